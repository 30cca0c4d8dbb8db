"""Units: the input features that receive scores, such as tokens, words, sentences and image patches.

`Units` describes the units of one stream, `UnitAxis` those along one axis of an attention matrix. Tokens are merged
into words and sentences by their character offsets in the text.
"""

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

#: The kind of a unit that is not an input: a learned query with which a model pools.
POOLING_QUERY = "probe"
#: The levels of text units, from small to large.
TEXT_LEVELS = ("token", "word", "sentence")
_ABBREVIATIONS = "".join(rf"(?<!\b{title})" for title in ("Mr", "Mrs", "Ms", "Dr", "Prof", "St", "vs"))
_SENTENCE_END_PATTERN = re.compile(
    rf"(?:[!?…]|{_ABBREVIATIONS}\.)[.!?…]*[\"'”’)\]]*(?=\s|$)|[。！？]+[\"'”’」』）]*|\n\s*\n"
)


@dataclass(frozen=True)
class Units:
    """The units of one input stream: what scores are assigned to.

    Attributes:
        stream: Name of the stream, e.g. "text" or "image".
        kind: "token", "word", "sentence", "patch", "region", "query", "frame" or another kind of unit.
        names: The name of each unit.
        special: Whether each unit is special, i.e. not part of the input, such as [CLS].
        texts: The input texts, one per segment.
        segments: The index of each unit's text in `texts`; all zero if None.
        offsets: Start and stop of each unit in its text, in characters.
        grid: Rows and columns of image patches.
        boxes: (left, top, right, bottom) of each unit, in fractions of the image; None for special units.
    """

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
        """Return the number of units, special ones included."""
        return len(self.names)

    @property
    def positions(self) -> Float[np.ndarray, "unit axis"]:
        """Coordinates of each unit: the fraction of the text before it, or (x, y) from the image centre (norm ≤ 1)."""
        if self.boxes is None:
            return (np.arange(len(self)) / max(len(self), 1))[:, None]
        centres = [((box[0] + box[2]) - 1, (box[1] + box[3]) - 1) if box else (1.0, 0.0) for box in self.boxes]
        return np.asarray(centres) / np.sqrt([2.0 if box else 1.0 for box in self.boxes])[:, None]

    def find_parents(self, level: str) -> "Int[np.ndarray, 'unit']":
        """Return for each unit the index of the word or sentence that it belongs to.

        Args:
            level: "word" or "sentence".

        Returns:
            One index per unit.

        Raises:
            InputError: If the units cannot be merged into that level.

        Example:
            >>> build_numbered_units(3, "text", names=["un", "##able", "to"]).find_parents("word")
            array([0, 0, 1])
        """
        return self.merge(level)[1]

    def merge(self, level: str) -> "tuple[Units, Int[np.ndarray, 'unit']]":
        """Merge text units into words or sentences. Special units stay separate.

        Args:
            level: "word" or "sentence".

        Returns:
            The larger units and, for each unit of this level, the index of the larger unit that it belongs to.

        Raises:
            InputError: If the units are not text, or not smaller than that level.

        Example:
            >>> units = build_numbered_units(3, "text", names=["un", "##believ", "##able"])
            >>> units.merge("word")[0].names
            ('unbelievable',)
        """
        if self.boxes is not None or self.kind not in TEXT_LEVELS:
            raise InputError(f"{pluralize_unit(self.kind)} cannot be merged into {level}s: only units of a text can")
        if level == self.kind:
            return self, np.arange(len(self))
        if level not in TEXT_LEVELS[1:] or self.kind in TEXT_LEVELS[TEXT_LEVELS.index(level) :]:
            raise InputError(
                f"{self.kind}s can only be merged into larger units ({' < '.join(TEXT_LEVELS)}), not into {level!r}"
            )
        if self.offsets is not None:
            parents = _group_by_offsets(self, level)
        else:
            parents = _group_by_token_markers(self.names, self.special, level)
        starts = [0, *(i for i in range(1, len(parents)) if parents[i] != parents[i - 1])]
        groups = [list(range(start, stop)) for start, stop in pairwise([*starts, len(self)])]
        index = np.empty(len(self), dtype=int)
        for group_index, group in enumerate(groups):
            index[group] = group_index
        return _merge_groups(self, level, groups), index

    def content_indices(self) -> Int[np.ndarray, "kept"]:
        """Return the indices of the units that are not special.

        Returns:
            Indices in ascending order; empty if all units are special.

        Example:
            >>> build_patch_units((1, 2), special_names=["[CLS]"]).content_indices()
            array([1, 2])
        """
        return np.flatnonzero(~np.asarray(self.special, dtype=bool))


