"""HTML that is escaped by construction: whatever is not `Markup` is text, and comes out as text."""

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

# What HTML reads, what cannot be seen, and halves of surrogate pairs, which UTF-8 cannot write.
_UNSAFE_CHARACTERS = re.compile("[<>&\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")
_VOID_ELEMENTS = {"img", "input", "meta", "br"}


class Markup(str):
    """A string that is HTML already; only this module makes it from text."""

    __slots__ = ()


MarkupChild = str | Markup | None


def make_element(element: str, *children: MarkupChild, **attributes: str | int | float | bool | None) -> Markup:
    """One element. Attributes that are None or False are left out; `class_` is class, `aria_label` aria-label.

    >>> make_element("b", "1 < 2", title='say "hi"')
    '<b title="say &quot;hi&quot;">1 &lt; 2</b>'
    >>> make_element("input", min=0, disabled=False)
    '<input min="0">'
    """
    given = "".join(_format_attribute(key, value) for key, value in attributes.items() if _is_attribute_set(value))
    if element in _VOID_ELEMENTS:
        return Markup(f"<{element}{given}>")
    return Markup(f"<{element}{given}>{join_markup(*children)}</{element}>")


def _is_attribute_set(value: object) -> bool:
    """Whether an attribute is written: None and False omit it, 0 and an empty string do not."""
    return value is not None and value is not False  # 0 equals False, and is a value


def join_markup(*children: MarkupChild) -> Markup:
    """Concatenate children: `Markup` as it is, other strings escaped; empty ones and None are skipped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in children if part))


def _format_attribute(key: str, value: object) -> str:
    """Format an attribute: trailing _ is dropped, other _ become -, and True writes the name alone."""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def make_style_element(css: str) -> Markup:
    """Our own rules; nothing of the user's may come in here."""
    return Markup(f"<style>{css}</style>")


def make_script_element(source: str) -> Markup:
    """Our own script; nothing of the user's may come in here."""
    return Markup(f"<script>{source}</script>")


def make_json_element(value: Any, required_modules: Sequence[str] = ()) -> Markup:
    """Data for machines; JSON itself can write what is dangerous as escapes, so that no text can end the element.

    needs: it is left to a script that can draw that, where another stands in the same notebook
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = _UNSAFE_CHARACTERS.sub(lambda sign: f"\\u{ord(sign.group()):04x}", text)
    marked = _format_attribute("data_modules", " ".join(required_modules)) if required_modules else ""
    return Markup(f'<script type="application/json" class="ch-data"{marked}>{text}</script>')
