"""How far methods agree on one input."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError
from clearhead.explanation import Explanation

if TYPE_CHECKING:
    from clearhead.explainer import Explainer, MethodLike


@dataclass(frozen=True)
class Comparison:
    """Explanations of one input by several methods, and Kendall's tau-b between their scores.

    Special tokens are left out of the agreement: methods differ in what they give them by construction.
    """

    explanations: dict[str, Explanation]

    def __getitem__(self, method: str) -> Explanation:
        return self.explanations[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.explanations)

    @property
    def methods(self) -> list[str]:
        return list(self.explanations)

    @property
    def agreement(self) -> Float[np.ndarray, "method method"]:
        """Tau-b of the scores (not of their order: ties count as ties); NaN where a method is constant."""
        from scipy.stats import kendalltau

        kept = next(iter(self.explanations.values())).units.drop_special()
        scores = [explanation.scores[kept] for explanation in self.explanations.values()]
        tau = np.full((len(scores), len(scores)), np.nan)
        for i, one in enumerate(scores):
            for j, other in enumerate(scores):
                tau[i, j] = kendalltau(one, other).statistic if len(kept) > 1 else np.nan
        return tau

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        agreement = [[None if np.isnan(cell) else float(cell) for cell in row] for row in self.agreement]
        return {
            "schema": "clearhead/comparison",
            "version": 1,
            "methods": self.methods,
            "agreement": {"statistic": "kendall tau-b", "special_units": "left out", "values": agreement},
            "explanations": {name: e.to_dict() for name, e in self.explanations.items()},
        }

    def __rich__(self) -> Any:
        from clearhead.show.terminal import render_comparison

        return render_comparison(self)

    def _repr_html_(self) -> str:
        from clearhead.show.html import fragment_of_comparison

        return fragment_of_comparison(self)


def compare(
    ex: "Explainer", inputs: Any, methods: "Sequence[MethodLike]" = ("generic", "grad-sam", "attcat"), **options: Any
) -> Comparison:
    """Several methods on one input, in one pass, and how far they agree."""
    if isinstance(inputs, list):
        raise InputError("compare takes one input; use explain with a list of methods for many")
    if isinstance(methods, str) or len(methods) < 2:
        raise InputError(f"compare needs at least two methods, but got {methods!r}")
    names = [str(method) for method in methods]
    if len(set(names)) < len(names):
        raise InputError(f"compare needs different methods, but got {', '.join(names)}")
    found = ex.explain(inputs, method=list(methods), **options)
    if any(isinstance(part, list) for part in found.values()):
        raise InputError("compare takes one input, but the model inputs hold several: split them")
    return Comparison(found)
