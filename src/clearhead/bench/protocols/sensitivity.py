"""Sensitivity-n and infidelity: do summed scores predict how far the output falls when units are removed?

y is the explained output, its class fixed to that of the unperturbed input; x − S is the input without the units of S.

    leave-one-out   d_u = y(x) − y(x − u) for each unit: the order that other methods are compared with (`agreement`)
    sensitivity-n   over random subsets S of n units, Pearson's correlation of Σ_S score with y(x) − y(x − S)
    infidelity      mean over the same subsets of (Σ_S score − (y(x) − y(x − S)))²; for the raw scores, and for scores
                    scaled by the factor β that minimises it (relevance has no unit of its own)

`subsets` draws S by example, so that all methods are measured on the same subsets; `squares` slides squares over an
image, like InterpretDL (`idl-infidelity`, whose metric is the scaled one; here pixels that are already grey count too).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float

from clearhead.bench.data import Example
from clearhead.bench.output_cache import OutputCache, PreparedExample, prepare_example
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    register_protocol,
)
from clearhead.bench.protocols.curves import compute_removed_counts
from clearhead.bench.protocols.perturbation import get_visible_units
from clearhead.bench.protocols.unit_removal import PixelRemover, UnitRemover, make_remover
from clearhead.errors import InputError
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Correlations of fewer points are not reported.
MIN_CORRELATION_POINTS = 3


def choose_default_fill(units: Units) -> str:
    """Return "mean" for patches and regions, "mask" for tokens."""
    if units.grid is not None or units.kind == "region":
        return "mean"
    return "mask"


def to_removal_mask(remover: UnitRemover, units: Units, removed: Bool[np.ndarray, "unit"]) -> Bool[np.ndarray, "item"]:
    """Convert a mask of units to the items of the remover: for an image, the pixels of the patches."""
    if isinstance(remover, PixelRemover):
        return np.asarray((removed[remover.patch_of_pixel.clip(min=0)] & (remover.patch_of_pixel >= 0)).flatten())
    return removed


class OutputDrops:
    """Computes y(x) − y(x − S) for many S of many inputs; each distinct perturbed input is forwarded once.

    Args:
        explainer: Explainer of the model.
        output_cache: Computes the outputs; by default a new cache.
    """

    def __init__(self, explainer: "Explainer", output_cache: OutputCache | None = None) -> None:
        self.output_cache = output_cache or OutputCache(explainer)
        self.requests: dict[str, tuple[PreparedExample, bytes, list[bytes]]] = {}

    def request(
        self,
        name: str,
        prepared: PreparedExample,
        remover: UnitRemover,
        removal_masks: Iterable[Bool[np.ndarray, "item"]],
    ) -> None:
        """Request the drops of these removals; `drops[name]` returns them in the same order."""
        clean_key = self.output_cache.request(prepared.sample, prepared.target)
        keys = [self.output_cache.request(remover.remove(mask), prepared.target) for mask in removal_masks]
        self.requests[name] = (prepared, clean_key, keys)

    def __getitem__(self, name: str) -> Float[np.ndarray, "subset"]:
        """Return the drops requested under a name, in the order of the removals; forwards the inputs that wait."""
        self.output_cache.flush()
        prepared, clean_key, keys = self.requests[name]
        clean_scores = torch.as_tensor(self.output_cache[clean_key])
        target = prepared.target.with_fixed_classes(clean_scores, prepared.label_lookup)
        clean_value, *values = (
            float(target.compute_value(torch.as_tensor(self.output_cache[key]), prepared.label_lookup))
            for key in (clean_key, *keys)
        )
        return np.array([clean_value - value for value in values])


#: Group (number of units, side of a square) → the weight of each unit in every subset of an input.
SubsetWeights = Mapping[str, Float[np.ndarray, "subset unit"]]


@dataclass(frozen=True)
class SubsetSensitivity(BenchmarkProtocol):
    """Base class: sums of scores over subsets of units, compared with the drop of the output without them.

    Attributes:
        fill: What replaces removed units; None for the default of each stream.
        stream: The stream to measure; None for all.
    """

    smaller_is_better_metrics: ClassVar[frozenset[str]] = frozenset({"infidelity", "scaled infidelity"})

    explained: ExplainedClass = "predicted"
    fill: str | None = None
    stream: str | None = None

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Measure each stream with at least two content units."""
        self.check_settings()
        drops = OutputDrops(explainer, output_cache)
        weights_by_input: dict[tuple[int, str], SubsetWeights] = {}
        first_method_explanations = next(iter(explanations.values()))
        for index, example in enumerate(examples):
            prepared = prepare_example(explainer, example, self)
            for stream in self.select_streams(first_method_explanations[index]):
                units = get_visible_units(prepared, stream)
                if len(units.content_indices()) < 2:
                    continue
                fill = self.fill or choose_default_fill(units)
                remover = make_remover(explainer.adapter, prepared.sample, units, fill)
                weights_by_input[index, stream], masks = self.build_subsets(remover, units, example.id, stream)
                drops.request(f"{index}/{stream}", prepared, remover, masks)
        measurements = []
        for method, method_explanations in explanations.items():
            for (index, stream), weights in weights_by_input.items():
                scores = method_explanations[index][stream].scores
                metrics = compute_subset_metrics(scores, weights, drops[f"{index}/{stream}"])
                measurements.append(Measurement(examples[index].id, method, stream, metrics))
        return measurements

    def select_streams(self, explanation: AnyExplanation) -> Sequence[str]:
        """Return the stream that `stream` names, or all streams of the explanation."""
        if self.stream is not None:
            return [self.stream]
        return list(explanation.streams)

    def build_subsets(
        self, remover: UnitRemover, units: Units, *key: str
    ) -> tuple[SubsetWeights, Iterable[Bool[np.ndarray, "item"]]]:
        """Return the unit weights of all subsets, and the removal masks in the same order."""
        raise NotImplementedError


