"""SHAP over a hierarchy: Owen values, which give a group of units what it would get as one player, and then split it.

    φ_a(c) = ½ [v(c + a) − v(c)] + ½ [v(c + a + b) − v(c + b)]

for the two halves a and b of a group that meets the players c. Each half goes on with both contexts (c and c + b), at
half the weight, down to single units: so cost grows as the square of their number. Texts are joined as by the shap
package (pieces of words first, then words, across commas and sentences last), pictures are halved along their longer
side. All coalitions go through the model together; where there are more than `evaluations`, level by level, and what a
group has is then spread evenly over its units, the smallest effects first. A warning says so beforehand, and the
certificate how much of all effects' sizes was left on groups (`unopened`): scores within a group are then no scores of
its units.

`context="present"` and `"absent"` follow one context alone, and what a group has beyond its halves, v(c + a + b) −
v(c + a) − v(c + b) + v(c), is spread over its units: that is shap's fixed_context=1 and 0, cheaper, but units that
never matter get a score. `replacement="written-mask"` masks as the package does.

The values are those of the shap package's PartitionExplainer, and tests hold them to it. The package itself is not
called: it asks for ten coalitions of one input at a time, for many of them twice, and draws from the global random
numbers.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import CostWarning
from clearhead.methods._perturbation import Game, Perturbation, Play, Shares, whole_number
from clearhead.methods.base import register
from clearhead.perturbation.hierarchy import Hierarchy


@dataclass
class _Node:
    """A node in one context: who is around it, what that is worth without it and with it, how much it counts."""

    node: int
    around: Bool[Tensor, "player"]
    without: Float[Tensor, ""]
    within: Float[Tensor, ""]
    weight: float

    @property
    def effect(self) -> Float[Tensor, ""]:
        return (self.within - self.without) * self.weight


@register(
    "shap",
    kind="values",
    family="perturbation",
    cost="500 forward passes or fewer (evaluations=), in batches",
    citation="Lundberg & Lee (2017), A unified approach to interpreting model predictions; Owen (1977), Values of "
    "games with a priori unions; the partition explainer of the shap package",
    signed=True,
    target="any",
    model_agnostic=True,
    axioms=("exact on additive games", "complete"),
)
class Shap(Perturbation):
    evaluations: int = 500
    context: Literal["both", "present", "absent"] = "both"

    def play(self, game: Game) -> Play:
        budget = whole_number("evaluations", self.evaluations, 2)
        tree = game.hierarchy()
        members = tree.members()
        players = [game.nobody for _ in members]
        for node, leaves in enumerate(members):
            players[node][[tree.leaves[leaf] for leaf in leaves if tree.leaves[leaf] >= 0]] = True
        if (needed := self._needed(tree, players)) > budget:
            warnings.warn(
                f"shap: to open every group of {game.players} units takes {needed:,} evaluations, and there are "
                f"{budget:,}: what other groups have is spread evenly over their units. How much that is, says "
                "`unopened` in the certificate; give evaluations=, or larger units (unit=)",
                CostWarning,
                stacklevel=2,
            )
        ends = [game.nobody, game.everybody]
        ahead = torch.stack([*ends, *self._all(tree, players, game.nobody, budget)])
        known = dict(zip(map(_code, ahead), (yield ahead), strict=True))
        base, full = (known[_code(end)] for end in ends)
        given = torch.zeros(len(members), dtype=base.dtype)  # what stays on each node
        opened, unopened = 0.0, 0.0  # sizes of effects
        level = [_Node(tree.root, game.nobody, base, full, 1.0)]
        while level:
            level.sort(key=lambda at: -abs(float(at.effect)))
            split: list[_Node] = []
            asked: dict[bytes, Tensor] = {}
            for at in level:
                new = {_code(row): row for row in _halves(at.node, at.around, tree, players)}
                fresh = {code: row for code, row in new.items() if code not in known and code not in asked}
                if not new or len(known) + len(asked) + len(fresh) > budget:
                    given[at.node] += at.effect
                    opened += 0.0 if new else abs(float(at.effect))
                    unopened += abs(float(at.effect)) if new else 0.0
                    continue
                asked |= fresh
                split.append(at)
            if asked:
                known |= dict(zip(asked, (yield torch.stack(list(asked.values()))), strict=True))
            level = []
            for at in split:
                a, b = tree.children(at.node)
                with_a, with_b = (known[_code(row)] for row in _halves(at.node, at.around, tree, players))
                rest = (at.within - with_a - with_b + at.without) * at.weight
                half = at.weight / 2 if self.context == "both" else at.weight
                if self.context == "absent":
                    given[at.node] += rest
                elif self.context == "present":
                    given[at.node] -= rest
                if self.context != "present":
                    level += [
                        _Node(a, at.around, at.without, with_a, half),
                        _Node(b, at.around, at.without, with_b, half),
                    ]
                if self.context != "absent":
                    level += [
                        _Node(a, at.around | players[b], with_b, at.within, half),
                        _Node(b, at.around | players[a], with_a, at.within, half),
                    ]
        leaves = torch.zeros(len(tree.leaves), dtype=base.dtype)
        for node, own in enumerate(members):
            leaves[own] += given[node] / len(own)
        left = unopened / max(opened + unopened, 1e-300)
        return _shares(leaves, tree.leaves, game.players, float(base), {"unopened": left})

    def _needed(self, tree: Hierarchy, players: list[Tensor]) -> int:
        """How many coalitions there are when every group is opened: two for each context that a group meets."""
        found, waiting = 2, [(tree.root, 1)]
        while waiting:
            node, contexts = waiting.pop()
            if (pair := tree.children(node)) is None:
                continue
            # units that always stay make no difference, neither as halves nor as contexts
            split = all(bool(players[half].any()) for half in pair)
            found += 2 * contexts if split else 0
            waiting += [(half, contexts * (2 if split and self.context == "both" else 1)) for half in pair]
        return found

    def _all(self, tree: Hierarchy, players: list[Tensor], nobody: Tensor, budget: int) -> list[Tensor]:
        """Every coalition that will be asked for, so that they go together; none where they go beyond the budget."""
        found = {_code(nobody): nobody, _code(~nobody): ~nobody}
        waiting = [(tree.root, nobody)]
        while waiting:
            node, around = waiting.pop()
            new = _halves(node, around, tree, players)
            found |= {_code(row): row for row in new}
            if len(found) > budget:
                return []
            if (pair := tree.children(node)) is not None:
                a, b = pair
                waiting += [(a, around), (b, around)] if self.context != "present" else []
                waiting += [(a, new[1]), (b, new[0])] if self.context != "absent" else []
        return list(found.values())[2:]


def _halves(node: int, around: Tensor, tree: Hierarchy, players: list[Tensor]) -> list[Bool[Tensor, "player"]]:
    """The players around with either half of a node; nothing for a leaf."""
    return [around | players[half] for half in tree.children(node) or ()]


def _code(coalition: Bool[Tensor, "player"]) -> bytes:
    return coalition.numpy().tobytes()


def _shares(
    leaves: Float[Tensor, "leaf"], players: tuple[int, ...], count: int, base: float, checks: dict[str, float]
) -> Shares:
    """What leaves that are players got, and what those that always stay got."""
    who = torch.tensor(players)
    scores = torch.zeros(count, dtype=leaves.dtype).index_add_(0, who[who >= 0], leaves[who >= 0])
    return Shares(scores, base, stays=leaves.masked_fill(who >= 0, 0) if (who < 0).any() else None, checks=checks)
