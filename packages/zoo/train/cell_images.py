"""Shared code of the training scripts of `counting` and `signs`: a ViT whose patches are the cells of its images.

Scenes never repeat. In more than half of the training images cells are hidden – some of the evidence, of the other
objects, of the background – and the target is what the visible cells say, so that masked inputs are in distribution.
"""

from __future__ import annotations

import argparse
from typing import Any, Protocol

import numpy as np
import torch
from cards import write_card, write_json
from jaxtyping import Bool, Float
from known import autocast_if_cuda, make_shared_parser, make_training_budget, report_target, run_training
from networks import ViT, build_vit_config, get_stored_name
from numpy.typing import NDArray
from pets import PROCESSOR_CONFIG
from pets_hans import sample_fills
from shapes_vqa import BatchPrefetcher
from torch import Tensor
from torch.nn import functional as F
from transformers import ViTForImageClassification

from clearhead.perturbation.image_fill import blur_image
from clearhead.training import TrainingBudget, save_checkpoint
from clearhead_zoo.tasks import cells, make_generator

TARGET_ACCURACY = 0.97
#: How hidden cells are filled where the accuracy on masked inputs is measured.
FILL_MODES = ("mean colour", "blur", "black")
#: The share of training images without hidden cells.
PLAIN_FRACTION = 0.4
#: The step whose scenes show how training goes; no run has so many.
CHECK_STEP = 2**31


class CellTask(Protocol):
    """What this script asks of a module of `clearhead_zoo.tasks`."""

    LABELS: tuple[str, ...]

    def sample_scenes(self, rng: np.random.Generator, labels: NDArray[np.int64]) -> cells.CellScenes: ...

    def compute_targets(self, scenes: cells.CellScenes, hidden: NDArray[np.bool_]) -> NDArray[np.float32]: ...

    def make_examples(self, count: int, seed: int, split: str = "held-out") -> list[cells.CellExample]: ...


def parse_options(doc: str | None, name: str, steps: int) -> argparse.Namespace:
    parser = make_shared_parser(doc, name=name, steps=steps, lr=1e-3)
    parser.add_argument("--batch", type=int, default=512, help="images per step")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--depth", type=int, default=4, help="layers")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 12, None, 16, 24
    return options


