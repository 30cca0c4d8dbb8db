"""Mosaics: pictures of two classes side by side; the explanation of one class must stay in its part.

>>> from clearhead.bench.data.base import DataSet
>>> from PIL import Image
>>> one = [Example(str(i), Image.new("RGB", (4, 4)), i % 2) for i in range(4)]
>>> made = mosaics(DataSet("mine", "all", "CC0", ("a", "b"), lambda: one, lambda row: row), count=3, seed=0)
>>> len(made), made[0].input.size, made[0].label != made[1].label
(3, (448, 224), True)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.evidence import Region
from clearhead.errors import InputError

#: Rows and columns of a mosaic, by name; every second cell is of the class that is explained.
LAYOUTS = {"pair": (1, 2), "square": (2, 2)}


@dataclass(frozen=True)
class _Drawn:
    """Which examples stand in the cells, and which cells are of the class explained."""

    number: int
    places: tuple[int, ...]
    own: tuple[int, ...]


def mosaics(data: DataSet, count: int, seed: int = 0, layout: str = "pair", side: int = 224) -> DataSet:
    """So many mosaics of pictures of a data set, two classes each, cells of `side` pixels."""
    if layout not in LAYOUTS:
        raise InputError(f"layout={layout!r} is not known: there are {', '.join(LAYOUTS)}")
    return replace(
        data,
        name=f"{data.name}, mosaics",
        rows=partial(_draw, data, count, seed, layout),
        example=partial(_mosaic, data, layout, side),
        chosen=None,
    )


def _draw(data: DataSet, count: int, seed: int, layout: str) -> Sequence[_Drawn]:
    labels = [example.label for example in data]
    kinds = sorted({label for label in labels if isinstance(label, int)})
    if len(kinds) < 2:
        raise InputError(f"mosaics need pictures of two classes, and {data.name} has {len(kinds)}")
    rng = np.random.default_rng([seed, 7])
    of = {kind: [place for place, label in enumerate(labels) if label == kind] for kind in kinds}
    cells = int(np.prod(LAYOUTS[layout]))
    drawn = []
    for number in range(count):
        first = kinds[number % len(kinds)]
        other = kinds[(number + 1 + int(rng.integers(len(kinds) - 1))) % len(kinds)]
        own = tuple(sorted(int(cell) for cell in rng.permutation(cells)[: cells // 2]))
        places = tuple(int(rng.choice(of[first if cell in own else other])) for cell in range(cells))
        drawn.append(_Drawn(number, places, own))
    return drawn


def _mosaic(data: DataSet, layout: str, side: int, drawn: _Drawn) -> Example:
    from PIL import Image

    rows, columns = LAYOUTS[layout]
    whole = Image.new("RGB", (columns * side, rows * side))
    boxes = []
    for cell, place in enumerate(drawn.places):
        row, column = divmod(cell, columns)
        whole.paste(_square(data[place].input, side), (column * side, row * side))
        if cell in drawn.own:
            boxes.append(Region((column / columns, row / rows, (column + 1) / columns, (row + 1) / rows)))
    label = data[drawn.places[drawn.own[0]]].label
    return Example(f"mosaic-{drawn.number:05d}", whole, label, (tuple(boxes),))


def _square(picture: Any, side: int) -> Any:
    from PIL import Image

    made = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    return made.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
