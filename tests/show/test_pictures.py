import numpy as np
import torch

from clearhead import Explanation
from clearhead.show import pictures


def test_heat_maps_grow_as_torch_would_grow_them() -> None:
    heat = np.random.default_rng(0).normal(size=(4, 6))
    wanted = torch.nn.functional.interpolate(
        torch.tensor(heat)[None, None], (32, 48), mode="bilinear", align_corners=False
    )
    assert np.allclose(pictures.upsampled(heat, 32, 48), wanted[0, 0].numpy(), atol=1e-5)


def test_a_patch_without_a_score_stays_without_one() -> None:
    heat = np.ones((4, 4))
    heat[1, 1] = np.nan
    grown = pictures.upsampled(heat, 40, 40)
    assert np.isnan(grown[15, 15]) and np.nanmin(grown) == np.nanmax(grown) == 1.0


def test_zero_leaves_the_picture_alone(image: dict[str, Explanation]) -> None:
    from dataclasses import replace

    explanation = image["generic"]
    blank = replace(explanation, scores=np.zeros_like(explanation.scores))
    assert explanation.picture is not None
    height, width = explanation.picture.shape[:2]
    assert (pictures.overlaid(blank, height, width) == pictures.grey(explanation.picture)).all()


def test_proportions_are_kept() -> None:
    assert pictures.fitted(100, 200, 50) == (25, 50)
    assert pictures.fitted(1, 1000, 36) == (1, 36)
