"""Texts: classifiers of one text or a pair, masked language models, and bare text encoders with a target of one's own."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import InputError
from clearhead.subjects.base import How, Readout, Sample, Subject, base_model, register_subject, split_mapping
from clearhead.targets import Target
from clearhead.units import Units, numbered


class TextSubject(Subject):
    """What all models of texts share: tokenizing, padding, the embedding as the start of gradients."""

    stream = "text"
    leaf = "input_ids"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Truncation and padding are settings of a tokenizer object: work on a copy, the user's stays as it is.
        self.processor = copy.deepcopy(self.processor)
        self.pad = self._token_id("pad") or 0

    def default_readout(self) -> Readout | None:
        config = self.model.config
        if hasattr(config, "classifier_pooling"):
            return "first" if config.classifier_pooling == "cls" else "mean"
        return "last" if type(base_model(self.model)).__name__.startswith(_DECODERS) else "first"

    def example(self) -> Any:
        if self.processor is not None:
            return "a small example"
        return {"input_ids": torch.arange(1, 5)[None] % self.model.config.vocab_size}

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if isinstance(raw, Mapping):
            return self._given(raw, how)
        pair = isinstance(raw, tuple) and len(raw) == 2
        texts: tuple[Any, ...] = raw if pair else (raw,)
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"expected a text, a pair of texts or model inputs, but got {_kind(raw)}")
        if not all(text.strip() for text in texts):
            raise InputError("the text is empty: there is nothing to explain")
        if self.processor is None:
            raise InputError("the model came without a tokenizer: give model inputs, or load (model, tokenizer)")
        return [self._tokenized(texts, how)]

    def _tokenized(self, texts: tuple[str, ...], how: How) -> Sample:
        full = self._encode(texts)
        limit = min(how.max_length or self.longest, self.longest)
        dropped = max(0, len(full["input_ids"]) - limit)
        encoding = full
        if dropped:
            if not how.truncation:
                raise InputError(
                    f"the text is {len(full['input_ids'])} tokens long and the model takes {limit}: "
                    "shorten it, or allow truncation"
                )
            if how.truncation_side is not None:
                self.processor.truncation_side = how.truncation_side
            encoding = self._encode(texts, truncation=True, max_length=limit)
            dropped = len(full["input_ids"]) - len(encoding["input_ids"])
        # Offsets and flags describe units; they are no business of the model's.
        offsets, special = encoding.pop("offset_mapping", None), encoding.pop("special_tokens_mask")
        units = Units(
            stream=self.stream,
            kind="token",
            names=tuple(self.processor.convert_ids_to_tokens(encoding["input_ids"])),
            special=tuple(bool(flag) for flag in special),
            texts=texts,
            segments=tuple(part or 0 for part in encoding.sequence_ids(0)) if offsets is not None else None,
            offsets=tuple((start, stop) for start, stop in offsets) if offsets is not None else None,
        )
        return self._sample({name: torch.as_tensor(part) for name, part in encoding.items()}, units, dropped)

    def _encode(self, texts: tuple[str, ...], **how: Any) -> Any:
        return self.processor(
            *texts,
            return_special_tokens_mask=True,
            return_offsets_mapping=bool(self.processor.is_fast),
            verbose=False,
            **how,
        )

    def _given(self, raw: Mapping[str, Any], how: How) -> list[Sample]:
        key = "input_ids" if "input_ids" in raw else "inputs_embeds"
        if key not in raw:
            raise InputError(f"model inputs need input_ids or inputs_embeds, but hold {', '.join(raw) or 'nothing'}")
        parts = [self._without_padding(part) for part in split_mapping(raw)]
        names = how.tokens
        named = [names] if names and isinstance(names[0], str) else list(names or [None] * len(parts))
        if len(named) != len(parts):
            raise InputError(f"tokens= names the units of {len(named)} inputs, but there are {len(parts)}")
        return [self._sample(part, self._named(part, key, n)) for part, n in zip(parts, named, strict=True)]

    def _named(self, part: dict[str, Tensor], key: str, names: Any) -> Units:
        special: list[bool] = []
        if key == "input_ids" and self.processor is not None:
            ids = part["input_ids"].tolist()
            names = names or self.processor.convert_ids_to_tokens(ids)
            outside = {self._token_id(kind) for kind in ("pad", "cls", "sep", "bos", "eos")}
            special = [one in outside for one in ids]
        return numbered(len(part[key]), self.stream, names, special)

    def _without_padding(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """Trailing padding is cut off; everything else stays as it was given."""
        if "attention_mask" not in part or "input_ids" not in part:
            return part
        used = (part["attention_mask"] != 0) | (part["input_ids"] != self.pad)
        length = int(used.nonzero().max()) + 1 if used.any() else 0
        if not length:
            raise InputError("the attention mask hides every token: there is nothing to explain")
        whole = len(used)
        return {name: value[:length] if value.shape[:1] == (whole,) else value for name, value in part.items()}

    def _sample(self, inputs: dict[str, Tensor], units: Units, dropped: int = 0) -> Sample:
        return Sample(inputs, units, dropped)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        longest = max(len(sample.units) for sample in samples)
        batch: dict[str, list[Tensor]] = {}
        for sample in samples:
            length = len(sample.units)
            parts = dict(sample.inputs)
            parts.setdefault("attention_mask", torch.ones(length, dtype=torch.long))
            for name, part in parts.items():
                fill = self.pad if name == "input_ids" else 0
                per_unit = part.dim() > 0 and len(part) == length
                batch.setdefault(name, []).append(_padded(part, longest, fill) if per_unit else part)
        stacked = {name: torch.stack(parts).to(self.device) for name, parts in batch.items()}
        return {name: part.to(self.dtype) if part.is_floating_point() else part for name, part in stacked.items()}

    def to_units(
        self, vectors: Float[Tensor, "batch unit feature"], samples: Sequence[Sample]
    ) -> Float[Tensor, "batch unit feature"]:
        return vectors

    def _token_id(self, kind: str) -> int | None:
        from_processor = getattr(self.processor, f"{kind}_token_id", None)
        return from_processor if from_processor is not None else getattr(self.model.config, f"{kind}_token_id", None)

    @property
    def longest(self) -> int:
        """How many tokens the model takes: its table of positions decides, not the tokenizer's setting alone."""
        limits = [getattr(self.processor, "model_max_length", None), *_table_sizes(self.model)]
        return min(int(limit) for limit in limits if limit)


