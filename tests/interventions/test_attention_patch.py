"""Attention patching: replaced weights by layer, head and row, with everything else unchanged."""

import pytest
import torch

from clearhead.adapters.base import InputOptions
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError
from clearhead.interventions.attention_patch import AttentionPatch, run_patched_forward
from clearhead.targets import make_target
from tests.invariants.model_snapshot import of_model as snapshot
from tests.models import TEXTS, explainer

#: One model captured through transformers' interface, one through the returned attentions.
MODELS = ("bert/classify", "deberta/classify")


def make_batch(name, texts=TEXTS):
    ex = explainer(name)
    samples = [s for text in texts for s in ex.adapter.make_samples(text, InputOptions())]
    ex.capabilities.run_self_test(samples)
    return ex, TargetBatch(ex.adapter, samples, [[make_target(None)]] * len(samples))


def uniform(attention, visible, layer):
    return visible.to(attention.dtype).expand_as(attention)


def identity(attention, visible, layer):
    return attention.clone()


@pytest.mark.parametrize("name", MODELS)
def test_identity_patch_preserves_logits_in_padded_batch(name):
    ex, targets = make_batch(name)
    with torch.no_grad():
        expected = ex.adapter.model(**targets.model_inputs).logits
        output, _, _ = run_patched_forward(ex.recorder, targets.model_inputs, [AttentionPatch(identity)])
    assert torch.allclose(output.logits, expected, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_only_patches_of_pooled_row_in_last_layer_change_logits(name):
    ex, targets = make_batch(name)
    rows = torch.ones(targets.num_samples, targets.max_units, dtype=torch.bool)
    rows[:, 0] = False
    with torch.no_grad():
        clean, _, _ = run_patched_forward(ex.recorder, targets.model_inputs, [])
        other_rows, _, _ = run_patched_forward(
            ex.recorder, targets.model_inputs, [AttentionPatch(uniform, layers=[2], query_mask=rows)]
        )
        pooled_row, _, _ = run_patched_forward(
            ex.recorder, targets.model_inputs, [AttentionPatch(uniform, layers=[2], query_mask=~rows)]
        )
    assert torch.equal(other_rows.logits, clean.logits)
    assert (pooled_row.logits - clean.logits).abs().min() > 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_uniform_patch_is_normalised_over_visible_keys(name):
    ex, targets = make_batch(name)
    with torch.no_grad():
        _, calls, _ = run_patched_forward(ex.recorder, targets.model_inputs, [AttentionPatch(uniform)])
    for i, sample in enumerate(targets.truncated_samples):
        length = len(sample.units)
        for call in calls:
            attention = call.attention[i, :, :length]
            assert torch.allclose(attention[..., :length], torch.tensor(1 / length, dtype=attention.dtype))
            assert not attention[..., length:].any()


@pytest.mark.parametrize("name", MODELS)
def test_patch_changes_only_selected_layer_head_and_row(name):
    ex, targets = make_batch(name)
    rows = torch.zeros(targets.num_samples, targets.max_units, dtype=torch.bool)
    rows[:, 1] = True
    with torch.no_grad():
        _, clean, _ = run_patched_forward(ex.recorder, targets.model_inputs, [])
        _, calls, _ = run_patched_forward(
            ex.recorder, targets.model_inputs, [AttentionPatch(uniform, layers=[1], heads=[2], query_mask=rows)]
        )
    changed = (calls[1].attention != clean[1].attention).any(-1).nonzero()
    assert {(head, row) for _, head, row in changed.tolist()} == {(2, 1)}
    assert torch.equal(calls[0].attention, clean[0].attention)
    assert not torch.equal(calls[2].attention, clean[2].attention)  # not frozen: later layers recompute attention


@pytest.mark.parametrize("name", MODELS)
def test_clean_attention_freezes_later_layers(name):
    ex, targets = make_batch(name)
    with torch.no_grad():
        _, clean, _ = run_patched_forward(ex.recorder, targets.model_inputs, [])
        pinned = [call.attention for call in clean]
        live, _, _ = run_patched_forward(ex.recorder, targets.model_inputs, [AttentionPatch(uniform, layers=[0])])
        frozen, calls, _ = run_patched_forward(
            ex.recorder, targets.model_inputs, [AttentionPatch(uniform, layers=[0])], clean_attention=pinned
        )
    assert torch.equal(calls[1].attention, pinned[1]) and torch.equal(calls[2].attention, pinned[2])
    assert not torch.equal(calls[0].attention, pinned[0])
    assert (live.logits - frozen.logits).abs().max() > 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_gradients_flow_into_learned_attention_weights(name):
    ex, targets = make_batch(name, TEXTS[:1])
    logits = torch.zeros(targets.max_units, dtype=torch.float64, requires_grad=True)

    def learned(attention, visible, layer):
        return logits.softmax(-1).expand_as(attention)

    def loss():
        output, _, _ = run_patched_forward(ex.recorder, targets.model_inputs, [AttentionPatch(learned, layers=[1, 2])])
        return output.logits[0, 0]

    gradient = torch.autograd.grad(loss(), logits)[0]
    with torch.no_grad():
        logits[3] += 1e-6
        up = loss()
        logits[3] -= 2e-6
        down = loss()
    assert gradient[3] == pytest.approx(((up - down) / 2e-6).item(), rel=1e-5)


def test_zero_patch_equals_zeroed_output_projection_of_head():
    ex, targets = make_batch("bert/classify")

    def zeros(attention, visible, layer):
        return torch.zeros_like(attention)

    with torch.no_grad():
        output, _, _ = run_patched_forward(
            ex.recorder, targets.model_inputs, [AttentionPatch(zeros, layers=[1], heads=[2], keep_row_sums=False)]
        )
        model = ex.adapter.model
        model.bert.encoder.layer[1].attention.output.dense.weight[:, 16:24] = 0
        expected = model(**targets.model_inputs).logits
    assert torch.allclose(output.logits, expected, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_model_is_unchanged_after_patch_raises(name):
    ex, targets = make_batch(name)
    before = snapshot(ex.adapter.model)

    def raise_value_error(attention, visible, layer):
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        run_patched_forward(ex.recorder, targets.model_inputs, [AttentionPatch(raise_value_error, layers=[1])])
    assert snapshot(ex.adapter.model) == before
    with torch.no_grad():
        expected = ex.adapter.model(**targets.model_inputs).logits
        output, _, _ = run_patched_forward(ex.recorder, targets.model_inputs, [])
    assert torch.allclose(output.logits, expected, atol=1e-12)


def test_head_out_of_range_raises():
    ex, targets = make_batch("bert/classify")
    with pytest.raises(InputError, match="4 heads"):
        run_patched_forward(ex.recorder, targets.model_inputs, [AttentionPatch(identity, heads=[4])])
