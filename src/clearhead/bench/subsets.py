"""What happens to the output when some units go, against what the scores say: leave-one-out, sensitivity-n, infidelity.

y is the number that was explained, its class held at that of the clean input; x − S the input without the units of S.

    leave-one-out   d_u = y(x) − y(x − u) of each unit: the order that other methods are compared with (`agreement`)
    sensitivity-n   over random subsets S of n units, Pearson's correlation of Σ_S score with y(x) − y(x − S)
    infidelity      mean over the same subsets of (Σ_S score − (y(x) − y(x − S)))²; as it is, and with the scores
                    scaled by the factor β that makes it least (relevance has no unit of its own)

Subsets are drawn by example, so that all methods are asked about the same ones.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float

from clearhead.bench.curves import removed_counts
from clearhead.bench.data import Example
from clearhead.bench.looking import Looks, Whole, read_whole
from clearhead.bench.perturbation import seen
from clearhead.bench.protocol import Explained, Explanations, Measurement, Protocol, register
from clearhead.bench.removing import FromPicture, Removal, removal
from clearhead.errors import InputError
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.explainer import Explainer


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
        self.ex, self.looks = ex, looks or Looks(ex)
        self.asked: dict[str, tuple[Whole, bytes, list[bytes]]] = {}

    def ask(
        self, name: str, whole: Whole, units: Units, fill: str | None, masks: Sequence[Bool[np.ndarray, "unit"]]
    ) -> None:
        way = removal(self.ex.subject, whole.sample, units, fill or default_fill(units))
        clean = self.looks.ask(whole.sample, whole.target)
        tickets = [self.looks.ask(way.without(removed_units(way, units, gone)), whole.target) for gone in masks]
        self.asked[name] = (whole, clean, tickets)

    def __getitem__(self, name: str) -> Float[np.ndarray, "subset"]:
        self.looks.finish()
        whole, clean, tickets = self.asked[name]
        target = whole.target.pinned(torch.as_tensor(self.looks[clean]), whole.classes)
        y = [float(target.value(torch.as_tensor(self.looks[one]), whole.classes)) for one in (clean, *tickets)]
        return np.array([y[0] - after for after in y[1:]])


@register("subsets")
@dataclass(frozen=True)
class Subsets(Protocol):
    """`shares` are the n of sensitivity-n, as shares of the units; `draws` subsets are drawn for each.

    Of a model with several streams all are asked about, or the one that `stream` names.
    """

    about: ClassVar[str] = "Do sums of scores over random subsets of units tell how far the output falls without them?"
    headline: ClassVar[tuple[str, ...]] = ("sensitivity 0.3", "scaled infidelity")

    explained: Explained = "predicted"
    shares: tuple[float, ...] = (0.1, 0.3, 0.5)
    draws: int = 32
    fill: str | None = None
    stream: str | None = None
    smaller_is_better: ClassVar[frozenset[str]] = frozenset({"infidelity", "scaled infidelity"})

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        if self.draws < 3:
            raise InputError(f"draws={self.draws}: a correlation needs at least 3")
        drops = Drops(ex, looks)
        masks: dict[str, list[Bool[np.ndarray, "draw unit"]]] = {}
        streams: dict[int, list[str]] = {}
        first = next(iter(explanations.values()))
        for place, example in enumerate(examples):
            whole = read_whole(ex, example, self)
            for stream in first[place].streams if self.stream is None else [self.stream]:
                units = seen(whole, stream)
                if len(units.drop_special()) < 2:
                    continue
                name = f"{place}/{stream}"
                masks[name] = self.subsets(units, example.id, stream)
                streams.setdefault(place, []).append(stream)
                drops.ask(name, whole, units, self.fill, [gone for own in masks[name] for gone in own])
        made = []
        for method, own in explanations.items():
            for place, example in enumerate(examples):
                for stream in streams.get(place, []):
                    name = f"{place}/{stream}"
                    figures = self._figures(own[place][stream].scores, masks[name], drops[name])
                    made.append(Measurement(example.id, method, stream, figures))
        return made

    def altered(self, methods: int) -> int:
        return 1 + len(self.shares) * self.draws

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

    def _figures(
        self,
        scores: Float[np.ndarray, "unit"],
        masks: Sequence[Bool[np.ndarray, "draw unit"]],
        drops: Float[np.ndarray, "subset"],
    ) -> dict[str, float]:
        scores = np.nan_to_num(scores[: masks[0].shape[1]]).astype(float)
        sums = [own @ scores for own in masks]
        figures = {}
        for share, own, fell in zip(self.shares, sums, np.split(drops, len(masks)), strict=True):
            figures[f"sensitivity {share:g}"] = correlation(own, fell)
        every = np.concatenate(sums)
        beta = float(every @ drops / (every @ every)) if every.any() else 0.0
        figures["infidelity"] = float(((every - drops) ** 2).mean())
        figures["scaled infidelity"] = float(((beta * every - drops) ** 2).mean())
        figures["beta"] = beta
        return figures


def correlation(a: Float[np.ndarray, "item"], b: Float[np.ndarray, "item"]) -> float:
    """Pearson's; 0 where one side does not move at all (to the last digits): nothing is then said."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b / size) if size > 1e-24 else 0.0
