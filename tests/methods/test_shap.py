"""SHAP over a hierarchy: against shap's own numbers, Owen values by their definition, and games with known values."""

import json
import warnings

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead.engine.passes.perturbation import MAX_PERTURBED_INPUTS
from clearhead.errors import CostWarning
from clearhead.methods._perturbation import CoalitionGame
from clearhead.methods.shap import PartitionShap
from clearhead.perturbation.hierarchy import (
    Hierarchy,
    build_spatial_hierarchy,
    build_text_hierarchy,
    merge_tokens_greedily,
)
from tests import models
from tests.methods import coalition_values, replica_comparison
from tests.methods.test_parity import DATA, ORIGINALS
from tests.methods.test_parity import explainer as author_model
from tests.replicas import shap as owen

FOLDER = DATA / "shap"
KINDS = {"default": "written-mask", "mask_nocollapse": "written-mask", "pad_nocollapse": "written-pad"}
LONG = "The author said it is boring, but she isn't here. Don't panic!"


def played(method, tree, value):
    count = max(tree.player_of_leaf) + 1
    game = CoalitionGame(count, 0, get_windows=None, get_hierarchy=lambda: tree)
    play, worth, asked = method.iter_coalitions(game), None, []
    while True:
        try:
            rows = play.send(worth)
        except StopIteration as end:
            return end.value, asked
        asked.append([tuple(row.nonzero().flatten().tolist()) for row in rows])
        worth = torch.tensor([value(members) for members in asked[-1]], dtype=torch.float64)


def nested(tree: Hierarchy, node: int | None = None):
    """A hierarchy as pairs of pairs, without what always stays."""
    node = tree.root if node is None else node
    children = tree.get_children(node)
    if children is None:
        return tree.player_of_leaf[node] if tree.player_of_leaf[node] >= 0 else None
    parts = [part for part in (nested(tree, child) for child in children) if part is not None]
    return tuple(parts) if len(parts) == 2 else parts[0] if parts else None


# Against shap itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sentence", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_what_shap_says(sentence: int, kind: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    text = json.loads((FOLDER / "sentences.json").read_text())[sentence]
    ex = clearhead.load(author_model("bert").adapter.model, tokenizer)
    with np.load(FOLDER / "arrays.npz") as file:
        values, base = (file[f"sent{sentence}/{kind}/{name}"] for name in ("values", "base_values"))
    for label in range(5):
        e = ex.explain(text, clearhead.Method("shap", replacement=KINDS[kind]), target=label)
        assert np.abs(e.scores - values[:, label]).max() < 1e-10
        assert e.base_value == pytest.approx(base[label], abs=1e-10)
    if sentence != 1:  # no word is in pieces, so that reading the text anew changes nothing
        plain = ex.explain(text, clearhead.Method("shap", replacement=KINDS[kind].removeprefix("written-")), target=4)
        np.testing.assert_allclose(plain.scores, e.scores, atol=1e-10)


@pytest.mark.skipif(not ORIGINALS.exists(), reason="the originals are kept beside the project")
def test_the_copies_are_those_of_the_originals() -> None:
    theirs = ORIGINALS / "captum_shap"
    assert (FOLDER / "arrays.npz").read_bytes() == (theirs / "shap_cases.npz").read_bytes()
    assert (FOLDER / "sentences.json").read_bytes() == (theirs / "shap_sentences.json").read_bytes()


@pytest.mark.parametrize(("fixed", "context"), [(None, "both"), (1, "present"), (0, "absent")])
def test_equals_the_package(fixed: int | None, context: str) -> None:
    shap = coalition_values.shap_package()
    ex = replica_comparison.explainer("bert/classify")
    tokenizer, model = ex.adapter.processor, ex.adapter.model

    def logits(texts):
        with torch.no_grad():
            return model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits.numpy()

    explainer = shap.explainers.PartitionExplainer(logits, shap.maskers.Text(tokenizer))
    theirs = explainer([LONG], fixed_context=fixed, max_evals=10**6, silent=True)
    method = clearhead.Method("shap", replacement="written-mask", context=context, evaluations=10**6)
    ours = ex.explain(LONG, method, target=1)
    np.testing.assert_allclose(ours.scores, theirs.values[0][:, 1], atol=1e-10)


