"""Engines: where chunks are computed. Each takes tasks and gives shards, in any order; the store does not care.

An engine is a function (worker, tasks, workers, address) → shards, registered by name; `ray` has its own file.
"""

import os
from collections.abc import Callable, Iterator, Sequence

from clearhead.bench.job import ChunkTask
from clearhead.bench.store import Shard
from clearhead.bench.worker import ChunkWorker, init_process_worker, run_process_task
from clearhead.errors import ClearheadError, InputError, unknown_value_error

Engine = Callable[[ChunkWorker, Sequence[ChunkTask], int, str | None], Iterator[Shard]]
ENGINE_REGISTRY: dict[str, Engine] = {}
#: Those that know no machine but this one.
LOCAL_ENGINES = ("local", "processes")


def register_engine(name: str) -> Callable[[Engine], Engine]:
    """Register an engine: a function that computes the chunks of a run and yields their results as they come.

    Args:
        name: The value of `engine=` and of `--engine`.

    Returns:
        A decorator for a function of the worker, the tasks, the number of workers and an address; it yields one `Shard`
        per task, in any order.
    """

    def add(engine: Engine) -> Engine:
        ENGINE_REGISTRY[name] = engine
        return engine

    return add


def get_engine(name: str, address: str | None = None) -> Engine:
    """Return a registered engine.

    Args:
        name: Name of the engine: "local", "processes" or "ray".
        address: Address of a cluster; None for this machine.

    Returns:
        The function that computes the chunks of a run.

    Raises:
        InputError: If there is no such engine, or an engine of this machine gets an address.
    """
    if name not in ENGINE_REGISTRY:
        raise unknown_value_error("engine", name, sorted(ENGINE_REGISTRY))
    if address is not None and name in LOCAL_ENGINES:
        raise InputError(f"engine={name!r} runs on this machine: an address is only for engine='ray'")
    return ENGINE_REGISTRY[name]


def check_opened_by_name(engine_name: str, worker: ChunkWorker) -> None:
    """Refuse objects where each process opens model and data by their names."""
    for what, given in (("model", worker.preloaded_explainer), ("data", worker.preloaded_dataset)):
        if given is not None:
            raise InputError(
                f"engine={engine_name!r} opens the {what} again in each process: pass its name instead of the object"
            )


@register_engine("local")
def run_locally(
    worker: ChunkWorker, tasks: Sequence[ChunkTask], num_workers: int = 1, address: str | None = None
) -> Iterator[Shard]:
    """One after the other, in this process."""
    for task in tasks:
        yield worker(task)


@register_engine("processes")
def run_in_processes(
    worker: ChunkWorker, tasks: Sequence[ChunkTask], num_workers: int = 2, address: str | None = None
) -> Iterator[Shard]:
    """Several processes on this machine, each with the model of its own. Each computes on one thread."""
    from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    check_opened_by_name("processes", worker)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = ProcessPoolExecutor(
        max(1, num_workers), mp_context=get_context("spawn"), initializer=init_process_worker, initargs=(worker.job,)
    )
    try:
        for done in as_completed([pool.submit(run_process_task, task) for task in tasks]):
            yield done.result()
    except BrokenExecutor:
        raise ClearheadError(
            "a worker process ended before its chunk was finished; it may have been killed, or may have run out of "
            "memory. Run the same command again to resume; fewer --workers or a smaller --batch-size need less memory"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)  # whoever stops a run does not wait for chunks that nobody will store
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before
