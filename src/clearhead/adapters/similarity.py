"""Similarity targets: the cosine of two pooled embeddings, from a dual encoder or from one encoder for two texts.

Scores depend on the scale: those of a cosine that is multiplied by the model's logit scale (about 100 for CLIP) are
different. The cosine itself is therefore the default, and the result names the scale.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.utils import ModelOutput

from clearhead.adapters.base import InputOptions, ModelAdapter, Readout, register_adapter, unwrap_base_model
from clearhead.adapters.text import TextEncoderAdapter
from clearhead.capture.checks.self_test import count_calls_from_config
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import Contrast, LabelLookup, Predicted, Target, describe_spec
from clearhead.units import UnitAxis, Units

Embeddings = Float[Tensor, "batch width"]


@dataclass(frozen=True)
class SimilarityTarget(Target):
    """How alike the two inputs of a sample are; with `against`, how much more alike than with another text."""

    name: str = ""
    against: str | None = None

    def with_fixed_classes(self, scores: Float[Tensor, "one_or_two"], labels: LabelLookup) -> Target:
        return self  # nothing is predicted

    def compute_value(self, scores: Float[Tensor, "one_or_two"], labels: LabelLookup) -> Float[Tensor, ""]:
        return scores[0] if self.against is None else scores[0] - scores[1]

    def describe(
        self, scores: Float[Tensor, "one_or_two"] | None, labels: LabelLookup, value: float, num_masks: int = 0
    ) -> dict[str, Any]:
        said = {"kind": "similarity", "name": self.name}
        if self.against is not None:
            note = f"{self.against!r} is held constant: the scores of {self.name!r} are the same as without it"
            said = {"kind": "contrast", "name": f"{self.name} − {self.against}", "against": self.against, "note": note}
        return {**said, "scale": self.scale, "value": value}


class PairAdapter(ModelAdapter):
    """What all models that compare two inputs share: the target, and the text that it may be held against.

    `Contrast(None, "a cat")` asks why the text fits better than "a cat". The tokens of that other text are no units:
    its vector is held fixed. So the scores of the text's own words stay those of its similarity: the contrast shows in
    the other input alone, and the result says so.
    """

    score_is_product: ClassVar[bool] = True
    target_scales: ClassVar[tuple[str, ...]] = ("cosine", "logit")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.labels = {0: "similarity"}

    @abstractmethod
    def get_compared_text(self, sample: Sample) -> str:
        """The text that another one may be held against."""

    @abstractmethod
    def get_embeddings(self, output: Any) -> tuple[Embeddings, Embeddings]:
        """The vectors of length one that are compared: those that a foil's may stand in for, and the others."""

    @abstractmethod
    def embed_contrast_texts(self, texts: Sequence[str]) -> Embeddings:
        """The vectors of texts that are held against."""

    def to_logit(self, cosine: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
        """The logit that the model makes of a cosine."""
        raise NotImplementedError

    def expand_target(self, sample: Sample, target: Target) -> list[Target]:
        own = self.get_compared_text(sample)
        match target.spec:
            case Predicted():
                return [SimilarityTarget(target.spec, target.scale, own)]
            case Contrast(a, b, None) if a in (None, own) and isinstance(b, str):
                if b == own:
                    raise InputError(f"cannot contrast {own!r} with itself: use a different text")
                if not b.strip():
                    raise InputError("the text to contrast with is empty: use a different text")
                return [SimilarityTarget(target.spec, target.scale, own, b)]
            case _ if target.function is not None:
                return [target]
        raise InputError(
            f"{self.name} measures the similarity of two inputs: leave out target=, or pass clearhead.Contrast(None, "
            f"other text) or a function of the output, not {describe_spec(target.spec)}"
        )

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        """The similarity of each pair, no sample with another; beside it that with the text it is held against."""
        text, other = self.get_embeddings(output)
        columns = [(text * other).sum(-1)]
        against = [getattr(target, "against", None) for target in targets]
        named = list(dict.fromkeys(name for name in against if name is not None))
        if named:
            with torch.no_grad():
                foils = self.embed_contrast_texts(named)
            chosen = foils[[0 if name is None else named.index(name) for name in against]]
            columns.append((chosen * other).sum(-1))
        logits = torch.tensor([target.scale == "logit" for target in targets], device=text.device)
        if logits.any():
            columns = [torch.where(logits, self.to_logit(column), column) for column in columns]
        return torch.stack(columns, dim=1)

    def select_prediction_scores(self, scores: Float[Tensor, "one_or_two"]) -> Float[Tensor, "one"]:
        return scores[:1]


@dataclass
class TextPairOutput(ModelOutput):
    """The vectors of two texts, of length one."""

    text_embeds: Embeddings | None = None
    other_embeds: Embeddings | None = None


class TextPairEncoder(nn.Module):
    """One encoder that reads two texts, one after the other."""

    def __init__(self, encoder: nn.Module, pooling: str | int) -> None:
        super().__init__()
        self.encoder, self.pooling, self.config = encoder, pooling, encoder.config

    def forward(self, **inputs: Tensor) -> "TextPairOutput":
        return TextPairOutput(*(self.embed(part) for part in split_pair_inputs(inputs)))

    def embed(self, inputs: Mapping[str, Tensor]) -> Embeddings:
        """The mean of the tokens that are not padding, the first or the last of them; of length one."""
        states, mask = self.encoder(**inputs).last_hidden_state, inputs["attention_mask"]
        if self.pooling == "mean":
            weights = mask.to(states.dtype)
            pooled = (weights[:, None] @ states)[:, 0] / weights.sum(-1, keepdim=True)
        else:
            place = 0 if self.pooling == "first" else mask.shape[1] - 1 - mask.flip(-1).argmax(-1)
            pooled = states[torch.arange(len(states), device=states.device), place]
        return nn.functional.normalize(pooled, dim=-1)


#: What the inputs of the second text begin with.
SECOND_TEXT_PREFIX = "other_"
POOLINGS = ("mean", "first", "last")


def split_pair_inputs(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of the first text, and those of the second.

    >>> split_pair_inputs({"input_ids": 1, "other_input_ids": 2})
    ({'input_ids': 1}, {'input_ids': 2})
    """
    text = {name: part for name, part in inputs.items() if not name.startswith(SECOND_TEXT_PREFIX)}
    return text, {
        name.removeprefix(SECOND_TEXT_PREFIX): part
        for name, part in inputs.items()
        if name.startswith(SECOND_TEXT_PREFIX)
    }


@register_adapter
class TextSimilarityAdapter(PairAdapter):
    """Why two texts are alike: `load(model, tokenizer, task="similarity", readout="mean")`, then explain((one, other)).

    The encoder is a bare one, as sentence-transformers use them; the streams are "text" and "other".
    """

    stream = "text"
    grad_input_name = "input_ids"
    input_names = ("text",)
    processor_class = "AutoTokenizer"
    task = "similarity"
    class_suffixes: ClassVar[tuple[str, ...]] = ("Model",)
    target_scales: ClassVar[tuple[str, ...]] = ("cosine",)

    def __post_init__(self) -> None:
        if self.readout not in POOLINGS:
            raise InputError(
                "choose how the encoder's tokens are pooled into a text vector: load(..., task='similarity', "
                f"readout='mean'), or 'first' or 'last', not {self.readout!r}"
            )
        encoder = self.model
        inside: Any = unwrap_base_model(encoder)
        if inside.base_model is not inside:
            raise UnsupportedError(
                f"{type(inside).__name__} has a head: pass its bare encoder, model.{inside.base_model_prefix}, to "
                "explain the similarity of two texts"
            )
        self.text_encoder = TextEncoderAdapter(encoder, self.processor, self.readout, self.name)
        self.name = self.text_encoder.name
        layers = count_calls_from_config(encoder.config)
        modules = len(self.text_encoder.session.topology.attention_modules)
        if not layers or not modules or layers % modules:
            raise UnsupportedError(
                f"{type(inside).__name__} runs {layers} layers with {modules} attention modules, so clearhead cannot "
                "distinguish the calls for the first text from those for the second"
            )
        self.calls_per_module = layers // modules  # ALBERT's layers are one module
        self.model = TextPairEncoder(encoder, self.readout)
        self.embedding_modules = [self.text_encoder.embeddings]  # type: ignore[misc]
        super().__post_init__()

    def choose_default_readout(self) -> Readout | None:
        return None  # it is always told

    @property
    def model_class_name(self) -> str:
        return type(self.model.encoder).__name__

    def count_expected_calls(self) -> int | None:
        return 2 * (count_calls_from_config(self.model.config) or 0)

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str]:
        stream = "text" if occurrence < self.calls_per_module else "other"
        return stream, stream

    def make_example_input(self) -> Any:
        if self.processor is None:
            ids = torch.arange(1, 6) % self.model.config.vocab_size
            return {"input_ids": ids[None, :4], "other_input_ids": ids[None]}
        return "a small example", "and another, which is longer"

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if isinstance(raw, Mapping):
            halves = split_pair_inputs(raw)
            if any("input_ids" not in half for half in halves):
                raise InputError(
                    f"model inputs must contain input_ids and {SECOND_TEXT_PREFIX}input_ids, but contain "
                    f"{', '.join(raw)}"
                )
            pairs = [self.text_encoder.make_samples(half, options) for half in halves]
            if len(pairs[0]) != len(pairs[1]):
                raise InputError(
                    f"there are {len(pairs[0])} first texts and {len(pairs[1])} second texts: they are paired by "
                    "position, so pass the same number of each"
                )
        elif isinstance(raw, tuple) and len(raw) == 2:
            pairs = [self.text_encoder.make_samples(part, options) for part in raw]
        else:
            raise InputError(
                f"expected two texts, (first, second), to explain their similarity, but got {type(raw).__name__} "
                f"({raw!r:.40})"
            )
        return [self._build_pair_sample(text, other) for text, other in zip(*pairs, strict=True)]

    def _build_pair_sample(self, text: Sample, other: Sample) -> Sample:
        inputs = {**text.inputs, **{f"{SECOND_TEXT_PREFIX}{name}": part for name, part in other.inputs.items()}}
        second: Units = replace(other.units, stream="other")
        return Sample(
            inputs,
            {**text.axes, "other": UnitAxis.concat(second)},
            num_truncated=text.num_truncated + other.num_truncated,
        )

    def _split_pair_sample(self, sample: Sample) -> tuple[Sample, Sample]:
        text, other = split_pair_inputs(sample.inputs)
        return Sample(text, {"text": sample.axes["text"]}), Sample(other, {"text": sample.axes["other"]})

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        texts, others = zip(*(self._split_pair_sample(sample) for sample in samples), strict=True)
        second = {f"{SECOND_TEXT_PREFIX}{name}": part for name, part in self.text_encoder.collate(others).items()}
        return {**self.text_encoder.collate(texts), **second}

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        return {
            "text": (self.text_encoder, "input_ids"),
            "other": (self.text_encoder, f"{SECOND_TEXT_PREFIX}input_ids"),
        }

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return "input_ids", f"{SECOND_TEXT_PREFIX}input_ids"

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {"text": vectors["input_ids"], "other": vectors[f"{SECOND_TEXT_PREFIX}input_ids"]}

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        text, other = self._split_pair_sample(sample)
        return {
            "text": self.text_encoder.find_readout_rows(text, target),
            "other": self.text_encoder.find_readout_rows(other, target),
        }

    def get_compared_text(self, sample: Sample) -> str:
        return format_units_text(sample.axes["other"].unit_groups[0])

    def get_embeddings(self, output: Any) -> tuple[Embeddings, Embeddings]:
        return output.other_embeds, output.text_embeds

    def embed_contrast_texts(self, texts: Sequence[str]) -> Embeddings:
        return self.model.embed(
            self.text_encoder.collate(
                [s for text in texts for s in self.text_encoder.make_samples(text, InputOptions())]
            )
        )


def format_units_text(units: Units) -> str:
    """The text that units stand for; without one, their names or, where these are mere numbers, their stream."""
    inside = [name for name, special in zip(units.names, units.special, strict=True) if not special]
    named = not all(name.isdigit() for name in inside)
    return " ".join(units.texts or (inside if named else [units.stream]))
