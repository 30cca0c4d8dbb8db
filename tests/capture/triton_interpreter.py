"""Where Triton kernels run: compiled on a GPU, or interpreted, in a process whose environment says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if COMPILED else "cpu"
here = pytest.mark.skipif(not (INTERPRETED or COMPILED), reason="in a process of its own, by test_interpreted")
apart = pytest.mark.skipif(INTERPRETED or COMPILED, reason="the tests of this file run in this process")


def interpret(file: str) -> None:
    """Run the tests of a file once more, interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
