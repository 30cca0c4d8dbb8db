"""Images made of a grid of cells: every object and every letter lies inside one cell, which is one patch of the models.

The evidence of an image is therefore a set of patches, with no patch that shows only a sliver of it. A scene is a few
integers per cell. Rendering uses integers only, by operations that numpy and torch share: the images of a seed are
bitwise identical wherever they are rendered.

>>> build_sprites().shape == (1 + len(KINDS) * NUM_VARIANTS, CELL_SIZE, CELL_SIZE)
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead_zoo.tasks.shapes import COLOUR_RGB, SHAPES, Booleans, Integers

__all__ = [
    "CELL_SIZE",
    "GRID_SIZE",
    "IMAGE_SIZE",
    "KINDS",
    "LETTERS",
    "NUM_CELLS",
    "CellExample",
    "CellScenes",
    "build_sprites",
    "get_cell_box",
    "make_example",
    "make_scenes",
    "render",
    "spread_over_pixels",
    "stack_scenes",
]

GRID_SIZE, CELL_SIZE = 8, 12
IMAGE_SIZE, NUM_CELLS = GRID_SIZE * CELL_SIZE, GRID_SIZE**2

#: Letters of 5 × 7 pixels.
GLYPHS = {
    "A": (".###.", "#...#", "#...#", "#####", "#...#", "#...#", "#...#"),
    "B": ("####.", "#...#", "#...#", "####.", "#...#", "#...#", "####."),
    "D": ("####.", "#...#", "#...#", "#...#", "#...#", "#...#", "####."),
    "H": ("#...#", "#...#", "#...#", "#####", "#...#", "#...#", "#...#"),
    "I": ("#####", "..#..", "..#..", "..#..", "..#..", "..#..", "#####"),
    "T": ("#####", "..#..", "..#..", "..#..", "..#..", "..#..", "..#.."),
    "U": ("#...#", "#...#", "#...#", "#...#", "#...#", "#...#", ".###."),
}
LETTERS = tuple(GLYPHS)
#: What a cell can show, apart from nothing.
KINDS = (*SHAPES, *LETTERS)
#: Sizes and positions of each kind.
NUM_VARIANTS = 64
#: Radii of shapes in pixels, and widths and heights of letters.
SHAPE_RADII, LETTER_WIDTHS, LETTER_HEIGHTS = (4.2, 4.7, 5.2), (5, 6, 7), (7, 8)
#: The parts of a plate that stretches over several cells: none, its left end, its middle, its right end.
NO_PLATE, LEFT_END, MIDDLE, RIGHT_END = range(4)
PAINT_NOISE, PIXEL_NOISE, TEXTURE_SIZE = 18, 14, 128


@dataclass(frozen=True)
class CellScenes:
    """Many images, described cell by cell (rows × cells, cells in reading order).

    kind: index into KINDS, −1 where the cell is empty; variant: its size and position
    colour, plate_colour: indices into COLOURS, and paint, plate_paint: red, green and blue as painted
    plate: which part of a plate is beneath (NO_PLATE, LEFT_END, MIDDLE, RIGHT_END)
    is_evidence, is_distractor: what decides the label, and what else there is but background
    background: red, green and blue; texture_offsets: which part of the fine and the coarse texture (rows × 2 × 2)
    """

    kind: Integers
    variant: Integers
    colour: Integers
    paint: Integers
    plate: Integers
    plate_colour: Integers
    plate_paint: Integers
    is_evidence: Booleans
    is_distractor: Booleans
    background: Integers
    texture_offsets: Integers

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, rows: Any) -> CellScenes:
        return CellScenes(*(getattr(self, field.name)[rows] for field in fields(self)))

    def erase_cells(self, erased: Booleans) -> CellScenes:
        """The same scenes with the background in place of what these cells show."""
        return replace(
            self,
            kind=np.where(erased, -1, self.kind),
            plate=np.where(erased, NO_PLATE, self.plate),
            is_evidence=self.is_evidence & ~erased,
            is_distractor=self.is_distractor & ~erased,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CellExample:
    """An image, its label, and the cells that decide the label; the other cells are independent of it.

    Each cell of the evidence is needed, and together they are sufficient. Cells are numbered in reading order.

    scene: what the image was rendered from, in one row
    pixels: height × width × 3, bytes; distractors: cells that show something that is no evidence
    """

    id: str
    scene: CellScenes
    pixels: NDArray[np.uint8]
    label: str
    evidence: tuple[int, ...]
    distractors: tuple[int, ...]

    @property
    def image(self) -> Any:
        """The image as pillow has it."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    @property
    def boxes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Left, top, right and bottom in pixels of each cell of the evidence."""
        return tuple(get_cell_box(cell) for cell in self.evidence)


def get_cell_box(cell: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a cell in pixels, right and bottom exclusive.

    >>> get_cell_box(9)
    (12, 12, 24, 24)
    """
    row, column = divmod(cell, GRID_SIZE)
    left, top = column * CELL_SIZE, row * CELL_SIZE
    return left, top, left + CELL_SIZE, top + CELL_SIZE


