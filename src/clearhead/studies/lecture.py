"""Compare Grad-SAM with SHAP on a few sentences: their agreement, and the scores of special tokens such as [CLS].

Special tokens are excluded from all rankings. Grad-SAM gives [CLS] a large score by construction: if the classifier
reads [CLS], only its row has a gradient in the last layer. SHAP removes units of the text, which [CLS] is not part of,
so its score is zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from clearhead.errors import InputError
from clearhead.explanation.explanation import Explanation, to_json_value
from clearhead.methods.base import Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clearhead.explainer import Explainer

LECTURE_SENTENCES = (
    "I like the movie",
    "I cannot wait for next time",
    "She hates the book",
    "This is so boring",
    "You look extremely confused",
)
#: Name → method and profile: the two methods, and a variant of each that scores special tokens differently.
LECTURE_METHODS = {
    "Grad-SAM": (Method("grad-sam"), None),
    "Grad-SAM, by columns": (Method("grad-sam", received=True), None),
    "SHAP": (Method("shap"), None),
    "SHAP, as in the lecture": (Method("shap"), "shap_lecture"),
}
#: Number of highest-ranked tokens whose overlap is measured.
NUM_TOP_TOKENS = 2


@dataclass(frozen=True)
class SentenceComparison:
    """Explanations of one sentence by all methods of `LECTURE_METHODS`.

    Attributes:
        by_method: Name of the method → explanation.
    """

    by_method: dict[str, Explanation]

    @property
    def grad_sam(self) -> Explanation:
        """The explanation by Grad-SAM with its default options."""
        return self.by_method["Grad-SAM"]

    @property
    def shap(self) -> Explanation:
        """The explanation of the predicted class by SHAP, without the lecture's settings."""
        return self.by_method["SHAP"]

    @property
    def text(self) -> str:
        """The sentence as the model read it."""
        return self.grad_sam.units.texts[0]

    @property
    def label(self) -> str:
        """The predicted label, which both methods explain."""
        return str(self.grad_sam.target["name"])

    @property
    def content_indices(self) -> Int[np.ndarray, "token"]:
        """Indices of the tokens that are not special."""
        return np.asarray(self.grad_sam.units.content_indices())

    def compute_abs_scores(self, method: str) -> Float[np.ndarray, "token"]:
        """Return the absolute scores of all tokens by a method of `LECTURE_METHODS`.

        Args:
            method: A key of `LECTURE_METHODS`, such as "SHAP".

        Returns:
            |score| of each token, special tokens included.
        """
        return np.abs(self.by_method[method].scores)

    def rank_indices(self, method: str) -> Int[np.ndarray, "token"]:
        """Return the indices of the content tokens by decreasing absolute score; ties in text order.

        Args:
            method: A key of `LECTURE_METHODS`.

        Returns:
            Indices of tokens, without special tokens.
        """
        content_indices = self.content_indices
        return content_indices[np.argsort(-self.compute_abs_scores(method)[content_indices], kind="stable")]

    def rank_tokens(self, method: str) -> list[str]:
        """Return the content tokens by decreasing absolute score.

        Args:
            method: A key of `LECTURE_METHODS`.

        Returns:
            Names of tokens, without special tokens.
        """
        return [self.grad_sam.tokens[index] for index in self.rank_indices(method)]

    @property
    def rank_correlation(self) -> float:
        """Spearman rank correlation of the absolute scores of Grad-SAM and SHAP, without special tokens.

        NaN with fewer than two tokens, or if the scores of a method are all equal.
        """
        from scipy.stats import spearmanr

        grad_sam_scores = self.compute_abs_scores("Grad-SAM")[self.content_indices]
        shap_scores = self.compute_abs_scores("SHAP")[self.content_indices]
        if len(grad_sam_scores) < 2 or np.ptp(grad_sam_scores) == 0 or np.ptp(shap_scores) == 0:
            return float("nan")
        return float(spearmanr(grad_sam_scores, shap_scores).statistic)

    @property
    def top_overlap(self) -> float:
        """Fraction of the `NUM_TOP_TOKENS` highest-ranked tokens that Grad-SAM and SHAP share."""
        count = min(NUM_TOP_TOKENS, len(self.content_indices))
        if not count:
            return float("nan")
        shared = set(self.rank_indices("Grad-SAM")[:count]) & set(self.rank_indices("SHAP")[:count])
        return len(shared) / count

    def compute_special_fractions(self, method: str) -> dict[str, float]:
        """Compute the fraction of Σ|score| that each special token holds, [CLS] and [SEP] for BERT.

        Args:
            method: A key of `LECTURE_METHODS`.

        Returns:
            Fractions from 0 to 1 by name of the token; all 0 if all scores are.
        """
        abs_scores = self.compute_abs_scores(method)
        total = float(abs_scores.sum())
        special_indices = [index for index, is_special in enumerate(self.grad_sam.units.special) if is_special]
        return {
            self.grad_sam.tokens[index]: float(abs_scores[index]) / total if total else 0.0 for index in special_indices
        }

    def compute_first_special_fraction(self, method: str) -> float:
        """Compute the fraction of the first special token, usually [CLS]; 0 without special tokens.

        Args:
            method: A key of `LECTURE_METHODS`.

        Returns:
            A fraction from 0 to 1.
        """
        return next(iter(self.compute_special_fractions(method).values()), 0.0)

    @property
    def is_first_special_largest(self) -> bool:
        """Whether no token has a larger Grad-SAM score than the first special token."""
        special_indices = np.flatnonzero(self.grad_sam.units.special)
        scores = self.grad_sam.scores
        return bool(len(special_indices)) and bool(scores[special_indices[0]] == scores.max())

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON-serialisable values.

        Returns:
            Text, label, rank correlation, overlap of the top tokens, and scores and ranking by each method.
        """
        return {
            "text": self.text,
            "label": self.label,
            "rank_correlation": self.rank_correlation,
            f"top_{NUM_TOP_TOKENS}_overlap": self.top_overlap,
            "methods": {
                method: {
                    "method": e.method,
                    "label": str(e.target["name"]),
                    "tokens": e.tokens,
                    "scores": to_json_value(e.scores),
                    "ranking": self.rank_tokens(method),
                    "special_shares": self.compute_special_fractions(method),
                }
                for method, e in self.by_method.items()
            },
        }


@dataclass(frozen=True)
class LectureResult:
    """Comparison of Grad-SAM with SHAP on all sentences.

    `plot()` draws a figure; terminals and notebooks show a table.

    Attributes:
        sentences: One comparison per sentence.
    """

    sentences: tuple[SentenceComparison, ...]

    @property
    def mean_rank_correlation(self) -> float:
        """Mean rank correlation of the sentences that have one; NaN if none has."""
        correlations = [sentence.rank_correlation for sentence in self.sentences]
        if not np.isfinite(correlations).any():
            return float("nan")
        return float(np.nanmean(correlations))

    @property
    def first_special_token(self) -> str:
        """Name of the first special token, usually [CLS]."""
        return next(
            (token for sentence in self.sentences for token in sentence.compute_special_fractions("SHAP")),
            "special tokens",
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON-serialisable values, schema "clearhead/lecture".

        Returns:
            The mean rank correlation (NaN if no sentence has one), and scores and fractions of each sentence.

        Example:
            >>> LectureResult(()).to_dict()["sentences"]
            []
        """
        return {
            "schema": "clearhead/lecture",
            "version": 1,
            "rank_correlation": {"statistic": "spearman", "of": "sizes of scores", "special_units": "left out"},
            "mean_rank_correlation": self.mean_rank_correlation,
            "sentences": [sentence.to_dict() for sentence in self.sentences],
        }

    def plot(self) -> "Figure":
        """Draw the scores of both methods for each sentence, and the fractions of the first special token.

        Returns:
            A matplotlib figure.

        Example:
            >>> clearhead.run_lecture(ex).plot().savefig("lecture.pdf")  # doctest: +SKIP
        """
        from clearhead.studies.lecture_figure import plot_lecture

        return plot_lecture(self)

    def __rich__(self) -> Any:
        from clearhead.studies.lecture_figure import render_lecture

        return render_lecture(self)


