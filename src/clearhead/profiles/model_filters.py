"""Kinds of models that authors' code is for: on others it would be numbers that no author computed."""

from collections.abc import Callable
from dataclasses import dataclass

from clearhead.adapters.base import Subject
from clearhead.adapters.cross_attention import CoAttention
from clearhead.adapters.detection import Detector, ObjectDetection
from clearhead.adapters.dual_encoder import ImageTextDual
from clearhead.adapters.generation import Answering
from clearhead.adapters.joint_sequence import OneSequence
from clearhead.adapters.masked_lm import MaskedLanguageModel


@dataclass(frozen=True)
class Kind:
    """`said` goes on after "models that"."""

    said: str
    fits: Callable[[Subject], bool]


def _reads_texts(subject: Subject) -> bool:
    return subject.takes == ("text",) and not isinstance(subject, Answering | MaskedLanguageModel)


def _reads_pictures(subject: Subject) -> bool:
    return subject.takes == ("image",) and not isinstance(subject, Detector)


TEXTS = Kind("read a text and say one thing about it", _reads_texts)
TEXTS_ALONE = Kind("read a text, and nothing beside it", lambda subject: subject.takes == ("text",))
PICTURES = Kind("read a picture and say one thing about it", _reads_pictures)
DETECTORS = Kind(
    "find objects in a picture by queries that look at it", lambda subject: isinstance(subject, ObjectDetection)
)
MASKED = Kind("fill in a masked word", lambda subject: isinstance(subject, MaskedLanguageModel))
TOWERS = Kind("hold a text against a picture, each read by itself", lambda subject: isinstance(subject, ImageTextDual))
CO_ATTENTION = Kind(
    "read a text and a picture that look at each other", lambda subject: isinstance(subject, CoAttention)
)
ONE_SEQUENCE = Kind("read a text and a picture as one sequence", lambda subject: isinstance(subject, OneSequence))
