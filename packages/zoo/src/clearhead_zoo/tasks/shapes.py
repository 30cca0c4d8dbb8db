"""Coloured shapes on a noisy background, and questions about them: "what colour is the circle left of the square?"

Every question has one correct answer. Each example contains the objects that the question is about, their exact masks
and boxes, and the content words of the question. The evidence in the image depends on the family of the question:

colour, shape: the one object that is named ("what shape is the red object?")
count: all objects that are counted; none where there are none
exist: the one object asked for if the answer is yes; none if it is no
relation: the object asked for and the one it is related to ("the circle left of the square"). There is always a second
    circle on the other side, of another colour, so that the relation has to be understood

Scenes are sampled with numpy and rendered with integers only, by operations that numpy and torch share: the images of
a seed are bitwise identical wherever they are rendered.

>>> one = make_example(seed=11, family="relation")
>>> one.text, one.label
('what colour is the circle left of the cross?', 'red')
>>> [one.names[place] for place in one.objects]
['large red circle', 'large yellow cross']
>>> [one.words[position] for position in one.evidence]
['colour', 'circle', 'left', 'cross']
>>> one.pixels.shape, one.masks.shape, one.features.shape
((64, 64, 3), (6, 64, 64), (8, 32))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clearhead_zoo.tasks import Span, make_generator
from clearhead_zoo.tasks import TaskExample as TextExample

Integers: TypeAlias = NDArray[np.int64]
Booleans: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float32]

SHAPES = ("circle", "square", "triangle", "cross", "ring")
PLURALS = ("circles", "squares", "triangles", "crosses", "rings")
COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
COLOUR_RGB = ((210, 50, 50), (60, 170, 70), (60, 90, 215), (225, 205, 60), (150, 65, 185), (70, 200, 210))
SIZES = ("small", "large")
RELATIONS = ("left of", "right of", "above", "below")
FAMILIES = ("colour", "shape", "count", "exist", "relation")
MAX_COUNT = 3
ANSWERS = (*COLOURS, *SHAPES, *(str(number) for number in range(MAX_COUNT + 1)), "no", "yes")
FIRST_SHAPE_ANSWER, FIRST_COUNT_ANSWER, NO_ANSWER = len(COLOURS), len(COLOURS) + len(SHAPES), len(ANSWERS) - 2
PAD_TOKEN, UNKNOWN_TOKEN, CLS_TOKEN, SEP_TOKEN, MASK_TOKEN = SPECIAL_TOKENS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
)
#: Words and question marks are the tokens.
TOKEN_PATTERN = r"\w+|\?"

#: Objects of a scene, at least and at most; regions of a scene, some of them mere ground; numbers that describe one.
MIN_OBJECTS, MAX_OBJECTS, NUM_REGIONS, FEATURE_SIZE = 2, 6, 8, 32
#: Positions and radii are whole numbers of quarter pixels.
SUBPIXELS_PER_PIXEL = 4
#: The share of the image's side that the radius of a small and of a large object takes, least and most.
RADIUS_FRACTIONS = ((0.070, 0.086), (0.109, 0.125))
#: A side of a relation is meant only from this share of the image's side on.
MIN_RELATION_DISTANCE = 0.09
FEATURE_NOISE_STD = 0.3


# -- the questions: there are only a few hundred


@dataclass(frozen=True)
class ShapesQuestion:
    """A question about a scene.

    Attributes:
        family: What is asked, such as "colour" or "count".
        text: The question.
        spans: Start and stop of each word in the text, in characters.
        content_positions: Positions of the words that carry the question.
    """

    family: str
    text: str
    spans: tuple[Span, ...]
    content_positions: tuple[int, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the question; punctuation is left out."""
        return tuple(self.text[start:end] for start, end in self.spans)


