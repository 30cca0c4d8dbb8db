"""Base classes of adapters for models that take a text together with an image or image regions."""

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
    InputOptions,
    ModelAdapter,
    NamedInputs,
    Readout,
    compute_readout_weights,
    list_class_names,
    unbatch_inputs,
    unwrap_base_model,
)
from clearhead.adapters.readers.image import denormalize_image, open_image, patchify, preprocess_image, to_pair
from clearhead.adapters.readers.regions import ImageRegions, make_region_units, read_regions
from clearhead.adapters.readers.text import TokenizerWrapper, pad_to_length
from clearhead.adapters.text import TextAdapter
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import Units, build_patch_units

TEXT_INPUT_NAMES = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")


@dataclass
class VisualInput:
    """What the text is about, ready for the model, and its units."""

    inputs: dict[str, Tensor]
    units: Units
    image: UInt8[np.ndarray, "height width 3"] | None = None


class TextWithVisualAdapter(TextAdapter):
    """A text and what it is about, each by name: `explain(text=…, image=…)` or `explain(text=…, regions=…)`."""

    #: The stream that stands beside the text, and the input that its gradients go to.
    visual_stream: ClassVar[str]
    visual_grad_input_name: ClassVar[str]
    #: The inputs that have one entry for each unit, and what they are padded with.
    pad_values: ClassVar[dict[str, int]] = {}
    #: Classes that could be taken for others, and why they are not explained.
    unsupported_classes: ClassVar[dict[str, str]] = {}
    #: What the outputs of a head are called that has no names for them.
    default_labels: ClassVar[dict[int, str]] = {}

    def __post_init__(self) -> None:
        names = list_class_names(self.model)
        for name in names:
            if name in self.unsupported_classes:
                raise UnsupportedError(f"{name} cannot be explained: {self.unsupported_classes[name]}")
        ModelAdapter.__post_init__(self)  # a text alone would come with a tokenizer alone
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
            given = type(self.processor).__name__
            raise InputError(
                f"{names[0]} also takes texts, but was loaded with a {given}, which has no tokenizer: pass its "
                "processor instead"
            )
        self.embeddings = unwrap_base_model(self.model).get_input_embeddings()  # type: ignore[operator]
        self.tokenizer_wrapper = TokenizerWrapper(
            tokenizer, self.model, "text", getattr(self.model.config, "text_config", None)
        )
        if not self.tokenizer_wrapper.pad_ids and self.embeddings.padding_idx is not None:
            self.tokenizer_wrapper.pad_ids = {self.embeddings.padding_idx}

    def read_config_labels(self) -> dict[int, str]:
        told = super().read_config_labels()
        unnamed = self.default_labels and all(name.startswith("LABEL_") for name in told.values())
        return dict(self.default_labels) if unnamed else told

    @abstractmethod
    def read_visual(self, raw: NamedInputs) -> VisualInput:
        """What the text is about, from what the caller gave."""

    @abstractmethod
    def read_visual_inputs(self, inputs: dict[str, Tensor], options: InputOptions) -> VisualInput:
        """What the text is about, from the caller's own model inputs."""

    @abstractmethod
    def build_joint_sample(
        self, inputs: dict[str, Tensor], units: Units, visual: VisualInput, num_truncated: int = 0
    ) -> Sample:
        """The text and what it is about as one sample."""

    def choose_default_readout(self) -> Readout | None:
        return "first"

    def find_readout_rows(self, sample: Sample, target: Target) -> dict[int, float]:
        return compute_readout_weights(self.readout, sample.axes[self.stream])

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if isinstance(raw, Mapping):
            return self._samples_from_model_inputs(raw, options)
        if not isinstance(raw, NamedInputs) or raw.text is None:
            given = "only " + self.visual_stream if isinstance(raw, NamedInputs) else f"a {type(raw).__name__}"
            raise InputError(
                f"{self.name} takes text= and {self.visual_stream}=, each passed by name, but was given {given}"
            )
        if not isinstance(raw.text, str):
            raise InputError(f"text= must be a text, not a {type(raw.text).__name__}")
        sight = self.read_visual(raw)
        tokens = self.tokenizer_wrapper.encode_texts((raw.text,), options)
        types = getattr(self.tokenizer_wrapper.config, "type_vocab_size", 2)
        if types < 2 or not self.forward_accepts("token_type_ids"):
            tokens.inputs.pop("token_type_ids", None)
        return [self.build_joint_sample(tokens.inputs, tokens.units, sight, tokens.num_truncated)]

    def _samples_from_model_inputs(self, raw: Mapping[str, Any], how: InputOptions) -> list[Sample]:
        key = "inputs_embeds" if raw.get("input_ids") is None else "input_ids"
        if raw.get(key) is None or raw.get(self.visual_grad_input_name) is None:
            held = ", ".join(raw) or "nothing"
            raise InputError(
                f"model inputs must contain input_ids and {self.visual_grad_input_name}, but contain {held}"
            )
        parts = unbatch_inputs(self, raw)
        nameless: list[Any] = [None] * len(parts)
        named = (
            [how.unit_names]
            if how.unit_names and isinstance(how.unit_names[0], str)
            else list(how.unit_names or nameless)
        )
        if len(named) != len(parts):
            raise InputError(f"tokens= names the units of {len(named)} inputs, but there are {len(parts)}")
        return [self._sample_from_model_inputs(part, key, names, how) for part, names in zip(parts, named, strict=True)]

    def _sample_from_model_inputs(self, part: dict[str, Tensor], key: str, names: Any, how: InputOptions) -> Sample:
        whole = {name: value for name, value in part.items() if name in TEXT_INPUT_NAMES}
        text = self._validate_inputs(whole, key)
        text = whole if how.keep_padding else text
        sight = self.read_visual_inputs(
            {name: value for name, value in part.items() if name not in TEXT_INPUT_NAMES}, how
        )
        return self.build_joint_sample(text, self._build_units(text, key, names), sight)

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return (*super().find_grad_input_names(batch), self.visual_grad_input_name)

    def add_attention_mask(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The text's inputs with an attention mask: what is padded must be hidden."""
        length = len(inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"])
        return {"attention_mask": torch.ones(length, dtype=torch.long), **inputs}

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        held = {tuple(sorted(sample.inputs)) for sample in samples}
        if len(held) != 1:
            raise InputError(
                f"the inputs of one batch must contain the same tensors, but contain {' / '.join(map(', '.join, held))}"
            )
        fills = {**dict.fromkeys(TEXT_INPUT_NAMES, 0), "input_ids": self.tokenizer_wrapper.pad_id, **self.pad_values}
        batch: dict[str, Any] = {}
        for name in samples[0].inputs:
            parts = [sample.inputs[name] for sample in samples]
            if name in fills:
                longest = max(len(part) for part in parts)
                parts = [pad_to_length(part, longest, fills[name]) for part in parts]
            stacked = torch.stack(parts).to(self.device)
            stacked = stacked.long() if name.endswith("mask") else stacked
            batch[name] = stacked.to(self.dtype) if stacked.is_floating_point() else stacked
        return batch

    def select_text_vectors(self, vectors: Mapping[str, Tensor]) -> Float[Tensor, "batch unit feature"]:
        return vectors["input_ids"] if "input_ids" in vectors else vectors["inputs_embeds"]


class TextWithRegionsAdapter(TextWithVisualAdapter):
    """A text beside the regions of a picture, which a detector found."""

    visual_stream = "regions"
    input_names: ClassVar[tuple[str, ...]] = ("text", "regions", "image")
    processor_class = "AutoTokenizer"

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        return {"text": (self, "input_ids"), "regions": (self, self.visual_grad_input_name)}

    @property
    def region_input_names(self) -> tuple[str, ...]:
        """The model's inputs with one row for each region."""
        return tuple(self.pad_values)

    @property
    @abstractmethod
    def region_feature_size(self) -> int:
        """How many numbers describe a region."""

    @abstractmethod
    def build_region_inputs(self, regions: ImageRegions) -> dict[str, Tensor]:
        """The model's inputs for these regions."""

    def read_visual(self, raw: NamedInputs) -> VisualInput:
        picture = None if raw.image is None else open_image(raw.image)
        given = raw.regions
        if given is None and picture is None:
            raise InputError(f"{self.name} takes text= and regions=(features, boxes), but was given only a text")
        if given is None:
            if self.region_detector is None:
                raise InputError(
                    f"{self.name} takes regions, but has no detector to find them in the image: pass "
                    "regions=(features, boxes), or load(…, detector=f) with f(image) → (features, boxes)"
                )
            given = self.region_detector(picture)
        regions = read_regions(given, picture)
        count, width = regions.features.shape
        if width != self.region_feature_size:
            raise InputError(f"{self.name} takes {self.region_feature_size} features per region, not {width}")
        return VisualInput(self.build_region_inputs(regions), make_region_units(count, regions.boxes), regions.image)

    def validate_region_inputs(
        self, inputs: dict[str, Tensor], mask_name: str, options: InputOptions
    ) -> dict[str, Tensor]:
        """The caller's own regions, made sure of; regions at the end that are hidden are padding, and are cut off."""
        regions = inputs[self.visual_grad_input_name]
        if regions.dim() != 2 or not len(regions) or regions.shape[1] != self.region_feature_size:
            raise InputError(
                f"{self.visual_grad_input_name} must be batch × region × {self.region_feature_size}, not "
                f"{tuple(regions.shape)}"
            )
        for name in self.pad_values:
            if name in inputs and len(inputs[name]) != len(regions):
                raise InputError(
                    f"{name} must have one row for each of the {len(regions)} regions of {self.visual_grad_input_name}"
                )
        inputs = {mask_name: torch.ones(len(regions), dtype=torch.long), **inputs}
        used = inputs[mask_name].nonzero().flatten()
        if not len(used):
            raise InputError(f"{mask_name} excludes every region: there is nothing to explain")
        length = len(regions) if options.keep_padding else int(used.max()) + 1
        return {name: value[:length] if name in self.pad_values else value for name, value in inputs.items()}


class TextWithImageAdapter(TextWithVisualAdapter):
    """A text beside a picture, in patches."""

    visual_stream = "image"
    visual_grad_input_name = "pixel_values"
    input_names: ClassVar[tuple[str, ...]] = ("text", "image")
    processor_class = "AutoProcessor"

    @property
    def vision_config(self) -> Any:
        return getattr(self.model.config, "vision_config", self.model.config)

    @property
    def patch_size(self) -> tuple[int, int]:
        return to_pair(self.vision_config.patch_size)

    @property
    def num_channels(self) -> int:
        return int(getattr(self.vision_config, "num_channels", 3))

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        about = {"processor": getattr(self.processor, "image_processor", None), "patch_size": self.patch_size}
        return {"text": (self, "input_ids"), "image": (SimpleNamespace(**about), "pixel_values")}

    def read_visual(self, raw: NamedInputs) -> VisualInput:
        if raw.image is None:
            raise InputError(f"{self.name} takes text= and image=, but was given only a text")
        if not hasattr(self.processor, "image_processor"):
            raise InputError(
                "the model was loaded without an image processor: pass model inputs, or load (model, processor)"
            )
        return self.read_visual_inputs({"pixel_values": preprocess_image(raw.image, self.processor)}, InputOptions())

    def read_visual_inputs(self, inputs: dict[str, Tensor], options: InputOptions) -> VisualInput:
        pixels = inputs["pixel_values"]
        if pixels.dim() != 3 or len(pixels) != self.num_channels or not pixels.is_floating_point():
            given = f"{tuple(pixels.shape)} of {pixels.dtype}"
            raise InputError(
                f"pixel_values must be batch × {self.num_channels} × height × width of real numbers, not batch × "
                f"{given}"
            )
        (high, wide), size = self.patch_size, pixels.shape[1:]
        grid = (size[0] // high, size[1] // wide)
        if not all(grid):
            raise InputError(
                f"an image of {size[0]} × {size[1]} pixels cannot be divided into patches of {high} × {wide}"
            )
        seen = pixels[:, : grid[0] * high, : grid[1] * wide]
        shown = denormalize_image(seen, getattr(self.processor, "image_processor", None))
        return VisualInput(inputs, build_patch_units(grid, ["[CLS]"]), shown)

    def gather_image_vectors(self, vectors: Mapping[str, Tensor], samples: Sequence[Sample]) -> Tensor:
        (units,) = (part for axis in samples[0].axes.values() for part in axis.unit_groups if part.stream == "image")
        return patchify(vectors["pixel_values"], units, self.patch_size)

    def make_example_input(self) -> Any:
        size = self.vision_config.image_size
        shape = (1, self.num_channels, *to_pair(size))
        pixels = torch.linspace(-3, 3, shape[1] * shape[2] * shape[3]).sin().reshape(shape)
        ids = torch.arange(2, 6)[None] % len(self.embeddings.weight)
        return {"input_ids": ids, "pixel_values": pixels}
