"""Masking of inputs: texts by their tokens, images by their patches or regions, and several streams together.

In a model with several streams, the units of all streams are players of one game. The replacement of masked units is
chosen for texts (`mask` …), for images (`mean` …) or for regions (`remove` …); other streams use their defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import ModelAdapter
from clearhead.errors import InputError, unknown_value_error
from clearhead.perturbation.features import FEATURE_REPLACEMENTS, FeaturePlayers
from clearhead.perturbation.hierarchy import Hierarchy, merge_hierarchies
from clearhead.perturbation.image import IMAGE_REPLACEMENTS, ImagePlayers
from clearhead.perturbation.players import MaskablePlayers
from clearhead.perturbation.text import SPECIAL_TOKEN_REPLACEMENTS, TEXT_REPLACEMENTS, TextPlayers
from clearhead.sample import Sample
from clearhead.units import TEXT_LEVELS, UnitAxis, Units


def make_players(
    adapter: ModelAdapter,
    sample: Sample,
    unit: str | None = None,
    replacement: str | None = None,
    image_unit: str = "patch",
) -> MaskablePlayers:
    """Divide an input into players that can be masked.

    `find_masking_unsupported_reason` tells whether that is possible.

    Args:
        adapter: The model's adapter.
        sample: The sample.
        unit: What a player is: "token", "word", "sentence", "patch" or "superpixel". Default: "token" for texts and
            `image_unit` for images.
        replacement: What masked units are replaced by. Default: depends on the tokenizer, and "mean" for images.
        image_unit: The default unit of images.

    Returns:
        The players.

    Raises:
        InputError: If an option is not possible for this input.
    """
    if adapter.stream_readers:
        return MultiStreamPlayers(adapter, sample, unit, replacement, image_unit)
    (units,) = next(iter(sample.axes.values())).unit_groups
    if units.grid is not None:
        return ImagePlayers(adapter, sample, units, unit or image_unit, replacement or "mean")
    return TextPlayers(adapter, sample, units, unit or "token", replacement)


def find_masking_unsupported_reason(adapter: ModelAdapter, sample: Sample) -> str | None:
    """Return why units of this model's inputs cannot be masked.

    Args:
        adapter: The model's adapter.
        sample: A sample.

    Returns:
        The reason, or None if they can be masked.
    """
    name = adapter.model_class_name
    unit_groups = [units for axis in sample.axes.values() for units in axis.unit_groups]
    if not adapter.stream_readers and len(unit_groups) != 1:
        streams = ", ".join(units.stream for units in unit_groups)
        return f"masking units of several streams of {name} ({streams}) together is not supported"
    for units in unit_groups:
        if adapter.stream_readers and units.stream not in adapter.stream_readers and all(units.special):
            continue  # units of the model, such as learned queries, that are not input
        reader, input_name = adapter.stream_readers.get(units.stream, (adapter, ""))
        if not _supports_masking(reader, input_name, sample, units):
            return (
                f"masking units of the input of {name} is not supported: only images, vectors, and texts read by a "
                "tokenizer of transformers, or with a TokenReader that has a mask_id, can be masked"
            )
    return None


def _supports_masking(reader: Any, input_name: str, sample: Sample, units: Units) -> bool:
    """Whether a stream is an image of pixels, vectors of regions, or a text with one id or vector per unit."""
    if units.grid is not None:
        pixels = sample.inputs.get(input_name or "pixel_values")
        return pixels is not None and pixels.dim() == 3
    if _is_vector_stream(sample, input_name, units):
        return True
    for name, num_dimensions in ((input_name or "input_ids", 1), ("inputs_embeds", 2)):
        tensor = sample.inputs.get(name)
        if tensor is not None and tensor.dim() == num_dimensions:
            has_tokens = getattr(reader, "tokenizer_wrapper", None) is not None
            return units.kind in TEXT_LEVELS and len(tensor) == len(units) and has_tokens
    return False


def _is_vector_stream(sample: Sample, input_name: str, units: Units) -> bool:
    """Whether the units of a stream are vectors in the model's input, and no tokens of a text."""
    vectors = sample.inputs.get(input_name)
    return (
        vectors is not None
        and vectors.dim() == 2
        and len(vectors) == len(units)
        and units.grid is None
        and input_name != "inputs_embeds"
    )


class _StreamSample(Sample):
    """One stream of a sample. The other streams keep their positions, so none of its units can be deleted."""