# Against the definition -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "albert/classify"])
def test_equals_its_replica(subject: str) -> None:
    raw = models.inputs(subject)[2 if subject.startswith("albert") else 0]
    ex = replica_comparison.explainer(subject)
    players, units, value = coalition_values.game(subject, raw)
    e = ex.explain(raw, "shap")
    tree = nested(build_text_hierarchy(e.units, [players.index(i) if i in players else -1 for i in range(units)]))
    slow = owen.scores(range(len(players)), lambda there: value([players[i] for i in there]), tree)
    assert replica_comparison.gap(e.scores, coalition_values.on_units(slow, players, units)) < 1e-9
    assert e.base_value == pytest.approx(value([]), rel=1e-10)
    assert e.base_value + e.scores.sum() == pytest.approx(e.target["value"], rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_any_game_over_any_tree(count: int) -> None:
    generator = np.random.default_rng(count)
    worth = generator.normal(size=2**count)
    tree = build_spatial_hierarchy(generator.normal(size=(count, 2)))

    def value(members):
        return worth[sum(2**member for member in members)]

    shares, asked = played(PartitionShap(unit_context=None), tree, value)
    np.testing.assert_allclose(shares.scores, owen.scores(range(count), value, nested(tree)), atol=1e-12)
    assert sum(map(len, asked)) == shares_evaluated(asked), "no coalition is asked for twice"
    assert shares.diagnostics["unopened"] == 0


def shares_evaluated(asked) -> int:
    """How many different coalitions there were."""
    return len({members for rows in asked for members in rows})


@pytest.mark.parametrize(
    ("context", "expected"),
    [("both", [0, 0.5, 0.5, 0]), ("present", [-1 / 3, 2 / 3, 2 / 3, 0]), ("absent", [1 / 3, 1 / 3, 1 / 3, 0])],
)
def test_null_players(context: str, expected: list[float]) -> None:
    """f = x1·x2: with one context alone a player that never matters gets something (analysis.md, 5.2)."""
    tree = Hierarchy((0, 1, 2, 3), ((0, 1), (4, 2), (5, 3)))
    shares, _ = played(
        PartitionShap(unit_context=None, context=context), tree, lambda members: float({1, 2} <= set(members))
    )
    np.testing.assert_allclose(shares.scores, expected, atol=1e-12)


def test_an_additive_game_gives_back_its_weights() -> None:
    weights = np.linspace(-2, 3, 30)
    tree = build_spatial_hierarchy(np.stack([np.arange(30), np.zeros(30)], axis=1))
    shares, _ = played(
        PartitionShap(unit_context=None, evaluations=5000), tree, lambda members: 5 + weights[list(members)].sum()
    )
    np.testing.assert_allclose(shares.scores, weights, atol=1e-9)


@pytest.mark.filterwarnings("ignore::clearhead.errors.CostWarning")
@pytest.mark.parametrize("evaluations", [2, 3, 10, 40])
def test_a_budget_is_kept_and_nothing_is_lost(evaluations: int) -> None:
    """Beyond it, what a group has is spread over its players; it all still adds up."""
    tree = build_spatial_hierarchy(np.stack([np.arange(12), np.zeros(12)], axis=1))
    generator = np.random.default_rng(0)
    worth = {}

    def value(members):
        return worth.setdefault(members, generator.normal())

    shares, asked = played(PartitionShap(unit_context=None, evaluations=evaluations), tree, value)
    assert shares_evaluated(asked) <= evaluations
    total = value(tuple(range(12))) - value(())
    assert float(shares.scores.sum()) == pytest.approx(total)
    assert shares.diagnostics["unopened"] > 0
    if evaluations < 4:
        np.testing.assert_allclose(shares.scores, total / 12)
        assert shares.diagnostics["unopened"] == 1


@pytest.mark.filterwarnings("ignore::clearhead.errors.CostWarning")
def test_what_is_left_on_groups_is_said() -> None:
    """f = 3·x0 − x2 + 2·x3 over ((0, 1), (2, 3)): four evaluations open the whole, six one of its halves, too."""
    tree = Hierarchy((0, 1, 2, 3), ((0, 1), (2, 3), (4, 5)))
    weights = np.array([3.0, 0.0, -1.0, 2.0])

    def unopened(evaluations: int) -> float:
        shares, _ = played(
            PartitionShap(unit_context=None, evaluations=evaluations), tree, lambda there: weights[list(there)].sum()
        )
        return shares.diagnostics["unopened"]

    assert unopened(4) == 1
    # of (0, 1), which has more, both contexts are asked for: its units have 3 + 0, and (2, 3) is left with 1
    assert unopened(8) == pytest.approx(1 / 4)
    assert unopened(12) == 0


@pytest.mark.parametrize("context", ["both", "present", "absent"])
def test_says_how_many_evaluations_it_takes(context: str) -> None:
    """One fewer than it takes is said beforehand; with as many every group is opened, and nothing is said."""
    ex = replica_comparison.explainer("bert/classify")

    def explained(evaluations: int) -> clearhead.Explanation:
        method = clearhead.Method("shap", context=context, evaluations=evaluations)
        return ex.explain("She isn't here, is she?", method, target=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", CostWarning)
        whole = explained(10**6).certificate["checks"]
        needed = int(whole["evaluations"])
        explained(needed)
    assert whole["unopened"] == 0
    with pytest.warns(CostWarning, match=rf"takes {needed:,} evaluations, and there are {needed - 1:,}"):
        fewer = explained(needed - 1)
    assert 0 < fewer.certificate["checks"]["unopened"] < 1


# Batches --------------------------------------------------------------------------------------------------------------


def test_a_sentence_of_sixteen_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """No coalition is evaluated twice, all go through the model in full batches, and nothing is padded."""
    text = "the movie is so boring and far too long but she said it is the book once"
    ex = replica_comparison.explainer("bert/classify")
    ex.explain(text, "random")
    rows: list[tuple[int, ...]] = []
    batches: list[int] = []
    forward = ex.adapter.model.bert.forward

    def counted(input_ids=None, attention_mask=None, **more):
        assert attention_mask.all(), "padded"
        rows.extend(map(tuple, input_ids.tolist()))
        batches.append(len(input_ids))
        return forward(input_ids=input_ids, attention_mask=attention_mask, **more)

    monkeypatch.setattr(ex.adapter.model.bert, "forward", counted)
    e = ex.explain(text, clearhead.Method("shap", unit="word"))
    assert e.provenance["players"] == "word"
    whole = tuple(e for e in rows[0])
    assert rows.count(whole) == 2, "the whole input, once to see what is predicted and once as a coalition"
    assert len(set(rows)) == len(rows) - 1 == e.certificate["checks"]["evaluations"]
    assert batches[0] == 1 and all(size == MAX_PERTURBED_INPUTS for size in batches[1:-1])
    assert len(batches) == 1 + -(-len(set(rows)) // MAX_PERTURBED_INPUTS), (
        "the input itself, then as few batches as there can be"
    )


def test_several_sentences_share_their_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coalitions of all inputs go together; of copies of one input nothing is evaluated anew."""
    ex = replica_comparison.explainer("bert/classify")
    texts = ["I like the movie", "So boring", "I like the movie"]
    alone = [ex.explain(text, "shap") for text in texts]
    batches: list[int] = []
    forward = ex.adapter.model.bert.forward

    def counted(input_ids=None, **more):
        batches.append(len(input_ids))
        return forward(input_ids=input_ids, **more)

    monkeypatch.setattr(ex.adapter.model.bert, "forward", counted)
    together = ex.explain(texts, "shap")
    asked = [e.certificate["checks"]["evaluations"] for e in alone]
    assert batches == [3, asked[0] + asked[1]], "the inputs, and then every coalition of the two that differ"
    for e, f in zip(together, alone, strict=True):
        np.testing.assert_allclose(e.scores, f.scores, atol=1e-10)


# The hierarchy --------------------------------------------------------------------------------------------------------


def test_pieces_of_words_are_joined_first_and_sentences_last() -> None:
    tokens = ["i", "play", "##ing", ".", "you", "do", "##n", "'", "t"]
    pairs = merge_tokens_greedily(tokens, [False] * len(tokens))
    assert pairs[0] == (1, 2) and pairs[1] == (5, 6)
    tree = Hierarchy(tuple(range(len(tokens))), tuple(pairs))
    halves = [set(tree.list_leaves_by_node()[child]) for child in tree.get_children(tree.root)]
    assert {0, 1, 2, 3} in halves


def test_two_texts_are_two_halves() -> None:
    ex = replica_comparison.explainer("bert/classify")
    e = ex.explain(models.PAIR, "shap")
    tree = build_text_hierarchy(e.units, list(range(len(e))))
    middle = e.tokens.index("[SEP]")
    for node in range(len(tree.player_of_leaf), tree.root - 2):
        members = set(tree.list_leaves_by_node()[node])
        inside = [i for i in members if not e.units.special[i]]
        assert not inside or max(inside) < middle or min(inside) > middle


def test_a_picture_is_halved() -> None:
    places = np.array([(r, c) for r in range(2) for c in range(4)], dtype=float)
    tree = build_spatial_hierarchy(places)
    halves = [tree.list_leaves_by_node()[child] for child in tree.get_children(tree.root)]
    assert sorted(map(sorted, halves)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
