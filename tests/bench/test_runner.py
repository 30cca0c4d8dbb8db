"""Benchmark runs: deterministic chunks, reuse of stored results, merging, failures, and killed runs."""

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


def make_dataset(texts: tuple[str, ...] = TEXTS) -> BenchmarkDataset:
    rows = [Example(f"t{i}", text, i % 2) for i, text in enumerate(texts)]
    return BenchmarkDataset("mine", "all", "CC0", ("LABEL_0", "LABEL_1"), lambda: rows, lambda row: row)


def make_run(out: Path, job: BenchmarkJob = JOB, texts: tuple[str, ...] = TEXTS, ex: Any = None) -> BenchmarkRun:
    return BenchmarkRun(job, out, ex or explainer("bert/classify"), make_dataset(texts))


def read_shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "shards").iterdir()}


def test_second_run_reuses_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_run(tmp_path / "run")()
    before, table = read_shards(tmp_path / "run"), (tmp_path / "run" / "table.parquet").read_bytes()
    assert (first.chunks, first.computed, first.already_stored) == (3, 3, 0)
    monkeypatch.setattr(ChunkWorker, "__call__", lambda self, task: pytest.fail("computed again"))
    second = make_run(tmp_path / "run")
    assert second.estimate_cost().max_perturbed_inputs == second.estimate_cost().num_missing_chunks == 0
    report = second()
    assert (report.computed, report.already_stored) == (0, 3)
    assert read_shards(tmp_path / "run") == before and (tmp_path / "run" / "table.parquet").read_bytes() == table


def test_table_has_one_row_per_example_method_and_part(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run()
    rows = list(run.store.iter_table_rows())
    keys = {(row.example, row.method, row.part) for row in rows}
    assert len(rows) == len(keys) == 5 * 3 * 2  # saliency, random, position; both directions
    assert {row.versions for row in rows} and {row.model for row in rows} == {run.worker.model_digest}
    assert {row.settings for row in rows} == set(run.protocols) and {row.data for row in rows} == {"mine"}
    manifest = run.store.read_manifest()
    assert manifest["settings"][rows[0].settings]["fills"] == ["mask"]
    assert len(rows[0].curves["probability"]) == 11


def test_rows_equal_direct_measurement(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run()
    (protocol,) = run.protocols.values()
    ex, examples = explainer("bert/classify"), list(make_dataset())
    explanations = explain_examples(ex, examples, [parse_method(name) for name in run.methods], protocol).by_method
    expected = {(m.example, m.method, m.part): m.figures for m in protocol.measure(ex, examples, explanations)}
    for row in run.load_measurements(protocol.hash):
        assert row.figures == pytest.approx(expected[row.example, row.method, row.part], abs=1e-9)


def test_added_method_computes_only_missing_measurements(tmp_path: Path) -> None:
    make_run(tmp_path / "run")()
    before = read_shards(tmp_path / "run")
    larger_job = replace(JOB, methods=("saliency", "input-x-gradient"))
    larger = make_run(tmp_path / "run", larger_job)
    assert all(
        methods == ("input-x-gradient",)
        for task in larger.find_missing_tasks()
        for _, methods in task.missing_methods_by_settings
    )
    larger()
    after = read_shards(tmp_path / "run")
    assert before.items() <= after.items() and len(after) == 6
    assert {row.method for row in larger.store.iter_table_rows()} == {
        "saliency",
        "input-x-gradient",
        "random",
        "position",
    }
    smaller = make_run(tmp_path / "run")
    smaller()  # the table contains only the job's methods
    assert {row.method for row in smaller.store.iter_table_rows()} == {"saliency", "random", "position"}


def test_cost_estimate_excludes_size_dependent_protocols(tmp_path: Path) -> None:
    both = make_run(tmp_path / "run", replace(JOB, protocols=("idl-text", "perturb-text"))).estimate_cost()
    single = make_run(tmp_path / "run").estimate_cost()
    assert both.max_perturbed_inputs == single.max_perturbed_inputs > 0 and single.size_dependent_protocols == ()
    assert "those of idl-text not counted" in str(both) and "not counted" not in str(single)


def test_added_method_remeasures_agreement_of_all_methods(tmp_path: Path) -> None:
    job = replace(JOB, protocols=("agreement",), settings={"agreement": {"leave_one_out": False}})
    make_run(tmp_path / "run", job)()
    larger = make_run(tmp_path / "run", replace(job, methods=("saliency", "input-x-gradient")))
    assert {
        len(methods) for task in larger.find_missing_tasks() for _, methods in task.missing_methods_by_settings
    } == {4}


def test_agreement_of_methods_measured_separately_is_missing(tmp_path: Path) -> None:
    job = replace(JOB, protocols=("agreement",), settings={"agreement": {"leave_one_out": False}})
    single = make_run(tmp_path / "alone", job)
    single()
    for others in (("rollout",), ("input-x-gradient",), ("rollout", "input-x-gradient")):
        run = make_run(tmp_path / "run", replace(job, methods=("saliency", *others)))
        run()
    methods = {"saliency", "rollout", "input-x-gradient", "random", "position"}
    pairs = {(row.method, row.part) for row in run.store.iter_table_rows()}
    assert pairs == {(method, f"text/{other}") for method in methods for other in methods - {method}}
    smaller = make_run(tmp_path / "run", job)
    smaller()  # the table of a smaller job contains no rows of other methods
    assert (tmp_path / "run/table.parquet").read_bytes() == (tmp_path / "alone/table.parquet").read_bytes()


def test_failure_reasons_are_limited_to_requested_protocols(tmp_path: Path) -> None:
    make_run(tmp_path / "run", replace(JOB, protocols=("input-invariance",), settings={}))()  # needs an image model
    assert len(RunResults(tmp_path / "run").failure_reasons) == 3
    run = make_run(tmp_path / "run", JOB)
    run()
    assert (
        list(run.store.iter_table_rows())
        and run.collect_failure_reasons() == RunResults(tmp_path / "run").failure_reasons == {}
    )


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:20] + bytes(40) + b[60:]])
def test_damaged_shard_raises_with_path_and_remedy(tmp_path: Path, damage: Any) -> None:
    make_run(tmp_path / "run")()
    before = read_shards(tmp_path / "run")
    path = tmp_path / "run" / "shards" / next(iter(before))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=f"{path.name}' cannot be read .*: remove it and run the same command"):
        make_run(tmp_path / "run")()
    path.unlink()
    assert make_run(tmp_path / "run")().computed == 1 and read_shards(tmp_path / "run") == before


