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

from clearhead.bench.engines import check_opened_by_name, register_engine
from clearhead.bench.job import BenchmarkJob, ChunkTask
from clearhead.bench.store import Shard
from clearhead.bench.worker import ChunkWorker
from clearhead.errors import ClearheadError, InputError

#: A chunk whose actor dies so many times more is given up: it is the chunk that kills.
MAX_CHUNK_RETRIES = 3
#: Shards are small; nothing else goes through Ray's object store.
OBJECT_STORE_BYTES = 128 * 2**20

#: A cluster of our own calls nobody, does not stand back behind other programs, and keeps its log to itself.
LOCAL_CLUSTER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}


class AttemptCounter:
    """How often each chunk was begun: Ray Data itself would begin one anew for ever."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()

    def start_attempt(self, chunk_key: str) -> int:
        self.attempts[chunk_key] += 1
        return self.attempts[chunk_key]


class ChunkActor:
    """What an actor holds: a worker, and with it the model, opened at the first chunk.

    What goes wrong comes back in place of a shard: Ray would wrap it, and say it in its own words.
    """

    def __init__(self, job: BenchmarkJob, start_attempt: Callable[[str], int]) -> None:
        self.worker, self.start_attempt = ChunkWorker(job), start_attempt

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        task: ChunkTask = pickle.loads(row["task"])
        try:
            died = self.start_attempt(task.chunk_key) - 1
            if died > MAX_CHUNK_RETRIES:
                raise ClearheadError(
                    f"the worker died {died} times on chunk {task.chunk_key} ({len(task.example_indices)} examples, "
                    f"the first at {task.example_indices[0]})"
                )
            made = self.worker(task)
            return {"made": pickle.dumps(made)}
        except Exception as problem:
            return {"made": pickle.dumps(ClearheadError(str(problem)) if _is_unpicklable(problem) else problem)}


def _is_unpicklable(problem: Exception) -> bool:
    """Whether it cannot be sent, or not be understood elsewhere."""
    try:
        return type(pickle.loads(pickle.dumps(problem))) is not type(problem)
    except Exception:
        return True


@register_engine("ray")
def run_on_ray(
    worker: ChunkWorker, tasks: Sequence[ChunkTask], num_workers: int = 2, address: str | None = None
) -> Iterator[Shard]:
    """As many actors as workers, each with a GPU of its own where the cluster has any and the job asks for no CPU."""
    check_opened_by_name("ray", worker)
    if not tasks:
        return
    ray = _import_ray()
    with ray_cluster(ray, num_workers, address), _silenced_ray_data(ray):
        yield from _iter_shards(ray, _build_shard_dataset(ray, worker.job, tasks, min(num_workers, len(tasks))))


def _import_ray() -> Any:
    try:
        import ray.data
    except ImportError:
        raise InputError("engine='ray' needs Ray: pip install 'clearhead[bench]'") from None
    return ray


@contextmanager
def ray_cluster(ray: Any, num_workers: int, address: str | None) -> Iterator[None]:
    """The cluster at this address, or one of our own; one that the program joined before is left as it is."""
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": "error"}
    try:
        if address is None:
            for name, value in LOCAL_CLUSTER_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            ray.init(num_cpus=num_workers, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as problem:
        raise InputError(f"there is no Ray cluster at {address or 'this machine'}: {problem}") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _silenced_ray_data(ray: Any) -> Iterator[None]:
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


def _build_shard_dataset(ray: Any, job: BenchmarkJob, tasks: Sequence[ChunkTask], workers: int) -> Any:
    """The dataset of what comes of each chunk; nothing is computed before it is read."""
    gpus = ray.cluster_resources().get("GPU", 0)
    wants_gpu = gpus >= 1 and (job.device in (None, "auto") or str(job.device).startswith("cuda"))
    if wants_gpu:
        # Ray shows an actor its own GPU alone: to each it is the first
        job, workers = replace(job, device="cuda"), min(workers, int(gpus))
    tries = ray.remote(AttemptCounter).options(num_cpus=0).remote()
    rows = ray.data.from_items([{"task": pickle.dumps(task)} for task in tasks], override_num_blocks=len(tasks))
    return rows.map(  # Ray Data starts actors anew, and chunks with them
        ChunkActor,
        fn_constructor_args=(job, lambda key: ray.get(tries.start_attempt.remote(key))),
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        num_cpus=1,  # and so Ray lets them compute on one thread, as the engine `processes` does
        num_gpus=int(wants_gpu),
    )


def _iter_shards(ray: Any, measured: Any) -> Iterator[Shard]:
    try:
        for row in measured.iter_rows():
            made: Shard | Exception = pickle.loads(row["made"])
            if isinstance(made, Exception):
                raise made
            yield made
    except ray.exceptions.RayError as problem:
        raise ClearheadError(f"the Ray cluster failed: {problem}") from None
