"""AttCAT, with the attention received and with the read-out row, against its replica."""

import numpy as np
import pytest
import torch

import clearhead
from tests.methods import replica_comparison


@pytest.mark.parametrize("weights", ["received", "row"])
@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_its_replica(subject: str, weights: str) -> None:
    replica_comparison.assert_twins("attcat", subject, weights=weights)


@pytest.mark.parametrize("weights", ["received", "row"])
@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None, weights: str) -> None:
    for subject in ("bert/classify", "dinov2/image"):
        replica_comparison.assert_twins("attcat", subject, layers=layers, heads=heads, weights=weights)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets(subject: str, target: str) -> None:
    replica_comparison.assert_twins("attcat", subject, target=target)


@pytest.mark.parametrize("weights", ["received", "row"])
def test_hidden_special_tokens_get_nothing(weights: str) -> None:
    """The authors hide [CLS] and [SEP] from attention while attributing: nobody looks at them, so they score zero."""
    ex = replica_comparison.explainer("bert/classify")
    inputs = replica_comparison.SENTENCES[0]
    hidden = torch.zeros_like(inputs["attention_mask"])
    hidden[:, 1:-1] = 1
    e = ex.explain({**inputs, "attention_mask": hidden}, clearhead.Method("attcat", weights=weights))
    assert list(np.flatnonzero(e.scores == 0)) == [0, len(e) - 1]
