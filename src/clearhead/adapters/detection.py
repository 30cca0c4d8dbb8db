"""Adapters for object detectors (DETR, YOLOS): explain the label that an object query predicts.

DETR and related models have two axes, the cells of the backbone's feature map ("image") and the object queries
("queries"). YOLOS has one axis, with its detection tokens after the patches. The read-out position is the query itself.
Detectors whose attention samples a few points of the image (Deformable DETR, RT-DETR …) have no attention map over it:
only methods that need no map can explain them.
"""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.adapters.base import Readout, register_adapter, unwrap_base_model
from clearhead.adapters.image import ImageAdapter
from clearhead.adapters.readers.image import denormalize_image, patchify
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.topology import is_deformable_attention
from clearhead.errors import InputError, UnsupportedError
from clearhead.machine_failures import is_machine_failure
from clearhead.sample import Sample
from clearhead.targets import DetectionQuery, MaskedToken, PositionTarget, Target, describe_spec
from clearhead.units import UnitAxis, Units, build_patch_units

#: Detectors that have a class for "nothing here", the last one; the others give each class a probability of its own.
_MODEL_TYPES_WITH_NO_OBJECT_CLASS = ("detr", "table-transformer", "yolos")
NO_OBJECT_LABEL = "no object"


@dataclass
class DetectionOutput:
    """What a detector says about one picture, query by query; boxes are corners, as fractions of the picture."""

    logits: Float[Tensor, "query label"]
    boxes: Float[Tensor, "query 4"]
    probabilities: Float[Tensor, "query label"]  # of objects: nothing is none


@dataclass
class DetectionSample(Sample):
    """A picture with what is found in it."""

    detections: DetectionOutput | None = None


