"""Filters for the models that authors' code is for; on other models a profile would reproduce no author's scores."""

from collections.abc import Callable
from dataclasses import dataclass

from clearhead.adapters.base import ModelAdapter
from clearhead.adapters.cross_attention import CrossAttentionAdapter
from clearhead.adapters.detection import BaseDetectionAdapter, ObjectDetectionAdapter
from clearhead.adapters.dual_encoder import ImageTextDualEncoderAdapter
from clearhead.adapters.generation import GenerativeAdapter
from clearhead.adapters.joint_sequence import JointSequenceAdapter
from clearhead.adapters.masked_lm import MaskedLMAdapter


@dataclass(frozen=True)
class ModelFilter:
    """A predicate on models, with a description that completes the phrase "models that".

    Attributes:
        description: The end of the phrase, such as "predict a masked token".
        matches: Whether an adapter's model belongs to them.
    """

    description: str
    matches: Callable[[ModelAdapter], bool]


def _is_text_classifier(adapter: ModelAdapter) -> bool:
    """Whether a model takes a text only, and neither generates tokens nor fills masks."""
    return adapter.input_names == ("text",) and not isinstance(adapter, GenerativeAdapter | MaskedLMAdapter)


def _is_image_classifier(adapter: ModelAdapter) -> bool:
    """Whether a model takes an image only, and is no detector."""
    return adapter.input_names == ("image",) and not isinstance(adapter, BaseDetectionAdapter)


TEXT_CLASSIFIERS = ModelFilter("read a text and make one prediction", _is_text_classifier)
TEXT_ONLY_MODELS = ModelFilter("read only a text", lambda adapter: adapter.input_names == ("text",))
IMAGE_CLASSIFIERS = ModelFilter("read an image and make one prediction", _is_image_classifier)
OBJECT_DETECTORS = ModelFilter(
    "detect objects in an image by queries that attend to it",
    lambda adapter: isinstance(adapter, ObjectDetectionAdapter),
)
MASKED_LANGUAGE_MODELS = ModelFilter("predict a masked token", lambda adapter: isinstance(adapter, MaskedLMAdapter))
DUAL_ENCODERS = ModelFilter(
    "compare a text with an image, each encoded separately",
    lambda adapter: isinstance(adapter, ImageTextDualEncoderAdapter),
)
CO_ATTENTION_MODELS = ModelFilter(
    "read a text and an image that attend to each other", lambda adapter: isinstance(adapter, CrossAttentionAdapter)
)
JOINT_SEQUENCE_MODELS = ModelFilter(
    "read a text and an image as one sequence", lambda adapter: isinstance(adapter, JointSequenceAdapter)
)
