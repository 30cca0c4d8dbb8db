"""The real files in ../shared/data, where they are present."""

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
    pytest.mark.skipif(not ROOT.is_dir(), reason=f"no data in {ROOT.parent.name}/{ROOT.name} beside the repository"),
]

COUNTS = {
    ("sst2", "train"): 60_614,
    ("sst2", "validation"): 6_735,
    ("sst2", "test"): 872,
    ("rt-polarity", "all"): 10_662,
    ("subj", "all"): 10_000,
    ("trec", "train"): 5_452,
    ("trec", "test"): 500,
    ("custrev", "all"): 3_771,  # of 3,775 lines, four have a label alone
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
def test_counts_labels_and_licences(name: str, split: str) -> None:
    data = load_benchmark_dataset(name, split, root=ROOT)
    assert len(data) == COUNTS[name, split] and len(data.labels) == CLASSES[name]
    assert data.licence == DATASET_REGISTRY[name].licence and set(data.splits) == {s for n, s in COUNTS if n == name}
    some = data.select(np.random.default_rng(0).integers(0, len(data), 20).tolist())
    assert all(isinstance(e.label, int) and 0 <= e.label < len(data.labels) for e in some)
    assert [e.id for e in some] == [
        e.id for e in load_benchmark_dataset(name, split, root=ROOT).select(some.indices or ())
    ]


@pytest.mark.parametrize(("name", "split"), [key for key in COUNTS if key[0] in ("sst2", "trec", "eraser-movies")])
def test_ids_are_distinct_and_texts_are_there(name: str, split: str) -> None:
    data = load_benchmark_dataset(name, split, root=ROOT)
    examples = [data[place] for place in range(0, len(data), max(1, len(data) // 300))]
    assert len({e.id for e in examples}) == len(examples) and all(e.input.strip() for e in examples)


def test_sst2_classes_are_the_right_way_round() -> None:
    data = load_benchmark_dataset("sst2", "test", root=ROOT)
    first = next(e for e in data if "charming and often affecting journey" in e.input)
    assert data.label_name(first.label) == "positive"


def test_no_review_is_in_two_splits_of_eraser_movies() -> None:
    data = load_benchmark_dataset("eraser-movies", root=ROOT)
    ids = {split: {example.id for example in data.with_split(split)} for split in SPLITS}
    assert not ids["train"] & ids["validation"] and not (ids["train"] | ids["validation"]) & ids["test"]
    raw = (ROOT / "eraser-movies" / "train.jsonl").read_text("utf-8").splitlines()
    assert {json.loads(line)["annotation_id"] for line in raw} >= ids["validation"]  # as published, it is


SPLITS = ("train", "validation", "test")


@pytest.mark.parametrize("split", SPLITS)
def test_evidence_cuts_out_the_rationale(split: str) -> None:
    data = load_benchmark_dataset("eraser-movies", split, root=ROOT)
    checked = 0
    for place in range(0, len(data), 4):
        example, (row, _) = data[place], data._rows[place]
        pieces = [piece for one in example.evidence or () for piece in one]
        written = [one["text"] for group in row["evidences"] for one in group if one["text"]]
        for piece, text in zip(pieces, written, strict=True):
            assert isinstance(piece, CharSpan) and " ".join(example.input[piece.start : piece.stop].split()) == text
        checked += len(pieces)
    assert checked > 300


def units_of(kind: str, text: str, names: list[str], offsets: tuple[Span, ...]) -> Units:
    return Units("text", kind, tuple(names), (False,) * len(names), (text,), None, offsets)


def letters(places: tuple[Span, ...], mask: np.ndarray) -> set[int]:
    return {i for (start, stop), flag in zip(places, mask, strict=True) if flag for i in range(start, stop)}


def test_rationales_become_words_and_pieces() -> None:
    """On white-space words evidence is exactly the annotated tokens; on a tokenizer's pieces it is the same letters."""
    for example in load_benchmark_dataset("eraser-movies", "validation", root=ROOT)[:10]:
        text = example.input
        places = tuple(match.span() for match in re.finditer(r"\S+", text))
        mask = find_evidence_units(example, units_of("word", text, [text[a:b] for a, b in places], places))
        assert example.evidence is not None
        wanted = [piece for one in example.evidence for piece in one if isinstance(piece, CharSpan)]
        assert mask.tolist() == [any(p.start <= a and b <= p.stop for p in wanted) for a, b in places]
        encoded = tokenizer("wordpiece")(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
        offsets = tuple((a, b) for a, b in encoded["offset_mapping"])
        names = tokenizer("wordpiece").convert_ids_to_tokens(encoded["input_ids"])
        assert letters(offsets, find_evidence_units(example, units_of("token", text, names, offsets))) == letters(
            places, mask
        )


def test_masks_lie_on_their_pets() -> None:
    """Masks have their picture's size, are never empty, and the animals' colours differ from what is around them."""
    data = load_benchmark_dataset("pets", "test", root=ROOT)
    apart = []
    for place in range(0, len(data), 60):
        example = data[place]
        [[mask]] = example.evidence or ()
        assert isinstance(mask, EvidenceMask) and mask.ignored_pixels is not None
        picture = np.asarray(example.input, dtype=float)
        assert picture.shape == (128, 128, 3) and mask.pixels.shape == (128, 128)
        outside = ~mask.pixels & ~mask.ignored_pixels
        assert mask.pixels.any() and not (mask.pixels & mask.ignored_pixels).any()
        apart.append(_contrast(picture, mask.pixels, outside) - _contrast(picture, mask.pixels.T, outside.T))
        units = build_patch_units((12, 12), special_names=["[CLS]"])
        assert 0 < find_evidence_units(example, units).sum() < len(units)
    assert np.mean(apart) > 0  # more so than under the mask turned over


def _contrast(picture: np.ndarray, inside: np.ndarray, outside: np.ndarray) -> float:
    if not inside.any() or not outside.any():
        return 0.0
    return float(np.abs(picture[inside].mean(0) - picture[outside].mean(0)).mean() / picture.std())


def test_species_follow_from_breeds() -> None:
    breeds, species = (load_benchmark_dataset("pets", "test", root=ROOT, label=kind) for kind in ("breed", "species"))
    for place in range(0, len(breeds), 90):
        capital = breeds.label_name(breeds[place].label)[0].isupper()
        assert (species.label_name(species[place].label) == "cat") == capital


def test_boxes_lie_in_their_pictures() -> None:
    data = load_benchmark_dataset("tiny-imagenet", root=ROOT)
    widest = 0.0
    for place in range(0, len(data), 100):
        [[box]] = data[place].evidence or ()
        assert isinstance(box, ImageBox) and data[place].input.size == (64, 64)
        widest = max(widest, box.box[2])
    assert widest == 1.0  # the last column counts
