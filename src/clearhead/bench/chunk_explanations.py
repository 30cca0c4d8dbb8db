"""Explain a chunk of examples with all methods in shared passes; a method that fails does not affect the others."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.bench.data.base import Example
from clearhead.bench.protocols.base import BenchmarkProtocol
from clearhead.errors import ClearheadError, InputError, UnsupportedError
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.methods.base import Method

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: In every table: what any method must beat.
CONTROL_METHODS = ("random", "position")


@dataclass
class ChunkExplanations:
    """Explanations of the examples of one chunk, and why methods have none.

    Attributes:
        by_method: Explanations of each method, in the order of the examples.
        partial_by_method: For methods that failed on some examples, the explanations of the others by index.
        failure_reasons: The error of each method that failed.
    """

    by_method: dict[str, list[AnyExplanation]] = field(default_factory=dict)
    partial_by_method: dict[str, dict[int, AnyExplanation]] = field(default_factory=dict)
    failure_reasons: dict[str, str] = field(default_factory=dict)

    def get_by_index(self, method: str) -> dict[int, AnyExplanation]:
        """Return the explanations of a method by the index of the example; empty if the method failed on all.

        Args:
            method: Name of the method.

        Returns:
            Explanations by index.
        """
        return (
            dict(enumerate(self.by_method[method]))
            if method in self.by_method
            else self.partial_by_method.get(method, {})
        )


def add_controls(methods: Sequence[str | Method]) -> list[Method]:
    """The methods, and the controls behind them; none twice."""
    made = [one if isinstance(one, Method) else Method(one) for one in methods]
    made += [Method(name) for name in CONTROL_METHODS if name not in [str(one) for one in made]]
    names = [str(one) for one in made]
    if len(set(names)) < len(names):
        raise InputError(f"the same method was given twice: {', '.join(names)}")
    return made


def parse_method(text: str) -> Method:
    """A method as it is written in a table: `grad-sam(received=True)`."""
    name, _, inside = text.partition("(")
    if not inside:
        return Method(text)
    call = ast.parse(f"f({inside}", mode="eval").body
    assert isinstance(call, ast.Call)
    return Method(name, **{word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg})


def split_applicable(explainer: "Explainer", methods: Sequence[Method]) -> tuple[list[Method], dict[str, str]]:
    """Those methods that can speak for this model, and why the others cannot."""
    why = {line.name: line.why_not for line in explainer.methods()}
    for method in methods:
        method.declaration  # noqa: B018 – an unknown name is told now, with the nearest known one
    refused = {str(method): why[method.name] for method in methods if why.get(method.name)}
    return [method for method in methods if str(method) not in refused], refused


def explain_examples(
    explainer: "Explainer",
    examples: Sequence[Example],
    methods: Sequence[Method],
    protocol: BenchmarkProtocol,
    batch_size: int = 8,
    seed: int = 0,
) -> ChunkExplanations:
    """Every method on every example, together; where one fails, by itself, and then example by example.

    So a method fails alone, and only on the examples that are too much for it.
    """
    made, _ = _try_explain(explainer, examples, methods, protocol, batch_size, seed)
    if made is not None:
        return ChunkExplanations(made)
    result = ChunkExplanations()
    for method in methods:
        made, why = _try_explain(explainer, examples, [method], protocol, batch_size, seed)
        if made is not None:
            result.by_method |= made
            continue
        some, failed = _explain_individually(explainer, examples, method, protocol, seed)
        if some:
            result.partial_by_method[str(method)] = some
        if failed or not some:  # a batch may be too much, and no example of it
            result.failure_reasons[str(method)] = format_failures(failed) if some else why
    return result


def _explain_individually(
    ex: "Explainer", examples: Sequence[Example], method: Method, protocol: BenchmarkProtocol, seed: int
) -> tuple[dict[int, AnyExplanation], dict[str, str]]:
    """The explanations of those examples on which a method does not fail, and why it does on the others."""
    found, failed = {}, {}
    for place, example in enumerate(examples if len(examples) > 1 else ()):
        made, why = _try_explain(ex, [example], [method], protocol, 1, seed)
        if made is None:
            failed[example.id] = why
        else:
            found[place] = made[str(method)][0]
    return found, failed


def format_failures(reasons: Mapping[str, str]) -> str:
    """
    >>> format_failures({"t1": "it is empty", "t2": "it is long", "t3": "it is empty"})
    "on 't1', 't3': it is empty; on 't2': it is long"
    """
    ids: dict[str, list[str]] = {}
    for example, why in reasons.items():
        ids.setdefault(why, []).append(repr(example))
    return "; ".join(f"on {', '.join(own)}: {why}" for why, own in ids.items())


def _try_explain(
    ex: "Explainer",
    examples: Sequence[Example],
    methods: Sequence[Method],
    protocol: BenchmarkProtocol,
    batch_size: int,
    seed: int,
) -> tuple[dict[str, list[AnyExplanation]] | None, str]:
    """The explanations, or why there are none; what is the fault of no method is raised."""
    how: dict[str, Any] = {"method": list(methods), "batch_size": batch_size, "seed": seed}
    try:
        how["target"] = [protocol.select_target(example) for example in examples]
        found: dict[str, list[AnyExplanation]] = ex.explain(**build_explain_kwargs(examples), **how)
        for e in (e for own in found.values() for e in own):
            _check_no_nan(e)
        return found, ""
    except ClearheadError as problem:
        return None, str(problem)
    except Exception as problem:
        if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
            raise
        return None, f"{type(problem).__name__}: {problem}"


def get_explanation_seed(explanations: Mapping[str, Sequence[AnyExplanation]]) -> int:
    """What these were drawn with: others that are compared with them are drawn with the same."""
    first = next(iter(explanations.values()))[0]
    return int(next(iter(first.by_stream.values())).certificate.get("seed", 0))


def _check_no_nan(e: AnyExplanation) -> None:
    """NaN would be ranked somewhere and averaged without a word: it is a failure of the method, told like any other."""
    strange = [stream for stream, part in e.by_stream.items() if np.isnan(part.scores).any()]
    if strange:
        raise UnsupportedError(f"its scores are not numbers (NaN; {', '.join(strange)})")


def build_explain_kwargs(examples: Sequence[Example]) -> dict[str, Any]:
    """Build the arguments of `Explainer.explain` from the inputs of examples: lists by stream, and given continuations.

    Args:
        examples: Examples with the same streams; at least one.

    Returns:
        Keyword arguments, each a list in the order of the examples.
    """
    first = examples[0].input
    if isinstance(first, Mapping) and set(first) <= {"text", "image", "audio", "regions"}:
        made: dict[str, Any] = {name: [example.input[name] for example in examples] for name in first}
    else:
        made = {"inputs": [example.input for example in examples]}
    if any(example.continuation is not None for example in examples):
        made["answer"] = [example.continuation for example in examples]
    return made
