"""Engines: where chunks are computed. Each takes tasks and gives shards, in any order; the store does not care.

An engine is a function (worker, tasks, workers, address) → shards, registered by name; `ray` has its own file.
"""

import os
from collections.abc import Callable, Iterator, Sequence

from clearhead.bench.job import Task
from clearhead.bench.store import Shard
from clearhead.bench.worker import Worker, start_here, work_here
from clearhead.errors import ClearheadError, InputError, unknown

Engine = Callable[[Worker, Sequence[Task], int, str | None], Iterator[Shard]]
ENGINES: dict[str, Engine] = {}
#: Those that know no machine but this one.
HERE = ("local", "processes")


def register(name: str) -> Callable[[Engine], Engine]:
    def add(engine: Engine) -> Engine:
        ENGINES[name] = engine
        return engine

    return add


def engine(name: str, address: str | None = None) -> Engine:
    """An engine by its name; with an address, one that goes elsewhere."""
    if name not in ENGINES:
        raise unknown("engine", name, sorted(ENGINES))
    if address is not None and name in HERE:
        raise InputError(f"engine={name!r} computes on this machine: an address is for engine='ray'")
    return ENGINES[name]


def opened_anew(name: str, worker: Worker) -> None:
    """Refuse objects where each process opens model and data by their names."""
    for what, given in (("model", worker.given), ("data", worker.data_given)):
        if given is not None:
            raise InputError(f"engine={name!r} opens the {what} anew in each process: give its name, not the object")


@register("local")
def local(worker: Worker, tasks: Sequence[Task], workers: int = 1, address: str | None = None) -> Iterator[Shard]:
    """One after the other, in this process."""
    for task in tasks:
        yield worker(task)


@register("processes")
def processes(worker: Worker, tasks: Sequence[Task], workers: int = 2, address: str | None = None) -> Iterator[Shard]:
    """Several processes on this machine, each with the model of its own. Each computes on one thread."""
    from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    opened_anew("processes", worker)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = ProcessPoolExecutor(
        max(1, workers), mp_context=get_context("spawn"), initializer=start_here, initargs=(worker.job,)
    )
    try:
        for done in as_completed([pool.submit(work_here, task) for task in tasks]):
            yield done.result()
    except BrokenExecutor:
        raise ClearheadError(
            "a worker process ended before its chunk was done (killed, or out of memory?): the same command goes on "
            "with what is stored; fewer --workers or a smaller --batch-size need less memory"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)  # whoever stops a run does not wait for chunks that nobody will store
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before