def test_damaged_table_raises_and_partial_timing_line_is_ignored(tmp_path: Path) -> None:
    make_run(tmp_path / "run")()
    with (tmp_path / "run" / "timings.jsonl").open("a") as file:
        file.write('{"chunk": "ab')
    assert RunResults(tmp_path / "run").total_seconds > 0
    table = tmp_path / "run" / "table.parquet"
    table.write_bytes(table.read_bytes()[:100])
    with pytest.raises(InputError, match=r"table.parquet' cannot be read .* again to rewrite it"):
        _ = RunResults(tmp_path / "run").protocol_results
    make_run(tmp_path / "run")()
    assert len(RunResults(tmp_path / "run").protocol_results) == 1


def test_run_killed_before_manifest_resumes(tmp_path: Path) -> None:
    (tmp_path / ".run.json.0123.partial").write_text("{")
    make_run(tmp_path)()
    assert not list(tmp_path.glob(".*")) and len(read_shards(tmp_path)) == 3


def test_changed_weights_texts_settings_or_seed_reuse_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run()
    other = explainer("bert/classify")
    with __import__("torch").no_grad():
        other.adapter.model.classifier.bias += 1
    assert len(make_run(tmp_path / "run", ex=other).find_missing_tasks()) == 3
    assert len(make_run(tmp_path / "run", texts=(*TEXTS[:4], "a wonderful book")).find_missing_tasks()) == 1
    changed = replace(JOB, settings={"perturb-text": {"fills": ("pad",)}})
    assert len(make_run(tmp_path / "run", changed).find_missing_tasks()) == 3
    assert len(make_run(tmp_path / "run", replace(JOB, seed=1)).find_missing_tasks()) == 3


