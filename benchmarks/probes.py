"""Attention on trial: every probe on zoo:sentiment, zoo:logic, zoo:recall and the BiLSTM of the debate.

    python benchmarks/probes.py --out build/probes [--sentences carry/probes/sentences.json.gz | --data ../shared/data]
        [--device cuda] [--workers 12] [--seconds 500] [--size small] [--only logic,recall/heads]

Each probe of each model is a separate process that writes one JSON file to the folder, and so is each training run that
a probe needs (`seeds@3`, `frontier@0.01`): a probe waits for its runs and then only loads them. Existing results are
not computed again, and interrupted training continues, so the same command continues after a break. A job that fails on
the device is tried again on the CPU, which is always used for the BiLSTM: cuDNN has no gradients of a recurrent network
in evaluation mode. `--size small` is a run for two cores. benchmarks/probes_page.py writes docs/attention-on-trial.md
from the results.
"""

import argparse
import csv
import gzip
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

MODEL_NAMES = ("sentiment", "logic", "recall", "bilstm")
#: The model that must be there before others can be made of it.
BILSTM_JOB = "bilstm/model"
SENTIMENT_LABELS = ("NEGATIVE", "POSITIVE")


@dataclass(frozen=True)
class StudySize:
    """How many inputs and steps: for a GPU, and for two cores."""

    inputs: int = 300
    num_adversary_inputs: int = 128
    few: int = 100
    by_head: int = 12
    draws: int = 100
    num_training_inputs: int = 4000
    num_steps: int = 400
    num_long_steps: int = 3000
    num_seeds: int = 5
    search: int = 500


FULL_SIZE = StudySize()
SMALL_SIZE = StudySize(
    inputs=100,
    num_adversary_inputs=32,
    few=24,
    by_head=3,
    draws=50,
    num_training_inputs=600,
    num_steps=60,
    num_long_steps=600,
    num_seeds=3,
    search=150,
)
TINY_SIZE = StudySize(
    inputs=6,
    num_adversary_inputs=3,
    few=3,
    by_head=1,
    draws=4,
    num_training_inputs=24,
    num_steps=2,
    num_long_steps=2,
    num_seeds=2,
    search=3,
)
SIZES = {"full": FULL_SIZE, "small": SMALL_SIZE, "tiny": TINY_SIZE}


@dataclass
class StudyInputs:
    """Texts to learn from and texts to measure on, with labels; of the latter also the evidence, where it is known."""

    training: list[tuple[str, Any]]
    evaluation: list[tuple[str, Any]]
    known_evidence: list[Any] | None = None

    def texts(self, count: int) -> list[str]:
        return [text for text, _ in self.evaluation[:count]]

    def labels(self, count: int) -> list[Any]:
        return [label for _, label in self.evaluation[:count]]


def load_inputs(model: str, size: StudySize, sentences: Path | None, data: Path) -> StudyInputs:
    if model in ("sentiment", "bilstm"):
        found = _load_sentences(sentences, data)
        learned = found["train"] if model == "bilstm" else found["train"][: size.num_training_inputs]
        return StudyInputs([tuple(one) for one in learned], [tuple(one) for one in found["test"]])
    from clearhead_zoo.tasks import logic, recall

    if model == "logic":
        made = (
            logic.make_examples(4 * size.num_training_inputs, 1, "train"),
            logic.make_examples(size.inputs, 0, evident=True),
        )
    else:
        made = (
            recall.make_examples(size.num_training_inputs, 1, "train", pairs=(3, 12)),
            recall.make_examples(size.inputs, 0, pairs=(4, 16)),
        )
    pairs = [[(one.text, one.label) for one in part] for part in made]
    return StudyInputs(*pairs, known_evidence=made[1])


