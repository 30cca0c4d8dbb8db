"""CAT: each token's features times their gradient, summed over the layers.

    CAT^l_i = Σ_k h^l_ik · ∂y/∂h^l_ik,     CAT_i = Σ_l CAT^l_i

h^l is the *input* of layer l, the embedding output included. The output of the last layer is left out: its gradient
is zero everywhere but at the pooled token.
"""

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Call
from clearhead.methods.base import Fold, register


def features_x_gradient(call: Call) -> Float[Tensor, "batch unit"]:
    assert call.block_input is not None and call.block_input_gradient is not None
    return (call.block_input * call.block_input_gradient).sum(-1)


@register(
    "cat",
    family="relevance",
    asks=("block_input", "block_input_gradient"),
    cost="one forward and one backward",
    citation="Qiang et al. (2022), AttCAT: explaining transformers via attentive class activation tokens, NeurIPS",
    signed=True,
    target="any",
    linear_in_target=True,
    has=("layers",),
    parts="contributions",
)
class CAT(Fold):
    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"]:
        return features_x_gradient(call)[:, None, None]