def test_stale_rows_of_other_versions_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = "clearhead 99"

    def set_versions(versions: str) -> None:
        for module in ("runner", "worker"):
            monkeypatch.setattr(f"clearhead.bench.{module}.format_versions", lambda: versions)

    assert make_run(tmp_path / "run").estimate_cost().num_stale_rows == 0
    make_run(tmp_path / "run")()
    rows = 5 * 3 * 2
    assert len(list(make_run(tmp_path / "run").store.iter_table_rows())) == rows
    set_versions(now)
    rerun = make_run(tmp_path / "run")
    assert rerun.estimate_cost().num_stale_rows == rows
    fewer = make_run(tmp_path / "run", texts=TEXTS[:2])
    assert fewer.estimate_cost().num_stale_rows == 2 * 3 * 2  # only rows of examples of this job
    other = replace(JOB, settings={"perturb-text": {"fills": ("pad",)}})
    assert make_run(tmp_path / "run", other).estimate_cost().num_stale_rows == 0
    damaged = tmp_path / "run/shards/of-nobody.parquet"
    damaged.write_bytes(b"")
    assert rerun.estimate_cost().num_stale_rows == rows  # damaged shards of other runs are ignored
    rerun()
    assert make_run(tmp_path / "run").estimate_cost().num_stale_rows == 0  # nothing is missing
    set_versions("clearhead 100")
    assert make_run(tmp_path / "run").estimate_cost().num_stale_rows == rows  # measured twice before, counted once


def test_chunks_of_shorter_run_are_reused_by_longer_run() -> None:
    texts = tuple("word " * (1 + (7 * i) % 5) for i in range(70))
    short = list(iter_chunks(make_dataset(texts[:40]), 2))
    long = list(iter_chunks(make_dataset(texts), 2))
    assert [key for _, key in short[:16]] == [key for _, key in long[:16]]
    all_indices = sorted(index for indices, _ in long for index in indices)
    assert all_indices == list(range(70))
    with pytest.raises(InputError, match="at least 1"):
        list(iter_chunks(make_dataset(), 0))


def test_merged_runs_equal_complete_run(tmp_path: Path) -> None:
    complete = make_run(tmp_path / "whole")
    complete()
    for number, texts in enumerate((TEXTS[:4], TEXTS)):
        make_run(tmp_path / str(number), texts=texts)()
    first, second = ResultStore(tmp_path / "0"), ResultStore(tmp_path / "1")
    num_copied = first.merge(second)
    assert num_copied == len(read_shards(tmp_path / "0")) - 2 and first.merge(second) == 0
    merged = make_run(tmp_path / "0")
    assert not merged.find_missing_tasks()
    merged()
    assert (tmp_path / "0" / "table.parquet").read_bytes() == (tmp_path / "whole" / "table.parquet").read_bytes()


def test_unsupported_protocol_is_recorded_and_not_retried(tmp_path: Path) -> None:
    job = replace(JOB, methods=("saliency",), protocols=("perturb-images",), settings={})
    run = make_run(tmp_path / "run", job)
    run()
    assert "needs patches of an image" in run.collect_failure_reasons()["perturb-images: saliency"]
    assert not list(run.store.iter_table_rows()) and not make_run(tmp_path / "run", job).find_missing_tasks()


def test_unexplainable_example_does_not_affect_others(tmp_path: Path) -> None:
    job = replace(JOB, chunk=5, methods=("saliency", "rollout"))
    run = make_run(tmp_path / "run", job, (*TEXTS[:2], "", *TEXTS[3:]))
    run()
    assert {row.example for row in run.store.iter_table_rows()} == {"t0", "t1", "t3", "t4"}
    assert set(run.collect_failure_reasons().values()) == {"on 't2': the text is empty: there is nothing to explain"}
    assert (
        run.collect_failure_reasons() == RunResults(tmp_path / "run").failure_reasons
        and len(run.collect_failure_reasons()) == 4
    )
    assert not make_run(tmp_path / "run", job, (*TEXTS[:2], "", *TEXTS[3:])).find_missing_tasks()


def test_method_failing_on_one_example_is_measured_on_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.methods.random import RandomControl

    original = RandomControl.compute_scores

    def fail_on_short(self: Any, tape: Any) -> Any:
        return 1 / 0 if self.unit_context.valid_mask.sum(-1).min() < 5 else original(self, tape)

    reference = make_run(tmp_path / "whole", replace(JOB, chunk=5, protocols=("perturb-text", "agreement")))
    reference()
    monkeypatch.setattr(RandomControl, "compute_scores", fail_on_short)
    run = make_run(tmp_path / "run", replace(JOB, chunk=5, protocols=("perturb-text", "agreement"), keep=True))
    run()
    rows = {(row.protocol, row.method, row.part, row.example): row.figures for row in run.store.iter_table_rows()}
    all_rows = {
        (row.protocol, row.method, row.part, row.example): row.figures for row in reference.store.iter_table_rows()
    }
    short = {"t1"}  # two tokens between two special tokens
    failed = {key for key in all_rows if key[3] in short and (key[1] == "random" or key[0] == "agreement")}
    assert set(rows) == set(all_rows) - failed
    assert all(rows[key] == pytest.approx(all_rows[key], abs=1e-6, nan_ok=True) for key in rows)
    assert run.collect_failure_reasons()["perturb-text: random"] == "on 't1': ZeroDivisionError: division by zero"
    stored = RunResults(tmp_path / "run").load_explanations({("t1", "saliency"), ("t1", "random"), ("t0", "random")})
    assert set(stored) == {("t1", "saliency"), ("t0", "random")}


