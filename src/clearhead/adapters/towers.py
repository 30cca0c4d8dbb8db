"""Adapters for the text tower and the image tower of a dual encoder: their inputs and their read-out positions."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import (
    InputOptions,
    ModelAdapter,
    Readout,
    compute_readout_weights,
    unbatch_inputs,
    unwrap_base_model,
)
from clearhead.adapters.image import ImageAdapter, PatchLayout, find_patch_layout
from clearhead.adapters.readers.image import denormalize_image, open_image
from clearhead.adapters.text import TextAdapter
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import build_patch_units

#: Where text towers are pooled, by their kind; all others are at their first token.
END_OF_TEXT, LAST_POSITION = "end of text", "last position"
_TEXT_TOWER_READOUTS = {
    **dict.fromkeys(("clip_text_model", "metaclip_2_text_model"), END_OF_TEXT),
    **dict.fromkeys(("siglip_text_model", "siglip2_text_model"), LAST_POSITION),
}
#: Picture towers with a class token that goes by another name than elsewhere.
_VISION_MODEL_TYPES_WITH_CLASS_TOKEN = tuple(
    f"{name}_vision_model" for name in ("clip", "altclip", "chinese_clip", "metaclip_2")
)
#: A learned query that looks at all patches pools them.
POOLING_PROBE = "probe"


class Tower(ModelAdapter):
    """A tower that is called by the model around it, which passes on only what it knows."""

    forwarded_arguments: frozenset[str] | None = None

    def get_main_input_name(self) -> str:
        # In transformers 5.0 SigLIP's tower for pictures says that it takes words, and CLIP's say nothing.
        return self.grad_input_name

    def forward_accepts(self, argument: str) -> bool:
        return super().forward_accepts(argument) and (
            self.forwarded_arguments is None or argument in self.forwarded_arguments
        )


class TextTower(Tower, TextAdapter):
    """The text tower: CLIP's is causal and pooled at the end of the text, SigLIP's at its last position, be it padding,
    the others at their first token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.readout == END_OF_TEXT:
            self.tokenizer_wrapper.pad_id = 0  # never the highest number; nothing that is read looks at it

    @property
    def model_type(self) -> str:
        return str(getattr(self.model.config, "model_type", ""))

    def choose_default_readout(self) -> Readout | None:
        return _TEXT_TOWER_READOUTS.get(self.model_type, "first")

    def find_readout_rows(self, sample: Sample, target: Target | None = None) -> dict[int, float]:
        if self.readout == END_OF_TEXT:
            return {self._find_eos_position(sample.inputs["input_ids"]): 1.0}
        return compute_readout_weights("first" if self.readout == "first" else "last", sample.axes[self.stream])

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if not isinstance(raw, str | Mapping):
            raise InputError(
                f"expected one text, but got {type(raw).__name__} ({raw!r:.40}); to contrast it with another text, "
                "pass target=clearhead.Contrast(None, other)"
            )
        samples = super().make_samples(raw, options)
        if isinstance(raw, Mapping):
            return samples
        if self.readout == END_OF_TEXT and any(
            self._find_eos_position(one.inputs["input_ids"]) + 1 != len(one.units) for one in samples
        ):
            raise InputError("the text contains an end-of-text token, at which CLIP stops reading: remove it")
        return [self._pad_to_max_length(sample) for sample in samples]

    def _remove_padding(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.readout == LAST_POSITION:
            return part  # what is read is padding, as a rule
        if self.readout != END_OF_TEXT:
            return super()._remove_padding(part)
        length = self._find_eos_position(part["input_ids"]) + 1  # nothing that comes after the end is looked at
        return {name: value[:length] for name, value in part.items()}

    @property
    def eos_is_highest_id(self) -> bool:
        """Old files of CLIP have a wrong number for the end of a text, 2: then it is taken to be the highest."""
        return self.model_type == "clip_text_model" and self.model.config.eos_token_id == 2

    def _find_eos_position(self, ids: Tensor) -> int:
        """Where CLIP pools: at the first end-of-text token."""
        end = self.model.config.eos_token_id
        if self.eos_is_highest_id:
            return int(ids.argmax())
        found = (ids == end).nonzero().flatten()
        if not len(found):
            raise InputError(
                f"the text has no end-of-text token (id {end}), which is the read-out position of "
                f"{type(self.model).__name__}: let its tokenizer add the special tokens"
            )
        return int(found[0])

    def _pad_to_max_length(self, sample: Sample) -> Sample:
        """SigLIP reads texts of one length: the padding is part of what it reads."""
        inputs, units, pad = sample.inputs, sample.units, self.tokenizer_wrapper.get_special_token_id("pad")
        count = self.tokenizer_wrapper.max_length - len(units)
        if self.readout != LAST_POSITION or not count:
            return sample
        if pad is None:
            raise InputError(
                "the tokenizer has no padding token, but SigLIP pads all texts to one length: set tokenizer.pad_token"
            )
        fills = {name: pad if name == "input_ids" else 0 for name in inputs}
        longer = {name: torch.cat([part, part.new_full((count,), fills[name])]) for name, part in inputs.items()}
        name = str(self.tokenizer_wrapper.call_tokenizer("convert_ids_to_tokens", pad))
        whole = replace(
            units,
            names=(*units.names, *[name] * count),
            special=(*units.special, *[True] * count),
            segments=None if units.segments is None else (*units.segments, *[0] * count),
            offsets=None if units.offsets is None else (*units.offsets, *[(0, 0)] * count),
        )
        return Sample.from_units(longer, whole, num_truncated=sample.num_truncated)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        lengths = {len(sample.units) for sample in samples}
        if self.readout == LAST_POSITION and len(lengths) > 1:
            raise InputError(
                f"{type(self.model).__name__} reads the last position, so the input_ids of one batch must have the "
                f"same length, not {sorted(lengths)}: pad them to {self.tokenizer_wrapper.max_length} tokens, or pass "
                "texts"
            )
        return super().collate(samples)


class ImageTower(Tower, ImageAdapter):
    """The picture tower, pooled at its class token, at a query that looks at all patches (SigLIP), or at their mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.readout is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} attends within windows or on shrinking grids, so no attention map covers "
                "the image"
            )

    @property
    def patch_layout(self) -> PatchLayout:
        if self.model_type in _VISION_MODEL_TYPES_WITH_CLASS_TOKEN:
            return PatchLayout(("[CLS]",), "first")
        if self.model_type.startswith("siglip"):
            return PatchLayout((), POOLING_PROBE)
        known = find_patch_layout(self.model)
        return replace(known, readout="first") if known.readout == "first + patches" else known

    def find_readout_rows(self, sample: Sample, target: Target | None = None) -> dict[int, float]:
        return compute_readout_weights(self.readout, sample.axes[self.stream])


class NaflexImageTower(ImageTower):
    """SigLIP 2's picture tower: the processor cuts a picture of any shape into patches, and pads them."""

    MODEL_INPUT_NAMES = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def forward_accepts(self, argument: str) -> bool:
        # In transformers 5.0 the tower itself knows the mask as attention_mask; the model around it does not.
        return argument in self.MODEL_INPUT_NAMES

    def make_example_input(self) -> Any:
        side = 4
        patch = self.num_channels * self.patch_size[0] * self.patch_size[1]
        values = torch.linspace(-3, 3, side * side * patch).sin().reshape(1, side * side, patch)
        return {"pixel_values": values, "spatial_shapes": torch.tensor([[side, side]])}

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if isinstance(raw, Mapping):
            return [self._build_sample(part) for part in unbatch_inputs(self, raw)]
        if self.processor is None:
            raise InputError(
                "the model was loaded without an image processor: pass pixel_values, or load (model, processor)"
            )
        made = self.processor(images=open_image(raw), return_tensors="np")
        return [
            self._build_sample({name: torch.as_tensor(np.asarray(made[name][0])) for name in self.MODEL_INPUT_NAMES})
        ]

    def _build_sample(self, inputs: dict[str, Tensor]) -> Sample:
        missing = [name for name in ("pixel_values", "spatial_shapes") if name not in inputs]
        if missing:
            raise InputError(
                f"model inputs must contain {', '.join(missing)}, as returned by the model's image processor"
            )
        (high, wide), (rows, columns) = self.patch_size, inputs["spatial_shapes"].tolist()
        count, width = rows * columns, self.num_channels * high * wide
        pixels = inputs["pixel_values"]
        if pixels.dim() != 2 or len(pixels) < count or pixels.shape[1] != width:
            raise InputError(
                f"pixel_values must be batch × at least {count} patches × {width}, not batch × {tuple(pixels.shape)}"
            )
        pixels = pixels[:count]  # what follows is padding
        shown = pixels.reshape(rows, columns, high, wide, self.num_channels).permute(4, 0, 2, 1, 3)
        picture = denormalize_image(shown.reshape(self.num_channels, rows * high, columns * wide), self.processor)
        kept = {"pixel_values": pixels, "spatial_shapes": inputs["spatial_shapes"]}
        return Sample.from_units(kept, build_patch_units((rows, columns)), image=picture)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Pictures of one grid share a batch, so that there is no padding."""
        parts = {name: torch.stack([sample.inputs[name] for sample in samples]) for name in samples[0].inputs}
        pixels = parts["pixel_values"].to(self.device, self.dtype)
        seen = torch.ones(pixels.shape[:2], dtype=torch.long, device=self.device)
        shapes = parts["spatial_shapes"].to(self.device)
        return {"pixel_values": pixels, "pixel_attention_mask": seen, "spatial_shapes": shapes}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {self.stream: vectors["pixel_values"]}


def split_towers(model: Any, tokenizer: Any, image_processor: Any) -> tuple[TextTower, ImageTower]:
    """Both towers of a dual encoder."""
    inside: Any = unwrap_base_model(model)
    text, image = inside.text_model, inside.vision_model
    patched = str(getattr(image.config, "model_type", "")) == "siglip2_vision_model"
    texts, images = TextTower(text, tokenizer), (NaflexImageTower if patched else ImageTower)(image, image_processor)
    texts.forwarded_arguments = images.forwarded_arguments = frozenset(inspect.signature(inside.forward).parameters)
    return texts, images
