"""Rationales: do the highest-scored words agree with those that people marked (ERASER)?

Words are what stands between white space; the score of a word is the largest of the pieces that lie in it, by their
characters, so that an unknown piece is where it is and shifts nothing. Words that were cut off have no score: they are
never chosen, and what people marked among them is missed. Of the first k words against the marked ones:

    token f1 @k   2·P·R / (P + R) on words
    iou f1 @k     the same on spans: one that was chosen counts if it overlaps a marked one by half (of their union)
    auprc         area under precision over recall by trapezoids, as ERASER's scorer takes it; average precision beside

`spans` "runs" joins neighbouring words into one span; "words" leaves each by itself, as Transformer-Explainability.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Bool, Float

from clearhead.bench.data import Characters, Example
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, ranking, register
from clearhead.errors import InputError, unknown
from clearhead.explanation.explanation import Explanation
from clearhead.units import Span, Units

if TYPE_CHECKING:
    from clearhead.bench.output_cache import Looks
    from clearhead.explainer import Explainer

#: A span of a text: which text of a pair, its first word, and the word after its last.
WordSpan = tuple[int, int, int]
OVERLAP = 0.5


@register("rationales")
@dataclass(frozen=True)
class Rationales(Protocol):
    about: ClassVar[str] = "Do the highest-scored words agree with those that people marked?"
    headline: ClassVar[tuple[str, ...]] = ("auprc", "token f1 @20")

    explained: Explained = "gold"
    counts: tuple[int, ...] = tuple(range(5, 85, 5))
    clamp: bool = True
    spans: str = "runs"

    def check(self) -> None:
        super().check()
        if self.spans not in ("runs", "words"):
            raise unknown("spans", self.spans, ("runs", "words"))

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        self.check()
        made = []
        for method, own in explanations.items():
            for example, explanation in zip(examples, own, strict=True):
                for stream in example.streams or [one for one in explanation.streams if one in ("text", "source")]:
                    figures = self._figures(example, explanation[stream])
                    if figures is not None:
                        made.append(Measurement(example.id, method, stream, figures))
        return made

    def _figures(self, example: Example, part: Explanation) -> dict[str, float] | None:
        if example.evidence is None:
            raise InputError(f"{example.id!r} has no rationale: choose a data set or split that has")
        words = words_of(part.units)
        scores = word_scores(part.units, part.scores, words)
        marked = [piece for one in example.evidence for piece in one if isinstance(piece, Characters)]
        gold_spans = _marked_spans(marked, words)
        gold = _inside(gold_spans, words)
        if not gold.any():
            return None
        scores = np.where(np.isnan(scores), np.nan, np.maximum(scores, 0)) if self.clamp else scores
        order = ranking(scores, self.seed, example.id, part.stream)
        order = order[~np.isnan(scores[order])]
        figures: dict[str, float] = {"marked": float(gold.sum())}
        for count in self.counts:
            chosen = np.zeros(len(words), dtype=bool)
            chosen[order[:count]] = True
            found = runs(chosen, words) if self.spans == "runs" else _single(chosen, words)
            figures[f"token f1 @{count}"] = f1(
                (chosen & gold).sum() / max(1, chosen.sum()), (chosen & gold).sum() / gold.sum()
            )
            figures[f"iou f1 @{count}"] = iou_f1(found, gold_spans)
        if not gold.all():
            figures |= curve_areas(gold, scores)
        return figures


def words_of(units: Units) -> list[tuple[int, Span]]:
    """Every word between white space, of each text: which text, and its characters."""
    if units.offsets is None:
        raise InputError("words of a rationale need the text itself, not model inputs")
    return [(segment, span) for segment, text in enumerate(units.texts) for span in _between_blanks(text)]


def _between_blanks(text: str) -> list[Span]:
    found, start = [], None
    for place, sign in enumerate(text + " "):
        if sign.isspace():
            if start is not None:
                found.append((start, place))
            start = None
        elif start is None:
            start = place
    return found


def word_scores(
    units: Units, scores: Float[np.ndarray, "unit"], words: Sequence[tuple[int, Span]]
) -> Float[np.ndarray, "word"]:
    """The largest score of the pieces that share a character with a word; NaN for a word that no piece reaches."""
    assert units.offsets is not None
    segments = units.segments or (0,) * len(units)
    best = np.full(len(words), np.nan)
    owner: dict[tuple[int, int], int] = {}
    for number, (segment, (start, stop)) in enumerate(words):
        owner |= {(segment, place): number for place in range(start, stop)}
    for place, (start, stop) in enumerate(units.offsets):
        if units.special[place]:
            continue
        for number in {owner[segments[place], at] for at in range(start, stop) if (segments[place], at) in owner}:
            best[number] = np.fmax(best[number], scores[place])
    return best


def _marked_spans(pieces: Sequence[Characters], words: Sequence[tuple[int, Span]]) -> list[WordSpan]:
    """The words that each marked piece touches; a span that is marked twice counts once."""
    found = []
    for piece in pieces:
        inside = [
            number
            for number, (segment, (start, stop)) in enumerate(words)
            if segment == piece.segment and start < piece.stop and stop > piece.start
        ]
        if inside:
            found.append((piece.segment, inside[0], inside[-1] + 1))
    return sorted(set(found))


def _inside(found: Sequence[WordSpan], words: Sequence[tuple[int, Span]]) -> Bool[np.ndarray, "word"]:
    marked = np.zeros(len(words), dtype=bool)
    for _, start, stop in found:
        marked[start:stop] = True
    return marked


def _single(chosen: Bool[np.ndarray, "word"], words: Sequence[tuple[int, Span]]) -> list[WordSpan]:
    return [(words[place][0], place, place + 1) for place in np.flatnonzero(chosen).tolist()]


def runs(chosen: Bool[np.ndarray, "word"], words: Sequence[tuple[int, Span]]) -> list[WordSpan]:
    """Neighbouring words of one text as one span.

    >>> runs(np.array([True, True, False, True]), [(0, (0, 1)), (0, (2, 3)), (0, (4, 5)), (1, (0, 1))])
    [(0, 0, 2), (1, 3, 4)]
    """
    found: list[WordSpan] = []
    for segment, start, stop in _single(chosen, words):
        if found and found[-1][0] == segment and found[-1][2] == start:
            found[-1] = (segment, found[-1][1], stop)
        else:
            found.append((segment, start, stop))
    return found


def f1(precision: float, recall: float) -> float:
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def iou_f1(found: Sequence[WordSpan], gold: Sequence[WordSpan]) -> float:
    """F1 of spans: a found span counts where its best overlap with a marked one is a half or more.

    >>> iou_f1([(0, 0, 3), (0, 8, 9)], [(0, 1, 3)])
    0.6666666666666666
    """

    def overlap(a: WordSpan, b: WordSpan) -> float:
        if a[0] != b[0]:
            return 0.0
        shared = max(0, min(a[2], b[2]) - max(a[1], b[1]))
        return shared / ((a[2] - a[1]) + (b[2] - b[1]) - shared)

    hits = sum(max((overlap(one, other) for other in gold), default=0.0) >= OVERLAP for one in found)
    # several found spans may hit one marked span (only if they overlap each other): recall stays a share
    return f1(hits / max(1, len(found)), min(1.0, hits / max(1, len(gold))))


def curve_areas(gold: Bool[np.ndarray, "word"], scores: Float[np.ndarray, "word"]) -> dict[str, float]:
    """Words without a score come last, all at once."""
    from sklearn.metrics import auc, average_precision_score, precision_recall_curve

    known = scores[~np.isnan(scores)]
    lowest = known.min() if len(known) else 0.0
    values = np.where(np.isnan(scores), lowest - max(1.0, abs(lowest)), scores)
    precision, recall, _ = precision_recall_curve(gold, values)
    return {
        "auprc": float(auc(recall, precision)),
        "average precision": float(average_precision_score(gold, values)),
    }
