"""Pages in a real browser: opening them, unfolding what is folded away, and pages to look at."""

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.links import Links
from clearhead.render import html, view_model
from clearhead.render.view_model import document, view


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
    both = (Links("text", "regions", weights), Links("regions", "text", weights.T))
    return html.alone(view_model.whole_page([document(joint, links=both)], "Why?"))


def ranked() -> dict[str, Any]:
    """What a report of a benchmark is made of."""
    cell = {"mean": 0.2, "low": 0.1, "high": 0.3, "said": ["0.200", "0.100", "0.300"], "rank": "1"}
    rows = [{"name": "generic", "control": False, "cells": [cell, None]}]
    table = view("ranking", title="aopc", columns=["a (4 examples)", "b"], ends=[[0, 0.4], [0, 1]], rows=rows)
    folded = view("table", title="Settings", heads=["setting", "value"], rows=[["fill", "mask"]])
    return view_model.whole_page([view("section", heading="perturb", parts=[table, folded], more=[folded])], "Report")
