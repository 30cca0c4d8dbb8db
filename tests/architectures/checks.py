"""What is asked of an explained model: that it says of the untouched one what is true of it."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import clearhead
from clearhead.adapters.base import InputOptions
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.engine.target_batch import TargetBatch
from clearhead.explainer import Explainer
from clearhead.targets import make_target

#: In float64; some models compute their softmax or norms in float32 all the same.
TOLERANCE = 1e-5
#: How far the input is moved to see its gradient: far ones cross a kink (ReLU, experts), near ones are lost in float32.
STEPS = (1e-4, 1e-6, 1e-8, 1e-5, 1e-7, 1e-3, 1e-2)
#: Methods whose scores are never all zero, unless something is wrong; others leave out what speaks against a target.
TELLING = ("generic", "saliency")


class Wrong(AssertionError):
    """What was explained is not what the model said."""


def planned(ex: Explainer, raws: list[Any], target: Any) -> tuple[TargetBatch, list[int]]:
    """The batch of these inputs, and how many targets each of them has."""
    subject = ex.adapter
    samples = [sample for raw in raws for sample in subject.make_samples(raw, InputOptions())]
    wanted = make_target(target, subject.target_scales[0])
    samples = [subject.resolve_sample(sample, wanted) for sample in samples]
    steps = [subject.expand_target(sample, wanted) for sample in samples]
    most = max(map(len, steps))
    filled = [own + own[-1:] * (most - len(own)) for own in steps]
    plan = TargetBatch(
        subject, [subject.truncate_to_targets(sample, own) for sample, own in zip(samples, steps, strict=True)], filled
    )
    return plan, [len(own) for own in steps]


def values(ex: Explainer, raws: list[Any], target: Any) -> list[float]:
    """What the untouched model says about inputs that share a batch: the sum of the targets of each."""
    plan, counts = planned(ex, raws, target)
    with torch.no_grad():
        number = plan.compute_target(ex.adapter.model(**plan.model_inputs)).reshape(max(counts), len(counts))
    return [float(number[:count, i].sum()) for i, count in enumerate(counts)]


def varied(example: Mapping[str, Any], shorter: bool) -> dict[str, Any]:
    """Another input like this one, with other numbers in it and, if asked for, one token less."""
    given = {name: torch.as_tensor(part) for name, part in example.items()}
    made = {name: part.flip(-1) * 0.9 if part.is_floating_point() else part for name, part in given.items()}
    made |= {name: given[name] for name in ("noise", "visual_pos") if name in given}
    ids = given.get("input_ids")
    if not shorter or ids is None:
        return made
    row = ids.flatten(0, -2)[0].tolist()
    # the last token may have a part to play, and so have those that come several times (places for a picture)
    free = [place for place in range(1, len(row) - 1) if row.count(row[place]) == 1]
    keep = [place for place in range(len(row)) if not free or place != free[-1]]
    along = {name for name, part in given.items() if part.shape == ids.shape and not name.startswith("decoder")}
    return {name: part[..., keep] if name in along else part for name, part in made.items()}


def check_batched(ex: Explainer, one: Any, alone: dict[str, Any], real: float, target: Any, methods: list[str]) -> str:
    """Batched = single, for two inputs of different lengths where the model itself has that."""
    why = ""
    for shorter in (True, False):
        other = varied(one, shorter)
        single = values(ex, [other], target)[0]
        try:
            pair = values(ex, [one, other], target)
        except clearhead.InputError as problem:
            why = f"clearhead does not put two lengths into one batch: {problem}"
            continue
        if not np.allclose(pair, [real, single], rtol=TOLERANCE, atol=TOLERANCE):
            if shorter and not padding_matters(ex.adapter.model, other):
                raise Wrong("padding changes the answer, though it does not change that of the untouched model")
            why = "padding changes the model's own answer"
            continue
        both = ex.explain([one, other], methods, target)
        second = ex.explain(other, methods, target)
        for method in methods:
            for place, own in enumerate((alone[method], second[method])):
                _check_same(method, own, both[method][place])
                check_value(both[method][place].target["value"], pair[place], "the batched answer is not the model's")
        return why if "input_ids" in one else ""
    raise Wrong("two inputs of one length that share a batch get other answers than alone")


def padding_matters(model: Any, one: Mapping[str, Any]) -> bool:
    """Whether the untouched model, called with one token of padding as anybody would pad, says something else."""
    given = {name: torch.as_tensor(part) for name, part in one.items()}
    ids = given.get("input_ids")
    if ids is None:
        return True
    config = model.config.get_text_config()
    pad = getattr(config, "pad_token_id", None)
    given.setdefault("attention_mask", torch.ones_like(ids))
    along = [name for name, part in given.items() if part.shape == ids.shape and not name.startswith("decoder")]
    fills = {"input_ids": 0 if pad is None else pad}
    more = {name: given[name].new_full((*ids.shape[:-1], 1), fills.get(name, 0)) for name in along}
    padded = {name: torch.cat([part, more[name]], -1) if name in more else part for name, part in given.items()}
    plain, found = called(model, given), called(model, padded)
    for name, part in plain.items():
        seen = found[name][tuple(slice(size) for size in part.shape)]
        if seen.shape != part.shape or not torch.allclose(seen, part, rtol=TOLERANCE, atol=TOLERANCE):
            return True
    return False


def check_gradient(ex: Explainer, one: Any, target: Any) -> None:
    """The gradient of the input is that of the untouched model: a small step changes the answer by as much."""
    plan, _ = planned(ex, [one], target)
    found = ex.recorder.run(
        plan.model_inputs, plan.compute_target, ("input_gradient",), leaves=plan.leaves
    ).input_gradient
    assert found is not None
    for way in _ways(found):
        expected = sum(float((part * way[leaf]).sum()) for leaf, part in found.items())
        slopes = (_slope(ex, plan, way, step) for step in STEPS)
        if not any(abs(slope - expected) <= 0.03 * abs(expected) for slope in slopes):
            raise Wrong("small steps of the input change the answer by another amount than its gradient says")


def _ways(found: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Where the input is moved to: anywhere. Float32 is too coarse for that, so there along either half of the gradient
    (a step along it changes the answer most)."""
    noise = {leaf: _noise(part[0]) for leaf, part in found.items()}
    if all(part.dtype == torch.float64 for part in found.values()):
        yield noise
        return
    for side in (1, -1):
        half = {leaf: part[0] * (side * noise[leaf] > 0) for leaf, part in found.items()}
        size = sum(float(part.square().sum()) for part in half.values()) ** 0.5
        yield {leaf: part / size for leaf, part in half.items()}


