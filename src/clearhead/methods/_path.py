"""Base class of methods that evaluate the model on a path from a baseline to the input, or at noisy inputs.

    x(α) = x′ + α (x + ε − x′)

x′ is a baseline, ε noise. Such a method lists the points it needs and receives the tape of each. Points that several
methods need are run once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import AttentionCall, Requirements, Tape, resolve_requirements
from clearhead.errors import InputError
from clearhead.methods.base import AttributionMethod
from clearhead.methods.cost import Cost

#: Rules by which an integral over 0…1 becomes a weighted sum.
QuadratureRule = Literal["gauss-legendre", "riemann-middle", "riemann-left", "riemann-right", "riemann-trapezoid"]


class NoBaseline(Enum):
    """Type of the sentinel `NO_BASELINE`, which differs from every baseline name that a caller could give."""

    NO_BASELINE = 0


NO_BASELINE = NoBaseline.NO_BASELINE


@dataclass(frozen=True)
class PathPoint:
    """A point on a path at which the model is evaluated.

    Attributes:
        alpha: α; None for a random value, drawn for each sample.
        baseline: Name of x′, None for the default of the model. Of several names, one is drawn for each sample.
            `NO_BASELINE` if the input is scaled or perturbed without a baseline.
        noise_std: σ of ε.
        noise_relative_to: Whether σ is in the units of the input or a fraction of its range.
        sample_index: Number of the random draw, keyed by the content of the input.
        interpolate_at: What α scales: the inputs (token embeddings, pixels), or, for texts, the input of the first
            layer, which includes positions.
        stream: The only stream that is changed; None for all.
    """

    alpha: float | None = 1.0
    baseline: str | tuple[str, ...] | NoBaseline | None = NO_BASELINE
    noise_std: float = 0.0
    noise_relative_to: Literal["units", "range"] = "units"
    sample_index: int | None = None
    interpolate_at: Literal["inputs", "layers"] = "inputs"
    stream: str | None = None


@dataclass
class PathPointResult:
    """Result of one point.

    Attributes:
        point: The point.
        tape: The tape recorded there.
        input_delta: x + ε − x′ for each unit, by stream.
    """

    point: PathPoint
    tape: Tape
    input_delta: "dict[str, Float[Tensor, 'batch unit feature']]"


@dataclass
class NormInputs:
    """Inputs of the norms of one layer.

    Attributes:
        first_norm_input: Input of the first norm: the layer input in pre-norm models, the layer input plus the
            attention output in post-norm models.
        values_after_attention: Computes the value vectors of the input of the second norm, which in pre-norm models is
            the layer input plus the attention output.
    """

    first_norm_input: Float[Tensor, "batch unit model"]
    values_after_attention: "Callable[[], Float[Tensor, 'batch unit heads']]"


class PathMethod(AttributionMethod):
    """Base class of methods with `pass_type=PassType.PATH`. `compute_scores` receives the tape of the input itself.

    Attributes:
        requires_on_path: Tensors to record at each point (all of them are in the declaration, too).
        requires_at_input: Tensors to record at the input itself (likewise).
        path_layers: The layers passed to `on_point_call`: the last one or all selected ones.
        of_predicted: Whether the tape of the input itself is that of the predicted class, whatever the target.
        norm_inputs: Inputs of the norms of each layer, set if `needs_norm_inputs`.
        attributed_total: Sum of the scores of this stream, for completeness: over all streams the sums should add to
            y(x) − y(x′). None if the method is not complete.
        base_value: y(x′).
    """

    requires_on_path: ClassVar[Requirements] = resolve_requirements("input_gradient")
    requires_at_input: ClassVar[Requirements] = frozenset()
    path_layers: ClassVar[Literal["last", "all"]] = "last"
    of_predicted: bool = False
    norm_inputs: "Mapping[int, NormInputs]"
    attributed_total: Float[Tensor, "batch"] | None = None
    base_value: Float[Tensor, "batch"] | None = None

    @classmethod
    def count_points(cls, options: Mapping[str, Any]) -> int | None:
        """Return the number of different points with these options; None if it is unknown, as by default.

        Args:
            options: The options that were set; those not listed have their defaults.

        Returns:
            The number of forward and backward passes besides the clean pass.
        """
        return None

    @classmethod
    def get_cost(cls, options: Mapping[str, Any]) -> Cost:
        """Return the cost of the clean pass and of one forward and one backward pass for each point."""
        num_points = cls.count_points(options)
        if num_points is None:
            return cls.declaration.cost
        needs_clean_gradient = any(requirement.endswith("gradient") for requirement in cls.requires_at_input)
        return replace(cls.declaration.cost, forward=1 + num_points, backward=int(needs_clean_gradient) + num_points)

    @property
    def needs_norm_inputs(self) -> bool:
        """Whether `norm_inputs` must be recorded."""
        return False

    def iter_points(self) -> Iterable[PathPoint]:
        """Return the points at which the model must be evaluated.

        Returns:
            The points in the order of evaluation; several may share a batch.
        """
        raise NotImplementedError

    def on_point(self, result: PathPointResult) -> None:
        """Process the result of one point.

        Args:
            result: Values and gradients at the point; points come in the order of `iter_points`.
        """

    def on_point_call(self, point: PathPoint, call: AttentionCall, queries: slice | None = None) -> None:
        """Process one attention call of this stream at one point.

        Args:
            point: The point.
            call: The call of the last layer, or of each selected layer (`path_layers`).
            queries: The queries of a tile, each of which comes once; None for full maps.
        """


#: Prefix of baseline names that are other inputs.
EXAMPLE_PREFIX = "example: "


def build_baseline_names(baselines: str | tuple[str, ...] | None, examples: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all baselines; examples get a prefix. A single string is one name, not its letters.

    >>> build_baseline_names("zero", "good"), build_baseline_names(None, ("good", "bad"))
    (('zero', 'example: good'), ('example: good', 'example: bad'))
    """
    if isinstance(baselines, str):
        baselines = (baselines,)
    if isinstance(examples, str):
        examples = (examples,)
    return (*(baselines or ()), *(EXAMPLE_PREFIX + example for example in examples))


