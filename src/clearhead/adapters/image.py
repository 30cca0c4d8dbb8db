"""Adapters for image models with patches as units; the grid is computed from the patch size and the image size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import (
    InputOptions,
    ModelAdapter,
    Readout,
    list_class_names,
    register_adapter,
    unbatch_inputs,
    unwrap_base_model,
)
from clearhead.adapters.readers.image import denormalize_image, patchify, preprocess_image, to_pair
from clearhead.capture.checks.self_test import count_calls_from_config
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import build_patch_units


@dataclass(frozen=True)
class PatchLayout:
    """The tokens that stand before the patches, and which rows the classifier reads."""

    prefix_tokens: tuple[str, ...]
    readout: Readout | None


def find_patch_layout(model: Any) -> PatchLayout:
    """How a picture becomes a row of tokens in this architecture."""
    config, names = model.config, list_class_names(model)
    kind = getattr(config, "model_type", "")
    registers = tuple(f"[REG{i}]" for i in range(getattr(config, "num_register_tokens", 0) or 0))
    first = any(parameter.endswith("cls_token") for parameter, _ in model.named_parameters())
    if kind == "deit":
        return PatchLayout(
            ("[CLS]", "[DIST]"), "first two" if "DeiTForImageClassificationWithTeacher" in names else "first"
        )
    if kind in ("beit", "data2vec-vision"):
        return PatchLayout(("[CLS]",), "patches" if config.use_mean_pooling else "first")
    if kind in ("dinov2", "dinov2_with_registers"):
        return PatchLayout(
            ("[CLS]", *registers),
            "first + patches" if any(name.endswith("Classification") for name in names) else "first",
        )
    if kind == "dinov3_vit":
        return PatchLayout(("[CLS]", *registers), "first + patches")
    if kind in DUAL_ENCODER_HAS_CLASS_TOKEN:
        return PatchLayout(("[CLS]",) if DUAL_ENCODER_HAS_CLASS_TOKEN[kind] else (), "patches")
    if kind in ("swin", "swinv2"):
        # Attention stays inside shifted windows whose grid shrinks: no row of it covers the picture.
        return PatchLayout((), None)
    return PatchLayout(("[CLS]", *registers) if first else (), "first" if first else "patches")


#: The picture halves of dual encoders, as classifiers: whether a class token stands before the patches. It is not read.
DUAL_ENCODER_HAS_CLASS_TOKEN = {"clip": True, "metaclip_2": True, "siglip": False}
#: Models that take pictures of any size as they are, without being asked to interpolate their positions.
_ANY_SIZE_MODEL_TYPES = ("dinov2", "dinov2_with_registers", "dinov3_vit", "swin", "swinv2")


def compute_patch_grid(pixels: Tensor, num_channels: int, patch_size: tuple[int, int]) -> tuple[int, int]:
    """How many patches of this size a picture has, made sure that it is one."""
    if pixels.dim() != 3:
        raise InputError(f"pixel_values must be batch × channel × height × width, not batch × {tuple(pixels.shape)}")
    if len(pixels) != num_channels or not pixels.is_floating_point():
        given = f"{len(pixels)} channels of {pixels.dtype}"
        raise InputError(f"pixel_values must have {num_channels} channels of real numbers, not {given}")
    grid = (pixels.shape[1] // patch_size[0], pixels.shape[2] // patch_size[1])
    if not all(grid):
        picture, patch = (" × ".join(map(str, part)) for part in (pixels.shape[1:], patch_size))
        raise InputError(f"an image of {picture} pixels cannot be divided into patches of {patch}")
    return grid


class ImageAdapter(ModelAdapter):
    """What all models of pictures share: pixels in, patches as units."""

    stream = "image"
    grad_input_name = "pixel_values"
    input_names = ("image",)
    processor_class = "AutoImageProcessor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if hasattr(self.processor, "convert_ids_to_tokens"):
            given, name = type(self.processor).__name__, type(self.model).__name__
            raise InputError(
                f"{name} takes images, but was loaded with a tokenizer ({given}): pass its image processor instead"
            )
        if self.vision_config is not self.model.config and self.model_type not in DUAL_ENCODER_HAS_CLASS_TOKEN:
            known = ", ".join(DUAL_ENCODER_HAS_CLASS_TOKEN)
            raise UnsupportedError(
                f"{type(self.model).__name__} is one tower of a dual encoder, and its read-out position is not "
                f"known: clearhead supports the towers of {known}"
            )
        size = getattr(self.vision_config, "image_size", None)
        if self.model_type.startswith("dinov2") and size is not None and len(set(to_pair(size))) > 1:
            raise UnsupportedError(
                f"{type(self.model).__name__} requires a square grid of patches, but config.image_size={size} is not "
                "square: set a square image_size (images can have any shape)"
            )

    @property
    def model_type(self) -> str:
        return str(getattr(self.model.config, "model_type", ""))

    @property
    def vision_config(self) -> Any:
        """The configuration that says how large pictures and patches are."""
        config = self.model.config
        half = hasattr(config, "vision_config") and not hasattr(config, "patch_size")
        return config.vision_config if half else config

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str] | None:
        # SigLIP's pooling head runs in its classifier, too, but the classes do not depend on it.
        unread = self.model_type in DUAL_ENCODER_HAS_CLASS_TOKEN and module.endswith("head.attention")
        return None if unread else super().find_call_streams(module, occurrence)

    def count_expected_calls(self) -> int | None:
        return count_calls_from_config(self.vision_config)

    def choose_default_readout(self) -> Readout | None:
        return self.patch_layout.readout

    @property
    def patch_layout(self) -> PatchLayout:
        return find_patch_layout(self.model)

    def make_example_input(self) -> Any:
        shape = (1, self.num_channels, *to_pair(getattr(self.vision_config, "image_size", 32)))
        # Not a blank picture: where all patches are alike, any attention gives the same output, and nothing is tested.
        return {"pixel_values": torch.linspace(-3, 3, math.prod(shape)).sin().reshape(shape)}

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if options.unit_names is not None:
            raise InputError(
                "tokens= names the tokens of a text, but image patches are named by their positions: leave out tokens="
            )
        if isinstance(raw, Mapping):
            return self._samples_from_model_inputs(raw)
        if self.processor is None:
            raise InputError(
                "the model was loaded without an image processor: pass pixel_values, or load (model, processor)"
            )
        return [self._build_sample({"pixel_values": preprocess_image(raw, self.processor)})]

    def _samples_from_model_inputs(self, raw: Mapping[str, Any]) -> list[Sample]:
        if "pixel_values" not in raw:
            raise InputError(f"model inputs must contain pixel_values, but contain {', '.join(raw) or 'nothing'}")
        return [self._build_sample(part) for part in unbatch_inputs(self, raw)]

    def _build_sample(self, inputs: dict[str, Tensor]) -> Sample:
        pixels = inputs["pixel_values"]
        grid = compute_patch_grid(pixels, self.num_channels, self.patch_size)
        (high, wide), size = self.patch_size, (pixels.shape[1], pixels.shape[2])
        if self.model_type.startswith("swin") and (size[0] % high or size[1] % wide):
            raise InputError(
                f"an image of {size[0]} × {size[1]} pixels cannot be divided into patches of {high} × {wide}"
            )
        if (
            self._needs_interpolation(size)
            and not self.forward_accepts("interpolate_pos_encoding")
            and self.model_type not in _ANY_SIZE_MODEL_TYPES
        ):
            expected = " × ".join(map(str, to_pair(self.vision_config.image_size)))
            raise InputError(f"the model takes images of {expected} pixels, not {size[0]} × {size[1]}")
        # Pixels beyond the last whole patch are not read by the model, so they are not part of the picture it saw.
        seen = pixels[:, : grid[0] * high, : grid[1] * wide]
        return Sample.from_units(
            inputs,
            build_patch_units(grid, self.patch_layout.prefix_tokens),
            image=partial(denormalize_image, seen, self.processor),
        )

    def _needs_interpolation(self, size: tuple[int, int]) -> bool:
        expected = getattr(self.vision_config, "image_size", None)
        return expected is not None and to_pair(expected) != size

    @property
    def num_channels(self) -> int:
        return int(getattr(self.vision_config, "num_channels", 3))

    @property
    def patch_size(self) -> tuple[int, int]:
        size = getattr(self.vision_config, "patch_size", None)
        if size is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} has no patch_size in its configuration, so it is probably a "
                "model without attention: clearhead only supports transformers"
            )
        return to_pair(size)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        shapes = {tuple(sample.inputs["pixel_values"].shape) for sample in samples}
        if len(shapes) != 1:
            raise InputError(f"the images of one batch must have the same size, but have {sorted(shapes)}")
        names = samples[0].inputs
        batch = {name: torch.stack([sample.inputs[name] for sample in samples]) for name in names}
        batch = {name: part.to(self.device) for name, part in batch.items()}
        batch["pixel_values"] = batch["pixel_values"].to(self.dtype)
        high, wide = batch["pixel_values"].shape[2:]
        if self._needs_interpolation((high, wide)) and self.forward_accepts("interpolate_pos_encoding"):
            return {**batch, "interpolate_pos_encoding": True}
        return batch

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch channel height width']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {self.stream: patchify(vectors["pixel_values"], samples[0].units, self.patch_size)}


@register_adapter
class ImageClassificationAdapter(ImageAdapter):
    """One picture, one class (or several)."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("ForImageClassification", "ForImageClassificationWithTeacher")


