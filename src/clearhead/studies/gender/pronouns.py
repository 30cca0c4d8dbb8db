"""Probabilities of two words at the mask of a sentence, relative to their prior, with and without an axis removed."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from clearhead.adapters.base import InputOptions
from clearhead.concepts.ablation_cost import ProjectionsByLayer
from clearhead.concepts.removal import ablated_directions
from clearhead.concepts.word_pairs import WordPair, is_single_token
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.stats import ConfidenceInterval, compute_mean_interval
from clearhead.studies.gender.axis_maps import get_masked_lm_adapter
from clearhead.studies.gender.templates import BiasTemplate


@dataclass(frozen=True)
class PronounProbabilities:
    """Probabilities of two words at the mask of a sentence.

    Attributes:
        text: The sentence.
        first_probability: Probability of the first word.
        second_probability: Probability of the second word.
        first_prior: Probability of the first word if the filler is masked as well; None without a filler.
        second_prior: Probability of the second word if the filler is masked as well.
    """

    text: str
    first_probability: float
    second_probability: float
    first_prior: float | None
    second_prior: float | None

    @property
    def log_ratio(self) -> float:
        """ln p(first) − ln p(second)."""
        return float(np.log(self.first_probability) - np.log(self.second_probability))

    @property
    def bias(self) -> float | None:
        """Log ratio relative to the prior (Kurita et al. 2019); None without a filler."""
        if self.first_prior is None or self.second_prior is None:
            return None
        return self.log_ratio - float(np.log(self.first_prior) - np.log(self.second_prior))


def select_single_token_templates(explainer: Explainer, templates: Sequence[BiasTemplate]) -> list[BiasTemplate]:
    """Keep the templates whose compared words, if they have their own, are single tokens of the vocabulary.

    Raises:
        InputError: No template remains.
    """
    selected = [
        template
        for template in templates
        if template.compared_words is None or all(is_single_token(explainer, word) for word in template.compared_words)
    ]
    if not selected:
        raise InputError(f"no sentence has both of its words in the vocabulary of {explainer.adapter.name}")
    return selected


def compute_pronoun_probabilities(
    explainer: Explainer,
    templates: Sequence[BiasTemplate],
    word_pair: WordPair = ("he", "she"),
    projections: ProjectionsByLayer | None = None,
    batch_size: int = 32,
) -> list[PronounProbabilities]:
    """Compute the probabilities of two words at the first mask of each sentence.

    Args:
        explainer: Explainer of a masked language model.
        templates: The sentences.
        word_pair: The two words, for templates without words of their own.
        projections: Directions or projections to remove from the hidden states of each layer.
        batch_size: Sentences per forward pass.
    """
    ablation = nullcontext() if projections is None else ablated_directions(explainer, projections)
    queries = [(template.text, template.compared_words or word_pair) for template in templates]
    prior_queries = [
        (template.prior_text, template.compared_words or word_pair)
        for template in templates
        if template.prior_text is not None
    ]
    unique_prior_queries = list(dict.fromkeys(prior_queries))
    with ablation:
        probabilities = _compute_mask_probabilities(explainer, queries, batch_size)
        prior_probabilities = _compute_mask_probabilities(explainer, unique_prior_queries, batch_size)
    priors = dict(zip(unique_prior_queries, prior_probabilities, strict=True))
    results = []
    for template, (text, words), (first, second) in zip(templates, queries, probabilities, strict=True):
        first_prior: float | None = None
        second_prior: float | None = None
        if template.prior_text is not None:
            first_prior, second_prior = priors[template.prior_text, words]
        results.append(PronounProbabilities(text, first, second, first_prior, second_prior))
    return results


def summarise_pronouns(results: Sequence[PronounProbabilities]) -> dict[str, ConfidenceInterval]:
    """Average the probabilities over sentences.

    Returns:
        "first", "second" and "sum" of the probabilities; "leaning" = ln p(first)/p(second); "apart", its absolute
        value; "bias", the leaning relative to the prior; "size of bias", its absolute value.
    """
    biases = np.array([np.nan if result.bias is None else result.bias for result in results])
    columns = {
        "first": [result.first_probability for result in results],
        "second": [result.second_probability for result in results],
        "sum": [result.first_probability + result.second_probability for result in results],
        "apart": [abs(result.log_ratio) for result in results],
        "leaning": [result.log_ratio for result in results],
        "bias": biases,
        "size of bias": np.abs(biases),
    }
    return {name: compute_mean_interval(np.array(values)) for name, values in columns.items()}


def _compute_mask_probabilities(
    explainer: Explainer, queries: Sequence[tuple[str, WordPair]], batch_size: int
) -> list[tuple[float, float]]:
    """Compute the probabilities of both words at the first mask of each text."""
    adapter = get_masked_lm_adapter(explainer)
    probabilities: list[tuple[float, float]] = []
    for start in range(0, len(queries), batch_size):
        batch = queries[start : start + batch_size]
        samples = [sample for text, _ in batch for sample in adapter.make_samples(text, InputOptions())]
        mask_positions = [sample.mask_positions[0] for sample in samples]
        logits = adapter.session.forward(adapter.collate(samples)).logits
        rows = logits[torch.arange(len(samples)), mask_positions].double().softmax(-1)
        for row, (_, (first, second)) in zip(rows, batch, strict=True):
            first_probability = float(row[adapter.label_index(first)])
            probabilities.append((first_probability, float(row[adapter.label_index(second)])))
    return probabilities
