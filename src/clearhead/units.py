"""One coordinate system for what gets a score: tokens, words and sentences of texts, patches of a picture."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from clearhead.errors import InputError

Span = tuple[int, int]
Box = tuple[float, float, float, float]

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# A word is a run of letters and digits (apostrophes and hyphens inside), one ideograph, or one sign.
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+(?:['’\-][^\W{_CJK}]+)*|[^\w\s]")
_SENTENCE_END = re.compile(r"[.!?…。！？]+[\"'”’)\]]*(?=\s|$)|\n{2,}")


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

    def merged(self, kind: str) -> "tuple[Units, Int[np.ndarray, 'unit']]":
        """Larger units and, for each unit of this level, the index of the one it belongs to.

        Special units stay by themselves.
        """
        if self.boxes is not None:
            raise InputError(f"a picture has patches, not {kind}s")
        if kind == self.kind:
            return self, np.arange(len(self))
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
        return [match.span() for match in _WORD.finditer(text)]
    if kind == "sentence":
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        found = [_trimmed(text, start, stop) for start, stop in pairwise([0, *ends, len(text)])]
        return [span for span in found if span[0] < span[1]]
    raise InputError(f"units can be merged into words or sentences, not {kind!r}")


def _trimmed(text: str, start: int, stop: int) -> Span:
    piece = text[start:stop]
    return start + len(piece) - len(piece.lstrip()), stop - (len(piece) - len(piece.rstrip()))


def _by_characters(units: Units, kind: str) -> list[object]:
    """A token belongs to the word that holds its first visible character; one of white space alone to the next word."""
    assert units.offsets is not None
    ends = [[stop for _, stop in spans(text, kind)] for text in units.texts]
    segments = units.segments or (0,) * len(units)
    parents: list[object] = []
    for place, (segment, (start, stop)) in enumerate(zip(segments, units.offsets, strict=True)):
        if units.special[place]:
            parents.append(("special", place))
            continue
        text = units.texts[segment]
        start += len(text[start:stop]) - len(text[start:stop].lstrip())
        parents.append((segment, min(bisect_right(ends[segment], start), len(ends[segment]) - 1)))
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
    offsets = [(units.offsets[g[0]][0], max(units.offsets[i][1] for i in g)) for g in groups]
    offsets = [
        span if units.special[g[0]] else _trimmed(units.texts[segments[g[0]]], *span)
        for g, span in zip(groups, offsets, strict=True)
    ]
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


def numbered(count: int, stream: str, names: Sequence[str] | None = None, special: Sequence[bool] = ()) -> Units:
    """Units of model inputs that came without a text: numbered, or named by the caller."""
    if names is not None and len(names) != count:
        raise InputError(f"tokens= names {len(names)} units, but the input has {count}")
    return Units(
        stream=stream,
        kind="token",
        names=tuple(names) if names is not None else tuple(str(place) for place in range(count)),
        special=tuple(special) or (False,) * count,
    )