def make_scenes(
    rng: np.random.Generator,
    kind: Integers,
    colour: Integers,
    is_evidence: Booleans,
    plate: Integers | None = None,
    plate_colour: Integers | None = None,
    ink: Integers | None = None,
) -> CellScenes:
    """Scenes with these kinds and colours in their cells; sizes, shades and backgrounds are drawn at random.

    ink: brightness of what is painted on a plate, in place of the colour
    """
    rows = len(kind)
    plate = np.full_like(kind, NO_PLATE) if plate is None else plate
    plate_colour = np.zeros_like(kind) if plate_colour is None else plate_colour
    paint = np.array(COLOUR_RGB)[colour]
    if ink is not None:
        paint = np.where((plate != NO_PLATE)[..., None], ink[..., None], paint)
    # a plate has one shade in all of its cells: that of the row's plates of this colour
    shades = rng.integers(-PAINT_NOISE, PAINT_NOISE + 1, (rows, len(COLOUR_RGB), 3))
    return CellScenes(
        kind=kind,
        variant=rng.integers(NUM_VARIANTS, size=kind.shape),
        colour=colour,
        paint=paint + rng.integers(-PAINT_NOISE, PAINT_NOISE + 1, (*kind.shape, 3)),
        plate=plate,
        plate_colour=plate_colour,
        plate_paint=np.array(COLOUR_RGB)[plate_colour] + shades[np.arange(rows)[:, None], plate_colour],
        is_evidence=is_evidence,
        is_distractor=((kind >= 0) | (plate != NO_PLATE)) & ~is_evidence,
        background=rng.integers(70, 131, (rows, 1)) + rng.integers(-12, 13, (rows, 3)),
        texture_offsets=rng.integers(TEXTURE_SIZE, size=(rows, 2, 2)),
    )


def make_example(id: str, scene: CellScenes, label: str) -> CellExample:
    """An example from the one scene that is given."""
    return CellExample(
        id=id,
        scene=scene,
        pixels=np.ascontiguousarray(render(scene)[0].transpose(1, 2, 0)).astype(np.uint8),
        label=label,
        evidence=tuple(np.flatnonzero(scene.is_evidence[0]).tolist()),
        distractors=tuple(np.flatnonzero(scene.is_distractor[0]).tolist()),
    )


def stack_scenes(scenes: Sequence[CellScenes]) -> CellScenes:
    """The scenes of all of these, in order."""
    names = [field.name for field in fields(CellScenes)]
    return CellScenes(*(np.concatenate([getattr(part, name) for part in scenes]) for name in names))


def spread_over_pixels(values: Any) -> Any:
    """A value for each cell as a value for each pixel: … × cells to … × height × width, for numpy and torch.

    >>> mask = spread_over_pixels(np.arange(NUM_CELLS) == 9)
    >>> mask.shape, int(mask.sum()), bool(mask[12, 23])
    ((96, 96), 144, True)
    """
    place = np.arange(IMAGE_SIZE) // CELL_SIZE
    return values[..., place[:, None] * GRID_SIZE + place]


