"""CAT: hidden states times their gradient, summed over the layers.

    CAT^l_i = Σ_k h^l_ik · ∂y/∂h^l_ik,     CAT_i = Σ_l CAT^l_i

h^l is the *input* of layer l, the embedding output included. The output of the last layer is left out: its gradient is
zero except at the read-out position.
"""

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import AttentionCall
from clearhead.methods.base import AttributionMethod, register_method
from clearhead.methods.cost import Cost


def compute_features_x_gradient(call: AttentionCall) -> Float[Tensor, "batch unit"]:
    """Return Σ_k h_ik · ∂y/∂h_ik for the input h of the call's layer."""
    assert call.block_input is not None and call.block_input_gradient is not None
    return (call.block_input * call.block_input_gradient).sum(-1)


@register_method(
    "cat",
    family="relevance",
    requires=("block_input", "block_input_gradient"),
    cost=Cost(forward=1, backward=1),
    citation="Qiang et al. (2022), AttCAT: explaining transformers via attentive class activation tokens, NeurIPS",
    signed=True,
    target="any",
    measures="the contribution of each token's hidden states to the target, summed over layers",
    misleads="layers are added up although each builds on the previous one, so early evidence is counted several times",
    linear_in_target=True,
    supports=("layers",),
    layer_scores="contributions",
)
class CAT(AttributionMethod):
    """Hidden states times their gradient."""

    def on_call(self, call: AttentionCall) -> Float[Tensor, "batch head row unit"]:
        """CAT^l of each token, as a single head and row."""
        return compute_features_x_gradient(call)[:, None, None]
