"""The page of docs/leaderboard.md: methods measured on some of the examples, or apart, are said to be."""

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
    """AUPRC, token F1 and ERASER's two, of one method; `better` shifts all towards the good."""
    made = []
    for example in examples:
        noise = np.random.default_rng([len(example), int(example.split()[1])]).normal(0, 0.01)
        own = {"auprc": 0.2 + better + noise, "token f1 @20": 0.1 + better + noise, "iou f1 @20": 0.0}
        made.append(row("rationales", "text", method, example, own))
        made.append(row("eraser", "text/delete/positive", method, example, {"aopc": 0.3 + better + noise}))
        made.append(row("eraser", "text/delete/keep", method, example, {"aopc": 0.3 - better + noise}))
    return made


def row(protocol: str, part: str, method: str, example: str, figures: dict[str, float]) -> dict[str, object]:
    return {"protocol": protocol, "part": part, "method": method, "example": example, "figures": figures}


def line(key: str, rows: list[dict[str, object]], device: str, refused: dict[str, str]) -> str:
    about = {"versions": "clearhead 0", "device": device, "dtype": "float32", "data": "eraser-movies"}
    return json.dumps({"key": key, "seconds": 1.0, "about": about, "refused": refused, "rows": rows}) + "\n"


WHY = {"eraser: deeplift": "NaN", "eraser: tam": "no rule"}


def run(folder: Path) -> Path:
    """Three methods on all examples; `flow`, the best, on four; DeepLIFT refused on the GPU, measured on the CPU."""
    at = folder / "rationale"
    at.mkdir(parents=True)
    main = [
        one for name, gain in (("generic", 0.2), ("lime", 0.1), ("random", 0)) for one in rows_of(name, EXAMPLES, gain)
    ]
    (at / "0-of-1.jsonl").write_text(line("a", main, "GPU", WHY))
    (at / "flow-0-of-1.jsonl").write_text(line("a/0/flow", rows_of("flow", EXAMPLES[:4], 0.5), "CPU", {}))
    (at / "deeplift-0-of-1.jsonl").write_text(line("a/0/deeplift", rows_of("deeplift", EXAMPLES, 0.15), "CPU", {}))
    return folder


def test_few_examples_give_a_mean_and_no_rank(tables: ModuleType, tmp_path: Path) -> None:
    model = tables.summarise(run(tmp_path))["models"]["rationale"]
    found = model["tables"]["rationale, text"]["methods"]
    assert found["flow"][3:] == [4, None]
    assert found["flow"][0] > found["generic"][0]  # the best mean, and yet not called the best
    # as if `flow` had not been there: it is in no test, and takes no rank
    assert {method: own[4] for method, own in found.items() if method != "flow"} == {
        "generic": "1",
        "deeplift": "2",
        "lime": "3",
        "random": "4",
    }
    assert model["device"] == "CPU and GPU"


def test_smaller_is_better_where_it_is(tables: ModuleType, tmp_path: Path) -> None:
    found = tables.summarise(run(tmp_path))["models"]["rationale"]["tables"]
    assert found["eraser, text: sufficiency"]["methods"]["generic"][4] == "1"
    assert found["eraser, text: comprehensiveness"]["methods"]["generic"][4] == "1"
    assert {"rationale, text: token f1 @20", "rationale, text: iou f1 @20"} <= set(found)


def test_the_page_says_how_many_and_why_not(tables: ModuleType, tmp_path: Path) -> None:
    page = tables.render_page(tables.summarise(run(tmp_path)), "")
    flow = next(one for one in page.splitlines() if one.startswith("| flow |") and "(4)" in one)
    assert "·" not in flow and "**" not in flow
    assert "`tam` on rationale: no rule" in page
    assert "`deeplift` on rationale" not in page  # refused on one device, measured on another
    assert "`kernel-shap` on rationale: left out: it takes longer" in page