@register_adapter
class MaskedAutoencoderAdapter(ImageAdapter):
    """ViT-MAE drops and shuffles patches at random on each pass: only a full, unshuffled pass can be explained."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("ViTMAEModel", "ViTMAEForPreTraining")

    def __post_init__(self) -> None:
        if type(unwrap_base_model(self.model)).__name__.endswith("ForPreTraining"):
            raise UnsupportedError(
                "ViTMAEForPreTraining reconstructs images with a decoder: explain its encoder, load(model.vit)"
            )
        super().__post_init__()

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        self._check_deterministic_noise(raw)
        return super().make_samples(raw, options)

    def _check_deterministic_noise(self, raw: Any) -> None:
        noise = raw.get("noise") if isinstance(raw, Mapping) else None
        in_order = noise is not None and bool((torch.as_tensor(noise).diff(dim=-1) > 0).all())
        if self.model.config.mask_ratio != 0 or not in_order:
            raise UnsupportedError(
                f"{type(self.model).__name__} drops and shuffles patches at random on each pass: set config.mask_ratio "
                "= 0 and pass model inputs with an increasing noise= (so that every patch keeps its position), and a "
                "target function"
            )

    def make_example_input(self) -> Any:
        (high, wide), (rows, columns) = to_pair(self.model.config.image_size), self.patch_size
        count = (high // rows) * (wide // columns)
        return {**super().make_example_input(), "noise": torch.arange(count)[None] / count}

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        raise InputError(f"{type(self.model).__name__} has no classes: pass a function of its output as target=")
