"""All methods on 256 inputs of mixed length within a memory budget: peak memory of the process, and equal results.

    python benchmarks/memory_budget.py                       # zoo:sentiment, 2GiB, 256 inputs
    python benchmarks/memory_budget.py --memory 200MiB --inputs 64 --keep memory.jsonl

Every method that applies is measured by itself, with few steps and evaluations (the budget limits memory, not run
time), and all in one call, with even fewer. Each measurement is a separate process; its peak is the resident set size
(RSS) reported by the system, and its memory before the start (Python, torch, the model) is reported next to it. Then
the same runs without a budget, in the same process, and the results are compared (not for all in one call, nor with
--kept-alone). With --keep, results are stored as they come and not measured again; with --workers several are measured
at a time.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import numpy as np

#: Fewer evaluations than by default: as much is held at a time.
FEWER_STEPS = {
    "shap": {"evaluations": 40},
    "kernel-shap": {"evaluations": 40},
    "calibrated": {"evaluations": 16},
    "lime": {"evaluations": 40},
    "integrated-gradients": {"steps": 4},
    "layer-conductance": {"steps": 4},
    "gradient-shap": {"samples": 4},
    "smoothgrad": {"samples": 4},
    "beyond-intuition-head": {"steps": 4},
    "beyond-intuition-token": {"steps": 4},
    "tam": {"steps": 4},
    "flow": {"layers": (-3, None)},
    "value-zeroing": {"layers": (-1, None)},
}
#: Fewer still: for all methods in one call, which takes as long as all.
FEWEST_STEPS = {
    **{
        name: {**own, **{option: 2 for option in ("steps", "samples") if option in own}}
        for name, own in FEWER_STEPS.items()
    },
    "shap": {"evaluations": 8},
    "kernel-shap": {"evaluations": 8},
    "calibrated": {"evaluations": 16},
    "lime": {"evaluations": 8},
    "deeplift-shap": {"samples": 1},
}
ALL_METHODS_ROW = "all in one call"
SAMPLE_WORDS = (
    "this film is a quiet and wonderful story about two people who never say what they mean , and I could not look "
    "away for a moment ; the music , the light and the faces stay with you long after the boring parts are forgotten"
)


def make_texts(count: int, max_words: int = 200) -> list[str]:
    """From 3 words to `longest`, drawn with a seed: many are short, few are long."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(3), np.log(max_words), count)).astype(int)
    return [" ".join(rng.choice(SAMPLE_WORDS.split(), length)) for length in lengths]


def get_peak_rss_mib() -> float:
    """MiB that the process took at most so far, by the system's account."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def list_applicable_methods(arguments: argparse.Namespace) -> list[str]:
    import clearhead

    return [line.name for line in clearhead.load(arguments.model).methods() if line.applies]


def measure_methods(arguments: argparse.Namespace, names: list[str]) -> dict:
    """With the budget, and then, where it is one method, without; what is known after the first is printed at once."""
    import clearhead

    ex = clearhead.load(arguments.model)
    fewer = FEWER_STEPS if len(names) == 1 else FEWEST_STEPS
    methods = [clearhead.Method(name, **fewer.get(name, {})) for name in names]
    inputs = make_texts(arguments.inputs, arguments.longest)
    ex.explain("warm up", methods)
    before, started = get_peak_rss_mib(), time.perf_counter()
    kept = ex.explain(inputs, methods, memory=arguments.memory)
    found = {"before": before, "peak": get_peak_rss_mib(), "seconds": time.perf_counter() - started}
    if len(names) > 1 or arguments.kept_alone:
        return found
    print(json.dumps(found), flush=True)
    started = time.perf_counter()
    free = ex.explain(inputs, methods)
    found |= {"peak without": get_peak_rss_mib(), "seconds without": time.perf_counter() - started}
    ((own,), (other,)) = kept.values(), free.values()
    return found | {"gap": compute_relative_gap([e.scores for e in own], [e.scores for e in other])}


def compute_relative_gap(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """The largest difference of scores, relative to the largest score."""
    size = max(np.abs(row).max() for row in second)
    return float(max(np.abs(a - b).max() for a, b in zip(first, second, strict=True)) / size)


def describe_machine() -> str:
    """Where it ran, and with what."""
    import torch
    import transformers

    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}, {os.cpu_count()} cores; {versions}; {date.today()}"


def measure_in_subprocess(arguments: argparse.Namespace, names: list[str]) -> dict:
    command = [sys.executable, __file__, "--model", arguments.model, "--only", *names, "--memory", arguments.memory]
    command += ["--inputs", str(arguments.inputs), "--longest", str(arguments.longest)]
    command += ["--kept-alone"] if arguments.kept_alone else []
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        return {"failed": (ended.stderr.strip().splitlines() or [f"exit {ended.returncode}"])[-1]}
    return json.loads(ended.stdout.splitlines()[-1])


def format_row(name: str, result: dict) -> str:
    if "failed" in result:
        return f"| {name} | failed: {result['failed']} | | | | |"
    without = f"{result['peak without']:,.0f} | {result['gap']:.0e}" if "gap" in result else "– | –"
    return f"| {name} | {result['before']:,.0f} | {result['peak']:,.0f} | {without} | {result['seconds']:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:sentiment")
    parser.add_argument("--inputs", type=int, default=256)
    parser.add_argument("--longest", type=int, default=200, help="number of words of the longest input")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--skip", nargs="*", default=[], help=f"methods to skip, or {ALL_METHODS_ROW!r}")
    parser.add_argument("--kept-alone", action="store_true", help="skip the runs without a budget: half the time")
    parser.add_argument("--workers", type=int, default=1, help="number of parallel processes")
    parser.add_argument("--keep", type=Path, help="file for the results: one line of JSON per method")
    parser.add_argument("--only", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure_methods(arguments, arguments.only)))
        return
    names = [name for name in list_applicable_methods(arguments) if name not in arguments.skip]
    settings = {name: getattr(arguments, name) for name in ("model", "inputs", "longest", "memory")}
    where = describe_machine()
    print(f"{len(names)} methods on {arguments.inputs} texts of 3 to {arguments.longest} words, {arguments.model}")
    print(f"\n| memory={arguments.memory} | MiB before | peak | peak without a budget | difference | seconds |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    rows = {ALL_METHODS_ROW: names, **{name: [name] for name in names}}

    def row(name: str) -> None:
        key = {**settings, "method": name}
        known = find_stored_result(arguments.keep, key)
        one = known or key | {"machine": where} | measure_in_subprocess(arguments, rows[name])
        print(format_row(name, one), flush=True)
        if arguments.keep and not known and "failed" not in one:
            with arguments.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(one) + "\n")

    with ThreadPoolExecutor(arguments.workers) as pool:
        list(pool.map(row, [name for name in rows if name not in arguments.skip]))


def find_stored_result(file: Path | None, key: dict) -> dict | None:
    if file is None or not file.exists():
        return None
    lines = (json.loads(text) for text in file.read_text(encoding="utf-8").splitlines())
    return next((one for one in lines if key.items() <= one.items()), None)


if __name__ == "__main__":
    main()
