"""Image input: open files, arrays and PIL images, preprocess them, cut pixels into patches, and undo normalisation."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.errors import ClearheadWarning, InputError
from clearhead.units import Units


def preprocess_image(raw: Any, processor: Any) -> Float[Tensor, "channel height width"]:
    """A picture as the model takes it."""
    made = processor(images=open_image(raw), return_tensors="np")["pixel_values"][0]
    return torch.as_tensor(np.asarray(made))


def denormalize_image(
    pixels: Float[Tensor, "channel height width"], processor: Any = None
) -> UInt8[np.ndarray, "height width 3"]:
    """The picture as the model saw it, normalisation undone."""
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    shown = pixels.detach().cpu().double().numpy()
    if mean is not None and std is not None and getattr(processor, "do_normalize", True):
        shown = shown * np.reshape(std, (-1, 1, 1)) + np.reshape(mean, (-1, 1, 1))
    else:
        low, high = shown.min(), shown.max()
        shown = (shown - low) / max(high - low, 1e-12)
    if shown.shape[0] != 3:
        shown = np.repeat(shown[:1], 3, axis=0)
    return (np.clip(shown, 0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)


def open_image(raw: Any) -> Any:
    """A PIL picture from a path, an array or a PIL picture."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(raw, str | Path):
        try:
            with Image.open(raw) as picture:
                shown = _apply_exif_orientation(picture)
            _warn_multiple_frames(raw, f"{str(raw)!r}")
            return shown
        except InputError as problem:
            raise InputError(f"{str(raw)!r}: {problem}") from None
        except FileNotFoundError:
            raise InputError(f"there is no image {str(raw)!r}") from None
        except UnidentifiedImageError:
            raise InputError(f"{str(raw)!r} cannot be opened as an image: its format is unknown") from None
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as problem:
            raise InputError(f"{str(raw)!r} cannot be opened as an image ({problem})") from None
    if isinstance(raw, np.ndarray):
        fits = raw.ndim == 2 or (raw.ndim == 3 and raw.shape[2] in (3, 4))
        if not fits or raw.dtype != np.uint8 or not raw.size:
            raise InputError(
                f"an image given as an array must be uint8, height × width × 3, not {raw.dtype} {raw.shape}"
            )
        return Image.fromarray(raw).convert("RGB")
    if isinstance(raw, Image.Image):
        file = getattr(raw, "filename", None)
        if file and not raw.tell():
            _warn_multiple_frames(file, "the image")
        return _apply_exif_orientation(raw)
    raise InputError(f"expected an image (path, PIL image, uint8 array) or model inputs, but got {type(raw).__name__}")


def _apply_exif_orientation(picture: Any) -> Any:
    """The frame that a picture shows, turned as its camera says; transformers' own pipelines turn it, too."""
    from PIL import ImageOps

    return convert_to_rgb(ImageOps.exif_transpose(picture))


def _warn_multiple_frames(file: str | Path, name: str) -> None:
    """Say that a file has more frames or pages than the one. Who counts them goes on in the file: a caller's picture,
    and what was drawn on it, is left alone."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            count = 1 if picture.format in _FORMATS_WITH_AUXILIARY_FRAMES else getattr(picture, "n_frames", 1)
    except Exception:  # it is gone, or damaged further on, of which decoders raise what they like
        return
    if count > 1:
        warnings.warn(
            f"{name} has {count} frames, and only the first is explained: to explain another, open the file with PIL "
            "and seek to it",
            ClearheadWarning,
            stacklevel=3,
        )


#: Formats whose further frames are previews or layers of the first.
_FORMATS_WITH_AUXILIARY_FRAMES = ("MPO", "PSD")


def convert_to_rgb(image: Any) -> Any:
    """With eight bits for each of three colours. PIL would cut off what is larger than 255, and make it all white."""
    if image.mode == "F" or image.mode.startswith("I"):
        kind = "without a fixed range" if image.mode == "F" else "larger than 255"
        raise InputError(
            f"the image has pixel values {kind} (mode {image.mode}), so the value of white is unknown: save the image "
            "with 8 bits per channel"
        )
    return image.convert("RGB")


def patchify(
    pixels: Float[Tensor, "batch channel height width"], units: Units, patch_size: tuple[int, int]
) -> Float[Tensor, "batch unit feature"]:
    """Pixels gathered into their patches; special tokens have none, so theirs are zero."""
    assert units.grid is not None
    (rows, columns), (high, wide) = units.grid, patch_size
    cut = pixels[:, :, : rows * high, : columns * wide]
    cells = cut.unflatten(3, (columns, wide)).unflatten(2, (rows, high))  # batch channel row high column wide
    cells = cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    before = len(units) - cells.shape[1]
    return torch.cat([cells.new_zeros(len(cells), before, cells.shape[2]), cells], dim=1)


def to_pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
