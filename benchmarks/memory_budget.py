"""All methods on 256 inputs of mixed length within a memory budget: peak memory of the process, and equal results.

    python benchmarks/memory_budget.py                       # zoo:sentiment, 2GiB, 256 inputs
    python benchmarks/memory_budget.py --memory 200MiB --inputs 64

Every method that applies, with few steps and evaluations (the budget is about what is held, not about how often). Each
run is a process of its own; its peak is that of the system's own account (RSS), and what it holds before it begins
(Python, torch, the model) is given beside it. The results of runs with and without a budget are compared.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np

#: Fewer evaluations than by default: as much is held at a time.
FEWER = {
    "shap": {"evaluations": 40},
    "kernel-shap": {"evaluations": 40},
    "lime": {"evaluations": 40},
    "integrated-gradients": {"steps": 4},
    "gradient-shap": {"samples": 4},
    "smoothgrad": {"samples": 4},
    "beyond-intuition-head": {"steps": 4},
    "beyond-intuition-token": {"steps": 4},
    "tam": {"steps": 4},
    "flow": {"layers": (-2, None)},
}
SENTENCE = (
    "this film is a quiet and wonderful story about two people who never say what they mean , and I could not look "
    "away for a moment ; the music , the light and the faces stay with you long after the boring parts are forgotten"
)


def texts(count: int, longest: int = 200) -> list[str]:
    """From 3 words to `longest`, drawn with a seed: many are short, few are long."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(3), np.log(longest), count)).astype(int)
    return [" ".join(rng.choice(SENTENCE.split(), length)) for length in lengths]


def resident() -> float:
    """MiB that the process takes now, and took at most, by the system's account."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one_run(arguments: argparse.Namespace) -> None:
    import clearhead

    ex = clearhead.load(arguments.model)
    names = [line.name for line in ex.methods() if line.applies and line.name not in arguments.skip]
    methods = [clearhead.Method(name, **FEWER.get(name, {})) for name in names]
    ex.explain("warm up", methods)
    before, started = resident(), time.perf_counter()
    found = ex.explain(
        texts(arguments.inputs, arguments.longest), methods, memory=None if arguments.free else arguments.memory
    )
    taken = time.perf_counter() - started
    scores = {name: [e.scores.tolist() for e in es] for name, es in found.items()}
    print(json.dumps({"before": before, "peak": resident(), "seconds": taken, "scores": scores}))


def run(arguments: argparse.Namespace, memory: str | None) -> dict:
    command = [sys.executable, __file__, "--model", arguments.model, "--one"]
    command += ["--inputs", str(arguments.inputs), "--longest", str(arguments.longest)]
    command += ["--skip", *arguments.skip] if arguments.skip else []
    command += ["--memory", memory] if memory else ["--free"]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(ended.stdout.splitlines()[-1])


def gaps(one: dict, other: dict) -> dict[str, float]:
    """By method, the largest difference of scores, relative to the largest score."""
    found = {}
    for name, rows in one.items():
        size = max(np.abs(row).max() for row in rows)
        found[name] = max(np.abs(np.subtract(a, b)).max() / size for a, b in zip(rows, other[name], strict=True))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:sentiment")
    parser.add_argument("--inputs", type=int, default=256)
    parser.add_argument("--longest", type=int, default=200, help="words of the longest input")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--skip", nargs="*", default=[], help="methods to leave out")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--free", action="store_true", help="without a budget")
    arguments = parser.parse_args()
    if arguments.one:
        one_run(arguments)
        return
    kept = run(arguments, arguments.memory)
    free = run(arguments, None)
    count = len(kept["scores"])
    print(f"{count} methods on {arguments.inputs} texts of 3 to {arguments.longest} words, {arguments.model}")
    for name, one in ((f"memory={arguments.memory}", kept), ("without a budget", free)):
        print(
            f"{name:20} peak {one['peak']:7,.0f} MiB, of which {one['before']:,.0f} before it began: "
            f"{one['peak'] - one['before']:6,.0f} MiB more; {one['seconds']:.0f} s"
        )
    largest = ", ".join(f"{name} {gap:.0e}" for name, gap in list(gaps(kept["scores"], free["scores"]).items())[:4])
    print(
        f"largest differences of scores, relative to the method's largest (float32; LRP amplifies rounding): {largest}"
    )


if __name__ == "__main__":
    main()
