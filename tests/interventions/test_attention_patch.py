"""The patcher: what is put in place of attention, where, and that nothing else changes."""

import pytest
import torch

from clearhead.adapters.base import InputOptions
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError
from clearhead.interventions.attention_patch import AttentionPatch, run_patched_forward
from clearhead.targets import make_target
from tests.invariants.model_snapshot import of_model as snapshot
from tests.models import TEXTS, explainer

#: One model through transformers' interface, one through what its modules return.
MODELS = ("bert/classify", "deberta/classify")


def made(name, texts=TEXTS):
    ex = explainer(name)
    samples = [s for text in texts for s in ex.adapter.make_samples(text, InputOptions())]
    ex.capabilities.run_self_test(samples)
    return ex, TargetBatch(ex.adapter, samples, [[make_target(None)]] * len(samples))


def uniform(attention, visible, layer):
    return visible.to(attention.dtype).expand_as(attention)


def same(attention, visible, layer):
    return attention.clone()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_attention_gives_the_same_logits_also_in_padded_batches(name):
    ex, plan = made(name)
    with torch.no_grad():
        real = ex.adapter.model(**plan.model_inputs).logits
        output, _, _ = run_patched_forward(ex.recorder, plan.model_inputs, [AttentionPatch(same)])
    assert torch.allclose(output.logits, real, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_nobody_reads_change_nothing_and_the_row_that_is_read_does(name):
    ex, plan = made(name)
    rows = torch.ones(plan.num_samples, plan.max_units, dtype=torch.bool)
    rows[:, 0] = False
    with torch.no_grad():
        clean, _, _ = run_patched_forward(ex.recorder, plan.model_inputs, [])
        others, _, _ = run_patched_forward(
            ex.recorder, plan.model_inputs, [AttentionPatch(uniform, layers=[2], query_mask=rows)]
        )
        pooled, _, _ = run_patched_forward(
            ex.recorder, plan.model_inputs, [AttentionPatch(uniform, layers=[2], query_mask=~rows)]
        )
    assert torch.equal(others.logits, clean.logits)
    assert (pooled.logits - clean.logits).abs().min() > 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_uniform_weights_lie_on_visible_keys_alone(name):
    ex, plan = made(name)
    with torch.no_grad():
        _, calls, _ = run_patched_forward(ex.recorder, plan.model_inputs, [AttentionPatch(uniform)])
    for i, sample in enumerate(plan.truncated_samples):
        length = len(sample.units)
        for call in calls:
            own = call.attention[i, :, :length]
            assert torch.allclose(own[..., :length], torch.tensor(1 / length, dtype=own.dtype))
            assert not own[..., length:].any()


@pytest.mark.parametrize("name", MODELS)
def test_heads_layers_and_rows_are_chosen(name):
    ex, plan = made(name)
    rows = torch.zeros(plan.num_samples, plan.max_units, dtype=torch.bool)
    rows[:, 1] = True
    with torch.no_grad():
        _, clean, _ = run_patched_forward(ex.recorder, plan.model_inputs, [])
        _, calls, _ = run_patched_forward(
            ex.recorder, plan.model_inputs, [AttentionPatch(uniform, layers=[1], heads=[2], query_mask=rows)]
        )
    changed = (calls[1].attention != clean[1].attention).any(-1).nonzero()
    assert {(head, row) for _, head, row in changed.tolist()} == {(2, 1)}
    assert torch.equal(calls[0].attention, clean[0].attention)
    assert not torch.equal(calls[2].attention, clean[2].attention)  # live: it attends anew


@pytest.mark.parametrize("name", MODELS)
def test_frozen_pins_what_comes_after(name):
    ex, plan = made(name)
    with torch.no_grad():
        _, clean, _ = run_patched_forward(ex.recorder, plan.model_inputs, [])
        pinned = [call.attention for call in clean]
        live, _, _ = run_patched_forward(ex.recorder, plan.model_inputs, [AttentionPatch(uniform, layers=[0])])
        frozen, calls, _ = run_patched_forward(
            ex.recorder, plan.model_inputs, [AttentionPatch(uniform, layers=[0])], clean_attention=pinned
        )
    assert torch.equal(calls[1].attention, pinned[1]) and torch.equal(calls[2].attention, pinned[2])
    assert not torch.equal(calls[0].attention, pinned[0])
    assert (live.logits - frozen.logits).abs().max() > 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_gradients_flow_to_what_the_weights_are_made_from(name):
    ex, plan = made(name, TEXTS[:1])
    logits = torch.zeros(plan.max_units, dtype=torch.float64, requires_grad=True)

    def learned(attention, visible, layer):
        return logits.softmax(-1).expand_as(attention)

    def loss():
        output, _, _ = run_patched_forward(ex.recorder, plan.model_inputs, [AttentionPatch(learned, layers=[1, 2])])
        return output.logits[0, 0]

    gradient = torch.autograd.grad(loss(), logits)[0]
    with torch.no_grad():
        logits[3] += 1e-6
        up = loss()
        logits[3] -= 2e-6
        down = loss()
    assert gradient[3] == pytest.approx(((up - down) / 2e-6).item(), rel=1e-5)


def test_a_silent_head_is_one_whose_part_of_the_output_projection_is_zero():
    ex, plan = made("bert/classify")

    def nothing(attention, visible, layer):
        return torch.zeros_like(attention)

    with torch.no_grad():
        output, _, _ = run_patched_forward(
            ex.recorder, plan.model_inputs, [AttentionPatch(nothing, layers=[1], heads=[2], keep_row_sums=False)]
        )
        model = ex.adapter.model
        model.bert.encoder.layer[1].attention.output.dense.weight[:, 16:24] = 0
        cut = model(**plan.model_inputs).logits
    assert torch.allclose(output.logits, cut, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_as_before_also_when_a_patch_raises(name):
    ex, plan = made(name)
    before = snapshot(ex.adapter.model)

    def wrong(attention, visible, layer):
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        run_patched_forward(ex.recorder, plan.model_inputs, [AttentionPatch(wrong, layers=[1])])
    assert snapshot(ex.adapter.model) == before
    with torch.no_grad():
        real = ex.adapter.model(**plan.model_inputs).logits
        again, _, _ = run_patched_forward(ex.recorder, plan.model_inputs, [])
    assert torch.allclose(again.logits, real, atol=1e-12)


def test_heads_that_are_not_there_are_refused():
    ex, plan = made("bert/classify")
    with pytest.raises(InputError, match="4 heads"):
        run_patched_forward(ex.recorder, plan.model_inputs, [AttentionPatch(same, heads=[4])])
