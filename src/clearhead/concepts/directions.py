"""A direction at one layer, oriented and centred on the two classes it separates, and the directions of all layers."""

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

from clearhead.data.atomic_file import atomic_write
from clearhead.errors import InputError

#: The output of the embedding layer, which is the input of layer 0; in place of a layer index.
EMBEDDINGS = "embeddings"
#: A layer by index, from 0, for the output of its block; or `EMBEDDINGS`.
LayerIndex = int | str
#: Version of the file format; in version 1, layers were counted from 1.
DIRECTIONS_VERSION = 2


@dataclass(frozen=True)
class HeldOutMetrics:
    """How well a direction separates vectors that it was not fitted to.

    Attributes:
        accuracy: Fraction of scores with the sign of their class; None for numeric labels.
        effect: Cohen's d of the two classes along the direction; for numeric labels, the correlation with them.
        count: Number of vectors that were tested.
    """

    accuracy: float | None
    effect: float
    count: int


@dataclass(frozen=True)
class Direction:
    """Unit vectors at one layer that separate two classes, positive towards `names[0]`.

    The zero of a projection h·q is arbitrary, so a score is (h·q − centre) / spread.

    Attributes:
        q: The unit vectors; the first is the direction, further rows are its further dimensions.
        eigenvalues: Eigenvalue of each dimension.
        centre: Middle of the two classes' means, by dimension.
        spread: Pooled standard deviation of the two classes, by dimension.
        names: Names of the two classes.
        counts: Number of vectors of each class.
        held_out_metrics: Metrics on vectors that were not used for fitting.
        metadata: The fitting method and its settings.
    """

    q: Float[Tensor, "dimension model"]
    eigenvalues: Float[Tensor, "dimension"]
    centre: Float[Tensor, "dimension"]
    spread: Float[Tensor, "dimension"]
    names: tuple[str, str] = ("first", "second")
    counts: tuple[int, int] = (0, 0)
    held_out_metrics: HeldOutMetrics | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def project(self, states: Float[Tensor, "*any model"], dimension: int = 0) -> Float[Tensor, "*any"]:
        """Compute the projection h·q, neither centred nor scaled.

        Args:
            states: Hidden states.
            dimension: Which of the unit vectors to project on.

        Returns:
            The projections, without the last axis of the states; positive or negative around an arbitrary zero.

        Raises:
            InputError: The states have another width than the direction.
        """
        if states.shape[-1] != self.q.shape[1]:
            raise InputError(f"the direction has {self.q.shape[1]} features, but these states have {states.shape[-1]}")
        q = self.q[dimension].to(states)
        return states @ q

    def compute_score(self, states: Float[Tensor, "*any model"], dimension: int = 0) -> Float[Tensor, "*any"]:
        """Compute (h·q − centre) / spread: positive towards the first name, in standard deviations of the classes.

        Args:
            states: Hidden states.
            dimension: Which of the unit vectors to project on.

        Returns:
            The scores, without the last axis of the states.

        Raises:
            InputError: The states have another width than the direction.

        Example:
            >>> directions = Directions.load("gender.safetensors")  # doctest: +SKIP
            >>> directions[8].compute_score(hidden_states)  # batch × unit  # doctest: +SKIP
        """
        centre = self.centre[dimension]
        spread = self.spread[dimension]
        return (self.project(states, dimension) - centre.to(states)) / spread.to(states)


class Directions(Mapping[LayerIndex, Direction]):
    """Directions by layer: layer k is the output of block k, from 0; "embeddings" is the input of layer 0."""

    def __init__(
        self, by_layer: "Mapping[Any, Direction] | Iterable[tuple[LayerIndex, Direction]]", model: str = ""
    ) -> None:
        """Collect directions.

        Args:
            by_layer: The direction of each layer.
            model: Name of the model they were fitted in; empty if unknown.
        """
        self.by_layer: dict[LayerIndex, Direction] = dict(by_layer)
        self.model = model

    def __getitem__(self, layer: LayerIndex) -> Direction:
        """Return the direction of a layer, by its index or "embeddings"; `KeyError` if there is none."""
        if layer not in self.by_layer:
            raise KeyError(f"no direction for layer {layer}: there are directions for {list(self)}")
        return self.by_layer[layer]

    def __iter__(self) -> Iterator[LayerIndex]:
        """Iterate over the layers from the input to the output, "embeddings" first."""
        return iter(sorted(self.by_layer, key=lambda layer: -1 if layer == EMBEDDINGS else int(layer)))

    def __len__(self) -> int:
        """Return the number of layers that have a direction."""
        return len(self.by_layer)

    def to_table(self) -> list[dict[str, Any]]:
        """Return one record for each layer with its held-out metrics.

        Returns:
            Records with "layer" and the fields of `HeldOutMetrics`; `count` is 0 where nothing was held out.
        """
        no_metrics = HeldOutMetrics(None, math.nan, 0)
        return [
            {"layer": layer, **asdict(direction.held_out_metrics or no_metrics)} for layer, direction in self.items()
        ]

    def save(self, path: str | Path) -> Path:
        """Save to one safetensors file: the vectors as tensors, everything else as JSON in its header.

        Args:
            path: The file to write; an existing one is replaced.

        Returns:
            The path.

        Example:
            >>> Directions.load(directions.save("gender.safetensors"))  # doctest: +SKIP
        """
        tensors: dict[str, Tensor] = {}
        layer_metadata: dict[LayerIndex, Any] = {}
        for layer, direction in self.items():
            for name in _TENSOR_FIELDS:
                tensors[f"{layer}.{name}"] = getattr(direction, name).detach().cpu().contiguous().clone()
            metrics = direction.held_out_metrics
            layer_metadata[layer] = {
                "names": direction.names,
                "counts": direction.counts,
                "tested": None if metrics is None else asdict(metrics),
                "about": direction.metadata,
            }
        header = {
            "schema": "clearhead/directions",
            "version": DIRECTIONS_VERSION,
            "model": self.model,
            "layers": layer_metadata,
        }
        with atomic_write(path) as partial:
            save_file(tensors, str(partial), metadata={"clearhead": json.dumps(header)})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Directions":
        """Load directions that `save` wrote.

        Args:
            path: A safetensors file.

        Returns:
            The directions, on the CPU.

        Raises:
            InputError: The file cannot be opened, or was not written by clearhead.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("clearhead", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError, ValueError) as problem:
            raise InputError(f"{str(path)!r} cannot be opened as directions ({problem})") from None
        if header.get("schema") != "clearhead/directions":
            raise InputError(f"{str(path)!r} contains no directions saved by clearhead")
        if header.get("version") != DIRECTIONS_VERSION:
            raise InputError(
                f"{str(path)!r} has version {header.get('version')} of the file format, but {DIRECTIONS_VERSION} is "
                "needed: compute the directions again"
            )
        by_layer: dict[LayerIndex, Direction] = {}
        for layer, layer_metadata in header["layers"].items():
            metrics = layer_metadata["tested"]
            first_name, second_name = layer_metadata["names"]
            first_count, second_count = layer_metadata["counts"]
            by_layer[layer if layer == EMBEDDINGS else int(layer)] = Direction(
                **{name: tensors[f"{layer}.{name}"] for name in _TENSOR_FIELDS},
                names=(first_name, second_name),
                counts=(int(first_count), int(second_count)),
                held_out_metrics=None if metrics is None else HeldOutMetrics(**metrics),
                metadata=layer_metadata["about"],
            )
        return cls(by_layer, header.get("model", ""))


_TENSOR_FIELDS = tuple(f.name for f in fields(Direction))[:4]
