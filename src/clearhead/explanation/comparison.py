"""Comparison of several methods on one input: their explanations and rank correlations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError, UnsupportedError
from clearhead.explanation.explanation import to_json_value
from clearhead.explanation.multi_stream import AnyExplanation

if TYPE_CHECKING:
    from clearhead.explainer import Explainer, MethodLike


#: Candidates for the methods that `compare` uses by default; the first three that apply to the model are used.
DEFAULT_COMPARED_METHODS = ("ensemble", "generic", "grad-sam", "attcat", "rollout", "attention-gradcam")


@dataclass(frozen=True)
class Comparison:
    """Explanations of one input by several methods, and Kendall's tau-b between their scores.

    Special tokens are left out of the agreement, because methods score them differently by construction.

    Attributes:
        explanations: The explanations by method. `comparison["generic"]` returns one of them.
    """

    explanations: Mapping[str, AnyExplanation]

    def __getitem__(self, method: str) -> AnyExplanation:
        return self.explanations[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.explanations)

    @property
    def methods(self) -> list[str]:
        """Names of the compared methods."""
        return list(self.explanations)

    @property
    def agreement(self) -> Float[np.ndarray, "method method"]:
        """Kendall's tau-b between the scores of each pair of methods; NaN where a method's scores are constant.

        Raises:
            InputError: If the explanations have several streams; use `agreements` then.
        """
        agreements = self.agreements
        if len(agreements) > 1:
            names = " or ".join(f"agreements[{stream!r}]" for stream in agreements)
            raise InputError(f"these explanations have several streams: use {names}")
        return next(iter(agreements.values()))

    @property
    def agreements(self) -> dict[str, Float[np.ndarray, "method method"]]:
        """The agreement by stream. A stream that is not an input, such as a detector's queries, is left out."""
        reference = next(iter(self.explanations.values()))
        input_streams = [
            stream for stream, explanation in reference.by_stream.items() if len(explanation.units.content_indices())
        ]
        return {stream: self._compute_agreement(stream) for stream in input_streams or reference.streams}

    def _compute_agreement(self, stream: str) -> Float[np.ndarray, "method method"]:
        """Compute Kendall's τ between methods over a stream's units, without special ones; NaN for fewer than two."""
        from scipy.stats import kendalltau

        explanations = [explanation[stream] for explanation in self.explanations.values()]
        indices = explanations[0].units.content_indices()
        scores = [explanation.scores[indices] for explanation in explanations]
        tau = np.full((len(scores), len(scores)), np.nan)
        if len(indices) > 1:
            for i, row_scores in enumerate(scores):
                for j, column_scores in enumerate(scores):
                    tau[i, j] = kendalltau(row_scores, column_scores).statistic
        return tau

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form.

        Returns:
            A dict of plain Python values. With several streams, the agreement is a mapping from stream to values.
        """
        agreements = {stream: to_json_value(tau) for stream, tau in self.agreements.items()}
        values: Any = agreements
        if len(agreements) == 1:
            (values,) = agreements.values()
        return {
            "schema": "clearhead/comparison",
            "version": 1,
            "methods": self.methods,
            "agreement": {"statistic": "kendall tau-b", "special_units": "left out", "values": values},
            "explanations": {name: explanation.to_dict() for name, explanation in self.explanations.items()},
        }

    def __rich__(self) -> Any:
        from clearhead.render.terminal import render_comparison

        return render_comparison(self)

    def _repr_html_(self) -> str:
        """Return an HTML fragment, which notebooks display."""
        from clearhead.render.html import render_notebook_html

        return render_notebook_html(self)


def compare(
    ex: "Explainer",
    inputs: Any = None,
    methods: "Sequence[MethodLike] | None" = None,
    **options: Any,
) -> Comparison:
    """Explain one input with several methods and measure how far they agree.

    Args:
        ex: The explainer.
        inputs: One input, as in `Explainer.explain`.
        methods: At least two different methods. Default: the first three of `DEFAULT_COMPARED_METHODS` that apply to
            the model.
        **options: Further options of `Explainer.explain`, such as `target` or `layers`.

    Returns:
        The explanations by method and their agreement.

    Raises:
        InputError: If fewer than two different methods, or several inputs, are given.
        UnsupportedError: If a method cannot be applied to this model.

    Example:
        >>> comparison = clearhead.compare(ex, "A wonderful film", ["generic", "grad-sam"])  # doctest: +SKIP
        >>> comparison.agreement  # doctest: +SKIP
    """
    if methods is None:
        methods = _select_default_methods(ex)
    if isinstance(inputs, list) and not ex.adapter.is_single_input(inputs):
        raise InputError("compare takes one input; use explain with a list of methods for several")
    if isinstance(methods, str):
        methods = [methods]
    names = [str(method) for method in methods]
    if len(names) < 2:
        raise InputError(f"compare needs at least two methods, but got {', '.join(names) or 'none'}")
    if len(set(names)) < len(names):
        raise InputError(f"compare needs different methods, but got {', '.join(names)}")
    explanations = ex.explain(inputs, method=list(methods), **options)
    if any(isinstance(explanation, list) for explanation in explanations.values()):
        raise InputError("compare takes one input, but several were given: compare them one by one")
    return Comparison(explanations)


def _select_default_methods(ex: "Explainer") -> list[str]:
    """Return the first three default methods that apply to the model; fewer than two are an error."""
    applicability = {row.name: row for row in ex.methods()}
    selected = [name for name in DEFAULT_COMPARED_METHODS if applicability[name].applies][:3]
    if len(selected) < 2:
        name = next(name for name in DEFAULT_COMPARED_METHODS if not applicability[name].applies)
        raise UnsupportedError(
            f"fewer than two of {', '.join(DEFAULT_COMPARED_METHODS)} apply, so name the methods to compare; "
            f"{name}: {applicability[name].why_not}"
        )
    return selected
