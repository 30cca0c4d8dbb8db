"""Train `zoo:shapes-detr`: a small DETR that finds coloured shapes in a picture and says which shapes they are.

    python packages/zoo/train/shapes_detr.py --out packages/zoo/src/clearhead_zoo/models/shapes-detr

Boxes are matched to queries exactly, for all pictures and all layers of the decoder at once. Three things make it
learn in minutes: the norms of the backbone, which DETR takes frozen from a trained one, are alive during training (and
stored as the frozen ones); the decoder answers several groups of queries, each for itself, of which the first is stored
(Group DETR, Chen et al. 2023); and at first every place of the encoder is asked what covers it, which fades and is not
stored. A cut run goes on with --resume and the same --work.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from cards import write_card, write_json
from jaxtyping import Bool, Float, Int
from known import chunks, clock_of, half_precision, shared_options
from numpy.typing import NDArray
from shapes_vqa import Ahead
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DetrConfig, DetrForObjectDetection

from clearhead.training import Average, Clock, Muon, save_checkpoint, train
from clearhead_zoo.tasks import generator, shapes

SIZE, STRIDE, QUERIES = 96, 8, 12
NONE = len(shapes.SHAPES)
#: The share of the run in which the encoder is helped along.
SUPPORTED = 0.6
#: Weights of the parts of the loss, as in the paper; “nothing” is rarer here than there, so it weighs more.
BY_DISTANCE, BY_OVERLAP, NOTHING = 5.0, 2.0, 0.25
BAR = 0.95
#: A detection counts as such from this score on, where detections are counted.
SURE = 0.5


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    config = config_of(options)
    learner = Learner(DetrForObjectDetection(DetrConfig(**config)), options.groups).to(options.device)
    clock = clock_of(options)
    tensors = learn(options, learner, clock)
    save_checkpoint(options.out / "model.safetensors", hub_names(tensors), dtype=torch.float16)
    write_json(options.out / "config.json", config)
    write_json(options.out / "preprocessor_config.json", processor())
    figures = measure(options)
    print(write_card(options.out, facts_of(options, clock.step, figures)), flush=True)
    reached = figures["AP at IoU 0.5"]
    print(f"reached {reached:.4f}, bar {BAR}" if reached >= BAR else f"BAR MISSED: {reached:.4f} < {BAR}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = shared_options(__doc__, name="shapes-detr", steps=15_000, lr=1e-3)
    parser.add_argument("--matrix-lr", type=float, default=0.005, help="peak learning rate of the layers' matrices")
    parser.add_argument("--batch", type=int, default=256, help="pictures a step")
    parser.add_argument("--width", type=int, default=128, help="width of the transformer")
    parser.add_argument("--depth", type=int, default=3, help="layers of the encoder, and of the decoder")
    parser.add_argument("--groups", type=int, default=4, help="groups of queries in training")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 8, None, 8, 24
    return options


# -- the model while it learns


class Learner(nn.Module):
    """The DETR with living norms and more groups of queries; it tells what each layer of the decoder says."""

    def __init__(self, detr: DetrForObjectDetection, groups: int) -> None:
        super().__init__()
        self.detr, self.groups = detr, groups
        width = detr.config.d_model
        self.covered = nn.Linear(width, NONE + 1 + 4)
        self.more_queries = nn.Parameter(torch.randn(groups - 1, detr.config.num_queries, width))
        revive(detr.model.backbone)
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
        detr.model.decoder.register_forward_pre_hook(self.grouped, with_kwargs=True)
        for layer in detr.model.decoder.layers:
            layer.register_forward_hook(lambda module, inputs, output: self.layers.append(output))

    def grouped(self, decoder: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """In training the decoder sees each picture once for each group, so that groups do not see one another."""
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


def revive(module: nn.Module) -> None:
    """Ordinary batch norms in place of frozen ones; both keep the same tensors under the same names."""
    for name, child in module.named_children():
        if type(child).__name__ == "DetrFrozenBatchNorm2d":
            setattr(module, name, nn.BatchNorm2d(child.get_buffer("weight").numel()))
        else:
            revive(child)


def learn(options: argparse.Namespace, learner: Learner, clock: Clock) -> dict[str, Tensor]:
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
    average = Average(learner.train(), horizon=200)
    train(
        Lessons(options, learner, clock, average).loss,
        optimisers,
        clock,
        average,
        clip=1.0,
        report_every=2 if options.smoke else 100,
        checkpoint=checkpoint,
        name="smoke" if options.smoke else "train",
    )
    return {name.removeprefix("detr."): tensor for name, tensor in average.tensors.items() if name.startswith("detr.")}


class Lessons:
    """Fresh scenes for every step; from time to time, how well the averaged weights do on scenes put aside."""

    def __init__(self, options: argparse.Namespace, learner: Learner, clock: Clock, average: Average) -> None:
        self.options, self.learner, self.clock, self.average = options, learner, clock, average
        self.looked, self.every = time.monotonic(), 45.0
        self.ahead = Ahead(self.draw)

    def draw(self, step: int, lesson: int) -> shapes.Scenes:
        return shapes.scenes(generator(self.options.seed, "train", step), self.options.batch, SIZE)

    def loss(self) -> Tensor:
        device = torch.device(self.options.device)
        if time.monotonic() - self.looked > self.every:
            self.look()
        scenes = self.ahead.take(self.clock.step)
        pixels, masks = seen(scenes, device)
        truth = targets(scenes, masks)
        with half_precision(device):
            logits, boxes, covered = self.learner(pixels)
        groups = self.learner.groups
        repeated = (values.repeat(groups, *[1] * (values.ndim - 1)) for values in truth)
        loss = detection_loss(logits.float(), boxes.float(), *repeated)
        support = max(0.0, 1.0 - self.clock.fraction / SUPPORTED)
        return loss + support * covering_loss(covered.float(), masks, *truth) if support else loss

    def look(self) -> None:
        scenes = shapes.scenes(generator(self.options.seed + 1, "train"), 256, SIZE)
        with self.average.applied():
            found = detections(self.learner.detr, scenes, torch.device(self.options.device))
        print(f"step {self.clock.step}: AP50 {average_precision(scenes, found)[0]:.4f}", flush=True)
        self.looked = time.monotonic()


# -- what is to be found, and how far off a guess is


def seen(scenes: shapes.Scenes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pixels as the image processor gives them, and masks."""
    pictures, masks = shapes.render(scenes, lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(device))
    return pictures.float() / 127.5 - 1.0, masks


