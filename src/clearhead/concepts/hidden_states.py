"""The hidden states of inputs at chosen layers, with the gradient of a target where one is asked for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import How, Sample
from clearhead.adapters.text import TextSubject
from clearhead.capture.tape import Call
from clearhead.concepts.layer_hooks import layer_number, own_calls
from clearhead.engine.batching import batches_of, followed
from clearhead.engine.target_batch import Plan
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.targets import Target, TargetLike, make_target

#: True for a bar on standard error, or a function that follows a list.
Progress = bool | Callable[[list[Any]], Iterable[Any]]
#: One vector for each unit of an input.
Own = Float[Tensor, "unit model"]


@dataclass
class Found:
    """What one input left at the layers that were asked for."""

    sample: Sample
    states: dict[int, Own]
    gradients: dict[int, Own]
    logits: Float[Tensor, "label"] | None = None


def read(ex: Explainer, raw: Any, how: How | None = None) -> list[Sample]:
    """An input as it is. A masked language model also takes a text without a mask: its states need none."""
    subject, how = ex.subject, how or How()
    if subject.masked and isinstance(subject, TextSubject) and isinstance(raw, str | tuple):
        tokens = subject.words.read(raw if isinstance(raw, tuple) else (raw,), how)
        known = {name: part for name, part in tokens.inputs.items() if subject.accepts(name)}
        mask: int | None = getattr(subject, "mask", None)
        masks = [place for place, token in enumerate(known["input_ids"].tolist()) if token == mask]
        return [Sample.of(known, tokens.units, dropped=tokens.dropped, masks=tuple(masks))]
    return subject.samples(raw, how)


def check_several(inputs: Any) -> None:
    if isinstance(inputs, str):
        raise InputError(f"a list of inputs is wanted, and {inputs[:40]!r} is one text: put it into a list")


def states_of(
    ex: Explainer,
    inputs: Sequence[Any],
    layers: Sequence[int],
    *,
    target: TargetLike = None,
    scale: str | None = None,
    gradient: bool = False,
    stream: str | None = None,
    batch_size: int = 16,
    progress: Progress = False,
) -> list[Found]:
    """The states h^k of every input, in order; with `gradient`, also those of the target's number on a scale."""
    check_several(inputs)
    samples = [sample for raw in inputs for sample in (ex.subject.samples(raw, How()) if gradient else read(ex, raw))]
    wanted: Target | None = None
    if gradient:
        wanted = make_target(target, scale or ex.subject.scales[0])
        samples = [ex.subject.completed(sample, wanted) for sample in samples]
    if not samples:
        raise InputError("there are no inputs to read states of")
    found: dict[int, Found] = {}
    for places, part in _parts(ex, samples, layers, wanted, stream, batch_size, progress):
        found |= dict(zip(places, part, strict=True))
    return [found[i] for i in range(len(samples))]


@torch.inference_mode(False)
def _parts(
    ex: Explainer,
    samples: list[Sample],
    layers: Sequence[int],
    target: Target | None,
    stream: str | None,
    batch_size: int,
    progress: Progress,
) -> Iterator[tuple[list[int], list[Found]]]:
    own, stream = own_calls(ex, stream), stream or ex.subject.stream
    numbers = [layer_number(layer, len(own)) for layer in layers]
    calls = sorted({own[max(0, number - 1)] for number in numbers})
    suffix = "" if target is None else "_gradient"
    asks = [f"{'hidden_state' if number else 'block_input'}{suffix}" for number in numbers]
    for places in followed(list(batches_of(samples, batch_size)), progress):
        part = [samples[i] for i in places]
        if target is not None:
            plan = _plan(ex, part, target)
            batch, leaves, value = plan.batch, plan.leaves, plan.value
        else:
            batch = ex.subject.collate(part)
            leaves, value = ex.subject.leaves(batch), partial(_no_target, len(part))
        tape = ex.recorder.record(batch, value, set(asks), leaves=leaves, places=calls)
        scores = None if target is None else plan.scores
        kept = dict(zip(calls, tape.calls, strict=True))
        yield places, [_found(i, sample, numbers, kept, own, stream, scores) for i, sample in enumerate(part)]


def _plan(ex: Explainer, samples: Sequence[Sample], target: Target) -> Plan:
    steps = [ex.subject.steps(sample, target) for sample in samples]
    if any(len(own) > 1 for own in steps):
        raise InputError(
            "the target has several steps, and a gradient is of one: choose one, as clearhead.Generated(0)"
        )
    return Plan(ex.subject, samples, steps)


def _no_target(count: int, output: Any) -> Float[Tensor, "batch"]:
    return torch.zeros(count)


def _found(
    i: int,
    sample: Sample,
    numbers: Sequence[int],
    kept: dict[int, Call],
    own: Sequence[int],
    stream: str,
    scores: Tensor | None,
) -> Found:
    length = len(sample.axes[stream])
    states, gradients = {}, {}
    for number in dict.fromkeys(numbers):
        call, name = kept[own[max(0, number - 1)]], "hidden_state" if number else "block_input"
        states[number] = getattr(call, name)[i, :length].clone()
        there = getattr(call, f"{name}_gradient")
        if there is not None:
            gradients[number] = there[i, :length].clone()
    return Found(sample, states, gradients, None if scores is None else scores[i])
