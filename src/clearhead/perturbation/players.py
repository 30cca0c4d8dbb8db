"""Players: the parts of an input that can be masked, in the terms of cooperative game theory (Shapley values)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.perturbation.hierarchy import Hierarchy
from clearhead.sample import Sample


class MaskablePlayers(ABC):
    """The maskable parts of one input. A coalition is a boolean mask of the players that are kept.

    Attributes:
        sample: The unmasked sample.
        num_players: Number of players.
        unit: What a player is, e.g. "word" or "superpixel".
        replacement: What masked parts are replaced by.
        cache_key: Equal for players whose masked inputs are equal, so that evaluations can be shared.
    """

    sample: Sample
    num_players: int
    unit: str
    replacement: str
    cache_key: tuple[Any, ...]

    @abstractmethod
    def keep_only(self, keep: Bool[Tensor, "player"]) -> Sample:
        """Return the sample with all other players masked or removed.

        Args:
            keep: True for the players that stay; units that are no players always stay.

        Returns:
            A new sample; its units may be fewer if players are removed.
        """

    @abstractmethod
    def compute_mask_keys(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        """Return a key for each coalition; equal keys mean equal masked inputs.

        Args:
            keep: The coalitions.

        Returns:
            Keys, to run each distinct input once.
        """

    @abstractmethod
    def count_units(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        """Return the number of units of each masked input.

        Args:
            keep: The coalitions.

        Returns:
            Lengths, to batch inputs of similar length.
        """

    @abstractmethod
    def spread_to_units(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        """Divide the score of each player equally among its units, which preserves the sum.

        Args:
            scores: One score per player.

        Returns:
            One score per unit; zero for units that are no players.
        """

    @abstractmethod
    def spread_fixed_leaves(self, leaf_scores: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        """Divide the scores of leaves that are not players among their units.

        Args:
            leaf_scores: One score per leaf of the hierarchy, players and others.

        Returns:
            One score per unit.
        """

    @abstractmethod
    def add_up_units(self, unit_scores: Float[Tensor, "unit"]) -> Float[Tensor, "player"]:
        """Add up the scores of the units of each player; those of fixed units are left out."""

    def add_up_axes(self, scores_by_axis: "Mapping[str, Float[Tensor, 'padded']]") -> Float[Tensor, "player"]:
        """Add up the scores of the units of each player.

        Args:
            scores_by_axis: The scores of the units of each attention axis; padding at the end is left out.
        """
        ((name, axis),) = self.sample.axes.items()
        return self.add_up_units(scores_by_axis[name][: len(axis)])

    def spread_by_axis(
        self, scores: Float[Tensor, "player"], fixed_scores: Float[Tensor, "leaf"] | None
    ) -> "dict[str, Float[Tensor, 'unit']]":
        """Divide scores among units, by attention axis.

        Args:
            scores: The scores of the players.
            fixed_scores: The scores of the hierarchy's leaves that are not players, if there are any.

        Returns:
            The scores of the units of each axis.
        """
        unit_scores = self.spread_to_units(scores)
        if fixed_scores is not None:
            unit_scores = unit_scores + self.spread_fixed_leaves(fixed_scores)
        return {next(iter(self.sample.axes)): unit_scores}

    @abstractmethod
    def build_hierarchy(self) -> Hierarchy:
        """Build the tree of players for Owen values.

        Returns:
            A binary tree whose leaves are players, and units that are never masked.
        """

    @abstractmethod
    def make_windows(self, size: int) -> Bool[Tensor, "window player"]:
        """Return every run of `size` neighbouring players; in an image, every square with that side.

        Args:
            size: Number of players of a run, or along the side of a square.

        Returns:
            One row per window, True for its players. A window is smaller where there are fewer players than `size`.
        """


def pack_bits(rows: Bool[Tensor, "row item"]) -> list[bytes]:
    """Pack boolean rows into bytes, to be used as dictionary keys."""
    return [row.tobytes() for row in np.packbits(rows.numpy(), axis=1)]


def make_membership_mask(members: Sequence[Sequence[int]], num_players: int) -> Bool[Tensor, "row player"]:
    """Convert lists of players to boolean rows."""
    mask = torch.zeros(len(members), num_players, dtype=torch.bool)
    for row, players in enumerate(members):
        mask[row, list(players)] = True
    return mask
