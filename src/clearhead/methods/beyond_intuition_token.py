"""Beyond Intuition, token-wise: perception that weighs tokens by what attention takes from them, times feedback.

    Ã_l = E_h[A_l] · diag(ρ_l),     ρ_j = ‖W_o v_j‖ / ‖z_j‖,     P = Π_l (I + Ã_l)
    F = E_h[(mean_k ∂y/∂A_last(α_k x))⁺]
    r = Σ_i w_i P_i ⊙ F_i

v_j are the values of all heads (with their bias), W_o the output projection (without), z_j what enters the layer; with
`steps` points α_k evenly from 0 to 1 (`_perception.py`). Layers from half of the depth on: with the 12 layers of ViT-B,
those of the authors' script, from layer 6 on. The profile `bi_vit_c` starts at layer 6 at any depth, as the script
does. `perception="uniform"` sets ρ to one, `layers=(-1, None)` perceives through the last layer alone, and
`perception="none"` leaves the feedback alone.
"""

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Asks, Call, check_asks
from clearhead.errors import Refusal
from clearhead.methods._perception import Feedback, PerceptionFold
from clearhead.methods.base import of_authors, register


@register(
    "beyond-intuition-token",
    kind="path",
    family="relevance",
    asks=("attention_gradient", "values", "output_projection", "block_input"),
    cost="21 forward and backward passes (one a step), several at once",
    citation="Chen et al. (2023), Beyond intuition: rethinking token attributions inside transformers, TMLR",
    signed=False,
    target="any",
    layers=(0.5, None),
    has=("layers", "rows"),
    parts="depths",
)
class BeyondIntuitionToken(PerceptionFold):
    clean: ClassVar[Asks] = check_asks(("attention", "values", "output_projection", "block_input"))
    steps: int = 20
    feedback: Feedback = "integrated"
    perception: Literal["token", "uniform", "none"] = "token"
    lookups: bool = of_authors(False)
    #: z as what goes into the layer's first norm (InterpretDL): after attention, where norms come last.
    normed: bool = of_authors(False)
    #: v as the values of what comes out of attention, the layer's input added (Beyond Intuition's code for CLIP).
    late: bool = of_authors(False)

    @property
    def reads_norms(self) -> bool:
        return self.normed or self.late

    @property
    def perceives(self) -> bool:
        return self.perception != "none"

    def weight(self, call: Call) -> Float[Tensor, "batch 1 1 key"] | float:
        return self.transported(call)[:, None, None] if self.perception == "token" else 1.0

    def transported(self, call: Call) -> Float[Tensor, "batch key"]:
        """ρ: how long what attention takes from a token is, beside the token itself."""
        if call.values is None or call.output_projection is None or call.block_input is None:
            raise Refusal(
                f"the output projection of {call.module} was not found, so what it takes from tokens is not known"
            )
        values, tokens = call.values.transpose(1, 2).flatten(2), call.block_input
        if self.reads_norms:
            seen = self.norms[call.layer]
            values, tokens = seen.late_values() if self.late else values, seen.first if self.normed else tokens
        taken = values @ call.output_projection.to(values).mT
        return taken.norm(dim=-1) / tokens.norm(dim=-1).clamp(min=1e-30)