def train_and_store(options: argparse.Namespace, task: CellTask) -> int:
    """Train a ViT on the task, write the files of the model, and return the number of steps."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    network = ViT(cells.IMAGE_SIZE, cells.CELL_SIZE, options.width, options.depth, options.heads, len(task.LABELS)).to(
        options.device
    )
    budget = make_training_budget(options)
    stream = SceneStream(options, task, network, budget)
    tensors = run_training(
        options,
        network,
        budget,
        stream.compute_loss,
        uses_muon=lambda name: name.startswith("blocks."),
        check=stream.describe_accuracy,
    )
    stored = {get_stored_name(name): tensor for name, tensor in tensors.items()}
    save_checkpoint(options.out / "model.safetensors", stored, dtype=torch.float16)
    write_json(options.out / "config.json", build_vit_config(options, task.LABELS, cells.IMAGE_SIZE, cells.CELL_SIZE))
    write_json(options.out / "preprocessor_config.json", PROCESSOR_CONFIG)
    return budget.step


class SceneStream:
    """Fresh scenes for every step, with some of their cells hidden."""

    def __init__(self, options: argparse.Namespace, task: CellTask, network: ViT, budget: TrainingBudget) -> None:
        self.options, self.task, self.network, self.budget = options, task, network, budget
        self.prefetcher = BatchPrefetcher(self.sample_batch)

    def sample_batch(self, step: int, lesson: int) -> tuple[cells.CellScenes, NDArray[np.bool_], NDArray[np.float32]]:
        rng = make_generator(self.options.seed, "train", step)
        scenes = self.task.sample_scenes(rng, rng.integers(len(self.task.LABELS), size=self.options.batch))
        hidden = sample_hidden_cells(rng, scenes)
        return scenes, hidden, self.task.compute_targets(scenes, hidden)

    def compute_loss(self) -> Tensor:
        device = torch.device(self.options.device)
        scenes, hidden, targets = self.prefetcher.take(self.budget.step)
        images = render_images(scenes, device)
        images = fill_cells(images, hidden, sample_fills(images))
        with autocast_if_cuda(device):
            logits, _ = self.network(images)
        return F.cross_entropy(logits.float(), torch.from_numpy(targets).to(device))

    def describe_accuracy(self) -> str:
        """Accuracy on new scenes of the training split: plain, with all but the evidence hidden, and as in training."""
        device = torch.device(self.options.device)
        scenes, hidden, _ = self.sample_batch(CHECK_STEP, 0)
        images, nothing = render_images(scenes, device), np.zeros_like(hidden)
        figures = []
        for name, chosen in (("plain", nothing), ("evidence only", ~scenes.is_evidence), ("some hidden", hidden)):
            logits, _ = self.network(fill_cells(images, chosen, sample_fills(images)))
            possible = self.task.compute_targets(scenes, chosen)[np.arange(len(chosen)), logits.argmax(-1).cpu()]
            figures.append(f"{name} {(possible > 0).mean():.3f}")
        return ", ".join(figures)


def sample_hidden_cells(rng: np.random.Generator, scenes: cells.CellScenes) -> NDArray[np.bool_]:
    """Cells to hide: none, some or all of the evidence, of the other objects and of the background, independently."""
    groups = np.stack([scenes.is_evidence, scenes.is_distractor, ~scenes.is_evidence & ~scenes.is_distractor], axis=-1)
    rates = rng.random((len(scenes), 3))
    kind = rng.random(rates.shape)
    # hidden evidence teaches little about what is visible, so it is mostly left
    max_kind_of_none, max_kind_of_some = np.array([0.6, 0.35, 0.35]), np.array([0.9, 0.7, 0.7])
    rates = np.select([kind < max_kind_of_none, kind < max_kind_of_some], [0.0, rates], 1.0)
    rates[rng.random(len(scenes)) < PLAIN_FRACTION] = 0.0
    return np.asarray(rng.random(scenes.kind.shape) < (groups * rates[:, None]).sum(axis=-1))


def render_images(scenes: cells.CellScenes, device: torch.device) -> Float[Tensor, "batch 3 size size"]:
    """Pixels as the image processor gives them."""
    images: Tensor = cells.render(scenes, lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device))
    return images.float() / 127.5 - 1.0


def fill_cells(
    images: Float[Tensor, "batch 3 size size"], hidden: NDArray[np.bool_], fills: Float[Tensor, "batch 3 size size"]
) -> Float[Tensor, "batch 3 size size"]:
    """The images with these cells filled by others."""
    mask: Bool[Tensor, "batch size size"] = cells.spread_over_pixels(torch.from_numpy(hidden).to(images.device))
    return torch.where(mask[:, None], fills, images)


def make_fills(images: Float[Tensor, "batch 3 size size"], mode: str) -> Float[Tensor, "batch 3 size size"]:
    """What stands in place of hidden pixels, as clearhead masks images; mode: one of FILL_MODES."""
    if mode == "mean colour":
        return images.mean(dim=(2, 3), keepdim=True).expand_as(images)
    return blur_image(images) if mode == "blur" else torch.full_like(images, -1.0)


class StoredModel:
    """The stored files, opened the way a user opens them, and the held-out examples."""

    def __init__(self, options: argparse.Namespace, task: CellTask) -> None:
        self.device = torch.device(options.device)
        self.model = (
            ViTForImageClassification.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
        )
        self.task = task
        examples = task.make_examples(options.count, options.seed)
        self.scenes = cells.stack_scenes([example.scene for example in examples])
        self.labels = np.array([task.LABELS.index(example.label) for example in examples])

    @torch.no_grad()
    def compute_probabilities(
        self, hidden: NDArray[np.bool_] | None = None, mode: str = "mean colour", scenes: cells.CellScenes | None = None
    ) -> NDArray[np.float32]:
        """Probabilities of the labels, with these cells hidden."""
        scenes = self.scenes if scenes is None else scenes
        probabilities = []
        for start in range(0, len(scenes), 250):
            rows = slice(start, start + 250)
            images = render_images(scenes[rows], self.device)
            if hidden is not None:
                images = fill_cells(images, hidden[rows], make_fills(images, mode))
            probabilities.append(self.model(images).logits.softmax(-1).cpu())
        return torch.cat(probabilities).numpy()

    def predict(
        self, hidden: NDArray[np.bool_] | None = None, mode: str = "mean colour", scenes: cells.CellScenes | None = None
    ) -> NDArray[np.int64]:
        """The most probable labels, with these cells hidden."""
        return self.compute_probabilities(hidden, mode, scenes).argmax(axis=1)

    def sample_cells(self, rng: np.random.Generator, among: NDArray[np.bool_], count: Any) -> NDArray[np.bool_]:
        """So many cells of each row among these, at random (all, if there are no more)."""
        order = np.where(among, rng.random(among.shape), 2.0).argsort(axis=1).argsort(axis=1)
        return np.asarray(among & (order < np.reshape(count, (-1, 1))))


def write_model_card(
    options: argparse.Namespace, name: str, steps: int, figures: dict[str, float], facts: dict[str, Any]
) -> None:
    """Write the card from the task's own facts (summary, data, measured, use, labels), and say if it is good enough."""
    rounded = {figure: round(float(value), 4) for figure, value in figures.items()}
    card = {
        "name": name,
        "task": "image-classification",
        "summary": facts["summary"],
        "architecture": f"ViT, class token, {cells.IMAGE_SIZE} px, {cells.GRID_SIZE} × {cells.GRID_SIZE} patches, "
        f"{options.depth} blocks of width {options.width}, {options.heads} heads",
        "labels": facts["labels"],
        "licence": "Apache-2.0",
        "data": facts["data"],
        "command": f"python packages/zoo/train/{name}.py --out packages/zoo/src/clearhead_zoo/models/{name} "
        f"--seed {options.seed} --steps {steps} --batch {options.batch} --lr {options.lr:g} --width {options.width} "
        f"--depth {options.depth} --heads {options.heads}",
        "figures": rounded,
        "measured": facts["measured"],
        "use": facts["use"],
    }
    print(write_card(options.out, card), flush=True)
    kept = [figure for figure in rounded if figure.startswith("accuracy")]
    report_target({figure: rounded[figure] for figure in sorted(kept, key=rounded.__getitem__)}, TARGET_ACCURACY)
