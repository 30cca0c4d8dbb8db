"""Texts: classifiers of one text or a pair, masked language models, and bare encoders with a target of one's own."""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.errors import InputError, Refusal
from clearhead.subjects.base import (
    How,
    Readout,
    Sample,
    Subject,
    base_model,
    class_names,
    register_subject,
    split_mapping,
)
from clearhead.targets import Target
from clearhead.units import Span, Units, located, numbered


class TextSubject(Subject):
    """What all models of texts share: tokenizing, padding, the embedding as the start of gradients."""

    stream = "text"
    leaf = "input_ids"

    def __post_init__(self) -> None:
        super().__post_init__()
        config, name = self.model.config, type(base_model(self.model)).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise Refusal(f"{name} is an encoder–decoder: its two streams are not explained yet")
        for kind, why in _REFUSED.items():
            if getattr(config, "model_type", "") == kind:
                raise Refusal(f"{name} cannot be explained: {why}")
        try:
            self.embeddings: Any = base_model(self.model).get_input_embeddings()  # type: ignore[operator]
        except NotImplementedError:
            self.embeddings = None
        if getattr(getattr(self.embeddings, "weight", None), "ndim", 0) != 2:
            raise Refusal(f"{name} cannot be explained: it has no table of word embeddings to start from")
        if getattr(config, "attention_type", None) == "block_sparse":
            raise Refusal(
                f"{name} attends in sparse blocks: set config.attention_type = 'original_full' and load it anew"
            )
        if self.processor is not None and not hasattr(self.processor, "convert_ids_to_tokens"):
            given = type(self.processor).__name__
            raise InputError(f"{name} takes texts, but came with a {given}, which is no tokenizer: give its tokenizer")
        # Truncation and padding are settings of a tokenizer object: work on a copy, the user's stays as it is.
        self.processor = copy.deepcopy(self.processor)
        self.truncation_side = getattr(self.processor, "truncation_side", "right")
        self.lock = threading.RLock()  # for those settings, which every call of the tokenizer reads or sets
        # Where the two differ the model's own padding counts: it numbers positions and finds the last token by it.
        own = getattr(config, "pad_token_id", None)
        self.pads = {own, self._token_id("pad")} - {None}
        self.pad = own if own is not None else self._token_id("pad") or 0
        # Tokens that frame a text; the mask and unknown words are part of it.
        self.outside = {self._token_id(kind) for kind in ("pad", "cls", "sep", "bos", "eos")} - {None}

    def default_readout(self) -> Readout | None:
        config, names = self.model.config, class_names(self.model)
        if hasattr(config, "classifier_pooling"):
            return "first" if config.classifier_pooling == "cls" else "mean"
        decoder = "GenericForSequenceClassification" in names or any(name.startswith(_DECODERS) for name in names)
        return "last" if decoder else "first"

    def rows(self, sample: Sample, target: Target) -> dict[int, float]:
        """Masked units are not averaged over, and the last token is the last that is not padding, as in the models."""
        mask, ids = sample.inputs.get("attention_mask"), sample.inputs.get("input_ids")
        if self.readout == "mean" and mask is not None:
            seen = mask.nonzero().flatten().tolist()
            return dict.fromkeys(seen, 1 / len(seen))
        own = getattr(self.model.config, "pad_token_id", None)
        if self.readout == "last" and ids is not None and own is not None:
            seen = (ids != own).nonzero().flatten().tolist()
            return {seen[-1] if seen else 0: 1.0}
        return super().rows(sample, target)

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
        if how.tokens is not None:
            raise InputError("tokens= names the units of model inputs; a text's units have names of their own")
        encoding, dropped = self._truncated(texts, how)
        # Offsets and flags describe units; they are no business of the model's.
        offsets, flags = encoding.pop("offset_mapping", None), encoding.pop("special_tokens_mask")
        ids = encoding["input_ids"]
        names = self._ask("convert_ids_to_tokens", ids)
        special = tuple(bool(flag) or one in self.outside for flag, one in zip(flags, ids, strict=True))
        if all(special):
            why = f"max_length={how.max_length} leaves no room for it" if dropped else "its tokenizer drops it all"
            raise InputError(f"no token of the text reaches the model ({why}): there is nothing to explain")
        parts: tuple[tuple[int, ...], tuple[Span, ...]] | None = None
        if offsets is not None:
            segments = tuple(part or 0 for part in encoding.sequence_ids(0))
            parts = segments, tuple((start, stop) for start, stop in offsets)
        elif not dropped:
            parts = self._located(names, special, texts)
        units = Units(
            stream=self.stream,
            kind="token",
            names=tuple(names),
            special=special,
            texts=texts,
            segments=parts[0] if parts else None,
            offsets=parts[1] if parts else None,
        )
        if getattr(self.model.config, "type_vocab_size", 2) < 2 or not self.accepts("token_type_ids"):
            encoding.pop("token_type_ids", None)
        return self._sample({name: torch.as_tensor(part) for name, part in encoding.items()}, units, dropped)

    def _truncated(self, texts: tuple[str, ...], how: How) -> tuple[Any, int]:
        """The encoded text, and how many tokens of it were cut off."""
        most = self.longest if how.max_length is None else how.max_length
        if not isinstance(most, Integral) or isinstance(most, bool) or most < 1:
            raise InputError(f"max_length={how.max_length!r} is not possible: give a number of tokens")
        full = self._encode(texts)
        length, limit = len(full["input_ids"]), min(int(most), self.longest)
        if length <= limit:
            return full, 0
        if not how.truncation:
            raise InputError(
                f"the text is {length} tokens long and the model takes {limit}: shorten it, or allow truncation"
            )
        if limit <= sum(full["special_tokens_mask"]):
            raise InputError(f"max_length={limit} leaves no room beside the special tokens: give more")
        with self.lock:
            self.processor.truncation_side = how.truncation_side or self.truncation_side
            encoding = self._encode(texts, truncation=True, max_length=limit)
        return encoding, length - len(encoding["input_ids"])

    def _ask(self, verb: str, *given: Any, **how: Any) -> Any:
        """Every call of the tokenizer goes through here: one thread must not undo another's truncation."""
        with self.lock:
            return getattr(self.processor, verb)(*given, **how)

    def _encode(self, texts: tuple[str, ...], **how: Any) -> Any:
        return self._ask(
            "__call__",
            *texts,
            return_special_tokens_mask=True,
            return_offsets_mapping=bool(self.processor.is_fast),
            verbose=False,
            **how,
        )

    def _located(
        self, names: Sequence[str], special: Sequence[bool], texts: tuple[str, ...]
    ) -> tuple[tuple[int, ...], tuple[Span, ...]] | None:
        """Segments and offsets for a tokenizer that gives none; None where they cannot be told for sure."""
        runs = _runs(special)
        if len(runs) != len(texts):
            return None
        segments, offsets = [0] * len(names), [(0, 0)] * len(names)
        for segment, (run, text) in enumerate(zip(runs, texts, strict=True)):
            pieces = [self._ask("convert_tokens_to_string", [names[i]]) for i in run]
            found = located([piece.removeprefix("##") for piece in pieces], text)
            if found is None:
                return None
            for i, span in zip(run, found, strict=True):
                segments[i], offsets[i] = segment, span
        return tuple(segments), tuple(offsets)

    def _given(self, raw: Mapping[str, Any], how: How) -> list[Sample]:
        keys = [key for key in ("input_ids", "inputs_embeds") if raw.get(key) is not None]
        if len(keys) != 1:
            held = ", ".join(raw) or "nothing"
            raise InputError(f"model inputs need either input_ids or inputs_embeds, but hold {held}")
        parts = [self._checked(part, keys[0]) for part in split_mapping(self, raw)]
        names = how.tokens
        nameless: list[Any] = [None] * len(parts)
        named = [names] if names and isinstance(names[0], str) else list(names or nameless)
        if len(named) != len(parts):
            raise InputError(f"tokens= names the units of {len(named)} inputs, but there are {len(parts)}")
        return [self._sample(part, self._named(part, keys[0], n)) for part, n in zip(parts, named, strict=True)]

    def _checked(self, part: dict[str, Tensor], key: str) -> dict[str, Tensor]:
        """One sample of the caller's own model inputs, made sure of."""
        count, width = self.embeddings.weight.shape
        given = part[key]
        whole = f"must be {'batch × token' if key == 'input_ids' else 'batch × token × width'}"
        if given.dim() != (1 if key == "input_ids" else 2) or not len(given):
            raise InputError(f"{key} {whole}, but one sample has the shape {tuple(given.shape)}")
        for name in ("attention_mask", "token_type_ids", "position_ids"):
            if name in part and part[name].shape != given.shape[:1]:
                raise InputError(f"{name} must have the {len(given)} tokens of {key}, not {tuple(part[name].shape)}")
        if key == "input_ids" and (given.is_floating_point() or given.min() < 0 or given.max() >= count):
            raise InputError(f"input_ids must be whole numbers from 0 to {count - 1}")
        if key == "inputs_embeds" and given.shape[1] != width:
            raise InputError(f"inputs_embeds must be {width} wide, not {given.shape[1]}")
        part = self._without_padding(part)
        if len(part[key]) > min(_table_sizes(self.model)):
            raise InputError(
                f"{len(part[key])} tokens are more than the model takes ({min(_table_sizes(self.model))}): "
                "model inputs are not truncated, shorten them"
            )
        return part

    def _named(self, part: dict[str, Tensor], key: str, names: Any) -> Units:
        length = len(part[key])
        hidden = [False] * length if "attention_mask" not in part else (part["attention_mask"] == 0).tolist()
        if key != "input_ids" or self.processor is None:
            return numbered(length, self.stream, names, hidden)
        ids = part["input_ids"].tolist()
        special = [one in self.outside or out for one, out in zip(ids, hidden, strict=True)]
        units = numbered(length, self.stream, names or self._ask("convert_ids_to_tokens", ids), special)
        return units if names is not None else self._with_texts(units, ids)

    def _with_texts(self, units: Units, ids: list[int]) -> Units:
        """The texts that ids stand for, where encoding them again gives the same ids: so words can be told."""
        if not self.processor.is_fast:
            return units
        texts, segments, offsets = [], [0] * len(ids), [(0, 0)] * len(ids)
        for segment, run in enumerate(_runs(units.special)):
            texts.append(self._ask("decode", [ids[i] for i in run]))
            how = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
            again = self._ask("__call__", texts[-1], **how)
            if again["input_ids"] != [ids[i] for i in run]:
                return units
            for i, (start, stop) in zip(run, again["offset_mapping"], strict=True):
                segments[i], offsets[i] = segment, (start, stop)
        return replace(units, texts=tuple(texts), segments=tuple(segments), offsets=tuple(offsets))

    def _without_padding(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """Trailing padding is cut off; everything else stays as it was given."""
        if "attention_mask" not in part:
            return part
        used = part["attention_mask"] != 0
        if "input_ids" in part:
            pads = torch.tensor(sorted(self.pads), device=used.device)
            used = used | ~torch.isin(part["input_ids"], pads)
        length = int(used.nonzero().max()) + 1 if used.any() else 0
        if not length:
            raise InputError("the attention mask hides every token: there is nothing to explain")
        whole = len(used)
        return {name: value[:length] if value.shape[:1] == (whole,) else value for name, value in part.items()}

    def _sample(self, inputs: dict[str, Tensor], units: Units, dropped: int = 0) -> Sample:
        return Sample.of(inputs, units, dropped=dropped)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        longest = max(len(sample.units) for sample in samples)
        if self.readout == "last" and any(len(sample.units) != longest for sample in samples):
            # Models that read the last token find it by the padding's id.
            ids = all("input_ids" in sample.inputs for sample in samples)
            if not ids or getattr(self.model.config, "pad_token_id", None) is None:
                raise InputError(
                    "inputs of different lengths cannot share a batch, since the model cannot tell their padding: "
                    "set model.config.pad_token_id and give texts or input_ids, or batch_size=1"
                )
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

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        (only,) = vectors.values()
        return {self.stream: only}

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
_DECODERS = ("GPT", "OpenAIGPT", "CTRL", "OPT", "Bloom", "Falcon", "Mpt", "BioGpt", "Llama", "Mistral", "Qwen", "Gemma")
#: Models whose answer would be wrong, and why.
_REFUSED = {
    "xlnet": "the attention it returns is a copy beside its computation, and it reads the last position, padding too",
    "ctrl": "it changes its word embeddings in place, so no gradient can start from them",
    "ibert": "it computes with whole numbers, which have no gradients",
    "reformer": "its attention is hashed and chunked, so no map of it covers the text",
    "yoso": "its attention is sampled, so no map of it covers the text",
    "nystromformer": "its attention is approximated through landmarks, so no map of it covers the text",
}


def _runs(special: Sequence[bool]) -> list[list[int]]:
    """The places between special tokens, run by run."""
    runs: list[list[int]] = []
    for place, flag in enumerate(special):
        if not flag:
            if not place or special[place - 1]:
                runs.append([])
            runs[-1].append(place)
    return runs


def _padded(part: Tensor, length: int, fill: int) -> Tensor:
    return torch.cat([part, part.new_full((length - len(part), *part.shape[1:]), fill)])


def _kind(raw: Any) -> str:
    return f"{type(raw).__name__} ({raw!r:.40})"


@register_subject
class TextEncoder(TextSubject):
    """A text encoder without a head: the target is a function of its output."""

    endings: ClassVar[tuple[str, ...]] = (
        *("BertModel", "RobertaModel", "ElectraModel", "MPNetModel", "AlbertModel", "DebertaModel", "DebertaV2Model"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accepts("visual_embeds"):
            raise Refusal(f"{type(base_model(self.model)).__name__} reads pictures and texts: it is not explained yet")

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
    masked = True

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
        if "input_ids" not in inputs:
            raise InputError("the masked position cannot be found in inputs_embeds: give input_ids")
        masks = (inputs["input_ids"] == self.mask).nonzero().flatten().tolist()
        if not masks:
            token = getattr(self.processor, "mask_token", f"id {self.mask}")
            cut = f" ({dropped} tokens were cut off, the masked one may be among them)" if dropped else ""
            raise InputError(f"no masked position: put {token} where the model should guess a word{cut}")
        return Sample.of(inputs, units, dropped=dropped, masks=tuple(masks))

    @property
    def regression(self) -> bool:
        return False

    def position(self, sample: Sample, target: Target) -> int:
        which = target.mask or 0
        if target.mask is None and len(sample.masks) > 1:
            raise InputError(
                f"the text has {len(sample.masks)} masked positions: "
                "choose one with target=clearhead.MaskedWord(word, mask=0)"
            )
        if not -len(sample.masks) <= which < len(sample.masks):
            raise InputError(f"mask={which}, but the text has {len(sample.masks)} masked positions, counted from 0")
        return sample.masks[which]

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        places = [
            sample.masks[0] if target.custom is not None else self.position(sample, target)
            for sample, target in zip(samples, targets, strict=True)
        ]
        return output.logits[torch.arange(len(places)) % len(output.logits), places]

    def rows(self, sample: Sample, target: Target) -> dict[int, float]:
        if self.readout != "mask":
            return super().rows(sample, target)
        if target.custom is not None:  # a function of the output may read any of them
            return dict.fromkeys(sample.masks, 1 / len(sample.masks))
        return {self.position(sample, target): 1.0}

    def label_index(self, label: str | int) -> int:
        size = self.model.config.vocab_size
        if isinstance(label, int):
            if not 0 <= label < size:
                raise InputError(f"word {label} does not exist: the vocabulary has {size} words, counted from 0")
            return label
        if self.processor is None:
            raise InputError("words need the tokenizer: load it together with the model, or give the word's id")
        tries = [self._ask("encode", text, add_special_tokens=False) for text in (" " + label, label)]
        for ids in tries:
            if len(ids) == 1 and ids[0] != getattr(self.processor, "unk_token_id", None):
                return int(ids[0])
        vocabulary = self._ask("get_vocab")
        if label in vocabulary:  # a piece by its own name, such as ##ing
            return int(vocabulary[label])
        pieces = self._ask("convert_ids_to_tokens", tries[-1])
        raise InputError(f"{label!r} is not one word of the vocabulary (pieces: {', '.join(pieces)}): choose another")

    def label_name(self, index: int) -> str:
        if self.processor is None:
            return str(index)
        word = self._ask("decode", [index]).strip()
        # Half a character, or white space alone, is better shown as the piece it is.
        return word if word and "\ufffd" not in word else str(self._ask("convert_ids_to_tokens", index))