def test_method_failing_only_on_batches_is_measured_on_every_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clearhead.methods.random import RandomControl

    original = RandomControl.compute_scores
    monkeypatch.setattr(
        RandomControl,
        "compute_scores",
        lambda self, tape: 1 / (len(self.unit_context.valid_mask) == 1) and original(self, tape),
    )
    run = make_run(tmp_path / "run", replace(JOB, chunk=5))
    run()
    assert {row.example for row in run.store.iter_table_rows() if row.method == "random"} == {f"t{i}" for i in range(5)}
    assert not run.collect_failure_reasons()


def test_nan_scores_are_reported_and_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.methods.random import RandomControl

    original = RandomControl.compute_scores

    def nan_on_short(self: Any, tape: Any) -> Any:
        output, short = original(self, tape), self.unit_context.valid_mask.sum(-1) < 5
        return replace(output, scores=output.scores.masked_fill(short[:, None, None], float("nan")))

    monkeypatch.setattr(RandomControl, "compute_scores", nan_on_short)
    run = make_run(tmp_path / "run", replace(JOB, chunk=5))
    run()
    assert "t1" not in {row.example for row in run.store.iter_table_rows() if row.method == "random"}
    assert run.collect_failure_reasons()["perturb-text: random"] == "on 't1': its scores are not numbers (NaN; text)"


def test_example_without_label_does_not_affect_others(tmp_path: Path) -> None:
    rows = [Example(f"t{i}", text, None if i == 1 else 0) for i, text in enumerate(TEXTS)]
    dataset = BenchmarkDataset("mine", "all", "CC0", ("LABEL_0", "LABEL_1"), lambda: rows, lambda row: row)
    for settings, reason in (
        ({"explained": "gold"}, "on 't1': explained='gold', but 't1' has no single true class"),
        ({"judged": "gold"}, "on 't1': judged='gold', but 't1' has no true class: use judged='predicted'"),
        ({"examples": "wrong"}, "on 't1': examples='wrong', but 't1' has no true class"),
    ):
        job = replace(JOB, chunk=5, settings={"perturb-text": {"fractions": (0.5,), **settings}})
        run = BenchmarkRun(job, tmp_path / next(iter(settings)), explainer("bert/classify"), dataset)
        run()
        assert "t1" not in {row.example for row in run.store.iter_table_rows()}
        assert run.collect_failure_reasons()["perturb-text: saliency"] == reason
    run = BenchmarkRun(replace(JOB, chunk=5), tmp_path / "all", explainer("bert/classify"), dataset)
    run()
    assert {row.example for row in run.store.iter_table_rows() if "correct" not in row.figures} == {"t1"}


