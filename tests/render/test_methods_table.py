"""`ex.methods()` as a table in terminal and notebook, with notes on some methods."""

import re

from rich.console import Console

from clearhead import Cost
from clearhead.engine.applicability_table import MethodApplicability
from tests.methods import replica_comparison


def test_methods_are_rendered_as_a_table() -> None:
    lines = replica_comparison.explainer("bert/classify").methods()
    assert isinstance(lines, list) and all(isinstance(line, MethodApplicability) for line in lines)
    with (console := Console(width=80)).capture() as captured:
        console.print(lines)
    for output in (repr(lines), captured.get(), lines._repr_html_()):
        assert "Applies(" not in output
        assert all(name in output for name in (line.name for line in lines))
        assert "partial-lrp, transformer-attribution: Others claim patents" in re.sub(r"\s+", " ", output)


def test_inapplicable_method_states_the_reason() -> None:
    lines = replica_comparison.explainer("bert/classify").methods()
    lines[:] = [MethodApplicability("lrp", "relevance", Cost(forward=1), False, "it has <b>no</b> rule")]
    assert "it has <b>no</b> rule" in repr(lines)
    assert "<b>no</b>" not in lines._repr_html_() and "no" in lines._repr_html_()
    assert "patent" not in repr(lines)
