"""The result: units and their scores, what was explained, what was predicted, and how we know."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float, UInt8

from clearhead.errors import InputError, unknown
from clearhead.units import Units

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Version of the JSON form and of the file; a reader refuses a newer one.
VERSION = 1


@dataclass(frozen=True)
class Explanation:
    """Scores for the units of one stream.

    `scores` are raw and signed as the method gave them; scaling happens when they are shown. `matrix` has one row of
    scores per row that was read (`rows="all"`), `per_layer` and `per_head` the shares of layers and heads.
    """

    units: Units
    scores: Float[np.ndarray, "unit"]
    method: str
    target: Mapping[str, Any]
    prediction: Mapping[str, Any]
    certificate: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    base_value: float | None = None
    matrix: Float[np.ndarray, "row unit"] | None = None
    per_layer: Float[np.ndarray, "layer unit"] | None = None
    per_head: Float[np.ndarray, "layer head unit"] | None = None
    picture: UInt8[np.ndarray, "height width 3"] | None = None

    @property
    def stream(self) -> str:
        return self.units.stream

    @property
    def tokens(self) -> list[str]:
        """The names of the units."""
        return list(self.units.names)

    @property
    def signed(self) -> bool:
        """Whether the method's scores can speak against the target."""
        return bool(self.provenance.get("signed", (self.scores < 0).any()))

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, stream: str) -> "Explanation":
        if stream != self.stream:
            raise unknown("stream", stream, [self.stream])
        return self

    def words(self) -> "Explanation":
        """Word pieces merged into words, their scores added up."""
        return self._merged("word")

    def sentences(self) -> "Explanation":
        """Units merged into sentences, their scores added up."""
        return self._merged("sentence")

    def _merged(self, kind: str) -> "Explanation":
        units, parents = self.units.merged(kind)
        into = np.zeros((len(self.units), len(units)), dtype=self.scores.dtype)
        into[np.arange(len(parents)), parents] = 1
        return replace(
            self,
            units=units,
            scores=self.scores @ into,
            matrix=None if self.matrix is None else into.T @ self.matrix @ into,
            per_layer=None if self.per_layer is None else self.per_layer @ into,
            per_head=None if self.per_head is None else self.per_head @ into,
        )

    def top(self, count: int = 5, special: bool = False) -> list[tuple[str, float]]:
        """The units with the largest scores, special tokens left out unless asked for.

        Ties keep the order of the input.
        """
        kept = np.arange(len(self)) if special else self.units.drop_special()
        order = kept[np.argsort(-self.scores[kept], kind="stable")][:count]
        return [(self.units.names[i], float(self.scores[i])) for i in order]

    def heat_map(self) -> Float[np.ndarray, "row column"]:
        """The scores of a picture's patches, laid out as they lie in it."""
        if self.units.grid is None:
            raise InputError("a text has no grid of patches")
        return self.scores[self.units.drop_special()].reshape(self.units.grid)

    def __sub__(self, other: "Explanation") -> "Explanation":
        """The difference of two explanations of one input.

        For methods linear in the target it explains the contrast of the two; otherwise it is a difference of scores,
        and says so.
        """
        if not isinstance(other, Explanation):
            return NotImplemented
        if self.units != other.units:
            raise InputError("only explanations of the same units can be subtracted: these have different units")
        linear = self.provenance.get("linear_in_target") and self.method == other.method
        name = f"{self.target.get('name')} − {other.target.get('name')}"
        meaning = "contrast" if linear else "difference of scores"
        values = [side.target.get("value") for side in (self, other)]
        gap = None if None in values else float(values[0]) - float(values[1])
        method = self.method if self.method == other.method else f"{self.method} − {other.method}"

        def minus(one: np.ndarray | None, two: np.ndarray | None) -> Any:
            return None if one is None or two is None or one.shape != two.shape else one - two

        return replace(
            self,
            method=method,
            scores=self.scores - other.scores,
            target={"kind": meaning, "name": name, "scale": self.target.get("scale"), "value": gap},
            provenance={**self.provenance, "signed": True, "minus": dict(other.provenance)},
            base_value=minus(np.asarray(self.base_value), np.asarray(other.base_value)) if self.base_value else None,
            matrix=minus(self.matrix, other.matrix),
            per_layer=minus(self.per_layer, other.per_layer),
            per_head=minus(self.per_head, other.per_head),
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, as `explanation.schema.json` describes it. Pictures stay in the file form."""
        return {
            "schema": "clearhead/explanation",
            "version": VERSION,
            "stream": self.stream,
            "units": {name: part for name, part in asdict(self.units).items() if part is not None},
            "scores": self.scores.tolist(),
            "method": self.method,
            "target": dict(self.target),
            "prediction": dict(self.prediction),
            "base_value": self.base_value,
            "certificate": dict(self.certificate),
            "provenance": dict(self.provenance),
            **{name: part.tolist() for name in _ARRAYS if (part := getattr(self, name)) is not None},
        }

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file: arrays as tensors, the rest as JSON metadata."""
        from safetensors.numpy import save_file

        arrays = {name: getattr(self, name) for name in ("scores", "picture", *_ARRAYS)}
        about = {key: value for key, value in self.to_dict().items() if key not in arrays}
        save_file(
            {name: np.ascontiguousarray(part) for name, part in arrays.items() if part is not None},
            str(path),
            metadata={"clearhead": json.dumps(about, ensure_ascii=False)},
        )
        return Path(path)

    def plot(
        self, kind: Literal["bars", "table", "text", "layers", "overlay", "heads"] | None = None, **options: Any
    ) -> "Figure":
        """A matplotlib figure."""
        from clearhead.show.figures import plot

        return plot(self, kind, **options)

    def html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page, written to `path` if given."""
        from clearhead.show.html import page

        text = page([self])
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        from clearhead.show.html import fragment

        return fragment(self)

    def __rich__(self) -> Any:
        from clearhead.show.terminal import render

        return render(self)

    def __repr__(self) -> str:
        top = ", ".join(f"{name} {score:.3g}" for name, score in self.top(3))
        return f"Explanation({self.method} of {self.target.get('name')!r}: {len(self)} {self.units.kind}s; top: {top})"


_ARRAYS = ("matrix", "per_layer", "per_head")


def load(path: str | Path) -> Explanation:
    """Open a file that `Explanation.save` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            about = json.loads((file.metadata() or {})["clearhead"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"there is no file {str(path)!r}") from None
    except (SafetensorError, KeyError, ValueError, IsADirectoryError) as problem:
        raise InputError(f"{str(path)!r} is not an explanation that clearhead saved ({problem})") from None
    return from_parts(about, arrays)


def from_dict(data: Mapping[str, Any]) -> Explanation:
    """The explanation whose `to_dict()` this is."""
    arrays = {name: np.asarray(data[name]) for name in ("scores", *_ARRAYS) if data.get(name) is not None}
    return from_parts(data, arrays)


def from_parts(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Explanation:
    if about.get("schema") != "clearhead/explanation":
        raise InputError("this is not an explanation that clearhead wrote")
    if about["version"] > VERSION:
        raise InputError(f"written by a newer clearhead (form {about['version']}, this one reads up to {VERSION})")
    frozen = {key: _frozen(value) if isinstance(value, list) else value for key, value in about["units"].items()}
    plain = {key: about[key] for key in ("method", "target", "prediction", "base_value", "certificate", "provenance")}
    return Explanation(units=Units(**frozen), **plain, **arrays)  # type: ignore[arg-type]


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value
