"""What is explained: how a kind of model takes input, what its units are called, which row is read."""

from clearhead.subjects import (  # noqa: F401  (importing a subject registers it)
    audio,
    co_attention,
    decoder,
    detection,
    dual_encoder,
    encoder_decoder,
    image,
    image_text,
    masked,
    multiple_choice,
    one_sequence,
    similarity,
    speech,
    text,
    token_heads,
)
from clearhead.subjects.base import How, Sample, Subject, register_subject, subject_for

__all__ = ["How", "Sample", "Subject", "register_subject", "subject_for"]
