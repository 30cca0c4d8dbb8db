"""Two streams that look at each other: LXMERT, BLIP's cross-attending text encoder, BridgeTower."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import How, Sample, register_subject
from clearhead.adapters.readers.image import pair
from clearhead.adapters.readers.regions import Regions, units_of_regions
from clearhead.adapters.text_with_visual import BesidePicture, BesideRegions, Sight, TextBeside
from clearhead.errors import InputError
from clearhead.targets import Target
from clearhead.units import Axis, Units


class CoAttention(TextBeside):
    """The text is one axis, what it is about another."""

    stream = "text"

    def joined_sample(self, inputs: dict[str, Tensor], units: Units, sight: Sight, dropped: int = 0) -> Sample:
        axes = {"text": Axis.of(units), self.sight: Axis.of(sight.units)}
        return Sample({**self.with_mask(inputs), **sight.inputs}, axes, dropped=dropped, picture=sight.picture)


@cache
def _answers(count: int) -> dict[int, str]:
    return {index: f"answer {index}" for index in range(count)}


@register_subject
class Lxmert(CoAttention, BesideRegions):
    """A question beside the regions of a picture; its classifier reads the question's first token."""

    endings: ClassVar[tuple[str, ...]] = ("LxmertForQuestionAnswering", "LxmertModel", "LxmertForPreTraining")
    sight_leaf = "visual_feats"
    fills: ClassVar[dict[str, int]] = {"visual_feats": 0, "visual_pos": 0, "visual_attention_mask": 0}
    refused: ClassVar[dict[str, str]] = {
        "LxmertForPreTraining": "it has many heads; load the one you mean, or explain its encoder, load(model.lxmert)"
    }

    def told_labels(self) -> dict[int, str]:
        told, count = super().told_labels(), self.model.config.num_qa_labels
        # Labels of another number are those of another kind of head.
        return told if len(told) == count else _answers(count)

    @property
    def features(self) -> int:
        return int(self.model.config.visual_feat_dim)

    def region_inputs(self, regions: Regions) -> dict[str, Tensor]:
        if regions.boxes is None:
            raise InputError(f"{self.name} reads where regions lie: give regions=(features, boxes)")
        mask = torch.ones(len(regions.features), dtype=torch.long)
        return {"visual_feats": regions.features, "visual_pos": regions.boxes, "visual_attention_mask": mask}

    def look_at(self, inputs: dict[str, Tensor], how: How) -> Sight:
        wide = self.model.config.visual_pos_dim
        if "visual_pos" not in inputs or inputs["visual_pos"].shape[1:] != (wide,):
            raise InputError(f"model inputs need visual_pos, batch × region × {wide}: where the regions lie")
        inputs = self.checked_regions(inputs, "visual_attention_mask", how)
        boxes, hidden = inputs["visual_pos"], (inputs["visual_attention_mask"] == 0).tolist()
        return Sight(inputs, units_of_regions(len(boxes), boxes, hidden))

    def expected_calls(self) -> int | None:
        config = self.model.config
        return int(config.l_layers + config.r_layers + 4 * config.x_layers)

    def streams_of(self, module: str, nth: int) -> tuple[str, str]:
        """One module serves both directions in a cross layer: first the text looks at the regions, then they at it."""
        if ".visual_attention." in module:
            return ("text", "regions") if nth == 0 else ("regions", "text")
        own = "regions" if ".r_layers." in module or ".visn_self_att." in module else "text"
        return own, own

    def readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        return {"text": self.rows(sample, target), "regions": {}}

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {"text": self.text_vectors(vectors), "regions": vectors["visual_feats"]}

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        scores = getattr(output, "question_answering_score", None)
        if scores is None:
            raise InputError(f"{type(self.model).__name__} has no classes: give target= a function of its output")
        return scores.repeat(len(samples) // len(scores), 1)

    def example(self) -> Any:
        config = self.model.config
        features = torch.linspace(-3, 3, 3 * self.features).sin().reshape(1, 3, -1)
        places = torch.linspace(0.1, 0.9, 3 * config.visual_pos_dim).reshape(1, 3, -1)
        ids = torch.arange(1, 5)[None] % config.vocab_size
        return {"input_ids": ids, "visual_feats": features, "visual_pos": places}


class CoAttentionWithPicture(CoAttention, BesidePicture):
    """A text beside a picture in a tower of its own; the head says whether they belong together."""

    outputs: ClassVar[dict[int, str]] = {0: "no match", 1: "match"}

    def look_at(self, inputs: dict[str, Tensor], how: How) -> Sight:
        sight = super().look_at(inputs, how)
        size, expected = tuple(inputs["pixel_values"].shape[1:]), pair(self.picture_config.image_size)
        if size != expected and not self.accepts("interpolate_pos_encoding"):
            given, wanted = (" × ".join(map(str, sides)) for sides in (size, expected))
            raise InputError(f"the model takes pictures of {wanted} pixels, not {given}")
        return sight

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        batch = super().collate(samples)
        if tuple(batch["pixel_values"].shape[2:]) != pair(self.picture_config.image_size):
            batch["interpolate_pos_encoding"] = True  # else BLIP reads positions of other places, in silence
        return batch

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *leaf']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {"text": self.text_vectors(vectors), "image": self.picture_vectors(vectors, samples)}


@register_subject
class Blip(CoAttentionWithPicture):
    """The text looks at the picture, never the other way round; the head reads the text's first token."""

    endings: ClassVar[tuple[str, ...]] = ("BlipForImageTextRetrieval", "BlipForQuestionAnswering")
    refused: ClassVar[dict[str, str]] = {
        "BlipForQuestionAnswering": "its forward pass gives a loss and no scores of the words that it answers with"
    }

    def look_at(self, inputs: dict[str, Tensor], how: How) -> Sight:
        if "use_itm_head" in inputs:
            raise InputError("use_itm_head is not for explanations: the matching head is what is explained")
        return super().look_at(inputs, how)

    def expected_calls(self) -> int | None:
        config = self.model.config
        return int(config.vision_config.num_hidden_layers + 2 * config.text_config.num_hidden_layers)

    def streams_of(self, module: str, nth: int) -> tuple[str, str]:
        if module.startswith("vision_model."):
            return "image", "image"
        return "text", "image" if ".crossattention." in module else "text"

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        return output.itm_score.repeat(len(samples) // len(output.itm_score), 1)


@register_subject
class BridgeTower(CoAttentionWithPicture):
    """Both towers go on beside the layers in which they meet; the head reads the first token of both."""

    endings: ClassVar[tuple[str, ...]] = ("BridgeTowerForImageAndTextRetrieval", "BridgeTowerForContrastiveLearning")
    refused: ClassVar[dict[str, str]] = {
        "BridgeTowerForContrastiveLearning": "it compares three vectors of every pair in the batch, not one",
    }

    def readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        half = {row: weight / 2 for row, weight in self.rows(sample, target).items()}
        return {"text": half, "image": half}

    def expected_calls(self) -> int | None:
        config = self.model.config
        return int(2 * config.text_config.num_hidden_layers + 4 * config.num_hidden_layers)

    def streams_of(self, module: str, nth: int) -> tuple[str, str]:
        own = "image" if ".vision_model." in module or ".cross_modal_image_layers." in module else "text"
        other = "text" if own == "image" else "image"
        return own, other if ".crossattention." in module else own

    def in_tower(self, module: str) -> bool:
        return "cross_modal_" not in module

    def block_of(self, module: str) -> str | None:
        """In a layer of both each looks at what went into the other's half, not at what came out of it."""
        found = re.search(r"cross_modal_\w+_layers\.(\d+)\.", module)
        return found and found[1]
