"""What is explained: how a kind of model takes input, what its units are called, which row is read."""

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
from clearhead.adapters.base import InputOptions, ModelAdapter, Sample, make_adapter, register_adapter

__all__ = ["InputOptions", "ModelAdapter", "Sample", "make_adapter", "register_adapter"]
