"""Memory budget of passes: measures the memory of tensors, and chooses batch sizes that keep to a limit.

The first inputs, the shortest, run one by one, and the peak memory of their tensors is measured. Memory grows at most
with the square of the length and with the number of rows, so that the need of longer inputs is known in advance; it is
measured again whenever lengths have grown by a quarter. A pass that exceeds the limit is stopped, and repeated with
fewer rows. Results do not depend on the budget.

Code that runs passes calls `budgeted_passes`, `start_budgeted_pass` and `limit_rows`; without a budget they do nothing.
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

_BYTES_PER_UNIT = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
#: Share of the budget that tensors may take: memory of Python, numpy and the allocator is not measured, and was as much
#: as that of the tensors. At 1/3, processes took up to 40 % of a budget of 2 GiB, and up to 85 % with the memory they
#: held before, that of the model included (docs/memory.md); at 0.4 it was 47 % and 92 %.
TARGET_MEMORY_FRACTION = 1 / 3
#: A single input may take this many times the budget before it is stopped, so that the error can tell its need.
SINGLE_INPUT_LIMIT_FACTOR = 2
#: Inputs may be this much longer than the measured ones before memory is measured again.
REMEASURE_LENGTH_FACTOR = 1.25


#: Name under which the clean pass is measured; other passes start from its measurement.
CLEAN_PASS_NAME = "clean"


class MemoryBudgetExceededError(Exception):
    """A pass needed more than the memory budget; the batch is divided and run again."""


def parse_bytes(memory: str | int) -> int:
    """Parse an amount of memory into bytes.

    Args:
        memory: A number of bytes, or a text with a unit such as "2GiB" or "500MB".

    Returns:
        The number of bytes, at least 1.

    Raises:
        InputError: It is not an amount of memory, or zero.

    Example:
        >>> parse_bytes("2GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
        (2147483648, 1500000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(memory).lower())
    num_bytes = 0
    if match is not None and not isinstance(memory, bool):
        num_bytes = int(float(match[1]) * _BYTES_PER_UNIT[match[2]])
    if not num_bytes:
        raise InputError(f"memory={memory!r} is not an amount of memory: use, for example, '2GiB' or '500MB'")
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes for messages.

    Example:
        >>> format_bytes(3 * 2**29), format_bytes(2000)
        ('1.5 GiB', '2 KiB')
    """
    unit = "KiB"
    unit_bytes = 2**10
    if num_bytes >= 2**30:
        unit = "GiB"
        unit_bytes = 2**30
    elif num_bytes >= 2**20:
        unit = "MiB"
        unit_bytes = 2**20
    amount = num_bytes / unit_bytes
    return f"{amount:.2g} {unit}" if amount < 10 else f"{amount:,.0f} {unit}"


class TensorMemoryMeter(TorchDispatchMode):
    """Inside the `with`, measures the live and peak memory of all tensors that are created.

    Args:
        limit_bytes: Maximum number of live bytes.

    Raises:
        MemoryBudgetExceededError: Live memory exceeds `limit_bytes`.
    """

    def __init__(self, limit_bytes: float = float("inf")) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.tracked_storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        argument_keys: set[int] | None = None
        for result in results if isinstance(results, list | tuple) else (results,):
            if not isinstance(result, Tensor) or result.layout is not torch.strided:
                continue
            key = _get_storage_key(result)
            if key in self.tracked_storages:
                continue
            if argument_keys is None:  # a view of a weight takes no memory
                argument_keys = set(_iter_storage_keys(args)) | set(_iter_storage_keys((kwargs or {}).values()))
            if key not in argument_keys:
                self._track_storage(result, key)
        return results

    def _track_storage(self, tensor: Tensor, key: int) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self.tracked_storages.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._untrack_storage, key, size).atexit = False
        if self.live_bytes > self.limit_bytes:
            raise MemoryBudgetExceededError

    def _untrack_storage(self, key: int, size: int) -> None:
        self.tracked_storages.discard(key)
        self.live_bytes -= size


def _iter_storage_keys(arguments: Iterable[Any]) -> Iterator[int]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield _get_storage_key(argument)
        elif isinstance(argument, list | tuple):
            yield from _iter_storage_keys(argument)


def _get_storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


class CudaMemoryMeter(AbstractContextManager["CudaMemoryMeter"]):
    """Measures the memory of tensors on a GPU with CUDA's own statistics.

    A dispatch mode does not see backward passes on a GPU, which run in other threads.

    Args:
        device: The GPU; what is allocated there already is not counted.
    """

    limit_bytes = float("inf")  # CUDA raises an error by itself when the device is full

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.baseline_bytes = torch.cuda.memory_allocated(device)

    def __exit__(self, *exception: object) -> None:
        """Does nothing: there is no state to restore."""

    @property
    def live_bytes(self) -> int:
        """Memory of the tensors that have been created and still exist."""
        return torch.cuda.memory_allocated(self.device) - self.baseline_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest `live_bytes` since the last reset; setting it resets the peak."""
        return torch.cuda.max_memory_allocated(self.device) - self.baseline_bytes

    @peak_bytes.setter
    def peak_bytes(self, size: int) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True)