def pluralize_unit(unit_kind: str) -> str:
    """Return the plural of a kind of unit, for messages.

    Args:
        unit_kind: A kind of unit, e.g. "token".

    Returns:
        The plural.

    Example:
        >>> pluralize_unit("patch"), pluralize_unit("word")
        ('patches', 'words')
    """
    return {"patch": "patches", "query": "queries"}.get(unit_kind, f"{unit_kind}s")


@dataclass(frozen=True)
class UnitAxis:
    """The units along one axis of an attention matrix, of one stream or of several that share a sequence.

    Attributes:
        unit_groups: The units of each stream.
        indices: For each group, the index of each of its units along the axis.
    """

    unit_groups: tuple[Units, ...]
    indices: tuple[tuple[int, ...], ...]

    @classmethod
    def concat(cls, *unit_groups: Units) -> "UnitAxis":
        """Concatenate the units of several streams along one axis.

        Args:
            *unit_groups: The units of each stream, in the order of the sequence.

        Returns:
            The axis.

        Example:
            >>> axis = UnitAxis.concat(build_numbered_units(2, "text"), build_numbered_units(3, "regions"))
            >>> axis.indices
            ((0, 1), (2, 3, 4))
        """
        ends = [0, *accumulate(len(units) for units in unit_groups)]
        return cls(unit_groups, tuple(tuple(range(start, stop)) for start, stop in pairwise(ends)))

    def __len__(self) -> int:
        """Return the length of the axis: the number of units of all streams along it."""
        return sum(map(len, self.unit_groups))

    @cached_property
    def indexers(self) -> "tuple[slice | list[int], ...]":
        """The indices of each group; as a slice where they are contiguous, since slicing copies nothing."""
        return tuple(map(_make_indexer, self.indices))

    @cached_property
    def special(self) -> tuple[bool, ...]:
        """Whether each unit of the axis is special."""
        if self.indexers == (slice(0, len(self)),):
            return self.unit_groups[0].special
        flags = [False] * len(self)
        for units, indices in zip(self.unit_groups, self.indices, strict=True):
            for i, flag in zip(indices, units.special, strict=True):
                flags[i] = flag
        return tuple(flags)

    @property
    def positions(self) -> Float[np.ndarray, "unit axis"]:
        """The position of each unit in its own stream, as in `Units.positions`."""
        group_positions = [units.positions for units in self.unit_groups]
        if self.indexers == (slice(0, len(self)),):
            return group_positions[0]
        positions = np.zeros((len(self), max(group.shape[1] for group in group_positions)))
        for group, indexer in zip(group_positions, self.indexers, strict=True):
            positions[indexer, : group.shape[1]] = group
        return positions


def _make_indexer(indices: tuple[int, ...]) -> slice | list[int]:
    """Return a slice if the indices are contiguous, since indexing with a slice copies nothing."""
    if not indices:
        return slice(0)
    contiguous = range(indices[0], indices[0] + len(indices))
    if indices == tuple(contiguous):
        return slice(contiguous.start, contiguous.stop)
    return list(indices)


def build_patch_units(grid: tuple[int, int], special_names: Sequence[str] = (), stream: str = "image") -> Units:
    """Build the units of an image: its patches row by row, after the model's special tokens.

    Args:
        grid: Rows and columns.
        special_names: Names of the special tokens in front.
        stream: Name of the stream.

    Returns:
        The units.

    Example:
        >>> build_patch_units((2, 3), special_names=["[CLS]"]).names
        ('[CLS]', '0,0', '0,1', '0,2', '1,0', '1,1', '1,2')
    """
    rows, columns = grid
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    boxes = [(c / columns, r / rows, (c + 1) / columns, (r + 1) / rows) for r, c in cells]
    return Units(
        stream=stream,
        kind="patch",
        names=(*special_names, *(f"{row},{column}" for row, column in cells)),
        special=(True,) * len(special_names) + (False,) * len(cells),
        grid=grid,
        boxes=(None,) * len(special_names) + tuple(boxes),
    )