def targets(
    scenes: shapes.Scenes, masks: Bool[Tensor, "batch object size size"]
) -> tuple[Int[Tensor, "batch object"], Float[Tensor, "batch object 4"], Bool[Tensor, "batch object"]]:
    """Shapes, boxes (centre and sides, as shares of the picture's) and which objects there are."""
    corners = torch.stack(shapes.boxes(masks), dim=2) / scenes.size
    low, high = corners.chunk(2, dim=2)
    shape, present = (torch.from_numpy(array).to(masks.device) for array in (scenes.shape, scenes.present))
    return shape, torch.cat([(low + high) / 2, high - low], dim=2), present


def corners_of(boxes: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n 4"]:
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], dim=-1)


def overlaps(one: Float[Tensor, "*n 4"], other: Float[Tensor, "*n 4"]) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes, plain and generalised (Rezatofighi et al. 2019)."""
    a, b = corners_of(one), corners_of(other)
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    outer = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    union = one[..., 2:].prod(-1) + other[..., 2:].prod(-1) - inner
    plain = inner / union.clamp(min=1e-9)
    return plain, plain - (outer - union) / outer.clamp(min=1e-9)


@torch.no_grad()
def matched(cost: Float[Tensor, "n query object"], present: Bool[Tensor, "n object"]) -> Int[Tensor, "n query"]:
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


def detection_loss(
    logits: Float[Tensor, "layer batch query kind"],
    boxes: Float[Tensor, "layer batch query 4"],
    shape: Int[Tensor, "batch object"],
    truth: Float[Tensor, "batch object 4"],
    present: Bool[Tensor, "batch object"],
) -> Float[Tensor, ""]:
    """The loss of Carion et al. 2020, summed over the layers of the decoder."""
    layers, _, queries, _ = logits.shape
    logits, boxes = logits.flatten(0, 1), boxes.flatten(0, 1)
    shape, truth, present = (values.repeat(layers, *[1] * (values.ndim - 1)) for values in (shape, truth, present))
    with torch.no_grad():
        chance = logits.softmax(-1).gather(2, shape[:, None].expand(-1, queries, -1))
        distance = (boxes[:, :, None] - truth[:, None]).abs().sum(-1)
        overlap = overlaps(boxes[:, :, None], truth[:, None])[1]
        owner = matched(BY_DISTANCE * distance - BY_OVERLAP * overlap - chance, present)
    has = owner >= 0
    own = owner.clamp(min=0)
    kind = torch.where(has, shape.gather(1, own), NONE)
    weight = logits.new_ones(NONE + 1)
    weight[NONE] = NOTHING
    aim = truth.gather(1, own[:, :, None].expand(-1, -1, 4))
    count = has.sum().clamp(min=1)
    distance = ((boxes - aim).abs().sum(-1) * has).sum() / count
    overlap = ((1 - overlaps(boxes, aim)[1]) * has).sum() / count
    naming = F.cross_entropy(logits.flatten(0, 1), kind.flatten(), weight)
    return layers * (naming + BY_DISTANCE * distance + BY_OVERLAP * overlap)


def covering_loss(
    covered: Float[Tensor, "batch place kind_and_box"],
    masks: Bool[Tensor, "batch object size size"],
    shape: Int[Tensor, "batch object"],
    truth: Float[Tensor, "batch object 4"],
    present: Bool[Tensor, "batch object"],
) -> Float[Tensor, ""]:
    """Each place of the encoder should know the shape and the box of the object that covers most of it, if any."""
    side = SIZE // STRIDE
    area = masks.reshape(*masks.shape[:2], side, STRIDE, side, STRIDE).sum((3, 5)).flatten(2)
    most, owner = area.max(1)
    has = most >= STRIDE
    kind = torch.where(has, shape.gather(1, owner), NONE)
    aim = truth.gather(1, owner[:, :, None].expand(-1, -1, 4))
    boxes = covered[..., NONE + 1 :].sigmoid()
    count = has.sum().clamp(min=1)
    distance = ((boxes - aim).abs().sum(-1) * has).sum() / count
    overlap = ((1 - overlaps(boxes, aim)[1]) * has).sum() / count
    naming = F.cross_entropy(covered[..., : NONE + 1].flatten(0, 1), kind.flatten())
    return naming + BY_DISTANCE * distance + BY_OVERLAP * overlap


# -- how good it is


Found = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]


@torch.no_grad()
def detections(model: DetrForObjectDetection, scenes: shapes.Scenes, device: torch.device) -> Found:
    """Scores, shapes and boxes (corners in pixels) of every query, as the image processor gives them too."""
    found = []
    for chunk in chunks(range(len(scenes)), 128):
        out = model(pixel_values=seen(scenes[list(chunk)], device)[0])
        score, kind = out.logits.float().softmax(-1)[..., :NONE].max(-1)
        found.append((score, kind, corners_of(out.pred_boxes.float()) * scenes.size))
    scores, kinds, boxes = (torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True))
    return scores, kinds, boxes


def pixel_overlap(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """Intersection over union of boxes given by their corners."""
    low, high = np.maximum(one[..., :2], other[..., :2]), np.minimum(one[..., 2:], other[..., 2:])
    inner = np.prod(np.maximum(high - low, 0), axis=-1)
    areas = (np.prod(box[..., 2:] - box[..., :2], axis=-1) for box in (one, other))
    return np.asarray(inner / np.maximum(sum(areas) - inner, 1e-9))


def true_boxes(scenes: shapes.Scenes) -> NDArray[np.int64]:
    """Corners in pixels, in parts: masks of many scenes at once would fill the memory."""
    parts = [shapes.boxes(shapes.render(scenes[list(chunk)])[1]) for chunk in chunks(range(len(scenes)), 128)]
    return np.concatenate([np.stack(part, axis=2) for part in parts])


def average_precision(scenes: shapes.Scenes, found: Found, least: float = 0.5) -> tuple[float, dict[str, float]]:
    """Mean over the shapes, and of each, of the area under precision by recall, at the overlap `least`.

    All points, precision made monotone (as Pascal VOC since 2010). Detections in the order of their scores take, in
    their picture, the object of their shape they overlap most, if it is still free and the overlap is enough.
    """
    scores, kinds, boxes = found
    truth = true_boxes(scenes)
    overlap = pixel_overlap(boxes[:, :, None], truth[:, None])
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
            if near[best] >= least and free[row, best]:
                free[row, best], right[place] = False, True
        recall = np.cumsum(right) / wanted.sum()
        precision = np.cumsum(right) / np.arange(1, len(right) + 1)
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        each[name] = float(np.sum(np.diff(recall, prepend=0.0) * envelope)) if len(right) else 0.0
    return float(np.mean(list(each.values()))), each


def is_found(found: Found, box: NDArray[np.int64], shape: NDArray[np.int64] | None = None) -> NDArray[np.bool_]:
    """For one object of each picture: is there a sure detection in its place (and of its shape, if given)?"""
    scores, kinds, boxes = found
    there = (scores >= SURE) & (pixel_overlap(boxes, box[:, None].astype(np.float64)) >= 0.5)
    return np.asarray((there if shape is None else there & (kinds == shape[:, None])).any(1))


def measure(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    device = torch.device(options.device)
    model = DetrForObjectDetection.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    rng = generator(options.seed, "held-out")
    scenes = shapes.scenes(rng, options.count, SIZE)
    found = detections(model, scenes, device)
    mean, each = average_precision(scenes, found)
    rows = np.arange(len(scenes))
    # one object of each scene is looked at; the first is as good as any
    chosen = np.zeros_like(scenes.present)
    chosen[:, 0] = True
    box, shape = true_boxes(scenes)[rows, 0], scenes.shape[:, 0]
    alone = detections(model, scenes.without(~chosen), device)
    figures = {
        "AP at IoU 0.5": mean,
        **{f"AP at IoU 0.5, {name}": value for name, value in each.items()},
        "AP at IoU 0.75": average_precision(scenes, found, 0.75)[0],
        "finds an object": is_found(found, box, shape).mean(),
        "finds something in its place when the object is painted over": is_found(
            detections(model, scenes.without(chosen), device), box
        ).mean(),
        "finds the object when all others are painted over": is_found(alone, box, shape).mean(),
        "detections too many in a picture": float(((found[0] >= SURE).sum(1) - scenes.present.sum(1)).clip(0).mean()),
    }
    return {name: round(float(figure), 4) for name, figure in figures.items()}


# -- its files


def hub_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that DETRs on the hub have: every transformers opens those, whatever its own names are."""
    names = {"model.backbone.model.": "model.backbone.conv_encoder.model.", ".mlp.fc": ".fc", ".o_proj.": ".out_proj."}

    def renamed(name: str) -> str:
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        return name

    return {renamed(name): tensor for name, tensor in tensors.items()}


