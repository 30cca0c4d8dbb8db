"""Checks of an explained model: the explanation must agree with the model without clearhead."""

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

#: For models in float64, some of which compute their softmax or norms in float32.
TOLERANCE = 1e-5
#: Step sizes of the finite differences: large ones cross a kink (ReLU, experts), small ones are lost in float32.
STEPS = (1e-4, 1e-6, 1e-8, 1e-5, 1e-7, 1e-3, 1e-2)
#: Methods whose scores must not all be zero; other methods may drop all negative evidence.
NONZERO_METHODS = ("generic", "saliency")


class WrongExplanationError(AssertionError):
    """The explanation does not agree with the model."""


def make_target_batch(ex: Explainer, raws: list[Any], target: Any) -> tuple[TargetBatch, list[int]]:
    """Build the batch of the inputs; return it with the number of targets of each input."""
    adapter = ex.adapter
    samples = [sample for raw in raws for sample in adapter.make_samples(raw, InputOptions())]
    resolved_target = make_target(target, adapter.target_scales[0])
    samples = [adapter.resolve_sample(sample, resolved_target) for sample in samples]
    steps = [adapter.expand_target(sample, resolved_target) for sample in samples]
    max_steps = max(map(len, steps))
    padded_steps = [sample_steps + sample_steps[-1:] * (max_steps - len(sample_steps)) for sample_steps in steps]
    target_batch = TargetBatch(
        adapter,
        [
            adapter.truncate_to_targets(sample, sample_steps)
            for sample, sample_steps in zip(samples, steps, strict=True)
        ],
        padded_steps,
    )
    return target_batch, [len(sample_steps) for sample_steps in steps]


def compute_target_values(ex: Explainer, raws: list[Any], target: Any) -> list[float]:
    """Return the summed target values of each input, from a pass of the model over one batch without recording."""
    target_batch, counts = make_target_batch(ex, raws, target)
    with torch.no_grad():
        target_values = target_batch.compute_target(ex.adapter.model(**target_batch.model_inputs)).reshape(
            max(counts), len(counts)
        )
    return [float(target_values[:count, i].sum()) for i, count in enumerate(counts)]


def make_variant(example: Mapping[str, Any], shorter: bool) -> dict[str, Any]:
    """Build an input of the same form with other values and, if asked for, one token less."""
    tensors = {name: torch.as_tensor(tensor) for name, tensor in example.items()}
    variant = {
        name: tensor.flip(-1) * 0.9 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }
    variant |= {name: tensors[name] for name in ("noise", "visual_pos") if name in tensors}
    ids = tensors.get("input_ids")
    if not shorter or ids is None:
        return variant
    row = ids.flatten(0, -2)[0].tolist()
    # keep the last token, and tokens that occur several times (image placeholders)
    removable = [position for position in range(1, len(row) - 1) if row.count(row[position]) == 1]
    keep = [position for position in range(len(row)) if not removable or position != removable[-1]]
    sequence_names = {
        name for name, tensor in tensors.items() if tensor.shape == ids.shape and not name.startswith("decoder")
    }
    return {name: tensor[..., keep] if name in sequence_names else tensor for name, tensor in variant.items()}


def check_batched(
    ex: Explainer, example: Any, alone: dict[str, Any], real: float, target: Any, methods: list[str]
) -> str:
    """Check that batched equals single; inputs differ in length where padding does not change the model's logits."""
    note = ""
    for shorter in (True, False):
        other = make_variant(example, shorter)
        single = compute_target_values(ex, [other], target)[0]
        try:
            pair = compute_target_values(ex, [example, other], target)
        except clearhead.InputError as problem:
            note = f"clearhead does not put two lengths into one batch: {problem}"
            continue
        if not np.allclose(pair, [real, single], rtol=TOLERANCE, atol=TOLERANCE):
            if shorter and not model_depends_on_padding(ex.adapter.model, other):
                raise WrongExplanationError("padding changes the logits, but not those of the model without clearhead")
            note = "padding changes the model's own answer"
            continue
        both = ex.explain([example, other], methods, target)
        second = ex.explain(other, methods, target)
        for method in methods:
            for index, single_explanation in enumerate((alone[method], second[method])):
                check_equal_scores(method, single_explanation, both[method][index])
                check_value(
                    both[method][index].target["value"],
                    pair[index],
                    "the batched target value is not that of the model",
                )
        return note if "input_ids" in example else ""
    raise WrongExplanationError("two inputs of one length that share a batch get other logits than alone")


