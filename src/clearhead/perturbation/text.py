"""Taking tokens, words or sentences away from a text.

`mask`, `pad`, `unk`, `eos`, `bos` put that token in the place of each token, `delete` leaves nothing; `written-mask`
and `written-pad` write the token into the text and read it anew, as the shap package does (what is left of a word may
then be read as another word). Special tokens always stay, and so does a mask to be filled. Words of a prompt can be
deleted where the word that comes next is explained: it is then the one after what is left.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import Sample, device_of
from clearhead.adapters.generation import Answered
from clearhead.errors import InputError, unknown
from clearhead.perturbation.hierarchy import Hierarchy, of_words, pieces
from clearhead.perturbation.players import Players, packed, rows_of
from clearhead.units import LEVELS, Axis, Units, numbered

TOKENS = ("mask", "pad", "unk", "eos", "bos")
WRITTEN = {"written-mask": "mask", "written-pad": "pad"}
OF_TEXTS = (*TOKENS, "delete", *WRITTEN)
#: The read-out of texts that are read at the token that ends them (CLIP).
END = "end of text"


@dataclass
class InText(Players):
    """Tokens, words or sentences."""

    subject: Any
    sample: Sample
    units: Units
    unit: str
    replacement: str

    def __init__(self, subject: Any, sample: Sample, units: Units, unit: str, replacement: str | None) -> None:
        self.subject, self.sample, self.units, self.unit = subject, sample, units, unit
        if unit not in LEVELS:
            raise unknown("unit", unit, LEVELS)
        self.merged, parents = units.merged(unit)
        self.parents = torch.as_tensor(parents)
        stays = self._stays()
        _, own = torch.unique(self.parents[~stays], return_inverse=True)
        self.owner = torch.full((len(units),), -1)
        self.owner[~stays] = own
        self.count = int(self.owner.max()) + 1
        if not self.count:
            raise InputError("nothing can be taken away from this text: every token is special")
        self.replacement = self._default() if replacement is None else self._checked(replacement)
        self.key = (self.replacement,)

    def _stays(self) -> Bool[Tensor, "unit"]:
        """Special tokens (also where there is no tokenizer to say so) and masks that are to be filled."""
        stays = torch.tensor(self.units.special)
        if "input_ids" in self.sample.inputs:
            outside = torch.tensor(sorted(self.subject.words.outside), dtype=torch.long)
            stays |= torch.isin(self.sample.inputs["input_ids"].cpu(), outside)
        stays[list(self.sample.masks)] = True
        return stays

    def _token(self, kind: str) -> int | None:
        own = getattr(self.subject, "mask", None) if kind == "mask" else None
        return own if own is not None else self.subject.words.token_id(kind)

    def _default(self) -> str:
        """The mask; for models that have none an unknown word, the end of a text … and otherwise nothing."""
        if self._token("mask") is None and self.subject.words.tokenizer is None and self._movable():
            return "delete"
        taken = self._read_by()
        known = [kind for kind in ("mask", "unk", "eos", "bos", "pad") if self._token(kind) not in {*taken, None}]
        return known[0] if known else self._checked("delete")

    def _read_by(self) -> set[int | None]:
        """Tokens that say where the text is read: in the place of others, they would have it read elsewhere."""
        config, readout = getattr(self.subject.model, "config", None), self.subject.readout
        if readout == "last":
            return {getattr(self.subject.words.config, "pad_token_id", None)}
        if readout == END:
            highest = getattr(config, "vocab_size", 0) - 1 if self.subject.ends_at_highest else None
            return {getattr(config, "eos_token_id", None), highest}
        return set()

    def _movable(self) -> bool:
        """Whether no place of the text is one that a target may be about, but for masks, which are known."""
        return type(self.sample) is Sample and getattr(self.subject, "kind", None) is None

    def _next_word(self) -> bool:
        """Whether the target is the word after a prompt, and no other: it is read at the end, wherever that is."""
        last = len(self.units) - 1
        return type(self.sample) is Answered and self.sample.first == last and self.sample.kept == (last,)

    def _checked(self, replacement: str) -> str:
        name = self.subject.model_class
        if replacement not in OF_TEXTS:
            raise unknown("replacement in a text", replacement, OF_TEXTS)
        stays_known = self._movable() or (replacement == "delete" and self._next_word())
        if replacement not in TOKENS and not stays_known:
            raise InputError(
                f"replacement={replacement!r} would move the words that the target of {name} is about: choose another "
                "of " + ", ".join(TOKENS)
            )
        if replacement in WRITTEN and (self.units.offsets is None or len(self.units.texts) != 1 or self.sample.masks):
            raise InputError(f"replacement={replacement!r} is for a single text, given as such")
        if replacement in TOKENS and self._token(replacement) is None:
            raise InputError(
                f"replacement={replacement!r}, but no such token of {name} is known: load its tokenizer together with "
                "the model, or choose another of " + ", ".join(OF_TEXTS)
            )
        if self.subject.readout == END and replacement in TOKENS and self._token(replacement) in self._read_by():
            raise InputError(
                f"replacement={replacement!r} is the end of a text, at which {name} is read: choose another"
            )
        return replacement

    def kept(self, keep: Bool[Tensor, "*coalition player"]) -> Bool[Tensor, "*coalition unit"]:
        return (self.owner < 0) | keep[..., self.owner.clamp(min=0)]

    def codes(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        return packed(self.kept(keep))

    def lengths(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        return self.kept(keep).sum(1).tolist() if self.replacement == "delete" else [len(self.units)] * len(keep)

    def without(self, keep: Bool[Tensor, "player"]) -> Sample:
        kept = self.kept(keep)
        if self.replacement == "delete":
            return self._deleted(kept)
        if self.replacement in WRITTEN:
            return self._read_anew(kept)
        token = self._token(self.replacement)
        inputs = dict(self.sample.inputs)
        if "input_ids" in inputs:
            inputs["input_ids"] = inputs["input_ids"].masked_fill(~kept.to(inputs["input_ids"].device), token or 0)
        else:
            vectors, lookup = inputs["inputs_embeds"], self.subject.embeddings
            with torch.no_grad():
                instead = lookup(torch.tensor([[token or 0]], device=device_of(lookup)))[0].to(vectors)
            inputs["inputs_embeds"] = torch.where(kept.to(vectors.device)[:, None], vectors, instead)
        return replace(self.sample, inputs=inputs)

    def _deleted(self, kept: Bool[Tensor, "unit"]) -> Sample:
        left = kept.nonzero().flatten().tolist()
        if not left:
            raise InputError(
                "replacement='delete' leaves nothing of the text, and a model cannot read nothing: choose another of "
                + ", ".join(TOKENS)
            )
        whole, inputs = len(self.units), {}
        for name, part in self.sample.inputs.items():
            along = part.shape[:1] == (whole,)
            # what is left moves together: positions are counted anew
            inputs[name] = part if not along else part[: len(left)] if name == "position_ids" else part[left]
        axes = {stream: Axis.of(_some(self.units, left)) for stream in self.sample.axes}
        masks = tuple(left.index(place) for place in self.sample.masks)
        deleted = replace(self.sample, inputs=inputs, axes=axes, masks=masks)
        last = len(left) - 1
        return replace(deleted, first=last, kept=(last,)) if isinstance(deleted, Answered) else deleted

    def _read_anew(self, kept: Bool[Tensor, "unit"]) -> Sample:
        token = getattr(self.subject.words.tokenizer, f"{WRITTEN[self.replacement]}_token")
        parts = [piece if there else f" {token}" for piece, there in zip(pieces(self.units), kept, strict=True)]
        read = self.subject.words.ask("__call__", " ".join("".join(parts).split()), verbose=False)
        inputs = {name: torch.as_tensor(read[name]) for name in self.sample.inputs}
        return replace(
            self.sample, inputs=inputs, axes={s: Axis.of(numbered(len(read["input_ids"]), s)) for s in self.sample.axes}
        )

    def spread(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        sizes = torch.bincount(self.owner[self.owner >= 0], minlength=self.count)
        return (scores / sizes)[self.owner.clamp(min=0)].masked_fill(self.owner < 0, 0)

    def beside(self, leaves: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        return (leaves / torch.bincount(self.parents))[self.parents]

    def hierarchy(self) -> Hierarchy:
        owners = [int(self.owner[self.parents == place].max()) for place in range(len(self.merged))]
        return of_words(self.merged, owners)

    def windows(self, size: int) -> Bool[Tensor, "window player"]:
        firsts = [int((self.owner == player).nonzero()[0]) for player in range(self.count)]
        stays = (self.owner < 0).cumsum(0)
        runs = stays[firsts]  # what stands between special tokens is one run
        found = []
        for run in runs.unique().tolist():
            places = (runs == run).nonzero().flatten().tolist()
            wide = min(size, len(places))
            found += [places[start : start + wide] for start in range(len(places) - wide + 1)]
        return rows_of(found, self.count)


def _some(units: Units, left: list[int]) -> Units:
    def those(part: tuple[Any, ...] | None) -> Any:
        return None if part is None else tuple(part[i] for i in left)

    return replace(
        units,
        names=those(units.names),
        special=those(units.special),
        segments=those(units.segments),
        offsets=those(units.offsets),
    )
