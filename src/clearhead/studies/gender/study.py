"""Study of an axis such as gender in a masked language model.

Running text → sentences with listed words and their counterfactuals → one direction per layer → maps of sentences, the
similarity of AttCAT and DR, the ranking of listed words, and the model with the axis removed.

>>> run_axis_study(ex, texts, pairs, {"free": make_free_templates("[MASK]")}, names=("he", "she"))  # doctest: +SKIP
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from clearhead.concepts.ablation_cost import ProjectionsByLayer, compute_masked_lm_cost
from clearhead.concepts.directions import Directions
from clearhead.concepts.hidden_states import Progress
from clearhead.concepts.removal import compute_conceptor_negation, fit_pca_direction
from clearhead.concepts.word_pairs import (
    AxisVectors,
    PairOccurrence,
    WordPair,
    collect_occurrences,
    compute_axis_vectors,
    fit_directions,
)
from clearhead.engine.batching import with_progress
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.explanation.explanation import to_json_value
from clearhead.explanation.json_keys import to_snake_case_keys
from clearhead.stats import ConfidenceInterval, compare_paired, compute_mean_interval
from clearhead.studies.gender.axis_maps import (
    AxisMaps,
    compare_rankings,
    compute_axis_maps,
    compute_filler_contribution,
    compute_map_similarity,
    compute_pair_difference,
    find_word_pieces,
    get_masked_lm_adapter,
)
from clearhead.studies.gender.map_similarity import ProfileSimilarity
from clearhead.studies.gender.pronouns import (
    compute_pronoun_probabilities,
    select_single_token_templates,
    summarise_pronouns,
)
from clearhead.studies.gender.templates import BiasTemplate, PeopleSentence

#: Methods that remove an axis from the hidden states.
REMOVAL_METHODS = ("densray", "hard", "conceptor")
#: Number of sentences of each set whose maps are kept in the result.
NUM_SHOWN_SENTENCES = 2
#: Number of sentences held out to rank their listed words and to measure the cost of removal.
NUM_HELD_OUT_SENTENCES = 100


@dataclass(frozen=True)
class SentenceSetResult:
    """Results on one set of sentences.

    Attributes:
        name: Name of the set.
        count: Number of sentences.
        similarity: Similarity of AttCAT and DR.
        share: Contribution of the filler to Σ|AttCAT|; None if no sentence has a filler.
        largest: Number of sentences in which the filler contributes most.
        ranks: Whether the maps rank the filler first, see `compare_rankings`; None if no sentence has a filler.
        pronouns: Probabilities at the mask by removal method ("" for the unchanged model), means over sentences.
        changes: By removal method, |ln p(a)/p(b)| with − without removal, and its p-value.
        shown: Some sentences with their maps.
    """

    name: str
    count: int
    similarity: ProfileSimilarity | None
    share: ConfidenceInterval | None
    largest: int
    ranks: dict[str, Any] | None
    pronouns: dict[str, dict[str, ConfidenceInterval]]
    changes: dict[str, tuple[ConfidenceInterval, float]]
    shown: dict[str, AxisMaps]


@dataclass
class AxisStudy:
    """Results of a study of an axis.

    Attributes:
        model: Name of the model.
        names: Names of the two sides of the axis.
        compared_words: The two words that are compared at the mask.
        num_pairs: Number of word pairs with an occurrence.
        num_occurrences: Number of sentences that the directions were fitted on.
        directions: Directions of the axis by layer.
        set_results: Results by set of sentences.
        rank_comparison: Ranking of the listed words in held-out sentences, see `compare_rankings`.
        people_scores: Position of subject and object on the axis, for sentences about two people.
        costs: Loss of the language model on held-out sentences, by removal method.
        shown_maps: Maps of further sentences.
        settings: Settings of the run, for the report.
    """

    model: str
    names: WordPair
    compared_words: WordPair
    num_pairs: int
    num_occurrences: int
    directions: Directions
    set_results: list[SentenceSetResult]
    rank_comparison: dict[str, Any] | None
    people_scores: list[dict[str, Any]]
    costs: dict[str, dict[str, ConfidenceInterval]]
    shown_maps: dict[str, AxisMaps] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        from clearhead.render.html import render_notebook_view_model
        from clearhead.render.reports.concepts import build_axis_report

        return render_notebook_view_model(build_axis_report(self))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON-serialisable values, schema "clearhead/axis".

        Returns:
            Plain JSON values; non-finite numbers become null.
        """
        costs = {
            method: {name: asdict(interval) for name, interval in intervals.items()}
            for method, intervals in self.costs.items()
        }
        return to_json_value(
            {
                "schema": "clearhead/axis",
                "version": 2,
                "model": self.model,
                "names": self.names,
                "words": self.compared_words,
                "pairs": self.num_pairs,
                "occurrences": self.num_occurrences,
                "settings": self.settings,
                "layers": self.directions.to_table(),
                "sets": [_set_result_to_dict(result) for result in self.set_results],
                "ranks": _ranks_to_dict(self.rank_comparison),
                "people": to_snake_case_keys(self.people_scores),
                "costs": to_snake_case_keys(costs),
                "shown": _maps_to_dict(self.shown_maps),
            }
        )


