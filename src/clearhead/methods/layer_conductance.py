"""Layer conductance: the contribution of each unit of a layer to the change of the target along a path from a baseline.

    r_i = Σ_k ∫₀¹ ∂y/∂h_ik (x(α)) · ∂h_ik(x(α))/∂α dα,     x(α) = x′ + α(x − x′)
        ≈ Σ_k Σ_s ½ (g_s + g_{s+1})_ik · (h_{s+1} − h_s)_ik

h_i is the output of the layer at unit i, g its gradient, s the points of the path. (The first interval uses only g at
its end: at the baseline norms may divide by almost zero, and gradients are then unbounded.) The scores of every layer
sum to y(x) − y(x′) if the target depends on the input through the layer only; the base value is y(x′). The certificate
has the error of the last layer's sum (`completeness_gap`). The scores are those of the last of `layers`, and
`per_layer` has all of them. They move towards the read-out position with depth. Baselines as in integrated gradients;
`rule` is the quadrature rule of the `steps`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import AttentionCall, Requirements, Tape, resolve_requirements
from clearhead.methods._path import (
    PathMethod,
    PathPoint,
    PathPointResult,
    QuadratureRule,
    check_step_count,
    compute_quadrature,
)
from clearhead.methods.base import MethodScores, compat_option, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.input_x_gradient import VectorReduction, reduce_vectors
from clearhead.methods.pass_type import PassType

#: The output of a layer at one point of the path, and its gradient.
StateAndGradient = tuple[Float[Tensor, "batch unit model"], Float[Tensor, "batch unit model"]]


@register_method(
    "layer-conductance",
    pass_type=PassType.PATH,
    family="gradient",
    requires=("hidden_state_gradient",),
    cost=Cost(forward=52, backward=51, note="one per interpolation point, batched"),
    citation="Dhamdhere, Sundararajan & Yan (2019), How important is a neuron?, ICLR; as differences along the way, "
    "Shrikumar, Su & Kundaje (2018), Computationally efficient measures of internal neuron importance",
    signed=True,
    target="any",
    measures="how much of the change from a baseline flows through each unit of a layer",
    misleads="in late layers, the hidden state of a unit also contains information from other units",
    linear_in_target=True,
    layers=(None, 0.5),
    supports=("layers",),
    layer_scores="depths",
    axioms=("complete in the limit",),
)
class LayerConductance(PathMethod):
    """Conductance of the units of each layer.

    Attributes:
        steps: Number of intervals of the path.
        rule: The quadrature rule whose points divide the path.
        baseline: The baseline x′ by name; None for the default of the model.
        reduce: How vectors become scores: signed sum, Euclidean norm, or sum of absolute values.
        captum: Whether points and gradients are those of captum.
    """

    requires_on_path: ClassVar[Requirements] = resolve_requirements("hidden_state_gradient")
    path_layers: ClassVar[Literal["last", "all"]] = "all"
    steps: int = 50
    rule: QuadratureRule = compat_option("riemann-trapezoid")
    baseline: str | None = None
    reduce: VectorReduction = "sum"
    captum: bool = compat_option(False)

    @classmethod
    def count_points(cls, options: Mapping[str, Any]) -> int:
        """Return the number of ends of all intervals, and of α = 0."""
        alphas = compute_interval_ends(
            options.get("rule", cls.rule), options.get("steps", cls.steps), options.get("captum", cls.captum)
        )
        return len({0.0, *alphas})

    @property
    def linear_in_target(self) -> bool:
        """True for the signed sum; norms and absolute values are not linear."""
        return self.reduce == "sum"

    def setup(self) -> None:
        self.alphas = compute_interval_ends(self.rule, self.steps, self.captum)
        self.pending_states: dict[int, dict[float, StateAndGradient]] = {
            layer: {} for layer in self.unit_context.layers
        }
        self.layer_integrals: dict[int, Tensor | float] = dict.fromkeys(self.unit_context.layers, 0.0)

    def iter_points(self) -> Iterable[PathPoint]:
        """Return the ends of all intervals, and α = 0 for y(x′)."""
        return [PathPoint(alpha, self.baseline) for alpha in sorted({0.0, *self.alphas})]

    def on_point(self, result: PathPointResult) -> None:
        """Keep y(x′), the value at α = 0."""
        if result.point.alpha == 0:
            self.base_value = result.tape.value

    def on_point_call(self, point: PathPoint, call: AttentionCall, queries: slice | None = None) -> None:
        """Keep h and g of a layer, and integrate the intervals of which both ends are now known."""
        assert point.alpha is not None and call.hidden_state is not None and call.hidden_state_gradient is not None
        if point.alpha not in self.alphas:
            return
        states = self.pending_states[call.layer]
        # cloned, since a view of one point would keep the tensors of the whole batch of points alive
        states[point.alpha] = (call.hidden_state.clone(), call.hidden_state_gradient.clone())
        point_index = self.alphas.index(point.alpha)
        for start_index in (point_index - 1, point_index):  # the intervals that end and begin at this point
            if not 0 <= start_index < len(self.alphas) - 1:
                continue
            start = states.get(self.alphas[start_index])
            end = states.get(self.alphas[start_index + 1])
            if start is not None and end is not None:
                self.layer_integrals[call.layer] = self.layer_integrals[call.layer] + self._integrate_interval(
                    start, end, is_first=start_index == 0
                )
        for alpha in [alpha for alpha in states if self._is_consumed(alpha, states)]:
            states[alpha] = (call.hidden_state.new_empty(0), call.hidden_state.new_empty(0))  # free the memory

    def _integrate_interval(
        self, start: StateAndGradient, end: StateAndGradient, is_first: bool
    ) -> Float[Tensor, "batch unit model"]:
        """Return mean gradient × change of the state over one interval of the path."""
        if self.captum:
            gradient = start[1]
        elif is_first:
            gradient = end[1]
        else:
            gradient = (start[1] + end[1]) / 2
        return gradient * (end[0] - start[0])

    def _is_consumed(self, alpha: float, states: dict[float, StateAndGradient]) -> bool:
        """Whether both intervals at this point are integrated."""
        point_index = self.alphas.index(alpha)
        return all(neighbour in states for neighbour in self.alphas[max(point_index - 1, 0) : point_index + 2])

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Reduce the integrals of all layers; the scores are those of the last of `layers`."""
        by_layer = [self.layer_integrals[layer] for layer in self.unit_context.layers]
        integrals = torch.stack([integral for integral in by_layer if isinstance(integral, Tensor)], dim=1)
        integrals = integrals.to(self.unit_context.readout) * self.unit_context.valid_mask[:, None, :, None]
        self.attributed_total = integrals[:, -1].sum((1, 2))
        per_layer = reduce_vectors(integrals.flatten(0, 1), self.reduce).unflatten(0, integrals.shape[:2])
        return MethodScores(per_layer[:, -1:], per_layer=per_layer, base_value=self.base_value)


def compute_interval_ends(rule: QuadratureRule, steps: int, captum_compatible: bool = False) -> list[float]:
    """Return the ends α of all intervals: the points of a quadrature rule and the ends of the path.

    Example:
        >>> compute_interval_ends("riemann-trapezoid", 2)
        [0.0, 0.5, 1.0]
    """
    alphas = [alpha for alpha, _ in compute_quadrature(rule, check_step_count(steps) + 1, captum_compatible)]
    if captum_compatible:  # captum leaves out the ends of the path
        return alphas
    return sorted({0.0, *alphas, 1.0})