class MultiStreamPlayers(MaskablePlayers):
    """The players of several streams, concatenated.

    Attributes:
        stream_players: The players of each stream.
        stream_locations: For each stream, the names of the model's inputs by those of the stream's own sample, its axis
            and the indices of its units there.
        player_slices: The range of players of each stream.

    Args:
        adapter: Adapter of a model with several streams.
        sample: The input.
        unit: The player of each stream; None for tokens, and `image_unit` for images.
        replacement: What masked units are replaced by; None for the default of each stream.
        image_unit: The default unit of images.
    """

    def __init__(
        self, adapter: Any, sample: Sample, unit: str | None, replacement: str | None, image_unit: str
    ) -> None:
        self.sample = sample
        self.stream_players: list[MaskablePlayers] = []
        self.stream_locations: list[tuple[dict[str, str], str, tuple[int, ...]]] = []
        streams = [
            (axis_name, units, indices)
            for axis_name, axis in sample.axes.items()
            for units, indices in zip(axis.unit_groups, axis.indices, strict=True)
        ]
        readable = [units for _, units, _ in streams if units.stream in adapter.stream_readers]
        vectors = [u for u in readable if _is_vector_stream(sample, adapter.stream_readers[u.stream][1], u)]
        _check_options(
            unit,
            replacement,
            has_text=any(units.kind in TEXT_LEVELS and units not in vectors for units in readable),
            has_image=any(units.grid is not None for units in readable),
            has_vectors=bool(vectors),
        )
        for axis_name, units, indices in streams:
            if units.stream not in adapter.stream_readers or all(units.special):
                continue
            reader, input_name = adapter.stream_readers[units.stream]
            players = self._make_stream_players(reader, input_name, units, unit, replacement, image_unit)
            if players is not None:
                self.stream_players.append(players)
                own_names = list(players.sample.inputs)
                input_names = dict(zip(own_names, own_names if len(own_names) > 1 else [input_name], strict=True))
                self.stream_locations.append((input_names, axis_name, indices))
        if not self.stream_players:
            raise InputError("nothing in this input can be masked: every unit is special")
        ends = [0, *accumulate(players.num_players for players in self.stream_players)]
        self.player_slices = [slice(*pair) for pair in pairwise(ends)]
        self.num_players = ends[-1]
        self.unit = ", ".join(dict.fromkeys(players.unit for players in self.stream_players))
        self.replacement = ", ".join(dict.fromkeys(players.replacement for players in self.stream_players))
        self.cache_key = tuple(players.cache_key for players in self.stream_players)

    def _make_stream_players(
        self, reader: Any, input_name: str, units: Units, unit: str | None, replacement: str | None, image_unit: str
    ) -> MaskablePlayers | None:
        """Create the players of one stream; None if all its units are special."""
        if input_name not in self.sample.inputs:
            raise InputError(f"masking units of several streams needs the input {input_name}, which was not given")
        if _is_vector_stream(self.sample, input_name, units):
            return self._make_feature_players(reader, input_name, units, replacement)
        name = "input_ids" if units.grid is None else "pixel_values"
        sample = _StreamSample({name: self.sample.inputs[input_name]}, {units.stream: UnitAxis.concat(units)})
        if units.grid is not None:
            if unit in ("patch", "superpixel"):
                image_unit = unit
            image_replacement = replacement if replacement in IMAGE_REPLACEMENTS else "mean"
            return ImagePlayers(reader, sample, units, image_unit, image_replacement)
        special_ids = torch.tensor(sorted(reader.tokenizer_wrapper.special_ids), dtype=torch.long)
        if (torch.tensor(units.special) | torch.isin(sample.inputs[name].cpu(), special_ids)).all():
            return None
        text_replacement = replacement if replacement in SPECIAL_TOKEN_REPLACEMENTS else None
        text_unit = unit if unit in TEXT_LEVELS else "token"
        return TextPlayers(reader, sample, units, text_unit, text_replacement)

    def _make_feature_players(
        self, reader: Any, input_name: str, units: Units, replacement: str | None
    ) -> FeaturePlayers:
        """Create the players of a stream of vectors, with all inputs that have one row per vector."""
        other_names = getattr(reader, "region_input_names", ())
        names = [input_name, *(name for name in other_names if name != input_name and name in self.sample.inputs)]
        sample = _StreamSample(
            {name: self.sample.inputs[name] for name in names}, {units.stream: UnitAxis.concat(units)}
        )
        return FeaturePlayers(sample, units, names, replacement if replacement in FEATURE_REPLACEMENTS else None)

    def _split_by_stream(self, keep: Bool[Tensor, "*coalition player"]) -> list[Bool[Tensor, "*coalition own"]]:
        """Split coalitions into those of the players of each stream."""
        return [keep[..., player_slice] for player_slice in self.player_slices]

    def keep_only(self, keep: Bool[Tensor, "player"]) -> Sample:
        """Return the sample with the other players of all streams masked."""
        inputs = dict(self.sample.inputs)
        names_by_stream = [input_names for input_names, _, _ in self.stream_locations]
        for players, stream_keep, input_names in zip(
            self.stream_players, self._split_by_stream(keep), names_by_stream, strict=True
        ):
            masked = players.keep_only(stream_keep).inputs
            inputs |= {input_names[name]: tensor for name, tensor in masked.items()}
        return replace(self.sample, inputs=inputs)

    def compute_mask_keys(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        """Return for each coalition the keys of all streams, joined."""
        keys_by_stream = [
            players.compute_mask_keys(stream_keep)
            for players, stream_keep in zip(self.stream_players, self._split_by_stream(keep), strict=True)
        ]
        return [b"".join(keys) for keys in zip(*keys_by_stream, strict=True)]

    def count_units(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        """Return the number of units that are left, of all streams."""
        num_fixed = sum(map(len, self.sample.axes.values())) - sum(len(p.sample.units) for p in self.stream_players)
        counts = [
            players.count_units(stream_keep)
            for players, stream_keep in zip(self.stream_players, self._split_by_stream(keep), strict=True)
        ]
        return [num_fixed + sum(numbers) for numbers in zip(*counts, strict=True)]

    def spread_to_units(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        """Divide the scores within each stream, and concatenate the streams."""
        return torch.cat(
            [
                players.spread_to_units(scores[player_slice])
                for players, player_slice in zip(self.stream_players, self.player_slices, strict=True)
            ]
        )

    def add_up_units(self, unit_scores: Float[Tensor, "unit"]) -> Float[Tensor, "player"]:
        """Add up the scores within each stream; the units of the streams are concatenated."""
        lengths = [len(indices) for _, _, indices in self.stream_locations]
        return torch.cat(
            [
                players.add_up_units(scores)
                for players, scores in zip(self.stream_players, unit_scores.split(lengths), strict=True)
            ]
        )

    def add_up_axes(self, scores_by_axis: "Mapping[str, Float[Tensor, 'padded']]") -> Float[Tensor, "player"]:
        """Add up the scores of the units of each player, by the indices of the streams along their axes."""
        return self.add_up_units(
            torch.cat([scores_by_axis[axis_name][list(indices)] for _, axis_name, indices in self.stream_locations])
        )

    def spread_fixed_leaves(self, leaf_scores: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        """Divide the scores within each stream, and concatenate the streams."""
        return torch.cat(
            [
                players.spread_fixed_leaves(stream_scores)
                for players, stream_scores in zip(
                    self.stream_players, self._split_leaf_scores(leaf_scores), strict=True
                )
            ]
        )

    def _split_leaf_scores(self, leaf_scores: Float[Tensor, "leaf"]) -> "Sequence[Float[Tensor, 'stream_leaf']]":
        """Split the scores of the leaves of the merged hierarchy by stream."""
        return leaf_scores.split([len(tree.player_of_leaf) for tree in self._build_stream_hierarchies()])

    def spread_by_axis(
        self, scores: Float[Tensor, "player"], fixed_scores: Float[Tensor, "leaf"] | None
    ) -> "dict[str, Float[Tensor, 'unit']]":
        """Divide the scores of each stream among its units, at their indices along their axis."""
        unit_scores = {name: torch.zeros(len(axis), dtype=scores.dtype) for name, axis in self.sample.axes.items()}
        leaf_scores: Sequence[Tensor | None] = [None] * len(self.stream_players)
        if fixed_scores is not None:
            leaf_scores = self._split_leaf_scores(fixed_scores)
        for players, player_slice, stream_leaf_scores, (_, axis_name, indices) in zip(
            self.stream_players, self.player_slices, leaf_scores, self.stream_locations, strict=True
        ):
            stream_scores = players.spread_by_axis(scores[player_slice], stream_leaf_scores)
            (unit_scores[axis_name][list(indices)],) = stream_scores.values()
        return unit_scores

    def _build_stream_hierarchies(self) -> list[Hierarchy]:
        """Build the hierarchy of each stream by itself."""
        return [players.build_hierarchy() for players in self.stream_players]

    def build_hierarchy(self) -> Hierarchy:
        """Merge the hierarchies of the streams into one."""
        num_players = [players.num_players for players in self.stream_players]
        return merge_hierarchies(self._build_stream_hierarchies(), num_players)

    def make_windows(self, size: int) -> Bool[Tensor, "window player"]:
        """Return the windows of all streams; no window spans two streams."""
        return torch.block_diag(*(players.make_windows(size).long() for players in self.stream_players)).bool()


def _check_options(
    unit: str | None, replacement: str | None, has_text: bool, has_image: bool, has_vectors: bool
) -> None:
    """Check that unit and replacement are possible for at least one of the streams."""
    units: list[str] = []
    replacements: list[str] = []
    if has_text:
        units += TEXT_LEVELS
        replacements += SPECIAL_TOKEN_REPLACEMENTS
    if has_image:
        units += ("patch", "superpixel")
        replacements += IMAGE_REPLACEMENTS
    if has_vectors:
        replacements += [name for name in FEATURE_REPLACEMENTS if name not in replacements]
    if unit is not None and unit not in units:
        if not units:
            raise InputError(f"unit={unit!r}: the units of this input cannot be grouped, so leave out unit=")
        raise unknown_value_error("unit", unit, units)
    if replacement in TEXT_REPLACEMENTS and replacement not in SPECIAL_TOKEN_REPLACEMENTS:
        raise InputError(
            f"replacement={replacement!r} would shift the tokens of one stream relative to the others: choose another "
            "of " + ", ".join(replacements)
        )
    if replacement is not None and replacement not in replacements:
        raise unknown_value_error("replacement", replacement, replacements)
