"""Attention and attribution of a code model by syntax class, beside what chance gives.

For head h of layer l, an input of N tokens of which n_c are of class c:

    received_c = (N / n_c) · (1/N) Σ_q Σ_{k ∈ c} A_{q,k}          1 is what uniform attention gives
    paid_{b,c} = (N / n_c) · (1/n_b) Σ_{q ∈ b} Σ_{k ∈ c} A_{q,k}  how rows of class b look at class c
    attributed_c = (N / n_c) · Σ_{i ∈ c} |a_i| / Σ_i |a_i|        1 is what equal scores give

The factor N / n_c corrects for how frequent a class is and for how long the input is. One number an input, never one a
token: tokens of one input are not independent. Special tokens are a class of their own; without them (`special=False`)
rows are those of the other tokens and sum to one over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from clearhead.adapters.base import How
from clearhead.adapters.generation import Answered, Answering
from clearhead.capture.session import at_rest
from clearhead.concepts.hidden_states import read
from clearhead.engine.batching import followed
from clearhead.errors import InputError
from clearhead.explainer import Explainer, MethodLike
from clearhead.methods.base import Method
from clearhead.studies.code.syntax import CLASSES, PARTS, align
from clearhead.studies.code.tasks import Question
from clearhead.targets import Generated, TargetLike

Progress = bool | Callable[[list[Any]], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class Measured:
    """What a model does with questions about code; NaN where an input has no token of a class.

    said: what the model answered; confidence: the probability of it (of a translation, the geometric mean over tokens)
    functions: the number of the function that each question is about
    """

    model: str
    by: str
    classes: tuple[str, ...]
    received: Float[np.ndarray, "question layer head class"]
    paid: Float[np.ndarray, "question layer by class"]
    counts: Int[np.ndarray, "question class"]
    correct: Bool[np.ndarray, " question"]
    confidence: Float[np.ndarray, " question"]
    said: tuple[str, ...]
    about: tuple[str, ...]
    functions: Int[np.ndarray, " question"]
    attributed: dict[str, Float[np.ndarray, "question class"]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.correct)

    @property
    def apart(self) -> bool:
        """Whether each question is about a function of its own."""
        return len(np.unique(self.functions)) == len(self)

    @property
    def lengths(self) -> Int[np.ndarray, " question"]:
        return np.asarray(self.counts.sum(1))

    @property
    def shares(self) -> Float[np.ndarray, " class"]:
        """How frequent each class is: the share of tokens, all inputs together."""
        return np.asarray(self.counts.sum(0) / self.counts.sum())

    def only(self, classes: Sequence[str]) -> Measured:
        """These classes alone."""
        places = [self.classes.index(name) for name in classes]
        return Measured(
            self.model,
            self.by,
            tuple(classes),
            self.received[..., places],
            self.paid[..., places, :][..., places],
            self.counts[:, places],
            self.correct,
            self.confidence,
            self.said,
            self.about,
            self.functions,
            {name: part[:, places] for name, part in self.attributed.items()},
        )


def measure(
    ex: Explainer,
    questions: Sequence[Question],
    by: str = "class",
    methods: Sequence[MethodLike] = (),
    special: bool = True,
    progress: Progress = False,
) -> Measured:
    """Ask every question once, and put attention, attribution and the answer beside the syntax of the input.

    by: "class" (identifier, keyword …) or "part" (declaration, condition …)
    methods: attribution methods, any that are registered
    """
    return measure_both(ex, questions, (by,), methods, special, progress)[0]


def measure_both(
    ex: Explainer,
    questions: Sequence[Question],
    readings: Sequence[str] = ("class", "part"),
    methods: Sequence[MethodLike] = (),
    special: bool = True,
    progress: Progress = False,
) -> list[Measured]:
    """By several readings of the same passes."""
    if not questions:
        raise InputError("nothing to measure: no question was given")
    tables = [_Table(by, special, methods) for by in readings]
    answers = []
    for (question,) in followed([[one] for one in questions], progress):
        answer = ask(ex, question)
        scores = attribution_of(ex, question, answer, methods)
        reading = align(answer.units, question.sources)
        for table in tables:
            table.add(reading.of(table.by), answer.attention, scores)
        answers.append(replace(answer, attention=answer.attention[:0]))  # maps are large, and done with
    return [table.measured(ex.subject.name, questions, answers) for table in tables]


def looked_at(
    ex: Explainer,
    questions: Sequence[Question],
    classes: Sequence[str],
    special: bool = True,
    progress: Progress = False,
) -> Float[np.ndarray, "question layer head class"]:
    """Received attention by class alone: also of a model that has no answer to the questions, as a pretrained one."""
    found = []
    for (question,) in followed([[one] for one in questions], progress):
        (sample,) = read(ex, question.raw)
        batch = ex.subject.collate([sample])
        leaves = ex.subject.leaves(batch)
        tape = ex.recorder.record(batch, lambda output: torch.zeros(1), ("attention",), leaves=leaves)
        kinds = np.array(align(sample.axes[ex.subject.stream].parts[0], question.sources).kinds)
        member = np.array([kinds == name for name in classes])
        found.append(received_by(_attention(tape, sample), member, special=special))
    return np.stack(found)


class _Table:
    """What one reading makes of the passes, line by line."""

    def __init__(self, by: str, special: bool, methods: Sequence[MethodLike]) -> None:
        every = CLASSES if by == "class" else PARTS
        self.by, self.special = by, special
        self.names = tuple(name for name in every if special or name != "special")
        self.received: list[np.ndarray] = []
        self.paid: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []
        self.attributed: dict[str, list[np.ndarray]] = {str(method): [] for method in methods}

    def add(self, kinds: Sequence[str], attention: np.ndarray, scores: Mapping[str, np.ndarray]) -> None:
        member = np.array([np.array(kinds) == name for name in self.names])
        self.received.append(received_by(attention, member, special=self.special))
        self.paid.append(paid_by(attention, member, special=self.special))
        self.counts.append(member.sum(1))
        for name, own in scores.items():
            self.attributed[name].append(attributed_to(own, member))

    def measured(self, model: str, questions: Sequence[Question], answers: Sequence[Answer]) -> Measured:
        """Classes that no input has are left out."""
        seen = np.asarray(self.counts).sum(0) > 0
        return Measured(
            model=model,
            by=self.by,
            classes=tuple(name for name, here in zip(self.names, seen, strict=True) if here),
            received=np.stack(self.received)[..., seen],
            paid=np.stack(self.paid)[..., seen, :][..., seen],
            counts=np.stack(self.counts)[:, seen],
            correct=np.array([one.correct for one in answers]),
            confidence=np.array([one.confidence for one in answers]),
            said=tuple(one.said for one in answers),
            about=tuple(question.about for question in questions),
            functions=functions_of(questions),
            attributed={name: np.stack(part)[:, seen] for name, part in self.attributed.items()},
        )


def functions_of(questions: Sequence[Question]) -> Int[np.ndarray, " question"]:
    """Numbers that are equal for questions about one function."""
    named = [-1 - place if one.function is None else one.function for place, one in enumerate(questions)]
    return np.asarray(np.unique(np.array(named), return_inverse=True)[1])


# -- the formulas


def _lift(mass: np.ndarray, member: Bool[np.ndarray, "class token"]) -> np.ndarray:
    """Mass on each class in units of the class's share of the tokens; NaN where it has none."""
    count = member.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(count > 0, mass * (count.sum() / np.maximum(count, 1)), np.nan))