def _table_sizes(model: nn.Module) -> list[int]:
    config = model.config
    size = getattr(config, "max_position_embeddings", None)
    if not isinstance(size, int) or size <= 0:
        return [10**9]
    # RoBERTa and its kin number positions from the padding index on.
    shifted = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None
    ]
    shifted = [shift for shift in shifted if getattr(config, "model_type", "") not in _UNSHIFTED]
    return [size - max(shifted, default=0)]


#: Models whose position table has a padding row but counts from zero all the same.
_UNSHIFTED = ("deberta", "deberta-v2")
#: Decoders whose classifiers read the last token.
_DECODERS = ("GPT", "Llama", "Mistral", "Mixtral", "Qwen", "Gemma", "Phi", "OPT", "Bloom", "Falcon", "Olmo", "Glm")


def _padded(part: Tensor, length: int, fill: int) -> Tensor:
    return torch.cat([part, part.new_full((length - len(part), *part.shape[1:]), fill)])


def _kind(raw: Any) -> str:
    return f"{type(raw).__name__} ({raw!r:.40})"


@register_subject
class TextEncoder(TextSubject):
    """A text encoder without a head: the target is a function of its output."""

    endings: ClassVar[tuple[str, ...]] = ("BertModel", "RobertaModel", "ElectraModel", "MPNetModel", "DebertaV2Model")

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        raise InputError(
            f"{type(self.model).__name__} has no classes: give target= a function of its output that returns one "
            "number per sample"
        )


@register_subject
class TextClassification(TextSubject):
    """One text or a pair of texts, single- or multi-label."""

    endings: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)


@register_subject
class MaskedLanguageModel(TextSubject):
    """The word at a masked position; the position is found, not assumed."""

    endings: ClassVar[tuple[str, ...]] = ("ForMaskedLM",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.multi_label = False
        self.mask = self._token_id("mask")

    def default_readout(self) -> Readout | None:
        return "mask"

    def example(self) -> Any:
        if self.processor is not None:
            return f"a {self.processor.mask_token} example"
        return {"input_ids": torch.full((1, 4), self.mask or 0)}

    def _sample(self, inputs: dict[str, Tensor], units: Units, dropped: int = 0) -> Sample:
        if self.mask is None:
            raise InputError("the id of the mask token is not known: load the tokenizer together with the model")
        masks = (inputs["input_ids"] == self.mask).nonzero().flatten().tolist()
        if not masks:
            token = getattr(self.processor, "mask_token", f"id {self.mask}")
            raise InputError(f"no masked position: put {token} where the model should guess a word")
        return Sample(inputs, units, dropped, masks=tuple(masks))

    def position(self, sample: Sample, target: Target) -> int:
        which = target.mask or 0
        if target.mask is None and len(sample.masks) > 1:
            raise InputError(
                f"the text has {len(sample.masks)} masked positions: "
                "choose one with target=clearhead.MaskedWord(word, mask=0)"
            )
        if which >= len(sample.masks):
            raise InputError(f"mask={which}, but the text has {len(sample.masks)} masked positions, counted from 0")
        return sample.masks[which]

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        places = [self.position(sample, target) for sample, target in zip(samples, targets, strict=True)]
        return output.logits[torch.arange(len(places)), places]

    def rows(self, sample: Sample, target: Target) -> dict[int, float]:
        return {self.position(sample, target): 1.0} if self.readout == "mask" else super().rows(sample, target)

    def label_index(self, label: str | int) -> int:
        size = self.model.config.vocab_size
        if isinstance(label, int):
            if not 0 <= label < size:
                raise InputError(f"word {label} does not exist: the vocabulary has {size} words, counted from 0")
            return label
        if self.processor is None:
            raise InputError("words need the tokenizer: load it together with the model, or give the word's id")
        tries = [self.processor.encode(text, add_special_tokens=False) for text in (" " + label, label)]
        for ids in tries:
            if len(ids) == 1 and ids[0] != getattr(self.processor, "unk_token_id", None):
                return int(ids[0])
        pieces = self.processor.convert_ids_to_tokens(tries[-1])
        raise InputError(f"{label!r} is not one word of the vocabulary (pieces: {', '.join(pieces)}): choose another")

    def label_name(self, index: int) -> str:
        return self.processor.decode([index]).strip() if self.processor is not None else str(index)
