"""Train `zoo:pets`: a small ViT that classifies 37 breeds of cats and dogs, distilled from a ResNet-18.

    python packages/zoo/train/pets.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/pets

A ViT cannot be trained well on labels alone with so few images. So there are four stages, each with its own time
budget: a ResNet is trained on Tiny-ImageNet and the pets together at 64 px (`teacher-wide`); the ViT is distilled from
its outputs *and its feature maps* on an unlimited number of mixed views (`student-wide`); the ResNet continues with the
pets alone at 96 px (`teacher-pets`), and so does the ViT (`student-pets`). Finished stages are skipped and an
interrupted stage continues when the script is called again with the same --work.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card, write_json
from jaxtyping import Float
from networks import ResNet, ViT, build_vit_config, get_stored_name
from pictures import LabelledImages, augment_images, mix_images, normalise_pixels, read_images, resize_images
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.training import (
    ExponentialMovingAverage,
    Muon,
    TrainingBudget,
    build_layerwise_lr_groups,
    load_checkpoint,
    save_checkpoint,
    train,
)

NUM_IMAGENET_CLASSES, NUM_BREEDS = 200, 37
IMAGENET_SIZE = 64
IMAGE_SIZE, PATCH_SIZE = 96, 8
STAGES = ("teacher-wide", "student-wide", "teacher-pets", "student-pets")
TEMPERATURE = 2.0


@dataclass
class TrainingData:
    """Everything on the device; pets are labelled after the 200 wide classes while both are learned together."""

    imagenet: LabelledImages
    imagenet_held_out: LabelledImages
    pets: LabelledImages
    pets_held_out: LabelledImages


class DistillationStudent(nn.Module):
    """The ViT, with linear maps that let its patch tokens predict the teacher's feature maps while it learns."""

    def __init__(self, vit: ViT) -> None:
        super().__init__()
        self.vit = vit
        self.adapters = nn.ModuleList([nn.Linear(vit.width, 256), nn.Linear(vit.width, 512)])

    def forward(self, images: Float[Tensor, "batch 3 size size"]) -> tuple[Tensor, list[Tensor]]:
        logits, tapped = self.vit(images)
        return logits, [adapter(tokens) for adapter, tokens in zip(self.adapters, tapped, strict=True)]


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    data = read_data(options.data, options.work, device)
    print(f"data: {len(data.imagenet.labels)} wide, {len(data.pets.labels)} pets", flush=True)
    seconds = dict(zip(STAGES, options.seconds, strict=True))
    stages: dict[str, Callable[[], None]] = {
        "teacher-wide": lambda: train_imagenet_teacher(options, data, seconds["teacher-wide"]),
        "student-wide": lambda: train_imagenet_student(options, data, seconds["student-wide"]),
        "teacher-pets": lambda: train_pets_teacher(options, data, seconds["teacher-pets"]),
        "student-pets": lambda: train_pets_student(options, data, seconds["student-pets"]),
    }
    for stage, run in stages.items():
        if get_stage_path(options, stage).exists():
            print(f"{stage}: finished earlier", flush=True)
            continue
        begun = time.monotonic()
        run()
        print(f"{stage}: finished in {time.monotonic() - begun:.0f} s", flush=True)
        if stage == options.until:
            return
    export_model(options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with pets/ and tiny-imagenet/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument(
        "--base", type=Path, help="checkpoint of a wide student with the initial weights (skips that stage)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("work/pets"), help="folder for checkpoints and decoded images"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=4,
        default=[95, 370, 45, 170],
        metavar="S",
        help=f"budgets of {', '.join(STAGES)}",
    )
    parser.add_argument("--until", choices=STAGES, help="stop after this stage")
    parser.add_argument("--batch", type=int, default=512, help="images per step")
    parser.add_argument("--width", type=int, default=256, help="width of the ViT")
    parser.add_argument("--depth", type=int, default=10, help="blocks of the ViT")
    parser.add_argument("--heads", type=int, default=4, help="attention heads of the ViT")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    return parser.parse_args()


def read_data(folder: Path, work: Path, device: torch.device) -> TrainingData:
    def read(pattern: str) -> LabelledImages:
        cache = work / "decoded" / (pattern.replace("/", "-").replace("*", "") + ".npy")
        return read_images(sorted(folder.glob(pattern)), cache).to(device)

    return TrainingData(
        imagenet=read("tiny-imagenet/tin-train-*.npz"),
        imagenet_held_out=read("tiny-imagenet/tin-val.npz"),
        pets=read("pets/pets-trainval.npz"),
        pets_held_out=read("pets/pets-test.npz"),
    )


def get_stage_path(options: argparse.Namespace, stage: str) -> Path:
    return Path(options.work / f"{stage}.safetensors")


def autocast_if_cuda(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def compile_if_cuda(module: nn.Module) -> None:
    """Compile in place, where that pays; weight names stay as they are."""
    if torch.cuda.is_available():
        # one class serves several sizes, with and without gradients: more than torch's default number of versions
        torch._dynamo.config.recompile_limit = 64
        module.compile(dynamic=False)


def to_channels_last(network: ResNet) -> ResNet:
    """Convolutions in half precision are fastest in this memory layout."""
    for weight in network.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return network


def sample_imagenet_batch(data: TrainingData, pets: LabelledImages, size: int, batch: int) -> tuple[Tensor, Tensor]:
    """One pet for seven other images: the pets are few, and they are what it is about."""
    few = max(1, batch // 8)
    wide, wide_labels = data.imagenet.sample(batch - few)
    pet, pet_labels = pets.sample(few)
    pictures = torch.cat([augment_images(wide, size), augment_images(pet, size)])
    return pictures, torch.cat([wide_labels, NUM_IMAGENET_CLASSES + pet_labels])


def sample_pets_batch(data: TrainingData, batch: int, num_others: int = 0) -> tuple[Tensor, Tensor]:
    """Pets, and for a student `few` other images: the teacher's answers to them are a lesson too (labels are −1)."""
    pets, labels = data.pets.sample(batch - num_others)
    if not num_others:
        return augment_images(pets, IMAGE_SIZE), labels
    wide, _ = data.imagenet.sample(num_others)
    return torch.cat([augment_images(pets, IMAGE_SIZE), augment_images(wide, IMAGE_SIZE)]), torch.cat(
        [labels, labels.new_full((num_others,), -1)]
    )


def train_teacher(
    options: argparse.Namespace,
    stage: str,
    teacher: ResNet,
    sample_batch: Callable[[], tuple[Tensor, Tensor]],
    budget: TrainingBudget,
    lr: float,
) -> ExponentialMovingAverage:
    """Cross-entropy on mixed images."""
    device = torch.device(options.device)
    teacher = to_channels_last(teacher.to(device)).train()
    average = ExponentialMovingAverage(teacher)
    groups = build_layerwise_lr_groups(teacher, lambda name: 0, lr, 1.0, weight_decay=5e-4)
    optimiser = torch.optim.SGD(groups, momentum=0.9, nesterov=True)

    def loss_of() -> Tensor:
        pictures, labels = sample_batch()
        pictures, partner, own = mix_images(pictures, probability=0.3)
        with autocast_if_cuda(device):
            logits, _ = teacher(pictures.contiguous(memory_format=torch.channels_last))
        first = F.cross_entropy(logits.float(), labels, reduction="none")
        second = F.cross_entropy(logits.float(), labels[partner], reduction="none")
        return (own * first + (1 - own) * second).mean()

    partial = options.work / f"{stage}.partial.safetensors"
    train(loss_of, [optimiser], budget, average, warmup_fraction=0.15, checkpoint=partial, name=stage)
    return average


def train_imagenet_teacher(options: argparse.Namespace, data: TrainingData, seconds: float) -> None:
    # views of 128 px images at 64 px would skip pixels
    small_pets = resize_images(data.pets, 80)
    teacher = ResNet(NUM_IMAGENET_CLASSES + NUM_BREEDS)
    compile_if_cuda(teacher)
    average = train_teacher(
        options,
        "teacher-wide",
        teacher,
        lambda: sample_imagenet_batch(data, small_pets, IMAGENET_SIZE, options.batch),
        TrainingBudget(total_seconds=seconds),
        lr=0.4 * options.batch / 512,
    )
    with average.averaged_weights() as network:
        facts = measure_imagenet(network, data, IMAGENET_SIZE, options.batch)
    save_stage(options, "teacher-wide", average, facts)


def train_pets_teacher(options: argparse.Namespace, data: TrainingData, seconds: float) -> None:
    teacher = ResNet(NUM_BREEDS)
    teacher.load_state_dict(
        select_breed_classifier(load_checkpoint(get_stage_path(options, "teacher-wide"))[0], "classifier"), strict=False
    )
    batch = options.batch // 2
    average = train_teacher(
        options,
        "teacher-pets",
        teacher,
        lambda: sample_pets_batch(data, batch),
        TrainingBudget(total_seconds=seconds),
        lr=0.04 * options.batch / 512,
    )
    with average.averaged_weights() as network:
        facts = measure_pets(network, data, batch)
    save_stage(options, "teacher-pets", average, facts)


def select_breed_classifier(tensors: dict[str, Tensor], classifier: str) -> dict[str, Tensor]:
    """Keep the rows of the breeds of a classifier that also knows the wide classes."""
    return {
        name: tensor[NUM_IMAGENET_CLASSES:] if name.startswith(f"{classifier}.") else tensor
        for name, tensor in tensors.items()
    }


def make_student(options: argparse.Namespace, classes: int) -> DistillationStudent:
    taps = (options.depth // 2 - 1, options.depth - 3)
    return DistillationStudent(ViT(IMAGE_SIZE, PATCH_SIZE, options.width, options.depth, options.heads, classes, taps))


def train_student(
    options: argparse.Namespace,
    stage: str,
    learner: DistillationStudent,
    teacher: ResNet,
    teacher_size: int,
    sample_batch: Callable[[], tuple[Tensor, Tensor]],
    budget: TrainingBudget,
    matrix_lr: float,
    other_lr: float,
) -> ExponentialMovingAverage:
    """Imitate the teacher's answers and its inner maps on the same mixed views; labels are not used."""
    device = torch.device(options.device)
    learner = learner.to(device).train()
    teacher = to_channels_last(teacher.to(device)).eval().requires_grad_(False)
    average = ExponentialMovingAverage(learner)
    for block in learner.vit.blocks:
        compile_if_cuda(block)
    compile_if_cuda(teacher)
    matrices = [weight for weight in learner.vit.blocks.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in learner.parameters() if id(weight) not in chosen]
    optimisers = [
        Muon(matrices, lr=matrix_lr, weight_decay=0.03),
        torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"),
    ]

    def loss_of() -> Tensor:
        pictures, _, _ = mix_images(sample_batch()[0], probability=0.6)
        with autocast_if_cuda(device):
            with torch.no_grad():
                seen = F.interpolate(pictures, size=(teacher_size, teacher_size), mode="bilinear", antialias=True)
                answers, maps = teacher(seen.contiguous(memory_format=torch.channels_last))
            logits, guesses = learner(pictures)
        return compute_distillation_loss(logits.float(), answers.float()) + 0.5 * sum(
            (compute_feature_loss(guess, truth, learner.vit.grid) for guess, truth in zip(guesses, maps, strict=True)),
            start=torch.zeros((), device=device),
        )

    partial = options.work / f"{stage}.partial.safetensors"
    train(loss_of, optimisers, budget, average, warmup_fraction=0.03, checkpoint=partial, name=stage)
    return average


def compute_distillation_loss(
    logits: Float[Tensor, "batch classes"], answers: Float[Tensor, "batch classes"]
) -> Float[Tensor, ""]:
    """Kullback–Leibler divergence from the teacher's softened answers."""
    spoken, heard = (x.div(TEMPERATURE).log_softmax(-1) for x in (logits, answers))
    return F.kl_div(spoken, heard, log_target=True, reduction="batchmean") * TEMPERATURE**2


def compute_feature_loss(
    predicted: Float[Tensor, "batch patch channel"], teacher_map: Float[Tensor, "batch channel height width"], grid: int
) -> Float[Tensor, ""]:
    """Squared error against the teacher's map, brought to the patch grid and to unit variance per channel."""
    teacher_map = teacher_map.float()
    if teacher_map.shape[-1] != grid:
        teacher_map = F.interpolate(teacher_map, size=(grid, grid), mode="bilinear", align_corners=False)
    teacher_map = teacher_map - teacher_map.mean(dim=(0, 2, 3), keepdim=True)
    teacher_map = teacher_map / (teacher_map.square().mean(dim=(0, 2, 3), keepdim=True) + 1e-6).sqrt()
    return F.mse_loss(predicted.float(), teacher_map.flatten(2).transpose(1, 2))


def train_imagenet_student(options: argparse.Namespace, data: TrainingData, seconds: float) -> None:
    learner = make_student(options, NUM_IMAGENET_CLASSES + NUM_BREEDS)
    if options.base is not None:
        save_checkpoint(get_stage_path(options, "student-wide"), load_checkpoint(options.base)[0], dtype=torch.float16)
        return
    teacher = ResNet(NUM_IMAGENET_CLASSES + NUM_BREEDS)
    teacher.load_state_dict(load_checkpoint(get_stage_path(options, "teacher-wide"))[0], strict=False)
    average = train_student(
        options,
        "student-wide",
        learner,
        teacher,
        IMAGENET_SIZE,
        lambda: sample_imagenet_batch(data, data.pets, IMAGE_SIZE, options.batch),
        TrainingBudget(total_seconds=seconds),
        matrix_lr=0.015,
        other_lr=1e-3,
    )
    with average.averaged_weights() as network:
        facts = measure_imagenet(network, data, IMAGE_SIZE, options.batch)
    save_stage(options, "student-wide", average, facts)


def train_pets_student(options: argparse.Namespace, data: TrainingData, seconds: float) -> None:
    learner = make_student(options, NUM_BREEDS)
    learner.load_state_dict(
        select_breed_classifier(load_checkpoint(get_stage_path(options, "student-wide"))[0], "vit.classifier")
    )
    teacher = ResNet(NUM_BREEDS)
    teacher.load_state_dict(load_checkpoint(get_stage_path(options, "teacher-pets"))[0], strict=False)
    average = train_student(
        options,
        "student-pets",
        learner,
        teacher,
        IMAGE_SIZE,
        lambda: sample_pets_batch(data, options.batch, num_others=options.batch // 8),
        TrainingBudget(total_seconds=seconds),
        matrix_lr=0.006,
        other_lr=5e-4,
    )
    with average.averaged_weights() as network:
        facts = measure_pets(network, data, options.batch)
    save_stage(options, "student-pets", average, facts)


def save_stage(
    options: argparse.Namespace, stage: str, average: ExponentialMovingAverage, facts: dict[str, float]
) -> None:
    print(f"{stage}: {facts}", flush=True)
    save_checkpoint(get_stage_path(options, stage), average.tensors, facts, torch.float16)


@torch.no_grad()
def predict_logits(network: nn.Module, images: LabelledImages, batch: int) -> Float[Tensor, "n classes"]:
    """Logits of all images, in batches of one size, so that nothing is compiled a second time."""
    count, device = len(images.labels), images.labels.device
    answers = []
    for start in range(0, count, batch):
        index = torch.arange(start, start + batch, device=device).clamp(max=count - 1)
        chunk = normalise_pixels(images.pixels[index]).contiguous(memory_format=torch.channels_last)
        with autocast_if_cuda(device):
            answers.append(network(chunk)[0].float())
    return torch.cat(answers)[:count]


def measure_imagenet(network: nn.Module, data: TrainingData, size: int, batch: int) -> dict[str, float]:
    wide, pets = resize_images(data.imagenet_held_out, size), resize_images(data.pets_held_out, size)
    guess = predict_logits(network, wide, batch)[:, :NUM_IMAGENET_CLASSES].argmax(-1)
    breed = predict_logits(network, pets, batch)[:, NUM_IMAGENET_CLASSES:].argmax(-1)
    return {
        "tiny-imagenet": (guess == wide.labels).float().mean().item(),
        "breed": (breed == pets.labels).float().mean().item(),
    }


def measure_pets(network: nn.Module, data: TrainingData, batch: int) -> dict[str, float]:
    held_out = resize_images(data.pets_held_out, IMAGE_SIZE)
    breed = predict_logits(network, held_out, batch).argmax(-1)
    return {"breed": (breed == held_out.labels).float().mean().item()}


def export_model(options: argparse.Namespace) -> None:
    """Write the model in transformers' layout, then measure what was written."""
    tensors, _ = load_checkpoint(get_stage_path(options, "student-pets"))
    vit = {name.removeprefix("vit."): tensor for name, tensor in tensors.items() if name.startswith("vit.")}
    packed = np.load(options.data / "pets" / "pets-test.npz")
    breeds: dict[int, str] = {}
    for label, name in zip(packed["label"], packed["name"], strict=True):
        breeds[int(label)] = str(name).rsplit("_", 1)[0]
    # in the names of the data set a capital letter means a cat
    cats = [breed.replace("_", " ") for _, breed in sorted(breeds.items()) if breed[0].isupper()]
    labels = [breed.replace("_", " ") for _, breed in sorted(breeds.items())]
    save_checkpoint(
        options.out / "model.safetensors",
        {get_stored_name(name): tensor for name, tensor in vit.items()},
        {},
        torch.float16,
    )
    write_json(options.out / "config.json", build_config(options, labels))
    write_json(options.out / "preprocessor_config.json", PROCESSOR_CONFIG)
    print(
        write_card(options.out, build_card_facts(options, labels, cats, measure_stored_model(options, packed, cats))),
        flush=True,
    )


PROCESSOR_CONFIG = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": IMAGE_SIZE},
    "resample": 2,
    "do_center_crop": True,
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def build_config(options: argparse.Namespace, labels: list[str]) -> dict[str, Any]:
    return build_vit_config(options, labels, IMAGE_SIZE, PATCH_SIZE)


@torch.no_grad()
def measure_stored_model(options: argparse.Namespace, packed: Any, cats: list[str]) -> dict[str, float]:
    """Accuracy of the stored files on the held-out pets, opened the way a user opens them."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    device = torch.device(options.device)
    model = AutoModelForImageClassification.from_pretrained(options.out, dtype=torch.float32).to(device).eval()
    processor = AutoImageProcessor.from_pretrained(options.out)
    pictures = read_images([options.data / "pets" / "pets-test.npz"]).pixels
    guesses = []
    for chunk in pictures.split(128):
        inputs = processor(list(chunk.numpy()), return_tensors="pt", input_data_format="channels_first")
        guesses.append(model(inputs["pixel_values"].to(device)).logits.argmax(-1).cpu())
    guess = torch.cat(guesses)
    is_cat = torch.tensor([model.config.id2label[index] in cats for index in range(NUM_BREEDS)])
    truth = torch.from_numpy(packed["label"].astype(np.int64))
    return {
        "breed accuracy": round((guess == truth).float().mean().item(), 4),
        "species accuracy": round((is_cat[guess] == is_cat[truth]).float().mean().item(), 4),
    }


def build_card_facts(
    options: argparse.Namespace, labels: list[str], cats: list[str], figures: dict[str, float]
) -> dict[str, Any]:
    return {
        "name": "pets",
        "task": "image-classification",
        "summary": "A small vision transformer that classifies the breed of a cat or dog (37 breeds).",
        "architecture": f"ViT, class token, {IMAGE_SIZE} px, {IMAGE_SIZE // PATCH_SIZE} × {IMAGE_SIZE // PATCH_SIZE} "
        "patches, "
        f"{options.depth} blocks of width {options.width}, {options.heads} heads",
        "labels": labels,
        "cats": cats,
        "licence": "Apache-2.0 (weights); data under their own terms",
        "data": "Tiny-ImageNet-200 (ImageNet research terms), Oxford-IIIT Pet trainval (CC BY-SA 4.0)",
        "command": "python packages/zoo/train/pets.py --data ../shared/data "
        f"--out packages/zoo/src/clearhead_zoo/models/pets --seed {options.seed}",
        "figures": figures,
        "measured": "On the 3,669 test images of Oxford-IIIT Pet (centre square, 128 px), loaded with transformers "
        "in float32. Species is derived from the breed (`cats` in card.json). No setting was selected on these "
        "figures.",
        "use": "For trying out explanations of a real, small image classifier without network access. Not for "
        "serious breed classification: it is often wrong, and it predicts a breed for any image, animal or not.",
    }


if __name__ == "__main__":
    main()
