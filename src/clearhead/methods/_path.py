"""Paths: where a method wants to see the model beside the input itself, and what it is shown there.

    x(α) = x′ + α (x + ε − x′)

x′ is a baseline, ε noise. A method of this kind says which points it wants and is handed the tape of each; points that
several methods want are run once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Asks, Call, Tape, check_asks
from clearhead.errors import InputError
from clearhead.methods.base import Fold

#: Rules by which an integral over 0…1 becomes a weighted sum.
Rule = Literal["gauss-legendre", "riemann-middle", "riemann-left", "riemann-right", "riemann-trapezoid"]


class Nothing(Enum):
    """In the place of a baseline's name: no name that a caller could give."""

    NOTHING = 0


NOTHING = Nothing.NOTHING


@dataclass(frozen=True)
class Point:
    """One place of a path.

    along: α; None for a random one, drawn for each sample
    baseline: x′ by name, None for the one that is safe for the model; of several names one is drawn for each sample;
        NOTHING where the input is scaled or moved by itself, and held against nothing
    noise: σ of ε; in the units of the input, or as a share of its range
    draw: which of the random draws, keyed by the content of the input
    at: what α scales: the inputs (word embeddings, pixels), or, of words, what enters the first layer (with positions)
    only: the one stream that is moved, of several
    """

    along: float | None = 1.0
    baseline: str | tuple[str, ...] | Nothing | None = NOTHING
    noise: float = 0.0
    noise_of: Literal["units", "range"] = "units"
    draw: int | None = None
    at: Literal["inputs", "layers"] = "inputs"
    only: str | None = None


@dataclass
class Step:
    """What one point shows: the tape there, and the way to the input, x + ε − x′, unit by unit."""

    point: Point
    tape: Tape
    way: "dict[str, Float[Tensor, 'batch unit feature']]"


@dataclass
class Normed:
    """What the first norm of a layer is given, and the values that attention would make of what the second is given.

    The first norm's input is the layer's input where norms come first, and what attention gave added to it where they
    come last; the second norm's, where norms come first, is what attention gave added to the layer's input.
    """

    first: Float[Tensor, "batch unit model"]
    late_values: "Callable[[], Float[Tensor, 'batch unit heads']]"


class PathFold(Fold):
    """Base of every method of the kind "path". `finish` gets the tape of the input itself."""

    #: What is asked for at each point, and at the input itself (all of it stands in the declaration, too).
    along: ClassVar[Asks] = check_asks("input_gradient")
    clean: ClassVar[Asks] = frozenset()
    #: Which layers are shown at each point, where what is asked for lies in layers.
    at_layers: ClassVar[Literal["last", "all"]] = "last"
    #: Whether the tape of the input itself is that of the predicted class, whichever one is explained.
    of_predicted: bool = False
    #: What goes into the norms of each layer, for those that read it.
    norms: "Mapping[int, Normed]"
    #: What the scores of this axis add up to, where those of all axes together should be y(x) − y(x′), the base value.
    explained: Float[Tensor, "batch"] | None = None
    base_value: Float[Tensor, "batch"] | None = None

    @property
    def reads_norms(self) -> bool:
        return False

    def points(self) -> Iterable[Point]:
        """Where the model is to be looked at."""
        raise NotImplementedError

    def at(self, step: Step) -> None:
        """Fold one point into the state."""

    def at_call(self, point: Point, call: Call, queries: slice | None = None) -> None:
        """One layer of this stream at one point: the last one, or each of those that were chosen.

        Maps are whole, or (`queries`) those of a tile, each of which is shown once.
        """


#: How the name of a baseline begins that is another input.
EXAMPLE = "example: "


def named(baselines: str | tuple[str, ...] | None, examples: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names of baselines, those that are other inputs among them; a text alone is one of them, not its letters.

    >>> named("zero", "good"), named(None, ("good", "bad"))
    (('zero', 'example: good'), ('example: good', 'example: bad'))
    """
    own = (baselines,) if isinstance(baselines, str) else baselines or ()
    others = (examples,) if isinstance(examples, str) else examples
    return (*own, *(EXAMPLE + other for other in others))


def counted(steps: int, least: int = 1, name: str = "steps") -> int:
    """A number of steps, or of what `name` says, made sure of."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < least:
        raise InputError(f"{name}={steps!r} is not possible: give a whole number of at least {least}")
    return steps


def quadrature(rule: Rule, steps: int, captum: bool = False) -> list[tuple[float, float]]:
    """Points of 0…1 and their weights, which sum to one.

    Captum's points of Riemann sums are rounded to float32, and its trapezoids are n where there are n − 1, so that
    their sum is too small by 1/n: `captum` gives those.

    >>> quadrature("riemann-middle", 2), quadrature("riemann-trapezoid", 3)
    ([(0.25, 0.5), (0.75, 0.5)], [(0.0, 0.25), (0.5, 0.5), (1.0, 0.25)])
    """
    counted(steps, 2 if rule == "riemann-trapezoid" else 1)
    if rule == "gauss-legendre":
        places, weights = np.polynomial.legendre.leggauss(steps)
        return [((1 + place) / 2, weight / 2) for place, weight in zip(places.tolist(), weights.tolist(), strict=True)]
    ends = {
        "riemann-left": (0.0, 1 - 1 / steps),
        "riemann-right": (1 / steps, 1.0),
        "riemann-middle": (0.5 / steps, 1 - 0.5 / steps),
        "riemann-trapezoid": (0.0, 1.0),
    }
    points = torch.linspace(*ends[rule], steps, dtype=torch.float32 if captum else torch.float64).tolist()
    if rule != "riemann-trapezoid":
        return [(point, 1 / steps) for point in points]
    each = 1 / steps if captum else 1 / (steps - 1)
    return [(point, each / 2 if i in (0, steps - 1) else each) for i, point in enumerate(points)]
