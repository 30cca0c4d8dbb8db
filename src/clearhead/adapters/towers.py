"""The two halves of a dual encoder, each as a subject of its own: how a tower reads its input, where it is pooled."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import How, Readout, Sample, Subject, base_model, read_rows, split_mapping
from clearhead.adapters.image import ImageSubject, Layout, layout_of
from clearhead.adapters.readers.image import as_seen, open_picture
from clearhead.adapters.text import TextSubject
from clearhead.errors import InputError, Refusal
from clearhead.targets import Target
from clearhead.units import patches

#: Where text towers are pooled, by their kind; all others are at their first token.
END, LAST = "end of text", "last position"
_TEXT = {
    **dict.fromkeys(("clip_text_model", "metaclip_2_text_model"), END),
    **dict.fromkeys(("siglip_text_model", "siglip2_text_model"), LAST),
}
#: Picture towers with a class token that goes by another name than elsewhere.
_CLASS_TOKEN = tuple(f"{name}_vision_model" for name in ("clip", "altclip", "chinese_clip", "metaclip_2"))
#: A learned query that looks at all patches pools them.
POOLED = "probe"


class Half(Subject):
    """A tower that is called by the model around it, which passes on only what it knows."""

    passed: frozenset[str] | None = None

    def main_input(self) -> str:
        # In transformers 5.0 SigLIP's tower for pictures says that it takes words, and CLIP's say nothing.
        return self.leaf

    def accepts(self, argument: str) -> bool:
        return super().accepts(argument) and (self.passed is None or argument in self.passed)


class TextHalf(Half, TextSubject):
    """The text tower: CLIP's is causal and pooled at the end of the text, SigLIP's at its last position, be it padding,
    the others at their first token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.readout == END:
            self.words.pad = 0  # never the highest number; nothing that is read looks at it

    @property
    def kind(self) -> str:
        return str(getattr(self.model.config, "model_type", ""))

    def default_readout(self) -> Readout | None:
        return _TEXT.get(self.kind, "first")

    def rows(self, sample: Sample, target: Target | None = None) -> dict[int, float]:
        if self.readout == END:
            return {self._end(sample.inputs["input_ids"]): 1.0}
        return read_rows("first" if self.readout == "first" else "last", sample.axes[self.stream])

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if not isinstance(raw, str | Mapping):
            raise InputError(
                f"expected one text, but got {type(raw).__name__} ({raw!r:.40}); for one text against another give "
                "target=clearhead.Contrast(None, other)"
            )
        samples = super().samples(raw, how)
        if isinstance(raw, Mapping):
            return samples
        if self.readout == END and any(self._end(one.inputs["input_ids"]) + 1 != len(one.units) for one in samples):
            raise InputError("there is an end-of-text token inside the text, at which CLIP stops reading: leave it out")
        return [self._filled(sample) for sample in samples]

    def _without_padding(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.readout == LAST:
            return part  # what is read is padding, as a rule
        if self.readout != END:
            return super()._without_padding(part)
        length = self._end(part["input_ids"]) + 1  # nothing that comes after the end is looked at
        return {name: value[:length] for name, value in part.items()}

    @property
    def ends_at_highest(self) -> bool:
        """Old files of CLIP have a wrong number for the end of a text, 2: then it is taken to be the highest."""
        return self.kind == "clip_text_model" and self.model.config.eos_token_id == 2

    def _end(self, ids: Tensor) -> int:
        """Where CLIP pools: at the first end-of-text token."""
        end = self.model.config.eos_token_id
        if self.ends_at_highest:
            return int(ids.argmax())
        found = (ids == end).nonzero().flatten()
        if not len(found):
            raise InputError(
                f"the text has no end-of-text token (number {end}), at which {type(self.model).__name__} is read: let "
                "its tokenizer add the special tokens"
            )
        return int(found[0])

    def _filled(self, sample: Sample) -> Sample:
        """SigLIP reads texts of one length: the padding is part of what it reads."""
        inputs, units, pad = sample.inputs, sample.units, self.words.token_id("pad")
        count = self.words.longest - len(units)
        if self.readout != LAST or not count:
            return sample
        if pad is None:
            raise InputError("the tokenizer has no padding token, which SigLIP fills up texts with: set one")
        fills = {name: pad if name == "input_ids" else 0 for name in inputs}
        longer = {name: torch.cat([part, part.new_full((count,), fills[name])]) for name, part in inputs.items()}
        name = str(self.words.ask("convert_ids_to_tokens", pad))
        whole = replace(
            units,
            names=(*units.names, *[name] * count),
            special=(*units.special, *[True] * count),
            segments=None if units.segments is None else (*units.segments, *[0] * count),
            offsets=None if units.offsets is None else (*units.offsets, *[(0, 0)] * count),
        )
        return Sample.of(longer, whole, dropped=sample.dropped)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        lengths = {len(sample.units) for sample in samples}
        if self.readout == LAST and len(lengths) > 1:
            raise InputError(
                f"{type(self.model).__name__} is read at its last position, so input_ids of one batch must be equally "
                f"long, not {sorted(lengths)}: pad them to {self.words.longest} tokens, or give texts"
            )
        return super().collate(samples)


class ImageHalf(Half, ImageSubject):
    """The picture tower, pooled at its class token, at a query that looks at all patches (SigLIP), or at their mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.readout is None:
            raise Refusal(
                f"{type(self.model).__name__} is no picture tower whose attention covers the picture: it attends in "
                "windows, or on grids that shrink"
            )

    @property
    def layout(self) -> Layout:
        if self.kind in _CLASS_TOKEN:
            return Layout(("[CLS]",), "first")
        if self.kind.startswith("siglip"):
            return Layout((), POOLED)
        known = layout_of(self.model)
        return replace(known, readout="first") if known.readout == "first + patches" else known

    def rows(self, sample: Sample, target: Target | None = None) -> dict[int, float]:
        return read_rows(self.readout, sample.axes[self.stream])


class PatchedHalf(ImageHalf):
    """SigLIP 2's picture tower: the processor cuts a picture of any shape into patches, and pads them."""

    NAMES = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def accepts(self, argument: str) -> bool:
        # In transformers 5.0 the tower itself knows the mask as attention_mask; the model around it does not.
        return argument in self.NAMES

    def example(self) -> Any:
        side = 4
        patch = self.channels * self.patch_size[0] * self.patch_size[1]
        values = torch.linspace(-3, 3, side * side * patch).sin().reshape(1, side * side, patch)
        return {"pixel_values": values, "spatial_shapes": torch.tensor([[side, side]])}

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if isinstance(raw, Mapping):
            return [self._sample(part) for part in split_mapping(self, raw)]
        if self.processor is None:
            raise InputError("the model came without an image processor: give pixel_values, or load (model, processor)")
        made = self.processor(images=open_picture(raw), return_tensors="np")
        return [self._sample({name: torch.as_tensor(np.asarray(made[name][0])) for name in self.NAMES})]

    def _sample(self, inputs: dict[str, Tensor]) -> Sample:
        missing = [name for name in ("pixel_values", "spatial_shapes") if name not in inputs]
        if missing:
            raise InputError(f"model inputs need {', '.join(missing)} as its image processor makes them")
        (high, wide), (rows, columns) = self.patch_size, inputs["spatial_shapes"].tolist()
        count, width = rows * columns, self.channels * high * wide
        pixels = inputs["pixel_values"]
        if pixels.dim() != 2 or len(pixels) < count or pixels.shape[1] != width:
            raise InputError(
                f"pixel_values must be batch × at least {count} patches × {width}, not batch × {tuple(pixels.shape)}"
            )
        pixels = pixels[:count]  # what follows is padding
        shown = pixels.reshape(rows, columns, high, wide, self.channels).permute(4, 0, 2, 1, 3)
        picture = as_seen(shown.reshape(self.channels, rows * high, columns * wide), self.processor)
        kept = {"pixel_values": pixels, "spatial_shapes": inputs["spatial_shapes"]}
        return Sample.of(kept, patches((rows, columns)), picture=picture)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Pictures of one grid share a batch, so that there is no padding."""
        parts = {name: torch.stack([sample.inputs[name] for sample in samples]) for name in samples[0].inputs}
        pixels = parts["pixel_values"].to(self.device, self.dtype)
        seen = torch.ones(pixels.shape[:2], dtype=torch.long, device=self.device)
        shapes = parts["spatial_shapes"].to(self.device)
        return {"pixel_values": pixels, "pixel_attention_mask": seen, "spatial_shapes": shapes}

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {self.stream: vectors["pixel_values"]}


def halves_of(model: Any, tokenizer: Any, image_processor: Any) -> tuple[TextHalf, ImageHalf]:
    """Both towers of a dual encoder."""
    inside: Any = base_model(model)
    text, image = inside.text_model, inside.vision_model
    patched = str(getattr(image.config, "model_type", "")) == "siglip2_vision_model"
    texts, images = TextHalf(text, tokenizer), (PatchedHalf if patched else ImageHalf)(image, image_processor)
    texts.passed = images.passed = frozenset(inspect.signature(inside.forward).parameters)
    return texts, images
