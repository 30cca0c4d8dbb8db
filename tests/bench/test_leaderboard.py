"""Tables of docs/leaderboard.md: methods measured on fewer examples or in separate runs are labelled."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import leaderboard_tables

    yield leaderboard_tables
    for name in ("leaderboard_tables", "leaderboard"):
        sys.modules.pop(name, None)


EXAMPLES = [f"review {number}" for number in range(24)]


def rows_of(method: str, examples: list[str], better: float) -> list[dict[str, object]]:
    """AUPRC, token F1 and ERASER's two metrics of one method; `better` improves all of them."""
    rows = []
    for example in examples:
        noise = np.random.default_rng([len(example), int(example.split()[1])]).normal(0, 0.01)
        rationale_metrics = {"auprc": 0.2 + better + noise, "token f1 @20": 0.1 + better + noise, "iou f1 @20": 0.0}
        rows.append(row("rationales", "text", method, example, rationale_metrics))
        rows.append(row("eraser", "text/delete/positive", method, example, {"aopc": 0.3 + better + noise}))
        rows.append(row("eraser", "text/delete/keep", method, example, {"aopc": 0.3 - better + noise}))
    return rows


def row(protocol: str, part: str, method: str, example: str, figures: dict[str, float]) -> dict[str, object]:
    return {"protocol": protocol, "part": part, "method": method, "example": example, "figures": figures}


def line(key: str, rows: list[dict[str, object]], device: str, refused: dict[str, str]) -> str:
    about = {"versions": "clearhead 0", "device": device, "dtype": "float32", "data": "eraser-movies"}
    return json.dumps({"key": key, "seconds": 1.0, "about": about, "refused": refused, "rows": rows}) + "\n"


FAILURES = {"eraser: deeplift": "NaN", "eraser: tam": "no rule"}


def write_run(folder: Path) -> Path:
    """Three methods on all examples; `flow`, the best, on four; DeepLIFT failed on the GPU, measured on the CPU."""
    model_folder = folder / "rationale"
    model_folder.mkdir(parents=True)
    rows = [
        each
        for name, gain in (("generic", 0.2), ("lime", 0.1), ("random", 0))
        for each in rows_of(name, EXAMPLES, gain)
    ]
    (model_folder / "0-of-1.jsonl").write_text(line("a", rows, "GPU", FAILURES))
    (model_folder / "flow-0-of-1.jsonl").write_text(line("a/0/flow", rows_of("flow", EXAMPLES[:4], 0.5), "CPU", {}))
    (model_folder / "deeplift-0-of-1.jsonl").write_text(
        line("a/0/deeplift", rows_of("deeplift", EXAMPLES, 0.15), "CPU", {})
    )
    return folder


def test_method_with_few_examples_gets_no_rank(tables: ModuleType, tmp_path: Path) -> None:
    model = tables.summarise(write_run(tmp_path))["models"]["rationale"]
    methods = model["tables"]["rationale, text"]["methods"]
    assert methods["flow"][3:] == [4, None]
    assert methods["flow"][0] > methods["generic"][0]  # the best mean, but without a rank
    # the other ranks are those without `flow`
    assert {method: values[4] for method, values in methods.items() if method != "flow"} == {
        "generic": "1",
        "deeplift": "2",
        "lime": "3",
        "random": "4",
    }
    assert model["device"] == "CPU and GPU"


def test_rank_respects_smaller_is_better(tables: ModuleType, tmp_path: Path) -> None:
    tables_by_name = tables.summarise(write_run(tmp_path))["models"]["rationale"]["tables"]
    assert tables_by_name["eraser, text: sufficiency"]["methods"]["generic"][4] == "1"
    assert tables_by_name["eraser, text: comprehensiveness"]["methods"]["generic"][4] == "1"
    assert {"rationale, text: token f1 @20", "rationale, text: iou f1 @20"} <= set(tables_by_name)


def test_page_states_example_counts_and_failure_reasons(tables: ModuleType, tmp_path: Path) -> None:
    page = tables.render_page(tables.summarise(write_run(tmp_path)), "")
    flow = next(
        table_line for table_line in page.splitlines() if table_line.startswith("| flow |") and "(4)" in table_line
    )
    assert "·" not in flow and "**" not in flow
    assert "`tam` on rationale: no rule" in page
    assert "`deeplift` on rationale" not in page  # failed on one device, measured on another
    assert "`kernel-shap` on rationale: omitted: it takes longer" in page


