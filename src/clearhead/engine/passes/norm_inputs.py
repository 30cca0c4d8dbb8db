"""What goes into the norms of each layer: where some authors' code reads vectors that a tape does not hold."""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import UnsupportedError
from clearhead.methods._path import NormInputs


def capture_norm_inputs(
    recorder: Recorder, batch: TargetBatch, self_test: SelfTest
) -> dict[tuple[str, int], NormInputs]:
    """By stream and layer, from one pass of its own."""
    blocks, thread = recorder.session.topology.layer_of_module, threading.get_ident()
    heard: dict[int, list[tuple[nn.Module, Tensor]]] = {}
    handles = []

    def listen(block: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hear(norm: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread and args:
                heard.setdefault(id(block), []).append((norm, args[0].detach()))

        return hear

    places = [place for place in self_test.call_sites if place.query_stream == place.key_stream]
    attentions = {place.module: recorder.model.get_submodule(place.module) for place in places}
    for block in {id(blocks[id(module)]): blocks[id(module)] for module in attentions.values()}.values():
        norms = [module for module in block.modules() if type(module).__name__.endswith("Norm")]
        handles += [norm.register_forward_pre_hook(listen(block)) for norm in norms]
    with remove_hooks_on_exit(handles):
        recorder.run(batch.model_inputs, batch.compute_target, (), leaves=batch.leaves)
    found = {}
    for place in places:
        attention = attentions[place.module]
        runs = heard.get(id(blocks[id(attention)]), [])
        if len(runs) < 2 or len({id(norm) for norm, _ in runs}) < len(runs):
            raise UnsupportedError(
                f"this setting needs the two norms of the layer of {place.module}, which were not found"
            )
        found[place.query_stream, place.layer] = _build_norm_inputs(attention, runs, batch.targets_per_sample)
    return found


def _build_norm_inputs(attention: nn.Module, runs: list[tuple[nn.Module, Tensor]], steps: int) -> NormInputs:
    (norm, first), (_, second) = runs[:2]

    def late_values() -> Tensor:
        project: Any = getattr(attention, "v_proj", None) or getattr(attention, "value", None)
        if project is None:
            raise UnsupportedError(
                f"this setting needs a separate value projection, which {type(attention).__name__} does not have"
            )
        return project(norm(second)).detach().repeat(steps, 1, 1)

    return NormInputs(first.repeat(steps, 1, 1), late_values)
