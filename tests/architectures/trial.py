"""Try one class: it is explained correctly, explained by gradient methods alone, unsupported, or it fails."""

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
from clearhead.methods.pass_type import PassType
from tests.architectures.checks import (
    NONZERO_METHODS,
    WrongExplanationError,
    call_model,
    check_batched,
    check_gradient,
    check_scores,
    check_target_in_output,
    check_unit_rows,
    check_value,
    compute_target_values,
    make_target_batch,
)

MAX_SECONDS = 120  # CPU seconds that one class may take
GRADIENT_METHODS = ("saliency", "input-x-gradient")

#: Status of the classes that work.
WORKS = ("interface", "returned", "registered")


@dataclass(frozen=True)
class Outcome:
    """Result for one class, with the reason if it does not fully work."""

    status: str
    reason: str = ""


def try_build_and_explain(build: Callable[[], Any]) -> Outcome:
    """Build a model and explain it; every exception becomes an outcome."""
    try:
        with limit_cpu_seconds(MAX_SECONDS):
            try:
                model = build()
            except Exception as error:
                return Outcome("not built", format_error(error))
            return explain_and_check(model)
    except clearhead.UnsupportedError as error:
        return Outcome("refused", str(error))
    except WrongExplanationError as error:
        return Outcome("fails", str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("fails", f"{format_error(error)} ({where.filename.split('/')[-1]}:{where.lineno})")


def explain_and_check(model: Any) -> Outcome:
    """Explain a model and check the results; raise UnsupportedError if no method can explain it."""
    try:
        return explain_and_check_once(model)
    except (clearhead.UnsupportedError, WrongExplanationError, TimeoutError):
        raise
    except Exception:
        if model.dtype != torch.float64:
            raise
        return explain_and_check_once(model.float())  # some models have parts that are always float32


def explain_and_check_once(model: Any) -> Outcome:
    ex = clearhead.load(model)
    example = ex.adapter.make_example_input()
    try:
        plain_outputs = compute_plain_outputs(ex, example)  # some models change on their first pass
        if any(part.isnan().any() for part in plain_outputs.values()):
            raise ValueError("it gives numbers that are none")
    except clearhead.UnsupportedError:
        raise
    except Exception as error:
        if model.dtype == torch.float64:
            raise
        return Outcome("not built", f"it does not run by itself: {format_error(error)}")
    before = snapshot_model_state(model)
    target = choose_target(ex, example)
    methods, reason = list_methods(ex), ""
    if "generic" not in methods:
        reason = next(line.why_not for line in ex.methods() if line.name == "generic")
    try:
        explanations = ex.explain(example, methods, target)
    except clearhead.UnsupportedError as error:
        methods, reason = [name for name in methods if name in GRADIENT_METHODS], str(error)
        explanations = ex.explain(example, methods, target)
    model_values = compute_target_values(ex, [example], target)
    check_value(
        explanations[methods[0]].target["value"], model_values[0], "the recorded target value is not that of the model"
    )
    check_target_in_output(explanations[methods[0]].target, plain_outputs)
    for method, explanation in explanations.items():
        check_scores(method, explanation)
    check_gradient(ex, example, target)
    if not reason and "saliency" in methods:  # the input gradient maps to units
        check_unit_rows(ex, example, target)
    note = check_batched(ex, example, explanations, model_values[0], target, methods)
    if snapshot_model_state(model) != before:
        raise WrongExplanationError("the model was changed")
    recorded = explanations[methods[0]].certificate["recorder"]
    return Outcome("gradients" if reason else recorded, "; ".join(filter(None, (reason, note))))


def list_methods(ex: Explainer) -> list[str]:
    """List the methods that apply and need one pass, those whose scores must not be zero first; without controls."""
    applies = {line.name for line in ex.methods() if line.applies}
    tapes = [name for name, method in METHOD_REGISTRY.items() if method.declaration.pass_type is PassType.TAPE]
    rest = sorted(name for name in tapes if name in applies and METHOD_REGISTRY[name].declaration.family != "control")
    return sorted(rest, key=lambda name: name not in NONZERO_METHODS) or list(GRADIENT_METHODS)


def choose_target(ex: Explainer, example: Any) -> Any:
    """Return the default target, or the first output value for models without classes."""
    try:
        ex.explain(example, "saliency")
    except clearhead.InputError as error:
        if "a function of" in str(error):
            return get_first_output
        raise
    except clearhead.UnsupportedError:
        pass
    return None


def get_first_output(output: Any) -> Tensor:
    first = next(part for part in output.values() if isinstance(part, Tensor))
    return first.flatten(2)[:, 0, 0] if first.dim() > 2 else first[:, 0]


def compute_plain_outputs(ex: Explainer, example: Any) -> dict[str, Tensor]:
    """Run the model without clearhead, with an example as it is or with the inputs that its adapter adds."""
    model, extra_inputs = ex.adapter.model, dict[str, Any]()
    if ex.adapter.forward_accepts("use_cache"):  # with a cache, FSMT returns the logits of the last token only
        extra_inputs["use_cache"] = torch.tensor(False)
    if ex.adapter.forward_accepts("mm_token_type_ids") and "input_ids" in example:  # image tokens
        extra_inputs["mm_token_type_ids"] = (example["input_ids"] == model.config.image_token_id).long()
    try:
        return call_model(model, {**example, **extra_inputs})
    except Exception:
        return call_model(model, make_target_batch(ex, [example], None)[0].model_inputs)


def snapshot_model_state(model: Any) -> tuple[Any, ...]:
    """Return the state that must not change: hooks, modes, gradients, the attention implementation."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    grads = [(p.requires_grad, p.grad is None) for p in model.parameters()]
    return hooks, modes, grads, model.config._attn_implementation


@contextmanager
def limit_cpu_seconds(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)  # CPU time, which does not depend on the load of the machine
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def format_error(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
