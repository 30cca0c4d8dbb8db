"""AttCAT, with the attention received and with the read-out row, against its replica."""

import numpy as np
import pytest
import torch

import clearhead
from tests.methods import twins


@pytest.mark.parametrize("weights", ["received", "row"])
@pytest.mark.parametrize("subject", twins.SUBJECTS)
def test_equals_its_replica(subject: str, weights: str) -> None:
    twins.assert_twins("attcat", subject, weights=weights)


@pytest.mark.parametrize("weights", ["received", "row"])
@pytest.mark.parametrize("layers", twins.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *twins.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None, weights: str) -> None:
    for subject in ("bert/classify", "dinov2/image"):
        twins.assert_twins("attcat", subject, layers=layers, heads=heads, weights=weights)


@pytest.mark.parametrize("target", twins.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets(subject: str, target: str) -> None:
    twins.assert_twins("attcat", subject, target=target)


@pytest.mark.parametrize("weights", ["received", "row"])
def test_hidden_special_tokens_get_nothing(weights: str) -> None:
    """The authors hide [CLS] and [SEP] from attention while attributing: nobody looks at them, so they score zero."""
    ex = twins.explainer("bert/classify")
    inputs = twins.SENTENCES[0]
    hidden = torch.zeros_like(inputs["attention_mask"])
    hidden[:, 1:-1] = 1
    e = ex.explain({**inputs, "attention_mask": hidden}, clearhead.Method("attcat", weights=weights))
    assert list(np.flatnonzero(e.scores == 0)) == [0, len(e) - 1]
