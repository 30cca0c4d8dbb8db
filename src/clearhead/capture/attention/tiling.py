"""Settings of a tiled pass, which never holds a full attention map, and the interface of attention kernels."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.tape import AttentionCall

if TYPE_CHECKING:
    from clearhead.capture.attention.tiled import TiledAttention

#: Name of the loop over tiles in the certificate.
TORCH_TILES_NAME = "torch tiles"
#: ∂y/∂query, ∂y/∂key and ∂y/∂value.
QKVGradients = tuple[Tensor, Tensor, Tensor]


class AttentionKernel(Protocol):
    """Computes the output of an attention call, its gradients, and reductions of its maps, without tiles."""

    #: Name in the certificate.
    name: str

    def supports(self, call: "TiledAttention", reductions: Sequence[MapReduction]) -> bool:
        """Whether the kernel computes exactly this attention, whose rows must sum to one, and these reductions.

        Args:
            call: The attention call, before it is computed.
            reductions: Reductions of its maps that will be needed.

        Returns:
            False for a mask, shape, dtype or device that the kernel does not support; torch then computes the tiles.
        """

    def forward(self, call: "TiledAttention") -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        """Compute the output, and the tensors to keep in `call.kernel_saved_tensors` for the backward pass.

        Args:
            call: A supported call.

        Returns:
            The output, and the tensors that `backward` needs, such as the log-sum-exp of each query's scores.
        """

    def backward(
        self,
        call: "TiledAttention",
        gradient: Float[Tensor, "batch query head width"],
        reductions: Sequence[MapReduction],
    ) -> tuple[QKVGradients, list[Tensor]]:
        """Compute ∂y/∂query, ∂y/∂key and ∂y/∂value, and the reductions, from the gradient of the output.

        Args:
            call: The call, with the saved tensors.
            gradient: ∂y/∂output.
            reductions: The reductions to compute in the same loop.

        Returns:
            The three gradients, and the reductions in the order of the argument.
        """

    def reduce_maps(
        self, call: "TiledAttention", gradient: Tensor | None, reductions: Sequence[MapReduction]
    ) -> list[Tensor]:
        """Compute the reductions alone; without a gradient, only those of attention are possible.

        Args:
            call: The call, with the saved tensors.
            gradient: ∂y/∂output, or None.
            reductions: The reductions to compute.

        Returns:
            The reductions in the order of the argument.
        """


@dataclass
class KernelLog:
    """The kernels that a tiled pass used, for the certificate.

    Attributes:
        output_kernels: Names of the kernels that computed attention outputs.
        map_kernels: Names of the kernels that computed maps or reductions of maps.
        has_recomputed_layers: Whether activation checkpointing recomputed a layer.
    """

    output_kernels: set[str] = field(default_factory=set)
    map_kernels: set[str] = field(default_factory=set)
    has_recomputed_layers: bool = False

    @property
    def name(self) -> str:
        """The entry of the certificate."""
        name = "streaming: " + " and ".join(sorted(self.map_kernels or self.output_kernels or {TORCH_TILES_NAME}))
        if self.has_recomputed_layers:
            name += ", layers computed twice"
        return name

    def __or__(self, other: "KernelLog") -> "KernelLog":
        """Merge the logs of two passes: the kernels of either."""
        return KernelLog(
            self.output_kernels | other.output_kernels,
            self.map_kernels | other.map_kernels,
            self.has_recomputed_layers or other.has_recomputed_layers,
        )


@dataclass(frozen=True)
class TilingConfig:
    """Settings and callbacks of a tiled pass.

    Attributes:
        on_tile: Receives a call with the maps of one tile, the queries of the tile, and the number of the sweep. All
            tiles of a call are processed when the recorder hands over the call.
        tile_passes: Number of sweeps over all tiles of a call.
        needs_masked_gradients: Whether `on_tile` reads the gradient where a mask hides keys, too, so that tiles cannot
            leave such keys out.
        tile_rows: Number of queries per tile; None for one that suits the length.
        kernel: Computes the calls that it supports without tiles.
        request_reductions: Returns the reductions that suffice for a call; None if tiles are needed.
        on_reduced: Receives the reductions of a call, in place of tiles.
        defers_reductions: Whether calls can compute reductions after the pass (`deferred.py`).
        checkpoint_layers: Whether layers are recomputed in the backward pass, so that memory is that of one layer and
            of the tensors kept for deferred reductions.
        kernel_log: Collects the kernels that were used.
    """

    on_tile: Callable[[AttentionCall, slice, int], None] = lambda call, queries, sweep: None
    tile_passes: int = 1
    needs_masked_gradients: bool = False
    tile_rows: int | None = None
    kernel: AttentionKernel | None = None
    request_reductions: Callable[[AttentionCall], list[MapReduction] | None] = lambda call: None
    on_reduced: Callable[[AttentionCall, list[Tensor]], None] = lambda call, sums: None
    defers_reductions: bool = False
    checkpoint_layers: bool = False
    kernel_log: KernelLog = field(default_factory=KernelLog)


def get_fastest_kernel(device: torch.device) -> AttentionKernel | None:
    """Return the fastest kernel for a device; None where that is torch's own, tile by tile.

    Args:
        device: Device of the model.

    Returns:
        Triton's kernel on GPUs from Ampere on, the kernel for CPUs, or None.
    """
    uses_interpreter = os.environ.get("TRITON_INTERPRET") == "1"  # runs Triton kernels on the CPU, for tests
    return _find_fastest_kernel(device, uses_interpreter)


@cache
def _find_fastest_kernel(device: torch.device, uses_interpreter: bool) -> AttentionKernel | None:
    """Return Triton's kernel from Ampere GPUs on, the cached tiles on a CPU, and None elsewhere."""
    is_ampere = device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    if (is_ampere or uses_interpreter) and find_spec("triton") is not None:
        from clearhead.capture.kernels.triton.kernel import TritonKernel  # compilers are slow to import

        return TritonKernel()
    from clearhead.capture.kernels.cpu import CPUKernel  # imports this module

    return CPUKernel() if device.type == "cpu" else None
