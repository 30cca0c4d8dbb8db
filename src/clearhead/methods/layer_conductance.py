"""Layer conductance: how much of what the target gains on the way from a baseline flows through each unit of a layer.

    r_i = Σ_k ∫₀¹ ∂y/∂h_ik (x(α)) · ∂h_ik(x(α))/∂α dα,     x(α) = x′ + α(x − x′)
        ≈ Σ_k Σ_s ½ (g_s + g_{s+1})_ik · (h_{s+1} − h_s)_ik

h_i is what comes out of the layer at unit i, g its gradient, s the points of the way. (In the first stretch, g at its
end alone: at the baseline itself norms may have next to nothing to divide by, and gradients then know no bounds.) The
scores of every layer add up to y(x) − y(x′), the base value being y(x′) (where the target is reached through the layer
alone); how far the last layer's are from that is in the certificate (`completeness_gap`). The scores are those of the
last of `layers`, and `per_layer` shows them all, so that one sees where the target's reasons lie at each depth: at the
top they lie where the target is read. Baselines as in integrated gradients; `rule` says how the `steps` divide the way.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Asks, Call, Tape, check_asks
from clearhead.methods._path import PathFold, Point, Rule, Step, counted, quadrature
from clearhead.methods.base import Scores, of_authors, register
from clearhead.methods.input_x_gradient import Reduce, reduced

#: What comes out of a layer at one point of the way, and the gradient there.
Seen = tuple[Float[Tensor, "batch unit model"], Float[Tensor, "batch unit model"]]


@register(
    "layer-conductance",
    kind="path",
    family="gradient",
    asks=("hidden_state_gradient",),
    cost="52 forward and backward passes (one a point of the way), several at once",
    citation="Dhamdhere, Sundararajan & Yan (2019), How important is a neuron?, ICLR; as differences along the way, "
    "Shrikumar, Su & Kundaje (2018), Computationally efficient measures of internal neuron importance",
    signed=True,
    target="any",
    linear_in_target=True,
    layers=(None, 0.5),
    has=("layers",),
    parts="depths",
    axioms=("complete in the limit",),
)
class LayerConductance(PathFold):
    along: ClassVar[Asks] = check_asks("hidden_state_gradient")
    at_layers: ClassVar[Literal["last", "all"]] = "all"
    steps: int = 50
    rule: Rule = of_authors("riemann-trapezoid")
    baseline: str | None = None
    reduce: Reduce = "sum"
    captum: bool = of_authors(False)

    @property
    def linear_in_target(self) -> bool:
        return self.reduce == "sum"

    def begin(self) -> None:
        ways = [along for along, _ in quadrature(self.rule, counted(self.steps) + 1, self.captum)]
        self.ways = ways if self.captum else sorted({0.0, *ways, 1.0})
        self.waiting: dict[int, dict[float, Seen]] = {layer: {} for layer in self.frame.layers}
        self.sums: dict[int, Tensor | float] = dict.fromkeys(self.frame.layers, 0.0)

    def points(self) -> Iterable[Point]:
        return [Point(along, self.baseline) for along in sorted({0.0, *self.ways})]

    def at(self, step: Step) -> None:
        if step.point.along == 0:
            self.base_value = step.tape.value

    def at_call(self, point: Point, call: Call, queries: slice | None = None) -> None:
        assert point.along is not None and call.hidden_state is not None and call.hidden_state_gradient is not None
        if point.along not in self.ways:
            return
        seen = self.waiting[call.layer]
        # copies: a view of one point would keep all that ran with it
        seen[point.along] = (call.hidden_state.clone(), call.hidden_state_gradient.clone())
        place = self.ways.index(point.along)
        for near in (place - 1, place):  # the stretches that begin and end here
            ends = [seen.get(along) for along in self.ways[near : near + 2]] if near >= 0 else []
            if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
                self.sums[call.layer] = self.sums[call.layer] + self._stretch(ends[0], ends[1], first=near == 0)
        for along in [one for one in seen if self._done(one, seen)]:
            seen[along] = (call.hidden_state.new_empty(0), call.hidden_state.new_empty(0))  # of no more use

    def _stretch(self, start: Seen, end: Seen, first: bool) -> Float[Tensor, "batch unit model"]:
        if self.captum:
            gradient = start[1]
        else:
            gradient = end[1] if first else (start[1] + end[1]) / 2
        return gradient * (end[0] - start[0])

    def _done(self, along: float, seen: dict[float, Seen]) -> bool:
        place = self.ways.index(along)
        return all(near in seen for near in self.ways[max(place - 1, 0) : place + 2])

    def finish(self, tape: Tape) -> Scores:
        by_layer = [self.sums[layer] for layer in self.frame.layers]
        whole = torch.stack([part for part in by_layer if isinstance(part, Tensor)], dim=1)
        whole = whole.to(self.frame.readout) * self.frame.valid[:, None, :, None]
        self.explained = whole[:, -1].sum((1, 2))
        per_layer = reduced(whole.flatten(0, 1), self.reduce).unflatten(0, whole.shape[:2])
        return Scores(per_layer[:, -1:], per_layer=per_layer, base_value=self.base_value)