def test_protocol_failure_of_one_method_does_not_affect_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One method has only an example on which the protocol fails; the other methods keep their examples."""
    from clearhead.methods.random import RandomControl

    original = RandomControl.compute_scores

    def fail_on_long(self: Any, tape: Any) -> Any:
        return original(self, tape) if self.unit_context.valid_mask.sum(-1).max() < 5 else 1 / 0

    monkeypatch.setattr(RandomControl, "compute_scores", fail_on_long)
    rows = [Example(f"t{i}", text, None if i == 1 else 0) for i, text in enumerate(TEXTS)]
    dataset = BenchmarkDataset("mine", "all", "CC0", ("LABEL_0", "LABEL_1"), lambda: rows, lambda row: row)
    job = replace(JOB, chunk=5, settings={"perturb-text": {"fractions": (0.5,), "judged": "gold"}})
    run = BenchmarkRun(job, tmp_path / "run", explainer("bert/classify"), dataset)
    run()
    measured = {(row.method, row.example) for row in run.store.iter_table_rows() if row.protocol == "perturb-text"}
    assert {example for method, example in measured if method == "saliency"} == {"t0", "t2", "t3", "t4"}
    assert not any(method == "random" for method, _ in measured)
    reason = run.collect_failure_reasons()["perturb-text: random"]
    assert "ZeroDivisionError" in reason and "'t1' has no true class" in reason


def test_duplicate_example_ids_raise(tmp_path: Path) -> None:
    rows = [Example("same", text, 0) for text in TEXTS]
    dataset = BenchmarkDataset("mine", "all", "CC0", ("LABEL_0", "LABEL_1"), lambda: rows, lambda row: row)
    with pytest.raises(InputError, match="two examples of mine are named 'same'"):
        BenchmarkRun(JOB, tmp_path / "run", explainer("bert/classify"), dataset).estimate_cost()


def test_partial_shard_files_are_ignored_and_removed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run()
    name = next(iter(read_shards(tmp_path / "run")))
    (tmp_path / "run" / "shards" / f".{name}.123.partial").write_bytes(b"half")
    (tmp_path / "run" / "shards" / name).unlink()
    rerun = make_run(tmp_path / "run")
    assert len(rerun.find_missing_tasks()) == 1
    rerun()
    assert name in read_shards(tmp_path / "run") and not list((tmp_path / "run" / "shards").glob(".*"))


def test_foreign_folder_raises_and_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="is not a benchmark run"):
        make_run(tmp_path)()
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    with pytest.raises(InputError, match="no finished table"):
        list(ResultStore(tmp_path).iter_table_rows())


def test_shard_round_trip_is_exact_and_deterministic(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "s")
    store.prepare_folder({"settings": {}})
    row = MeasurementRow(
        "m", "d", "e", "a", "truth", "h", "v", "text", {"x": 0.1, "nan": float("inf")}, {"c": [1.0, 2.0]}
    )
    shard = Shard("key", (("h", ("a", "b")),), (row,), {"truth: b": "has no rule"})
    path = store.write_shard(shard)
    requested = {"h": RequestedMethods("truth", frozenset({"a", "b"}))}
    assert store.read_chunk_rows("key", requested) == [row] and store.find_available_methods(
        store.find_shards("key"), requested
    ) == {"h": {"a", "b"}}
    assert store.collect_failure_reasons(["key"], requested) == {"truth: b": "has no rule"}
    first = path.read_bytes()
    assert store.write_shard(shard).read_bytes() == first


def test_time_estimate_scales_with_examples_and_workers(tmp_path: Path) -> None:
    texts = tuple(f"{text} {number}" for text in TEXTS for number in range(4))
    unfinished = make_run(tmp_path / "run", replace(JOB, methods=("saliency", "rollout")), texts)
    expected = estimate_time(unfinished)
    assert expected is not None and set(expected.seconds_by_method) == {"saliency", "rollout", "random", "position"}
    assert all(seconds > 0 for seconds in expected.seconds_by_method.values())
    assert expected.total_seconds == pytest.approx(20 * expected.seconds_per_example) and str(expected).startswith(
        "about "
    )
    assert not (tmp_path / "run").exists()  # nothing is stored
    ten_workers = estimate_time(unfinished, num_workers=10)  # there are ten chunks
    assert ten_workers is not None and ten_workers.total_seconds == pytest.approx(2 * ten_workers.seconds_per_example)
    small_run = make_run(tmp_path / "run")
    assert estimate_time(small_run) is None
    small_run()
    save_method_seconds(small_run, expected)
    assert set(RunResults(tmp_path / "run").seconds_by_method) == set(expected.seconds_by_method)


def test_labels_are_aligned_by_name() -> None:
    ex = explainer("bert/classify")
    names = BenchmarkDataset("mine", "all", "CC0", ("LABEL_1", "LABEL_0"), list, Example)
    assert align_label(Example("x", "a", 0), names, ex).label == 1
    too_many = BenchmarkDataset("mine", "all", "CC0", tuple("abcdefg"), list, Example)
    assert align_label(Example("x", "a", 0), too_many, ex).label is None
    numbered = BenchmarkDataset("mine", "all", "CC0", ("bad", "so so", "good"), list, Example)
    assert [align_label(Example("x", "a", label), numbered, ex).label for label in (0, 1, 2)] == [0, 1, 2]
    named = explainer("bert/classify", id2label={0: "negative", 1: "neutral", 2: "positive"})
    assert [align_label(Example("x", "a", label), numbered, named).label for label in (0, 1, 2)] == [0, 1, 2]
    arbitrary_ids = replace(numbered, label_ids_are_arbitrary=True)  # label ids without a meaning
    assert all(align_label(Example("x", "a", label), arbitrary_ids, named).label is None for label in (0, 1, 2))
    assert [align_label(Example("x", "a", label), arbitrary_ids, ex).label for label in (0, 1, 2)] == [0, 1, 2]
    partly_named = BenchmarkDataset("mine", "all", "CC0", ("LABEL_1", "other", "third"), list, Example)
    assert [align_label(Example("x", "a", label), partly_named, ex).label for label in (0, 1, 2)] == [1, None, None]


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
def test_parse_setting_reads_typed_values(text: str, expected: tuple[str, str, Any]) -> None:
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
def test_parse_setting_rejects_invalid_text(text: str) -> None:
    with pytest.raises(InputError):
        parse_setting(text)


def test_every_protocol_records_whether_prediction_is_correct(tmp_path: Path) -> None:
    job = replace(JOB, protocols=("perturb-text", "subsets", "classes"), settings={"subsets": {"draws": 3}})
    run = make_run(tmp_path / "run", job)
    run()
    correct_by_key = {(row.protocol, row.example): row.figures["correct"] for row in run.store.iter_table_rows()}
    model = explainer("bert/classify")
    for example in make_dataset():
        is_correct = float(model.explain(example.input, "saliency").prediction["index"] == example.label)
        assert [correct_by_key[name, example.id] for name in job.protocols] == [is_correct] * 3
    assert set(correct_by_key.values()) == {0.0, 1.0}
    sections = RunResults(tmp_path / "run").protocol_results
    assert all(
        0 < len({measurement.example for measurement in section.correct_measurements}) < len(TEXTS)
        for section in sections
    )


def test_invalid_jobs_raise() -> None:
    with pytest.raises(InputError, match="te-images and bi-images are the same measurement"):
        ChunkWorker(replace(JOB, protocols=("te-images", "bi-images"), settings={}))
    with pytest.raises(InputError, match="no such protocol"):
        ChunkWorker(replace(JOB, protocols=("truth",)))
    with pytest.raises(InputError, match="no protocol"):
        ChunkWorker(replace(JOB, protocols=(), settings={}))
    with pytest.raises(InputError, match="local"):
        get_engine("cluster")
    with pytest.raises(InputError, match="pass its name"):
        list(get_engine("processes")(ChunkWorker(JOB, explainer("bert/classify"), make_dataset()), [], 1))


@pytest.fixture
def light_worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker without model and data, whose processes import neither torch nor clearhead."""
    monkeypatch.setattr("clearhead.bench.engines.init_process_worker", id)
    return SimpleNamespace(job=None, preloaded_explainer=None, preloaded_dataset=None)


