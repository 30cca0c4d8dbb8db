"""`ex.methods()` shows itself, in a terminal and in a notebook, and says what is to be known of some methods."""

import re

from rich.console import Console

from clearhead.engine.applicability import MethodApplicability
from tests.methods import replica_comparison


def test_methods_show_themselves_as_a_table() -> None:
    lines = replica_comparison.explainer("bert/classify").methods()
    assert isinstance(lines, list) and all(isinstance(line, MethodApplicability) for line in lines)
    with (console := Console(width=80)).capture() as shown:
        console.print(lines)
    for said in (repr(lines), shown.get(), lines._repr_html_()):
        assert "Applies(" not in said
        assert all(name in said for name in (line.name for line in lines))
        assert "partial-lrp, transformer-attribution: Others claim patents" in re.sub(r"\s+", " ", said)


def test_what_does_not_apply_says_why() -> None:
    lines = replica_comparison.explainer("bert/classify").methods()
    lines[:] = [MethodApplicability("lrp", "relevance", "much", False, "it has <b>no</b> rule")]
    assert "it has <b>no</b> rule" in repr(lines)
    assert "<b>no</b>" not in lines._repr_html_() and "no" in lines._repr_html_()
    assert "patent" not in repr(lines)
