"""Attention flow: how much can be sent from the row that is read down to each input through all layers' attention.

    F_pj = max-flow from (L, p) to (0, j),     r = w · F, rows of F divided by their sums

in the graph of (L + 1) · n nodes whose edge from (l, i) to (l − 1, j) can carry Ã_l[i, j], with Ã_l = E_h A_l + I, rows
divided by their sums, as in rollout. `per_layer[l]` is the same read-out taken after layer l. Each F_pj is a problem of
its own, solved exactly by igraph (push–relabel): n of them for each row that is read and each layer after which it is
read (all rows at once, or with depths=False, after the last layer alone). What would take long is said beforehand.

Where many rows are read (a mean of units), many problems need no solving. F_pj ≤ min(1, Σ_i Ã_1[i, j]), and what surely
gets through is known from smaller problems: flows may be mixed, and joined at a layer m of the middle, so that

    F_pj  ≥  Σ_k Ã_L[p, k] F′_kj                     F′: after one layer less
    F_pj  ≥  v_p + f_j − 1                           for any supply q of one in all at the units of layer m

with v_p what p can send into q, and f_j what j can get out of it. Where the ends meet, that is the answer.
"""

import warnings
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Call, Tape
from clearhead.errors import CostWarning
from clearhead.methods.base import Fold, Scores, register

#: Edges that igraph goes through in a second, all problems together (measured: 9 million), and seconds worth a word.
SPEED, PATIENCE = 9_000_000, 30
#: What two ends that meet may be apart.
ROUNDING = 1e-12


@register(
    "flow",
    family="attention",
    asks=("attention",),
    cost="one forward, then a max-flow problem for each unit, row and layer (igraph)",
    citation="Abnar & Zuidema (2020), Quantifying attention flow in transformers, ACL",
    signed=False,
    target="none",
    has=("layers", "heads", "rows"),
    parts="depths",
    axioms=("rows sum to one",),
    package="igraph",
    extra="flow",
)
class Flow(Fold):
    """depths: read after every layer, too, and not after the last alone"""

    depths: bool = True

    def begin(self) -> None:
        self.maps: list[Float[Tensor, "batch query key"]] = []
        rows = (self.frame.readout != 0).any(1).sum(-1).tolist()
        deep = len(self.frame.layers)
        between = [depth - 2 for depth in self._read(deep) if depth > 2]  # layers of which each edge counts
        lengths = self.frame.lengths.tolist()
        problems = [count * length * len(between) for count, length in zip(rows, lengths, strict=True)]
        work = sum(count * length**3 * sum(between) for count, length in zip(rows, lengths, strict=True))
        if work > PATIENCE * SPEED:
            longest = int(self.frame.lengths.max())
            warnings.warn(
                f"flow: {sum(problems):,} max-flow problems in graphs of up to {(deep - 1) * longest + 2:,} nodes and "
                f"{(deep - 2) * longest**2 + 2 * longest:,} edges, which may take {_duration(work / SPEED)}",
                CostWarning,
                stacklevel=2,
            )

    def visit(self, call: Call) -> None:
        attention = call.mean_attention.double().cpu()  # before rows are divided: ends meet where their sums are one
        mixed = attention + torch.eye(attention.shape[-1]).to(attention)
        self.maps.append(mixed / mixed.sum(-1, keepdim=True))

    def finish(self, tape: Tape) -> Scores:
        layers = torch.stack(self.maps[::-1], dim=1)  # the first layer first
        readout, read = self.frame.readout, self._read(layers.shape[1])
        found = torch.zeros(len(readout), len(read), *readout.shape[1:], dtype=torch.float64)
        for i, length in enumerate(self.frame.lengths.tolist()):
            weights = readout[i, :, :length].double().cpu()
            before = None
            for d, depth in enumerate(read):
                before = flow(layers[i, :depth, :length, :length], _wanted(weights), before)
                found[i, d, :, :length] = weights @ _divided(before)
        found = found.to(readout)
        return Scores(found[:, -1], per_layer=found[:, :, 0] if self._every_depth else None)

    @property
    def _every_depth(self) -> bool:
        return self.depths and self.frame.readout.shape[1] == 1

    def _read(self, deep: int) -> range:
        """After how many layers."""
        return range(1 if self._every_depth else deep, deep + 1)


