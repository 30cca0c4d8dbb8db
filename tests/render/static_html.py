"""The static content of a page, before any script has run."""

import json
import re
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str, class_: str = "") -> list[dict[str, str | None]]:
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and class_ in ["", *(attributes.get("class") or "").split()]
        ]

    def inside(self, tag: str) -> list[str]:
        return [text for parent, text in self.texts if parent == tag]

    @property
    def document(self) -> dict[str, Any]:
        """The view model that the page passes to the renderer."""
        (data,) = [text for parent, text in self.texts if parent == "script" and text.startswith("{")]
        view_model: dict[str, Any] = json.loads(data)
        return view_model

    @property
    def inputs(self) -> list[dict[str, Any]]:
        view_model = self.document
        return list(view_model["children"]) if view_model["view"] == "page" else [view_model]


def find_external_urls(page: str) -> list[str]:
    """Return every URL in a page that a browser would fetch."""
    parsed = Page(page)
    urls = [
        str(attributes[key])
        for _, attributes in parsed.tags
        for key in ("src", "href", "srcset", "data", "poster", "action", "xlink:href", "background")
        if key in attributes
    ]
    styles = [str(attributes["style"]) for _, attributes in parsed.tags if attributes.get("style")]
    styles += parsed.inside("style")
    urls += re.findall(r"(?:url\(|@import)\s*(\S+)", "\n".join(styles))
    return [url for url in urls if not url.startswith("data:image/")]


def assert_harmless(page: str) -> None:
    parsed = Page(page)
    assert not parsed.open
    scripts = [attributes for attributes in parsed.all("script") if attributes.get("type") != "application/json"]
    assert len(scripts) == 1
    assert not [key for _, attributes in parsed.tags for key in attributes if key.startswith("on")]
    assert not {tag for tag, _ in parsed.tags} & {"svg", "iframe", "object", "link", "base", "form", "a", "img"}
    assert find_external_urls(page) == []
    assert "\x00" not in page and "\x1b" not in page and "\u202e" not in page
    page.encode()
