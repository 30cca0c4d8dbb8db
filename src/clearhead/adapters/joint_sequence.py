"""Adapters for models that join text and image in one sequence: VisualBERT (image regions) and ViLT (patches)."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from clearhead.adapters.base import (
    InputOptions,
    Readout,
    list_class_names,
    register_adapter,
    unwrap_base_model,
)
from clearhead.adapters.readers.regions import ImageRegions, make_region_units
from clearhead.adapters.text_with_visual import (
    TextWithImageAdapter,
    TextWithRegionsAdapter,
    TextWithVisualAdapter,
    VisualInput,
)
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import UnitAxis, Units


class JointSequenceAdapter(TextWithVisualAdapter):
    """One axis: the text first, then what it is about."""

    stream = "joint"

    def build_joint_sample(
        self, inputs: dict[str, Tensor], units: Units, visual: VisualInput, num_truncated: int = 0
    ) -> Sample:
        return Sample(
            {**self.add_attention_mask(inputs), **visual.inputs},
            {"joint": UnitAxis.concat(units, visual.units)},
            num_truncated=num_truncated,
            batch_key=(len(units),),  # padding would stand between the text and the rest
            image=visual.image,
        )

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        if len({sample.batch_key for sample in samples}) > 1:
            raise InputError(
                f"texts of different lengths cannot share a batch of {type(self.model).__name__}, since padding would "
                "be inside the sequence: record them one by one"
            )
        return super().collate(samples)

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        if getattr(output, "logits", None) is None:
            raise InputError(f"{type(self.model).__name__} has no classes: pass a function of its output as target=")
        return super().compute_class_scores(output, samples, targets)


@register_adapter
class VisualBertAdapter(JointSequenceAdapter, TextWithRegionsAdapter):
    """Answers to questions are read off the last word of the question, everything else off the first token."""

    class_suffixes: ClassVar[tuple[str, ...]] = (
        *("VisualBertForQuestionAnswering", "VisualBertForVisualReasoning", "VisualBertModel"),
        *("VisualBertForPreTraining", "VisualBertForMultipleChoice", "VisualBertForRegionToPhraseAlignment"),
    )
    visual_grad_input_name = "visual_embeds"
    pad_values: ClassVar[dict[str, int]] = {
        "visual_embeds": 0,
        "visual_attention_mask": 0,
        "visual_token_type_ids": 0,
        "image_text_alignment": -1,
    }
    unsupported_classes: ClassVar[dict[str, str]] = {
        "VisualBertForPreTraining": "it has two heads; explain its encoder, load(model.visual_bert)",
        "VisualBertForMultipleChoice": "it takes several texts at once, each with its own regions",
        "VisualBertForRegionToPhraseAlignment": "its scores are themselves attention weights, from phrases to regions",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.config.bypass_transformer:
            raise UnsupportedError(
                f"{type(self.model).__name__} adds regions at its last layer only (config.bypass_transformer): its "
                "layers do not process one joint sequence"
            )

    def choose_default_readout(self) -> Readout | None:
        asked = any(name.endswith("ForQuestionAnswering") for name in list_class_names(self.model))
        return "last word" if asked else "first"

    def find_readout_rows(self, sample: Sample, target: Target) -> dict[int, float]:
        """The last word stands before the last token that is not hidden, however the hidden ones lie."""
        if self.readout != "last word":
            return super().find_readout_rows(sample, target)
        return {int(sample.inputs["attention_mask"].sum()) - 2: 1.0}

    def build_joint_sample(
        self, inputs: dict[str, Tensor], units: Units, visual: VisualInput, num_truncated: int = 0
    ) -> Sample:
        sample = super().build_joint_sample(inputs, units, visual, num_truncated)
        if int(sample.inputs["attention_mask"].sum()) < 2:
            raise InputError(
                f"{self.name} reads the second-to-last token, so a text of one token is too short: use a longer text"
            )
        return sample

    @property
    def region_feature_size(self) -> int:
        return int(self.model.config.visual_embedding_dim)

    def build_region_inputs(self, regions: ImageRegions) -> dict[str, Tensor]:
        ones = torch.ones(len(regions.features), dtype=torch.long)
        return {"visual_embeds": regions.features, "visual_attention_mask": ones, "visual_token_type_ids": ones}

    def read_visual_inputs(self, inputs: dict[str, Tensor], options: InputOptions) -> VisualInput:
        inputs = self.validate_region_inputs(inputs, "visual_attention_mask", options)
        inputs.setdefault("visual_token_type_ids", torch.ones(len(inputs["visual_embeds"]), dtype=torch.long))
        hidden = (inputs["visual_attention_mask"] == 0).tolist()
        return VisualInput(inputs, make_region_units(len(hidden), masked=hidden))

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {"joint": concat_padded(self.select_text_vectors(vectors), vectors["visual_embeds"])}

    def make_example_input(self) -> Any:
        regions = torch.linspace(-3, 3, 3 * self.region_feature_size).sin().reshape(1, 3, -1)
        return {"input_ids": torch.arange(2, 6)[None] % self.model.config.vocab_size, "visual_embeds": regions}


@register_adapter
class ViltAdapter(JointSequenceAdapter, TextWithImageAdapter):
    """A text beside a picture of any size; the head reads the text's first token."""

    class_suffixes: ClassVar[tuple[str, ...]] = (
        *("ViltForQuestionAnswering", "ViltForImageAndTextRetrieval", "ViltModel"),
        *("ViltForImagesAndTextClassification", "ViltForTokenClassification"),
    )
    unsupported_classes: ClassVar[dict[str, str]] = {
        "ViltForImagesAndTextClassification": "it processes several images one by one, not in one joint sequence",
        "ViltForTokenClassification": "token labels of a text with an image are not supported yet",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        names = list_class_names(self.model)
        if "ViltForImageAndTextRetrieval" in names:
            self.labels = {0: "match"}
        if "ViltForQuestionAnswering" in names:
            # It is trained to say yes or no to each answer, unless its configuration says otherwise.
            self.multi_label = self.model.config.problem_type in (None, "multi_label_classification")

    def read_visual_inputs(self, inputs: dict[str, Tensor], options: InputOptions) -> VisualInput:
        if "pixel_mask" in inputs:
            inputs = {**inputs, "pixel_values": self._crop_to_pixel_mask(inputs["pixel_values"], inputs["pixel_mask"])}
        if "image_embeds" in inputs:
            raise InputError("image_embeds have no patches to display: pass pixel_values")
        sight = super().read_visual_inputs(inputs, options)
        assert sight.units.grid is not None
        count, most = sight.units.grid[0] * sight.units.grid[1], self.model.config.max_image_length
        if isinstance(most, int) and 0 <= most < count:
            raise InputError(
                f"{self.name} samples {most} of the {count} patches of this image at random in each pass: set "
                "model.config.max_image_length = -1, or use a smaller image"
            )
        sight.inputs["pixel_mask"] = torch.ones(sight.inputs["pixel_values"].shape[1:], dtype=torch.long)
        return sight

    def _crop_to_pixel_mask(self, pixels: Float[Tensor, "channel height width"], mask: Tensor) -> Tensor:
        """The picture without its padding, which must be what lies to the right and below."""
        (high, wide), size = self.patch_size, pixels.shape[1:]
        grid = (size[0] // high, size[1] // wide)
        if mask.dim() != 2 or not all(grid):
            raise InputError(f"pixel_mask must be batch × height × width, not batch × {tuple(mask.shape)}")
        shown = F.interpolate(mask[None, None].float(), size=grid)[0, 0] != 0  # as the model reads it
        rows, columns = int(shown[:, 0].sum()), int(shown[0].sum())
        if not rows or not columns or int(shown.sum()) != rows * columns or not shown[:rows, :columns].all():
            raise InputError("pixel_mask must keep one rectangle of the image, in its upper left corner")
        return pixels if (rows, columns) == grid else pixels[:, : rows * high, : columns * wide]

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """ViLT shuffles the patches at every pass: while it is recorded they are put in order again."""
        model: Any = unwrap_base_model(self.model)
        embeddings, thread = getattr(model, "vilt", model).embeddings, threading.get_ident()
        shuffled, before = embeddings.visual_embed, embeddings.__dict__.get("visual_embed")

        def in_order(*args: Any, **kwargs: Any) -> Any:
            vectors, mask, (places, size) = shuffled(*args, **kwargs)
            if threading.get_ident() != thread:
                return vectors, mask, (places, size)
            order = (places[..., 0] * size[1] + places[..., 1]).argsort(dim=1)
            first = torch.zeros_like(order[:, :1])  # the picture's own [CLS]
            each = torch.cat([first, order + 1], dim=1)
            rows = torch.arange(len(each), device=each.device)[:, None]
            return vectors[rows, each], mask[rows, each], (places[rows, order], size)

        embeddings.__dict__["visual_embed"] = in_order
        try:
            yield
        finally:
            del embeddings.__dict__["visual_embed"]
            if before is not None:
                embeddings.__dict__["visual_embed"] = before

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *leaf']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {"joint": concat_padded(self.select_text_vectors(vectors), self.gather_image_vectors(vectors, samples))}


def concat_padded(
    first: Float[Tensor, "batch unit feature"], second: Float[Tensor, "batch unit feature"]
) -> Float[Tensor, "batch unit feature"]:
    """Vectors of two streams along one axis; the shorter ones are filled up with zeros, which count for nothing."""
    wide = max(first.shape[2], second.shape[2])
    return torch.cat([F.pad(part, (0, wide - part.shape[2])) for part in (first, second)], dim=1)
