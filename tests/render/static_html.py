"""What a browser would find in a page before any script has run."""

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
            found for kind, found in self.tags if kind == tag and class_ in ["", *(found.get("class") or "").split()]
        ]

    def inside(self, tag: str) -> list[str]:
        return [text for where, text in self.texts if where == tag]

    @property
    def document(self) -> dict[str, Any]:
        """What the renderer is given."""
        (data,) = [text for where, text in self.texts if where == "script" and text.startswith("{")]
        found: dict[str, Any] = json.loads(data)
        return found

    @property
    def inputs(self) -> list[dict[str, Any]]:
        found = self.document
        return list(found["parts"]) if found["view"] == "page" else [found]


def outside_addresses(page: str) -> list[str]:
    """Everything in a page that would make a browser fetch something."""
    parsed = Page(page)
    loaded = [
        str(attributes[key])
        for _, attributes in parsed.tags
        for key in ("src", "href", "srcset", "data", "poster", "action", "xlink:href", "background")
        if key in attributes
    ]
    styles = [str(found["style"]) for _, found in parsed.tags if found.get("style")] + parsed.inside("style")
    loaded += re.findall(r"(?:url\(|@import)\s*(\S+)", "\n".join(styles))
    return [address for address in loaded if not address.startswith("data:image/")]


def assert_harmless(page: str) -> None:
    parsed = Page(page)
    assert not parsed.open
    running = [found for found in parsed.all("script") if found.get("type") != "application/json"]
    assert len(running) == 1
    assert not [key for _, found in parsed.tags for key in found if key.startswith("on")]
    assert not {tag for tag, _ in parsed.tags} & {"svg", "iframe", "object", "link", "base", "form", "a", "img"}
    assert outside_addresses(page) == []
    assert "\x00" not in page and "\x1b" not in page and "\u202e" not in page
    page.encode()
