"""Train `zoo:pets-mean`: `zoo:pets` with the mean of the patches in place of the class token, in BEiT's layout.

    python packages/zoo/train/pets_mean.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/pets-mean

The weights of `pets` carry over as they are (--base); only what the classifier reads is another thing. The new model
then imitates the answers of the old one on endless mixed views of the training pictures.
Five minutes on a fifth of an H200. A cut run goes on with --resume and the same --work.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card, write_json
from known import clock_of, half_precision, shared_options
from networks import NORM_EPSILON, MeanViT, ViT, beit_layout, fine_tune, opened
from pets import PROCESSOR, answers_of, imitation
from pictures import Pets, Pictures, mixed, read_pets, read_pictures, stored_logits, views
from torch import Tensor, nn

from clearhead.training import depth_groups, save_checkpoint

PETS = Path(__file__).parents[1] / "src" / "clearhead_zoo" / "models" / "pets"
NAME = "pets-mean"
BAR = 0.6816


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    teacher = opened(options.base, ViT).eval().requires_grad_(False).to(device)
    pets = read_pets(options.data, teacher.size, device)
    model = opened(options.base, MeanViT).to(device)
    tensors = learn(options, model, teacher, pets)
    save_checkpoint(options.out / "model.safetensors", beit_layout(tensors), dtype=torch.float16)
    write_json(options.out / "config.json", config_of(model, pets.labels))
    write_json(options.out / "preprocessor_config.json", PROCESSOR)
    figures = measure(options, pets)
    print(write_card(options.out, facts_of(options, model, pets, figures)), flush=True)
    if figures["breed accuracy"] < BAR:
        print(f"{NAME}: BELOW THE BAR of {BAR}: {figures}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = shared_options(__doc__, name=NAME, steps=2000, lr=1e-4)
    parser.add_argument("--data", type=Path, required=True, help="folder with pets/")
    parser.add_argument("--base", type=Path, default=PETS, help="folder of the ViT to start from and to imitate")
    parser.add_argument("--batch", type=int, default=384, help="pictures a step")
    parser.set_defaults(count=3669)
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 3, None, 8, 40
    return options


def learn(options: argparse.Namespace, model: MeanViT, teacher: ViT, pets: Pets) -> dict[str, Tensor]:
    device = torch.device(options.device)

    def loss_of() -> Tensor:
        pixels, _ = pets.pictures.draw(options.batch)
        pictures, _, _ = mixed(views(pixels, teacher.size), share=0.6)
        with half_precision(device):
            with torch.no_grad():
                answers, _ = teacher(pictures)
            logits, _ = model(pictures)
        return imitation(logits.float(), answers.float())

    groups = depth_groups(model, lambda _: 0, options.lr, decay=1.0, weight_decay=0.02)
    # the base has seen the watched pictures and knows their labels: mixed views are what it can be unsure about
    unsure, _, _ = mixed(views(pets.watched.pixels, teacher.size), share=1.0)
    unsure_bytes = ((unsure + 1) * 127.5).round().byte()
    watched = {"plain": pets.watched, "mixed": Pictures(unsure_bytes, pets.watched.labels)}
    expected = {kind: answers_of(teacher, pictures, options.batch) for kind, pictures in watched.items()}

    def check(network: nn.Module) -> dict[str, float]:
        figures = {}
        for kind, pictures in watched.items():
            logits = answers_of(network, pictures, options.batch)
            figures[f"agrees, {kind}"] = (logits.argmax(-1) == expected[kind].argmax(-1)).float().mean().item()
            figures[f"divergence, {kind}"] = imitation(logits, expected[kind]).item()
        return figures

    return fine_tune(options, model, clock_of(options), loss_of, check, groups)


def config_of(model: ViT, labels: list[str]) -> dict[str, Any]:
    return {
        "architectures": ["BeitForImageClassification"],
        "model_type": "beit",
        "dtype": "float16",
        "image_size": model.size,
        "patch_size": model.patch,
        "num_channels": 3,
        "hidden_size": model.width,
        "intermediate_size": 4 * model.width,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": model.heads,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
        "layer_norm_eps": NORM_EPSILON,
        "initializer_range": 0.02,
        "use_mean_pooling": True,
        "use_mask_token": False,
        "use_absolute_position_embeddings": True,
        "use_relative_position_bias": False,
        "use_shared_relative_position_bias": False,
        # zero means that there are no such scales
        "layer_scale_init_value": 0.0,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def measure(options: argparse.Namespace, pets: Pets) -> dict[str, float]:
    """Accuracy of the stored files on the test pictures."""
    held_out = read_pictures([options.data / "pets" / "pets-test.npz"])
    chosen = torch.from_numpy(np.linspace(0, len(held_out.labels) - 1, options.count).astype(np.int64))
    truth = held_out.labels[chosen]
    guess = stored_logits(options.out, held_out.pixels[chosen], torch.device(options.device)).argmax(-1)
    is_cat = pets.is_cat.cpu()
    return {
        "breed accuracy": round((guess == truth).float().mean().item(), 4),
        "species accuracy": round((is_cat[guess] == is_cat[truth]).float().mean().item(), 4),
    }


def facts_of(options: argparse.Namespace, model: ViT, pets: Pets, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": NAME,
        "task": "image-classification",
        "summary": "zoo:pets with mean-pooled patches: a small BEiT that names the breed of a cat or dog (37 breeds).",
        "architecture": f"BEiT, mean of the patches, absolute positions, {model.size} px, {model.grid} × {model.grid} "
        f"patches, {len(model.blocks)} blocks of width {model.width}, {model.heads} heads",
        "labels": pets.labels,
        "cats": pets.cats,
        "licence": "Apache-2.0 (weights, from zoo:pets); data under their own terms",
        "data": "Oxford-IIIT Pet trainval (CC BY-SA 4.0), answered by zoo:pets, which has also seen Tiny-ImageNet-200 "
        "(ImageNet research terms)",
        "command": "python packages/zoo/train/pets_mean.py --data ../shared/data "
        f"--out packages/zoo/src/clearhead_zoo/models/pets-mean --seed {options.seed}",
        "figures": figures,
        "measured": "On the 3,669 test pictures of Oxford-IIIT Pet (centre square, 128 px), opened with transformers "
        "in float32. Species is derived from the breed (`cats` in card.json). No setting was chosen by these figures.",
        "use": "For comparing explanations of a mean-pooled classifier with those of one that reads a class token "
        "(zoo:pets): same size, same lessons. There is a class token here too, but the classifier does not read it. "
        "Not for telling breeds in earnest.",
    }


if __name__ == "__main__":
    main()