def _make_question(family: str, by_colour: int, first: int, second: int, relation: int) -> ShapesQuestion:
    """Words in capitals in these sentences are the ones that carry the question."""
    one, other = ((COLOURS if by_colour else SHAPES)[number].upper() for number in (first, second))
    asked, thing = ("SHAPE", " object") if by_colour else ("COLOUR", "")
    looked_for = SHAPES[second].upper() if family == "exist" else ""
    side = RELATIONS[relation].replace(" of", "").upper() + (" of" if " of" in RELATIONS[relation] else "")
    sentence = {
        "colour": f"what {asked} is the {one}?",
        "shape": f"what {asked} is the {one} object?",
        "count": f"how MANY {one} objects are there?" if by_colour else f"how MANY {PLURALS[first].upper()} are there?",
        "exist": f"is there a {one} {looked_for}?",
        "relation": f"what {asked} is the {one}{thing} {side} the {other}{thing}?",
    }[family]
    spans, start = [], 0
    for word in sentence.replace("?", "").split(" "):
        spans.append((start, start + len(word)))
        start += len(word) + 1
    content = tuple(place for place, (start, end) in enumerate(spans) if sentence[start:end].isupper())
    return ShapesQuestion(family, sentence.lower(), tuple(spans), content)


@cache
def _build_question_table() -> tuple[tuple[ShapesQuestion, ...], Integers]:
    """All questions, and their numbers by family, by_colour, first, second and relation."""
    table: list[ShapesQuestion] = []
    numbers = np.full((len(FAMILIES), 2, len(COLOURS), len(COLOURS), len(RELATIONS)), -1, dtype=np.int64)

    def add(family: str, by_colour: int, first: int, second: int = 0, relation: int = 0) -> None:
        numbers[FAMILIES.index(family), by_colour, first, second, relation] = len(table)
        table.append(_make_question(family, by_colour, first, second, relation))

    for by_colour, values in enumerate((SHAPES, COLOURS)):
        for first in range(len(values)):
            add(FAMILIES[by_colour], by_colour, first)
            add("count", by_colour, first)
            for second in range(len(SHAPES) if by_colour else 0):
                add("exist", by_colour, first, second)
            for second in range(len(values)):
                for relation in range(len(RELATIONS) if first != second else 0):
                    add("relation", by_colour, first, second, relation)
    return tuple(table), numbers


def list_questions() -> tuple[ShapesQuestion, ...]:
    """Every question that can be asked.

    >>> len(list_questions()), list_questions()[0].text
    (252, 'what colour is the circle?')
    """
    return _build_question_table()[0]


@cache
def build_vocabulary() -> list[str]:
    """Every word, at its number."""
    return [*SPECIAL_TOKENS, "?", *sorted({word for question in list_questions() for word in question.words})]


@cache
def build_token_table() -> tuple[Integers, Booleans]:
    """Each question as a padded row of tokens, and which of them carry the question."""
    number = {word: place for place, word in enumerate(build_vocabulary())}
    rows = [[CLS_TOKEN, *question.words, "?", SEP_TOKEN] for question in list_questions()]
    ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    content = np.zeros(ids.shape, dtype=bool)
    for place, (row, question) in enumerate(zip(rows, list_questions(), strict=True)):
        ids[place, : len(row)] = [number[word] for word in row]
        content[place, [position + 1 for position in question.content_positions]] = True
    return ids, content


# -- the scenes


@dataclass(frozen=True)
class Scenes:
    """Many scenes: kinds and positions of their objects (rows × objects), and their background.

    x, y, radius: in quarter pixels; shape, colour, large: indices into SHAPES, COLOURS and SIZES; present: most scenes
    have fewer than MAX_OBJECTS objects; colour_offset: deviation of an object's paint from its colour;
    background_colour, background_slope: paint of the background and its change across the image; noise_seed: seed of
    the noise
    """

    size: int
    x: Integers
    y: Integers
    radius: Integers
    shape: Integers
    colour: Integers
    large: Integers
    present: Booleans
    colour_offset: Integers
    background_colour: Integers
    background_slope: Integers
    noise_seed: Integers

    def __len__(self) -> int:
        """Return the number of scenes."""
        return len(self.x)

    def __getitem__(self, rows: Any) -> Scenes:
        """Return the scenes of these rows, by a slice, indices or a mask."""
        arrays = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "size"}
        return Scenes(self.size, **arrays)

    def remove_objects(self, removed: Booleans) -> Scenes:
        """The same scenes with the background in place of these objects."""
        return replace(self, present=self.present & ~removed)


