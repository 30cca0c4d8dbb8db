"""Engines: where chunks are computed. Each takes tasks and gives shards, in any order; the store does not care.

An engine is a function (worker, tasks) → shards, registered by name; `ray` is added by its own file.
"""

import os
from collections.abc import Callable, Iterator, Sequence

from clearhead.bench.planning import Task
from clearhead.bench.store import Shard
from clearhead.bench.working import Worker, start_here, work_here
from clearhead.errors import InputError, unknown

Engine = Callable[[Worker, Sequence[Task], int], Iterator[Shard]]
ENGINES: dict[str, Engine] = {}


def register(name: str) -> Callable[[Engine], Engine]:
    def add(engine: Engine) -> Engine:
        ENGINES[name] = engine
        return engine

    return add


def engine(name: str) -> Engine:
    if name not in ENGINES:
        raise unknown("engine", name, sorted(ENGINES))
    return ENGINES[name]


@register("local")
def local(worker: Worker, tasks: Sequence[Task], workers: int = 1) -> Iterator[Shard]:
    """One after the other, in this process."""
    for task in tasks:
        yield worker(task)


@register("processes")
def processes(worker: Worker, tasks: Sequence[Task], workers: int = 2) -> Iterator[Shard]:
    """Several processes on this machine, each with the model of its own. Each computes on one thread."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    if worker.given is not None:
        raise InputError("engine='processes' opens the model anew in each process: give its name, not the object")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        pool = ProcessPoolExecutor(
            max(1, workers), mp_context=get_context("spawn"), initializer=start_here, initargs=(worker.job,)
        )
        with pool:
            for done in as_completed([pool.submit(work_here, task) for task in tasks]):
                yield done.result()
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before
