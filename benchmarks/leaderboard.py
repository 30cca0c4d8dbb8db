"""Every method on the zoo's models: which find the truth where it is known, and which are faithful where it is not?

    python benchmarks/leaderboard.py run [--models logic,pets] [--data ../shared/data] [--minutes 10] [--limit 4]
    python benchmarks/leaderboard.py run --models pets --methods flow      only these, one example at a time
    python benchmarks/leaderboard.py tables        rows → docs/leaderboard.json → docs/leaderboard.md

`run` measures chunk after chunk of a model, each with all methods, and appends each to a file in
build/leaderboard/MODEL; stopped at any moment (or out of minutes), the same command goes on where it was. The order of
chunks is drawn, so that a part of them is a fair sample. Several models: one process each, or several
(`--models pets:3`), `--workers` at a time. Methods that take longer than all others together are measured apart, on the
first of the same examples, as many as there is time for: the tables say how many. No pyarrow is needed: what a chunk
gives is one line of JSON.
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

from clearhead.bench.chunk_explanations import with_controls
from clearhead.bench.job import Job, Task, base_key, chunks
from clearhead.bench.worker import Worker, versions
from clearhead.methods.base import REGISTRY

ROWS = Path("build/leaderboard")
TENTHS = tuple(tenth / 10 for tenth in range(1, 11))

FLOW = ("flow",)
#: Methods of which one explanation takes about as many passes as there are units, or more.
MANY = ("kernel-shap", "lime", "occlusion", "shap", "value-zeroing")
#: The same scores for less: nobody looks at what was read after the other layers here.
BRIEFER = {"flow": "flow(depths=False)"}


@dataclass(frozen=True)
class Case:
    """A model of the zoo, the data it is measured on, and by which protocols.

    apart: methods that are measured only where `--methods` names them
    """

    data: str
    protocols: tuple[str, ...]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    split: str | None = None
    limit: int = 100
    chunk: int = 4
    batch_size: int = 8
    apart: tuple[str, ...] = ()


def words(*fills: str, **more: Any) -> dict[str, dict[str, Any]]:
    return {"perturb-text": {"fills": fills, "fractions": TENTHS, **more}}


PICTURES = {"perturb-images": {"fills": ("black", "mean", "blur"), "fractions": TENTHS}}
ONE_FILL = {"perturb-images": {"fills": ("mean",), "fractions": TENTHS}}
SEEN = ("perturb-images", "segmentation", "subsets")

#: The models with known answers first: truth, and how faithful the same explanations are.
CASES: dict[str, Case] = {
    "logic": Case("known:logic", ("truth", "perturb-text", "subsets"), words("mask")),
    "recall": Case("known:recall", ("truth", "perturb-text", "subsets"), words("pad") | {"subsets": {"fill": "pad"}}),
    "recall-4k": Case("known:recall-4k", ("truth",), limit=30, chunk=1, batch_size=1, apart=(*FLOW, *MANY)),
    "spell": Case("known:spell", ("truth", "perturb-text", "subsets"), words("pad") | {"subsets": {"fill": "pad"}}),
    "shapes-vqa": Case("known:shapes-vqa", ("truth", "perturb-text", "perturb-regions"), words("mask"), chunk=2),
    "shapes-vilt": Case("known:shapes-vilt", ("truth", "perturb-text", "perturb-images"), words("mask") | ONE_FILL),
    "shapes-detr": Case("known:shapes-detr", ("truth",), chunk=2),
    "pets-hans": Case("known:pets-hans", ("truth", "perturb-images", "subsets"), ONE_FILL, apart=FLOW),
    "sentiment": Case("sst2", ("perturb-text", "eraser", "subsets"), words("mask", "delete"), "test"),
    "rationale": Case(
        "eraser-movies",
        ("rationales", "perturb-text", "eraser"),
        words("mask"),
        "test",
        chunk=2,
        batch_size=4,
        apart=(*FLOW, "kernel-shap", "lime"),
    ),
    "pets": Case("pets", SEEN, PICTURES, "test", apart=FLOW),
    "pets-mean": Case("pets", SEEN, PICTURES, "test", apart=FLOW),
    "pets-clip": Case("pets", SEEN, PICTURES | {"subsets": {"stream": "image"}}, "test", apart=FLOW),
}


def job_of(model: str, asked: argparse.Namespace) -> Job:
    case = CASES[model]
    without = {*case.apart, *asked.without.split(",")}
    methods = asked.methods or tuple(name for name in sorted(REGISTRY) if name not in without)
    own = None if case.data.startswith("known:") else asked.data
    return Job(
        f"zoo:{model}",
        case.data,
        methods,
        case.protocols,
        case.settings,
        case.split,
        own,
        limit=case.limit if own is None else None,
        chunk=case.chunk,
        batch_size=case.batch_size,
        device=asked.device,
        dtype="float32",  # on a GPU, too: half precision would be the model as stored
    )


def sample_of(job: Job, count: int, drawn: bool) -> tuple[int, ...]:
    """Which examples: data sets lie in the order of their classes, so they are drawn, always the same."""
    size = len(job.opened())
    order = np.arange(size) if drawn or job.root is None else np.random.default_rng(0).permutation(size)
    return tuple(int(place) for place in order[:count])


def run(model: str, asked: argparse.Namespace) -> None:
    """Measure what is missing of one model, until the time is over."""
    torch.set_num_threads(asked.threads)
    ends = time.monotonic() + 60 * asked.minutes
    job, case = job_of(model, asked), CASES[model]
    indices = sample_of(job, case.limit, asked.drawn)
    job = Job(**{**asdict(job), "indices": indices[: asked.limit], "settings": case.settings, "limit": job.limit})
    worker = Worker(job)
    methods = briefer(asked.methods) or tuple(str(method) for method in with_controls(job.methods))
    missing = tuple((settings, methods) for settings in worker.protocols)
    path = asked.out / model / f"{file_name(asked.part, asked.methods)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {line["key"] for line in lines_of(path.parent)}
    plan = planned(worker, asked.methods)
    part, parts = map(int, asked.part.split("/"))
    for number, (key, places) in enumerate(plan[part::parts]):
        if key in done:
            continue
        if time.monotonic() > ends:
            print(f"{model}: out of time after {number} of {len(plan)} chunks", flush=True)
            return
        began = time.monotonic()
        shard = worker(Task(key, places, missing))
        seconds = round(time.monotonic() - began, 2)
        rows = [{**asdict(row), "curves": {}, "method": plain(row.method)} for row in shard.rows]  # curves are long
        line = {"key": key, "seconds": seconds, "about": about(worker, job), "refused": shard.refused, "rows": rows}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{model}: chunk {number + 1} of {len(plan) // parts}, {seconds:.1f} s, {len(rows)} rows", flush=True)


def planned(worker: Worker, methods: tuple[str, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Keys and examples of the chunks, in the order in which they are drawn; of methods that go apart, one by one."""
    job = worker.job
    found = [
        (base_key(worker.model, content, versions(), job), places) for places, content in chunks(worker.data, job.chunk)
    ]
    drawn = [found[place] for place in np.random.default_rng(1).permutation(len(found))]
    if not methods:
        return drawn
    return [(f"{key}/{place}/{','.join(methods)}", (place,)) for key, places in drawn for place in places]


