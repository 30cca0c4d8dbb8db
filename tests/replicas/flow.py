"""Attention flow (Abnar & Zuidema 2020): one max-flow problem for each pair of an output row and an input, solved by
augmenting along shortest paths (Edmonds & Karp); rows are then normalised to sum to one."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tests.replicas.plain_pass import Seen


def max_flow(capacity: Float[np.ndarray, "node node"], source: int, sink: int) -> float:
    residual, total = capacity.copy(), 0.0
    while True:
        parents = {source: source}
        queue = deque([source])
        while queue and sink not in parents:
            node = queue.popleft()
            for other in np.flatnonzero(residual[node] > 1e-15).tolist():
                if other not in parents:
                    parents[other] = node
                    queue.append(other)
        if sink not in parents:
            return total
        path = [sink]
        while path[-1] != source:
            path.append(parents[path[-1]])
        steps = list(zip(path[1:], path[:-1], strict=True))
        bottleneck = min(residual[step] for step in steps)
        for a, b in steps:
            residual[a, b] -= bottleneck
            residual[b, a] += bottleneck
        total += bottleneck


def graph(maps: Sequence[Float[np.ndarray, "head query key"]], heads: Sequence[int] | None) -> np.ndarray:
    """Return the capacities between all nodes: the first n are the inputs, the last n the queries of the last map."""
    units = maps[0].shape[-1]
    heads = range(len(maps[0])) if heads is None else heads
    nodes = np.zeros((len(maps) + 1, units, len(maps) + 1, units))
    for layer, attention in enumerate(maps):
        for i in range(units):
            row = sum(attention[head][i] for head in heads) / len(heads) + np.eye(units)[i]
            nodes[layer + 1, i, layer] = row / row.sum()
    return nodes.reshape((len(maps) + 1) * units, -1)


def compute_rows(
    seen: Seen, requested: Sequence[int], layers: Sequence[int], heads: Sequence[int] | None
) -> np.ndarray:
    capacity = graph([seen.attention[layer] for layer in layers], heads)
    flows = np.zeros((seen.units, seen.units))
    for p in requested:
        flows[p] = [max_flow(capacity, len(layers) * seen.units + p, j) for j in range(seen.units)]
        flows[p] /= flows[p].sum()
    return flows


def matrix(
    seen: Seen, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Float[np.ndarray, "row unit"]:
    return compute_rows(seen, range(seen.units), range(seen.layers) if layers is None else layers, heads)


def depths(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "layer unit"]:
    layers, read_rows = range(seen.layers) if layers is None else layers, np.flatnonzero(readout).tolist()
    return np.array([readout @ compute_rows(seen, read_rows, layers[: last + 1], heads) for last in range(len(layers))])


def scores(
    seen: Seen,
    readout: Float[np.ndarray, "unit"],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Float[np.ndarray, "unit"]:
    read_rows = np.flatnonzero(readout).tolist()
    return readout @ compute_rows(seen, read_rows, range(seen.layers) if layers is None else layers, heads)