def _rows(attention: np.ndarray, member: np.ndarray, special: bool) -> tuple[np.ndarray, np.ndarray]:
    """The attention among the tokens that are in some class, and which of the rows there are; rows sum to one."""
    inside = member.any(0)
    if special or inside.all():
        return attention, np.ones(attention.shape[-2], dtype=bool)
    square = attention.shape[-1] == attention.shape[-2]
    rows = np.asarray(inside) if square else np.ones(attention.shape[-2], dtype=bool)
    kept = np.asarray(attention * inside)
    return kept / np.maximum(kept.sum(-1, keepdims=True), 1e-12), rows


def received_by(
    attention: Float[np.ndarray, "layer head query key"], member: Bool[np.ndarray, "class key"], special: bool = True
) -> Float[np.ndarray, "layer head class"]:
    """How much the tokens of each class are looked at; 1 is what uniform attention gives."""
    whole, rows = _rows(attention, member, special)
    return _lift(whole[..., rows, :].mean(-2) @ member.T, member)


def paid_by(
    attention: Float[np.ndarray, "layer head token token"],
    member: Bool[np.ndarray, "class token"],
    special: bool = True,
) -> Float[np.ndarray, "layer by class"]:
    """How rows of one class look at each class, mean over heads; NaN where either has no token."""
    whole, _ = _rows(attention, member, special)
    mean = whole.mean(1)
    count = np.maximum(member.sum(1), 1)
    by_rows = (member / count[:, None]) @ mean
    lifted = _lift(by_rows @ member.T, member)
    return np.asarray(np.where(member.sum(1)[:, None] > 0, lifted, np.nan))


