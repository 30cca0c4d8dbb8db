"""The registered claim: its criteria on made-up scores with a known verdict, and a run that is interrupted."""

import argparse
import json
import re
import time
from pathlib import Path

import claim
import claim_page
import claim_tasks
import numpy as np
import pytest
from claim_page import ClaimColumn, build_claim_columns, evaluate_claim
from claim_tasks import REMOVAL_CASES, KnownAnswerCase, MethodScores, make_training_command

import clearhead_zoo
from clearhead.bench.protocols.base import Measurement


def make_column(task: str, seed: int, means: dict[str, float], count: int = 200) -> ClaimColumn:
    """Scores with these means, whose differences between methods vary little over the examples."""
    rng = np.random.default_rng([seed, len(task)])
    difficulty = rng.normal(scale=0.1, size=count)
    values = {name: mean + difficulty + rng.normal(scale=0.02, size=count) for name, mean in means.items()}
    return ClaimColumn(task, "text", seed, values)


class FakeClock:
    """A module `time` whose deadline of one second has come after so many looks at the clock."""

    perf_counter = staticmethod(time.perf_counter)
    strftime = staticmethod(time.strftime)

    def __init__(self, num_ticks: int) -> None:
        self.num_ticks = num_ticks

    def monotonic(self) -> float:
        self.num_ticks -= 1
        return 0.0 if self.num_ticks >= 0 else 2.0


GOOD = {"ensemble": 0.95, "saliency": 0.9, "generic": 0.8, "kernel-shap": 0.95, "random": 0.3}


REMOVAL = {"ensemble": 0.55, "generic": 0.5, "deeplift": 0.55, "lime": 0.7}


def evaluate(changes: dict[str, float], removal_changes: dict[str, float]) -> list[bool]:
    """Which criteria are met by two tasks with five seeds and three models of real data."""
    columns = [make_column(task, seed, GOOD | changes) for task in ("logic", "recall") for seed in range(5)]
    removal_columns = [make_column(name, 9, REMOVAL | removal_changes) for name in ("pets", "movies", "sentiment")]
    return [verdict.is_met for verdict in evaluate_claim(columns, removal_columns)]


def test_claim_holds_where_no_method_is_better() -> None:
    assert all(evaluate({}, {}))


@pytest.mark.parametrize(
    ("index", "changes", "removal_changes"),
    [
        (0, {"occlusion": 0.97}, {}),  # no cheap method, so it is only no longer tied
        (1, {"ensemble": 0.83, "saliency": 0.8, "kernel-shap": 0.83}, {}),
        (2, {"generic": 0.951}, {}),
        (3, {"kernel-shap": 0.96}, {}),
        (4, {}, {"generic": 0.57}),
        (5, {}, {"deeplift": 0.57}),
    ],
)
def test_each_criterion_can_refute_the_claim(
    index: int, changes: dict[str, float], removal_changes: dict[str, float]
) -> None:
    met = evaluate(changes, removal_changes)
    assert not met[index]
    allowed = {2: {0}, 3: {0}, 4: {5}}.get(index, set())  # a better method breaks ties, too
    assert {i for i, is_met in enumerate(met) if not is_met} <= {index} | allowed


def test_missing_removal_figures_do_not_support_the_claim() -> None:
    columns = [make_column("logic", seed, GOOD) for seed in range(5)]
    assert [verdict.is_met for verdict in evaluate_claim(columns, [])][-2:] == [False, False]


def test_removal_gap_is_the_area_between_both_curves() -> None:
    areas = {"positive": 0.25, "negative": 0.75}
    measurements = [
        Measurement("a", "saliency", f"text/mask/{direction}", {"probability clearhead": area})
        for direction, area in areas.items()
    ]
    assert REMOVAL_CASES[0].select_values(measurements) == {("text/mask", "a"): 0.5}


def test_tie_needs_shared_examples_only() -> None:
    column = make_column("logic", 0, GOOD)
    better_on_few = np.full(200, np.nan)
    better_on_few[:100] = column.values["ensemble"][:100] + 0.05
    better = ClaimColumn("logic", "text", 0, {**column.values, "lime": better_on_few})
    assert column.is_tied_for_best("ensemble")
    assert not better.is_tied_for_best("ensemble")
    assert better.compare("lime", "ensemble")[0] == pytest.approx(0.05)


def test_controls_are_no_rivals() -> None:
    assert make_column("logic", 0, {"ensemble": 0.9, "random": 0.99}).is_tied_for_best("ensemble")


def test_scores_keep_their_examples_when_a_stream_appears_late() -> None:
    scores = MethodScores(3)
    scores.add(["a", "b"], {("text", "a"): 0.5}, 1.0)
    scores.add(["c"], {("text", "c"): 0.25, ("image", "c"): 1.0}, 1.0)
    assert scores.columns == {"text": [0.5, None, 0.25], "image": [None, None, 1.0]}
    image, text = build_claim_columns("task", 0, {"ensemble": scores})
    np.testing.assert_array_equal(text.values["ensemble"], [0.5, np.nan, 0.25])
    np.testing.assert_array_equal(image.values["ensemble"], [np.nan, np.nan, 1.0])


