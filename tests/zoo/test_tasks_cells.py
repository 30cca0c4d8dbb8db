"""The tasks `counting` and `signs`: the evidence agrees with the pixels, and nothing else tells the label."""

from __future__ import annotations

import doctest
import importlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")

from clearhead.bench.data import ImageBox, find_evidence_units, load_benchmark_dataset  # noqa: E402
from clearhead.units import build_patch_units  # noqa: E402
from clearhead_zoo.tasks import cells, counting, make_generator, shapes, signs  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "packages" / "zoo" / "train"
TASKS = pytest.mark.parametrize("task", [counting, signs], ids=["counting", "signs"])
#: 0.999 quantile of the χ² distribution with so many degrees of freedom.
MAX_CHI_SQUARE = {5: 20.5, 47: 82.7, 55: 93.2, 63: 103.4}


def read_image(task: ModuleType, pixels: Any) -> str | None:
    """Reference: the label, from the pixels alone."""
    return count_red_circles(pixels) if task is counting else read_red_sign(pixels)


def find_red(pixels: Any) -> Any:
    red, green, blue = (pixels[..., channel].astype(int) for channel in range(3))
    return (red > 170) & (red - np.maximum(green, blue) > 90)


def crop_to_box(mask: Any) -> Any:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def count_red_circles(pixels: Any) -> str:
    """Count the blobs that fill a round share of their box, leave its corners empty, and have no hole."""
    count = 0
    for cell in range(cells.NUM_CELLS):
        left, top, right, bottom = cells.get_cell_box(cell)
        red = find_red(pixels[top:bottom, left:right])
        if red.sum() < 20:
            continue
        blob = crop_to_box(red)
        height, width = blob.shape
        corners = blob[[0, 0, -1, -1], [0, -1, 0, -1]]
        centre = blob[height // 2 - 1 : height // 2 + 1, width // 2 - 1 : width // 2 + 1]
        count += bool(0.66 <= blob.mean() <= 0.93 and not corners.any() and centre.all())
    return counting.LABELS[count]


def read_red_sign(pixels: Any) -> str | None:
    """Find three neighbouring cells whose plate is red, and compare the ink on them with scaled glyphs."""
    word = ""
    for cell in range(cells.NUM_CELLS):
        left, top, right, bottom = cells.get_cell_box(cell)
        inner = pixels[top:bottom, left:right][1:-1, 1:-1]
        # a plate fills the edge of its cell, a shape does not
        if find_red(np.concatenate([inner[0], inner[-1]])).mean() < 0.8:
            continue
        ink = crop_to_box(inner.min(axis=-1) > 150)
        height, width = ink.shape
        word += min(
            cells.GLYPHS,
            key=lambda letter: (
                np.array([[pixel == "#" for pixel in row] for row in cells.GLYPHS[letter]])[
                    np.arange(height) * 7 // height
                ][:, np.arange(width) * 5 // width]
                != ink
            ).sum(),
        )
    return word.lower() or None


def render_bytes(scene: cells.CellScenes) -> Any:
    return cells.render(scene)[0].transpose(1, 2, 0).astype(np.uint8)


def compute_chi_square(counts: Any) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("module", [cells, counting, signs])
def test_doctests_pass(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


@TASKS
def test_pixels_show_the_label_and_erasing_the_evidence_changes_it(task: ModuleType) -> None:
    for example in task.make_examples(60, seed=5):
        evidence = example.scene.is_evidence
        assert read_image(task, example.pixels) == example.label
        assert read_image(task, render_bytes(example.scene.erase_cells(~evidence))) == example.label
        without = read_image(task, render_bytes(example.scene.erase_cells(evidence)))
        assert without == ("0" if task is counting else None)


@TASKS
def test_every_cell_of_the_evidence_is_needed(task: ModuleType) -> None:
    for example in task.make_examples(24, seed=6):
        for cell in example.evidence:
            erased = example.scene.erase_cells(np.arange(cells.NUM_CELLS)[None] == cell)
            left = read_image(task, render_bytes(erased))
            if task is counting:
                assert left == str(int(example.label) - 1)
            else:
                assert left is not None and len(left) == 2 and set(left) < set(example.label)


@TASKS
def test_erasing_cells_changes_only_their_pixels(task: ModuleType) -> None:
    for example in task.make_examples(10, seed=7):
        evidence = example.scene.is_evidence
        changed = (render_bytes(example.scene.erase_cells(evidence)) != example.pixels).any(axis=-1)
        assert not (changed & ~cells.spread_over_pixels(evidence)[0]).any()
        assert changed.sum() > 30 * len(example.evidence)
        boxes = np.zeros_like(changed)
        for left, top, right, bottom in example.boxes:
            boxes[top:bottom, left:right] = True
        assert np.array_equal(boxes, cells.spread_over_pixels(evidence)[0])


@TASKS
def test_examples_depend_on_seed_split_and_index_alone(task: ModuleType) -> None:
    few, many = task.make_examples(3, seed=1), task.make_examples(15, seed=1)
    for first, second in zip(few, many, strict=False):
        assert (first.id, first.label, first.evidence) == (second.id, second.label, second.evidence)
        assert np.array_equal(first.pixels, second.pixels)
    images = [example.pixels.tobytes() for seed in (1, 2) for example in task.make_examples(15, seed=seed)]
    images += [example.pixels.tobytes() for example in task.make_examples(15, seed=1, split="train")]
    assert len(set(images)) == 45


@TASKS
def test_labels_are_balanced(task: ModuleType) -> None:
    labels = Counter(example.label for example in task.make_examples(72, seed=0))
    expected = set(task.LABELS) - {"0"}
    assert set(labels) == expected and set(labels.values()) == {72 // len(expected)}


@TASKS
def test_positions_are_uniform_and_independent_of_the_label(task: ModuleType) -> None:
    labels = np.arange(12000) % len(task.LABELS)
    scenes = task.sample_scenes(make_generator(3, "train"), labels)
    if task is counting:
        assert compute_chi_square(scenes.is_evidence.sum(0)) < MAX_CHI_SQUARE[63]
        assert np.array_equal(scenes.is_evidence.sum(1), labels)
        return
    first = scenes.is_evidence.argmax(1)
    starts = np.bincount(first, minlength=64).reshape(8, 8)
    assert not starts[:, 6:].any() and compute_chi_square(starts[:, :6]) < MAX_CHI_SQUARE[47]
    table = np.zeros((len(task.LABELS), 8))
    np.add.at(table, (labels, first // 8), 1)
    assert max(compute_chi_square(row) for row in table) < 30  # 7 degrees of freedom, twelve rows


@TASKS
def test_distractors_are_independent_of_the_label(task: ModuleType) -> None:
    """Means over the images of each label, of everything that can be said of the other objects."""
    labels = np.arange(12000) % len(task.LABELS)
    scenes = task.sample_scenes(make_generator(4, "train"), labels)
    others = scenes.is_distractor
    features = [others.sum(1), (others & (scenes.plate > 0)).sum(1)]
    features += [(others & (scenes.kind == kind)).sum(1) for kind in range(len(cells.KINDS))]
    features += [(others & (scenes.plate == 0) & (scenes.colour == colour)).sum(1) for colour in range(6)]
    features += [others[:, half].sum(1) for half in (slice(0, 32), slice(32, 64))]
    for feature in features:
        if not feature.any():
            continue
        means = np.array([feature[labels == label].mean() for label in range(len(task.LABELS))])
        error = feature.std() / np.sqrt(len(labels) / len(task.LABELS))
        assert np.abs(means - feature.mean()).max() < 4.5 * error


def test_count_cannot_be_told_from_the_amount_of_red_or_of_objects() -> None:
    """The best guess from the area of red, from the area of red circles' colour and of objects, falls far short."""
    labels = 1 + np.arange(3000) % counting.MAX_COUNT
    scenes = counting.sample_scenes(make_generator(5, "train"), labels)
    images = cells.render(scenes).transpose(0, 2, 3, 1)
    red = find_red(images).sum((1, 2))
    objects = (scenes.kind >= 0).sum(1)
    for amount in (red, objects):
        order = amount.argsort(kind="stable")
        guesses = np.empty_like(labels)
        # the guess that suits the neighbours in amount best
        for part in np.array_split(order, 60):
            guesses[part] = np.bincount(labels[part]).argmax()
        assert (guesses == labels).mean() < 0.5


def test_distractors_of_counting_are_near_and_never_counted() -> None:
    scenes = counting.sample_scenes(make_generator(6, "train"), np.arange(600) % 7)
    is_red, is_circle = scenes.colour == shapes.COLOURS.index("red"), scenes.kind == shapes.SHAPES.index("circle")
    assert np.array_equal(scenes.is_evidence, is_red & is_circle)
    other = scenes.is_distractor
    assert 0.28 < (is_red & other).sum() / other.sum() < 0.39
    assert 0.28 < (is_circle & other).sum() / other.sum() < 0.39
    assert set(np.unique(other.sum(1))) == set(range(counting.MIN_DISTRACTORS, counting.MAX_DISTRACTORS + 1))


def test_scenes_of_signs_have_one_red_sign_and_others() -> None:
    labels = np.arange(600) % len(signs.LABELS)
    scenes = signs.sample_scenes(make_generator(7, "train"), labels)
    red = shapes.COLOURS.index("red")
    for row, label in enumerate(labels):
        starts = np.flatnonzero(scenes.plate[row] == cells.LEFT_END)
        assert signs.MIN_SIGNS <= len(starts) <= signs.MAX_SIGNS
        words: dict[bool, list[tuple[str, list[int]]]] = {}
        for start in starts:
            place = start + np.arange(3)
            assert start % cells.GRID_SIZE <= 5
            assert scenes.plate[row, place].tolist() == [cells.LEFT_END, cells.MIDDLE, cells.RIGHT_END]
            colour = set(scenes.plate_colour[row, place].tolist())
            assert len(colour) == 1
            word = "".join(cells.KINDS[kind] for kind in scenes.kind[row, place]).lower()
            words.setdefault(colour.pop() == red, []).append((word, place.tolist()))
        (word, place), *more = words[True]
        assert not more and word == signs.LABELS[label] and len(words[False]) >= 2
        assert np.flatnonzero(scenes.is_evidence[row]).tolist() == place
        assert {word for word, _ in words[False]} <= set(signs.LABELS)
    is_shape = (scenes.kind >= 0) & (scenes.kind < len(shapes.SHAPES))
    assert set(np.unique(is_shape.sum(1))) == set(range(signs.MIN_SHAPES, signs.MAX_SHAPES + 1))
    assert (is_shape & (scenes.colour == red)).any()


def test_targets_of_counting_are_the_visible_count() -> None:
    rng = make_generator(8, "train")
    scenes = counting.sample_scenes(rng, np.arange(70) % 7)
    hidden = rng.random(scenes.kind.shape) < 0.5
    targets = counting.compute_targets(scenes, hidden)
    for row in range(70):
        visible = sum(1 for cell in np.flatnonzero(scenes.is_evidence[row]) if not hidden[row, cell])
        assert targets[row].tolist() == [float(count == visible) for count in range(7)]


def test_targets_of_signs_are_the_words_that_agree_with_the_visible_letters() -> None:
    rng = make_generator(9, "train")
    labels = np.arange(96) % len(signs.LABELS)
    scenes = signs.sample_scenes(rng, labels)
    hidden = rng.random(scenes.kind.shape) < 0.5
    targets = signs.compute_targets(scenes, hidden)
    for row, label in enumerate(labels):
        shown = [not hidden[row, cell] for cell in np.flatnonzero(scenes.is_evidence[row])]
        word = signs.LABELS[label]
        possible = [
            all(not is_shown or a == b for a, b, is_shown in zip(word, other, shown, strict=True))
            for other in signs.LABELS
        ]
        assert targets[row] == pytest.approx(np.array(possible) / sum(possible))


def test_letters_cannot_stand_at_two_places_of_a_word() -> None:
    """Otherwise a single visible letter would not tell which place it has."""
    assert len(set("".join(signs.LETTER_CHOICES))) == sum(map(len, signs.LETTER_CHOICES))
    assert set(signs.LABELS) == {"".join(letters) for letters in itertools.product(*signs.LETTER_CHOICES)}


def test_sprites_keep_away_from_the_edge_and_are_distinct() -> None:
    sprites = cells.build_sprites()
    assert not sprites[0].any() and set(np.unique(sprites)) == {0, 1}
    assert not sprites[:, [0, -1]].any() and not sprites[:, :, [0, -1]].any()
    kinds = sprites[1:].reshape(len(cells.KINDS), cells.NUM_VARIANTS, -1)
    drawn = [{variant.tobytes() for variant in kind} for kind in kinds]
    assert min(map(len, drawn)) > 5
    assert not any(first & second for first, second in itertools.combinations(drawn, 2))


@TASKS
def test_numpy_and_torch_render_the_same_bytes(task: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    scenes = task.sample_scenes(make_generator(1, "held-out"), np.arange(6))
    images = cells.render(scenes)
    tensors = cells.render(scenes, lambda array: torch.from_numpy(np.ascontiguousarray(array)))
    assert images.shape == (6, 3, 96, 96) and images.min() >= 0 and images.max() <= 255
    assert np.array_equal(images, tensors.numpy())


def test_stacked_scenes_render_as_single_ones() -> None:
    examples = signs.make_examples(4, seed=2)
    stacked = cells.render(cells.stack_scenes([example.scene for example in examples]))
    for image, example in zip(stacked, examples, strict=True):
        assert np.array_equal(image.transpose(1, 2, 0), example.pixels)


@TASKS
def test_task_does_not_import_torch(task: ModuleType) -> None:
    name = task.__name__
    code = f"import sys, {name} as task; task.make_examples(2, 0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@TASKS
def test_benchmark_evidence_is_exactly_the_patches_of_the_cells(task: ModuleType) -> None:
    name = task.__name__.split(".")[-1]
    dataset = load_benchmark_dataset("known", task=name, count=14, seed=3)
    grid = build_patch_units((cells.GRID_SIZE, cells.GRID_SIZE))
    assert dataset.labels == task.LABELS
    for example, zoo_example in zip(dataset, task.make_examples(14, seed=3), strict=True):
        assert example.evidence is not None and all(isinstance(item, ImageBox) for item in example.evidence[0])
        patches = find_evidence_units(example, grid, coverage_threshold=0.999)
        assert np.array_equal(patches, find_evidence_units(example, grid, coverage_threshold=0.0))
        assert np.flatnonzero(patches).tolist() == list(zoo_example.evidence)
        assert task.LABELS[example.label] == example.target == zoo_example.label


# -- the scripts


@pytest.fixture
def cell_images(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("cell_images")


@TASKS
def test_hidden_cells_of_training_vary_from_none_to_all(cell_images: Any, task: ModuleType) -> None:
    rng = make_generator(0, "train")
    scenes = task.sample_scenes(rng, 1 + np.arange(2000) % 6)
    hidden = cell_images.sample_hidden_cells(rng, scenes)
    assert 0.4 < (~hidden).all(1).mean() < 0.6
    is_background = ~scenes.is_evidence & ~scenes.is_distractor
    shares = [
        (hidden & group).sum(1) / group.sum(1) for group in (scenes.is_evidence, scenes.is_distractor, is_background)
    ]
    for share in shares:
        assert (share == 0).mean() > 0.3 and (share == 1).mean() > 0.04
        assert ((share > 0) & (share < 1)).mean() > 0.04
    only_evidence = (shares[0] == 0) & (shares[1] == 1) & (shares[2] == 1)
    assert only_evidence.sum() > 20


def test_filled_cells_are_the_hidden_ones(cell_images: Any) -> None:
    torch = pytest.importorskip("torch")
    scenes = signs.sample_scenes(make_generator(0, "train"), np.arange(3))
    images = cell_images.render_images(scenes, torch.device("cpu"))
    assert np.array_equal(((images + 1) * 127.5).round().int().numpy(), cells.render(scenes))
    for mode in cell_images.FILL_MODES:
        filled = cell_images.fill_cells(images, scenes.is_evidence, cell_images.make_fills(images, mode))
        changed = torch.any(filled != images, dim=1).numpy()
        mask = cells.spread_over_pixels(scenes.is_evidence)
        assert not (changed & ~mask).any() and changed.sum() > 0.95 * mask.sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["counting", "signs"])
def test_training_script_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), "--smoke", "--device", "cpu", *folders], check=True, cwd=ROOT
    )
    card = json.loads((tmp_path / "out" / "card.json").read_text(encoding="utf-8"))
    assert card["name"] == name and card["bytes"] < 4e6
    assert all(0 <= value <= 1 for value in card["figures"].values())


# -- the models


def load_zoo_model(name: str) -> tuple[Any, Any]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if name not in clearhead_zoo.names():
        pytest.skip(f"models/{name} is not trained yet: run packages/zoo/train/{name}.py")
    folder = clearhead_zoo.path(name)
    model, report = transformers.AutoModelForImageClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval(), transformers.AutoImageProcessor.from_pretrained(folder)


def predict_labels(model_and_processor: tuple[Any, Any], images: list[Any]) -> list[str]:
    torch = pytest.importorskip("torch")
    model, processor = model_and_processor
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        indices = torch.cat([model(chunk).logits.argmax(-1) for chunk in pixels.split(32)])
    return [model.config.id2label[index] for index in indices.tolist()]


@TASKS
def test_processor_gives_the_pixels_of_training(cell_images: Any, task: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    _, processor = load_zoo_model(task.__name__.split(".")[-1])
    example = task.make_examples(1, seed=0)[0]
    pixels = processor(example.image, return_tensors="pt")["pixel_values"]
    expected = cell_images.render_images(example.scene, torch.device("cpu"))
    torch.testing.assert_close(pixels, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@TASKS
def test_model_needs_the_evidence_and_nothing_else(task: ModuleType) -> None:
    model = load_zoo_model(task.__name__.split(".")[-1])
    examples = task.make_examples(120, seed=77)
    labels = np.array([example.label for example in examples])

    def measure_accuracy(images: list[Any], expected: Any = labels) -> float:
        return float((np.array(predict_labels(model, images)) == expected).mean())

    def erase(keep_evidence: bool) -> list[Any]:
        return [render_bytes(e.scene.erase_cells(e.scene.is_evidence != keep_evidence)) for e in examples]

    assert measure_accuracy([example.image for example in examples]) >= 0.95
    assert measure_accuracy(erase(keep_evidence=True)) >= 0.95
    if task is counting:
        assert measure_accuracy(erase(keep_evidence=False), np.full(len(labels), "0")) >= 0.95
    else:
        assert measure_accuracy(erase(keep_evidence=False)) <= 0.2


def test_card_figures_prove_the_evidence_of_counting() -> None:
    load_zoo_model("counting")
    figures = clearhead_zoo.card("counting")["figures"]
    assert all(value >= 0.97 for name, value in figures.items() if name.startswith(("accuracy", "predicts")))


def test_card_figures_prove_the_evidence_of_signs() -> None:
    load_zoo_model("signs")
    figures = clearhead_zoo.card("signs")["figures"]
    assert all(value >= 0.97 for name, value in figures.items() if name.startswith(("accuracy", "a word")))
    for name, value in figures.items():
        chance = {"second": 1 / 3, "first": 1 / 2, "third": 1 / 2}
        if name.startswith("same word when the evidence"):
            assert abs(value - 1 / 12) <= 0.05, name
        elif name.startswith("same word"):
            assert abs(value - next(chance[part] for part in chance if part in name)) <= 0.06, name
