"""How texts become tokens: encoding, truncation, where each token lies, and words by name."""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.adapters.base import InputOptions
from clearhead.errors import InputError
from clearhead.units import Span, Units, align_pieces, build_numbered_units


@dataclass
class EncodedText:
    """One text (or pair) as the model takes it, and its units."""

    inputs: dict[str, Tensor]
    units: Units
    num_truncated: int = 0


class TokenizerWrapper:
    """A tokenizer, as one stream of a model reads texts with it."""

    def __init__(self, tokenizer: Any, model: nn.Module, stream: str = "text", config: Any = None) -> None:
        self.model, self.stream = model, stream
        self.config = model.config if config is None else config
        self.lock = threading.RLock()  # for those settings, which every call of the tokenizer reads or sets
        self.original_tokenizer = tokenizer
        self._copy_tokenizer()

    def __getstate__(self) -> dict[str, Any]:
        return {name: part for name, part in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    def _copy_tokenizer(self) -> None:
        """Truncation and padding are settings of a tokenizer object: work on a copy, the user's stays as it is."""
        self.tokenizer, self.copied_settings = (
            copy.deepcopy(self.original_tokenizer),
            _read_tokenizer_settings(self.original_tokenizer),
        )
        self.truncation_side = getattr(self.tokenizer, "truncation_side", "right")
        # Where the two differ the model's own padding counts: it numbers positions and finds the last token by it.
        own = getattr(self.config, "pad_token_id", None)
        self.pad_ids = {own, self.get_special_token_id("pad")} - {None}
        self.pad_id = own if own is not None else self.get_special_token_id("pad") or 0
        # Tokens that frame a text; the mask and unknown words are part of it.
        self.special_ids = {
            one for kind in ("pad", "cls", "sep", "bos", "eos") for one in self.get_special_token_ids(kind)
        }

    def encode_texts(self, texts: tuple[str, ...], options: InputOptions, **tokenizer_kwargs: Any) -> EncodedText:
        """The texts encoded; `encoding` goes to the tokenizer, such as add_special_tokens=False."""
        if self.tokenizer is None:
            raise InputError("the model was loaded without a tokenizer: pass model inputs, or load (model, tokenizer)")
        if options.unit_names is not None:
            raise InputError(
                "tokens= names the units of model inputs, but the units of a text already have names: leave out tokens="
            )
        with self.lock:
            if _read_tokenizer_settings(self.original_tokenizer) != self.copied_settings:  # tokens were added since
                self._copy_tokenizer()
        if not all(text.strip() for text in texts):
            raise InputError("the text is empty: there is nothing to explain")
        for text in texts:
            check_unicode(text)
        encoded, dropped = self._encode_truncated(texts, options, tokenizer_kwargs)
        # Offsets and flags describe units; they are no business of the model's.
        offsets, flags = encoded.pop("offset_mapping", None), encoded.pop("special_tokens_mask")
        ids = encoded["input_ids"]
        names = self.call_tokenizer("convert_ids_to_tokens", ids)
        special = tuple(bool(flag) or one in self.special_ids for flag, one in zip(flags, ids, strict=True))
        if all(special):
            why = (
                f"max_length={options.max_length} leaves no room for it" if dropped else "the tokenizer drops all of it"
            )
            raise InputError(f"no token of the text reaches the model ({why}): there is nothing to explain")
        parts: tuple[tuple[int, ...], tuple[Span, ...]] | None = None
        if offsets is not None:
            segments = tuple(part or 0 for part in encoded.sequence_ids(0))
            parts = segments, tuple((start, stop) for start, stop in offsets)
        elif not dropped:
            parts = self._locate_tokens(names, special, texts)
        units = Units(
            stream=self.stream,
            kind="token",
            names=tuple(names),
            special=special,
            texts=texts,
            segments=parts[0] if parts else None,
            offsets=parts[1] if parts else None,
        )
        return EncodedText({name: torch.as_tensor(part) for name, part in encoded.items()}, units, dropped)

    def make_units(self, ids: Sequence[int], names: Sequence[str] | None = None, masked: Sequence[bool] = ()) -> Units:
        """The units of ids that came without a text: named by the tokenizer, or by the caller."""
        if self.tokenizer is None:
            return build_numbered_units(len(ids), self.stream, names, masked)
        out = masked or [False] * len(ids)
        special = [one in self.special_ids or flag for one, flag in zip(ids, out, strict=True)]
        units = build_numbered_units(
            len(ids), self.stream, names or self.call_tokenizer("convert_ids_to_tokens", list(ids)), special
        )
        return units if names is not None else self._add_decoded_texts(units, list(ids))

    def call_tokenizer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Every call of the tokenizer goes through here: one thread must not undo another's truncation."""
        with self.lock:
            return getattr(self.tokenizer, method)(*args, **kwargs)

    def get_special_token_id(self, role: str) -> int | None:
        return next(iter(self.get_special_token_ids(role)), None)

    def get_special_token_ids(self, role: str) -> list[int]:
        """All tokens of a kind: a model may end its texts in several ways."""
        known = getattr(self.tokenizer, f"{role}_token_id", None)
        known = known if known is not None else getattr(self.config, f"{role}_token_id", None)
        return known if isinstance(known, list) else [] if known is None else [known]

    @property
    def max_length(self) -> int:
        """How many tokens the model takes: its table of positions decides, not the tokenizer's setting alone."""
        limits = [getattr(self.tokenizer, "model_max_length", None), self.max_positions]
        return min(int(limit) for limit in limits if limit)

    @cached_property
    def max_positions(self) -> int:
        """The size of the model's table of positions (looked up once: it is asked for with every input)."""
        size = getattr(self.config, "max_position_embeddings", None)
        if not isinstance(size, int) or size <= 0:
            return 10**9
        # RoBERTa and its kin number positions from the padding index on.
        shifted = [
            module.padding_idx + 1
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None
        ]
        shifted = [
            shift
            for shift in shifted
            if getattr(self.config, "model_type", "") not in _MODEL_TYPES_WITHOUT_POSITION_OFFSET
        ]
        # A dynamic RoPE has no table: it stretches its positions to texts that are longer.
        stretch = float(find_rope_parameters(self.config).get("dynamic", {}).get("factor") or 1.0)
        return int(size * stretch) - max(shifted, default=0)

    def find_token_id(self, token: str | int, vocab_size: int) -> int:
        """A word of the vocabulary by name or id."""
        if isinstance(token, int):
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"token {token} does not exist: the vocabulary has {vocab_size} tokens, counted from 0"
                )
            return token
        if self.tokenizer is None:
            raise InputError(
                "a target given as text needs the tokenizer: load it together with the model, or pass the token id"
            )
        tries = [self.call_tokenizer("encode", text, add_special_tokens=False) for text in (" " + token, token)]
        for ids in tries:
            if len(ids) == 1 and ids[0] != getattr(self.tokenizer, "unk_token_id", None):
                return int(ids[0])
        vocabulary = self.call_tokenizer("get_vocab")
        if token in vocabulary:  # a piece by its own name, such as ##ing
            return int(vocabulary[token])
        pieces = self.call_tokenizer("convert_ids_to_tokens", tries[-1])
        raise InputError(
            f"{token!r} is not a single token of the vocabulary (it is split into: {', '.join(pieces)}): choose another"
        )

    def decode_token(self, token_id: int) -> str:
        if self.tokenizer is None:
            return str(token_id)
        word = self.call_tokenizer("decode", [token_id]).strip()
        # Half a character, or white space alone, is better shown as the piece it is.
        return word if word and "\ufffd" not in word else str(self.call_tokenizer("convert_ids_to_tokens", token_id))

    def _encode_truncated(self, texts: tuple[str, ...], how: InputOptions, encoding: dict[str, Any]) -> tuple[Any, int]:
        """The encoded text, and how many tokens of it were cut off."""
        most = self.max_length if how.max_length is None else how.max_length
        if not isinstance(most, Integral) or isinstance(most, bool) or most < 1:
            raise InputError(f"max_length={how.max_length!r} is not valid: use a positive number of tokens")
        full = self._encode(texts, **encoding)
        length, limit = len(full["input_ids"]), min(int(most), self.max_length)
        if length <= limit:
            return full, 0
        if not how.truncation:
            raise InputError(
                f"the text has {length} tokens, but the model takes at most {limit}: shorten it, or allow truncation"
            )
        if limit <= sum(full["special_tokens_mask"]):
            raise InputError(
                f"max_length={limit} leaves no room for the text next to the special tokens: use a larger limit"
            )
        with self.lock:
            self.tokenizer.truncation_side = how.truncation_side or self.truncation_side
            encoded = self._encode(texts, truncation=True, max_length=limit, **encoding)
        return encoded, length - len(encoded["input_ids"])

    def _encode(self, texts: tuple[str, ...], **how: Any) -> Any:
        return self.call_tokenizer(
            "__call__",
            *texts,
            return_special_tokens_mask=True,
            return_offsets_mapping=bool(self.tokenizer.is_fast),
            verbose=False,
            **how,
        )

    def _locate_tokens(
        self, names: Sequence[str], special: Sequence[bool], texts: tuple[str, ...]
    ) -> tuple[tuple[int, ...], tuple[Span, ...]] | None:
        """Segments and offsets for a tokenizer that gives none; None where they cannot be told for sure."""
        runs = _find_content_runs(special)
        if len(runs) != len(texts):
            return None
        segments, offsets = [0] * len(names), [(0, 0)] * len(names)
        for segment, (run, text) in enumerate(zip(runs, texts, strict=True)):
            pieces = [self.call_tokenizer("convert_tokens_to_string", [names[i]]) for i in run]
            found = align_pieces([piece.removeprefix("##") for piece in pieces], text)
            if found is None:
                return None
            for i, span in zip(run, found, strict=True):
                segments[i], offsets[i] = segment, span
        return tuple(segments), tuple(offsets)

    def _add_decoded_texts(self, units: Units, ids: list[int]) -> Units:
        """The texts that ids stand for, where encoding them again gives the same ids: so words can be told."""
        if not self.tokenizer.is_fast:
            return units
        texts, segments, offsets = [], [0] * len(ids), [(0, 0)] * len(ids)
        for segment, run in enumerate(_find_content_runs(units.special)):
            texts.append(self.call_tokenizer("decode", [ids[i] for i in run]))
            how = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
            again = self.call_tokenizer("__call__", texts[-1], **how)
            if again["input_ids"] != [ids[i] for i in run]:
                return units
            for i, (start, stop) in zip(run, again["offset_mapping"], strict=True):
                segments[i], offsets[i] = segment, (start, stop)
        return replace(units, texts=tuple(texts), segments=tuple(segments), offsets=tuple(offsets))


