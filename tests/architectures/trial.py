"""One class put to the test: explained rightly, explained by gradients alone, refused with a reason – or it fails."""

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import clearhead
from clearhead.explainer import Explainer
from clearhead.methods.base import METHOD_REGISTRY
from tests.architectures.checks import (
    TELLING,
    Wrong,
    called,
    check_batched,
    check_gradient,
    check_heard,
    check_places,
    check_scores,
    check_value,
    planned,
    values,
)

LONGEST = 120  # seconds of computing that one class may take
GRADIENT = ("saliency", "input-x-gradient")

#: How a class can turn out, if it works.
WORKS = ("interface", "returned", "registered")


@dataclass(frozen=True)
class Outcome:
    """How one class turned out, and why (for those that do not fully work)."""

    how: str
    why: str = ""


def tried(build: Callable[[], Any]) -> Outcome:
    """Build a model and explain it; nothing that it raises gets out."""
    try:
        with _at_most(LONGEST):
            try:
                model = build()
            except Exception as problem:
                return Outcome("not built", _line(problem))
            return explained(model)
    except clearhead.UnsupportedError as refusal:
        return Outcome("refused", str(refusal))
    except Wrong as problem:
        return Outcome("fails", str(problem))
    except Exception as problem:
        where = traceback.extract_tb(problem.__traceback__)[-1]
        return Outcome("fails", f"{_line(problem)} ({where.filename.split('/')[-1]}:{where.lineno})")


def explained(model: Any) -> Outcome:
    """Whether a model is explained rightly; a Refusal where it is not explained at all."""
    try:
        return _explained(model)
    except (clearhead.UnsupportedError, Wrong, TimeoutError):
        raise
    except Exception:
        if model.dtype != torch.float64:
            raise
        return _explained(model.float())  # some parts of some models are in float32, whatever is asked for


def _explained(model: Any) -> Outcome:
    ex = clearhead.load(model)
    one = ex.adapter.make_example_input()
    try:
        heard = _heard(ex, one)  # some models change on their first pass, by themselves
        if any(part.isnan().any() for part in heard.values()):
            raise ValueError("it gives numbers that are none")
    except clearhead.UnsupportedError:
        raise
    except Exception as problem:
        if model.dtype == torch.float64:
            raise
        return Outcome("not built", f"it does not run by itself: {_line(problem)}")
    before = _touched(model)
    target = _target(ex, one)
    methods, why = _methods(ex), ""
    if "generic" not in methods:
        why = next(line.why_not for line in ex.methods() if line.name == "generic")
    try:
        alone = ex.explain(one, methods, target)
    except clearhead.UnsupportedError as refusal:
        methods, why = [name for name in methods if name in GRADIENT], str(refusal)
        alone = ex.explain(one, methods, target)
    real = values(ex, [one], target)
    check_value(alone[methods[0]].target["value"], real[0], "the recorded answer is not the untouched model's")
    check_heard(alone[methods[0]].target, heard)
    for method, explanation in alone.items():
        check_scores(method, explanation)
    check_gradient(ex, one, target)
    if not why and "saliency" in methods:  # where the parts of the input that units hold are known
        check_places(ex, one, target)
    note = check_batched(ex, one, alone, real[0], target, methods)
    if _touched(model) != before:
        raise Wrong("the model is not as it was before")
    recorded = alone[methods[0]].certificate["recorder"]
    return Outcome("gradients" if why else recorded, "; ".join(filter(None, (why, note))))


def _methods(ex: Explainer) -> list[str]:
    """The methods that apply and need one pass, those that show most first; controls show nothing about a model."""
    applies = {line.name for line in ex.methods() if line.applies}
    tapes = [name for name, method in METHOD_REGISTRY.items() if method.declaration.pass_type == "tape"]
    rest = sorted(name for name in tapes if name in applies and METHOD_REGISTRY[name].declaration.family != "control")
    return sorted(rest, key=lambda name: name not in TELLING) or list(GRADIENT)


def _target(ex: Explainer, one: Any) -> Any:
    """The default; for models without classes, the first number that comes out of them."""
    try:
        ex.explain(one, "saliency")
    except clearhead.InputError as problem:
        if "a function of" in str(problem):
            return _first_number
        raise
    except clearhead.UnsupportedError:
        pass
    return None


def _first_number(output: Any) -> Tensor:
    first = next(part for part in output.values() if isinstance(part, Tensor))
    return first.flatten(2)[:, 0, 0] if first.dim() > 2 else first[:, 0]


def _heard(ex: Explainer, one: Any) -> dict[str, Tensor]:
    """What comes out of the untouched model, called with an example as it is or with what its subject adds to it."""
    model, also = ex.adapter.model, dict[str, Any]()
    if ex.adapter.forward_accepts("use_cache"):  # with a cache, FSMT answers for the last word alone
        also["use_cache"] = torch.tensor(False)
    if ex.adapter.forward_accepts("mm_token_type_ids") and "input_ids" in one:  # as processors say where pictures stand
        also["mm_token_type_ids"] = (one["input_ids"] == model.config.image_token_id).long()
    try:
        return called(model, {**one, **also})
    except Exception:
        return called(model, planned(ex, [one], None)[0].model_inputs)


def _touched(model: Any) -> tuple[Any, ...]:
    """What must be the same afterwards: hooks, modes, gradients, the attention implementation."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    grads = [(p.requires_grad, p.grad is None) for p in model.parameters()]
    return hooks, modes, grads, model.config._attn_implementation


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)  # computing time, so that others on the machine do not count
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {' '.join(lines[:2])}"
