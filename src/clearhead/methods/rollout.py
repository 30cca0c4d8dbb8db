"""Attention rollout: attention multiplied through the layers, half of each layer being the residual stream.

    Â_l = (E_h A_l + I) / 2,     r = w · Â_{L-1} ⋯ Â_s

pushed as a row from the last layer to the first; no matrices are multiplied. `per_layer[l]` is the same read-out taken
after layer l (R^l[p, :] of the paper's figures).
"""

import torch

from clearhead.methods.base import Fold, Scores, register
from clearhead.recording.tape import Call, Tape


@register(
    "rollout",
    family="attention",
    asks=("attention",),
    cost="one forward",
    citation="Abnar & Zuidema (2020), Quantifying attention flow in transformers, ACL",
    signed=False,
    target="none",
    has=("layers", "heads", "rows"),
    parts="depths",
    axioms=("rows sum to one",),
)
class Rollout(Fold):
    def begin(self) -> None:
        self.one_row = self.frame.readout.shape[1] == 1
        # One row per depth: the row that is read after layer l starts when the fold comes to layer l.
        depths = len(self.frame.layers)
        self.rows = torch.zeros_like(self.frame.readout).repeat(1, depths, 1) if self.one_row else self.frame.readout

    def visit(self, call: Call) -> None:
        if self.one_row:
            self.rows[:, call.layer - self.frame.layers.start] = self.frame.readout[:, 0]
        self.rows = (self.rows + self.rows @ call.mean_attention) / 2

    def finish(self, tape: Tape) -> Scores:
        if self.one_row:
            return Scores(self.rows[:, -1:], per_layer=self.rows)
        return Scores(self.rows)
