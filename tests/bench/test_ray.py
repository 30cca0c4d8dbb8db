"""The engine `ray`: a local cluster of two workers, one of which is killed during a chunk."""

import os
import pickle
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from clearhead.bench.engines import get_engine
from clearhead.bench.job import BenchmarkJob, ChunkTask
from clearhead.bench.ray_engine import MAX_CHUNK_RETRIES, AttemptCounter, ChunkActor
from clearhead.bench.runner import BenchmarkRun
from clearhead.bench.worker import ChunkWorker
from clearhead.errors import ClearheadError, InputError
from tests.models import explainer

REQUIRED = ("pyarrow", "ray")
pytestmark = pytest.mark.skipif(not all(map(find_spec, REQUIRED)), reason=f"{' and '.join(REQUIRED)} are not installed")

JOB = BenchmarkJob("zoo:logic", "known:logic", ("saliency",), ("truth", "perturb-text"), {}, limit=24, chunk=2)
MEASURING = b"ray::MapWorker(Map(ChunkActor)).submit"


def parent_pid(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def is_descendant(process: int) -> bool:
    while process > 1:
        process = parent_pid(process)
        if process == os.getpid():
            return True
    return False


def find_measuring_processes() -> list[int]:
    """Child processes that are measuring a chunk: Ray writes the method into their titles."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes().startswith(MEASURING) and is_descendant(int(path.name)):
                processes.append(int(path.name))
        except OSError:
            continue  # the process has ended
    return processes


class WorkerKiller:
    """Kills one of the workers during a chunk, once, after the first chunk is done."""

    def __init__(self) -> None:
        self.num_examples, self.killed = 0, 0

    def __call__(self, examples: int) -> None:
        self.num_examples += examples
        if self.killed or not examples:
            return
        until = time.monotonic() + 30
        while not (busy := find_measuring_processes()) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(busy[0], signal.SIGKILL)
        self.killed = busy[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers in /proc")
def test_ray_run_with_killed_worker_equals_local_run(tmp_path: Path) -> None:
    import ray

    pytest.importorskip("clearhead_zoo")
    BenchmarkRun(JOB, tmp_path / "local")()
    killer = WorkerKiller()
    report = BenchmarkRun(JOB, tmp_path / "ray")("ray", 2, killer)
    assert killer.killed and report.computed == 12 and killer.num_examples == 24
    assert not ray.is_initialized()  # the run started the cluster and has stopped it
    for name in ("shards", "."):
        ray_files, local_files = (
            {path.name: path.read_bytes() for path in (tmp_path / run / name).glob("*.parquet")}
            for run in ("ray", "local")
        )
        assert ray_files == local_files and ray_files


def test_ray_engine_rejects_loaded_model_and_misplaced_address() -> None:
    with pytest.raises(InputError, match="opens the model again"):
        list(get_engine("ray")(ChunkWorker(JOB, explainer("bert/classify")), [], 2, None))
    with pytest.raises(InputError, match="an address is only for engine='ray'"):
        get_engine("local", "auto")
    assert (
        list(get_engine("ray")(ChunkWorker(JOB), [], 2, "no-such-host:1")) == []
    )  # without tasks no cluster is joined


def test_chunk_that_repeatedly_kills_its_worker_raises() -> None:
    task, attempts = ChunkTask("a-key", (7, 9), ()), AttemptCounter()
    results = [
        pickle.loads(ChunkActor(JOB, attempts.start_attempt)({"task": pickle.dumps(task)})["made"])
        for _ in range(2 + MAX_CHUNK_RETRIES)
    ]
    assert not any(isinstance(result, ClearheadError) for result in results[:-1])
    with pytest.raises(ClearheadError, match=r"died 4 times on chunk a-key \(2 examples, the first at 7\)"):
        raise results[-1]