def test_a_reason_stays_where_another_protocol_measured_the_method(tables: ModuleType, tmp_path: Path) -> None:
    at = tmp_path / "rationale"
    at.mkdir()
    rows = rows_of("lime", EXAMPLES, 0.1) + rows_of("random", EXAMPLES, 0)
    why = {
        "perturb-text: lime": "no mask",
        "subsets: lime": "no mask",
        "eraser: lime": "on the GPU",
        "eraser: tam": "no rule",
    }
    (at / "0-of-1.jsonl").write_text(line("a", rows, "GPU", why))
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
    made = tables.merge_model_summaries(
        summary["models"]["rationale"], tables.summarise(tmp_path / "later")["models"]["rationale"]
    )
    assert made["refused"] == {"perturb-text: lime": "no mask", "subsets: lime": "no mask", "subsets: tam": "no"}


def test_orders_are_compared_among_well_measured_methods(tables: ModuleType, tmp_path: Path) -> None:
    rows = {"rationale": {"values": {}}}
    good = {f"m{n}": dict.fromkeys(EXAMPLES, n / 10) for n in range(5)}
    values = {**good, "flow": {EXAMPLES[0]: 9.0}}
    rows["rationale"]["values"] = {
        "gap, text: mask": ("gap", False, values),
        "rationale, text": ("rationale", False, values),
        "eraser, text: sufficiency": ("eraser", True, values),
    }
    (found,) = tables.compute_agreements(rows)
    assert (found["first"], found["second"], found["methods"]) == ("gap, text: mask", "rationale, text", 5)
    assert found["tau"][0] == 1.0


def test_a_method_measured_later_stands_beside_without_a_rank(tables: ModuleType, tmp_path: Path) -> None:
    before = tables.summarise(run(tmp_path / "first"))["models"]["rationale"]
    at = tmp_path / "second" / "rationale"
    at.mkdir(parents=True)
    (at / "lime-0-of-1.jsonl").write_text(line("b/0/tam", rows_of("tam", EXAMPLES, 0.5), "CPU", {}))
    made = tables.merge_model_summaries(before, tables.summarise(tmp_path / "second")["models"]["rationale"])
    found = made["tables"]["rationale, text"]["methods"]
    assert found["tam"][3:] == [24, None] and found["generic"][4] == "1"
    assert "eraser: tam" not in made["refused"] and "eraser: tam" in before["refused"]
    assert made["seconds"] == 4.0
    again = tables.summarise(run(tmp_path / "third"))["models"]["rationale"]
    assert tables.merge_model_summaries(made, again) is again  # a whole run takes the place of what was there


def test_what_a_run_costs(tables: ModuleType, tmp_path: Path) -> None:
    notes = [{"pictures": 20 * n, "seconds": 2.0 * n, "mib": 700.0 + n, "cuda mib": 90.0} for n in range(1, 26)]
    found = {
        "machine": {"device": "GPU", "dtype": "float32", "torch": "2"},
        "methods": ["generic", "random"],
        "fractions": [0.5, 1.0],
        "clearhead": {"judged": 10, "distinct": 10, "explained": 5, "notes": notes},
        "authors": {"judged": 20, "distinct": 10, "explained": 10, "notes": notes[4:5]},
        "compared": {"pictures": 100, "clearhead": 10.0, "authors": 30.0, "ratio": 3.0, "gap": 1e-7},
    }
    page = tables._render_cost(found)
    assert [one.split(" | ")[0] for one in page.splitlines() if one.startswith("| ")][2:] == [
        f"| {count}" for count in (100, 200, 300, 400, 500)
    ]
    assert "3.0 times as fast" in page and "The curves are equal to 1e-07." in page
    found["compared"] |= {"gap": 0.41, "curves": 40, "apart": 2, "gap of controls": 1e-7}
    page = tables._render_cost(found)
    assert "More than 0.001 apart are 2 of 40 curves (at most 0.41)" in page and "turns over units that are" in page
    found["compared"]["gap of controls"] = 0.3
    assert "turns over units, or classes, that are" in tables._render_cost(found)
