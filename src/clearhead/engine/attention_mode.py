"""Which kernel records attention: one of whole maps (`materialised`), or of tiles (`streaming`)."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from clearhead.adapters.base import Sample
from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.attention.tiling import TORCH, Kernel, Ran, Tiles, kernel_for
from clearhead.capture.kernels.cpu import CachedTiles
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import Call
from clearhead.engine.target_batch import Plan, Reading
from clearhead.errors import InputError, Refusal, unknown
from clearhead.methods._tiled import Tiled
from clearhead.methods.base import ACROSS, REGISTRY, Method

#: "streaming" is with the fastest kernel that the hardware has, "tiles" and "triton" with this one.
KERNELS = ("materialised", "streaming", "tiles", "triton")
#: Up to so many units maps are kept whole, where nobody says otherwise: that is faster, and other methods need it.
LIMIT = 2048
#: The same where a kernel makes sums of maps at once, and all methods are content with sums; and so many units of a
#: batch together (one input of 512 is faster with whole maps, eight are not, on an H200 and on a CPU).
SUMS_FROM = 512
SUMS_FROM_TOGETHER = 4096
#: From so many units on layers are computed again on the way back, where nobody says otherwise: that takes a third
#: longer, but memory of one layer in place of all (and what some methods set aside of each).
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
    crosses = recorder.tested is not None and recorder.tested.crosses
    sums = fastest is not None and all(_wants_sums(method, crosses, fastest) for method in methods)
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
    # a kernel that does not take the model's attention leaves it to tiles, which are slower than whole maps
    left = TORCH in recorder.streaming_outputs["" if fastest is None else fastest.name]
    return None if left and not asked and length <= LIMIT else tiles


def _wants_sums(method: Method, crosses: bool, kernel: Kernel) -> bool:
    """Whether a method wants no map, or sums of maps alone (with its own options, or on a path, it may want more).

    On a CPU tiles of one layer are a little slower than its whole maps, but those of all other layers are spared.
    """
    if not method.declaration.asks & {"attention", "attention_gradient"}:
        return method.kind in ("tape", "path")
    fold: type[Tiled] = ACROSS[method.name] if crosses and method.name in ACROSS else REGISTRY[method.name]
    alone = method.option("layers", method.declaration.layers) == (-1, None) and fold.sweeps > 0
    little = fold.wants_sums() or (alone and kernel.name == CachedTiles.name)
    return method.kind == "tape" and not method.own_options and little


def _kernel(recorder: Recorder, tried: Plan, kernel: str | None) -> Kernel | None:
    if kernel in ("tiles", "materialised"):
        return None
    found = recorder.kernel or kernel_for(tried.subject.device)
    if kernel == "triton" and (found is None or found.name != "triton"):
        raise Refusal("kernel='triton' needs a GPU and the package triton: say kernel='tiles', or leave it out")
    return found


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
