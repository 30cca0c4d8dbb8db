"""Inputs of the norms of each layer, which some authors' code reads and a tape does not hold."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from clearhead.capture.session import remove_hooks_on_exit
from clearhead.engine.passes.base import PassContext
from clearhead.errors import UnsupportedError
from clearhead.methods._path import NormInputs, PathMethod


@contextmanager
def captured_norm_inputs(context: PassContext, methods: Sequence[PathMethod]) -> Iterator[None]:
    """Inside the `with`, the next forward pass sets `norm_inputs` of these methods.

    Args:
        context: The batch, and how to run it.
        methods: The methods, one for each stream.
    """
    model = context.recorder.model
    layer_of_module = context.recorder.session.topology.layer_of_module
    thread_id = threading.get_ident()
    is_complete = False
    calls_by_layer: dict[int, list[tuple[nn.Module, Tensor]]] = {}

    def make_hook(layer: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def capture(norm: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread_id and args and not is_complete:
                calls_by_layer.setdefault(id(layer), []).append((norm, args[0].detach()))

        return capture

    def complete(*_: Any) -> None:  # layers that are recomputed in the backward pass are not captured again
        nonlocal is_complete
        is_complete = is_complete or threading.get_ident() == thread_id

    sites = [site for site in context.self_test.call_sites if site.query_stream == site.key_stream]
    attention_modules = {site.module: model.get_submodule(site.module) for site in sites}
    layers = {id(layer_of_module[id(module)]): layer_of_module[id(module)] for module in attention_modules.values()}
    handles = [model.register_forward_hook(complete)]
    for layer in layers.values():
        norms = [module for module in layer.modules() if type(module).__name__.endswith("Norm")]
        handles += [norm.register_forward_pre_hook(make_hook(layer)) for norm in norms]
    for method in methods:
        names = {site.layer: site.module for site in sites if site.query_stream == method.unit_context.stream}
        attention_by_layer = {layer: attention_modules[name] for layer, name in names.items()}
        calls = {
            layer: calls_by_layer.setdefault(id(layer_of_module[id(attention)]), [])
            for layer, attention in attention_by_layer.items()
        }
        method.norm_inputs = _NormInputsByLayer(names, attention_by_layer, calls, context.batch.targets_per_sample)
    with remove_hooks_on_exit(handles):
        yield


class _NormInputsByLayer(Mapping[int, NormInputs]):
    """The inputs of norms by layer, built when they are read: after the forward pass.

    Args:
        module_names: The name of the attention module of each layer.
        attention_by_layer: The attention module of each layer.
        calls_by_layer: The norms of each layer with their inputs, in the order of their calls.
        num_targets: Number of targets, for each of which the inputs are repeated.
    """

    def __init__(
        self,
        module_names: Mapping[int, str],
        attention_by_layer: Mapping[int, nn.Module],
        calls_by_layer: Mapping[int, list[tuple[nn.Module, Tensor]]],
        num_targets: int,
    ) -> None:
        self.module_names = module_names
        self.attention_by_layer = attention_by_layer
        self.calls_by_layer = calls_by_layer
        self.num_targets = num_targets

    def __len__(self) -> int:
        return len(self.attention_by_layer)

    def __iter__(self) -> Iterator[int]:
        return iter(self.attention_by_layer)

    def __getitem__(self, layer: int) -> NormInputs:
        attention = self.attention_by_layer[layer]
        calls = self.calls_by_layer[layer]
        if len(calls) < 2 or len({id(norm) for norm, _ in calls}) < len(calls):
            raise UnsupportedError(
                f"this setting needs the two norms of the layer of {self.module_names[layer]}, which were not found"
            )
        (norm, first_input), (_, second_input) = calls[:2]
        return NormInputs(
            first_input.repeat(self.num_targets, 1, 1),
            lambda: self._compute_values(attention, norm, second_input),
        )

    def _compute_values(self, attention: nn.Module, norm: nn.Module, norm_input: Tensor) -> Tensor:
        """The value vectors of a norm's output."""
        project: Any = getattr(attention, "v_proj", None) or getattr(attention, "value", None)
        if project is None:
            raise UnsupportedError(
                f"this setting needs a separate value projection, which {type(attention).__name__} does not have"
            )
        return project(norm(norm_input)).detach().repeat(self.num_targets, 1, 1)
