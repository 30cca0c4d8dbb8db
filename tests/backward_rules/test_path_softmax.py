"""The mean Jacobian of the softmax: equal to its replica, exact on the path, and not zero where attention saturates."""

import numpy as np
import pytest
import torch

from clearhead.backward_rules.path_softmax import compute_path_softmax_vjp, make_uniform_logits
from tests.replicas.path_softmax import mean_jacobian

MASKS = [-torch.inf, torch.finfo(torch.float32).min, -10_000.0]


def make_logits(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    z, z0 = torch.randn(2, 3, 4, 6, generator=generator, dtype=torch.float64)
    return scale * z, z0


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_gradient_equals_that_with_the_matrix_of_the_replica(scale: float) -> None:
    z, z0 = make_logits(scale)
    g = torch.linspace(-1, 2, z.numel(), dtype=z.dtype).reshape(z.shape)
    gradient = compute_path_softmax_vjp(z, z0, g, -1)
    for index in np.ndindex(3, 4):
        jacobian = mean_jacobian(z[index].numpy(), z0[index].numpy())
        np.testing.assert_allclose(gradient[index], jacobian.T @ g[index].numpy(), atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_difference_of_logits_is_mapped_to_that_of_probabilities(scale: float) -> None:
    z, z0 = make_logits(scale)
    g = torch.linspace(-1, 2, z.numel(), dtype=z.dtype).reshape(z.shape)
    propagated = ((z - z0) * compute_path_softmax_vjp(z, z0, g, -1)).sum(-1)
    torch.testing.assert_close(propagated, ((z.softmax(-1) - z0.softmax(-1)) * g).sum(-1))


@pytest.mark.parametrize("mask", MASKS)
def test_masked_entries_change_nothing_and_get_nothing(mask: float) -> None:
    z, z0 = make_logits(3.0)
    padded, padded0 = (torch.cat([tensor, torch.full_like(tensor[..., :2], mask)], -1) for tensor in (z, z0))
    g = torch.linspace(-1, 2, padded.numel(), dtype=z.dtype).reshape(padded.shape)
    gradient = compute_path_softmax_vjp(padded, padded0, g, -1)
    torch.testing.assert_close(gradient[..., :6], compute_path_softmax_vjp(z, z0, g[..., :6], -1))
    assert float(gradient[..., 6:].abs().max()) < 1e-12
    uniform = make_uniform_logits(padded, -1)
    torch.testing.assert_close(uniform[..., :6], z.mean(-1, keepdim=True).expand_as(z))
    assert bool((uniform[..., 6:] == mask).all())


def test_saturated_softmax_keeps_a_gradient() -> None:
    """p = (1, 0, 0) to 1e-17: the gradient at z is zero, and the logit that decided gets the whole difference of p."""
    z = torch.tensor([[40.0, 0.0, 0.0]], dtype=torch.float64)
    g = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    p = z.softmax(-1)
    assert float((p * (g - (p * g).sum(-1, keepdim=True))).abs().max()) < 1e-16
    z0 = make_uniform_logits(z, -1)
    relevance = (z - z0) * compute_path_softmax_vjp(z, z0, g, -1)
    assert float(relevance.sum()) == pytest.approx(1 - 1 / 3, abs=1e-12)
    assert float(relevance[0, 0]) > 0.4
