"""Runs: chunks are always the same, what is there is not computed again, killed runs end as undisturbed ones."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clearhead.bench.chunk_explanations import explain_examples, parse_method
from clearhead.bench.data import BenchmarkDataset, Example
from clearhead.bench.engines import get_engine
from clearhead.bench.job import BenchmarkJob, align_label, get_protocol, iter_chunks, parse_setting
from clearhead.bench.run_results import RunResults
from clearhead.bench.runner import BenchmarkRun
from clearhead.bench.store import MeasurementRow, RequestedMethods, ResultStore, Shard
from clearhead.bench.time_estimate import estimate_time, save_method_seconds
from clearhead.bench.worker import ChunkWorker
from clearhead.errors import ClearheadError, InputError
from tests.models import explainer

pytest.importorskip("pyarrow")
JOB = BenchmarkJob("a bert", "mine", ("saliency",), ("perturb-text",), {"perturb-text": {"fills": ("mask",)}}, chunk=2)
TEXTS = ("I like the movie", "so boring", "you look extremely confused", "she hates the book", "a wonderful film")


def data(texts: tuple[str, ...] = TEXTS) -> BenchmarkDataset:
    rows = [Example(f"t{i}", text, i % 2) for i, text in enumerate(texts)]
    return BenchmarkDataset("mine", "all", "CC0", ("LABEL_0", "LABEL_1"), lambda: rows, lambda row: row)


def run(out: Path, job: BenchmarkJob = JOB, texts: tuple[str, ...] = TEXTS, ex: Any = None) -> BenchmarkRun:
    return BenchmarkRun(job, out, ex or explainer("bert/classify"), data(texts))


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "shards").iterdir()}


def test_a_second_run_computes_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path / "run")()
    before, table = shards(tmp_path / "run"), (tmp_path / "run" / "table.parquet").read_bytes()
    assert (first.chunks, first.computed, first.there_before) == (3, 3, 0)
    monkeypatch.setattr(ChunkWorker, "__call__", lambda self, task: pytest.fail("computed again"))
    again = run(tmp_path / "run")
    assert again.estimate_cost().max_perturbed_inputs == again.estimate_cost().num_missing_chunks == 0
    report = again()
    assert (report.computed, report.there_before) == (0, 3)
    assert shards(tmp_path / "run") == before and (tmp_path / "run" / "table.parquet").read_bytes() == table


def test_one_row_for_each_example_method_and_part(tmp_path: Path) -> None:
    made = run(tmp_path / "run")
    made()
    rows = list(made.store.iter_table_rows())
    keys = {(row.example, row.method, row.part) for row in rows}
    assert len(rows) == len(keys) == 5 * 3 * 2  # saliency, random, position; both directions
    assert {row.versions for row in rows} and {row.model for row in rows} == {made.worker.model_digest}
    assert {row.settings for row in rows} == set(made.protocols) and {row.data for row in rows} == {"mine"}
    about = made.store.read_manifest()
    assert about["settings"][rows[0].settings]["fills"] == ["mask"]
    assert len(rows[0].curves["probability"]) == 11


def test_rows_equal_what_the_protocol_says(tmp_path: Path) -> None:
    made = run(tmp_path / "run")
    made()
    (protocol,) = made.protocols.values()
    ex, examples = explainer("bert/classify"), list(data())
    own = explain_examples(ex, examples, [parse_method(name) for name in made.methods], protocol).by_method
    expected = {(m.example, m.method, m.part): m.figures for m in protocol.measure(ex, examples, own)}
    for one in made.load_measurements(protocol.hash):
        assert one.figures == pytest.approx(expected[one.example, one.method, one.part], abs=1e-9)


def test_what_is_added_is_computed_and_what_is_there_stays(tmp_path: Path) -> None:
    run(tmp_path / "run")()
    before = shards(tmp_path / "run")
    more = replace(JOB, methods=("saliency", "input-x-gradient"))
    larger = run(tmp_path / "run", more)
    assert all(
        methods == ("input-x-gradient",)
        for task in larger.find_missing_tasks()
        for _, methods in task.missing_methods_by_settings
    )
    larger()
    after = shards(tmp_path / "run")
    assert before.items() <= after.items() and len(after) == 6
    assert {row.method for row in larger.store.iter_table_rows()} == {
        "saliency",
        "input-x-gradient",
        "random",
        "position",
    }
    smaller = run(tmp_path / "run")
    smaller()  # the table is that of the job, whatever else is there
    assert {row.method for row in smaller.store.iter_table_rows()} == {"saliency", "random", "position"}


def test_what_grows_with_an_example_is_not_among_the_inputs_that_are_counted(tmp_path: Path) -> None:
    both = run(tmp_path / "run", replace(JOB, protocols=("idl-text", "perturb-text"))).estimate_cost()
    alone = run(tmp_path / "run").estimate_cost()
    assert both.max_perturbed_inputs == alone.max_perturbed_inputs > 0 and alone.size_dependent_protocols == ()
    assert "those of idl-text not counted" in str(both) and "not counted" not in str(alone)


def test_agreement_is_measured_among_all_methods_again(tmp_path: Path) -> None:
    job = replace(JOB, protocols=("agreement",), settings={"agreement": {"leave_one_out": False}})
    run(tmp_path / "run", job)()
    larger = run(tmp_path / "run", replace(job, methods=("saliency", "input-x-gradient")))
    assert {
        len(methods) for task in larger.find_missing_tasks() for _, methods in task.missing_methods_by_settings
    } == {4}


def test_agreement_of_two_methods_that_were_never_measured_together_is_not_taken_for_there(tmp_path: Path) -> None:
    job = replace(JOB, protocols=("agreement",), settings={"agreement": {"leave_one_out": False}})
    alone = run(tmp_path / "alone", job)
    alone()
    for more in (("rollout",), ("input-x-gradient",), ("rollout", "input-x-gradient")):
        made = run(tmp_path / "run", replace(job, methods=("saliency", *more)))
        made()
    every = {"saliency", "rollout", "input-x-gradient", "random", "position"}
    pairs = {(row.method, row.part) for row in made.store.iter_table_rows()}
    assert pairs == {(one, f"text/{other}") for one in every for other in every - {one}}
    again = run(tmp_path / "run", job)
    again()  # nor does the table of a few methods tell of others that were measured with them
    assert (tmp_path / "run/table.parquet").read_bytes() == (tmp_path / "alone/table.parquet").read_bytes()


def test_only_what_this_job_asked_for_is_told_as_not_measured(tmp_path: Path) -> None:
    run(tmp_path / "run", replace(JOB, protocols=("input-invariance",), settings={}))()  # is for pictures
    assert len(RunResults(tmp_path / "run").failure_reasons) == 3
    told = run(tmp_path / "run", JOB)
    told()
    assert (
        list(told.store.iter_table_rows())
        and told.collect_failure_reasons() == RunResults(tmp_path / "run").failure_reasons == {}
    )


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:20] + bytes(40) + b[60:]])
def test_a_damaged_shard_is_named_with_what_to_do(tmp_path: Path, damage: Any) -> None:
    run(tmp_path / "run")()
    before = shards(tmp_path / "run")
    path = tmp_path / "run" / "shards" / next(iter(before))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=f"{path.name}' cannot be read .*: remove it, and the same command"):
        run(tmp_path / "run")()
    path.unlink()
    assert run(tmp_path / "run")().computed == 1 and shards(tmp_path / "run") == before


def test_a_damaged_table_and_half_a_line_of_times(tmp_path: Path) -> None:
    run(tmp_path / "run")()
    with (tmp_path / "run" / "timings.jsonl").open("a") as file:
        file.write('{"chunk": "ab')
    assert RunResults(tmp_path / "run").total_seconds > 0
    table = tmp_path / "run" / "table.parquet"
    table.write_bytes(table.read_bytes()[:100])
    with pytest.raises(InputError, match=r"table.parquet' cannot be read .* writes it anew"):
        _ = RunResults(tmp_path / "run").protocol_results
    run(tmp_path / "run")()
    assert len(RunResults(tmp_path / "run").protocol_results) == 1


def test_a_run_killed_before_it_said_what_it_is_goes_on(tmp_path: Path) -> None:
    (tmp_path / ".run.json.0123.partial").write_text("{")
    run(tmp_path)()
    assert not list(tmp_path.glob(".*")) and len(shards(tmp_path)) == 3


def test_other_weights_texts_or_settings_share_nothing(tmp_path: Path) -> None:
    base = run(tmp_path / "run")
    base()
    other = explainer("bert/classify")
    with __import__("torch").no_grad():
        other.adapter.model.classifier.bias += 1
    assert len(run(tmp_path / "run", ex=other).find_missing_tasks()) == 3
    assert len(run(tmp_path / "run", texts=(*TEXTS[:4], "a wonderful book")).find_missing_tasks()) == 1
    changed = replace(JOB, settings={"perturb-text": {"fills": ("pad",)}})
    assert len(run(tmp_path / "run", changed).find_missing_tasks()) == 3
    assert len(run(tmp_path / "run", replace(JOB, seed=1)).find_missing_tasks()) == 3


def test_what_other_versions_measured_is_counted_where_it_is_computed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = "clearhead 99"

    def versions_are(said: str) -> None:
        for module in ("runner", "worker"):
            monkeypatch.setattr(f"clearhead.bench.{module}.format_versions", lambda: said)

    assert run(tmp_path / "run").estimate_cost().num_stale_rows == 0
    run(tmp_path / "run")()
    rows = 5 * 3 * 2
    assert len(list(run(tmp_path / "run").store.iter_table_rows())) == rows
    versions_are(now)
    again = run(tmp_path / "run")
    assert again.estimate_cost().num_stale_rows == rows
    fewer = run(tmp_path / "run", texts=TEXTS[:2])
    assert fewer.estimate_cost().num_stale_rows == 2 * 3 * 2  # only those of the examples that are to be measured
    other = replace(JOB, settings={"perturb-text": {"fills": ("pad",)}})
    assert run(tmp_path / "run", other).estimate_cost().num_stale_rows == 0
    damaged = tmp_path / "run/shards/of-nobody.parquet"
    damaged.write_bytes(b"")
    assert again.estimate_cost().num_stale_rows == rows  # no shard of this run: its damage is not this run's
    again()
    assert run(tmp_path / "run").estimate_cost().num_stale_rows == 0  # there is nothing to compute
    versions_are("clearhead 100")
    assert run(tmp_path / "run").estimate_cost().num_stale_rows == rows  # measured twice before, each still one row


def test_a_longer_run_finds_the_windows_of_a_shorter_one() -> None:
    texts = tuple("word " * (1 + (7 * i) % 5) for i in range(70))
    short = list(iter_chunks(data(texts[:40]), 2))
    long = list(iter_chunks(data(texts), 2))
    assert [key for _, key in short[:16]] == [key for _, key in long[:16]]
    every = sorted(place for places, _ in long for place in places)
    assert every == list(range(70))
    with pytest.raises(InputError, match="at least 1"):
        list(iter_chunks(data(), 0))


def test_runs_merge(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    whole()
    for number, texts in enumerate((TEXTS[:4], TEXTS)):
        run(tmp_path / str(number), texts=texts)()
    first, second = ResultStore(tmp_path / "0"), ResultStore(tmp_path / "1")
    taken = first.merge(second)
    assert taken == len(shards(tmp_path / "0")) - 2 and first.merge(second) == 0
    merged = run(tmp_path / "0")
    assert not merged.find_missing_tasks()
    merged()
    assert (tmp_path / "0" / "table.parquet").read_bytes() == (tmp_path / "whole" / "table.parquet").read_bytes()


def test_a_method_that_does_not_apply_is_told_once_and_not_tried_again(tmp_path: Path) -> None:
    job = replace(JOB, methods=("saliency",), protocols=("perturb-images",), settings={})
    refusing = run(tmp_path / "run", job)
    refusing()
    assert "needs patches of an image" in refusing.collect_failure_reasons()["perturb-images: saliency"]
    assert not list(refusing.store.iter_table_rows()) and not run(tmp_path / "run", job).find_missing_tasks()


def test_an_example_that_cannot_be_explained_costs_no_other(tmp_path: Path) -> None:
    job = replace(JOB, chunk=5, methods=("saliency", "rollout"))
    made = run(tmp_path / "run", job, (*TEXTS[:2], "", *TEXTS[3:]))
    made()
    assert {row.example for row in made.store.iter_table_rows()} == {"t0", "t1", "t3", "t4"}
    assert set(made.collect_failure_reasons().values()) == {"on 't2': the text is empty: there is nothing to explain"}
    assert (
        made.collect_failure_reasons() == RunResults(tmp_path / "run").failure_reasons
        and len(made.collect_failure_reasons()) == 4
    )
    assert not run(tmp_path / "run", job, (*TEXTS[:2], "", *TEXTS[3:])).find_missing_tasks()


def test_a_method_that_fails_on_one_example_is_measured_on_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.methods.random import RandomControl

    finish = RandomControl.compute_scores

    def fails(self: Any, tape: Any) -> Any:
        return 1 / 0 if self.unit_context.valid_mask.sum(-1).min() < 5 else finish(self, tape)

    whole = run(tmp_path / "whole", replace(JOB, chunk=5, protocols=("perturb-text", "agreement")))
    whole()
    monkeypatch.setattr(RandomControl, "compute_scores", fails)
    made = run(tmp_path / "run", replace(JOB, chunk=5, protocols=("perturb-text", "agreement"), keep=True))
    made()
    rows = {(row.protocol, row.method, row.part, row.example): row.figures for row in made.store.iter_table_rows()}
    every = {(row.protocol, row.method, row.part, row.example): row.figures for row in whole.store.iter_table_rows()}
    short = {"t1"}  # two words between two marks
    lost = {key for key in every if key[3] in short and (key[1] == "random" or key[0] == "agreement")}
    assert set(rows) == set(every) - lost
    assert all(rows[key] == pytest.approx(every[key], abs=1e-6, nan_ok=True) for key in rows)
    assert made.collect_failure_reasons()["perturb-text: random"] == "on 't1': ZeroDivisionError: division by zero"
    kept = RunResults(tmp_path / "run").load_explanations({("t1", "saliency"), ("t1", "random"), ("t0", "random")})
    assert set(kept) == {("t1", "saliency"), ("t0", "random")}


def test_a_method_that_fails_on_batches_alone_is_measured_on_every_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.methods.random import RandomControl

    finish = RandomControl.compute_scores
    monkeypatch.setattr(
        RandomControl,
        "compute_scores",
        lambda self, tape: 1 / (len(self.unit_context.valid_mask) == 1) and finish(self, tape),
    )
    made = run(tmp_path / "run", replace(JOB, chunk=5))
    made()
    assert {row.example for row in made.store.iter_table_rows() if row.method == "random"} == {
        f"t{i}" for i in range(5)
    }
    assert not made.collect_failure_reasons()


def test_scores_that_are_no_numbers_are_told_and_not_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.methods.random import RandomControl

    finish = RandomControl.compute_scores

    def strange(self: Any, tape: Any) -> Any:
        made, short = finish(self, tape), self.unit_context.valid_mask.sum(-1) < 5
        return replace(made, scores=made.scores.masked_fill(short[:, None, None], float("nan")))

    monkeypatch.setattr(RandomControl, "compute_scores", strange)
    made = run(tmp_path / "run", replace(JOB, chunk=5))
    made()
    assert "t1" not in {row.example for row in made.store.iter_table_rows() if row.method == "random"}
    assert made.collect_failure_reasons()["perturb-text: random"] == "on 't1': its scores are no numbers (NaN; text)"


def test_an_example_without_a_class_costs_no_other(tmp_path: Path) -> None:
    rows = [Example(f"t{i}", text, None if i == 1 else 0) for i, text in enumerate(TEXTS)]
    some = BenchmarkDataset("mine", "all", "CC0", ("LABEL_0", "LABEL_1"), lambda: rows, lambda row: row)
    for own, why in (
        ({"explained": "gold"}, "on 't1': explained='gold', but 't1' has no single true class"),
        ({"judged": "gold"}, "on 't1': judged='gold', but 't1' has no true class: use judged='predicted'"),
        ({"examples": "wrong"}, "on 't1': examples='wrong', but 't1' has no true class"),
    ):
        job = replace(JOB, chunk=5, settings={"perturb-text": {"fractions": (0.5,), **own}})
        made = BenchmarkRun(job, tmp_path / next(iter(own)), explainer("bert/classify"), some)
        made()
        assert "t1" not in {row.example for row in made.store.iter_table_rows()}
        assert made.collect_failure_reasons()["perturb-text: saliency"] == why
    made = BenchmarkRun(replace(JOB, chunk=5), tmp_path / "all", explainer("bert/classify"), some)
    made()
    assert {row.example for row in made.store.iter_table_rows() if "correct" not in row.figures} == {"t1"}


def test_methods_of_other_examples_do_not_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One method has only an example on which the protocol fails: the others keep theirs."""
    from clearhead.methods.random import RandomControl

    finish = RandomControl.compute_scores

    def of_the_short_one(self: Any, tape: Any) -> Any:
        return finish(self, tape) if self.unit_context.valid_mask.sum(-1).max() < 5 else 1 / 0

    monkeypatch.setattr(RandomControl, "compute_scores", of_the_short_one)
    rows = [Example(f"t{i}", text, None if i == 1 else 0) for i, text in enumerate(TEXTS)]
    some = BenchmarkDataset("mine", "all", "CC0", ("LABEL_0", "LABEL_1"), lambda: rows, lambda row: row)
    job = replace(JOB, chunk=5, settings={"perturb-text": {"fractions": (0.5,), "judged": "gold"}})
    made = BenchmarkRun(job, tmp_path / "run", explainer("bert/classify"), some)
    made()
    measured = {(row.method, row.example) for row in made.store.iter_table_rows() if row.protocol == "perturb-text"}
    assert {example for method, example in measured if method == "saliency"} == {"t0", "t2", "t3", "t4"}
    assert not any(method == "random" for method, _ in measured)
    why = made.collect_failure_reasons()["perturb-text: random"]
    assert "ZeroDivisionError" in why and "'t1' has no true class" in why