def compute_subset_metrics(
    scores: Float[np.ndarray, "unit"], subset_weights: SubsetWeights, drops: Float[np.ndarray, "subset"]
) -> dict[str, float]:
    """Compute sensitivity and infidelity of one method on one input; `drops` are in the order of the weights."""
    num_units = next(iter(subset_weights.values())).shape[1]
    scores = np.nan_to_num(scores[:num_units]).astype(float)
    sums_by_group = {group: weights @ scores for group, weights in subset_weights.items()}
    all_sums = np.concatenate(list(sums_by_group.values()))
    group_ends = np.cumsum([len(sums) for sums in sums_by_group.values()])
    drops_by_group = np.split(drops, group_ends[:-1])
    metrics = {
        f"sensitivity {group}": compute_pearson_correlation(sums, group_drops)
        for (group, sums), group_drops in zip(sums_by_group.items(), drops_by_group, strict=True)
        if len(sums) >= MIN_CORRELATION_POINTS
    }
    beta = float(all_sums @ drops / (all_sums @ all_sums)) if all_sums.any() else 0.0
    metrics["infidelity"] = float(((all_sums - drops) ** 2).mean())
    metrics["scaled infidelity"] = float(((beta * all_sums - drops) ** 2).mean())
    metrics["beta"] = beta
    return metrics