@dataclass(frozen=True)
class QuestionBatch:
    """Scenes with one question each: indices into list_questions() and ANSWERS, and the objects that are the evidence.

    referent, anchor: the object asked for and the one it is related to, −1 where there is none
    """

    scenes: Scenes
    question: Integers
    answer: Integers
    evidence: Booleans
    referent: Integers
    anchor: Integers

    def __len__(self) -> int:
        """Return the number of questions, one per scene."""
        return len(self.question)

    def __getitem__(self, rows: Any) -> QuestionBatch:
        """Return the questions and scenes of these rows, by a slice, indices or a mask."""
        return QuestionBatch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def sample_other_objects(self, rng: np.random.Generator) -> Booleans:
        """As many objects that are no evidence (fewer, if there are no more), drawn at random."""
        free = self.scenes.present & ~self.evidence
        order = np.argsort(np.where(free, rng.random(free.shape), 2.0), axis=1)
        chosen = np.zeros_like(free)
        np.put_along_axis(chosen, order, np.arange(free.shape[1]) < self.evidence.sum(1, keepdims=True), axis=1)
        return chosen & free

    def recolour_referents(self, rng: np.random.Generator) -> QuestionBatch:
        """Those whose answer is the referent's colour, with that object in another colour and the answer with it."""
        asks_colour = (self.answer < len(COLOURS)) & (self.referent >= 0)
        kept = self[np.flatnonzero(asks_colour)]
        rows = np.arange(len(kept))
        colour = kept.scenes.colour.copy()
        colour[rows, kept.referent] = _sample_other_value(rng, kept.answer, len(COLOURS))
        return replace(kept, scenes=replace(kept.scenes, colour=colour), answer=colour[rows, kept.referent])


def sample_scenes(rng: np.random.Generator, num_scenes: int, size: int = 96) -> Scenes:
    """Scenes with any objects in them, none touching another."""
    count = rng.integers(MIN_OBJECTS, MAX_OBJECTS + 1, num_scenes)
    x, y, radius, large, _ = _sample_layout(rng, count, size, np.full(num_scenes, -1))
    shape, colour = rng.integers(len(SHAPES), size=x.shape), rng.integers(len(COLOURS), size=x.shape)
    return _make_scenes(rng, size, x, y, radius, shape, colour, large, count)


