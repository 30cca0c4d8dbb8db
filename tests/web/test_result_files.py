"""Explanations from outside: whatever stands in them is drawn, or refused with a reason."""

import copy
import json
import random
from typing import Any

import pytest

import clearhead
from clearhead.errors import InputError
from clearhead.web.limits import Limits
from clearhead.web.result_files import (
    build_explanations_view_model,
    decode_explanations,
    encode_explanations,
    encode_html,
)
from clearhead.web.schemas import RenderRequest

JUNK: list[Any] = [None, 5, -1, 1e308, "", "<script>", "\u202e", [], {}, [[]], [None], {"a": []}, True, "x" * 5000]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value, at every depth."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inside for place in places(part, (*path, key)))]


def spoilt(value: Any, draw: random.Random) -> Any:
    made = copy.deepcopy(value)
    path = draw.choice(places(made)[1:])
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = draw.choice(JUNK)
    return made


@pytest.mark.parametrize("seed", range(3))
def test_a_spoilt_explanation_is_drawn_or_refused(explainers: dict[str, clearhead.Explainer], seed: int) -> None:
    whole = explainers["zoo:sentiment"].explain("so boring", method="generic").to_dict()
    draw, drawings, refusals = random.Random(seed), 0, 0
    for _ in range(60):
        try:
            found = decode_explanations(RenderRequest(explanations=[spoilt(whole, draw)]), Limits())
            json.dumps([build_explanations_view_model(found), encode_explanations(found)], allow_nan=False)
            encode_html(found)
            drawings += 1
        except InputError:
            refusals += 1
    assert drawings > 5 and refusals > 5


def test_pictures_go_with_their_own_explanations(explainers: dict[str, clearhead.Explainer]) -> None:
    whole = explainers["zoo:sentiment"].explain("so boring").to_dict()
    shown = RenderRequest(explanations=[whole], pictures=[None, None])
    with pytest.raises(InputError, match="2 pictures for 1 explanations"):
        decode_explanations(shown, Limits())
