"""The page that `clearhead bias code` ends in."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.render.report_blocks import panel, said, section, sheet, table, write
from clearhead.render.view_model import Document
from clearhead.render.views import code
from clearhead.studies.code.permutation_tests import RATE

if TYPE_CHECKING:
    from clearhead.studies.code.study import CodeStudy

CLASSES = (
    "All numbers are multiples of what chance gives: 1 is what a class would get if every token were looked at alike "
    "(or had the same score). That corrects for frequent classes and for long inputs. Special tokens are a class of "
    "their own. Intervals are over functions, one number a question."
)
TESTED = (
    "One number a question, head and class (log₂ of the multiple), compared among questions of like length in which "
    "the same was asked for; {way}. p is corrected by Benjamini and Hochberg over all cells. No question is left out "
    "for being far from the mean."
)
ALONE = "labels are shuffled among them"
TOGETHER = (
    "several questions are about one function, so what each function adds to the difference keeps its size and its "
    "sign is flipped"
)
DETECTOR = (
    "The chance that a wrong answer is ranked above a right one; 0.5 is none. What is fitted is judged on questions "
    "that it was not fitted on. Confidence is the probability of the model’s own answer, used as it is."
)
MOST = 30


def code_page(found: "CodeStudy", path: str | Path) -> Path:
    return write(path, code_sheet(found))


def code_sheet(found: "CodeStudy") -> Document:
    """Rightness, classes, parts, right against wrong, the detector, and what another model does."""
    parts: list[Document | None] = [_rightness(found), _classes(found), _parts(found), _groups(found)]
    parts += [_attribution(found), _detector(found), _change(found)]
    told = ", ".join(f"{name} {said(value)}" for name, value in found.settings.items())
    left_out = "".join(f" Not done: {words}." for words in found.left_out)
    return sheet(f"clearhead · {found.model}", "Syntax in a code model", parts, f"{told}.{left_out}")


def _rightness(found: "CodeStudy") -> Document:
    rows = [["all", len(found.by_class), found.accuracy], *(list(line.values()) for line in found.rightness())]
    return section("How often is it right?", table(["asked for", "questions", "right"], rows))


def _lines(lines: list[dict[str, Any]]) -> Document:
    return table(list(lines[0]), [list(line.values()) for line in lines])


def _classes(found: "CodeStudy") -> Document:
    own = found.by_class
    return section(
        "What is looked at: classes",
        _lines(found.table(own)),
        panel(*code.by_layer(own), note="Every head a point, the line their mean."),
        panel(code.looking(own)),
        note=CLASSES,
    )


def _parts(found: "CodeStudy") -> Document:
    figure = panel(*code.by_layer(found.by_part))
    return section("What is looked at: parts of the tree", _lines(found.table(found.by_part)), figure)


def _groups(found: "CodeStudy") -> Document | None:
    if found.attention is None:
        return None
    lines, tested = found.discoveries(), found.attention.tested
    plain = int((found.attention.p < RATE).sum())
    words = (
        f"{len(lines)} of {tested} cells differ at a rate of false discoveries of {RATE:g}; {plain} have p < {RATE:g} "
        f"before the correction, where chance alone gives about {RATE * tested:.0f}. "
    )
    return section(
        "Right answers against wrong ones",
        panel(*code.p_maps(found.attention, found.by_class.classes)),
        panel(code.boxes(found.by_class)),
        _lines(lines[:MOST]) if lines else None,
        note=words + TESTED.format(way=ALONE if found.by_class.apart else TOGETHER),
    )


def _attribution(found: "CodeStudy") -> Document | None:
    if found.attribution is None:
        return None
    methods, own = list(found.by_class.attributed), found.attribution
    rows = [
        [
            name,
            *(
                f"{said(float(own.delta[row, place]))} (q {said(float(own.q[row, place]))})"
                for row in range(len(methods))
            ),
        ]
        for place, name in enumerate(found.by_class.classes)
    ]
    note = "Cliff’s delta, right − wrong: above zero, right answers rest more on the class. q: p after the correction."
    return section("Attribution, right against wrong", table(["class", *methods], rows), note=note)


def _detector(found: "CodeStudy") -> Document | None:
    if found.detection is None:
        return None
    rows: list[list[Any]] = [[name, own] for name, own in found.detection.auroc.items()]
    rows.append(["syntax and confidence − confidence", found.detection.gain])
    verdict = "Syntax adds to confidence. " if found.detection.helps else "Syntax adds nothing that could be shown. "
    note = f"{verdict}{found.detection.wrong} of {len(found.by_class)} answers are wrong. {DETECTOR}"
    return section("Can one tell that it is wrong?", table(["from", "AUROC"], rows), note=note)


def _change(found: "CodeStudy") -> Document | None:
    if found.change is None:
        return None
    note = (
        f"The same questions put to {found.other}: {int(found.change.found.sum())} of {found.change.tested} cells "
        "differ. p by flipping the signs of each function’s differences, corrected as above."
    )
    rows = [
        [name, float(np.nanmean(found.change.difference[..., place])), int(found.change.found[..., place].sum())]
        for place, name in enumerate(found.by_class.classes)
    ]
    figure = panel(*code.p_maps(found.change, found.by_class.classes))
    return section("Against another model", table(["class", "mean change (log₂)", "heads"], rows), figure, note=note)
