"""AttnLRP: input × gradient, with gradients that let relevance through unchanged.

    r_i = Σ_k x_ik · g_ik          x_i: a token's word embedding, or the pixels of a patch

g is the gradient, but for activations (f(z)/z), products of two activations such as attention and gated units (halved
for each of the two) and norms (what divides is a constant): `backward_rules/attn_lrp.py`. Relevance is conserved but
for what biases, positions and the softmax's constant part take up.
"""

from clearhead.backward_rules.attn_lrp import AttnLRP
from clearhead.capture.tape import Tape
from clearhead.methods._modified_backward import PATENTS, UnderRules
from clearhead.methods.base import Scores, register


@register(
    "attn-lrp",
    kind="rules",
    family="relevance",
    asks=("inputs", "input_gradient"),
    cost="one forward and one backward, under rules",
    citation="Achtibat et al. (2024), AttnLRP: attention-aware layer-wise relevance propagation for transformers, ICML",
    signed=True,
    target="any",
    linear_in_target=True,
    note=PATENTS,
)
class AttnLRPMethod(UnderRules):
    @property
    def family(self) -> AttnLRP:
        return AttnLRP()

    def finish(self, tape: Tape) -> Scores:
        assert tape.inputs is not None and tape.input_gradient is not None
        stream = self.frame.stream
        return Scores((tape.inputs[stream] * tape.input_gradient[stream]).sum(-1)[:, None])
