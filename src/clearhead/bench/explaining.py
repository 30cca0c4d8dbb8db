"""The explanations that protocols are handed: all methods of an input in shared passes, failures kept apart."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clearhead.bench.data.base import Example
from clearhead.bench.protocol import Protocol
from clearhead.errors import ClearheadError, InputError
from clearhead.joint import AnyExplanation
from clearhead.methods.base import Method

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: In every table: what any method must beat.
CONTROLS = ("random", "position")


@dataclass
class Explained:
    """By method the explanations, in the order of the examples; and why a method has none."""

    by_method: dict[str, list[AnyExplanation]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def with_controls(methods: Sequence[str | Method]) -> list[Method]:
    """The methods, and the controls behind them; none twice."""
    made = [one if isinstance(one, Method) else Method(one) for one in methods]
    made += [Method(name) for name in CONTROLS if name not in [str(one) for one in made]]
    names = [str(one) for one in made]
    if len(set(names)) < len(names):
        raise InputError(f"two of the methods are the same: {', '.join(names)}")
    return made


def method_of(text: str) -> Method:
    """A method as it is written in a table: `grad-sam(received=True)`."""
    name, _, inside = text.partition("(")
    if not inside:
        return Method(text)
    call = ast.parse(f"f({inside}", mode="eval").body
    assert isinstance(call, ast.Call)
    return Method(name, **{word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg})


def applicable(ex: "Explainer", methods: Sequence[Method]) -> tuple[list[Method], dict[str, str]]:
    """Those methods that can speak for this model, and why the others cannot."""
    why = {line.name: line.why_not for line in ex.methods()}
    for method in methods:
        method.declaration  # noqa: B018 – an unknown name is told now, with the nearest known one
    refused = {str(method): why[method.name] for method in methods if why.get(method.name)}
    return [method for method in methods if str(method) not in refused], refused


def explained(
    ex: "Explainer",
    examples: Sequence[Example],
    methods: Sequence[Method],
    protocol: Protocol,
    batch_size: int = 8,
    seed: int = 0,
) -> Explained:
    """Every method on every example, together; one by one where one of them fails, so that it fails alone."""
    try:
        return Explained(_together(ex, examples, methods, protocol, batch_size, seed))
    except Exception as problem:
        if _no_fault_of_a_method(problem) or len(methods) == 1:
            raise
    result = Explained()
    for method in methods:
        try:
            result.by_method |= _together(ex, examples, [method], protocol, batch_size, seed)
        except ClearheadError as problem:
            result.refused[str(method)] = str(problem)
        except Exception as problem:
            if _no_fault_of_a_method(problem):
                raise
            result.refused[str(method)] = f"{type(problem).__name__}: {problem}"
    return result


def _no_fault_of_a_method(problem: Exception) -> bool:
    return isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError"


def _together(
    ex: "Explainer",
    examples: Sequence[Example],
    methods: Sequence[Method],
    protocol: Protocol,
    batch_size: int,
    seed: int,
) -> dict[str, list[AnyExplanation]]:
    options: dict[str, Any] = {
        "method": list(methods),
        "target": [protocol.target(example) for example in examples],
        "batch_size": batch_size,
        "seed": seed,
    }
    found: dict[str, list[AnyExplanation]] = ex.explain(**given(examples), **options)
    return found


def given(examples: Sequence[Example]) -> dict[str, Any]:
    """Their inputs as `Explainer.explain` takes them: a list, or a list for each of several streams; and answers."""
    first = examples[0].input
    if isinstance(first, Mapping) and set(first) <= {"text", "image", "audio", "regions"}:
        made: dict[str, Any] = {name: [example.input[name] for example in examples] for name in first}
    else:
        made = {"inputs": [example.input for example in examples]}
    if any(example.answer is not None for example in examples):
        made["answer"] = [example.answer for example in examples]
    return made