def sample_question_batch(
    rng: np.random.Generator, num_questions: int, size: int = 64, families: Sequence[str] = FAMILIES
) -> QuestionBatch:
    """Scenes with a question each; families in equal parts (name one twice for more of it), answers of each too."""
    family = np.array([FAMILIES.index(name) for name in families])[rng.permutation(num_questions) % len(families)]
    by_colour = np.where(family < 2, family, rng.integers(2, size=num_questions))
    by_colour[family == FAMILIES.index("exist")] = 1
    is_count, is_exist, is_relation = (family == FAMILIES.index(name) for name in ("count", "exist", "relation"))
    relation = np.where(is_relation, rng.integers(len(RELATIONS), size=num_questions), 0)
    number = rng.integers(MAX_COUNT + 1, size=num_questions)
    least = np.select([is_count, is_exist | is_relation], [np.maximum(number, MIN_OBJECTS), 3], MIN_OBJECTS)
    count = rng.integers(least, MAX_OBJECTS + 1)
    x, y, radius, large, roles = _sample_layout(rng, count, size, np.where(is_relation, relation, -1))
    referent, anchor, foil = roles
    places = np.arange(MAX_OBJECTS)

    # objects have a property that names them and one that is asked for; which is which depends on the question
    names, others = np.where(by_colour, len(COLOURS), len(SHAPES)), np.where(by_colour, len(SHAPES), len(COLOURS))
    chance = rng.random((num_questions, len(COLOURS)))
    chance[np.arange(len(COLOURS)) >= names[:, None]] = 2.0
    order = np.argsort(chance, axis=1)
    first, second = order[:, 0], order[:, 1]
    # nothing else bears the names that the question uses, except when it asks whether there is such a thing
    free = np.select([is_exist, is_relation], [0, 2], 1)
    named = np.take_along_axis(order, rng.integers(free[:, None], names[:, None], (num_questions, MAX_OBJECTS)), axis=1)
    asked = rng.integers(0, others[:, None], (num_questions, MAX_OBJECTS))
    answer = rng.integers(0, others)
    is_counted = is_count[:, None] & (places < number[:, None])
    is_referent = ~is_count[:, None] & (places == referent[:, None])
    is_anchor, is_foil = (is_relation[:, None] & (places == place[:, None]) for place in (anchor, foil))
    there = is_exist & (rng.integers(2, size=num_questions) == 1)
    # what is looked for has two near relatives in most scenes: one of its name, and one like it in the other property
    tempts = is_exist[:, None] & (rng.random((num_questions, 2)) < 0.75)
    is_namesake, is_alike = (tempts[:, [k]] & (places == (referent[:, None] + 1 + k) % 3) for k in (0, 1))
    is_referent &= (~is_exist | there)[:, None]
    named = np.where(is_counted | is_referent | is_foil | is_namesake, first[:, None], named)
    named = np.where(is_anchor, second[:, None], named)
    named = np.where(is_alike, _sample_other_value(rng, first, names)[:, None], named)
    asked = np.where(is_referent | is_alike, answer[:, None], asked)
    taken = is_foil | (is_exist[:, None] & ~is_referent & (named == first[:, None]) & (asked == answer[:, None]))
    asked = np.where(taken, _sample_other_value(rng, answer, others)[:, None], asked)

    shape, colour = np.where(by_colour[:, None], asked, named), np.where(by_colour[:, None], named, asked)
    present = places < count[:, None]
    numbers = _build_question_table()[1][
        family, by_colour, first, np.select([is_exist, is_relation], [answer, second], 0), relation
    ]
    label = answer + np.where(by_colour, FIRST_SHAPE_ANSWER, 0)
    return QuestionBatch(
        scenes=_make_scenes(rng, size, x, y, radius, shape, colour, large, count),
        question=numbers,
        answer=np.select([is_count, is_exist], [FIRST_COUNT_ANSWER + number, NO_ANSWER + there], label),
        evidence=(is_counted | is_referent | is_anchor) & present,
        referent=np.where(is_referent.any(1), is_referent.argmax(1), -1),
        anchor=np.where(is_relation, anchor, -1),
    )


def _sample_other_value(rng: np.random.Generator, value: Integers, values: int | Integers) -> Integers:
    """Another value than this one."""
    return (value + 1 + rng.integers(0, np.broadcast_to(values, value.shape) - 1)) % values


def _sample_layout(
    rng: np.random.Generator, count: Integers, size: int, relation: Integers
) -> tuple[Integers, Integers, Integers, Integers, Integers]:
    """Positions that do not touch, radii, sizes, and who is referent, anchor and foil; drawn again until they suit."""
    rows = len(count)
    x, y, radius, large = (np.zeros((rows, MAX_OBJECTS), dtype=np.int64) for _ in range(4))
    roles = np.zeros((3, rows), dtype=np.int64)
    todo = np.arange(rows)
    while len(todo):
        large[todo] = rng.integers(2, size=(len(todo), MAX_OBJECTS))
        low, high = (
            np.round(np.array(RADIUS_FRACTIONS)[:, k] * size * SUBPIXELS_PER_PIXEL).astype(np.int64) for k in (0, 1)
        )
        radius[todo] = rng.integers(low[large[todo]], high[large[todo]] + 1)
        x[todo], y[todo], fits = _place_objects(rng, radius[todo], count[todo], size)
        roles[:, todo], related = _assign_roles(rng, x[todo], y[todo], count[todo], size, relation[todo])
        todo = todo[~(fits & related)]
    return x, y, radius, large, roles


