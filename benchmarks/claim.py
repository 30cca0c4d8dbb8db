"""The registered claim about the default method (docs/claim.md): train, measure, and write the results.

    python benchmarks/claim.py train [--tasks logic,recall] [--minutes 9] [--parallel 4] [--device cuda] [--data DIR]
    python benchmarks/claim.py measure [--tasks …] [--methods …] [--minutes 9] [--parallel 2]
    python benchmarks/claim.py status
    python benchmarks/claim.py page

`train` trains the models of the seeds that the zoo does not keep, several side by side. `measure` explains held-out
examples of every model with every method. Both stop after --minutes and continue where they stopped: training from its
checkpoint, measuring with the next chunk of examples. `page` writes docs/claim-results.md from the stored scores.
`make claim` runs all of them. --data is a folder with spell.tsv (`train/spell.py --prepare`) and pets/.
"""

import argparse
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
    MethodScores,
    TrainedModel,
    list_models,
    make_training_command,
    read_scores,
    resolve_methods,
)

import clearhead
from clearhead.bench.chunk_explanations import explain_examples, split_applicable
from clearhead.bench.data import load_benchmark_dataset
from clearhead.bench.data.base import Example
from clearhead.bench.protocols.known_evidence import KnownEvidence
from clearhead.data.atomic_file import atomic_write

#: Examples that are explained before the scores are stored.
CHUNK_SIZE = 25
METRIC = "minimal average precision"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("train", "measure", "measure-model", "status", "page"))
    parser.add_argument("--tasks", default="", help="tasks, separated by commas (default: all)")
    parser.add_argument("--seeds", default="", help="seeds, separated by commas (default: all)")
    parser.add_argument("--methods", default="", help="methods, separated by commas (default: all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time, to be continued")
    parser.add_argument("--parallel", type=int, default=1, help="number of processes side by side")
    parser.add_argument("--device", default="cpu", help="device of the models")
    parser.add_argument("--data", type=Path, help="folder with spell.tsv and pets/, for their training")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    models = [
        model
        for model in list_models()
        if (not options.tasks or model.task in options.tasks.split(","))
        and (not options.seeds or str(model.seed) in options.seeds.split(","))
    ]
    if options.step == "train":
        train_models(models, options.device, options.data, options.parallel, deadline)
    elif options.step == "measure":
        measure_models(models, options, deadline)
    elif options.step == "measure-model":
        measure_model(models[0], options.methods.split(",") if options.methods else None, options.device, deadline)
    elif options.step == "status":
        print_status(models)
    else:
        write_page(models)


def train_models(
    models: Sequence[TrainedModel], device: str, data: Path | None, num_parallel: int, deadline: float
) -> None:
    """Train the models that are not trained yet."""
    commands = {}
    for model in models:
        if model.is_trained:
            continue
        try:
            commands[model.name] = [sys.executable, *make_training_command(model, device, data)]
        except FileNotFoundError as problem:
            print(f"{model.name}: not trained. {problem}", file=sys.stderr)
    run_side_by_side(commands, num_parallel, deadline)


def measure_models(models: Sequence[TrainedModel], options: argparse.Namespace, deadline: float) -> None:
    """Measure all trained models, each in a process of its own."""
    minutes = (deadline - time.monotonic()) / 60
    commands = {}
    for model in models:
        if not model.is_trained:
            print(f"{model.name}: not trained yet", file=sys.stderr)
            continue
        selection = ["--tasks", model.task, "--seeds", str(model.seed), "--methods", options.methods]
        limits = ["--minutes", str(minutes), "--device", options.device]
        commands[model.name] = [sys.executable, __file__, "measure-model", *selection, *limits]
    run_side_by_side(commands, options.parallel, deadline)


