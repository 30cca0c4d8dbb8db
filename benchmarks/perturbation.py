"""The perturbation benchmark beside the authors' way: 6 methods and 2 controls × 10 fractions × both ways on zoo:pets.

The authors run one method at a time: a first program explains every picture and writes its map into a file, a second
reads the maps and sends every altered picture through the model, the clean one and the empty one again and again.
clearhead explains all methods in shared passes and sends each distinct altered picture once. Same pictures, methods,
fractions, fill and model on both sides; the curves are compared. Every way runs in a process of its own, so that its
memory is its own; after each chunk clearhead's is noted, to see if it grows.

    python benchmarks/perturbation.py [--pictures 16] [--data ../shared/data] [--device cuda] [--threads 1] [--chunk 4]
        [--authors 4] [--json benchmarks/results/perturbation/h200.json]

500 pictures are the size that papers take samples of; the authors' way may take the first few of them only, and is then
held against clearhead's time for the same few. Without a data folder, pictures are noise.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers

import clearhead
from clearhead.bench.chunk_explanations import CONTROLS
from clearhead.bench.data import DataSet, Example, read
from clearhead.bench.job import Job, Task, chunks
from clearhead.bench.protocols.base import ranking
from clearhead.bench.worker import Worker

#: The six that are compared, and the controls that are in every table of clearhead's: both sides measure all.
METHODS = ("generic", "grad-sam", "attention-x-gradient", "attention-gradcam", "saliency", "input-x-gradient")
ALL = (*METHODS, *CONTROLS)
FRACTIONS = tuple(tenth / 10 for tenth in range(1, 11))
DIRECTIONS = ("positive", "negative")
#: As stored, a GPU would take float16.
DTYPE = "float32"
#: What the authors' second program sends through the model at a time.
BATCH = 16

Curves = dict[str, list[float]]
#: Called with the number of pictures that are done.
Note = Callable[[int], None]


def pictures(count: int, folder: str | None) -> Sequence[Example]:
    if folder is not None:
        return read("pets", None, folder)[:count]
    noise = np.random.default_rng(0)
    given = [noise.integers(0, 255, (128, 128, 3), dtype=np.uint8) for _ in range(count)]
    return [Example(str(number), picture) for number, picture in enumerate(given)]


class Watch:
    """Which pictures go through the model: with gradients, to be explained, and without, to be judged by (and, in the
    authors' way, to be explained by the controls).

    Eight bytes are kept of each: a table of them would grow with the pictures, and memory is what is measured.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.seen = {True: array("q"), False: array("q")}
        self.seconds = 0.0
        model.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs["pixel_values"].detach()
        _wait(given.device)  # or what the GPU has still to do would count as watching
        began = time.perf_counter()
        self.seen[torch.is_grad_enabled()].extend(hash(one.tobytes()) for one in given.float().cpu().numpy())
        self.seconds += time.perf_counter() - began

    def counts(self) -> dict[str, int]:
        explained, judged = self.seen[True], self.seen[False]
        return {"explained": len(explained), "judged": len(judged), "distinct": len(set(judged))}


class Clock:
    """Seconds without those of watching, and memory, each time it is told how many pictures are done."""

    def __init__(self, watch: Watch, device: torch.device) -> None:
        self.watch, self.device = watch, device
        self.notes: list[dict[str, float]] = []
        self.began = time.perf_counter()

    def note(self, pictures: int) -> None:
        _wait(self.device)
        seconds = time.perf_counter() - self.began - self.watch.seconds
        found = {"pictures": pictures, "seconds": round(seconds, 2), "mib": round(resident(), 1)}
        if self.device.type == "cuda":  # the most since the last note
            found["cuda mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
            torch.cuda.reset_peak_memory_stats()
        self.notes.append(found)
        print(f"{pictures} pictures, {seconds:.1f} s, {found['mib']:,.0f} MiB", file=sys.stderr, flush=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def resident() -> float:
    """MiB that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def authors_way(ex: clearhead.Explainer, given: Sequence[Example], folder: Path, chunk: int, note: Note) -> Curves:
    """One method after the other, maps through files, no table of what was seen before."""
    for method in ALL:
        for number, example in enumerate(given):
            np.save(folder / f"{method}-{number}.npy", ex.explain(example.input, method=method).scores)
    curves: Curves = {}
    for method in ALL:
        for direction in DIRECTIONS:
            for batch in (range(start, min(start + BATCH, len(given))) for start in range(0, len(given), BATCH)):
                scores = [np.load(folder / f"{method}-{number}.npy")[1:] for number in batch]
                found = _fractions(ex, [given[number] for number in batch], scores, direction)
                curves |= {f"{method}/{given[n].id}/{direction}": own for n, own in zip(batch, found, strict=True)}
    note(len(given))
    return curves


def _fractions(
    ex: clearhead.Explainer, batch: Sequence[Example], scores: Sequence[np.ndarray], direction: str
) -> list[list[float]]:
    """A batch of pictures at every fraction, each from the clean ones: the probability of the class predicted there."""
    processor, model = ex.subject.processor, ex.subject.model
    clean = processor([example.input for example in batch], return_tensors="pt")["pixel_values"]
    empty = processor([np.zeros_like(np.asarray(batch[0].input))], return_tensors="pt")["pixel_values"]
    side = int(len(scores[0]) ** 0.5)
    orders = [
        ranking(own if direction == "positive" else -own, 0, example.id, "image")
        for own, example in zip(scores, batch, strict=True)
    ]
    found = []
    for fraction in (0.0, *FRACTIONS):
        gone = torch.zeros(len(batch), side * side, dtype=torch.bool)
        for row, order in zip(gone, orders, strict=True):
            row[order[: int(side * side * fraction)].copy()] = True
        mask = gone.reshape(-1, 1, side, side).repeat_interleave(clean.shape[-1] // side, -1)
        mask = mask.repeat_interleave(clean.shape[-2] // side, -2)
        with torch.no_grad():
            output = model(pixel_values=torch.where(mask, empty, clean).to(model.device))
        found.append(output.logits.double().softmax(-1).cpu())
    curves = torch.stack(found, 1)  # picture × fraction × class
    judged = curves[:, 0].argmax(-1)
    return curves[torch.arange(len(batch)), :, judged].tolist()


def our_way(ex: clearhead.Explainer, given: Sequence[Example], folder: Path, chunk: int, note: Note) -> Curves:
    # only pictures, as the authors' way has them: labels play no part
    data = DataSet("pictures", "all", "their own", (), lambda: given, lambda one: Example(one.id, one.input))
    settings = {"perturb-images": {"fills": ("black",), "fractions": FRACTIONS}}
    worker = Worker(Job("zoo:pets", "pictures", METHODS, ("perturb-images",), settings), ex, data)
    missing = tuple((settings, ALL) for settings in worker.protocols)
    path, done = folder / "rows.jsonl", 0
    with path.open("w", encoding="utf-8") as file:
        for places, key in chunks(data, chunk):
            file.writelines(json.dumps(asdict(row)) + "\n" for row in worker(Task(key, places, missing)).rows)
            done += len(places)
            note(done)
    with path.open(encoding="utf-8") as file:
        rows = (json.loads(line) for line in file)
        return {f"{r['method']}/{r['example']}/{r['part'].split('/')[-1]}": r["curves"]["probability"] for r in rows}


WAYS = {"clearhead": our_way, "the authors' way": authors_way}


def go(way: str, asked: argparse.Namespace, out: Path) -> None:
    """One way, in this process."""
    torch.set_num_threads(asked.threads)
    torch.backends.cudnn.allow_tf32 = False  # or convolutions of batches of another size differ in the third digit
    ex = clearhead.load("zoo:pets", device=asked.device, dtype=DTYPE)
    given = pictures(asked.pictures, asked.data)
    ex.methods(), ex.explain(given[0].input, method=list(METHODS))  # what is done once for a model is no side's cost
    before = resident()
    watch = Watch(ex.subject.model)
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(watch, ex.subject.device)
        curves = WAYS[way](ex, given, Path(folder), asked.chunk, clock.note)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    facts = {**watch.counts(), "mib before": round(before, 1), "peak mib": round(peak, 1), "notes": clock.notes}
    out.write_text(json.dumps({"facts": facts, "curves": curves}), encoding="utf-8")


def in_a_process(way: str, asked: argparse.Namespace, count: int, folder: Path) -> tuple[dict[str, Any], Curves]:
    out = folder / "way.json"
    command = [sys.executable, __file__, "--way", way, "--into", str(out), "--pictures", str(count)]
    command += ["--device", asked.device, "--threads", str(asked.threads), "--chunk", str(asked.chunk)]
    command += [] if asked.data is None else ["--data", asked.data]
    subprocess.run(command, check=True)
    made = json.loads(out.read_text(encoding="utf-8"))
    facts = made["facts"]
    print(
        f"{way:17} {count:4} pictures {facts['notes'][-1]['seconds']:8.1f} s   {facts['explained']:7,} pictures "
        f"explained, {facts['judged']:7,} judged, {facts['distinct']:7,} of them distinct   "
        f"{facts['peak mib']:,.0f} MiB at most ({facts['mib before']:,.0f} before)",
        flush=True,
    )
    return facts, made["curves"]


def machine(asked: argparse.Namespace) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if "cuda" in asked.device else platform.processor() or platform.machine()
    found = {"device": device, "threads": asked.threads, "dtype": DTYPE, "python": platform.python_version()}
    return found | {"torch": torch.__version__, "transformers": transformers.__version__}


def compared(ours: dict[str, Any], theirs: dict[str, Any], our_curves: Curves, their_curves: Curves) -> dict[str, Any]:
    """Both ways on the pictures that both took: seconds, and how far their curves lie apart."""
    assert their_curves.keys() <= our_curves.keys()
    assert ours["judged"] == ours["distinct"], "an altered picture went through the model twice"
    count, seconds = theirs["notes"][-1]["pictures"], theirs["notes"][-1]["seconds"]
    same = next(note["seconds"] for note in ours["notes"] if note["pictures"] >= count)
    gaps = {key: float(np.abs(np.subtract(own, our_curves[key])).max()) for key, own in their_curves.items()}
    found = {"pictures": count, "clearhead": same, "authors": seconds, "ratio": seconds / same}
    return found | {"gap": max(gaps.values()), "worst": max(gaps, key=lambda key: gaps[key])} | _apart(gaps)


def _apart(gaps: dict[str, float]) -> dict[str, Any]:
    """How many curves lie apart. The controls take units away in an order that nothing computes: where theirs are
    equal, both ways judge the same class, and what lies apart lost its units in another order."""
    controls = max(gap for key, gap in gaps.items() if key.split("/")[0] in CONTROLS)
    return {"curves": len(gaps), "apart": sum(gap > 1e-3 for gap in gaps.values()), "gap of controls": controls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--data", help="the folder that holds pets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=4, help="pictures that clearhead computes and stores at once")
    parser.add_argument("--authors", type=int, help="pictures of the authors' way, a multiple of the chunk; all")
    parser.add_argument("--json", type=Path, help="write what was found here, too, as soon as it is found")
    parser.add_argument("--way", choices=list(WAYS), help="only this one, in this process")
    parser.add_argument("--into", type=Path, help="where one way writes what it found")
    asked = parser.parse_args()
    if asked.way is not None:
        go(asked.way, asked, asked.into)
        return
    found: dict[str, Any] = {"machine": machine(asked), "methods": ALL, "fractions": FRACTIONS, "chunk": asked.chunk}
    with tempfile.TemporaryDirectory() as folder:
        ours, our_curves = in_a_process("clearhead", asked, asked.pictures, Path(folder))
        keep(found | {"clearhead": ours}, asked.json)
        theirs, their_curves = in_a_process("the authors' way", asked, asked.authors or asked.pictures, Path(folder))
    both = compared(ours, theirs, our_curves, their_curves)
    keep(found | {"clearhead": ours, "authors": theirs, "compared": both}, asked.json)
    early, late = ours["notes"][(len(ours["notes"]) - 1) // 4], ours["notes"][-1]
    print(
        f"{both['pictures']} pictures: {both['clearhead']:.1f} s against {both['authors']:.1f} s, "
        f"{both['ratio']:.2f} × faster, curves equal to {both['gap']:.1e}; {late['mib'] - early['mib']:+,.0f} MiB "
        f"from {early['pictures']} to {late['pictures']} pictures"
    )


def keep(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
