"""Removal (masking) of units from one stream of an input: tokens, image regions, pixels.

Texts: `delete` (the remaining tokens close up), `mask` and `pad` (replaced by that token), `attention` (hidden from
attention, positions unchanged), `pad+attention` (both). Regions: `delete`, `attention`, `mean` (of the features of all
regions). Images: `black`, `grey` (127 of 255), `mean` (of the image), `centre` (zero after normalisation), `blur`, and
`inpaint` (each pixel is the weighted mean of its neighbours, so that the hole has no edge and no colour of its own).
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.adapters.base import ModelAdapter
from clearhead.errors import InputError, unknown_value_error
from clearhead.perturbation.multi_stream import ImagePlayers
from clearhead.sample import Sample
from clearhead.units import UnitAxis, Units

TEXT_FILLS = ("delete", "mask", "pad", "attention", "pad+attention")
REGION_FILLS = ("delete", "attention", "mean")
IMAGE_FILLS = ("black", "grey", "mean", "centre", "blur", "inpaint")


class UnitRemover(ABC):
    """Removes units from one stream of one input and fills the gaps."""

    @abstractmethod
    def remove(self, removed: Bool[np.ndarray, "item"]) -> Sample:
        """Return the input without these units (of an image: without these pixels, in row-major order)."""

    def removes_everything(self, removed: Bool[np.ndarray, "item"]) -> bool:
        """Return True if the perturbed input no longer depends on the example, only on its size."""
        return False


def make_remover(adapter: ModelAdapter, sample: Sample, units: Units, fill: str) -> UnitRemover:
    """Create the remover for a stream: pixels of an image, regions with features, or tokens."""
    if units.grid is not None:
        return PixelRemover(adapter, sample, units, fill)
    if units.kind == "region" and any(name in sample.inputs for name in RegionRemover.REGION_INPUT_NAMES):
        return RegionRemover(sample, units, fill)
    return TextRemover(adapter, sample, units, fill)


class TextRemover(UnitRemover):
    """Removes tokens of a text, of an encoder–decoder's source, or of a prompt.

    Args:
        adapter: Adapter of the model.
        sample: The input.
        units: The tokens.
        fill: "delete", "mask", "pad", "attention" (removed from the attention mask) or "pad+attention".

    Raises:
        InputError: If the fill is unknown or not possible, or the units are no tokens of the model.
    """

    def __init__(self, adapter: Any, sample: Sample, units: Units, fill: str) -> None:
        self.sample = sample
        self.units = units
        self.ids_input_name = "input_ids"
        if units.stream == "prefix":
            self.ids_input_name = "decoder_input_ids"
        if self.ids_input_name not in sample.inputs or len(sample.inputs[self.ids_input_name]) < len(units):
            raise InputError(
                f"the units of {units.stream!r} are not tokens of {adapter.model_class_name}: none can be removed"
            )
        if fill not in TEXT_FILLS:
            raise unknown_value_error("fill of a text", fill, TEXT_FILLS)
        replacement_tokens = [word for word in fill.split("+") if word in ("mask", "pad")]
        self.fill_token_id = _find_token_id(adapter, replacement_tokens[0]) if replacement_tokens else None
        self.masks_attention = "attention" in fill
        self.deletes_tokens = fill == "delete"
        if self.deletes_tokens and (sample.mask_positions or (type(sample) is not Sample and units.stream != "source")):
            raise InputError("fill='delete' would move the tokens that the target refers to: choose 'mask' or 'pad'")

    @property
    def _aligned_input_names(self) -> list[str]:
        """Names of the inputs with one entry per token."""
        names = [self.ids_input_name]
        if self.ids_input_name == "input_ids":
            names += ["attention_mask", "token_type_ids", "position_ids"]
        length = len(self.sample.inputs[self.ids_input_name])
        return [name for name in names if name in self.sample.inputs and len(self.sample.inputs[name]) == length]

    def remove(self, removed: Bool[np.ndarray, "unit"]) -> Sample:
        """Return the sample with these tokens deleted, replaced by the fill token, or masked from attention."""
        inputs = dict(self.sample.inputs)
        ids = inputs[self.ids_input_name]
        removed_tokens = torch.zeros(len(ids), dtype=torch.bool)
        removed_tokens[: len(removed)] = torch.as_tensor(removed)
        if self.deletes_tokens:
            return self._delete_tokens(removed_tokens)
        if self.fill_token_id is not None:
            inputs[self.ids_input_name] = ids.masked_fill(removed_tokens, self.fill_token_id)
        if self.masks_attention:
            name = "attention_mask"
            if self.ids_input_name != "input_ids":
                name = "decoder_attention_mask"
            inputs[name] = inputs.get(name, torch.ones_like(ids)).masked_fill(removed_tokens, 0)
        return replace(self.sample, inputs=inputs)

    def removes_everything(self, removed: Bool[np.ndarray, "unit"]) -> bool:
        """Return True if all content tokens are removed and the model has no other input."""
        is_only_input = set(self._aligned_input_names) == set(self.sample.inputs) and (
            self.deletes_tokens or self.fill_token_id is not None
        )
        return bool(is_only_input and np.all(removed | np.asarray(self.units.special)))

    def _delete_tokens(self, removed: Bool[Tensor, "unit"]) -> Sample:
        """Shorten every input and axis that runs along the tokens; position ids stay consecutive."""
        remaining = (~removed).nonzero().flatten()
        inputs = dict(self.sample.inputs)
        for name in self._aligned_input_names:
            if name == "position_ids":
                inputs[name] = inputs[name][: len(remaining)]
            else:
                inputs[name] = inputs[name][remaining]
        return replace(self.sample, inputs=inputs, axes=_shorten_axes(self.sample, self.units, remaining))


def _shorten_axes(sample: Sample, units: Units, remaining: Int[Tensor, "unit"]) -> dict[str, UnitAxis]:
    """Return the sample's axes with only the remaining units of one stream; units after them on the axis move up."""
    remaining_units = _select_units(units, remaining.tolist())
    axes = {}
    for name, axis in sample.axes.items():
        if any(group.stream == units.stream for group in axis.unit_groups):
            groups = (remaining_units if group.stream == units.stream else group for group in axis.unit_groups)
            axes[name] = UnitAxis.concat(*groups)
        else:
            axes[name] = axis
    return axes


