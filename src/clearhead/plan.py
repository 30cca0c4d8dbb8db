"""One batch with its targets: what the recorder is called with, and the coordinates that methods work in."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.methods.base import REGISTRY, Fold, Frame, Method, layer_range
from clearhead.recording.tape import Tape
from clearhead.subjects.base import Sample, Subject
from clearhead.targets import Target


class Plan:
    """One batch with its targets: what the recorder is called with, and what came out."""

    def __init__(self, subject: Subject, samples: Sequence[Sample], targets: Sequence[Target], seed: int = 0) -> None:
        self.subject, self.samples, self.targets, self.seed = subject, samples, targets, seed
        self.batch = subject.collate(samples)
        self.leaf = subject.leaf if subject.leaf in self.batch else "inputs_embeds"
        self.scores: Float[Tensor, "batch label"] | None = None
        self.values: Float[Tensor, " batch"] = torch.empty(0)

    @cached_property
    def readout(self) -> Float[Tensor, "batch 1 unit"]:
        width = max(len(sample.units) for sample in self.samples)
        wide = torch.float64 if self.subject.dtype == torch.float64 else torch.float32
        weights = torch.zeros(len(self.samples), 1, width, dtype=wide)
        for i, (sample, target) in enumerate(zip(self.samples, self.targets, strict=True)):
            rows = self.subject.rows(sample, target) if self.subject.readout is not None else {}
            weights[i, 0, list(rows)] = torch.tensor(list(rows.values()), dtype=wide)
        return weights.to(self.subject.device)

    @cached_property
    def fingerprints(self) -> list[str]:
        """What tells one input from another, whatever it is called."""
        return [f"{sample.seed(0):014x}" for sample in self.samples]

    def value(self, output: Any) -> Float[Tensor, "batch"]:
        """One number per sample; a target of the caller's own sees the whole output."""
        own = {id(target.custom): target.custom for target in self.targets if target.custom is not None}
        computed = {key: _own_value(function, output, len(self.samples)) for key, function in own.items()}
        by_class = any(target.custom is None for target in self.targets)
        if by_class or getattr(output, "logits", None) is not None:
            self.scores = self.subject.scores(output, self.samples, self.targets)
        values = [
            computed[id(target.custom)][i] if target.custom is not None else self._of_classes(target, i)
            for i, target in enumerate(self.targets)
        ]
        number = torch.stack(values)
        self.values = number.detach()
        self.scores = None if self.scores is None else self.scores.detach()
        return number

    def _of_classes(self, target: Target, i: int) -> Float[Tensor, ""]:
        assert self.scores is not None
        if self.subject.regression and target.scale != "logit":
            raise InputError(f"the model measures and has no classes, so no {target.scale}: use scale='logit'")
        return target.value(self.scores[i], self.subject)

    def arranged(self, tape: Tape) -> Tape:
        """Embeddings or pixels as one vector per unit."""
        parts = {name: getattr(tape, name) for name in ("inputs", "input_gradient")}
        for name, part in parts.items():
            setattr(tape, name, None if part is None else self.subject.to_units(part, self.samples))
        tape.logits = self.scores
        tape.truncated_tokens = tuple(sample.dropped for sample in self.samples)
        return tape

    @cached_property
    def frame(self) -> Frame:
        """The coordinates that all methods of this batch share."""
        width = max(len(sample.units) for sample in self.samples)
        device = self.subject.device
        valid = torch.zeros(len(self.samples), width, dtype=torch.bool)
        axes = self.samples[0].units.places.shape[1]
        readout = self.readout
        places = torch.zeros(len(self.samples), width, axes, dtype=readout.dtype)
        for i, sample in enumerate(self.samples):
            units = sample.units
            valid[i, : len(units)] = True
            places[i, : len(units)] = torch.as_tensor(units.places, dtype=places.dtype)
        return Frame(
            readout=readout,
            valid=valid.to(device),
            seeds=tuple(sample.seed(self.seed) for sample in self.samples),
            places=places.to(device),
        )


def fold_for(method: Method, plan: Plan, count: int) -> Fold:
    """A method, ready to visit the calls of one batch."""
    frame = plan.frame
    if method.option("rows") == "all":
        width = frame.valid.shape[1]
        every = torch.eye(width, dtype=frame.readout.dtype, device=frame.readout.device)
        frame = replace(frame, readout=every.expand(len(frame.valid), width, width))
    chosen = layer_range(method.option("layers", method.declaration.layers), count)
    return REGISTRY[method.name](frame=replace(frame, layers=chosen), **method.own_options)


def _own_value(function: Callable[[Any], Tensor], output: Any, count: int) -> Float[Tensor, "batch"]:
    value = function(output)
    if not isinstance(value, Tensor) or value.shape != (count,):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the target function must return one number per sample, ({count},), but returned {shape}")
    return value
