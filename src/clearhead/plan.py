"""One batch with its targets: what the recorder is called with, and the coordinates that methods work in."""

from collections.abc import Callable, Sequence
from dataclasses import replace
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

    def __init__(self, subject: Subject, samples: Sequence[Sample], targets: Sequence[Target]) -> None:
        self.subject, self.samples, self.targets = subject, samples, targets
        self.batch = subject.collate(samples)
        self.leaf = subject.leaf if subject.leaf in self.batch else "inputs_embeds"
        self.scores: Float[Tensor, "batch label"] | None = None
        self.values: Float[Tensor, " batch"] = torch.empty(0)

    @property
    def readout(self) -> Float[Tensor, "batch 1 unit"]:
        width = max(len(sample.units) for sample in self.samples)
        wide = torch.float64 if self.subject.dtype == torch.float64 else torch.float32
        weights = torch.zeros(len(self.samples), 1, width, dtype=wide)
        for i, (sample, target) in enumerate(zip(self.samples, self.targets, strict=True)):
            rows = self.subject.rows(sample, target) if self.subject.readout is not None else {}
            for unit, weight in rows.items():
                weights[i, 0, unit] = weight
        return weights.to(self.subject.device)

    def value(self, output: Any) -> Float[Tensor, "batch"]:
        """One number per sample; a target of the caller's own sees the whole output."""
        own = {target.custom for target in self.targets if target.custom is not None}
        computed = {function: _own_value(function, output, len(self.samples)) for function in own}
        by_class = any(target.custom is None for target in self.targets)
        if by_class or getattr(output, "logits", None) is not None:
            self.scores = self.subject.scores(output, self.samples, self.targets)
        values = [
            computed[target.custom][i] if target.custom is not None else self._of_classes(target, i)
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
        return tape

    def frame(self, seed: int) -> Frame:
        width = max(len(sample.units) for sample in self.samples)
        device = self.subject.device
        valid = torch.zeros(len(self.samples), width, dtype=torch.bool)
        special = torch.zeros_like(valid)
        axes = self.samples[0].units.places.shape[1]
        readout = self.readout
        places = torch.zeros(len(self.samples), width, axes, dtype=readout.dtype)
        for i, sample in enumerate(self.samples):
            units = sample.units
            valid[i, : len(units)] = True
            special[i, : len(units)] = torch.tensor(units.special)
            places[i, : len(units)] = torch.as_tensor(units.places, dtype=places.dtype)
        return Frame(
            readout=readout,
            valid=valid.to(device),
            special=special.to(device),
            seeds=tuple(sample.seed(seed) for sample in self.samples),
            places=places.to(device),
        )


def fold_for(method: Method, plan: Plan, seed: int, count: int) -> Fold:
    """A method, ready to visit the calls of one batch."""
    frame = plan.frame(seed)
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
