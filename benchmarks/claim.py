"""The registered claim about the default method (docs/claim.md): train, measure, and write the results.

    python benchmarks/claim.py train [--cases logic-seed1,recall-seed1] [--minutes 9] [--parallel 4] [--data DIR]
    python benchmarks/claim.py measure [--cases …] [--methods …] [--minutes 9] [--parallel 2] [--data DIR]
    python benchmarks/claim.py status
    python benchmarks/claim.py page

`train` trains the models of the seeds that the zoo does not keep, several side by side. `measure` explains held-out
examples of every case with every method. Both stop after --minutes. Run again, `train` restarts what it ended, and
`measure` continues with the next chunk of examples. `page` writes docs/claim-results.md from the stored figures.
`make claim` runs all of them. --data is a folder with the data sets pets, sst2 and eraser-movies, and with spell.tsv
(`packages/zoo/train/spell.py --prepare`).
"""

import argparse
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

from claim_page import write_page
from claim_tasks import (
    EXAMPLES_SEED,
    ClaimCase,
    KnownAnswerCase,
    MethodScores,
    compute_fingerprint,
    list_cases,
    make_training_command,
    read_scores,
    resolve_methods,
)

import clearhead
from clearhead.bench.chunk_explanations import explain_examples, split_applicable
from clearhead.bench.data.base import Example
from clearhead.data.atomic_file import atomic_write

#: Examples that are explained before the scores are stored.
CHUNK_SIZE = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("train", "measure", "measure-case", "status", "page"))
    parser.add_argument("--cases", default="", help="cases, separated by commas (default: all)")
    parser.add_argument("--methods", default="", help="methods, separated by commas (default: all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time, to be continued")
    parser.add_argument("--parallel", type=int, default=1, help="number of processes side by side")
    parser.add_argument("--device", default="cpu", help="device of the models")
    parser.add_argument("--data", type=Path, help="folder with spell.tsv, pets, sst2 and eraser-movies")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    cases = select_cases(options.cases)
    if options.step == "train":
        sys.exit(not train_models(cases, options, deadline))
    elif options.step == "measure":
        sys.exit(not measure_cases(cases, options, deadline))
    elif options.step == "measure-case":
        measure_case(cases[0], options, deadline)
    elif options.step == "status":
        print_status(cases)
    else:
        write_page(cases)


def select_cases(names: str) -> list[ClaimCase]:
    """Return the cases with these names, separated by commas; all if there is no name."""
    cases = {case.name: case for case in list_cases()}
    unknown = set(filter(None, names.split(","))) - set(cases)
    if unknown:
        raise SystemExit(f"unknown cases {', '.join(sorted(unknown))}; known are {', '.join(cases)}")
    return [cases[name] for name in names.split(",")] if names else [*cases.values()]


def train_models(cases: Sequence[ClaimCase], options: argparse.Namespace, deadline: float) -> bool:
    """Train the models that are not trained yet, and return whether all are. A training that was ended starts again."""
    commands = {}
    is_possible = True
    for case in cases:
        if case.is_trained or not isinstance(case, KnownAnswerCase):
            continue
        try:
            commands[case.name] = [sys.executable, *make_training_command(case, options.device, options.data)]
        except FileNotFoundError as problem:
            print(f"{case.name}: not trained. {problem}", file=sys.stderr)
            is_possible = False
    return run_side_by_side(commands, options.parallel, deadline) and is_possible


def measure_cases(cases: Sequence[ClaimCase], options: argparse.Namespace, deadline: float) -> bool:
    """Measure all cases that have a model, each in a process of its own; return whether all cases are measured."""
    commands = {}
    is_possible = True
    for case in cases:
        if not case.is_trained:
            print(f"{case.name}: not trained yet", file=sys.stderr)
            is_possible = False
            continue
        command = [sys.executable, __file__, "measure-case", "--cases", case.name, "--device", options.device]
        command += ["--methods", options.methods] if options.methods else []
        command += ["--data", str(options.data)] if options.data else []
        commands[case.name] = command
    return run_side_by_side(commands, options.parallel, deadline) and is_possible


def run_side_by_side(commands: dict[str, list[str]], num_parallel: int, deadline: float) -> bool:
    """Run commands in processes with one thread each; end them at the deadline. Return whether all succeeded."""
    num_succeeded = 0
    waiting = list(commands.items())
    running: dict[str, subprocess.Popen[bytes]] = {}
    started: dict[str, float] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        while waiting or running:
            while waiting and len(running) < num_parallel and time.monotonic() < deadline:
                name, command = waiting.pop(0)
                started[name] = time.monotonic()
                running[name] = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            for name, process in list(running.items()):
                if process.poll() is not None:
                    has_succeeded = process.returncode == 0
                    num_succeeded += has_succeeded
                    seconds = time.monotonic() - started[name]
                    print(f"{name}: {'done' if has_succeeded else 'failed'} after {seconds:.0f} s", flush=True)
                    del running[name]
            if time.monotonic() >= deadline:
                print(f"Time is up: {len(running) + len(waiting)} are not finished. Run the same command again.")
                return False
            time.sleep(0.2)
        return num_succeeded == len(commands)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def measure_case(case: ClaimCase, options: argparse.Namespace, deadline: float) -> None:
    """Measure the methods of one case, cheap ones first, and store the figures after each chunk of examples."""
    explainer = clearhead.load(str(case.model_dir), device=options.device, dtype="float32")
    examples = case.load_examples(options.data)
    applicable, reasons = split_applicable(explainer, [clearhead.Method(name) for name in resolve_methods()])
    with ScoreStore(case, describe_machine(explainer), reasons) as store:
        for method in applicable:
            store.expect(method, case.count_examples(method.name))
        for method in applicable:
            if not options.methods or str(method) in options.methods.split(","):
                store.measure(explainer, examples, method, deadline)


