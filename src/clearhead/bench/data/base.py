"""Benchmark data: an `Example` is an input with its label and evidence; a `BenchmarkDataset` is a sequence of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.bench.data.evidence import EvidenceItem
    from clearhead.bench.zero_shot import ZeroShotClasses

#: An index into the data set's labels, or answers with their scores (VQA); None if the label is not published.
ExampleLabel = int | Mapping[str, float] | None


@dataclass(frozen=True)
class Example:
    """One labelled input with its ground-truth evidence.

    Attributes:
        id: Unique name within the data set.
        input: Input for `Explainer.explain`: a text, a pair, an image, or a dict with `text` and `image`.
        label: The true class.
        evidence: Alternative sets of evidence, each sufficient by itself; None if the input is not annotated.
        excluded: Parts of the input that count neither as evidence nor as other input (the words of the question).
        streams: Streams that contain the evidence, if the model has others too.
        target: What to explain, if it is not the label.
        continuation: Text that a generative model is given as its output.
        zero_shot_classes: Captions among which a dual encoder chooses; the explained caption is part of the input.
    """

    id: str
    input: Any
    label: ExampleLabel = None
    evidence: "tuple[tuple[EvidenceItem, ...], ...] | None" = None
    excluded: "tuple[EvidenceItem, ...]" = ()
    streams: tuple[str, ...] = ()
    target: Any = None
    continuation: str | None = None
    zero_shot_classes: "ZeroShotClasses | None" = None


def _refuse_reopening(split: str) -> "BenchmarkDataset":
    """Raise `InputError`: the default `open_other_split` of a data set that was created in Python."""
    raise InputError(f"this data set was created in Python, so it cannot be reopened for the split {split!r}")


@dataclass(frozen=True, eq=False)
class BenchmarkDataset(Sequence[Example]):
    """One split of a data set, loaded lazily; the order of its examples is deterministic.

    Attributes:
        name: Name of the data set.
        split: Name of the split.
        licence: Licence of the data, in words.
        labels: Names of the classes.
        load_rows: Called once, on first use: returns everything that must be known in advance (lines, file names).
        make_example: Turns one row into an example (opens its image, locates its evidence).
        splits: Names of all available splits.
        open_other_split: Opens another split of the same data.
        indices: Selected rows, or None for all.
        label_ids_are_arbitrary: True if label ids were assigned alphabetically and carry no meaning.

    Example:
        >>> rows = ["so so", "good"]
        >>> data = BenchmarkDataset("mine", "all", "CC0", ("bad", "good"), lambda: rows, lambda row: Example(row, row))
        >>> len(data), data[1].input, [example.id for example in data[:1]]
        (2, 'good', ['so so'])
    """

    name: str
    split: str
    licence: str
    labels: tuple[str, ...]
    load_rows: Callable[[], Sequence[Any]]
    make_example: Callable[[Any], Example]
    splits: tuple[str, ...] = ()
    open_other_split: "Callable[[str], BenchmarkDataset]" = _refuse_reopening
    indices: tuple[int, ...] | None = None
    label_ids_are_arbitrary: bool = False

    @cached_property
    def _rows(self) -> Sequence[Any]:
        """Rows of all examples, loaded at first use; `__getstate__` leaves them out of pickles."""
        return self.load_rows()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the rows: another process loads them itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __len__(self) -> int:
        """Return the number of selected examples; loads the rows, but opens no image."""
        return len(self._rows) if self.indices is None else len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> "BenchmarkDataset": ...
    def __getitem__(self, index: "int | slice") -> "Example | BenchmarkDataset":
        """Return one example, or the data set of a slice of them.

        Args:
            index: Index of an example, negative from the end, or a slice.

        Returns:
            The example, with its image opened; for a slice a `BenchmarkDataset`, which opens nothing.

        Raises:
            IndexError: If there is no such example.
        """
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"{self.name}, {self.split}: there is no example {index}; the split has {len(self)} examples"
            )
        index %= len(self)
        return self.make_example(self._rows[index if self.indices is None else self.indices[index]])

    def __iter__(self) -> Iterator[Example]:
        """Iterate over the examples; each is made when it is reached."""
        return (self[index] for index in range(len(self)))

    def select(self, indices: Iterable[int]) -> "BenchmarkDataset":
        """Return a data set of the examples at these indices, in this order.

        Args:
            indices: Indices of examples; negative ones count from the end.

        Returns:
            The selected examples.

        Raises:
            InputError: If an index is out of range.

        Example:
            >>> rows = ["so so", "good", "bad"]
            >>> data = BenchmarkDataset("mine", "all", "CC0", ("bad", "good"), lambda: rows, lambda t: Example(t, t))
            >>> [example.id for example in data.select([2, 0])]
            ['bad', 'so so']
        """
        size = len(self)
        selected = list(indices)
        for index in selected:
            if not -size <= index < size:
                raise InputError(
                    f"{self.name}, {self.split}: there is no example {index}; the split has {size} examples"
                )
        row_indices = self.indices or range(size)
        subset = replace(self, indices=tuple(row_indices[index % size] for index in selected))
        subset.__dict__["_rows"] = self._rows
        return subset

    def with_split(self, split: str) -> "BenchmarkDataset":
        """Open another split of the same data, with all its examples.

        Args:
            split: Name of the split.

        Returns:
            The other split.

        Raises:
            InputError: If the split is unknown, or the data set was created by hand.

        Example:
            >>> load_benchmark_dataset("pets", "test").with_split("train")  # doctest: +SKIP
        """
        return self.open_other_split(split)

    def label_name(self, label: ExampleLabel) -> str:
        """Return the name of a label; for answers with scores, the best answer.

        Args:
            label: A label of one of the examples.

        Returns:
            The name, or an empty string without a label.

        Example:
            >>> BenchmarkDataset("mine", "all", "CC0", ("bad", "good"), list, Example).label_name(1)
            'good'
        """
        if label is None:
            return ""
        if isinstance(label, Mapping):
            return max(label, key=lambda answer: label[answer], default="")
        return self.labels[label] if label < len(self.labels) else str(label)