def model_depends_on_padding(model: Any, example: Mapping[str, Any]) -> bool:
    """Return whether one token of masked padding changes the outputs of the model without clearhead."""
    tensors = {name: torch.as_tensor(tensor) for name, tensor in example.items()}
    ids = tensors.get("input_ids")
    if ids is None:
        return True
    config = model.config.get_text_config()
    pad = getattr(config, "pad_token_id", None)
    tensors.setdefault("attention_mask", torch.ones_like(ids))
    sequence_names = [
        name for name, tensor in tensors.items() if tensor.shape == ids.shape and not name.startswith("decoder")
    ]
    fills = {"input_ids": 0 if pad is None else pad}
    padding = {name: tensors[name].new_full((*ids.shape[:-1], 1), fills.get(name, 0)) for name in sequence_names}
    padded = {
        name: torch.cat([tensor, padding[name]], -1) if name in padding else tensor for name, tensor in tensors.items()
    }
    without_padding, with_padding = call_model(model, tensors), call_model(model, padded)
    for name, tensor in without_padding.items():
        truncated = with_padding[name][tuple(slice(size) for size in tensor.shape)]
        if truncated.shape != tensor.shape or not torch.allclose(truncated, tensor, rtol=TOLERANCE, atol=TOLERANCE):
            return True
    return False


def check_gradient(ex: Explainer, example: Any, target: Any) -> None:
    """Check the input gradient against finite differences of the model without recording."""
    target_batch, _ = make_target_batch(ex, [example], target)
    gradient = ex.recorder.run(
        target_batch.model_inputs, target_batch.compute_target, ("input_gradient",), leaves=target_batch.leaves
    ).input_gradient
    assert gradient is not None
    for direction in iterate_directions(gradient):
        expected = sum(float((leaf_gradient * direction[leaf]).sum()) for leaf, leaf_gradient in gradient.items())
        slopes = (compute_slope(ex, target_batch, direction, step) for step in STEPS)
        if not any(abs(slope - expected) <= 0.03 * abs(expected) for slope in slopes):
            raise WrongExplanationError("the input gradient does not agree with finite differences")


