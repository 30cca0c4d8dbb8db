"""What the model says about altered inputs: each distinct one goes through it once, in full batches of like length."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import Given, How, Sample
from clearhead.bench.data.base import Example
from clearhead.bench.protocols.base import Protocol
from clearhead.bench.zero_shot import Captioned
from clearhead.capture.session import at_rest
from clearhead.engine.target_batch import Plan
from clearhead.errors import InputError
from clearhead.targets import Target, make_target

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: At most so many inputs, and so many units, go through the model at a time; so many inputs wait at most. A CPU gets a
#: quarter of the units: what it computes on should stay in its cache (zoo:pets, 28 pictures at once instead of 113:
#: 1.3 times as fast).
INPUTS, UNITS, WAITING = 128, 2**14, 512


@dataclass(frozen=True)
class Whole:
    """An example as the model reads it, nothing removed, with the target that says which scores are looked at."""

    example: Example
    sample: Sample
    target: Target
    #: What knows the classes that are judged by: the subject, or captions.
    classes: Any


def read_whole(ex: "Explainer", example: Example, protocol: Protocol) -> Whole:
    raw = example.input
    if isinstance(raw, dict) and set(raw) <= {"text", "image", "audio", "regions"}:
        raw = Given(**raw)
    made = ex.subject.samples(raw, How(answer=example.answer))
    wanted = make_target(protocol.target(example), ex.subject.scales[0])
    if len(made) != 1:
        raise InputError(f"{example.id!r} holds {len(made)} inputs: a benchmark takes them one by one")
    sample = ex.subject.completed(made[0], wanted)
    steps = ex.subject.steps(sample, wanted)
    if len(steps) != 1:
        raise InputError(f"{example.id!r} has {len(steps)} targets, and curves follow one: choose it, as Generated(0)")
    if example.among is not None:
        return Whole(example, sample, example.among.target(raw.text), example.among)
    return Whole(example, ex.subject.cut(sample, steps), steps[0], ex.subject)


Scores = dict[bytes, Float[np.ndarray, "label"]]


class Looks:
    """A table from altered inputs to the scores of all classes. `asked` and `passed` count inputs.

    `bare` inputs, of which nothing is left, are the same for many examples: their scores may be shared by several
    tables. They go through the model one by one, so that what they score depends on nothing that went beside them.
    """

    def __init__(self, ex: "Explainer", bare: Scores | None = None) -> None:
        self.ex, self.subject = ex, ex.subject
        self.table: Scores = {}
        self.bare: Scores = {} if bare is None else bare
        self.waiting: dict[bytes, tuple[Sample, Target]] = {}
        self.asked = self.passed = 0

    def ask(self, sample: Sample, target: Target, bare: bool = False) -> bytes:
        """A ticket: `scores[ticket]` after `finish`."""
        key = _key(sample, target)
        self.asked += 1
        if bare:
            if key not in self.bare:
                self.bare |= self._seen([key], [(sample, target)])
        elif key not in self.table and key not in self.waiting:
            self.waiting[key] = (sample, target)
            if len(self.waiting) >= WAITING:
                self.finish()
        return key

    def finish(self) -> None:
        """Look at whatever waits."""
        for keys in self._batches():
            self.table |= self._seen(keys, [self.waiting[key] for key in keys])
        self.waiting = {}

    def _seen(self, keys: list[bytes], batch: list[tuple[Sample, Target]]) -> Scores:
        """One batch through the model."""
        recorder = self.ex.recorder
        with recorder.lock, at_rest(recorder.model), torch.no_grad(), self.subject.scope():
            plan = Plan(self.subject, [sample for sample, _ in batch], [[target] for _, target in batch])
            output = self.subject.model(**plan.batch)
            target = batch[0][1]
            if isinstance(target, Captioned) and target.captions is not None:
                scores: Tensor | None = target.captions.scores(output)
            else:
                plan.value(output)
                scores = plan.scores
        if scores is None:
            raise InputError(f"{self.subject.model_class} gives no scores of classes to follow")
        self.passed += len(keys)
        return dict(zip(keys, scores.double().cpu().numpy(), strict=True))

    def __getitem__(self, ticket: bytes) -> Float[np.ndarray, "label"]:
        return self.table[ticket] if ticket in self.table else self.bare[ticket]

    def _batches(self) -> Iterator[list[bytes]]:
        # a model without a padding token cannot tell the end of the shorter ones
        most = UNITS if self.subject.device.type != "cpu" else UNITS // 4
        exact = getattr(getattr(self.subject.model, "config", None), "pad_token_id", None) is None

        def shape(key: bytes) -> tuple[tuple[Any, ...], int]:
            sample = self.waiting[key][0]
            length = sum(len(axis) for axis in sample.axes.values())
            inputs = {name: tuple(part.shape[1:]) for name, part in sample.inputs.items()}
            pixels = tuple(getattr(sample.inputs.get("pixel_values"), "shape", ()))
            alike = (pixels, tuple(sorted(inputs.items())), sample.alike, length if exact else 0)
            return alike, length

        batch: list[bytes] = []
        for key in sorted(self.waiting, key=shape):
            full = len(batch) >= INPUTS or (len(batch) + 1) * shape(key)[1] > most
            if batch and (full or shape(key)[0] != shape(batch[0])[0]):
                yield batch
                batch = []
            batch.append(key)
        if batch:
            yield batch


def _key(sample: Sample, target: Target) -> bytes:
    """The content of an input, and which scores are read: those of a class are the same for all classes."""
    digest = hashlib.blake2b(f"{target.place}\0{target.mask}".encode(), digest_size=16)
    for name in sorted(sample.inputs):
        part = sample.inputs[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{part.dtype}\0{tuple(part.shape)}\0".encode())
        digest.update(part.numpy().tobytes())
    return digest.digest()


def log_probabilities(scores: Float[np.ndarray, "label"], multi_label: bool) -> Float[np.ndarray, "label"]:
    """ln p of each class, without computing p.

    >>> np.exp(log_probabilities(np.array([0.0, 0.0]), False)).tolist()
    [0.5, 0.5]
    """
    if multi_label:
        return -np.logaddexp(0, -scores)
    top = scores.max()
    return np.asarray(scores - top - np.log(np.exp(scores - top).sum()))