class BaseDetectionAdapter(ImageAdapter):
    """What all detectors share: targets are queries, one by one or all that found something."""

    #: From which probability on an object counts as found.
    threshold = 0.5

    def __post_init__(self) -> None:
        if self.forward_accepts("input_ids"):
            name = type(unwrap_base_model(self.model)).__name__
            raise UnsupportedError(
                f"{name} detects the objects named in a text: clearhead only supports detectors with fixed classes"
            )
        super().__post_init__()
        self.has_no_object_class = self.model_type in _MODEL_TYPES_WITH_NO_OBJECT_CLASS
        self.multi_label = not self.has_no_object_class

    def read_config_labels(self) -> dict[int, str]:
        told = super().read_config_labels()
        return {**told, len(told): NO_OBJECT_LABEL} if self.has_no_object_class else told

    @property
    def num_classes(self) -> int:
        """How many kinds of objects there are."""
        return len(self.labels) - self.has_no_object_class

    def choose_default_readout(self) -> Readout | None:
        return "query"

    def run_detection(self, pixels: Float[Tensor, "channel height width"]) -> tuple[DetectionOutput, tuple[int, int]]:
        """One pass without gradients: what is found, and the grid of the feature map."""
        given = pixels[None].to(self.device, self.dtype)
        watched, seen = _FeatureMapSizeHook(), self.backbone
        handles = [] if seen is None else [seen.register_forward_hook(watched)]
        name = type(self.model).__name__
        with remove_hooks_on_exit(handles):
            try:
                output = self.session.forward({"pixel_values": given})
            except RuntimeError as problem:  # some take only sizes that halve often enough, or one size
                if is_machine_failure(problem):
                    raise
                size = " × ".join(map(str, pixels.shape[1:]))
                raise InputError(f"{name} cannot process an image of {size} pixels ({problem})") from None
        logits, boxes = getattr(output, "logits", None), getattr(output, "pred_boxes", None)
        if logits is None or boxes is None or boxes.shape[-1] != 4:
            raise UnsupportedError(
                f"{name} returns no classes and boxes for object queries: clearhead cannot explain it"
            )
        if logits.shape[-1] != len(self.labels):
            raise UnsupportedError(
                f"{name} scores {logits.shape[-1]} classes, but its configuration names {self.num_classes}"
            )
        p = logits[0].softmax(-1)[:, : self.num_classes] if self.has_no_object_class else logits[0].sigmoid()
        (x, y, wide, high) = boxes[0].unbind(-1)
        corners = torch.stack([x - wide / 2, y - high / 2, x + wide / 2, y + high / 2], dim=-1)
        return DetectionOutput(logits[0], corners, p), watched.size or (0, 0)

    @property
    def backbone(self) -> nn.Module | None:
        """The module whose last feature map is what the encoder reads."""
        return next((m for name, m in self.model.named_modules() if name.split(".")[-1] == "backbone"), None)

    def _build_sample(self, inputs: dict[str, Tensor]) -> Sample:
        pixels = inputs["pixel_values"]
        if pixels.dim() != 3 or len(pixels) != self.num_channels or not pixels.is_floating_point():
            raise InputError(
                f"pixel_values must be batch × {self.num_channels} × height × width, real numbers, not {pixels.dtype}, "
                f"batch × {tuple(pixels.shape)}"
            )
        for name in set(inputs) - {"pixel_values", "pixel_mask"}:
            raise InputError(f"detectors accept only pixel_values (and pixel_mask) as model inputs: leave out {name}")
        pixels = _remove_image_padding(pixels, inputs.get("pixel_mask"))
        found, grid = self.run_detection(pixels)
        axes, pixels = self.build_axes(pixels, grid, len(found.logits))
        return DetectionSample(
            {"pixel_values": pixels}, axes, image=denormalize_image(pixels, self.processor), detections=found
        )

    def build_axes(
        self, pixels: Float[Tensor, "channel height width"], grid: tuple[int, int], num_queries: int
    ) -> tuple[dict[str, UnitAxis], Float[Tensor, "channel height width"]]:
        """The axes of attention for a feature map of this grid and so many queries, and the pixels that it covers."""
        raise NotImplementedError

    def expand_target(self, sample: Sample, target: Target) -> list[Target]:
        if target.function is not None:
            return [target]
        if isinstance(target.spec, MaskedToken) or (
            isinstance(target.spec, PositionTarget) and not isinstance(target.spec, DetectionQuery)
        ):
            raise InputError(
                f"{describe_spec(target.spec)} is not a target of a detector: pass clearhead.DetectionQuery(number) "
                '(--target "query N"), or a label'
            )
        found = get_detections(sample)
        if target.position is not None:
            return [self._make_query_target(target, found, self._resolve_query(target.position, len(found.logits)))]
        return [
            self._make_query_target(target, found, query)
            for query in self._select_queries(found, _get_target_label(target))
        ]

    def _resolve_query(self, place: int | str, count: int) -> int:
        if isinstance(place, str) or not -count <= place < count:
            raise InputError(f"query {place!r} does not exist: the model has {count} queries, counted from 0")
        return place % count

    def _select_queries(self, found: DetectionOutput, label: str | int | None) -> list[int]:
        """Every object (of this class) that was found, the surest first; the likeliest where none was."""
        best, kind = found.probabilities.max(-1)
        sure = best > self.threshold
        if label is not None:
            wanted = self.label_index(label)
            if wanted == self.num_classes:
                raise InputError(
                    f"{NO_OBJECT_LABEL!r} is the prediction of most queries: choose one query, such as "
                    f"clearhead.DetectionQuery(5, {NO_OBJECT_LABEL!r})"
                )
            best, sure = found.probabilities[:, wanted], sure & (kind == wanted)
        if not sure.any():
            return [int(best.argmax())]
        order = best.argsort(descending=True, stable=True)
        return [int(query) for query in order if sure[query]]

    def _make_query_target(self, target: Target, found: DetectionOutput, query: int) -> Target:
        """The target at one query; without a label it is the likeliest object's, however likely nothing is."""
        placed = target.at_position(query, DetectionQuery).spec
        assert isinstance(placed, DetectionQuery)
        label = int(found.probabilities[query].argmax()) if placed.label is None else placed.label
        return Target(DetectionQuery(query, label, placed.against), target.scale)

    def extend_target_description(self, sample: Sample, target: Target, description: dict[str, Any]) -> dict[str, Any]:
        """With where the query sees its object, and how sure it is."""
        if target.function is not None:
            return description
        found, query = get_detections(sample), get_query_index(target)
        label = self.label_index(_get_target_label(target) or 0)
        p = float(
            found.logits[query].softmax(-1)[label] if self.has_no_object_class else found.probabilities[query, label]
        )
        seen = label != self.num_classes and p > self.threshold
        missed = f"query {query} does not detect {self.label_name(label)}: its probability is {p:.1g}"
        return description | {
            "label": self.label_name(label),
            "box": [float(edge) for edge in found.boxes[query]],
            "probability": p,
            "found": seen,
            **({} if seen or label == self.num_classes else {"note": missed}),
        }

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        # a function of the output has no query of its own: what is predicted is then said of the surest one
        queries = [
            self._select_queries(get_detections(sample), None)[0]
            if target.function is not None
            else get_query_index(target)
            for sample, target in zip(samples, targets, strict=True)
        ]
        return output.logits[torch.arange(len(queries)) % len(output.logits), queries]

    def find_readout_queries(self, sample: Sample, target: Target) -> dict[int, float]:
        """The row of the query; a function of the output may read any of them."""
        count = len(get_detections(sample).logits)
        if isinstance(self.readout, int):
            return {self.readout % count: 1.0}
        if target.function is not None:
            return dict.fromkeys(range(count), 1 / count)
        return {get_query_index(target): 1.0}

    def make_example_input(self) -> Any:
        high, wide = self.example_size
        waves = torch.linspace(-3, 3, self.num_channels * high * wide).mul(7).sin()
        return {"pixel_values": waves.reshape(1, self.num_channels, high, wide)}

    @property
    def example_size(self) -> tuple[int, int]:
        """Not square, so that rows and columns cannot be taken for each other."""
        return 192, 256


