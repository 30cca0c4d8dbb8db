"""Training images: read the packed WebP files once, then crop, flip, tint and mix on the device."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F


@dataclass
class LabelledImages:
    """Square images of one size and their labels."""

    pixels: UInt8[Tensor, "n 3 size size"]
    labels: Int[Tensor, " n"]

    def to(self, device: torch.device) -> LabelledImages:
        return LabelledImages(self.pixels.to(device), self.labels.to(device))

    def sample(self, count: int) -> tuple[UInt8[Tensor, "count 3 size size"], Int[Tensor, " count"]]:
        """A random batch, drawn on the device so that nothing waits for the host."""
        index = torch.randint(len(self.labels), (count,), device=self.labels.device)
        return self.pixels[index], self.labels[index]


def _decode(files: list[bytes]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])


def read_images(paths: Sequence[Path], cache: Path | None = None) -> LabelledImages:
    """All images of some packed files (`data`, `off`, `label`); decoded pixels are kept in `cache` if given."""
    if not paths:
        raise FileNotFoundError(
            "no image files found; --data must contain pets/ and tiny-imagenet/ (see the zoo's README)"
        )
    packed = [np.load(path) for path in paths]
    labels = torch.from_numpy(np.concatenate([file["label"] for file in packed]).astype(np.int64))
    if cache is not None and cache.exists():
        return LabelledImages(torch.from_numpy(np.load(cache)), labels)
    chunks: list[list[bytes]] = []
    for file in packed:
        data, offsets = file["data"].tobytes(), file["off"]
        files = [data[start:end] for start, end in itertools.pairwise(offsets)]
        chunks += [files[start : start + 512] for start in range(0, len(files), 512)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        pixels = np.concatenate(list(pool.map(_decode, chunks))).transpose(0, 3, 1, 2)
    pixels = np.ascontiguousarray(pixels)
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.save(cache, pixels)
    return LabelledImages(torch.from_numpy(pixels), labels)


@dataclass
class PetImages:
    """The pets that may be trained on (every tenth of them kept apart to watch the training by), and their names."""

    train_images: LabelledImages
    validation_images: LabelledImages
    labels: list[str]
    cats: list[str]

    @property
    def is_cat(self) -> Tensor:
        """Which of the labels are cats."""
        return torch.tensor([label in self.cats for label in self.labels], device=self.train_images.labels.device)


def read_pets(folder: Path, size: int, device: torch.device) -> PetImages:
    path = folder / "pets" / "pets-trainval.npz"
    read = read_images([path])
    labels, cats = read_breed_names(np.load(path))
    apart = torch.arange(len(read.labels)) % 10 == 0
    watched = resize_images(LabelledImages(read.pixels[apart], read.labels[apart]), size)
    return PetImages(
        LabelledImages(read.pixels[~apart], read.labels[~apart]).to(device), watched.to(device), labels, cats
    )


def read_breed_names(packed: Any) -> tuple[list[str], list[str]]:
    """All breeds by their numbers, and those of them that are cats."""
    breeds = {
        int(label): str(name).rsplit("_", 1)[0] for label, name in zip(packed["label"], packed["name"], strict=True)
    }
    ordered = [breed for _, breed in sorted(breeds.items())]
    # in the names of the data set a capital letter means a cat
    cats = [breed.replace("_", " ") for breed in ordered if breed[0].isupper()]
    return [breed.replace("_", " ") for breed in ordered], cats


@torch.no_grad()
def compute_stored_logits(
    folder: Path, pixels: UInt8[Tensor, "n 3 height width"], device: torch.device
) -> Float[Tensor, "n classes"]:
    """What the stored files of an image classifier say, opened the way a user opens them."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    answers = []
    for chunk in pixels.split(128):
        inputs = processor(list(chunk.numpy()), return_tensors="pt", input_data_format="channels_first")
        answers.append(model(inputs["pixel_values"].to(device)).logits.cpu())
    return torch.cat(answers)


def resize_images(images: LabelledImages, size: int) -> LabelledImages:
    """The same images at another size, smoothed first as PIL does."""
    chunks = [
        F.interpolate(chunk.float(), size=(size, size), mode="bilinear", antialias=True).round().clamp(0, 255).byte()
        for chunk in images.pixels.split(2048)
    ]
    return LabelledImages(torch.cat(chunks), images.labels)


def normalise_pixels(pixels: UInt8[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch 3 height width"]:
    """Pixels as the networks see them: −1 … 1, as the stored image processor does."""
    return pixels.float() / 127.5 - 1.0


def augment_images(
    pixels: UInt8[Tensor, "batch 3 height width"], size: int, min_area_fraction: float = 0.3, tint_strength: float = 0.3
) -> Float[Tensor, "batch 3 size size"]:
    """One random view of each image: a crop of at least `smallest` of its area, perhaps mirrored, tinted a little."""
    batch, device = len(pixels), pixels.device
    area = torch.empty(batch, device=device).uniform_(min_area_fraction, 1.0)
    ratio = torch.empty(batch, device=device).uniform_(-0.25, 0.25).exp()
    width, height = (area * ratio).sqrt().clamp(max=1.0), (area / ratio).sqrt().clamp(max=1.0)
    centre_x = torch.empty(batch, device=device).uniform_(-1, 1) * (1 - width)
    centre_y = torch.empty(batch, device=device).uniform_(-1, 1) * (1 - height)
    mirror = torch.randint(0, 2, (batch,), device=device) * 2 - 1
    zero = torch.zeros_like(width)
    affine = torch.stack(
        [torch.stack([width * mirror, zero, centre_x], 1), torch.stack([zero, height, centre_y], 1)], dim=1
    )
    grid = F.affine_grid(affine, [batch, 3, size, size], align_corners=False)
    view = F.grid_sample(
        normalise_pixels(pixels), grid, mode="bilinear", padding_mode="reflection", align_corners=False
    )

    def amount() -> Float[Tensor, "batch 1 1 1"]:
        return torch.empty(batch, 1, 1, 1, device=device).uniform_(1 - tint_strength, 1 + tint_strength)

    grey = view.mean(dim=1, keepdim=True)
    view = grey + (view - grey) * amount()
    level = view.mean(dim=(1, 2, 3), keepdim=True)
    view = level + (view - level) * amount() + (amount() - 1)
    return view.clamp(-1, 1)


def mix_images(
    images: Float[Tensor, "batch 3 size size"], probability: float
) -> tuple[Float[Tensor, "batch 3 size size"], Int[Tensor, " batch"], Float[Tensor, " batch"]]:
    """With probability `share` blend each image with a partner or paste a box of it; also partners and own parts."""
    batch, size, device = len(images), images.shape[-1], images.device
    partner = torch.randperm(batch, device=device)
    kind = float(torch.rand(()))
    if kind >= probability:
        return images, partner, torch.ones(batch, device=device)
    if kind < probability / 2:
        own = torch.rand(batch, device=device)
        blend = own[:, None, None, None]
        return blend * images + (1 - blend) * images[partner], partner, own
    side = max(1, int(size * float(torch.rand(())) ** 0.5))
    top, left = (int(torch.randint(0, size - side + 1, ())) for _ in range(2))
    pasted = images.clone()
    pasted[:, :, top : top + side, left : left + side] = images[partner, :, top : top + side, left : left + side]
    return pasted, partner, torch.full((batch,), 1 - (side / size) ** 2, device=device)
