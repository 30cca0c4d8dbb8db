"""Heat maps upsampled to the size of an image."""

import numpy as np
import torch

from clearhead.images import upsample_heat_map


def test_upsample_equals_torch_interpolate() -> None:
    heat = np.random.default_rng(0).normal(size=(4, 6))
    expected = torch.nn.functional.interpolate(
        torch.tensor(heat)[None, None], (32, 48), mode="bilinear", align_corners=False
    )
    assert np.allclose(upsample_heat_map(heat, 32, 48), expected[0, 0].numpy(), atol=1e-5)


def test_upsample_keeps_missing_values_missing() -> None:
    heat = np.ones((4, 4))
    heat[1, 1] = np.nan
    upsampled = upsample_heat_map(heat, 40, 40)
    assert np.isnan(upsampled[15, 15]) and np.nanmin(upsampled) == np.nanmax(upsampled) == 1.0
