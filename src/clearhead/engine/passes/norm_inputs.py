"""What goes into the norms of each layer: where some authors' code reads vectors that a tape does not hold."""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.layers import blocks_of
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import hooks
from clearhead.engine.target_batch import Plan
from clearhead.errors import Refusal
from clearhead.methods._path import Normed


def normed(recorder: Recorder, plan: Plan, tested: SelfTest) -> dict[tuple[str, int], Normed]:
    """By stream and layer, from one pass of its own."""
    blocks, thread = blocks_of(recorder.model), threading.get_ident()
    heard: dict[int, list[tuple[nn.Module, Tensor]]] = {}
    handles = []

    def listen(block: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hear(norm: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread and args:
                heard.setdefault(id(block), []).append((norm, args[0].detach()))

        return hear

    places = [place for place in tested.places if place.query_stream == place.key_stream]
    attentions = {place.module: recorder.model.get_submodule(place.module) for place in places}
    for block in {id(blocks[id(module)]): blocks[id(module)] for module in attentions.values()}.values():
        norms = [module for module in block.modules() if type(module).__name__.endswith("Norm")]
        handles += [norm.register_forward_pre_hook(listen(block)) for norm in norms]
    with hooks(handles):
        recorder.run(plan.batch, plan.value, (), leaves=plan.leaves)
    found = {}
    for place in places:
        attention = attentions[place.module]
        runs = heard.get(id(blocks[id(attention)]), [])
        if len(runs) < 2 or len({id(norm) for norm, _ in runs}) < len(runs):
            raise Refusal(f"the two norms of the layer of {place.module} were not found, which this setting reads")
        found[place.query_stream, place.layer] = _of(attention, runs, plan.steps)
    return found


def _of(attention: nn.Module, runs: list[tuple[nn.Module, Tensor]], steps: int) -> Normed:
    (norm, first), (_, second) = runs[:2]

    def late_values() -> Tensor:
        project: Any = getattr(attention, "v_proj", None) or getattr(attention, "value", None)
        if project is None:
            raise Refusal(f"{type(attention).__name__} has no projection of its values alone, which this setting reads")
        return project(norm(second)).detach().repeat(steps, 1, 1)

    return Normed(first.repeat(steps, 1, 1), late_values)
