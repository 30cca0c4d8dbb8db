"""What a target is worth with some units alone, computed one coalition at a time and without clearhead's code.

Texts: absent tokens are the mask token; special tokens and the mask that is to be filled stay. Pictures: absent patches
are the picture's mean."""

import os
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch

from tests.methods import replica_comparison

#: Who is there (numbers of units) → the target's value.
Value = Callable[[Collection[int]], float]


def shap_package() -> Any:
    """The shap package; numba would compile for ten seconds what is run once."""
    os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
    return pytest.importorskip("shap", reason="the shap package is not installed")


def game(subject: str, raw: Any, label: int | None = None, ex: Any = None) -> tuple[list[int], int, Value]:
    """The units that can be absent, how many units there are, and the value; the class is that of the whole input."""
    ex = ex or replica_comparison.explainer(subject)
    model, inputs = ex.adapter.model, replica_comparison.model_inputs(subject, raw)
    if subject.endswith("/image"):
        return _picture_game(subject, model, inputs["pixel_values"], label)
    tokenizer = ex.adapter.processor
    ids, mask = inputs["input_ids"][0], tokenizer.mask_token_id
    special = {tokenizer.cls_token_id, tokenizer.sep_token_id, mask}
    players = [i for i, one in enumerate(ids.tolist()) if one not in special]
    place = (0, replica_comparison.masked_position(subject, inputs)) if subject.endswith("/mask") else (0,)

    def scores(there: Collection[int]) -> torch.Tensor:
        row = ids.clone()
        for i in players:
            if i not in there:
                row[i] = mask
        with torch.no_grad():
            return model(**{**inputs, "input_ids": row[None]}).logits[place]

    wanted = int(scores(players).argmax()) if label is None else label
    return players, len(ids), lambda there: float(scores(there)[wanted])


def _picture_game(subject: str, model: Any, pixels: torch.Tensor, label: int | None) -> tuple[list[int], int, Value]:
    name = subject.split("/")[0]
    before, size = replica_comparison.BEFORE[name], 2 if name == "swin" else 4
    columns = pixels.shape[3] // size
    units = before + columns * (pixels.shape[2] // size)
    players = list(range(before, units))
    mean = pixels.mean((2, 3), keepdim=True)

    def scores(there: Collection[int]) -> torch.Tensor:
        seen = pixels.clone()
        for i in players:
            if i not in there:
                y, x = ((i - before) // columns) * size, ((i - before) % columns) * size
                seen[:, :, y : y + size, x : x + size] = mean
        with torch.no_grad():
            return model(pixel_values=seen).logits[0]

    wanted = int(scores(players).argmax()) if label is None else label
    return players, units, lambda there: float(scores(there)[wanted])


def on_units(values: Any, players: list[int], units: int) -> np.ndarray:
    """The values of players as scores of all units; those that always stay have none."""
    scores = np.zeros(units)
    scores[players] = values
    return scores
