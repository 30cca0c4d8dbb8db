"""Binary trees of units for Owen values: neighbouring tokens of a text, neighbouring areas of an image."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from clearhead.units import Units

_OPEN_BRACKET = "("
_CLOSE_BRACKET = ")"
_CONNECTORS = ("but", "and", "or")
_SENTENCE_ENDS = (".", "?", "!")


@dataclass(frozen=True)
class Hierarchy:
    """A binary tree over units.

    Attributes:
        player_of_leaf: The player of each leaf, −1 for a unit that is never masked. Leaf i is node i.
        merged_pairs: Node len(player_of_leaf) + k joins the two nodes `merged_pairs[k]`; the last node is the root.
    """

    player_of_leaf: tuple[int, ...]
    merged_pairs: tuple[tuple[int, int], ...]

    @property
    def root(self) -> int:
        """Index of the root node, the last one."""
        return len(self.player_of_leaf) + len(self.merged_pairs) - 1

    def get_children(self, node: int) -> tuple[int, int] | None:
        """Return the children of a node, or None for a leaf.

        Args:
            node: Index of the node.

        Returns:
            Indices of the two nodes that were merged.
        """
        if node < len(self.player_of_leaf):
            return None
        return self.merged_pairs[node - len(self.player_of_leaf)]

    def list_leaves_by_node(self) -> list[list[int]]:
        """Return the leaves below each node.

        Returns:
            Indices of leaves for each node, from the leaves to the root.
        """
        leaves = [[leaf] for leaf in range(len(self.player_of_leaf))]
        for first, second in self.merged_pairs:
            leaves.append(leaves[first] + leaves[second])
        return leaves


def merge_hierarchies(hierarchies: Sequence[Hierarchy], num_players: Sequence[int]) -> Hierarchy:
    """Join the trees of several streams at the top.

    Args:
        hierarchies: The trees; each numbers its players from 0.
        num_players: Number of players of each tree.

    Returns:
        One tree, with the players numbered consecutively.
    """
    total_leaves = sum(len(tree.player_of_leaf) for tree in hierarchies)
    leaves: list[int] = []
    pairs: list[tuple[int, int]] = []
    roots: list[int] = []
    first_player = 0
    for tree, count in zip(hierarchies, num_players, strict=True):
        first_leaf = len(leaves)
        first_inner = total_leaves + len(pairs)
        leaf_nodes = range(first_leaf, first_leaf + len(tree.player_of_leaf))
        inner_nodes = range(first_inner, first_inner + len(tree.merged_pairs))
        nodes = [*leaf_nodes, *inner_nodes]
        leaves += [leaf if leaf < 0 else leaf + first_player for leaf in tree.player_of_leaf]
        pairs += [(nodes[a], nodes[b]) for a, b in tree.merged_pairs]
        roots.append(nodes[tree.root])
        first_player += count
    while len(roots) > 1:
        pairs.append((roots[0], roots[1]))
        roots = [total_leaves + len(pairs) - 1, *roots[2:]]
    return Hierarchy(tuple(leaves), tuple(pairs))


def build_text_hierarchy(units: Units, player_of_unit: Sequence[int]) -> Hierarchy:
    """Build the tree of a text by greedy merging, as shap's text masker does: words first, across sentences last.

    Args:
        units: The units of the text.
        player_of_unit: The player of each unit, −1 for units that are never masked.

    Returns:
        The tree.
    """
    tokens, separators = _prepare_tokens(units)
    return Hierarchy(tuple(player_of_unit), tuple(merge_tokens_greedily(tokens, separators)))


def merge_tokens_greedily(tokens: Sequence[str], is_separator: Sequence[bool]) -> list[tuple[int, int]]:
    """Merge neighbouring groups of tokens greedily, as in shap 0.51.

    Args:
        tokens: The tokens; one that continues a word starts with ##.
        is_separator: Whether each token separates two texts.

    Returns:
        The merged pairs of nodes, in the order of merging. Brackets keep their content together.
    """
    groups = [[i] for i in range(len(tokens))]
    nodes = list(range(len(tokens)))
    pairs: list[tuple[int, int]] = []
    balanced = [token not in (_OPEN_BRACKET, _CLOSE_BRACKET) for token in tokens]
    while len(groups) > 1:
        merits = [_score_merge(tokens, is_separator, balanced, a, b) for a, b in pairwise(groups)]
        best = int(np.argmax(merits))
        pairs.append((nodes[best], nodes[best + 1]))
        first = groups[best][0]
        last = groups[best + 1][-1]
        if tokens[first] == _OPEN_BRACKET and tokens[last] == _CLOSE_BRACKET:
            balanced[first] = balanced[last] = True
        groups[best : best + 2] = [groups[best] + groups[best + 1]]
        nodes[best : best + 2] = [len(tokens) + len(pairs) - 1]
    return pairs


def _score_merge(
    tokens: Sequence[str], separators: Sequence[bool], balanced: Sequence[bool], a: list[int], b: list[int]
) -> float:
    """Score the merge of two neighbouring groups, as in shap 0.51."""
    end = tokens[a[-1]]
    begin = tokens[b[0]]
    merit = 0.0
    merit -= 1000 * (separators[a[-1]] or separators[b[0]])  # merge two texts last
    merit += 20 * begin.startswith("##")
    merit += 15 * (begin == "'" and (len(b) == 1 or (len(b) == 2 and tokens[b[1]] in ("t", "s"))))
    merit += 15 * (end == "'" and begin in ("t", "s"))
    merit -= 1000 * (_is_control_token(tokens[a[0]]) != _is_control_token(tokens[b[-1]]))
    merit -= 100 * (begin == _OPEN_BRACKET and not balanced[b[0]]) + 100 * (
        end == _CLOSE_BRACKET and not balanced[a[-1]]
    )
    merit -= 2 * (tokens[a[0]] == _OPEN_BRACKET)
    merit -= 2 * (end in _CONNECTORS or begin in _CONNECTORS)
    merit -= 10 * (end == ",") + (begin == ",") * (10 if len(b) > 1 else 1)
    merit -= 20 * (end in _SENTENCE_ENDS) + (begin in _SENTENCE_ENDS) * (20 if len(b) > 1 else 1)
    return merit - len(a) - len(b)


def _is_control_token(token: str) -> bool:
    """Whether a token is written in brackets, as special tokens are."""
    return token.startswith("[") and token.endswith("]")


def _prepare_tokens(units: Units) -> tuple[list[str], list[bool]]:
    """Return the tokens in shap's notation, and which of them separate two texts."""
    content = [i for i, special in enumerate(units.special) if not special]
    is_separator = [
        bool(content) and special and content[0] < i < content[-1] for i, special in enumerate(units.special)
    ]
    if units.offsets is None:
        marks_beginnings = any(name.startswith(("Ġ", "▁")) for name in units.names)
        tokens = [_mark_continuation(name, marks_beginnings) for name in units.names]
        return ["" if special else token for token, special in zip(tokens, units.special, strict=True)], is_separator
    texts = get_unit_texts(units)
    tokens = []
    for i, text in enumerate(texts):
        continues = i > 0 and not re.match(r"^.*\W$", texts[i - 1]) and re.match(r"^[A-Za-z]", text) and tokens[i - 1]
        prefix = "##" if continues else ""
        tokens.append(f"{prefix}{text.strip()}")
    return tokens, is_separator


