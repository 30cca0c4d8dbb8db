"""How units are taken away from an input: who the players are, and what stands in the place of those that are absent.

Texts: `mask`, `pad`, `unk`, `eos`, `bos` put that token in the place of each token, `delete` leaves nothing;
`written-mask` and `written-pad` write the token into the text and read it anew, as the shap package does (what is left
of a word may then be read as another word). Pictures: `mean` (of the picture), `black`, and `blur` (so far that a patch
has no detail left). Players are tokens, words or sentences of a text; patches or superpixels of a picture. Special
tokens always stay, and so does a mask to be filled.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.errors import InputError, unknown
from clearhead.subjects.base import Sample, Subject
from clearhead.subjects.hierarchy import Hierarchy, of_places, of_words, pieces
from clearhead.subjects.pictures import pair
from clearhead.units import LEVELS, Axis, Units, numbered

TOKENS = ("mask", "pad", "unk", "eos", "bos")
WRITTEN = {"written-mask": "mask", "written-pad": "pad"}
OF_TEXTS = (*TOKENS, "delete", *WRITTEN)
OF_PICTURES = ("mean", "blur", "black")
#: About how many superpixels a picture is cut into.
SEGMENTS = 50


class Players(ABC):
    """The players of one input: `owner` is whose each unit is, −1 for units that always stay."""

    count: int
    unit: str
    replacement: str
    #: What must be equal for two games to share what was evaluated.
    key: tuple[Any, ...]

    @abstractmethod
    def without(self, keep: Bool[Tensor, "player"]) -> Sample:
        """The input with these players alone."""

    @abstractmethod
    def codes(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        """What tells one altered input from another."""

    @abstractmethod
    def lengths(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        """How many units each altered input has."""

    @abstractmethod
    def spread(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        """The scores of players on their units, in equal shares: so they add up to the same."""

    def beside(self, leaves: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        """What leaves of the hierarchy got that are no players, on their units."""
        raise NotImplementedError

    @abstractmethod
    def hierarchy(self) -> Hierarchy:
        """Which players belong together: what Owen values need."""

    @abstractmethod
    def windows(self, size: int) -> Bool[Tensor, "window player"]:
        """Every run of so many neighbours; in a picture, every square with that side."""


def players_of(subject: Subject, sample: Sample, unit: str | None = None, replacement: str | None = None) -> Players:
    """The players of an input, as `why_not` allows them."""
    (units,) = next(iter(sample.axes.values())).parts
    if units.grid is not None:
        return InPicture(subject, sample, units, unit or "patch", replacement or "mean")
    return InText(subject, sample, units, unit or "token", replacement)


def why_not(subject: Subject, sample: Sample) -> str | None:
    """Why units of this model's inputs cannot be taken away; None where they can."""
    name = subject.model_class
    parts = [units for axis in sample.axes.values() for units in axis.parts]
    if len(parts) != 1:
        streams = ", ".join(units.stream for units in parts)
        return f"it takes units away from one stream of input, and {name} has several ({streams})"
    (units,) = parts
    pixels, ids = sample.inputs.get("pixel_values"), _leaf(sample)
    if units.grid is not None and pixels is not None and pixels.dim() == 3:
        return None
    if units.kind in LEVELS and ids is not None and len(ids) == len(units) and hasattr(subject, "words"):
        return None
    return f"it is not known how units of the input of {name} are taken away: it does so with texts and pictures"


