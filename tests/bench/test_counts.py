"""Pictures × 10 fractions × 6 methods × both directions: each distinct altered picture goes through the model once."""

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


class Watch:
    """Which pictures the model sees, with gradients (to be explained) and without (to be judged by)."""

    def __init__(self, model: Any) -> None:
        self.seen: dict[bool, Counter[bytes]] = {True: Counter(), False: Counter()}
        self.handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        pictures = kwargs["pixel_values"].detach()
        self.seen[torch.is_grad_enabled()].update(one.numpy().tobytes() for one in pictures)


def test_each_distinct_altered_picture_goes_through_the_model_once_and_only_once(tmp_path: Path) -> None:
    ex = explainer("vit/image")
    size = np.asarray(inputs("vit/image")[0]).shape
    noise = np.random.default_rng(0)
    rows = [Example(str(i), noise.integers(1, 255, size, dtype=np.uint8)) for i in range(4)]
    data = BenchmarkDataset("mine", "all", "CC0", (), lambda: rows, lambda row: row)
    own = ex.explain([row.input for row in rows], method=[*METHODS, *CONTROLS])
    job = BenchmarkJob(
        "a vit", "mine", METHODS, ("perturb-images",), {"perturb-images": {"fills": ("black",)}}, chunk=2
    )
    run = BenchmarkRun(job, tmp_path / "run", ex, data)
    watch = Watch(ex.adapter.model)
    run()
    watch.handle.remove()

    distinct = set()
    for place, row in enumerate(rows):
        for method in (*METHODS, *CONTROLS):
            part = own[method][place]
            inner = np.array(part.units.content_indices())
            for sign in (1, -1):
                order = inner[argsort_descending(sign * part.scores[inner], 0, row.id, part.stream)]
                distinct |= {(place, frozenset(order[: int(len(inner) * k / 10)].tolist())) for k in range(11)}
    judged = watch.seen[False]
    # with everything removed all pictures are one, in all chunks
    black = sum(len(gone) == len(inner) for _, gone in distinct)
    assert black == len(rows) and len(judged) == len(distinct) - len(rows) + 1
    assert len(run.chunk_plan) == 2 and set(judged.values()) == {1}
    asked = len(rows) * (1 + (len(METHODS) + len(CONTROLS)) * 2 * 10)
    assert len(judged) < asked - len(rows) * 15  # at 1.0 all sixteen curves meet


def test_memory_does_not_grow_with_the_number_of_examples(tmp_path: Path) -> None:
    """After each chunk as many explanations and as much in tensors are held as before it."""
    ex = explainer("vit/image")
    size = np.asarray(inputs("vit/image")[0]).shape

    def row(place: int) -> Example:
        return Example(str(place), np.random.default_rng(place).integers(1, 255, size, dtype=np.uint8))

    data = BenchmarkDataset("mine", "all", "CC0", (), lambda: range(8), row)
    job = BenchmarkJob(
        "a vit", "mine", ("generic", "saliency"), ("perturb-images",), {"perturb-images": {"fills": ("black",)}}
    )
    held: list[tuple[int, int]] = []

    def note(examples: int) -> None:
        gc.collect()
        # by type(): asking some of torch's own objects for their class warns
        explanations = sum(type(one) is Explanation for one in gc.get_objects())
        tensors = sum(one.nbytes for one in gc.get_objects() if type(one) is torch.Tensor)
        held.append((explanations, tensors))

    BenchmarkRun(replace(job, chunk=1), tmp_path / "run", ex, data)(advance=note)
    # the first note comes before the first chunk; with the first, what is made once for a model may come
    assert len(held) == 9 and len(set(held[2:])) == 1


def passes(monkeypatch: pytest.MonkeyPatch, model: Any, explain: Callable[[], Any]) -> tuple[int, int]:
    """How many pictures go forward with gradients, and how many backward passes are made."""
    watch, backward = Watch(model), []
    grad = torch.autograd.grad
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", lambda *args, **more: (backward.append(1), grad(*args, **more))[1])
        explain()
    watch.handle.remove()
    return sum(watch.seen[True].values()), len(backward)


def test_explanations_share_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six methods of one recorded pass cost one pass, not six."""
    ex, pictures = explainer("vit/image", torch.float32), inputs("vit/image")[:2]
    ex.explain(pictures, method=list(METHODS))  # the recorder tries a model out once
    alone = [passes(monkeypatch, ex.adapter.model, partial(ex.explain, pictures, method=one)) for one in METHODS]
    together = passes(monkeypatch, ex.adapter.model, partial(ex.explain, pictures, method=list(METHODS)))
    assert alone == [(2, 1)] * len(METHODS)  # each by itself: both pictures once, one backward pass
    assert together == (2, 1)
    # a path method has passes of its own, and shares the clean one; tapes of others are not made again for it
    path = [Method("integrated-gradients", steps=4)]
    steps = passes(monkeypatch, ex.adapter.model, partial(ex.explain, pictures, method=path))
    both = passes(monkeypatch, ex.adapter.model, partial(ex.explain, pictures, method=[*METHODS, *path]))
    assert both[0] <= steps[0] + 2 and both[1] <= steps[1] + 1