def run_lecture(explainer: "Explainer", sentences: Sequence[str] = LECTURE_SENTENCES) -> LectureResult:
    """Explain the predicted class of each sentence with Grad-SAM and SHAP, and compare the scores.

    SHAP as in the lecture (profile `shap_lecture`) always explains class 1.

    Args:
        explainer: Explainer of a text classifier with at least two classes.
        sentences: Sentences; by default the five of the lecture.

    Returns:
        One comparison per sentence.

    Raises:
        InputError: `sentences` is not a list of texts, or the model is not such a classifier.

    Example:
        >>> clearhead.run_lecture(clearhead.load("zoo:sentiment")).mean_rank_correlation  # doctest: +SKIP
    """
    if isinstance(sentences, str) or not sentences or not all(isinstance(text, str) for text in sentences):
        raise InputError(f"the lecture needs a list of sentences, not {sentences!r}")
    adapter = explainer.adapter
    if adapter.input_names != ("text",) or adapter.readout is None:
        raise InputError(
            f"the lecture needs a text classifier; {adapter.name} takes {' and '.join(adapter.input_names)}"
        )
    num_labels = len(adapter.labels)
    if num_labels < 2:
        raise InputError(
            f"the lecture explains class 1, counted from 0, but {adapter.model_class_name} has {num_labels}"
        )
    methods_by_profile: dict[str | None, dict[str, Method]] = {}
    for name, (method, profile) in LECTURE_METHODS.items():
        methods_by_profile.setdefault(profile, {})[name] = method
    explanations: dict[str, list[Any]] = {}
    for profile, methods in methods_by_profile.items():
        by_method = explainer.explain(list(sentences), method=list(methods.values()), profile=profile)
        explanations |= {name: by_method[str(method)] for name, method in methods.items()}
    comparisons = [
        SentenceComparison({name: explanations[name][index] for name in LECTURE_METHODS})
        for index in range(len(sentences))
    ]
    return LectureResult(tuple(comparisons))
