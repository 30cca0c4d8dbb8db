"""Syntax in a code model, the whole inquiry: classes and parts, right against wrong, a detector, another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.explainer import Explainer, MethodLike
from clearhead.stats import Interval, interval
from clearhead.studies.code.attention import Measured, Progress, looked_at, measure_both
from clearhead.studies.code.error_detector import Detection, detect, too_few
from clearhead.studies.code.permutation_tests import PERMUTATIONS, RATE, Differences, changes, differences
from clearhead.studies.code.tasks import Question

#: Fewer wrong (or right) answers are not tested against the others.
FEW = 5


@dataclass(frozen=True, eq=False)
class CodeStudy:
    """What was found; `None` where there was too little to find it with, and `left_out` says so.

    attention, attribution: wrong answers against right ones, cell by cell (attribution: method by class)
    change: what another model does with the same questions, less what this one does
    """

    by_class: Measured
    by_part: Measured
    accuracy: Interval
    attention: Differences | None = None
    attribution: Differences | None = None
    detection: Detection | None = None
    change: Differences | None = None
    other: str = ""
    left_out: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        return self.by_class.model

    def table(self, measured: Measured) -> list[dict[str, Any]]:
        """One line a class: how frequent, how much looked at, how much attributed to; 1 is what chance gives."""
        lines, functions = [], measured.functions
        for place, name in enumerate(measured.classes):
            received = interval(_mean(measured.received[..., place]), groups=functions)
            line = {"class": name, "share of tokens": float(measured.shares[place]), "attention received": received}
            scores = {method: own[:, place] for method, own in measured.attributed.items()}
            lines.append(line | {method: interval(own, groups=functions) for method, own in scores.items()})
        return lines

    def rightness(self) -> list[dict[str, Any]]:
        """How often the model is right, by what was asked for."""
        found = self.by_class
        asked = sorted({name for name in found.about if name})
        rows = [(name, np.array([own == name for own in found.about])) for name in asked]
        return [
            {
                "asked for": name,
                "questions": int(mine.sum()),
                "right": interval(found.correct[mine].astype(float), groups=found.functions[mine]),
            }
            for name, mine in rows
        ]

    def discoveries(self) -> list[dict[str, Any]]:
        """The heads and classes in which wrong answers differ, most surely different first."""
        if self.attention is None:
            return []
        cells = [tuple(int(one) for one in cell) for cell in np.argwhere(self.attention.found)]
        lines = [
            {
                "layer": layer,
                "head": head,
                "class": self.by_class.classes[place],
                "right − wrong": float(self.attention.difference[layer, head, place]),
                "Cliff's delta": float(self.attention.delta[layer, head, place]),
                "q": float(self.attention.q[layer, head, place]),
            }
            for layer, head, place in cells
        ]
        return sorted(lines, key=lambda line: (line["q"], -abs(line["Cliff's delta"])))

    def _repr_html_(self) -> str:
        from clearhead.render.html import notebook_cell
        from clearhead.render.reports.code import code_sheet

        return notebook_cell(code_sheet(self))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": "clearhead/code-study",
            "version": 1,
            "model": self.model,
            "settings": self.settings,
            "questions": len(self.by_class),
            "functions": len(np.unique(self.by_class.functions)),
            "accuracy": _plain(self.accuracy),
            "right by class": [_line(line) for line in self.rightness()],
            "classes": [_line(line) for line in self.table(self.by_class)],
            "parts": [_line(line) for line in self.table(self.by_part)],
            "tested cells": None if self.attention is None else self.attention.tested,
            "rate of false discoveries": RATE,
            "wrong against right": self.discoveries(),
            "attribution, wrong against right": self._attribution(),
            "detector": None
            if self.detection is None
            else {
                "auroc": {name: _plain(own) for name, own in self.detection.auroc.items()},
                "gain over confidence": _plain(self.detection.gain),
                "wrong": self.detection.wrong,
            },
            "compared with": self.other or None,
            "compared cells": None if self.change is None else self.change.tested,
            "changed cells": None if self.change is None else int(self.change.found.sum()),
            "left out": list(self.left_out),
        }

    def _attribution(self) -> list[dict[str, Any]]:
        if self.attribution is None:
            return []
        return [
            {
                "method": method,
                "class": name,
                "right − wrong": _number(self.attribution.difference[row, place]),
                "Cliff's delta": _number(self.attribution.delta[row, place]),
                "q": _number(self.attribution.q[row, place]),
            }
            for row, method in enumerate(self.by_class.attributed)
            for place, name in enumerate(self.by_class.classes)
        ]


def study(
    ex: Explainer,
    questions: Sequence[Question],
    methods: Sequence[MethodLike] = (),
    against: Explainer | None = None,
    special: bool = True,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
    progress: Progress = False,
    **settings: Any,
) -> CodeStudy:
    """Ask all questions and test what differs.

    against: another model with as many layers and heads, which reads the same inputs; it need not answer them
    """
    by_class, by_part = measure_both(ex, questions, methods=methods, special=special, progress=progress)
    found = concluded(by_class, by_part, permutations, seed)
    told = {"questions": len(questions), "permutations": permutations, "special tokens": special, "seed": seed}
    if against is not None:
        other = looked_at(against, questions, by_class.classes, special, progress)
        found = compared(found, other, against.subject.name, permutations, seed)
    return replace(found, settings={**told, **settings})


def compared(
    found: CodeStudy,
    other: Float[np.ndarray, "question layer head class"],
    name: str,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> CodeStudy:
    """With what another model looks at (`looked_at`) beside it."""
    own = found.by_class
    change = changes(_log(own.received), _log(other), permutations, seed, own.functions)
    return replace(found, change=change, other=name)


def concluded(by_class: Measured, by_part: Measured, permutations: int = PERMUTATIONS, seed: int = 0) -> CodeStudy:
    """What follows from measurements: the tests and the detector, or why they were left out."""
    right, kinds, lengths = by_class.correct, by_class.about, by_class.lengths.astype(float)
    own = by_class.functions
    fewest = int(min(right.sum(), (~right).sum()))
    left_out, attention, attribution, detection = [], None, None, None
    if len(right) > 1 and len(np.unique(own)) == 1:
        left_out.append(
            f"intervals: all {len(right)} questions are about one function, or joined by functions they share"
        )
    if fewest < FEW:
        left_out.append(f"wrong against right: {int((~right).sum())} wrong and {int(right.sum())} right answers")
    else:
        attention = differences(_log(by_class.received), right, lengths, kinds, permutations, seed, own)
        if by_class.attributed:
            whole = np.stack(list(by_class.attributed.values()), 1)
            attribution = differences(_log(whole), right, lengths, kinds, permutations, seed, own)
    if (reason := too_few(by_class)) is not None:
        left_out.append(f"the detector: {reason}")
    else:
        detection = detect(by_class, seed=seed)
    accuracy = interval(right.astype(float), seed=seed, groups=own)
    return CodeStudy(by_class, by_part, accuracy, attention, attribution, detection, left_out=tuple(left_out))


def _log(lifts: np.ndarray) -> np.ndarray:
    """Ratios: twice and half of what chance gives are equally far from it."""
    return np.asarray(np.log2(np.clip(lifts, 2.0**-10, None)))


def _mean(values: np.ndarray) -> np.ndarray:
    """One number a question: the mean over layers and heads; NaN where the class has no token."""
    return np.asarray(values.reshape(len(values), -1).mean(1))


def _plain(own: Interval) -> dict[str, float | int | None]:
    return {"mean": _number(own.mean), "low": _number(own.low), "high": _number(own.high), "count": own.count}


def _line(line: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) if isinstance(value, Interval) else value for name, value in line.items()}


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
