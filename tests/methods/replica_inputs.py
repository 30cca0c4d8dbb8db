"""The inputs of a subject, each with what its replica needs: an input evaluator, the read-out, the random seed."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from clearhead.adapters import InputOptions
from tests import models
from tests.methods import replica_comparison
from tests.replicas.path_passes import InputEvaluator, select_predicted_class
from tests.replicas.plain_pass import Seen


@dataclass
class Case:
    evaluator: InputEvaluator
    seen: Seen
    readout: np.ndarray
    seed: int
    patch: int
    before: int

    @property
    def patch_layout(self) -> dict[str, int]:
        return {"patch": self.patch, "before": self.before}


@cache
def make_cases(subject: str) -> list[Case]:
    return [make_case(subject, raw) for raw in models.inputs(subject)]


def make_case(subject: str, raw: Any) -> Case:
    ex, inputs = replica_comparison.explainer(subject), replica_comparison.model_inputs(subject, raw)
    seen, readout = replica_comparison.record_plain_pass(subject, raw)
    index = (0, replica_comparison.find_masked_position(subject, inputs)) if subject.endswith("/mask") else (0,)
    select_class = select_predicted_class(ex.adapter.model(**_to_model_dtype(ex, inputs)).logits[index])
    evaluator = InputEvaluator(ex.adapter.model, inputs, lambda output: select_class(output.logits[index]))
    (sample,) = ex.adapter.make_samples(raw, InputOptions())
    name = subject.split("/")[0]
    return Case(
        evaluator,
        seen,
        readout,
        sample.derive_seed(0),
        2 if name == "swin" else 4,
        replica_comparison.NUM_PREFIX_TOKENS.get(name, 0),
    )


def _to_model_dtype(ex: Any, inputs: Any) -> dict[str, Any]:
    return {
        name: tensor.to(ex.adapter.dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()
    }


def compute_mean_baseline(subject: str, case: Case) -> np.ndarray:
    """Return the default baseline of models whose padding is zero: the mean embedding; special tokens are kept."""
    table = replica_comparison.explainer(subject).adapter.model.get_input_embeddings().weight.detach().numpy()
    baseline = np.broadcast_to(table.mean(0), case.evaluator.x.shape).copy()
    baseline[:, [0, -1]] = case.evaluator.x[:, [0, -1]]
    return baseline


def get_tolerance(subject: str) -> float:
    return 1e-6 if subject.split("/")[0] in replica_comparison.FLOAT32_SOFTMAX else 1e-10
