"""One file a method: the formula, and what it declares."""

from clearhead.methods import (  # noqa: F401  (importing a method registers it)
    attcat,
    attention,
    attention_gradcam,
    cat,
    generic,
    grad_sam,
    input_x_gradient,
    position,
    random,
    rollout,
    saliency,
)
from clearhead.methods.base import REGISTRY, Declaration, Fold, Frame, Method, Scores, register

__all__ = ["REGISTRY", "Declaration", "Fold", "Frame", "Method", "Scores", "register"]
