"""Pages in a real browser: opening them, unfolding what is folded away, and pages to look at."""

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.links import AttentionLinks
from clearhead.render import html, view_model
from clearhead.render.view_model import build_view_model, make_view_model


class Opened:
    """A page in the browser, with all that it said and asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda problem: self.said.append(str(problem)))
        page.on("request", lambda request: self.asked.append(request.url))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    @property
    def fetched(self) -> list[str]:
        """What was asked for beside the page itself."""
        return [address for address in self.asked[1:] if not address.startswith("data:")]


Open = Callable[..., Opened]


def every_fold(page: Opened) -> None:
    """Open whatever is folded away, and what is folded away inside."""
    for _ in range(2):
        page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        page.wait_for_timeout(30)


def linked(joint: Any) -> str:
    weights = np.random.default_rng(0).uniform(size=(len(joint["text"]), len(joint["regions"])))
    both = (AttentionLinks("text", "regions", weights), AttentionLinks("regions", "text", weights.T))
    return html.render_standalone_page(view_model.build_page_view_model([build_view_model(joint, links=both)], "Why?"))


def ranked() -> dict[str, Any]:
    """What a report of a benchmark is made of."""
    cell = {"mean": 0.2, "low": 0.1, "high": 0.3, "said": ["0.200", "0.100", "0.300"], "rank": "1"}
    rows = [{"name": "generic", "control": False, "cells": [cell, None]}]
    table = make_view_model(
        "ranking", title="aopc", columns=["a (4 examples)", "b"], ends=[[0, 0.4], [0, 1]], rows=rows
    )
    folded = make_view_model("table", title="Settings", heads=["setting", "value"], rows=[["fill", "mask"]])
    return view_model.build_page_view_model(
        [make_view_model("section", heading="perturb", parts=[table, folded], more=[folded])], "Report"
    )
