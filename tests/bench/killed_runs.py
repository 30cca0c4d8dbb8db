"""A program with two runs: one that is killed repeatedly and then finishes, and one that is not disturbed.

Children are forked from a process that computed nothing itself, so they start quickly. Each is killed at a random time
after it wrote a shard.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pyarrow.parquet  # noqa: F401
import torch
import transformers  # noqa: F401

import clearhead.bench.worker  # noqa: F401 – imported once for all children
from clearhead.bench.job import BenchmarkJob
from clearhead.bench.runner import BenchmarkRun

SETTINGS = {"perturb-text": {"fills": ("mask",), "fractions": (0.5, 1.0)}}
PROTOCOLS = ("truth", "perturb-text")


def start_run(out: str, chunks: int) -> int:
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        job = BenchmarkJob("zoo:logic", "known:logic", ("saliency",), PROTOCOLS, SETTINGS, limit=chunks, chunk=1)
        BenchmarkRun(job, out)()
        os._exit(0)
    return child


def count_shards(out: str) -> int:
    return len(list(Path(out, "shards").glob("*.parquet")))


def num_chunks(times: int) -> int:
    """Enough chunks that no child finishes before it is killed: each writes at most five shards."""
    return 6 + 5 * times


def kill_repeatedly(out: str, times: int, chunks: int) -> list[int]:
    """The number of shards at each kill."""
    shard_counts: list[int] = []
    for _ in range(times):
        before, child = count_shards(out), start_run(out, chunks)
        while count_shards(out) == before and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.002)
        deadline = time.monotonic() + random.uniform(0, 0.1)
        while time.monotonic() < deadline and count_shards(out) < before + 4:
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        shard_counts.append(count_shards(out))
    return shard_counts


if __name__ == "__main__":
    folder, times = sys.argv[1], int(sys.argv[2])
    random.seed(times)
    chunks = num_chunks(times)
    for name, kills in (("whole", 0), ("killed", times)):
        shard_counts = kill_repeatedly(f"{folder}/{name}", kills, chunks)
        _, status = os.waitpid(start_run(f"{folder}/{name}", chunks), 0)
        assert status == 0, status
    print(*shard_counts)
