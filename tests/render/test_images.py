import numpy as np

from clearhead import Explanation
from clearhead.render import images


def test_zero_leaves_the_picture_alone(image: dict[str, Explanation]) -> None:
    from dataclasses import replace

    explanation = image["generic"]
    blank = replace(explanation, scores=np.zeros_like(explanation.scores))
    assert explanation.picture is not None
    height, width = explanation.picture.shape[:2]
    assert (images.overlaid(blank, height, width) == images.grey(explanation.picture)).all()


def test_proportions_are_kept() -> None:
    assert images.fitted(100, 200, 50) == (25, 50)
    assert images.fitted(1, 1000, 36) == (1, 36)
