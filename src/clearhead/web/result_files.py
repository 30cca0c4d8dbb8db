"""Explanations that come from outside: a saved file that is looked at, and results that are written to a file."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clearhead.errors import InputError
from clearhead.explanation.explanation import from_dict
from clearhead.explanation.explanation import load as open_file
from clearhead.explanation.multi_stream import JointExplanation
from clearhead.render.view_model import document
from clearhead.web.image_upload import as_url, pixels_of
from clearhead.web.limits import Limits
from clearhead.web.schemas import Shown

if TYPE_CHECKING:
    from clearhead.explanation.multi_stream import AnyExplanation

Made = TypeVar("Made")


def explanations_in(content: bytes, limits: Limits) -> "list[AnyExplanation]":
    """What a saved file holds: safetensors, or the JSON form of one explanation or several."""
    if not content:
        raise InputError("the file is empty")
    if content.lstrip()[:1] in (b"{", b"["):
        return _from_json(content, limits)
    with tempfile.TemporaryDirectory(prefix="clearhead-") as folder:
        path = Path(folder) / "opened.safetensors"  # a name of ours: none from a request is ever opened
        path.write_bytes(content)
        try:
            found: AnyExplanation = open_file(path)
        except InputError as problem:
            raise InputError(str(problem).replace(repr(str(path)), "the file")) from None
    if found.picture is not None and found.picture.shape[0] * found.picture.shape[1] > limits.pixels:
        raise InputError(f"the picture in the file is too large: {limits.pixels:,} pixels are the most that is taken")
    return [found]


def _from_json(content: bytes, limits: Limits) -> "list[AnyExplanation]":
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise InputError("the file looks like JSON, but is damaged") from None
    if isinstance(data, dict) and data.get("schema") == "clearhead/shown":  # what the page itself keeps
        try:
            return explanations_of(Shown(explanations=data["explanations"], pictures=data.get("pictures", [])), limits)
        except (KeyError, ValueError) as problem:
            raise problem if isinstance(problem, InputError) else InputError("the file is damaged") from None
    if isinstance(data, dict) and data.get("schema") == "clearhead/comparison":
        data = list(data["explanations"].values()) if isinstance(data.get("explanations"), dict) else []
    return [_explanation(one) for one in _bounded(data if isinstance(data, list) else [data], limits)]


def explanations_of(shown: Shown, limits: Limits) -> "list[AnyExplanation]":
    """The results that a page sends back, with the pictures that they are about."""
    made = [_explanation(one) for one in _bounded(shown.explanations, limits)]
    if shown.pictures and len(shown.pictures) != len(made):
        raise InputError(f"{len(shown.pictures)} pictures for {len(made)} explanations: give one for each (or null)")
    pictures: dict[str, Any] = {}
    left = limits.pixels  # for all of them together: a small body can hold many large pictures
    for sent in dict.fromkeys(one for one in shown.pictures if one is not None):
        pictures[sent] = pixels_of(sent, replace(limits, pixels=left))
        left -= pictures[sent].shape[0] * pictures[sent].shape[1]
    named = zip(made, shown.pictures or [None] * len(made), strict=True)
    return [one if sent is None else _with_picture(one, pictures[sent]) for one, sent in named]


def _bounded(given: Sequence[Any], limits: Limits) -> Sequence[Any]:
    if not 0 < len(given) <= limits.explanations:
        raise InputError(f"{len(given)} explanations were given: between 1 and {limits.explanations} can be shown")
    return given


def _explanation(data: Any) -> "AnyExplanation":
    try:
        made: AnyExplanation = from_dict(data)
    except (RecursionError, OverflowError, ValueError, KeyError, TypeError, AttributeError) as problem:
        if isinstance(problem, InputError):
            raise
        raise InputError("this is not an explanation that clearhead wrote") from None
    return made


def _with_picture(one: "AnyExplanation", picture: Any) -> "AnyExplanation":
    if isinstance(one, JointExplanation):
        parts = {stream: _on_grid(part, picture) for stream, part in one.parts.items()}
        return JointExplanation(parts)
    return _on_grid(one, picture)


def _on_grid(part: Any, picture: Any) -> Any:
    has_places = part.units.grid is not None or part.units.boxes is not None
    return replace(part, picture=picture) if has_places else part


def sent(explanations: "Sequence[AnyExplanation]") -> dict[str, Any]:
    """The form in which explanations go to a page, and back."""
    pictures = [None if one.picture is None else as_url(one.picture) for one in explanations]
    return {"explanations": [one.to_dict() for one in explanations], "pictures": pictures}


def drawn(explanations: "Sequence[AnyExplanation]") -> dict[str, Any]:
    """How the page draws them. Their form was checked; what stands in their free parts is anybody's."""
    return _unless_damaged(lambda: document(explanations))


def as_html(explanations: "Sequence[AnyExplanation]") -> bytes:
    from clearhead.render.html import page

    return _unless_damaged(lambda: page(explanations).encode("utf-8", "replace"))


def _unless_damaged(make: Callable[[], Made]) -> Made:
    try:
        return make()
    except InputError:
        raise
    except Exception as problem:  # whatever is wrong with it comes from outside
        raise InputError(f"this explanation is damaged: it cannot be drawn ({type(problem).__name__})") from None


def as_safetensors(explanations: "Sequence[AnyExplanation]") -> bytes:
    if len(explanations) != 1:
        raise InputError(f"a safetensors file holds one explanation, and there are {len(explanations)}: share a page")
    with tempfile.TemporaryDirectory(prefix="clearhead-") as folder:
        path = Path(folder) / "saved.safetensors"
        return _unless_damaged(lambda: explanations[0].save(path).read_bytes())