def test_two_examples_of_one_name_are_told(tmp_path: Path) -> None:
    rows = [Example("same", text, 0) for text in TEXTS]
    twice = BenchmarkDataset("mine", "all", "CC0", ("LABEL_0", "LABEL_1"), lambda: rows, lambda row: row)
    with pytest.raises(InputError, match="two examples of mine are called 'same'"):
        BenchmarkRun(JOB, tmp_path / "run", explainer("bert/classify"), twice).estimate_cost()


def test_half_written_shards_are_none(tmp_path: Path) -> None:
    made = run(tmp_path / "run")
    made()
    name = next(iter(shards(tmp_path / "run")))
    (tmp_path / "run" / "shards" / f".{name}.123.partial").write_bytes(b"half")
    (tmp_path / "run" / "shards" / name).unlink()
    again = run(tmp_path / "run")
    assert len(again.find_missing_tasks()) == 1
    again()
    assert name in shards(tmp_path / "run") and not list((tmp_path / "run" / "shards").glob(".*"))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="no benchmark run"):
        run(tmp_path)()
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    with pytest.raises(InputError, match="no finished table"):
        list(ResultStore(tmp_path).iter_table_rows())


def test_a_shard_comes_back_as_it_was(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "s")
    store.initialise_folder({"settings": {}})
    row = MeasurementRow(
        "m", "d", "e", "a", "truth", "h", "v", "text", {"x": 0.1, "nan": float("inf")}, {"c": [1.0, 2.0]}
    )
    shard = Shard("key", (("h", ("a", "b")),), (row,), {"truth: b": "has no rule"})
    path = store.write_shard(shard)
    wanted = {"h": RequestedMethods("truth", frozenset({"a", "b"}))}
    assert store.read_chunk_rows("key", wanted) == [row] and store.find_available_methods(
        store.find_shards("key"), wanted
    ) == {"h": {"a", "b"}}
    assert store.collect_failure_reasons(["key"], wanted) == {"truth: b": "has no rule"}
    first = path.read_bytes()
    assert store.write_shard(shard).read_bytes() == first


