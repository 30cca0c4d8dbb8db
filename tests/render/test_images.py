import numpy as np

from clearhead import Explanation
from clearhead.render import images


def test_zero_scores_give_the_plain_greyscale_image(image: dict[str, Explanation]) -> None:
    from dataclasses import replace

    explanation = image["generic"]
    blank = replace(explanation, scores=np.zeros_like(explanation.scores))
    assert explanation.image is not None
    height, width = explanation.image.shape[:2]
    assert (images.overlay_heat_map(blank, height, width) == images.to_light_greyscale(explanation.image)).all()


def test_fit_image_size_keeps_the_aspect_ratio() -> None:
    assert images.fit_image_size(100, 200, 50) == (25, 50)
    assert images.fit_image_size(1, 1000, 36) == (1, 36)
