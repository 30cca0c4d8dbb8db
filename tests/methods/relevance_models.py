"""The models that `tests/replicas/relevance.py` can walk, their inputs in one padded batch, and each walked alone."""

from functools import cache
from typing import Any

import numpy as np
import torch

import clearhead
from tests import models
from tests.methods import replica_comparison
from tests.replicas import relevance
from tests.replicas.plain_pass import Seen

SUBJECTS = ("bert/classify", "vit/image")
VARIANTS = ("ours", "orig")
#: Of the maximum: rounding grows where relevance is divided by what is next to nothing. ViT's softmax is float32's.
WITHIN = {"bert/classify": 1e-9, "vit/image": 1e-7}


class Pure(torch.overrides.TorchFunctionMode):
    """A softmax that is asked to run in float32 runs in the format of its input: its last bits hang on the processor,
    and relevance propagation makes them larger by several orders of magnitude."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ == "softmax":
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)


def explained(subject: str, method: str, options: dict[str, Any], **how: Any) -> list[clearhead.Explanation]:
    """All inputs of a subject in one batch."""
    ex = replica_comparison.explainer(subject)
    with Pure():
        return ex.explain(models.inputs(subject), clearhead.Method(method, **options), target=1, **how)


@cache
def walked(subject: str, variant: str) -> list[tuple[relevance.Found, Seen, np.ndarray]]:
    """Each input by itself: the walk, an ordinary pass, and the read-out."""
    found = []
    for raw in models.inputs(subject):
        with Pure():
            seen, readout = replica_comparison.slow(subject, raw, lambda z: z[1])
        found.append((walk(subject, raw, variant), seen, readout))
    return found


def walk(subject: str, raw: Any, variant: str) -> relevance.Found:
    model, inputs = replica_comparison.explainer(subject).adapter.model, replica_comparison.model_inputs(subject, raw)
    if subject.endswith("/image"):
        return relevance.vit(model, inputs["pixel_values"][0].numpy(), 1, variant)
    return relevance.bert(model, inputs["input_ids"][0].tolist(), 1, variant)
