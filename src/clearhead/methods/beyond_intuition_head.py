"""Beyond Intuition, head-wise: perception that weighs heads by how much the target depends on them, times feedback.

    Ã_l = Σ_h θ_h A_h,     θ_h ∝ mean |A_hᵀ ∂y/∂A_h|,     P = Π_l (I + Ã_l)
    F = E_h[(mean_k ∂y/∂A_last(α_k x))⁺]
    r = Σ_i w_i P_i ⊙ F_i

with `steps` points α_k evenly from 0 to 1 (`_perception.py`). θ sums to one over the heads of a sample. Layers from a
quarter of the depth on: with the 12 layers of ViT-B, those of the authors' script, from layer 3 on. The profile
`bi_vit_h` starts at layer 3 at any depth, as the script does. `perception="uniform"` weighs all heads alike,
`layers=(-1, None)` perceives through the last layer alone, and `perception="none"` leaves the feedback alone.
"""

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Asks, Call, check_asks
from clearhead.errors import Refusal
from clearhead.methods._perception import Feedback, PerceptionFold
from clearhead.methods.base import of_authors, register

#: AᵀG is a product of matrices, cubic in the length.
LONGEST = 4096


@register(
    "beyond-intuition-head",
    kind="path",
    family="relevance",
    asks=("attention", "attention_gradient"),
    cost="21 forward and backward passes (one a step), several at once",
    citation="Chen et al. (2023), Beyond intuition: rethinking token attributions inside transformers, TMLR",
    signed=False,
    target="any",
    layers=(0.25, None),
    has=("layers", "heads", "rows"),
    parts="depths",
)
class BeyondIntuitionHead(PerceptionFold):
    clean: ClassVar[Asks] = check_asks("attention_gradient")
    steps: int = 20
    feedback: Feedback = "integrated"
    perception: Literal["head", "uniform", "none"] = "head"
    lookups: bool = of_authors(False)
    #: θ by the gradients of the class that is predicted, whichever one is explained (InterpretDL).
    of_predicted: bool = of_authors(False)

    def begin(self) -> None:
        super().begin()
        length = self.frame.valid.shape[1]
        if length > LONGEST and self.perception == "head":
            raise Refusal(
                f"beyond-intuition-head multiplies matrices of {length} × {length} for every head and layer, which is "
                f"not done beyond {LONGEST} units: use beyond-intuition-token, or perception='uniform'"
            )

    @property
    def perceives(self) -> bool:
        return self.perception != "none"

    @property
    def needs_whole(self) -> bool:
        return super().needs_whole or self.perception == "head"

    def visit(self, call: Call) -> None:
        if self.perception == "head":
            self.mix(call, self.started(call) @ self.mixing(call).to(self.pushed)[:, None])
        else:
            super().visit(call)

    def mixing(self, call: Call) -> Float[Tensor, "batch query key"]:
        if self.perception != "head":
            return super().mixing(call)
        assert call.attention is not None and call.attention_gradient is not None
        # Padded rows have no gradient, but padded columns do: attention that is held at zero can still be wished for.
        gradient = call.attention_gradient * self.frame.valid[:, None, None]
        weight = (call.attention.mT @ gradient).abs().sum((2, 3))
        whole = weight.sum(1, keepdim=True)
        theta = (weight / whole.clamp(min=1e-300)).where(whole > 0, 1 / weight.shape[1])
        return (theta[:, :, None, None] * call.attention).sum(1)