def flow(
    layers: Float[Tensor, "layer unit unit"],
    wanted: Float[Tensor, "unit"],
    before: Float[Tensor, "unit unit"] | None = None,
) -> Float[Tensor, "unit unit"]:
    """The wanted rows of F; the others are zero. `before` is what was found after one layer less."""
    first, last, most = layers[0], layers[-1], Between(layers[1:-1]).most if len(layers) > 2 else None
    found = torch.zeros_like(first)
    sure = joined(layers, wanted) if len(layers) > 3 and wanted.count_nonzero() > 2 else torch.zeros_like(first)
    for p in wanted.nonzero().flatten().tolist():
        if len(layers) == 1:
            found[p] = first[p]
        elif most is None:  # what meets at a unit is as much as the less of the two
            found[p] = torch.minimum(last[p, :, None], first).sum(0)
        else:
            found[p] = first.sum(0).clamp(max=last[p].sum())
            least = sure[p] if before is None else torch.maximum(sure[p], last[p] @ before)
            for j in (found[p] - least > ROUNDING).nonzero().flatten().tolist():
                found[p, j] = most(last[p], first[:, j])
    return found


def joined(layers: Float[Tensor, "layer unit unit"], wanted: Float[Tensor, "unit"]) -> Float[Tensor, "unit unit"]:
    """What surely gets from the wanted rows to each unit: v_p + f_j − 1, by one problem for each row and each unit.

    The supply q in the middle is what rollout brings there, in the mean of the wanted rows: each can send about that.
    """
    lower, upper = layers[: len(layers) // 2], layers[len(layers) // 2 :]
    rows = wanted.nonzero().flatten().tolist()
    supply = reduce(torch.matmul, upper.flip(0))[rows].mean(0)
    send, get = Between(upper[:-1]).most, Between(lower[1:]).most
    gets = layers.new_tensor([get(supply, into) for into in lower[0].T])
    found = torch.zeros_like(layers[0])
    for p in rows:
        found[p] = (send(upper[-1, p], supply) + gets - supply.sum()).clamp(min=0)
    return found


def _wanted(weights: Float[Tensor, "row unit"]) -> Float[Tensor, "unit"]:
    """The rows that are read; all, where most are: what is known of all of them saves problems in the next layer."""
    wanted = weights.any(0)
    return torch.ones_like(wanted) if 2 * wanted.sum() > len(wanted) else wanted


def _divided(rows: Float[Tensor, "unit unit"]) -> Float[Tensor, "unit unit"]:
    """Each row divided by its sum, but for rows of nothing."""
    sums = rows.sum(-1, keepdim=True)
    return rows / torch.where(sums == 0, 1.0, sums)


class Between:
    """The layers between the last, of which one row is read, and the first, of which one column is.

    All else of these two leads nowhere. The graph is one for all rows and columns: those are its last edges.
    """

    def __init__(self, layers: Float[Tensor, "layer unit unit"]) -> None:
        from igraph import Graph

        depth, n, _ = layers.shape
        layer, i, j = layers.nonzero(as_tuple=True)  # the node i above layer l is number (l + 1) · n + i
        self.source, self.sink = (depth + 1) * n, (depth + 1) * n + 1
        units, each = torch.arange(n), torch.ones(n, dtype=torch.long)
        edges = [
            torch.stack([(layer + 1) * n + i, layer * n + j], dim=1),
            torch.stack([self.source * each, depth * n + units], dim=1),
            torch.stack([units, self.sink * each], dim=1),
        ]
        self.graph = Graph(n=self.sink + 1, edges=torch.cat(edges).numpy(), directed=True)
        self.capacity = layers[layer, i, j].tolist()

    def most(self, out: Float[Tensor, "unit"], into: Float[Tensor, "unit"]) -> float:
        """The max-flow with these capacities from the source and to the sink."""
        capacity = [*self.capacity, *out.tolist(), *into.tolist()]
        return float(self.graph.maxflow_value(self.source, self.sink, capacity=capacity))


def _duration(seconds: float) -> str:
    """
    >>> _duration(45), _duration(600), _duration(9000)
    ('45 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
