"""Invariant 3: logits with recording equal logits without, for each attention implementation."""

import pytest
import torch

from tests import models
from tests.invariants import cases

REQUIREMENTS = ("attention", "attention_gradient", "block_input", "block_input_gradient", "inputs", "input_gradient")


@pytest.mark.parametrize("subject", cases.SUBJECTS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("batched", [True, False], ids=["one padded batch", "one at a time"])
def test_recorded_logits_and_target_equal_plain_forward(subject, implementation, dtype, batched):
    ex = models.explainer(subject, dtype)
    model, raws = ex.adapter.model, models.inputs(subject)
    if implementation != model.config._attn_implementation:
        if implementation == "sdpa":
            pytest.skip(f"{type(model).__name__} has no sdpa attention")
        model.set_attn_implementation(implementation)
    method = "generic" if cases.applies("generic", subject) else "saliency"
    for batch in [raws] if batched else [[raw] for raw in raws]:
        with torch.no_grad():
            plain = model(**cases.collated(ex, batch)).logits
        if plain.isnan().any():
            # Eager ModernBERT in transformers: float64's minimum becomes −∞ in its float32 softmax.
            assert (subject.split("/")[0], implementation, dtype) == ("modernbert", "eager", torch.float64)
            pytest.skip("the model itself outputs NaN for a padded batch")
        explanations = ex.explain(batch, method=method)
        tape = ex.record(batch, REQUIREMENTS)
        if subject.endswith("/mask"):
            token = models.tokenizer(models.TEXT[subject.split("/")[0]][1]).mask_token
            masks = [e.tokens.index(token) for e in explanations]
            plain = plain[torch.arange(len(masks)), masks]
        # It is the same computation, but torch may choose other kernels where gradients are recorded.
        tolerance, size = 1e-13 if dtype == torch.float64 else 1e-6, float(plain.abs().max())
        assert cases.gap(tape.logits, plain) <= tolerance
        assert cases.gap(tape.value, plain.max(1).values, size) <= tolerance
        for row, e in zip(plain, explanations, strict=True):
            assert e.prediction["index"] == int(row.argmax())
            assert cases.gap(e.target["value"], row.max(), size) <= tolerance
            top_logits = [entry["logit"] for entry in e.prediction["top"]]
            assert cases.gap(top_logits, row.sort(descending=True).values[: len(top_logits)], size) <= tolerance
        assert explanations[0].certificate["capture_error"] <= tolerance
