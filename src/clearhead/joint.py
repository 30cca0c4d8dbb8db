"""The explanation of an input of several streams: a picture and a text, a source and what was said so far."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.errors import InputError, unknown
from clearhead.explanation import Explanation, from_parts
from clearhead.files import whole

SCHEMA = "clearhead/joint-explanation"
VERSION = 1


class JointExplanation:
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
    def steps(self) -> tuple[str, ...] | None:
        return self._any.steps

    def __getattr__(self, name: str) -> Any:
        if name in ("scores", "units", "tokens", "matrix", "stream", "heat_map", "per_layer", "per_head"):
            named = " or ".join(f"e[{stream!r}].{name}" for stream in self.parts)
            raise InputError(f"this explanation has several streams: say {named}")
        raise AttributeError(name)

    def words(self) -> "JointExplanation":
        """Word pieces merged into words; what is no text stays as it is."""
        return JointExplanation(
            {stream: part.words() if part.units.kind == "token" else part for stream, part in self.parts.items()}
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

    def html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page, written to `path` if given."""
        from clearhead.show.html import page

        text = page([self])
        if path is not None:
            with whole(path) as partial:
                partial.write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        from clearhead.show.html import fragment

        return fragment(self)

    def __rich__(self) -> Any:
        from clearhead.show.terminal import render

        return render(self)

    def __repr__(self) -> str:
        inside = "; ".join(
            f"{stream}: {', '.join(name for name, _ in part.top(3))}" for stream, part in self.parts.items()
        )
        return f"JointExplanation({self.method} of {self.target.get('name')!r}: {inside})"


AnyExplanation = Explanation | JointExplanation


def joint_from(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> JointExplanation:
    """A joint explanation from its JSON form and its arrays."""
    if about.get("version") != VERSION or not isinstance(about.get("parts"), Mapping):
        raise InputError("this is not an explanation that this clearhead can read")
    return JointExplanation(
        {
            stream: from_parts(
                part, {name.split("/", 1)[1]: a for name, a in arrays.items() if name.startswith(f"{stream}/")}
            )
            for stream, part in about["parts"].items()
        }
    )