class _PassMeasurement:
    """Measured memory of the passes of one type over a batch.

    Inner passes are those that a method runs for a batch: points on a path, perturbed inputs.

    Attributes:
        num_units: Number of units of the longest sample.
        rows: Number of samples in the batch.
        peak_bytes: Peak memory of the batch until inner passes start.
        held_bytes: Live memory when inner passes start.
        bytes_per_inner_row: Largest additional memory of an inner pass, per row.
    """

    num_units: int
    rows: int
    peak_bytes: float
    held_bytes: float = 0
    bytes_per_inner_row: float = 0

    def compute_length_factor(self, num_units: int) -> float:
        """Return the factor by which memory grows for longer inputs."""
        return max(1.0, num_units / self.num_units) ** 2

    def compute_batch_rows(self, available_bytes: float, num_units: int) -> int:
        """Return how many samples fit in a batch; an inner pass has at least one row per sample."""
        bytes_per_row = max(self.peak_bytes / self.rows, self.held_bytes / self.rows + self.bytes_per_inner_row)
        return int(available_bytes / max(bytes_per_row * self.compute_length_factor(num_units), 1))

    def compute_inner_rows(self, available_bytes: float, num_units: int, rows: int) -> int:
        """Return how many rows an inner pass may have, in addition to a batch of `rows` samples."""
        remaining_bytes = available_bytes / self.compute_length_factor(num_units) - self.held_bytes * rows / self.rows
        return int(remaining_bytes / max(self.bytes_per_inner_row or self.peak_bytes / self.rows, 1))


