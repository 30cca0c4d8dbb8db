"""The models that `tests/replicas/relevance.py` supports, explained in a padded batch and by the replica one by one."""

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
#: Relative to the maximum: division by values near zero amplifies rounding. ViT computes its softmax in float32.
TOLERANCES = {"bert/classify": 1e-9, "vit/image": 1e-7}


class InputDtypeSoftmax(torch.overrides.TorchFunctionMode):
    """Computes a softmax in the dtype of its input, also where float32 is requested.

    The last bits of a float32 softmax depend on the processor, and relevance propagation amplifies them by several
    orders of magnitude.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ == "softmax":
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)


def explain_batch(subject: str, method: str, options: dict[str, Any], **how: Any) -> list[clearhead.Explanation]:
    """Explain all inputs of a subject in one batch."""
    ex = replica_comparison.explainer(subject)
    with InputDtypeSoftmax():
        return ex.explain(models.inputs(subject), clearhead.Method(method, **options), target=1, **how)


@cache
def walk_batch(subject: str, variant: str) -> list[tuple[relevance.RelevanceRecord, Seen, np.ndarray]]:
    """Return for each input by itself: the relevance of the replica, a plain pass, and the read-out."""
    records = []
    for raw in models.inputs(subject):
        with InputDtypeSoftmax():
            seen, readout = replica_comparison.record_plain_pass(subject, raw, lambda z: z[1])
        records.append((walk_input(subject, raw, variant), seen, readout))
    return records


def walk_input(subject: str, raw: Any, variant: str) -> relevance.RelevanceRecord:
    model, inputs = replica_comparison.explainer(subject).adapter.model, replica_comparison.model_inputs(subject, raw)
    if subject.endswith("/image"):
        return relevance.vit(model, inputs["pixel_values"][0].numpy(), 1, variant)
    return relevance.bert(model, inputs["input_ids"][0].tolist(), 1, variant)