def _place_objects(
    rng: np.random.Generator, radius: Integers, count: Integers, size: int, tries: int = 16
) -> tuple[Integers, Integers, Booleans]:
    """One object after the other goes to the first of a few random places where it touches none before it."""
    rows = len(radius)
    x, y = np.zeros_like(radius), np.zeros_like(radius)
    fits = np.ones(rows, dtype=bool)
    for place in range(MAX_OBJECTS):
        own = radius[:, place, None]
        room = SUBPIXELS_PER_PIXEL * size - 2 * own - 2 * SUBPIXELS_PER_PIXEL
        spots = own[None] + SUBPIXELS_PER_PIXEL + (rng.random((2, rows, tries)) * (room + 1)).astype(np.int64)
        reach = own + radius[:, :place] + SUBPIXELS_PER_PIXEL
        near = (np.abs(spots[0, :, :, None] - x[:, None, :place]) < reach[:, None]) & (
            np.abs(spots[1, :, :, None] - y[:, None, :place]) < reach[:, None]
        )
        free = ~near.any(2)
        chosen = free.argmax(1)
        x[:, place], y[:, place] = spots[0, np.arange(rows), chosen], spots[1, np.arange(rows), chosen]
        fits &= free.any(1) | (place >= count)
    return x, y, fits


def _assign_roles(
    rng: np.random.Generator, x: Integers, y: Integers, count: Integers, size: int, relation: Integers
) -> tuple[Integers, Booleans]:
    """Referent, anchor and foil: an anchor that has objects clearly on both sides, and one from each side.

    Without a relation the referent is any of the first three objects.
    """
    rows = np.arange(len(x))
    along = np.where(relation[:, None] < 2, x, y) * np.where(relation % 2, -1, 1)[:, None]
    present = np.arange(MAX_OBJECTS) < count[:, None]
    ahead = along[:, :, None] - along[:, None, :] >= MIN_RELATION_DISTANCE * size * SUBPIXELS_PER_PIXEL
    ahead &= present[:, :, None] & present[:, None, :]
    behind = ahead.transpose(0, 2, 1)
    able = ahead.any(2) & behind.any(2)
    anchor = (able * rng.random(able.shape)).argmax(1)
    referent, foil = ((side[rows, anchor] * rng.random(able.shape)).argmax(1) for side in (ahead, behind))
    related = relation >= 0
    alone = rng.integers(0, np.minimum(count, 3))
    return np.stack([np.where(related, referent, alone), anchor, foil]), able.any(1) | ~related


def _make_scenes(
    rng: np.random.Generator,
    size: int,
    x: Integers,
    y: Integers,
    radius: Integers,
    shape: Integers,
    colour: Integers,
    large: Integers,
    count: Integers,
) -> Scenes:
    rows = len(x)
    return Scenes(
        size=size,
        x=x,
        y=y,
        radius=radius,
        shape=shape,
        colour=colour,
        large=large,
        present=np.arange(MAX_OBJECTS) < count[:, None],
        colour_offset=rng.integers(-18, 19, (rows, MAX_OBJECTS, 3)),
        background_colour=rng.integers(60, 131, (rows, 1)) + rng.integers(-12, 13, (rows, 3)),
        background_slope=rng.integers(-30, 31, (rows, 2)),
        noise_seed=rng.integers(2**31, size=rows),
    )


# -- how they look


