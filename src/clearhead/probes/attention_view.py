"""Attention of one input to look at: every map, what each head looks at here and on other inputs, and rollout and flow
by depth for the row that is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError
from clearhead.explanation.explanation import plain
from clearhead.probes.base import Batch, Probed
from clearhead.probes.head_importance import looks
from clearhead.probes.head_patterns import READINGS, pattern

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: With more units than this, no flow is computed.
LONGEST = 40
#: How many of the inputs beside it share a pass.
INPUTS = 16
SAYS = (
    "A map shows where a head takes values from, not what they are nor what becomes of them; a pattern's name is a "
    "suggestion. Whether the answer hangs on a head is what clearhead probe heads measures."
)


@dataclass
class AttentionView:
    """The attention of one input.

    row: the unit whose row is read, None where there is no such; by_depth: raw, rollout and flow of that row, or the
    mean of all rows, layer × unit
    keys: the units that are looked at, where they are others than those that look
    looks: figures of each head here; beside: the same as means over other inputs, if there are any
    candidates: the probabilities of labels or masked words that were asked about
    """

    model: str
    tokens: tuple[str, ...]
    row: int | None
    prediction: str
    attention: Float[np.ndarray, "layer head query key"]
    by_depth: "dict[str, Float[np.ndarray, 'layer unit']]"
    looks: "dict[str, Float[np.ndarray, 'layer head']]"
    beside: "dict[str, Float[np.ndarray, 'layer head']] | None" = None
    candidates: dict[str, float] = field(default_factory=dict)
    keys: tuple[str, ...] | None = None

    def pattern(self, layer: int, head: int, on_average: bool = False) -> str:
        own = self.beside if on_average and self.beside is not None else self.looks
        return pattern({name: float(part[layer, head]) for name, part in own.items()})

    def map(self, layer: int, head: int) -> Float[np.ndarray, "query key"]:
        """One head's map; negative numbers count from the end."""
        layers, heads = self.attention.shape[:2]
        if not (-layers <= layer < layers and -heads <= head < heads):
            raise InputError(
                f"there is no head {head} in layer {layer}: the model has {layers} layers of {heads} heads, counted "
                "from 0"
            )
        return self.attention[layer, head]

    def to_dict(self) -> dict[str, Any]:
        layers, heads = self.attention.shape[:2]
        lines = [
            {"layer": layer, "head": head, "pattern": self.pattern(layer, head)}
            | ({} if self.beside is None else {"pattern on average": self.pattern(layer, head, True)})
            | {name: float(part[layer, head]) for name, part in self.looks.items()}
            for layer in range(layers)
            for head in range(heads)
        ]
        about = {"schema": "clearhead/attention", "version": 1, "model": self.model, "tokens": self.tokens}
        rest: dict[str, Any] = {
            "row": self.row,
            "prediction": self.prediction,
            "heads": lines,
            "by_depth": self.by_depth,
        }
        rest |= {} if self.keys is None else {"keys": self.keys}
        rest |= {"candidates": self.candidates}
        return plain({**about, **rest, "attention": self.attention, "says": SAYS})

    def _repr_html_(self) -> str:
        from clearhead.render.html import fragment

        return fragment(self)

    def __rich__(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("layer", "pattern of its heads", "entropy", "distance", "sink", "seen most"):
            table.add_column(name)
        layers, heads = self.attention.shape[:2]
        units, (depth, *_) = self.keys or self.tokens, self.by_depth.values()
        for layer in range(layers):
            names = [self.pattern(layer, head) for head in range(heads)]
            counted = ", ".join(f"{names.count(name)} {name}" for name in READINGS if name in names)
            means = [self.looks[name][layer].mean() for name in ("entropy", "distance", "sink")]
            figures = ["–" if np.isnan(mean) else f"{mean:.2f}" for mean in means]
            raw = depth[layer]
            seen = ", ".join(f"{units[i]} {raw[i]:.2f}" for i in np.argsort(-raw, kind="stable")[:3])
            table.add_row(str(layer), Text(counted), *figures, Text(seen))
        head = f"attention · {self.model} → {self.prediction} · {layers} layers of {heads} heads · "
        asked = ", ".join(f"{name} {share:.4f}" for name, share in self.candidates.items())
        told = [Text(f"probabilities: {asked}")] if asked else []
        read = "all rows" if self.row is None else f"row {self.row} ({self.tokens[self.row]}) is read"
        return Group(Text(head + read), *told, table, Text(SAYS))


def view(
    ex: "Explainer",
    given: Any,
    beside: list[Any] | None = None,
    target: Any = None,
    candidates: Sequence[str | int] = (),
) -> AttentionView:
    """The attention of one input to look at; `beside` are others, over which heads are averaged.

    candidates: labels or masked words whose probabilities are told, such as "his" and "her"
    """
    probed = Probed(ex, [given], target)
    if len(probed.samples) != 1:
        raise InputError(f"attention is shown for one input, and there are {len(probed.samples)}")
    batch = Batch(probed, probed.samples)
    others = None
    if beside:
        parts = [
            looks(other, i)
            for _, other in Probed(ex, beside, target).batches(INPUTS)
            for i in range(len(other.samples))
        ]
        others = {name: np.mean([part[name] for part in parts], axis=0) for name in parts[0]}
    methods = ["rollout", *(["flow"] if find_spec("igraph") and batch.lengths[0] <= LONGEST else [])]
    depths = {name: e.per_layer for name, e in ex.explain(given, method=methods, target=target).items()}
    raw = np.stack([batch.pooled(layer)[0].mean(0).double().cpu().numpy() for layer in range(probed.layers)])
    return AttentionView(
        model=probed.subject.name,
        tokens=probed.units(probed.samples[0]).names,
        row=probed.row(probed.samples[0]),
        prediction=probed.label(batch.probabilities[0]),
        attention=np.stack([part[0].double().cpu().numpy() for part in batch.attention]),
        by_depth={"raw": raw, **depths},
        looks=looks(batch, 0),
        beside=others,
        candidates={
            str(label): float(batch.probabilities[0, probed.subject.label_index(label)]) for label in candidates
        },
    )
