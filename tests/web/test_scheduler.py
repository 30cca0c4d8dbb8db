"""The queue: bounded, cheapest first, nobody passed by for long, everything ends when it was promised to."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from clearhead.web.cancellation import RunCancelledError
from clearhead.web.limits import Limits
from clearhead.web.scheduler import JobEvent, JobScheduler, QueueFullError, RequestJob, WorkItem


class Told(list[JobEvent]):
    """What a job told, and whether it ended."""

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


class Bench:
    """A queue with one worker whose first job holds it until it is let go."""

    def __init__(self, **limits: Any) -> None:
        self.queue = JobScheduler(Limits(**{"workers": 1, **limits}))
        self.ran: list[list[Any]] = []
        self.gate = threading.Event()
        self.held = self.submit("gate", lambda steps: void(self.gate.wait(10)))
        self.queue.start()
        while self.queue.jobs[self.held.job].work_items:
            time.sleep(0.005)

    def submit(
        self,
        model: str,
        run: Callable[[Sequence[WorkItem]], None] | None = None,
        *,
        cost: float = 1.0,
        alike: Any = None,
        name: Any = None,
        seconds: float = 60.0,
    ) -> Any:
        told = Told()
        job = RequestJob(model, told, seconds)
        job.work_items.append(WorkItem(job, run or self.note, cost, alike, name))
        self.queue.submit(job)
        told.job = job.id  # type: ignore[attr-defined]
        return told

    def note(self, steps: Sequence[WorkItem]) -> None:
        self.ran.append([step.payload for step in steps])


def void(value: object) -> None:
    """Nothing is done with it."""


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Any:
    made = Bench(**getattr(request, "param", {}))
    yield made
    made.gate.set()
    made.queue.stop()


def test_the_cheapest_goes_first_and_equals_in_their_order(bench: Bench) -> None:
    told = [bench.submit("m", cost=cost, name=name) for cost, name in ((9, "dear"), (1, "first"), (1, "second"))]
    bench.gate.set()
    assert [one.last for one in told] == ["done"] * 3
    assert bench.ran == [["first"], ["second"], ["dear"]]


@pytest.mark.parametrize("bench", [{"patience": 0.05}], indirect=True)
def test_who_has_waited_long_is_passed_by_no_more(bench: Bench) -> None:
    dear = bench.submit("m", cost=9, name="dear")
    time.sleep(0.1)
    cheap = bench.submit("m", cost=1, name="cheap")
    bench.gate.set()
    assert dear.last == cheap.last == "done"
    assert bench.ran == [["dear"], ["cheap"]]


@pytest.mark.parametrize("bench", [{"together": 3}], indirect=True)
def test_those_alike_share_a_run_up_to_a_number(bench: Bench) -> None:
    told = [bench.submit("m", alike="a", name=i) for i in range(4)] + [bench.submit("m", alike="b", name="other")]
    bench.gate.set()
    assert [one.last for one in told] == ["done"] * 5
    assert bench.ran == [[0, 1, 2], [3], ["other"]]


@pytest.mark.parametrize("bench", [{"waiting": 2}], indirect=True)
def test_one_too_many_is_turned_away_with_a_hint(bench: Bench) -> None:
    bench.submit("m")
    with pytest.raises(QueueFullError, match="try again in") as turned:
        bench.submit("m")
    assert 1 <= turned.value.retry_after_seconds <= 60
    bench.gate.set()
    assert bench.held.last == "done"


def test_a_waiting_job_can_be_cancelled_and_never_runs(bench: Bench) -> None:
    told = bench.submit("m", name="never")
    assert bench.queue.cancel(told.job) and not bench.queue.cancel("nobody")
    assert told.last == "cancelled"  # at once, although the worker is still held
    bench.gate.set()
    assert bench.held.last == "done" and bench.ran == []


def test_what_is_not_done_in_time_is_given_up(bench: Bench) -> None:
    told = bench.submit("m", name="late", seconds=0.05)
    time.sleep(0.1)
    bench.gate.set()
    assert told.last == "expired" and "0 s" in told[-1]["message"] and bench.ran == []


@pytest.mark.parametrize("problem", [RuntimeError("secret path /root/x"), RunCancelledError()])
def test_a_fault_ends_neither_the_worker_nor_says_what_is_inside(bench: Bench, problem: BaseException) -> None:
    def fail(steps: Sequence[WorkItem]) -> None:
        raise problem

    told, after = bench.submit("m", fail), bench.submit("m", name="after")
    bench.gate.set()
    assert told.last == after.last == "done" and bench.ran == [["after"]]
    assert "secret" not in str(list(told))


@pytest.mark.parametrize("bench", [{"workers": 2}], indirect=True)
def test_a_model_is_with_one_worker_at_a_time(bench: Bench) -> None:
    inside, most = [0], [0]

    def count(steps: Sequence[WorkItem]) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1

    told = [bench.submit("m", count) for _ in range(4)]  # while the gate holds the other worker
    bench.gate.set()
    told += [bench.submit("m", count) for _ in range(4)]
    assert [one.last for one in told] == ["done"] * 8 and most == [1]


def test_leisure_is_for_when_nobody_waits(bench: Bench) -> None:
    bench.queue.background_tasks.append(("m", lambda: bench.ran.append(["leisure"])))
    told = bench.submit("m", cost=9, name="work")
    bench.gate.set()
    assert told.last == "done"
    for _ in range(100):
        if len(bench.ran) == 2:
            break
        time.sleep(0.02)
    assert bench.ran == [["work"], ["leisure"]]


def test_what_can_wait_makes_room_and_is_taken_up_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.web.scheduler.MIN_RUN_SECONDS", 0.0)
    tries = []

    def long(steps: Sequence[WorkItem]) -> None:
        tries.append(len(bench.ran))
        bench.queue.yield_if_contended(steps[0], time.monotonic())
        bench.ran.append(["long"])

    told = [bench.submit("m", long, cost=0.5), bench.submit("m", cost=1, name="short"), bench.submit("n", name="other")]
    bench.gate.set()
    assert [one.last for one in told] == ["done"] * 3
    assert tries[-1] >= 1 and bench.ran.index(["short"]) < bench.ran.index(["long"])
