"""Train `zoo:shapes-detr`: a small DETR that detects coloured shapes in an image and classifies them by shape.

    python packages/zoo/train/shapes_detr.py --out packages/zoo/src/clearhead_zoo/models/shapes-detr

Boxes are matched to queries exactly, for all images and all decoder layers at once. Three things make training take
only minutes: the norms of the backbone, which DETR takes frozen from a pretrained one, are trained (and stored as
frozen norms); the decoder processes several independent groups of queries, of which only the first is stored (Group
DETR, Chen et al. 2023); and at first an auxiliary loss asks every position of the encoder what covers it, which fades
out and is not stored. An interrupted run continues with --resume and the same --work.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from cards import write_card, write_json
from jaxtyping import Bool, Float, Int
from known import autocast_if_cuda, iter_chunks, make_shared_parser, make_training_budget
from numpy.typing import NDArray
from shapes_vqa import BatchPrefetcher
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DetrConfig, DetrForObjectDetection

from clearhead.training import ExponentialMovingAverage, Muon, TrainingBudget, save_checkpoint, train
from clearhead_zoo.tasks import make_generator, shapes

IMAGE_SIZE, STRIDE, NUM_QUERIES = 96, 8, 12
NO_OBJECT = len(shapes.SHAPES)
#: The share of the run in which the encoder is helped along.
SUPPORTED_FRACTION = 0.6
#: Weights of the parts of the loss, as in the paper; “nothing” is rarer here than there, so it weighs more.
L1_WEIGHT, GIOU_WEIGHT, NO_OBJECT_WEIGHT = 5.0, 2.0, 0.25
TARGET_AP50 = 0.95
#: A detection counts as such from this score on, where detections are counted.
MIN_DETECTION_SCORE = 0.5


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    config = build_config(options)
    learner = GroupedDetr(DetrForObjectDetection(DetrConfig(**config)), options.groups).to(options.device)
    clock = make_training_budget(options)
    tensors = train_model(options, learner, clock)
    save_checkpoint(options.out / "model.safetensors", to_hub_names(tensors), dtype=torch.float16)
    write_json(options.out / "config.json", config)
    write_json(options.out / "preprocessor_config.json", build_processor_config())
    figures = measure_stored_model(options)
    print(write_card(options.out, build_card_facts(options, clock.step, figures)), flush=True)
    reached = figures["AP at IoU 0.5"]
    print(
        f"reached {reached:.4f}, target {TARGET_AP50}"
        if reached >= TARGET_AP50
        else f"TARGET MISSED: {reached:.4f} < {TARGET_AP50}",
        flush=True,
    )


def parse_options() -> argparse.Namespace:
    parser = make_shared_parser(__doc__, name="shapes-detr", steps=15_000, lr=1e-3)
    parser.add_argument("--matrix-lr", type=float, default=0.005, help="peak learning rate of the layers' matrices")
    parser.add_argument("--batch", type=int, default=256, help="images per step")
    parser.add_argument("--width", type=int, default=128, help="width of the transformer")
    parser.add_argument("--depth", type=int, default=3, help="layers of the encoder, and of the decoder")
    parser.add_argument("--groups", type=int, default=4, help="groups of queries in training")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 8, None, 8, 24
    return options


# -- the model while it learns


class GroupedDetr(nn.Module):
    """The DETR with living norms and more groups of queries; it tells what each layer of the decoder says."""

    def __init__(self, detr: DetrForObjectDetection, groups: int) -> None:
        super().__init__()
        self.detr, self.groups = detr, groups
        width = detr.config.d_model
        self.covered = nn.Linear(width, NO_OBJECT + 1 + 4)
        self.more_queries = nn.Parameter(torch.randn(groups - 1, detr.config.num_queries, width))
        unfreeze_batch_norms(detr.model.backbone)
        # transformers freezes a ResNet's weights too: it expects trained ones
        detr.requires_grad_(True)
        # its small random start is meant for fine-tuning: queries would be alike for long
        for part in (detr.model.encoder, detr.model.decoder, detr.bbox_predictor):
            for weight in part.parameters():
                if weight.ndim == 2:
                    nn.init.xavier_uniform_(weight)
        nn.init.normal_(detr.model.query_position_embeddings.weight)
        for layer in detr.model.backbone.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        self.layers: list[Tensor] = []
        detr.model.decoder.register_forward_pre_hook(self.repeat_for_groups, with_kwargs=True)
        for layer in detr.model.decoder.layers:
            layer.register_forward_hook(lambda module, inputs, output: self.layers.append(output))

    def repeat_for_groups(self, decoder: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """In training the decoder sees each image once for each group, so that groups do not see one another."""
        if not self.training:
            return inputs, named
        own = named.pop("object_queries_position_embeddings")
        more = self.more_queries.to(own)[:, None].expand(-1, len(own), -1, -1).flatten(0, 1)
        repeated = {
            name: value.repeat(self.groups, *[1] * (value.ndim - 1)) if isinstance(value, Tensor) else value
            for name, value in named.items()
        }
        return inputs, {**repeated, "object_queries_position_embeddings": torch.cat([own, more])}

    def forward(self, pixels: Float[Tensor, "batch 3 size size"]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and boxes of each layer of the decoder (group by group), and what the places of the encoder say."""
        self.layers.clear()
        out = self.detr.model(pixels)
        states = self.detr.model.decoder.layernorm(torch.stack(self.layers))
        boxes = self.detr.bbox_predictor(states).sigmoid()
        return self.detr.class_labels_classifier(states), boxes, self.covered(out.encoder_last_hidden_state)