def config_of(options: argparse.Namespace) -> dict[str, Any]:
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
        "num_queries": QUERIES,
        "d_model": options.width,
        "encoder_layers": options.depth,
        "decoder_layers": options.depth,
        "encoder_attention_heads": options.width // 32,
        "decoder_attention_heads": options.width // 32,
        "encoder_ffn_dim": 4 * options.width,
        "decoder_ffn_dim": 4 * options.width,
        "activation_function": "relu",
        # pictures never repeat: there is nothing to regularise
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "position_embedding_type": "sine",
        # with it transformers puts another norm between the decoder's layers: another model than the one trained
        "auxiliary_loss": False,
        "id2label": {str(number): shape for number, shape in enumerate(shapes.SHAPES)},
        "label2id": {shape: number for number, shape in enumerate(shapes.SHAPES)},
    }


def processor() -> dict[str, Any]:
    return {
        "image_processor_type": "DetrImageProcessor",
        "format": "coco_detection",
        "do_resize": True,
        "size": {"height": SIZE, "width": SIZE},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_annotations": True,
        "do_pad": True,
    }


def facts_of(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "shapes-detr",
        "task": "object-detection",
        "summary": "A small DETR that finds coloured shapes in a picture and names their shapes.",
        "architecture": f"DETR, {SIZE} px, ResNet of 2 stages to {SIZE // STRIDE} × {SIZE // STRIDE} places, "
        f"{options.depth} + {options.depth} layers of width {options.width}, {options.width // 32} heads, "
        f"{QUERIES} queries",
        "labels": list(shapes.SHAPES),
        "licence": "Apache-2.0",
        "data": f"generated: clearhead_zoo.tasks.shapes; {shapes.LEAST} to {shapes.MOST} objects of "
        f"{len(shapes.SHAPES)} shapes, {len(shapes.COLOURS)} colours and {len(shapes.SIZES)} sizes on a noisy ground, "
        "none touching another, each with its exact mask",
        "command": "python packages/zoo/train/shapes_detr.py --out packages/zoo/src/clearhead_zoo/models/shapes-detr "
        f"--seed {options.seed} --steps {steps} --batch {options.batch} --lr {options.lr:g} "
        f"--matrix-lr {options.matrix_lr:g} --width {options.width} --depth {options.depth} --groups {options.groups}",
        "figures": figures,
        "measured": f"On {options.count:,} generated scenes of the held-out stream, opened with transformers in "
        "float32. Average precision with interpolation at all points (as Pascal VOC since 2010), mean over the five "
        f"shapes, all {QUERIES} queries counted whatever their score. Elsewhere a detection counts from a score of "
        f"{SURE} on and an overlap of 0.5, for one object of each scene. An object is painted over by rendering the "
        "picture without it: the ground is seen in its place, all else is the same.",
        "use": "For checking whether an explanation of a detection finds the object, whose exact mask is known. Not "
        "for other pictures: it knows its shapes on their noisy ground, and nothing else.",
    }


if __name__ == "__main__":
    main()
