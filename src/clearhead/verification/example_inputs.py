"""Default inputs for verification, and variants of an input that share a batch with it."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearhead.adapters.base import InputOptions, ModelAdapter, NamedInputs
from clearhead.errors import ClearheadError
from clearhead.zoo import is_zoo_installed

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

EXAMPLE_TEXT = "You look extremely confused"


def find_example_inputs(explainer: "Explainer") -> dict[str, Any]:
    """Choose an example input for a model: a zoo example, a sentence, an image, or any input that the model takes.

    Args:
        explainer: The explainer of the model.

    Returns:
        Keyword arguments of `Explainer.explain`.
    """
    adapter = explainer.adapter
    if zoo_example := _load_zoo_example(adapter.name):
        return zoo_example
    example = adapter.make_example_input()
    if isinstance(example, str) and _get_mask_token(adapter) in example:
        return {"inputs": example}
    if takes_text_input(adapter) and adapter.processor is not None and _accepts_text(adapter, EXAMPLE_TEXT):
        return {"inputs": EXAMPLE_TEXT}
    if adapter.input_names == ("image",) and adapter.processor is not None and find_spec("skimage") is not None:
        import skimage.data

        return {"inputs": skimage.data.chelsea()}
    return {"inputs": example}


def _accepts_text(adapter: ModelAdapter, text: str) -> bool:
    """Whether a single text is a valid input; some models take pairs, or tokens of another kind."""
    try:
        return bool(adapter.make_samples(text, InputOptions()))
    except ClearheadError:
        return False


def _load_zoo_example(name: str) -> dict[str, Any]:
    """Return the arguments of a zoo model's own example; empty for other models."""
    if not name.startswith("zoo:") or not is_zoo_installed():
        return {}
    from clearhead_zoo import examples

    model_name = name.removeprefix("zoo:")
    if model_name not in examples.list_models_with_examples():
        return {}
    example: dict[str, Any] = examples.make_example_input(model_name)
    return example


def _get_mask_token(adapter: ModelAdapter) -> str:
    """The mask token, or a string that occurs in no text if there is none."""
    return getattr(adapter.processor, "mask_token", None) or "\0"


def takes_text_input(adapter: ModelAdapter) -> bool:
    """Return whether the model takes a string as a text, as opposed to a file name.

    Args:
        adapter: The model's adapter.
    """
    return not {"image", "audio"} & set(adapter.input_names)


def make_longer_input(adapter: ModelAdapter, raw_input: Any) -> Any:
    """Lengthen a text input, so that the original is padded when both share a batch.

    Args:
        adapter: The model's adapter.
        raw_input: The input.

    Returns:
        A longer input, or None if the input is not a text.
    """
    if isinstance(raw_input, NamedInputs):
        if not isinstance(raw_input.text, str):
            return None
        return replace(raw_input, text=_lengthen_text(adapter, raw_input.text))
    if not takes_text_input(adapter):
        return None
    if isinstance(raw_input, tuple) and raw_input and isinstance(raw_input[0], str):
        return (_lengthen_text(adapter, raw_input[0]), *raw_input[1:])
    if not isinstance(raw_input, str):
        return None
    return _lengthen_text(adapter, raw_input)


def _lengthen_text(adapter: ModelAdapter, text: str) -> str:
    """Append a text to itself twice, without further mask tokens."""
    unmasked = text.replace(_get_mask_token(adapter), "it")  # keeps the number of masked positions
    return f"{text} {unmasked} {unmasked}"


def make_reversed_input(raw_input: Any, is_text: bool) -> Any:
    """Reverse an input, to get a different one of the same length.

    Args:
        raw_input: The input.
        is_text: Whether strings are texts, as opposed to file names.

    Returns:
        The reversed input; an input that cannot be reversed is returned unchanged.
    """
    if isinstance(raw_input, NamedInputs):
        return replace(
            raw_input,
            text=make_reversed_input(raw_input.text, True),
            image=make_reversed_input(raw_input.image, False),
            audio=make_reversed_input(raw_input.audio, False),
        )
    if isinstance(raw_input, Mapping):
        # integer tensors are ids or masks, whose order must stay
        floating = {name: tensor for name, tensor in raw_input.items() if _is_floating(tensor)}
        return {**raw_input, **{name: make_reversed_input(tensor, False) for name, tensor in floating.items()}}
    if is_text and isinstance(raw_input, tuple):
        return tuple(make_reversed_input(text, True) for text in raw_input)
    if is_text and isinstance(raw_input, str):
        return " ".join(reversed(raw_input.split()))
    if isinstance(raw_input, torch.Tensor):
        return raw_input.flip(-1)
    if isinstance(raw_input, np.ndarray) or hasattr(raw_input, "convert"):  # an array or a PIL image
        pixels = np.asarray(raw_input)
        return np.ascontiguousarray(np.flip(pixels, axis=min(1, pixels.ndim - 1)))
    return raw_input


def _is_floating(value: Any) -> bool:
    """Whether a value is a tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()