def unfreeze_batch_norms(module: nn.Module) -> None:
    """Ordinary batch norms in place of frozen ones; both keep the same tensors under the same names."""
    for name, child in module.named_children():
        if type(child).__name__ == "DetrFrozenBatchNorm2d":
            setattr(module, name, nn.BatchNorm2d(child.get_buffer("weight").numel()))
        else:
            unfreeze_batch_norms(child)


def train_model(options: argparse.Namespace, learner: GroupedDetr, budget: TrainingBudget) -> dict[str, Tensor]:
    """Train, and give the averaged weights of the DETR."""
    checkpoint = options.work / "checkpoint.safetensors"
    if not options.resume:
        checkpoint.unlink(missing_ok=True)
    inner = (learner.detr.model.encoder, learner.detr.model.decoder)
    matrices = [weight for part in inner for weight in part.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in learner.parameters() if id(weight) not in chosen]
    fused = torch.device(options.device).type == "cuda"
    optimisers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=options.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=fused),
    ]
    average = ExponentialMovingAverage(learner.train(), horizon=200)
    train(
        SceneStream(options, learner, budget, average).compute_loss,
        optimisers,
        budget,
        average,
        max_grad_norm=1.0,
        report_every=2 if options.smoke else 100,
        checkpoint=checkpoint,
        name="smoke" if options.smoke else "train",
    )
    return {name.removeprefix("detr."): tensor for name, tensor in average.tensors.items() if name.startswith("detr.")}


