"""Perturbation protocols for images, texts and image regions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from clearhead.bench.data.base import Example
from clearhead.bench.protocols.base import register_protocol
from clearhead.bench.protocols.perturbation import PerturbationProtocol
from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.explanation import Explanation
from clearhead.units import Units


@register_protocol("perturb-images")
@dataclass(frozen=True)
class ImagePerturbation(PerturbationProtocol):
    """Perturbation of images.

    Attributes:
        ranked: "patch" removes whole patches; "pixel" removes single pixels of the heat map, upscaled to the image.
    """

    fills: tuple[str, ...] = ("black", "mean", "blur")
    ranked: str = "patch"

    def check_settings(self) -> None:
        """Check the settings of perturbation, and that `ranked` is "patch" or "pixel"."""
        super().check_settings()
        if self.ranked not in ("patch", "pixel"):
            raise unknown_value_error("value for ranked=", self.ranked, ("patch", "pixel"))

    def select_streams(self, streams: Sequence[str], explanation: Any) -> list[str]:
        """Return the streams whose units are patches."""
        patch_streams = [stream for stream in streams if explanation[stream].units.grid is not None]
        if not patch_streams:
            raise InputError(f"perturb-images needs patches of an image, but the streams are {', '.join(streams)}")
        return patch_streams

    def iter_removal_masks(
        self, explanation: Explanation, direction: str, remover: Any, example: Example
    ) -> Iterator[Bool[np.ndarray, "pixel"]]:
        """Yield the removed pixels at each fraction."""
        tie_break_key = (example.id, explanation.stream)
        if self.ranked == "pixel":
            scores = upscale_bilinear(explanation.heat_map(), remover.image_size).flatten()
            counts = self.compute_counts(len(scores))
            yield from self._iter_ranked_masks(
                scores, np.arange(len(scores)), len(scores), direction, counts, tie_break_key
            )
        else:
            patches = explanation.units.content_indices()
            counts = self.compute_counts(len(patches))
            for mask in self._iter_ranked_masks(
                explanation.scores[patches], patches, len(explanation), direction, counts, tie_break_key
            ):
                # −1 marks pixels beyond the last whole patch: they belong to no unit and are never removed
                yield (mask[remover.patch_of_pixel.clip(min=0)] & (remover.patch_of_pixel >= 0)).flatten()


def upscale_bilinear(
    heat_map: Float[np.ndarray, "row column"], size: tuple[int, int]
) -> Float[np.ndarray, "height width"]:
    """Upscale a heat map bilinearly (align_corners=False, as all authors do), scaled to at most ±1 and rounded.

    Only the ranking is used, so the scale does not matter. Along the edges the upscaled map is constant up to
    floating-point noise; rounding to 12 digits keeps the ranking independent of the machine.
    """
    small = torch.as_tensor(np.ascontiguousarray(heat_map))[None, None].double()
    large = torch.nn.functional.interpolate(small, size=size, mode="bilinear", align_corners=False)[0, 0].numpy()
    return np.asarray(np.round(large / (np.abs(large).max() or 1.0), 12))


@register_protocol("perturb-text")
@dataclass(frozen=True)
class TextPerturbation(PerturbationProtocol):
    """Perturbation of the tokens of a text, of an encoder–decoder's source, or of a prompt.

    Attributes:
        stream: The stream to perturb; by default all text streams.
        protect: True never removes special tokens; (a, b) protects the first a and last b tokens, special or not.
        of: Base of the fractions, the "removable" tokens or all "units".
        clamp: Set negative scores to zero.
        padded_to: Pad the text to this many tokens; the padding competes with zero scores and counts in the fractions.
        shortest: Skip texts with fewer tokens.
    """

    fills: tuple[str, ...] = ("delete", "mask")
    stream: str | None = None
    protect: bool | tuple[int, int] = True
    of: str = "removable"
    clamp: bool = False
    padded_to: int | None = None
    shortest: int = 0

    def check_settings(self) -> None:
        """Check the settings of perturbation, and the values of `of` and `protect`."""
        super().check_settings()
        if self.of not in ("removable", "units"):
            raise unknown_value_error("value for of=", self.of, ("removable", "units"))
        if not isinstance(self.protect, bool) and (len(self.protect) != 2 or min(self.protect) < 0):
            raise InputError(
                f"protect={self.protect} is not valid: use true, false, or the number of tokens to protect at the "
                "start and at the end"
            )

    def select_streams(self, streams: Sequence[str], explanation: Any) -> list[str]:
        """Return the text streams with at least `shortest` tokens."""
        if self.stream is not None:
            return [explanation[self.stream].stream]
        text_streams = [
            stream for stream in streams if stream in ("text", "source") and explanation[stream].units.boxes is None
        ]
        if not text_streams:
            raise InputError(f"perturb-text needs a text, but the streams are {', '.join(streams)}")
        return [stream for stream in text_streams if len(explanation[stream]) >= self.shortest]

    def iter_removal_masks(
        self, explanation: Explanation, direction: str, remover: Any, example: Example
    ) -> Iterator[Bool[np.ndarray, "unit"]]:
        """Yield the removed tokens at each fraction."""
        removable = self._find_removable(explanation.units)
        scores = explanation.scores
        if self.clamp:
            scores = np.maximum(scores, 0)
        num_pads = max(0, (self.padded_to or 0) - len(explanation))
        candidates = np.concatenate([removable, np.full(num_pads, -1)])
        candidate_scores = np.concatenate([scores[removable], np.zeros(num_pads)])
        total = len(candidates)
        if self.of == "units":
            total = len(explanation) + num_pads
        counts = [min(count, len(candidates)) for count in self.compute_counts(total)]
        yield from self._iter_ranked_masks(
            candidate_scores, candidates, len(explanation), direction, counts, (example.id, explanation.stream)
        )

    def _find_removable(self, units: Units) -> Int[np.ndarray, "place"]:
        """Return the units that `protect` leaves: those not special, all, or all but some at both ends."""
        if self.protect is True:
            return np.asarray(units.content_indices())
        if self.protect is False:
            return np.arange(len(units))
        num_first, num_last = self.protect
        return np.arange(num_first, len(units) - num_last)


@register_protocol("perturb-regions")
@dataclass(frozen=True)
class RegionPerturbation(PerturbationProtocol):
    """Perturbation of image regions, for models that take region features and boxes."""

    fills: tuple[str, ...] = ("delete",)
    rounding: str = "kept"

    def select_streams(self, streams: Sequence[str], explanation: Any) -> list[str]:
        """Return "regions"; `InputError` for a model without region features."""
        if "regions" not in streams:
            raise InputError(f"perturb-regions needs regions of an image, but the streams are {', '.join(streams)}")
        return ["regions"]

    def iter_removal_masks(
        self, explanation: Explanation, direction: str, remover: Any, example: Example
    ) -> Iterator[Bool[np.ndarray, "unit"]]:
        """Yield the removed regions at each fraction."""
        counts = self.compute_counts(len(explanation))
        yield from self._iter_ranked_masks(
            explanation.scores,
            np.arange(len(explanation)),
            len(explanation),
            direction,
            counts,
            (example.id, "regions"),
        )