def _find_token_id(adapter: Any, token_name: str) -> int:
    """Return the id of the "mask" or "pad" token, from the tokenizer or the model's config."""
    wrapper = getattr(adapter, "tokenizer_wrapper", None)
    wrapper = getattr(wrapper, "tokenizer_wrapper", wrapper)
    token_id = None
    if wrapper is not None and hasattr(wrapper, "get_special_token_id"):
        token_id = wrapper.get_special_token_id(token_name)
    if token_id is None:
        tokenizer = getattr(adapter.processor, "tokenizer", adapter.processor)
        token_id = getattr(tokenizer, f"{token_name}_token_id", None)
    if token_id is None and token_name == "pad":
        token_id = getattr(adapter.model.config, "pad_token_id", None)
    if token_id is None:
        raise InputError(
            f"fill={token_name!r}, but {adapter.model_class_name} has no such token: choose another of {TEXT_FILLS}"
        )
    return int(token_id)


def _select_units(units: Units, indices: list[int]) -> Units:
    """Return only the units at these indices; fields that are None stay None."""

    def select(values: Any) -> Any:
        return None if values is None else tuple(values[i] for i in indices)

    return replace(
        units,
        names=select(units.names),
        special=select(units.special),
        segments=select(units.segments),
        offsets=select(units.offsets),
        boxes=select(units.boxes),
    )


class RegionRemover(UnitRemover):
    """Removes image regions that are given to the model as features and boxes.

    Args:
        sample: The input.
        units: The regions.
        fill: "delete", "attention" (removed from the attention mask) or "mean" (the mean feature vector).

    Raises:
        InputError: If the fill is unknown.
    """

    #: Inputs with one entry per region, features first: LXMERT's and VisualBERT's.
    REGION_INPUT_NAMES = (
        "visual_feats",
        "visual_embeds",
        "visual_pos",
        "visual_attention_mask",
        "visual_token_type_ids",
    )

    def __init__(self, sample: Sample, units: Units, fill: str) -> None:
        if fill not in REGION_FILLS:
            raise unknown_value_error("fill of regions", fill, REGION_FILLS)
        self.sample = sample
        self.units = units
        self.fill = fill
        self.region_input_names = [name for name in self.REGION_INPUT_NAMES if name in sample.inputs]

    def remove(self, removed: Bool[np.ndarray, "unit"]) -> Sample:
        """Return the sample without these regions."""
        inputs = dict(self.sample.inputs)
        removed_regions = torch.as_tensor(removed)
        if self.fill == "attention":
            mask = inputs.get("visual_attention_mask", torch.ones(len(removed_regions)))
            inputs["visual_attention_mask"] = mask.masked_fill(removed_regions, 0)
            return replace(self.sample, inputs=inputs)
        if self.fill == "mean":
            features = inputs[self.region_input_names[0]]
            mean = features.double().mean(0).to(features)
            inputs[self.region_input_names[0]] = torch.where(removed_regions[:, None], mean, features)
            return replace(self.sample, inputs=inputs)
        remaining = (~removed_regions).nonzero().flatten()
        if len(remaining):
            inputs |= {name: inputs[name][remaining] for name in self.region_input_names}
        else:  # the model needs at least one region: keep one that attention masks out
            placeholder = {name: inputs[name][:1] for name in self.region_input_names}
            mask = inputs.get("visual_attention_mask", torch.ones(1))
            placeholder["visual_attention_mask"] = torch.zeros_like(mask[:1])
            remaining = remaining.new_zeros(1)
            inputs |= placeholder
        return replace(self.sample, inputs=inputs, axes=_shorten_axes(self.sample, self.units, remaining))


