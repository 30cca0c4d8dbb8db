"""How units are taken away from an input: texts by their tokens, pictures by their patches, several streams together.

A model of several streams has all their units as players of one game. What stands in the place of those that are
absent is said for texts (`mask` …) or for pictures (`mean` …); the others have their defaults.
"""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import Sample, Subject
from clearhead.errors import InputError, unknown
from clearhead.perturbation.hierarchy import Hierarchy, together
from clearhead.perturbation.image import OF_PICTURES, InPicture
from clearhead.perturbation.players import Players
from clearhead.perturbation.text import OF_TEXTS, TOKENS, InText
from clearhead.units import LEVELS, Axis, Units


def players_of(
    subject: Subject, sample: Sample, unit: str | None = None, replacement: str | None = None, pictures: str = "patch"
) -> Players:
    """The players of an input, as `why_not` allows them; `pictures` are those of a picture unless `unit` says."""
    if subject.readers:
        return InStreams(subject, sample, unit, replacement, pictures)
    (units,) = next(iter(sample.axes.values())).parts
    if units.grid is not None:
        return InPicture(subject, sample, units, unit or pictures, replacement or "mean")
    return InText(subject, sample, units, unit or "token", replacement)


def why_not(subject: Subject, sample: Sample) -> str | None:
    """Why units of this model's inputs cannot be taken away; None where they can."""
    name = subject.model_class
    parts = [units for axis in sample.axes.values() for units in axis.parts]
    if not subject.readers and len(parts) != 1:
        streams = ", ".join(units.stream for units in parts)
        return f"it is not known how units of the streams of {name} ({streams}) are taken away together"
    for units in parts:
        if subject.readers and units.stream not in subject.readers and all(units.special):
            continue  # part of the model, and no input
        reader, leaf = subject.readers.get(units.stream, (subject, ""))
        if not _known(reader, leaf, sample, units):
            return (
                f"it is not known how units of the input of {name} are taken away: that is for texts that a tokenizer "
                "of transformers reads, and for pictures"
            )
    return None


def _known(reader: Any, leaf: str, sample: Sample, units: Units) -> bool:
    """Whether a stream is a picture of pixels in rows, or a text with as many numbers as units."""
    if units.grid is not None:
        pixels = sample.inputs.get(leaf or "pixel_values")
        return pixels is not None and pixels.dim() == 3
    for name, dimensions in ((leaf or "input_ids", 1), ("inputs_embeds", 2)):
        along = sample.inputs.get(name)
        if along is not None and along.dim() == dimensions:
            return units.kind in LEVELS and len(along) == len(units) and hasattr(reader, "words")
    return False


class _Part(Sample):
    """One stream of a sample; what stands beside it does not move, so that nothing of it can be deleted."""


