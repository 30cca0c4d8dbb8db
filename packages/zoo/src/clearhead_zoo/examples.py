"""Ready inputs for the zoo's models whose true reasons are known, by name and number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead_zoo.tasks import counting, logic, recall, shapes, signs

__all__ = ["list_models_with_examples", "make_example_input"]


def list_models_with_examples() -> list[str]:
    """The models that have ready examples."""
    return sorted(_EXAMPLE_MAKERS)


def make_example_input(name: str, index: int = 0) -> dict[str, Any]:
    """The arguments of `Explainer.explain` for one held-out example of a model.

    >>> make_example_input("recall", 3)["text"].split()[-1]
    '→'
    >>> sorted(make_example_input("shapes-vqa", 3))
    ['image', 'regions', 'text']
    """
    if name not in _EXAMPLE_MAKERS:
        raise LookupError(
            f"{name} has no built-in examples: the models with examples are {', '.join(list_models_with_examples())}"
        )
    return _EXAMPLE_MAKERS[name](index)


def _make_region_example(number: int) -> dict[str, Any]:
    one = shapes.make_example(number)
    return {"text": one.text, "image": one.image, "regions": (one.features, one.region_boxes)}


def _make_question_example(number: int) -> dict[str, Any]:
    one = shapes.make_example(number)
    return {"text": one.text, "image": one.image}


def _make_scene_example(number: int) -> dict[str, Any]:
    return {"image": shapes.make_example(number, size=96).image}


def _make_logic_example(number: int) -> dict[str, Any]:
    return {"text": logic.make_examples(1, number)[0].text}


def _make_recall_example(number: int) -> dict[str, Any]:
    return {"text": recall.make_examples(1, number, pairs=(3, 8))[0].text}


def _make_counting_example(number: int) -> dict[str, Any]:
    return {"image": counting.make_examples(1 + number % counting.MAX_COUNT, number)[-1].image}


def _make_sign_example(number: int) -> dict[str, Any]:
    return {"image": signs.make_examples(1 + number % len(signs.LABELS), number)[-1].image}


_EXAMPLE_MAKERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "counting": _make_counting_example,
    "logic": _make_logic_example,
    "recall": _make_recall_example,
    "recall-4k": _make_recall_example,
    "shapes-detr": _make_scene_example,
    "shapes-vilt": _make_question_example,
    "shapes-vqa": _make_region_example,
    "signs": _make_sign_example,
}
