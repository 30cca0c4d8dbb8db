"""Perturbation of pictures, of texts and of regions, and the settings under which authors published."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from clearhead.bench.data.base import Example
from clearhead.bench.perturbation import Perturbation
from clearhead.bench.protocol import register
from clearhead.errors import InputError, unknown
from clearhead.explanation import Explanation
from clearhead.units import Units


@register("perturb-images")
@dataclass(frozen=True)
class Pictures(Perturbation):
    """`ranked` "patch" removes whole patches; "pixel" single pixels of the map, scaled up to the picture's size."""

    fills: tuple[str, ...] = ("black", "mean", "blur")
    ranked: str = "patch"

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
        elif self.ranked == "patch":
            places = part.units.drop_special()
            counts = self.counts(len(places))
            for gone in self._masks(part.scores[places], places, len(part), direction, counts, key):
                # −1 is what lies beyond the last whole patch: no unit's, and never removed
                yield (gone[way.patch_of.clip(min=0)] & (way.patch_of >= 0)).flatten()
        else:
            raise unknown("ranked", self.ranked, ("patch", "pixel"))


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
        if self.of not in ("removable", "units"):
            raise unknown("of", self.of, ("removable", "units"))
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
        if len(self.protect) != 2 or min(self.protect) < 0:
            raise InputError(f"protect={self.protect}: it is true, false, or two numbers of tokens, first and last")
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


#: Fractions removed from questions and from regions of LXMERT, and from the more regions of VisualBERT.
_VQA = (0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
_MANY_BOXES = (0.5, 0.75, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
_NINE = tuple(tenth / 10 for tenth in range(1, 10))

#: What authors published, by name: the settings of their code, with the quirks that decide figures. One is not copied:
#: VisualBERT's loop ends after num_samples + 1 questions and divides their sum by num_samples, so that its mean is too
#: large by the factor 1 + 1/num_samples (1.0001 for 10,000 questions). Ours is the mean of the questions there are.
PUBLISHED: dict[str, Perturbation] = {
    "te-images": Pictures(judged="gold", fractions=_NINE, fills=("black",), ranked="pixel"),
    "bi-images": Pictures(judged="gold", fractions=_NINE, fills=("black",), ranked="pixel"),
    "idl-images": Pictures(fractions=tuple(step / 20 for step in range(1, 21)), fills=("grey",), ranked="pixel"),
    "idl-text": Texts(fractions=(), fills=("pad",), protect=(1, 1)),
    "bi-clip": Pictures(judged="gold", fills=("centre",), ranked="pixel"),
    "bi-movies": Texts(
        explained="gold",
        judged="gold",
        fractions=tuple(round(0.52 + 0.02 * step, 2) for step in range(9)),
        fills=("pad+attention",),
        protect=False,
        of="units",
        clamp=True,
    ),
    "bi-newsgroups": Texts(
        explained="gold",
        judged="gold",
        fills=("pad+attention",),
        protect=False,
        of="units",
        clamp=True,
        padded_to=512,
    ),
    "attcat": Texts(
        judged="gold",
        fractions=tuple(step / 9 for step in range(1, 10)),
        rounding="nearest",
        directions=("positive",),
        fills=("delete", "pad"),
        of="units",
        shortest=10,
    ),
    "eraser": Texts(
        fractions=(0.01, 0.05, 0.1, 0.2, 0.5), rounding="up", directions=("positive", "keep"), fills=("delete",)
    ),
    "lxmert-text": Texts(judged="gold", fractions=_VQA, rounding="kept", fills=("delete",), stream="text"),
    "lxmert-regions": Regions(judged="gold", fractions=_VQA),
    # its question mark stands where the model reads the answer off: it stays, as the separator behind it
    "visualbert-text": Texts(
        judged="gold", fractions=_VQA, rounding="kept", fills=("delete",), stream="text", protect=(1, 2)
    ),
    "visualbert-regions": Regions(judged="gold", fractions=_MANY_BOXES),
}
