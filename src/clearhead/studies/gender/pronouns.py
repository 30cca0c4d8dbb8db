"""How likely two words are at the mask of a sentence, less how likely they are anyway, with and without an axis."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from clearhead.adapters.base import How
from clearhead.capture.session import at_rest
from clearhead.concepts.ablation_cost import Maps
from clearhead.concepts.removal import removed
from clearhead.concepts.word_pairs import Pair, is_one_piece
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.stats import Interval, interval
from clearhead.studies.gender.axis_maps import masked_model
from clearhead.studies.gender.templates import Template


@dataclass(frozen=True)
class Pronouns:
    """The probabilities of two words at the mask, and with the filler masked, too.

    bias: ln p(a)/p_prior(a) − ln p(b)/p_prior(b) (Kurita et al. 2019); None where there is no filler to mask
    """

    text: str
    first: float
    second: float
    prior_first: float | None
    prior_second: float | None

    @property
    def log_ratio(self) -> float:
        return float(np.log(self.first) - np.log(self.second))

    @property
    def bias(self) -> float | None:
        if self.prior_first is None or self.prior_second is None:
            return None
        return self.log_ratio - float(np.log(self.prior_first) - np.log(self.prior_second))


def answerable(ex: Explainer, templates: Sequence[Template]) -> list[Template]:
    """Those whose two words, where they have words of their own, are one piece each of the vocabulary."""
    kept = [one for one in templates if one.words is None or all(is_one_piece(ex, word) for word in one.words)]
    if not kept:
        raise InputError(f"no sentence has both of its words in the vocabulary of {ex.subject.name}")
    return kept


def pronouns(
    ex: Explainer,
    templates: Sequence[Template],
    words: Pair = ("he", "she"),
    without: Maps | None = None,
    batch_size: int = 32,
) -> list[Pronouns]:
    """How likely the two words are at the first mask of each sentence; `without`: after removing these directions."""
    subject = masked_model(ex)
    asked = [(one, one.words or words) for one in templates]
    with at_rest(subject.model), nullcontext() if without is None else removed(ex, without):
        own = _probabilities(ex, [(one.text, pair) for one, pair in asked], batch_size)
        wanted = list(dict.fromkeys((one.prior, pair) for one, pair in asked if one.prior is not None))
        priors = dict(zip(wanted, _probabilities(ex, wanted, batch_size), strict=True))
    found = []
    for (one, pair), (first, second) in zip(asked, own, strict=True):
        prior: tuple[float | None, float | None] = (None, None) if one.prior is None else priors[one.prior, pair]
        found.append(Pronouns(one.text, first, second, *prior))
    return found


def summary(found: Sequence[Pronouns]) -> dict[str, Interval]:
    """Means over sentences. `apart` is |ln p(a)/p(b)|, `leaning` the same with its sign, `bias` less the prior's."""
    columns = {
        "first": [one.first for one in found],
        "second": [one.second for one in found],
        "sum": [one.first + one.second for one in found],
        "apart": [abs(one.log_ratio) for one in found],
        "leaning": [one.log_ratio for one in found],
        "bias": [np.nan if one.bias is None else one.bias for one in found],
        "size of bias": [np.nan if one.bias is None else abs(one.bias) for one in found],
    }
    return {name: interval(np.array(values)) for name, values in columns.items()}


@torch.no_grad()
def _probabilities(ex: Explainer, asked: Sequence[tuple[str, Pair]], batch_size: int) -> list[tuple[float, float]]:
    subject = masked_model(ex)
    found: list[tuple[float, float]] = []
    for start in range(0, len(asked), batch_size):
        part = asked[start : start + batch_size]
        samples = [sample for text, _ in part for sample in subject.samples(text, How())]
        logits = subject.model(**subject.collate(samples)).logits
        rows = logits[torch.arange(len(samples)), [sample.masks[0] for sample in samples]].double().softmax(-1)
        for row, (_, (a, b)) in zip(rows, part, strict=True):
            found.append((float(row[subject.label_index(a)]), float(row[subject.label_index(b)])))
    return found
