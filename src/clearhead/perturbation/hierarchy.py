"""Which units belong together, pair by pair up to the whole: words of a sentence, neighbours in a picture."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from clearhead.units import Units

_OPEN, _CLOSE, _CONNECTORS, _ENDS = "(", ")", ("but", "and", "or"), (".", "?", "!")


@dataclass(frozen=True)
class Hierarchy:
    """A tree of pairs. `leaves` says which player each leaf is (−1 for a unit that always stays); node len(leaves) + k
    joins the two nodes `pairs[k]`, and the last one is the whole."""

    leaves: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]

    @property
    def root(self) -> int:
        return len(self.leaves) + len(self.pairs) - 1

    def children(self, node: int) -> tuple[int, int] | None:
        return None if node < len(self.leaves) else self.pairs[node - len(self.leaves)]

    def members(self) -> list[list[int]]:
        """The leaves below each node."""
        found = [[leaf] for leaf in range(len(self.leaves))]
        for left, right in self.pairs:
            found.append(found[left] + found[right])
        return found


def together(trees: Sequence[Hierarchy], counts: Sequence[int]) -> Hierarchy:
    """Trees side by side, joined at the top; each has so many players, and numbers them from 0."""
    leaves: list[int] = []
    pairs: list[tuple[int, int]] = []
    total, player, tops = sum(len(tree.leaves) for tree in trees), 0, list[int]()
    for tree, count in zip(trees, counts, strict=True):
        first, inner = len(leaves), total + len(pairs)
        nodes = [*range(first, first + len(tree.leaves)), *range(inner, inner + len(tree.pairs))]
        leaves += [leaf if leaf < 0 else leaf + player for leaf in tree.leaves]
        pairs += [(nodes[a], nodes[b]) for a, b in tree.pairs]
        tops.append(nodes[tree.root])
        player += count
    while len(tops) > 1:
        pairs.append((tops[0], tops[1]))
        tops = [total + len(pairs) - 1, *tops[2:]]
    return Hierarchy(tuple(leaves), tuple(pairs))


def of_words(units: Units, players: Sequence[int]) -> Hierarchy:
    """Neighbours joined greedily as shap's masker for texts does: pieces of words first, across sentences last."""
    tokens, separators = _tokens(units)
    return Hierarchy(tuple(players), tuple(joined(tokens, separators)))


def joined(tokens: Sequence[str], separators: Sequence[bool]) -> list[tuple[int, int]]:
    """Pairs of nodes, best first. A token that goes on with a word starts with ##; brackets are held together."""
    groups = [[i] for i in range(len(tokens))]
    nodes, pairs = list(range(len(tokens))), []
    balanced = [token not in (_OPEN, _CLOSE) for token in tokens]
    while len(groups) > 1:
        merits = [_merit(tokens, separators, balanced, a, b) for a, b in pairwise(groups)]
        best = int(np.argmax(merits))
        pairs.append((nodes[best], nodes[best + 1]))
        first, last = groups[best][0], groups[best + 1][-1]
        if tokens[first] == _OPEN and tokens[last] == _CLOSE:
            balanced[first] = balanced[last] = True
        groups[best : best + 2] = [groups[best] + groups[best + 1]]
        nodes[best : best + 2] = [len(tokens) + len(pairs) - 1]
    return pairs


def _merit(
    tokens: Sequence[str], separators: Sequence[bool], balanced: Sequence[bool], a: list[int], b: list[int]
) -> float:
    """How well two neighbouring groups go together, as in shap 0.51."""
    end, begin = tokens[a[-1]], tokens[b[0]]
    merit = 0.0
    merit -= 1000 * (separators[a[-1]] or separators[b[0]])  # two texts meet last
    merit += 20 * begin.startswith("##")
    merit += 15 * (begin == "'" and (len(b) == 1 or (len(b) == 2 and tokens[b[1]] in ("t", "s"))))
    merit += 15 * (end == "'" and begin in ("t", "s"))
    merit -= 1000 * (_control(tokens[a[0]]) != _control(tokens[b[-1]]))
    merit -= 100 * (begin == _OPEN and not balanced[b[0]]) + 100 * (end == _CLOSE and not balanced[a[-1]])
    merit -= 2 * (tokens[a[0]] == _OPEN)
    merit -= 2 * (end in _CONNECTORS or begin in _CONNECTORS)
    merit -= 10 * (end == ",") + (begin == ",") * (10 if len(b) > 1 else 1)
    merit -= 20 * (end in _ENDS) + (begin in _ENDS) * (20 if len(b) > 1 else 1)
    return merit - len(a) - len(b)


def _control(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _tokens(units: Units) -> tuple[list[str], list[bool]]:
    """Tokens as they stand in the text, and which of them separate two texts."""
    inside = [i for i, special in enumerate(units.special) if not special]
    between = [bool(inside) and special and inside[0] < i < inside[-1] for i, special in enumerate(units.special)]
    if units.offsets is None:
        begins = any(name.startswith(("Ġ", "▁")) for name in units.names)
        marked = [name[1:] if name.startswith(("Ġ", "▁")) else f"##{name}" if begins else name for name in units.names]
        return [mark if not special else "" for mark, special in zip(marked, units.special, strict=True)], between
    parts, tokens = pieces(units), list[str]()
    for i, piece in enumerate(parts):
        inner = i > 0 and not re.match(r"^.*\W$", parts[i - 1]) and re.match(r"^[A-Za-z]", piece) and tokens[i - 1]
        tokens.append(f"##{piece.strip()}" if inner else piece.strip())
    return tokens, between


def pieces(units: Units) -> list[str]:
    """The text of each unit, with the white space after it; special units have none."""
    assert units.offsets is not None
    segments, found = units.segments or (0,) * len(units), list[str]()
    for i, (start, stop) in enumerate(units.offsets):
        goes_on = i + 1 < len(units) and segments[i + 1] == segments[i] and not units.special[i + 1]
        until = max(stop, units.offsets[i + 1][0]) if goes_on else stop
        found.append("" if units.special[i] else units.texts[segments[i]][start:until])
    return found


def of_places(places: Float[np.ndarray, "player 2"]) -> Hierarchy:
    """A picture halved again and again along its longer side."""
    pairs: list[tuple[int, int]] = []

    def node(own: list[int]) -> int:
        if len(own) == 1:
            return own[0]
        at = places[own]
        along = int(np.argmax(np.ptp(at, axis=0)))
        middle = (at[:, along].min() + at[:, along].max()) / 2
        first = [player for player in own if places[player, along] < middle] or own[: len(own) // 2]
        rest = [player for player in own if player not in set(first)]
        left, right = node(first), node(rest)
        pairs.append((left, right))
        return len(places) + len(pairs) - 1

    node(list(range(len(places))))
    return Hierarchy(tuple(range(len(places))), tuple(pairs))
