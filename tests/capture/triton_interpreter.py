"""Runs Triton tests compiled on a GPU, or interpreted in a subprocess with TRITON_INTERPRET=1."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if COMPILED else "cpu"
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or COMPILED), reason="runs in the subprocess of test_passes_in_triton_interpreter"
)
starts_interpreter = pytest.mark.skipif(INTERPRETED or COMPILED, reason="the tests of this file run in this process")


def run_interpreted(file: str) -> None:
    """Run the tests of a file in the Triton interpreter, in a subprocess."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert " passed" in result.stdout and "failed" not in result.stdout
