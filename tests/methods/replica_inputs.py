"""The inputs of a subject, each with what its slow twin needs: a walker, its read-out, its random seed."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from clearhead.adapters import InputOptions
from tests import models
from tests.methods import replica_comparison
from tests.replicas.path_passes import Walker, fixed
from tests.replicas.plain_pass import Seen


@dataclass
class Case:
    walker: Walker
    seen: Seen
    readout: np.ndarray
    seed: int
    patch: int
    before: int

    @property
    def cut(self) -> dict[str, int]:
        return {"patch": self.patch, "before": self.before}


@cache
def cases(subject: str) -> list[Case]:
    return [case(subject, raw) for raw in models.inputs(subject)]


def case(subject: str, raw: Any) -> Case:
    ex, inputs = replica_comparison.explainer(subject), replica_comparison.model_inputs(subject, raw)
    seen, readout = replica_comparison.slow(subject, raw)
    place = (0, replica_comparison.masked_position(subject, inputs)) if subject.endswith("/mask") else (0,)
    chosen = fixed(ex.adapter.model(**_as(ex, inputs)).logits[place])
    walker = Walker(ex.adapter.model, inputs, lambda output: chosen(output.logits[place]))
    (sample,) = ex.adapter.make_samples(raw, InputOptions())
    name = subject.split("/")[0]
    return Case(
        walker, seen, readout, sample.derive_seed(0), 2 if name == "swin" else 4, replica_comparison.BEFORE.get(name, 0)
    )


def _as(ex: Any, inputs: Any) -> dict[str, Any]:
    return {name: part.to(ex.adapter.dtype) if part.is_floating_point() else part for name, part in inputs.items()}


def mean_word(subject: str, one: Case) -> np.ndarray:
    """The default baseline of these tiny models, whose padding is zero: the mean word, special tokens as they are."""
    table = replica_comparison.explainer(subject).adapter.model.get_input_embeddings().weight.detach().numpy()
    baseline = np.broadcast_to(table.mean(0), one.walker.x.shape).copy()
    baseline[:, [0, -1]] = one.walker.x[:, [0, -1]]
    return baseline


def allowed(subject: str) -> float:
    return 1e-6 if subject.split("/")[0] in replica_comparison.FLOAT32_SOFTMAX else 1e-10
