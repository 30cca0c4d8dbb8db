"""Texts: classifiers of one text or a pair, masked language models, and bare encoders with a target of one's own."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import (
    InputOptions,
    ModelAdapter,
    Readout,
    list_class_names,
    register_adapter,
    unbatch_inputs,
    unwrap_base_model,
)
from clearhead.adapters.readers.text import EncodedText, TokenizerWrapper, find_rope_parameters, pad_to_length
from clearhead.capture.checks.self_test import count_calls_from_config
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import Units, build_numbered_units


class TextAdapter(ModelAdapter):
    """What all models of texts share: tokenizing, padding, the embedding as the start of gradients."""

    stream = "text"
    grad_input_name = "input_ids"
    input_names: ClassVar[tuple[str, ...]] = ("text",)
    processor_class = "AutoTokenizer"

    def __post_init__(self) -> None:
        super().__post_init__()
        config, name = self.model.config, type(unwrap_base_model(self.model)).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{name} is an encoder–decoder model: of these, clearhead explains only those that generate text"
            )
        for kind, why in _UNSUPPORTED_MODEL_TYPES.items():
            if getattr(config, "model_type", "") == kind:
                raise UnsupportedError(f"{name} cannot be explained: {why}")
        try:
            self.embeddings: Any = _get_input_embeddings(unwrap_base_model(self.model))
        except NotImplementedError:
            self.embeddings = None
        if getattr(getattr(self.embeddings, "weight", None), "ndim", 0) != 2:
            raise UnsupportedError(f"{name} cannot be explained: it has no table of token embeddings")
        if getattr(config, "attention_type", None) == "block_sparse":
            raise UnsupportedError(
                f"{name} uses block-sparse attention: set config.attention_type = 'original_full' and load it again"
            )
        if self.processor is not None and not hasattr(self.processor, "convert_ids_to_tokens"):
            given = type(self.processor).__name__
            raise InputError(
                f"{name} takes texts, but was loaded with a {given}, which is not a tokenizer: pass its tokenizer "
                "instead"
            )
        self.tokenizer_wrapper = TokenizerWrapper(self.processor, self.model, self.stream, config.get_text_config())

    def count_expected_calls(self) -> int | None:
        """Those of the part that reads texts: a tower for pictures has nothing to do."""
        return count_calls_from_config(self.model.config.get_text_config())

    def choose_default_readout(self) -> Readout | None:
        config, names = self.model.config, list_class_names(self.model)
        decoder = "GenericForSequenceClassification" in names or any(
            name.startswith(_DECODER_CLASS_PREFIXES) for name in names
        )
        if hasattr(config, "classifier_pooling") and not decoder:
            return "first" if config.classifier_pooling == "cls" else "mean"
        return "last" if decoder else "first"

    def find_readout_rows(self, sample: Sample, target: Target) -> dict[int, float]:
        """Masked units are not averaged over, and the last token is the last that is not padding, as in the models."""
        mask, ids = sample.inputs.get("attention_mask"), sample.inputs.get("input_ids")
        if self.readout == "mean" and mask is not None:
            seen = mask.nonzero().flatten().tolist()
            return dict.fromkeys(seen, 1 / len(seen))
        own = getattr(self.tokenizer_wrapper.config, "pad_token_id", None)
        if self.readout == "last" and ids is not None and own is not None:
            seen = (ids != own).nonzero().flatten().tolist()
            return {seen[-1] if seen else 0: 1.0}
        return super().find_readout_rows(sample, target)

    def make_example_input(self) -> Any:
        if self.processor is not None:
            return "a small example"
        return {"input_ids": torch.arange(1, 5)[None] % len(self.embeddings.weight)}

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if isinstance(raw, Mapping):
            return self._samples_from_model_inputs(raw, options)
        pair = isinstance(raw, tuple) and len(raw) == 2
        texts: tuple[Any, ...] = raw if pair else (raw,)
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"expected a text, a pair of texts or model inputs, but got {_describe_value(raw)}")
        tokens = self.tokenizer_wrapper.encode_texts(texts, options)
        self._check_vocabulary(tokens)
        if getattr(self.model.config, "type_vocab_size", 2) < 2 or not self.forward_accepts("token_type_ids"):
            tokens.inputs.pop("token_type_ids", None)
        return [self._build_sample(tokens.inputs, tokens.units, tokens.num_truncated)]

    def _check_vocabulary(self, tokens: EncodedText) -> None:
        count = len(self.embeddings.weight)
        for one, name in zip(tokens.inputs["input_ids"].tolist(), tokens.units.names, strict=True):
            if one >= count:
                raise InputError(
                    f"the tokenizer encodes {name!r} as id {one}, but the model's vocabulary has {count} tokens: check "
                    "that the tokenizer belongs to this model"
                )

    def _samples_from_model_inputs(self, raw: Mapping[str, Any], how: InputOptions) -> list[Sample]:
        keys = [key for key in ("input_ids", "inputs_embeds") if raw.get(key) is not None]
        if len(keys) != 1:
            held = ", ".join(raw) or "nothing"
            raise InputError(f"model inputs must contain either input_ids or inputs_embeds, but contain {held}")
        whole = unbatch_inputs(self, raw)
        checked = [self._validate_inputs(part, keys[0]) for part in whole]
        parts = whole if how.keep_padding else checked
        names = how.unit_names
        nameless: list[Any] = [None] * len(parts)
        named = [names] if names and isinstance(names[0], str) else list(names or nameless)
        if len(named) != len(parts):
            raise InputError(f"tokens= names the units of {len(named)} inputs, but there are {len(parts)}")
        return [
            self._build_sample(part, self._build_units(part, keys[0], n)) for part, n in zip(parts, named, strict=True)
        ]

    def _validate_inputs(self, part: dict[str, Tensor], key: str) -> dict[str, Tensor]:
        """One sample of the caller's own model inputs, made sure of."""
        count, width = self.embeddings.weight.shape
        given = part[key]
        whole = f"must be {'batch × token' if key == 'input_ids' else 'batch × token × width'}"
        if given.dim() != (1 if key == "input_ids" else 2) or not len(given):
            raise InputError(f"{key} {whole}, but one sample has the shape {tuple(given.shape)}")
        for name in ("attention_mask", "token_type_ids", "position_ids"):
            if name in part and part[name].shape != given.shape[:1]:
                raise InputError(
                    f"{name} must have one value for each of the {len(given)} tokens of {key}, not the shape "
                    f"{tuple(part[name].shape)}"
                )
        if key == "input_ids" and (given.is_floating_point() or given.min() < 0 or given.max() >= count):
            raise InputError(f"input_ids must be integers from 0 to {count - 1}")
        if key == "inputs_embeds" and given.shape[1] != width:
            raise InputError(f"inputs_embeds must have {width} features per token, not {given.shape[1]}")
        part = self._remove_padding(part)
        if len(part[key]) > self.tokenizer_wrapper.max_positions:
            raise InputError(
                f"the input has {len(part[key])} tokens, more than the model's maximum "
                f"({self.tokenizer_wrapper.max_positions}): model inputs are not truncated, so shorten them"
            )
        return part

    def _build_units(self, part: dict[str, Tensor], key: str, names: Any) -> Units:
        length = len(part[key])
        hidden = [False] * length if "attention_mask" not in part else (part["attention_mask"] == 0).tolist()
        if key != "input_ids":
            return build_numbered_units(length, self.tokenizer_wrapper.stream, names, hidden)
        return self.tokenizer_wrapper.make_units(part["input_ids"].tolist(), names, hidden)

    def _remove_padding(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """Trailing padding is cut off; everything else stays as it was given."""
        if "attention_mask" not in part:
            return part
        used = part["attention_mask"] != 0
        if "input_ids" in part:
            pads = torch.tensor(sorted(self.tokenizer_wrapper.pad_ids), device=used.device)
            used = used | ~torch.isin(part["input_ids"], pads)
        length = int(used.nonzero().max()) + 1 if used.any() else 0
        if not length:
            raise InputError("the attention mask excludes every token: there is nothing to explain")
        whole = len(used)
        return {name: value[:length] if value.shape[:1] == (whole,) else value for name, value in part.items()}

    def _build_sample(self, inputs: dict[str, Tensor], units: Units, num_truncated: int = 0) -> Sample:
        return Sample.from_units(inputs, units, num_truncated=num_truncated)

    @property
    def positions_depend_on_batch_length(self) -> bool:
        return bool({"dynamic", "longrope"} & find_rope_parameters(self.model.config.get_text_config()).keys())

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        longest = max(len(sample.units) for sample in samples)
        if self.positions_depend_on_batch_length and any(len(sample.units) != longest for sample in samples):
            raise InputError(
                "inputs of different lengths cannot share a batch, since the model computes positions from the longest "
                "one: set batch_size=1"
            )
        if self.readout == "last" and any(len(sample.units) != longest for sample in samples):
            # Models that read the last token find it by the padding's id.
            ids = all("input_ids" in sample.inputs for sample in samples)
            if not ids or getattr(self.tokenizer_wrapper.config, "pad_token_id", None) is None:
                raise InputError(
                    "inputs of different lengths cannot share a batch, since the model cannot recognise their padding: "
                    "set model.config.pad_token_id and pass texts or input_ids, or set batch_size=1"
                )
        batch: dict[str, list[Tensor]] = {}
        for sample in samples:
            length = len(sample.units)
            parts = dict(sample.inputs)
            parts.setdefault("attention_mask", torch.ones(length, dtype=torch.long))
            for name, part in parts.items():
                fill = self.tokenizer_wrapper.pad_id if name == "input_ids" else 0
                per_unit = part.dim() > 0 and len(part) == length
                batch.setdefault(name, []).append(pad_to_length(part, longest, fill) if per_unit else part)
        stacked = {name: torch.stack(parts).to(self.device) for name, parts in batch.items()}
        return {name: part.to(self.dtype) if part.is_floating_point() else part for name, part in stacked.items()}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        (only,) = vectors.values()
        return {self.stream: only}


#: Decoders whose classifiers read the last token.
_DECODER_CLASS_PREFIXES = (
    *("GPT", "OpenAIGPT", "CTRL", "OPT", "Bloom", "Falcon", "Mpt", "BioGpt", "Llama", "Mistral", "Qwen", "Gemma"),
    "ModernBertDecoder",
)
#: Models whose answer would be wrong, and why.
_UNSUPPORTED_MODEL_TYPES = {
    "xlnet": (
        "the attention it returns is a copy that its output does not depend on, and it reads the last position even if "
        "that is padding"
    ),
    "ctrl": "it changes its token embeddings in place, so they have no gradient",
    "ibert": "it computes with integers, which have no gradients",
    "reformer": "its attention is hashed and chunked, so no attention map covers the text",
    "longformer": "it attends within chunks and pads its input to whole chunks, so no attention map covers the text",
    "bros": "it uses the positions of words on a page (bbox), which are not supported yet",
    "yoso": "its attention is sampled, so no attention map covers the text",
    "nystromformer": "its attention is approximated through landmarks, so no attention map covers the text",
}


def _get_input_embeddings(model: Any) -> Any:
    if not hasattr(model, "get_input_embeddings"):  # transformers 5.0: the text towers of CLIP and its kin
        return model.embeddings.token_embedding
    return model.get_input_embeddings()


def _describe_value(raw: Any) -> str:
    return f"{type(raw).__name__} ({raw!r:.40})"


@register_adapter
class TextEncoderAdapter(TextAdapter):
    """A text encoder without a head: the target is a function of its output."""

    class_suffixes: ClassVar[tuple[str, ...]] = (
        *("BertModel", "RobertaModel", "ElectraModel", "MPNetModel", "AlbertModel", "DebertaModel", "DebertaV2Model"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.forward_accepts("visual_embeds"):
            raise UnsupportedError(
                f"{type(unwrap_base_model(self.model)).__name__} takes images and texts, which is not supported yet"
            )

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        raise InputError(
            f"{type(self.model).__name__} has no classes: pass as target= a function of its output that returns one "
            "number per sample"
        )


@register_adapter
class TextClassificationAdapter(TextAdapter):
    """One text or a pair of texts, single- or multi-label."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)


@register_adapter
class NextSentencePredictionAdapter(TextAdapter):
    """A pair of texts: whether the second goes on where the first ends."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("ForNextSentencePrediction",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.labels, self.multi_label = {0: "goes on", 1: "does not"}, False
