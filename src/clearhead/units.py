"""One coordinate system for what gets a score: tokens, words and sentences of texts, patches of a picture."""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np
from jaxtyping import Float, Int

from clearhead.errors import InputError

Span = tuple[int, int]
Box = tuple[float, float, float, float]

#: The kind of a unit that is no input: a learned query with which a model pools.
PROBE = "probe"
#: The levels of a text, from small to large.
LEVELS = ("token", "word", "sentence")
_TITLES = "".join(rf"(?<!\b{title})" for title in ("Mr", "Mrs", "Ms", "Dr", "Prof", "St", "vs"))
_SENTENCE_END = re.compile(rf"(?:[!?…]|{_TITLES}\.)[.!?…]*[\"'”’)\]]*(?=\s|$)|[。！？]+[\"'”’」』）]*|\n\s*\n")


@dataclass(frozen=True)
class Units:
    """The pieces of one stream. `offsets` are characters of `texts[segment]`; `boxes` are fractions of the picture."""

    stream: str
    kind: str
    names: tuple[str, ...]
    special: tuple[bool, ...]
    texts: tuple[str, ...] = ()
    segments: tuple[int, ...] | None = None
    offsets: tuple[Span, ...] | None = None
    grid: tuple[int, int] | None = None
    boxes: tuple[Box | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def places(self) -> Float[np.ndarray, "unit axis"]:
        """Where each unit lies: 0 is the start of a text or the middle of a picture, 1 its end or edge."""
        if self.boxes is None:
            return (np.arange(len(self)) / max(len(self), 1))[:, None]
        middle = [((b[0] + b[2]) - 1, (b[1] + b[3]) - 1) if b else (1.0, 0.0) for b in self.boxes]
        return np.asarray(middle) / np.sqrt([2.0 if b else 1.0 for b in self.boxes])[:, None]

    def parents(self, kind: str) -> "Int[np.ndarray, 'unit']":
        """For each unit, the index of the word or sentence that it belongs to."""
        return self.merged(kind)[1]

    def merged(self, kind: str) -> "tuple[Units, Int[np.ndarray, 'unit']]":
        """Larger units and, for each unit of this level, the index of the one it belongs to.

        Special units stay by themselves.
        """
        if self.boxes is not None or self.kind not in LEVELS:
            raise InputError(f"these units are {plural(self.kind)}, not {kind}s")
        if kind == self.kind:
            return self, np.arange(len(self))
        if kind not in LEVELS[1:] or self.kind in LEVELS[LEVELS.index(kind) :]:
            raise InputError(f"{self.kind}s can be merged into larger units ({', '.join(LEVELS)}), not into {kind!r}")
        parents = _by_characters(self, kind) if self.offsets is not None else _by_marks(self.names, self.special, kind)
        starts = [0, *(i for i in range(1, len(parents)) if parents[i] != parents[i - 1])]
        groups = [list(range(start, stop)) for start, stop in pairwise([*starts, len(self)])]
        index = np.empty(len(self), dtype=int)
        for place, group in enumerate(groups):
            index[group] = place
        return _joined(self, kind, groups), index

    def drop_special(self) -> Int[np.ndarray, "kept"]:
        """Indices of the units that are not special."""
        return np.flatnonzero(~np.asarray(self.special, dtype=bool))


def plural(kind: str) -> str:
    """
    >>> plural("patch"), plural("word")
    ('patches', 'words')
    """
    return {"patch": "patches", "query": "queries"}.get(kind, f"{kind}s")


@dataclass(frozen=True)
class Axis:
    """The units along one axis of attention: those of one stream, or of several that share one sequence."""

    parts: tuple[Units, ...]
    at: tuple[tuple[int, ...], ...]  # where the units of each part stand

    @classmethod
    def of(cls, *parts: Units) -> "Axis":
        """Parts that follow each other.

        >>> axis = Axis.of(numbered(2, "text"), numbered(3, "regions"))
        >>> axis.at
        ((0, 1), (2, 3, 4))
        """
        ends = [0, *accumulate(len(part) for part in parts)]
        return cls(parts, tuple(tuple(range(start, stop)) for start, stop in pairwise(ends)))

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @cached_property
    def where(self) -> "tuple[slice | list[int], ...]":
        """Where the units of each part stand: as a slice, where they follow each other, since that takes no reading."""
        spans = [slice(at[0], at[0] + len(at)) if at else slice(0) for at in self.at]
        pairs = zip(self.at, spans, strict=True)
        return tuple(span if at == tuple(range(span.stop)[span]) else list(at) for at, span in pairs)

    @cached_property
    def special(self) -> tuple[bool, ...]:
        if self.where == (slice(0, len(self)),):
            return self.parts[0].special
        flags = [False] * len(self)
        for part, at in zip(self.parts, self.at, strict=True):
            for place, flag in zip(at, part.special, strict=True):
                flags[place] = flag
        return tuple(flags)

    @property
    def places(self) -> Float[np.ndarray, "unit axis"]:
        """Where each unit lies in its own stream."""
        own = [part.places for part in self.parts]
        if self.where == (slice(0, len(self)),):
            return own[0]
        places = np.zeros((len(self), max(part.shape[1] for part in own)))
        for part, at in zip(own, self.where, strict=True):
            places[at, : part.shape[1]] = part
        return places


def patches(grid: tuple[int, int], before: Sequence[str] = (), stream: str = "image") -> Units:
    """The patches of a picture in rows, after the model's special tokens.

    >>> patches((2, 3), before=["[CLS]"]).names
    ('[CLS]', '0,0', '0,1', '0,2', '1,0', '1,1', '1,2')
    """
    rows, columns = grid
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    boxes = [(c / columns, r / rows, (c + 1) / columns, (r + 1) / rows) for r, c in cells]
    return Units(
        stream=stream,
        kind="patch",
        names=(*before, *(f"{row},{column}" for row, column in cells)),
        special=(True,) * len(before) + (False,) * len(cells),
        grid=grid,
        boxes=(None,) * len(before) + tuple(boxes),
    )


def spans(text: str, kind: str) -> list[Span]:
    """Where the words or sentences of a text lie.

    >>> [("Don't panic. Go!")[a:b] for a, b in spans("Don't panic. Go!", "word")]
    ["Don't", 'panic', '.', 'Go', '!']
    >>> [("Don't panic. Go!")[a:b] for a, b in spans("Don't panic. Go!", "sentence")]
    ["Don't panic.", 'Go!']
    """
    if kind == "word":
        return [match.span() for match in _word_pattern().finditer(text)]
    if kind == "sentence":
        inside = {end: stop for start, stop in spans(text, "word") for end in range(start + 1, stop)}
        ends = [inside.get(match.end(), match.end()) for match in _SENTENCE_END.finditer(text)]  # no word is cut
        found = [_trimmed(text, start, stop) for start, stop in pairwise([0, *ends, len(text)])]
        return [span for span in found if span[0] < span[1]]
    raise InputError(f"units can be merged into words or sentences, not {kind!r}")


@cache
def _word_pattern() -> re.Pattern[str]:
    """A word is a run of letters and digits (apostrophes and hyphens inside), one ideograph, or a sign (repeated).

    Marks (accents, vowel signs, joiners) belong to what stands before them. Built when first used: Python's
    expressions have no class for marks.
    """
    marks = "".join(chr(i) for i in range(0x300, 0x1E950) if unicodedata.category(chr(i))[0] == "M")
    mark = f"[{marks}\U000e0100-\U000e01ef\u00ad\u200c\u200d\u2060]"
    ideographs = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
    run = rf"[^\W{ideographs}](?:[^\W{ideographs}]|{mark})*"
    number = r"(?<=\d)[.,](?=\d)"
    flag = "[\U0001f1e6-\U0001f1ff]{2}"
    sign = rf"([^\w\s])(?:\1|{mark}|[\U0001f3fb-\U0001f3ff]|(?<=\u200d)[^\w\s])*"
    return re.compile(rf"[{ideographs}]{mark}*|{run}(?:(?:['’\-]|{number}){run})*|{flag}|{sign}")


def _trimmed(text: str, start: int, stop: int) -> Span:
    piece = text[start:stop]
    stop -= len(piece) - len(piece.rstrip())
    return min(start + len(piece) - len(piece.lstrip()), stop), stop


def _by_characters(units: Units, kind: str) -> list[object]:
    """A token belongs to the word that holds its characters; one of white space alone to the word that follows.

    A token that covers several words makes one of them: no token is ever split.
    """
    assert units.offsets is not None
    ends = [[stop for _, stop in spans(text, kind)] for text in units.texts]
    segments = units.segments or (0,) * len(units)
    parents: list[object] = []
    reached = [-1] * len(units.texts)  # how far the tokens before came, and the word that they began
    current = [-1] * len(units.texts)
    for place, (segment, span) in enumerate(zip(segments, units.offsets, strict=True)):
        if units.special[place]:
            parents.append(("special", place))
            continue
        start, stop = _trimmed(units.texts[segment], *span)
        last = len(ends[segment]) - 1
        first = min(bisect_right(ends[segment], start if start < stop else span[0]), last)
        if first > reached[segment]:
            current[segment] = first
        reached[segment] = max(reached[segment], first, min(bisect_right(ends[segment], stop - 1), last))
        parents.append((segment, current[segment]))
    return parents


def _by_marks(names: Sequence[str], special: Sequence[bool], kind: str) -> list[object]:
    """Without offsets the tokenizer's own marks say where a word begins (## continues; Ġ and ▁ begin)."""
    if kind != "word":
        raise InputError("sentences need the text; give the text instead of model inputs")
    begins = any(name.startswith(("Ġ", "▁")) for name in names)
    parents: list[object] = []
    for place, name in enumerate(names):
        continues = not name.startswith(("Ġ", "▁")) if begins else name.startswith("##")
        alone = not parents or special[place] or special[place - 1]
        parents.append(parents[-1] if continues and not alone else place)
    return parents


def _joined(units: Units, kind: str, groups: list[list[int]]) -> Units:
    if units.offsets is None:
        names = ["".join(units.names[i].removeprefix("##").lstrip("Ġ▁") for i in group) for group in groups]
        return replace(units, kind=kind, names=tuple(names), special=tuple(units.special[g[0]] for g in groups))
    segments = units.segments or (0,) * len(units)
    offsets = [(min(units.offsets[i][0] for i in g), max(units.offsets[i][1] for i in g)) for g in groups]
    for place, g in enumerate(groups):
        if not units.special[g[0]]:
            text = units.texts[segments[g[0]]]
            after = groups[place + 1][0] if place + 1 < len(groups) else g[0]
            same = after > g[0] and not units.special[after] and segments[after] == segments[g[0]]
            offsets[place] = _extent(text, *offsets[place], units.offsets[after][0] if same else len(text))
    names = [
        units.names[g[0]] if units.special[g[0]] else units.texts[segments[g[0]]][span[0] : span[1]]
        for g, span in zip(groups, offsets, strict=True)
    ]
    return replace(
        units,
        kind=kind,
        names=tuple(names),
        special=tuple(units.special[g[0]] for g in groups),
        segments=tuple(segments[g[0]] for g in groups),
        offsets=tuple(offsets),
    )


def _extent(text: str, start: int, stop: int, limit: int) -> Span:
    """Without the white space around, and with the marks and control characters that a tokenizer dropped after it."""
    start, stop = _trimmed(text, start, stop)
    while stop < limit and not text[stop].isspace() and unicodedata.category(text[stop])[0] in "MC":
        stop += 1
    return start, stop


def located(pieces: Sequence[str], text: str) -> tuple[Span, ...] | None:
    """Where each piece lies in the text, for tokenizers that do not say; None if that cannot be told for sure.

    >>> located(["He", "llo", "<unk>", "."], "hello café.")
    ((0, 2), (2, 5), (6, 10), (10, 11))
    """
    folded = [(_folded(sign), place) for place, sign in enumerate(text)]
    characters = "".join(sign for sign, _ in folded)
    origin = [place for sign, place in folded for _ in sign] + [len(text)]
    found: list[Span | None] = []
    cursor = 0
    for piece in pieces:
        surface = _folded(piece).strip()
        start = characters.find(surface, cursor) if surface else cursor
        known = start >= 0 and (not characters[cursor:start].strip() or (found and found[-1] is None))
        found.append((start, start + len(surface)) if known else None)
        cursor = start + len(surface) if known else cursor
    for place, span in enumerate(found):  # what lies between its neighbours is an unknown piece's
        if span is None:
            before = found[place - 1] if place else (0, 0)
            after = found[place + 1] if place + 1 < len(found) else (len(characters), 0)
            if before is None or after is None:
                return None
            found[place] = _trimmed(characters, before[1], after[0])
    whole = [span for span in found if span is not None]
    if any(characters[a[1] : b[0]].strip() for a, b in pairwise([(0, 0), *whole, (len(characters), 0)])):
        return None
    return tuple((origin[start], origin[stop - 1] + 1 if stop > start else origin[start]) for start, stop in whole)


def _folded(text: str) -> str:
    """Case, accents and widths set aside."""
    return "".join(sign for sign in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(sign))


def numbered(count: int, stream: str, names: Sequence[str] | None = None, special: Sequence[bool] = ()) -> Units:
    """Units of model inputs that came without a text: numbered, or named by the caller."""
    if names is not None and len(names) != count:
        raise InputError(f"tokens= names {len(names)} units, but the input has {count}")
    return Units(
        stream=stream,
        kind="token",
        names=_numerals(count) if names is None else tuple(names),
        special=tuple(special) or (False,) * count,
    )


@lru_cache(maxsize=8)
def _numerals(count: int) -> tuple[str, ...]:
    """Inputs of a batch have the same."""
    return tuple(map(str, range(count)))
