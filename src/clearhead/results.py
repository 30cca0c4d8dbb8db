"""From what a pass left behind to an `Explanation`: what was scored, what was predicted, and how we know."""

import platform
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import clearhead
from clearhead.explanation import Explanation
from clearhead.methods.base import Fold, Method, Scores
from clearhead.plan import Plan
from clearhead.recording.self_test import SelfTest
from clearhead.subjects.base import How, Subject
from clearhead.targets import probabilities


@dataclass
class Request:
    """What one call of `explain` asks of every batch."""

    methods: list[Method]
    how: How
    per: str | None
    #: Whether the rows that are read were seen to reach the target, by the target's function (None for classes).
    checked: dict[int, bool] = field(default_factory=dict)

    @property
    def reading(self) -> dict[str, Any]:
        given = {"max_length": self.how.max_length, "truncation_side": self.how.truncation_side}
        return {name: value for name, value in given.items() if value is not None}


def explanation_of(
    plan: Plan, i: int, method: Method, fold: Fold, part: Scores, request: Request, tested: SelfTest
) -> Explanation:
    """The i-th sample of a batch as one method explains it."""
    sample, target = plan.samples[i], plan.targets[i]
    length = len(sample.units)
    logits = plan.scores[i] if plan.scores is not None else None
    matrix, row = None, part.scores[i, 0, :length]
    if method.option("rows") == "all":
        matrix = part.scores[i, :length, :length]
        row = (plan.readout[i, :, :length].to(matrix.dtype) @ matrix)[0]

    def cut(values: Tensor | None) -> Any:
        return None if values is None else _array(values[i][..., :length])

    return Explanation(
        units=sample.units,
        scores=_array(row),
        method=str(method),
        target=target.description(logits, plan.subject, float(plan.values[i]), masks=len(sample.masks)),
        prediction=_prediction(logits, plan.subject),
        certificate=_certificate(plan, i, request, tested),
        provenance=_provenance(plan, i, method, fold, request),
        base_value=None if part.base_value is None else float(part.base_value[i]),
        matrix=None if matrix is None else _array(matrix),
        per_layer=cut(part.per_layer),
        per_head=cut(part.per_head) if request.per == "head" else None,
        picture=sample.picture,
    )


def _certificate(plan: Plan, i: int, request: Request, tested: SelfTest) -> dict[str, Any]:
    """What was checked about a result."""
    return {
        "capture_error": tested.capture_error,
        "rebuild_error": tested.rebuild_error,
        "recorder": tested.path,
        "readout": plan.subject.readout,
        "readout_checked": request.checked.get(id(plan.targets[i].custom), False),
        "dtype": str(plan.subject.dtype).removeprefix("torch."),
        "device": str(plan.subject.device),
        "seed": plan.seed,
        "versions": _versions(),
        "truncated_tokens": plan.samples[i].dropped,
    }


def _provenance(plan: Plan, i: int, method: Method, fold: Fold, request: Request) -> dict[str, Any]:
    """Where a result comes from: enough to get it again."""
    declaration, layers, readout = method.declaration, fold.frame.layers, plan.subject.readout
    return {
        "model": plan.subject.name,
        "model_class": type(plan.subject.model).__name__,
        "method": method.name,
        "options": {key: list(value) if isinstance(value, tuple) else value for key, value in method.options},
        "layers": [layers.start, layers.stop] if "layers" in declaration.has else None,
        "heads": fold.heads,
        "reading": request.reading,
        "loading": {} if readout == plan.subject.default_readout() else {"readout": readout},
        "citation": declaration.citation,
        "signed": declaration.signed,
        "linear_in_target": fold.linear_in_target,
        "input": plan.fingerprints[i],
        "parts": declaration.parts,
    }


def _prediction(logits: Float[Tensor, "label"] | None, subject: Subject) -> dict[str, Any]:
    """The five most likely labels."""
    if logits is None:
        return {}
    if subject.regression:
        measures = [
            {"label": subject.label_name(int(i)), "index": int(i), "logit": float(logits[i])}
            for i in logits.topk(min(5, len(logits))).indices
        ]
        return {**{key: measures[0][key] for key in ("label", "index")}, "value": measures[0]["logit"], "top": measures}
    p = probabilities(logits.double(), subject.multi_label)
    top = [
        {
            "label": subject.label_name(int(i)),
            "index": int(i),
            "probability": float(p[i]),
            "logit": float(logits[i]),
        }
        for i in p.topk(min(5, len(p))).indices
    ]
    first = top[0]
    return {"label": first["label"], "index": first["index"], "probability": first["probability"], "top": top}


def _versions() -> dict[str, str]:
    import transformers

    return {
        "clearhead": clearhead.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _array(tensor: Tensor) -> np.ndarray:
    """A copy: a view would keep the whole batch alive."""
    return tensor.cpu().numpy().copy()
