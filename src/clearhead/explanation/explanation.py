"""`Explanation`: the scores of one input's units, with the target, the prediction and the certificate.

Also reads and writes the file and JSON forms.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Bool, Float, UInt8

from clearhead.data.atomic_file import atomic_write
from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.degenerate_scores import find_degenerate_scores
from clearhead.explanation.display import DisplayMixin
from clearhead.explanation.validation import check_format, iter_explanation_problems, lists_to_tuples
from clearhead.images import RenderedOnAccess
from clearhead.units import Units, pluralize_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from clearhead.explanation.regions import RegionSpec

#: Name and version of the file and JSON schema. Files with another version are refused.
EXPLANATION_SCHEMA = "clearhead/explanation"
EXPLANATION_VERSION = 2
MULTI_STREAM_SCHEMA = "clearhead/multi-stream-explanation"


@dataclass(frozen=True, eq=False)
class Explanation(DisplayMixin):
    """Attribution scores of the units (tokens, words, patches, …) of one input.

    Scores are raw and signed, as the method computed them; they are only rescaled for display.

    Attributes:
        units: The units: names, text offsets or image boxes, special tokens.
        scores: One score per unit. NaN marks a unit without a score.
        method: The method with its options.
        target: The explained output: its "kind", "name", "scale" and "value".
        prediction: The model's prediction and its most likely labels ("top").
        certificate: Results of the checks: capture error, dtype, truncated tokens, completeness gap, warnings.
        provenance: How the scores were computed: model, input hash, options, versions.
        base_value: The target's value at the baseline, for methods whose scores add up to the difference from it.
        matrix: Several rows of scores: one per entry of `steps`, whose sum `scores` is, or one per unit with
            `rows="all"`.
        per_layer: Contributions of the layers, or the scores after each depth.
        per_head: Contributions of the heads of each layer (`per="head"`).
        factors: The factors whose product the scores are, for methods that have them, named in
            `provenance["factors"]`.
        component_scores: The scores of the methods that a combined method combines, or that another one starts from, or
            the terms that the scores are the sum of, named in `provenance["components"]`; see `components`.
        intervals: Lower and upper bound of each score, for methods that estimate them (`calibrated`) and a single
            target. `provenance["interval_level"]` is how often they are meant to contain the exact score. They are
            missing where scores were added up without their covariance, or subtracted:
            `provenance["missing_intervals"]` says why.
        covariance: The covariance of the scores, from which the intervals of words and regions are computed; kept for
            up to 256 units.
        image: The image as the model sees it, for image inputs.
        steps: Names of several explained outputs: generated tokens, detected objects.

    Example:
        >>> e = ex.explain("You look extremely confused")  # doctest: +SKIP
        >>> e.words().top(3)  # doctest: +SKIP
        >>> e.save("why.safetensors")  # doctest: +SKIP
    """

    units: Units
    scores: Float[np.ndarray, "unit"]
    method: str
    target: Mapping[str, Any]
    prediction: Mapping[str, Any]
    certificate: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    base_value: float | None = None
    matrix: Float[np.ndarray, "row unit"] | None = None
    per_layer: Float[np.ndarray, "layer unit"] | None = None
    per_head: Float[np.ndarray, "layer head unit"] | None = None
    factors: Float[np.ndarray, "factor unit"] | None = None
    component_scores: Float[np.ndarray, "component unit"] | None = None
    intervals: Float[np.ndarray, "unit 2"] | None = None
    covariance: Float[np.ndarray, "unit unit"] | None = None
    image: UInt8[np.ndarray, "height width 3"] | None = RenderedOnAccess()  # type: ignore[assignment]  # noqa: RUF009
    steps: tuple[str, ...] | None = None

    def __eq__(self, other: object) -> bool:
        """Return whether units, scores, image and metadata are equal; a NaN equals another NaN."""
        if not isinstance(other, Explanation):
            return NotImplemented
        images_equal = np.array_equal(self.image, other.image)  # type: ignore[arg-type]  # None equals only None
        return images_equal and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "image": self.image}  # an image that was not rendered would take its model input along

    @property
    def components(self) -> dict[str, Float[np.ndarray, "unit"]]:
        """The scores that a method combines, by name; empty for most methods.

        These are the scores of other methods (`ensemble`), the prior of `calibrated`, or the terms of a sum: what a
        token gets, and what its position gets (`pa-lrp`).

        >>> e = ex.explain("A wonderful film", "ensemble")  # doctest: +SKIP
        >>> e.components["deeplift-shap"]  # doctest: +SKIP
        """
        if self.component_scores is None:
            return {}
        return dict(zip(self.provenance["components"], self.component_scores, strict=True))

    @property
    def stream(self) -> str:
        """Name of the input stream, e.g. "text" or "image"."""
        return self.units.stream

    @property
    def tokens(self) -> list[str]:
        """The names of the units."""
        return list(self.units.names)

    @property
    def signed(self) -> bool:
        """Whether scores can be negative, i.e. count as evidence against the target."""
        return bool(self.provenance.get("signed", (self.scores < 0).any()))

    @property
    def warnings(self) -> list[str]:
        """What is odd about the scores, and what to do about it: one sentence each, as stored in the certificate."""
        return list(self.certificate.get("warnings") or ())

    def __len__(self) -> int:
        """Return the number of units, special tokens included."""
        return len(self.units)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of all streams; a single one here (see `MultiStreamExplanation`)."""
        return (self.stream,)

    @property
    def by_stream(self) -> "dict[str, Explanation]":
        """Explanations by stream: this one only. Gives the same interface as `MultiStreamExplanation`."""
        return {self.stream: self}

    def step(self, which: int) -> "Explanation":
        """Return the explanation of one of several outputs, such as one generated token.

        Args:
            which: Index of the step; negative values count from the end.

        Returns:
            An explanation whose scores are that row of `matrix`.

        Raises:
            InputError: If the explanation has no steps, or the index is out of range.

        Example:
            >>> from clearhead.units import build_numbered_units
            >>> units, rows = build_numbered_units(2, "text", names=["two", "cats"]), np.array([[0.1, 0.4], [0.3, 0.0]])
            >>> e = Explanation(units, rows.sum(0), "generic", {"name": "on a"}, {}, matrix=rows, steps=("on", "a"))
            >>> e.step(1).top(1), e.step(1).target["name"]
            ([('two', 0.3)], 'a')
        """
        if self.steps is None or self.matrix is None:
            raise InputError("this explanation has a single target and no steps")
        if not -len(self.steps) <= which < len(self.steps):
            raise InputError(f"step {which} does not exist: there are {len(self.steps)} steps, counted from 0")
        target = {**self.target, "name": self.steps[which], "value": None}
        if step_targets := self.target.get("steps"):  # missing in the difference of two explanations
            target = step_targets[which]
        step = replace(self, scores=self.matrix[which], matrix=None, steps=None, target=target)
        return step._with_warnings_of(self)

    def __getitem__(self, stream: str) -> "Explanation":
        """Return this explanation, by the name of its only stream, as `MultiStreamExplanation` does for several.

        Args:
            stream: Name of the stream. (For the score of one unit, use `e.scores[i]`.)

        Returns:
            The explanation itself.

        Raises:
            InputError: If the stream has another name.
        """
        if stream != self.stream:
            raise unknown_value_error("stream", stream, [self.stream])
        return self

    def words(self, absolute: bool = False) -> "Explanation":
        """Merge subword tokens into words by adding up their scores.

        Args:
            absolute: Add up absolute values, so that positive and negative scores do not cancel.

        Returns:
            The explanation with words as units.

        Raises:
            InputError: If the units are not part of a text.

        Example:
            >>> e.words().top(2)  # doctest: +SKIP
        """
        return self._merge_units("word", absolute)

    def sentences(self, absolute: bool = False) -> "Explanation":
        """Merge tokens or words into sentences by adding up their scores.

        Args:
            absolute: Add up absolute values, so that positive and negative scores do not cancel.

        Returns:
            The explanation with sentences as units.

        Raises:
            InputError: If the units are not part of a text, or the text is not known.

        Example:
            >>> ex.explain("It is long. I liked it!").sentences().top(1)  # doctest: +SKIP
        """
        return self._merge_units("sentence", absolute)

    def regions(self, regions: "RegionSpec", absolute: bool = False) -> "Explanation":
        """Merge image patches into regions; the score of a patch in several regions is divided by area.

        Args:
            regions: (rows, columns) of a grid; boxes (left, top, right, bottom) as a mapping or list, in fractions of
                the image or in pixels; or an integer map with the region of each pixel or patch (negative: none).
            absolute: Add up absolute values, so that positive and negative scores do not cancel.

        Returns:
            The explanation with regions as units. Patches outside all regions form the region "elsewhere".

        Raises:
            InputError: If the units are not patches, or the regions are malformed.

        Example:
            >>> e.regions({"face": (0.3, 0.1, 0.7, 0.6)})  # doctest: +SKIP
        """
        from clearhead.explanation.regions import merge_into_regions

        image_size = None
        if self.image is not None:
            image_size = self.image.shape[:2]
        return self._aggregate(*merge_into_regions(self.units, regions, image_size), absolute)

    def _merge_units(self, level: str, absolute: bool) -> "Explanation":
        """Merge units into words or sentences; each unit contributes its whole score to its parent."""
        units, parents = self.units.merge(level)
        shares = np.zeros((len(self.units), len(units)))
        shares[np.arange(len(parents)), parents] = 1
        return self._aggregate(units, shares, absolute)

    def _aggregate(self, units: Units, shares: Float[np.ndarray, "unit larger"], absolute: bool) -> "Explanation":
        """Distribute the scores of units to larger units, by the share of each unit in each of them."""
        weights = shares.astype(self.scores.dtype)

        def add_up(scores: np.ndarray | None) -> Any:
            if scores is None:
                return None
            if absolute:
                scores = np.abs(scores)
            return _sum_with_nan(scores, weights)

        matrix = add_up(self.matrix)
        if matrix is not None and self.steps is None:  # the row of a word is the mean of its tokens' rows
            matrix = _sum_with_nan(matrix.T, weights / weights.sum(0)).T
        aggregated = replace(
            self,
            units=units,
            scores=add_up(self.scores),
            matrix=matrix,
            per_layer=add_up(self.per_layer),
            per_head=add_up(self.per_head),
            factors=None,  # a sum of products is not a product of sums
            component_scores=add_up(self.component_scores),
            **self._aggregate_intervals(add_up(self.scores), weights, absolute),
        )
        if not absolute:
            return aggregated._with_warnings_of(self)
        changes = {"signed": False, "linear_in_target": False, "absolute": True}
        provenance = {**aggregated.provenance, **changes}
        return replace(aggregated, base_value=None, provenance=provenance)._with_warnings_of(self)

    def _aggregate_intervals(
        self, sums: Float[np.ndarray, "larger"], weights: Float[np.ndarray, "unit larger"], absolute: bool
    ) -> dict[str, Any]:
        """Return the intervals and the covariance of larger units, or the provenance with why there are none."""
        if self.intervals is None:
            return {}
        reason = ""
        if absolute:
            reason = "the intervals are about signed scores, and absolute values were added up"
        elif self.covariance is None:
            reason = (
                f"the covariance of {len(self)} scores is not kept: explain with a larger unit (unit='word' or "
                "unit='superpixel'), which is then masked as a whole"
            )
        if reason:
            provenance = {**self.provenance, "missing_intervals": reason}
            return {"intervals": None, "covariance": None, "provenance": provenance}
        covariance = weights.T @ self.covariance @ weights
        return {
            "intervals": compute_intervals(sums, covariance, self.provenance["interval_multiplier"]),
            "covariance": covariance,
        }

    def _find_degenerate_scores(self) -> list[str]:
        return find_degenerate_scores(self.scores, self.units, self.target, self.certificate, self.provenance)

    def _with_warnings_of(self, *origins: "Explanation") -> "Explanation":
        """Return a copy with the warnings about its own scores, and the origins' warnings about their passes.

        Explanations without a list of warnings were not checked, and are not checked afterwards.
        """
        if any("warnings" not in origin.certificate for origin in origins):
            return self
        about_passes = [
            warning
            for origin in origins
            if origin.warnings
            for warning in origin.warnings
            if warning not in origin._find_degenerate_scores()
        ]
        warnings = list(dict.fromkeys([*self._find_degenerate_scores(), *about_passes]))
        return replace(self, certificate={**self.certificate, "warnings": warnings})

    def top(self, count: int = 5, include_special: bool = False) -> list[tuple[str, float]]:
        """Return the units with the largest scores, in descending order.

        Args:
            count: Number of units.
            include_special: Whether special tokens such as [CLS] are included.

        Returns:
            Pairs of name and score. Ties keep the order of the input.

        Example:
            >>> from clearhead.units import build_numbered_units
            >>> units = build_numbered_units(3, "text", names=["not", "very", "good"])
            >>> Explanation(units, np.array([-0.5, 0.1, 0.4]), "generic", target={}, prediction={}).top(2)
            [('good', 0.4), ('very', 0.1)]
        """
        indices = self.units.content_indices()
        if include_special:
            indices = np.arange(len(self))
        order = indices[np.argsort(-self.scores[indices], kind="stable")][:count]
        return [(self.units.names[i], float(self.scores[i])) for i in order]

    def heat_map(self) -> Float[np.ndarray, "row column"]:
        """Return the scores of image patches as a two-dimensional grid.

        Returns:
            One score per patch, by row and column.

        Raises:
            InputError: If the units are not patches of a grid.

        Example:
            >>> from clearhead.units import build_patch_units
            >>> units = build_patch_units((2, 2), special_names=["[CLS]"])
            >>> scores = np.array([0.9, 0.0, 0.1, 0.2, 0.3])
            >>> Explanation(units, scores, "generic", target={}, prediction={}).heat_map().tolist()
            [[0.0, 0.1], [0.2, 0.3]]
        """
        if self.units.grid is None:
            raise InputError(f"{pluralize_unit(self.units.kind)} are not on a grid, so there is no heat map")
        return self.scores[self.units.content_indices()].reshape(self.units.grid)

    def mask(self) -> Bool[np.ndarray, "height width"]:
        """Segment the image: upsample the heat map to the image and cut it at Otsu's threshold.

        Returns:
            True for the pixels above the threshold; all False for a constant heat map.

        Raises:
            InputError: If the units are not patches of a grid.

        Example:
            >>> ex.explain("cat.jpg").mask().mean()  # the fraction of the image that is segmented  # doctest: +SKIP
        """
        from clearhead.explanation.otsu_mask import compute_otsu_mask

        heat_map = self.heat_map()
        height, width = heat_map.shape
        if self.image is not None:
            height, width = self.image.shape[:2]
        return compute_otsu_mask(heat_map, height, width)

    def __sub__(self, other: "Explanation") -> "Explanation":
        """Subtract another explanation of the same input.

        For methods that are linear in the target, the difference explains the contrast of the two targets. Otherwise
        it is only a difference of scores, which its target's "kind" states. On the scale "log-odds" it is always a
        difference of scores: the log-odds of one class against another are not the difference of their log-odds
        against all others (see `clearhead.Contrast`).

        Args:
            other: The explanation to subtract, of the same input, with the same units.

        Returns:
            The difference of scores, layers, heads and base values; None for what only one of the two has, or for
            arrays of different shapes.

        Raises:
            InputError: If the two explanations have different inputs or units.

        Example:
            >>> difference = ex.explain(text, target="cat") - ex.explain(text, target="dog")  # doctest: +SKIP
            >>> difference.target["kind"]  # "contrast" for methods that are linear in the target  # doctest: +SKIP
        """
        if not isinstance(other, Explanation):
            return NotImplemented
        if self.units != other.units or self.provenance.get("input") != other.provenance.get("input"):
            raise InputError(
                "only explanations of the same input can be subtracted: these have different units or content"
            )
        linear = bool(self.provenance.get("linear_in_target")) and self.target.get("scale") != "log-odds"
        explains_contrast = linear and self._origin == other._origin and self._is_same_model(other)

        def subtract(first: Any, second: Any) -> Any:
            if first is None or second is None or np.shape(first) != np.shape(second):
                return None
            return first - second

        def convert_value(explanation: "Explanation") -> float | None:
            value = explanation.target.get("value")
            return None if value is None else float(value)

        scale = self.target.get("scale")
        method = self.method
        if self.method != other.method:
            method = f"{self.method} − {other.method}"
        target = {
            "kind": "contrast" if explains_contrast else "score_difference",
            "name": f"{self.target.get('name')} − {other.target.get('name')}",
            "scale": scale if scale == other.target.get("scale") else None,
            "value": subtract(convert_value(self), convert_value(other)),
        }
        difference = replace(
            self,
            method=method,
            scores=self.scores - other.scores,
            target=target,
            provenance={
                **self.provenance,
                "signed": True,
                "minus": dict(other.provenance),
                **({} if self.intervals is None else {"missing_intervals": "the scores are a difference of two"}),
            },
            base_value=subtract(self.base_value, other.base_value),
            matrix=subtract(self.matrix, other.matrix),
            per_layer=subtract(self.per_layer, other.per_layer),
            per_head=subtract(self.per_head, other.per_head),
            factors=None,
            component_scores=subtract(self.component_scores, other.component_scores),
            intervals=None,
            covariance=None,
        )
        return difference._with_warnings_of(self, other)

    @property
    def _origin(self) -> tuple[Any, ...]:
        """The properties that two explanations must share for their difference to explain the targets' difference."""
        return self.method, self.provenance.get("model"), self.target.get("scale"), self.provenance.get("minus")

    def _is_same_model(self, other: "Explanation") -> bool:
        """Whether both explanations come from one model.

        Models given as objects are all named after their class, so their logits are compared.
        """
        own_logits, other_logits = (
            {row.get("index"): row.get("logit") for row in e.prediction.get("top") or ()} for e in (self, other)
        )
        if not own_logits and not other_logits:
            return self.provenance.get("model") != self.provenance.get("model_class")
        if own_logits.keys() != other_logits.keys():
            return False
        values, other_values = (
            np.asarray([logits[index] for index in sorted(logits)], dtype=float)
            for logits in (own_logits, other_logits)
        )
        # The last bits of logits depend on the other samples of a batch.
        tolerance = 2e-2
        if self.certificate.get("dtype", "float32") in ("float32", "float64"):
            tolerance = 1e-4
        return bool(np.abs(values - other_values).max() <= tolerance * max(np.abs(values).max(), 1))

    def to_dict(self, short: bool = False) -> dict[str, Any]:
        """Return the JSON form, as described by `explanation.schema.json`.

        Non-finite numbers become null. The image is not included; `save` keeps it.

        Args:
            short: Write numbers with no more digits than their precision, as in HTML pages.

        Returns:
            A dict of plain Python values. `clearhead.from_dict` reads it.

        Example:
            >>> from clearhead.units import build_numbered_units
            >>> e = Explanation(build_numbered_units(2, "text"), np.array([0.5, np.nan]), "generic", {}, {})
            >>> e.to_dict()["scores"]
            [0.5, None]
        """
        data: dict[str, Any] = {
            "schema": EXPLANATION_SCHEMA,
            "version": EXPLANATION_VERSION,
            "stream": self.stream,
            "units": {name: value for name, value in asdict(self.units).items() if value is not None},
            "scores": self.scores,
            "method": self.method,
            "target": self.target,
            "prediction": self.prediction,
            "base_value": self.base_value,
            "certificate": self.certificate,
            "provenance": self.provenance,
        }
        if self.steps is not None:
            data["steps"] = self.steps
        data |= self._get_arrays(_ARRAY_FIELDS)
        plain: dict[str, Any] = to_json_value(data, short)
        return plain

    def _get_arrays(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return the fields with these names that are not None."""
        return {name: array for name in names if (array := getattr(self, name)) is not None}

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the content of a saved file.

        Returns:
            The JSON form without its arrays, and the arrays by name.

        Example:
            >>> from clearhead.units import build_numbered_units
            >>> e = Explanation(build_numbered_units(2, "text"), np.array([0.5, 0.1]), "generic", {}, {})
            >>> metadata, arrays = e.to_arrays()
            >>> list(arrays), metadata["method"]
            (['scores'], 'generic')
        """
        names = ("scores", "image", *_ARRAY_FIELDS)
        metadata = {key: value for key, value in self.to_dict().items() if key not in names}
        return metadata, self._get_arrays(names)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file: arrays as tensors, everything else as JSON metadata.

        Args:
            path: The file to write. An existing file is replaced.

        Returns:
            The path. `clearhead.load_explanation` opens the file.

        Raises:
            OSError: If the file cannot be written. An existing file is then unchanged.

        Example:
            >>> clearhead.load_explanation(e.save("why.safetensors")) == e  # doctest: +SKIP
            True
        """
        from safetensors.numpy import save

        metadata, arrays = self.to_arrays()
        content = save(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()},
            metadata={"clearhead": json.dumps(metadata, ensure_ascii=False, allow_nan=False)},
        )
        with atomic_write(path) as partial:
            partial.write_bytes(content)
        return Path(path)

    def plot(
        self,
        kind: Literal["bars", "table", "text", "layers", "overlay", "heads", "matrix", "steps", "regions", "frames"]
        | None = None,
        ax: "Axes | None" = None,
        **options: Any,
    ) -> "Axes":
        """Draw the explanation with matplotlib.

        Args:
            kind: Type of plot. Default: the most informative one for these units.
            ax: Axes to draw into. By default a new figure is made.
            **options: Options of the plot type.

        Returns:
            The main axes.

        Raises:
            InputError: If the explanation lacks the data of that plot type.

        Example:
            >>> e.plot("bars").figure.savefig("why.pdf")  # doctest: +SKIP
        """
        from clearhead.render.mpl.explanation import get_main_axes, plot_explanation

        return get_main_axes(plot_explanation(self, kind, ax, **options), ax)

    def latex(self, include_special: bool = False) -> str:
        """Return the text as LaTeX for a paper, with each unit on a coloured background.

        Args:
            include_special: Whether special tokens such as [CLS] are included.

        Returns:
            LaTeX source.

        Raises:
            InputError: If the units are not part of a text.

        Example:
            >>> Path("why.tex").write_text(e.words().latex())  # doctest: +SKIP
        """
        from clearhead.render.latex import render_latex_text

        return render_latex_text(self, include_special)

    def __repr__(self) -> str:
        top = ", ".join(f"{name} {score:.3g}" for name, score in self.top(3))
        unit_kinds = pluralize_unit(self.units.kind)
        counted = self._format_warning_count()
        return (
            f"Explanation({self.method} of {self.target.get('name')!r}: {len(self)} {unit_kinds}; top: {top}{counted})"
        )


_ARRAY_FIELDS = ("matrix", "per_layer", "per_head", "factors", "component_scores", "intervals", "covariance")
_JSON_FIELDS = ("method", "target", "prediction", "base_value", "certificate", "provenance")


def compute_intervals(
    scores: Float[np.ndarray, "unit"], covariance: Float[np.ndarray, "unit unit"], multiplier: float
) -> Float[np.ndarray, "unit 2"]:
    """Return the lower and upper bound of each score.

    Args:
        scores: The scores.
        covariance: Their covariance.
        multiplier: The half-width of an interval in standard deviations.
    """
    half_widths = (multiplier * np.sqrt(np.maximum(np.diagonal(covariance), 0))).astype(scores.dtype)
    return np.stack([scores - half_widths, scores + half_widths], axis=1)


def _sum_with_nan(
    scores: Float[np.ndarray, "*part unit"], shares: Float[np.ndarray, "unit larger"]
) -> Float[np.ndarray, "*part larger"]:
    """Sum the scores of units into larger units: `scores @ shares`, where NaN is passed on.

    Args:
        scores: Scores of the units, along the last axis.
        shares: One row per unit and one column per larger unit: the fraction of the unit's score that it receives.

    Returns:
        Scores of the larger units, along the last axis. A larger unit is NaN if and only if any of the units with a
        nonzero share in it is NaN.
    """
    missing = np.isnan(scores)
    sums = np.where(missing, 0, scores) @ shares
    return np.where(missing @ (shares != 0), np.nan, sums)


def load_explanation(path: str | Path) -> Any:
    """Open a file written by `Explanation.save`.

    Args:
        path: A safetensors file.

    Returns:
        An `Explanation`, or a `MultiStreamExplanation` for several streams.

    Raises:
        InputError: If the file does not exist, is damaged, or was written by another version of clearhead.

    Example:
        >>> clearhead.load_explanation("why.safetensors").top(3)  # doctest: +SKIP
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            header = (file.metadata() or {}).get("clearhead")
            if header is None:
                raise ValueError("its tensors are not those of an explanation")
            metadata = json.loads(header)
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        if isinstance(metadata, Mapping) and metadata.get("schema") == MULTI_STREAM_SCHEMA:
            from clearhead.explanation.multi_stream import multi_stream_from_arrays

            return multi_stream_from_arrays(metadata, arrays)
        return explanation_from_arrays(metadata, arrays)
    except FileNotFoundError:
        raise InputError(f"there is no file {str(path)!r}") from None
    except InputError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}") from None
    except (SafetensorError, ValueError, TypeError, OSError) as error:
        raise InputError(f"{str(path)!r} is not an explanation saved by clearhead ({error})") from None