def test_the_time_of_a_run_is_predicted_from_one_example(tmp_path: Path) -> None:
    texts = tuple(f"{text} {number}" for text in TEXTS for number in range(4))
    made = run(tmp_path / "run", replace(JOB, methods=("saliency", "rollout")), texts)
    expected = estimate_time(made)
    assert expected is not None and set(expected.seconds_by_method) == {"saliency", "rollout", "random", "position"}
    assert all(seconds > 0 for seconds in expected.seconds_by_method.values())
    assert expected.total_seconds == pytest.approx(20 * expected.seconds_per_example) and str(expected).startswith(
        "about "
    )
    assert not (tmp_path / "run").exists()  # nothing was stored
    with_ten = estimate_time(made, num_workers=10)  # ten chunks: more workers would have nothing to do
    assert with_ten is not None and with_ten.total_seconds == pytest.approx(2 * with_ten.seconds_per_example)
    few = run(tmp_path / "run")
    assert estimate_time(few) is None
    few()
    save_method_seconds(few, expected)
    assert set(RunResults(tmp_path / "run").seconds_by_method) == set(expected.seconds_by_method)


def test_labels_are_matched_by_name() -> None:
    ex = explainer("bert/classify")
    names = BenchmarkDataset("mine", "all", "CC0", ("LABEL_1", "LABEL_0"), list, Example)
    assert align_label(Example("x", "a", 0), names, ex).label == 1
    strange = BenchmarkDataset("mine", "all", "CC0", tuple("abcdefg"), list, Example)
    assert align_label(Example("x", "a", 0), strange, ex).label is None
    numbered = BenchmarkDataset("mine", "all", "CC0", ("bad", "so so", "good"), list, Example)
    assert [align_label(Example("x", "a", label), numbered, ex).label for label in (0, 1, 2)] == [0, 1, 2]
    named = explainer("bert/classify", id2label={0: "negative", 1: "neutral", 2: "positive"})
    assert [align_label(Example("x", "a", label), numbered, named).label for label in (0, 1, 2)] == [0, 1, 2]
    found = replace(numbered, label_ids_are_arbitrary=True)  # their numbers are nobody's
    assert all(align_label(Example("x", "a", label), found, named).label is None for label in (0, 1, 2))
    assert [align_label(Example("x", "a", label), found, ex).label for label in (0, 1, 2)] == [0, 1, 2]
    half = BenchmarkDataset("mine", "all", "CC0", ("LABEL_1", "other", "third"), list, Example)
    assert [align_label(Example("x", "a", label), half, ex).label for label in (0, 1, 2)] == [1, None, None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("perturb-text.fractions=0.1,0.5", ("perturb-text", "fractions", (0.1, 0.5))),
        ("perturb-text.protect=false", ("perturb-text", "protect", False)),
        ("perturb-text.protect=1,2", ("perturb-text", "protect", (1, 2))),
        ("visualbert-text.protect=true", ("visualbert-text", "protect", True)),
        ("perturb-text.fractions=", ("perturb-text", "fractions", ())),
        ("subsets.fill=none", ("subsets", "fill", None)),
        ("te-images.ranked=patch", ("te-images", "ranked", "patch")),
    ],
)
def test_settings_as_they_are_typed(text: str, expected: tuple[str, str, Any]) -> None:
    assert parse_setting(text) == expected
    assert get_protocol(expected[0], **{expected[1]: expected[2]}).settings[expected[1]] == expected[2]


