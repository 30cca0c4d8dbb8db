"""Pages in a real browser: opening pages and details, and example pages."""

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.links import AttentionLinks
from clearhead.render import html, view_model
from clearhead.render.view_model import build_view_model, make_view_model


class BrowserPage:
    """A page in the browser, with its console messages and requests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.messages: list[str] = []
        self.urls: list[str] = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.urls.append(request.url))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    @property
    def fetched(self) -> list[str]:
        """URLs of all requests besides the page itself."""
        return [url for url in self.urls[1:] if not url.startswith("data:")]


OpenPage = Callable[..., BrowserPage]


def open_all_details(page: BrowserPage) -> None:
    """Open all details elements, nested ones included."""
    for _ in range(2):
        page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        page.wait_for_timeout(30)


def render_links_page(joint: Any) -> str:
    weights = np.random.default_rng(0).uniform(size=(len(joint["text"]), len(joint["regions"])))
    links = (AttentionLinks("text", "regions", weights), AttentionLinks("regions", "text", weights.T))
    return html.render_standalone_page(view_model.build_page_view_model([build_view_model(joint, links=links)], "Why?"))


def build_ranking_page() -> dict[str, Any]:
    """Return the view model of a benchmark report."""
    cell = {"mean": 0.2, "low": 0.1, "high": 0.3, "texts": ["0.200", "0.100", "0.300"], "rank": "1"}
    rows = [{"name": "generic", "is_control": False, "cells": [cell, None]}]
    table = make_view_model(
        "ranking", title="aopc", columns=["a (4 examples)", "b"], ranges=[[0, 0.4], [0, 1]], rows=rows
    )
    collapsed = make_view_model("table", title="Settings", columns=["setting", "value"], rows=[["fill", "mask"]])
    return view_model.build_page_view_model(
        [make_view_model("section", heading="perturb", children=[table, collapsed], collapsed_children=[collapsed])],
        "Report",
    )
