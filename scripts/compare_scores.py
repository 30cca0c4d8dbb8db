"""Compare the golden scores of two checkouts to the last bit.

Each checkout computes the arrays of its own tests/golden with its own sources, by the same interpreter, in one thread,
with no environment variable of the caller's but PATH and HOME. Every array that is not equal bit for bit is reported,
and so is every number of passes that differs. Exit code: 0 equal, 1 different, 2 a checkout could not be run.

Example:
    git worktree add /tmp/before HEAD~1
    python scripts/compare_scores.py /tmp/before
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load

SHOWN = 40


def run_checkout(checkout: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """Start writing the golden files of a checkout into a folder."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    sources = [checkout / "src", checkout / "packages" / "zoo" / "src"]
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        **threads,
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
        "MKL_CBWR": "COMPATIBLE",  # else sums depend on where arrays lie in memory
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "tests.golden.write", "--out", str(folder), "--only", "scores", "passes"]
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT)


def load_scores(folder: Path) -> dict[str, np.ndarray]:
    """Read all arrays that a checkout wrote, by model and key."""
    return {
        f"{path.name.split('.')[0]}/{key}": array
        for path in sorted((folder / "scores").glob("*.safetensors.gz"))
        for key, array in load(gzip.decompress(path.read_bytes())).items()
    }


def compare_arrays(old: np.ndarray, new: np.ndarray) -> str | None:
    """Return how two arrays differ, or nothing where they are equal to the last bit."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return f"{old.dtype}{list(old.shape)} became {new.dtype}{list(new.shape)}"
    if old.tobytes() == new.tobytes():
        return None
    distance = np.nanmax(np.abs(old.astype(np.float64) - new.astype(np.float64)), initial=0.0)
    largest = np.nanmax(np.abs(old.astype(np.float64)), initial=0.0)
    return f"differs by {distance:.3g}, the largest entry being {largest:.3g}"


def compare_scores(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> dict[str, str]:
    """Return how the arrays of two checkouts differ, by key."""
    differences = dict.fromkeys(old.keys() - new.keys(), "is gone")
    differences |= dict.fromkeys(new.keys() - old.keys(), "is new")
    for key in old.keys() & new.keys():
        difference = compare_arrays(old[key], new[key])
        if difference is not None:
            differences[key] = difference
    return differences


def compare_passes(old: dict[str, dict[str, int]], new: dict[str, dict[str, int]]) -> dict[str, str]:
    """Return which numbers of passes differ, by call."""
    return {
        call: f"{old.get(call, 'no such call')} became {new.get(call, 'no such call')}"
        for call in old.keys() | new.keys()
        if old.get(call) != new.get(call)
    }


def print_differences(title: str, differences: dict[str, str], shown: int) -> None:
    print(f"{title}: {len(differences)} differ")
    for key in sorted(differences)[:shown]:
        print(f"  {key}: {differences[key]}")
    if len(differences) > shown:
        print(f"  … and {len(differences) - shown} more (--all shows them)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT", help="a folder with the old sources and tests/golden")
    parser.add_argument("new", type=Path, metavar="NEW_CHECKOUT", nargs="?", default=Path(), help="default: this one")
    parser.add_argument("--all", action="store_true", help=f"list every difference, not only the first {SHOWN}")
    parser.add_argument("--parallel", action="store_true", help="run both checkouts at the same time")
    arguments = parser.parse_args()
    checkouts = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    for checkout in checkouts.values():
        if not (checkout / "tests" / "golden" / "write.py").is_file():
            print(f"{checkout} has no tests/golden/write.py: give the root of a checkout that has it", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name for name in checkouts}
        processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, checkout in checkouts.items():
            print(f"{name}: {checkout}")
            processes[name] = run_checkout(checkout, folders[name])
            if not arguments.parallel:
                processes[name].wait()
        for name, process in processes.items():
            if process.wait():
                log = folders[name].with_suffix(".log").read_text("utf-8")
                print(f"{name}: python -m tests.golden.write ended with {process.returncode}:\n{log}", file=sys.stderr)
                return 2
        scores = {name: load_scores(folder) for name, folder in folders.items()}
        passes = {name: json.loads((folder / "passes.json").read_text("utf-8")) for name, folder in folders.items()}
    score_differences = compare_scores(scores["old"], scores["new"])
    pass_differences = compare_passes(passes["old"], passes["new"])
    shown = len(score_differences) + len(pass_differences) if arguments.all else SHOWN
    print_differences(f"arrays ({len(scores['old'])} old, {len(scores['new'])} new)", score_differences, shown)
    print_differences(f"pass counts ({len(passes['old'])} old, {len(passes['new'])} new)", pass_differences, shown)
    return 1 if score_differences or pass_differences else 0


if __name__ == "__main__":
    sys.exit(main())
