"""The perturbation benchmark against the authors' code: 6 methods and 2 controls × 10 fractions × both directions.

The authors run one method at a time on zoo:pets: a first program explains every image and writes its map to a file, a
second reads the maps and sends every perturbed image through the model, the original and the empty one again each time.
clearhead explains all methods in shared passes and evaluates each distinct perturbed image once. Images, methods,
fractions, fill and model are the same on both sides; the curves are compared. Each implementation runs in a separate
process, so that its memory is its own; clearhead's memory is logged after each chunk, to see if it grows.

    python benchmarks/perturbation.py [--pictures 16] [--data ../shared/data] [--device cuda] [--threads 1] [--chunk 4]
        [--authors 4] [--json benchmarks/results/perturbation/h200.json]

500 images is the usual sample size in papers; the authors' implementation may take only the first few of them, and is
then compared with clearhead's time for the same few. Without a data folder, images are noise.
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
from clearhead.bench.chunk_explanations import CONTROL_METHODS
from clearhead.bench.data import BenchmarkDataset, Example, load_benchmark_dataset
from clearhead.bench.job import BenchmarkJob, ChunkTask, iter_chunks
from clearhead.bench.protocols.base import argsort_descending
from clearhead.bench.worker import ChunkWorker

#: The six that are compared, and the controls that are in every table of clearhead's: both sides measure all.
COMPARED_METHODS = ("generic", "grad-sam", "attention-x-gradient", "attention-gradcam", "saliency", "input-x-gradient")
ALL_METHODS = (*COMPARED_METHODS, *CONTROL_METHODS)
FRACTIONS = tuple(tenth / 10 for tenth in range(1, 11))
DIRECTIONS = ("positive", "negative")
#: As stored, a GPU would take float16.
DTYPE = "float32"
#: What the authors' second program sends through the model at a time.
REFERENCE_BATCH_SIZE = 16

CurvesByKey = dict[str, list[float]]
#: Called with the number of images that are done.
ProgressCallback = Callable[[int], None]


def load_images(count: int, folder: str | None) -> Sequence[Example]:
    if folder is not None:
        return load_benchmark_dataset("pets", None, folder)[:count]
    noise = np.random.default_rng(0)
    given = [noise.integers(0, 255, (128, 128, 3), dtype=np.uint8) for _ in range(count)]
    return [Example(str(number), picture) for number, picture in enumerate(given)]


class ForwardCounter:
    """Which images go through the model: with gradients, to be explained, and without, to be judged by (and, in the
    authors' way, to be explained by the controls).

    Eight bytes are kept of each: a table of them would grow with the images, and memory is what is measured.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.image_hashes = {True: array("q"), False: array("q")}
        self.overhead_seconds = 0.0
        model.register_forward_pre_hook(self._count_inputs, with_kwargs=True)

    def _count_inputs(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs["pixel_values"].detach()
        _synchronize(given.device)  # or what the GPU has still to do would count as watching
        began = time.perf_counter()
        self.image_hashes[torch.is_grad_enabled()].extend(hash(one.tobytes()) for one in given.float().cpu().numpy())
        self.overhead_seconds += time.perf_counter() - began

    def get_counts(self) -> dict[str, int]:
        explained, judged = self.image_hashes[True], self.image_hashes[False]
        return {"explained": len(explained), "judged": len(judged), "distinct": len(set(judged))}


class ResourceLog:
    """Seconds without those of watching, and memory, each time it is told how many images are done."""

    def __init__(self, watch: ForwardCounter, device: torch.device) -> None:
        self.forward_counter, self.device = watch, device
        self.entries: list[dict[str, float]] = []
        self.start_time = time.perf_counter()

    def add_entry(self, num_images: int) -> None:
        _synchronize(self.device)
        seconds = time.perf_counter() - self.start_time - self.forward_counter.overhead_seconds
        found = {"pictures": num_images, "seconds": round(seconds, 2), "mib": round(get_rss_mib(), 1)}
        if self.device.type == "cuda":  # the most since the last note
            found["cuda mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
            torch.cuda.reset_peak_memory_stats()
        self.entries.append(found)
        print(f"{num_images} images, {seconds:.1f} s, {found['mib']:,.0f} MiB", file=sys.stderr, flush=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def get_rss_mib() -> float:
    """MiB that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run_reference_implementation(
    explainer: clearhead.Explainer,
    examples: Sequence[Example],
    folder: Path,
    chunk_size: int,
    on_progress: ProgressCallback,
) -> CurvesByKey:
    """One method after the other, maps through files, no table of what was seen before."""
    for method in ALL_METHODS:
        for number, example in enumerate(examples):
            np.save(folder / f"{method}-{number}.npy", explainer.explain(example.input, method=method).scores)
    curves: CurvesByKey = {}
    for method in ALL_METHODS:
        for direction in DIRECTIONS:
            for batch in (
                range(start, min(start + REFERENCE_BATCH_SIZE, len(examples)))
                for start in range(0, len(examples), REFERENCE_BATCH_SIZE)
            ):
                scores = [np.load(folder / f"{method}-{number}.npy")[1:] for number in batch]
                found = _compute_fraction_curves(explainer, [examples[number] for number in batch], scores, direction)
                curves |= {f"{method}/{examples[n].id}/{direction}": own for n, own in zip(batch, found, strict=True)}
    on_progress(len(examples))
    return curves


def _compute_fraction_curves(
    ex: clearhead.Explainer, batch: Sequence[Example], scores: Sequence[np.ndarray], direction: str
) -> list[list[float]]:
    """A batch of images at every fraction, each from the clean ones: the probability of the class predicted there."""
    processor, model = ex.adapter.processor, ex.adapter.model
    clean = processor([example.input for example in batch], return_tensors="pt")["pixel_values"]
    empty = processor([np.zeros_like(np.asarray(batch[0].input))], return_tensors="pt")["pixel_values"]
    side = int(len(scores[0]) ** 0.5)
    orders = [
        argsort_descending(own if direction == "positive" else -own, 0, example.id, "image")
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
    curves = torch.stack(found, 1)  # image × fraction × class
    judged = curves[:, 0].argmax(-1)
    return curves[torch.arange(len(batch)), :, judged].tolist()


def run_clearhead(
    explainer: clearhead.Explainer,
    examples: Sequence[Example],
    folder: Path,
    chunk_size: int,
    on_progress: ProgressCallback,
) -> CurvesByKey:
    # only images, as the authors' way has them: labels play no part
    data = BenchmarkDataset(
        "pictures", "all", "their own", (), lambda: examples, lambda one: Example(one.id, one.input)
    )
    settings = {"perturb-images": {"fills": ("black",), "fractions": FRACTIONS}}
    worker = ChunkWorker(
        BenchmarkJob("zoo:pets", "pictures", COMPARED_METHODS, ("perturb-images",), settings), explainer, data
    )
    missing = tuple((settings, ALL_METHODS) for settings in worker.protocols_by_settings)
    path, done = folder / "rows.jsonl", 0
    with path.open("w", encoding="utf-8") as file:
        for places, key in iter_chunks(data, chunk_size):
            file.writelines(json.dumps(asdict(row)) + "\n" for row in worker(ChunkTask(key, places, missing)).rows)
            done += len(places)
            on_progress(done)
    with path.open(encoding="utf-8") as file:
        rows = (json.loads(line) for line in file)
        return {f"{r['method']}/{r['example']}/{r['part'].split('/')[-1]}": r["curves"]["probability"] for r in rows}


IMPLEMENTATIONS = {"clearhead": run_clearhead, "the authors' way": run_reference_implementation}


def run_implementation(name: str, options: argparse.Namespace, out: Path) -> None:
    """One way, in this process."""
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = False  # or convolutions of batches of another size differ in the third digit
    ex = clearhead.load("zoo:pets", device=options.device, dtype=DTYPE)
    given = load_images(options.pictures, options.data)
    (
        ex.methods(),
        ex.explain(given[0].input, method=list(COMPARED_METHODS)),
    )  # what is done once for a model is no side's cost
    before = get_rss_mib()
    watch = ForwardCounter(ex.adapter.model)
    with tempfile.TemporaryDirectory() as folder:
        clock = ResourceLog(watch, ex.adapter.device)
        curves = IMPLEMENTATIONS[name](ex, given, Path(folder), options.chunk, clock.add_entry)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    facts = {**watch.get_counts(), "mib before": round(before, 1), "peak mib": round(peak, 1), "notes": clock.entries}
    out.write_text(json.dumps({"facts": facts, "curves": curves}), encoding="utf-8")


def run_in_subprocess(
    name: str, options: argparse.Namespace, count: int, folder: Path
) -> tuple[dict[str, Any], CurvesByKey]:
    out = folder / "way.json"
    command = [sys.executable, __file__, "--way", name, "--into", str(out), "--pictures", str(count)]
    command += ["--device", options.device, "--threads", str(options.threads), "--chunk", str(options.chunk)]
    command += [] if options.data is None else ["--data", options.data]
    subprocess.run(command, check=True)
    made = json.loads(out.read_text(encoding="utf-8"))
    facts = made["facts"]
    print(
        f"{name:17} {count:4} images {facts['notes'][-1]['seconds']:8.1f} s   {facts['explained']:7,} images "
        f"explained, {facts['judged']:7,} evaluated, {facts['distinct']:7,} of them distinct   "
        f"{facts['peak mib']:,.0f} MiB peak ({facts['mib before']:,.0f} before)",
        flush=True,
    )
    return facts, made["curves"]


def describe_machine(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if "cuda" in options.device else platform.processor() or platform.machine()
    found = {"device": device, "threads": options.threads, "dtype": DTYPE, "python": platform.python_version()}
    return found | {"torch": torch.__version__, "transformers": transformers.__version__}


def compare_implementations(
    ours: dict[str, Any], theirs: dict[str, Any], our_curves: CurvesByKey, their_curves: CurvesByKey
) -> dict[str, Any]:
    """Both ways on the images that both took: seconds, and how far their curves lie apart."""
    assert their_curves.keys() <= our_curves.keys()
    assert ours["judged"] == ours["distinct"], "an altered picture went through the model twice"
    count, seconds = theirs["notes"][-1]["pictures"], theirs["notes"][-1]["seconds"]
    same = next(note["seconds"] for note in ours["notes"] if note["pictures"] >= count)
    gaps = {key: float(np.abs(np.subtract(own, our_curves[key])).max()) for key, own in their_curves.items()}
    found = {"pictures": count, "clearhead": same, "authors": seconds, "ratio": seconds / same}
    return (
        found | {"gap": max(gaps.values()), "worst": max(gaps, key=lambda key: gaps[key])} | _summarise_curve_gaps(gaps)
    )


def _summarise_curve_gaps(gaps: dict[str, float]) -> dict[str, Any]:
    """How many curves lie apart. The controls take units away in an order that nothing computes: where theirs are
    equal, both ways judge the same class, and what lies apart lost its units in another order."""
    controls = max(gap for key, gap in gaps.items() if key.split("/")[0] in CONTROL_METHODS)
    return {"curves": len(gaps), "apart": sum(gap > 1e-3 for gap in gaps.values()), "gap of controls": controls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--data", help="folder with pets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--chunk", type=int, default=4, help="number of images that clearhead computes and stores at once"
    )
    parser.add_argument(
        "--authors",
        type=int,
        help="number of images for the authors' implementation, a multiple of the chunk; default: all",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file, as they are computed")
    parser.add_argument("--way", choices=list(IMPLEMENTATIONS), help="run only this implementation, in this process")
    parser.add_argument("--into", type=Path, help="output file of one implementation")
    asked = parser.parse_args()
    if asked.way is not None:
        run_implementation(asked.way, asked, asked.apply)
        return
    found: dict[str, Any] = {
        "machine": describe_machine(asked),
        "methods": ALL_METHODS,
        "fractions": FRACTIONS,
        "chunk": asked.chunk,
    }
    with tempfile.TemporaryDirectory() as folder:
        ours, our_curves = run_in_subprocess("clearhead", asked, asked.pictures, Path(folder))
        write_results(found | {"clearhead": ours}, asked.json)
        theirs, their_curves = run_in_subprocess(
            "the authors' way", asked, asked.authors or asked.pictures, Path(folder)
        )
    both = compare_implementations(ours, theirs, our_curves, their_curves)
    write_results(found | {"clearhead": ours, "authors": theirs, "compared": both}, asked.json)
    early, late = ours["notes"][(len(ours["notes"]) - 1) // 4], ours["notes"][-1]
    print(
        f"{both['pictures']} images: {both['clearhead']:.1f} s against {both['authors']:.1f} s, {both['ratio']:.2f} × "
        f"faster, curves equal to {both['gap']:.1e}; {late['mib'] - early['mib']:+,.0f} MiB from {early['pictures']} "
        f"to {late['pictures']} images"
    )


def write_results(results: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
