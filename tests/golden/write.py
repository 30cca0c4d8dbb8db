"""Write the golden files: `python -m tests.golden.write`, or `make golden`, from the root of the repository.

Do so only for an intended change of behaviour, and describe the change in the commit.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    MPLBACKEND="agg",
)

import torch
import transformers

from tests.golden.commands import describe_commands
from tests.golden.outputs import compute_outputs
from tests.golden.passes import compute_pass_counts
from tests.golden.scores import GOLDEN_MODELS, compute_golden_scores
from tests.golden.storage import GOLDEN_FOLDER, save_arrays, save_json


def write_scores(folder: Path) -> None:
    """Write the scores of every golden model, and the version of transformers."""
    for name in GOLDEN_MODELS:
        save_arrays(folder, name, compute_golden_scores(name))
    save_json(folder, "versions", {"transformers": transformers.__version__})


def write_passes(folder: Path) -> None:
    """Write the number of passes of typical calls."""
    save_json(folder, "passes", compute_pass_counts())


def write_commands(folder: Path) -> None:
    """Write the commands with their options, and the output of each with --json."""
    save_json(folder, "commands", describe_commands())
    with tempfile.TemporaryDirectory() as workspace:
        save_json(folder, "outputs", compute_outputs(Path(workspace)))


WRITERS: dict[str, Callable[[Path], None]] = {
    "scores": write_scores,
    "passes": write_passes,
    "commands": write_commands,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.write", description=__doc__)
    parser.add_argument("--out", type=Path, default=GOLDEN_FOLDER, help="folder of the files (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=WRITERS, default=list(WRITERS), help="write only these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.only:
        start = time.monotonic()
        WRITERS[name](arguments.out)
        print(f"{name}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
