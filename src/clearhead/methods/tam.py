"""Transition Attention Maps: attention as a Markov chain from the last layer to the first, times gradient feedback.

    s = w · E_h[A_last],     s ← s · E_h[A_l] + s  for the earlier layers
    F = E_h[(mean_k ∂y/∂A_last(α_k x))⁺]
    r = s ⊙ w · F

with `steps` points α_k evenly from 0 to 1 (`_perception.py`; several read-out rows are each multiplied with their own
feedback). The default layers start at a third of the depth: with the 12 layers of ViT-B at layer 4, as in the authors'
scripts. The profile `tam` starts at layer 4 at any depth, as the scripts do. The method equals Beyond Intuition with
equal head weights and without the identity of the last layer.
"""

from typing import ClassVar

from clearhead.methods._perception import FeedbackMode, PerceptionMethod
from clearhead.methods.base import register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "tam",
    pass_type=PassType.PATH,
    family="relevance",
    requires=("attention", "attention_gradient"),
    cost=Cost(forward=21, backward=20, note="one per step, batched"),
    citation="Yuan et al. (2021), Explaining information flow inside vision transformers using Markov chain, NeurIPS "
    "workshop",
    signed=False,
    target="any",
    measures="attention multiplied layer by layer from the read-out position, weighted by gradients along a path",
    misleads="the path starts at a black or empty input, which the model never saw in training",
    layers=(1 / 3, None),
    supports=("layers", "heads", "rows"),
    layer_scores="depths",
)
class TransitionAttentionMaps(PerceptionMethod):
    """Attention as a Markov chain, times gradient feedback.

    Attributes:
        steps: Number of points α_k.
        feedback: The gradient for the feedback: integrated over the path, at the input, averaged over noisy inputs, or
            none.
    """

    adds_identity_at_top: ClassVar[bool] = False
    steps: int = 20
    feedback: FeedbackMode = "integrated"
