"""SHAP over a hierarchy equals the shap package, exact Owen values, and the known values of games."""

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
from tests.methods.test_parity import explainer as load_author_model
from tests.replicas import shap as owen

FOLDER = DATA / "shap"
REPLACEMENTS = {"default": "written-mask", "mask_nocollapse": "written-mask", "pad_nocollapse": "written-pad"}
LONG_TEXT = "The author said it is boring, but she isn't here. Don't panic!"


def run_game(method, tree, value):
    count = max(tree.player_of_leaf) + 1
    game = CoalitionGame(count, 0, get_windows=None, get_hierarchy=lambda: tree)
    rounds, values, coalitions = method.iter_coalitions(game), None, []
    while True:
        try:
            rows = rounds.send(values)
        except StopIteration as end:
            return end.value, coalitions
        coalitions.append([tuple(row.nonzero().flatten().tolist()) for row in rows])
        values = torch.tensor([value(members) for members in coalitions[-1]], dtype=torch.float64)


def to_nested_pairs(tree: Hierarchy, node: int | None = None):
    """Return a hierarchy as nested pairs of players, without units that always stay."""
    node = tree.root if node is None else node
    children = tree.get_children(node)
    if children is None:
        return tree.player_of_leaf[node] if tree.player_of_leaf[node] >= 0 else None
    halves = [half for half in (to_nested_pairs(tree, child) for child in children) if half is not None]
    return tuple(halves) if len(halves) == 2 else halves[0] if halves else None