def find_text_spans(text: str, level: str) -> list[Span]:
    """Find the words or sentences of a text.

    Args:
        text: The text.
        level: "word" or "sentence".

    Returns:
        Start and stop of each word or sentence, in characters.

    Raises:
        InputError: If the level is neither.

    Example:
        >>> [("Don't panic. Go!")[a:b] for a, b in find_text_spans("Don't panic. Go!", "word")]
        ["Don't", 'panic', '.', 'Go', '!']
        >>> [("Don't panic. Go!")[a:b] for a, b in find_text_spans("Don't panic. Go!", "sentence")]
        ["Don't panic.", 'Go!']
    """
    if level == "word":
        return [match.span() for match in _compile_word_pattern().finditer(text)]
    if level == "sentence":
        word_stops = {end: stop for start, stop in find_text_spans(text, "word") for end in range(start + 1, stop)}
        matches = _SENTENCE_END_PATTERN.finditer(text)
        ends = [word_stops.get(match.end(), match.end()) for match in matches]  # do not cut a word
        sentences = [_strip_span(text, start, stop) for start, stop in pairwise([0, *ends, len(text)])]
        return [span for span in sentences if span[0] < span[1]]
    raise InputError(f"units can be merged into words or sentences, not {level!r}")


@cache
def _compile_word_pattern() -> re.Pattern[str]:
    """Compile the pattern of a word: letters and digits (with apostrophes, hyphens), an ideograph or a repeated sign.

    Combining marks (accents, vowel signs, joiners) belong to the preceding character. Python's regular expressions have
    no class for marks, so the pattern lists them; it is compiled on first use.
    """
    marks = "".join(chr(i) for i in range(0x300, 0x1E950) if unicodedata.category(chr(i))[0] == "M")
    mark = f"[{marks}\U000e0100-\U000e01ef\u00ad\u200c\u200d\u2060]"
    ideographs = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
    run = rf"[^\W{ideographs}](?:[^\W{ideographs}]|{mark})*"
    number = r"(?<=\d)[.,](?=\d)"
    flag = "[\U0001f1e6-\U0001f1ff]{2}"
    sign = rf"([^\w\s])(?:\1|{mark}|[\U0001f3fb-\U0001f3ff]|(?<=\u200d)[^\w\s])*"
    return re.compile(rf"[{ideographs}]{mark}*|{run}(?:(?:['’\-]|{number}){run})*|{flag}|{sign}")


def _strip_span(text: str, start: int, stop: int) -> Span:
    """Shorten a span by the whitespace at its ends."""
    piece = text[start:stop]
    stop -= len(piece) - len(piece.rstrip())
    return min(start + len(piece) - len(piece.lstrip()), stop), stop


def _group_by_offsets(units: Units, level: str) -> list[object]:
    """Return a group key for each token: the word that holds its characters.

    A token of white space belongs to the following word. A token that covers several words joins them: no token is
    ever split.
    """
    assert units.offsets is not None
    ends = [[stop for _, stop in find_text_spans(text, level)] for text in units.texts]
    segments = units.segments or (0,) * len(units)
    parents: list[object] = []
    reached = [-1] * len(units.texts)  # last word that earlier tokens cover, by text
    current = [-1] * len(units.texts)  # first word of the current group, by text
    for i, (segment, span) in enumerate(zip(segments, units.offsets, strict=True)):
        if units.special[i]:
            parents.append(("special", i))
            continue
        start, stop = _strip_span(units.texts[segment], *span)
        is_blank = start >= stop
        last = len(ends[segment]) - 1
        first = min(bisect_right(ends[segment], span[0] if is_blank else start), last)
        if first > reached[segment]:
            current[segment] = first
        reached[segment] = max(reached[segment], first, min(bisect_right(ends[segment], stop - 1), last))
        parents.append((segment, current[segment]))
    return parents


def _group_by_token_markers(names: Sequence[str], special: Sequence[bool], level: str) -> list[object]:
    """Return a group key for each token without offsets, by the tokenizer's markers (## continues; Ġ and ▁ begin)."""
    if level != "word":
        raise InputError("merging into sentences needs the text: pass the text instead of model inputs")
    marks_beginnings = any(name.startswith(("Ġ", "▁")) for name in names)
    parents: list[object] = []
    for i, name in enumerate(names):
        if marks_beginnings:
            continues = not name.startswith(("Ġ", "▁"))
        else:
            continues = name.startswith("##")
        if continues and i > 0 and not special[i] and not special[i - 1]:
            parents.append(parents[-1])
        else:
            parents.append(i)
    return parents