def run_side_by_side(commands: dict[str, list[str]], num_parallel: int, deadline: float) -> None:
    """Run commands in processes with one thread each; end them at the deadline."""
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
                    seconds = time.monotonic() - started[name]
                    print(
                        f"{name}: {'done' if process.returncode == 0 else 'failed'} after {seconds:.0f} s", flush=True
                    )
                    del running[name]
            if time.monotonic() >= deadline:
                print(f"Time is up: {len(running) + len(waiting)} are not finished. Run the same command again.")
                return
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def measure_model(model: TrainedModel, methods: Sequence[str] | None, device: str, deadline: float) -> None:
    """Measure the methods of one model, cheap ones first, and store the scores after each chunk of examples."""
    explainer = clearhead.load(str(model.model_dir), device=device)
    examples = list(load_benchmark_dataset("known", task=model.task, count=model.num_examples, seed=EXAMPLES_SEED))
    applicable, reasons = split_applicable(explainer, [clearhead.Method(name) for name in resolve_methods()])
    num_units = count_units(explainer, examples[0])
    store = ScoreStore(model, describe_machine(explainer), reasons)
    for method in applicable:
        if methods is not None and str(method) not in methods:
            continue
        store.measure(explainer, examples[: model.count_examples(method.name, num_units)], method, deadline)


class ScoreStore:
    """The stored scores of one model; a method has those of the first examples, because they are measured in order.

    Args:
        model: The model.
        machine: Where methods are measured now.
        reasons: Method → why it does not apply.
    """

    def __init__(self, model: TrainedModel, machine: str, reasons: dict[str, str]) -> None:
        self.model = model
        self.machine = machine
        self.reasons = dict(reasons)
        self.methods = read_scores(model)
        self.protocol = KnownEvidence()

    def measure(
        self, explainer: clearhead.Explainer, examples: Sequence[Example], method: clearhead.Method, deadline: float
    ) -> None:
        """Explain the examples that are left with one method, chunk by chunk, and store the scores after each chunk."""
        scores = self.methods.setdefault(str(method), MethodScores(0, 0.0, {}))
        for start in range(scores.num_measured, len(examples), CHUNK_SIZE):
            if time.monotonic() >= deadline:
                return
            chunk = examples[start : start + CHUNK_SIZE]
            started = time.perf_counter()
            explained = explain_examples(explainer, chunk, [method], self.protocol)
            self.reasons |= explained.failure_reasons
            scores.add(
                [example.id for example in chunk],
                {
                    (measurement.part, measurement.example): measurement.figures[METRIC]
                    for measurement in self.protocol.measure(explainer, chunk, explained.by_method)
                },
                time.perf_counter() - started,
            )
            self._write()

    def _write(self) -> None:
        figures = json.loads((self.model.model_dir / "card.json").read_text())["figures"]
        quality_name, quality = next(iter(figures.items()))
        content = {
            "task": self.model.task,
            "seed": self.model.seed,
            "quality_name": quality_name,
            "quality": quality,
            "metric": METRIC,
            "protocol": self.protocol.settings,
            "examples_seed": EXAMPLES_SEED,
            "machine": self.machine,
            "commit": read_commit(),
            "date": time.strftime("%Y-%m-%d"),
            "not_measured": self.reasons,
            "methods": {name: vars(scores) for name, scores in self.methods.items()},
        }
        self.model.scores_path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.model.scores_path) as path:
            path.write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")


def count_units(explainer: clearhead.Explainer, example: Example) -> int:
    """Return the number of units of all streams of an example."""
    explanation = explain_examples(explainer, [example], [clearhead.Method("position")], KnownEvidence())
    (positions,) = explanation.by_method["position"]
    return sum(len(positions[stream].units) for stream in positions.streams)


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


def print_status(models: Iterable[TrainedModel]) -> None:
    """Print what is trained and measured."""
    for model in models:
        methods = read_scores(model)
        counts = sorted(scores.num_measured for scores in methods.values())
        state = "zoo model" if model.is_zoo_model else "trained" if model.is_trained else "not trained"
        measured = f"{len(counts)} methods, {counts[0]} to {counts[-1]} examples" if counts else "not measured"
        print(f"{model.name:20} {state:12} {measured}")


if __name__ == "__main__":
    main()
