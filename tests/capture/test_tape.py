"""Calls and tapes hold what was asked for and nothing else; they move, and they save."""

from dataclasses import fields

import pytest
import torch

import clearhead
from clearhead.capture.tape import GRADIENT_SOURCES, AttentionCall, Requirement, Tape
from tests.invariants import cases
from tests.models import inputs

ASKS = Requirement.__args__


def expected(asks):
    """What was asked for; a gradient brings along what it is the gradient of."""
    brought = {f"{name}_gradient": name for name in ("attention", "block_input", "hidden_state")}
    brought["input_gradient"] = "inputs"
    return set(asks) | {brought[ask] for ask in asks if ask in brought}


def held(tape):
    whole = {name for name in ("inputs", "input_gradient") if getattr(tape, name) is not None}
    calls = [{name for name, _ in call.iter_tensors()} for call in tape.calls]
    assert all(call == calls[0] for call in calls)
    return whole | calls[0]


@pytest.mark.parametrize("subject", ["bert/classify", "albert/mask", "dinov2/image"])
@pytest.mark.parametrize("asks", [*((ask,) for ask in ASKS), ("values", "input_gradient"), ASKS, ()], ids="+".join)
def test_only_what_was_asked_for(subject, asks):
    tape = cases.explainer(subject).record(inputs(subject), asks)
    assert held(tape) == expected(asks)
    assert len(tape.calls) == 3 and [call.layer for call in tape.calls] == [0, 1, 2]
    for name, part in _tensors(tape):
        assert not part.requires_grad and part.grad_fn is None, f"{name} still hangs on the graph"


def test_no_backward_pass_unless_asked_for(monkeypatch):
    ex = cases.explainer("bert/classify")
    ex.explain(inputs("bert/classify")[0])
    called = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: called.append(1) or grad(*a, **k))
    ex.record(inputs("bert/classify"), set(ASKS) - GRADIENT_SOURCES.keys())
    ex.explain(inputs("bert/classify"), method=["attention", "rollout", "random", "position"])
    assert not called
    ex.explain(inputs("bert/classify"), method=["generic", "cat", "grad-sam", "saliency", "rollout"])
    assert called == [1], "methods asked for together share one backward pass"


def test_methods_together_share_one_forward():
    ex = cases.explainer("bert/classify")
    ex.explain(inputs("bert/classify"))
    passes = []
    with ex.adapter.model.register_forward_pre_hook(lambda module, args: passes.append(1)):
        ex.explain(inputs("bert/classify"), method=list(cases.FROM_TAPE))
    assert passes == [1]


def test_asks_are_spelled_right():
    with pytest.raises(clearhead.InputError, match="did you mean 'attention'"):
        cases.explainer("bert/classify").record(inputs("bert/classify"), ("atention",))


def test_models_that_return_attentions_have_no_values():
    ex = cases.explainer("deberta/classify")
    for ask in ("values", "output_projection"):
        with pytest.raises(
            clearhead.UnsupportedError, match=r"DebertaV2ForSequenceClassification ignores .* interface"
        ):
            ex.record(inputs("deberta/classify"), (ask,))
    tape = ex.record(inputs("deberta/classify"), ("attention_gradient", "block_input_gradient"))
    assert [call.module for call in tape.calls] == [f"deberta.encoder.layer.{i}.attention.self" for i in range(3)]


@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_save_and_load(subject, tmp_path):
    tape = cases.explainer(subject).record(inputs(subject), ASKS)
    opened = Tape.load(tape.save(tmp_path / "tape.safetensors"))
    _assert_same(tape, opened)
    _assert_same(tape, Tape.load(opened.save(tmp_path / "again.safetensors")))
    first, second = ((tmp_path / name).read_bytes() for name in ("tape.safetensors", "again.safetensors"))
    assert first == second


def test_an_empty_tape_saves(tmp_path):
    _assert_same(Tape(), Tape.load(Tape().save(tmp_path / "empty.safetensors")))


def test_to_another_device():
    """The meta device stands in for a GPU: every tensor moves, everything else stays."""
    tape = cases.explainer("bert/classify").record(inputs("bert/classify"), ASKS)
    moved = tape.to("meta")
    assert {part.device.type for _, part in _tensors(moved)} == {"meta"}
    assert {part.device.type for _, part in _tensors(tape)} == {"cpu"}, "the tape itself stays where it is"
    assert [name for name, _ in _tensors(moved)] == [name for name, _ in _tensors(tape)]
    for one, other in zip(tape.calls, moved.calls, strict=True):
        assert (one.layer, one.module, one.kind, one.query_stream) == (
            other.layer,
            other.module,
            other.kind,
            other.query_stream,
        )


def test_heads_of_a_call():
    call = cases.explainer("bert/classify").record(inputs("bert/classify"), ASKS).calls[1]
    some = call.select_heads([2, 0])
    assert torch.equal(some.attention, call.attention[:, [2, 0]])
    assert torch.equal(some.attention_gradient, call.attention_gradient[:, [2, 0]])
    assert torch.equal(some.values, call.values[:, [2, 0]])
    assert torch.equal(some.positive_product, (call.attention * call.attention_gradient).clamp(min=0)[:, [2, 0]])
    assert some.block_input is call.block_input


def _tensors(tape):
    found = [(name, getattr(tape, name)) for name in Tape.TENSOR_FIELDS]
    found += [(f"{call.layer}.{name}", part) for call in tape.calls for name, part in call.iter_tensors()]
    return [(name, part) for name, part in found if part is not None]


def _assert_same(one, other):
    assert [name for name, _ in _tensors(one)] == [name for name, _ in _tensors(other)]
    for (name, mine), (_, yours) in zip(_tensors(one), _tensors(other), strict=True):
        assert mine.dtype == yours.dtype and torch.equal(mine, yours), name
    plain = [f.name for f in fields(AttentionCall) if "Tensor" not in str(f.type)]
    assert plain == ["layer", "module", "kind", "query_stream", "key_stream", "deferred"]
    for mine, yours in zip(one.calls, other.calls, strict=True):
        assert [getattr(mine, name) for name in plain] == [getattr(yours, name) for name in plain]