def render(scenes_batch: Scenes, to_array: Callable[[NDArray[Any]], Any] = np.asarray) -> tuple[Any, Any]:
    """Images (rows × 3 × height × width, whole numbers from 0 to 255) and masks (rows × objects × height × width).

    to_array: converts arrays to the library and device of the rendering, such as
        `lambda a: torch.from_numpy(a).to("cuda")`; images and masks are then tensors on that device
    """
    masks = _render_masks(scenes_batch, to_array)
    size, side = scenes_batch.size, to_array(np.arange(scenes_batch.size, dtype=np.int16))
    # where an image is painted the numbers are small, and a quarter of the memory is a quarter of the time
    slope, ground, paints = (
        to_array(values.astype(np.int16))
        for values in (
            scenes_batch.background_slope[:, :, None, None],
            scenes_batch.background_colour[:, :, None, None],
            _get_object_colours(scenes_batch)[..., None, None],
        )
    )
    tilt = (slope[:, 0] * side[:, None] + slope[:, 1] * side) // size
    place = np.arange(size)
    grain, shift = to_array(scenes_batch.noise_seed[:, None, None]), to_array(np.array([0, 8, 16])[:, None, None])
    fine = _hash_to_24_bits(grain, to_array(place[:, None] * size + place))
    coarse = _hash_to_24_bits(grain ^ 0x5A5A5A, to_array(place[:, None] // 4 * size + place // 4))
    pictures = ground + tilt[:, None]
    rough = (coarse[:, None] >> shift) % 33 - 16
    bare = to_array(np.ones(1, dtype=bool))
    for number in range(masks.shape[1]):
        mask = masks[:, number, None]
        pictures = pictures + mask * (paints[:, number] - pictures)
        bare = bare & ~mask
    return (pictures + bare * rough + (fine[:, None] >> shift) % 29 - 14).clip(0, 255), masks


def _get_object_colours(many: Scenes) -> Integers:
    return np.array(COLOUR_RGB)[many.colour] + many.colour_offset


def _render_masks(many: Scenes, array: Callable[[NDArray[Any]], Any]) -> Any:
    """Which pixels have their centre in an object: one test for all shapes, of which each uses a part.

    Between two circles, below two slanting lines, and in a horizontal or a vertical bar.
    """
    radius, far = many.radius, 4 * SUBPIXELS_PER_PIXEL * many.size
    parts: dict[
        str, tuple[Any, ...]
    ] = {  # squared inner and outer circle, height of the lines' tip, length and breadth of the bars
        "circle": (0 * radius, radius**2, far, radius, radius),
        "square": (0 * radius, far**2, far, radius * 7 // 8, radius * 7 // 8),
        "triangle": (0 * radius, far**2, radius, radius, radius),
        "cross": (0 * radius, far**2, far, radius, radius * 3 // 8),
        "ring": ((radius * 9 // 16) ** 2, radius**2, far, radius, radius),
    }
    chosen = [many.shape == place for place in range(len(SHAPES))]

    def small(values: NDArray[Any]) -> Any:
        return array(values.astype(np.int32)[:, :, None, None])

    inner, outer, tip, length, breadth = (
        small(np.select(chosen, [np.broadcast_to(parts[shape][part], radius.shape) for shape in SHAPES]))
        for part in range(5)
    )
    centres = array((SUBPIXELS_PER_PIXEL * np.arange(many.size) + SUBPIXELS_PER_PIXEL // 2).astype(np.int32))
    right, down = centres - small(many.x), centres[:, None] - small(many.y)
    aside, off = abs(right), abs(down)
    distance = right**2 + down**2
    inside = (distance >= inner) & (distance <= outer) & (2 * aside - down <= tip)
    bars = ((aside <= length) & (off <= breadth)) | ((aside <= breadth) & (off <= length))
    return inside & bars & array(many.present[:, :, None, None])


def _hash_to_24_bits(seed: Any, place: Any) -> Any:
    """Twenty-four bits that look random; all numbers stay below 2⁶³, so nothing overflows anywhere."""
    mixed = (place * 0x9E3779B1 + seed) & 0x7FFFFFFF
    for factor in (0x5BD1E995, 0x27D4EB2D):
        mixed = ((mixed ^ (mixed >> 15)) * factor) & 0x7FFFFFFF
    return (mixed ^ (mixed >> 13)) & 0xFFFFFF


def compute_boxes(masks: Any) -> tuple[Any, Any, Any, Any]:
    """Left, top, right and bottom of each mask, in pixels: the smallest box, right and bottom just outside of it."""
    columns, rows = masks.any(2), masks.any(3)
    left, top = ((side.cumsum(2) == 0).sum(2) for side in (columns, rows))
    return left, top, left + columns.sum(2), top + rows.sum(2)


# -- regions, as a detector would give them


@cache
def _make_feature_codes() -> Floats:
    """What each colour, shape and size adds to the features of a region; the last row is that of the ground."""
    rows = len(COLOURS) + len(SHAPES) + len(SIZES) + 1
    return np.random.default_rng(20).standard_normal((rows, FEATURE_SIZE)).astype(np.float32)


def sample_background_features(rng: np.random.Generator, *shape: int) -> Floats:
    """Features of background regions; they replace the features of an object to remove it."""
    noise = rng.standard_normal((*shape, FEATURE_SIZE), dtype=np.float32)
    return np.asarray(_make_feature_codes()[-1] + FEATURE_NOISE_STD * noise, dtype=np.float32)


def make_regions(rng: np.random.Generator, scenes_batch: Scenes) -> tuple[Floats, Floats, Integers]:
    """Features (rows × regions × FEATURES), boxes (corners as shares of the side), and the region of each object.

    The objects and, up to REGIONS, some boxes of mere ground, in random order.
    """
    rows, codes = len(scenes_batch), _make_feature_codes()
    parts = (scenes_batch.colour, len(COLOURS) + scenes_batch.shape, len(COLOURS) + len(SHAPES) + scenes_batch.large)
    noise = rng.standard_normal((rows, MAX_OBJECTS, FEATURE_SIZE), dtype=np.float32)
    objects = np.sum([codes[part] for part in parts], axis=0) + FEATURE_NOISE_STD * noise
    features = sample_background_features(rng, rows, NUM_REGIONS)
    features[:, :MAX_OBJECTS] = np.where(scenes_batch.present[:, :, None], objects, features[:, :MAX_OBJECTS])
    reach = rng.integers(
        int(RADIUS_FRACTIONS[0][0] * scenes_batch.size * SUBPIXELS_PER_PIXEL),
        int(RADIUS_FRACTIONS[1][1] * scenes_batch.size * SUBPIXELS_PER_PIXEL),
        (rows, NUM_REGIONS),
    )
    middle = reach + (
        rng.random((2, rows, NUM_REGIONS)) * (SUBPIXELS_PER_PIXEL * scenes_batch.size - 2 * reach)
    ).astype(np.int64)
    reach[:, :MAX_OBJECTS] = np.where(scenes_batch.present, _get_half_sides(scenes_batch), reach[:, :MAX_OBJECTS])
    for axis, own in enumerate((scenes_batch.x, scenes_batch.y)):
        middle[axis, :, :MAX_OBJECTS] = np.where(scenes_batch.present, own, middle[axis, :, :MAX_OBJECTS])
    corners = np.stack([*(middle - reach), *(middle + reach)], axis=2) / (SUBPIXELS_PER_PIXEL * scenes_batch.size)
    order = rng.permuted(np.tile(np.arange(NUM_REGIONS), (rows, 1)), axis=1)
    shuffled = [np.take_along_axis(values, order[:, :, None], axis=1) for values in (features, corners)]
    seen, where = (values.astype(np.float32) for values in shuffled)
    return seen, where, np.argsort(order, axis=1)[:, :MAX_OBJECTS]


def _get_half_sides(many: Scenes) -> Integers:
    return np.where(many.shape == SHAPES.index("square"), many.radius * 7 // 8, many.radius)


# -- single examples, for people and for the library's readers


@dataclass(frozen=True, kw_only=True, eq=False)
class ShapesExample(TextExample):
    """An image, a question about it (`text`), the answer (`label`) and its evidence.

    `evidence` are the words that carry the question; `objects` the objects that are the evidence in the image.

    pixels: height × width × 3, bytes; masks: objects × height × width; boxes: left, top, right, bottom in pixels;
    names: of the objects, such as "small red circle"; features, region_boxes: for models whose input is regions instead
    of pixels; regions: the region of each object; referent, anchor: the objects' parts in the question, or None
    """

    family: str
    pixels: NDArray[np.uint8]
    names: tuple[str, ...]
    masks: Booleans
    boxes: Integers
    objects: tuple[int, ...]
    referent: int | None
    anchor: int | None
    features: Floats
    region_boxes: Floats
    regions: tuple[int, ...]

    @property
    def image(self) -> Any:
        """The image as pillow has it."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    @property
    def evidence_regions(self) -> tuple[int, ...]:
        """Indices of the regions of the evidence, one per object."""
        return tuple(self.regions[place] for place in self.objects)

    @property
    def evidence_mask(self) -> Booleans:
        """The pixels of the evidence."""
        return np.asarray(self.masks[list(self.objects)].any(axis=0))


def find_covered_patches(mask: Any, patch_size: int) -> Any:
    """Which patches hold some of a mask (… × height × width)."""
    *rest, height, width = mask.shape
    return mask.reshape(*rest, height // patch_size, patch_size, width // patch_size, patch_size).any(-1).any(-2)


def make_examples(
    count: int, seed: int, split: str = "held-out", size: int = 64, families: Sequence[str] = FAMILIES
) -> list[ShapesExample]:
    """Questions about scenes, each with everything that is known about it."""
    unknown = sorted(set(families) - set(FAMILIES))
    if unknown:
        raise ValueError(f"there are no questions named {', '.join(unknown)}; there are: {', '.join(FAMILIES)}")
    rng = make_generator(seed, split)
    asked = sample_question_batch(rng, count, size, families)
    features, corners, region = make_regions(rng, asked.scenes)
    pictures, masks = render(asked.scenes)
    edges = np.stack(compute_boxes(masks), axis=2)
    made = []
    for row in range(count):
        question, scene = list_questions()[asked.question[row]], asked.scenes[row]
        seen = int(scene.present.sum())
        made.append(
            ShapesExample(
                id=f"shapes-{split}-{seed}-{row}",
                text=question.text,
                spans=question.spans,
                label=ANSWERS[asked.answer[row]],
                witnesses=(question.content_positions,),
                family=question.family,
                pixels=np.ascontiguousarray(pictures[row].transpose(1, 2, 0)).astype(np.uint8),
                names=tuple(
                    f"{SIZES[large]} {COLOURS[colour]} {SHAPES[shape]}"
                    for large, colour, shape in zip(
                        scene.large[:seen], scene.colour[:seen], scene.shape[:seen], strict=True
                    )
                ),
                masks=masks[row, :seen],
                boxes=edges[row, :seen],
                objects=tuple(int(place) for place in np.flatnonzero(asked.evidence[row])),
                referent=_none_if_negative(asked.referent[row]),
                anchor=_none_if_negative(asked.anchor[row]),
                features=features[row],
                region_boxes=corners[row],
                regions=tuple(int(place) for place in region[row, :seen]),
            )
        )
    return made


def make_example(seed: int = 0, family: str | None = None, size: int = 64) -> ShapesExample:
    """One ready example; family: one of FAMILIES, or any."""
    return make_examples(1, seed, size=size, families=FAMILIES if family is None else (family,))[0]


def _none_if_negative(place: np.int64) -> int | None:
    return int(place) if place >= 0 else None
