"""Compare a method with its reference implementation (its replica in `tests/replicas`) on the same inputs.

clearhead explains a padded batch, the replica one sample at a time. The read-out of each model and the number of
special tokens before its patches are written here by hand, so that clearhead is not compared with itself."""

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
IMAGE_CLASSIFIERS = tuple(f"{name}/image" for name in models.IMAGE if name != "swin")
#: Every subject whose attention attends over its units.
SUBJECTS = (*CLASSIFIERS, *MASKED, *IMAGE_CLASSIFIERS)
#: One subject for each kind of read-out: first token, mask, first two tokens, class token and mean, mean.
ONE_PER_READOUT = ("bert/classify", "modernbert/mask", "deit-distilled/image", "dinov2/image", "beit/image")

#: Half-open ranges, negative from the end, and the layers (of three) that they select.
LAYER_RANGES = [((0, 2), [0, 1]), ((-2, None), [1, 2]), ((1, 2), [1]), ((None, -1), [0, 1]), ((-1, None), [2])]
HEADS = [([0], [0]), ([1, 3], [1, 3]), ([-1], [3])]

#: Targets: the target and the scale given to clearhead, and the same value as a function of the logits.
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

#: Two inputs with fixed ids, for tests whose result must not depend on the random vocabulary.
SENTENCES = [
    {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    for ids in ([2, 17, 45, 99, 8, 61, 120, 33, 74, 3], [2, 88, 140, 21, 56, 3])
]

#: Models whose eager attention, which replicas use, computes its softmax in float32 in any dtype; for other models
#: replicas agree within the rounding of float64.
FLOAT32_SOFTMAX = ("vit", "deit", "deit-distilled", "beit", "swin", "modernbert")
NUM_PREFIX_TOKENS = {"vit": 1, "deit": 2, "deit-distilled": 2, "dinov2": 1, "dinov2-registers": 5, "beit": 1, "swin": 0}


def predicted(scores: Tensor) -> Tensor:
    return scores[int(scores.argmax())]


@cache
def explainer(subject: str) -> clearhead.Explainer:
    return models.explainer(subject)


def model_inputs(subject: str, raw: Any) -> dict[str, Tensor]:
    """Return the arguments of the model, prepared by its processor alone."""
    if isinstance(raw, Mapping):
        return dict(raw)
    processor = explainer(subject).adapter.processor
    if subject.endswith("/image"):
        return {"pixel_values": processor(images=raw, return_tensors="pt")["pixel_values"].double()}
    return dict(processor(raw, return_tensors="pt"))


def compute_readout(subject: str, inputs: Mapping[str, Tensor], units: int) -> np.ndarray:
    """Return the weight of each row in the read-out of the target."""
    name, task = subject.split("/")
    weights = np.zeros(units)
    if task == "mask":
        weights[find_masked_position(subject, inputs)] = 1
    elif name == "deit-distilled":  # the mean of two classifiers, one on [CLS] and one on [DIST]
        weights[:2] = 0.5
    elif name == "beit":  # the mean of the patches; [CLS] exists, but is not used
        weights[1:] = 1 / (units - 1)
    elif name.startswith("dinov2"):  # [CLS] and the mean of the patches; registers are not used
        weights[0] = 0.5
        weights[NUM_PREFIX_TOKENS[name] :] = 0.5 / (units - NUM_PREFIX_TOKENS[name])
    else:
        weights[:1] = 1
    return weights


def find_masked_position(subject: str, inputs: Mapping[str, Tensor]) -> int:
    mask = explainer(subject).adapter.processor.mask_token_id
    return inputs["input_ids"][0].tolist().index(mask)


def record_plain_pass(
    subject: str, raw: Any, of_classes: Callable[[Tensor], Tensor] = predicted
) -> tuple[Seen, np.ndarray]:
    """Return the record of a plain pass over one input, and the read-out."""
    inputs = model_inputs(subject, raw)
    index = (0, find_masked_position(subject, inputs)) if subject.endswith("/mask") else (0,)
    seen = watch(explainer(subject).adapter.model, inputs, lambda output: of_classes(output.logits[index]))
    return seen, compute_readout(subject, inputs, seen.units)


@cache
def record_plain_passes(
    subject: str, of_classes: Callable[[Tensor], Tensor] = predicted
) -> list[tuple[Seen, np.ndarray]]:
    return [record_plain_pass(subject, raw, of_classes) for raw in models.inputs(subject)]


def replica_of(method: str) -> ModuleType:
    return import_module(f"tests.replicas.{method.replace('-', '_')}")


def gap(actual: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest expected value."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert np.isfinite(actual).all() and np.isfinite(expected).all()
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-300))


