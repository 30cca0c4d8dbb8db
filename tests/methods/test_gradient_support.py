"""Which gradients and which attention can be anything but zero, and that recording sees what eager attention sees."""

import copy

import numpy as np
import pytest
import torch

from tests import models
from tests.methods import replica_comparison


@pytest.mark.parametrize(
    "subject", [*replica_comparison.FEW, "bert/mask", "electra/classify", "deberta/classify", "vit/image"]
)
def test_last_layer_speaks_through_the_read_out_alone(subject: str) -> None:
    """The gradient of the last attention lies in the rows that are read, and in all of them."""
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[1]
    tape = ex.record(raw, ("attention_gradient",))
    assert len(tape.calls) == 3
    _, readout = replica_comparison.slow_batch(subject)[1]
    for call, whole in zip(tape.calls, (False, False, True), strict=True):
        used = call.attention_gradient[0].abs().sum((0, 2)) > 0
        if whole:
            np.testing.assert_array_equal(used, readout > 0)
        elif subject.split("/")[0] != "modernbert":  # whose window hides some rows from the target
            assert used.all()


@pytest.mark.parametrize("subject", ["bert/classify", "electra/classify"])
def test_tokens_hidden_by_the_mask_get_no_attention(subject: str) -> None:
    """Special tokens masked: their columns are zero in every layer, and so is what attention gives them."""
    ex = replica_comparison.explainer(subject)
    inputs = replica_comparison.SENTENCES[0]
    hidden = inputs["attention_mask"].clone()
    hidden[:, [0, -1]] = 0
    given = {**inputs, "attention_mask": hidden}
    for call in ex.record(given, ("attention",)).calls:
        columns = call.attention[0, :, 1:-1].sum((0, 1))
        assert (columns[[0, -1]] == 0).all()
        assert (columns[1:-1] > 0).all()
    # Rollout keeps what the residual stream carries: with any other row read, the hidden tokens get nothing.
    for method, rows in (("attention", None), ("attention-gradcam", None), ("generic", None), ("rollout", "all")):
        e = ex.explain(given, method, target=1, rows=rows)
        scores = e.scores if rows is None else e.matrix[1:-1].sum(0)
        assert not scores[[0, -1]].any(), method
        assert scores[1:-1].any(), method


@pytest.mark.parametrize(
    "subject", ["bert/classify", "roberta/classify", "albert/mask", "electra/mask", "deberta/classify"]
)
def test_recorded_with_padding_equals_eager(subject: str) -> None:
    """The mask is not lost on the way through the recorder's own attention function."""
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)
    padded = ex.adapter.processor(raw, padding=True, return_tensors="pt")
    lengths = padded["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) > 1
    eager = copy.deepcopy(ex.adapter.model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        expected = eager(**padded, output_attentions=True)
    tape = ex.record(raw, ("attention",))
    for call, attention in zip(tape.calls, expected.attentions, strict=True):
        for sample, length in enumerate(lengths):
            assert replica_comparison.gap(call.attention[sample, :, :length], attention[sample, :, :length]) < 1e-12
            assert not call.attention[sample, :, :length, length:].any()
    if subject.endswith("classify"):
        assert replica_comparison.gap(tape.logits, expected.logits) < 1e-12