def _load_sentences(packed: Path | None, data: Path) -> dict[str, list[Any]]:
    if packed is not None and packed.is_file():
        with gzip.open(packed, "rt", encoding="utf-8") as file:
            return json.load(file)
    found = {}
    for name, file in {"train": "train.tsv", "test": "test_official_dev.tsv"}.items():
        with (data / "sst2" / file).open(encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            found[name] = [(row["sentence"].strip(), int(row["label"])) for row in rows]
    there = {text for text, _ in found["test"]}
    whole = [row for row in found["train"] if len(row[0].split()) >= 8 and row[0] not in there]
    return {"train": whole[:12000], "test": found["test"]}


def load_explainer(model: str, inputs: StudyInputs, size: StudySize, folder: Path, device: str) -> Any:
    import clearhead

    if model != "bilstm":
        return clearhead.load(f"zoo:{model}", device=device, dtype="float32")
    from clearhead.studies.bilstm import train_bilstm

    texts, labels = zip(*inputs.training, strict=True)
    kept = folder / "runs" / "bilstm.safetensors"
    return train_bilstm(
        texts,
        labels,
        SENTIMENT_LABELS,
        steps=size.num_long_steps,
        device=device,
        checkpoint=kept,
        progress=_print_progress,
    )


def _print_progress(name: str, share: float) -> None:
    if round(share * 1000) % 100 == 0:
        print(f"{name}: {share:.0%}", flush=True)


def build_training_arguments(
    model: str, inputs: StudyInputs, size: StudySize, folder: Path, multiplier: int = 1
) -> tuple[list[str], list[Any], dict[str, Any]]:
    """Inputs, labels and settings for the probes that train: what is measured comes last."""
    measured, learned = inputs.evaluation[: size.inputs], inputs.training[: multiplier * size.num_training_inputs]
    texts, labels = zip(*learned, *measured, strict=True)
    how: dict[str, Any] = {
        "sentiment": {"fresh": 1, "steps": size.num_steps, "learning_rate": 5e-5},
        "logic": {"fresh": "all", "steps": size.num_long_steps, "learning_rate": 1e-3, "batch_size": 96},
        "recall": {"fresh": 1, "steps": size.num_steps, "learning_rate": 1e-3},
        "bilstm": {"fresh": "all", "steps": size.num_long_steps // 2, "learning_rate": 1e-3},
    }[model]
    how = {
        "batch_size": 32,
        **how,
        "held_out": len(measured),
        "checkpoint_dir": folder / "runs" / model,
        "progress": _print_progress,
    }
    return list(texts), list(labels), how


#: Guides of the diagnostic beside the fixed ones, where they apply.
GUIDE_METHODS = ("rollout", "generic", "grad-sam", "attcat", "input-x-gradient", "saliency", "random")
ADVERSARY_STRENGTHS = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
#: The strength of the adversary that guides the diagnostic: one of the above, so that it is trained once.
GUIDE_STRENGTH = 1e-2


def get_adversary_learning_rate(model: str) -> float:
    """The learning rate of adversaries."""
    return 5e-5 if model == "sentiment" else 3e-4


def build_jobs() -> dict[str, Callable[..., Any]]:
    """By name, what a job computes from the explainer, the inputs, the size, the model's name and the folder."""
    from clearhead import probes
    from clearhead.probes.adversarial_training import train_adversary
    from clearhead.probes.base import ProbeScope
    from clearhead.probes.fine_tuning import FineTuningConfig, LabelledSplit

    def plain(probe: str, count: str, **how: Any) -> Callable[..., Any]:
        def run(ex: Any, given: StudyInputs, size: StudySize, model: str, folder: Path) -> Any:
            told = {name: getattr(size, value) if name in ("draws", "steps") else value for name, value in how.items()}
            return getattr(probes, f"run_{probe}_probe")(ex, given.texts(getattr(size, count)), **told)

        return run

    def uniform(ex: Any, given: StudyInputs, size: StudySize, model: str, folder: Path) -> Any:
        return probes.run_uniform_probe(ex, given.texts(size.inputs), given.labels(size.inputs))

    def adversary(ex: Any, given: StudyInputs, size: StudySize, model: str, folder: Path) -> Any:
        found = probes.run_adversary_probe(ex, given.texts(size.num_adversary_inputs), steps=size.search)
        for line, one in zip(found.records, given.known_evidence or (), strict=False):
            line["evidence"] = [[bool(hit) for hit in hits] for hits in find_evidence_units(ex, one)]
        return found

    def seeds(ex: Any, given: StudyInputs, size: StudySize, model: str, folder: Path) -> Any:
        texts, labels, how = build_training_arguments(
            model, given, size, folder, multiplier=4 if model == "logic" else 1
        )
        return probes.run_seeds_probe(ex, texts, labels, seeds=size.num_seeds, **how)

    def frontier(ex: Any, given: StudyInputs, size: StudySize, model: str, folder: Path) -> Any:
        texts, labels, how = build_training_arguments(model, given, size, folder)
        how |= {"steps": size.num_steps, "learning_rate": get_adversary_learning_rate(model)}
        return probes.run_frontier_probe(ex, texts, labels, strengths=ADVERSARY_STRENGTHS, seeds=0, **how)

    def one_seed(seed: int) -> Callable[..., Any]:
        def run(ex: Any, given: StudyInputs, size: StudySize, model: str, folder: Path) -> None:
            texts, labels, how = build_training_arguments(
                model, given, size, folder, multiplier=4 if model == "logic" else 1
            )
            probes.run_seeds_probe(ex, texts, labels, seeds=1, seed=seed - 1, **how)

        return run

    def one_adversary(strength: float) -> Callable[..., Any]:
        def run(ex: Any, given: StudyInputs, size: StudySize, model: str, folder: Path) -> None:
            texts, labels, how = build_training_arguments(model, given, size, folder)
            lessons = LabelledSplit(ex, texts, labels, how["held_out"], None, 0)
            training = FineTuningConfig(
                size.num_steps,
                how["batch_size"],
                get_adversary_learning_rate(model),
                how["checkpoint_dir"],
                _print_progress,
            )
            train_adversary(lessons, ProbeScope("S1"), strength, training, 0)

        return run

    def diagnostic(ex: Any, given: StudyInputs, size: StudySize, model: str, folder: Path) -> Any:
        texts, labels, how = build_training_arguments(model, given, size, folder)
        kept = {name: how[name] for name in ("batch_size", "held_out", "checkpoint_dir", "progress")}
        why = {line.name: line.why_not for line in ex.methods()}
        guides = ["uniform", "own", "base", "adversary", *(name for name in GUIDE_METHODS if not why.get(name))]
        adversaries = {
            "adversary_steps": size.num_steps,
            "adversary_learning_rate": get_adversary_learning_rate(model),
            "strength": GUIDE_STRENGTH,
        }
        return probes.run_diagnostic_probe(
            ex, texts, labels, guides=guides, steps=2 * size.num_steps, **adversaries, **kept
        )

    return {
        "model": lambda *given: None,
        **{f"seeds@{seed}": one_seed(seed) for seed in range(1, 1 + FULL_SIZE.num_seeds)},
        **{f"frontier@{strength:g}": one_adversary(strength) for strength in ADVERSARY_STRENGTHS},
        "permutation": plain("permutation", "inputs", draws="draws"),
        "permutation-kept": plain("permutation", "inputs", draws="draws", keep=True),
        "permutation-S2": plain("permutation", "few", draws="draws", scope="S2"),
        "permutation-S4": plain("permutation", "few", draws="draws", scope="S4"),
        "permutation-heads": plain("permutation", "by_head", draws="draws", by_head=True),
        "adversary": adversary,
        "adversary-S2": plain("adversary", "few", scope="S2", steps="search"),
        "correlation": plain("correlation", "few"),
        "uniform": uniform,
        "heads": plain("heads", "few"),
        "skips": plain("skips", "few"),
        "seeds": seeds,
        "frontier": frontier,
        "diagnostic": diagnostic,
        "truth": measure_known_evidence,
    }


def find_evidence_units(explainer: Any, example: Any) -> list[list[bool]]:
    """For each minimal set of words that decides the label, which units belong to it; then those set aside."""
    from clearhead.adapters.base import InputOptions

    units = (
        explainer.adapter.make_samples(example.text, InputOptions())[0].axes[explainer.adapter.stream].unit_groups[0]
    )

    def units_at(positions: Any) -> list[bool]:
        spans = [example.spans[position] for position in positions]
        return [
            not special and any(start < stop and start >= span[0] and stop <= span[1] for span in spans)
            for (start, stop), special in zip(units.offsets, units.special, strict=True)
        ]

    aside = [special or asks for special, asks in zip(units.special, units_at(example.question_positions), strict=True)]
    return [*(units_at(witness) for witness in example.witnesses), aside]


def measure_known_evidence(explainer: Any, inputs: StudyInputs, size: StudySize, model: str, folder: Path) -> Any:
    """Which methods find what is known to decide the label: average precision, example by example."""
    from clearhead.bench.chunk_explanations import add_controls, explain_examples, split_applicable
    from clearhead.bench.data import load_benchmark_dataset
    from clearhead.bench.protocols.known_evidence import KnownEvidence

    protocol = KnownEvidence()
    names = ["attention", "rollout", "attention-x-gradient", "generic", "grad-sam", "input-x-gradient", "saliency"]
    methods, _ = split_applicable(explainer, add_controls(names))
    examples = list(load_benchmark_dataset("known", task=model, count=size.few))
    own = explain_examples(explainer, examples, methods, protocol, batch_size=16)
    rows = protocol.measure(explainer, examples, own.by_method)
    return {
        "rows": [{"example": r.example, "method": r.method, "figures": r.figures} for r in rows],
        "refused": own.failure_reasons,
    }


JOB_ORDER = (
    *(f"seeds@{seed}" for seed in range(1, 1 + FULL_SIZE.num_seeds)),
    *(
        f"frontier@{strength:g}"
        for strength in (GUIDE_STRENGTH, *(one for one in ADVERSARY_STRENGTHS if one != GUIDE_STRENGTH))
    ),
    *("adversary-S2", "diagnostic", "permutation-heads", "correlation", "heads", "permutation-S4", "adversary"),
    *("frontier", "seeds", "permutation-S2", "permutation", "permutation-kept", "uniform", "truth", "skips"),
)


def list_jobs(only: str | None, size: StudySize) -> list[str]:
    """The jobs, the slow ones first, and training before what opens its runs."""
    every = [
        BILSTM_JOB,
        *(f"{model}/{job}" for job in JOB_ORDER for model in ("bilstm", "logic", "sentiment", "recall")),
    ]
    left_out = {f"{model}/truth" for model in ("sentiment", "bilstm")} | {"bilstm/skips", "bilstm/permutation-heads"}
    left_out |= {f"bilstm/{job}" for job in ("permutation-S2", "permutation-S4", "adversary-S2")}  # one row: the same
    left_out |= {
        f"{model}/seeds@{seed}" for model in MODEL_NAMES for seed in range(size.num_seeds + 1, FULL_SIZE.num_seeds + 1)
    }
    if find_spec("igraph") is None:  # shares by flow need it: for the other machine
        left_out |= {f"{model}/skips" for model in MODEL_NAMES}
    chosen = None if only is None else only.split(",")
    return [
        name
        for name in every
        if name not in left_out and (chosen is None or name in chosen or name.split("/")[0] in chosen)
    ]


def find_dependencies(name: str, names: Sequence[str]) -> list[str]:
    """Those of the jobs that must be done before this one."""
    model, job = name.split("/")
    first = [BILSTM_JOB] if model == "bilstm" and name != BILSTM_JOB else []
    runs = [other for other in names if other.startswith(f"{model}/{job}@")]
    guide = [f"{model}/frontier@{GUIDE_STRENGTH:g}"] if job == "diagnostic" else []
    return [other for other in (*first, *runs, *guide) if other in names]


def run_job(name: str, arguments: argparse.Namespace) -> None:
    """One probe of one model."""
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # recurrent networks are recorded without cuDNN, and must give the same
    model, job = name.split("/")
    size = SIZES[arguments.size]
    path, started = _get_result_path(arguments.out, name), time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    for device in dict.fromkeys(("cpu" if model == "bilstm" and name != BILSTM_JOB else arguments.device, "cpu")):
        try:
            given = load_inputs(model, size, arguments.sentences, arguments.data)
            ex = load_explainer(model, given, size, arguments.out, device)
            found = build_jobs()[job](ex, given, size, model, arguments.out)
            break
        except Exception:
            print(f"{name} failed on {device}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            if device == "cpu":
                raise
    content = found.to_dict() if hasattr(found, "to_dict") else found
    told = {
        "seconds": round(time.perf_counter() - started, 1),
        "device": device,
        "size": arguments.size,
        "found": content,
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
    unfinished.replace(path)
    print(f"{name}: {told['seconds']} s on {device}", flush=True)


def _get_result_path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '-')}.json"


def run_all(arguments: argparse.Namespace) -> None:
    """Every job that is not there yet, some at a time, until time is up."""
    names = list_jobs(arguments.only, SIZES[arguments.size])
    waiting = [name for name in names if not _get_result_path(arguments.out, name).exists()]
    running: dict[str, subprocess.Popen[bytes]] = {}
    started, failed = time.monotonic(), []
    arguments.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--out", arguments.out, "--device", arguments.device, "--size", arguments.size]
    command += ["--data", arguments.data, *(["--sentences", arguments.sentences] if arguments.sentences else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    while waiting or running:
        undone = {*waiting, *running}
        # a run that failed holds nothing up: what needs it trains it itself, or fails with its own message
        ready = [name for name in waiting if undone.isdisjoint(find_dependencies(name, names))]
        for name in ready[: arguments.workers - len(running)]:
            waiting.remove(name)
            log = (arguments.out / f"{name.replace('/', '-')}.log").open("wb")
            told = [str(part) for part in [*command, "--job", name]]
            running[name] = subprocess.Popen(told, stdout=log, stderr=subprocess.STDOUT, env=environment)
        time.sleep(0.5)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            code = running.pop(name).returncode
            failed += [name] if code else []
            print(f"{time.monotonic() - started:4.0f} s {'failed' if code else 'done'}: {name}", flush=True)
        if BILSTM_JOB in failed:
            waiting = [name for name in waiting if not name.startswith("bilstm/")]
        if arguments.seconds and time.monotonic() - started > arguments.seconds:
            for process in running.values():
                process.kill()
            print(
                f"out of time: {', '.join([*running, *waiting])} not finished; the same command continues", flush=True
            )
            break
    if failed:
        print(f"failed (see the logs in {arguments.out}): {', '.join(failed)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/probes"))
    parser.add_argument("--sentences", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this time (0: never)")
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--only", help="models (logic) and jobs (recall/heads), separated by commas")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    run_job(arguments.job, arguments) if arguments.job else run_all(arguments)


if __name__ == "__main__":
    main()
