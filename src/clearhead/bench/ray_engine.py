"""Engine `ray`: Ray Data with actors that keep the model open, on this machine or on a cluster.

Without an address a cluster of this machine is started, and stopped at the end; with one (`auto`, `HOST:PORT`) the run,
on one of its machines, joins that cluster, whose machines must have clearhead, the model and the data under the same
names. The chunks of the plan are the rows of a dataset, one a block, which its actors turn into shards as they come. An
actor that dies is started again and its chunk is measured again, on another machine if its own is gone; what it had
finished is stored already. Chunks are fixed by the plan, so the store is that of any other engine.
"""

import logging
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from clearhead.bench.engines import opened_anew, register
from clearhead.bench.job import Job, Task
from clearhead.bench.store import Shard
from clearhead.bench.worker import Worker
from clearhead.errors import ClearheadError, InputError

#: A chunk whose actor dies so many times more is given up: it is the chunk that kills.
RETRIES = 3
#: Shards are small; nothing else goes through Ray's object store.
OBJECT_STORE = 128 * 2**20

#: A cluster of our own calls nobody, does not stand back behind other programs, and keeps its log to itself.
OWN_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}


class Tries:
    """How often each chunk was begun: Ray Data itself would begin one anew for ever."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()

    def begin(self, key: str) -> int:
        self.begun[key] += 1
        return self.begun[key]


class Keeper:
    """What an actor holds: a worker, and with it the model, opened at the first chunk.

    What goes wrong comes back in place of a shard: Ray would wrap it, and say it in its own words.
    """

    def __init__(self, job: Job, begin: Callable[[str], int]) -> None:
        self.worker, self.begin = Worker(job), begin

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        task: Task = pickle.loads(row["task"])
        try:
            died = self.begin(task.key) - 1
            if died > RETRIES:
                raise ClearheadError(
                    f"the worker died {died} times over chunk {task.key} ({len(task.places)} examples, the first at "
                    f"{task.places[0]})"
                )
            made = self.worker(task)
            return {"made": pickle.dumps(made)}
        except Exception as problem:
            return {"made": pickle.dumps(ClearheadError(str(problem)) if _foreign(problem) else problem)}


def _foreign(problem: Exception) -> bool:
    """Whether it cannot be sent, or not be understood elsewhere."""
    try:
        return type(pickle.loads(pickle.dumps(problem))) is not type(problem)
    except Exception:
        return True


@register("ray")
def on_ray(worker: Worker, tasks: Sequence[Task], workers: int = 2, address: str | None = None) -> Iterator[Shard]:
    """As many actors as workers, each with a GPU of its own where the cluster has any and the job asks for no CPU."""
    opened_anew("ray", worker)
    if not tasks:
        return
    ray = _ray()
    with cluster(ray, workers, address), _quiet(ray):
        yield from _shards(ray, _measured(ray, worker.job, tasks, min(workers, len(tasks))))


def _ray() -> Any:
    try:
        import ray.data
    except ImportError:
        raise InputError("engine='ray' needs Ray: pip install 'clearhead[bench]'") from None
    return ray


@contextmanager
def cluster(ray: Any, workers: int, address: str | None) -> Iterator[None]:
    """The cluster at this address, or one of our own; one that the program joined before is left as it is."""
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": "error"}
    try:
        if address is None:
            for name, value in OWN_CLUSTER.items():
                os.environ.setdefault(name, value)
            ray.init(num_cpus=workers, include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as problem:
        raise InputError(f"no Ray cluster at {address or 'this machine'}: {problem}") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Ray Data says nothing of its own: no plan, no bars beside ours."""
    context, log = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    bars, level = context.enable_progress_bars, log.level
    log.setLevel(logging.ERROR)
    context.enable_progress_bars = False
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        log.setLevel(level)


def _measured(ray: Any, job: Job, tasks: Sequence[Task], workers: int) -> Any:
    """The dataset of what comes of each chunk; nothing is computed before it is read."""
    gpus = ray.cluster_resources().get("GPU", 0)
    wants_gpu = gpus >= 1 and (job.device is None or job.device.startswith("cuda"))
    if wants_gpu:
        # Ray shows an actor its own GPU alone: to each it is the first
        job, workers = replace(job, device="cuda"), min(workers, int(gpus))
    tries = ray.remote(Tries).options(num_cpus=0).remote()
    rows = ray.data.from_items([{"task": pickle.dumps(task)} for task in tasks], override_num_blocks=len(tasks))
    return rows.map(  # Ray Data starts actors anew, and chunks with them
        Keeper,
        fn_constructor_args=(job, lambda key: ray.get(tries.begin.remote(key))),
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        num_cpus=1,  # and so Ray lets them compute on one thread, as the engine `processes` does
        num_gpus=int(wants_gpu),
    )


def _shards(ray: Any, measured: Any) -> Iterator[Shard]:
    try:
        for row in measured.iter_rows():
            made: Shard | Exception = pickle.loads(row["made"])
            if isinstance(made, Exception):
                raise made
            yield made
    except ray.exceptions.RayError as problem:
        raise ClearheadError(f"the Ray cluster failed: {problem}") from None