class ScoreStore:
    """The stored figures of one case; a method has those of the first examples, because they are measured in order.

    One process at a time can have it open.

    Args:
        case: The case.
        machine: Where methods are measured now.
        reasons: Method → why it does not apply.
    """

    def __init__(self, case: ClaimCase, machine: str, reasons: dict[str, str]) -> None:
        self.case = case
        self.protocol = case.protocol
        self.fingerprint = compute_fingerprint(case)
        stored = json.loads(case.scores_path.read_text()) if case.scores_path.exists() else {}
        if stored and stored["fingerprint"] != self.fingerprint:
            raise SystemExit(f"{case.scores_path} has figures of other weights or examples: delete it to measure again")
        self.methods = read_scores(case)
        self.reasons = reasons
        self.provenance = {
            name: sorted({*stored.get(name, []), value})
            for name, value in (
                ("machines", machine),
                ("commits", read_commit()),
                ("dates", time.strftime("%Y-%m-%d")),
            )
        }

    def __enter__(self) -> "ScoreStore":
        self.case.scores_path.parent.mkdir(parents=True, exist_ok=True)
        self.lock_file = open(self.case.scores_path.with_suffix(".lock"), "w")
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{self.case.name} is being measured by another process") from None
        return self

    def __exit__(self, *error: object) -> None:
        self.lock_file.close()
        Path(self.lock_file.name).unlink()

    def expect(self, method: clearhead.Method, num_examples: int) -> None:
        """Note on how many examples a method is to be measured."""
        if num_examples:
            self.methods.setdefault(str(method), MethodScores(num_examples)).num_expected = num_examples

    def measure(
        self, explainer: clearhead.Explainer, examples: Sequence[Example], method: clearhead.Method, deadline: float
    ) -> None:
        """Explain the examples that are left with one method, chunk by chunk, and store the scores after each chunk."""
        scores = self.methods.get(str(method), MethodScores(0))
        while not scores.is_complete and time.monotonic() < deadline:
            chunk = examples[scores.num_measured : min(scores.num_measured + CHUNK_SIZE, scores.num_expected)]
            started = time.perf_counter()
            explained = explain_examples(explainer, chunk, [method], self.protocol)
            by_index = explained.get_by_index(str(method))
            reason = explained.failure_reasons.get(str(method), "")
            succeeded = [chunk[index] for index in by_index]
            measurements = self.protocol.measure(explainer, succeeded, {str(method): list(by_index.values())})
            scores.add(
                [example.id for example in chunk],
                self.case.select_values(measurements),
                time.perf_counter() - started,
                {example.id: reason for index, example in enumerate(chunk) if index not in by_index},
            )
            self._write()

    def _write(self) -> None:
        figures = json.loads((self.case.model_dir / "card.json").read_text())["figures"]
        quality_name, quality = next(iter(figures.items()))
        content = {
            "case": vars(self.case),
            "fingerprint": self.fingerprint,
            "quality_name": quality_name,
            "quality": quality,
            "protocol": self.protocol.settings,
            "examples_seed": EXAMPLES_SEED,
            **self.provenance,
            "not_applicable": self.reasons,
            "methods": {name: vars(scores) for name, scores in self.methods.items()},
        }
        with atomic_write(self.case.scores_path) as path:
            path.write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")


def describe_machine(explainer: clearhead.Explainer) -> str:
    """Return the processor or GPU, the dtype, and the versions."""
    import torch
    import transformers

    device = explainer.adapter.device
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    dtype = str(explainer.adapter.dtype).removeprefix("torch.")
    return f"{name}, {dtype}, torch {torch.__version__}, transformers {transformers.__version__}"


def read_commit() -> str:
    """Return the commit of the working tree, or what CLEARHEAD_COMMIT says where there is no git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    return finished.stdout.strip() or os.environ.get("CLEARHEAD_COMMIT", "unknown")


def print_status(cases: Iterable[ClaimCase]) -> None:
    """Print what is trained and measured."""
    for case in cases:
        counts = sorted(scores.num_measured for scores in read_scores(case).values())
        state = "has a model" if case.is_trained else "not trained"
        measured = f"{len(counts)} methods, {counts[0]} to {counts[-1]} examples" if counts else "not measured"
        print(f"{case.name:20} {state:12} {measured}")


if __name__ == "__main__":
    main()
