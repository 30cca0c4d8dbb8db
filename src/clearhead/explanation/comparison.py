"""Comparison of several methods on one input: their explanations and rank correlations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError, UnsupportedError
from clearhead.explanation.explanation import Explanation, to_json_value
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import pluralize_unit

if TYPE_CHECKING:
    from clearhead.explainer import Explainer, MethodLike


#: Candidates for the methods that `compare` uses by default; the first three that apply to the model are used.
DEFAULT_COMPARED_METHODS = ("ensemble", "generic", "grad-sam", "attcat", "rollout", "attention-gradcam")
#: Chance that a comparison of methods with unrelated orders has a warning, over all its pairs and streams.
DISAGREEMENT_ERROR_RATE = 0.01
#: Neighbouring patches have similar scores, so the p-value of hundreds of them is too small. A weaker correlation than
#: this is no warning, whatever its p-value.
MIN_DISAGREEMENT = 0.2


@dataclass(frozen=True)
class Comparison:
    """Explanations of one input by several methods, and Kendall's tau-b between their scores.

    Special tokens are left out of the agreement, because methods score them differently by construction.

    Attributes:
        explanations: The explanations by method. `comparison["generic"]` returns one of them.
    """

    explanations: Mapping[str, AnyExplanation]

    def __getitem__(self, method: str) -> AnyExplanation:
        """Return the explanation by one method.

        Args:
            method: The method as it is written in `methods`, with its options.

        Returns:
            Its explanation.

        Raises:
            KeyError: If the method was not compared.
        """
        return self.explanations[method]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the methods."""
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
        return {stream: self._compute_agreement(stream) for stream in self._list_compared_streams()}

    def _list_compared_streams(self) -> list[str]:
        """The input streams; all streams if none is an input."""
        reference = next(iter(self.explanations.values()))
        input_streams = [
            stream for stream, explanation in reference.by_stream.items() if len(explanation.units.content_indices())
        ]
        return input_streams or list(reference.streams)

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

    @property
    def warnings(self) -> list[str]:
        """Pairs of methods that put units into opposite orders, beyond chance, and what to do: one sentence each.

        The p-values of Kendall's tau-b, one-sided, are compared with `DISAGREEMENT_ERROR_RATE` divided by the number of
        pairs. Controls are left out, and so are pairs that explain different targets.
        """
        names = [name for name, e in self.explanations.items() if e.provenance.get("family") != "control"]
        streams = self._list_compared_streams()
        pairs = [
            (first, second, stream)
            for first, second in combinations(names, 2)
            if self[first].target.get("name") == self[second].target.get("name")
            for stream in streams
        ]
        warnings = []
        for first, second, stream in pairs:
            warning = check_disagreement(self[first][stream], self[second][stream], (first, second), len(pairs))
            if warning:
                warnings.append(warning if len(streams) == 1 else f"{stream}: {warning}")
        return warnings

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form.

        Returns:
            A dict of plain Python values. With several streams, the agreement is a mapping from stream to values.

        Example:
            >>> comparison = clearhead.compare(ex, "A wonderful film")  # doctest: +SKIP
            >>> comparison.to_dict()["agreement"]["statistic"]  # doctest: +SKIP
            'kendall tau-b'
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
            "warnings": self.warnings,
            "explanations": {name: explanation.to_dict() for name, explanation in self.explanations.items()},
        }

    def __rich__(self) -> Any:
        from clearhead.render.terminal import render_comparison

        return render_comparison(self)

    def _repr_html_(self) -> str:
        """Return an HTML fragment, which notebooks display."""
        from clearhead.render.html import render_notebook_html

        return render_notebook_html(self)


def check_disagreement(
    first: Explanation, second: Explanation, names: tuple[str, str], num_pairs: int = 1
) -> str | None:
    """Warn if two methods put the units of one stream into opposite orders, beyond chance.

    Args:
        first: The explanation by one method.
        second: The explanation of the same input by the other one.
        names: The names of the two methods.
        num_pairs: How many pairs are tested together.

    Returns:
        The warning, or None.
    """
    from scipy.stats import kendalltau

    indices = first.units.content_indices()
    if len(indices) < 2:
        return None
    test = kendalltau(first.scores[indices], second.scores[indices], alternative="less")
    is_beyond_chance = test.pvalue < DISAGREEMENT_ERROR_RATE / num_pairs and test.statistic <= -MIN_DISAGREEMENT
    if not is_beyond_chance:  # a NaN, for constant scores, is not
        return None
    advice = "explain with method='occlusion', which removes units and measures the effect, and trust what it supports"
    if "occlusion" in (first.provenance.get("method"), second.provenance.get("method")):
        advice = "explain with method='kernel-shap', and trust what it supports"
    if first.signed != second.signed:
        unsigned = names[1] if first.signed else names[0]
        advice = f"{unsigned} has no signs, so units that count against the target may cause this; {advice}"
    statistic = f"{test.statistic:.2f}".replace("-", "−")
    return (
        f"{names[0]} and {names[1]} rank the {pluralize_unit(first.units.kind)} in opposite orders, more than chance "
        f"explains (Kendall’s τ-b {statistic}, p = {test.pvalue:.1g}, n = {len(indices)}): {advice}."
    )


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
            f"fewer than two of {', '.join(DEFAULT_COMPARED_METHODS)} apply, so specify the methods to compare; "
            f"{name}: {applicability[name].why_not}"
        )
    return selected
