"""Train `zoo:shapes-vilt`: a small ViLT that answers questions about coloured shapes from pixels.

    python packages/zoo/train/shapes_vilt.py --out packages/zoo/src/clearhead_zoo/models/shapes-vilt

Answers alone are a slow training signal, so there are auxiliary losses on the patches at first: in the middle layers,
each patch should encode the colour and the shape of what it shows, and whether the question relates to it; before the
last layer, whether the question asks for it. The auxiliary losses fade out before the last third of the run; their
heads are not stored. Position embeddings start from coordinates: without these, relations stayed at chance. The
questions form a curriculum of three stages: look up, count and find, relate. Background patches are sometimes grey and
words that do not carry the question are sometimes masked, so that masked inputs are not out of distribution when an
explanation is tested. An interrupted run continues with --resume and the same --work.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from cards import write_card, write_json
from jaxtyping import Bool, Float, Int
from known import autocast_if_cuda, iter_chunks, make_shared_parser, make_training_budget, write_model_files
from numpy.typing import NDArray
from shapes_vqa import (
    DATA_NOTE,
    MAX_TOKENS,
    MEASURED_NOTE,
    SPECIAL_TOKENS,
    TARGET_ACCURACY,
    BatchPrefetcher,
    FamilyAccuracy,
    build_label_config,
    build_tokenizer,
    compute_figures,
    mask_question_words,
    report_target,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViltConfig, ViltForQuestionAnswering

from clearhead.training import ExponentialMovingAverage, Muon, TrainingBudget, train
from clearhead_zoo.tasks import make_generator, shapes

IMAGE_SIZE, PATCH_SIZE = 64, 8
#: The share of the run in which the patches are helped along.
SUPPORTED_FRACTION = 0.65
#: Families of questions, and the share of the run at which the next lesson starts at the latest.
CURRICULUM_STAGES = (
    (("colour", "shape"), 0.12),
    (("colour", "shape", "count", "exist"), 0.25),
    (("colour", "shape", "count", "exist", "relation", "relation", "relation"), 0.80),
    (shapes.FAMILIES, 1.0),
)
#: What a patch is to a question: ground, some object, what is asked for, what that is related to.
NUM_ROLES = 4


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    config = build_config(options)
    model = ViltForQuestionAnswering(ViltConfig(**config)).to(options.device)
    initialise_positions(model)
    clock = make_training_budget(options)
    tensors = train_model(options, ViltWithPatchHeads(model, options.depth), clock)
    write_model_files(options.out, tensors, config, build_tokenizer(), SPECIAL_TOKENS, MAX_TOKENS)
    write_json(options.out / "preprocessor_config.json", build_processor_config())
    figures = measure_stored_model(options)
    print(write_card(options.out, build_card_facts(options, clock.step, figures)), flush=True)
    report_target(figures["accuracy"], TARGET_ACCURACY)


def parse_options() -> argparse.Namespace:
    parser = make_shared_parser(__doc__, name="shapes-vilt", steps=20_000, lr=1e-3)
    parser.add_argument("--matrix-lr", type=float, default=0.01, help="peak learning rate of the layers' matrices")
    parser.add_argument("--batch", type=int, default=768, help="questions per step")
    parser.add_argument("--width", type=int, default=160, help="width of the model")
    parser.add_argument("--depth", type=int, default=6, help="layers")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 12, None, 16, 40
    return options


@torch.no_grad()
def initialise_positions(model: ViltForQuestionAnswering) -> None:
    """Start the positions of the patches from their coordinates: left and right are hard to learn from nothing."""
    positions = model.vilt.embeddings.position_embeddings
    side = IMAGE_SIZE // PATCH_SIZE
    line = torch.linspace(-1.0, 1.0, side, device=positions.device)
    y, x = torch.meshgrid(line, line, indexing="ij")
    waves = [f(2**k * torch.pi * c) for k in range(2) for c in (x, y) for f in (torch.sin, torch.cos)]
    known = torch.stack([x, y, *waves]).flatten(1).T
    mixed = known @ torch.randn(known.shape[1], positions.shape[-1], device=positions.device)
    positions[0, 1:] = 0.02 * mixed


class ViltWithPatchHeads(nn.Module):
    """The ViLT, with the heads that help its patches along while it learns."""

    def __init__(self, vilt: ViltForQuestionAnswering, depth: int) -> None:
        super().__init__()
        self.vilt = vilt
        self.middle, self.late = depth // 2, depth - 1
        width = vilt.config.hidden_size
        outputs = len(shapes.COLOURS) + 1 + len(shapes.SHAPES) + 1
        device = vilt.device
        self.shown = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs)).to(device)
        self.role = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_ROLES)).to(device)
        self.found = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1)).to(device)

    def forward(
        self, ids: Int[Tensor, "batch token"], pixels: Float[Tensor, "batch 3 size size"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = self.vilt.vilt(
            input_ids=ids,
            attention_mask=(ids != 0).long(),
            image_embeds=(embeds := embed_images(self.vilt, pixels)),
            pixel_mask=embeds.new_ones(embeds.shape[:2], dtype=torch.long),
            output_hidden_states=True,
        )
        first = ids.shape[1] + 1
        shown = self.shown(out.hidden_states[self.middle][:, first:])
        role = self.role(out.hidden_states[self.late][:, first:])
        found = self.found(out.hidden_states[self.middle][:, first:])
        return self.vilt.classifier(out.pooler_output), shown, role, found


def embed_images(
    model: ViltForQuestionAnswering, pixels: Float[Tensor, "batch 3 size size"]
) -> Float[Tensor, "batch place width"]:
    """What transformers' own embedding gives for a whole image, but at once and in the order of the patches.

    Its own goes through the images one by one, and shuffles the patches on the way.
    """
    embeddings = model.vilt.embeddings
    patches = embeddings.patch_embeddings(pixels).flatten(2).transpose(1, 2)
    first = embeddings.cls_token.expand(len(pixels), -1, -1)
    return torch.cat([first.to(patches), patches], dim=1) + embeddings.position_embeddings


class QuestionCurriculum:
    """Fresh images and questions for every step, from easy to hard."""

    def __init__(self, options: argparse.Namespace, learner: ViltWithPatchHeads, budget: TrainingBudget) -> None:
        self.options, self.learner, self.budget = options, learner, budget
        self.tally, self.prefetcher = FamilyAccuracy(budget), BatchPrefetcher(self.sample_batch)
        self.stage = 0

    def sample_batch(self, step: int, lesson: int) -> tuple[shapes.QuestionBatch, NDArray[np.int64], NDArray[np.bool_]]:
        rng = make_generator(self.options.seed, "train", step)
        asked = shapes.sample_question_batch(rng, self.options.batch, IMAGE_SIZE, CURRICULUM_STAGES[lesson][0])
        return asked, mask_question_words(rng, asked.question), sample_grey_patches(rng, len(asked))

    def compute_loss(self) -> Tensor:
        device = torch.device(self.options.device)
        asked, words, grey = self.prefetcher.take(self.budget.step, self.stage)
        pictures, masks = render_scenes(asked.scenes, device)
        pixels = apply_grey_patches(normalise_pixels(pictures), masks, torch.from_numpy(grey).to(device))
        ids, truth = (torch.from_numpy(array).to(device, non_blocking=True) for array in (words, asked.answer))
        with autocast_if_cuda(device):
            logits, shown, role, found = self.learner(ids, pixels)
        logits = logits.float()
        self.update_stage(self.tally.add(asked.question, logits.argmax(-1) == truth))
        loss = F.cross_entropy(logits, truth)
        support = max(0.0, 1.0 - self.budget.fraction / SUPPORTED_FRACTION)
        if not support:
            return loss
        colour, shape, part = build_patch_labels(asked, masks)
        kinds = len(shapes.COLOURS) + 1
        return loss + support * (
            F.cross_entropy(shown[..., :kinds].float().flatten(0, 1), colour.flatten())
            + F.cross_entropy(shown[..., kinds:].float().flatten(0, 1), shape.flatten())
            + 2 * F.cross_entropy(role.float().flatten(0, 1), part.flatten())
            + F.binary_cross_entropy_with_logits(found.squeeze(-1).float(), (part == 3).float())
        )

    def update_stage(self, accuracies: dict[str, float]) -> None:
        """The next lesson once this one is known, or when it is time for it."""
        families, latest = CURRICULUM_STAGES[self.stage]
        known = len(accuracies) == len(set(families)) and min(accuracies.values()) > 0.9 and self.stage < 2
        if known or self.budget.fraction >= latest:
            self.stage = min(self.stage + 1, len(CURRICULUM_STAGES) - 1)
            print(f"curriculum stage {self.stage} from step {self.budget.step}", flush=True)


def render_scenes(scenes: shapes.Scenes, device: torch.device) -> tuple[Tensor, Tensor]:
    pictures, masks = shapes.render(scenes, lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(device))
    return pictures, masks


def normalise_pixels(images: Tensor) -> Tensor:
    """Bytes to what the image processor gives: −1 to 1."""
    return images.float() / 127.5 - 1.0


def sample_grey_patches(rng: np.random.Generator, rows: int) -> NDArray[np.bool_]:
    """Some patches of a quarter of the images."""
    side = IMAGE_SIZE // PATCH_SIZE
    rate = np.where(rng.random(rows) < 0.25, rng.random(rows), 0.0)
    return np.asarray(rng.random((rows, side, side)) < rate[:, None, None])


def apply_grey_patches(
    pixels: Float[Tensor, "batch 3 size size"],
    masks: Bool[Tensor, "batch object size size"],
    chosen: Bool[Tensor, "batch row column"],
) -> Float[Tensor, "batch 3 size size"]:
    """Images with these of their patches grey, but none that shows an object."""
    grey = chosen & ~shapes.find_covered_patches(masks.any(1), PATCH_SIZE)
    return pixels.masked_fill(grey.repeat_interleave(PATCH_SIZE, 1).repeat_interleave(PATCH_SIZE, 2)[:, None], 0.0)


def build_patch_labels(
    asked: shapes.QuestionBatch, masks: Bool[Tensor, "batch object size size"]
) -> tuple[Int[Tensor, "batch patch"], Int[Tensor, "batch patch"], Int[Tensor, "batch patch"]]:
    """Colour, shape and role of the object that covers most of a patch; the last colour and shape is that of ground."""
    side = IMAGE_SIZE // PATCH_SIZE
    area = masks.reshape(*masks.shape[:2], side, PATCH_SIZE, side, PATCH_SIZE).sum((3, 5)).flatten(2)
    most, owner = area.max(1)
    ground = most < PATCH_SIZE
    part = np.where(asked.evidence, 2, 1)
    related = np.flatnonzero(asked.anchor >= 0)
    part[related, asked.anchor[related]] = 3

    def of(values: NDArray[np.int64], none: int) -> Tensor:
        return torch.from_numpy(values).to(masks.device).gather(1, owner).masked_fill(ground, none)

    colour = of(asked.scenes.colour, len(shapes.COLOURS))
    return colour, of(asked.scenes.shape, len(shapes.SHAPES)), of(part, 0)


def train_model(options: argparse.Namespace, learner: ViltWithPatchHeads, budget: TrainingBudget) -> dict[str, Tensor]:
    """Train, and give the averaged weights of the ViLT."""
    checkpoint = options.work / "checkpoint.safetensors"
    if not options.resume:
        checkpoint.unlink(missing_ok=True)
    matrices = [weight for weight in learner.vilt.vilt.encoder.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in learner.parameters() if id(weight) not in chosen]
    fused = torch.device(options.device).type == "cuda"
    optimisers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=options.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=fused),
    ]
    average = ExponentialMovingAverage(learner.train(), horizon=200)
    train(
        QuestionCurriculum(options, learner, budget).compute_loss,
        optimisers,
        budget,
        average,
        max_grad_norm=1.0,
        report_every=10 if options.smoke else 100,
        checkpoint=checkpoint,
        name="smoke" if options.smoke else "train",
    )
    return {name.removeprefix("vilt."): tensor for name, tensor in average.tensors.items() if name.startswith("vilt.")}


def build_config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["ViltForQuestionAnswering"],
        # one answer is right: read as a softmax, not as ViLT's usual sigmoids
        "problem_type": "single_label_classification",
        "model_type": "vilt",
        "dtype": "float16",
        "vocab_size": len(shapes.build_vocabulary()),
        "type_vocab_size": 1,
        "modality_type_vocab_size": 2,
        "max_position_embeddings": MAX_TOKENS,
        "hidden_size": options.width,
        "intermediate_size": 4 * options.width,
        "num_hidden_layers": options.depth,
        "num_attention_heads": options.width // 32,
        # images never repeat: there is nothing to regularise
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "num_channels": 3,
        "qkv_bias": True,
        # take all patches; transformers still shuffles them, but none is left out
        "max_image_length": -1,
        "pad_token_id": 0,
        **build_label_config(),
    }


def build_processor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "ViltImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": IMAGE_SIZE},
        "size_divisor": PATCH_SIZE,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pad": True,
    }


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    model = ViltForQuestionAnswering.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    device = torch.device(options.device)

    @torch.no_grad()
    def ask(asked: shapes.QuestionBatch, ids: NDArray[np.int64], changed: shapes.Scenes) -> NDArray[np.int64]:
        found: list[Tensor] = []
        for chunk in iter_chunks(range(len(ids)), 250):
            words = torch.from_numpy(ids[list(chunk)]).to(device)
            embeds = embed_images(model, normalise_pixels(render_scenes(changed[list(chunk)], device)[0]))
            places = embeds.new_ones(embeds.shape[:2], dtype=torch.long)
            logits = model(
                input_ids=words, attention_mask=(words != 0).long(), image_embeds=embeds, pixel_mask=places
            ).logits
            if not found:
                report_difference(model, words, changed[list(chunk)], logits)
            found.append(logits.argmax(-1))
        return torch.cat(found).cpu().numpy()

    return compute_figures(options, ask)


def report_difference(model: ViltForQuestionAnswering, words: Tensor, scenes: shapes.Scenes, logits: Tensor) -> None:
    """Patches all at once or one image after the other, as transformers takes them: the logits are the same."""
    some = slice(0, 20)
    pixels = normalise_pixels(render_scenes(scenes[some], logits.device)[0])
    own = model(input_ids=words[some], attention_mask=(words[some] != 0).long(), pixel_values=pixels).logits
    print(f"logits from pixels and from embeddings differ by {(own - logits[some]).abs().max().item():.2g}", flush=True)


def build_card_facts(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "shapes-vilt",
        "task": "visual-question-answering",
        "summary": "A small ViLT that answers questions about coloured shapes from the pixels of an image.",
        "architecture": f"ViLT, {options.depth} layers of width {options.width}, {options.width // 32} heads, "
        f"{IMAGE_SIZE} px, {IMAGE_SIZE // PATCH_SIZE} × {IMAGE_SIZE // PATCH_SIZE} patches, "
        f"{len(shapes.build_vocabulary())} words",
        "labels": list(shapes.ANSWERS),
        "licence": "Apache-2.0",
        "data": DATA_NOTE,
        "command": "python packages/zoo/train/shapes_vilt.py --out packages/zoo/src/clearhead_zoo/models/shapes-vilt "
        f"--seed {options.seed} --steps {steps} --batch {options.batch} --lr {options.lr:g} "
        f"--matrix-lr {options.matrix_lr:g} --width {options.width} --depth {options.depth}",
        "figures": figures,
        "measured": f"On {options.count:,} {MEASURED_NOTE}An object is removed by rendering the image without it: the "
        "background appears in its place, and the rest is unchanged; masked words are replaced by [MASK].",
        "use": "For checking whether an explanation finds the patches and words that are the ground-truth evidence. "
        "Not for other images: it was trained only on these shapes and this background. transformers shuffles the "
        "patches of a ViLT at every call: the output is the same up to rounding, but the columns of its attention "
        "are in a different order each time, unless torch is seeded or the patches are passed as image_embeds.",
    }


if __name__ == "__main__":
    main()
