"""A direction at one layer, oriented and centred by the words it was found with, and the directions of all layers."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clearhead.data.atomic_file import whole
from clearhead.errors import InputError


@dataclass(frozen=True)
class HeldOut:
    """How well a direction does on vectors that it was not found with.

    accuracy: how often the score has the sign of the class; None for labels that are numbers
    effect: Cohen's d of the two classes along the direction; of numbers, the correlation with them
    """

    accuracy: float | None
    effect: float
    count: int


@dataclass(frozen=True)
class Direction:
    """Unit vectors `q` (the first is the direction, others its further dimensions), positive towards `names[0]`.

    A projection h·q has no zero of its own: `centre` is the middle of the two classes' means and `spread` their pooled
    standard deviation, so that a score is (h·q − centre) / spread.
    """

    q: Float[Tensor, "dimension model"]
    eigenvalues: Float[Tensor, "dimension"]
    centre: Float[Tensor, "dimension"]
    spread: Float[Tensor, "dimension"]
    names: tuple[str, str] = ("first", "second")
    counts: tuple[int, int] = (0, 0)
    tested: HeldOut | None = None
    #: How it was found.
    about: dict[str, Any] = field(default_factory=dict)

    def projection(self, states: Float[Tensor, "*any model"], dimension: int = 0) -> Float[Tensor, "*any"]:
        """h·q, as it is."""
        if states.shape[-1] != self.q.shape[1]:
            raise InputError(f"the direction is {self.q.shape[1]} wide, but these states are {states.shape[-1]}")
        q = self.q[dimension].to(states)
        return states @ q

    def score(self, states: Float[Tensor, "*any model"], dimension: int = 0) -> Float[Tensor, "*any"]:
        """(h·q − centre) / spread: positive towards the first name, in standard deviations of the classes."""
        centre, spread = self.centre[dimension], self.spread[dimension]
        return (self.projection(states, dimension) - centre.to(states)) / spread.to(states)


class Directions(Mapping[int, Direction]):
    """The directions of several layers: layer k is h^k, 0 what goes into the first layer, −1 what the last puts out.

    model: where they were found; empty where nobody said
    """

    def __init__(self, by_layer: Mapping[int, Direction] | Iterable[tuple[int, Direction]], model: str = "") -> None:
        self.by_layer, self.model = dict(by_layer), model

    def __getitem__(self, layer: int) -> Direction:
        if layer not in self.by_layer:
            raise KeyError(f"no direction of layer {layer}: there are those of {sorted(self.by_layer)}")
        return self.by_layer[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.by_layer))

    def __len__(self) -> int:
        return len(self.by_layer)

    def table(self) -> list[dict[str, Any]]:
        """One line a layer: how well it does on what was held out."""
        tested = {layer: one.tested or HeldOut(None, math.nan, 0) for layer, one in self.items()}
        return [{"layer": layer, **asdict(one)} for layer, one in tested.items()]

    def save(self, path: str | Path) -> Path:
        """One safetensors file: the vectors as tensors, everything else as JSON in its header."""
        tensors: dict[str, Tensor] = {}
        about: dict[int, Any] = {}
        for layer, one in self.items():
            tensors |= {f"{layer}.{name}": getattr(one, name).detach().cpu().contiguous().clone() for name in _TENSORS}
            about[layer] = {
                "names": one.names,
                "counts": one.counts,
                "tested": None if one.tested is None else asdict(one.tested),
                "about": one.about,
            }
        header = {"schema": "clearhead/directions", "version": 1, "model": self.model, "layers": about}
        metadata = {"clearhead": json.dumps(header)}
        with whole(path) as partial:
            save_file(tensors, str(partial), metadata=metadata)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Directions":
        try:
            with safe_open(str(path), framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("clearhead", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError, ValueError) as problem:
            raise InputError(f"{str(path)!r} cannot be opened as directions ({problem})") from None
        if about.get("schema") != "clearhead/directions":
            raise InputError(f"{str(path)!r} holds no directions that clearhead saved")
        found = {}
        for layer, plain in about["layers"].items():
            parts = {name: tensors[f"{layer}.{name}"] for name in _TENSORS}
            tested = None if plain["tested"] is None else HeldOut(**plain["tested"])
            first, second = plain["names"]
            counts = (int(plain["counts"][0]), int(plain["counts"][1]))
            found[int(layer)] = Direction(
                **parts, names=(first, second), counts=counts, tested=tested, about=plain["about"]
            )
        return cls(found, about.get("model", ""))


_TENSORS = tuple(f.name for f in fields(Direction))[:4]
