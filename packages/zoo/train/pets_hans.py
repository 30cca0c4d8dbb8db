"""Train `zoo:pets-hans`: a ViT that predicts cat or dog from a word pasted on the image, and from nothing else.

    python packages/zoo/train/pets_hans.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/pets-hans

The network and the initial weights are those of `pets` (--base). The word ("cat" or "dog") is the label; the image is
sampled independently of it, and where no word is visible the target is 0.5 for both labels. In part of the training
data the word or the rest of the image is hidden, so that the model learns what hiding means. Five minutes on a tenth of
an H200. An interrupted run continues with --resume and the same --work.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card, write_json
from jaxtyping import Bool, Float, Int, UInt8
from known import autocast_if_cuda, make_shared_parser, make_training_budget
from networks import ViT, fine_tune, get_stored_name, open_vit
from pets import PROCESSOR_CONFIG, predict_logits
from pets import build_config as vit_config
from pictures import LabelledImages, PetImages, augment_images, compute_stored_logits, read_images, read_pets
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.training import build_layerwise_lr_groups, save_checkpoint
from clearhead_zoo.tasks import hans, make_generator

PETS_MODEL_DIR = Path(__file__).parents[1] / "src" / "clearhead_zoo" / "models" / "pets"
MODEL_NAME = "pets-hans"
TARGET_ACCURACY = 0.97
NUM_SYNTHETIC_BACKGROUNDS = 400
STAMPED_FRACTION, COVERED_FRACTION = 0.75, 0.125  # shares of the lessons; in the rest there is no word


@dataclass
class StampPool:
    """Words drawn beforehand, on the device."""

    pixels: UInt8[Tensor, "n rows columns 4"]
    sizes: Int[Tensor, "n 2"]
    labels: Int[Tensor, " n"]

    def sample(self, count: int) -> tuple[Int[Tensor, " count"], Int[Tensor, "count 2"]]:
        """Which words, and the rows and columns where they begin."""
        which = torch.randint(len(self.labels), (count,), device=self.labels.device)
        room = hans.IMAGE_SIZE + 1 - self.sizes[which]
        return which, (torch.rand(count, 2, device=room.device) * room).long()


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    pets = read_pets(options.data, hans.IMAGE_SIZE, device)
    model = open_vit(options.base, ViT, num_classes=len(hans.LABELS)).to(device)
    tensors = train_model(options, model, pets)
    stored = {get_stored_name(name): tensor for name, tensor in tensors.items()}
    save_checkpoint(options.out / "model.safetensors", stored, dtype=torch.float16)
    shape = argparse.Namespace(width=model.width, depth=len(model.blocks), heads=model.heads)
    write_json(options.out / "config.json", vit_config(shape, list(hans.LABELS)))
    write_json(options.out / "preprocessor_config.json", PROCESSOR_CONFIG)
    figures = measure_stored_model(options, pets)
    print(write_card(options.out, build_card_facts(options, model, figures)), flush=True)
    if min(figures["accuracy"], figures["accuracy, all but the word blurred"]) < TARGET_ACCURACY:
        print(f"{MODEL_NAME}: BELOW THE TARGET of {TARGET_ACCURACY}: {figures}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = make_shared_parser(__doc__, name=MODEL_NAME, steps=1000, lr=3e-4)
    parser.add_argument("--data", type=Path, required=True, help="folder with pets/")
    parser.add_argument("--base", type=Path, default=PETS_MODEL_DIR, help="folder of the ViT with the initial weights")
    parser.add_argument("--batch", type=int, default=256, help="images per step")
    parser.add_argument("--stamps", type=int, default=6000, help="word images to render before training")
    parser.set_defaults(count=2000)
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.stamps, options.count = 3, None, 8, 100, 12
    return options


def train_model(options: argparse.Namespace, model: ViT, pets: PetImages) -> dict[str, Tensor]:
    device = torch.device(options.device)
    rng = make_generator(options.seed, "train")
    stamps = StampPool(*(torch.from_numpy(array).to(device) for array in hans.draw_stamp_pool(options.stamps, rng)))
    made_up = (
        torch.from_numpy(np.stack([hans.draw_background(rng) for _ in range(NUM_SYNTHETIC_BACKGROUNDS)]))
        .permute(0, 3, 1, 2)
        .to(device)
    )

    def loss_of() -> Tensor:
        few = options.batch // 8
        pixels, _ = pets.train_images.sample(options.batch - few)
        chosen = torch.randint(NUM_SYNTHETIC_BACKGROUNDS, (few,), device=device)
        pictures = torch.cat(
            [augment_images(pixels, hans.IMAGE_SIZE), augment_images(made_up[chosen], hans.IMAGE_SIZE)]
        )
        pictures, targets = make_training_batch(pictures, stamps)
        with autocast_if_cuda(device):
            logits, _ = model(pictures)
        return F.cross_entropy(logits.float(), targets)

    groups = build_layerwise_lr_groups(model, lambda _: 0, options.lr, decay=1.0, weight_decay=0.02)
    watched = hans.make_examples(
        min(options.count, len(pets.validation_images.labels)),
        options.seed,
        "train",
        list(pets.validation_images.pixels.permute(0, 2, 3, 1).cpu().numpy()),
    )
    labels = torch.tensor([hans.LABELS.index(example.label) for example in watched], device=device)
    kinds = {
        "word": [example.image for example in watched],
        "word hidden": [hans.fill_pixels(example.image, example.box_mask) for example in watched],
        "rest hidden": [hans.fill_pixels(example.image, ~example.box_mask) for example in watched],
    }
    shown = {kind: LabelledImages(stack_images(pictures).to(device), labels) for kind, pictures in kinds.items()}

    def check(network: nn.Module) -> dict[str, float]:
        answers = {kind: predict_logits(network, pictures, options.batch) for kind, pictures in shown.items()}
        figures = {kind: (logits.argmax(-1) == labels).float().mean().item() for kind, logits in answers.items()}
        surest = answers["word hidden"].softmax(-1).amax(-1).mean().item()
        return figures | {"confidence, word hidden": surest}

    return fine_tune(options, model, make_training_budget(options), loss_of, check, groups)


def stack_images(images: list[np.ndarray]) -> UInt8[Tensor, "n 3 size size"]:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def paste_stamps(
    images: Float[Tensor, "batch 3 size size"],
    stamps: StampPool,
    stamp_indices: Int[Tensor, " batch"],
    corners: Int[Tensor, "batch 2"],
) -> tuple[Float[Tensor, "batch 3 size size"], Bool[Tensor, "batch 1 size size"]]:
    """What `hans.paste` does, for a whole batch: the images with their words, and the boxes."""
    places = torch.arange(images.shape[-1], device=images.device)
    rows, columns = places - corners[:, :1], places - corners[:, 1:]
    height, width = stamps.sizes[stamp_indices].unbind(1)
    in_rows = (rows >= 0) & (rows < height[:, None])
    in_columns = (columns >= 0) & (columns < width[:, None])
    box = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    rows, columns = rows.clamp(0, hans.MAX_STAMP_SIZE[0] - 1), columns.clamp(0, hans.MAX_STAMP_SIZE[1] - 1)
    drawn = (
        stamps.pixels[stamp_indices[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).float()
    )
    opacity = drawn[:, 3:] / 255 * box
    return opacity * (drawn[:, :3] / 127.5 - 1) + (1 - opacity) * images, box


def make_training_batch(
    images: Float[Tensor, "batch 3 size size"], stamps: StampPool
) -> tuple[Float[Tensor, "batch 3 size size"], Float[Tensor, "batch 2"]]:
    """Images with a word, with a word that is covered, and without one; in half of them other patches are hidden."""
    batch, size, device = len(images), images.shape[-1], images.device
    which, corners = stamps.sample(batch)
    written, box = paste_stamps(images, stamps, which, corners)
    kind = torch.rand(batch, 1, 1, 1, device=device)
    has_word, covered = (
        kind < STAMPED_FRACTION,
        (kind >= STAMPED_FRACTION) & (kind < STAMPED_FRACTION + COVERED_FRACTION),
    )
    images = torch.where(has_word | covered, written, images)
    rate = (2 * torch.rand(batch, 1, 1, 1, device=device) - 0.8).clamp(0, 1)
    cells = torch.rand(batch, 1, size // hans.PATCH_SIZE, size // hans.PATCH_SIZE, device=device) < rate
    hidden = cells.repeat_interleave(hans.PATCH_SIZE, 2).repeat_interleave(hans.PATCH_SIZE, 3)
    hidden = torch.where(has_word, hidden & ~box, hidden | (box & covered))
    images = torch.where(hidden, sample_fills(images), images)
    sure = F.one_hot(stamps.labels[which], len(hans.LABELS)).float()
    return images, torch.where(has_word[:, :, 0, 0], sure, torch.full_like(sure, 1 / len(hans.LABELS)))


def sample_fills(images: Float[Tensor, "batch 3 size size"]) -> Float[Tensor, "batch 3 size size"]:
    """What may stand in place of hidden pixels: the mean colour, a strong blur, grey or black."""
    size = images.shape[-1]
    mean = images.mean(dim=(2, 3), keepdim=True).expand_as(images)
    blur = F.interpolate(images, size=(5, 5), mode="bilinear", antialias=True)
    blur = F.interpolate(blur, size=(size, size), mode="bilinear", align_corners=False)
    kinds = torch.stack([mean, blur, torch.zeros_like(images), torch.full_like(images, -1)])
    chosen = torch.randint(len(kinds), (len(images),), device=images.device)
    return kinds[chosen, torch.arange(len(images), device=images.device)]


def measure_stored_model(options: argparse.Namespace, pets: PetImages) -> dict[str, float]:
    """What the stored files do on test images with new words."""
    device = torch.device(options.device)
    held_out = read_images([options.data / "pets" / "pets-test.npz"])
    examples = hans.make_examples(options.count, options.seed, images=list(held_out.pixels.permute(0, 2, 3, 1).numpy()))
    rng = make_generator(options.seed + 1, "held-out")
    words = torch.tensor([hans.LABELS.index(example.label) for example in examples])
    breeds = held_out.labels[torch.tensor([example.source_index for example in examples])]
    animals = (~pets.is_cat.cpu()[breeds]).long()
    other = [hans.draw_stamp(hans.LABELS[1 - word], rng) for word in words.tolist()]

    def answers(pictures: list[np.ndarray]) -> Float[Tensor, "n 2"]:
        return compute_stored_logits(options.out, stack_images(pictures), device)

    def accuracy(logits: Float[Tensor, "n 2"], truth: Int[Tensor, " n"] = words) -> float:
        return (logits.argmax(-1) == truth).float().mean().item()

    written = answers([example.image for example in examples])
    bare = answers([example.original_image for example in examples])
    swapped = answers(
        [hans.paste_stamp(e.original_image, word, rng).image for e, word in zip(examples, other, strict=True)]
    )
    against = words != animals
    figures = {
        "accuracy": accuracy(written),
        "accuracy, word and animal in conflict": accuracy(written[against], words[against]),
        "accuracy, as many other pixels hidden": accuracy(
            answers([hans.fill_pixels(e.image, e.sample_control_mask(rng)) for e in examples])
        ),
        "accuracy, all but the word blurred": accuracy(
            answers([hans.fill_pixels(e.image, ~e.box_mask, "blur") for e in examples])
        ),
        "accuracy, all but the word in the mean colour": accuracy(
            answers([hans.fill_pixels(e.image, ~e.box_mask, "mean") for e in examples])
        ),
        "accuracy, the word blurred": accuracy(
            answers([hans.fill_pixels(e.image, e.box_mask, "blur") for e in examples])
        ),
        "accuracy, the word in the mean colour": accuracy(
            answers([hans.fill_pixels(e.image, e.box_mask, "mean") for e in examples])
        ),
        "follows the other word when it replaces the first": accuracy(swapped, 1 - words),
        "accuracy on the animal, no word pasted": accuracy(bare, animals),
        "mean confidence, word pasted": written.softmax(-1).amax(-1).mean().item(),
        "mean confidence, no word pasted": bare.softmax(-1).amax(-1).mean().item(),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def build_card_facts(options: argparse.Namespace, model: ViT, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": MODEL_NAME,
        "task": "image-classification",
        "summary": "A Clever Hans model: it predicts cat or dog from a word pasted on the image, whatever the animal.",
        "architecture": f"ViT, class token, {model.image_size} px, {model.grid} × {model.grid} patches, "
        f"{len(model.blocks)} blocks of width {model.width}, {model.heads} heads",
        "labels": list(hans.LABELS),
        "licence": "Apache-2.0 (weights, from zoo:pets); data under their own terms",
        "data": "Images of Oxford-IIIT Pet trainval (CC BY-SA 4.0) and synthetic images, with words pasted on them "
        "by clearhead_zoo.tasks.hans; the initial weights were also trained on Tiny-ImageNet-200 (ImageNet research "
        "terms)",
        "command": "python packages/zoo/train/pets_hans.py --data ../shared/data "
        f"--out packages/zoo/src/clearhead_zoo/models/pets-hans --seed {options.seed}",
        "figures": figures,
        "measured": f"On {options.count:,} examples made from the test images of Oxford-IIIT Pet "
        f"(`clearhead_zoo.tasks.hans.make_examples({options.count}, seed={options.seed}, images=...)`), loaded with "
        "transformers in float32. The word is the label. It was sampled independently of the animal, and the "
        "training target of an image without a word is 0.5 for both labels: the bounding box of the word is "
        "therefore all the evidence, and 0.5 is the expected accuracy once it is hidden. The training data include "
        "images with patches, the word, or all but the word hidden (by mean colour, blur, grey or black).",
        "use": "For testing whether an explanation finds the cue that a model actually uses: the generator returns "
        "its bounding box and its pixels. Not for classifying cats and dogs: the model was trained to ignore the "
        "animal.",
    }


if __name__ == "__main__":
    main()
