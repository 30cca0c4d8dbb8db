"""Small trained models for clearhead: folders in the transformers layout, and what was measured about them.

>>> "sentiment" in names()
True
>>> path("sentiment").name
'sentiment'
>>> card("sentiment")["task"]
'text-classification'
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

__all__ = ["card", "names", "path"]

MODELS_DIR = Path(__file__).parent / "models"


def names() -> list[str]:
    """The models that are here, by name."""
    return sorted(folder.name for folder in MODELS_DIR.iterdir() if (folder / "card.json").is_file())


def path(name: str) -> Path:
    """The folder of a model, for `AutoModel….from_pretrained` or `clearhead.load`.

    >>> path("sentimant")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    LookupError: the zoo has no model 'sentimant': did you mean 'sentiment'? Available models: ...
    """
    known = names()
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {nearest[0]!r}?" if nearest else "."
        raise LookupError(f"the zoo has no model {name!r}{hint} Available models: {', '.join(known)}")
    return MODELS_DIR / name


def card(name: str) -> dict[str, Any]:
    """What is known about a model: task, data, licence, size, measured figures, checksum of its weights."""
    facts: dict[str, Any] = json.loads((path(name) / "card.json").read_text(encoding="utf-8"))
    return facts
