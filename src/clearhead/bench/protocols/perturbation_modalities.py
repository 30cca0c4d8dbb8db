"""Perturbation of pictures, of texts and of regions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from clearhead.bench.data.base import Example
from clearhead.bench.protocols.base import register
from clearhead.bench.protocols.perturbation import Perturbation
from clearhead.errors import InputError, unknown
from clearhead.explanation.explanation import Explanation
from clearhead.units import Units


@register("perturb-images")
@dataclass(frozen=True)
class Pictures(Perturbation):
    """`ranked` "patch" removes whole patches; "pixel" single pixels of the map, scaled up to the picture's size."""

    fills: tuple[str, ...] = ("black", "mean", "blur")
    ranked: str = "patch"

    def check(self) -> None:
        super().check()
        if self.ranked not in ("patch", "pixel"):
            raise unknown("ranked", self.ranked, ("patch", "pixel"))

    def streams_of(self, streams: Sequence[str], explanation: Any) -> list[str]:
        found = [stream for stream in streams if explanation[stream].units.grid is not None]
        if not found:
            raise InputError(f"perturb-images needs patches of a picture, and the streams are {', '.join(streams)}")
        return found

    def removed(
        self, part: Explanation, direction: str, way: Any, example: Example
    ) -> Iterator[Bool[np.ndarray, "pixel"]]:
        key = (example.id, part.stream)
        if self.ranked == "pixel":
            scores = scaled_up(part.heat_map(), way.size).flatten()
            counts = self.counts(len(scores))
            yield from self._masks(scores, np.arange(len(scores)), len(scores), direction, counts, key)
        else:
            places = part.units.drop_special()
            counts = self.counts(len(places))
            for gone in self._masks(part.scores[places], places, len(part), direction, counts, key):
                # −1 is what lies beyond the last whole patch: no unit's, and never removed
                yield (gone[way.patch_of.clip(min=0)] & (way.patch_of >= 0)).flatten()


def scaled_up(heat: Float[np.ndarray, "row column"], size: tuple[int, int]) -> Float[np.ndarray, "height width"]:
    """Bilinear, corners of pixels not aligned: as all authors do it. Ranked, so its scale does not matter: ±1 at most.

    Along the edges it is flat, but for the last digit: that would rank pixels by how a machine rounds.
    """
    small = torch.as_tensor(np.ascontiguousarray(heat))[None, None].double()
    large = torch.nn.functional.interpolate(small, size=size, mode="bilinear", align_corners=False)[0, 0].numpy()
    return np.asarray(np.round(large / (np.abs(large).max() or 1.0), 12))


@register("perturb-text")
@dataclass(frozen=True)
class Texts(Perturbation):
    """Tokens of a text, of a source or of a prompt.

    protect: special tokens are never removed, or (a, b) so many at the beginning and at the end, special or not
    of: what fractions are of, "removable" tokens or all "units"
    clamp: negative scores count as zero; padded_to: the text is padded to so many tokens, whose pads compete with
    zero scores and count in the fractions; shortest: texts of fewer tokens are left out
    """

    fills: tuple[str, ...] = ("delete", "mask")
    stream: str | None = None
    protect: bool | tuple[int, int] = True
    of: str = "removable"
    clamp: bool = False
    padded_to: int | None = None
    shortest: int = 0

    def check(self) -> None:
        super().check()
        if self.of not in ("removable", "units"):
            raise unknown("of", self.of, ("removable", "units"))
        if not isinstance(self.protect, bool) and (len(self.protect) != 2 or min(self.protect) < 0):
            raise InputError(f"protect={self.protect}: it is true, false, or two numbers of tokens, first and last")

    def streams_of(self, streams: Sequence[str], explanation: Any) -> list[str]:
        if self.stream is not None:
            return [explanation[self.stream].stream]
        found = [one for one in streams if one in ("text", "source") and explanation[one].units.boxes is None]
        if not found:
            raise InputError(f"perturb-text needs a text, and the streams are {', '.join(streams)}")
        return [one for one in found if len(explanation[one]) >= self.shortest]

    def removed(
        self, part: Explanation, direction: str, way: Any, example: Example
    ) -> Iterator[Bool[np.ndarray, "unit"]]:
        places = self._removable(part.units)
        scores = np.maximum(part.scores, 0) if self.clamp else part.scores
        pads = max(0, (self.padded_to or 0) - len(part))
        candidates = np.concatenate([places, np.full(pads, -1)])
        values = np.concatenate([scores[places], np.zeros(pads)])
        whole = len(candidates) if self.of == "removable" else len(part) + pads
        counts = [min(count, len(candidates)) for count in self.counts(whole)]
        yield from self._masks(values, candidates, len(part), direction, counts, (example.id, part.stream))

    def _removable(self, units: Units) -> Int[np.ndarray, "place"]:
        if isinstance(self.protect, bool):
            return np.asarray(units.drop_special()) if self.protect else np.arange(len(units))
        first, last = self.protect
        return np.arange(first, len(units) - last)


@register("perturb-regions")
@dataclass(frozen=True)
class Regions(Perturbation):
    """Regions of a picture, for models that read features and boxes."""

    fills: tuple[str, ...] = ("delete",)
    rounding: str = "kept"

    def streams_of(self, streams: Sequence[str], explanation: Any) -> list[str]:
        if "regions" not in streams:
            raise InputError(f"perturb-regions needs regions of a picture, and the streams are {', '.join(streams)}")
        return ["regions"]

    def removed(
        self, part: Explanation, direction: str, way: Any, example: Example
    ) -> Iterator[Bool[np.ndarray, "unit"]]:
        counts = self.counts(len(part))
        yield from self._masks(part.scores, np.arange(len(part)), len(part), direction, counts, (example.id, "regions"))
