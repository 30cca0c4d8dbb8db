"""Numbers of forward and backward passes: each distinct altered image runs through the model once."""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.bench.data import BenchmarkDataset, Example
from clearhead.bench.job import BenchmarkJob
from clearhead.bench.protocols.base import argsort_descending
from clearhead.bench.runner import BenchmarkRun
from clearhead.explanation.explanation import Explanation
from clearhead.methods.base import Method
from tests.models import explainer, inputs

pytest.importorskip("pyarrow")
METHODS = ("generic", "grad-sam", "attention-x-gradient", "attention-gradcam", "saliency", "input-x-gradient")
CONTROLS = ("random", "position")


class ImageCounter:
    """Counts the images that run through the model, with gradients (explained) and without (perturbed)."""

    def __init__(self, model: Any) -> None:
        self.counts: dict[bool, Counter[bytes]] = {True: Counter(), False: Counter()}
        self.handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        images = kwargs["pixel_values"].detach()
        self.counts[torch.is_grad_enabled()].update(image.numpy().tobytes() for image in images)


def test_each_distinct_altered_image_runs_once(tmp_path: Path) -> None:
    ex = explainer("vit/image")
    size = np.asarray(inputs("vit/image")[0]).shape
    noise = np.random.default_rng(0)
    rows = [Example(str(i), noise.integers(1, 255, size, dtype=np.uint8)) for i in range(4)]
    data = BenchmarkDataset("mine", "all", "CC0", (), lambda: rows, lambda row: row)
    explanations = ex.explain([row.input for row in rows], method=[*METHODS, *CONTROLS])
    job = BenchmarkJob(
        "a vit", "mine", METHODS, ("perturb-images",), {"perturb-images": {"fills": ("black",)}}, chunk=2
    )
    run = BenchmarkRun(job, tmp_path / "run", ex, data)
    counter = ImageCounter(ex.adapter.model)
    run()
    counter.handle.remove()

    distinct = set()
    for index, row in enumerate(rows):
        for method in (*METHODS, *CONTROLS):
            explanation = explanations[method][index]
            inner = np.array(explanation.units.content_indices())
            for sign in (1, -1):
                order = inner[argsort_descending(sign * explanation.scores[inner], 0, row.id, explanation.stream)]
                distinct |= {(index, frozenset(order[: int(len(inner) * k / 10)].tolist())) for k in range(11)}
    perturbed = counter.counts[False]
    # with everything removed all images are equal, in all chunks
    fully_removed = sum(len(removed) == len(inner) for _, removed in distinct)
    assert fully_removed == len(rows) and len(perturbed) == len(distinct) - len(rows) + 1
    assert len(run.chunk_plan) == 2 and set(perturbed.values()) == {1}
    requested = len(rows) * (1 + (len(METHODS) + len(CONTROLS)) * 2 * 10)
    assert len(perturbed) < requested - len(rows) * 15  # at 1.0 all sixteen curves are equal


def test_memory_does_not_grow_with_number_of_examples(tmp_path: Path) -> None:
    """The number of live explanations and the bytes of live tensors are the same after each chunk."""
    ex = explainer("vit/image")
    size = np.asarray(inputs("vit/image")[0]).shape

    def row(index: int) -> Example:
        return Example(str(index), np.random.default_rng(index).integers(1, 255, size, dtype=np.uint8))

    data = BenchmarkDataset("mine", "all", "CC0", (), lambda: range(8), row)
    job = BenchmarkJob(
        "a vit", "mine", ("generic", "saliency"), ("perturb-images",), {"perturb-images": {"fills": ("black",)}}
    )
    live: list[tuple[int, int]] = []

    def record_live(examples: int) -> None:
        gc.collect()
        # type() instead of isinstance(), which triggers warnings for some objects of torch
        explanations = sum(type(each) is Explanation for each in gc.get_objects())
        tensors = sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor)
        live.append((explanations, tensors))

    BenchmarkRun(replace(job, chunk=1), tmp_path / "run", ex, data)(advance=record_live)
    # the first entry is before the first chunk, which may allocate caches of the model
    assert len(live) == 9 and len(set(live[2:])) == 1


def count_passes(monkeypatch: pytest.MonkeyPatch, model: Any, explain: Callable[[], Any]) -> tuple[int, int]:
    """The numbers of images forwarded with gradients and of backward passes."""
    counter, backward = ImageCounter(model), []
    grad = torch.autograd.grad
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", lambda *args, **kwargs: (backward.append(1), grad(*args, **kwargs))[1])
        explain()
    counter.handle.remove()
    return sum(counter.counts[True].values()), len(backward)


def test_methods_share_forward_and_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six methods that use a recorded pass share one pass."""
    ex, images = explainer("vit/image", torch.float32), inputs("vit/image")[:2]
    ex.explain(images, method=list(METHODS))  # runs the self-test
    separate = [
        count_passes(monkeypatch, ex.adapter.model, partial(ex.explain, images, method=method)) for method in METHODS
    ]
    together = count_passes(monkeypatch, ex.adapter.model, partial(ex.explain, images, method=list(METHODS)))
    assert separate == [(2, 1)] * len(METHODS)  # each method alone: both images once, one backward pass
    assert together == (2, 1)
    # a path method needs its own passes and shares the clean one; the tapes of others are not recorded again
    path = [Method("integrated-gradients", steps=4)]
    steps = count_passes(monkeypatch, ex.adapter.model, partial(ex.explain, images, method=path))
    both = count_passes(monkeypatch, ex.adapter.model, partial(ex.explain, images, method=[*METHODS, *path]))
    assert both[0] <= steps[0] + 2 and both[1] <= steps[1] + 1