def _mark_continuation(name: str, marks_beginnings: bool) -> str:
    """Mark a token that continues a word with ##, whatever the tokenizer's own notation."""
    if name.startswith(("Ġ", "▁")):
        return name[1:]
    return f"##{name}" if marks_beginnings else name


def get_unit_texts(units: Units) -> list[str]:
    """Return the text of each unit with the white space after it; special units have none.

    Args:
        units: Units with offsets.

    Returns:
        One text per unit.
    """
    assert units.offsets is not None
    segments = units.segments or (0,) * len(units)
    texts: list[str] = []
    for i, (start, stop) in enumerate(units.offsets):
        if units.special[i]:
            texts.append("")
            continue
        if i + 1 < len(units) and segments[i + 1] == segments[i] and not units.special[i + 1]:
            stop = max(stop, units.offsets[i + 1][0])
        texts.append(units.texts[segments[i]][start:stop])
    return texts


def build_spatial_hierarchy(centroids: Float[np.ndarray, "player 2"]) -> Hierarchy:
    """Build the tree of an image by recursive halving along the longer side.

    Args:
        centroids: The centre of each player.

    Returns:
        The tree; every leaf is a player.
    """
    pairs: list[tuple[int, int]] = []

    def add_node(players: list[int]) -> int:
        if len(players) == 1:
            return players[0]
        positions = centroids[players]
        axis = int(np.argmax(np.ptp(positions, axis=0)))
        middle = (positions[:, axis].min() + positions[:, axis].max()) / 2
        first_half = [p for p in players if centroids[p, axis] < middle] or players[: len(players) // 2]
        second_half = [p for p in players if p not in set(first_half)]
        first_node = add_node(first_half)
        second_node = add_node(second_half)
        pairs.append((first_node, second_node))
        return len(centroids) + len(pairs) - 1

    add_node(list(range(len(centroids))))
    return Hierarchy(tuple(range(len(centroids))), tuple(pairs))
