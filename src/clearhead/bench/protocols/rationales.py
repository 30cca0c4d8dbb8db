"""Agreement with human rationales: do the highest-scored words match the annotated ones? (ERASER)

Words are separated by white space. The score of a word is the largest score of the tokens that overlap its characters,
so that an unknown token keeps its position and shifts nothing. Truncated words have no score: they are never selected,
and annotations on them count as missed. The first k words are compared with the annotated ones:

    token f1 @k   2·P·R / (P + R) on words
    iou f1 @k     the same on spans: a selected span counts if its IoU with an annotated one is at least 0.5
    auprc         area under the precision–recall curve by trapezoids, as ERASER's scorer computes it; the average
                  precision is reported too

`spans` "runs" joins adjacent words into one span; "words" treats each word as a span, like Transformer-Explainability.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Bool, Float

from clearhead.bench.data import CharSpan, Example
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    argsort_descending,
    register_protocol,
)
from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.explanation import Explanation
from clearhead.units import Span, Units

if TYPE_CHECKING:
    from clearhead.bench.output_cache import OutputCache
    from clearhead.explainer import Explainer

#: Span of words: index of the text in a pair, first word, and the word after the last.
WordSpan = tuple[int, int, int]
MIN_SPAN_IOU = 0.5


@register_protocol("rationales")
@dataclass(frozen=True)
class RationaleAgreement(BenchmarkProtocol):
    """Agreement with human rationales.

    Attributes:
        counts: The numbers k of selected words.
        clamp: Whether negative scores are set to zero.
        spans: "runs" joins adjacent words into one span, "words" treats each word as a span.
    """

    description: ClassVar[str] = "Do the highest-scored words agree with those that people marked?"
    headline_metrics: ClassVar[tuple[str, ...]] = ("auprc", "token f1 @20")
    rate_metric_prefixes: ClassVar[tuple[str, ...]] = ("auprc", "average precision", "token f1 ", "iou f1 ")

    explained: ExplainedClass = "gold"
    counts: tuple[int, ...] = tuple(range(5, 85, 5))
    clamp: bool = True
    spans: str = "runs"

    def check_settings(self) -> None:
        """Check the settings of all protocols, and that `spans` is "runs" or "words"."""
        super().check_settings()
        if self.spans not in ("runs", "words"):
            raise unknown_value_error("value for spans=", self.spans, ("runs", "words"))

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Measure the example's evidence streams, or all text streams."""
        self.check_settings()
        measurements = []
        for method, method_explanations in explanations.items():
            for example, explanation in zip(examples, method_explanations, strict=True):
                text_streams = [stream for stream in explanation.streams if stream in ("text", "source")]
                for stream in example.streams or text_streams:
                    metrics = self._compute_metrics(example, explanation[stream])
                    if metrics is not None:
                        measurements.append(Measurement(example.id, method, stream, metrics))
        return measurements

    def _compute_metrics(self, example: Example, explanation: Explanation) -> dict[str, float] | None:
        """Compare ranked words with the rationale: token F1, IoU F1, curve areas; None without annotated words."""
        if example.evidence is None:
            raise InputError(f"{example.id!r} has no rationale: choose a data set or split with rationales")
        words = find_words(explanation.units)
        scores = compute_word_scores(explanation.units, explanation.scores, words)
        annotations = [item for alternative in example.evidence for item in alternative if isinstance(item, CharSpan)]
        gold_spans = _find_annotated_spans(annotations, words)
        gold = _spans_to_mask(gold_spans, words)
        if not gold.any():
            return None
        if self.clamp:
            scores = np.where(np.isnan(scores), np.nan, np.maximum(scores, 0))
        order = argsort_descending(scores, self.seed, example.id, explanation.stream)
        order = order[~np.isnan(scores[order])]
        to_spans = merge_adjacent_words if self.spans == "runs" else _words_to_spans
        metrics: dict[str, float] = {"marked": float(gold.sum())}
        for count in self.counts:
            selected = np.zeros(len(words), dtype=bool)
            selected[order[:count]] = True
            num_hits = (selected & gold).sum()
            metrics[f"token f1 @{count}"] = compute_f1(num_hits / max(1, selected.sum()), num_hits / gold.sum())
            metrics[f"iou f1 @{count}"] = compute_iou_f1(to_spans(selected, words), gold_spans)
        if not gold.all():
            metrics |= compute_curve_areas(gold, scores)
        return metrics


def find_words(units: Units) -> list[tuple[int, Span]]:
    """Find the white-space separated words of each text, as (index of the text, characters)."""
    if units.offsets is None:
        raise InputError("words of a rationale need the text itself, not model inputs")
    return [(segment, span) for segment, text in enumerate(units.texts) for span in _split_at_whitespace(text)]


def _split_at_whitespace(text: str) -> list[Span]:
    """Return the character spans of the words between white space."""
    spans = []
    start = None
    for index, character in enumerate(text + " "):
        if character.isspace():
            if start is not None:
                spans.append((start, index))
            start = None
        elif start is None:
            start = index
    return spans