def _leaf(sample: Sample) -> Tensor | None:
    """What lies along the tokens: ids, or their vectors."""
    for name, dimensions in (("input_ids", 1), ("inputs_embeds", 2)):
        if name in sample.inputs and sample.inputs[name].dim() == dimensions:
            return sample.inputs[name]
    return None


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
        if self._token("mask") is None and self.subject.words.tokenizer is None and self._deletable():
            return "delete"
        # A model that finds the last token by its padding would read another one.
        taken = {getattr(self.subject.model.config, "pad_token_id", None)} if self.subject.readout == "last" else {None}
        known = [kind for kind in ("mask", "unk", "eos", "bos", "pad") if self._token(kind) not in {*taken, None}]
        return known[0] if known else self._checked("delete")

    def _deletable(self) -> bool:
        """Whether the places that a target may be about stay where they are, or are known."""
        return type(self.sample) is Sample and getattr(self.subject, "kind", None) is None

    def _checked(self, replacement: str) -> str:
        name = self.subject.model_class
        if replacement not in OF_TEXTS:
            raise unknown("replacement in a text", replacement, OF_TEXTS)
        if replacement not in TOKENS and not self._deletable():
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
        return replacement

    def kept(self, keep: Bool[Tensor, "*coalition player"]) -> Bool[Tensor, "*coalition unit"]:
        return (self.owner < 0) | keep[..., self.owner.clamp(min=0)]

    def codes(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        return _packed(self.kept(keep))

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
            vectors, table = inputs["inputs_embeds"], self.subject.embeddings.weight.detach()
            inputs["inputs_embeds"] = torch.where(kept.to(vectors.device)[:, None], vectors, table[token].to(vectors))
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
        return replace(self.sample, inputs=inputs, axes=axes, masks=masks)

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
        return _rows(found, self.count)


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


def _packed(rows: Bool[Tensor, "row item"]) -> list[bytes]:
    return [row.tobytes() for row in np.packbits(rows.numpy(), axis=1)]


def _rows(places: Sequence[Sequence[int]], count: int) -> Bool[Tensor, "row player"]:
    rows = torch.zeros(len(places), count, dtype=torch.bool)
    for row, own in enumerate(places):
        rows[row, list(own)] = True
    return rows


class InPicture(Players):
    """Patches or superpixels: whose each pixel is, and which patch it lies in."""

    def __init__(self, subject: Any, sample: Sample, units: Units, unit: str, replacement: str) -> None:
        self.subject, self.sample, self.units = subject, sample, units
        if unit not in ("patch", "superpixel"):
            raise unknown("unit", unit, ("patch", "superpixel"))
        if replacement not in OF_PICTURES:
            raise unknown("replacement in a picture", replacement, OF_PICTURES)
        self.unit, self.replacement, self.key = unit, replacement, (replacement, unit)
        self.pixels = sample.inputs["pixel_values"]
        self.patch_of = self._patches()
        self.labels = self._superpixels() if unit == "superpixel" else self._of_patches()
        self.count = int(self.labels.max()) + 1
        self.absent = self._absent()

    @property
    def size(self) -> tuple[int, int]:
        return pair(self.subject.patch_size)

    def _patches(self) -> Int[Tensor, "height width"]:
        """The unit that each pixel lies in; −1 beyond the last whole patch, where the model does not look."""
        assert self.units.grid is not None and self.units.boxes is not None
        (rows, columns), (high, wide) = self.units.grid, self.size
        first = next(i for i, box in enumerate(self.units.boxes) if box is not None)
        cells = first + torch.arange(rows * columns).reshape(rows, columns)
        found = torch.full(self.pixels.shape[1:], -1)
        found[: rows * high, : columns * wide] = cells.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        return found

    def _of_patches(self) -> Int[Tensor, "height width"]:
        return torch.where(self.patch_of < 0, -1, self.patch_of - self.patch_of[self.patch_of >= 0].min())

    def _superpixels(self) -> Int[Tensor, "height width"]:
        """SLIC on the pixels that the model sees, whatever their scale; without scikit-image, patches."""
        try:
            from skimage.segmentation import slic
        except ImportError:
            return self._of_patches()
        shown = self.pixels.detach().cpu().double().numpy()
        low, high = shown.min(), shown.max()
        shown = (shown - low) / max(high - low, 1e-12)
        made = slic(shown, SEGMENTS, start_label=0, channel_axis=0, convert2lab=len(shown) == 3)
        labels = torch.where(self.patch_of < 0, -1, torch.as_tensor(made).long())
        inside = labels >= 0
        labels[inside] = torch.unique(labels[inside], return_inverse=True)[1]
        return labels

    def _absent(self) -> Float[Tensor, "channel height width"]:
        """What is seen where a player is absent."""
        pixels = self.pixels
        if self.replacement == "mean":
            return pixels.double().mean((1, 2), keepdim=True).to(pixels).expand_as(pixels)
        if self.replacement == "blur":
            return _blurred(pixels.double(), float(max(self.size))).to(pixels)
        processor = self.subject.processor
        mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
        if processor is None or (getattr(processor, "do_normalize", True) and (mean is None or std is None)):
            raise InputError(
                "replacement='black', but which numbers are black is not known without the image processor: load it "
                "together with the model, or choose 'mean' or 'blur'"
            )
        if not getattr(processor, "do_normalize", True):
            return torch.zeros_like(pixels)
        black = -torch.tensor(mean).to(pixels) / torch.tensor(std).to(pixels)
        return black[:, None, None].expand_as(pixels)

    def codes(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        return _packed(keep)

    def lengths(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        return [len(self.units)] * len(keep)

    def without(self, keep: Bool[Tensor, "player"]) -> Sample:
        kept = (self.labels < 0) | keep[self.labels.clamp(min=0)]
        pixels = torch.where(kept.to(self.pixels.device), self.pixels, self.absent)
        return replace(self.sample, inputs={**self.sample.inputs, "pixel_values": pixels})

    def spread(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        inside = self.labels >= 0
        labels = self.labels[inside]
        shares = (scores / torch.bincount(labels, minlength=self.count))[labels]
        found = torch.zeros(len(self.units), dtype=scores.dtype)
        return found.index_add_(0, self.patch_of[inside], shares)

    def _places(self) -> Float[np.ndarray, "player 2"]:
        """The middle of each player."""
        inside = self.labels >= 0
        labels = self.labels[inside]
        sizes = torch.bincount(labels, minlength=self.count)
        places = inside.nonzero().double()
        sums = torch.zeros(self.count, 2, dtype=torch.float64).index_add_(0, labels, places)
        return (sums / sizes[:, None]).numpy()

    def hierarchy(self) -> Hierarchy:
        return of_places(self._places())

    def windows(self, size: int) -> Bool[Tensor, "window player"]:
        if self.unit != "patch":
            raise InputError(f"window={size} is a square of patches; superpixels have no rows: leave out window=")
        assert self.units.grid is not None
        rows, columns = self.units.grid
        high, wide = min(size, rows), min(size, columns)
        cells = np.arange(rows * columns).reshape(rows, columns)
        starts = [(r, c) for r in range(rows - high + 1) for c in range(columns - wide + 1)]
        return _rows([cells[r : r + high, c : c + wide].flatten().tolist() for r, c in starts], self.count)


def _blurred(pixels: Float[Tensor, "channel height width"], sigma: float) -> Float[Tensor, "channel height width"]:
    """A Gaussian blur; beyond the edge the picture goes on as it ends."""
    reach = torch.arange(-int(3 * sigma), int(3 * sigma) + 1).double()
    weights = (-(reach**2) / (2 * sigma**2)).exp()
    weights = (weights / weights.sum()).to(pixels.device)
    for axis in (1, 2):
        length = pixels.shape[axis]
        places = (torch.arange(length)[:, None] + reach.long()).clamp(0, length - 1).to(pixels.device)
        pixels = (pixels.movedim(axis, -1)[..., places] * weights).sum(-1).movedim(-1, axis)
    return pixels
