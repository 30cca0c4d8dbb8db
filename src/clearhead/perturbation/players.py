"""Who plays: the pieces of an input that can be taken away, and what is asked of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import Sample
from clearhead.perturbation.hierarchy import Hierarchy


class Players(ABC):
    """The players of one input: `owner` is whose each unit is, −1 for units that always stay."""

    sample: Sample
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

    @abstractmethod
    def beside(self, leaves: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        """What leaves of the hierarchy got that are no players, on their units."""

    def by_axis(
        self, scores: Float[Tensor, "player"], stays: Float[Tensor, "leaf"] | None
    ) -> "dict[str, Float[Tensor, 'unit']]":
        """What players got, and leaves that are none, as scores along each axis."""
        own = self.spread(scores)
        return {next(iter(self.sample.axes)): own if stays is None else own + self.beside(stays)}

    @abstractmethod
    def hierarchy(self) -> Hierarchy:
        """Which players belong together: what Owen values need."""

    @abstractmethod
    def windows(self, size: int) -> Bool[Tensor, "window player"]:
        """Every run of so many neighbours; in a picture, every square with that side."""


def packed(rows: Bool[Tensor, "row item"]) -> list[bytes]:
    return [row.tobytes() for row in np.packbits(rows.numpy(), axis=1)]


def rows_of(places: Sequence[Sequence[int]], count: int) -> Bool[Tensor, "row player"]:
    rows = torch.zeros(len(places), count, dtype=torch.bool)
    for row, own in enumerate(places):
        rows[row, list(own)] = True
    return rows
