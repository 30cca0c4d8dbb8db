"""KernelSHAP: Shapley values as the weighted least-squares fit of an additive game.

    φ = argmin Σ_z π(z) (v(z) − v(∅) − z·φ)²     with Σ φ = v(all) − v(∅),   π(z) = (M − 1) / (C(M, |z|) |z| (M − |z|))

v(z) is the target's value with the units z alone, `replacement` in the place of the others. With up to 11 players all
coalitions are enumerated, and φ are the exact Shapley values. With more, the sizes whose coalitions all fit into
`evaluations` (by default 1024 and two for each player) are enumerated, and the others drawn from π, each coalition
together with its complement (Covert & Lee, 2021).
"""

import math
from itertools import combinations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.methods._perturbation import NOTHING, Game, Perturbation, Play, Shares, whole_number
from clearhead.methods.base import register

#: Up to so many players, all coalitions.
EXACT = 11


@register(
    "kernel-shap",
    kind="values",
    family="perturbation",
    cost="2048 forward passes or fewer (two to the number of units, or evaluations=), in batches",
    citation="Lundberg & Lee (2017), A unified approach to interpreting model predictions; Covert & Lee (2021), "
    "Improving KernelSHAP: practical Shapley value estimation via linear regression",
    signed=True,
    target="any",
    linear_in_target=True,
    model_agnostic=True,
    axioms=("exact on additive games", "complete"),
)
class KernelShap(Perturbation):
    evaluations: int | None = None

    def play(self, game: Game) -> Play:
        count = game.players
        if self.evaluations is None:
            budget = 2**EXACT if count <= EXACT else 2 * count + 1024
        else:
            budget = whole_number("evaluations", self.evaluations, 4)
        z, weights = coalitions(count, budget - 2, game.generator())
        worth = yield torch.cat([torch.stack([game.nobody, game.everybody]), z])
        base, full = worth[0], worth[1]
        return Shares(constrained_fit(z.double(), weights, worth[2:] - base, full - base), float(base))


def coalitions(
    count: int, budget: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "coalition player"], Float[Tensor, "coalition"]]:
    """Coalitions but for the empty and the full one, and what each counts; those of one size count π together."""
    rows: list[Tensor] = []
    weights: list[float] = []
    sizes = list(range(1, count // 2 + 1))  # a size stands for its complement, too
    shares = {s: (count - 1) / (s * (count - s)) * (1 if 2 * s == count else 2) for s in sizes}
    while sizes:
        size = sizes[0]
        every = math.comb(count, size) * (1 if 2 * size == count else 2)
        if every > budget * shares[size] / sum(shares[s] for s in sizes):
            break
        for members in combinations(range(count), size):
            row = torch.zeros(count, dtype=torch.bool)
            row[list(members)] = True
            both = [row] if 2 * size == count else [row, ~row]
            rows += both
            weights += [shares[size] / every] * len(both)
        budget -= every
        sizes.pop(0)
    pairs = budget // 2 if sizes else 0
    if pairs:
        left = torch.tensor([shares[size] for size in sizes], dtype=torch.float64)
        drawn = torch.multinomial(left, pairs, replacement=True, generator=generator)
        for place in drawn.tolist():
            row = torch.zeros(count, dtype=torch.bool)
            row[torch.randperm(count, generator=generator)[: sizes[place]]] = True
            rows += [row, ~row]
        weights += [float(left.sum()) / (2 * pairs)] * (2 * pairs)
    z = torch.stack(rows) if rows else torch.zeros(0, count, dtype=torch.bool)
    return z, torch.tensor(weights, dtype=torch.float64)


def constrained_fit(
    z: Float[Tensor, "coalition player"],
    weights: Float[Tensor, "coalition"],
    worth: Float[Tensor, "coalition"],
    total: Float[Tensor, ""],
) -> Float[Tensor, "player"]:
    """Least squares under Σ φ = total. Of several solutions, where there are too few coalitions, the smallest."""
    count = z.shape[1]
    even = (total / count).expand(count)
    if not len(z):
        return even
    # φ = total/M + B θ with Σ (B θ) = 0: what is left is a plain least-squares problem.
    basis = torch.linalg.qr(torch.eye(count, dtype=z.dtype) - 1 / count)[0][:, : count - 1]
    root = weights.sqrt()[:, None]
    left = worth - z @ even
    theta = torch.linalg.pinv(root * (z @ basis), rtol=NOTHING) @ (root[:, 0] * left)
    return even + basis @ theta
