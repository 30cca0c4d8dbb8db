"""What a model is measured on where nobody says, and what is put beside an input in a batch."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearhead.adapters.base import Given, How, Subject
from clearhead.errors import ClearheadError
from clearhead.zoo import has_zoo

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

TEXT = "You look extremely confused"


def inputs_for(ex: "Explainer") -> dict[str, Any]:
    """What `explain` is called with: a ready example of the zoo, a sentence, a picture, or any input that fits."""
    subject = ex.subject
    if ready := _ready(subject.name):
        return ready
    example = subject.example()
    if isinstance(example, str) and _mask(subject) in example:
        return {"inputs": example}
    if reads_text(subject) and subject.processor is not None and _fits(subject, TEXT):
        return {"inputs": TEXT}
    if subject.takes == ("image",) and subject.processor is not None and find_spec("skimage") is not None:
        import skimage.data

        return {"inputs": skimage.data.chelsea()}
    return {"inputs": example}


def _fits(subject: Subject, text: str) -> bool:
    """Whether one text is an input: some models take two, or tokens of another kind."""
    try:
        return bool(subject.samples(text, How()))
    except ClearheadError:
        return False


def _ready(name: str) -> dict[str, Any]:
    if not name.startswith("zoo:") or not has_zoo():
        return {}
    from clearhead_zoo import examples

    short = name.removeprefix("zoo:")
    found: dict[str, Any] = examples.example(short) if short in examples.names() else {}
    return found


def _mask(subject: Subject) -> str:
    """What stands for a word to guess; a text that nobody writes where there is none."""
    return getattr(subject.processor, "mask_token", None) or "\0"


def reads_text(subject: Subject) -> bool:
    """Whether a string is a text to it, and not the name of a file."""
    return not {"image", "audio"} & set(subject.takes)


def longer(subject: Subject, raw: Any) -> Any:
    """An input that this one is padded beside; None where an input's length is not its own."""
    if isinstance(raw, Given):
        return replace(raw, text=_longer(subject, raw.text)) if isinstance(raw.text, str) else None
    if not reads_text(subject):
        return None
    if isinstance(raw, tuple) and raw and isinstance(raw[0], str):
        return (_longer(subject, raw[0]), *raw[1:])
    return _longer(subject, raw) if isinstance(raw, str) else None


def _longer(subject: Subject, raw: str) -> str:
    known = raw.replace(_mask(subject), "it")  # there is one word to guess, as before
    return f"{raw} {known} {known}"


def turned(raw: Any, is_text: bool) -> Any:
    """The same input the other way round: another one, and as long. What cannot be turned is its own neighbour."""
    if isinstance(raw, Given):
        return replace(raw, text=turned(raw.text, True), image=turned(raw.image, False), audio=turned(raw.audio, False))
    if isinstance(raw, Mapping):
        return {name: turned(part, False) if _is_floating(part) else part for name, part in raw.items()}
    if is_text and isinstance(raw, tuple):
        return tuple(turned(part, True) for part in raw)
    if is_text and isinstance(raw, str):
        return " ".join(reversed(raw.split()))
    if isinstance(raw, torch.Tensor):
        return raw.flip(-1)
    if isinstance(raw, np.ndarray) or hasattr(raw, "convert"):  # an array, or a picture of PIL
        pixels = np.asarray(raw)
        return np.ascontiguousarray(np.flip(pixels, axis=min(1, pixels.ndim - 1)))
    return raw


def _is_floating(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.is_floating_point()
