"""A run that is killed again and again and then left to finish, beside one that nobody disturbs.

Children are forked from a process that computed nothing itself: they start at once. Each is killed some time after a
shard that it wrote, at a random moment of the next one.
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

import clearhead.bench.worker  # noqa: F401 – what is imported here need not be imported by each child
from clearhead.bench.job import BenchmarkJob
from clearhead.bench.runner import BenchmarkRun

SETTINGS = {"perturb-text": {"fills": ("mask",), "fractions": (0.5, 1.0)}}
PROTOCOLS = ("truth", "perturb-text")


def started(out: str, chunks: int) -> int:
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        job = BenchmarkJob("zoo:logic", "known:logic", ("saliency",), PROTOCOLS, SETTINGS, limit=chunks, chunk=1)
        BenchmarkRun(job, out)()
        os._exit(0)
    return child


def shards(out: str) -> int:
    return len(list(Path(out, "shards").glob("*.parquet")))


def chunks_for(times: int) -> int:
    """So many that no child is done before it is killed: none gets further than five shards."""
    return 6 + 5 * times


def killed(out: str, times: int, chunks: int) -> list[int]:
    """How many shards were there at each kill."""
    there: list[int] = []
    for _ in range(times):
        before, child = shards(out), started(out, chunks)
        while shards(out) == before and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.002)
        moment = time.monotonic() + random.uniform(0, 0.1)
        while time.monotonic() < moment and shards(out) < before + 4:
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        there.append(shards(out))
    return there


if __name__ == "__main__":
    folder, times = sys.argv[1], int(sys.argv[2])
    random.seed(times)
    chunks = chunks_for(times)
    for name, kills in (("whole", 0), ("killed", times)):
        there = killed(f"{folder}/{name}", kills, chunks)
        _, status = os.waitpid(started(f"{folder}/{name}", chunks), 0)
        assert status == 0, status
    print(*there)