def iterate_directions(gradients: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the directions of the finite differences: a random one in float64.

    Float32 is too coarse for that. There the gradient is restricted to either of two random halves: steps along the
    gradient change the output most.
    """
    noise = {leaf: make_noise(gradient[0]) for leaf, gradient in gradients.items()}
    if all(gradient.dtype == torch.float64 for gradient in gradients.values()):
        yield noise
        return
    for side in (1, -1):
        half = {leaf: gradient[0] * (side * noise[leaf] > 0) for leaf, gradient in gradients.items()}
        size = sum(float(gradient.square().sum()) for gradient in half.values()) ** 0.5
        yield {leaf: gradient / size for leaf, gradient in half.items()}


def compute_slope(ex: Explainer, target_batch: TargetBatch, direction: Mapping[str, Tensor], step: float) -> float:
    up, down = (
        compute_target_at(ex, target_batch, {leaf: part * s for leaf, part in direction.items()}) for s in (step, -step)
    )
    return (up - down) / (2 * step)


def compute_target_at(ex: Explainer, target_batch: TargetBatch, direction: Mapping[str, Tensor]) -> float:
    """Return the target value of the model without recording, with every leaf moved."""
    batch, waiting_leaves = dict(target_batch.model_inputs), [leaf for leaf in target_batch.leaves if leaf in direction]
    for leaf in [leaf for leaf in waiting_leaves if batch[leaf].is_floating_point()]:
        batch[leaf] = batch[leaf] + direction[leaf]
        waiting_leaves.remove(leaf)

    def move(module: Any, args: Any, output: Tensor) -> Tensor:
        return output + direction[waiting_leaves.pop(0)] if waiting_leaves else output

    handles = (
        [module.register_forward_hook(move) for module in ex.recorder.get_embedding_modules()] if waiting_leaves else []
    )
    with remove_hooks_on_exit(handles), torch.no_grad():
        return float(target_batch.compute_target(ex.adapter.model(**batch)).sum())


def make_noise(part: Tensor) -> Tensor:
    return torch.randn(part.shape, generator=torch.Generator().manual_seed(0)).to(part)


def check_unit_rows(ex: Explainer, example: Any, target: Any) -> None:
    """Check that a changed unit changes its own row of the first layer's input most.

    Nothing is checked where an earlier tower has mixed most rows.
    """
    target_batch, _ = make_target_batch(ex, [example], target)
    record = partial(
        ex.recorder.record, target_batch.model_inputs, target_batch.compute_target, leaves=target_batch.leaves
    )
    reference = record(("inputs", "block_input"))
    assert reference.inputs is not None
    leaves = {
        leaf: tensor[: len(tensor) // target_batch.targets_per_sample].clone()
        for leaf, tensor in reference.inputs.items()
    }
    with torch.enable_grad():
        for tensor in leaves.values():
            tensor.requires_grad_()
        unit_vectors = ex.adapter.to_unit_vectors(leaves, target_batch.truncated_samples[:1])
    for stream, vectors in unit_vectors.items():
        count = vectors.shape[1]
        self_calls = [i for i, call in enumerate(reference.calls) if call.query_stream == call.key_stream == stream]
        rows = reference.calls[self_calls[0]].block_input if self_calls else None
        if rows is None or rows.dim() != 3 or rows.shape[1] != count or not vectors.requires_grad:
            continue
        for unit in sorted({0, count // 2, count - 1}):
            gradients = torch.autograd.grad(
                vectors[0, unit].sum(), list(leaves.values()), retain_graph=True, allow_unused=True
            )
            unit_masks = {
                leaf: tensor != 0 for leaf, tensor in zip(leaves, gradients, strict=True) if tensor is not None
            }
            if not any(tensor.any() for tensor in unit_masks.values()):
                continue  # a class token has no pixels
            moved_vectors = {
                leaf: tensor.detach() + make_noise(tensor) * unit_masks[leaf]
                for leaf, tensor in leaves.items()
                if leaf in unit_masks
            }
            changed_rows = record(("block_input",), vectors=moved_vectors).calls[self_calls[0]].block_input
            assert changed_rows is not None
            change = (changed_rows - rows)[0].norm(dim=-1)
            is_local = int((change > 1e-3 * change.max()).sum()) <= count / 2
            if is_local and change[unit] < 0.25 * change.max():  # convolutions before the first layer mix neighbours
                raise WrongExplanationError(f"unit {unit} changes row {int(change.argmax())} most ({stream})")


def check_value(recorded: float, real: float, problem: str) -> None:
    if not abs(recorded - real) <= TOLERANCE * max(1.0, abs(real)):
        raise WrongExplanationError(f"{problem}: {recorded:.6g}, not {real:.6g}")


def call_model(model: Any, example: Mapping[str, Any]) -> dict[str, Tensor]:
    """Call a model without clearhead and return its floating-point output tensors in float64."""
    dtype = next(model.parameters()).dtype
    tensors = {name: torch.as_tensor(tensor) for name, tensor in example.items()}
    with torch.no_grad():
        output = model(
            **{name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        )
    tensors = {name: tensor for name, tensor in output.items() if isinstance(tensor, Tensor)}
    return {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}


def check_target_in_output(target: Mapping[str, Any], parts: Mapping[str, Tensor]) -> None:
    """Check that the explained value is among the outputs of the model."""
    embeds = [tensor for name, tensor in parts.items() if name.endswith("_embeds") and tensor.dim() == 2]
    cosines = [(a * b).sum(-1) for a in embeds for b in embeds if a.shape == b.shape]
    outputs = torch.cat([tensor.flatten() for tensor in (*parts.values(), *cosines)])
    for step in target.get("steps", [target]):
        gap = float((outputs - step["value"]).abs().min())
        if not gap <= TOLERANCE * max(1.0, abs(step["value"])):
            raise WrongExplanationError(f"{step['value']:.6g} is explained, but is not an output of the model")


def iterate_streams(explanation: Any) -> Iterator[tuple[str, Any]]:
    yield from ((stream, explanation[stream]) for stream in explanation.streams)


def check_scores(method: str, explanation: Any) -> None:
    for stream, stream_explanation in iterate_streams(explanation):
        if not np.isfinite(stream_explanation.scores).all():
            raise WrongExplanationError(f"{method} gives scores that are not finite ({stream})")
        if (
            method in NONZERO_METHODS
            and not all(stream_explanation.units.special)
            and not np.abs(stream_explanation.scores).max() > 0
        ):
            raise WrongExplanationError(f"{method} gives only zero scores ({stream})")


def check_equal_scores(method: str, alone: Any, batched: Any) -> None:
    for (stream, single), (_, batched_part) in zip(iterate_streams(alone), iterate_streams(batched), strict=True):
        gap, size = np.abs(single.scores - batched_part.scores).max(), np.abs(single.scores).max()
        # NanoChat normalises its embeddings, so embedding × gradient is a rounding error
        size = max(size, 1e-3 * abs(alone.target["value"]))
        if not gap <= 10 * TOLERANCE * size:
            raise WrongExplanationError(f"{method} differs by {gap / size:.0e} between one input and two ({stream})")