def render(scenes: CellScenes, to_array: Callable[[NDArray[Any]], Any] = np.asarray) -> Any:
    """Images (rows × 3 × height × width, whole numbers from 0 to 255).

    to_array: converts arrays to the library and device of the rendering, such as
        `lambda a: torch.from_numpy(a).to("cuda")`; images are then tensors on that device
    """
    rows, line = len(scenes), np.arange(IMAGE_SIZE)

    def spread_masks(bank: NDArray[np.int16], index: Integers) -> Any:
        """The mask of each cell, put together to images."""
        cells = to_array(bank)[to_array(index)].reshape(rows, GRID_SIZE, GRID_SIZE, CELL_SIZE, CELL_SIZE)
        return cells.swapaxes(2, 3).reshape(rows, 1, IMAGE_SIZE, IMAGE_SIZE)

    def spread_paint(paint: Integers) -> Any:
        cells = np.ascontiguousarray(paint.transpose(0, 2, 1).astype(np.int16))
        return spread_over_pixels(to_array(cells))

    def cut_textures(number: int) -> Any:
        """Part of a texture that repeats itself, for each scene."""
        down, right = (
            to_array((scenes.texture_offsets[:, number, axis, None] + line) % TEXTURE_SIZE) for axis in range(2)
        )
        return to_array(build_textures()[number])[down[:, :, None], right[:, None, :]].swapaxes(1, 3).swapaxes(2, 3)

    index = np.where(scenes.kind < 0, 0, 1 + scenes.kind * NUM_VARIANTS + scenes.variant)
    images = to_array(scenes.background.astype(np.int16)[:, :, None, None]) + cut_textures(1)
    plates = spread_masks(_build_plates(), scenes.plate)
    images = images + plates * (spread_paint(scenes.plate_paint) - images)
    images = images + spread_masks(build_sprites(), index) * (spread_paint(scenes.paint) - images)
    return (images + cut_textures(0)).clip(0, 255)


@cache
def build_sprites() -> NDArray[np.int16]:
    """The mask of nothing, and then those of each kind in all its sizes and positions."""
    rng = np.random.default_rng(7)
    sprites = [np.zeros((CELL_SIZE, CELL_SIZE), dtype=np.int16)]
    for kind in KINDS:
        draw = _draw_shape if kind in SHAPES else _draw_letter
        sprites += [draw(kind, rng).astype(np.int16) for _ in range(NUM_VARIANTS)]
    return np.stack(sprites)


def _draw_shape(shape: str, rng: np.random.Generator) -> Booleans:
    """Pixels whose centre is in a shape, which keeps half a pixel away from the edge of its cell."""
    radius = float(rng.choice(SHAPE_RADII))
    room = int(2 * (CELL_SIZE / 2 - 0.5 - radius))
    x, y = CELL_SIZE / 2 + rng.integers(-room, room + 1, size=2) / 2
    centres = np.arange(CELL_SIZE) + 0.5
    right, down = centres - x, centres[:, None] - y
    aside, off, distance = abs(right), abs(down), np.hypot(right, down)
    inside: dict[str, Booleans] = {
        "circle": distance <= radius,
        "square": np.maximum(aside, off) <= 0.85 * radius,
        "triangle": (off <= radius) & (2 * aside - down <= radius),
        "cross": (np.minimum(aside, off) <= 0.35 * radius) & (np.maximum(aside, off) <= radius),
        "ring": (distance <= radius) & (distance >= 0.55 * radius),
    }
    return inside[shape]


def _draw_letter(letter: str, rng: np.random.Generator) -> Booleans:
    """A letter in one of a few sizes; a plate's edge is at least a pixel away."""
    glyph = np.array([[pixel == "#" for pixel in row] for row in GLYPHS[letter]])
    width, height = int(rng.choice(LETTER_WIDTHS)), int(rng.choice(LETTER_HEIGHTS))
    scaled = glyph[np.arange(height) * 7 // height][:, np.arange(width) * 5 // width]
    top = int(rng.integers(2, CELL_SIZE - 2 - height + 1))
    left = int(rng.integers(2, CELL_SIZE - 2 - width + 1))
    drawn = np.zeros((CELL_SIZE, CELL_SIZE), dtype=bool)
    drawn[top : top + height, left : left + width] = scaled
    return drawn


@cache
def _build_plates() -> NDArray[np.int16]:
    """The masks of the parts of a plate; a pixel of background is left around it."""
    plates = np.zeros((4, CELL_SIZE, CELL_SIZE), dtype=np.int16)
    plates[LEFT_END, 1:-1, 1:] = plates[MIDDLE, 1:-1] = plates[RIGHT_END, 1:-1, :-1] = 1
    return plates


@cache
def build_textures() -> NDArray[np.int16]:
    """Fine and coarse noise (2 × side × side × 3) that can be repeated without a seam."""
    rng = np.random.default_rng(8)
    fine = rng.integers(-PIXEL_NOISE, PIXEL_NOISE + 1, (TEXTURE_SIZE, TEXTURE_SIZE, 3))
    coarse = np.zeros_like(fine)
    for cell, depth in ((4, 8), (16, 14)):
        blocks = rng.integers(-depth, depth + 1, (TEXTURE_SIZE // cell, TEXTURE_SIZE // cell, 3))
        coarse += blocks.repeat(cell, axis=0).repeat(cell, axis=1)
    return np.stack([fine, coarse]).astype(np.int16)
