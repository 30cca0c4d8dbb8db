"""Long texts: tile by tile, `generic` finds the pair that zoo:recall-4k was asked about."""

import pytest

import clearhead

clearhead_zoo = pytest.importorskip("clearhead_zoo")
from clearhead_zoo.tasks import recall  # noqa: E402


def found_pair(tokens: int) -> None:
    example = recall.examples(1, seed=2024, pairs=recall.most_pairs(tokens))[0]
    ex = clearhead.load("zoo:recall-4k")
    e = ex.explain(example.text, kernel="streaming")
    assert e.certificate["kernel"] == "streaming: torch tiles" and e.target["name"] == example.label
    listed = [i for i, special in enumerate(e.units.special) if not special][: -len(example.question)]
    best = sorted(listed, key=lambda i: e.scores[i], reverse=True)[:2]
    assert {e.tokens[i] for i in best} & {example.words[place] for place in example.evidence}


def test_at_512_tokens() -> None:
    found_pair(512)


@pytest.mark.slow
def test_at_4096_tokens() -> None:
    found_pair(4096)
