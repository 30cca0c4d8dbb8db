"""Pictures: classifiers whose units are patches. The grid comes from the model and the picture, never from a root."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import (
    How,
    Readout,
    Sample,
    Subject,
    base_model,
    class_names,
    register_subject,
    split_mapping,
)
from clearhead.adapters.readers.image import as_seen, in_patches, pair, pixels_of
from clearhead.capture.checks.self_test import expected_calls
from clearhead.errors import InputError, Refusal
from clearhead.targets import Target
from clearhead.units import patches


@dataclass(frozen=True)
class Layout:
    """The tokens that stand before the patches, and which rows the classifier reads."""

    before: tuple[str, ...]
    readout: Readout | None


def layout_of(model: Any) -> Layout:
    """How a picture becomes a row of tokens in this architecture."""
    config, names = model.config, class_names(model)
    kind = getattr(config, "model_type", "")
    registers = tuple(f"[REG{i}]" for i in range(getattr(config, "num_register_tokens", 0) or 0))
    first = any(parameter.endswith("cls_token") for parameter, _ in model.named_parameters())
    if kind == "deit":
        return Layout(("[CLS]", "[DIST]"), "first two" if "DeiTForImageClassificationWithTeacher" in names else "first")
    if kind in ("beit", "data2vec-vision"):
        return Layout(("[CLS]",), "patches" if config.use_mean_pooling else "first")
    if kind in ("dinov2", "dinov2_with_registers"):
        return Layout(
            ("[CLS]", *registers),
            "first + patches" if any(name.endswith("Classification") for name in names) else "first",
        )
    if kind == "dinov3_vit":
        return Layout(("[CLS]", *registers), "first + patches")
    if kind in DUAL:
        return Layout(("[CLS]",) if DUAL[kind] else (), "patches")
    if kind in ("swin", "swinv2"):
        # Attention stays inside shifted windows whose grid shrinks: no row of it covers the picture.
        return Layout((), None)
    return Layout(("[CLS]", *registers) if first else (), "first" if first else "patches")


#: The picture halves of dual encoders, as classifiers: whether a class token stands before the patches. It is not read.
DUAL = {"clip": True, "metaclip_2": True, "siglip": False}
#: Models that take pictures of any size as they are, without being asked to interpolate their positions.
_ANY_SIZE = ("dinov2", "dinov2_with_registers", "dinov3_vit", "swin", "swinv2")


def grid_of(pixels: Tensor, channels: int, size: tuple[int, int]) -> tuple[int, int]:
    """How many patches of this size a picture has, made sure that it is one."""
    if pixels.dim() != 3:
        raise InputError(f"pixel_values must be batch × channel × height × width, not batch × {tuple(pixels.shape)}")
    if len(pixels) != channels or not pixels.is_floating_point():
        given = f"{len(pixels)} channels of {pixels.dtype}"
        raise InputError(f"pixel_values must have {channels} channels of real numbers, not {given}")
    grid = (pixels.shape[1] // size[0], pixels.shape[2] // size[1])
    if not all(grid):
        picture, patch = (" × ".join(map(str, part)) for part in (pixels.shape[1:], size))
        raise InputError(f"a picture of {picture} pixels does not fall into patches of {patch}")
    return grid


class ImageSubject(Subject):
    """What all models of pictures share: pixels in, patches as units."""

    stream = "image"
    leaf = "pixel_values"
    takes = ("image",)
    processor_class = "AutoImageProcessor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if hasattr(self.processor, "convert_ids_to_tokens"):
            given, name = type(self.processor).__name__, type(self.model).__name__
            raise InputError(f"{name} takes pictures, but came with a tokenizer ({given}): give its image processor")
        if self.sizes is not self.model.config and self.kind not in DUAL:
            known = ", ".join(DUAL)
            raise Refusal(
                f"{type(self.model).__name__} is half of a dual encoder, and how it reads its patches is not known: of "
                f"these halves clearhead explains those of {known}"
            )
        size = getattr(self.sizes, "image_size", None)
        if self.kind.startswith("dinov2") and size is not None and len(set(pair(size))) > 1:
            raise Refusal(
                f"{type(self.model).__name__} takes the root of its number of patches, so config.image_size={size} "
                "cannot run: keep it square (pictures may be of any shape)"
            )

    @property
    def kind(self) -> str:
        return str(getattr(self.model.config, "model_type", ""))

    @property
    def sizes(self) -> Any:
        """The configuration that says how large pictures and patches are."""
        config = self.model.config
        half = hasattr(config, "vision_config") and not hasattr(config, "patch_size")
        return config.vision_config if half else config

    def streams_of(self, module: str, nth: int) -> tuple[str, str] | None:
        # SigLIP's pooling head runs in its classifier, too, but the classes do not depend on it.
        unread = self.kind in DUAL and module.endswith("head.attention")
        return None if unread else super().streams_of(module, nth)

    def expected_calls(self) -> int | None:
        return expected_calls(self.sizes)

    def default_readout(self) -> Readout | None:
        return self.layout.readout

    @property
    def layout(self) -> Layout:
        return layout_of(self.model)

    def example(self) -> Any:
        shape = (1, self.channels, *pair(getattr(self.sizes, "image_size", 32)))
        # Not a blank picture: where all patches are alike, any attention gives the same output, and nothing is tested.
        return {"pixel_values": torch.linspace(-3, 3, math.prod(shape)).sin().reshape(shape)}

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if how.tokens is not None:
            raise InputError("tokens= names tokens of text; a picture's patches have their places as names")
        if isinstance(raw, Mapping):
            return self._given(raw)
        if self.processor is None:
            raise InputError("the model came without an image processor: give pixel_values, or load (model, processor)")
        return [self._sample({"pixel_values": pixels_of(raw, self.processor)})]

    def _given(self, raw: Mapping[str, Any]) -> list[Sample]:
        if "pixel_values" not in raw:
            raise InputError(f"model inputs need pixel_values, but hold {', '.join(raw) or 'nothing'}")
        return [self._sample(part) for part in split_mapping(self, raw)]

    def _sample(self, inputs: dict[str, Tensor]) -> Sample:
        pixels = inputs["pixel_values"]
        grid = grid_of(pixels, self.channels, self.patch_size)
        (high, wide), size = self.patch_size, (pixels.shape[1], pixels.shape[2])
        if self.kind.startswith("swin") and (size[0] % high or size[1] % wide):
            raise InputError(f"a picture of {size[0]} × {size[1]} pixels does not fall into patches of {high} × {wide}")
        if self._interpolates(size) and not self.accepts("interpolate_pos_encoding") and self.kind not in _ANY_SIZE:
            expected = " × ".join(map(str, pair(self.sizes.image_size)))
            raise InputError(f"the model takes pictures of {expected} pixels, not {size[0]} × {size[1]}")
        # Pixels beyond the last whole patch are not read by the model, so they are not part of the picture it saw.
        seen = pixels[:, : grid[0] * high, : grid[1] * wide]
        return Sample.of(inputs, patches(grid, self.layout.before), picture=as_seen(seen, self.processor))

    def _interpolates(self, size: tuple[int, int]) -> bool:
        expected = getattr(self.sizes, "image_size", None)
        return expected is not None and pair(expected) != size

    @property
    def channels(self) -> int:
        return int(getattr(self.sizes, "num_channels", 3))

    @property
    def patch_size(self) -> tuple[int, int]:
        size = getattr(self.sizes, "patch_size", None)
        if size is None:
            raise Refusal(
                f"{type(self.model).__name__} has no patches (patch_size in its configuration), so it seems to be a "
                "model without attention: clearhead explains transformers"
            )
        return pair(size)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        shapes = {tuple(sample.inputs["pixel_values"].shape) for sample in samples}
        if len(shapes) != 1:
            raise InputError(f"pictures of one batch must have one size, but have {sorted(shapes)}")
        names = samples[0].inputs
        batch = {name: torch.stack([sample.inputs[name] for sample in samples]) for name in names}
        batch = {name: part.to(self.device) for name, part in batch.items()}
        batch["pixel_values"] = batch["pixel_values"].to(self.dtype)
        high, wide = batch["pixel_values"].shape[2:]
        if self._interpolates((high, wide)) and self.accepts("interpolate_pos_encoding"):
            return {**batch, "interpolate_pos_encoding": True}
        return batch

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch channel height width']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {self.stream: in_patches(vectors["pixel_values"], samples[0].units, self.patch_size)}


@register_subject
class ImageClassification(ImageSubject):
    """One picture, one class (or several)."""

    endings: ClassVar[tuple[str, ...]] = ("ForImageClassification", "ForImageClassificationWithTeacher")


@register_subject
class MaskedAutoencoder(ImageSubject):
    """ViT-MAE drops and shuffles patches at random on each pass: only a full, unshuffled pass can be explained."""

    endings: ClassVar[tuple[str, ...]] = ("ViTMAEModel", "ViTMAEForPreTraining")

    def __post_init__(self) -> None:
        if type(base_model(self.model)).__name__.endswith("ForPreTraining"):
            raise Refusal("ViTMAEForPreTraining rebuilds pictures with a decoder: explain its encoder, load(model.vit)")
        super().__post_init__()

    def samples(self, raw: Any, how: How) -> list[Sample]:
        self._require_determinism(raw)
        return super().samples(raw, how)

    def _require_determinism(self, raw: Any) -> None:
        noise = raw.get("noise") if isinstance(raw, Mapping) else None
        in_order = noise is not None and bool((torch.as_tensor(noise).diff(dim=-1) > 0).all())
        if self.model.config.mask_ratio != 0 or not in_order:
            raise Refusal(
                f"{type(self.model).__name__} drops and shuffles patches at random on each pass: set "
                "config.mask_ratio = 0 and give model inputs with an increasing noise= (so that every patch keeps its "
                "place), and a target function"
            )

    def example(self) -> Any:
        (high, wide), (rows, columns) = pair(self.model.config.image_size), self.patch_size
        count = (high // rows) * (wide // columns)
        return {**super().example(), "noise": torch.arange(count)[None] / count}

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        raise InputError(f"{type(self.model).__name__} has no classes: give target= a function of its output")
