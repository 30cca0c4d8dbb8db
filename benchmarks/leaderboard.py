"""Every method on the zoo's models: localisation of ground-truth evidence where it is known, and faithfulness.

    python benchmarks/leaderboard.py run [--models logic,pets] [--data ../shared/data] [--minutes 10] [--limit 4]
    python benchmarks/leaderboard.py run --models pets --methods flow      only these, one example at a time
    python benchmarks/leaderboard.py tables        rows → docs/leaderboard.json → docs/leaderboard.md

`run` measures a model in chunks, each with all methods, and appends each chunk to a file in build/leaderboard/MODEL. An
interrupted run, or one that ran out of minutes, continues with the same command. The order of chunks is random, so that
a part of them is an unbiased sample. Several models: one process each, or several (`--models pets:3`), `--workers` at a
time. Methods that take longer than all others together are measured separately, on the first of the same examples, as
many as time allows: the tables show the number. No pyarrow is needed: the result of a chunk is one line of JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch

from clearhead.bench.chunk_explanations import add_controls
from clearhead.bench.job import BenchmarkJob, ChunkTask, compute_chunk_key, iter_chunks
from clearhead.bench.worker import ChunkWorker, format_versions
from clearhead.methods.base import METHOD_REGISTRY

DEFAULT_OUT_DIR = Path("build/leaderboard")
DECILE_FRACTIONS = tuple(tenth / 10 for tenth in range(1, 11))

FLOW_METHODS = ("flow",)
#: Methods whose number of passes is about the number of units, or more.
PERTURBATION_METHODS = ("kernel-shap", "lime", "occlusion", "shap", "value-zeroing")
#: The same scores at lower cost: the scores after the other layers are not used here.
FASTER_VARIANTS = {"flow": "flow(depths=False)"}


@dataclass(frozen=True)
class BenchmarkCase:
    """A model of the zoo, its data and protocols.

    slow_methods: methods that are measured only if `--methods` names them
    """

    data: str
    protocols: tuple[str, ...]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    split: str | None = None
    limit: int = 100
    chunk_size: int = 4
    batch_size: int = 8
    slow_methods: tuple[str, ...] = ()


def make_text_settings(*fills: str, **settings: Any) -> dict[str, dict[str, Any]]:
    return {"perturb-text": {"fills": fills, "fractions": DECILE_FRACTIONS, **settings}}


IMAGE_SETTINGS = {"perturb-images": {"fills": ("black", "mean", "blur"), "fractions": DECILE_FRACTIONS}}
SINGLE_FILL_IMAGE_SETTINGS = {"perturb-images": {"fills": ("mean",), "fractions": DECILE_FRACTIONS}}
IMAGE_PROTOCOLS = ("perturb-images", "segmentation", "subsets")

#: The known-answer models first: ground truth, and faithfulness of the same explanations.
CASES: dict[str, BenchmarkCase] = {
    "logic": BenchmarkCase("known:logic", ("truth", "perturb-text", "subsets"), make_text_settings("mask")),
    "recall": BenchmarkCase(
        "known:recall", ("truth", "perturb-text", "subsets"), make_text_settings("pad") | {"subsets": {"fill": "pad"}}
    ),
    "recall-4k": BenchmarkCase(
        "known:recall-4k",
        ("truth",),
        limit=30,
        chunk_size=1,
        batch_size=1,
        slow_methods=(*FLOW_METHODS, *PERTURBATION_METHODS),
    ),
    "spell": BenchmarkCase(
        "known:spell", ("truth", "perturb-text", "subsets"), make_text_settings("pad") | {"subsets": {"fill": "pad"}}
    ),
    "shapes-vqa": BenchmarkCase(
        "known:shapes-vqa", ("truth", "perturb-text", "perturb-regions"), make_text_settings("mask"), chunk_size=2
    ),
    "shapes-vilt": BenchmarkCase(
        "known:shapes-vilt",
        ("truth", "perturb-text", "perturb-images"),
        make_text_settings("mask") | SINGLE_FILL_IMAGE_SETTINGS,
    ),
    "shapes-detr": BenchmarkCase("known:shapes-detr", ("truth",), chunk_size=2),
    "pets-hans": BenchmarkCase(
        "known:pets-hans", ("truth", "perturb-images", "subsets"), SINGLE_FILL_IMAGE_SETTINGS, slow_methods=FLOW_METHODS
    ),
    "sentiment": BenchmarkCase(
        "sst2", ("perturb-text", "eraser", "subsets"), make_text_settings("mask", "delete"), "test"
    ),
    "rationale": BenchmarkCase(
        "eraser-movies",
        ("rationales", "perturb-text", "eraser"),
        make_text_settings("mask"),
        "test",
        chunk_size=2,
        batch_size=4,
        slow_methods=(*FLOW_METHODS, "kernel-shap", "lime"),
    ),
    "pets": BenchmarkCase("pets", IMAGE_PROTOCOLS, IMAGE_SETTINGS, "test", slow_methods=FLOW_METHODS),
    "pets-mean": BenchmarkCase("pets", IMAGE_PROTOCOLS, IMAGE_SETTINGS, "test", slow_methods=FLOW_METHODS),
    "pets-clip": BenchmarkCase(
        "pets", IMAGE_PROTOCOLS, IMAGE_SETTINGS | {"subsets": {"stream": "image"}}, "test", slow_methods=FLOW_METHODS
    ),
}


def make_job(model: str, options: argparse.Namespace) -> BenchmarkJob:
    case = CASES[model]
    without = {*case.slow_methods, *options.without.split(",")}
    methods = options.methods or tuple(name for name in sorted(METHOD_REGISTRY) if name not in without)
    own = None if case.data.startswith("known:") else options.data
    return BenchmarkJob(
        f"zoo:{model}",
        case.data,
        methods,
        case.protocols,
        case.settings,
        case.split,
        own,
        limit=case.limit if own is None else None,
        chunk=case.chunk_size,
        batch_size=case.batch_size,
        device=options.device,
        dtype="float32",  # on a GPU, too: half precision would be the model as stored
    )


def sample_indices(job: BenchmarkJob, count: int, already_shuffled: bool) -> tuple[int, ...]:
    """Which examples: data sets lie in the order of their classes, so they are drawn, always the same."""
    size = len(job.open_dataset())
    order = np.arange(size) if already_shuffled or job.root is None else np.random.default_rng(0).permutation(size)
    return tuple(int(place) for place in order[:count])


def run_model(model: str, options: argparse.Namespace) -> None:
    """Measure what is missing of one model, until the time is over."""
    torch.set_num_threads(options.threads)
    ends = time.monotonic() + 60 * options.minutes
    job, case = make_job(model, options), CASES[model]
    indices = sample_indices(job, case.limit, options.drawn)
    job = BenchmarkJob(
        **{**asdict(job), "indices": indices[: options.limit], "settings": case.settings, "limit": job.limit}
    )
    worker = ChunkWorker(job)
    methods = use_faster_variants(options.methods) or tuple(str(method) for method in add_controls(job.methods))
    missing = tuple((settings, methods) for settings in worker.protocols_by_settings)
    path = options.out / model / f"{make_file_name(options.part, options.methods)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {line["key"] for line in read_chunk_lines(path.parent)}
    plan = plan_chunks(worker, options.methods)
    part, parts = map(int, options.part.split("/"))
    for number, (key, places) in enumerate(plan[part::parts]):
        if key in done:
            continue
        if time.monotonic() > ends:
            print(f"{model}: out of time after {number} of {len(plan)} chunks", flush=True)
            return
        began = time.monotonic()
        shard = worker(ChunkTask(key, places, missing))
        seconds = round(time.monotonic() - began, 2)
        rows = [
            {**asdict(row), "curves": {}, "method": strip_options(row.method)} for row in shard.rows
        ]  # curves are long
        line = {
            "key": key,
            "seconds": seconds,
            "about": describe_run(worker, job),
            "refused": shard.failure_reasons,
            "rows": rows,
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{model}: chunk {number + 1} of {len(plan) // parts}, {seconds:.1f} s, {len(rows)} rows", flush=True)


def plan_chunks(worker: ChunkWorker, methods: tuple[str, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Keys and examples of the chunks, in the order in which they are drawn; of methods that go apart, one by one."""
    job = worker.job
    found = [
        (compute_chunk_key(worker.model_digest, content, format_versions(), job), places)
        for places, content in iter_chunks(worker.dataset, job.chunk)
    ]
    drawn = [found[place] for place in np.random.default_rng(1).permutation(len(found))]
    if not methods:
        return drawn
    return [(f"{key}/{place}/{','.join(methods)}", (place,)) for key, places in drawn for place in places]


