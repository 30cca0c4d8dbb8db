"""Chooses whether attention is captured as materialised maps or in a tiled pass, and with which kernel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiling import (
    TORCH_TILES_NAME,
    AttentionKernel,
    KernelLog,
    TilingConfig,
    get_fastest_kernel,
)
from clearhead.capture.kernels.cpu import CPUKernel
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import CALL_REQUIREMENTS, AttentionCall
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import UnsupportedError
from clearhead.methods._tiled import TiledMethod
from clearhead.methods.base import CROSS_STREAM_REGISTRY, METHOD_REGISTRY, Method
from clearhead.methods.pass_type import PassType
from clearhead.sample import Sample

if TYPE_CHECKING:
    from clearhead.engine.capabilities import ModelCapabilities

#: By default, maps are materialised up to this many units: that is faster, and some methods need it.
MAX_FULL_LENGTH = 2048
#: The limit where a kernel computes reductions of maps and all methods need only reductions, for one input and for all
#: units of a batch (one input of 512 is faster with materialised maps, eight are not, on an H200 and on a CPU).
MIN_REDUCED_LENGTH = 512
MIN_REDUCED_BATCH_UNITS = 4096
#: The limit for one input in half precision on a GPU. There, a pass with materialised maps takes its gradients from
#: tiles, too, and costs more kernel launches than a tiled pass.
MIN_REDUCED_LENGTH_HALF_PRECISION = 128
#: By default, layers are checkpointed from this many units on: that takes a third longer, but the memory of one layer
#: in place of all (and of the tensors that some methods keep of each).
MIN_CHECKPOINT_LENGTH = 16384


def compute_max_length(samples: Sequence[Sample]) -> int:
    """Return the number of units of the longest axis of all samples."""
    return max(len(axis) for sample in samples for axis in sample.axes.values())


@dataclass(frozen=True)
class AttentionMode:
    """How the passes over a batch capture attention, where methods require it.

    Attributes:
        tiling: Settings of tiled passes; None for materialised maps.
        reason: Why, in a few words, for the plan.
    """

    tiling: TilingConfig | None
    reason: str


def choose_attention_mode(
    capabilities: "ModelCapabilities",
    samples: Sequence[Sample],
    methods: Sequence[Method],
    kernel: str | None,
    checkpoint: bool | None,
) -> AttentionMode:
    """Choose between materialised maps and tiled passes for a batch of samples.

    A model whose attention cannot be computed in tiles keeps its maps, unless the options require a tiled pass.

    Args:
        capabilities: What is known about the model.
        samples: The samples to explain.
        methods: The methods to run.
        kernel: One of `request.ATTENTION_KERNELS`; None for the default.
        checkpoint: Whether to checkpoint layers; None for the default.

    Raises:
        UnsupportedError: The options require a tiled pass, which this model or this hardware does not support.
    """
    recorder = capabilities.recorder
    length = compute_max_length(samples)
    checkpoint_layers = checkpoint
    if checkpoint_layers is None:
        checkpoint_layers = length >= MIN_CHECKPOINT_LENGTH and kernel != "materialised"
    captures_attention = any(method.declaration.requires & CALL_REQUIREMENTS for method in methods)
    attention_kernel = None
    if captures_attention or kernel == "triton":
        attention_kernel = _select_kernel(recorder, capabilities.adapter.device, kernel)
    if not captures_attention:
        tiling = TilingConfig(checkpoint_layers=True) if checkpoint_layers else None
        return AttentionMode(tiling, "no method requires attention")
    if kernel == "materialised":
        return AttentionMode(None, "requested by kernel='materialised'")
    is_tiling_required = kernel is not None or bool(checkpoint)
    if not is_tiling_required and length <= MAX_FULL_LENGTH:
        min_length = _get_min_reduced_length(capabilities.adapter.dtype, capabilities.adapter.device)
        is_large = length > min_length or length * len(samples) >= MIN_REDUCED_BATCH_UNITS
        if not is_large:
            return AttentionMode(
                None,
                f"the inputs are short ({length} units at most, {length * len(samples)} in the padded batch)",
            )
        if attention_kernel is None:
            return AttentionMode(None, f"{length} units do not exceed {MAX_FULL_LENGTH}, and no kernel is faster")
        needs_maps = [
            method for method in methods if not _needs_only_reductions(capabilities, method, attention_kernel)
        ]
        if needs_maps:
            return AttentionMode(
                None, f"{needs_maps[0].name} needs maps, and {length} units do not exceed {MAX_FULL_LENGTH}"
            )
    tiling = TilingConfig(tile_rows=recorder.tile_rows, kernel=attention_kernel, checkpoint_layers=checkpoint_layers)
    test_batch = capabilities.test_batch
    try:
        recorder.run_tiling_test(test_batch.model_inputs, test_batch.leaves, tiling.kernel)
    except UnsupportedError:
        if is_tiling_required:
            raise
        return AttentionMode(None, "the attention of this model cannot be computed in tiles")
    # a kernel that does not support the model's attention falls back to tiles, which are slower than full maps
    kernel_name = "" if attention_kernel is None else attention_kernel.name
    falls_back = TORCH_TILES_NAME in recorder.tiling_output_kernels[kernel_name]
    if falls_back and not is_tiling_required and length <= MAX_FULL_LENGTH:
        return AttentionMode(None, "no kernel supports the attention of this model, and tiles are slower than maps")
    if is_tiling_required:
        return AttentionMode(tiling, "requested by kernel= or checkpoint=")
    if length > MAX_FULL_LENGTH:
        return AttentionMode(tiling, f"{length} units exceed {MAX_FULL_LENGTH}")
    return AttentionMode(tiling, "the methods need only reductions of maps, which the kernel computes faster")


def _get_min_reduced_length(dtype: torch.dtype, device: torch.device) -> int:
    """The length above which a single input is tiled if all methods need only reductions."""
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return MIN_REDUCED_LENGTH_HALF_PRECISION
    return MIN_REDUCED_LENGTH


def _needs_only_reductions(capabilities: "ModelCapabilities", method: Method, kernel: AttentionKernel) -> bool:
    """Whether a method needs no map, or reductions of maps alone (with options, or on a path, it may need more).

    On a CPU, tiles of one layer are a little slower than its full maps, but the maps of all other layers are avoided.
    """
    if not method.declaration.requires & {"attention", "attention_gradient"}:
        return not method.pass_type.materialises_attention
    method_class: type[TiledMethod]
    self_test = capabilities.recorder.self_test
    if self_test is not None and self_test.has_cross_attention and method.name in CROSS_STREAM_REGISTRY:
        method_class = CROSS_STREAM_REGISTRY[method.name]
    else:
        method_class = METHOD_REGISTRY[method.name]
    uses_last_layer = method.get_option("layers", method.declaration.layers) == (-1, None)
    is_cheap_on_cpu = uses_last_layer and method_class.tile_passes > 0 and kernel.name == CPUKernel.name
    needs_no_full_map = method_class.needs_only_reductions() or is_cheap_on_cpu
    return method.pass_type is PassType.TAPE and not method.constructor_kwargs and needs_no_full_map


def _select_kernel(recorder: Recorder, device: torch.device, kernel: str | None) -> AttentionKernel | None:
    if kernel in ("tiles", "materialised"):
        return None
    attention_kernel = recorder.kernel or get_fastest_kernel(device)
    if kernel == "triton" and (attention_kernel is None or attention_kernel.name != "triton"):
        raise UnsupportedError(
            "kernel='triton' needs a GPU and the package triton: pass kernel='tiles', or leave out kernel="
        )
    return attention_kernel


def find_rows_with_gradient(
    recorder: Recorder, batch: TargetBatch, call_index: int, tiling: TilingConfig | None
) -> set[int]:
    """Return the query rows of one call's attention that influence the target, for a batch of one sample.

    Args:
        recorder: Recorder of the model.
        batch: The batch.
        call_index: Index of the attention call.
        tiling: Settings of a tiled pass; None for materialised maps.
    """
    rows: set[int] = set()

    def add_rows(gradient: Tensor | None, start: int = 0) -> None:
        assert gradient is not None
        rows.update((gradient[0].abs().sum((0, 2)).nonzero().flatten() + start).tolist())

    def on_tile(call: AttentionCall, query_slice: slice, sweep: int) -> None:
        add_rows(call.attention_gradient, query_slice.start)

    def on_reduced(call: AttentionCall, sums: list[Tensor]) -> None:
        positive_sum, total_sum = sums  # a row has no gradient if both are zero
        rows.update((positive_sum.abs() + total_sum.abs())[0].sum(0).nonzero().flatten().tolist())

    if tiling is not None:
        reductions = [MapReduction("positive"), MapReduction("product")]
        tiling = replace(
            tiling,
            on_tile=on_tile,
            request_reductions=lambda call: reductions,
            on_reduced=on_reduced,
            kernel_log=KernelLog(),
        )
    tape = recorder.record(
        batch.model_inputs,
        batch.compute_target,
        ("attention_gradient",),
        leaves=batch.leaves,
        call_indices=range(call_index, call_index + 1),
        tiling=tiling,
    )
    if tiling is None:
        add_rows(tape.calls[0].attention_gradient)
    return rows
