"""Pictures × 10 fractions × 6 methods × both directions: each distinct altered picture goes through the model once."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.bench.data import DataSet, Example
from clearhead.bench.planning import Job
from clearhead.bench.protocol import ranking
from clearhead.bench.running import Run
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
    data = DataSet("mine", "all", "CC0", (), lambda: rows, lambda row: row)
    own = ex.explain([row.input for row in rows], method=[*METHODS, *CONTROLS])
    job = Job("a vit", "mine", METHODS, ("perturb-images",), {"perturb-images": {"fills": ("black",)}}, chunk=2)
    run = Run(job, tmp_path / "run", ex, data)
    watch = Watch(ex.subject.model)
    run()
    watch.handle.remove()

    distinct = set()
    for place, row in enumerate(rows):
        for method in (*METHODS, *CONTROLS):
            part = own[method][place]
            inner = np.array(part.units.drop_special())
            for sign in (1, -1):
                order = inner[ranking(sign * part.scores[inner], 0, row.id, part.stream)]
                distinct |= {(place, frozenset(order[: int(len(inner) * k / 10)].tolist())) for k in range(11)}
    judged = watch.seen[False]
    # with everything removed all pictures are one; chunks know nothing of each other, so each sends it once
    black = sum(len(gone) == len(inner) for _, gone in distinct)
    assert black == len(rows) and len(judged) == len(distinct) - len(rows) + 1
    assert Counter(judged.values()) == {1: len(judged) - 1, len(run.plan): 1}
    asked = len(rows) * (1 + (len(METHODS) + len(CONTROLS)) * 2 * 10)
    assert len(judged) < asked - len(rows) * 15  # at 1.0 all sixteen curves meet