def use_faster_variants(methods: tuple[str, ...]) -> tuple[str, ...]:
    """
    >>> use_faster_variants(("flow", "lime"))
    ('flow(depths=False)', 'lime')
    """
    return tuple(FASTER_VARIANTS.get(name, name) for name in methods)


def strip_options(method: str) -> str:
    """
    >>> strip_options("flow(depths=False)")
    'flow'
    """
    return method.partition("(")[0]


def make_file_name(part: str, methods: tuple[str, ...]) -> str:
    """
    >>> make_file_name("0/2", ("flow",))
    'flow-0-of-2'
    """
    return "-".join([*methods, part.replace("/", "-of-")])


def describe_run(worker: ChunkWorker, job: BenchmarkJob) -> dict[str, Any]:
    """What a row's hash of settings stands for, and where it was measured."""
    settings = {key: {"protocol": name, **made.settings} for key, (name, made) in worker.protocols_by_settings.items()}
    device = torch.cuda.get_device_name() if job.device and "cuda" in job.device else "CPU"
    dtype = str(job.dtype)
    return {
        "settings": settings,
        "versions": format_versions(),
        "device": device,
        "dtype": dtype,
        "data": worker.dataset.name,
    }


def read_chunk_lines(folder: Path) -> list[dict[str, Any]]:
    """The chunks of a model; a line that was cut off by a kill is none."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                read = json.loads(line)
            except ValueError:
                continue
            found[read["key"]] = read
    return list(found.values())


def run_in_processes(parts: list[tuple[str, str]], options: argparse.Namespace) -> None:
    """One process a part of a model, so many at a time; each writes a log beside its rows."""
    waiting, running = list(parts), {}
    options.out.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < options.workers:
            model, part = waiting.pop(0)
            command = [sys.executable, __file__, "run", "--models", model, "--part", part, "--data", options.data]
            command += ["--out", str(options.out), "--threads", str(options.threads), "--minutes", str(options.minutes)]
            command += ["--device", "cpu" if model in options.on_cpu.split(",") else options.device]
            command += [
                "--without",
                options.without,
                *([] if options.limit is None else ["--limit", str(options.limit)]),
            ]
            command += ["--drawn"] if options.drawn else []
            command += ["--methods", ",".join(options.methods)] if options.methods else []
            log = (options.out / f"{model}-{make_file_name(part, options.methods)}.log").open("a", encoding="utf-8")
            running[model, part] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        for own, process in list(running.items()):
            if process.poll() is not None:
                print(f"{own[0]} {own[1]}: ended with {process.returncode}", flush=True)
                del running[own]
        time.sleep(0.5)


def parse_model_parts(models: str) -> list[tuple[str, str]]:
    """
    >>> parse_model_parts("logic,pets:2")
    [('logic', '0/1'), ('pets', '0/2'), ('pets', '1/2')]
    """
    found = []
    for one in models.split(","):
        model, _, count = one.partition(":")
        found += [(model, f"{part}/{count or 1}") for part in range(int(count or 1))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "tables"))
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--part", default="0/1", help="part of a model's chunks, for one of several processes")
    parser.add_argument("--drawn", action="store_true", help="the data contain the examples in the order of sampling")
    parser.add_argument("--data", default="../shared/data", help="folder with pets, sst2 and eraser-movies")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT_DIR)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no chunk after this time")
    parser.add_argument("--limit", type=int, help="maximum number of examples per model, for a trial run")
    parser.add_argument("--methods", type=lambda names: tuple(names.split(",")), default=(), help="only these methods")
    parser.add_argument("--without", default="", help="methods to skip on this machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--on-cpu", default="", help="models that stay on the CPU, whatever the device")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    parts = parse_model_parts(asked.models)
    if asked.what == "tables":
        from leaderboard_tables import write_leaderboard

        write_leaderboard(asked.out, Path("docs"))
    elif len(parts) == 1:
        run_model(parts[0][0], asked)
    else:
        run_in_processes(parts, asked)


if __name__ == "__main__":
    main()