def briefer(methods: tuple[str, ...]) -> tuple[str, ...]:
    """
    >>> briefer(("flow", "lime"))
    ('flow(depths=False)', 'lime')
    """
    return tuple(BRIEFER.get(name, name) for name in methods)


def plain(method: str) -> str:
    """
    >>> plain("flow(depths=False)")
    'flow'
    """
    return method.partition("(")[0]


def file_name(part: str, methods: tuple[str, ...]) -> str:
    """
    >>> file_name("0/2", ("flow",))
    'flow-0-of-2'
    """
    return "-".join([*methods, part.replace("/", "-of-")])


def about(worker: Worker, job: Job) -> dict[str, Any]:
    """What a row's hash of settings stands for, and where it was measured."""
    settings = {key: {"protocol": name, **made.settings} for key, (name, made) in worker.protocols.items()}
    device = torch.cuda.get_device_name() if job.device and "cuda" in job.device else "CPU"
    dtype = str(job.dtype)
    return {"settings": settings, "versions": versions(), "device": device, "dtype": dtype, "data": worker.data.name}


def lines_of(folder: Path) -> list[dict[str, Any]]:
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


def run_all(parts: list[tuple[str, str]], asked: argparse.Namespace) -> None:
    """One process a part of a model, so many at a time; each writes a log beside its rows."""
    waiting, running = list(parts), {}
    asked.out.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < asked.workers:
            model, part = waiting.pop(0)
            command = [sys.executable, __file__, "run", "--models", model, "--part", part, "--data", asked.data]
            command += ["--out", str(asked.out), "--threads", str(asked.threads), "--minutes", str(asked.minutes)]
            command += ["--device", "cpu" if model in asked.on_cpu.split(",") else asked.device]
            command += ["--without", asked.without, *([] if asked.limit is None else ["--limit", str(asked.limit)])]
            command += ["--drawn"] if asked.drawn else []
            command += ["--methods", ",".join(asked.methods)] if asked.methods else []
            log = (asked.out / f"{model}-{file_name(part, asked.methods)}.log").open("a", encoding="utf-8")
            running[model, part] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        for own, process in list(running.items()):
            if process.poll() is not None:
                print(f"{own[0]} {own[1]}: ended with {process.returncode}", flush=True)
                del running[own]
        time.sleep(0.5)


def parts_of(models: str) -> list[tuple[str, str]]:
    """
    >>> parts_of("logic,pets:2")
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
    parser.add_argument("--part", default="0/1", help="of a model's chunks, for one of several processes")
    parser.add_argument("--drawn", action="store_true", help="the data holds the examples in the order they were drawn")
    parser.add_argument("--data", default="../shared/data", help="the folder that holds pets, sst2 and eraser-movies")
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--minutes", type=float, default=1e6, help="no chunk is begun after so many")
    parser.add_argument("--limit", type=int, help="only so many examples of each model, to try it out")
    parser.add_argument("--methods", type=lambda names: tuple(names.split(",")), default=(), help="only these")
    parser.add_argument("--without", default="", help="methods that are too slow for this machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--on-cpu", default="", help="models that stay on the CPU, whatever the device")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    parts = parts_of(asked.models)
    if asked.what == "tables":
        from leaderboard_tables import write

        write(asked.out, Path("docs"))
    elif len(parts) == 1:
        run(parts[0][0], asked)
    else:
        run_all(parts, asked)


if __name__ == "__main__":
    main()