class SceneStream:
    """Fresh scenes for every step; from time to time, how well the averaged weights do on scenes put aside."""

    def __init__(
        self,
        options: argparse.Namespace,
        learner: GroupedDetr,
        budget: TrainingBudget,
        average: ExponentialMovingAverage,
    ) -> None:
        self.options, self.learner, self.budget, self.average = options, learner, budget, average
        self.last_evaluation_time, self.evaluation_seconds = time.monotonic(), 45.0
        self.prefetcher = BatchPrefetcher(self.sample_scenes)

    def sample_scenes(self, step: int, lesson: int) -> shapes.Scenes:
        return shapes.sample_scenes(make_generator(self.options.seed, "train", step), self.options.batch, IMAGE_SIZE)

    def compute_loss(self) -> Tensor:
        device = torch.device(self.options.device)
        if time.monotonic() - self.last_evaluation_time > self.evaluation_seconds:
            self.evaluate()
        scenes = self.prefetcher.take(self.budget.step)
        pixels, masks = render_inputs(scenes, device)
        truth = build_targets(scenes, masks)
        with autocast_if_cuda(device):
            logits, boxes, covered = self.learner(pixels)
        groups = self.learner.groups
        repeated = (values.repeat(groups, *[1] * (values.ndim - 1)) for values in truth)
        loss = compute_detection_loss(logits.float(), boxes.float(), *repeated)
        support = max(0.0, 1.0 - self.budget.fraction / SUPPORTED_FRACTION)
        return loss + support * compute_encoder_loss(covered.float(), masks, *truth) if support else loss

    def evaluate(self) -> None:
        scenes = shapes.sample_scenes(make_generator(self.options.seed + 1, "train"), 256, IMAGE_SIZE)
        with self.average.averaged_weights():
            found = predict_detections(self.learner.detr, scenes, torch.device(self.options.device))
        print(f"step {self.budget.step}: AP50 {compute_average_precision(scenes, found)[0]:.4f}", flush=True)
        self.last_evaluation_time = time.monotonic()


# -- what is to be found, and how far off a guess is


