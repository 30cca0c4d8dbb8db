"""captum's own DeepLIFT, for the profile `captum`: its rules for activation modules, plain gradients of all else."""

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.capture.recorder import Recorder
from clearhead.capture.session import at_rest, hooks
from clearhead.engine.target_batch import Plan
from clearhead.errors import Refusal
from clearhead.machine_failures import is_machine_failure


class _OfVectors(nn.Module):
    """The target's value as a function of the vectors that the graph starts from, for twice as many rows as `plan`."""

    def __init__(self, recorder: Recorder, plan: Plan) -> None:
        super().__init__()
        self.model = recorder.model
        self.recorder, self.plan = [recorder], plan  # in a list: it is no part of this module
        self.leaves = [leaf for leaf in plan.leaves if leaf in plan.batch]

    def forward(self, *vectors: Tensor) -> Tensor:
        given = dict(zip(self.leaves, vectors, strict=True))
        batch = dict(self.plan.batch)
        looked_up = {leaf: part for leaf, part in given.items() if not batch[leaf].is_floating_point()}
        batch |= {leaf: part.to(batch[leaf]) for leaf, part in given.items() if leaf not in looked_up}
        with self.recorder[0].scope(), _in_place_of_words(self.recorder[0], list(looked_up.values())):
            return self.plan.value(self.model(**batch))


@contextmanager
def _in_place_of_words(recorder: Recorder, vectors: list[Tensor]) -> Iterator[None]:
    thread, waiting = threading.get_ident(), list(vectors)

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return waiting.pop(0).to(output).clone() if waiting and threading.get_ident() == thread else output

    with hooks([module.register_forward_hook(start) for module in (recorder.lookups() if vectors else ())]):
        yield


def captum_multipliers(
    recorder: Recorder, plan: Plan, inputs: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What captum multiplies x − x′ with, for each target (one after the other)."""
    from captum.attr import DeepLift

    subject = plan.subject
    found: list[tuple[Tensor, ...]] = []
    values: list[Tensor] = []
    with recorder.lock, at_rest(recorder.model), torch.inference_mode(False), torch.enable_grad():
        for step in range(plan.steps):
            targets = [[plan.targets[step * plan.size + i]] for i in range(plan.size)]
            function = _OfVectors(recorder, Plan(subject, plan.given * 2, targets * 2, plan.seed))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that it sets hooks, and removes them afterwards
                    multipliers = DeepLift(function, multiply_by_inputs=False).attribute(
                        tuple(inputs[leaf].detach() for leaf in function.leaves),
                        tuple(reference[leaf].detach() for leaf in function.leaves),
                    )
            except (RuntimeError, AssertionError) as problem:
                if isinstance(problem, RuntimeError) and is_machine_failure(problem):
                    raise
                said = str(problem).splitlines()[0]
                raise Refusal(f"captum's DeepLIFT cannot explain {subject.name}: {said}") from None
            finally:
                _clean(function)
            found.append(tuple(part.detach() for part in multipliers))
            values.append(function.plan.values[plan.size :])
    plan.values = torch.cat(values)
    plan.numbers = plan.values.tolist()
    return {leaf: torch.cat([parts[i] for parts in found]) for i, leaf in enumerate(function.leaves)}


def _clean(function: nn.Module) -> None:
    """captum leaves what it remembers on the modules where it fails."""
    for module in function.modules():
        for name in ("input", "output"):
            if isinstance(module.__dict__.get(name), Tensor):
                delattr(module, name)
