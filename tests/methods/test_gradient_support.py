"""Where gradients and attention can be nonzero; recorded attention equals eager attention."""

import copy

import numpy as np
import pytest
import torch

from tests import models
from tests.methods import replica_comparison


@pytest.mark.parametrize(
    "subject", [*replica_comparison.ONE_PER_READOUT, "bert/mask", "electra/classify", "deberta/classify", "vit/image"]
)
def test_last_layer_gradient_is_nonzero_only_in_readout_rows(subject: str) -> None:
    """The gradient of the last attention map is nonzero in the read-out rows, and in all of them."""
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[1]
    tape = ex.record(raw, ("attention_gradient",))
    assert len(tape.calls) == 3
    _, readout = replica_comparison.record_plain_passes(subject)[1]
    for call, is_last in zip(tape.calls, (False, False, True), strict=True):
        used = call.attention_gradient[0].abs().sum((0, 2)) > 0
        if is_last:
            np.testing.assert_array_equal(used, readout > 0)
        elif subject.split("/")[0] != "modernbert":  # its sliding window keeps some rows from reaching the target
            assert used.all()


@pytest.mark.parametrize("subject", ["bert/classify", "electra/classify"])
def test_masked_tokens_receive_no_attention_and_no_scores(subject: str) -> None:
    """The columns of masked special tokens are zero in every layer, and so are their scores."""
    ex = replica_comparison.explainer(subject)
    inputs = replica_comparison.SENTENCES[0]
    mask = inputs["attention_mask"].clone()
    mask[:, [0, -1]] = 0
    masked_inputs = {**inputs, "attention_mask": mask}
    for call in ex.record(masked_inputs, ("attention",)).calls:
        columns = call.attention[0, :, 1:-1].sum((0, 1))
        assert (columns[[0, -1]] == 0).all()
        assert (columns[1:-1] > 0).all()
    # Rollout includes the residual connection: the masked tokens have zero scores in all other rows.
    for method, rows in (("attention", None), ("attention-gradcam", None), ("generic", None), ("rollout", "all")):
        e = ex.explain(masked_inputs, method, target=1, rows=rows)
        scores = e.scores if rows is None else e.matrix[1:-1].sum(0)
        assert not scores[[0, -1]].any(), method
        assert scores[1:-1].any(), method


@pytest.mark.parametrize(
    "subject", ["bert/classify", "roberta/classify", "albert/mask", "electra/mask", "deberta/classify"]
)
def test_recorded_attention_of_padded_batch_equals_eager_attention(subject: str) -> None:
    """The recorder's attention function applies the padding mask."""
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