def compute_largest_gap(
    method: str,
    subject: str,
    *,
    target: str | None = None,
    layers: tuple[tuple[int | None, int | None], Sequence[int]] | None = None,
    heads: tuple[Sequence[int], Sequence[int]] | None = None,
    all_rows: bool = False,
    batch_size: int | None = None,
    **options: Any,
) -> float:
    """Return the largest gap between the method on a padded batch and its replica on each input.

    Scores, contributions and, with `all_rows`, the matrix are compared.
    ModernBERT is padded only with `batch_size`: its float32 softmax rounds differently at another length.
    """
    chosen_target, scale, of_classes = TARGETS[target] if target else (None, "logit", predicted)
    declaration = clearhead.Method(method).declaration
    results = explainer(subject).explain(
        models.inputs(subject),
        clearhead.Method(method, **options),
        chosen_target,
        scale=scale,
        layers=layers and layers[0],
        heads=heads and heads[0],
        rows="all" if all_rows else None,
        per="head" if declaration.has_head_contributions and not all_rows else None,
        batch_size=batch_size or (1 if subject.startswith("modernbert") else 3),
    )
    replica = replica_of(method)
    selection = {"layers": layers and layers[1], "heads": heads and heads[1]}
    gaps = []
    for result, (seen, readout_weights) in zip(results, record_plain_passes(subject, of_classes), strict=True):
        replica_options: dict[str, Any] = {
            **selection,
            **options,
            "readout": readout_weights,
            **_get_patch_layout(subject),
        }

        def call_replica(name: str, seen: Seen = seen, replica_options: dict[str, Any] = replica_options) -> np.ndarray:
            function = getattr(replica, name)
            arguments = {
                key: replica_options[key] for key in inspect.signature(function).parameters if key in replica_options
            }
            return function(seen, **arguments)

        gaps.append(gap(result.scores, call_replica("scores")))
        if all_rows:
            gaps.append(gap(result.matrix, call_replica("matrix")))
        elif hasattr(replica, "depths"):
            gaps.append(gap(result.per_layer, call_replica("depths")))
        elif hasattr(replica, "contributions"):
            gaps.append(gap(result.per_layer, call_replica("contributions").sum(1)))
            if declaration.has_head_contributions:
                gaps.append(gap(result.per_head, call_replica("contributions")))
    return max(gaps)


def assert_equals_reference(method: str, subject: str, **settings: Any) -> None:
    largest_gap = compute_largest_gap(method, subject, **settings)
    tolerance = 1e-5 if subject.split("/")[0] in FLOAT32_SOFTMAX else 1e-10
    assert largest_gap <= tolerance, f"{method} differs from its replica by {largest_gap:.1e}"


def _get_patch_layout(subject: str) -> dict[str, Any]:
    """Return the patch size and the number of tokens before the patches of an image."""
    name = subject.split("/")[0]
    return {"patch": 2 if name == "swin" else 4, "before": NUM_PREFIX_TOKENS.get(name, 0)}


def load_with_scaled_classifier(
    subject: str, factor: float, row: int | None = None, dtype: torch.dtype = torch.float64
) -> Any:
    """Load the subject with its classifier, or one row of it, multiplied by a factor; this scales the logits."""
    ex = models.explainer(subject, dtype)
    layer = ex.adapter.model.classifier
    rows = slice(None) if row is None else row
    with torch.no_grad():
        layer.weight[rows] *= factor
        layer.bias[rows] *= factor
    return ex
