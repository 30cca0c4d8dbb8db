"""The perturbation benchmark beside the authors' way: 6 methods and 2 controls × 10 fractions × both ways on zoo:pets.

The authors run one method at a time: a first program explains every picture and writes its map into a file, a second
reads the maps and sends every altered picture through the model, the clean one and the empty one again and again.
clearhead explains all methods in shared passes and sends each distinct altered picture once. Same pictures, methods,
fractions, fill, batches and model on both sides; the curves are compared. Every way runs in a process of its own, so
that its peak of memory is its own; clearhead runs once more with a quarter of the pictures, to see if memory grows.

    python benchmarks/perturbation.py [--pictures 16] [--data ../shared/data] [--device cuda] [--threads 1] [--chunk 4]

500 pictures are the size that papers take samples of; without a data folder, pictures are noise.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch

import clearhead
from clearhead.bench.data import DataSet, Example, read
from clearhead.bench.explaining import CONTROLS
from clearhead.bench.planning import Job, Task, chunks
from clearhead.bench.protocol import ranking
from clearhead.bench.working import Worker

#: The six that are compared, and the controls that are in every table of clearhead's: both sides measure all.
METHODS = ("generic", "grad-sam", "attention-x-gradient", "attention-gradcam", "saliency", "input-x-gradient")
ALL = (*METHODS, *CONTROLS)
FRACTIONS = tuple(tenth / 10 for tenth in range(1, 11))
DIRECTIONS = ("positive", "negative")
#: What the authors' second program sends through the model at a time.
BATCH = 16

Curves = dict[str, list[float]]


def pictures(count: int, folder: str | None) -> Sequence[Example]:
    if folder is not None:
        return read("pets", None, folder)[:count]
    noise = np.random.default_rng(0)
    given = [noise.integers(0, 255, (128, 128, 3), dtype=np.uint8) for _ in range(count)]
    return [Example(str(number), picture) for number, picture in enumerate(given)]


class Watch:
    """Which pictures go through the model: with gradients, to be explained, and without, to be judged by."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seen: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        self.seconds = 0.0
        model.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        began = time.perf_counter()
        given = kwargs["pixel_values"].detach().float().cpu().numpy()
        self.seen[torch.is_grad_enabled()].update(hash(one.tobytes()) for one in given)
        self.seconds += time.perf_counter() - began

    def counts(self) -> dict[str, int]:
        explained, judged = self.seen[True], self.seen[False]
        return {"explained": sum(explained.values()), "judged": sum(judged.values()), "distinct": len(judged)}


def authors_way(ex: clearhead.Explainer, given: Sequence[Example], folder: Path, chunk: int) -> Curves:
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


def our_way(ex: clearhead.Explainer, given: Sequence[Example], folder: Path, chunk: int) -> Curves:
    # only pictures, as the authors' way has them: labels play no part
    data = DataSet("pictures", "all", "their own", (), lambda: given, lambda one: Example(one.id, one.input))
    settings = {"perturb-images": {"fills": ("black",), "fractions": FRACTIONS}}
    worker = Worker(Job("zoo:pets", "pictures", METHODS, ("perturb-images",), settings), ex, data)
    missing = tuple((settings, ALL) for settings in worker.protocols)
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for places, key in chunks(data, chunk):
            file.writelines(json.dumps(asdict(row)) + "\n" for row in worker(Task(key, places, missing)).rows)
    with path.open(encoding="utf-8") as file:
        rows = (json.loads(line) for line in file)
        return {f"{r['method']}/{r['example']}/{r['part'].split('/')[-1]}": r["curves"]["probability"] for r in rows}


WAYS = {"clearhead": our_way, "the authors' way": authors_way}


def go(way: str, asked: argparse.Namespace, out: Path) -> None:
    """One way, in this process."""
    torch.set_num_threads(asked.threads)
    ex = clearhead.load("zoo:pets", device=asked.device)
    given = pictures(asked.pictures, asked.data)
    ex.methods(), ex.explain(given[0].input, method=list(METHODS))  # what is done once for a model is no side's cost
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    watch = Watch(ex.subject.model)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        curves = WAYS[way](ex, given, Path(folder), asked.chunk)
        seconds = time.perf_counter() - began - watch.seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    facts = {"seconds": seconds, **watch.counts(), "mib": peak, "mib before": before}
    out.write_text(json.dumps({"facts": facts, "curves": curves}), encoding="utf-8")


def in_a_process(way: str, asked: argparse.Namespace, count: int, folder: Path) -> tuple[dict[str, float], Curves]:
    out = folder / "way.json"
    command = [sys.executable, __file__, "--way", way, "--into", str(out), "--pictures", str(count)]
    command += ["--device", asked.device, "--threads", str(asked.threads), "--chunk", str(asked.chunk)]
    command += [] if asked.data is None else ["--data", asked.data]
    subprocess.run(command, check=True)
    made = json.loads(out.read_text(encoding="utf-8"))
    facts = made["facts"]
    print(
        f"{way:17} {count:4} pictures {facts['seconds']:8.1f} s   {facts['explained']:7,} pictures explained, "
        f"{facts['judged']:7,} judged, {facts['distinct']:7,} of them distinct   "
        f"peak {facts['mib']:,.0f} MiB ({facts['mib before']:,.0f} before)",
        flush=True,
    )
    return facts, made["curves"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--data", help="the folder that holds pets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=4, help="pictures that clearhead computes and stores at once")
    parser.add_argument("--way", choices=list(WAYS), help="only this one, in this process")
    parser.add_argument("--into", type=Path, help="where one way writes what it found")
    asked = parser.parse_args()
    if asked.way is not None:
        go(asked.way, asked, asked.into)
        return
    with tempfile.TemporaryDirectory() as folder:
        fewer = in_a_process("clearhead", asked, max(1, asked.pictures // 4), Path(folder))[0]
        ours, our_curves = in_a_process("clearhead", asked, asked.pictures, Path(folder))
        theirs, their_curves = in_a_process("the authors' way", asked, asked.pictures, Path(folder))
    assert our_curves.keys() == their_curves.keys()
    assert ours["judged"] == ours["distinct"], "an altered picture went through the model twice"
    gap = max(float(np.abs(np.subtract(own, their_curves[key])).max()) for key, own in our_curves.items())
    print(
        f"{theirs['seconds'] / ours['seconds']:.2f} × faster, curves equal "
        f"to {gap:.1e}, {ours['mib'] - fewer['mib']:+,.0f} MiB for four times as many pictures"
    )


if __name__ == "__main__":
    main()
