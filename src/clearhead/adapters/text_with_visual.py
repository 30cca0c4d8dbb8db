"""A text beside something that it is about, in one model: what co-attention and joint sequences share."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.adapters.base import (
    Given,
    How,
    Readout,
    Sample,
    Subject,
    base_model,
    class_names,
    read_rows,
    split_mapping,
)
from clearhead.adapters.readers.image import as_seen, in_patches, open_picture, pair, pixels_of
from clearhead.adapters.readers.regions import Regions, read_regions, units_of_regions
from clearhead.adapters.readers.text import Words, padded
from clearhead.adapters.text import TextSubject
from clearhead.errors import InputError, Refusal
from clearhead.targets import Target
from clearhead.units import Units, patches

TEXT = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")


@dataclass
class Sight:
    """What the text is about, ready for the model, and its units."""

    inputs: dict[str, Tensor]
    units: Units
    picture: UInt8[np.ndarray, "height width 3"] | None = None


class TextBeside(TextSubject):
    """A text and what it is about, each by name: `explain(text=…, image=…)` or `explain(text=…, regions=…)`."""

    #: The stream that stands beside the text, and the input that its gradients go to.
    sight: ClassVar[str]
    sight_leaf: ClassVar[str]
    #: The inputs that have one entry for each unit, and what they are padded with.
    fills: ClassVar[dict[str, int]] = {}
    #: Classes that could be taken for others, and why they are not explained.
    refused: ClassVar[dict[str, str]] = {}
    #: What the outputs of a head are called that has no names for them.
    outputs: ClassVar[dict[int, str]] = {}

    def __post_init__(self) -> None:
        names = class_names(self.model)
        for name in names:
            if name in self.refused:
                raise Refusal(f"{name} cannot be explained: {self.refused[name]}")
        Subject.__post_init__(self)  # a text alone would come with a tokenizer alone
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
            given = type(self.processor).__name__
            raise InputError(f"{names[0]} takes texts, too, but came with a {given} that has no tokenizer")
        self.embeddings = base_model(self.model).get_input_embeddings()  # type: ignore[operator]
        self.words = Words(tokenizer, self.model, "text", getattr(self.model.config, "text_config", None))
        if not self.words.pads and self.embeddings.padding_idx is not None:
            self.words.pads = {self.embeddings.padding_idx}

    def told_labels(self) -> dict[int, str]:
        told = super().told_labels()
        unnamed = self.outputs and all(name.startswith("LABEL_") for name in told.values())
        return dict(self.outputs) if unnamed else told

    @abstractmethod
    def look(self, raw: Given) -> Sight:
        """What the text is about, from what the caller gave."""

    @abstractmethod
    def look_at(self, inputs: dict[str, Tensor], how: How) -> Sight:
        """What the text is about, from the caller's own model inputs."""

    @abstractmethod
    def joined_sample(self, inputs: dict[str, Tensor], units: Units, sight: Sight, dropped: int = 0) -> Sample:
        """The text and what it is about as one sample."""

    def default_readout(self) -> Readout | None:
        return "first"

    def rows(self, sample: Sample, target: Target) -> dict[int, float]:
        return read_rows(self.readout, sample.axes[self.stream])

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if isinstance(raw, Mapping):
            return self._given(raw, how)
        if not isinstance(raw, Given) or raw.text is None:
            given = "only " + self.sight if isinstance(raw, Given) else f"a {type(raw).__name__}"
            raise InputError(f"{self.name} takes text= and {self.sight}=, each by name, but was given {given}")
        if not isinstance(raw.text, str):
            raise InputError(f"text= must be a text, not a {type(raw.text).__name__}")
        sight = self.look(raw)
        tokens = self.words.read((raw.text,), how)
        types = getattr(self.words.config, "type_vocab_size", 2)
        if types < 2 or not self.accepts("token_type_ids"):
            tokens.inputs.pop("token_type_ids", None)
        return [self.joined_sample(tokens.inputs, tokens.units, sight, tokens.dropped)]

    def _given(self, raw: Mapping[str, Any], how: How) -> list[Sample]:
        key = "inputs_embeds" if raw.get("input_ids") is None else "input_ids"
        if raw.get(key) is None or raw.get(self.sight_leaf) is None:
            held = ", ".join(raw) or "nothing"
            raise InputError(f"model inputs need input_ids and {self.sight_leaf}, but hold {held}")
        parts = split_mapping(self, raw)
        nameless: list[Any] = [None] * len(parts)
        named = [how.tokens] if how.tokens and isinstance(how.tokens[0], str) else list(how.tokens or nameless)
        if len(named) != len(parts):
            raise InputError(f"tokens= names the units of {len(named)} inputs, but there are {len(parts)}")
        return [self._sample_of(part, key, names, how) for part, names in zip(parts, named, strict=True)]

    def _sample_of(self, part: dict[str, Tensor], key: str, names: Any, how: How) -> Sample:
        whole = {name: value for name, value in part.items() if name in TEXT}
        text = self._checked(whole, key)
        text = whole if how.padding else text
        sight = self.look_at({name: value for name, value in part.items() if name not in TEXT}, how)
        return self.joined_sample(text, self._named(text, key, names), sight)

    def leaves(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return (*super().leaves(batch), self.sight_leaf)

    def with_mask(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The text's inputs with an attention mask: what is padded must be hidden."""
        length = len(inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"])
        return {"attention_mask": torch.ones(length, dtype=torch.long), **inputs}

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        held = {tuple(sorted(sample.inputs)) for sample in samples}
        if len(held) != 1:
            raise InputError(f"inputs of one batch must hold the same, but hold {' / '.join(map(', '.join, held))}")
        fills = {**dict.fromkeys(TEXT, 0), "input_ids": self.words.pad, **self.fills}
        batch: dict[str, Any] = {}
        for name in samples[0].inputs:
            parts = [sample.inputs[name] for sample in samples]
            if name in fills:
                longest = max(len(part) for part in parts)
                parts = [padded(part, longest, fills[name]) for part in parts]
            stacked = torch.stack(parts).to(self.device)
            stacked = stacked.long() if name.endswith("mask") else stacked
            batch[name] = stacked.to(self.dtype) if stacked.is_floating_point() else stacked
        return batch

    def text_vectors(self, vectors: Mapping[str, Tensor]) -> Float[Tensor, "batch unit feature"]:
        return vectors["input_ids"] if "input_ids" in vectors else vectors["inputs_embeds"]


class BesideRegions(TextBeside):
    """A text beside the regions of a picture, which a detector found."""

    sight = "regions"
    takes: ClassVar[tuple[str, ...]] = ("text", "regions", "image")
    processor_class = "AutoTokenizer"

    @property
    @abstractmethod
    def features(self) -> int:
        """How many numbers describe a region."""

    @abstractmethod
    def region_inputs(self, regions: Regions) -> dict[str, Tensor]:
        """The model's inputs for these regions."""

    def look(self, raw: Given) -> Sight:
        picture = None if raw.image is None else open_picture(raw.image)
        given = raw.regions
        if given is None and picture is None:
            raise InputError(f"{self.name} takes text= and regions=(features, boxes), but was given a text alone")
        if given is None:
            if self.detector is None:
                raise InputError(
                    f"{self.name} reads regions, and there is nothing to find them in the picture with: give "
                    "regions=(features, boxes), or load(…, detector=f) with f(picture) → (features, boxes)"
                )
            given = self.detector(picture)
        regions = read_regions(given, picture)
        count, width = regions.features.shape
        if width != self.features:
            raise InputError(f"{self.name} takes {self.features} features for a region, not {width}")
        return Sight(self.region_inputs(regions), units_of_regions(count, regions.boxes), regions.picture)

    def checked_regions(self, inputs: dict[str, Tensor], mask: str, how: How) -> dict[str, Tensor]:
        """The caller's own regions, made sure of; regions at the end that are hidden are padding, and are cut off."""
        regions = inputs[self.sight_leaf]
        if regions.dim() != 2 or not len(regions) or regions.shape[1] != self.features:
            raise InputError(f"{self.sight_leaf} must be batch × region × {self.features}, not {tuple(regions.shape)}")
        for name in self.fills:
            if name in inputs and len(inputs[name]) != len(regions):
                raise InputError(f"{name} must have the {len(regions)} regions of {self.sight_leaf}")
        inputs = {mask: torch.ones(len(regions), dtype=torch.long), **inputs}
        used = inputs[mask].nonzero().flatten()
        if not len(used):
            raise InputError(f"{mask} hides every region: there is nothing to explain")
        length = len(regions) if how.padding else int(used.max()) + 1
        return {name: value[:length] if name in self.fills else value for name, value in inputs.items()}


class BesidePicture(TextBeside):
    """A text beside a picture, in patches."""

    sight = "image"
    sight_leaf = "pixel_values"
    takes: ClassVar[tuple[str, ...]] = ("text", "image")
    processor_class = "AutoProcessor"

    @property
    def picture_config(self) -> Any:
        return getattr(self.model.config, "vision_config", self.model.config)

    @property
    def patch_size(self) -> tuple[int, int]:
        return pair(self.picture_config.patch_size)

    @property
    def channels(self) -> int:
        return int(getattr(self.picture_config, "num_channels", 3))

    @property
    def readers(self) -> dict[str, tuple[Any, str]]:
        about = {"processor": getattr(self.processor, "image_processor", None), "patch_size": self.patch_size}
        return {"text": (self, "input_ids"), "image": (SimpleNamespace(**about), "pixel_values")}

    def look(self, raw: Given) -> Sight:
        if raw.image is None:
            raise InputError(f"{self.name} takes text= and image=, but was given a text alone")
        if not hasattr(self.processor, "image_processor"):
            raise InputError("the model came without an image processor: give model inputs, or load (model, processor)")
        return self.look_at({"pixel_values": pixels_of(raw.image, self.processor)}, How())

    def look_at(self, inputs: dict[str, Tensor], how: How) -> Sight:
        pixels = inputs["pixel_values"]
        if pixels.dim() != 3 or len(pixels) != self.channels or not pixels.is_floating_point():
            given = f"{tuple(pixels.shape)} of {pixels.dtype}"
            raise InputError(
                f"pixel_values must be batch × {self.channels} × height × width of real numbers, not batch × {given}"
            )
        (high, wide), size = self.patch_size, pixels.shape[1:]
        grid = (size[0] // high, size[1] // wide)
        if not all(grid):
            raise InputError(f"a picture of {size[0]} × {size[1]} pixels does not fall into patches of {high} × {wide}")
        seen = pixels[:, : grid[0] * high, : grid[1] * wide]
        shown = as_seen(seen, getattr(self.processor, "image_processor", None))
        return Sight(inputs, patches(grid, ["[CLS]"]), shown)

    def picture_vectors(self, vectors: Mapping[str, Tensor], samples: Sequence[Sample]) -> Tensor:
        (units,) = (part for axis in samples[0].axes.values() for part in axis.parts if part.stream == "image")
        return in_patches(vectors["pixel_values"], units, self.patch_size)

    def example(self) -> Any:
        size = self.picture_config.image_size
        shape = (1, self.channels, *pair(size))
        pixels = torch.linspace(-3, 3, shape[1] * shape[2] * shape[3]).sin().reshape(shape)
        ids = torch.arange(2, 6)[None] % len(self.embeddings.weight)
        return {"input_ids": ids, "pixel_values": pixels}
