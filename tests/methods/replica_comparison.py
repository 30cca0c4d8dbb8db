"""A method and its slow twin on the same inputs: clearhead on a padded batch, the replica on one sample at a time.

What the read-out of a model is, and how many special tokens stand before its patches, is said here by hand, so that
clearhead is not asked to mark its own work."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import clearhead
from tests import models
from tests.replicas.plain_pass import Seen, watch

CLASSIFIERS = tuple(f"{name}/classify" for name in models.TEXT)
MASKED = tuple(f"{name}/mask" for name in models.TEXT)
PICTURES = tuple(f"{name}/image" for name in models.IMAGE if name != "swin")
#: Every subject whose attention runs over its units.
SUBJECTS = (*CLASSIFIERS, *MASKED, *PICTURES)
#: One subject of each kind of read-out, for what need not be tried on all: first, mask, first two, class + mean, mean.
FEW = ("bert/classify", "modernbert/mask", "deit-distilled/image", "dinov2/image", "beit/image")

#: Half-open ranges, negative from the end, and the layers (of three) that they mean.
RANGES = [((0, 2), [0, 1]), ((-2, None), [1, 2]), ((1, 2), [1]), ((None, -1), [0, 1]), ((-1, None), [2])]
HEADS = [([0], [0]), ([1, 3], [1, 3]), ([-1], [3])]

#: Targets: what clearhead is told, on which scale, and the same as a plain function of the scores of all classes.
TARGETS: dict[str, tuple[Any, str, Callable[[Tensor], Tensor]]] = {
    "label": (1, "logit", lambda z: z[1]),
    "contrast": (clearhead.Contrast(2, 0), "logit", lambda z: z[2] - z[0]),
    "probability": (0, "probability", lambda z: z.exp()[0] / z.exp().sum()),
    "contrast of probabilities": (
        clearhead.Contrast(0, 1),
        "probability",
        lambda z: (z.exp()[0] - z.exp()[1]) / z.exp().sum(),
    ),
    "log-odds": (2, "log-odds", lambda z: (z.softmax(-1)[2] / (1 - z.softmax(-1)[2])).log()),
}

#: Two inputs in fixed ids, for what a chance vocabulary must not decide.
SENTENCES = [
    {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    for ids in ([2, 17, 45, 99, 8, 61, 120, 33, 74, 3], [2, 88, 140, 21, 56, 3])
]

#: Models whose eager attention, as replicas have it, computes a softmax in float32, whatever their dtype; with others
#: replicas agree to float64's rounding.
FLOAT32_SOFTMAX = ("vit", "deit", "deit-distilled", "beit", "swin", "modernbert")
BEFORE = {"vit": 1, "deit": 2, "deit-distilled": 2, "dinov2": 1, "dinov2-registers": 5, "beit": 1, "swin": 0}


def predicted(scores: Tensor) -> Tensor:
    return scores[int(scores.argmax())]


@cache
def explainer(subject: str) -> clearhead.Explainer:
    return models.explainer(subject)


def model_inputs(subject: str, raw: Any) -> dict[str, Tensor]:
    """What the model is called with, made by its processor alone."""
    if isinstance(raw, Mapping):
        return dict(raw)
    processor = explainer(subject).adapter.processor
    if subject.endswith("/image"):
        return {"pixel_values": processor(images=raw, return_tensors="pt")["pixel_values"].double()}
    return dict(processor(raw, return_tensors="pt"))


def readout(subject: str, inputs: Mapping[str, Tensor], units: int) -> np.ndarray:
    """How much each row counts for the target."""
    name, task = subject.split("/")
    weights = np.zeros(units)
    if task == "mask":
        weights[masked_position(subject, inputs)] = 1
    elif name == "deit-distilled":  # the mean of two classifiers, one on [CLS] and one on [DIST]
        weights[:2] = 0.5
    elif name == "beit":  # the mean of the patches; [CLS] is there, but not used
        weights[1:] = 1 / (units - 1)
    elif name.startswith("dinov2"):  # [CLS] beside the mean of the patches; registers are not used
        weights[0] = 0.5
        weights[BEFORE[name] :] = 0.5 / (units - BEFORE[name])
    else:
        weights[:1] = 1
    return weights


def masked_position(subject: str, inputs: Mapping[str, Tensor]) -> int:
    mask = explainer(subject).adapter.processor.mask_token_id
    return inputs["input_ids"][0].tolist().index(mask)


def slow(subject: str, raw: Any, of_classes: Callable[[Tensor], Tensor] = predicted) -> tuple[Seen, np.ndarray]:
    """What a plain pass over one input shows, and the read-out."""
    inputs = model_inputs(subject, raw)
    place = (0, masked_position(subject, inputs)) if subject.endswith("/mask") else (0,)
    seen = watch(explainer(subject).adapter.model, inputs, lambda output: of_classes(output.logits[place]))
    return seen, readout(subject, inputs, seen.units)


@cache
def slow_batch(subject: str, of_classes: Callable[[Tensor], Tensor] = predicted) -> list[tuple[Seen, np.ndarray]]:
    return [slow(subject, raw, of_classes) for raw in models.inputs(subject)]


def replica_of(method: str) -> ModuleType:
    return import_module(f"tests.replicas.{method.replace('-', '_')}")


def gap(fast: Any, slow: Any) -> float:
    """The largest deviation, relative to the largest value."""
    fast, slow = np.asarray(fast), np.asarray(slow)
    assert fast.shape == slow.shape, (fast.shape, slow.shape)
    assert np.isfinite(fast).all() and np.isfinite(slow).all()
    return float(np.abs(fast - slow).max() / max(np.abs(slow).max(), 1e-300))


def worst_gap(
    method: str,
    subject: str,
    *,
    target: str | None = None,
    layers: tuple[tuple[int | None, int | None], Sequence[int]] | None = None,
    heads: tuple[Sequence[int], Sequence[int]] | None = None,
    every_row: bool = False,
    batch_size: int | None = None,
    **options: Any,
) -> float:
    """How far the method on a padded batch of three lies from its replica on each alone: scores, shares and matrix.

    ModernBERT is not padded unless asked to be: its softmax rounds to float32, and so differently at another length."""
    wanted, scale, of_classes = TARGETS[target] if target else (None, "logit", predicted)
    declaration = clearhead.Method(method).declaration
    results = explainer(subject).explain(
        models.inputs(subject),
        clearhead.Method(method, **options),
        wanted,
        scale=scale,
        layers=layers and layers[0],
        heads=heads and heads[0],
        rows="all" if every_row else None,
        per="head" if declaration.has_head_contributions and not every_row else None,
        batch_size=batch_size or (1 if subject.startswith("modernbert") else 3),
    )
    replica = replica_of(method)
    where = {"layers": layers and layers[1], "heads": heads and heads[1]}
    gaps = []
    for result, (seen, read) in zip(results, slow_batch(subject, of_classes), strict=True):
        known: dict[str, Any] = {**where, **options, "readout": read, **_cut_of(subject)}

        def twin(name: str, seen: Seen = seen, known: dict[str, Any] = known) -> np.ndarray:
            function = getattr(replica, name)
            taken = {key: known[key] for key in inspect.signature(function).parameters if key in known}
            return function(seen, **taken)

        gaps.append(gap(result.scores, twin("scores")))
        if every_row:
            gaps.append(gap(result.matrix, twin("matrix")))
        elif hasattr(replica, "depths"):
            gaps.append(gap(result.per_layer, twin("depths")))
        elif hasattr(replica, "shares"):
            gaps.append(gap(result.per_layer, twin("shares").sum(1)))
            if declaration.has_head_contributions:
                gaps.append(gap(result.per_head, twin("shares")))
    return max(gaps)


def assert_twins(method: str, subject: str, **how: Any) -> None:
    found = worst_gap(method, subject, **how)
    allowed = 1e-5 if subject.split("/")[0] in FLOAT32_SOFTMAX else 1e-10
    assert found <= allowed, f"{method} is {found:.1e} away from its replica"


def _cut_of(subject: str) -> dict[str, Any]:
    """How a picture is cut into patches."""
    name = subject.split("/")[0]
    return {"patch": 2 if name == "swin" else 4, "before": BEFORE.get(name, 0)}


def with_classifier_times(
    subject: str, factor: float, row: int | None = None, dtype: torch.dtype = torch.float64
) -> Any:
    """The subject anew, its classifier (or one row of it) multiplied: so are the logits (or one of them)."""
    made = models.explainer(subject, dtype)
    layer = made.adapter.model.classifier
    rows = slice(None) if row is None else row
    with torch.no_grad():
        layer.weight[rows] *= factor
        layer.bias[rows] *= factor
    return made