def test_dead_worker_process_raises(light_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.bench.engines.run_process_task", os._exit)
    tasks: Any = [1]
    with pytest.raises(ClearheadError, match=r"a worker process ended .* Run the same command again"):
        list(get_engine("processes")(light_worker, tasks, 1, None))


def test_closed_run_does_not_wait_for_remaining_chunks(light_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.bench.engines.run_process_task", time.sleep)
    tasks: Any = [0.2] * 100
    running: Any = get_engine("processes")(light_worker, tasks, 1, None)
    next(running)
    stopped = time.monotonic()
    running.close()
    assert time.monotonic() - stopped < 10  # all chunks would take 20 s


def test_parse_method_round_trip_with_options() -> None:
    assert (
        str(parse_method("grad-sam(received=True)")) == "grad-sam(received=True)"
        and str(parse_method("random")) == "random"
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_run_killed_at_random_times_equals_undisturbed_run(tmp_path: Path, times: int) -> None:
    pytest.importorskip("clearhead_zoo")
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    script = str(Path(__file__).parent / "killed_runs.py")
    result = subprocess.run(
        [sys.executable, script, str(tmp_path), str(times)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    shard_counts = [int(count) for count in result.stdout.split()]
    chunks = 6 + 5 * times
    # no run was finished when killed
    assert len(shard_counts) == times and shard_counts[0] > 0 and shard_counts[-1] < chunks
    killed, undisturbed = tmp_path / "killed", tmp_path / "whole"
    assert read_shards(killed) == read_shards(undisturbed) and len(read_shards(undisturbed)) == chunks
    assert (killed / "table.parquet").read_bytes() == (undisturbed / "table.parquet").read_bytes()
    timed_chunks = [json.loads(line)["chunk"] for line in (killed / "timings.jsonl").read_text().splitlines()]
    assert len(timed_chunks) == len(set(timed_chunks))  # no chunk was computed twice
