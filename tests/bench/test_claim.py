"""The registered claim: its criteria on made-up scores with a known verdict, and a run that is interrupted."""

import argparse
import json
import time
from pathlib import Path

import claim
import claim_page
import claim_tasks
import numpy as np
import pytest
from claim_page import ClaimColumn, build_claim_columns, evaluate_claim
from claim_tasks import REMOVAL_CASES, KnownAnswerCase, MethodScores, list_known_answer_cases, make_training_command

from clearhead.bench.protocols.base import Measurement


def make_column(task: str, seed: int, means: dict[str, float], count: int = 200) -> ClaimColumn:
    """Scores with these means, whose differences between methods vary little over the examples."""
    rng = np.random.default_rng([seed, len(task)])
    difficulty = rng.normal(scale=0.1, size=count)
    values = {name: mean + difficulty + rng.normal(scale=0.02, size=count) for name, mean in means.items()}
    return ClaimColumn(f"{task}, text", seed, values)


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
    better = ClaimColumn("logic, text", 0, {**column.values, "lime": better_on_few})
    assert column.is_tied_for_best("ensemble")
    assert not better.is_tied_for_best("ensemble")
    assert better.compare("lime", "ensemble")[0] == pytest.approx(0.05)


def test_controls_are_no_rivals() -> None:
    assert make_column("logic", 0, {"ensemble": 0.9, "random": 0.99}).is_tied_for_best("ensemble")


def test_scores_keep_their_examples_when_a_stream_appears_late() -> None:
    scores = MethodScores(0, 0.0, {})
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


def test_each_task_has_the_zoo_s_seed_and_others() -> None:
    cases = list_known_answer_cases()
    for task in {case.task for case in cases}:
        seeds = [case.seed for case in cases if case.task == task]
        assert len(set(seeds)) == len(seeds) == claim_tasks.FEWER_SEEDS.get(task, claim_tasks.NUM_SEEDS)
        assert sum(case.is_zoo_model for case in cases if case.task == task) == 1


def test_interrupted_measurement_continues_and_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["ensemble", "saliency", "rollout"]
    options = argparse.Namespace(device="cpu", data=None, methods=",".join(methods))
    monkeypatch.setattr(claim_tasks, "SCORES_DIR", tmp_path)
    monkeypatch.setattr(claim_tasks, "NUM_TEXT_EXAMPLES", 6)
    monkeypatch.setattr(claim_tasks, "EXAMPLES_SEED", 1)
    monkeypatch.setattr(claim, "CHUNK_SIZE", 4)
    monkeypatch.setattr(claim_page, "RESULTS_PAGE", tmp_path / "results.md")
    case = KnownAnswerCase("logic", claim_tasks.read_zoo_seed("logic"))
    clock = FakeClock(num_ticks=1)
    monkeypatch.setattr(claim, "time", clock)
    claim.measure_case(case, options, deadline=1.0)
    assert [scores.num_measured for scores in claim_tasks.read_scores(case).values()] == [4]
    with pytest.raises(SystemExit, match="measured on no model yet"):
        claim_page.write_page([case])
    clock.num_ticks = 1000
    claim.measure_case(case, options, deadline=1.0)
    scores = claim_tasks.read_scores(case)
    assert {name: score.num_measured for name, score in scores.items()} == dict.fromkeys(methods, 6)
    before = json.loads(case.scores_path.read_text())["methods"]
    claim.measure_case(case, options, deadline=1.0)  # nothing is left to do
    assert json.loads(case.scores_path.read_text())["methods"] == before
    claim_page.write_page([case])
    page = (tmp_path / "results.md").read_text()
    assert "| logic, text | 0 | 6 |" in page and "overall difference from kernel-shap" in page
