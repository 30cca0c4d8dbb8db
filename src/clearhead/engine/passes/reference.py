"""The kind "reference": a pass at the input, and one at each reference that is differentiated between the two.

The class explained is the one of the input itself. What several methods want to hold it against is run once.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import Sample, Subject
from clearhead.backward_rules.base import NoRule, in_place_has_no_rule
from clearhead.backward_rules.paired_pass import LiftedSide, Side, Watched, refuse_unseen
from clearhead.capture.checks.custom_attention import tensors_of
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import Tape, check_asks
from clearhead.engine.baselines import Baselines
from clearhead.engine.passes.captum_deeplift import captum_multipliers
from clearhead.engine.passes.completeness import completeness_gap
from clearhead.engine.random_references import RandomReferences
from clearhead.engine.target_batch import Plan, Reading
from clearhead.errors import Refusal
from clearhead.methods._reference import Held, Multipliers, Reference, ReferenceFold
from clearhead.methods.base import Method, Scores
from clearhead.targets import Pinned, Target

#: Why DeepLIFT has no rule for the model of a recorder ("" where it has).
_known: "WeakKeyDictionary[Recorder, str]" = WeakKeyDictionary()


def from_reference(
    recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest
) -> list[dict[str, Scores]]:
    """The input itself, then every reference that is wanted, then what the methods make of it."""
    found: dict[int, dict[str, Scores]] = {}
    for multipliers in dict.fromkeys(_fold(reading).multipliers for reading in readings):
        own = [(i, reading) for i, reading in enumerate(readings) if _fold(reading).multipliers == multipliers]
        _hold(recorder, plan, [reading for _, reading in own], multipliers)
        found |= {i: _finished(reading, plan) for i, reading in own}
    return [found[i] for i in range(len(readings))]


def _hold(recorder: Recorder, plan: Plan, readings: Sequence[Reading], multipliers: Multipliers) -> None:
    wanted: dict[Reference, list[ReferenceFold]] = {}
    try:
        against = Against(recorder, plan, multipliers)
        for reading in readings:
            for fold in _folds(reading):
                for reference in dict.fromkeys(map(against.known, fold.references())):
                    wanted.setdefault(reference, []).append(fold)
        for reference, folds in wanted.items():
            with in_place_has_no_rule():
                held = against.hold(reference)
            for fold in folds:
                fold.at(held)
    except NoRule as problem:
        name, subject = readings[0].method.name, plan.subject
        raise Refusal(f"{name} cannot explain {subject.name}: in {subject.model_class}, {problem}") from None


def _fold(reading: Reading) -> ReferenceFold:
    return cast(ReferenceFold, reading.any_fold)


def _folds(reading: Reading) -> list[ReferenceFold]:
    return [fold for fold in reading.folds.values() if isinstance(fold, ReferenceFold)]


def _finished(reading: Reading, plan: Plan) -> dict[str, Scores]:
    """With how far the scores of all streams together are from what they should add up to."""
    parts = reading.finish(Tape())
    gain = plan.values - _fold(reading).base_value
    gap = (gain - torch.stack([fold.explained for fold in _folds(reading)]).sum(0)).abs()
    if _fold(reading).captum:
        worst = int(gap.argmax())
        warnings.warn(
            f"captum's {reading.method.name} has no rule for norms, softmax, products and most activations: its scores "
            f"miss {float(gap[worst]):.2g} of {float(gain[worst]):.2g}; without the profile they add up",
            stacklevel=2,
        )
    relative = completeness_gap(gap, [part.scores for part in parts.values()])
    return {stream: replace(part, checks={"completeness_gap": relative}) for stream, part in parts.items()}


class Against:
    """One batch, watched at the input, and held against references."""

    def __init__(self, recorder: Recorder, plan: Plan, multipliers: Multipliers = "steady") -> None:
        self.recorder, self.plan, self.multipliers = recorder, plan, multipliers
        self.watched = Watched()
        tape = self._pass(nullcontext() if multipliers == "captum" else self.watched, plan, None)
        self.inputs = {leaf: part.chunk(plan.steps)[0] for leaf, part in (tape.inputs or {}).items()}
        words = [leaf for leaf in self.inputs if not plan.batch[leaf].is_floating_point()]
        self.baselines = Baselines(_flattened(plan, self.inputs, words), self.inputs, words, recorder)
        self.draws = RandomReferences(plan, self.inputs, words, self.baselines, recorder)
        targets = [self._pinned(i, target) for i, target in enumerate(plan.targets)]
        each = [[targets[step * plan.size + i] for step in range(plan.steps)] for i in range(plan.size)]
        self.pinned = Plan(plan.subject, plan.given, each, plan.seed)

    def known(self, reference: Reference) -> Reference:
        """Where nothing can be drawn, one reference stands for all draws."""
        return Reference() if reference.draw is not None and not self.draws.possible else reference

    def hold(self, reference: Reference) -> Held:
        plan = self.pinned
        vectors = {leaf: self._vectors(reference, leaf) for leaf in self.inputs}
        ways = {leaf: x - vectors[leaf] for leaf, x in self.inputs.items()}
        if self.multipliers == "captum":
            multipliers = captum_multipliers(self.recorder, plan, self.inputs, vectors)
        else:
            side = LiftedSide(self.watched, steady=self.multipliers == "steady")
            multipliers = self._pass(side, plan, vectors).input_gradient or {}
        ways = {leaf: part.repeat(plan.steps, *(1,) * (part.dim() - 1)) for leaf, part in ways.items()}
        arranged = plan.subject.arranged
        return Held(reference, arranged(ways, plan.samples), arranged(multipliers, plan.samples), plan.values)

    def _vectors(self, reference: Reference, leaf: str) -> Tensor:
        if reference.draw is not None:
            return self.draws.of(reference.draw, leaf)
        return self.baselines.of(reference.baseline, leaf)

    def _pinned(self, i: int, target: Target) -> Target:
        # a subject's own kind of target (how alike two inputs are) has no class that could be another one
        if type(target) is not Target or target.custom is not None or self.plan.scores is None:
            return target
        return Pinned(target.wanted, target.scale, target.classes(self.plan.scores[i], self.plan.subject))

    def _pass(self, mode: Any, plan: Plan, vectors: dict[str, Tensor] | None) -> Tape:
        """A pass of which every operation, those of the target among them, is seen by the mode."""
        watching = vectors is None

        def value(output: Any) -> Float[Tensor, "*target batch"]:
            with mode:
                number = plan.value(output)
            if not watching:
                return number
            if isinstance(mode, Side):
                refuse_unseen(number)
            return number.detach().requires_grad_()  # the pass that is watched needs no way back

        return _seen(self.recorder, mode).run(
            plan.batch,
            value,
            check_asks(("inputs", "input_gradient")),
            leaves=plan.leaves,
            places=(),
            rows=None if watching else plan.rows,
            vectors=vectors,
        )


def _flattened(plan: Plan, inputs: Mapping[str, Tensor], words: Sequence[str]) -> Plan:
    """The same plan with a row of words for each row of vectors: where texts are chosen between, a batch has an axis
    of choices, which the model flattens before it looks words up."""
    own = copy(plan)
    own.batch = {**plan.batch, **{leaf: plan.batch[leaf].reshape(inputs[leaf].shape[:-1]) for leaf in words}}
    return own


def _seen(recorder: Recorder, mode: Side | Any) -> Recorder:
    """The same recorder, whose operations the mode sees."""
    own = copy(recorder)

    @contextmanager
    def scope() -> Iterator[None]:
        with recorder.scope(), mode:
            yield

    own.scope = scope
    return own


def why_not(recorder: Recorder, subject: Subject, sample: Sample, method: Method) -> str | None:
    """Why DeepLIFT cannot speak for a model: tried on one sample, the first time. Captum's always speaks."""
    if method.option("captum"):
        return None
    if recorder not in _known:
        try:
            plan = Plan(subject, [sample], [[Target(_everything)]])
            with in_place_has_no_rule():
                held = Against(recorder, plan).hold(Reference())
            _known[recorder] = _why_incomplete(held, plan)
        except NoRule as problem:
            _known[recorder] = f"in {subject.model_class}, {problem}"
    return _known[recorder] or None


def _why_incomplete(held: Held, plan: Plan) -> str:
    """Compiled code and the like pass no mode: where the scores miss something, there is more than was seen."""
    parts = torch.cat([(way * held.multipliers[stream]).flatten() for stream, way in held.way.items()])
    gap = float((plan.values - held.value - parts.sum()).abs() / (parts.abs().sum() + 1e-12))
    if gap <= (0.05 if plan.subject.dtype in (torch.float16, torch.bfloat16) else 1e-3):
        return ""
    return (
        f"in {plan.subject.model_class} the scores miss {gap:.1e} of what they should add up to: part of it is "
        "compiled code, or a function of its own, which no rule reaches"
    )


def _everything(output: Any) -> Float[Tensor, "1"]:
    """A target that depends on all that a model says."""
    return torch.stack([part.float().sum() for part in tensors_of(output) if part.requires_grad]).sum().reshape(1)
