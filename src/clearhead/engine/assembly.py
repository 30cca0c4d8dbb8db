"""From what a pass left behind to an `Explanation`: what was scored, what was predicted, and how we know."""

import platform
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import clearhead
from clearhead.adapters.base import How, Sample, Subject
from clearhead.capture.checks.self_test import SelfTest
from clearhead.engine.target_batch import Plan, Reading
from clearhead.errors import ClearheadWarning
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation, JointExplanation
from clearhead.methods.base import Method, Scores
from clearhead.profiles import Profile
from clearhead.targets import probabilities
from clearhead.units import PROBE, Units


@dataclass
class Request:
    """What one call of `explain` asks of every batch."""

    methods: list[Method]
    how: How
    per: str | None
    seed: int = 0
    profile: Profile | None = None
    #: The target that was given and that the profile's author does not heed.
    ignored: Any = None
    kernel: str | None = None
    checkpoint: bool | None = None
    #: Whether the rows that are read were seen to reach the target, by the target's function (None for classes).
    checked: dict[int, bool] = field(default_factory=dict)

    @property
    def reading(self) -> dict[str, Any]:
        how = self.how
        given = {
            "max_length": how.max_length,
            "truncation_side": how.truncation_side,
            "answer": how.answer if isinstance(how.answer, str) else None,
            "max_new_tokens": None if how.max_new_tokens == How.max_new_tokens else how.max_new_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass
class Pass:
    """What one recorded pass left behind: for each method, the scores along each axis, where they were made.

    All of it is brought to the CPU at once: looking at a GPU for each sample by itself costs more than the looking.
    """

    plan: Plan
    readings: list[Reading]
    made: list[dict[str, Scores]]
    #: Whether every head's share is kept, too.
    heads: bool = False

    def __post_init__(self) -> None:
        self.here = False
        if not self.heads:  # nobody asks for them, and they are large
            self.made = [
                {stream: replace(part, per_head=None) for stream, part in parts.items()} for parts in self.made
            ]

    def fetch(self) -> None:
        """Bring the scores to the CPU, and leave none where they were made; this waits for a GPU that is at work."""
        self.made = [{stream: part.cpu() for stream, part in parts.items()} for parts in self.made]
        self.here = True

    @property
    def parts(self) -> list[dict[str, Scores]]:
        if not self.here:
            self.fetch()
        return self.made

    @cached_property
    def readouts(self) -> "dict[str, Float[Tensor, 'batch 1 unit']]":
        return {stream: part.cpu() for stream, part in self.plan.readouts.items()}


@dataclass
class Step:
    """One target of one sample, in the pass that computed it."""

    done: Pass
    place: int  # in the batch of that pass

    @property
    def logits(self) -> Float[Tensor, "label"] | None:
        logits = self.done.plan.logits
        return None if logits is None else logits[self.place]

    @property
    def description(self) -> dict[str, Any]:
        plan, i = self.done.plan, self.place
        sample, target = plan.samples[i], plan.targets[i]
        said = target.description(self.logits, plan.subject, plan.numbers[i], masks=len(sample.masks))
        return plan.subject.described(sample, target, said)


def explanations_of(
    samples: Sequence[Sample], counts: Sequence[int], passes: Sequence[Pass], request: Request, tested: SelfTest
) -> list[list[AnyExplanation]]:
    """Each sample of a batch as each method explains it, its `counts` targets together.

    All that can be said without scores is said first: a GPU may still be at work on these.
    """
    each = [_steps(passes, i, count) for i, count in enumerate(counts)]
    methods = range(len(request.methods))
    said = [[_said(steps, m, request, tested) for m in methods] for steps in each]
    return [
        [_explanation(sample, steps, m, said[i][m], request) for m in methods]
        for i, (sample, steps) in enumerate(zip(samples, each, strict=True))
    ]


def _steps(passes: Sequence[Pass], i: int, count: int) -> list[Step]:
    """The targets of the i-th sample."""
    return [Step(done, step * done.plan.size + i) for done in passes for step in range(done.plan.steps)][:count]


def _said(steps: Sequence[Step], m: int, request: Request, tested: SelfTest) -> dict[str, Any]:
    first, last = steps[0], steps[-1]
    plan, reading = first.done.plan, first.done.readings[m]
    return {
        "method": str(reading.method),
        "target": _target(steps, plan.subject),
        "prediction": _prediction(first.logits, plan.subject) if len(steps) == 1 else {},
        "certificate": _certificate(plan, first.place, request, tested, reading),
        "provenance": _provenance(last.done.plan, last.place, reading, request) | _chosen(first, m),
        "steps": tuple(step.description["name"] for step in steps) if len(steps) > 1 else None,
    }


def _explanation(
    sample: Sample, steps: Sequence[Step], m: int, said: dict[str, Any], request: Request
) -> AnyExplanation:
    about = {**said, "certificate": said["certificate"] | _checks(steps, m)}
    streams: dict[str, Explanation] = {}
    for stream, axis in sample.axes.items():
        found = _Axis(stream, len(axis), steps, m, request)
        for units, at in zip(axis.parts, axis.where, strict=True):
            if units.kind == PROBE:
                continue  # what a model pools with is no part of the input
            picture = sample.picture if units.boxes is not None else None
            arrays = found.arrays(units, at)
            if request.profile is None:  # authors have units that they give no score
                _check_numbers(arrays["scores"], about)
            streams[units.stream] = Explanation(units=units, picture=picture, **arrays, **about)
    return next(iter(streams.values())) if len(streams) == 1 else JointExplanation(streams)


def _check_numbers(scores: np.ndarray, about: dict[str, Any]) -> None:
    """A slope can leave the range of a small format where the model's answer does not."""
    wrong = int((~np.isfinite(scores)).sum())
    if wrong:
        dtype = about["certificate"]["dtype"]
        wider = ": clearhead.load(…, dtype='float32') has room for them" if dtype == "float16" else ""
        said = f"{wrong} of {scores.size} scores of {about['method']} are NaN or infinite, with the model in {dtype}"
        warnings.warn(said + wider, ClearheadWarning, stacklevel=2)


class _Axis:
    """The scores along one axis, all steps together."""

    def __init__(self, stream: str, length: int, steps: Sequence[Step], m: int, request: Request) -> None:
        self.length, self.per = length, request.per
        self.parts = [(step.done.parts[m][stream], step.place) for step in steps]
        self.lengths = [len(step.done.plan.samples[step.place].axes[stream]) for step in steps]
        method = steps[0].done.readings[m].method
        self.every_row = method.option("rows") == "all"
        self.finish = None if request.profile is None else request.profile.settings(method.name).finish
        self.readout = self._whole(steps[0].done.readouts[stream][steps[0].place], self.lengths[0])

    def arrays(self, units: Units, at: "slice | list[int]") -> dict[str, Any]:
        part, i = self.parts[0]
        alone, matrix = len(self.parts) == 1, None
        if self.every_row:
            matrix = self._whole(part.scores[i], self.lengths[0])
            matrix = self._whole(matrix.mT, self.lengths[0]).mT
            row = (self.readout.to(matrix.dtype) @ matrix)[0]
            matrix = matrix[:, at]
        elif alone:
            row = self._whole(part.scores[i, 0], self.lengths[0])
        else:
            pairs = zip(self.parts, self.lengths, strict=True)
            rows = torch.stack([self._whole(part.scores[i, 0], length) for (part, i), length in pairs])
            row, matrix = rows.sum(0), rows[:, at]
        return {
            "scores": self._finished(_array(row[at]), units, at),
            "matrix": None if matrix is None else self._finished(_array(matrix), units, at),
            "base_value": None if part.base_value is None or not alone else float(part.base_value[i]),
            "per_layer": self._cut(part.per_layer, i, at) if alone else None,
            "per_head": self._cut(part.per_head, i, at) if alone and self.per == "head" else None,
            "factors": self._cut(torch.stack([*part.factors.values()], 1), i, at) if alone and part.factors else None,
        }

    def _finished(self, scores: np.ndarray, units: Units, at: "slice | list[int]") -> np.ndarray:
        """As an author leaves them."""
        if self.finish is None:
            return scores
        read = {place: float(weight) for place, weight in enumerate(self.readout[0, at]) if weight}
        return self.finish(scores, units, read)

    def _whole(self, part: Float[Tensor, "*part some"], length: int) -> Float[Tensor, "*part unit"]:
        """A target that depends on the first units alone was explained with them alone: the others have no score."""
        part = part[..., :length]
        if length == self.length:
            return part
        return torch.cat([part, part.new_zeros(*part.shape[:-1], self.length - length)], dim=-1)

    def _cut(self, values: Tensor | None, i: int, at: "slice | list[int]") -> Any:
        return None if values is None else _array(self._whole(values[i], self.lengths[0])[..., at])


def _target(steps: Sequence[Step], subject: Subject) -> dict[str, Any]:
    described = [step.description for step in steps]
    if len(described) == 1:
        return described[0]
    return {
        "kind": "several",
        "name": subject.joined([one["name"] for one in described]),
        "scale": described[0]["scale"],
        "value": sum(one["value"] for one in described),
        "steps": described,
    }


def _certificate(plan: Plan, i: int, request: Request, tested: SelfTest, reading: Reading) -> dict[str, Any]:
    """What was checked about a result."""
    return {
        "capture_error": tested.capture_error,
        "rebuild_error": tested.rebuild_error,
        "recorder": tested.path,
        "kernel": reading.kernel,
        "readout": plan.subject.readout,
        "readout_checked": request.checked.get(id(plan.targets[i].custom), False),
        **plan.made_in,
        "seed": plan.seed,
        "versions": dict(_versions()),
        "truncated_tokens": plan.samples[i].dropped,
    }


def _checks(steps: Sequence[Step], m: int) -> dict[str, Any]:
    """What the method itself measured: the worst of all steps and streams."""
    found: dict[str, float] = {}
    for step in steps:
        for part in step.done.parts[m].values():
            for name, figures in (part.checks or {}).items():
                found[name] = max(found.get(name, 0.0), float(figures[step.place]))
    return {"checks": found} if found else {}


def _chosen(step: Step, m: int) -> dict[str, Any]:
    """What the method chose where the caller left it open, and the names of its factors."""
    parts = step.done.made[m].values()
    factors = next((list(part.factors) for part in parts if part.factors), None)
    named = {} if factors is None else {"factors": factors}
    return named | {name: given[step.place] for part in parts for name, given in (part.chosen or {}).items()}


def _provenance(plan: Plan, i: int, reading: Reading, request: Request) -> dict[str, Any]:
    """Where a result comes from: enough to get it again."""
    method, readout = reading.method, plan.subject.readout
    declaration = method.declaration
    layers = next(iter(reading.layers.values())) if len(reading.layers) == 1 else None
    given = getattr(plan.samples[i], "given", False) and "answer" not in request.reading
    return {
        "model": plan.subject.name,
        "model_class": plan.subject.model_class,
        "method": method.name,
        "options": {key: list(value) if isinstance(value, tuple) else value for key, value in method.options},
        "layers": [layers.start, layers.stop] if layers is not None and "layers" in declaration.has else None,
        "heads": reading.any_fold.heads,
        "reading": {**request.reading, **({"answer": list(getattr(plan.samples[i], "answer", ()))} if given else {})},
        "profile": None if request.profile is None else request.profile.name,
        **({} if request.ignored is None else {"ignored_target": str(request.ignored)}),
        "loading": {
            **({} if plan.subject.task is None else {"task": plan.subject.task}),
            **({} if readout == plan.subject.default_readout() else {"readout": readout}),
        },
        "citation": declaration.citation,
        "signed": reading.any_fold.signed,
        "linear_in_target": reading.any_fold.linear_in_target,
        "input": plan.fingerprints[i],
        "parts": declaration.parts,
    }


def _prediction(logits: Float[Tensor, "label"] | None, subject: Subject) -> dict[str, Any]:
    """The five most likely labels."""
    if logits is None:
        return {}
    logits = subject.choices(logits)
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


@cache
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
