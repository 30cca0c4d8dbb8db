"""Perception times feedback: what Beyond Intuition and TAM share.

    P = Π_l (I + Ã_l),     F = E_h[(mean_k ∂y/∂A_last(α_k x))⁺],     r = Σ_i w_i P_i ⊙ F_i

Perception P says how tokens mix, feedback F what the target wishes of the last attention. The feedback is taken along
the way from nothing to the input (of pictures the normalised pixels are scaled, of words what enters the first layer):
first the mean over the points, then the clamp, then the mean over heads.

Both are in `factors`, w · P and w · F. Each factor can be exchanged: `feedback="none"` gives w · P alone,
`perception="none"` w · F alone.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Asks, Call, Tape, check_asks
from clearhead.methods._path import PathFold, Point, counted
from clearhead.methods.base import Scores

#: Integrated along the way; at the input alone; the mean over noisy inputs; left out.
Feedback = Literal["integrated", "gradient", "smoothed", "none"]
Rows = Float[Tensor, "batch row unit"]


class PerceptionFold(PathFold):
    """Rows of P pushed down from the last layer to the first, one set for each depth at which perception may end.

    Where one row speaks, it alone is pushed. A mean over rows cannot be pushed, since each row has a feedback of its
    own: then all of them are.
    """

    along: ClassVar[Asks] = check_asks("attention_gradient")
    clean: ClassVar[Asks] = check_asks("attention")
    steps: int = 20
    feedback: Feedback = "integrated"
    #: Whether words are scaled as they are looked up, without their positions (Beyond Intuition's code for CLIP).
    lookups: bool = False

    #: Whether the topmost layer adds the identity, too.
    top_keeps: ClassVar[bool] = True

    sweeps: ClassVar[int] = 1

    @property
    def perceives(self) -> bool:
        return True

    @property
    def needs_whole(self) -> bool:
        return not self.one_token  # every row then, with a feedback of its own

    def begin(self) -> None:
        counted(self.steps)
        readout = self.frame.readout
        self.one_token = bool(((readout != 0).sum(-1) <= 1).all())  # such a row can be pushed as it is
        every = torch.eye(readout.shape[2], dtype=readout.dtype, device=readout.device) if not self.one_token else None
        self.first: Rows = readout if every is None else every.expand(len(readout), -1, -1)
        self.by_depth = readout.shape[1] == 1
        depths = len(self.frame.layers) if self.by_depth else 1
        self.pushed = torch.zeros_like(self.first)[:, None].repeat(1, depths, 1, 1)
        self.wish: Tensor | float = 0.0

    def wanted_sum(self, call: Call) -> Reduce:
        return Reduce("attention", self.started(call).flatten(1, 2))

    def joined(self, call: Call, total: Tensor) -> None:
        self.mix(call, total.sum(1).unflatten(1, self.pushed.shape[1:3]) * self.weight(call))

    def weight(self, call: Call) -> Float[Tensor, "batch 1 1 key"] | float:
        """What the columns of E_h A are multiplied with to make Ã."""
        return 1.0

    def mixing(self, call: Call) -> Float[Tensor, "batch query key"]:
        """Ã of one layer, whole."""
        weight = self.weight(call)
        return call.mean_attention * (weight if isinstance(weight, float) else weight[:, 0])

    def started(self, call: Call) -> Float[Tensor, "batch depth row unit"]:
        """The rows that come to a call, among them those that start there."""
        top = self._top(call)
        if top is not None:
            self.pushed[:, top] = self.first
        return self.pushed

    def mix(self, call: Call, mixed: Float[Tensor, "batch depth row unit"]) -> None:
        """P ← P + P · Ã, given P · Ã."""
        top = self._top(call)
        if top is not None and not self.top_keeps:
            self.pushed[:, top] = 0
        self.pushed = self.pushed + mixed

    def _top(self, call: Call) -> int | None:
        """The depth whose perception begins at this call, if one does."""
        if self.by_depth:
            return call.layer - self.frame.layers.start
        return 0 if call.layer == self.frame.layers.stop - 1 else None

    def points(self) -> Iterable[Point]:
        point = Point(at="inputs" if self.lookups else "layers", only=self.frame.stream)
        if self.feedback == "integrated":
            ways = np.linspace(0, 1, self.steps).tolist() if self.steps > 1 else [1.0]
            return [replace(point, along=along) for along in ways]
        if self.feedback == "smoothed":
            return [replace(point, noise=0.15, noise_of="range", draw=draw) for draw in range(self.steps)]
        return [point] if self.feedback == "gradient" else []

    def at_call(self, point: Point, call: Call, queries: slice | None = None) -> None:
        assert call.attention_gradient is not None
        gradient = call.attention_gradient / (1 if self.feedback == "gradient" else self.steps)
        self.wish = self.wish + (self._of_reading(gradient, queries) if self.one_token else gradient)

    def _of_reading(
        self, gradient: Float[Tensor, "batch head query key"], queries: slice | None
    ) -> Float[Tensor, "batch head row key"]:
        """The rows that are read, of those of some queries: each is the row of one token."""
        which = self.frame.readout.abs().argmax(-1) - (0 if queries is None else queries.start)
        inside = (which >= 0) & (which < gradient.shape[2]) & self.frame.readout.any(-1)
        places = which.clamp(0, gradient.shape[2] - 1)[:, None, :, None]
        return gradient.take_along_dim(places, 2) * inside[:, None, :, None]

    def finish(self, tape: Tape) -> Scores:
        # where perception is left out, a row counts as much as it is read
        perceived = self.pushed if self.perceives else self.first.sum(-1, keepdim=True)[:, None].expand_as(self.pushed)
        rows, factors = perceived, None
        if isinstance(self.wish, Tensor):
            wished = self.wish.clamp(min=0).mean(1).to(rows)[:, None]
            rows = perceived * wished
            if self.perceives and self.by_depth:
                factors = {"perception": self._read(perceived)[:, -1, 0], "feedback": self._read(wished)[:, 0, 0]}
        rows = self._read(rows)
        return Scores(rows[:, -1], per_layer=rows[:, :, 0] if self.by_depth else None, factors=factors)

    def _read(self, rows: Float[Tensor, "batch depth row unit"]) -> Float[Tensor, "batch depth read unit"]:
        rows = rows if self.one_token else self.frame.readout[:, None] @ rows
        return rows * self.frame.valid[:, None, None]