def _slope(ex: Explainer, plan: TargetBatch, way: Mapping[str, Tensor], step: float) -> float:
    up, down = (_stepped(ex, plan, {leaf: part * s for leaf, part in way.items()}) for s in (step, -step))
    return (up - down) / (2 * step)


def _stepped(ex: Explainer, plan: TargetBatch, way: Mapping[str, Tensor]) -> float:
    """The untouched model's answer with every leaf moved a little."""
    batch, waiting = dict(plan.model_inputs), [leaf for leaf in plan.leaves if leaf in way]
    for leaf in [leaf for leaf in waiting if batch[leaf].is_floating_point()]:
        batch[leaf] = batch[leaf] + way[leaf]
        waiting.remove(leaf)

    def move(module: Any, args: Any, output: Tensor) -> Tensor:
        return output + way[waiting.pop(0)] if waiting else output

    handles = [module.register_forward_hook(move) for module in ex.recorder.get_embedding_modules()] if waiting else []
    with remove_hooks_on_exit(handles), torch.no_grad():
        return float(plan.compute_target(ex.adapter.model(**batch)).sum())


def _noise(part: Tensor) -> Tensor:
    return torch.randn(part.shape, generator=torch.Generator().manual_seed(0)).to(part)


def check_places(ex: Explainer, one: Any, target: Any) -> None:
    """A unit that moves changes its own row of what goes into the first layer most; where a tower has mixed most rows
    before, nothing can be said."""
    plan, _ = planned(ex, [one], target)
    record = partial(ex.recorder.record, plan.model_inputs, plan.compute_target, leaves=plan.leaves)
    still = record(("inputs", "block_input"))
    assert still.inputs is not None
    leaves = {leaf: part[: len(part) // plan.targets_per_sample].clone() for leaf, part in still.inputs.items()}
    with torch.enable_grad():
        for part in leaves.values():
            part.requires_grad_()
        arranged = ex.adapter.to_unit_vectors(leaves, plan.truncated_samples[:1])
    for stream, vectors in arranged.items():
        count = vectors.shape[1]
        alone = [i for i, call in enumerate(still.calls) if call.query_stream == call.key_stream == stream]
        rows = still.calls[alone[0]].block_input if alone else None
        if rows is None or rows.dim() != 3 or rows.shape[1] != count or not vectors.requires_grad:
            continue
        for unit in sorted({0, count // 2, count - 1}):
            own = torch.autograd.grad(
                vectors[0, unit].sum(), list(leaves.values()), retain_graph=True, allow_unused=True
            )
            held = {leaf: part != 0 for leaf, part in zip(leaves, own, strict=True) if part is not None}
            if not any(part.any() for part in held.values()):
                continue  # a class token has no pixels
            moved = {leaf: part.detach() + _noise(part) * held[leaf] for leaf, part in leaves.items() if leaf in held}
            found = record(("block_input",), vectors=moved).calls[alone[0]].block_input
            assert found is not None
            change = (found - rows)[0].norm(dim=-1)
            apart = int((change > 1e-3 * change.max()).sum()) <= count / 2
            if apart and change[unit] < 0.25 * change.max():  # convolutions before the first layer see neighbours, too
                raise Wrong(f"what is called unit {unit} is read in row {int(change.argmax())} ({stream})")


def check_value(recorded: float, real: float, problem: str) -> None:
    if not abs(recorded - real) <= TOLERANCE * max(1.0, abs(real)):
        raise Wrong(f"{problem}: {recorded:.6g}, not {real:.6g}")


def called(model: Any, one: Mapping[str, Any]) -> dict[str, Tensor]:
    """What comes out of a model when it is called as anybody would call it."""
    dtype = next(model.parameters()).dtype
    given = {name: torch.as_tensor(part) for name, part in one.items()}
    with torch.no_grad():
        output = model(**{name: part.to(dtype) if part.is_floating_point() else part for name, part in given.items()})
    tensors = {name: part for name, part in output.items() if isinstance(part, Tensor)}
    return {name: part.double() for name, part in tensors.items() if part.is_floating_point()}


def check_heard(target: Mapping[str, Any], parts: Mapping[str, Tensor]) -> None:
    """What is explained is among the numbers that come out of the model."""
    embeds = [part for name, part in parts.items() if name.endswith("_embeds") and part.dim() == 2]
    cosines = [(a * b).sum(-1) for a in embeds for b in embeds if a.shape == b.shape]
    numbers = torch.cat([part.flatten() for part in (*parts.values(), *cosines)])
    for step in target.get("steps", [target]):
        gap = float((numbers - step["value"]).abs().min())
        if not gap <= TOLERANCE * max(1.0, abs(step["value"])):
            raise Wrong(f"{step['value']:.6g} is explained, but does not come out of the model")


def _streams(explanation: Any) -> Iterator[tuple[str, Any]]:
    yield from ((stream, explanation[stream]) for stream in explanation.streams)


def check_scores(method: str, explanation: Any) -> None:
    for stream, part in _streams(explanation):
        if not np.isfinite(part.scores).all():
            raise Wrong(f"{method} gives scores that are not finite ({stream})")
        if method in TELLING and not all(part.units.special) and not np.abs(part.scores).max() > 0:
            raise Wrong(f"{method} gives no score but zero ({stream})")


def _check_same(method: str, alone: Any, batched: Any) -> None:
    for (stream, one), (_, other) in zip(_streams(alone), _streams(batched), strict=True):
        gap, size = np.abs(one.scores - other.scores).max(), np.abs(one.scores).max()
        # NanoChat scales its words to one length, so they times their gradients are rounding errors
        size = max(size, 1e-3 * abs(alone.target["value"]))
        if not gap <= 10 * TOLERANCE * size:
            raise Wrong(f"{method} differs by {gap / size:.0e} between one input and two ({stream})")
