"""Grad-SAM beside SHAP on a few sentences: where they agree, and what becomes of [CLS].

Special tokens are left out of every ranking. Grad-SAM gives [CLS] much by construction: where the classifier reads
[CLS], its row alone has a gradient in the last layer. SHAP takes units out of the text, and [CLS] is in no text: it has
nothing to lose, and gets nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from clearhead.errors import InputError
from clearhead.explanation.explanation import Explanation, plain
from clearhead.methods.base import Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clearhead.explainer import Explainer

SENTENCES = (
    "I like the movie",
    "I cannot wait for next time",
    "She hates the book",
    "This is so boring",
    "You look extremely confused",
)
#: The two methods, and each of them once more in another reading, for what becomes of special tokens; with the profile.
METHODS = {
    "Grad-SAM": (Method("grad-sam"), None),
    "Grad-SAM, by columns": (Method("grad-sam", received=True), None),
    "SHAP": (Method("shap"), None),
    "SHAP, as in the lecture": (Method("shap"), "shap_lecture"),
}
#: How many of the first tokens are compared.
FIRST = 2


@dataclass(frozen=True)
class Beside:
    """One sentence by both methods."""

    by_method: dict[str, Explanation]

    @property
    def grad_sam(self) -> Explanation:
        return self.by_method["Grad-SAM"]

    @property
    def shap(self) -> Explanation:
        return self.by_method["SHAP"]

    @property
    def text(self) -> str:
        return self.grad_sam.units.texts[0]

    @property
    def label(self) -> str:
        return str(self.grad_sam.target["name"])

    @property
    def words(self) -> Int[np.ndarray, "token"]:
        """Which tokens are not special."""
        return np.asarray(self.grad_sam.units.drop_special())

    def sizes(self, method: str) -> Float[np.ndarray, "token"]:
        return np.abs(self.by_method[method].scores)

    def ranking(self, method: str) -> list[str]:
        """The tokens by the size of their score, the largest first, without special ones."""
        own = self.words[np.argsort(-self.sizes(method)[self.words], kind="stable")]
        return [self.grad_sam.tokens[place] for place in own]

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation of the sizes of both methods' scores, without special tokens."""
        from scipy.stats import spearmanr

        one, other = (self.sizes(method)[self.words] for method in ("Grad-SAM", "SHAP"))
        if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
            return float("nan")
        return float(spearmanr(one, other).statistic)

    @property
    def overlap(self) -> float:
        """How many of the first tokens both methods share, as a share."""
        count = min(FIRST, len(self.words))
        one, other = (
            set(self.words[np.argsort(-self.sizes(method)[self.words], kind="stable")][:count])
            for method in ("Grad-SAM", "SHAP")
        )
        return len(one & other) / count if count else float("nan")

    def special_shares(self, method: str) -> dict[str, float]:
        """What each special token has of all scores' sizes; [CLS] and [SEP] of BERT."""
        sizes, total = self.sizes(method), float(self.sizes(method).sum())
        special = [place for place, is_special in enumerate(self.grad_sam.units.special) if is_special]
        return {self.grad_sam.tokens[place]: float(sizes[place]) / total if total else 0.0 for place in special}

    def first_share(self, method: str) -> float:
        """The share of the special token that comes first, [CLS] as a rule."""
        return next(iter(self.special_shares(method).values()), 0.0)

    @property
    def first_wins(self) -> bool:
        """Whether, by Grad-SAM, no token has more than the special one that comes first."""
        special = np.flatnonzero(self.grad_sam.units.special)
        return bool(len(special)) and bool(self.grad_sam.scores[special[0]] == self.grad_sam.scores.max())

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "label": self.label,
            "rank_correlation": self.correlation,
            f"top_{FIRST}_overlap": self.overlap,
            "methods": {
                method: {
                    "method": e.method,
                    "label": str(e.target["name"]),
                    "tokens": e.tokens,
                    "scores": plain(e.scores),
                    "ranking": self.ranking(method),
                    "special_shares": self.special_shares(method),
                }
                for method, e in self.by_method.items()
            },
        }


@dataclass(frozen=True)
class Lecture:
    """All sentences; `plot()` draws them, and a terminal or notebook shows them as a table."""

    sentences: tuple[Beside, ...]

    @property
    def mean_correlation(self) -> float:
        found = [one.correlation for one in self.sentences]
        return float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")

    @property
    def first_special(self) -> str:
        """What the first special token is called."""
        return next((name for one in self.sentences for name in one.special_shares("SHAP")), "special tokens")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": "clearhead/lecture",
            "version": 1,
            "rank_correlation": {"statistic": "spearman", "of": "sizes of scores", "special_units": "left out"},
            "mean_rank_correlation": self.mean_correlation,
            "sentences": [one.to_dict() for one in self.sentences],
        }

    def plot(self) -> "Figure":
        """One figure: the bars of both methods for each sentence, and what becomes of special tokens."""
        from clearhead.studies.lecture_figure import plot

        return plot(self)

    def __rich__(self) -> Any:
        from clearhead.studies.lecture_figure import render

        return render(self)


def lecture(ex: "Explainer", sentences: Sequence[str] = SENTENCES) -> Lecture:
    """Grad-SAM beside SHAP for the predicted class of each sentence, by default the five of the lecture.

    SHAP as in the lecture (the profile shap_lecture) is about class 1, whatever is predicted.

    >>> clearhead.lecture(clearhead.load("zoo:sentiment")).mean_correlation  # doctest: +SKIP
    """
    if isinstance(sentences, str) or not sentences or not all(isinstance(text, str) for text in sentences):
        raise InputError(f"the lecture is about a list of sentences, not {sentences!r}")
    if ex.subject.takes != ("text",) or ex.subject.readout is None:
        raise InputError(
            f"the lecture is about models that put a text into classes; {ex.subject.name} takes "
            f"{' and '.join(ex.subject.takes)}"
        )
    if len(ex.subject.labels) < 2:
        known = len(ex.subject.labels)
        raise InputError(f"the lecture is about class 1, counted from 0, and {ex.subject.model_class} has {known}")
    found: dict[str, list[Any]] = {}
    for profile in dict.fromkeys(profile for _, profile in METHODS.values()):
        own = {name: method for name, (method, other) in METHODS.items() if other == profile}
        explained = ex.explain(list(sentences), method=list(own.values()), profile=profile)
        found |= {name: explained[str(method)] for name, method in own.items()}
    return Lecture(tuple(Beside({name: found[name][i] for name in METHODS}) for i in range(len(sentences))))
