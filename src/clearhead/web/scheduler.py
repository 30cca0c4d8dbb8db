"""Bounded, cost-ordered job scheduler with starvation protection and a per-job deadline.

Each request that runs a model is a job of one model. Worker threads take the next work item of a job; each model is
used by one worker at a time. If the queue is full, a job is rejected with a Retry-After hint.
"""

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.web.cancellation import RunCancelledError, RunPreemptedError
from clearhead.web.limits import Limits

JobEvent = dict[str, Any]
#: Minimum running time of a preemptible run, in seconds.
MIN_RUN_SECONDS = 0.3
logger = logging.getLogger("clearhead.web")
_sequence_numbers = count()


class QueueFullError(Exception):
    """The queue is full.

    Args:
        retry_after_seconds: Estimated time until a job can be accepted.
    """

    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__(f"too many requests are waiting: try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


@dataclass(eq=False)
class WorkItem:
    """A part of a job that runs without interruption.

    Attributes:
        job: Its job.
        run: Function that runs this item, together with others of the same batch key.
        cost_passes: Declared cost in forward passes.
        batch_key: Items with equal keys run together; None runs alone.
        payload: Data for `run`.
    """

    job: "RequestJob"
    run: "Callable[[Sequence[WorkItem]], None]"
    cost_passes: float
    batch_key: Hashable = None
    payload: Any = None


@dataclass(eq=False)
class RequestJob:
    """One request.

    Attributes:
        model_name: Model that the request needs.
        emit: Function that sends an event to the client, callable from any thread.
        timeout_seconds: Deadline, counted from submission.
        id: Unguessable id, to cancel the request by.
        sequence_number: Order of arrival.
        submitted_at: Monotonic time of submission.
        work_items: Items that have not started yet.
        cancel_event: Set when the request is cancelled.
    """

    model_name: str
    emit: Callable[[JobEvent], None]
    timeout_seconds: float
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    sequence_number: int = field(default_factory=lambda: next(_sequence_numbers))
    submitted_at: float = field(default_factory=time.monotonic)
    work_items: deque[WorkItem] = field(default_factory=deque)
    cancel_event: threading.Event = field(default_factory=threading.Event)

    @property
    def is_expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.elapsed_seconds >= self.timeout_seconds

    @property
    def elapsed_seconds(self) -> float:
        """Time since submission."""
        return time.monotonic() - self.submitted_at

    @property
    def is_abandoned(self) -> bool:
        """Whether the job is cancelled or expired."""
        return self.cancel_event.is_set() or self.is_expired

    def emit_final_event(self) -> None:
        """Emit the last event: cancelled, expired or done."""
        if self.cancel_event.is_set():
            self.emit({"event": "cancelled"})
        elif self.is_expired:
            self.emit({"event": "expired", "message": format_timeout_message(self.timeout_seconds)})
        else:
            self.emit({"event": "done", "elapsed_seconds": round(self.elapsed_seconds, 3)})


def format_timeout_message(seconds: float) -> str:
    """Format the message of an expired job."""
    return (
        f"the request took more than {seconds:.0f} s and was aborted: use fewer or cheaper methods, or a shorter input"
    )


class JobScheduler:
    """The queue of jobs and the worker threads.

    Args:
        limits: Number of workers, length of the queue and time limits.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.jobs: dict[str, RequestJob] = {}
        self.busy_models: set[str] = set()
        self.running_items: set[WorkItem] = set()
        self.state_changed = threading.Condition()
        self.is_closed = False
        self.seconds_per_job = 0.5  # moving average of the time between the ends of jobs
        self._last_finish_time = time.monotonic()
        self.worker_threads: list[threading.Thread] = []
        #: Model name and function, run one at a time while no model is in use.
        self.background_tasks: deque[tuple[str, Callable[[], object]]] = deque()

    def start(self) -> None:
        """Start the worker threads."""
        self.is_closed = False
        names = [f"clearhead worker {index}" for index in range(self.limits.num_workers)]
        self.worker_threads = [threading.Thread(target=self._run_worker, name=name, daemon=True) for name in names]
        for thread in self.worker_threads:
            thread.start()

    def stop(self) -> None:
        """Cancel all jobs and wait for the worker threads."""
        with self.state_changed:
            self.is_closed = True
            for job in self.jobs.values():
                job.cancel_event.set()
            self.state_changed.notify_all()
        for thread in self.worker_threads:
            thread.join(timeout=5)

    def check_capacity(self) -> None:
        """Check that another job can be accepted.

        Raises:
            QueueFullError: The queue is full.
        """
        with self.state_changed:
            self._remove_finished_jobs()
            if len(self.jobs) >= self.limits.max_pending_requests:
                raise QueueFullError(self.retry_after_seconds)

    def submit(self, job: RequestJob) -> None:
        """Add a job to the queue.

        Raises:
            QueueFullError: The queue is full.
        """
        with self.state_changed:
            self.check_capacity()
            self.jobs[job.id] = job
            job.emit(
                {
                    "event": "queued",
                    "id": job.id,
                    "num_before": len(self.jobs) - 1,
                    "timeout_seconds": job.timeout_seconds,
                }
            )
            self.state_changed.notify_all()

    def cancel(self, job_id: str) -> bool:
        """Cancel a job, which ends before its next work item; returns whether there is such a job."""
        with self.state_changed:
            job = self.jobs.get(job_id)
            if job is not None:
                job.cancel_event.set()
                self._remove_finished_jobs()
        return job is not None

    @property
    def retry_after_seconds(self) -> int:
        """Estimated time until a quarter of the jobs is finished, 1 to 60 s."""
        return min(60, max(1, math.ceil(self.seconds_per_job * len(self.jobs) / 4)))

    def _run_worker(self) -> None:
        """Take and run work items until the scheduler is closed."""
        while True:
            with self.state_changed:
                work_items = self._take_next_batch() or self._take_background_task()
                while not work_items:
                    if self.is_closed:
                        return
                    self.state_changed.wait(timeout=1.0)
                    work_items = self._take_next_batch() or self._take_background_task()
            try:
                work_items[0].run(work_items)
            except RunCancelledError:
                pass
            except RunPreemptedError:
                with self.state_changed:
                    work_items[0].cost_passes = math.inf  # run after all jobs that it was interrupted for
                    work_items[0].job.work_items.appendleft(work_items[0])
            except Exception as error:  # a bug must not end the worker, and the client must hear of it
                logger.exception("a work item failed")
                for work_item in work_items:
                    work_item.job.emit({"event": "error", "message": format_error_message(error)})
            finally:
                with self.state_changed:
                    self.busy_models.discard(work_items[0].job.model_name)
                    self.running_items.difference_update(work_items)
                    self._remove_finished_jobs()
                    self.state_changed.notify_all()

    def yield_if_contended(self, work_item: WorkItem, started_at: float) -> None:
        """Interrupt a preemptible run if other jobs wait for the model, after a minimum running time.

        Args:
            work_item: The running item.
            started_at: Monotonic time at which it started.

        Raises:
            RunPreemptedError: Other jobs wait.
        """
        if (
            time.monotonic() - started_at < MIN_RUN_SECONDS
            or work_item.job.elapsed_seconds > self.limits.timeout_seconds / 2
        ):
            return
        with self.state_changed:
            is_contended = any(
                job.model_name == work_item.job.model_name and job.work_items
                for job in self.jobs.values()
                if job is not work_item.job
            )
        if is_contended:
            raise RunPreemptedError

    def _take_background_task(self) -> list[WorkItem]:
        """Take a background task, if no model is in use."""
        if not self.background_tasks or self.is_closed or self.busy_models:
            return []
        model_name, task = self.background_tasks.popleft()
        self.busy_models.add(model_name)

        def run(work_items: Sequence[WorkItem]) -> None:
            task()

        return [WorkItem(RequestJob(model_name, lambda event: None, math.inf), run, math.inf)]

    def _take_next_batch(self) -> list[WorkItem]:
        """Take the work item of highest priority, and waiting items with the same batch key."""
        self._remove_finished_jobs()
        candidates = [
            job.work_items[0] for job in self.jobs.values() if job.model_name not in self.busy_models and job.work_items
        ]
        if not candidates:
            return []
        next_item = min(candidates, key=self._compute_priority)
        batchable = [
            item
            for item in candidates
            if item.batch_key is not None and item.batch_key == next_item.batch_key and item != next_item
        ]
        batch = [next_item, *sorted(batchable, key=self._compute_priority)[: self.limits.max_batch_size - 1]]
        for item in batch:
            item.job.work_items.popleft()
        self.running_items.update(batch)
        self.busy_models.add(next_item.job.model_name)
        return batch

    def _compute_priority(self, work_item: WorkItem) -> tuple[float, int]:
        """Return the sort key: cost, or 0 once the job has waited too long; then order of arrival."""
        max_wait = self.limits.starvation_seconds
        if work_item.cost_passes == math.inf:  # preempted items wait longer, but not until they expire
            max_wait = self.limits.timeout_seconds / 2
        is_late = work_item.job.elapsed_seconds > max_wait
        return (0.0 if is_late else work_item.cost_passes, work_item.job.sequence_number)

    def _remove_finished_jobs(self) -> None:
        """Remove jobs that are finished or abandoned and not running, and emit their last event."""
        running_ids = {work_item.job.id for work_item in self.running_items}
        finished_jobs = [
            job for job in self.jobs.values() if job.id not in running_ids and (job.is_abandoned or not job.work_items)
        ]
        for job in finished_jobs:
            del self.jobs[job.id]
            job.emit_final_event()
            finish_time = time.monotonic()
            seconds = min(finish_time - self._last_finish_time, job.elapsed_seconds)
            self.seconds_per_job += 0.1 * (seconds - self.seconds_per_job)
            self._last_finish_time = finish_time


def format_error_message(error: Exception) -> str:
    """Format an error for the client: our own messages unchanged, others without their text, which may be internal."""
    if isinstance(error, ClearheadError):
        return str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: shorten the input, or use a cheaper method"
    return f"unexpected {type(error).__name__}: this is a bug in clearhead; the server's terminal has the details"
