"""The whole way: running text → sentences with listed words and their counterfactuals → a direction in every layer →
maps of sentences, how alike AttCAT and DR are, which map ranks listed words first, and the model without the axis.

>>> study(ex, texts, pairs, {"free": free("[MASK]")}, names=("he", "she"))                # doctest: +SKIP
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from clearhead.concepts.ablation_cost import Maps, cost_at_masks
from clearhead.concepts.directions import Directions
from clearhead.concepts.hidden_states import Progress
from clearhead.concepts.removal import conceptor_negation, hard_direction
from clearhead.concepts.word_pairs import AxisVectors, Occurrence, Pair, axis_vectors, collect, directions_of
from clearhead.engine.batching import followed
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.explanation.explanation import plain
from clearhead.stats import Interval, interval, paired
from clearhead.studies.gender.axis_maps import (
    Flow,
    alike,
    clearer,
    filler_share,
    flow,
    masked_model,
    pair_score,
    pieces_of,
)
from clearhead.studies.gender.map_similarity import Similarity
from clearhead.studies.gender.pronouns import answerable, pronouns, summary
from clearhead.studies.gender.templates import People, Template

#: Ways to take an axis out of the layers.
WAYS = ("densray", "hard", "conceptor")
#: How many sentences of each set are kept with their maps.
SHOWN = 2
#: How many sentences are kept apart to rank their listed words, and to measure what removing costs.
APART = 100


@dataclass(frozen=True)
class OfSet:
    """What was found on one set of sentences.

    share, largest: of the filler in Σ|AttCAT|, and in how many sentences it is the largest word
    ranks: do the maps rank the filler first; pronouns: by way of removal ("" for none), means over sentences
    changes: |ln p(a)/p(b)| after removing minus before, and its p; shown: some sentences with their maps
    """

    name: str
    count: int
    similarity: Similarity | None
    share: Interval | None
    largest: int
    ranks: dict[str, Any] | None
    pronouns: dict[str, dict[str, Interval]]
    changes: dict[str, tuple[Interval, float]]
    shown: dict[str, Flow]


@dataclass
class Study:
    """All of it.

    ranks: of sentences that hold listed words; costs: of loss at masked words, by way of removal; shown: sentences of
    one's own with their maps
    """

    model: str
    names: Pair
    words: Pair
    pairs: int
    occurrences: int
    directions: Directions
    sets: list[OfSet]
    ranks: dict[str, Any] | None
    people: list[dict[str, Any]]
    costs: dict[str, dict[str, Interval]]
    shown: dict[str, Flow] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        from clearhead.render.html import notebook_cell
        from clearhead.render.reports.concepts import axis_sheet

        return notebook_cell(axis_sheet(self))

    def to_dict(self) -> dict[str, Any]:
        about = {"schema": "clearhead/axis", "version": 1, "model": self.model, "names": self.names}
        about |= {"words": self.words, "pairs": self.pairs, "occurrences": self.occurrences, "settings": self.settings}
        found = [{**asdict(one), "shown": _plain_flows(one.shown)} for one in self.sets]
        rest = {"layers": self.directions.table(), "sets": found, "ranks": _plain_ranks(self.ranks)}
        for one in found:
            one["ranks"] = _plain_ranks(one["ranks"])
        costs = {way: {name: asdict(value) for name, value in own.items()} for way, own in self.costs.items()}
        return plain({**about, **rest, "people": self.people, "costs": costs, "shown": _plain_flows(self.shown)})


def study(
    ex: Explainer,
    texts: Iterable[str],
    pairs: Sequence[Pair],
    sets: Mapping[str, Sequence[Template]],
    *,
    names: Pair = ("first", "second"),
    words: Pair = ("he", "she"),
    sentences: Sequence[str] = (),
    people: Sequence[People] = (),
    count: int = 1000,
    ways: Sequence[str] = WAYS,
    normalise: bool = True,
    few: bool = False,
    seed: int = 0,
    progress: Progress = False,
) -> Study:
    """Find the axis of word pairs in running text, and follow it through sentences.

    pairs: those of `known_pairs`; names: what the two sides are called; words: the two that are compared at masks
    sentences: of one's own, with a mask or without, to be shown; people: sentences with a subject and an object
    count: how many sentences the directions are found with; normalise, few: as in `densray`
    """
    masked_model(ex)
    collected = collect(texts, pairs, count + APART)
    kept = min(APART, len(collected) // 5)
    found, apart = collected[: len(collected) - kept], collected[len(collected) - kept :]
    vectors = axis_vectors(ex, found, progress=progress)
    directions = directions_of(vectors, names, normalise=normalise, seed=seed, few=few)
    maps = {way: removal(way, vectors, directions, names) for way in ways}
    by_turns = [one.texts[place % 2] for place, one in enumerate(apart)]
    return Study(
        model=ex.subject.name,
        names=names,
        words=words,
        pairs=len({one.words for one in found}),
        occurrences=len(found),
        directions=directions,
        sets=[of_set(ex, directions, name, list(own), words, maps, progress) for name, own in sets.items()],
        ranks=_of_sentences(ex, directions, apart, pairs, progress),
        people=_of_people(ex, directions, people, progress),
        costs={way: cost_at_masks(ex, by_turns, own) for way, own in maps.items() if apart},
        shown={text: flow(ex, directions, text) for text in sentences},
        settings={"normalise": normalise, "seed": seed, "sentences asked for": count},
    )


def removal(way: str, vectors: AxisVectors, directions: Directions, names: Pair) -> Maps:
    """What is taken out of each layer, in one of three ways."""
    made: dict[str, Callable[[], Maps]] = {
        "densray": lambda: directions,
        "hard": lambda: {k: hard_direction(*own, names=names) for k, own in vectors.by_layer.items()},
        "conceptor": lambda: {k: conceptor_negation(*own) for k, own in vectors.by_layer.items()},
    }
    if way not in made:
        raise InputError(f"unknown way to remove an axis {way!r}. Accepted: {', '.join(made)}")
    return made[way]()


def of_set(
    ex: Explainer,
    directions: Directions,
    name: str,
    templates: Sequence[Template],
    words: Pair,
    maps: Mapping[str, Maps],
    progress: Progress = False,
) -> OfSet:
    """Maps of all sentences of a set, and what follows from them."""
    asked = answerable(ex, templates)
    flows = [flow(ex, directions, one.text) for one in followed(asked, progress)]
    fillers = [(one, own.filler) for one, own in zip(flows, asked, strict=True) if own.filler is not None]
    placed = [(one, pieces_of(one.tokens, filler)) for one, filler in fillers]
    placed = [(one, pieces) for one, pieces in placed if pieces]
    shares = [filler_share(one, filler) for one, filler in fillers if pieces_of(one.tokens, filler)]
    before = pronouns(ex, asked, words)
    after = {way: pronouns(ex, asked, words, own) for way, own in maps.items()}
    sizes = {way: np.array([abs(one.log_ratio) for one in own]) for way, own in {"": before, **after}.items()}
    return OfSet(
        name=name,
        count=len(asked),
        similarity=alike(flows, _place(placed)),
        share=interval(np.array([share for share, _ in shares])) if shares else None,
        largest=sum(largest for _, largest in shares),
        ranks=clearer([one for one, _ in placed], [pieces for _, pieces in placed]) if placed else None,
        pronouns={way: summary(own) for way, own in {"": before, **after}.items()},
        changes={way: (interval(sizes[way] - sizes[""]), paired(sizes[way], sizes[""])[1]) for way in maps},
        shown={one.text: own for one, own in list(zip(asked, flows, strict=True))[:SHOWN]},
    )


def _place(placed: Sequence[tuple[Flow, Sequence[int]]]) -> int:
    """Where the filler begins in most sentences: haversine looks at it and at the first token."""
    places = [pieces[0] for _, pieces in placed]
    return max(set(places), key=places.count) if places else 3


def _of_sentences(
    ex: Explainer, directions: Directions, apart: Sequence[Occurrence], pairs: Sequence[Pair], progress: Progress
) -> dict[str, Any] | None:
    """Sentences that the directions were not found with: do DR and AttDR rank their listed words first?

    Each counts with its counterfactual, so that neither side of the pairs is left out.
    """
    listed = {word for pair in pairs for word in pair}
    flows, places = [], []
    for one in followed(list(apart), progress):
        both = [flow(ex, directions, text) for text in one.texts]
        there = [[i for i, token in enumerate(own.tokens) if token.lstrip("Ġ▁").casefold() in listed] for own in both]
        if all(there):
            flows += both
            places += there
    return clearer(flows, places, versions=2) if flows else None


def _of_people(
    ex: Explainer, directions: Directions, sentences: Sequence[People], progress: Progress
) -> list[dict[str, Any]]:
    """Subject minus object, summed over layers, by DR and by AttDR."""
    found = []
    for one in followed(list(sentences), progress):
        own = flow(ex, directions, one.text)
        ends = [pieces_of(own.tokens, word) for word in (one.subject, one.object)]
        if not all(ends):
            continue
        first, second = ends
        line: dict[str, Any] = {"text": one.text, "subject": one.subject, "object": one.object}
        for name in ("dr", "attdr"):
            sums = own.of(name).sum(0)
            line |= {f"{name} subject": float(sums[first].mean()), f"{name} object": float(sums[second].mean())}
            line[f"{name} difference"] = pair_score(own, first, second, name)
        found.append(line)
    return found


def _plain_flows(flows: Mapping[str, Flow]) -> dict[str, Any]:
    return {text: _plain_flow(one) for text, one in flows.items()}


def _plain_flow(one: Flow) -> dict[str, Any]:
    maps = {name: getattr(one, name) for name in ("dr", "attention", "cat", "attdr", "attcat", "drcat", "dr_attcat")}
    made = {name: None if own is None else own.tolist() for name, own in maps.items()}
    return {"tokens": one.tokens, "mask": one.mask, **made}


def _plain_ranks(ranks: dict[str, Any] | None) -> dict[str, Any] | None:
    made = ranks or {}
    return {k: asdict(v) if isinstance(v, Interval) else v for k, v in made.items()} if ranks else None
