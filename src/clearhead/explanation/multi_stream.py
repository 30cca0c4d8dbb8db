"""`MultiStreamExplanation`: the explanation of a model with several inputs, such as an image and a text.

In encoder–decoders the streams are the source and the tokens generated so far.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from clearhead.data.atomic_file import atomic_write
from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.display import DisplayMixin
from clearhead.explanation.explanation import MULTI_STREAM_SCHEMA, Explanation, explanation_from_arrays
from clearhead.explanation.validation import check_format
from clearhead.units import TEXT_LEVELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from clearhead.explanation.regions import RegionSpec

MULTI_STREAM_VERSION = 2


class MultiStreamExplanation(DisplayMixin):
    """Explanation of an input with several streams: `e["text"]`, `e["image"]`.

    Holds one `Explanation` per stream. Target, prediction, provenance and the certificate except for its warnings are
    common to all of them.

    Attributes:
        by_stream: The explanations by stream.

    Args:
        by_stream: The explanation of each stream, by name. At least one.

    Example:
        >>> e = ex.explain(text="two cats", image="cats.jpg")  # doctest: +SKIP
        >>> e["text"].top(3), e["image"].heat_map()  # doctest: +SKIP
    """

    def __init__(self, by_stream: Mapping[str, Explanation]) -> None:
        self.by_stream = dict(by_stream)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, such as ("text", "image"), in the order of iteration."""
        return tuple(self.by_stream)

    def __getitem__(self, stream: str) -> Explanation:
        """Return the explanation of one stream.

        Args:
            stream: Name of the stream, see `streams`.

        Returns:
            Its explanation, with the units and scores of that input.

        Raises:
            InputError: If there is no such stream.

        Example:
            >>> e["image"].heat_map()  # doctest: +SKIP
        """
        if stream not in self.by_stream:
            raise unknown_value_error("stream", stream, self.by_stream)
        return self.by_stream[stream]

    def __iter__(self) -> Iterator[Explanation]:
        """Iterate over the explanations of the streams; over their names with `streams`."""
        return iter(self.by_stream.values())

    def __len__(self) -> int:
        """Return the number of units of all streams together; of streams with `len(e.streams)`."""
        return sum(map(len, self))

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same streams with equal explanations."""
        if not isinstance(other, MultiStreamExplanation):
            return NotImplemented
        return self.by_stream == other.by_stream

    __hash__ = None  # type: ignore[assignment]

    @property
    def _first_stream(self) -> Explanation:
        """The first stream, which stands for fields that are equal in all streams."""
        return next(iter(self))

    @property
    def method(self) -> str:
        """The method with its options, which is the same for all streams."""
        return self._first_stream.method

    @property
    def target(self) -> Mapping[str, Any]:
        """The explained output, as in `Explanation.target`."""
        return self._first_stream.target

    @property
    def prediction(self) -> Mapping[str, Any]:
        """The model's prediction."""
        return self._first_stream.prediction

    @property
    def certificate(self) -> Mapping[str, Any]:
        """Results of the checks, with the warnings of all streams."""
        certificate = self._first_stream.certificate
        if "warnings" not in certificate:
            return certificate
        return {**certificate, "warnings": self.warnings}

    @property
    def warnings(self) -> list[str]:
        """The warnings of all streams; those about the scores of one stream begin with its name."""
        by_stream = {stream: explanation.warnings for stream, explanation in self.by_stream.items()}
        common = [warning for warning in self._first_stream.warnings if all(warning in w for w in by_stream.values())]
        single = [f"{s}: {warning}" for s, w in by_stream.items() for warning in w if warning not in common]
        return single + common

    @property
    def provenance(self) -> Mapping[str, Any]:
        """How the scores were computed."""
        return self._first_stream.provenance

    @property
    def base_value(self) -> float | None:
        """The target's value at the baseline, if the method has one."""
        return self._first_stream.base_value

    @property
    def steps(self) -> tuple[str, ...] | None:
        """Names of several explained outputs, if there are several."""
        return self._first_stream.steps

    @property
    def image(self) -> UInt8[np.ndarray, "height width 3"] | None:
        """The image among the streams, if there is one."""
        return next((explanation.image for explanation in self if explanation.image is not None), None)

    def __getattr__(self, name: str) -> Any:
        """Refuse what only a single stream has, such as `scores`, with the expression to use instead."""
        if name in ("scores", "units", "tokens", "matrix", "stream", "heat_map", "per_layer", "per_head", "intervals"):
            named = " or ".join(f"e[{stream!r}].{name}" for stream in self.by_stream)
            raise InputError(f"this explanation has several streams: use {named}")
        raise AttributeError(name)

    def words(self, absolute: bool = False) -> "MultiStreamExplanation":
        """Merge subword tokens into words in the text streams; other streams stay unchanged.

        Args:
            absolute: Add up absolute values, so that positive and negative scores do not cancel.

        Returns:
            The explanation with words as units of its texts.

        Raises:
            InputError: If the units of a text are larger than words.

        Example:
            >>> e.words()["text"].top(3)  # doctest: +SKIP
        """
        return self._map_streams(lambda explanation: explanation.words(absolute), _is_text)

    def sentences(self, absolute: bool = False) -> "MultiStreamExplanation":
        """Merge units into sentences in the text streams; other streams stay unchanged.

        Args:
            absolute: Add up absolute values, so that positive and negative scores do not cancel.

        Returns:
            The explanation with sentences as units of its texts.

        Raises:
            InputError: If the text of the units is not known, as for inputs given as tensors.

        Example:
            >>> e.sentences()["encoder"].top(1)  # doctest: +SKIP
        """
        return self._map_streams(lambda explanation: explanation.sentences(absolute), _is_text)

    def regions(self, regions: "RegionSpec", absolute: bool = False) -> "MultiStreamExplanation":
        """Merge image patches into regions; other streams stay unchanged.

        Args:
            regions: As in `Explanation.regions`.
            absolute: Add up absolute values, so that positive and negative scores do not cancel.

        Returns:
            The explanation with regions as units of its image.

        Raises:
            InputError: If no stream has image patches, or the regions are malformed.

        Example:
            >>> e.regions({"left": (0.0, 0.0, 0.5, 1.0)})["image"].top(2)  # doctest: +SKIP
        """
        if not any(map(_has_patch_grid, self)):
            raise InputError("no stream of this explanation has patches of an image")
        return self._map_streams(lambda explanation: explanation.regions(regions, absolute), _has_patch_grid)

    def _map_streams(
        self, convert: Callable[[Explanation], Explanation], applies_to: Callable[[Explanation], bool]
    ) -> "MultiStreamExplanation":
        """Return a copy in which the streams that `applies_to` accepts are converted."""
        converted = dict(self.by_stream)
        for stream, explanation in self.by_stream.items():
            if applies_to(explanation):
                converted[stream] = convert(explanation)
        return MultiStreamExplanation(converted)

    def step(self, which: int) -> "MultiStreamExplanation":
        """Return the explanation of one of several outputs, such as one generated token.

        Args:
            which: Index of the step; negative values count from the end.

        Returns:
            The explanation of that step, for all streams.

        Raises:
            InputError: If the explanation has no steps, or the index is out of range.

        Example:
            >>> e.step(-1)["encoder"].top(3)  # what the last token depends on  # doctest: +SKIP
        """
        return MultiStreamExplanation(
            {stream: explanation.step(which) for stream, explanation in self.by_stream.items()}
        )

    def top(self, count: int = 5, include_special: bool = False) -> list[tuple[str, float]]:
        """Return the units with the largest scores of all streams, in descending order.

        Args:
            count: Number of units.
            include_special: Whether special tokens such as [CLS] are included.

        Returns:
            Pairs of name and score.

        Example:
            >>> from clearhead.units import build_numbered_units, build_patch_units
            >>> text, image = build_numbered_units(2, "text", names=["two", "cats"]), build_patch_units((1, 2))
            >>> streams = {"text": (text, np.array([0.1, 0.7])), "image": (image, np.array([0.5, 0.0]))}
            >>> explanations = {name: Explanation(*pair, "generic", {}, {}) for name, pair in streams.items()}
            >>> MultiStreamExplanation(explanations).top(2)
            [('cats', 0.7), ('0,0', 0.5)]
        """
        ranked = [pair for explanation in self for pair in explanation.top(len(explanation), include_special)]
        return sorted(ranked, key=lambda pair: -pair[1])[:count]

    def __sub__(self, other: "MultiStreamExplanation") -> "MultiStreamExplanation":
        """Subtract another explanation of the same input, stream by stream (see `Explanation.__sub__`).

        Args:
            other: The explanation to subtract, with the same streams.

        Returns:
            The difference of each stream.

        Raises:
            InputError: If a stream has another input or other units.
        """
        if not isinstance(other, MultiStreamExplanation) or other.streams != self.streams:
            return NotImplemented
        return MultiStreamExplanation(
            {stream: explanation - other[stream] for stream, explanation in self.by_stream.items()}
        )

    def to_dict(self, short: bool = False) -> dict[str, Any]:
        """Return the JSON form: the JSON forms of the streams by name.

        Args:
            short: Write numbers with no more digits than their precision.

        Returns:
            A dict of plain Python values. `clearhead.from_dict` reads it.

        Example:
            >>> list(e.to_dict()["by_stream"])  # doctest: +SKIP
            ['text', 'image']
        """
        streams = {stream: explanation.to_dict(short) for stream, explanation in self.by_stream.items()}
        return {"schema": MULTI_STREAM_SCHEMA, "version": MULTI_STREAM_VERSION, "by_stream": streams}

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file: arrays as tensors, everything else as JSON metadata.

        Args:
            path: The file to write. An existing file is replaced.

        Returns:
            The path. `clearhead.load_explanation` opens the file.

        Raises:
            OSError: If the file cannot be written. An existing file is then unchanged.

        Example:
            >>> clearhead.load_explanation(e.save("why.safetensors")) == e  # doctest: +SKIP
            True
        """
        from safetensors.numpy import save

        tensors: dict[str, np.ndarray] = {}
        metadata: dict[str, Any] = {"schema": MULTI_STREAM_SCHEMA, "version": MULTI_STREAM_VERSION, "by_stream": {}}
        for stream, explanation in self.by_stream.items():
            stream_metadata, arrays = explanation.to_arrays()
            metadata["by_stream"][stream] = stream_metadata
            tensors |= {f"{stream}/{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
        content = save(tensors, metadata={"clearhead": json.dumps(metadata, ensure_ascii=False, allow_nan=False)})
        with atomic_write(path) as partial:
            partial.write_bytes(content)
        return Path(path)

    def plot(self, kind: str | None = None, **options: Any) -> "Axes":
        """Draw the streams next to each other with matplotlib.

        Args:
            kind: Type of plot, drawn for the streams that support it. Default: the most informative one per stream.
            **options: Options of the plot type.

        Returns:
            The first axes. `e.plot().get_figure(root=True)` is the whole figure.

        Raises:
            InputError: If no stream has the data of that plot type.

        Example:
            >>> e.plot().get_figure(root=True).savefig("why.pdf")  # doctest: +SKIP
        """
        from clearhead.render.mpl.explanation import get_main_axes, plot_explanation

        return get_main_axes(plot_explanation(self, kind, **options))

    def __repr__(self) -> str:
        streams = "; ".join(
            f"{stream}: {', '.join(name for name, _ in explanation.top(3))}"
            for stream, explanation in self.by_stream.items()
        )
        counted = self._format_warning_count()
        return f"MultiStreamExplanation({self.method} of {self.target.get('name')!r}: {streams}{counted})"


AnyExplanation = Explanation | MultiStreamExplanation


def _is_text(explanation: Explanation) -> bool:
    """Whether units are parts of a text without positions in an image."""
    return explanation.units.kind in TEXT_LEVELS and explanation.units.boxes is None


def _has_patch_grid(explanation: Explanation) -> bool:
    """Whether units are the patches of an image."""
    return explanation.units.grid is not None


def multi_stream_from_arrays(metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> MultiStreamExplanation:
    """Build and validate a multi-stream explanation from the JSON form and arrays of a file.

    Args:
        metadata: The JSON form without arrays.
        arrays: The arrays by "stream/name".

    Returns:
        The explanation.

    Raises:
        InputError: If the data is damaged or was written by another version of clearhead.
    """

    def load_stream(stream: str) -> Explanation:
        prefix = f"{stream}/"
        stream_arrays = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        return explanation_from_arrays(metadata["by_stream"][stream], stream_arrays)

    return build_multi_stream_explanation(metadata, load_stream)


def build_multi_stream_explanation(
    metadata: Mapping[str, Any], load_stream: Callable[[str], Explanation]
) -> MultiStreamExplanation:
    """Build and validate a multi-stream explanation.

    Args:
        metadata: The JSON form.
        load_stream: Returns the validated explanation of a stream by its name.

    Returns:
        The explanation.

    Raises:
        InputError: If the data is damaged or was written by another version of clearhead.
    """
    check_format(metadata, MULTI_STREAM_SCHEMA, MULTI_STREAM_VERSION)
    streams = metadata.get("by_stream")
    if not isinstance(streams, Mapping) or not streams:
        raise InputError("this is not an explanation saved by clearhead")
    result = MultiStreamExplanation({str(stream): load_stream(stream) for stream in streams})
    for stream, explanation in result.by_stream.items():
        if explanation.stream != stream:
            raise InputError(
                f"this explanation is damaged: the stream {stream!r} has the units of {explanation.stream!r}"
            )
        if explanation.steps != result.steps:
            raise InputError("this explanation is damaged: its streams do not have the same steps")
    return result
