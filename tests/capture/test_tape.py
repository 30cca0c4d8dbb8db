"""Attention calls and tapes hold the requested tensors and nothing else; they move between devices and save."""

from dataclasses import fields

import pytest
import torch

import clearhead
from clearhead.capture.tape import GRADIENT_SOURCES, AttentionCall, Requirement, Tape
from tests.invariants import cases
from tests.models import inputs

REQUIREMENTS = Requirement.__args__
#: Requirements that are no tensors of attention calls.
INPUT_REQUIREMENTS = {"inputs", "input_gradient", "position_x_gradient"}


def expected_names(requirements):
    """The requested tensors, and for each gradient the tensor that it is taken of."""
    implied = {f"{name}_gradient": name for name in ("attention", "block_input", "hidden_state")}
    implied |= {"input_gradient": "inputs", "position_x_gradient": "inputs"}
    return set(requirements) | {implied[requirement] for requirement in requirements if requirement in implied}


def recorded_names(tape):
    input_names = {name for name in INPUT_REQUIREMENTS if getattr(tape, name) is not None}
    calls = [{name for name, _ in call.iter_tensors()} for call in tape.calls]
    assert all(call == calls[0] for call in calls)
    return input_names | (calls[0] if calls else set())


@pytest.mark.parametrize("subject", ["bert/classify", "albert/mask", "dinov2/image"])
@pytest.mark.parametrize(
    "requirements", [*((ask,) for ask in REQUIREMENTS), ("values", "input_gradient"), REQUIREMENTS, ()], ids="+".join
)
def test_tape_holds_only_requested_tensors_detached(subject, requirements):
    tape = cases.explainer(subject).record(inputs(subject), requirements)
    assert recorded_names(tape) == expected_names(requirements)
    has_call_tensors = bool(set(requirements) - INPUT_REQUIREMENTS)
    assert [call.layer for call in tape.calls] == ([0, 1, 2] if has_call_tensors else [])
    for name, tensor in _tensors(tape):
        assert not tensor.requires_grad and tensor.grad_fn is None, f"{name} is still attached to the autograd graph"


def test_backward_runs_only_for_gradients_and_once_for_all_methods(monkeypatch):
    ex = cases.explainer("bert/classify")
    ex.explain(inputs("bert/classify")[0], method="generic")
    called = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: called.append(1) or grad(*a, **k))
    ex.record(inputs("bert/classify"), set(REQUIREMENTS) - GRADIENT_SOURCES.keys())
    ex.explain(inputs("bert/classify"), method=["attention", "rollout", "random", "position"])
    assert not called
    ex.explain(inputs("bert/classify"), method=["generic", "cat", "grad-sam", "saliency", "rollout"])
    assert called == [1], "methods of one explain call share one backward pass"


def test_methods_of_one_call_share_one_forward_pass():
    ex = cases.explainer("bert/classify")
    ex.explain(inputs("bert/classify"), method="generic")
    passes = []
    with ex.adapter.model.register_forward_pre_hook(lambda module, args: passes.append(1)):
        ex.explain(inputs("bert/classify"), method=list(cases.FROM_TAPE))
    assert passes == [1]


def test_misspelled_requirement_raises_with_suggestion():
    with pytest.raises(clearhead.InputError, match="did you mean 'attention'"):
        cases.explainer("bert/classify").record(inputs("bert/classify"), ("atention",))


def test_values_are_unsupported_for_models_that_return_attentions():
    ex = cases.explainer("deberta/classify")
    for requirement in ("values", "output_projection"):
        with pytest.raises(
            clearhead.UnsupportedError, match=r"DebertaV2ForSequenceClassification ignores .* interface"
        ):
            ex.record(inputs("deberta/classify"), (requirement,))
    tape = ex.record(inputs("deberta/classify"), ("attention_gradient", "block_input_gradient"))
    assert [call.module for call in tape.calls] == [f"deberta.encoder.layer.{i}.attention.self" for i in range(3)]


@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_tape_save_load_round_trip_is_exact(subject, tmp_path):
    tape = cases.explainer(subject).record(inputs(subject), REQUIREMENTS)
    opened = Tape.load(tape.save(tmp_path / "tape.safetensors"))
    _assert_same(tape, opened)
    _assert_same(tape, Tape.load(opened.save(tmp_path / "again.safetensors")))
    first, second = ((tmp_path / name).read_bytes() for name in ("tape.safetensors", "again.safetensors"))
    assert first == second


def test_empty_tape_save_load_round_trip(tmp_path):
    _assert_same(Tape(), Tape.load(Tape().save(tmp_path / "empty.safetensors")))


def test_to_moves_every_tensor_and_keeps_the_original():
    """The meta device stands in for a GPU: every tensor moves, everything else stays."""
    tape = cases.explainer("bert/classify").record(inputs("bert/classify"), REQUIREMENTS)
    moved = tape.to("meta")
    assert {tensor.device.type for _, tensor in _tensors(moved)} == {"meta"}
    assert {tensor.device.type for _, tensor in _tensors(tape)} == {"cpu"}, "the original tape is not moved"
    assert [name for name, _ in _tensors(moved)] == [name for name, _ in _tensors(tape)]
    for original, copy in zip(tape.calls, moved.calls, strict=True):
        assert (original.layer, original.module, original.kind, original.query_stream) == (
            copy.layer,
            copy.module,
            copy.kind,
            copy.query_stream,
        )


def test_select_heads_selects_every_per_head_tensor():
    call = cases.explainer("bert/classify").record(inputs("bert/classify"), REQUIREMENTS).calls[1]
    selected = call.select_heads([2, 0])
    assert torch.equal(selected.attention, call.attention[:, [2, 0]])
    assert torch.equal(selected.attention_gradient, call.attention_gradient[:, [2, 0]])
    assert torch.equal(selected.values, call.values[:, [2, 0]])
    assert torch.equal(selected.positive_product, (call.attention * call.attention_gradient).clamp(min=0)[:, [2, 0]])
    assert selected.block_input is call.block_input


def _tensors(tape):
    tensors = [(name, getattr(tape, name)) for name in Tape.TENSOR_FIELDS]
    tensors += [(f"{call.layer}.{name}", tensor) for call in tape.calls for name, tensor in call.iter_tensors()]
    return [(name, tensor) for name, tensor in tensors if tensor is not None]


def _assert_same(tape, reference):
    assert [name for name, _ in _tensors(tape)] == [name for name, _ in _tensors(reference)]
    for (name, actual), (_, expected) in zip(_tensors(tape), _tensors(reference), strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), name
    plain = [f.name for f in fields(AttentionCall) if "Tensor" not in str(f.type)]
    assert plain == ["layer", "module", "kind", "query_stream", "key_stream", "deferred"]
    for actual, expected in zip(tape.calls, reference.calls, strict=True):
        assert [getattr(actual, name) for name in plain] == [getattr(expected, name) for name in plain]
