"""Pictures: classifiers whose units are patches. The grid comes from the model and the picture, never from a root."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.errors import InputError, Refusal
from clearhead.subjects.base import How, Readout, Sample, Subject, base_model, register_subject, split_mapping
from clearhead.targets import Target
from clearhead.units import patches


@dataclass(frozen=True)
class Layout:
    """The tokens that stand before the patches, and which rows the classifier reads."""

    before: tuple[str, ...]
    readout: Readout | None


def layout_of(model: Any) -> Layout:
    """How a picture becomes a row of tokens in this architecture."""
    config, name = model.config, type(base_model(model)).__name__
    kind = getattr(config, "model_type", "")
    registers = tuple(f"[REG{i}]" for i in range(getattr(config, "num_register_tokens", 0) or 0))
    if kind == "deit":
        return Layout(("[CLS]", "[DIST]"), "first two" if name.endswith("WithTeacher") else "first")
    if kind in ("beit", "data2vec-vision"):
        return Layout(("[CLS]",), "patches" if config.use_mean_pooling else "first")
    if kind in ("dinov2", "dinov2_with_registers"):
        return Layout(("[CLS]", *registers), "first + patches" if name.endswith("Classification") else "first")
    if kind == "dinov3_vit":
        return Layout(("[CLS]", *registers), "first + patches")
    if kind in ("swin", "swinv2"):
        # Attention stays inside shifted windows whose grid shrinks: no row of it covers the picture.
        return Layout((), None)
    if kind in ("siglip_vision_model", "siglip", "ijepa"):
        return Layout((), "patches")
    if kind in ("clip", "clip_vision_model"):
        return Layout(("[CLS]",), "patches")
    return Layout(("[CLS]",), "first")


class ImageSubject(Subject):
    """What all models of pictures share: pixels in, patches as units."""

    stream = "image"
    leaf = "pixel_values"

    def default_readout(self) -> Readout | None:
        return layout_of(self.model).readout

    def example(self) -> Any:
        size = _pair(getattr(self.model.config, "image_size", 32))
        return {"pixel_values": torch.zeros(1, getattr(self.model.config, "num_channels", 3), *size)}

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if isinstance(raw, Mapping):
            return self._given(raw)
        if self.processor is None:
            raise InputError("the model came without an image processor: give pixel_values, or load (model, processor)")
        picture = open_picture(raw)
        pixels = torch.as_tensor(np.asarray(self.processor(images=picture, return_tensors="np")["pixel_values"][0]))
        return [self._sample({"pixel_values": pixels})]

    def _given(self, raw: Mapping[str, Any]) -> list[Sample]:
        if "pixel_values" not in raw:
            raise InputError(f"model inputs need pixel_values, but hold {', '.join(raw) or 'nothing'}")
        return [self._sample(part) for part in split_mapping(raw)]

    def _sample(self, inputs: dict[str, Tensor]) -> Sample:
        pixels = inputs["pixel_values"]
        if pixels.dim() != 3:
            raise InputError(f"pixel_values of one picture must be channel × height × width, not {tuple(pixels.shape)}")
        high, wide = self.patch_size
        grid = (pixels.shape[1] // high, pixels.shape[2] // wide)
        units = patches(grid, layout_of(self.model).before)
        return Sample(inputs, units, picture=self._as_seen(pixels))

    def _as_seen(self, pixels: Float[Tensor, "channel height width"]) -> UInt8[np.ndarray, "height width 3"]:
        """The picture as the model saw it, normalisation undone."""
        mean, std = getattr(self.processor, "image_mean", None), getattr(self.processor, "image_std", None)
        shown = pixels.detach().cpu().double().numpy()
        if mean is not None and std is not None and getattr(self.processor, "do_normalize", True):
            shown = shown * np.reshape(std, (-1, 1, 1)) + np.reshape(mean, (-1, 1, 1))
        else:
            low, high = shown.min(), shown.max()
            shown = (shown - low) / max(high - low, 1e-12)
        if shown.shape[0] != 3:
            shown = np.repeat(shown[:1], 3, axis=0)
        return (np.clip(shown, 0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)

    @property
    def patch_size(self) -> tuple[int, int]:
        size = getattr(self.model.config, "patch_size", None)
        if size is None:
            raise Refusal(f"{type(self.model).__name__} does not say how large its patches are")
        return _pair(size)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        shapes = {tuple(sample.inputs["pixel_values"].shape) for sample in samples}
        if len(shapes) != 1:
            raise InputError(f"pictures of one batch must have one size, but have {sorted(shapes)}")
        names = samples[0].inputs
        batch = {name: torch.stack([sample.inputs[name] for sample in samples]) for name in names}
        batch = {name: part.to(self.device) for name, part in batch.items()}
        batch["pixel_values"] = batch["pixel_values"].to(self.dtype)
        expected = _pair(getattr(self.model.config, "image_size", None) or tuple(batch["pixel_values"].shape[2:]))
        if tuple(batch["pixel_values"].shape[2:]) != expected and self.accepts("interpolate_pos_encoding"):
            batch["interpolate_pos_encoding"] = True
        return batch

    def to_units(
        self, vectors: Float[Tensor, "batch channel height width"], samples: Sequence[Sample]
    ) -> Float[Tensor, "batch unit feature"]:
        """Pixels gathered into their patches; special tokens have none, so theirs are zero."""
        units = samples[0].units
        assert units.grid is not None
        (rows, columns), (high, wide) = units.grid, self.patch_size
        cut = vectors[:, :, : rows * high, : columns * wide]
        cells = cut.unflatten(3, (columns, wide)).unflatten(2, (rows, high))  # batch channel row high column wide
        cells = cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        before = len(units) - cells.shape[1]
        return torch.cat([cells.new_zeros(len(cells), before, cells.shape[2]), cells], dim=1)


@register_subject
class ImageClassification(ImageSubject):
    """One picture, one class (or several)."""

    endings: ClassVar[tuple[str, ...]] = ("ForImageClassification", "ForImageClassificationWithTeacher")


@register_subject
class MaskedAutoencoder(ImageSubject):
    """ViT-MAE drops and shuffles patches at random on each pass: only a full, unshuffled pass can be explained."""

    endings: ClassVar[tuple[str, ...]] = ("ViTMAEModel", "ViTMAEForPreTraining")

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
        count = (self.model.config.image_size // self.model.config.patch_size) ** 2
        return {**super().example(), "noise": torch.arange(count)[None] / count}

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        raise InputError(f"{type(self.model).__name__} has no classes: give target= a function of its output")


def open_picture(raw: Any) -> Any:
    """A PIL picture from a path, an array or a PIL picture."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(raw, str | Path):
        try:
            return Image.open(raw).convert("RGB")
        except FileNotFoundError:
            raise InputError(f"there is no picture {str(raw)!r}") from None
        except (UnidentifiedImageError, OSError) as problem:
            raise InputError(f"{str(raw)!r} is not a picture that can be opened ({problem})") from None
    if isinstance(raw, np.ndarray):
        if raw.ndim not in (2, 3) or raw.dtype != np.uint8:
            raise InputError(f"a picture as an array must be uint8, height × width × 3, not {raw.dtype} {raw.shape}")
        return Image.fromarray(raw).convert("RGB")
    if isinstance(raw, Image.Image):
        return raw.convert("RGB")
    raise InputError(f"expected a picture (path, PIL image, uint8 array) or model inputs, but got {type(raw).__name__}")


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
