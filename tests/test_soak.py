"""Soak and fuzz tests: constant memory, and no error but InputError. Slow: `make test-slow`."""

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import clearhead
from clearhead.methods import METHOD_REGISTRY
from tests.models import explainer

ALL_METHODS = sorted(METHOD_REGISTRY)


def read_resident_memory() -> float:
    """Return the resident memory in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_over_repeated_explanations() -> None:
    ex = explainer("bert/classify")

    def explain_texts(count: int) -> None:
        for turn in range(count):
            text = "I like the movie " * (1 + turn % 5)
            ex.explain([text, text[:9]], ALL_METHODS, target=lambda output, turn=turn: output.logits[:, turn % 3])

    explain_texts(100)
    gc.collect()
    before = read_resident_memory()
    explain_texts(500)
    gc.collect()
    assert read_resident_memory() - before < 20


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/classify", "albert/mask"])
def test_any_text_is_explained_or_raises_input_error(subject: str) -> None:
    ex = explainer(subject)
    mask = ex.adapter.processor.mask_token if subject.endswith("mask") else ""

    @settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.text(max_size=300))
    def try_text(text: str) -> None:
        try:
            e = ex.explain(f"{text} {mask}" if mask else text, method="generic")
        except clearhead.InputError:
            return  # such as a text of white space; the messages are tested elsewhere
        assert len(e) == len(e.scores) and e.words().scores.sum() == pytest.approx(e.scores.sum())
        assert clearhead.from_dict(e.to_dict()) == e
        assert "<script>alert" not in e.html()

    try_text()
