"""Pairs of a coalition and its complement, drawn without replacement with the sizes of the Shapley kernel.

The difference v(z) − v(¬z) of a pair is free of interactions of two units, and of any even number. A stratum has the
pairs whose smaller coalition has s of the M units. Its kernel mass is the sum of π over the coalitions of these pairs.
"""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass
class PairSampler:
    """Draws distinct pairs; after any number of them, each size is represented in proportion to its kernel mass.

    Attributes:
        num_players: The number of players; a single player has no pairs.
        generator: The random generator.
        coalitions: The coalitions drawn so far, one of each pair.
    """

    num_players: int
    generator: torch.Generator
    coalitions: list[Bool[Tensor, "player"]] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = range(1, self.num_players // 2 + 1)
        is_half = [2 * size == self.num_players for size in sizes]  # such a coalition and its complement are one size
        self.num_pairs = [
            math.comb(self.num_players, size) // (2 if half else 1) for size, half in zip(sizes, is_half, strict=True)
        ]
        masses = [(1 if half else 2) / (s * (self.num_players - s)) for s, half in zip(sizes, is_half, strict=True)]
        self.masses = torch.tensor(masses, dtype=torch.float64)
        self.masses /= self.masses.sum()
        self.drawn_strata: list[int] = []
        self.num_drawn = [0] * len(masses)
        self._drawn_codes: set[bytes] = set()

    @property
    def num_remaining(self) -> int:
        """The number of pairs that were not drawn yet."""
        return sum(self.num_pairs) - len(self.coalitions)

    def draw(self, count: int) -> Bool[Tensor, "pair player"]:
        """Draw more pairs, and return one coalition of each.

        Args:
            count: Number of pairs; fewer are returned if fewer remain.
        """
        first = len(self.coalitions)
        for _ in range(min(count, self.num_remaining)):
            self._draw_pair()
        return self.get_drawn()[first:]

    def get_drawn(self) -> Bool[Tensor, "pair player"]:
        """Return one coalition of each pair drawn so far."""
        return torch.stack([torch.zeros(self.num_players, dtype=torch.bool), *self.coalitions])[1:]

    def _draw_pair(self) -> None:
        """Draw one pair: a stratum, in proportion to what it lacks, and a coalition that was not drawn yet."""
        drawn = torch.tensor(self.num_drawn, dtype=torch.float64)
        is_open = torch.tensor([n < size for n, size in zip(self.num_drawn, self.num_pairs, strict=True)])
        shares = self.masses * is_open
        expected = shares / shares.sum() * (drawn[is_open].sum() + 1)
        stratum = int(torch.multinomial((expected - drawn * is_open).clamp(min=0), 1, generator=self.generator))
        while True:
            coalition = torch.zeros(self.num_players, dtype=torch.bool)
            coalition[torch.randperm(self.num_players, generator=self.generator)[: stratum + 1]] = True
            if 2 * (stratum + 1) == self.num_players and not coalition[0]:
                coalition = ~coalition  # of two complements of one size, the first has the first player
            code = coalition.numpy().tobytes()
            if code not in self._drawn_codes:
                break
        self._drawn_codes.add(code)
        self.coalitions.append(coalition)
        self.drawn_strata.append(stratum)
        self.num_drawn[stratum] += 1

    def compute_weights(self) -> Float[Tensor, "pair"]:
        """Return the weights of the pairs, which sum to one: each stratum that was drawn from has its kernel mass."""
        strata = torch.tensor(self.drawn_strata, dtype=torch.long)
        weights = self.masses[strata] / torch.tensor(self.num_drawn, dtype=torch.float64)[strata]
        return weights / weights.sum()

    def compute_evaluated_share(self) -> float:
        """Return the share of the kernel mass of all pairs that was drawn; exactly 1 if no pair remains."""
        if not self.num_remaining:
            return 1.0
        fractions = [drawn / size for drawn, size in zip(self.num_drawn, self.num_pairs, strict=True)]
        return float(self.masses @ torch.tensor(fractions, dtype=torch.float64))
