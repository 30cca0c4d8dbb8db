"""The explanation of an input of several streams: a picture and a text, a source and what was said so far."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from clearhead.data.atomic_file import whole
from clearhead.errors import InputError, unknown
from clearhead.explanation.display import Shown
from clearhead.explanation.explanation import Explanation, from_parts
from clearhead.units import LEVELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from clearhead.explanation.regions import Where

SCHEMA = "clearhead/joint-explanation"
VERSION = 1


class JointExplanation(Shown):
    """One result whose parts are the streams: `e["text"]`, `e["image"]`. What was explained is the same for all."""

    def __init__(self, parts: Mapping[str, Explanation]) -> None:
        self.parts = dict(parts)

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def __getitem__(self, stream: str) -> Explanation:
        if stream not in self.parts:
            raise unknown("stream", stream, self.parts)
        return self.parts[stream]

    def __iter__(self) -> Iterator[Explanation]:
        return iter(self.parts.values())

    def __len__(self) -> int:
        return sum(len(part) for part in self)

    def __eq__(self, other: object) -> bool:
        return self.parts == other.parts if isinstance(other, JointExplanation) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def _any(self) -> Explanation:
        return next(iter(self))

    @property
    def method(self) -> str:
        return self._any.method

    @property
    def target(self) -> Mapping[str, Any]:
        return self._any.target

    @property
    def prediction(self) -> Mapping[str, Any]:
        return self._any.prediction

    @property
    def certificate(self) -> Mapping[str, Any]:
        return self._any.certificate

    @property
    def provenance(self) -> Mapping[str, Any]:
        return self._any.provenance

    @property
    def base_value(self) -> float | None:
        return self._any.base_value

    @property
    def steps(self) -> tuple[str, ...] | None:
        return self._any.steps

    @property
    def picture(self) -> UInt8[np.ndarray, "height width 3"] | None:
        """The picture among the streams, if there is one."""
        return next((part.picture for part in self if part.picture is not None), None)

    def __getattr__(self, name: str) -> Any:
        if name in ("scores", "units", "tokens", "matrix", "stream", "heat_map", "per_layer", "per_head"):
            named = " or ".join(f"e[{stream!r}].{name}" for stream in self.parts)
            raise InputError(f"this explanation has several streams: say {named}")
        raise AttributeError(name)

    def words(self, absolute: bool = False) -> "JointExplanation":
        """Word pieces merged into words; what is no text stays as it is."""
        return JointExplanation(
            {stream: part.words(absolute) if _is_text(part) else part for stream, part in self.parts.items()}
        )

    def sentences(self, absolute: bool = False) -> "JointExplanation":
        """Units of texts merged into sentences; what is no text stays as it is."""
        return JointExplanation(
            {stream: part.sentences(absolute) if _is_text(part) else part for stream, part in self.parts.items()}
        )

    def regions(self, where: "Where", absolute: bool = False) -> "JointExplanation":
        """Patches merged into regions of the picture; what is no picture stays as it is."""
        pictures = [stream for stream, part in self.parts.items() if part.units.grid is not None]
        if not pictures:
            raise InputError("no stream of this explanation has patches of a picture")
        return JointExplanation(
            {s: part.regions(where, absolute) if s in pictures else part for s, part in self.parts.items()}
        )

    def step(self, which: int) -> "JointExplanation":
        """The explanation of one of several steps alone."""
        return JointExplanation({stream: part.step(which) for stream, part in self.parts.items()})

    def top(self, count: int = 5, special: bool = False) -> list[tuple[str, float]]:
        """The units with the largest scores, of all streams together."""
        every = [pair for part in self for pair in part.top(len(part), special)]
        return sorted(every, key=lambda pair: -pair[1])[:count]

    def __sub__(self, other: "JointExplanation") -> "JointExplanation":
        if not isinstance(other, JointExplanation) or other.streams != self.streams:
            return NotImplemented
        return JointExplanation({stream: part - other[stream] for stream, part in self.parts.items()})

    def to_dict(self, short: bool = False) -> dict[str, Any]:
        """The JSON form: that of each part, by stream."""
        parts = {stream: part.to_dict(short) for stream, part in self.parts.items()}
        return {"schema": SCHEMA, "version": VERSION, "parts": parts}

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file: arrays as tensors, the rest as JSON metadata."""
        from safetensors.numpy import save

        arrays: dict[str, np.ndarray] = {}
        about: dict[str, Any] = {"schema": SCHEMA, "version": VERSION, "parts": {}}
        for stream, part in self.parts.items():
            plain, tensors = part.as_parts()
            about["parts"][stream] = plain
            arrays |= {f"{stream}/{name}": np.ascontiguousarray(array) for name, array in tensors.items()}
        content = save(arrays, metadata={"clearhead": json.dumps(about, ensure_ascii=False, allow_nan=False)})
        with whole(path) as partial:
            partial.write_bytes(content)
        return Path(path)

    def plot(self, kind: str | None = None, **options: Any) -> "Axes":
        """Draw with matplotlib, the streams side by side; a kind is drawn for the streams that have it.

        Returns the first axes; `e.plot().get_figure(root=True)` is the whole figure.
        """
        from clearhead.render.mpl.explanation import main_axes, plot

        return main_axes(plot(self, kind, **options))

    def __repr__(self) -> str:
        inside = "; ".join(
            f"{stream}: {', '.join(name for name, _ in part.top(3))}" for stream, part in self.parts.items()
        )
        return f"JointExplanation({self.method} of {self.target.get('name')!r}: {inside})"


AnyExplanation = Explanation | JointExplanation


def _is_text(part: Explanation) -> bool:
    return part.units.kind in LEVELS and part.units.boxes is None


def joint_from(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> JointExplanation:
    """A joint explanation from its JSON form and its arrays."""

    def opened(stream: str) -> Explanation:
        own = {name.removeprefix(f"{stream}/"): part for name, part in arrays.items() if name.startswith(f"{stream}/")}
        return from_parts(about["parts"][stream], own)

    return joint_of(about, opened)


def joint_of(about: Mapping[str, Any], opened: Callable[[str], Explanation]) -> JointExplanation:
    """A joint explanation of which `opened` gives the part of each stream: the border where its form is checked."""
    version, parts = about.get("version"), about.get("parts")
    if not isinstance(version, int) or not isinstance(parts, Mapping) or not parts:
        raise InputError("this is not an explanation that clearhead wrote")
    if version > VERSION:
        raise InputError(f"written by a newer clearhead (form {version}, this one reads up to {VERSION})")
    made = JointExplanation({str(stream): opened(stream) for stream in parts})
    for stream, part in made.parts.items():
        if part.stream != stream:
            raise InputError(f"this explanation is damaged: the part {stream!r} has the units of {part.stream!r}")
        if part.steps != made.steps:
            raise InputError("this explanation is damaged: its parts do not have the same steps")
    return made