def attributed_to(
    scores: Float[np.ndarray, " token"], member: Bool[np.ndarray, "class token"]
) -> Float[np.ndarray, " class"]:
    """The share of |score| of each class; 1 is what equal scores give."""
    size = np.abs(scores) * member.any(0)
    return _lift(member @ size / max(float(size.sum()), 1e-300), member)


# -- asking


@dataclass(frozen=True)
class Answer:
    """One pass: the units of the input, the attention of its layers, and what the model said."""

    units: Any
    attention: Float[np.ndarray, "layer head query key"]
    said: str
    correct: bool
    confidence: float
    spoken: tuple[int, ...] = ()


def ask(ex: Explainer, question: Question) -> Answer:
    subject = ex.subject
    if isinstance(subject, Answering):
        return _translated(ex, question)
    tape = ex.record(question.raw, ("attention",))
    assert tape.logits is not None
    chances = tape.logits[0].float().softmax(-1)
    best = int(chances.argmax())
    right = best == subject.label_index(question.truth)
    (sample,) = subject.samples(question.raw, How())
    return Answer(sample.units, _attention(tape, sample), subject.label_name(best), right, float(chances[best]))


def _attention(tape: Any, sample: Any) -> Float[np.ndarray, "layer head query key"]:
    stream = next(iter(sample.axes))
    own = [call for call in tape.calls if (call.query_stream, call.key_stream) == (stream, stream)]
    return np.stack([call.attention[0].double().cpu().numpy() for call in own])


def _translated(ex: Explainer, question: Question, most: int = 400) -> Answer:
    subject: Any = ex.subject
    (sample,) = subject.samples(question.raw, How())
    spoken = tuple(int(one) for one in subject.say(sample, most))
    whole: Answered = subject.with_answer(sample, spoken)
    with torch.no_grad(), at_rest(subject.model):
        logits = subject.model(**subject.collate([whole])).logits[0].float().log_softmax(-1)
    steps = torch.arange(len(whole.answer)) + whole.first
    chances = logits[steps, torch.tensor(whole.answer)]
    tape = ex.record(question.raw, ("attention",), Generated(0), answer=list(spoken))
    said = subject.processor.decode(list(whole.answer), skip_special_tokens=True).strip()
    units = sample.axes[subject.stream].parts[0]
    sure = float(chances.mean().exp()) if len(chances) else 0.0
    return Answer(units, _attention(tape, sample), said, said == str(question.truth).strip(), sure, spoken)


def attribution_of(
    ex: Explainer, question: Question, answer: Answer, methods: Sequence[MethodLike]
) -> dict[str, Float[np.ndarray, " token"]]:
    """The scores of the input's units by each method, for what the model said."""
    if not methods:
        return {}
    more: dict[str, Any] = {}
    target: TargetLike = None
    if answer.spoken:
        more, target = {"answer": list(answer.spoken)}, Generated()
    named = {str(method): method if isinstance(method, Method) else Method(method) for method in methods}
    found = ex.explain(question.raw, list(named.values()), target, **more)
    stream = answer.units.stream
    parts = {name: one[stream] if len(one.streams) > 1 else one for name, one in found.items()}
    return {name: np.asarray(parts[str(method)].scores, dtype=np.float64) for name, method in named.items()}
