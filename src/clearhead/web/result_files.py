"""Parse explanations sent by a client or saved to a file, and encode explanations as files. The input is untrusted."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clearhead.errors import InputError
from clearhead.explanation.explanation import from_dict, load_explanation
from clearhead.explanation.multi_stream import MultiStreamExplanation
from clearhead.render.view_model import build_view_model
from clearhead.web.image_upload import decode_image_array, encode_png_data_url
from clearhead.web.limits import Limits
from clearhead.web.schemas import RenderRequest

if TYPE_CHECKING:
    from clearhead.explanation.multi_stream import AnyExplanation

ResultT = TypeVar("ResultT")


def parse_explanations_file(content: bytes, limits: Limits) -> "list[AnyExplanation]":
    """Parse a saved file: safetensors, or the JSON form of one or several explanations.

    Args:
        content: Bytes of the file.
        limits: Limits on the number of explanations and on the pixels of their images.

    Raises:
        InputError: The file is empty, damaged, or not an explanation, or exceeds a limit.
    """
    if not content:
        raise InputError("the file is empty")
    if content.lstrip()[:1] in (b"{", b"["):
        return _parse_explanations_json(content, limits)
    with tempfile.TemporaryDirectory(prefix="clearhead-") as folder:
        path = Path(folder) / "opened.safetensors"  # a fixed name: paths of requests are never opened
        path.write_bytes(content)
        try:
            explanation: AnyExplanation = load_explanation(path)
        except InputError as error:
            raise InputError(str(error).replace(repr(str(path)), "the file")) from None
    image = explanation.image
    if image is not None and image.shape[0] * image.shape[1] > limits.max_image_pixels:
        raise InputError(f"the image in the file is too large: at most {limits.max_image_pixels:,} pixels are accepted")
    return [explanation]


def _parse_explanations_json(content: bytes, limits: Limits) -> "list[AnyExplanation]":
    """Parse JSON: a file saved by the page, a comparison, a list of explanations, or one."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise InputError("the file appears to be JSON, but is damaged") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == "clearhead/explanations":  # saved by the page
        try:
            request = RenderRequest(explanations=data["explanations"], images=data.get("images", []))
            return decode_explanations(request, limits)
        except InputError:
            raise
        except (KeyError, ValueError):
            raise InputError("the file is damaged") from None
    if schema == "clearhead/comparison":
        data = list(data["explanations"].values()) if isinstance(data.get("explanations"), dict) else []
    if not isinstance(data, list):
        data = [data]
    _check_explanation_count(data, limits)
    return [_decode_explanation(encoded) for encoded in data]


def decode_explanations(request: RenderRequest, limits: Limits) -> "list[AnyExplanation]":
    """Decode the explanations that a page sends back, and attach their images.

    Raises:
        InputError: An explanation or image is invalid, or a limit is exceeded.
    """
    _check_explanation_count(request.explanations, limits)
    explanations = [_decode_explanation(encoded) for encoded in request.explanations]
    if not request.images:
        return explanations
    if len(request.images) != len(explanations):
        raise InputError(
            f"{len(request.images)} images for {len(explanations)} explanations: provide one for each (or null)"
        )
    decoded_images: dict[str, Any] = {}
    # One budget for all images together, because a small body can contain many large ones.
    remaining_pixels = limits.max_image_pixels
    for encoded in dict.fromkeys(request.images):
        if encoded is not None:
            decoded_images[encoded] = decode_image_array(encoded, replace(limits, max_image_pixels=remaining_pixels))
            height, width, _ = decoded_images[encoded].shape
            remaining_pixels -= height * width
    return [
        explanation if encoded is None else _attach_image(explanation, decoded_images[encoded])
        for explanation, encoded in zip(explanations, request.images, strict=True)
    ]


def _check_explanation_count(explanations: Sequence[Any], limits: Limits) -> None:
    """Raise `InputError` if there are no explanations, or more than the limit."""
    if not 0 < len(explanations) <= limits.max_explanations:
        raise InputError(
            f"{len(explanations)} explanations were given: between 1 and {limits.max_explanations} can be shown"
        )


def _decode_explanation(data: Any) -> "AnyExplanation":
    """Decode one explanation; whatever fails on untrusted data becomes an `InputError`."""
    try:
        explanation: AnyExplanation = from_dict(data)
    except InputError:
        raise
    except (RecursionError, OverflowError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError("this is not an explanation saved by clearhead") from None
    return explanation


def _attach_image(explanation: "AnyExplanation", image: Any) -> "AnyExplanation":
    """Attach the image to every stream whose units have positions in it."""
    if isinstance(explanation, MultiStreamExplanation):
        by_stream = {
            stream: _attach_image_to_stream(stream_explanation, image)
            for stream, stream_explanation in explanation.by_stream.items()
        }
        return MultiStreamExplanation(by_stream)
    return _attach_image_to_stream(explanation, image)


def _attach_image_to_stream(explanation: Any, image: Any) -> Any:
    """Attach the image if the units have positions in it."""
    has_positions = explanation.units.grid is not None or explanation.units.boxes is not None
    return replace(explanation, image=image) if has_positions else explanation


def encode_explanations(explanations: "Sequence[AnyExplanation]") -> dict[str, Any]:
    """Encode explanations and their images as JSON, the inverse of `decode_explanations`."""
    images = [
        None if explanation.image is None else encode_png_data_url(explanation.image) for explanation in explanations
    ]
    return {"explanations": [explanation.to_dict() for explanation in explanations], "images": images}


def build_explanations_view_model(explanations: "Sequence[AnyExplanation]") -> dict[str, Any]:
    """Build the view model. The schema was checked, but free-form fields may contain anything.

    Raises:
        InputError: The explanations cannot be drawn.
    """
    return _run_with_damage_check(lambda: build_view_model(explanations))


def encode_html(explanations: "Sequence[AnyExplanation]") -> bytes:
    """Render a self-contained HTML page.

    Raises:
        InputError: The explanations cannot be drawn.
    """
    from clearhead.render.html import render_explanations_page

    return _run_with_damage_check(lambda: render_explanations_page(explanations).encode("utf-8", "replace"))


def _run_with_damage_check(make: Callable[[], ResultT]) -> ResultT:
    """Call `make`; any error is due to the untrusted explanation and becomes an `InputError`."""
    try:
        return make()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"this explanation is damaged: it cannot be drawn ({type(error).__name__})") from None


def encode_safetensors(explanations: "Sequence[AnyExplanation]") -> bytes:
    """Encode a single explanation as a safetensors file.

    Raises:
        InputError: There are several explanations, or it is damaged.
    """
    if len(explanations) != 1:
        raise InputError(
            f"a safetensors file contains one explanation, but there are {len(explanations)}: save an HTML page instead"
        )
    with tempfile.TemporaryDirectory(prefix="clearhead-") as folder:
        path = Path(folder) / "saved.safetensors"
        return _run_with_damage_check(lambda: explanations[0].save(path).read_bytes())
