"""One file a method: the formula, and what it declares."""

from clearhead.methods import (  # noqa: F401  (importing a method registers it)
    attcat,
    attention,
    attention_gradcam,
    attention_gradient,
    attention_x_gradient,
    cat,
    generic,
    generic_across,
    grad_sam,
    input_x_gradient,
    position,
    random,
    rollout,
    saliency,
)
from clearhead.methods.base import (
    ACROSS,
    REGISTRY,
    AcrossFold,
    Declaration,
    Fold,
    Frame,
    Method,
    Scores,
    across,
    register,
)

__all__ = [
    "ACROSS",
    "REGISTRY",
    "AcrossFold",
    "Declaration",
    "Fold",
    "Frame",
    "Method",
    "Scores",
    "across",
    "register",
]
