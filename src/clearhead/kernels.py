"""Which kernel records attention: one of whole maps (`materialised`), or of tiles (`streaming`)."""

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from clearhead.errors import InputError, Refusal, unknown
from clearhead.methods.base import REGISTRY, Method
from clearhead.plan import Plan, Reading
from clearhead.recording.recorder import Recorder
from clearhead.recording.reduce import Reduce
from clearhead.recording.tape import Call
from clearhead.recording.tiles import Kernel, Ran, Tiles
from clearhead.subjects.base import Sample

#: "streaming" is with the fastest kernel that the hardware has, "tiles" and "triton" with this one.
KERNELS = ("materialised", "streaming", "tiles", "triton")
#: Up to so many units maps are kept whole, where nobody says otherwise: that is faster, and other methods need it.
LIMIT = 2048
#: The same where a kernel makes sums of maps at once, and all methods are content with sums; and so many units of a
#: batch together (one input of 512 is faster with whole maps on an H200, eight are not).
SUMS_FROM = 512
SUMS_FROM_TOGETHER = 4096
#: From so many units on layers are computed again on the way back, where nobody says otherwise: that takes a third
#: longer, but memory of one layer in place of all.
CHECKPOINT_FROM = 16384


def check_kernel(kernel: str | None, checkpoint: bool | None = None) -> None:
    if kernel is not None and kernel not in KERNELS:
        raise unknown("kernel", kernel, KERNELS)
    if checkpoint not in (None, True, False):
        raise InputError(f"checkpoint={checkpoint!r} is not possible: say True or False, or leave it out")
    if kernel == "materialised" and checkpoint:
        raise InputError("checkpoint=True belongs to streaming: kernel='materialised' keeps the maps of every layer")


def longest(samples: Sequence[Sample]) -> int:
    return max(len(axis) for sample in samples for axis in sample.axes.values())


def streams(
    recorder: Recorder,
    tried: Plan,
    samples: Sequence[Sample],
    methods: Sequence[Method],
    kernel: str | None,
    checkpoint: bool | None,
) -> Tiles | None:
    """How passes over these samples stream, if they do; `tried` is what the recorder was tested on.

    A model whose attention cannot be had in tiles keeps its maps, unless streaming was asked for: by name, or by layers
    that are to be computed again, which are a streaming pass's.
    """
    length, fastest = longest(samples), _kernel(recorder, tried, kernel)
    sums = fastest is not None and all(map(_streams, methods))
    many = sums and (length > SUMS_FROM or length * len(samples) >= SUMS_FROM_TOGETHER)
    asked = kernel is not None or bool(checkpoint)
    if kernel == "materialised" or (not asked and length <= LIMIT and not many):
        return None
    twice = length >= CHECKPOINT_FROM if checkpoint is None else checkpoint
    tiles = Tiles(rows=recorder.tile_rows, kernel=fastest, checkpoint=twice)
    try:
        recorder.test_streaming(tried.batch, tried.leaves, tiles.kernel)
    except Refusal:
        if asked:
            raise
        return None
    return tiles


def _streams(method: Method) -> bool:
    """Whether a method wants no map, or tiles or sums of maps (with its own options it may want more)."""
    maps = method.declaration.asks & {"attention", "attention_gradient"}
    return method.kind in ("tape", "path") and (not maps or REGISTRY[method.name].sweeps > 0)


def _kernel(recorder: Recorder, tried: Plan, kernel: str | None) -> Kernel | None:
    if kernel in ("tiles", "materialised"):
        return None
    found = recorder.kernel or kernel_for(tried.subject.device)
    if found is None and kernel == "triton":
        raise Refusal("kernel='triton' needs a GPU and the package triton: say kernel='tiles', or leave it out")
    return found


def kernel_for(device: torch.device) -> Kernel | None:
    """The fastest kernel that a device has; None where that is torch's, tile by tile."""
    modern = device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # on the CPU, statement by statement: for tests
    if not (modern or interpreted) or find_spec("triton") is None:
        return None
    from clearhead.recording.triton_kernel import TritonKernel  # compilers are slow to import

    return TritonKernel()


def check_streams(readings: Sequence[Reading]) -> None:
    """Streaming was asked for: what needs whole maps says so."""
    for reading in readings:
        if not reading.streams:
            raise Refusal(
                f"{reading.method} cannot be computed tile by tile: it needs whole maps of attention, or other passes. "
                "Leave kernel='streaming' out, or choose another method"
            )


def rows_reached(recorder: Recorder, plan: Plan, place: int) -> set[int]:
    """The rows of one call's attention that reach the target of a plan's only sample."""
    found: set[int] = set()

    def note(gradient: Tensor | None, start: int = 0) -> None:
        assert gradient is not None
        found.update((gradient[0].abs().sum((0, 2)).nonzero().flatten() + start).tolist())

    def fold(call: Call, queries: slice, sweep: int) -> None:
        note(call.attention_gradient, queries.start)

    def reduced(call: Call, sums: list[Tensor]) -> None:
        positive, whole = sums  # a row has no gradient where both are zero: what is positive in it, and all of it
        found.update((positive.abs() + whole.abs())[0].sum(0).nonzero().flatten().tolist())

    tiles = None
    if plan.streaming is not None:
        rows = [Reduce("positive"), Reduce("product")]
        tiles = replace(plan.streaming, fold=fold, reductions=lambda call: rows, reduced=reduced, ran=Ran())
    how = {"leaves": plan.leaves, "places": range(place, place + 1), "tiles": tiles}
    tape = recorder.record(plan.batch, plan.value, ("attention_gradient",), **how)
    if tiles is None:
        note(tape.calls[0].attention_gradient)
    return found