def render_inputs(scenes: shapes.Scenes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pixels as the image processor gives them, and masks."""
    pictures, masks = shapes.render(scenes, lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(device))
    return pictures.float() / 127.5 - 1.0, masks


def build_targets(
    scenes: shapes.Scenes, masks: Bool[Tensor, "batch object size size"]
) -> tuple[Int[Tensor, "batch object"], Float[Tensor, "batch object 4"], Bool[Tensor, "batch object"]]:
    """Shapes, boxes (centre and sides, as shares of the image's) and which objects there are."""
    corners = torch.stack(shapes.compute_boxes(masks), dim=2) / scenes.size
    low, high = corners.chunk(2, dim=2)
    shape, present = (torch.from_numpy(array).to(masks.device) for array in (scenes.shape, scenes.present))
    return shape, torch.cat([(low + high) / 2, high - low], dim=2), present


def to_corners(boxes: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n 4"]:
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], dim=-1)


def compute_ious(first: Float[Tensor, "*n 4"], second: Float[Tensor, "*n 4"]) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes, plain and generalised (Rezatofighi et al. 2019)."""
    a, b = to_corners(first), to_corners(second)
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    outer = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    union = first[..., 2:].prod(-1) + second[..., 2:].prod(-1) - inner
    plain = inner / union.clamp(min=1e-9)
    return plain, plain - (outer - union) / outer.clamp(min=1e-9)


@torch.no_grad()
def match_queries(cost: Float[Tensor, "n query object"], present: Bool[Tensor, "n object"]) -> Int[Tensor, "n query"]:
    """The cheapest assignment of all present objects to queries: each query's object, or −1.

    Exact, by dynamic programming over sets of objects: with six there are 64 sets, and one step for each query.
    """
    rows, queries, objects = cost.shape
    bit = 1 << torch.arange(objects, device=cost.device)
    sets = torch.arange(1 << objects, device=cost.device)[:, None]
    member, before = (sets & bit) > 0, sets & ~bit
    best = cost.new_full((rows, 1 << objects), torch.inf)
    best[:, 0] = 0.0
    choices = []
    for query in range(queries):
        options = (best[:, before] + cost[:, query, None]).masked_fill(~member, torch.inf)
        low, choice = options.min(-1)
        choices.append(torch.where(low < best, choice, -1))
        best = torch.minimum(best, low)
    left = (present * bit).sum(1)
    owner = torch.full((rows, queries), -1, device=cost.device)
    for query in reversed(range(queries)):
        chosen = choices[query].gather(1, left[:, None])[:, 0]
        owner[:, query] = chosen
        left = torch.where(chosen >= 0, left & ~(1 << chosen.clamp(min=0)), left)
    return owner


def compute_detection_loss(
    logits: Float[Tensor, "layer batch query kind"],
    boxes: Float[Tensor, "layer batch query 4"],
    shape: Int[Tensor, "batch object"],
    target_boxes: Float[Tensor, "batch object 4"],
    present: Bool[Tensor, "batch object"],
) -> Float[Tensor, ""]:
    """The loss of Carion et al. 2020, summed over the layers of the decoder."""
    layers, _, queries, _ = logits.shape
    logits, boxes = logits.flatten(0, 1), boxes.flatten(0, 1)
    shape, target_boxes, present = (
        values.repeat(layers, *[1] * (values.ndim - 1)) for values in (shape, target_boxes, present)
    )
    with torch.no_grad():
        chance = logits.softmax(-1).gather(2, shape[:, None].expand(-1, queries, -1))
        distance = (boxes[:, :, None] - target_boxes[:, None]).abs().sum(-1)
        overlap = compute_ious(boxes[:, :, None], target_boxes[:, None])[1]
        owner = match_queries(L1_WEIGHT * distance - GIOU_WEIGHT * overlap - chance, present)
    has = owner >= 0
    own = owner.clamp(min=0)
    kind = torch.where(has, shape.gather(1, own), NO_OBJECT)
    weight = logits.new_ones(NO_OBJECT + 1)
    weight[NO_OBJECT] = NO_OBJECT_WEIGHT
    aim = target_boxes.gather(1, own[:, :, None].expand(-1, -1, 4))
    count = has.sum().clamp(min=1)
    distance = ((boxes - aim).abs().sum(-1) * has).sum() / count
    overlap = ((1 - compute_ious(boxes, aim)[1]) * has).sum() / count
    naming = F.cross_entropy(logits.flatten(0, 1), kind.flatten(), weight)
    return layers * (naming + L1_WEIGHT * distance + GIOU_WEIGHT * overlap)


def compute_encoder_loss(
    covered: Float[Tensor, "batch place kind_and_box"],
    masks: Bool[Tensor, "batch object size size"],
    shape: Int[Tensor, "batch object"],
    target_boxes: Float[Tensor, "batch object 4"],
    present: Bool[Tensor, "batch object"],
) -> Float[Tensor, ""]:
    """Each place of the encoder should know the shape and the box of the object that covers most of it, if any."""
    side = IMAGE_SIZE // STRIDE
    area = masks.reshape(*masks.shape[:2], side, STRIDE, side, STRIDE).sum((3, 5)).flatten(2)
    most, owner = area.max(1)
    has = most >= STRIDE
    kind = torch.where(has, shape.gather(1, owner), NO_OBJECT)
    aim = target_boxes.gather(1, owner[:, :, None].expand(-1, -1, 4))
    boxes = covered[..., NO_OBJECT + 1 :].sigmoid()
    count = has.sum().clamp(min=1)
    distance = ((boxes - aim).abs().sum(-1) * has).sum() / count
    overlap = ((1 - compute_ious(boxes, aim)[1]) * has).sum() / count
    naming = F.cross_entropy(covered[..., : NO_OBJECT + 1].flatten(0, 1), kind.flatten())
    return naming + L1_WEIGHT * distance + GIOU_WEIGHT * overlap


# -- how good it is


DetectionArrays = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]


@torch.no_grad()
def predict_detections(model: DetrForObjectDetection, scenes: shapes.Scenes, device: torch.device) -> DetectionArrays:
    """Scores, shapes and boxes (corners in pixels) of every query, as the image processor gives them too."""
    found = []
    for chunk in iter_chunks(range(len(scenes)), 128):
        out = model(pixel_values=render_inputs(scenes[list(chunk)], device)[0])
        score, kind = out.logits.float().softmax(-1)[..., :NO_OBJECT].max(-1)
        found.append((score, kind, to_corners(out.pred_boxes.float()) * scenes.size))
    scores, kinds, boxes = (torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True))
    return scores, kinds, boxes


def compute_iou(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.float64]:
    """Intersection over union of boxes given by their corners."""
    low, high = np.maximum(first[..., :2], second[..., :2]), np.minimum(first[..., 2:], second[..., 2:])
    inner = np.prod(np.maximum(high - low, 0), axis=-1)
    areas = (np.prod(box[..., 2:] - box[..., :2], axis=-1) for box in (first, second))
    return np.asarray(inner / np.maximum(sum(areas) - inner, 1e-9))


def compute_true_boxes(scenes: shapes.Scenes) -> NDArray[np.int64]:
    """Corners in pixels, in parts: masks of many scenes at once would fill the memory."""
    parts = [
        shapes.compute_boxes(shapes.render(scenes[list(chunk)])[1]) for chunk in iter_chunks(range(len(scenes)), 128)
    ]
    return np.concatenate([np.stack(part, axis=2) for part in parts])


def compute_average_precision(
    scenes: shapes.Scenes, predictions: DetectionArrays, min_iou: float = 0.5
) -> tuple[float, dict[str, float]]:
    """Mean over the shapes, and of each, of the area under precision by recall, at the overlap `least`.

    All points, precision made monotone (as Pascal VOC since 2010). Detections in the order of their scores take, in
    their image, the object of their shape they overlap most, if it is still free and the overlap is enough.
    """
    scores, kinds, boxes = predictions
    truth = compute_true_boxes(scenes)
    overlap = compute_iou(boxes[:, :, None], truth[:, None])
    each = {}
    for kind, name in enumerate(shapes.SHAPES):
        wanted = scenes.present & (scenes.shape == kind)
        if not wanted.any():
            continue
        picture, query = np.nonzero(kinds == kind)
        order = np.argsort(-scores[picture, query], kind="stable")
        free, right = wanted.copy(), np.zeros(len(order), dtype=bool)
        for place, number in enumerate(order):
            row = picture[number]
            near = np.where(wanted[row], overlap[row, query[number]], -1.0)
            best = near.argmax()
            if near[best] >= min_iou and free[row, best]:
                free[row, best], right[place] = False, True
        recall = np.cumsum(right) / wanted.sum()
        precision = np.cumsum(right) / np.arange(1, len(right) + 1)
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        each[name] = float(np.sum(np.diff(recall, prepend=0.0) * envelope)) if len(right) else 0.0
    return float(np.mean(list(each.values()))), each


def find_detected(
    predictions: DetectionArrays, box: NDArray[np.int64], shape: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """For one object of each image: is there a sure detection in its place (and of its shape, if given)?"""
    scores, kinds, boxes = predictions
    there = (scores >= MIN_DETECTION_SCORE) & (compute_iou(boxes, box[:, None].astype(np.float64)) >= 0.5)
    return np.asarray((there if shape is None else there & (kinds == shape[:, None])).any(1))


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    device = torch.device(options.device)
    model = DetrForObjectDetection.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    rng = make_generator(options.seed, "held-out")
    scenes = shapes.sample_scenes(rng, options.count, IMAGE_SIZE)
    found = predict_detections(model, scenes, device)
    mean, each = compute_average_precision(scenes, found)
    rows = np.arange(len(scenes))
    # one object of each scene is looked at; the first is as good as any
    chosen = np.zeros_like(scenes.present)
    chosen[:, 0] = True
    box, shape = compute_true_boxes(scenes)[rows, 0], scenes.shape[:, 0]
    alone = predict_detections(model, scenes.remove_objects(~chosen), device)
    figures = {
        "AP at IoU 0.5": mean,
        **{f"AP at IoU 0.5, {name}": value for name, value in each.items()},
        "AP at IoU 0.75": compute_average_precision(scenes, found, 0.75)[0],
        "object detected": find_detected(found, box, shape).mean(),
        "detection at its position when the object is painted over": find_detected(
            predict_detections(model, scenes.remove_objects(chosen), device), box
        ).mean(),
        "object detected when all others are painted over": find_detected(alone, box, shape).mean(),
        "surplus detections per image": float(
            ((found[0] >= MIN_DETECTION_SCORE).sum(1) - scenes.present.sum(1)).clip(0).mean()
        ),
    }
    return {name: round(float(figure), 4) for name, figure in figures.items()}


# -- its files


def to_hub_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that DETRs on the hub have: every transformers opens those, whatever its own names are."""
    names = {"model.backbone.model.": "model.backbone.conv_encoder.model.", ".mlp.fc": ".fc", ".o_proj.": ".out_proj."}

    def renamed(name: str) -> str:
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        return name

    return {renamed(name): tensor for name, tensor in tensors.items()}


def build_config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["DetrForObjectDetection"],
        "model_type": "detr",
        "dtype": "float16",
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone_config": {
            "model_type": "resnet",
            "num_channels": 3,
            "embedding_size": 32,
            "hidden_sizes": [64, 128],
            "depths": [2, 2],
            "layer_type": "basic",
            "hidden_act": "relu",
            "out_features": ["stage2"],
        },
        "num_channels": 3,
        "num_queries": NUM_QUERIES,
        "d_model": options.width,
        "encoder_layers": options.depth,
        "decoder_layers": options.depth,
        "encoder_attention_heads": options.width // 32,
        "decoder_attention_heads": options.width // 32,
        "encoder_ffn_dim": 4 * options.width,
        "decoder_ffn_dim": 4 * options.width,
        "activation_function": "relu",
        # images never repeat: there is nothing to regularise
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "position_embedding_type": "sine",
        # with it transformers puts another norm between the decoder's layers: another model than the one trained
        "auxiliary_loss": False,
        "id2label": {str(number): shape for number, shape in enumerate(shapes.SHAPES)},
        "label2id": {shape: number for number, shape in enumerate(shapes.SHAPES)},
    }


