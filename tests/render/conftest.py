"""Explanations to show: real ones of tiny models, and made-up ones with every nasty score and token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead import Explanation
from clearhead.units import Units, build_numbered_units, build_patch_units
from tests import models
from tests.render.browser import Open, Opened

NASTY = [
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


def made(
    names: Sequence[str],
    scores: Sequence[float] | np.ndarray,
    special: Sequence[bool] = (),
    units: Units | None = None,
    **more: Any,
) -> Explanation:
    """An explanation without a model."""
    return Explanation(
        units=units or build_numbered_units(len(names), "text", names, special),
        scores=np.asarray(scores, dtype=np.float32),
        method=more.pop("method", "made-up"),
        target={"kind": "label", "name": "yes", "index": 0, "scale": "logit", "value": 1.5},
        prediction={"label": "yes", "index": 0, "probability": 0.9, "top": [_top("yes", 0.9), _top("no", 0.1)]},
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


def _top(label: str, probability: float) -> dict[str, Any]:
    return {"label": label, "index": 0, "probability": probability, "logit": 1.0}


@pytest.fixture(scope="session")
def nasty() -> Explanation:
    """Every dangerous string in every place where a string can stand."""
    text = " ".join(NASTY)
    starts = np.cumsum([0, *(len(token) + 1 for token in NASTY)])
    units = Units(
        stream="text",
        kind="token",
        names=tuple(NASTY),
        special=tuple(i == 2 for i in range(len(NASTY))),
        texts=(text,),
        segments=(0,) * len(NASTY),
        offsets=tuple((int(a), int(a) + len(token)) for a, token in zip(starts, NASTY, strict=False)),
    )
    bad = NASTY[0] + NASTY[1] + NASTY[3]
    explanation = made(NASTY, np.linspace(-1, 1, len(NASTY)), units=units, method=bad)
    return replace(
        explanation,
        target={**explanation.target, "name": bad, "kind": bad, "scale": bad},
        prediction={"label": bad, "top": [_top(bad, 0.5), _top(NASTY[2], 0.5)]},
        certificate={**explanation.certificate, bad: bad, "versions": {bad: bad}},
        provenance={"model": bad, "model_class": NASTY[4], "method": bad, "options": {"x": bad}, "citation": bad},
        per_layer=np.stack([explanation.scores] * 3),
    )


def several(subject: str, raw: Any) -> dict[str, Explanation]:
    found = models.explainer(subject).explain(raw, method=["generic", "attcat", "input-x-gradient"], per="head")
    return {str(explanation.provenance["method"]): explanation for explanation in found.values()}


@pytest.fixture(scope="session")
def text() -> dict[str, Explanation]:
    """Several methods on one text with a line break and odd spaces."""
    raw = "She hates   the book,\nbecause it isn't good 😀."
    return several("bert/classify", raw)


@pytest.fixture(scope="session", params=[1, 3], ids=["one output", "three outputs"])
def regression(request: pytest.FixtureRequest) -> Explanation:
    """A model that measures: it has outputs, and no probabilities."""
    ex = models.explainer("bert/classify", num_labels=request.param, problem_type="regression")
    found: Explanation = ex.explain("So boring!", method="generic", per="head")
    return found


@pytest.fixture(scope="session")
def pair() -> Explanation:
    found: Explanation = models.explainer("roberta/classify").explain(models.PAIR)
    return found


@pytest.fixture(scope="session")
def cut() -> Explanation:
    """A text of which the model saw the beginning only."""
    found: Explanation = models.explainer("bert/classify").explain("She hates the book. " * 8, max_length=12)
    return found


@pytest.fixture(scope="session")
def image() -> dict[str, Explanation]:
    return several("vit/image", models.inputs("vit/image")[0])


Change = Callable[[Explanation], Explanation]


def _one(explanation: Explanation) -> Explanation:
    units = build_patch_units((1, 1)) if explanation.units.grid else build_numbered_units(1, "text", ["only"])
    first = {key: getattr(explanation, key)[..., :1] for key in ("scores", "per_layer", "per_head")}
    return replace(explanation, units=units, matrix=None, **first)


def _filled(value: float) -> Change:
    def change(explanation: Explanation) -> Explanation:
        full = {key: np.full_like(getattr(explanation, key), value) for key in ("scores", "per_layer", "per_head")}
        return replace(explanation, **full)

    return change


def _holed(explanation: Explanation) -> Explanation:
    parts = {key: getattr(explanation, key).copy() for key in ("scores", "per_layer", "per_head")}
    for part in parts.values():
        part[..., 1::3] = np.nan
    return replace(explanation, **parts)


def _infinite(explanation: Explanation) -> Explanation:
    scores = explanation.scores.copy()
    scores[1], scores[2] = np.inf, -np.inf
    return replace(explanation, scores=scores)


#: What can go wrong with scores.
CHANGES: dict[str, Change] = {
    "as it is": lambda explanation: explanation,
    "zero": _filled(0.0),
    "constant": _filled(0.25),
    "negative": _filled(-3.0),
    "no score at all": _filled(np.nan),
    "some without a score": _holed,
    "infinite": _infinite,
    "tiny": _filled(1e-30),
    "one unit": _one,
    "no picture": lambda explanation: replace(explanation, image=None),
}


@pytest.fixture(params=CHANGES)
def change(request: pytest.FixtureRequest) -> Change:
    return CHANGES[request.param]


@pytest.fixture(scope="session")
def chromium(launch: Callable[..., Any]) -> Any:
    return launch()


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    pages: list[Opened] = []

    def open_page(text: str, **look: Any) -> Opened:
        file = tmp_path / f"{len(pages)}.html"
        file.write_text(text, encoding="utf-8")
        page = Opened(chromium.new_page(viewport={"width": 1180, "height": 900}, **look))
        pages.append(page)
        page.goto(file.as_uri())
        return page

    yield open_page
    for page in pages:
        page.close()
