"""Mapping of evidence to units: tokens of every tokenizer, words, sentences, patches."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.bench.data import (
    BenchmarkDataset,
    CharSpan,
    EvidenceMask,
    Example,
    ImageBox,
    compute_box_coverage,
    find_evidence_units,
)
from clearhead.bench.data.eraser import find_token_spans
from clearhead.errors import InputError
from clearhead.units import Units, build_numbered_units, build_patch_units
from tests.models import CORPUS, explainer, tokenizer

TOKENIZERS = ("wordpiece", "bytes", "unigram")
WORDS = sorted({word for line in CORPUS for word in line.split()} | {"Koala", "日本", "zzz"})


def units_of(kind: str, *texts: str) -> Units:
    tok = tokenizer(kind)
    encoded = tok(*texts, return_offsets_mapping=True, return_special_tokens_mask=True)
    return Units(
        stream="text",
        kind="token",
        names=tuple(tok.convert_ids_to_tokens(encoded["input_ids"])),
        special=tuple(bool(flag) for flag in encoded["special_tokens_mask"]),
        texts=texts,
        segments=tuple(segment or 0 for segment in encoded.sequence_ids(0)),
        offsets=tuple(tuple(span) for span in encoded["offset_mapping"]),
    )


def marked_names(text: Any, evidence: list[Any], units: Units, **options: Any) -> list[str]:
    mask = find_evidence_units(Example("1", text, 0, (tuple(evidence),)), units, **options)
    return [name for name, flag in zip(units.names, mask, strict=True) if flag]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_word_evidence_marks_its_tokens(kind: str) -> None:
    text = "Koala naïve 日本 isn't"
    units = units_of(kind, text)
    for start, stop in find_token_spans(text):
        mask = find_evidence_units(Example("1", text, 0, ((CharSpan(start, stop),),)), units)
        assert units.offsets is not None
        marked_characters = {i for (a, b), flag in zip(units.offsets, mask, strict=True) if flag for i in range(a, b)}
        assert {i for i in marked_characters if not text[i].isspace()} == set(range(start, stop))


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9), st.data())
@settings(max_examples=40, deadline=None)
def test_evidence_marks_exactly_the_tokens_of_words(kind: str, words: list[str], data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.sampled_from([" ", "  ", "\n"]), min_size=len(words), max_size=len(words)))
    chosen = data.draw(st.sets(st.integers(0, len(words) - 1)))
    text = "".join(word + gap for word, gap in zip(words, gaps, strict=True))
    spans = find_token_spans(text)
    assert [text[a:b] for a, b in spans] == words
    units = units_of(kind, text)
    example = Example("1", text, 0, (tuple(CharSpan(*spans[i]) for i in chosen),))
    mask = find_evidence_units(example, units)
    assert units.offsets is not None
    for name, special, (start, stop), flag in zip(units.names, units.special, units.offsets, mask, strict=True):
        owners = {i for i, (a, b) in enumerate(spans) if a < stop and start < b}  # no tokenizer here merges two words
        is_blank = special or name == "▁" or not text[start:stop].strip()
        assert flag == (not is_blank and bool(owners & chosen)), (name, text)
    merged, index = units.merge("word")
    word_mask = find_evidence_units(example, merged)
    assert word_mask.tolist() == [bool(mask[index == word_index].any()) for word_index in range(len(merged))]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_evidence_marks_only_tokens_of_its_segment(kind: str) -> None:
    pair = ("the book", "the movie")
    units = units_of(kind, *pair)
    mask = find_evidence_units(Example("1", pair, 0, ((CharSpan(0, 3, segment=1),),)), units)
    assert units.segments is not None and mask.any()
    assert {segment for segment, flag in zip(units.segments, mask, strict=True) if flag} == {1}


@pytest.mark.parametrize("subject", ["bert/classify", "roberta/classify", "albert/classify"])
def test_text_evidence_maps_to_units_of_explanation(subject: str) -> None:
    text = "She hates the book"
    explanation = explainer(subject).explain(text, method="position")
    example = Example("1", text, 0, ((CharSpan(4, 9),),))
    word_mask = find_evidence_units(example, explanation.words().units)
    assert [n for n, flag in zip(explanation.words().tokens, word_mask, strict=True) if flag] == ["hates"]
    assert find_evidence_units(example, explanation.units).any()


def test_mask_evidence_maps_to_patches_of_explanation() -> None:
    image = np.zeros((20, 20, 3), dtype=np.uint8)
    mask = np.zeros((20, 20), dtype=bool)
    mask[:5, 15:] = True
    explanation = explainer("vit/image").explain(image, method="position")
    patch_mask = find_evidence_units(Example("1", image, 0, ((EvidenceMask(mask),),)), explanation.units)
    assert [n for n, flag in zip(explanation.tokens, patch_mask, strict=True) if flag] == ["0,3"]


def test_trailing_white_space_of_span_marks_nothing() -> None:
    text = "so boring and long"
    assert marked_names(text, [CharSpan(0, 10)], units_of("bytes", text)) == marked_names(
        text, [CharSpan(0, 9)], units_of("bytes", text)
    )


def test_word_boundary_token_is_not_marked() -> None:
    assert "▁" not in marked_names("Koala", [CharSpan(0, 5)], units_of("unigram", "Koala"))


def test_alternatives_are_selected_or_united() -> None:
    text = "good and fine"
    units = units_of("wordpiece", text).merge("word")[0]
    example = Example("1", text, 1, ((CharSpan(0, 4),), (CharSpan(9, 13),)))
    assert find_evidence_units(example, units).tolist() == [False, True, False, True, False]
    assert find_evidence_units(example, units, alternative=1).tolist() == [False, False, False, True, False]
    with pytest.raises(InputError, match="2 sets of evidence"):
        find_evidence_units(example, units, alternative=2)


def test_missing_evidence_raises_and_empty_evidence_marks_nothing() -> None:
    units = units_of("wordpiece", "good")
    with pytest.raises(InputError, match="no marked evidence"):
        find_evidence_units(Example("1", "good", 1), units)
    assert not find_evidence_units(Example("1", "good", 1, ()), units).any()


def test_units_of_another_input_raise() -> None:
    example = Example("1", "good and fine", 1, ((CharSpan(9, 13),),))
    with pytest.raises(InputError, match="different inputs"):
        find_evidence_units(example, units_of("wordpiece", "good"))
    with pytest.raises(InputError, match="pass the text itself"):
        find_evidence_units(example, build_numbered_units(3, "text"))


def test_neighbouring_patches_of_a_box_have_no_coverage_at_all() -> None:
    """The `truth` protocol excludes patches with a little evidence, so a rounding error must not count as such."""
    grid = [(column / 8, row / 8, (column + 1) / 8, (row + 1) / 8) for row in range(8) for column in range(8)]
    for first in range(62):
        coverage = compute_box_coverage([ImageBox(grid[cell]) for cell in range(first, first + 3)], grid)
        assert np.flatnonzero(coverage).tolist() == [first, first + 1, first + 2]
        assert coverage[first : first + 3] == pytest.approx(1.0)


def test_patch_is_marked_above_coverage_threshold() -> None:
    units = build_patch_units((2, 2), special_names=["[CLS]"])
    mask = np.zeros((8, 8), dtype=bool)
    mask[:4, :4] = True  # the first patch
    mask[:4, 4:6] = True  # half of the second
    example = Example("1", None, 0, ((EvidenceMask(mask),),))
    assert find_evidence_units(example, units).tolist() == [False, True, False, False, False]
    assert find_evidence_units(example, units, coverage_threshold=0.49).tolist() == [False, True, True, False, False]


def test_ignored_pixels_do_not_count_in_coverage() -> None:
    inside, border = np.zeros((4, 4), dtype=bool), np.zeros((4, 4), dtype=bool)
    inside[:, 0], border[:, 1:3] = True, True
    assert compute_box_coverage([EvidenceMask(inside, border)], [(0.0, 0.0, 1.0, 1.0)]).tolist() == [0.5]
    assert compute_box_coverage([EvidenceMask(inside, ~inside)], [(0.5, 0.0, 1.0, 1.0)]).tolist() == [0.0]


def test_view_box_shifts_evidence() -> None:
    units = build_patch_units((1, 2))
    example = Example("1", None, 0, ((ImageBox((0.5, 0.0, 0.75, 1.0)),),))
    assert find_evidence_units(example, units).tolist() == [False, False]
    assert find_evidence_units(example, units, view_box=(0.25, 0.25, 0.75, 0.75)).tolist() == [False, True]


edges = st.tuples(st.integers(0, 11), st.integers(1, 12)).filter(lambda pair: pair[0] < pair[1])
boxes = st.tuples(edges, edges).map(lambda pair: (pair[0][0] / 12, pair[1][0] / 12, pair[0][1] / 12, pair[1][1] / 12))


@given(st.lists(boxes, max_size=3), st.lists(boxes, min_size=1, max_size=4), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_box_coverage_equals_fine_grid_count(regions: list[Any], target_boxes: list[Any], seed: int) -> None:
    """All edges are multiples of 1/12, so counting the cells of a 12 × 12 grid is exact."""
    random = np.random.default_rng(seed)
    small, ignored = random.random((3, 4)) < 0.3, random.random((3, 4)) < 0.2
    fine = np.kron(small, np.ones((4, 3), dtype=bool))
    ignored_pixels = np.kron(ignored, np.ones((4, 3), dtype=bool))
    for left, top, right, bottom in regions:
        fine[round(top * 12) : round(bottom * 12), round(left * 12) : round(right * 12)] = True
    coverage = compute_box_coverage([EvidenceMask(small, ignored), *map(ImageBox, regions)], target_boxes)
    for (left, top, right, bottom), covered in zip(target_boxes, coverage, strict=True):
        cells = np.s_[round(top * 12) : round(bottom * 12), round(left * 12) : round(right * 12)]
        counted = fine[cells] | ~ignored_pixels[cells]
        assert covered == pytest.approx(fine[cells].sum() / counted.sum() if counted.any() else 0.0, abs=1e-9)


def test_invalid_evidence_raises() -> None:
    with pytest.raises(InputError, match="start must be below stop"):
        CharSpan(3, 3)
    with pytest.raises(InputError, match="fractions"):
        ImageBox((0, 0, 32, 32))
    with pytest.raises(InputError, match="boolean array"):
        EvidenceMask(np.zeros((2, 2)))
    assert ImageBox.from_pixels((40, 0, 50, 8), 32, 32) is None


def load_rows() -> list[int]:
    CALLS.append(1)
    return list(range(5))


def make_example(row: int) -> Example:
    return Example(str(row), f"text {row}", row % 2)


CALLS: list[int] = []


def test_dataset_is_a_lazy_picklable_sequence() -> None:
    CALLS.clear()
    data = BenchmarkDataset("mine", "all", "CC0", ("even", "odd"), load_rows, make_example)
    assert not CALLS
    assert len(data) == 5 and data[-1].id == "4" and [e.id for e in data] == list("01234")
    assert [e.id for e in data[1:4][::-1]] == ["3", "2", "1"]
    assert [e.id for e in data.select([4, 0]).select([-2])] == ["4"]
    assert data.label_name(data[1].label) == "odd" and data.label_name({"a": 0.3, "b": 1.0}) == "b"
    assert len(CALLS) == 1
    unpickled = pickle.loads(pickle.dumps(data[1:3]))
    assert "_rows" not in vars(unpickled) and [e.id for e in unpickled] == ["1", "2"]
    with pytest.raises(IndexError):
        data[5]
    with pytest.raises(InputError, match="no example 9"):
        data.select([9])
    with pytest.raises(InputError, match="created in Python"):
        data.with_split("test")