class InStreams(Players):
    """The players of several streams, one stream after the other."""

    def __init__(self, subject: Any, sample: Sample, unit: str | None, replacement: str | None, pictures: str) -> None:
        self.sample = sample
        self.parts: list[Players] = []
        self.where: list[tuple[str, str, tuple[int, ...]]] = []  # input, axis, and where the units stand there
        streams = [(axis, *part) for axis, one in sample.axes.items() for part in zip(one.parts, one.at, strict=True)]
        kinds = {units.grid is not None for _, units, _ in streams if units.stream in subject.readers}
        _check(unit, replacement, kinds)
        for axis, units, at in streams:
            if units.stream not in subject.readers or all(units.special):
                continue
            reader, leaf = subject.readers[units.stream]
            part = self._part(reader, leaf, units, unit, replacement, pictures)
            if part is not None:
                self.parts.append(part)
                self.where.append((leaf, axis, at))
        if not self.parts:
            raise InputError("nothing can be taken away from this input: every unit is special")
        ends = [0, *accumulate(part.count for part in self.parts)]
        self.slices = [slice(*pair) for pair in pairwise(ends)]
        self.count = ends[-1]
        self.unit = ", ".join(dict.fromkeys(part.unit for part in self.parts))
        self.replacement = ", ".join(dict.fromkeys(part.replacement for part in self.parts))
        self.key = tuple(part.key for part in self.parts)

    def _part(
        self, reader: Any, leaf: str, units: Units, unit: str | None, replacement: str | None, pictures: str
    ) -> Players | None:
        if leaf not in self.sample.inputs:
            raise InputError(f"units of several streams are taken away from {leaf}, which was not given")
        name = "input_ids" if units.grid is None else "pixel_values"
        alone = _Part({name: self.sample.inputs[leaf]}, {units.stream: Axis.of(units)})
        if units.grid is not None:
            own = replacement if replacement in OF_PICTURES else None
            kind = unit if unit in ("patch", "superpixel") else pictures
            return InPicture(reader, alone, units, kind, own or "mean")
        outside = torch.tensor(sorted(reader.words.outside), dtype=torch.long)
        if (torch.tensor(units.special) | torch.isin(alone.inputs[name].cpu(), outside)).all():
            return None
        own = replacement if replacement in TOKENS else None
        return InText(reader, alone, units, unit if unit in LEVELS else "token", own)

    def _split(self, keep: Bool[Tensor, "*coalition player"]) -> list[Bool[Tensor, "*coalition own"]]:
        return [keep[..., own] for own in self.slices]

    def without(self, keep: Bool[Tensor, "player"]) -> Sample:
        inputs = dict(self.sample.inputs)
        for part, own, (leaf, _, _) in zip(self.parts, self._split(keep), self.where, strict=True):
            (inputs[leaf],) = part.without(own).inputs.values()
        return replace(self.sample, inputs=inputs)

    def codes(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        columns = [part.codes(own) for part, own in zip(self.parts, self._split(keep), strict=True)]
        return [b"".join(row) for row in zip(*columns, strict=True)]

    def lengths(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        return [sum(len(axis) for axis in self.sample.axes.values())] * len(keep)

    def spread(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        return torch.cat([part.spread(scores[own]) for part, own in zip(self.parts, self.slices, strict=True)])

    def beside(self, leaves: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        every = leaves.split([len(tree.leaves) for tree in self._trees()])
        return torch.cat([part.beside(own) for part, own in zip(self.parts, every, strict=True)])

    def by_axis(
        self, scores: Float[Tensor, "player"], stays: Float[Tensor, "leaf"] | None
    ) -> "dict[str, Float[Tensor, 'unit']]":
        found = {name: torch.zeros(len(axis), dtype=scores.dtype) for name, axis in self.sample.axes.items()}
        leaves = (
            [None] * len(self.parts) if stays is None else stays.split([len(tree.leaves) for tree in self._trees()])
        )
        for part, own, beside, (_, axis, at) in zip(self.parts, self.slices, leaves, self.where, strict=True):
            (found[axis][list(at)],) = part.by_axis(scores[own], beside).values()
        return found

    def _trees(self) -> list[Hierarchy]:
        return [part.hierarchy() for part in self.parts]

    def hierarchy(self) -> Hierarchy:
        return together(self._trees(), [part.count for part in self.parts])

    def windows(self, size: int) -> Bool[Tensor, "window player"]:
        return torch.block_diag(*(part.windows(size).long() for part in self.parts)).bool()


def _check(unit: str | None, replacement: str | None, pictures: set[bool]) -> None:
    """What is said of units and replacements must be meant for one of the streams."""
    units = [*(LEVELS if False in pictures else ()), *(("patch", "superpixel") if True in pictures else ())]
    others = [*(TOKENS if False in pictures else ()), *(OF_PICTURES if True in pictures else ())]
    if unit is not None and unit not in units:
        raise unknown("unit", unit, units)
    if replacement in OF_TEXTS and replacement not in TOKENS:
        raise InputError(
            f"replacement={replacement!r} would move the words of one stream beside the others: choose another of "
            + ", ".join(others)
        )
    if replacement is not None and replacement not in others:
        raise unknown("replacement", replacement, others)