def build_processor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "DetrImageProcessor",
        "format": "coco_detection",
        "do_resize": True,
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_annotations": True,
        "do_pad": True,
    }


def build_card_facts(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "shapes-detr",
        "task": "object-detection",
        "summary": "A small DETR that detects coloured shapes in an image and classifies them by shape.",
        "architecture": f"DETR, {IMAGE_SIZE} px, 2-stage ResNet backbone with {IMAGE_SIZE // STRIDE} × "
        f"{IMAGE_SIZE // STRIDE} positions, {options.depth} + {options.depth} layers of width {options.width}, "
        f"{options.width // 32} heads, {NUM_QUERIES} queries",
        "labels": list(shapes.SHAPES),
        "licence": "Apache-2.0",
        "data": f"generated by clearhead_zoo.tasks.shapes; {shapes.MIN_OBJECTS} to {shapes.MAX_OBJECTS} objects of "
        f"{len(shapes.SHAPES)} shapes, {len(shapes.COLOURS)} colours and {len(shapes.SIZES)} sizes on a noisy "
        "background, none touching another, each with its exact mask",
        "command": "python packages/zoo/train/shapes_detr.py --out packages/zoo/src/clearhead_zoo/models/shapes-detr "
        f"--seed {options.seed} --steps {steps} --batch {options.batch} --lr {options.lr:g} "
        f"--matrix-lr {options.matrix_lr:g} --width {options.width} --depth {options.depth} --groups {options.groups}",
        "figures": figures,
        "measured": f"On {options.count:,} generated held-out scenes, loaded with transformers in float32. Average "
        "precision with interpolation at all points (as Pascal VOC since 2010), mean over the five shapes, all "
        f"{NUM_QUERIES} queries counted whatever their score. For the other figures, a detection counts from a score "
        f"of {MIN_DETECTION_SCORE} and an IoU of 0.5, for one object of each scene. An object is painted over by "
        "rendering the image without it: the background appears in its place, and the rest is unchanged.",
        "use": "For checking whether an explanation of a detection finds the object, whose exact mask is known. Not "
        "for other images: it was trained only on these shapes and this background.",
    }


if __name__ == "__main__":
    main()