#: Models whose position table has a padding row but counts from zero all the same.
_MODEL_TYPES_WITHOUT_POSITION_OFFSET = ("deberta", "deberta-v2")


def find_rope_parameters(config: Any) -> dict[str, Mapping[str, Any]]:
    """The kinds of rotary positions that a model has, with their settings; its kinds of layers may differ."""
    told = getattr(config, "rope_parameters", None) or {}
    parts = [told, *(part for part in told.values() if isinstance(part, Mapping))]
    return {part["rope_type"]: part for part in parts if part.get("rope_type")}


def _find_content_runs(special: Sequence[bool]) -> list[list[int]]:
    """The places between special tokens, run by run."""
    runs: list[list[int]] = []
    for place, flag in enumerate(special):
        if not flag:
            if not place or special[place - 1]:
                runs.append([])
            runs[-1].append(place)
    return runs


def _read_tokenizer_settings(tokenizer: Any) -> tuple[Any, ...]:
    """What a person may change about a tokenizer that is in use."""
    size = len(tokenizer) if hasattr(type(tokenizer), "__len__") else None
    return size, getattr(tokenizer, "truncation_side", None)


def check_unicode(text: str) -> None:
    """Half of a pair of surrogates is no character; Python makes them of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise InputError(
            f"the text contains {text[problem.start]!a} at position {problem.start}, which is not a Unicode character: "
            "save it as UTF-8"
        ) from None


def pad_to_length(tensor: Tensor, length: int, fill_value: int) -> Tensor:
    missing = length - len(tensor)
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), fill_value)]) if missing else tensor
