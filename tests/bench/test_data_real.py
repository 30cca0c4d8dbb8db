"""Dataset readers on the real files in ../shared/data, if present."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from clearhead.bench.data import (
    DATASET_REGISTRY,
    CharSpan,
    EvidenceMask,
    ImageBox,
    find_evidence_units,
    load_benchmark_dataset,
)
from clearhead.units import Span, Units, build_patch_units
from tests.models import tokenizer

ROOT = Path(__file__).parents[3] / "shared" / "data"
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not ROOT.is_dir(), reason=f"no data in {ROOT.parent.name}/{ROOT.name} next to the repository"),
]

COUNTS = {
    ("sst2", "train"): 60_614,
    ("sst2", "validation"): 6_735,
    ("sst2", "test"): 872,
    ("rt-polarity", "all"): 10_662,
    ("subj", "all"): 10_000,
    ("trec", "train"): 5_452,
    ("trec", "test"): 500,
    ("custrev", "all"): 3_771,  # of 3,775 lines, four have only a label
    ("eraser-movies", "train"): 1_600,  # of 1,800, without the 200 of the validation set
    ("eraser-movies", "validation"): 200,
    ("eraser-movies", "test"): 199,
    ("tiny-imagenet", "train"): 100_000,
    ("tiny-imagenet", "validation"): 10_000,
    ("pets", "trainval"): 3_680,
    ("pets", "test"): 3_669,
}
CLASSES = {
    "sst2": 2,
    "rt-polarity": 2,
    "subj": 2,
    "trec": 6,
    "custrev": 2,
    "eraser-movies": 2,
    "tiny-imagenet": 200,
    "pets": 37,
}


@pytest.mark.parametrize(("name", "split"), COUNTS)
def test_dataset_has_expected_counts_labels_and_licence(name: str, split: str) -> None:
    data = load_benchmark_dataset(name, split, root=ROOT)
    assert len(data) == COUNTS[name, split] and len(data.labels) == CLASSES[name]
    assert data.licence == DATASET_REGISTRY[name].licence and set(data.splits) == {s for n, s in COUNTS if n == name}
    sample = data.select(np.random.default_rng(0).integers(0, len(data), 20).tolist())
    assert all(isinstance(e.label, int) and 0 <= e.label < len(data.labels) for e in sample)
    assert [e.id for e in sample] == [
        e.id for e in load_benchmark_dataset(name, split, root=ROOT).select(sample.indices or ())
    ]


@pytest.mark.parametrize(("name", "split"), [key for key in COUNTS if key[0] in ("sst2", "trec", "eraser-movies")])
def test_ids_are_unique_and_texts_are_not_empty(name: str, split: str) -> None:
    data = load_benchmark_dataset(name, split, root=ROOT)
    examples = [data[index] for index in range(0, len(data), max(1, len(data) // 300))]
    assert len({e.id for e in examples}) == len(examples) and all(e.input.strip() for e in examples)


def test_sst2_label_order_is_correct() -> None:
    data = load_benchmark_dataset("sst2", "test", root=ROOT)
    first = next(e for e in data if "charming and often affecting journey" in e.input)
    assert data.label_name(first.label) == "positive"


def test_eraser_movies_splits_are_disjoint() -> None:
    data = load_benchmark_dataset("eraser-movies", root=ROOT)
    ids = {split: {example.id for example in data.with_split(split)} for split in SPLITS}
    assert not ids["train"] & ids["validation"] and not (ids["train"] | ids["validation"]) & ids["test"]
    raw = (ROOT / "eraser-movies" / "train.jsonl").read_text("utf-8").splitlines()
    # in the published files the splits overlap
    assert {json.loads(line)["annotation_id"] for line in raw} >= ids["validation"]


SPLITS = ("train", "validation", "test")


@pytest.mark.parametrize("split", SPLITS)
def test_evidence_spans_equal_rationale_texts(split: str) -> None:
    data = load_benchmark_dataset("eraser-movies", split, root=ROOT)
    checked = 0
    for index in range(0, len(data), 4):
        example, (row, _) = data[index], data._rows[index]
        spans = [span for alternative in example.evidence or () for span in alternative]
        texts = [alternative["text"] for group in row["evidences"] for alternative in group if alternative["text"]]
        for span, text in zip(spans, texts, strict=True):
            assert isinstance(span, CharSpan) and " ".join(example.input[span.start : span.stop].split()) == text
        checked += len(spans)
    assert checked > 300


def units_of(kind: str, text: str, names: list[str], offsets: tuple[Span, ...]) -> Units:
    return Units("text", kind, tuple(names), (False,) * len(names), (text,), None, offsets)


def marked_characters(offsets: tuple[Span, ...], mask: np.ndarray) -> set[int]:
    return {i for (start, stop), flag in zip(offsets, mask, strict=True) if flag for i in range(start, stop)}


def test_rationales_map_to_words_and_word_pieces() -> None:
    """On white-space words evidence equals the annotated tokens; on word pieces it covers the same characters."""
    for example in load_benchmark_dataset("eraser-movies", "validation", root=ROOT)[:10]:
        text = example.input
        word_offsets = tuple(match.span() for match in re.finditer(r"\S+", text))
        mask = find_evidence_units(example, units_of("word", text, [text[a:b] for a, b in word_offsets], word_offsets))
        assert example.evidence is not None
        spans = [span for alternative in example.evidence for span in alternative if isinstance(span, CharSpan)]
        assert mask.tolist() == [any(p.start <= a and b <= p.stop for p in spans) for a, b in word_offsets]
        encoded = tokenizer("wordpiece")(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
        offsets = tuple((a, b) for a, b in encoded["offset_mapping"])
        names = tokenizer("wordpiece").convert_ids_to_tokens(encoded["input_ids"])
        assert marked_characters(
            offsets, find_evidence_units(example, units_of("token", text, names, offsets))
        ) == marked_characters(word_offsets, mask)


def test_pet_masks_cover_the_animals() -> None:
    """Masks have the size of their image, are not empty, and the animals' colours differ from the background."""
    data = load_benchmark_dataset("pets", "test", root=ROOT)
    contrast_gains = []
    for index in range(0, len(data), 60):
        example = data[index]
        [[mask]] = example.evidence or ()
        assert isinstance(mask, EvidenceMask) and mask.ignored_pixels is not None
        image = np.asarray(example.input, dtype=float)
        assert image.shape == (128, 128, 3) and mask.pixels.shape == (128, 128)
        outside = ~mask.pixels & ~mask.ignored_pixels
        assert mask.pixels.any() and not (mask.pixels & mask.ignored_pixels).any()
        contrast_gains.append(_contrast(image, mask.pixels, outside) - _contrast(image, mask.pixels.T, outside.T))
        units = build_patch_units((12, 12), special_names=["[CLS]"])
        assert 0 < find_evidence_units(example, units).sum() < len(units)
    assert np.mean(contrast_gains) > 0  # more than with the transposed mask


def _contrast(image: np.ndarray, inside: np.ndarray, outside: np.ndarray) -> float:
    if not inside.any() or not outside.any():
        return 0.0
    return float(np.abs(image[inside].mean(0) - image[outside].mean(0)).mean() / image.std())


def test_pet_species_match_breeds() -> None:
    breeds, species = (load_benchmark_dataset("pets", "test", root=ROOT, label=kind) for kind in ("breed", "species"))
    for index in range(0, len(breeds), 90):
        capital = breeds.label_name(breeds[index].label)[0].isupper()
        assert (species.label_name(species[index].label) == "cat") == capital


def test_tiny_imagenet_boxes_are_within_images() -> None:
    data = load_benchmark_dataset("tiny-imagenet", root=ROOT)
    max_right = 0.0
    for index in range(0, len(data), 100):
        [[box]] = data[index].evidence or ()
        assert isinstance(box, ImageBox) and data[index].input.size == (64, 64)
        max_right = max(max_right, box.box[2])
    assert max_right == 1.0  # boxes include the last column
