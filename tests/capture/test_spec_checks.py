"""Ready-made checks of spec/analysis.md, section 7.4 (3, 5 and 7), and the tape folded by hand."""

import copy

import pytest
import torch

from clearhead.adapters import InputOptions
from clearhead.capture.recorder import Recorder
from clearhead.engine.target_batch import MethodRun, TargetBatch
from clearhead.methods import METHOD_REGISTRY, Method
from clearhead.targets import make_target
from tests import models
from tests.invariants import cases


def test_last_layer_gradients_stand_in_the_pooled_row_alone():
    """Check 3: gradient support of A^L is row 0 only; of h^L (the last layer's output) position 0 only."""
    ex = cases.explainer("bert/classify")
    tape = ex.record(models.TEXTS, ("attention_gradient",))
    last, before = tape.calls[-1].attention_gradient, tape.calls[-2].attention_gradient
    assert last[:, :, 0].any() and not last[:, :, 1:].any()
    assert before[0, :, 1:].any(), "in the layer below, every row counts"
    batch, outputs = cases.collated(ex, models.TEXTS), []
    keep = ex.adapter.model.bert.encoder.layer[-1].register_forward_hook(lambda m, a, out: outputs.append(out))
    with keep:
        logits = ex.adapter.model(**batch).logits
    hidden = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
    (gradient,) = torch.autograd.grad(logits[:, 0].sum(), hidden)
    assert gradient[:, 0].any() and not gradient[:, 1:].any()
    # So CAT, which sums over the inputs of layers, leaves the last output out: it would speak for one position only.
    assert ex.record(models.TEXTS, ("block_input_gradient",)).calls[-1].block_input_gradient[0, 1:].any()


@pytest.mark.parametrize("subject", ["bert/mask", "roberta/mask", "deberta/mask"])
def test_last_layer_gradients_stand_in_the_masked_row_alone(subject):
    ex = cases.explainer(subject)
    token = models.tokenizer(models.TEXT[subject.split("/")[0]][1]).mask_token
    for raw in models.inputs(subject):
        gradient = ex.record(raw, ("attention_gradient",)).calls[-1].attention_gradient[0]
        rows = gradient.abs().sum((0, 2)).nonzero().flatten().tolist()
        assert rows == [ex.explain(raw).tokens.index(token)]


@pytest.mark.parametrize("subject", [s for s in cases.TEXT_SUBJECTS if not s.startswith("modernbert")])
def test_recording_with_padding_is_eager_with_padding(subject):
    """Check 7: attention in a padded batch is that of the model's own eager code, and padding is never looked at."""
    ex = cases.explainer(subject)
    batch = cases.collated(ex, models.inputs(subject))
    twin = copy.deepcopy(ex.adapter.model)
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        real = twin(**batch, output_attentions=True).attentions
    tape = ex.record(models.inputs(subject), ("attention",))
    hidden = batch["attention_mask"] == 0
    assert hidden.any()
    for call, attention in zip(tape.calls, real, strict=True):
        assert (call.attention - attention).abs().max() <= 1e-12
        looked_at = call.attention.sum(1) * (~hidden)[:, :, None] * hidden[:, None, :]  # by words, at padding
        assert not looked_at.any()


@pytest.mark.parametrize("subject", cases.TEXT_SUBJECTS)
def test_masked_specials_have_empty_columns(subject):
    """Check 5: hide the first and last token with the attention mask, and nothing looks at them."""
    if subject.startswith("deberta"):
        pytest.skip("DeBERTa zeroes the rows of masked tokens, too: covered by test_recording_with_padding…")
    ex = cases.explainer(subject)
    given = {name: part[:1] for name, part in cases.model_inputs(subject).items()}
    length = int(given["attention_mask"].sum())
    given = {name: part[:, :length].clone() for name, part in given.items()}
    given["attention_mask"][:, [0, length - 1]] = 0
    tape = ex.record(given, ("attention", "attention_gradient"))
    for call in tape.calls:
        rows = call.attention[0, :, 1:-1]
        assert not rows[..., [0, -1]].any() and rows[..., 1:-1].any()
        assert not call.positive_product[0, :, 1:-1][..., [0, -1]].any()


@pytest.mark.parametrize("subject", cases.SUBJECTS)
def test_a_kept_tape_folded_by_hand_gives_the_same_scores(subject):
    """What `record` keeps is what `explain` folds on the fly: the two ways meet."""
    ex, raws = cases.explainer(subject), models.inputs(subject)
    names = [name for name in cases.FROM_TAPE if cases.applies(name, subject)]
    tape = ex.record(raws, {ask for name in names for ask in METHOD_REGISTRY[name].declaration.requires})
    samples = [sample for raw in raws for sample in ex.adapter.make_samples(raw, InputOptions())]
    plan = TargetBatch(ex.adapter, samples, [[make_target(None)]] * len(samples))
    for name in names:
        reading = MethodRun(Method(name), plan, ex.recorder.self_test)
        for call in reversed(tape.calls):
            if call.attention is not None:
                reading.process_call(call)
        scores = reading.compute_scores(tape)[ex.adapter.stream].scores[:, 0]
        results = cases.batched(subject, name)
        size = cases.size(results)
        for i, e in enumerate(results[name]):
            assert cases.gap(scores[i, : len(e)], e.scores, size) <= 1e-12, name
            assert not scores[i, len(e) :].any() or name == "position", "padding has no score"


def test_a_recorder_needs_no_explainer():
    """Recording knows no method and no subject: a model, a batch and a number are enough."""
    ex = cases.explainer("bert/classify")
    batch = cases.collated(ex, models.TEXTS)
    tape = Recorder(ex.adapter.model).record(batch, lambda output: output.logits[:, 1], ("attention_gradient",))
    expected = ex.record(models.TEXTS, ("attention_gradient",), target=1)
    for one, other in zip(tape.calls, expected.calls, strict=True):
        assert torch.equal(one.attention_gradient, other.attention_gradient)
