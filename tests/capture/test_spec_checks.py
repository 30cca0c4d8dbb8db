"""Checks 3, 5 and 7 of spec/analysis.md, section 7.4, and methods applied to a recorded tape."""

import copy

import pytest
import torch

from clearhead.adapters import InputOptions
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import ModelSession
from clearhead.engine.method_run import MethodRun
from clearhead.engine.target_batch import TargetBatch
from clearhead.methods import METHOD_REGISTRY, Method
from clearhead.targets import make_target
from tests import models
from tests.invariants import cases


def test_last_layer_attention_gradient_is_nonzero_only_in_pooled_row():
    """Check 3: gradient support of A^L is row 0 only; of h^L (the last layer's output) position 0 only."""
    ex = cases.explainer("bert/classify")
    tape = ex.record(models.TEXTS, ("attention_gradient",))
    last, before = tape.calls[-1].attention_gradient, tape.calls[-2].attention_gradient
    assert last[:, :, 0].any() and not last[:, :, 1:].any()
    assert before[0, :, 1:].any(), "in the layer below, every row has a gradient"
    batch, outputs = cases.collated(ex, models.TEXTS), []
    keep = ex.adapter.model.bert.encoder.layer[-1].register_forward_hook(lambda m, a, out: outputs.append(out))
    with keep:
        logits = ex.adapter.model(**batch).logits
    hidden = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
    (gradient,) = torch.autograd.grad(logits[:, 0].sum(), hidden)
    assert gradient[:, 0].any() and not gradient[:, 1:].any()
    # So CAT sums over the inputs of layers and leaves the last output out: that has a gradient at one position only.
    assert ex.record(models.TEXTS, ("block_input_gradient",)).calls[-1].block_input_gradient[0, 1:].any()


@pytest.mark.parametrize("subject", ["bert/mask", "roberta/mask", "deberta/mask"])
def test_last_layer_attention_gradient_is_nonzero_only_in_mask_token_row(subject):
    ex = cases.explainer(subject)
    token = models.tokenizer(models.TEXT[subject.split("/")[0]][1]).mask_token
    for raw in models.inputs(subject):
        gradient = ex.record(raw, ("attention_gradient",)).calls[-1].attention_gradient[0]
        rows = gradient.abs().sum((0, 2)).nonzero().flatten().tolist()
        assert rows == [ex.explain(raw, method="generic").tokens.index(token)]


@pytest.mark.parametrize("subject", [s for s in cases.TEXT_SUBJECTS if not s.startswith("modernbert")])
def test_recorded_attention_equals_eager_with_padding(subject):
    """Check 7: attention in a padded batch equals that of the model's eager code; no token attends to padding."""
    ex = cases.explainer(subject)
    batch = cases.collated(ex, models.inputs(subject))
    eager_model = copy.deepcopy(ex.adapter.model)
    eager_model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = eager_model(**batch, output_attentions=True).attentions
    tape = ex.record(models.inputs(subject), ("attention",))
    is_padding = batch["attention_mask"] == 0
    assert is_padding.any()
    for call, attention in zip(tape.calls, expected, strict=True):
        assert (call.attention - attention).abs().max() <= 1e-12
        attention_to_padding = (
            call.attention.sum(1) * (~is_padding)[:, :, None] * is_padding[:, None, :]
        )  # by tokens, to padding
        assert not attention_to_padding.any()


@pytest.mark.parametrize("subject", cases.TEXT_SUBJECTS)
def test_masked_special_tokens_get_no_attention(subject):
    """Check 5: no token attends to the first and last token where the attention mask hides them."""
    if subject.startswith("deberta"):
        pytest.skip("DeBERTa zeroes the rows of masked tokens, too: covered by the test with padding")
    ex = cases.explainer(subject)
    inputs = {name: tensor[:1] for name, tensor in cases.model_inputs(subject).items()}
    length = int(inputs["attention_mask"].sum())
    inputs = {name: tensor[:, :length].clone() for name, tensor in inputs.items()}
    inputs["attention_mask"][:, [0, length - 1]] = 0
    tape = ex.record(inputs, ("attention", "attention_gradient"))
    for call in tape.calls:
        rows = call.attention[0, :, 1:-1]
        assert not rows[..., [0, -1]].any() and rows[..., 1:-1].any()
        assert not call.positive_product[0, :, 1:-1][..., [0, -1]].any()


@pytest.mark.parametrize("subject", cases.SUBJECTS)
def test_methods_on_recorded_tape_equal_explain(subject):
    """Methods applied to what `record` keeps give the scores that `explain` accumulates during the pass."""
    ex, raws = cases.explainer(subject), models.inputs(subject)
    names = [name for name in cases.FROM_TAPE if cases.applies(name, subject)]
    tape = ex.record(
        raws, {requirement for name in names for requirement in METHOD_REGISTRY[name].declaration.requires}
    )
    samples = [sample for raw in raws for sample in ex.adapter.make_samples(raw, InputOptions())]
    targets = TargetBatch(ex.adapter, samples, [[make_target(None)]] * len(samples))
    for name in names:
        method_run = MethodRun(Method(name), targets, ex.recorder.self_test)
        for call in reversed(tape.calls):
            if call.attention is not None:
                method_run.process_call(call)
        scores = method_run.compute_scores(tape)[ex.adapter.stream].scores[:, 0]
        results = cases.batched(subject, name)
        size = cases.size(results)
        for i, e in enumerate(results[name]):
            assert cases.gap(scores[i, : len(e)], e.scores, size) <= 1e-12, name
            assert not scores[i, len(e) :].any() or name == "position", "padding has no score"


def test_recorder_works_without_explainer():
    """Recording needs neither a method nor a model adapter: a model, a batch and a scalar are enough."""
    ex = cases.explainer("bert/classify")
    batch = cases.collated(ex, models.TEXTS)
    tape = Recorder(ModelSession(ex.adapter.model)).record(
        batch, lambda output: output.logits[:, 1], ("attention_gradient",)
    )
    expected = ex.record(models.TEXTS, ("attention_gradient",), target=1)
    for call, reference in zip(tape.calls, expected.calls, strict=True):
        assert torch.equal(call.attention_gradient, reference.attention_gradient)