def from_dict(data: Mapping[str, Any]) -> Any:
    """Read the JSON form written by `Explanation.to_dict`. Null in arrays becomes NaN.

    Args:
        data: The dict, of one stream or several.

    Returns:
        An `Explanation`, or a `MultiStreamExplanation` for several streams.

    Raises:
        InputError: If the data is not an explanation, is damaged, or was written by another version of clearhead.

    Example:
        >>> from clearhead.units import build_numbered_units
        >>> e = Explanation(build_numbered_units(2, "text"), np.array([0.5, np.nan]), "generic", {}, {})
        >>> from_dict(e.to_dict()).scores
        array([0.5, nan])
    """
    if not isinstance(data, Mapping):
        return explanation_from_arrays(data, {})  # raises the error for data of another type
    if data.get("schema") == MULTI_STREAM_SCHEMA:
        from clearhead.explanation.multi_stream import build_multi_stream_explanation

        return build_multi_stream_explanation(data, lambda stream: from_dict(data["by_stream"][stream]))
    values = {name: data.get(name) for name in ("scores", *_ARRAY_FIELDS)}
    try:
        arrays = {name: np.asarray(value, dtype=float) for name, value in values.items() if value is not None}
    except (TypeError, ValueError) as error:
        raise InputError(f"this is not an explanation saved by clearhead ({error})") from None
    return explanation_from_arrays(data, arrays)