@register_adapter
class ObjectDetectionAdapter(BaseDetectionAdapter):
    """A backbone, an encoder of its feature map, and a decoder of object queries."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("ForObjectDetection", "DetrForSegmentation")

    def count_expected_calls(self) -> int | None:
        config = self.model.config
        backbone = getattr(config, "backbone_config", None)
        encoder, decoder = getattr(config, "encoder_layers", 0), getattr(config, "decoder_layers", 0)
        looked = 0 if encoder or backbone is None else getattr(backbone, "num_hidden_layers", 0)  # LW-DETR's is a ViT
        return int(encoder + looked + 2 * decoder - len(self.sampling_attention_modules))

    @property
    def sampling_attention_modules(self) -> list[str]:
        """The modules that look at sampled points: they have no map, so none of them makes a call."""
        topology = self.session.topology
        names = [topology.names[id(module)] for module in topology.modules if is_deformable_attention(module)]
        return [name for name in names if not any(name.startswith(f"{outer}.") for outer in names)]

    def find_attention_unsupported_reason(self) -> str | None:
        if self.sampling_attention_modules:
            return (
                f"{type(self.model).__name__} uses deformable attention at a few sampled points of the image, so no "
                "attention map covers the image"
            )
        return None

    @property
    def example_size(self) -> tuple[int, int]:
        fixed = getattr(self.model.config, "anchor_image_size", None)  # RT-DETR may be made for one size
        return super().example_size if fixed is None else (int(fixed[0]), int(fixed[1]))

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        return {"image": (SimpleNamespace(processor=self.processor, patch_size=None), "pixel_values")}

    @property
    def grad_parameters(self) -> list[nn.Parameter]:
        """The object queries: the decoder starts from them, not from the picture."""
        names = ("query_position_embeddings", "query_refpoint_embeddings")
        return [p for name, p in self.model.named_parameters() if any(part in name for part in names)]

    def build_axes(
        self, pixels: Float[Tensor, "channel height width"], grid: tuple[int, int], num_queries: int
    ) -> tuple[dict[str, UnitAxis], Float[Tensor, "channel height width"]]:
        if not all(grid):
            raise UnsupportedError(
                f"the backbone of {type(self.model).__name__} was not found: it returns no feature map"
            )
        return {
            "image": UnitAxis.concat(build_patch_units(grid)),
            "queries": UnitAxis.concat(make_query_units(num_queries)),
        }, pixels

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str]:
        if "decoder" not in module:
            return "image", "image"
        return "queries", "image" if re.search("encoder_attn|cross", module.split("decoder")[-1]) else "queries"

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        return {"queries": self.find_readout_queries(sample, target)}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch channel height width']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """Each cell's share of the pixels; object queries are no input, so theirs is zero."""
        pixels, axes = vectors["pixel_values"], samples[0].axes
        (image,) = axes["image"].unit_groups
        assert image.grid is not None
        return {
            "image": group_pixels_by_cell(pixels, image.grid),
            "queries": pixels.new_zeros(len(pixels), len(axes["queries"]), 1),
        }


