"""HTML that is escaped by construction: whatever is not `Markup` is text, and comes out as text."""

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

# What HTML reads, what cannot be seen, and halves of surrogate pairs, which UTF-8 cannot write.
_DANGEROUS = re.compile("[<>&\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")
_VOID = {"img", "input", "meta", "br"}


class Markup(str):
    """A string that is HTML already; only this module makes it from text."""

    __slots__ = ()


Part = str | Markup | None


def tag(element: str, *children: Part, **attributes: str | int | float | bool | None) -> Markup:
    """One element. Attributes that are None or False are left out; `class_` is class, `aria_label` aria-label.

    >>> tag("b", "1 < 2", title='say "hi"')
    '<b title="say &quot;hi&quot;">1 &lt; 2</b>'
    >>> tag("input", min=0, disabled=False)
    '<input min="0">'
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items() if _is_given(value))
    if element in _VOID:
        return Markup(f"<{element}{given}>")
    return Markup(f"<{element}{given}>{joined(*children)}</{element}>")


def _is_given(value: object) -> bool:
    return value is not None and value is not False  # 0 equals False, and is a value


def joined(*parts: Part) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts if part))


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def style_sheet(css: str) -> Markup:
    """Our own rules; nothing of the user's may come in here."""
    return Markup(f"<style>{css}</style>")


def script(source: str) -> Markup:
    """Our own script; nothing of the user's may come in here."""
    return Markup(f"<script>{source}</script>")


def data(value: Any, needs: Sequence[str] = ()) -> Markup:
    """Data for machines; JSON itself can write what is dangerous as escapes, so that no text can end the element.

    needs: it is left to a script that can draw that, where another stands in the same notebook
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = _DANGEROUS.sub(lambda sign: f"\\u{ord(sign.group()):04x}", text)
    marked = _attribute("data_needs", " ".join(needs)) if needs else ""
    return Markup(f'<script type="application/json" class="ch-data"{marked}>{text}</script>')