@dataclass
class MemoryBudget:
    """Memory limit of one call of `explain`, and the measurements so far.

    Attributes:
        limit_bytes: The limit.
        measurements: Measured memory by pass type.
        exceeded_sizes: Rows and units of the largest pass that exceeded the limit, by pass type.
        meter: Measures the current batch; None if measurements suffice.
        pass_type: Type of the current passes.
        num_units: Number of units of the longest sample in the batch.
        batch_rows: Number of samples in the batch.
        inner_rows: Number of rows of the current inner pass; 0 if there is none.
        batch_peak_bytes: Peak memory of the batch until inner passes start.
        held_bytes: Live memory when inner passes start.
        bytes_per_inner_row: Largest memory of an inner pass per row. The maximum over methods counts, because they
            differ in memory and in the number of rows.
        inner_peak_bytes: Peak memory of the inner passes.
        max_inner_rows: Largest number of rows of an inner pass.
        required_bytes: Largest memory that the batch needed.
    """

    limit_bytes: int
    measurements: dict[str, _PassMeasurement] = field(default_factory=dict)
    exceeded_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    meter: "TensorMemoryMeter | CudaMemoryMeter | None" = None
    pass_type: str = ""
    num_units: int = 0
    batch_rows: int = 0
    inner_rows: int = 0
    batch_peak_bytes: float = 0
    held_bytes: float = 0
    bytes_per_inner_row: float = 0
    inner_peak_bytes: float = 0
    max_inner_rows: int = 1
    required_bytes: float = 0

    @property
    def _target_bytes(self) -> float:
        """Memory that tensors may take."""
        return self.limit_bytes * TARGET_MEMORY_FRACTION

    def _find_measurement(self, pass_type: str) -> _PassMeasurement | None:
        return self.measurements.get(pass_type) or self.measurements.get(CLEAN_PASS_NAME)

    def _cap_rows(self, pass_type: str, num_units: int, rows: int) -> int:
        """`rows`, but at least one, and at most half of a pass that exceeded the limit."""
        exceeded_rows, exceeded_units = self.exceeded_sizes.get(pass_type, (0, 0))
        if exceeded_rows and num_units >= exceeded_units:
            rows = min(rows, exceeded_rows // 2)
        return max(1, rows)

    def compute_batch_rows(self, pass_types: Collection[str], num_units: int) -> int:
        """Return how many samples may share a batch; one as long as there is no measurement.

        Args:
            pass_types: Types of the passes that run over the batch.
            num_units: Number of units of the longest sample.

        Returns:
            The smallest number of all pass types, at least 1.
        """
        return min(self._compute_rows_of_type(pass_type, num_units) for pass_type in pass_types)

    def _compute_rows_of_type(self, pass_type: str, num_units: int) -> int:
        rows = 1
        if (measurement := self._find_measurement(pass_type)) is not None:
            rows = measurement.compute_batch_rows(self._target_bytes, num_units)
        return self._cap_rows(pass_type, num_units, rows)

    def _is_measured(self, pass_type: str, num_units: int) -> bool:
        measurement = self.measurements.get(pass_type)
        return measurement is not None and num_units <= measurement.num_units * REMEASURE_LENGTH_FACTOR

    @contextmanager
    def measure_batch(self, pass_types: Collection[str], num_units: int, device: torch.device) -> Iterator[None]:
        """Run one batch under this budget, with a meter if measurements do not suffice.

        Args:
            pass_types: Types of the passes that run over the batch.
            num_units: Number of units of the longest sample.
            device: Device of the model.

        Yields:
            Nothing: the `with` contains all passes of the batch. The budget holds in this thread only.

        Raises:
            InputError: A single sample needs more than the limit.
        """
        self.meter = None
        if not all(self._is_measured(pass_type, num_units) for pass_type in pass_types):
            self.meter = CudaMemoryMeter(device) if device.type == "cuda" else TensorMemoryMeter()
        self.pass_type = ""
        self.batch_rows = 1
        self.num_units = num_units
        self.inner_rows = 0
        self.required_bytes = 0
        outer_budget = _THREAD_STATE.budget
        _THREAD_STATE.budget = self
        try:
            with self.meter or nullcontext():
                yield
        finally:
            _THREAD_STATE.budget = outer_budget
        if self.required_bytes > self.limit_bytes:  # of a single row: more rows would have been stopped
            raise memory_too_small_error(self.limit_bytes, num_units, format_bytes(self.required_bytes))

    @contextmanager
    def measure_passes(self, pass_type: str, rows: int, num_units: int) -> Iterator[None]:
        """Run all passes of one type over a batch, and measure them.

        Args:
            pass_type: Type of the passes.
            rows: Number of samples in the batch.
            num_units: Number of units of the longest sample.

        Yields:
            Nothing: the `with` contains the passes; nothing is stored if they raise an exception.
        """
        _trim_malloc()
        self.pass_type = pass_type
        self.batch_rows = rows
        self.num_units = num_units
        self.inner_rows = 0
        self.bytes_per_inner_row = self.inner_peak_bytes = 0
        inner_rows = 1
        if (measurement := self._find_measurement(pass_type)) is not None:
            inner_rows = measurement.compute_inner_rows(self._target_bytes, num_units, rows)
        self.max_inner_rows = self._cap_rows(pass_type, num_units, inner_rows)
        self._reset_peak()
        yield
        if self.meter is None:
            return
        if self.inner_rows:
            measurement = _PassMeasurement(
                num_units, rows, self.batch_peak_bytes, self.held_bytes, self._measure_inner_row()
            )
        else:
            measurement = _PassMeasurement(num_units, rows, float(self.meter.peak_bytes))
        self.required_bytes = max(self.required_bytes, measurement.peak_bytes, self.inner_peak_bytes)
        self.measurements[pass_type] = measurement

    def start_inner_pass(self, rows: int) -> None:
        """Note the start of an inner pass with this number of rows.

        Args:
            rows: Number of rows of the inner pass, such as integration steps × samples.
        """
        if not self.pass_type:
            return
        if self.meter is not None:
            if self.inner_rows:
                self.bytes_per_inner_row = self._measure_inner_row()
            else:
                self.batch_peak_bytes = self.meter.peak_bytes
                self.held_bytes = self.meter.live_bytes
        self.inner_rows = rows
        self._reset_peak()

    def _measure_inner_row(self) -> float:
        """Largest memory of an inner pass per row, that of the current one included."""
        assert self.meter is not None
        self.inner_peak_bytes = max(self.inner_peak_bytes, self.meter.peak_bytes)
        return max(self.bytes_per_inner_row, (self.meter.peak_bytes - self.held_bytes) / self.inner_rows)

    def _reset_peak(self) -> None:
        if self.meter is not None:
            self.meter.peak_bytes = self.meter.live_bytes
        self._set_meter_limit()

    def _set_meter_limit(self) -> None:
        if self.meter is None:
            return
        is_single = max(self.batch_rows, self.inner_rows) <= 1
        self.meter.limit_bytes = self.limit_bytes * (SINGLE_INPUT_LIMIT_FACTOR if is_single else 1)

    def shrink_after_exceeding(self) -> None:
        """Halve the number of rows after a pass that exceeded the limit.

        Raises:
            InputError: The pass had a single row.
        """
        rows = max(self.batch_rows, self.inner_rows)
        if rows <= 1:
            raise memory_too_small_error(
                self.limit_bytes,
                self.num_units,
                f"more than {format_bytes(SINGLE_INPUT_LIMIT_FACTOR * self.limit_bytes)}",
            )
        self.exceeded_sizes[self.pass_type] = (rows, self.num_units)

    def compute_max_inner_rows(self) -> int:
        """Return how many rows an inner pass may have, from the measurement of the current inner passes.

        Returns:
            The number; while the first inner passes are measured, at most four times that of the last one.
        """
        if self.meter is None or self.pass_type in self.measurements or not self.inner_rows:
            return self.max_inner_rows
        measurement = _PassMeasurement(
            self.num_units, self.batch_rows, self.batch_peak_bytes, self.held_bytes, max(self._measure_inner_row(), 1)
        )
        rows = measurement.compute_inner_rows(self._target_bytes, self.num_units, self.batch_rows)
        return self._cap_rows(self.pass_type, self.num_units, min(rows, 4 * self.inner_rows))


def memory_too_small_error(limit_bytes: int, num_units: int, required: str) -> InputError:
    """Return the error for a budget that a single input exceeds."""
    return InputError(
        f"memory={format_bytes(limit_bytes)!r} is too small: one input of {num_units} units needs {required} with "
        "these methods (in addition to the model itself). Raise the limit, shorten the input (max_length=), or explain "
        "it with fewer methods at a time"
    )


def _trim_malloc() -> None:
    """Return freed memory to the system: glibc keeps it, and the memory of all pass types would add up."""
    if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


class _ThreadState(threading.local):
    budget: MemoryBudget | None = None


_THREAD_STATE = _ThreadState()


def budgeted_passes(pass_type: str, rows: int, num_units: int) -> AbstractContextManager[None]:
    """Context in which all passes of one type over a batch run; it does nothing without a budget.

    Args:
        pass_type: Type of the passes.
        rows: Number of samples in the batch.
        num_units: Number of units of the longest sample.
    """
    if _THREAD_STATE.budget is None:
        return nullcontext()
    return _THREAD_STATE.budget.measure_passes(pass_type, rows, num_units)


def start_budgeted_pass(rows: int) -> None:
    """Note the start of an inner pass with this number of rows; does nothing without a budget."""
    if _THREAD_STATE.budget is not None:
        _THREAD_STATE.budget.start_inner_pass(rows)


def limit_rows(rows: int, remeasure: bool = False) -> int:
    """Return how many rows an inner pass may have.

    Args:
        rows: The largest number without a budget.
        remeasure: Whether the measurement of the current inner passes counts, for callers that ask before each pass.
    """
    budget = _THREAD_STATE.budget
    if budget is None:
        return rows
    max_rows = budget.compute_max_inner_rows() if remeasure else budget.max_inner_rows
    return max(1, min(rows, max_rows))