@pytest.mark.parametrize(
    "text",
    [
        *("fills=mask", "perturb-text.fill=mask", "nothing.seed=1", "truth.seed", "truth.seed=x", "truth.seed=true"),
        *(
            "perturb-text.fractions=0.1,many",
            "perturb-text.padded_to=wide",
            "perturb-text.protect=1,2,3",
            "perturb-text.clamp=1",
            "subsets.draws=2.5",
        ),
    ],
)
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(InputError):
        parse_setting(text)


def test_whether_an_example_is_predicted_correctly_stands_in_every_protocol(tmp_path: Path) -> None:
    job = replace(JOB, protocols=("perturb-text", "subsets", "classes"), settings={"subsets": {"draws": 3}})
    made = run(tmp_path / "run", job)
    made()
    every = {(row.protocol, row.example): row.figures["correct"] for row in made.store.iter_table_rows()}
    model = explainer("bert/classify")
    for example in data():
        true = float(model.explain(example.input, "saliency").prediction["index"] == example.label)
        assert [every[name, example.id] for name in job.protocols] == [true] * 3
    assert set(every.values()) == {0.0, 1.0}
    sections = RunResults(tmp_path / "run").protocol_results
    assert all(0 < len({one.example for one in section.correct_measurements}) < len(TEXTS) for section in sections)


