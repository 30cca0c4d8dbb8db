"""Input × gradient equals its reference implementation, and is exact for a target that is linear in the embeddings."""

import numpy as np
import pytest
import torch

from tests import models
from tests.methods import replica_comparison

SUBJECTS = (*replica_comparison.SUBJECTS, "swin/image")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    replica_comparison.assert_equals_reference("input-x-gradient", subject)


@pytest.mark.parametrize("reduce", ["l2", "abs", "sum"])
@pytest.mark.parametrize("subject", ["bert/classify", "albert/mask", "dinov2/image"])
def test_reductions_equal_reference(subject: str, reduce: str) -> None:
    replica_comparison.assert_equals_reference("input-x-gradient", subject, reduce=reduce)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets_and_scales_equal_reference(subject: str, target: str) -> None:
    replica_comparison.assert_equals_reference("input-x-gradient", subject, target=target)


def test_linear_target_is_explained_exactly() -> None:
    """For a target that is linear in the embeddings, each score is the contribution of its token."""
    ex, text = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")[0]
    embeddings = ex.adapter.model.bert.embeddings
    direction = torch.linspace(-1, 1, 32, dtype=torch.float64)
    sums: list[torch.Tensor] = []  # token + position + type embeddings, before the norm

    def linear(output: object) -> torch.Tensor:
        return (sums[-1] @ direction).sum(-1)

    handle = embeddings.LayerNorm.register_forward_pre_hook(lambda module, args: sums.append(args[0]))
    try:
        e = ex.explain(text, "input-x-gradient", target=linear)
    finally:
        handle.remove()
    ids = replica_comparison.model_inputs("bert/classify", text)["input_ids"][0]
    contribution = (embeddings.word_embeddings.weight[ids] @ direction).detach()
    np.testing.assert_allclose(e.scores, contribution, rtol=1e-12)
    rest = (sums[-1][0] @ direction).sum().detach() - contribution.sum()
    assert e.target["value"] == pytest.approx(float(e.scores.sum() + rest), rel=1e-12)
