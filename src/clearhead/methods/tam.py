"""Transition attention maps: attention as the transitions of a Markov chain, from the last layer down, times feedback.

    s = w · E_h[A_last],     s ← s · E_h[A_l] + s  for the layers before it
    F = E_h[(mean_k ∂y/∂A_last(α_k x))⁺]
    r = s ⊙ w · F

with `steps` points α_k evenly from 0 to 1 (`_perception.py`; several rows that are read are each multiplied with their
own feedback). Layers from a third of the depth on: with the 12 layers of ViT-B, those of the authors' scripts, from
layer 4 on. The profile `tam` starts at layer 4 at any depth, as the scripts do. It is Beyond Intuition with all heads
alike and without the last layer's identity.
"""

from typing import ClassVar

from clearhead.methods._perception import Feedback, PerceptionFold
from clearhead.methods.base import register


@register(
    "tam",
    kind="path",
    family="relevance",
    asks=("attention", "attention_gradient"),
    cost="21 forward and backward passes (one a step), several at once",
    citation="Yuan et al. (2021), Explaining information flow inside vision transformers using Markov chain, NeurIPS "
    "workshop",
    signed=False,
    target="any",
    layers=(1 / 3, None),
    has=("layers", "heads", "rows"),
    parts="depths",
)
class TransitionAttentionMaps(PerceptionFold):
    top_keeps: ClassVar[bool] = False
    steps: int = 20
    feedback: Feedback = "integrated"
