"""Value zeroing: how far each token's state moves when another token has nothing to give.

    C_l[i,j] = 1 − cos(h_i, h_i without v_j),     r = w · Ĉ_L · … · Ĉ_1          w: the read-out

h_i is what layer l makes of token i; without v_j the value vector of token j is zero in all heads of that layer, and
nothing else is changed: the attention stays as it was. Ĉ is C with rows that sum to one. No identity is added: a
layer's residual connection is in its states.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Call, Tape
from clearhead.methods.base import Fold, Scores, register


@register(
    "value-zeroing",
    kind="edits",
    family="perturbation",
    asks=("attention", "values"),
    cost="one forward, in which each layer runs once more for every unit",
    citation="Mohebbi et al. (2023), Quantifying context mixing in transformers, EACL",
    signed=False,
    target="none",
    has=("layers", "rows"),
    parts="depths",
    axioms=("rows sum to one",),
    # a distance is half a squared difference of two states that are nearly the same
    amplifies=100.0,
)
class ValueZeroing(Fold):
    def begin(self) -> None:
        self.one_row = self.frame.readout.shape[1] == 1
        # One row per depth: the row that is read after layer l starts when the fold comes to layer l.
        depths = len(self.frame.layers)
        self.rows = torch.zeros_like(self.frame.readout).repeat(1, depths, 1) if self.one_row else self.frame.readout

    def visit(self, call: Call) -> None:
        assert call.moved is not None
        if self.one_row:
            self.rows[:, call.layer - self.frame.layers.start] = self.frame.readout[:, 0]
        self.rows = self.rows @ self._normalised(call.moved)

    def _normalised(self, moved: Float[Tensor, "batch query key"]) -> Float[Tensor, "batch query key"]:
        valid = self.frame.valid
        own = moved.masked_fill(~(valid[:, :, None] & valid[:, None]), 0).to(self.rows)
        sums = own.sum(-1, keepdim=True)
        return own / torch.where(sums > 0, sums, 1)

    def finish(self, tape: Tape) -> Scores:
        if self.one_row:
            return Scores(self.rows[:, -1:], per_layer=self.rows)
        return Scores(self.rows)
