"""A bounded queue in front of the models: cheapest first, nobody passed by for long, nothing kept longer than promised.

Every request that computes is a `Job` of one model. Workers take the next step of some job; a model is with one worker
at a time. A job that would be one too many is turned away with a hint when to come again.
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
from clearhead.web.cancellation import Stopped, Yielded
from clearhead.web.limits import Limits

Event = dict[str, Any]
#: Seconds that a run which gives way has at least.
SHARE = 0.3
log = logging.getLogger("clearhead.web")
_numbers = count()


class Full(Exception):
    """There is no room for another job; after so many seconds there should be."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many requests are waiting: try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(eq=False)
class Step:
    """A part of a job that is run in one go.

    run: computes it for this step, and for others that are `alike`, at once
    cost: in forward passes, as declared
    """

    job: "Job"
    run: "Callable[[Sequence[Step]], None]"
    cost: float
    alike: Hashable = None
    about: Any = None


@dataclass(eq=False)
class Job:
    """One request. `tell` hands an event to whoever waits for it, from any thread."""

    model: str
    tell: Callable[[Event], None]
    seconds: float
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    number: int = field(default_factory=lambda: next(_numbers))
    since: float = field(default_factory=time.monotonic)
    steps: deque[Step] = field(default_factory=deque)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def expired(self) -> bool:
        return self.waited >= self.seconds

    @property
    def waited(self) -> float:
        return time.monotonic() - self.since

    @property
    def over(self) -> bool:
        return self.cancelled.is_set() or self.expired

    def end(self) -> None:
        """The last event: nothing comes after it."""
        if self.cancelled.is_set():
            self.tell({"event": "cancelled"})
        elif self.expired:
            self.tell({"event": "expired", "message": too_long(self.seconds)})
        else:
            self.tell({"event": "done", "seconds": round(self.waited, 3)})


def too_long(seconds: float) -> str:
    return f"this took more than {seconds:.0f} s and was given up: ask for fewer or cheaper methods, or a shorter input"


class Queue:
    """Jobs, and the threads that work on them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.jobs: dict[str, Job] = {}
        self.busy: set[str] = set()
        self.running: set[Step] = set()
        self.changed = threading.Condition()
        self.closed = False
        self.pace = 0.5  # seconds from one job's end to the next one's, lately
        self._last_end = time.monotonic()
        self.threads: list[threading.Thread] = []
        #: What may be done with a model while nobody waits, in one thread at a time.
        self.idle: deque[tuple[str, Callable[[], object]]] = deque()

    def start(self) -> None:
        self.closed = False
        named = (f"clearhead worker {number}" for number in range(self.limits.workers))
        self.threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in named]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        with self.changed:
            self.closed = True
            for job in self.jobs.values():
                job.cancelled.set()
            self.changed.notify_all()
        for thread in self.threads:
            thread.join(timeout=5)

    def check_room(self) -> None:
        with self.changed:
            self._close_those_done()
            if len(self.jobs) >= self.limits.waiting:
                raise Full(self.retry_after)

    def submit(self, job: Job) -> None:
        with self.changed:
            self.check_room()
            self.jobs[job.id] = job
            job.tell({"event": "queued", "id": job.id, "before": len(self.jobs) - 1, "seconds": job.seconds})
            self.changed.notify_all()

    def cancel(self, job_id: str) -> bool:
        with self.changed:
            job = self.jobs.get(job_id)
            if job is not None:
                job.cancelled.set()
                self._close_those_done()
        return job is not None

    @property
    def retry_after(self) -> int:
        """In how many seconds a quarter of those who wait should be through."""
        return min(60, max(1, math.ceil(self.pace * len(self.jobs) / 4)))

    def _work(self) -> None:
        while True:
            with self.changed:
                steps = self._take() or self._at_leisure()
                while not steps:
                    if self.closed:
                        return
                    self.changed.wait(timeout=1.0)
                    steps = self._take() or self._at_leisure()
            try:
                steps[0].run(steps)
            except Stopped:
                pass
            except Yielded:
                with self.changed:
                    steps[0].cost = math.inf  # after all those that it made room for
                    steps[0].job.steps.appendleft(steps[0])
            except Exception as problem:  # a fault of ours must not end the worker, nor be kept from who asked
                log.exception("a step failed")
                for step in steps:
                    step.job.tell({"event": "problem", "message": said(problem)})
            finally:
                with self.changed:
                    self.busy.discard(steps[0].job.model)
                    self.running.difference_update(steps)
                    self._close_those_done()
                    self.changed.notify_all()

    def give_way(self, step: Step, began: float) -> None:
        """For a run that can be broken off: make room once it has had its share and others wait for the model."""
        if time.monotonic() - began < SHARE or step.job.waited > self.limits.seconds / 2:
            return
        with self.changed:
            others = any(job.model == step.job.model and job.steps for job in self.jobs.values() if job is not step.job)
        if others:
            raise Yielded

    def _at_leisure(self) -> list[Step]:
        """Something that nobody waits for; one worker at most is at such a thing."""
        if not self.idle or self.closed or self.busy:
            return []
        model, work = self.idle.popleft()
        self.busy.add(model)

        def run(steps: Sequence[Step]) -> None:
            work()

        return [Step(Job(model, lambda event: None, math.inf), run, math.inf)]

    def _take(self) -> list[Step]:
        """The next step and, if others wait that are alike, those too."""
        self._close_those_done()
        waiting = [job.steps[0] for job in self.jobs.values() if job.model not in self.busy and job.steps]
        if not waiting:
            return []
        chosen = min(waiting, key=self._rank)
        alike = [step for step in waiting if step.alike is not None and step.alike == chosen.alike and step != chosen]
        steps = [chosen, *sorted(alike, key=self._rank)[: self.limits.together - 1]]
        for step in steps:
            step.job.steps.popleft()
        self.running.update(steps)
        self.busy.add(chosen.job.model)
        return steps

    def _rank(self, step: Step) -> tuple[float, int]:
        # What gave way to others waits longer, but not until it is given up.
        late = step.job.waited > (self.limits.patience if step.cost < math.inf else self.limits.seconds / 2)
        return (0.0 if late else step.cost, step.job.number)

    def _close_those_done(self) -> None:
        at_work = {step.job.id for step in self.running}
        for job in [job for job in self.jobs.values() if job.id not in at_work and (job.over or not job.steps)]:
            del self.jobs[job.id]
            job.end()
            now = time.monotonic()
            self.pace += 0.1 * (min(now - self._last_end, job.waited) - self.pace)
            self._last_end = now


def said(problem: Exception) -> str:
    """What is told about an error: ours as it is, others without what they may carry from inside."""
    if isinstance(problem, ClearheadError):
        return str(problem)
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return "this needs more memory than there is: shorten the input, or ask for a cheaper method"
    return f"unexpected {type(problem).__name__}: this is a fault of clearhead; the server's terminal says where"
