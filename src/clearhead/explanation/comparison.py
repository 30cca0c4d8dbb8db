"""How far methods agree on one input."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError, Refusal
from clearhead.explanation.explanation import plain
from clearhead.explanation.multi_stream import AnyExplanation

if TYPE_CHECKING:
    from clearhead.explainer import Explainer, MethodLike


#: Methods that are compared where none are named, as far as they apply.
DEFAULTS = ("generic", "grad-sam", "attcat", "rollout", "attention-gradcam")


@dataclass(frozen=True)
class Comparison:
    """Explanations of one input by several methods, and Kendall's tau-b between their scores.

    Special tokens are left out of the agreement: methods differ in what they give them by construction.
    """

    explanations: Mapping[str, AnyExplanation]

    def __getitem__(self, method: str) -> AnyExplanation:
        return self.explanations[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.explanations)

    @property
    def methods(self) -> list[str]:
        return list(self.explanations)

    @property
    def agreement(self) -> Float[np.ndarray, "method method"]:
        """Tau-b of the scores (not of their order: ties count as ties); NaN where a method is constant."""
        found = self.agreements
        if len(found) > 1:
            named = " or ".join(f"agreements[{stream!r}]" for stream in found)
            raise InputError(f"these explanations have several streams: say {named}")
        return next(iter(found.values()))

    @property
    def agreements(self) -> dict[str, Float[np.ndarray, "method method"]]:
        """The agreement on each stream; one that is no input, such as a detector's queries, is left out."""
        first = next(iter(self.explanations.values()))
        inside = [stream for stream, part in first.parts.items() if len(part.units.drop_special())]
        return {stream: self._agreement(stream) for stream in inside or first.streams}

    def _agreement(self, stream: str) -> Float[np.ndarray, "method method"]:
        from scipy.stats import kendalltau

        parts = [explanation[stream] for explanation in self.explanations.values()]
        kept = parts[0].units.drop_special()
        scores = [part.scores[kept] for part in parts]
        tau = np.full((len(scores), len(scores)), np.nan)
        for i, one in enumerate(scores):
            for j, other in enumerate(scores):
                tau[i, j] = kendalltau(one, other).statistic if len(kept) > 1 else np.nan
        return tau

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; where there are several streams, the agreement is a mapping from stream to values."""
        found = {stream: plain(tau) for stream, tau in self.agreements.items()}
        values = found if len(found) > 1 else next(iter(found.values()))
        return {
            "schema": "clearhead/comparison",
            "version": 1,
            "methods": self.methods,
            "agreement": {"statistic": "kendall tau-b", "special_units": "left out", "values": values},
            "explanations": {name: e.to_dict() for name, e in self.explanations.items()},
        }

    def __rich__(self) -> Any:
        from clearhead.render.terminal import render_comparison

        return render_comparison(self)

    def _repr_html_(self) -> str:
        from clearhead.render.html import fragment

        return fragment(self)


def compare(
    ex: "Explainer",
    inputs: Any = None,
    methods: "Sequence[MethodLike] | None" = None,
    **options: Any,
) -> Comparison:
    """Several methods on one input, in one pass, and how far they agree. `options` are those of `explain`.

    methods: by default the first three of `DEFAULTS` that apply to the model
    """
    methods = _default_methods(ex) if methods is None else methods
    if isinstance(inputs, list) and not ex.subject.is_one(inputs):
        raise InputError("compare takes one input; use explain with a list of methods for many")
    if isinstance(methods, str) or len(methods) < 2:
        given = [methods] if isinstance(methods, str) else methods
        raise InputError(f"compare needs at least two methods, but got {', '.join(map(str, given)) or 'none'}")
    names = [str(method) for method in methods]
    if len(set(names)) < len(names):
        raise InputError(f"compare needs different methods, but got {', '.join(names)}")
    found = ex.explain(inputs, method=list(methods), **options)
    if any(isinstance(part, list) for part in found.values()):
        raise InputError("compare takes one input, but these inputs hold several: split them")
    return Comparison(found)


def _default_methods(ex: "Explainer") -> list[str]:
    lines = {line.name: line for line in ex.methods()}
    found = [name for name in DEFAULTS if lines[name].applies][:3]
    if len(found) < 2:
        name = next(name for name in DEFAULTS if not lines[name].applies)
        raise Refusal(f"fewer than two of {', '.join(DEFAULTS)} apply, so name methods; {name}: {lines[name].why_not}")
    return found
