"""What happens to the output when some units go, against what the scores say: leave-one-out, sensitivity-n, infidelity.

y is the number that was explained, its class held at that of the clean input; x − S the input without the units of S.

    leave-one-out   d_u = y(x) − y(x − u) of each unit: the order that other methods are compared with (`agreement`)
    sensitivity-n   over random subsets S of n units, Pearson's correlation of Σ_S score with y(x) − y(x − S)
    infidelity      mean over the same subsets of (Σ_S score − (y(x) − y(x − S)))²; as it is, and with the scores
                    scaled by the factor β that makes it least (relevance has no unit of its own)

`subsets` draws S by example, so that all methods are asked about the same ones; `squares` takes every square of a
picture, as InterpretDL does (`idl-infidelity`, whose figure is the scaled one; what is grey already counts here, too).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float

from clearhead.bench.data import Example
from clearhead.bench.output_cache import Looks, Whole, read_whole
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, register
from clearhead.bench.protocols.curves import removed_counts
from clearhead.bench.protocols.perturbation import seen
from clearhead.bench.protocols.unit_removal import FromPicture, Removal, removal
from clearhead.errors import InputError
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: A correlation of fewer points says nothing.
FEWEST = 3


def default_fill(units: Units) -> str:
    return "mean" if units.grid is not None or units.kind == "region" else "mask"


def removed_units(way: Removal, units: Units, gone: Bool[np.ndarray, "unit"]) -> Bool[np.ndarray, "item"]:
    """Units as what a removal takes: of a picture, the pixels of its patches."""
    if isinstance(way, FromPicture):
        return np.asarray((gone[way.patch_of.clip(min=0)] & (way.patch_of >= 0)).flatten())
    return gone


class Drops:
    """y(x) − y(x − S) for many S of many inputs; each distinct altered input goes through the model once."""

    def __init__(self, ex: "Explainer", looks: Looks | None = None) -> None:
        self.looks = looks or Looks(ex)
        self.asked: dict[str, tuple[Whole, bytes, list[bytes]]] = {}

    def ask(self, name: str, whole: Whole, way: Removal, removed: Iterable[Bool[np.ndarray, "item"]]) -> None:
        clean = self.looks.ask(whole.sample, whole.target)
        tickets = [self.looks.ask(way.without(gone), whole.target) for gone in removed]
        self.asked[name] = (whole, clean, tickets)

    def __getitem__(self, name: str) -> Float[np.ndarray, "subset"]:
        self.looks.finish()
        whole, clean, tickets = self.asked[name]
        target = whole.target.pinned(torch.as_tensor(self.looks[clean]), whole.classes)
        y = [float(target.value(torch.as_tensor(self.looks[one]), whole.classes)) for one in (clean, *tickets)]
        return np.array([y[0] - after for after in y[1:]])


#: By kind (how many units, how large a square), how much of each unit every S of an input takes.
Shares = Mapping[str, Float[np.ndarray, "subset unit"]]


@dataclass(frozen=True)
class Sums(Protocol):
    """Sums of scores over parts of an input against how far the output falls without them, whatever the parts are.

    Of a model with several streams all are asked about, or the one that `stream` names.
    """

    smaller_is_better: ClassVar[frozenset[str]] = frozenset({"infidelity", "scaled infidelity"})

    explained: Explained = "predicted"
    fill: str | None = None
    stream: str | None = None

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        self.check()
        drops = Drops(ex, looks)
        shares: dict[tuple[int, str], Shares] = {}
        first = next(iter(explanations.values()))
        for place, example in enumerate(examples):
            whole = read_whole(ex, example, self)
            for stream in self.streams_of(first[place]):
                units = seen(whole, stream)
                if len(units.drop_special()) < 2:
                    continue
                way = removal(ex.subject, whole.sample, units, self.fill or default_fill(units))
                shares[place, stream], removed = self.parts(way, units, example.id, stream)
                drops.ask(f"{place}/{stream}", whole, way, removed)
        made = []
        for method, own in explanations.items():
            for (place, stream), taken in shares.items():
                found = figures(own[place][stream].scores, taken, drops[f"{place}/{stream}"])
                made.append(Measurement(examples[place].id, method, stream, found))
        return made

    def streams_of(self, explanation: AnyExplanation) -> Sequence[str]:
        return list(explanation.streams) if self.stream is None else [self.stream]

    def parts(self, way: Removal, units: Units, *key: str) -> tuple[Shares, Iterable[Bool[np.ndarray, "item"]]]:
        """What is asked about: how much of each unit goes, and what the removal takes for it, in the same order."""
        raise NotImplementedError


def figures(scores: Float[np.ndarray, "unit"], shares: Shares, drops: Float[np.ndarray, "subset"]) -> dict[str, float]:
    """Of one method on one input; `drops` lie in the order of the shares."""
    scores = np.nan_to_num(scores[: next(iter(shares.values())).shape[1]]).astype(float)
    sums = {kind: own @ scores for kind, own in shares.items()}
    every = np.concatenate(list(sums.values()))
    fell = np.split(drops, np.cumsum([len(own) for own in sums.values()])[:-1])
    found = {
        f"sensitivity {kind}": correlation(own, after)
        for (kind, own), after in zip(sums.items(), fell, strict=True)
        if len(own) >= FEWEST
    }
    beta = float(every @ drops / (every @ every)) if every.any() else 0.0
    found["infidelity"] = float(((every - drops) ** 2).mean())
    found["scaled infidelity"] = float(((beta * every - drops) ** 2).mean())
    found["beta"] = beta
    return found


@register("subsets")
@dataclass(frozen=True)
class Subsets(Sums):
    """`shares` are the n of sensitivity-n, as shares of the units; `draws` subsets are drawn for each."""

    about: ClassVar[str] = "Do sums of scores over random subsets of units tell how far the output falls without them?"
    headline: ClassVar[tuple[str, ...]] = ("sensitivity 0.3", "scaled infidelity")

    shares: tuple[float, ...] = (0.1, 0.3, 0.5)
    draws: int = 32

    def check(self) -> None:
        super().check()
        if self.draws < FEWEST:
            raise InputError(f"draws={self.draws}: a correlation needs at least {FEWEST}")
        if not self.shares or len({f"{share:g}" for share in self.shares}) < len(self.shares):
            raise InputError(f"shares={self.shares}: give at least one, and none twice")

    def altered(self, methods: int) -> int:
        return 1 + len(self.shares) * self.draws

    def parts(self, way: Removal, units: Units, *key: str) -> tuple[Shares, Iterable[Bool[np.ndarray, "item"]]]:
        drawn = self.subsets(units, *key)
        taken = {f"{share:g}": own.astype(float) for share, own in zip(self.shares, drawn, strict=True)}
        return taken, (removed_units(way, units, gone) for own in drawn for gone in own)

    def subsets(self, units: Units, *key: str) -> list[Bool[np.ndarray, "draw unit"]]:
        """For each share, so many random subsets of units that are not special."""
        places = units.drop_special()
        digest = hashlib.sha256("\0".join([str(self.seed), *key]).encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        found = []
        for count in removed_counts(self.shares, len(places), "up"):
            rows = np.zeros((self.draws, len(units)), dtype=bool)
            for row in rows:
                row[rng.permutation(places)[:count]] = True
            found.append(rows)
        return found


@register("squares")
@dataclass(frozen=True)
class Squares(Sums):
    """Every square of so many pixels (`sides`) of what the model sees, one each `stride` pixels; all lie wholly inside.

    A square's sum is that of the heat map, scaled up bilinearly to the picture, each patch's score spread over its
    pixels. Sides that do not fit a picture are left out, and a picture that none fits is refused.
    """

    about: ClassVar[str] = "Do sums of scores over squares of a picture tell how far the output falls without them?"
    headline: ClassVar[tuple[str, ...]] = ("scaled infidelity",)

    fill: str | None = "grey"
    sides: tuple[int, ...] = (32, 64, 128)
    stride: int = 8

    def check(self) -> None:
        super().check()
        if not self.sides or len(set(self.sides)) < len(self.sides):
            raise InputError(f"sides={self.sides}: give at least one, and none twice")
        if min(*self.sides, self.stride) < 1:
            raise InputError(f"sides={self.sides}, stride={self.stride}: each must be at least 1 pixel")

    def altered(self, methods: int) -> int | None:
        return None

    def streams_of(self, explanation: AnyExplanation) -> Sequence[str]:
        streams = super().streams_of(explanation)
        found = [stream for stream in streams if explanation[stream].units.grid is not None]
        if not found:
            raise InputError(f"squares are cut out of a picture's patches, and the streams are {', '.join(streams)}")
        return found

    def parts(self, way: Removal, units: Units, *key: str) -> tuple[Shares, Iterable[Bool[np.ndarray, "item"]]]:
        assert isinstance(way, FromPicture) and units.grid is not None
        high, wide = way.size
        fitting = [side for side in self.sides if side <= min(high, wide)]
        if not fitting:
            raise InputError(
                f"the model sees {high} × {wide} pixels, and no square of {', '.join(map(str, self.sides))} fits: "
                f"choose smaller sides, as sides={min(high, wide) // 4},{min(high, wide) // 2}"
            )
        taken = {}
        for side in fitting:
            down, across = (
                np.array([spread[start : start + side].sum(0) for start in starts(size, side, self.stride)])
                for size, spread in zip(way.size, map(_spread, units.grid, way.size), strict=True)
            )
            taken[str(side)] = np.zeros((len(down) * len(across), len(units)))
            taken[str(side)][:, units.drop_special()] = np.kron(down, across)
        return taken, (gone for side in fitting for gone in self._cut_out(side, way.size))

    def _cut_out(self, side: int, size: tuple[int, int]) -> Iterator[Bool[np.ndarray, "pixel"]]:
        for top in starts(size[0], side, self.stride):
            for left in starts(size[1], side, self.stride):
                gone = np.zeros(size, dtype=bool)
                gone[top : top + side, left : left + side] = True
                yield gone.flatten()


def starts(size: int, side: int, stride: int) -> range:
    """Where squares begin along one edge.

    >>> list(starts(10, 4, 3))
    [0, 3, 6]
    """
    return range(0, size - side + 1, stride)


def _spread(count: int, size: int) -> Float[np.ndarray, "pixel patch"]:
    """How much of each patch lies at each pixel along one edge, by bilinear interpolation; 1 of each altogether."""
    one = torch.eye(count, dtype=torch.float64)[None]
    large = torch.nn.functional.interpolate(one, size=size, mode="linear", align_corners=False)[0]
    return np.asarray((large * count / size).T)


def correlation(a: Float[np.ndarray, "item"], b: Float[np.ndarray, "item"]) -> float:
    """Pearson's; 0 where one side does not move at all (to the last digits): nothing is then said."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b / size) if size > 1e-24 else 0.0
