"""Which kernel records attention: one of whole maps (`materialised`), or of tiles (`streaming`)."""

from collections.abc import Sequence

from torch import Tensor

from clearhead.errors import Refusal, unknown
from clearhead.plan import Plan, Reading
from clearhead.recording.recorder import Recorder
from clearhead.recording.streaming import Tiles
from clearhead.recording.tape import Call
from clearhead.subjects.base import Sample

KERNELS = ("materialised", "streaming")
#: Up to so many units maps are kept whole, where nobody says otherwise: that is faster, and other methods need it.
LIMIT = 2048


def check_kernel(kernel: str | None) -> None:
    if kernel is not None and kernel not in KERNELS:
        raise unknown("kernel", kernel, KERNELS)


def is_long(samples: Sequence[Sample]) -> bool:
    return any(len(axis) > LIMIT for sample in samples for axis in sample.axes.values())


def streams(recorder: Recorder, tried: Plan, samples: Sequence[Sample], kernel: str | None) -> bool:
    """Whether passes over these samples stream; `tried` is what the recorder was tested on.

    A model whose attention cannot be had in tiles keeps its maps, unless streaming was asked for.
    """
    if kernel == "materialised" or (kernel is None and not is_long(samples)):
        return False
    try:
        recorder.test_streaming(tried.batch, tried.leaves)
    except Refusal:
        if kernel == "streaming":
            raise
        return False
    return True


def check_streams(readings: Sequence[Reading]) -> None:
    """Streaming was asked for: what needs whole maps says so."""
    for reading in readings:
        if reading.method.kind != "tape" or not reading.streams:
            raise Refusal(
                f"{reading.method} cannot be computed tile by tile: it needs whole maps of attention, or other passes. "
                "Leave kernel='streaming' out, or choose another method"
            )


def rows_reached(recorder: Recorder, plan: Plan, place: int, streaming: bool) -> set[int]:
    """The rows of one call's attention that reach the target of a plan's only sample."""
    found: set[int] = set()

    def note(gradient: Tensor | None, start: int = 0) -> None:
        assert gradient is not None
        found.update((gradient[0].abs().sum((0, 2)).nonzero().flatten() + start).tolist())

    def fold(call: Call, queries: slice, sweep: int) -> None:
        note(call.attention_gradient, queries.start)

    how = {"leaves": plan.leaves, "places": range(place, place + 1), "tiles": Tiles(fold) if streaming else None}
    tape = recorder.record(plan.batch, plan.value, ("attention_gradient",), **how)
    if not streaming:
        note(tape.calls[0].attention_gradient)
    return found
