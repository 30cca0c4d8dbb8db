"""Hidden states of inputs at chosen layers, and optionally the gradient of a target with respect to them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions
from clearhead.adapters.text import TextAdapter
from clearhead.capture.tape import AttentionCall
from clearhead.concepts.directions import EMBEDDINGS, LayerIndex
from clearhead.concepts.layer_hooks import find_self_attention_calls, get_hook_point_index, resolve_layer_index
from clearhead.engine.batching import iter_batch_indices, with_progress
from clearhead.engine.target_batch import TargetBatch, TargetFunction
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.sample import Sample
from clearhead.targets import Target, TargetLike, make_target

#: True for a progress bar on standard error, or a function that wraps a list.
Progress = bool | Callable[[list[Any]], Iterable[Any]]
#: One vector for each unit of an input.
UnitStates = Float[Tensor, "unit model"]


@dataclass
class LayerStates:
    """The hidden states of one input at the requested layers.

    Attributes:
        sample: The input as the model takes it.
        states: Hidden states by layer, without padding.
        gradients: Gradients of the target by layer; empty without a target.
        logits: The scores of all classes; None without a target.
    """

    sample: Sample
    states: dict[LayerIndex, UnitStates]
    gradients: dict[LayerIndex, UnitStates]
    logits: Float[Tensor, "label"] | None = None


def read_samples(explainer: Explainer, raw_input: Any, options: InputOptions | None = None) -> list[Sample]:
    """Make the samples of an input; a masked language model also accepts a text without a mask.

    Hidden states need no target, so a missing mask is not an error here.

    Args:
        explainer: Explainer of the model.
        raw_input: An input as `Explainer.explain` takes it.
        options: Input options, such as truncation.

    Returns:
        The samples of the input.
    """
    adapter = explainer.adapter
    options = options or InputOptions()
    if not (adapter.masked and isinstance(adapter, TextAdapter) and isinstance(raw_input, str | tuple)):
        return adapter.make_samples(raw_input, options)
    texts = raw_input if isinstance(raw_input, tuple) else (raw_input,)
    tokens = adapter.tokenizer_wrapper.encode_texts(texts, options)
    model_inputs = {name: tensor for name, tensor in tokens.inputs.items() if adapter.forward_accepts(name)}
    mask_token_id: int | None = getattr(adapter, "mask_token_id", None)
    mask_positions = tuple(i for i, token in enumerate(model_inputs["input_ids"].tolist()) if token == mask_token_id)
    return [
        Sample.from_units(model_inputs, tokens.units, num_truncated=tokens.num_truncated, mask_positions=mask_positions)
    ]


def check_is_list(inputs: Any) -> None:
    """Reject a single text where a list of inputs is needed.

    Raises:
        InputError: `inputs` is a string.
    """
    if isinstance(inputs, str):
        raise InputError(f"expected a list of inputs, but {inputs[:40]!r} is one text: put it in a list")


def compute_layer_states(
    explainer: Explainer,
    inputs: Sequence[Any],
    layers: Sequence[LayerIndex],
    *,
    target: TargetLike = None,
    scale: str | None = None,
    with_gradients: bool = False,
    stream: str | None = None,
    batch_size: int = 16,
    progress: Progress = False,
) -> list[LayerStates]:
    """Compute the hidden states of every input and, optionally, the gradients of a target.

    Args:
        explainer: Explainer of the model.
        inputs: The inputs, as `Explainer.explain` takes them.
        layers: Layers whose output is read, from 0, negative from the end; "embeddings" is the output of the embedding
            layer.
        target: Target of the gradients; default: the predicted class.
        scale: Scale of the target, such as "logit" or "log-odds".
        with_gradients: Also compute the gradient of the target.
        stream: Stream whose layers are read; default: the adapter's main stream.
        batch_size: Number of inputs in a pass.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        The states of each input, in the order of the inputs.

    Raises:
        InputError: There are no inputs, a layer does not exist, or the target has several steps.
    """
    check_is_list(inputs)
    resolved_target: Target | None = None
    samples: list[Sample] = []
    if with_gradients:
        resolved_target = make_target(target, scale or explainer.adapter.target_scales[0])
    for raw_input in inputs:
        if resolved_target is None:
            samples += read_samples(explainer, raw_input)
        else:
            samples += explainer.adapter.make_samples(raw_input, InputOptions())
    if resolved_target is not None:
        samples = [explainer.adapter.resolve_sample(sample, resolved_target) for sample in samples]
    if not samples:
        raise InputError("the list of inputs is empty")
    states_by_index: dict[int, LayerStates] = {}
    batches = _iter_state_batches(explainer, samples, layers, resolved_target, stream, batch_size, progress)
    for indices, batch_states in batches:
        states_by_index |= dict(zip(indices, batch_states, strict=True))
    return [states_by_index[i] for i in range(len(samples))]


@torch.inference_mode(False)
def _iter_state_batches(
    explainer: Explainer,
    samples: list[Sample],
    layers: Sequence[LayerIndex],
    target: Target | None,
    stream: str | None,
    batch_size: int,
    progress: Progress,
) -> Iterator[tuple[list[int], list[LayerStates]]]:
    """Yield the indices and the states of the samples, batch by batch."""
    layer_calls = find_self_attention_calls(explainer, stream)
    stream = stream or explainer.adapter.stream
    layer_indices = [resolve_layer_index(layer, len(layer_calls)) for layer in layers]
    call_by_layer = {layer: layer_calls[max(0, get_hook_point_index(layer) - 1)] for layer in layer_indices}
    call_indices = sorted(set(call_by_layer.values()))
    suffix = "" if target is None else "_gradient"
    requirements = {f"{_get_state_name(layer)}{suffix}" for layer in layer_indices}
    for indices in with_progress(list(iter_batch_indices(samples, batch_size)), progress):
        batch_samples = [samples[i] for i in indices]
        scores: Tensor | None = None
        if target is None:
            model_inputs = explainer.adapter.collate(batch_samples)
            leaves = explainer.adapter.find_grad_input_names(model_inputs)
            compute_zeros = partial(_compute_zero_target, len(batch_samples))
            tape = explainer.recorder.record(
                model_inputs, compute_zeros, requirements, leaves=leaves, call_indices=call_indices
            )
        else:
            batch = _build_target_batch(explainer, batch_samples, target)
            target_function = TargetFunction(batch)
            tape = explainer.recorder.record(
                batch.model_inputs,
                target_function,
                requirements,
                leaves=batch.leaves,
                call_indices=call_indices,
            )
            scores = target_function.result.class_scores
        calls = dict(zip(call_indices, tape.calls, strict=True))
        calls_by_layer = {layer: calls[call_index] for layer, call_index in call_by_layer.items()}
        yield (
            indices,
            [_collect_states(i, sample, calls_by_layer, stream, scores) for i, sample in enumerate(batch_samples)],
        )


def _build_target_batch(explainer: Explainer, samples: Sequence[Sample], target: Target) -> TargetBatch:
    """Build the batch whose target is differentiated; a target with several steps raises `InputError`."""
    steps = [explainer.adapter.expand_target(sample, target) for sample in samples]
    if any(len(sample_steps) > 1 for sample_steps in steps):
        raise InputError(
            "the target has several steps, but a gradient needs one: choose one, such as clearhead.GeneratedToken(0)"
        )
    return TargetBatch(explainer.adapter, samples, steps)


def _compute_zero_target(count: int, output: Any) -> Float[Tensor, "batch"]:
    """Return a target of zeros, for passes that record states without any gradient."""
    return torch.zeros(count)


def _get_state_name(layer: LayerIndex) -> str:
    """The field of an AttentionCall that contains the states: the input of its block for the embeddings."""
    return "block_input" if layer == EMBEDDINGS else "hidden_state"


def _collect_states(
    i: int,
    sample: Sample,
    calls_by_layer: Mapping[LayerIndex, AttentionCall],
    stream: str,
    scores: Tensor | None,
) -> LayerStates:
    """The states of the i-th sample of a batch, without padding."""
    length = len(sample.axes[stream])
    states = {}
    gradients = {}
    for layer, call in calls_by_layer.items():
        name = _get_state_name(layer)
        states[layer] = getattr(call, name)[i, :length].clone()
        gradient = getattr(call, f"{name}_gradient")
        if gradient is not None:
            gradients[layer] = gradient[i, :length].clone()
    return LayerStates(sample, states, gradients, None if scores is None else scores[i])
