"""Inputs of the norms of each layer, which some authors' code reads and a tape does not hold."""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from clearhead.capture.session import remove_hooks_on_exit
from clearhead.engine.passes.base import PassContext
from clearhead.errors import UnsupportedError
from clearhead.methods._path import NormInputs


def capture_norm_inputs(context: PassContext) -> dict[tuple[str, int], NormInputs]:
    """Capture the inputs of norms in one forward pass.

    Returns:
        The inputs by stream and layer.

    Raises:
        UnsupportedError: A layer does not have the two norms.
    """
    recorder = context.recorder
    batch = context.batch
    layer_of_module = recorder.session.topology.layer_of_module
    thread_id = threading.get_ident()
    calls_by_layer: dict[int, list[tuple[nn.Module, Tensor]]] = {}
    handles = []

    def make_hook(layer: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def capture(norm: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread_id and args:
                calls_by_layer.setdefault(id(layer), []).append((norm, args[0].detach()))

        return capture

    sites = [site for site in context.self_test.call_sites if site.query_stream == site.key_stream]
    attention_modules = {site.module: recorder.model.get_submodule(site.module) for site in sites}
    layers = {id(layer_of_module[id(module)]): layer_of_module[id(module)] for module in attention_modules.values()}
    for layer in layers.values():
        norms = [module for module in layer.modules() if type(module).__name__.endswith("Norm")]
        handles += [norm.register_forward_pre_hook(make_hook(layer)) for norm in norms]
    with remove_hooks_on_exit(handles):
        recorder.run(batch.model_inputs, batch.compute_target, (), leaves=batch.leaves)
    norm_inputs = {}
    for site in sites:
        attention = attention_modules[site.module]
        calls = calls_by_layer.get(id(layer_of_module[id(attention)]), [])
        if len(calls) < 2 or len({id(norm) for norm, _ in calls}) < len(calls):
            raise UnsupportedError(
                f"this setting needs the two norms of the layer of {site.module}, which were not found"
            )
        norm_inputs[site.query_stream, site.layer] = _build_norm_inputs(attention, calls, batch.targets_per_sample)
    return norm_inputs


def _build_norm_inputs(attention: nn.Module, calls: list[tuple[nn.Module, Tensor]], steps: int) -> NormInputs:
    """Repeat the inputs of one layer for each target."""
    (norm, first_input), (_, second_input) = calls[:2]

    def compute_values_after_attention() -> Tensor:
        project: Any = getattr(attention, "v_proj", None) or getattr(attention, "value", None)
        if project is None:
            raise UnsupportedError(
                f"this setting needs a separate value projection, which {type(attention).__name__} does not have"
            )
        return project(norm(second_input)).detach().repeat(steps, 1, 1)

    return NormInputs(first_input.repeat(steps, 1, 1), compute_values_after_attention)
