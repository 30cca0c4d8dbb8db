"""The perturbation benchmark beside the authors' way: methods × fractions × both directions on zoo:pets.

The authors run one method at a time: a first program explains every picture and writes its map into a file, a second
reads the maps and sends every altered picture through the model, the clean one and the empty one again and again.
clearhead explains all methods in shared passes and sends each distinct altered picture once. Same pictures, methods,
fractions, fill and model on both sides; the curves are compared. Peak memory is that of the process.

    python benchmarks/perturbation.py [--pictures 8] [--data ../shared/data] [--threads 1]

500 pictures are the issue's size (hours on two cores); pictures without a data folder are noise.
"""

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch

import clearhead
from clearhead.bench.data import DataSet, Example
from clearhead.bench.planning import Job
from clearhead.bench.protocol import ranking
from clearhead.bench.running import Run

METHODS = ("generic", "grad-sam", "attention-x-gradient", "attention-gradcam", "saliency", "input-x-gradient")
FRACTIONS = tuple(tenth / 10 for tenth in range(1, 11))
DIRECTIONS = ("positive", "negative")


def pictures(count: int, folder: str | None) -> list[Any]:
    if folder is not None:
        from clearhead.bench.data import read

        return [example.input for example in read("pets", None, folder)[:count]]
    noise = np.random.default_rng(0)
    return [noise.integers(0, 255, (224, 224, 3), dtype=np.uint8) for _ in range(count)]


class Passes:
    """How many pictures went through the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        self.handle = model.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.count += len(kwargs["pixel_values"])


def authors_way(ex: clearhead.Explainer, given: list[Any], folder: Path) -> dict[tuple[str, str, str], list[float]]:
    """One method after the other, maps through files, no table of what was seen before."""
    for method in METHODS:
        for number, picture in enumerate(given):
            np.save(folder / f"{method}-{number}.npy", ex.explain(picture, method=method).scores)
    model, processor = ex.subject.model, ex.subject.processor
    curves: dict[tuple[str, str, str], list[float]] = {}
    for method in METHODS:
        for number, picture in enumerate(given):
            pixels = processor(picture, return_tensors="pt")["pixel_values"]
            scores = np.load(folder / f"{method}-{number}.npy")[1:]
            side = int(len(scores) ** 0.5)
            black = processor(np.zeros_like(np.asarray(picture)), return_tensors="pt")["pixel_values"]
            for direction in DIRECTIONS:
                order = ranking(scores if direction == "positive" else -scores, 0, str(number), "image")
                found = []
                for fraction in (0.0, *FRACTIONS):
                    gone = torch.zeros(len(scores), dtype=torch.bool)
                    gone[order[: int(len(scores) * fraction)].copy()] = True
                    mask = gone.reshape(side, side).repeat_interleave(pixels.shape[-2] // side, 0)
                    mask = mask.repeat_interleave(pixels.shape[-1] // side, 1)
                    with torch.no_grad():
                        found.append(model(pixel_values=torch.where(mask, black, pixels)).logits.softmax(-1)[0])
                judged = int(found[0].argmax())
                curves[method, str(number), direction] = [float(one[judged]) for one in found]
    return curves


def our_way(ex: clearhead.Explainer, given: list[Any], folder: Path) -> dict[tuple[str, str, str], list[float]]:
    rows = [Example(str(number), picture) for number, picture in enumerate(given)]
    data = DataSet("pictures", "all", "their own", (), lambda: rows, lambda row: row)
    settings = {"perturb-images": {"fills": ("black",), "fractions": FRACTIONS}}
    run = Run(Job("zoo:pets", "pictures", METHODS, ("perturb-images",), settings), folder / "run", ex, data)
    run()
    return {
        (row.method, row.example, row.part.split("/")[-1]): list(row.curves["probability"]) for row in run.store.table()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--data", help="the folder that holds pets")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    ex = clearhead.load("zoo:pets")
    given = pictures(asked.pictures, asked.data)
    ex.explain(given[0], method=list(METHODS))  # what is done once for a model is no side's cost
    found = {}
    for name, way in (("clearhead", our_way), ("the authors' way", authors_way)):
        passes = Passes(ex.subject.model)
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            curves = way(ex, given, Path(folder))
            seconds = time.perf_counter() - began
        passes.handle.remove()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        found[name] = (seconds, passes.count, curves)
        print(
            f"{name:17} {seconds:8.1f} s   {passes.count:7,} pictures through the model   peak {peak:,.0f} MiB so far"
        )
    ours, theirs = found.values()
    gap = max(float(np.abs(np.subtract(ours[2][key], theirs[2][key])).max()) for key in theirs[2])
    print(f"clearhead measures the two controls beside; {theirs[0] / ours[0]:.2f} × faster, curves equal to {gap:.1e}")


if __name__ == "__main__":
    main()
