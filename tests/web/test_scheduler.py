"""The job scheduler: bounded queue, cheapest first, no starvation, and deadlines."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from clearhead.web.cancellation import RunCancelledError
from clearhead.web.limits import Limits
from clearhead.web.scheduler import JobEvent, JobScheduler, QueueFullError, RequestJob, WorkItem


class EventLog(list[JobEvent]):
    """The events of a job, and whether it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def __call__(self, event: JobEvent) -> None:
        self.append(event)
        if event["event"] in ("done", "cancelled", "expired"):
            self.ended.set()

    @property
    def last(self) -> str:
        assert self.ended.wait(10)
        return str(self[-1]["event"])


class SchedulerHarness:
    """A scheduler with one worker, whose first job blocks it until the gate is set."""

    def __init__(self, **limits: Any) -> None:
        self.queue = JobScheduler(Limits(**{"num_workers": 1, **limits}))
        self.ran: list[list[Any]] = []
        self.gate = threading.Event()
        self.blocking_job = self.submit("gate", lambda steps: discard(self.gate.wait(10)))
        self.queue.start()
        while self.queue.jobs[self.blocking_job.job].work_items:
            time.sleep(0.005)

    def submit(
        self,
        model: str,
        run: Callable[[Sequence[WorkItem]], None] | None = None,
        *,
        cost: float = 1.0,
        batch_key: Any = None,
        name: Any = None,
        seconds: float = 60.0,
    ) -> Any:
        log = EventLog()
        job = RequestJob(model, log, seconds)
        job.work_items.append(WorkItem(job, run or self.note, cost, batch_key, name))
        self.queue.submit(job)
        log.job = job.id  # type: ignore[attr-defined]
        return log

    def note(self, steps: Sequence[WorkItem]) -> None:
        self.ran.append([step.payload for step in steps])


def discard(value: object) -> None:
    """Ignore a return value."""


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Any:
    instance = SchedulerHarness(**getattr(request, "param", {}))
    yield instance
    instance.gate.set()
    instance.queue.stop()


def test_cheapest_job_runs_first_and_ties_keep_their_order(harness: SchedulerHarness) -> None:
    logs = [harness.submit("m", cost=cost, name=name) for cost, name in ((9, "expensive"), (1, "first"), (1, "second"))]
    harness.gate.set()
    assert [log.last for log in logs] == ["done"] * 3
    assert harness.ran == [["first"], ["second"], ["expensive"]]


@pytest.mark.parametrize("harness", [{"starvation_seconds": 0.05}], indirect=True)
def test_job_waiting_beyond_the_starvation_limit_is_not_overtaken(harness: SchedulerHarness) -> None:
    expensive = harness.submit("m", cost=9, name="expensive")
    time.sleep(0.1)
    cheap = harness.submit("m", cost=1, name="cheap")
    harness.gate.set()
    assert expensive.last == cheap.last == "done"
    assert harness.ran == [["expensive"], ["cheap"]]


@pytest.mark.parametrize("harness", [{"max_batch_size": 3}], indirect=True)
def test_jobs_with_equal_batch_key_share_a_run_up_to_the_limit(harness: SchedulerHarness) -> None:
    logs = [harness.submit("m", batch_key="a", name=i) for i in range(4)] + [
        harness.submit("m", batch_key="b", name="other")
    ]
    harness.gate.set()
    assert [log.last for log in logs] == ["done"] * 5
    assert harness.ran == [[0, 1, 2], [3], ["other"]]


@pytest.mark.parametrize("harness", [{"max_pending_requests": 2}], indirect=True)
def test_full_queue_raises_with_retry_after(harness: SchedulerHarness) -> None:
    harness.submit("m")
    with pytest.raises(QueueFullError, match="try again in") as raised:
        harness.submit("m")
    assert 1 <= raised.value.retry_after_seconds <= 60
    harness.gate.set()
    assert harness.blocking_job.last == "done"


def test_cancelled_waiting_job_never_runs(harness: SchedulerHarness) -> None:
    log = harness.submit("m", name="never")
    assert harness.queue.cancel(log.job) and not harness.queue.cancel("unknown")
    assert log.last == "cancelled"  # at once, although the worker is still blocked
    harness.gate.set()
    assert harness.blocking_job.last == "done" and harness.ran == []


def test_job_past_its_deadline_expires(harness: SchedulerHarness) -> None:
    log = harness.submit("m", name="late", seconds=0.05)
    time.sleep(0.1)
    harness.gate.set()
    assert log.last == "expired" and "0 s" in log[-1]["message"] and harness.ran == []


@pytest.mark.parametrize("problem", [RuntimeError("secret path /root/x"), RunCancelledError()])
def test_job_error_keeps_the_worker_alive_and_hides_details(harness: SchedulerHarness, problem: BaseException) -> None:
    def fail(steps: Sequence[WorkItem]) -> None:
        raise problem

    failed, next_job = harness.submit("m", fail), harness.submit("m", name="after")
    harness.gate.set()
    assert failed.last == next_job.last == "done" and harness.ran == [["after"]]
    assert "secret" not in str(list(failed))


@pytest.mark.parametrize("harness", [{"num_workers": 2}], indirect=True)
def test_model_is_used_by_one_worker_at_a_time(harness: SchedulerHarness) -> None:
    num_running, max_running = [0], [0]

    def count(steps: Sequence[WorkItem]) -> None:
        num_running[0] += 1
        max_running[0] = max(max_running[0], num_running[0])
        time.sleep(0.02)
        num_running[0] -= 1

    logs = [harness.submit("m", count) for _ in range(4)]  # while the gate holds the other worker
    harness.gate.set()
    logs += [harness.submit("m", count) for _ in range(4)]
    assert [log.last for log in logs] == ["done"] * 8 and max_running == [1]


def test_background_task_runs_after_waiting_jobs(harness: SchedulerHarness) -> None:
    harness.queue.background_tasks.append(("m", lambda: harness.ran.append(["background"])))
    log = harness.submit("m", cost=9, name="work")
    harness.gate.set()
    assert log.last == "done"
    for _ in range(100):
        if len(harness.ran) == 2:
            break
        time.sleep(0.02)
    assert harness.ran == [["work"], ["background"]]


def test_long_job_yields_to_waiting_jobs_and_resumes(
    harness: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.web.scheduler.MIN_RUN_SECONDS", 0.0)
    attempts = []

    def run_long_job(steps: Sequence[WorkItem]) -> None:
        attempts.append(len(harness.ran))
        harness.queue.yield_if_contended(steps[0], time.monotonic())
        harness.ran.append(["long"])

    logs = [
        harness.submit("m", run_long_job, cost=0.5),
        harness.submit("m", cost=1, name="short"),
        harness.submit("n", name="other"),
    ]
    harness.gate.set()
    assert [log.last for log in logs] == ["done"] * 3
    assert attempts[-1] >= 1 and harness.ran.index(["short"]) < harness.ran.index(["long"])
