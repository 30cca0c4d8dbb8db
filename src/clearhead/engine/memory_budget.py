"""How much memory passes may take: what they take is counted, and from that follows how many rows go together.

The first inputs, the shortest, go one by one, and what their tensors take at most is counted. Memory grows at most with
the square of the length and with the number of rows, so what longer ones need is known in advance; it is counted anew
whenever lengths have grown by a quarter. A pass that would take more than was allowed is stopped where it stands, and
run again with fewer rows. What comes out does not depend on it.

`passes_of`, `note` and `at_most` are for those who make passes; without a budget they do nothing.
"""

import ctypes
import re
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.errors import InputError

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
#: What part of the budget is aimed at: what Python, numpy and the allocator need beside the tensors is not counted, and
#: was seen to be as much as they. At 1/3 processes took up to 40 % of a budget of 2 GiB, and up to 85 % with what they
#: held before, the model among it (docs/memory.md); at 0.4 it was 47 % and 92 %.
AIM = 1 / 3
#: One input by itself may take so many times the budget until it is stopped: so that we can say how much it needs.
ALONE = 2
#: How much longer inputs may be than those that were counted.
NEAR = 1.25


class OverBudget(Exception):
    """A pass would have taken more than was allowed."""


def bytes_of(memory: str | int) -> int:
    """
    >>> bytes_of("2GiB"), bytes_of("1.5 MB"), bytes_of(4096)
    (2147483648, 1500000, 4096)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(memory).lower())
    size = 0 if found is None or isinstance(memory, bool) else int(float(found[1]) * _SIZES[found[2]])
    if not size:
        raise InputError(f"memory={memory!r} is no amount of memory: say how much, e.g. '2GiB' or '500MB'")
    return size


def in_words(size: float) -> str:
    """
    >>> in_words(3 * 2**29), in_words(2000)
    ('1.5 GiB', '2 KiB')
    """
    unit, of = next(((unit, of) for unit, of in (("GiB", 2**30), ("MiB", 2**20)) if size >= of), ("KiB", 2**10))
    return f"{size / of:.2g} {unit}" if size < 10 * of else f"{size / of:,.0f} {unit}"


class Meter(TorchDispatchMode):
    """Counts the bytes of all tensors that are made, and no longer those that are gone."""

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.limit, self.live, self.peak = limit, 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for part in made if isinstance(made, list | tuple) else (made,):
            if isinstance(part, Tensor) and part.layout is torch.strided and (key := _key(part)) not in self.known:
                if given is None:  # a view of a weight takes nothing
                    given = set(_keys(args)) | set(_keys((kwargs or {}).values()))
                if key not in given:
                    self._count(part, key)
        return made

    def _count(self, part: Tensor, key: int) -> None:
        storage = part.untyped_storage()
        size = storage.nbytes()
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size).atexit = False
        if self.live > self.limit:
            raise OverBudget

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def _keys(parts: Iterable[Any]) -> Iterator[int]:
    for part in parts:
        if isinstance(part, Tensor):
            yield _key(part)
        elif isinstance(part, list | tuple):
            yield from _keys(part)


def _key(part: Tensor) -> int:
    return part.untyped_storage()._cdata if part.layout is torch.strided else 0


class DeviceMeter(AbstractContextManager["DeviceMeter"]):
    """The same of a device that keeps count itself: its backward passes run in threads of their own."""

    limit = float("inf")  # it stops by itself when it is full

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, torch.cuda.memory_allocated(device)

    def __exit__(self, *problem: object) -> None:
        """Nothing to undo."""

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self.device) - self.before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) - self.before

    @peak.setter
    def peak(self, size: int) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True)
class _Counted:
    """What passes of one kind took at most.

    peak: the batch of so many rows, whose longest sample has so many units, with all that was held before
    held, more: what was held when passes within began (points on a path, altered inputs), and the most that one of
    these took beyond, for each of its rows
    """

    width: int
    rows: int
    peak: float
    held: float = 0
    more: float = 0

    def scale(self, width: int) -> float:
        return max(1.0, width / self.width) ** 2

    def batch(self, room: float, width: int) -> int:
        """How many samples may share a batch; passes within hold each of them once at least."""
        one = max(self.peak / self.rows, self.held / self.rows + self.more)
        return int(room / max(one * self.scale(width), 1))

    def within(self, room: float, width: int, rows: int) -> int:
        """How many rows passes within may have, beside a batch of so many."""
        left = room / self.scale(width) - self.held * rows / self.rows
        return int(left / max(self.more or self.peak / self.rows, 1))


@dataclass
class Budget:
    """What one call of `explain` may take, and what was learned about it so far, of each kind of passes."""

    size: int
    counted: dict[str, _Counted] = field(default_factory=dict)
    #: What was too much, by kind: rows and width of the largest pass.
    too_many: dict[str, tuple[int, int]] = field(default_factory=dict)
    meter: "Meter | DeviceMeter | None" = None
    kind: str = ""
    width: int = 0
    rows: int = 0  # of the batch
    inside: int = 0  # of the pass within that is under way; 0 for none
    peak: float = 0  # of the batch, until passes within began
    held: float = 0
    more: float = 0  # of the passes within: those of one method may take more, and those of another have more rows
    highest: float = 0
    most: int = 1
    needed: float = 0

    def _known(self, kind: str) -> _Counted | None:
        return self.counted.get(kind) or self.counted.get("tape")

    def _capped(self, kind: str, width: int, rows: int) -> int:
        tried, wide = self.too_many.get(kind, (0, 0))
        return max(1, min(rows, tried // 2) if tried and width >= wide else rows)

    def room(self, kinds: Collection[str], width: int) -> int:
        """How many samples of this width can share a batch; one, where nothing is known yet."""
        known = {kind: self._known(kind) for kind in kinds}
        room = {kind: 1 if one is None else one.batch(self.size * AIM, width) for kind, one in known.items()}
        return min(self._capped(kind, width, rows) for kind, rows in room.items())

    @contextmanager
    def batch(self, kinds: Collection[str], width: int, device: torch.device) -> Iterator[None]:
        """One batch, counted where what is known of passes does not suffice."""
        known = [self.counted.get(kind) for kind in kinds]
        near = all(one is not None and width <= one.width * NEAR for one in known)
        self.meter = None if near else DeviceMeter(device) if device.type == "cuda" else Meter()
        before, _HERE.budget = _HERE.budget, self
        self.kind, self.rows, self.width, self.inside, self.needed = "", 1, width, 0, 0
        try:
            with nullcontext() if self.meter is None else self.meter:
                yield
        finally:
            _HERE.budget = before
        if self.needed > self.size:  # one row by itself, or it would have been stopped
            raise too_small(self.size, width, in_words(self.needed))

    @contextmanager
    def passes(self, kind: str, rows: int, width: int) -> Iterator[None]:
        """All passes of one kind over a batch."""
        _give_back()
        self.kind, self.rows, self.width, self.inside = kind, rows, width, 0
        self.more = self.highest = 0
        known = self._known(kind)
        room = 1 if known is None else known.within(self.size * AIM, width, rows)
        self.most = self._capped(kind, width, room)
        self._start()
        yield
        if self.meter is None:
            return
        peak, held, more = float(self.meter.peak), 0.0, 0.0
        if self.inside:
            peak, held, more = self.peak, self.held, self._more()
        self.needed = max(self.needed, peak, self.highest)
        self.counted[kind] = _Counted(width, rows, peak, held, more)

    def note(self, rows: int) -> None:
        """A pass of so many rows comes, within those of one kind."""
        if not self.kind:
            return
        if self.meter is not None:
            if self.inside:
                self.more = self._more()
            else:
                self.peak, self.held = self.meter.peak, self.meter.live
        self.inside = rows
        self._start()

    def _more(self) -> float:
        """What a row of a pass within takes at most, the one under way among them."""
        assert self.meter is not None
        self.highest = max(self.highest, self.meter.peak)
        return max(self.more, (self.meter.peak - self.held) / self.inside)

    def _start(self) -> None:
        if self.meter is not None:
            self.meter.peak = self.meter.live
        self._limit()

    def _limit(self) -> None:
        if self.meter is not None:
            self.meter.limit = self.size * (ALONE if max(self.rows, self.inside) <= 1 else 1)

    def shrink(self) -> None:
        """After a pass that was too large: the next one is half as large, or there is none that fits."""
        rows = max(self.rows, self.inside)
        if rows <= 1:
            raise too_small(self.size, self.width, f"more than {in_words(ALONE * self.size)}")
        self.too_many[self.kind] = (rows, self.width)

    def grown(self) -> int:
        """How many rows passes within may have, by what was counted since they began."""
        if self.meter is None or self.kind in self.counted or not self.inside:
            return self.most
        so_far = _Counted(self.width, self.rows, self.peak, self.held, max(self._more(), 1))
        room = so_far.within(self.size * AIM, self.width, self.rows)
        return self._capped(self.kind, self.width, min(room, 4 * self.inside))


def too_small(size: int, width: int, needed: str) -> InputError:
    return InputError(
        f"memory={in_words(size)!r} is too small: one input of {width} units needs {needed} with these methods (beside "
        "the model itself). Allow more, shorten the input (max_length=), or explain it with fewer methods at a time"
    )


def _give_back() -> None:
    """Hand what was freed to the system: glibc keeps it, and what passes of each kind had would add up."""
    if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


class _Here(threading.local):
    budget: Budget | None = None


_HERE = _Here()


def passes_of(kind: str, rows: int, width: int) -> AbstractContextManager[None]:
    """All passes of one kind over one batch are made here."""
    return nullcontext() if _HERE.budget is None else _HERE.budget.passes(kind, rows, width)


def note(rows: int) -> None:
    """A pass of so many rows comes."""
    if _HERE.budget is not None:
        _HERE.budget.note(rows)


def at_most(rows: int, grows: bool = False) -> int:
    """So many rows in one pass, or as many as the budget has room for; `grows`: asked anew before each pass."""
    budget = _HERE.budget
    return rows if budget is None else max(1, min(rows, budget.grown() if grows else budget.most))
