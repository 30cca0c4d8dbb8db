"""Fixtures: explanations of tiny models, and synthetic ones with hostile tokens and degenerate scores."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead import Explanation
from clearhead.units import Units, build_numbered_units, build_patch_units
from tests import models
from tests.render.browser import BrowserPage, OpenPage

HOSTILE_STRINGS = [
    "<script>alert(1)</script>",
    '"onmouseover="alert(1)',
    "'><img src=http://owned.invalid/x.png onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "</style></title></textarea><svg onload=alert(3)>",
    "&amp;&lt;",
    "a\x00b\x1b[31mc\x07\r",
    "\u202eevil\u2066",
    "\u200fשלום",
    "$x^2$ {{7*7}} %s",
    "]]> --> <!--",
    "javascript:alert(4)",
    "\ud800",
    "\u2028line\u2029",
    "line\nbreak\ttab",
]


def with_intervals(explanation: Explanation, half_widths: Sequence[float]) -> Explanation:
    """The explanation with intervals of these half-widths and independent scores."""
    half_widths = np.asarray(half_widths, dtype=np.float32)
    return replace(
        explanation,
        intervals=np.stack([explanation.scores - half_widths, explanation.scores + half_widths], 1),
        covariance=np.diag((half_widths / 2) ** 2),
        provenance={**explanation.provenance, "interval_level": 0.9, "interval_multiplier": 2.0},
    )


def make_explanation(
    names: Sequence[str],
    scores: Sequence[float] | np.ndarray,
    special: Sequence[bool] = (),
    units: Units | None = None,
    **more: Any,
) -> Explanation:
    """Make an explanation without a model."""
    return Explanation(
        units=units or build_numbered_units(len(names), "text", names, special),
        scores=np.asarray(scores, dtype=np.float32),
        method=more.pop("method", "made-up"),
        target={"kind": "label", "name": "yes", "index": 0, "scale": "logit", "value": 1.5},
        prediction={
            "label": "yes",
            "index": 0,
            "probability": 0.9,
            "top": [_make_prediction("yes", 0.9), _make_prediction("no", 0.1)],
        },
        certificate={"capture_error": 1e-7, "dtype": "float32", "readout": "first", "truncated_tokens": 0},
        provenance={
            "model": "some/model",
            "model_class": "M",
            "method": "made-up",
            "options": {},
            "citation": "Me (1)",
        },
        **more,
    )


def _make_prediction(label: str, probability: float) -> dict[str, Any]:
    return {"label": label, "index": 0, "probability": probability, "logit": 1.0}


@pytest.fixture(scope="session")
def hostile() -> Explanation:
    """An explanation with hostile strings in every string field."""
    text = " ".join(HOSTILE_STRINGS)
    starts = np.cumsum([0, *(len(token) + 1 for token in HOSTILE_STRINGS)])
    units = Units(
        stream="text",
        kind="token",
        names=tuple(HOSTILE_STRINGS),
        special=tuple(i == 2 for i in range(len(HOSTILE_STRINGS))),
        texts=(text,),
        segments=(0,) * len(HOSTILE_STRINGS),
        offsets=tuple((int(a), int(a) + len(token)) for a, token in zip(starts, HOSTILE_STRINGS, strict=False)),
    )
    hostile_name = HOSTILE_STRINGS[0] + HOSTILE_STRINGS[1] + HOSTILE_STRINGS[3]
    explanation = make_explanation(
        HOSTILE_STRINGS, np.linspace(-1, 1, len(HOSTILE_STRINGS)), units=units, method=hostile_name
    )
    return replace(
        explanation,
        target={**explanation.target, "name": hostile_name, "kind": hostile_name, "scale": hostile_name},
        prediction={
            "label": hostile_name,
            "top": [_make_prediction(hostile_name, 0.5), _make_prediction(HOSTILE_STRINGS[2], 0.5)],
        },
        certificate={**explanation.certificate, hostile_name: hostile_name, "versions": {hostile_name: hostile_name}},
        provenance={
            "model": hostile_name,
            "model_class": HOSTILE_STRINGS[4],
            "method": hostile_name,
            "options": {"x": hostile_name},
            "citation": hostile_name,
        },
        per_layer=np.stack([explanation.scores] * 3),
    )


def explain_with_methods(subject: str, raw: Any) -> dict[str, Explanation]:
    explanations = models.explainer(subject).explain(raw, method=["generic", "attcat", "input-x-gradient"], per="head")
    return {str(explanation.provenance["method"]): explanation for explanation in explanations.values()}


@pytest.fixture(scope="session")
def text() -> dict[str, Explanation]:
    """Several methods on one text with a line break and odd spaces."""
    raw = "She hates   the book,\nbecause it isn't good 😀."
    return explain_with_methods("bert/classify", raw)


@pytest.fixture(scope="session", params=[1, 3], ids=["one output", "three outputs"])
def regression(request: pytest.FixtureRequest) -> Explanation:
    """An explanation of a regression model: outputs without probabilities."""
    ex = models.explainer("bert/classify", num_labels=request.param, problem_type="regression")
    explanation: Explanation = ex.explain("So boring!", method="generic", per="head")
    return explanation


@pytest.fixture(scope="session")
def pair() -> Explanation:
    explanation: Explanation = models.explainer("roberta/classify").explain(models.PAIR, method="generic")
    return explanation


@pytest.fixture(scope="session")
def truncated() -> Explanation:
    """An explanation of a truncated text."""
    explanation: Explanation = models.explainer("bert/classify").explain(
        "She hates the book. " * 8, max_length=12, method="generic"
    )
    return explanation


@pytest.fixture(scope="session")
def image() -> dict[str, Explanation]:
    return explain_with_methods("vit/image", models.inputs("vit/image")[0])


Change = Callable[[Explanation], Explanation]


def _keep_first_unit(explanation: Explanation) -> Explanation:
    units = build_patch_units((1, 1)) if explanation.units.grid else build_numbered_units(1, "text", ["only"])
    first_scores = {key: getattr(explanation, key)[..., :1] for key in ("scores", "per_layer", "per_head")}
    return replace(explanation, units=units, matrix=None, **first_scores)


def _fill_scores(value: float) -> Change:
    def change(explanation: Explanation) -> Explanation:
        filled = {key: np.full_like(getattr(explanation, key), value) for key in ("scores", "per_layer", "per_head")}
        return replace(explanation, **filled)

    return change


def _with_missing_scores(explanation: Explanation) -> Explanation:
    arrays = {key: getattr(explanation, key).copy() for key in ("scores", "per_layer", "per_head")}
    for array in arrays.values():
        array[..., 1::3] = np.nan
    return replace(explanation, **arrays)


def _with_infinite_scores(explanation: Explanation) -> Explanation:
    scores = explanation.scores.copy()
    scores[1], scores[2] = np.inf, -np.inf
    return replace(explanation, scores=scores)


#: Degenerate variants of an explanation.
CHANGES: dict[str, Change] = {
    "as it is": lambda explanation: explanation,
    "zero": _fill_scores(0.0),
    "constant": _fill_scores(0.25),
    "negative": _fill_scores(-3.0),
    "no score at all": _fill_scores(np.nan),
    "some without a score": _with_missing_scores,
    "infinite": _with_infinite_scores,
    "tiny": _fill_scores(1e-30),
    "one unit": _keep_first_unit,
    "no picture": lambda explanation: replace(explanation, image=None),
}


@pytest.fixture(params=CHANGES)
def change(request: pytest.FixtureRequest) -> Change:
    return CHANGES[request.param]


@pytest.fixture(scope="session")
def chromium(launch: Callable[..., Any]) -> Any:
    return launch()


@pytest.fixture
def open_page(chromium: Any, tmp_path: Path) -> Iterator[OpenPage]:
    pages: list[BrowserPage] = []

    def open_text(text: str, **options: Any) -> BrowserPage:
        file = tmp_path / f"{len(pages)}.html"
        file.write_text(text, encoding="utf-8")
        page = BrowserPage(chromium.new_page(viewport={"width": 1180, "height": 900}, **options))
        pages.append(page)
        page.goto(file.as_uri())
        return page

    yield open_text
    for page in pages:
        page.close()