def test_what_a_job_cannot_be() -> None:
    with pytest.raises(InputError, match="te-images and bi-images measure the same"):
        ChunkWorker(replace(JOB, protocols=("te-images", "bi-images"), settings={}))
    with pytest.raises(InputError, match="none of the protocols"):
        ChunkWorker(replace(JOB, protocols=("truth",)))
    with pytest.raises(InputError, match="no protocol"):
        ChunkWorker(replace(JOB, protocols=(), settings={}))
    with pytest.raises(InputError, match="local"):
        get_engine("cluster")
    with pytest.raises(InputError, match="give its name"):
        list(get_engine("processes")(ChunkWorker(JOB, explainer("bert/classify"), data()), [], 1))


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that opens nothing: its processes import neither torch nor clearhead."""
    monkeypatch.setattr("clearhead.bench.engines.init_process_worker", id)
    return SimpleNamespace(job=None, preloaded_explainer=None, preloaded_dataset=None)


def test_a_worker_process_that_dies_is_told(light: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.bench.engines.run_process_task", os._exit)
    tasks: Any = [1]
    with pytest.raises(ClearheadError, match=r"a worker process ended .* the same command goes on"):
        list(get_engine("processes")(light, tasks, 1, None))


def test_whoever_stops_a_run_does_not_wait_for_all_its_chunks(light: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.bench.engines.run_process_task", time.sleep)
    tasks: Any = [0.2] * 100
    running: Any = get_engine("processes")(light, tasks, 1, None)
    next(running)
    stopped = time.monotonic()
    running.close()
    assert time.monotonic() - stopped < 10  # all of them would take twenty seconds


def test_methods_with_options_are_read_back() -> None:
    assert (
        str(parse_method("grad-sam(received=True)")) == "grad-sam(received=True)"
        and str(parse_method("random")) == "random"
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_the_table_is_that_of_an_undisturbed_run(tmp_path: Path, times: int) -> None:
    pytest.importorskip("clearhead_zoo")
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    script = str(Path(__file__).parent / "killed_runs.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(times)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    there = [int(count) for count in done.stdout.split()]
    chunks = 6 + 5 * times
    assert len(there) == times and there[0] > 0 and there[-1] < chunks  # each kill was in the middle
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert shards(killed) == shards(whole) and len(shards(whole)) == chunks
    assert (killed / "table.parquet").read_bytes() == (whole / "table.parquet").read_bytes()
    noted = [json.loads(line)["chunk"] for line in (killed / "timings.jsonl").read_text().splitlines()]
    assert len(noted) == len(set(noted))  # nothing that was there was computed again
