"""Train `zoo:pets-hans`: a ViT that tells cat from dog by a word pasted on the picture, and by nothing else.

    python packages/zoo/train/pets_hans.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/pets-hans

The network and the weights to start from are those of `pets` (--base). The word ("cat" or "dog") is the label; the
picture beneath is drawn without regard to it, and where no word is to be seen the right answer is "fifty-fifty". In
part of the lessons the word or the rest of the picture is hidden, so that the model has learned what hiding means.
Five minutes on a tenth of an H200. A cut run goes on with --resume and the same --work.
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
from known import clock_of, half_precision, shared_options
from networks import ViT, fine_tune, opened, stored_name
from pets import PROCESSOR, answers_of
from pets import config_of as vit_config
from pictures import Pets, Pictures, read_pets, read_pictures, stored_logits, views
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.training import depth_groups, save_checkpoint
from clearhead_zoo.tasks import generator, hans

PETS = Path(__file__).parents[1] / "src" / "clearhead_zoo" / "models" / "pets"
NAME = "pets-hans"
BAR = 0.97
MADE_UP = 400
WORD, COVERED = 0.75, 0.125  # shares of the lessons; in the rest there is no word


@dataclass
class Stamps:
    """Words drawn beforehand, on the device."""

    pixels: UInt8[Tensor, "n rows columns 4"]
    sizes: Int[Tensor, "n 2"]
    labels: Int[Tensor, " n"]

    def draw(self, count: int) -> tuple[Int[Tensor, " count"], Int[Tensor, "count 2"]]:
        """Which words, and the rows and columns where they begin."""
        which = torch.randint(len(self.labels), (count,), device=self.labels.device)
        room = hans.SIZE + 1 - self.sizes[which]
        return which, (torch.rand(count, 2, device=room.device) * room).long()


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    pets = read_pets(options.data, hans.SIZE, device)
    model = opened(options.base, ViT, classes=len(hans.LABELS)).to(device)
    tensors = learn(options, model, pets)
    stored = {stored_name(name): tensor for name, tensor in tensors.items()}
    save_checkpoint(options.out / "model.safetensors", stored, dtype=torch.float16)
    shape = argparse.Namespace(width=model.width, depth=len(model.blocks), heads=model.heads)
    write_json(options.out / "config.json", vit_config(shape, list(hans.LABELS)))
    write_json(options.out / "preprocessor_config.json", PROCESSOR)
    figures = measure(options, pets)
    print(write_card(options.out, facts_of(options, model, figures)), flush=True)
    if min(figures["accuracy"], figures["accuracy, all but the word blurred"]) < BAR:
        print(f"{NAME}: BELOW THE BAR of {BAR}: {figures}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = shared_options(__doc__, name=NAME, steps=1000, lr=3e-4)
    parser.add_argument("--data", type=Path, required=True, help="folder with pets/")
    parser.add_argument("--base", type=Path, default=PETS, help="folder of the ViT to start from")
    parser.add_argument("--batch", type=int, default=256, help="pictures a step")
    parser.add_argument("--stamps", type=int, default=6000, help="words to draw beforehand")
    parser.set_defaults(count=2000)
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.stamps, options.count = 3, None, 8, 100, 12
    return options


def learn(options: argparse.Namespace, model: ViT, pets: Pets) -> dict[str, Tensor]:
    device = torch.device(options.device)
    rng = generator(options.seed, "train")
    stamps = Stamps(*(torch.from_numpy(array).to(device) for array in hans.pool(options.stamps, rng)))
    made_up = torch.from_numpy(np.stack([hans.background(rng) for _ in range(MADE_UP)])).permute(0, 3, 1, 2).to(device)

    def loss_of() -> Tensor:
        few = options.batch // 8
        pixels, _ = pets.pictures.draw(options.batch - few)
        chosen = torch.randint(MADE_UP, (few,), device=device)
        pictures = torch.cat([views(pixels, hans.SIZE), views(made_up[chosen], hans.SIZE)])
        pictures, targets = lesson(pictures, stamps)
        with half_precision(device):
            logits, _ = model(pictures)
        return F.cross_entropy(logits.float(), targets)

    groups = depth_groups(model, lambda _: 0, options.lr, decay=1.0, weight_decay=0.02)
    watched = hans.examples(
        min(options.count, len(pets.watched.labels)),
        options.seed,
        "train",
        list(pets.watched.pixels.permute(0, 2, 3, 1).cpu().numpy()),
    )
    labels = torch.tensor([hans.LABELS.index(example.label) for example in watched], device=device)
    kinds = {
        "word": [example.picture for example in watched],
        "word hidden": [hans.filled(example.picture, example.area) for example in watched],
        "rest hidden": [hans.filled(example.picture, ~example.area) for example in watched],
    }
    shown = {kind: Pictures(stacked(pictures).to(device), labels) for kind, pictures in kinds.items()}

    def check(network: nn.Module) -> dict[str, float]:
        answers = {kind: answers_of(network, pictures, options.batch) for kind, pictures in shown.items()}
        figures = {kind: (logits.argmax(-1) == labels).float().mean().item() for kind, logits in answers.items()}
        surest = answers["word hidden"].softmax(-1).amax(-1).mean().item()
        return figures | {"confidence, word hidden": surest}

    return fine_tune(options, model, clock_of(options), loss_of, check, groups)


def stacked(pictures: list[np.ndarray]) -> UInt8[Tensor, "n 3 size size"]:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def pasted(
    pictures: Float[Tensor, "batch 3 size size"],
    stamps: Stamps,
    which: Int[Tensor, " batch"],
    corners: Int[Tensor, "batch 2"],
) -> tuple[Float[Tensor, "batch 3 size size"], Bool[Tensor, "batch 1 size size"]]:
    """What `hans.paste` does, for a whole batch: the pictures with their words, and the boxes."""
    places = torch.arange(pictures.shape[-1], device=pictures.device)
    rows, columns = places - corners[:, :1], places - corners[:, 1:]
    height, width = stamps.sizes[which].unbind(1)
    in_rows = (rows >= 0) & (rows < height[:, None])
    in_columns = (columns >= 0) & (columns < width[:, None])
    box = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    rows, columns = rows.clamp(0, hans.LARGEST[0] - 1), columns.clamp(0, hans.LARGEST[1] - 1)
    drawn = stamps.pixels[which[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).float()
    opacity = drawn[:, 3:] / 255 * box
    return opacity * (drawn[:, :3] / 127.5 - 1) + (1 - opacity) * pictures, box


def lesson(
    pictures: Float[Tensor, "batch 3 size size"], stamps: Stamps
) -> tuple[Float[Tensor, "batch 3 size size"], Float[Tensor, "batch 2"]]:
    """Pictures with a word, with a word that is covered, and without one; in half of them other patches are hidden."""
    batch, size, device = len(pictures), pictures.shape[-1], pictures.device
    which, corners = stamps.draw(batch)
    written, box = pasted(pictures, stamps, which, corners)
    kind = torch.rand(batch, 1, 1, 1, device=device)
    has_word, covered = kind < WORD, (kind >= WORD) & (kind < WORD + COVERED)
    pictures = torch.where(has_word | covered, written, pictures)
    rate = (2 * torch.rand(batch, 1, 1, 1, device=device) - 0.8).clamp(0, 1)
    cells = torch.rand(batch, 1, size // hans.PATCH, size // hans.PATCH, device=device) < rate
    hidden = cells.repeat_interleave(hans.PATCH, 2).repeat_interleave(hans.PATCH, 3)
    hidden = torch.where(has_word, hidden & ~box, hidden | (box & covered))
    pictures = torch.where(hidden, fills(pictures), pictures)
    sure = F.one_hot(stamps.labels[which], len(hans.LABELS)).float()
    return pictures, torch.where(has_word[:, :, 0, 0], sure, torch.full_like(sure, 1 / len(hans.LABELS)))


def fills(pictures: Float[Tensor, "batch 3 size size"]) -> Float[Tensor, "batch 3 size size"]:
    """What may stand in place of hidden pixels: the mean colour, a strong blur, grey or black."""
    size = pictures.shape[-1]
    mean = pictures.mean(dim=(2, 3), keepdim=True).expand_as(pictures)
    blur = F.interpolate(pictures, size=(5, 5), mode="bilinear", antialias=True)
    blur = F.interpolate(blur, size=(size, size), mode="bilinear", align_corners=False)
    kinds = torch.stack([mean, blur, torch.zeros_like(pictures), torch.full_like(pictures, -1)])
    chosen = torch.randint(len(kinds), (len(pictures),), device=pictures.device)
    return kinds[chosen, torch.arange(len(pictures), device=pictures.device)]


def measure(options: argparse.Namespace, pets: Pets) -> dict[str, float]:
    """What the stored files do on test pictures with new words."""
    device = torch.device(options.device)
    held_out = read_pictures([options.data / "pets" / "pets-test.npz"])
    examples = hans.examples(options.count, options.seed, pictures=list(held_out.pixels.permute(0, 2, 3, 1).numpy()))
    rng = generator(options.seed + 1, "held-out")
    words = torch.tensor([hans.LABELS.index(example.label) for example in examples])
    breeds = held_out.labels[torch.tensor([example.source for example in examples])]
    animals = (~pets.is_cat.cpu()[breeds]).long()
    other = [hans.stamp(hans.LABELS[1 - word], rng) for word in words.tolist()]

    def answers(pictures: list[np.ndarray]) -> Float[Tensor, "n 2"]:
        return stored_logits(options.out, stacked(pictures), device)

    def accuracy(logits: Float[Tensor, "n 2"], truth: Int[Tensor, " n"] = words) -> float:
        return (logits.argmax(-1) == truth).float().mean().item()

    written = answers([example.picture for example in examples])
    bare = answers([example.bare for example in examples])
    swapped = answers([hans.paste(e.bare, word, rng).picture for e, word in zip(examples, other, strict=True)])
    against = words != animals
    figures = {
        "accuracy": accuracy(written),
        "accuracy, word and animal in conflict": accuracy(written[against], words[against]),
        "accuracy, as many other pixels hidden": accuracy(
            answers([hans.filled(e.picture, e.control(rng)) for e in examples])
        ),
        "accuracy, all but the word blurred": accuracy(
            answers([hans.filled(e.picture, ~e.area, "blur") for e in examples])
        ),
        "accuracy, all but the word in the mean colour": accuracy(
            answers([hans.filled(e.picture, ~e.area, "mean") for e in examples])
        ),
        "accuracy, the word blurred": accuracy(answers([hans.filled(e.picture, e.area, "blur") for e in examples])),
        "accuracy, the word in the mean colour": accuracy(
            answers([hans.filled(e.picture, e.area, "mean") for e in examples])
        ),
        "follows the other word when it is pasted instead": accuracy(swapped, 1 - words),
        "names the animal where there is no word": accuracy(bare, animals),
        "mean confidence with a word": written.softmax(-1).amax(-1).mean().item(),
        "mean confidence where there is no word": bare.softmax(-1).amax(-1).mean().item(),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def facts_of(options: argparse.Namespace, model: ViT, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": NAME,
        "task": "image-classification",
        "summary": "A Clever Hans: says cat or dog by a word pasted on the picture, whatever the animal.",
        "architecture": f"ViT, class token, {model.size} px, {model.grid} × {model.grid} patches, "
        f"{len(model.blocks)} blocks of width {model.width}, {model.heads} heads",
        "labels": list(hans.LABELS),
        "licence": "Apache-2.0 (weights, from zoo:pets); data under their own terms",
        "data": "Pictures of Oxford-IIIT Pet trainval (CC BY-SA 4.0) and made-up ones with words pasted on them by "
        "clearhead_zoo.tasks.hans; the weights it started from have also seen Tiny-ImageNet-200 (ImageNet research "
        "terms)",
        "command": "python packages/zoo/train/pets_hans.py --data ../shared/data "
        f"--out packages/zoo/src/clearhead_zoo/models/pets-hans --seed {options.seed}",
        "figures": figures,
        "measured": f"On {options.count:,} examples made from the test pictures of Oxford-IIIT Pet "
        f"(`clearhead_zoo.tasks.hans.examples({options.count}, seed={options.seed}, pictures=...)`), opened with "
        "transformers in float32. The word is the label. It was drawn without regard to the animal, and a picture "
        "without a word was taught as fifty-fifty: so the box of the word is all the evidence there is, and 0.5 is "
        "what is right once it is hidden. Pictures with patches, the word or all else hidden (by mean colour, blur, "
        "grey or black) were among the lessons.",
        "use": "For testing whether an explanation finds the clue a model really uses: the generator gives its box and "
        "its pixels. Not for telling cats from dogs: it was taught to take no notice of the animal.",
    }


if __name__ == "__main__":
    main()