def test_failure_reasons_are_kept_per_protocol(tables: ModuleType, tmp_path: Path) -> None:
    model_folder = tmp_path / "rationale"
    model_folder.mkdir()
    rows = rows_of("lime", EXAMPLES, 0.1) + rows_of("random", EXAMPLES, 0)
    reasons = {
        "perturb-text: lime": "no mask",
        "subsets: lime": "no mask",
        "eraser: lime": "on the GPU",
        "eraser: tam": "no rule",
    }
    (model_folder / "0-of-1.jsonl").write_text(line("a", rows, "GPU", reasons))
    summary = tables.summarise(tmp_path)
    assert summary["models"]["rationale"]["refused"] == {
        "perturb-text: lime": "no mask",
        "subsets: lime": "no mask",
        "eraser: tam": "no rule",
    }
    page = tables.render_page(summary, "")
    assert "`lime` on rationale (perturb-text, subsets): no mask" in page and "on the GPU" not in page
    assert "`tam` on rationale: no rule" in page
    later = tmp_path / "later" / "rationale"
    later.mkdir(parents=True)
    (later / "tam-0-of-1.jsonl").write_text(line("b/0/tam", rows_of("tam", EXAMPLES, 0), "CPU", {"subsets: tam": "no"}))
    merged = tables.merge_model_summaries(
        summary["models"]["rationale"], tables.summarise(tmp_path / "later")["models"]["rationale"]
    )
    assert merged["refused"] == {"perturb-text: lime": "no mask", "subsets: lime": "no mask", "subsets: tam": "no"}


def test_rank_agreement_uses_only_complete_methods(tables: ModuleType, tmp_path: Path) -> None:
    rows = {"rationale": {"values": {}}}
    complete = {f"m{n}": dict.fromkeys(EXAMPLES, n / 10) for n in range(5)}
    values = {**complete, "flow": {EXAMPLES[0]: 9.0}}
    rows["rationale"]["values"] = {
        "gap, text: mask": ("gap", False, values),
        "rationale, text": ("rationale", False, values),
        "eraser, text: sufficiency": ("eraser", True, values),
    }
    (agreement,) = tables.compute_agreements(rows)
    assert (agreement["first"], agreement["second"], agreement["methods"]) == ("gap, text: mask", "rationale, text", 5)
    assert agreement["tau"][0] == 1.0


def test_merged_later_method_gets_no_rank(tables: ModuleType, tmp_path: Path) -> None:
    before = tables.summarise(write_run(tmp_path / "first"))["models"]["rationale"]
    model_folder = tmp_path / "second" / "rationale"
    model_folder.mkdir(parents=True)
    (model_folder / "lime-0-of-1.jsonl").write_text(line("b/0/tam", rows_of("tam", EXAMPLES, 0.5), "CPU", {}))
    merged = tables.merge_model_summaries(before, tables.summarise(tmp_path / "second")["models"]["rationale"])
    methods = merged["tables"]["rationale, text"]["methods"]
    assert methods["tam"][3:] == [24, None] and methods["generic"][4] == "1"
    assert "eraser: tam" not in merged["refused"] and "eraser: tam" in before["refused"]
    assert merged["seconds"] == 4.0
    complete_run = tables.summarise(write_run(tmp_path / "third"))["models"]["rationale"]
    assert tables.merge_model_summaries(merged, complete_run) is complete_run  # a complete run replaces the old summary


def test_cost_table_lists_every_hundred_images(tables: ModuleType, tmp_path: Path) -> None:
    notes = [{"pictures": 20 * n, "seconds": 2.0 * n, "mib": 700.0 + n, "cuda mib": 90.0} for n in range(1, 26)]
    costs = {
        "machine": {"device": "GPU", "dtype": "float32", "torch": "2"},
        "methods": ["generic", "random"],
        "fractions": [0.5, 1.0],
        "clearhead": {"judged": 10, "distinct": 10, "explained": 5, "notes": notes},
        "authors": {"judged": 20, "distinct": 10, "explained": 10, "notes": notes[4:5]},
        "compared": {"pictures": 100, "clearhead": 10.0, "authors": 30.0, "ratio": 3.0, "gap": 1e-7},
    }
    page = tables._render_cost(costs)
    assert [table_line.split(" | ")[0] for table_line in page.splitlines() if table_line.startswith("| ")][2:] == [
        f"| {count}" for count in (100, 200, 300, 400, 500)
    ]
    assert "3.0 times as fast" in page and "The curves are equal to 1e-07." in page
    costs["compared"] |= {"gap": 0.41, "curves": 40, "apart": 2, "gap of controls": 1e-7}
    page = tables._render_cost(costs)
    assert "2 of 40 curves differ by more than 0.001 (at most 0.41)" in page and "can swap units that are" in page
    costs["compared"]["gap of controls"] = 0.3
    assert "can swap units or classes that are" in tables._render_cost(costs)