def check_step_count(count: int, minimum: int = 1, name: str = "steps") -> int:
    """Check a number of steps or samples and return it; `name` is the option for the message."""
    if not isinstance(count, int) or isinstance(count, bool) or count < minimum:
        raise InputError(f"{name}={count!r} is not valid: use an integer of at least {minimum}")
    return count


def compute_quadrature(rule: QuadratureRule, steps: int, captum_compatible: bool = False) -> list[tuple[float, float]]:
    """Return the points in 0…1 of a quadrature rule, with their weights, which sum to one.

    Args:
        rule: The quadrature rule.
        steps: The number of points.
        captum_compatible: Reproduce captum, which rounds the points of Riemann sums to float32 and divides trapezoids
            by n instead of n − 1, so that the weights sum to 1 − 1/n.

    Example:
        >>> compute_quadrature("riemann-middle", 2)
        [(0.25, 0.5), (0.75, 0.5)]
        >>> compute_quadrature("riemann-trapezoid", 3)
        [(0.0, 0.25), (0.5, 0.5), (1.0, 0.25)]
    """
    check_step_count(steps, 2 if rule == "riemann-trapezoid" else 1)
    if rule == "gauss-legendre":
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        return [((1 + node) / 2, weight / 2) for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True)]
    endpoints = {
        "riemann-left": (0.0, 1 - 1 / steps),
        "riemann-right": (1 / steps, 1.0),
        "riemann-middle": (0.5 / steps, 1 - 0.5 / steps),
        "riemann-trapezoid": (0.0, 1.0),
    }
    dtype = torch.float32 if captum_compatible else torch.float64
    points = torch.linspace(*endpoints[rule], steps, dtype=dtype).tolist()
    if rule != "riemann-trapezoid":
        return [(point, 1 / steps) for point in points]
    weight = 1 / steps if captum_compatible else 1 / (steps - 1)
    return [(point, weight / 2 if i in (0, steps - 1) else weight) for i, point in enumerate(points)]
