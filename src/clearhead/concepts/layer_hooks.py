"""Locate h^0 … h^L in a model and hook them: h^0 is the input of the first layer, h^k the output of the k-th."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from clearhead.adapters.base import InputOptions
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.concepts.directions import EMBEDDINGS, LayerIndex
from clearhead.errors import InputError, UnsupportedError
from clearhead.explainer import Explainer

HiddenStates = Float[Tensor, "batch unit model"]
#: Receives the states of a layer; returns their replacement, or None to keep them.
StateHook = Callable[[HiddenStates], HiddenStates | None]


@dataclass(frozen=True)
class HookPoint:
    """The input or the output of one run of a layer; a layer with shared weights runs several times in a pass.

    Attributes:
        block: The module of the layer.
        call_index: Which of the runs of this module in a pass, from 0.
        is_input: True for the input of the layer, False for its output.
    """

    block: nn.Module
    call_index: int
    is_input: bool = False


def get_self_test(explainer: Explainer) -> SelfTest:
    """Return the self-test of the capture, run on the adapter's example input if it has not been run."""
    return explainer.capabilities.run_self_test(
        explainer.adapter.make_samples(explainer.adapter.make_example_input(), InputOptions())
    )


def find_self_attention_calls(explainer: Explainer, stream: str | None = None) -> list[int]:
    """Return the indices of a model's self-attention calls for one stream, one per layer, in the order of the pass.

    Args:
        explainer: Explainer of the model.
        stream: Name of the stream; default: the adapter's main stream.

    Returns:
        Indices of calls in one pass, counted over the calls of all streams.

    Raises:
        InputError: The model has no layers of that stream.
        UnsupportedError: Its layers do not pass one vector for each unit.
    """
    self_test = get_self_test(explainer)
    stream = stream or explainer.adapter.stream
    call_indices = [
        i
        for i, call_site in enumerate(self_test.call_sites)
        if (call_site.query_stream, call_site.key_stream) == (stream, stream)
    ]
    if not call_indices:
        streams = sorted({call_site.query_stream for call_site in self_test.call_sites})
        raise InputError(
            f"{explainer.adapter.name} has no layers of the stream {stream!r}: it has {', '.join(streams)}"
        )
    if not self_test.has_unit_vectors:
        raise UnsupportedError(
            f"the layers of {explainer.adapter.name} do not pass on one vector for each unit, so no direction can be "
            "computed for them"
        )
    return call_indices


def resolve_layer_index(layer: LayerIndex, num_layers: int) -> LayerIndex:
    """Resolve a layer index: negative numbers count from the end; "embeddings" is returned unchanged.

    Layer k is the output of block k, counted from 0, which is h^(k+1); "embeddings" is h^0.

    Raises:
        InputError: The layer does not exist.
    """
    if layer == EMBEDDINGS:
        return layer
    if not isinstance(layer, int) or not -num_layers <= layer < num_layers:
        raise InputError(
            f"layer {layer!r} does not exist: use 0 to {num_layers - 1}, a negative number that counts from the end, "
            f"or {EMBEDDINGS!r} for the output of the embedding layer"
        )
    return layer % num_layers


def get_hook_point_index(layer: LayerIndex) -> int:
    """Return k of h^k for a resolved layer, its position in `find_hook_points`: 0 for "embeddings"."""
    return 0 if layer == EMBEDDINGS else int(layer) + 1


def find_hook_points(explainer: Explainer, stream: str | None = None) -> list[HookPoint]:
    """Return the hook points of h^0 … h^L of a stream.

    Raises:
        UnsupportedError: An attention module is not inside a list of layers.
    """
    layer_of_module = explainer.adapter.session.topology.layer_of_module
    run_counts: Counter[int] = Counter()
    hook_points: list[HookPoint] = []
    stream_calls = set(find_self_attention_calls(explainer, stream))
    for i, call_site in enumerate(get_self_test(explainer).call_sites):
        block = layer_of_module.get(id(explainer.adapter.model.get_submodule(call_site.module)))
        if block is None:
            raise UnsupportedError(
                f"{call_site.module} of {explainer.adapter.name} is not inside a list of layers: its layer is unknown"
            )
        if i in stream_calls:
            if not hook_points:
                hook_points.append(HookPoint(block, run_counts[id(block)], is_input=True))
            hook_points.append(HookPoint(block, run_counts[id(block)]))
        if call_site.query_stream == call_site.key_stream:
            run_counts[id(block)] += 1
    return hook_points


@contextmanager
def hooked_layers(model: nn.Module, state_hooks: Mapping[HookPoint, StateHook]) -> Iterator[None]:
    """Inside the `with`, call each hook with the states at its hook point, in passes of this thread.

    Args:
        model: The model.
        state_hooks: Hook functions by hook point; a returned tensor replaces the states.
    """
    thread = threading.get_ident()
    run_counts = Counter[int]()
    blocks = {id(hook_point.block): hook_point.block for hook_point in state_hooks}

    def run_hooks(block: nn.Module, is_input: bool, states: HiddenStates) -> HiddenStates | None:
        call_index = run_counts[id(block)]
        if not is_input:  # the input hook has already counted this run
            call_index -= 1
        changed = None
        for hook_point, hook in state_hooks.items():
            if hook_point.block is block and hook_point.is_input == is_input and hook_point.call_index == call_index:
                changed = hook(states if changed is None else changed)
        return changed

    def reset_counts(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            run_counts.clear()

    def hook_input(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread:
            return None
        name = "hidden_states" if "hidden_states" in kwargs or not kwargs else next(iter(kwargs))
        changed = run_hooks(block, True, args[0] if args else kwargs[name])
        run_counts[id(block)] += 1
        if changed is None:
            return None
        if args:
            return (changed, *args[1:]), kwargs
        return args, {**kwargs, name: changed}

    def hook_output(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        if not isinstance(output, tuple):
            return run_hooks(block, False, output)
        changed = run_hooks(block, False, output[0])
        if changed is None:
            return None
        return (changed, *output[1:])

    handles = [model.register_forward_pre_hook(reset_counts)]
    for block in blocks.values():
        handles.append(block.register_forward_pre_hook(hook_input, with_kwargs=True))
        handles.append(block.register_forward_hook(hook_output))
    with remove_hooks_on_exit(handles):
        yield
