"""Attention flow (Abnar & Zuidema 2020): one max-flow problem for each pair of an output row and an input, solved by
augmenting along shortest paths (Edmonds & Karp), then rows divided by their sums."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def max_flow(capacity: Float[np.ndarray, "node node"], source: int, sink: int) -> float:
    left, total = capacity.copy(), 0.0
    while True:
        came_from = {source: source}
        waiting = deque([source])
        while waiting and sink not in came_from:
            node = waiting.popleft()
            for other in np.flatnonzero(left[node] > 1e-15).tolist():
                if other not in came_from:
                    came_from[other] = node
                    waiting.append(other)
        if sink not in came_from:
            return total
        path = [sink]
        while path[-1] != source:
            path.append(came_from[path[-1]])
        steps = list(zip(path[1:], path[:-1], strict=True))
        least = min(left[step] for step in steps)
        for a, b in steps:
            left[a, b] -= least
            left[b, a] += least
        total += least


def graph(maps: Sequence[Float[np.ndarray, "head query key"]], heads: Sequence[int] | None) -> np.ndarray:
    """The capacities between all nodes; the inputs are the first n, what the last map looks from the last n."""
    units = maps[0].shape[-1]
    heads = range(len(maps[0])) if heads is None else heads
    nodes = np.zeros((len(maps) + 1, units, len(maps) + 1, units))
    for layer, attention in enumerate(maps):
        for i in range(units):
            row = sum(attention[head][i] for head in heads) / len(heads) + np.eye(units)[i]
            nodes[layer + 1, i, layer] = row / row.sum()
    return nodes.reshape((len(maps) + 1) * units, -1)


def rows(seen: Seen, wanted: Sequence[int], layers: Sequence[int], heads: Sequence[int] | None) -> np.ndarray:
    capacity = graph([seen.attention[layer] for layer in layers], heads)
    found = np.zeros((seen.units, seen.units))
    for p in wanted:
        found[p] = [max_flow(capacity, len(layers) * seen.units + p, j) for j in range(seen.units)]
        found[p] /= found[p].sum()
    return found


def matrix(
    seen: Seen, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Float[np.ndarray, "row unit"]:
    return rows(seen, range(seen.units), range(seen.layers) if layers is None else layers, heads)


def depths(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "layer unit"]:
    layers, read = range(seen.layers) if layers is None else layers, np.flatnonzero(readout).tolist()
    return np.array([readout @ rows(seen, read, layers[: place + 1], heads) for place in range(len(layers))])


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "unit"]:
    read = np.flatnonzero(readout).tolist()
    return readout @ rows(seen, read, range(seen.layers) if layers is None else layers, heads)
