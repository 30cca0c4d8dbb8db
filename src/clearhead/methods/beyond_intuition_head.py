"""Beyond Intuition, head-wise: perception with heads weighted by their effect on the target, times feedback.

    Ã_l = Σ_h θ_h A_h,     θ_h ∝ mean |A_hᵀ ∂y/∂A_h|,     P = Π_l (I + Ã_l)
    F = E_h[(mean_k ∂y/∂A_last(α_k x))⁺]
    r = Σ_i w_i P_i ⊙ F_i

with `steps` points α_k evenly from 0 to 1 (`_perception.py`). θ sums to one over the heads of a sample. The default
layers start at a quarter of the depth: with the 12 layers of ViT-B at layer 3, as in the authors' script. The profile
`bi_vit_h` starts at layer 3 at any depth, as the script does. `perception="uniform"` weights all heads equally,
`layers=(-1, None)` uses the perception of the last layer only, and `perception="none"` gives the feedback alone.
"""

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import AttentionCall, Requirements, resolve_requirements
from clearhead.errors import UnsupportedError
from clearhead.methods._perception import FeedbackMode, PerceptionMethod
from clearhead.methods.base import compat_option, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType

#: Maximum length for AᵀG, a matrix product that is cubic in the length.
MAX_HEAD_PERCEPTION_LENGTH = 4096


@register_method(
    "beyond-intuition-head",
    pass_type=PassType.PATH,
    family="relevance",
    requires=("attention", "attention_gradient"),
    cost=Cost(forward=21, backward=21, note="one per step, batched"),
    citation="Chen et al. (2023), Beyond intuition: rethinking token attributions inside transformers, TMLR",
    signed=False,
    target="any",
    measures="the attention that reaches the read-out position, weighted by gradients along a path, head by head",
    misleads="the path starts at a black or empty input, which the model never saw in training",
    layers=(0.25, None),
    supports=("layers", "heads", "rows"),
    layer_scores="depths",
)
class BeyondIntuitionHead(PerceptionMethod):
    """Perception with weighted heads, times gradient feedback.

    Attributes:
        steps: Number of points α_k.
        feedback: The gradient for the feedback: integrated over the path, at the input, averaged over noisy inputs, or
            none.
        perception: The head weights: by the gradient ("head"), equal ("uniform"), or no perception factor ("none").
        lookups: Whether α scales token embeddings without positions (Beyond Intuition's code for CLIP).
        of_predicted: Whether θ uses the gradients of the predicted class, whatever the target (InterpretDL).
    """

    requires_at_input: ClassVar[Requirements] = resolve_requirements("attention_gradient")
    steps: int = 20
    feedback: FeedbackMode = "integrated"
    perception: Literal["head", "uniform", "none"] = "head"
    lookups: bool = compat_option(False)
    of_predicted: bool = compat_option(False)

    def setup(self) -> None:
        super().setup()
        length = self.unit_context.valid_mask.shape[1]
        if length > MAX_HEAD_PERCEPTION_LENGTH and self.perception == "head":
            raise UnsupportedError(
                f"beyond-intuition-head multiplies matrices of {length} × {length} for every head and layer, which is "
                f"not supported beyond {MAX_HEAD_PERCEPTION_LENGTH} units: use beyond-intuition-token, or "
                "perception='uniform'"
            )

    @property
    def uses_perception(self) -> bool:
        """False for `perception="none"`."""
        return self.perception != "none"

    @property
    def needs_full_maps(self) -> bool:
        """True for weighted heads, too: θ needs A and ∂y/∂A of all queries."""
        return super().needs_full_maps or self.perception == "head"

    def on_call(self, call: AttentionCall) -> None:
        """With weighted heads, update P ← P + P · Ã from the full map; else from E_h A."""
        if self.perception == "head":
            self.add_mixed_rows(
                call, self.insert_readout_rows(call) @ self.compute_mixing_map(call).to(self.perception_rows)[:, None]
            )
        else:
            super().on_call(call)

    def compute_mixing_map(self, call: AttentionCall) -> Float[Tensor, "batch query key"]:
        """Ã = Σ_h θ_h A_h, θ_h ∝ Σ |A_hᵀ ∂y/∂A_h|; equal θ_h if all gradients are zero."""
        if self.perception != "head":
            return super().compute_mixing_map(call)
        assert call.attention is not None and call.attention_gradient is not None
        # Padded rows have no gradient, but padded columns do: the gradient of masked attention is not zero.
        gradient = call.attention_gradient * self.unit_context.valid_mask[:, None, None]
        weight = (call.attention.mT @ gradient).abs().sum((2, 3))
        total = weight.sum(1, keepdim=True)
        theta = (weight / total.clamp(min=1e-300)).where(total > 0, 1 / weight.shape[1])
        return (theta[:, :, None, None] * call.attention).sum(1)
