"""Model adapters: for each type of model, its inputs, the units of its attention maps, and its read-out positions."""

from clearhead.adapters import (  # noqa: F401  (importing an adapter registers it)
    audio,
    cross_attention,
    decoder,
    detection,
    dual_encoder,
    encoder_decoder,
    image,
    joint_sequence,
    masked_lm,
    multiple_choice,
    similarity,
    speech,
    text,
    token_heads,
    vision_language,
)
from clearhead.adapters.base import InputOptions, ModelAdapter, make_adapter, register_adapter

__all__ = ["InputOptions", "ModelAdapter", "make_adapter", "register_adapter"]