# The shap package -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sentence", [0, 1, 2])
@pytest.mark.parametrize("fixture", REPLACEMENTS)
def test_equals_stored_shap_values(sentence: int, fixture: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    text = json.loads((FOLDER / "sentences.json").read_text())[sentence]
    ex = clearhead.load(load_author_model("bert").adapter.model, tokenizer)
    with np.load(FOLDER / "arrays.npz") as file:
        values, base = (file[f"sent{sentence}/{fixture}/{name}"] for name in ("values", "base_values"))
    for label in range(5):
        e = ex.explain(text, clearhead.Method("shap", replacement=REPLACEMENTS[fixture]), target=label)
        assert np.abs(e.scores - values[:, label]).max() < 1e-10
        assert e.base_value == pytest.approx(base[label], abs=1e-10)
    if sentence != 1:  # no word has several tokens, so tokenising the text again changes nothing
        not_retokenised = ex.explain(
            text, clearhead.Method("shap", replacement=REPLACEMENTS[fixture].removeprefix("written-")), target=4
        )
        np.testing.assert_allclose(not_retokenised.scores, e.scores, atol=1e-10)


@pytest.mark.skipif(not ORIGINALS.exists(), reason="the original fixtures are outside the repository")
def test_copied_files_equal_original_fixtures() -> None:
    theirs = ORIGINALS / "captum_shap"
    assert (FOLDER / "arrays.npz").read_bytes() == (theirs / "shap_cases.npz").read_bytes()
    assert (FOLDER / "sentences.json").read_bytes() == (theirs / "shap_sentences.json").read_bytes()


@pytest.mark.parametrize(("fixed", "context"), [(None, "both"), (1, "present"), (0, "absent")])
def test_equals_shap_package(fixed: int | None, context: str) -> None:
    shap = coalition_values.import_shap()
    ex = replica_comparison.explainer("bert/classify")
    tokenizer, model = ex.adapter.processor, ex.adapter.model

    def logits(texts):
        with torch.no_grad():
            return model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits.numpy()

    explainer = shap.explainers.PartitionExplainer(logits, shap.maskers.Text(tokenizer))
    theirs = explainer([LONG_TEXT], fixed_context=fixed, max_evals=10**6, silent=True)
    method = clearhead.Method("shap", replacement="written-mask", context=context, evaluations=10**6)
    ours = ex.explain(LONG_TEXT, method, target=1)
    np.testing.assert_allclose(ours.scores, theirs.values[0][:, 1], atol=1e-10)


# Reference implementation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "albert/classify"])
def test_equals_reference_implementation(subject: str) -> None:
    raw = models.inputs(subject)[2 if subject.startswith("albert") else 0]
    ex = replica_comparison.explainer(subject)
    players, units, value = coalition_values.game(subject, raw)
    e = ex.explain(raw, "shap")
    tree = to_nested_pairs(
        build_text_hierarchy(e.units, [players.index(i) if i in players else -1 for i in range(units)])
    )
    expected = owen.scores(range(len(players)), lambda present: value([players[i] for i in present]), tree)
    assert replica_comparison.gap(e.scores, coalition_values.on_units(expected, players, units)) < 1e-9
    assert e.base_value == pytest.approx(value([]), rel=1e-10)
    assert e.base_value + e.scores.sum() == pytest.approx(e.target["value"], rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_random_game_over_random_tree_equals_reference(count: int) -> None:
    generator = np.random.default_rng(count)
    values = generator.normal(size=2**count)
    tree = build_spatial_hierarchy(generator.normal(size=(count, 2)))

    def value(members):
        return values[sum(2**member for member in members)]

    result, coalitions = run_game(PartitionShap(unit_context=None), tree, value)
    np.testing.assert_allclose(result.scores, owen.scores(range(count), value, to_nested_pairs(tree)), atol=1e-12)
    assert sum(map(len, coalitions)) == count_distinct_coalitions(coalitions), "no coalition may be evaluated twice"
    assert result.diagnostics["unopened"] == 0


def count_distinct_coalitions(coalitions) -> int:
    """Return the number of distinct coalitions."""
    return len({members for rows in coalitions for members in rows})


@pytest.mark.parametrize(
    ("context", "expected"),
    [("both", [0, 0.5, 0.5, 0]), ("present", [-1 / 3, 2 / 3, 2 / 3, 0]), ("absent", [1 / 3, 1 / 3, 1 / 3, 0])],
)
def test_null_player_has_zero_score_only_with_both_contexts(context: str, expected: list[float]) -> None:
    """f = x1·x2: with one context alone, player 0 has a nonzero score (analysis.md, 5.2)."""
    tree = Hierarchy((0, 1, 2, 3), ((0, 1), (4, 2), (5, 3)))
    result, _ = run_game(
        PartitionShap(unit_context=None, context=context), tree, lambda members: float({1, 2} <= set(members))
    )
    np.testing.assert_allclose(result.scores, expected, atol=1e-12)


def test_additive_game_recovers_its_weights() -> None:
    weights = np.linspace(-2, 3, 30)
    tree = build_spatial_hierarchy(np.stack([np.arange(30), np.zeros(30)], axis=1))
    result, _ = run_game(
        PartitionShap(unit_context=None, evaluations=5000), tree, lambda members: 5 + weights[list(members)].sum()
    )
    np.testing.assert_allclose(result.scores, weights, atol=1e-9)


@pytest.mark.filterwarnings("ignore::clearhead.errors.CostWarning")
@pytest.mark.parametrize("evaluations", [2, 3, 10, 40])
def test_budget_is_respected_and_scores_are_complete(evaluations: int) -> None:
    """Without further evaluations the value of a group is divided equally among its players."""
    tree = build_spatial_hierarchy(np.stack([np.arange(12), np.zeros(12)], axis=1))
    generator = np.random.default_rng(0)
    values = {}

    def value(members):
        return values.setdefault(members, generator.normal())

    result, coalitions = run_game(PartitionShap(unit_context=None, evaluations=evaluations), tree, value)
    assert count_distinct_coalitions(coalitions) <= evaluations
    total = value(tuple(range(12))) - value(())
    assert float(result.scores.sum()) == pytest.approx(total)
    assert result.diagnostics["unopened"] > 0
    if evaluations < 4:
        np.testing.assert_allclose(result.scores, total / 12)
        assert result.diagnostics["unopened"] == 1


@pytest.mark.filterwarnings("ignore::clearhead.errors.CostWarning")
def test_unopened_fraction_is_reported() -> None:
    """f = 3·x0 − x2 + 2·x3 over ((0, 1), (2, 3)): four evaluations open the root, eight also one of its halves."""
    tree = Hierarchy((0, 1, 2, 3), ((0, 1), (2, 3), (4, 5)))
    weights = np.array([3.0, 0.0, -1.0, 2.0])

    def compute_unopened(evaluations: int) -> float:
        result, _ = run_game(
            PartitionShap(unit_context=None, evaluations=evaluations),
            tree,
            lambda present: weights[list(present)].sum(),
        )
        return result.diagnostics["unopened"]

    assert compute_unopened(4) == 1
    # (0, 1) has the larger value and is opened: its units have 3 + 0; (2, 3) stays unopened with 1
    assert compute_unopened(8) == pytest.approx(1 / 4)
    assert compute_unopened(12) == 0


@pytest.mark.parametrize("context", ["both", "present", "absent"])
def test_cost_warning_states_the_required_evaluations(context: str) -> None:
    """One evaluation fewer than required gives a warning; with enough, all groups are opened without a warning."""
    ex = replica_comparison.explainer("bert/classify")

    def explain(evaluations: int) -> clearhead.Explanation:
        method = clearhead.Method("shap", context=context, evaluations=evaluations)
        return ex.explain("She isn't here, is she?", method, target=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", CostWarning)
        checks = explain(10**6).certificate["checks"]
        required = int(checks["evaluations"])
        explain(required)
    assert checks["unopened"] == 0
    with pytest.warns(CostWarning, match=rf"takes {required:,} evaluations, but only {required - 1:,}"):
        fewer = explain(required - 1)
    assert 0 < fewer.certificate["checks"]["unopened"] < 1


# Batches --------------------------------------------------------------------------------------------------------------


def test_coalitions_are_distinct_unpadded_and_in_full_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence of sixteen words: no coalition is evaluated twice, batches are full, and nothing is padded."""
    text = "the movie is so boring and far too long but she said it is the book once"
    ex = replica_comparison.explainer("bert/classify")
    ex.explain(text, "random")
    rows: list[tuple[int, ...]] = []
    batches: list[int] = []
    forward = ex.adapter.model.bert.forward

    def record_forward(input_ids=None, attention_mask=None, **kwargs):
        assert attention_mask.all(), "padded"
        rows.extend(map(tuple, input_ids.tolist()))
        batches.append(len(input_ids))
        return forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(ex.adapter.model.bert, "forward", record_forward)
    e = ex.explain(text, clearhead.Method("shap", unit="word"))
    assert e.provenance["players"] == "word"
    full_input = tuple(e for e in rows[0])
    assert rows.count(full_input) == 2, "the full input runs once for the prediction and once as a coalition"
    assert len(set(rows)) == len(rows) - 1 == e.certificate["checks"]["evaluations"]
    assert batches[0] == 1 and all(size == MAX_PERTURBED_INPUTS for size in batches[1:-1])
    assert len(batches) == 1 + -(-len(set(rows)) // MAX_PERTURBED_INPUTS), (
        "the input itself, then the minimal number of batches"
    )


def test_inputs_share_batches_and_equal_inputs_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coalitions of all inputs share batches; equal inputs are evaluated once."""
    ex = replica_comparison.explainer("bert/classify")
    texts = ["I like the movie", "So boring", "I like the movie"]
    single = [ex.explain(text, "shap") for text in texts]
    batches: list[int] = []
    forward = ex.adapter.model.bert.forward

    def record_forward(input_ids=None, **kwargs):
        batches.append(len(input_ids))
        return forward(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(ex.adapter.model.bert, "forward", record_forward)
    batched = ex.explain(texts, "shap")
    evaluations = [e.certificate["checks"]["evaluations"] for e in single]
    assert batches == [3, evaluations[0] + evaluations[1]], (
        "the inputs, and then every coalition of the two distinct inputs"
    )
    for e, f in zip(batched, single, strict=True):
        np.testing.assert_allclose(e.scores, f.scores, atol=1e-10)


# The hierarchy --------------------------------------------------------------------------------------------------------


def test_subwords_are_merged_first_and_sentences_last() -> None:
    tokens = ["i", "play", "##ing", ".", "you", "do", "##n", "'", "t"]
    pairs = merge_tokens_greedily(tokens, [False] * len(tokens))
    assert pairs[0] == (1, 2) and pairs[1] == (5, 6)
    tree = Hierarchy(tuple(range(len(tokens))), tuple(pairs))
    halves = [set(tree.list_leaves_by_node()[child]) for child in tree.get_children(tree.root)]
    assert {0, 1, 2, 3} in halves


def test_text_pair_is_split_at_the_separator() -> None:
    ex = replica_comparison.explainer("bert/classify")
    e = ex.explain(models.PAIR, "shap")
    tree = build_text_hierarchy(e.units, list(range(len(e))))
    middle = e.tokens.index("[SEP]")
    for node in range(len(tree.player_of_leaf), tree.root - 2):
        members = set(tree.list_leaves_by_node()[node])
        inside = [i for i in members if not e.units.special[i]]
        assert not inside or max(inside) < middle or min(inside) > middle


def test_image_is_split_into_halves() -> None:
    positions = np.array([(r, c) for r in range(2) for c in range(4)], dtype=float)
    tree = build_spatial_hierarchy(positions)
    halves = [tree.list_leaves_by_node()[child] for child in tree.get_children(tree.root)]
    assert sorted(map(sorted, halves)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
