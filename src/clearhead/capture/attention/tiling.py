"""What a streaming pass does with the maps that are never whole, and what makes sums of them at once."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.tape import Call

if TYPE_CHECKING:
    from clearhead.capture.attention.tiled import Streamed

#: What the certificate calls the loop over tiles.
TORCH = "torch tiles"
#: ∂y/∂query, ∂y/∂key and ∂y/∂value.
Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Makes the output of a call, its gradients, and sums of its maps."""

    #: What the certificate says.
    name: str

    def takes(self, call: "Streamed", reductions: Sequence[Reduce]) -> bool:
        """Whether it makes exactly this attention, whose rows must sum to one, and these sums."""

    def output(self, call: "Streamed") -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        """The output, and what is to be in `call.saved` on the way back."""

    def backward(
        self, call: "Streamed", gradient: Float[Tensor, "batch query head width"], reductions: Sequence[Reduce]
    ) -> tuple[Gradients, list[Tensor]]:
        """∂y/∂query, ∂y/∂key and ∂y/∂value, and the sums."""

    def reduced(self, call: "Streamed", gradient: Tensor | None, reductions: Sequence[Reduce]) -> list[Tensor]:
        """The sums alone; without a gradient, those of attention."""


@dataclass
class Ran:
    """What a streaming pass did, for the certificate.

    outputs, maps: what made the outputs of attention, and what made maps or sums of maps
    twice: whether a layer was computed again
    """

    outputs: set[str] = field(default_factory=set)
    maps: set[str] = field(default_factory=set)
    twice: bool = False

    @property
    def name(self) -> str:
        names = " and ".join(sorted(self.maps or self.outputs or {TORCH}))
        return f"streaming: {names}{', layers computed twice' if self.twice else ''}"

    def __or__(self, other: "Ran") -> "Ran":
        return Ran(self.outputs | other.outputs, self.maps | other.maps, self.twice or other.twice)


@dataclass(frozen=True)
class Tiles:
    """What a streaming pass does with tiles.

    fold: gets a call with the maps of a tile, its queries, and the number of the sweep; a call is complete when the
    recorder hands it over. sweeps: how often it is to see every tile. hidden: whether it reads the gradient where
    attention is hidden by a mask, too, so that such keys cannot be left out. rows: how many queries a tile has
    kernel: makes calls at once that it takes. reductions: the sums that are enough for a call (None: tiles are needed);
    reduced: gets them, in the place of tiles
    sets_aside: whether calls can be asked for sums after the pass (`deferred.py`)
    checkpoint: whether layers are computed again on the way back, so that memory is one layer's, and what is set aside
    """

    fold: Callable[[Call, slice, int], None] = lambda call, queries, sweep: None
    sweeps: int = 1
    hidden: bool = False
    rows: int | None = None
    kernel: Kernel | None = None
    reductions: Callable[[Call], list[Reduce] | None] = lambda call: None
    reduced: Callable[[Call, list[Tensor]], None] = lambda call, sums: None
    sets_aside: bool = False
    checkpoint: bool = False
    ran: Ran = field(default_factory=Ran)


def kernel_for(device: torch.device) -> Kernel | None:
    """The fastest kernel that a device has; None where that is torch's, tile by tile."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # on the CPU, statement by statement: for tests
    return _fastest(device, interpreted)


@cache
def _fastest(device: torch.device, interpreted: bool) -> Kernel | None:
    modern = device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    if (modern or interpreted) and find_spec("triton") is not None:
        from clearhead.capture.kernels.triton.kernel import TritonKernel  # compilers are slow to import

        return TritonKernel()
    from clearhead.capture.kernels.cpu import CachedTiles  # which imports what is here

    return CachedTiles() if device.type == "cpu" else None