@register_adapter
class YolosAdapter(BaseDetectionAdapter):
    """YOLOS: a vision transformer whose last tokens are the detections."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("YolosForObjectDetection",)

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        return {"image": (self, "pixel_values")}

    @property
    def example_size(self) -> tuple[int, int]:
        high, wide = self.patch_size
        return 3 * high, 4 * wide

    def build_axes(
        self, pixels: Float[Tensor, "channel height width"], grid: tuple[int, int], num_queries: int
    ) -> tuple[dict[str, UnitAxis], Float[Tensor, "channel height width"]]:
        (high, wide), size = self.patch_size, pixels.shape[1:]
        rows, columns = size[0] // high, size[1] // wide
        if not rows or not columns:
            raise InputError(
                f"an image of {size[0]} × {size[1]} pixels cannot be divided into patches of {high} × {wide}"
            )
        # Pixels beyond the last whole patch are not read by the model, so they are not part of the picture it saw.
        seen = pixels[:, : rows * high, : columns * wide]
        return {
            "image": UnitAxis.concat(build_patch_units((rows, columns), ["[CLS]"]), make_query_units(num_queries))
        }, seen

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        before = len(sample.axes["image"].unit_groups[0])
        return {"image": {before + query: w for query, w in self.find_readout_queries(sample, target).items()}}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch channel height width']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        image, detections = samples[0].axes["image"].unit_groups
        cells = patchify(vectors["pixel_values"], image, self.patch_size)
        return {"image": nn.functional.pad(cells, (0, 0, 0, len(detections)))}


def make_query_units(count: int) -> Units:
    """Object queries by number. They are special: a part of the model, none of the picture."""
    names = tuple(str(query) for query in range(count))
    return Units(stream="queries", kind="query", names=names, special=(True,) * count)


def get_detections(sample: Sample) -> DetectionOutput:
    assert isinstance(sample, DetectionSample) and sample.detections is not None
    return sample.detections


def get_query_index(target: Target) -> int:
    assert isinstance(target.position, int)
    return target.position


def group_pixels_by_cell(
    pixels: Float[Tensor, "batch channel height width"], grid: tuple[int, int]
) -> Float[Tensor, "batch cell feature"]:
    """Every pixel in the one cell that it lies in. Cells need not have equally many pixels: zeros fill them up.

    >>> group_pixels_by_cell(torch.tensor([[[[1.0, 2.0, 3.0]]]]), (1, 2))
    tensor([[[1., 2.],
             [3., 0.]]])
    """
    (down, inside_down), (across, inside_across) = (
        _split_axis_into_cells(size, count) for size, count in zip(pixels.shape[2:], grid, strict=True)
    )
    cells = pixels[:, :, down][..., across]  # batch channel row high column wide
    cells = cells * (inside_down[:, :, None, None] & inside_across).to(pixels)
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _split_axis_into_cells(size: int, count: int) -> tuple[Tensor, Tensor]:
    """Which pixels of a line lie in each of its parts, and which places of a part hold one."""
    ends = [-(-part * size // count) for part in range(count + 1)]
    longest = max(stop - start for start, stop in pairwise(ends))
    places = torch.tensor(ends[:-1])[:, None] + torch.arange(longest)
    return places.clamp(max=size - 1), places < torch.tensor(ends[1:])[:, None]


def _get_target_label(target: Target) -> str | int | None:
    placed = target.at_position(0, DetectionQuery).spec
    return placed.label if isinstance(placed, PositionTarget) else None


def _remove_image_padding(
    pixels: Float[Tensor, "channel height width"], mask: Tensor | None
) -> Float[Tensor, "channel height width"]:
    """The picture that an image processor padded: a detector's answer should not depend on what shares its batch."""
    if mask is None:
        return pixels
    if mask.shape != pixels.shape[1:]:
        raise InputError(
            f"pixel_mask must have the size of the image, {tuple(pixels.shape[1:])}, not {tuple(mask.shape)}"
        )
    high, wide = int((mask != 0).any(1).sum()), int((mask != 0).any(0).sum())
    if not high or not (mask[:high, :wide] != 0).all():
        raise InputError(
            "pixel_mask must contain one image in the upper left corner, with padding to the right of it and below it"
        )
    return pixels[:, :high, :wide]


class _FeatureMapSizeHook:
    """Hears how large the last feature map of a backbone is, in this thread alone."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.size: tuple[int, int] | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            maps = [part for part in _collect_tensors(output) if part.dim() == 4]
            self.size = (maps[-1].shape[2], maps[-1].shape[3]) if maps else None


def _collect_tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [tensor for part in parts for tensor in _collect_tensors(part)]
