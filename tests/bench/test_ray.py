"""The engine `ray`: a real cluster of two workers on this machine, one of which is killed in the middle."""

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

needed = ("pyarrow", "ray")
pytestmark = pytest.mark.skipif(not all(map(find_spec, needed)), reason=f"{' and '.join(needed)} are not installed")

JOB = BenchmarkJob("zoo:logic", "known:logic", ("saliency",), ("truth", "perturb-text"), {}, limit=24, chunk=2)
MEASURING = b"ray::MapWorker(Map(ChunkActor)).submit"


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def is_ours(process: int) -> bool:
    while process > 1:
        process = parent(process)
        if process == os.getpid():
            return True
    return False


def measuring() -> list[int]:
    """The processes under this one that are in the middle of a chunk: Ray writes the method into their titles."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes().startswith(MEASURING) and is_ours(int(path.name)):
                found.append(int(path.name))
        except OSError:
            continue  # gone meanwhile
    return found


class Killer:
    """Kills one of the workers in the middle of a chunk, once, when the first chunk is through."""

    def __init__(self) -> None:
        self.heard, self.killed = 0, 0

    def __call__(self, examples: int) -> None:
        self.heard += examples
        if self.killed or not examples:
            return
        until = time.monotonic() + 30
        while not (busy := measuring()) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(busy[0], signal.SIGKILL)
        self.killed = busy[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers in /proc")
def test_one_of_two_workers_is_killed_and_the_store_is_that_of_a_local_run(tmp_path: Path) -> None:
    import ray

    pytest.importorskip("clearhead_zoo")
    BenchmarkRun(JOB, tmp_path / "local")()
    killer = Killer()
    report = BenchmarkRun(JOB, tmp_path / "ray")("ray", 2, killer)
    assert killer.killed and report.computed == 12 and killer.heard == 24
    assert not ray.is_initialized()  # the cluster was ours, and is gone
    for name in ("shards", "."):
        ours, others = (
            {path.name: path.read_bytes() for path in (tmp_path / run / name).glob("*.parquet")}
            for run in ("ray", "local")
        )
        assert ours == others and ours


def test_what_the_engine_refuses() -> None:
    with pytest.raises(InputError, match="opens the model anew"):
        list(get_engine("ray")(ChunkWorker(JOB, explainer("bert/classify")), [], 2, None))
    with pytest.raises(InputError, match="an address is for engine='ray'"):
        get_engine("local", "auto")
    assert (
        list(get_engine("ray")(ChunkWorker(JOB), [], 2, "no-such-host:1")) == []
    )  # nothing to do: no cluster is joined


def test_a_chunk_that_kills_its_worker_again_and_again_is_given_up() -> None:
    task, tries = ChunkTask("a-key", (7, 9), ()), AttemptCounter()
    made = [
        pickle.loads(ChunkActor(JOB, tries.start_attempt)({"task": pickle.dumps(task)})["made"])
        for _ in range(2 + MAX_CHUNK_RETRIES)
    ]
    assert not any(isinstance(one, ClearheadError) for one in made[:-1])
    with pytest.raises(ClearheadError, match=r"died 4 times over chunk a-key \(2 examples, the first at 7\)"):
        raise made[-1]