class PixelRemover(UnitRemover):
    """Removes single pixels of an image.

    Args:
        adapter: Adapter of the model, or of several streams.
        sample: The input.
        units: The patches.
        fill: What replaces a pixel, one of `IMAGE_FILLS`.

    Raises:
        InputError: If the fill is unknown.
    """

    def __init__(self, adapter: Any, sample: Sample, units: Units, fill: str) -> None:
        if fill not in IMAGE_FILLS:
            raise unknown_value_error("fill of an image", fill, IMAGE_FILLS)
        self.sample = sample
        self.fill = fill
        self.pixels = sample.inputs["pixel_values"]
        # a model with several streams has a separate adapter for its images
        adapter = adapter.stream_readers.get(units.stream, (adapter, ""))[0]
        player_fill = {"black": "black", "blur": "blur", "grey": "black"}.get(fill, "mean")
        players = ImagePlayers(adapter, sample, units, "patch", player_fill)
        self.patch_of_pixel = players.patch_of_pixel.numpy()
        self.replacement_pixels = players.replacement_pixels
        if fill == "grey":
            self.replacement_pixels = self.replacement_pixels + 127 / 255 / _get_image_std(adapter, self.pixels)
        elif fill == "centre":
            self.replacement_pixels = torch.zeros_like(self.pixels)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the model's input image."""
        return (self.pixels.shape[1], self.pixels.shape[2])

    def remove(self, removed: Bool[np.ndarray, "pixel"]) -> Sample:
        """Return the sample without these pixels."""
        removed_pixels = removed.reshape(self.image_size)
        if self.fill == "inpaint":
            pixels = torch.as_tensor(inpaint(self.pixels.double().numpy(), removed_pixels)).to(self.pixels)
        else:
            pixels = torch.where(torch.as_tensor(removed_pixels), self.replacement_pixels, self.pixels)
        return replace(self.sample, inputs={**self.sample.inputs, "pixel_values": pixels})

    def removes_everything(self, removed: Bool[np.ndarray, "pixel"]) -> bool:
        """Return True if every pixel gets a constant that does not depend on the image."""
        return self.fill in ("black", "grey", "centre") and bool(removed.all())


def _get_image_std(adapter: Any, pixels: Float[Tensor, "channel height width"]) -> Float[Tensor, "channel 1 1"]:
    """Return the standard deviation by which the processor divides each channel; ones if it does not normalise."""
    std = None
    if getattr(adapter.processor, "do_normalize", True):
        std = getattr(adapter.processor, "image_std", None)
    if std is None:
        return torch.ones(len(pixels), 1, 1)
    return torch.tensor(std)[:, None, None].to(pixels)


#: Weights of a pixel's neighbours: horizontal and vertical ones count twice as much as diagonal ones.
_NEIGHBOUR_WEIGHTS = {
    (down, right): (2.0 if 0 in (down, right) else 1.0) for down in (-1, 0, 1) for right in (-1, 0, 1)
}
del _NEIGHBOUR_WEIGHTS[0, 0]


def inpaint(
    pixels: Float[np.ndarray, "channel height width"], removed: Bool[np.ndarray, "height width"]
) -> Float[np.ndarray, "channel height width"]:
    """Replace each removed pixel by the weighted mean of its neighbours, removed ones included: one linear system.

    If all pixels are removed, the result is the image's mean.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import spsolve

    if not removed.any():
        return pixels
    if removed.all():
        return np.broadcast_to(pixels.mean((1, 2), keepdims=True), pixels.shape).copy()
    height, width = removed.shape
    unknown_index = np.full(removed.shape, -1)
    unknown_index[removed] = np.arange(removed.sum())
    rows, columns = np.nonzero(removed)
    unknown_count = len(rows)
    diagonal = np.zeros(unknown_count)
    right_hand_side = np.zeros((unknown_count, len(pixels)))
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for (down, right), weight in _NEIGHBOUR_WEIGHTS.items():
        r = rows + down
        c = columns + right
        is_inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
        equation = np.flatnonzero(is_inside)
        r = r[is_inside]
        c = c[is_inside]
        diagonal[equation] += weight
        is_unknown = unknown_index[r, c] >= 0
        entries.append(
            (equation[is_unknown], unknown_index[r, c][is_unknown], np.full(is_unknown.sum(), -weight)),
        )
        right_hand_side[equation[~is_unknown]] += weight * pixels[:, r[~is_unknown], c[~is_unknown]].T
    entries.append((np.arange(unknown_count), np.arange(unknown_count), diagonal))
    i, j, values = (np.concatenate(arrays) for arrays in zip(*entries, strict=True))
    system = coo_array((values, (i, j)), shape=(unknown_count, unknown_count)).tocsc()
    filled = pixels.copy()
    filled[:, rows, columns] = spsolve(system, right_hand_side).reshape(unknown_count, len(pixels)).T
    return filled
