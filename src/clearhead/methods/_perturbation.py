"""Base class of perturbation methods: they evaluate the target with some units masked, as a cooperative game."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class ScoreIntervals:
    """The uncertainty of the scores of the players.

    Attributes:
        level: How often the intervals are meant to contain the exact scores.
        multiplier: The half-width of an interval in standard deviations.
        compute_covariance: Returns the covariance of weighted sums of the scores.
    """

    level: float
    multiplier: float
    compute_covariance: "Callable[[Float[Tensor, 'unit player']], Float[Tensor, 'unit unit']]"


@dataclass
class PlayerScores:
    """Scores of the players of one game.

    Attributes:
        scores: The score of each player.
        base_value: The value that the scores add to; None if they do not sum to the target's value.
        fixed_leaf_scores: Scores of leaves of the hierarchy that are never masked, such as special tokens.
        diagnostics: Figures about the computation, for the certificate.
        intervals: The uncertainty of the scores, for methods that estimate it.
        resolved_options: What the method decided for this input, for the provenance.
    """

    scores: Float[Tensor, "player"]
    base_value: float | None = None
    fixed_leaf_scores: Float[Tensor, "leaf"] | None = None
    diagnostics: dict[str, float] | None = None
    intervals: ScoreIntervals | None = None
    resolved_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CoalitionGame:
    """One input with one target, as a cooperative game whose players are units or groups of units.

    Attributes:
        num_players: The number of players.
        seed: Random seed, derived from the content of the input.
        get_windows: Returns the masks of all windows of a given size.
        get_hierarchy: Returns the hierarchy of the units (`perturbation.hierarchy.Hierarchy`).
        component_scores: The scores of the players by the method's components that apply to the model, by name.
    """

    num_players: int
    seed: int
    get_windows: Callable[[int], Bool[Tensor, "window player"]]
    get_hierarchy: Callable[[], Any]
    component_scores: "Mapping[str, Float[Tensor, 'player']]" = field(default_factory=dict)

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

    def count_masked_inputs(self, num_units: int) -> int:
        """Return the maximum number of masked inputs for an input of this many units."""
        return self.get_cost(vars(self)).count_inputs(num_units) - 1  # without the clean pass

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
