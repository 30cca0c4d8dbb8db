"""Ready inputs for the zoo's models whose true reasons are known, by name and number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead_zoo.tasks import logic, recall, shapes

__all__ = ["example", "names"]


def names() -> list[str]:
    """The models that have ready examples."""
    return sorted(_EXAMPLES)


def example(name: str, number: int = 0) -> dict[str, Any]:
    """The arguments of `Explainer.explain` for one held-out example of a model.

    >>> example("recall", 3)["text"].split()[-1]
    '→'
    >>> sorted(example("shapes-vqa", 3))
    ['image', 'regions', 'text']
    """
    if name not in _EXAMPLES:
        raise LookupError(f"{name} has no ready examples: those that have are {', '.join(names())}")
    return _EXAMPLES[name](number)


def _regions(number: int) -> dict[str, Any]:
    one = shapes.example(number)
    return {"text": one.text, "image": one.image, "regions": (one.features, one.region_boxes)}


def _question(number: int) -> dict[str, Any]:
    one = shapes.example(number)
    return {"text": one.text, "image": one.image}


def _scene(number: int) -> dict[str, Any]:
    return {"image": shapes.example(number, size=96).image}


def _logic(number: int) -> dict[str, Any]:
    return {"text": logic.examples(1, number)[0].text}


def _recall(number: int) -> dict[str, Any]:
    return {"text": recall.examples(1, number, pairs=(3, 8))[0].text}


_EXAMPLES: dict[str, Callable[[int], dict[str, Any]]] = {
    "logic": _logic,
    "recall": _recall,
    "recall-4k": _recall,
    "shapes-detr": _scene,
    "shapes-vilt": _question,
    "shapes-vqa": _regions,
}