@register_protocol("subsets")
@dataclass(frozen=True)
class RandomSubsetSensitivity(SubsetSensitivity):
    """Sensitivity-n over random subsets.

    Attributes:
        shares: The n of sensitivity-n, as fractions of the units.
        draws: Number of subsets for each n.
    """

    description: ClassVar[str] = (
        "Do sums of scores over random subsets of units predict how far the output falls without them?"
    )
    headline_metrics: ClassVar[tuple[str, ...]] = ("sensitivity 0.3", "scaled infidelity")

    shares: tuple[float, ...] = (0.1, 0.3, 0.5)
    draws: int = 32

    def check_settings(self) -> None:
        """Check the settings of all protocols, that `draws` suffices for a correlation, and that shares differ."""
        super().check_settings()
        if self.draws < MIN_CORRELATION_POINTS:
            raise InputError(
                f"draws={self.draws} is too small: a correlation needs at least {MIN_CORRELATION_POINTS} draws"
            )
        if not self.shares or len({f"{share:g}" for share in self.shares}) < len(self.shares):
            raise InputError(f"shares={self.shares} is not valid: list at least one value, without duplicates")

    def count_perturbed_inputs(self, num_methods: int) -> int:
        """Number of perturbed inputs per example; the same subsets serve all methods."""
        return 1 + len(self.shares) * self.draws

    def build_subsets(
        self, remover: UnitRemover, units: Units, *key: str
    ) -> tuple[SubsetWeights, Iterable[Bool[np.ndarray, "item"]]]:
        """Return one group of subsets for each fraction of the units."""
        subsets_by_share = self.draw_subsets(units, *key)
        weights = {
            f"{share:g}": subsets.astype(float) for share, subsets in zip(self.shares, subsets_by_share, strict=True)
        }
        masks = (to_removal_mask(remover, units, subset) for subsets in subsets_by_share for subset in subsets)
        return weights, masks

    def draw_subsets(self, units: Units, *key: str) -> list[Bool[np.ndarray, "draw unit"]]:
        """Draw `draws` random subsets of content units for each fraction."""
        content = units.content_indices()
        digest = hashlib.sha256("\0".join([str(self.seed), *key]).encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        subsets_by_share = []
        for count in compute_removed_counts(self.shares, len(content), "up"):
            subsets = np.zeros((self.draws, len(units)), dtype=bool)
            for subset in subsets:
                subset[rng.permutation(content)[:count]] = True
            subsets_by_share.append(subsets)
        return subsets_by_share


@register_protocol("squares")
@dataclass(frozen=True)
class SlidingSquareSensitivity(SubsetSensitivity):
    """Infidelity over sliding squares of an image.

    The squares lie wholly inside the model's input image. The sum of a square is that of the heat map, upscaled
    bilinearly so that each patch's score is spread over its pixels. Sides larger than the image are skipped; an image
    smaller than every side is an error.

    Attributes:
        fill: What replaces removed pixels.
        sides: Sides of the squares, in pixels.
        stride: Distance between neighbouring squares, in pixels.
    """

    description: ClassVar[str] = (
        "Do sums of scores over squares of an image predict how far the output falls without them?"
    )
    headline_metrics: ClassVar[tuple[str, ...]] = ("scaled infidelity",)

    fill: str | None = "grey"
    sides: tuple[int, ...] = (32, 64, 128)
    stride: int = 8

    def check_settings(self) -> None:
        """Validate the settings."""
        super().check_settings()
        if not self.sides or len(set(self.sides)) < len(self.sides):
            raise InputError(f"sides={self.sides} is not valid: list at least one value, without duplicates")
        if min(*self.sides, self.stride) < 1:
            raise InputError(f"sides={self.sides}, stride={self.stride} are not valid: each must be at least 1 pixel")

    def count_perturbed_inputs(self, num_methods: int) -> int | None:
        """None: the number of squares depends on the image size."""
        return None

    def select_streams(self, explanation: AnyExplanation) -> Sequence[str]:
        """Return the streams whose units are patches."""
        streams = super().select_streams(explanation)
        patch_streams = [stream for stream in streams if explanation[stream].units.grid is not None]
        if not patch_streams:
            raise InputError(f"squares need patches of an image, but the streams are {', '.join(streams)}")
        return patch_streams

    def build_subsets(
        self, remover: UnitRemover, units: Units, *key: str
    ) -> tuple[SubsetWeights, Iterable[Bool[np.ndarray, "item"]]]:
        """Return one group of squares for each side that fits the image."""
        assert isinstance(remover, PixelRemover) and units.grid is not None
        height, width = remover.image_size
        fitting_sides = [side for side in self.sides if side <= min(height, width)]
        if not fitting_sides:
            raise InputError(
                f"the model's input image has {height} × {width} pixels, and no square of "
                f"{', '.join(map(str, self.sides))} fits: choose smaller sides, such as "
                f"sides={min(height, width) // 4},{min(height, width) // 2}"
            )
        patch_weights = [
            _compute_interpolation_weights(num_patches, size)
            for num_patches, size in zip(units.grid, remover.image_size, strict=True)
        ]
        subset_weights = {}
        for side in fitting_sides:
            row_weights, column_weights = (
                np.array(
                    [
                        axis_weights[start : start + side].sum(0)
                        for start in compute_square_starts(size, side, self.stride)
                    ]
                )
                for size, axis_weights in zip(remover.image_size, patch_weights, strict=True)
            )
            weights = np.zeros((len(row_weights) * len(column_weights), len(units)))
            weights[:, units.content_indices()] = np.kron(row_weights, column_weights)
            subset_weights[str(side)] = weights
        masks = (mask for side in fitting_sides for mask in self._iter_square_masks(side, remover.image_size))
        return subset_weights, masks

    def _iter_square_masks(self, side: int, size: tuple[int, int]) -> Iterator[Bool[np.ndarray, "pixel"]]:
        """Yield the flattened mask of each square of side × side pixels, `stride` apart, row by row."""
        for y in compute_square_starts(size[0], side, self.stride):
            for x in compute_square_starts(size[1], side, self.stride):
                mask = np.zeros(size, dtype=bool)
                mask[y : y + side, x : x + side] = True
                yield mask.flatten()


def compute_square_starts(size: int, side: int, stride: int) -> range:
    """Return the start positions of squares along one edge.

    >>> list(compute_square_starts(10, 4, 3))
    [0, 3, 6]
    """
    return range(0, size - side + 1, stride)


def _compute_interpolation_weights(count: int, size: int) -> Float[np.ndarray, "pixel patch"]:
    """Return each patch's bilinear weight at each pixel along one edge; the weights of a patch sum to 1."""
    identity = torch.eye(count, dtype=torch.float64)[None]
    large = torch.nn.functional.interpolate(identity, size=size, mode="linear", align_corners=False)[0]
    return np.asarray((large * count / size).T)


def compute_pearson_correlation(a: Float[np.ndarray, "item"], b: Float[np.ndarray, "item"]) -> float:
    """Compute Pearson's correlation; 0 if one side is constant up to floating-point noise."""
    a = a - a.mean()
    b = b - b.mean()
    norm_product = float(np.sqrt((a @ a) * (b @ b)))
    if not norm_product > 1e-24:
        return 0.0
    return float(a @ b / norm_product)
