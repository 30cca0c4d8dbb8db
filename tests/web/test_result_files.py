"""Uploaded explanations: any content is rendered, or rejected with a reason."""

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


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON document, at every depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner_path for key, item in items for inner_path in list_paths(item, (*path, key)))]


def corrupt(value: Any, rng: random.Random) -> Any:
    corrupted = copy.deepcopy(value)
    path = rng.choice(list_paths(corrupted)[1:])
    parent = corrupted
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = rng.choice(JUNK)
    return corrupted


@pytest.mark.parametrize("seed", range(3))
def test_corrupted_explanation_is_rendered_or_rejected(explainers: dict[str, clearhead.Explainer], seed: int) -> None:
    document = explainers["zoo:sentiment"].explain("so boring", method="generic").to_dict()
    rng, num_rendered, num_rejected = random.Random(seed), 0, 0
    for _ in range(60):
        try:
            explanations = decode_explanations(RenderRequest(explanations=[corrupt(document, rng)]), Limits())
            json.dumps(
                [build_explanations_view_model(explanations), encode_explanations(explanations)], allow_nan=False
            )
            encode_html(explanations)
            num_rendered += 1
        except InputError:
            num_rejected += 1
    assert num_rendered > 5 and num_rejected > 5


def test_number_of_images_must_equal_number_of_explanations(explainers: dict[str, clearhead.Explainer]) -> None:
    document = explainers["zoo:sentiment"].explain("so boring").to_dict()
    request = RenderRequest(explanations=[document], images=[None, None])
    with pytest.raises(InputError, match="2 images for 1 explanations"):
        decode_explanations(request, Limits())
