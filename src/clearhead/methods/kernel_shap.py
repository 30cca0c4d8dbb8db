"""KernelSHAP: Shapley values as the weighted least-squares fit of an additive game.

    φ = argmin Σ_z π(z) (v(z) − v(∅) − z·φ)²     with Σ φ = v(all) − v(∅),   π(z) = (M − 1) / (C(M, |z|) |z| (M − |z|))

v(z) is the target's value with only the units z present, and the others masked by `replacement`. With up to 11 players
all coalitions are enumerated, and φ are the exact Shapley values. With more, the coalition sizes that fit into
`evaluations` (by default 1024 and two for each player) are enumerated, and the others are drawn from π, each coalition
together with its complement (Covert & Lee, 2021).
"""

import math
from itertools import combinations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.methods._perturbation import (
    PINV_RTOL,
    CoalitionGame,
    CoalitionGenerator,
    PerturbationMethod,
    PlayerScores,
    check_min_int,
)
from clearhead.methods.base import register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType

#: Maximum number of players for which all coalitions are enumerated.
MAX_EXACT_PLAYERS = 11


@register_method(
    "kernel-shap",
    pass_type=PassType.PERTURBATION,
    family="perturbation",
    cost=Cost(forward=2049, is_upper_bound=True, note="for up to 512 units (evaluations=), batched"),
    citation="Lundberg & Lee (2017), A unified approach to interpreting model predictions; Covert & Lee (2021), "
    "Improving KernelSHAP: practical Shapley value estimation via linear regression",
    signed=True,
    target="any",
    measures="the average effect of adding each unit to random subsets of the others",
    misleads="masked inputs are not real inputs, and with many units the estimates are noisy",
    linear_in_target=True,
    model_agnostic=True,
    axioms=("exact on additive games", "complete"),
)
class KernelShap(PerturbationMethod):
    """Shapley values by weighted least squares.

    Attributes:
        evaluations: Maximum number of coalitions; None for the default.
    """

    evaluations: int | None = None

    def iter_coalitions(self, game: CoalitionGame) -> CoalitionGenerator:
        """Request ∅, all players and coalitions of π, and fit φ under Σ φ = v(all) − v(∅)."""
        count = game.num_players
        if self.evaluations is None:
            budget = 2**MAX_EXACT_PLAYERS if count <= MAX_EXACT_PLAYERS else 2 * count + 1024
        else:
            budget = check_min_int("evaluations", self.evaluations, 4)
        z, weights = sample_coalitions(count, budget - 2, game.make_generator())
        values = yield torch.cat([torch.stack([game.empty_coalition, game.full_coalition]), z])
        base, full = values[:2]
        scores = fit_constrained_least_squares(z.double(), weights, values[2:] - base, full - base)
        return PlayerScores(scores, float(base))


def sample_coalitions(
    num_players: int, max_coalitions: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "coalition player"], Float[Tensor, "coalition"]]:
    """Return coalitions, without the empty and the full one, and their weights.

    The weights of the coalitions of one size sum to π of this size. Sizes are enumerated from the smallest (with its
    complement) while all coalitions of a size fit into the size's share of the budget; the others are sampled.
    """
    rows: list[Tensor] = []
    weights: list[float] = []
    sizes = list(range(1, num_players // 2 + 1))  # each size includes that of its complement
    multiplicity = {size: 1 if 2 * size == num_players else 2 for size in sizes}
    size_weights = {size: (num_players - 1) / (size * (num_players - size)) * multiplicity[size] for size in sizes}
    while sizes:
        size = sizes[0]
        num_coalitions = math.comb(num_players, size) * multiplicity[size]
        if num_coalitions > max_coalitions * size_weights[size] / sum(size_weights[s] for s in sizes):
            break
        for members in combinations(range(num_players), size):
            row = torch.zeros(num_players, dtype=torch.bool)
            row[list(members)] = True
            rows += [row, ~row][: multiplicity[size]]
            weights += [size_weights[size] / num_coalitions] * multiplicity[size]
        max_coalitions -= num_coalitions
        sizes.pop(0)
    num_pairs = 0
    if sizes:
        num_pairs = max_coalitions // 2
    if num_pairs:
        remaining_weights = torch.tensor([size_weights[size] for size in sizes], dtype=torch.float64)
        size_indices = torch.multinomial(remaining_weights, num_pairs, replacement=True, generator=generator)
        for size_index in size_indices.tolist():
            row = torch.zeros(num_players, dtype=torch.bool)
            row[torch.randperm(num_players, generator=generator)[: sizes[size_index]]] = True
            rows += [row, ~row]
        weights += [float(remaining_weights.sum()) / (2 * num_pairs)] * (2 * num_pairs)
    coalitions = torch.zeros(0, num_players, dtype=torch.bool)
    if rows:
        coalitions = torch.stack(rows)
    return coalitions, torch.tensor(weights, dtype=torch.float64)


def fit_constrained_least_squares(
    coalitions: Float[Tensor, "coalition player"],
    weights: Float[Tensor, "coalition"],
    values: Float[Tensor, "coalition"],
    total: Float[Tensor, ""],
) -> Float[Tensor, "player"]:
    """Fit the scores φ of players by weighted least squares under Σ φ = total; of several solutions, the smallest."""
    num_players = coalitions.shape[1]
    equal_scores = (total / num_players).expand(num_players)
    if not len(coalitions):
        return equal_scores
    # With φ = total/M + B θ and Σ (B θ) = 0 for every θ, the problem has no constraint any more.
    basis = torch.linalg.qr(torch.eye(num_players, dtype=coalitions.dtype) - 1 / num_players)[0][:, : num_players - 1]
    root = weights.sqrt()[:, None]
    residual = values - coalitions @ equal_scores
    theta = torch.linalg.pinv(root * (coalitions @ basis), rtol=PINV_RTOL) @ (root[:, 0] * residual)
    return equal_scores + basis @ theta
