"""Mosaics of images of two classes; the explanation of one class must stay in its own cells.

>>> from PIL import Image
>>> images = [Example(str(i), Image.new("RGB", (4, 4)), i % 2) for i in range(4)]
>>> dataset = BenchmarkDataset("mine", "all", "CC0", ("a", "b"), lambda: images, lambda row: row)
>>> mosaics = make_mosaics(dataset, count=3, seed=0)
>>> len(mosaics), mosaics[0].input.size, mosaics[0].label != mosaics[1].label
(3, (448, 224), True)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.evidence import ImageBox
from clearhead.errors import InputError

#: Rows and columns of a mosaic, by name; half of the cells show the explained class.
MOSAIC_LAYOUTS = {"pair": (1, 2), "square": (2, 2)}


@dataclass(frozen=True)
class _MosaicCells:
    """The examples in the cells of a mosaic, and which cells show the explained class."""

    index: int
    example_indices: tuple[int, ...]
    target_cells: tuple[int, ...]


def make_mosaics(
    dataset: BenchmarkDataset, count: int, seed: int = 0, layout: str = "pair", cell_size: int = 224
) -> BenchmarkDataset:
    """Create `count` mosaics from the images of a data set, two classes each, with cells of `cell_size` pixels."""
    if layout not in MOSAIC_LAYOUTS:
        raise InputError(f"layout={layout!r} is unknown. Accepted: {', '.join(MOSAIC_LAYOUTS)}")
    return replace(
        dataset,
        name=f"{dataset.name}, mosaics",
        load_rows=partial(_draw_mosaics, dataset, count, seed, layout),
        make_example=partial(_compose_mosaic, dataset, layout, cell_size),
        indices=None,
    )


def _draw_mosaics(dataset: BenchmarkDataset, count: int, seed: int, layout: str) -> Sequence[_MosaicCells]:
    """Draw the images of each mosaic: target classes take turns; the other class and the target cells are random."""
    labels = [example.label for example in dataset]
    classes = sorted({label for label in labels if isinstance(label, int)})
    if len(classes) < 2:
        raise InputError(f"mosaics need images of two classes, but {dataset.name} has {len(classes)}")
    rng = np.random.default_rng([seed, 7])
    indices_of = {cls: [index for index, label in enumerate(labels) if label == cls] for cls in classes}
    num_cells = int(np.prod(MOSAIC_LAYOUTS[layout]))
    mosaics = []
    for mosaic_index in range(count):
        target_class = classes[mosaic_index % len(classes)]
        other_class = classes[(mosaic_index + 1 + int(rng.integers(len(classes) - 1))) % len(classes)]
        target_cells = tuple(sorted(int(cell) for cell in rng.permutation(num_cells)[: num_cells // 2]))
        cell_classes = (target_class if cell in target_cells else other_class for cell in range(num_cells))
        example_indices = tuple(int(rng.choice(indices_of[cls])) for cls in cell_classes)
        mosaics.append(_MosaicCells(mosaic_index, example_indices, target_cells))
    return mosaics


def _compose_mosaic(dataset: BenchmarkDataset, layout: str, cell_size: int, cells: _MosaicCells) -> Example:
    """Paste the images into the cells; the evidence is the boxes of the cells with the target class."""
    from PIL import Image

    rows, columns = MOSAIC_LAYOUTS[layout]
    mosaic = Image.new("RGB", (columns * cell_size, rows * cell_size))
    boxes = []
    for cell, example_index in enumerate(cells.example_indices):
        row, column = divmod(cell, columns)
        mosaic.paste(_resize_square(dataset[example_index].input, cell_size), (column * cell_size, row * cell_size))
        if cell in cells.target_cells:
            boxes.append(ImageBox((column / columns, row / rows, (column + 1) / columns, (row + 1) / rows)))
    label = dataset[cells.example_indices[cells.target_cells[0]]].label
    return Example(f"mosaic-{cells.index:05d}", mosaic, label, (tuple(boxes),))


def _resize_square(image: Any, size: int) -> Any:
    """Resize an image to size × size pixels as RGB, without keeping its aspect ratio."""
    from PIL import Image

    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    return image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