def test_training_command_is_the_card_s_with_another_seed() -> None:
    words = make_training_command(KnownAnswerCase("logic", 3), "cpu", None)
    assert words[0] == "packages/zoo/train/logic.py" and (Path(__file__).parents[2] / words[0]).is_file()
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert options["--seed"] == "3" and options["--steps"] == "3000"
    assert options["--out"].endswith("logic-seed3")


def test_registered_page_lists_the_tasks_and_models_that_are_measured() -> None:
    page = (Path(__file__).parents[2] / "docs" / "claim.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(claim_tasks.TASK_SEEDS)
    assert f"seed {claim_tasks.EXAMPLES_SEED}" in page
    assert all(f"`{case.model}`" in page for case in REMOVAL_CASES)
    assert all(seeds[0] == claim_tasks.ZOO_SEED for seeds in claim_tasks.TASK_SEEDS.values())
    for task in set(claim_tasks.TASK_SEEDS) & set(clearhead_zoo.names()):
        assert f"--seed {claim_tasks.ZOO_SEED} " in clearhead_zoo.card(task)["command"] + " "


def test_failures_and_missing_figures_of_the_default_count_against_it() -> None:
    scores = MethodScores(2)
    scores.add(["a", "b"], {("text", "a"): 1.0}, 0.0, {"b": "out of range"})
    rival = MethodScores(2)
    rival.add(["a", "b"], {("text", "a"): 0.5, ("text", "b"): 0.5}, 0.0)
    (column,) = build_claim_columns("logic", 0, {"ensemble": scores, "saliency": rival})
    assert column.has_default_failed and not column.is_tied_for_best("ensemble")
    (without,) = build_claim_columns("logic", 0, {"saliency": rival})
    assert not without.is_tied_for_best("ensemble")
    ties, lowest, *_ = evaluate_claim([make_column("recall", 0, GOOD), without], [])
    assert not ties.is_met and not lowest.is_met and lowest.measured.startswith("0.000")


def test_streams_of_an_example_are_no_separate_evidence() -> None:
    text = make_column("logic", 0, {"ensemble": 0.9, "kernel-shap": 0.9, "saliency": 0.5})
    image = ClaimColumn("logic", "image", 0, text.values)
    assert evaluate_claim([text, image], [])[3].measured == evaluate_claim([text], [])[3].measured


def test_figures_of_other_weights_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_tasks, "SCORES_DIR", tmp_path)
    case = KnownAnswerCase("logic", claim_tasks.ZOO_SEED)
    case.scores_path.write_text(json.dumps({"fingerprint": "other", "methods": {}}))
    with pytest.raises(SystemExit, match="other weights"):
        claim.ScoreStore(case, "here", {})
    case.scores_path.unlink()
    with claim.ScoreStore(case, "here", {}), pytest.raises(SystemExit, match="by another process"):
        claim.ScoreStore(case, "here", {}).__enter__()


def test_two_pronunciations_of_a_word_are_two_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = KnownAnswerCase("spell", claim_tasks.ZOO_SEED).load_examples(None)
    assert len({example.id for example in examples}) == len(examples) == claim_tasks.NUM_TEXT_EXAMPLES


def test_interrupted_measurement_continues_and_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["ensemble", "saliency", "rollout"]
    options = argparse.Namespace(device="cpu", data=None, methods=",".join(methods))
    monkeypatch.setattr(claim_tasks, "SCORES_DIR", tmp_path)
    monkeypatch.setattr(claim_tasks, "NUM_TEXT_EXAMPLES", 6)
    monkeypatch.setattr(claim_tasks, "EXAMPLES_SEED", 1)
    monkeypatch.setattr(claim, "CHUNK_SIZE", 4)
    monkeypatch.setattr(claim_page, "RESULTS_PAGE", tmp_path / "results.md")
    case = KnownAnswerCase("logic", claim_tasks.ZOO_SEED)
    clock = FakeClock(num_ticks=1)
    monkeypatch.setattr(claim, "time", clock)
    claim.measure_case(case, options, deadline=1.0)
    counts = {name: scores.num_measured for name, scores in claim_tasks.read_scores(case).items()}
    assert {name: count for name, count in counts.items() if count} == {"rollout": 4}
    claim_page.write_page([case])
    assert "No verdict yet" in (tmp_path / "results.md").read_text()
    clock.num_ticks = 1000
    claim.measure_case(case, options, deadline=1.0)
    scores = claim_tasks.read_scores(case)
    assert {name: scores[name].num_measured for name in methods} == dict.fromkeys(methods, 6)
    before = json.loads(case.scores_path.read_text())["methods"]
    claim.measure_case(case, options, deadline=1.0)  # nothing is left to do
    assert json.loads(case.scores_path.read_text())["methods"] == before
    claim_page.write_page([case])
    page = (tmp_path / "results.md").read_text()
    assert "| logic, text | 0 | 6 |" in page and "overall difference from kernel-shap" in page
    assert "`saliency` on" not in page and "`generic` on 0 of 6 examples" in page
