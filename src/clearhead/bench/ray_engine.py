"""Engine `ray`: actors that keep the model open, on this machine or on a cluster.

Without an address a cluster of this machine is started, and stopped at the end; with one (`auto`, `HOST:PORT`,
`ray://HOST:PORT`) the run joins that cluster, whose machines must have clearhead, the model and the data under the same
names. An actor takes one chunk at a time. One that dies is started again and its chunk is measured again, on another
machine if its own is gone; what it had finished is stored already. Chunks are fixed by the plan, so the store is that
of any other engine. These are actors by themselves, not Ray Data's: a chunk goes in as a few numbers and comes out as a
few rows, which leaves nothing to stream in blocks, and Ray Data needs pandas.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from clearhead.bench.engines import opened_anew, register
from clearhead.bench.planning import Job, Task
from clearhead.bench.store import Shard
from clearhead.bench.working import Worker
from clearhead.errors import ClearheadError, InputError

#: A chunk whose actor dies so many times more is given up: it is the chunk that kills.
RETRIES = 3
#: Shards are small; nothing else goes through Ray's object store.
OBJECT_STORE = 128 * 2**20


class Keeper:
    """What an actor holds: a worker, and with it the model, opened at the first chunk."""

    def __init__(self, job: Job) -> None:
        self.worker = Worker(job)

    def measure(self, task: Task) -> Shard:
        return self.worker(task)


@register("ray")
def on_ray(worker: Worker, tasks: Sequence[Task], workers: int = 2, address: str | None = None) -> Iterator[Shard]:
    """As many actors as workers, each with a GPU of its own where the cluster has any and the job asks for no CPU."""
    opened_anew("ray", worker)
    if not tasks:
        return
    ray = _ray()
    with cluster(ray, workers, address):
        yield from _shards(ray, _keepers(ray, worker.job, min(workers, len(tasks))), tasks)


def _ray() -> Any:
    try:
        import ray
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
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of our own calls nobody
            ray.init(num_cpus=workers, include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as problem:
        raise InputError(f"no Ray cluster at {address or 'this machine'}: {problem}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _keepers(ray: Any, job: Job, workers: int) -> list[Any]:
    gpus = ray.cluster_resources().get("GPU", 0)
    wants_gpu = gpus >= 1 and (job.device is None or job.device.startswith("cuda"))
    if wants_gpu:
        # Ray shows an actor its own GPU alone: to each it is the first
        job, workers = replace(job, device="cuda"), min(workers, int(gpus))
    # of one CPU each, Ray lets them compute on one thread, as the engine `processes` does
    keeper = ray.remote(Keeper).options(num_cpus=1, num_gpus=int(wants_gpu), max_restarts=-1, max_task_retries=RETRIES)
    return [keeper.remote(job) for _ in range(workers)]


def _shards(ray: Any, keepers: Sequence[Any], tasks: Sequence[Task]) -> Iterator[Shard]:
    waiting, busy = iter(tasks), {}

    def give(keeper: Any) -> None:
        task = next(waiting, None)
        if task is not None:
            busy[keeper.measure.remote(task)] = (keeper, task)

    for keeper in keepers:
        give(keeper)
    while busy:
        (done,), _ = ray.wait(list(busy), num_returns=1)
        keeper, task = busy.pop(done)
        try:
            shard: Shard = ray.get(done)
        except ray.exceptions.RayTaskError as problem:
            raise problem.cause from problem
        except ray.exceptions.RayError as problem:
            raise ClearheadError(
                f"the worker died {1 + RETRIES} times over chunk {task.key} ({len(task.places)} examples, the first at "
                f"{task.places[0]}): {problem}"
            ) from None
        give(keeper)
        yield shard
