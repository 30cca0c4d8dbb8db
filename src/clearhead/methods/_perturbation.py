"""Base class of perturbation methods: they evaluate the target with some units masked, as a cooperative game."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.methods.base import AttributionMethod
from clearhead.methods.cost import Cost

#: Relative cut-off of singular values in least-squares fits. Independent coalitions have singular values of 1e-3 and
#: more; those of linearly dependent ones should be zero, and come out as up to 1e-13 by rounding.
PINV_RTOL = 1e-9
#: Yields coalitions (True for players present), receives the value of each, returns the scores of the players.
CoalitionGenerator = Generator[Bool[Tensor, "coalition player"], Float[Tensor, "coalition"], "PlayerScores"]


@dataclass
class PlayerScores:
    """Scores of the players of one game.

    Attributes:
        scores: The score of each player.
        base_value: The value that the scores add to; None if they do not sum to the target's value.
        fixed_leaf_scores: Scores of leaves of the hierarchy that are never masked, such as special tokens.
        diagnostics: Figures about the computation, for the certificate.
    """

    scores: Float[Tensor, "player"]
    base_value: float | None = None
    fixed_leaf_scores: Float[Tensor, "leaf"] | None = None
    diagnostics: dict[str, float] | None = None


@dataclass(frozen=True)
class CoalitionGame:
    """One input with one target, as a cooperative game whose players are units or groups of units.

    Attributes:
        num_players: The number of players.
        seed: Random seed, derived from the content of the input.
        get_windows: Returns the masks of all windows of a given size.
        get_hierarchy: Returns the hierarchy of the units (`perturbation.hierarchy.Hierarchy`).
    """

    num_players: int
    seed: int
    get_windows: Callable[[int], Bool[Tensor, "window player"]]
    get_hierarchy: Callable[[], Any]

    @property
    def empty_coalition(self) -> Bool[Tensor, "player"]:
        """The coalition without players: everything masked."""
        return torch.zeros(self.num_players, dtype=torch.bool)

    @property
    def full_coalition(self) -> Bool[Tensor, "player"]:
        """The coalition of all players: the unchanged input."""
        return ~self.empty_coalition

    def make_generator(self) -> torch.Generator:
        """Return a random generator that depends on the input and the seed only.

        Returns:
            A new generator on the CPU; each call starts the same sequence.
        """
        return torch.Generator().manual_seed(self.seed)


@dataclass
class PerturbationMethod(AttributionMethod):
    """Base class of perturbation methods.

    Attributes:
        replacement: What masked units are replaced with, by name; None for the default of the input.
        unit: The kind of unit that is masked as one player, such as "token", "word" or "patch".
        default_image_unit: The players of an image where `unit` is not set.
    """

    #: The players of an image if `unit` is None.
    default_image_unit: ClassVar[str] = "patch"

    replacement: str | None = None
    unit: str | None = None

    @classmethod
    def get_cost(cls, options: Mapping[str, Any]) -> Cost:
        """Return the clean pass and one forward pass for each of `evaluations`, else the declared cost."""
        evaluations = options.get("evaluations")
        if evaluations is None:
            return cls.declaration.cost
        return Cost(forward=1 + evaluations, is_upper_bound=True, note="batched")

    def iter_coalitions(self, game: CoalitionGame) -> CoalitionGenerator:
        """Yield batches of coalitions, receive their values, and return the scores of the players.

        Args:
            game: The players of one input and the random seed.

        Yields:
            Boolean tensors of coalitions × players, True for players that are kept.

        Returns:
            The scores of the players (the value of the generator).
        """
        raise NotImplementedError


def check_min_int(name: str, value: Any, minimum: int) -> int:
    """Return an integer option, or raise an `InputError` that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"{name}={value!r} is not valid: use an integer of at least {minimum}")
    return value