def run_axis_study(
    explainer: Explainer,
    texts: Iterable[str],
    pairs: Sequence[WordPair],
    template_sets: Mapping[str, Sequence[BiasTemplate]],
    *,
    names: WordPair = ("first", "second"),
    compared_words: WordPair = ("he", "she"),
    sentences: Sequence[str] = (),
    people: Sequence[PeopleSentence] = (),
    num_sentences: int = 1000,
    removal_methods: Sequence[str] = REMOVAL_METHODS,
    normalise: bool = True,
    few: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    progress: Progress = False,
) -> AxisStudy:
    """Fit the axis of word pairs on running text and analyse sentences with it.

    Args:
        explainer: Explainer of a masked language model.
        texts: Running text.
        pairs: Word pairs that define the axis.
        template_sets: Sets of sentences with a mask, by name.
        names: Names of the two sides of the axis.
        compared_words: Words to compare at the mask.
        sentences: Further sentences, with or without a mask, whose maps are kept.
        people: Sentences with a subject and an object.
        num_sentences: Number of sentences to fit the directions on.
        removal_methods: Methods that remove the axis, out of `REMOVAL_METHODS`.
        normalise: Whether to normalise the vectors, as in `fit_directions`.
        few: Whether to allow fewer sentences than dimensions, as in `fit_directions`.
        batch_size: Maximum number of sentences per pass.
        seed: Seed of the fit.
        progress: Whether to show a progress bar, or a function that wraps the sequence.

    Returns:
        The directions with all analyses; those without input are empty.

    Raises:
        InputError: The model is not a masked language model, the text has too few of the words, or a removal method
            is unknown.
    """
    get_masked_lm_adapter(explainer)
    collected = collect_occurrences(texts, pairs, num_sentences + NUM_HELD_OUT_SENTENCES)
    num_held_out = min(NUM_HELD_OUT_SENTENCES, len(collected) // 5)
    num_fitted = len(collected) - num_held_out
    occurrences = collected[:num_fitted]
    held_out = collected[num_fitted:]
    vectors = compute_axis_vectors(explainer, occurrences, batch_size=batch_size, progress=progress)
    directions = fit_directions(vectors, names, normalise=normalise, seed=seed, few=few)
    projections = {
        method: compute_removal_projections(method, vectors, directions, names) for method in removal_methods
    }
    set_results = [
        analyse_sentence_set(
            explainer, directions, name, list(templates), compared_words, projections, batch_size, progress
        )
        for name, templates in template_sets.items()
    ]
    rank_comparison = _compare_held_out_rankings(explainer, directions, held_out, pairs, progress)
    people_scores = _score_people_sentences(explainer, directions, people, progress)
    # alternate between the sentence and its counterfactual, so that both sides of the axis are equally frequent
    cost_texts = [occurrence.texts[index % 2] for index, occurrence in enumerate(held_out)]
    costs = {}
    if held_out:
        costs = {
            method: compute_masked_lm_cost(explainer, cost_texts, projection)
            for method, projection in projections.items()
        }
    return AxisStudy(
        model=explainer.adapter.name,
        names=names,
        compared_words=compared_words,
        num_pairs=len({occurrence.words for occurrence in occurrences}),
        num_occurrences=len(occurrences),
        directions=directions,
        set_results=set_results,
        rank_comparison=rank_comparison,
        people_scores=people_scores,
        costs=costs,
        shown_maps={text: compute_axis_maps(explainer, directions, text) for text in sentences},
        settings={"normalise": normalise, "seed": seed, "num_sentences": num_sentences},
    )


def compute_removal_projections(
    removal_method: str, vectors: AxisVectors, directions: Directions, names: WordPair
) -> ProjectionsByLayer:
    """Compute the direction or projection that a removal method takes out of each layer.

    Args:
        removal_method: "densray", "hard" or "conceptor".
        vectors: Hidden states of the two sides by layer.
        directions: Directions of the axis, which "densray" removes.
        names: Names of the two sides.

    Raises:
        InputError: The removal method is unknown.
    """
    factories: dict[str, Callable[[], ProjectionsByLayer]] = {
        "densray": lambda: directions,
        "hard": lambda: {layer: fit_pca_direction(*sides, names=names) for layer, sides in vectors.by_layer.items()},
        "conceptor": lambda: {layer: compute_conceptor_negation(*sides) for layer, sides in vectors.by_layer.items()},
    }
    if removal_method not in factories:
        raise InputError(f"unknown removal method {removal_method!r}. Accepted: {', '.join(factories)}")
    return factories[removal_method]()


def analyse_sentence_set(
    explainer: Explainer,
    directions: Directions,
    name: str,
    templates: Sequence[BiasTemplate],
    compared_words: WordPair,
    projections_by_method: Mapping[str, ProjectionsByLayer],
    batch_size: int = 32,
    progress: Progress = False,
) -> SentenceSetResult:
    """Compute the maps and mask probabilities of a set of sentences, and summarise them.

    Args:
        explainer: Explainer of a masked language model.
        directions: Directions of the axis by layer.
        name: Name of the set.
        templates: Sentences with a mask.
        compared_words: Words to compare at the mask, for templates without words of their own.
        projections_by_method: Projections to remove from each layer, by removal method.
        batch_size: Maximum number of sentences per pass.
        progress: Whether to show a progress bar, or a function that wraps the sequence.
    """
    selected = select_single_token_templates(explainer, templates)
    axis_maps = [
        compute_axis_maps(explainer, directions, template.text) for template in with_progress(selected, progress)
    ]
    filler_maps = []
    filler_pieces = []
    contributions = []
    for maps, template in zip(axis_maps, selected, strict=True):
        if template.filler is None:
            continue
        pieces = find_word_pieces(maps.tokens, template.filler)
        if pieces:
            filler_maps.append(maps)
            filler_pieces.append(pieces)
            contributions.append(compute_filler_contribution(maps, template.filler))
    results_by_method = {"": compute_pronoun_probabilities(explainer, selected, compared_words, batch_size=batch_size)}
    for method, projections in projections_by_method.items():
        results_by_method[method] = compute_pronoun_probabilities(
            explainer, selected, compared_words, projections, batch_size
        )
    magnitudes = {
        method: np.array([abs(result.log_ratio) for result in results]) for method, results in results_by_method.items()
    }
    has_fillers = bool(filler_maps)
    return SentenceSetResult(
        name=name,
        count=len(selected),
        similarity=compute_map_similarity(axis_maps, _find_filler_position(filler_pieces)),
        share=compute_mean_interval(np.array([share for share, _ in contributions])) if has_fillers else None,
        largest=sum(is_largest for _, is_largest in contributions),
        ranks=compare_rankings(filler_maps, filler_pieces) if has_fillers else None,
        pronouns={method: summarise_pronouns(results) for method, results in results_by_method.items()},
        changes={
            method: (
                compute_mean_interval(magnitudes[method] - magnitudes[""]),
                compare_paired(magnitudes[method], magnitudes[""])[1],
            )
            for method in projections_by_method
        },
        shown={
            template.text: maps for template, maps in list(zip(selected, axis_maps, strict=True))[:NUM_SHOWN_SENTENCES]
        },
    )


def _find_filler_position(filler_pieces: Sequence[Sequence[int]]) -> int:
    """Return the most frequent first token of the filler, which the haversine distance compares; 3 without fillers."""
    positions = [pieces[0] for pieces in filler_pieces]
    return max(set(positions), key=positions.count, default=3)


def _compare_held_out_rankings(
    explainer: Explainer,
    directions: Directions,
    held_out: Sequence[PairOccurrence],
    pairs: Sequence[WordPair],
    progress: Progress,
) -> dict[str, Any] | None:
    """Compare how DR and AttDR rank the listed words of held-out sentences; None without such sentences.

    Each sentence is paired with its counterfactual, so that both sides of the word pairs are represented.
    """
    listed_words = {word for pair in pairs for word in pair}
    axis_maps: list[AxisMaps] = []
    listed_indices: list[list[int]] = []
    for occurrence in with_progress(list(held_out), progress):
        version_maps = [compute_axis_maps(explainer, directions, text) for text in occurrence.texts]
        version_indices = [_find_listed_indices(maps.tokens, listed_words) for maps in version_maps]
        if all(version_indices):
            axis_maps += version_maps
            listed_indices += version_indices
    if not axis_maps:
        return None
    return compare_rankings(axis_maps, listed_indices, num_versions=2)


def _find_listed_indices(tokens: Sequence[str], listed_words: Container[str]) -> list[int]:
    """Return the indices of listed tokens, ignoring case and the tokenizer's word markers (Ġ, ▁)."""
    return [index for index, token in enumerate(tokens) if token.lstrip("Ġ▁").casefold() in listed_words]


def _score_people_sentences(
    explainer: Explainer, directions: Directions, sentences: Sequence[PeopleSentence], progress: Progress
) -> list[dict[str, Any]]:
    """Compute DR and AttDR of subject and object, summed over layers, and their difference."""
    rows = []
    for sentence in with_progress(list(sentences), progress):
        maps = compute_axis_maps(explainer, directions, sentence.text)
        subject_pieces = find_word_pieces(maps.tokens, sentence.subject)
        object_pieces = find_word_pieces(maps.tokens, sentence.object)
        if not subject_pieces or not object_pieces:
            continue
        row: dict[str, Any] = {"text": sentence.text, "subject": sentence.subject, "object": sentence.object}
        for name in ("dr", "attdr"):
            sums = maps.get_map(name).sum(0)
            row[f"{name} subject"] = float(sums[subject_pieces].mean())
            row[f"{name} object"] = float(sums[object_pieces].mean())
            row[f"{name} difference"] = compute_pair_difference(maps, subject_pieces, object_pieces, name)
        rows.append(row)
    return rows


def _set_result_to_dict(result: SentenceSetResult) -> dict[str, Any]:
    """Convert the results of a sentence set to a dict, with its maps and ranks."""
    pronouns = to_snake_case_keys(asdict(result)["pronouns"])
    return {
        **asdict(result),
        "pronouns": pronouns,
        "shown": _maps_to_dict(result.shown),
        "ranks": _ranks_to_dict(result.ranks),
    }


def _maps_to_dict(maps_by_text: Mapping[str, AxisMaps]) -> dict[str, Any]:
    """Convert the maps of several texts, by text."""
    return {text: _axis_maps_to_dict(maps) for text, maps in maps_by_text.items()}


def _axis_maps_to_dict(axis_maps: AxisMaps) -> dict[str, Any]:
    """Convert tokens, mask index and all maps to lists; a map that was not computed is None."""
    converted: dict[str, Any] = {"tokens": axis_maps.tokens, "mask": axis_maps.mask_index}
    for name in ("dr", "attention", "cat", "attdr", "attcat", "drcat", "dr_attcat"):
        values = getattr(axis_maps, name)
        converted[name] = None if values is None else values.tolist()
    return converted


def _ranks_to_dict(ranks: dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert the intervals of a rank comparison to dicts; None if there is no comparison."""
    if not ranks:
        return None
    return {name: asdict(value) if isinstance(value, ConfidenceInterval) else value for name, value in ranks.items()}