def _merge_groups(units: Units, level: str, groups: list[list[int]]) -> Units:
    """Build the larger units of groups of token indices."""
    first_indices = [group[0] for group in groups]
    special = tuple(units.special[i] for i in first_indices)
    if units.offsets is None:
        names = ["".join(units.names[i].removeprefix("##").lstrip("Ġ▁") for i in group) for group in groups]
        return replace(units, kind=level, names=tuple(names), special=special)
    segments = units.segments or (0,) * len(units)
    spans = [(min(units.offsets[i][0] for i in g), max(units.offsets[i][1] for i in g)) for g in groups]
    names = []
    for group_index, first in enumerate(first_indices):
        if units.special[first]:
            names.append(units.names[first])
            continue
        text = units.texts[segments[first]]
        limit = len(text)
        if group_index + 1 < len(groups):
            following = first_indices[group_index + 1]
            if not units.special[following] and segments[following] == segments[first]:
                limit = units.offsets[following][0]
        spans[group_index] = _extend_span(text, *spans[group_index], limit)
        start, stop = spans[group_index]
        names.append(text[start:stop])
    return replace(
        units,
        kind=level,
        names=tuple(names),
        special=special,
        segments=tuple(segments[i] for i in first_indices),
        offsets=tuple(spans),
    )


def _extend_span(text: str, start: int, stop: int, limit: int) -> Span:
    """Strip white space, and append combining marks and control characters that the tokenizer dropped."""
    start, stop = _strip_span(text, start, stop)
    while stop < limit and not text[stop].isspace() and unicodedata.category(text[stop])[0] in "MC":
        stop += 1
    return start, stop


def align_pieces(pieces: Sequence[str], text: str) -> tuple[Span, ...] | None:
    """Find the character span of each subword token, for tokenizers without offsets.

    Args:
        pieces: The tokens in order, without markers.
        text: The text; it may differ from the tokens in case, accents and width.

    Returns:
        Start and stop of each token, or None if the alignment is ambiguous.

    Example:
        >>> align_pieces(["He", "llo", "<unk>", "."], "hello café.")
        ((0, 2), (2, 5), (6, 10), (10, 11))
    """
    folded = [(_normalise_text(sign), index) for index, sign in enumerate(text)]
    characters = "".join(sign for sign, _ in folded)
    origin = [index for sign, index in folded for _ in sign] + [len(text)]
    spans: list[Span | None] = []
    cursor = 0
    for piece in pieces:
        surface = _normalise_text(piece).strip()
        start = characters.find(surface, cursor) if surface else cursor
        skips_nothing = start >= 0 and not characters[cursor:start].strip()
        follows_unknown = start >= 0 and bool(spans) and spans[-1] is None
        if skips_nothing or follows_unknown:
            cursor = start + len(surface)
            spans.append((start, cursor))
        else:
            spans.append(None)
    for index, span in enumerate(spans):  # an unknown token covers the text between its neighbours
        if span is None:
            previous = spans[index - 1] if index else (0, 0)
            following = spans[index + 1] if index + 1 < len(spans) else (len(characters), 0)
            if previous is None or following is None:
                return None
            spans[index] = _strip_span(characters, previous[1], following[0])
    aligned = [span for span in spans if span is not None]
    if any(characters[a[1] : b[0]].strip() for a, b in pairwise([(0, 0), *aligned, (len(characters), 0)])):
        return None
    return tuple((origin[start], origin[stop - 1] + 1 if stop > start else origin[start]) for start, stop in aligned)


def _normalise_text(text: str) -> str:
    """Remove case, accents and width variants."""
    return "".join(sign for sign in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(sign))


def build_numbered_units(
    count: int, stream: str, names: Sequence[str] | None = None, special: Sequence[bool] = ()
) -> Units:
    """Build the units of model inputs given without a text: numbered, or named by the caller.

    Args:
        count: Number of units.
        stream: Name of the stream.
        names: Names of the units. Default: their indices.
        special: Whether each unit is special. Default: none is.

    Returns:
        The units.

    Raises:
        InputError: If the number of names is wrong.

    Example:
        >>> build_numbered_units(3, "text").names
        ('0', '1', '2')
    """
    if names is not None and len(names) != count:
        raise InputError(f"tokens= names {len(names)} units, but the input has {count}")
    if names is None:
        names = _make_number_names(count)
    return Units(
        stream=stream,
        kind="token",
        names=tuple(names),
        special=tuple(special) or (False,) * count,
    )


@lru_cache(maxsize=8)
def _make_number_names(count: int) -> tuple[str, ...]:
    """Names "0", "1", …; cached because all inputs of a batch share them."""
    return tuple(map(str, range(count)))
