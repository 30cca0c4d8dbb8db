"""Adapters for models with cross-attention between a text and an image: LXMERT, BLIP's text encoder, BridgeTower."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions, register_adapter
from clearhead.adapters.readers.image import to_pair
from clearhead.adapters.readers.regions import ImageRegions, make_region_units
from clearhead.adapters.text_with_visual import (
    TextWithImageAdapter,
    TextWithRegionsAdapter,
    TextWithVisualAdapter,
    VisualInput,
)
from clearhead.errors import InputError
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import UnitAxis, Units


class CrossAttentionAdapter(TextWithVisualAdapter):
    """The text is one axis, what it is about another."""

    stream = "text"

    def build_joint_sample(
        self, inputs: dict[str, Tensor], units: Units, visual: VisualInput, num_truncated: int = 0
    ) -> Sample:
        axes = {"text": UnitAxis.concat(units), self.visual_stream: UnitAxis.concat(visual.units)}
        return Sample(
            {**self.add_attention_mask(inputs), **visual.inputs}, axes, num_truncated=num_truncated, image=visual.image
        )


@cache
def _make_answer_labels(count: int) -> dict[int, str]:
    return {index: f"answer {index}" for index in range(count)}


@register_adapter
class LxmertAdapter(CrossAttentionAdapter, TextWithRegionsAdapter):
    """A question beside the regions of a picture; its classifier reads the question's first token."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("LxmertForQuestionAnswering", "LxmertModel", "LxmertForPreTraining")
    visual_grad_input_name = "visual_feats"
    pad_values: ClassVar[dict[str, int]] = {"visual_feats": 0, "visual_pos": 0, "visual_attention_mask": 0}
    unsupported_classes: ClassVar[dict[str, str]] = {
        "LxmertForPreTraining": (
            "it has several task heads; load the one to explain, or explain its encoder, load(model.lxmert)"
        )
    }

    def read_config_labels(self) -> dict[int, str]:
        told, count = super().read_config_labels(), self.model.config.num_qa_labels
        # Labels of another number are those of another kind of head.
        return told if len(told) == count else _make_answer_labels(count)

    @property
    def region_feature_size(self) -> int:
        return int(self.model.config.visual_feat_dim)

    def build_region_inputs(self, regions: ImageRegions) -> dict[str, Tensor]:
        if regions.boxes is None:
            raise InputError(f"{self.name} uses the positions of regions: pass regions=(features, boxes)")
        mask = torch.ones(len(regions.features), dtype=torch.long)
        return {"visual_feats": regions.features, "visual_pos": regions.boxes, "visual_attention_mask": mask}

    def read_visual_inputs(self, inputs: dict[str, Tensor], options: InputOptions) -> VisualInput:
        wide = self.model.config.visual_pos_dim
        if "visual_pos" not in inputs or inputs["visual_pos"].shape[1:] != (wide,):
            raise InputError(
                f"model inputs must contain visual_pos, the positions of the regions (batch × region × {wide})"
            )
        inputs = self.validate_region_inputs(inputs, "visual_attention_mask", options)
        boxes, hidden = inputs["visual_pos"], (inputs["visual_attention_mask"] == 0).tolist()
        return VisualInput(inputs, make_region_units(len(boxes), boxes, hidden))

    def count_expected_calls(self) -> int | None:
        config = self.model.config
        return int(config.l_layers + config.r_layers + 4 * config.x_layers)

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str]:
        """One module serves both directions in a cross layer: first the text looks at the regions, then they at it."""
        if ".visual_attention." in module:
            return ("text", "regions") if occurrence == 0 else ("regions", "text")
        own = "regions" if ".r_layers." in module or ".visn_self_att." in module else "text"
        return own, own

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        return {"text": self.find_readout_rows(sample, target), "regions": {}}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {"text": self.select_text_vectors(vectors), "regions": vectors["visual_feats"]}

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        scores = getattr(output, "question_answering_score", None)
        if scores is None:
            raise InputError(f"{type(self.model).__name__} has no classes: pass a function of its output as target=")
        return scores.repeat(len(samples) // len(scores), 1)

    def make_example_input(self) -> Any:
        config = self.model.config
        features = torch.linspace(-3, 3, 3 * self.region_feature_size).sin().reshape(1, 3, -1)
        places = torch.linspace(0.1, 0.9, 3 * config.visual_pos_dim).reshape(1, 3, -1)
        ids = torch.arange(1, 5)[None] % config.vocab_size
        return {"input_ids": ids, "visual_feats": features, "visual_pos": places}


class ImageCrossAttentionAdapter(CrossAttentionAdapter, TextWithImageAdapter):
    """A text beside a picture in a tower of its own; the head says whether they belong together."""

    default_labels: ClassVar[dict[int, str]] = {0: "no match", 1: "match"}

    def read_visual_inputs(self, inputs: dict[str, Tensor], options: InputOptions) -> VisualInput:
        sight = super().read_visual_inputs(inputs, options)
        size, expected = tuple(inputs["pixel_values"].shape[1:]), to_pair(self.vision_config.image_size)
        if size != expected and not self.forward_accepts("interpolate_pos_encoding"):
            given, wanted = (" × ".join(map(str, sides)) for sides in (size, expected))
            raise InputError(f"the model takes images of {wanted} pixels, not {given}")
        return sight

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        batch = super().collate(samples)
        if tuple(batch["pixel_values"].shape[2:]) != to_pair(self.vision_config.image_size):
            batch["interpolate_pos_encoding"] = True  # else BLIP reads positions of other places, in silence
        return batch

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *leaf']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {"text": self.select_text_vectors(vectors), "image": self.gather_image_vectors(vectors, samples)}


@register_adapter
class BlipAdapter(ImageCrossAttentionAdapter):
    """The text looks at the picture, never the other way round; the head reads the text's first token."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("BlipForImageTextRetrieval", "BlipForQuestionAnswering")
    unsupported_classes: ClassVar[dict[str, str]] = {
        "BlipForQuestionAnswering": "its forward pass returns a loss, but no logits of the tokens that it generates"
    }

    def read_visual_inputs(self, inputs: dict[str, Tensor], options: InputOptions) -> VisualInput:
        if "use_itm_head" in inputs:
            raise InputError("use_itm_head cannot be set: the output of the matching head is explained")
        return super().read_visual_inputs(inputs, options)

    def count_expected_calls(self) -> int | None:
        config = self.model.config
        return int(config.vision_config.num_hidden_layers + 2 * config.text_config.num_hidden_layers)

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str]:
        if module.startswith("vision_model."):
            return "image", "image"
        return "text", "image" if ".crossattention." in module else "text"

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        return output.itm_score.repeat(len(samples) // len(output.itm_score), 1)


@register_adapter
class BridgeTowerAdapter(ImageCrossAttentionAdapter):
    """Both towers go on beside the layers in which they meet; the head reads the first token of both."""

    class_suffixes: ClassVar[tuple[str, ...]] = (
        "BridgeTowerForImageAndTextRetrieval",
        "BridgeTowerForContrastiveLearning",
    )
    unsupported_classes: ClassVar[dict[str, str]] = {
        "BridgeTowerForContrastiveLearning": "it compares three vectors for every pair in the batch instead of one",
    }

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        half = {row: weight / 2 for row, weight in self.find_readout_rows(sample, target).items()}
        return {"text": half, "image": half}

    def count_expected_calls(self) -> int | None:
        config = self.model.config
        return int(2 * config.text_config.num_hidden_layers + 4 * config.num_hidden_layers)

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str]:
        own = "image" if ".vision_model." in module or ".cross_modal_image_layers." in module else "text"
        other = "text" if own == "image" else "image"
        return own, other if ".crossattention." in module else own

    def is_residual_tower(self, module: str) -> bool:
        return "cross_modal_" not in module

    def find_simultaneous_group(self, module: str) -> str | None:
        """In a layer of both each looks at what went into the other's half, not at what came out of it."""
        found = re.search(r"cross_modal_\w+_layers\.(\d+)\.", module)
        return found and found[1]