def explanation_from_arrays(metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Explanation:
    """Build and validate an explanation from its JSON form and its arrays.

    Everything read from outside passes through here; types and lengths are checked nowhere else.

    Args:
        metadata: The JSON form without arrays.
        arrays: "scores" and the optional arrays, by name.

    Returns:
        The explanation.

    Raises:
        InputError: If the data is damaged or was written by another version of clearhead.
    """
    if not isinstance(metadata, Mapping):
        raise InputError("this is not an explanation saved by clearhead")
    check_format(metadata, EXPLANATION_SCHEMA, EXPLANATION_VERSION)
    try:
        units = Units(**{key: lists_to_tuples(value) for key, value in metadata["units"].items()})
        properties = {name: metadata[name] for name in _JSON_FIELDS}
        steps = lists_to_tuples(metadata.get("steps"))
        explanation = Explanation(units=units, steps=steps, **properties, **arrays)  # type: ignore[arg-type]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"this explanation is damaged: {type(error).__name__} {error}") from None
    for problem in iter_explanation_problems(explanation):
        raise InputError(f"this explanation is damaged: {problem}")
    return explanation


def to_json_value(value: Any, short: bool = False) -> Any:
    """Convert arrays, tuples and mappings to plain JSON values; non-finite numbers become null.

    Args:
        value: Any nested value.
        short: Write array elements with no more digits than their precision: nine for float32, where an exact
            representation takes seventeen.

    Returns:
        Dicts, lists, strings, numbers, booleans and None.

    Example:
        >>> to_json_value({"scores": np.array([0.1, np.nan], dtype=np.float32)}, short=True)
        {'scores': [0.1, None]}
    """
    if short and isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = value.astype(str).astype(float)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item, short) for key, item in value.items()}
    if isinstance(value, list | tuple | range | set | frozenset):
        return [to_json_value(item, short) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
