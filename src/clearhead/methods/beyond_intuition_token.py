"""Beyond Intuition, token-wise: perception with tokens weighted by the norm of their values, times feedback.

    Ã_l = E_h[A_l] · diag(ρ_l),     ρ_j = ‖W_o v_j‖ / ‖z_j‖,     P = Π_l (I + Ã_l)
    F = E_h[(mean_k ∂y/∂A_last(α_k x))⁺]
    r = Σ_i w_i P_i ⊙ F_i

v_j are the values of all heads (with their bias), W_o is the output projection (without bias), z_j the layer input;
with `steps` points α_k evenly from 0 to 1 (`_perception.py`). The default layers start at half of the depth: with the
12 layers of ViT-B at layer 6, as in the authors' script. The profile `bi_vit_c` starts at layer 6 at any depth, as the
script does. `perception="uniform"` sets ρ to one, `layers=(-1, None)` uses the perception of the last layer only, and
`perception="none"` gives the feedback alone.
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


@register_method(
    "beyond-intuition-token",
    pass_type=PassType.PATH,
    family="relevance",
    requires=("attention_gradient", "values", "output_projection", "block_input"),
    cost=Cost(forward=21, backward=20, note="one per step, batched"),
    citation="Chen et al. (2023), Beyond intuition: rethinking token attributions inside transformers, TMLR",
    signed=False,
    target="any",
    measures="the attention that reaches the read-out position, weighted by gradients along a path, token by token",
    misleads="the path starts at a black or empty input, which the model never saw in training",
    layers=(0.5, None),
    supports=("layers", "rows"),
    layer_scores="depths",
)
class BeyondIntuitionToken(PerceptionMethod):
    """Perception with weighted tokens, times gradient feedback.

    Attributes:
        steps: Number of points α_k.
        feedback: The gradient for the feedback: integrated over the path, at the input, averaged over noisy inputs, or
            none.
        perception: The token weights: ρ ("token"), one ("uniform"), or no perception factor ("none").
        lookups: Whether α scales token embeddings without positions (Beyond Intuition's code for CLIP).
        normed: Whether z is the input of the layer's first norm (InterpretDL), which in post-norm models is after
            attention.
        late: Whether v are the values of the state after attention and residual (Beyond Intuition's code for CLIP).
    """

    requires_at_input: ClassVar[Requirements] = resolve_requirements(
        ("attention", "values", "output_projection", "block_input")
    )
    steps: int = 20
    feedback: FeedbackMode = "integrated"
    perception: Literal["token", "uniform", "none"] = "token"
    lookups: bool = compat_option(False)
    normed: bool = compat_option(False)
    late: bool = compat_option(False)

    @property
    def needs_norm_inputs(self) -> bool:
        """Whether z or v come from the inputs of the layer's norms (`normed`, `late`)."""
        return self.normed or self.late

    @property
    def uses_perception(self) -> bool:
        """False for `perception="none"`."""
        return self.perception != "none"

    def compute_column_weights(self, call: AttentionCall) -> Float[Tensor, "batch 1 1 key"] | float:
        """ρ_j of each key; one unless `perception="token"`."""
        if self.perception != "token":
            return 1.0
        return self.compute_transport_ratios(call)[:, None, None]

    def compute_transport_ratios(self, call: AttentionCall) -> Float[Tensor, "batch key"]:
        """Compute ρ: the norm of a token's projected values, relative to the norm of the token."""
        if call.values is None or call.output_projection is None or call.block_input is None:
            raise UnsupportedError(
                f"the output projection of {call.module} was not found, so the contribution of each token to its "
                "output is unknown"
            )
        values = call.values.transpose(1, 2).flatten(2)
        tokens = call.block_input
        if self.late:
            values = self.norm_inputs[call.layer].values_after_attention()
        if self.normed:
            tokens = self.norm_inputs[call.layer].first_norm_input
        projected_values = values @ call.output_projection.to(values).mT
        return projected_values.norm(dim=-1) / tokens.norm(dim=-1).clamp(min=1e-30)
