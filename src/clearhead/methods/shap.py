"""Partition SHAP: Owen values, which assign a score to a group of units as one player, and then divide it.

    φ_a(c) = ½ [v(c + a) − v(c)] + ½ [v(c + a + b) − v(c + b)]

for the two halves a and b of a group in the context of the players c. Each half is divided further in both contexts (c
and c + b), with half the weight, down to single units: the cost grows with the square of their number. The hierarchy of
texts is that of the shap package (subword tokens are joined first, then words, commas and sentences last). Images are
halved along their longer side. All coalitions are evaluated together. If there are more than `evaluations`, they are
evaluated level by level, the largest effects first, and the score of a group that is not divided is spread evenly over
its units. A warning announces this, and the certificate has the fraction of the absolute effects that was not divided
(`unopened`): the scores of the units within such a group are not individual scores.

`context="present"` and `"absent"` use a single context, and the interaction of the halves, v(c + a + b) − v(c + a) −
v(c + b) + v(c), is spread over the units of the group. This is fixed_context=1 and 0 of the shap package: cheaper, but
units that never matter get a score. `replacement="written-mask"` masks as the package does.

The values are those of the shap package's PartitionExplainer, which tests compare them with. The package itself is not
called: it evaluates ten coalitions of one input at a time, many of them twice, and uses the global random number
generator.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import CostWarning
from clearhead.methods._perturbation import (
    CoalitionGame,
    CoalitionGenerator,
    PerturbationMethod,
    PlayerScores,
    check_min_int,
)
from clearhead.methods.base import register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType
from clearhead.perturbation.hierarchy import Hierarchy


@dataclass
class _NodeInContext:
    """A node of the hierarchy in one context.

    Attributes:
        node: The node.
        context_players: The other players that are present.
        value_without: The value of the context.
        value_with: The value of the context with the players of the node.
        weight: The weight of this context.
    """

    node: int
    context_players: Bool[Tensor, "player"]
    value_without: Float[Tensor, ""]
    value_with: Float[Tensor, ""]
    weight: float

    @property
    def effect(self) -> Float[Tensor, ""]:
        """The weighted effect of adding the node to its context."""
        return (self.value_with - self.value_without) * self.weight


@register_method(
    "shap",
    pass_type=PassType.PERTURBATION,
    family="perturbation",
    cost=Cost(forward=501, is_upper_bound=True, note="one per evaluation (evaluations=), batched"),
    citation="Lundberg & Lee (2017), A unified approach to interpreting model predictions; Owen (1977), Values of "
    "games with a priori unions; the partition explainer of the shap package",
    signed=True,
    target="any",
    measures="the average effect of adding each unit, with neighbouring units grouped",
    misleads="masked inputs are not real inputs, and the scores depend on the grouping",
    model_agnostic=True,
    axioms=("exact on additive games", "complete"),
)
class PartitionShap(PerturbationMethod):
    """Owen values over a hierarchy of units.

    Attributes:
        evaluations: Maximum number of coalitions.
        context: Contexts in which a half of a group is evaluated: with the other half, without it, or both.
    """

    evaluations: int = 500
    context: Literal["both", "present", "absent"] = "both"

    def iter_coalitions(self, game: CoalitionGame) -> CoalitionGenerator:
        """Divide groups level by level, the largest effects first, until the budget is used up."""
        budget = check_min_int("evaluations", self.evaluations, 2)
        tree = game.get_hierarchy()
        members = tree.list_leaves_by_node()
        players = [game.empty_coalition for _ in members]
        for node, leaves in enumerate(members):
            players[node][[tree.player_of_leaf[leaf] for leaf in leaves if tree.player_of_leaf[leaf] >= 0]] = True
        if (needed := self._count_coalitions(tree, players)) > budget:
            warnings.warn(
                f"shap: dividing every group of {game.num_players} units takes {needed:,} evaluations, but only "
                f"{budget:,} are allowed: the score of an undivided group is distributed evenly over its units. "
                "`unopened` in the certificate is their fraction of the effect; increase evaluations=, or choose "
                "larger units (unit=)",
                CostWarning,
                stacklevel=2,
            )
        initial = [game.empty_coalition, game.full_coalition]
        batch = torch.stack([*initial, *self._enumerate_coalitions(tree, players, game.empty_coalition, budget)])
        values = dict(zip(map(_encode_coalition, batch), (yield batch), strict=True))
        base, full = (values[_encode_coalition(coalition)] for coalition in initial)
        node_scores = torch.zeros(len(members), dtype=base.dtype)  # scores that are not divided further
        leaf_effect = 0.0  # sum of absolute effects
        unopened_effect = 0.0
        level = [_NodeInContext(tree.root, game.empty_coalition, base, full, 1.0)]
        while level:
            level.sort(key=lambda item: -abs(float(item.effect)))
            divided: list[_NodeInContext] = []
            requested: dict[bytes, Tensor] = {}
            for item in level:
                coalitions = {
                    _encode_coalition(row): row
                    for row in _add_each_half(item.node, item.context_players, tree, players)
                }
                unknown = {
                    code: row for code, row in coalitions.items() if code not in values and code not in requested
                }
                if not coalitions or len(values) + len(requested) + len(unknown) > budget:
                    node_scores[item.node] += item.effect
                    if coalitions:
                        unopened_effect += abs(float(item.effect))
                    else:
                        leaf_effect += abs(float(item.effect))
                    continue
                requested |= unknown
                divided.append(item)
            if requested:
                values |= dict(zip(requested, (yield torch.stack(list(requested.values()))), strict=True))
            level = []
            for item in divided:
                a, b = tree.get_children(item.node)
                with_a, with_b = (
                    values[_encode_coalition(row)]
                    for row in _add_each_half(item.node, item.context_players, tree, players)
                )
                interaction = (item.value_with - with_a - with_b + item.value_without) * item.weight
                weight = item.weight / 2 if self.context == "both" else item.weight
                if self.context == "absent":
                    node_scores[item.node] += interaction
                elif self.context == "present":
                    node_scores[item.node] -= interaction
                if self.context != "present":
                    level += [
                        _NodeInContext(a, item.context_players, item.value_without, with_a, weight),
                        _NodeInContext(b, item.context_players, item.value_without, with_b, weight),
                    ]
                if self.context != "absent":
                    level += [
                        _NodeInContext(a, item.context_players | players[b], with_b, item.value_with, weight),
                        _NodeInContext(b, item.context_players | players[a], with_a, item.value_with, weight),
                    ]
        leaf_scores = torch.zeros(len(tree.player_of_leaf), dtype=base.dtype)
        for node, leaves in enumerate(members):
            leaf_scores[leaves] += node_scores[node] / len(leaves)
        unopened = unopened_effect / max(leaf_effect + unopened_effect, 1e-300)
        return _build_player_scores(
            leaf_scores, tree.player_of_leaf, game.num_players, float(base), {"unopened": unopened}
        )

    def _count_coalitions(self, tree: Hierarchy, players: list[Tensor]) -> int:
        """Count the coalitions needed to divide every group: two for each context of a group."""
        count = 2
        pending = [(tree.root, 1)]
        while pending:
            node, num_contexts = pending.pop()
            if (halves := tree.get_children(node)) is None:
                continue
            # units that are never masked add no coalitions, neither as halves nor as contexts
            if all(bool(players[half].any()) for half in halves):
                count += 2 * num_contexts
                if self.context == "both":
                    num_contexts *= 2
            pending += [(half, num_contexts) for half in halves]
        return count

    def _enumerate_coalitions(self, tree: Hierarchy, players: list[Tensor], empty: Tensor, budget: int) -> list[Tensor]:
        """Return all coalitions that will be needed, to evaluate them together; none if they exceed the budget."""
        coalitions = {_encode_coalition(empty): empty, _encode_coalition(~empty): ~empty}
        pending = [(tree.root, empty)]
        while pending:
            node, context_players = pending.pop()
            with_halves = _add_each_half(node, context_players, tree, players)
            coalitions |= {_encode_coalition(row): row for row in with_halves}
            if len(coalitions) > budget:
                return []
            if (halves := tree.get_children(node)) is not None:
                a, b = halves
                if self.context != "present":
                    pending += [(a, context_players), (b, context_players)]
                if self.context != "absent":
                    pending += [(a, with_halves[1]), (b, with_halves[0])]
        return list(coalitions.values())[2:]


def _add_each_half(
    node: int, context_players: Tensor, tree: Hierarchy, players: list[Tensor]
) -> list[Bool[Tensor, "player"]]:
    """Return the context with either half of a node; an empty list for a leaf."""
    return [context_players | players[half] for half in tree.get_children(node) or ()]


def _encode_coalition(coalition: Bool[Tensor, "player"]) -> bytes:
    """Convert a coalition to bytes, which are the key of its value."""
    return coalition.numpy().tobytes()


def _build_player_scores(
    leaf_scores: Float[Tensor, "leaf"],
    player_of_leaf: tuple[int, ...],
    num_players: int,
    base_value: float,
    diagnostics: dict[str, float],
) -> PlayerScores:
    """Sum the scores of leaves by player; leaves that are never masked (player −1) keep their own."""
    player_index = torch.tensor(player_of_leaf)
    is_player = player_index >= 0
    scores = torch.zeros(num_players, dtype=leaf_scores.dtype)
    scores.index_add_(0, player_index[is_player], leaf_scores[is_player])
    result = PlayerScores(scores, base_value, diagnostics=diagnostics)
    if not is_player.all():
        result.fixed_leaf_scores = leaf_scores.masked_fill(is_player, 0)
    return result