def compute_word_scores(
    units: Units, scores: Float[np.ndarray, "unit"], words: Sequence[tuple[int, Span]]
) -> Float[np.ndarray, "word"]:
    """Return the largest score of the tokens that overlap each word; NaN for a word without tokens."""
    assert units.offsets is not None
    segments = units.segments or (0,) * len(units)
    word_scores = np.full(len(words), np.nan)
    word_at: dict[tuple[int, int], int] = {}
    for word_index, (segment, (start, stop)) in enumerate(words):
        word_at |= {(segment, position): word_index for position in range(start, stop)}
    for unit, (start, stop) in enumerate(units.offsets):
        if units.special[unit]:
            continue
        characters = ((segments[unit], position) for position in range(start, stop))
        for word_index in {word_at[character] for character in characters if character in word_at}:
            word_scores[word_index] = np.fmax(word_scores[word_index], scores[unit])
    return word_scores


def _find_annotated_spans(annotations: Sequence[CharSpan], words: Sequence[tuple[int, Span]]) -> list[WordSpan]:
    """Return the words that each annotation overlaps; a span that is annotated twice counts once."""
    spans = []
    for annotation in annotations:
        overlapping = [
            word_index
            for word_index, (segment, (start, stop)) in enumerate(words)
            if segment == annotation.segment and start < annotation.stop and stop > annotation.start
        ]
        if overlapping:
            spans.append((annotation.segment, overlapping[0], overlapping[-1] + 1))
    return sorted(set(spans))


def _spans_to_mask(spans: Sequence[WordSpan], words: Sequence[tuple[int, Span]]) -> Bool[np.ndarray, "word"]:
    """Mark the words that lie in any of the spans."""
    mask = np.zeros(len(words), dtype=bool)
    for _, start, stop in spans:
        mask[start:stop] = True
    return mask


def _words_to_spans(selected: Bool[np.ndarray, "word"], words: Sequence[tuple[int, Span]]) -> list[WordSpan]:
    """Return each selected word as a span of its own; `merge_adjacent_words` joins them."""
    return [(words[index][0], index, index + 1) for index in np.flatnonzero(selected).tolist()]


def merge_adjacent_words(selected: Bool[np.ndarray, "word"], words: Sequence[tuple[int, Span]]) -> list[WordSpan]:
    """Join adjacent selected words of the same text into spans.

    >>> merge_adjacent_words(np.array([True, True, False, True]), [(0, (0, 1)), (0, (2, 3)), (0, (4, 5)), (1, (0, 1))])
    [(0, 0, 2), (1, 3, 4)]
    """
    spans: list[WordSpan] = []
    for segment, start, stop in _words_to_spans(selected, words):
        if spans and spans[-1][0] == segment and spans[-1][2] == start:
            spans[-1] = (segment, spans[-1][1], stop)
        else:
            spans.append((segment, start, stop))
    return spans


def compute_f1(precision: float, recall: float) -> float:
    """Compute the harmonic mean of precision and recall; 0 if both are 0."""
    if not precision + recall:
        return 0.0
    return float(2 * precision * recall / (precision + recall))


def compute_iou_f1(predicted: Sequence[WordSpan], gold: Sequence[WordSpan]) -> float:
    """Compute F1 of spans; a predicted span is a hit if its best IoU with a gold span is at least 0.5.

    >>> compute_iou_f1([(0, 0, 3), (0, 8, 9)], [(0, 1, 3)])
    0.6666666666666666
    """

    def compute_iou(a: WordSpan, b: WordSpan) -> float:
        if a[0] != b[0]:
            return 0.0
        shared = max(0, min(a[2], b[2]) - max(a[1], b[1]))
        return shared / ((a[2] - a[1]) + (b[2] - b[1]) - shared)

    best_ious = (max((compute_iou(span, gold_span) for gold_span in gold), default=0.0) for span in predicted)
    num_hits = sum(iou >= MIN_SPAN_IOU for iou in best_ious)
    # several predicted spans may hit one gold span (only if they overlap each other): recall is capped at 1
    return compute_f1(num_hits / max(1, len(predicted)), min(1.0, num_hits / max(1, len(gold))))


def compute_curve_areas(gold: Bool[np.ndarray, "word"], scores: Float[np.ndarray, "word"]) -> dict[str, float]:
    """Compute AUPRC and average precision; words without a score tie for the last rank."""
    from sklearn.metrics import auc, average_precision_score, precision_recall_curve

    valid_scores = scores[~np.isnan(scores)]
    lowest = valid_scores.min() if len(valid_scores) else 0.0
    values = np.where(np.isnan(scores), lowest - max(1.0, abs(lowest)), scores)
    precision, recall, _ = precision_recall_curve(gold, values)
    return {
        "auprc": float(auc(recall, precision)),
        "average precision": float(average_precision_score(gold, values)),
    }
