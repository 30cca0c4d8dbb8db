"""The value of a target with only some units present, computed one coalition at a time and without clearhead's code.

Text: absent tokens are replaced by the mask token; special tokens and the masked token to predict stay. Images: absent
patches are replaced by the mean of the image."""

import os
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch

from tests.methods import replica_comparison

#: Maps the indices of the present units to the value of the target.
Value = Callable[[Collection[int]], float]


def import_shap() -> Any:
    """Import the shap package without numba, which would compile for ten seconds what runs once."""
    os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
    return pytest.importorskip("shap", reason="the shap package is not installed")


def game(subject: str, raw: Any, label: int | None = None, ex: Any = None) -> tuple[list[int], int, Value]:
    """Return the units that can be absent, the number of units, and the value; the class is that of the full input."""
    ex = ex or replica_comparison.explainer(subject)
    model, inputs = ex.adapter.model, replica_comparison.model_inputs(subject, raw)
    if subject.endswith("/image"):
        return _image_game(subject, model, inputs["pixel_values"], label)
    tokenizer = ex.adapter.processor
    ids, mask = inputs["input_ids"][0], tokenizer.mask_token_id
    special = {tokenizer.cls_token_id, tokenizer.sep_token_id, mask}
    players = [i for i, token_id in enumerate(ids.tolist()) if token_id not in special]
    position = (0, replica_comparison.find_masked_position(subject, inputs)) if subject.endswith("/mask") else (0,)

    def scores(present: Collection[int]) -> torch.Tensor:
        row = ids.clone()
        for i in players:
            if i not in present:
                row[i] = mask
        with torch.no_grad():
            return model(**{**inputs, "input_ids": row[None]}).logits[position]

    target_label = int(scores(players).argmax()) if label is None else label
    return players, len(ids), lambda present: float(scores(present)[target_label])


def _image_game(subject: str, model: Any, pixels: torch.Tensor, label: int | None) -> tuple[list[int], int, Value]:
    name = subject.split("/")[0]
    num_prefix_tokens, size = replica_comparison.NUM_PREFIX_TOKENS[name], 2 if name == "swin" else 4
    columns = pixels.shape[3] // size
    units = num_prefix_tokens + columns * (pixels.shape[2] // size)
    players = list(range(num_prefix_tokens, units))
    mean = pixels.mean((2, 3), keepdim=True)

    def scores(present: Collection[int]) -> torch.Tensor:
        masked_pixels = pixels.clone()
        for i in players:
            if i not in present:
                y, x = ((i - num_prefix_tokens) // columns) * size, ((i - num_prefix_tokens) % columns) * size
                masked_pixels[:, :, y : y + size, x : x + size] = mean
        with torch.no_grad():
            return model(pixel_values=masked_pixels).logits[0]

    target_label = int(scores(players).argmax()) if label is None else label
    return players, units, lambda present: float(scores(present)[target_label])


def on_units(values: Any, players: list[int], units: int) -> np.ndarray:
    """Return the values of the players as scores of all units; units that always stay have a score of zero."""
    scores = np.zeros(units)
    scores[players] = values
    return scores
