"""One small interface: an example is an id, an input, a label and its evidence; a data set is a row of examples."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.bench.data.evidence import Piece
    from clearhead.bench.zero_shot import Captions

#: An index into the data set's labels, or answers with their scores (VQA); None where the label is not given away.
Label = int | Mapping[str, float] | None


@dataclass(frozen=True)
class Example:
    """One input. `input` is what `Explainer.explain` takes: a text, a pair, a picture, or `text` and `image` by name.

    `evidence` holds alternative sets, each enough by itself; None says that nobody marked any. What is `aside` (the
    words that ask) is neither evidence nor its contrary. `streams` are those that the evidence lies in, where a model
    has others, too. `target` is what to explain where the label is not it, `answer` what a language model is to say.
    """

    id: str
    input: Any
    label: Label = None
    evidence: "tuple[tuple[Piece, ...], ...] | None" = None
    aside: "tuple[Piece, ...]" = ()
    streams: tuple[str, ...] = ()
    target: Any = None
    answer: str | None = None
    #: The captions among which a dual encoder chooses; the one that is explained is in the input already.
    among: "Captions | None" = None


def _alone(split: str) -> "DataSet":
    raise InputError(f"this data set was made by hand: it cannot be opened again for the split {split!r}")


@dataclass(frozen=True, eq=False)
class DataSet(Sequence[Example]):
    """One split of a data set, read when it is needed.

    `rows` is called once, at the first use, for all that must be known beforehand (lines, file names, offsets);
    `example` makes one row into an example (opens its picture, finds its evidence). Order is always the same.

    >>> data = DataSet("mine", "all", "CC0", ("bad", "good"), lambda: ["so so", "good"], lambda row: Example(row, row))
    >>> len(data), data[1].input, [example.id for example in data[:1]]
    (2, 'good', ['so so'])
    """

    name: str
    split: str
    licence: str
    labels: tuple[str, ...]
    rows: Callable[[], Sequence[Any]]
    example: Callable[[Any], Example]
    splits: tuple[str, ...] = ()
    reopen: "Callable[[str], DataSet]" = _alone
    chosen: tuple[int, ...] | None = None
    #: Whether labels are names that were found in the data, and their numbers no more than their order in the alphabet.
    by_alphabet: bool = False

    @cached_property
    def _rows(self) -> Sequence[Any]:
        return self.rows()

    def __getstate__(self) -> dict[str, Any]:
        """Another process reads the rows for itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __len__(self) -> int:
        return len(self._rows) if self.chosen is None else len(self.chosen)

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> "DataSet": ...
    def __getitem__(self, place: "int | slice") -> "Example | DataSet":
        if isinstance(place, slice):
            return self.select(range(len(self))[place])
        if not -len(self) <= place < len(self):
            raise IndexError(f"{self.name}, {self.split}: there is no example {place} of {len(self)}")
        place %= len(self)
        return self.example(self._rows[place if self.chosen is None else self.chosen[place]])

    def __iter__(self) -> Iterator[Example]:
        return (self[place] for place in range(len(self)))

    def select(self, places: Iterable[int]) -> "DataSet":
        """The examples at these places, in this order."""
        size = len(self)
        wanted = list(places)
        for place in wanted:
            if not -size <= place < size:
                raise InputError(f"{self.name}, {self.split}: there is no example {place}, it has {size}")
        old = self.chosen
        chosen = tuple(place % size if old is None else old[place] for place in wanted)
        new = replace(self, chosen=chosen)
        new.__dict__["_rows"] = self._rows
        return new

    def other(self, split: str) -> "DataSet":
        """Another split of the same data, all of it."""
        return self.reopen(split)

    def label_name(self, label: Label) -> str:
        """A label in words; of several answers the best.

        >>> DataSet("mine", "all", "CC0", ("bad", "good"), list, Example).label_name(1)
        'good'
        """
        if label is None:
            return ""
        if isinstance(label, Mapping):
            return max(label, key=lambda answer: label[answer], default="")
        return self.labels[label] if label < len(self.labels) else str(label)
