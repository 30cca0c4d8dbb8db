"""captum's own DeepLIFT, for the profile `captum`: its rules for activation modules, plain gradients of all else."""

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.capture.recorder import Recorder
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import UnsupportedError
from clearhead.machine_failures import is_machine_failure


class _TargetModule(nn.Module):
    """The target's value as a function of the vectors that the graph starts from, for twice as many rows as `plan`."""

    def __init__(self, recorder: Recorder, plan: TargetBatch) -> None:
        super().__init__()
        self.model = recorder.model
        self.recorder_ref, self.target_batch = [recorder], plan  # in a list: it is no part of this module
        self.leaves = [leaf for leaf in plan.leaves if leaf in plan.model_inputs]

    def forward(self, *vectors: Tensor) -> Tensor:
        given = dict(zip(self.leaves, vectors, strict=True))
        batch = dict(self.target_batch.model_inputs)
        looked_up = {leaf: part for leaf, part in given.items() if not batch[leaf].is_floating_point()}
        batch |= {leaf: part.to(batch[leaf]) for leaf, part in given.items() if leaf not in looked_up}
        with self.recorder_ref[0].scope(), _replaced_embeddings(self.recorder_ref[0], list(looked_up.values())):
            return self.target_batch.compute_target(self.model(**batch))


@contextmanager
def _replaced_embeddings(recorder: Recorder, vectors: list[Tensor]) -> Iterator[None]:
    thread, waiting = threading.get_ident(), list(vectors)

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return waiting.pop(0).to(output).clone() if waiting and threading.get_ident() == thread else output

    with remove_hooks_on_exit(
        [module.register_forward_hook(start) for module in (recorder.get_embedding_modules() if vectors else ())]
    ):
        yield


def compute_captum_multipliers(
    recorder: Recorder, batch: TargetBatch, inputs: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What captum multiplies x − x′ with, for each target (one after the other)."""
    from captum.attr import DeepLift

    subject = batch.adapter
    found: list[tuple[Tensor, ...]] = []
    values: list[Tensor] = []
    with recorder.session.running(with_gradients=True):
        for step in range(batch.targets_per_sample):
            targets = [[batch.targets[step * batch.num_samples + i]] for i in range(batch.num_samples)]
            function = _TargetModule(recorder, TargetBatch(subject, batch.source_samples * 2, targets * 2, batch.seed))
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
                raise UnsupportedError(f"captum's DeepLIFT cannot explain {subject.name}: {said}") from None
            finally:
                _remove_captum_attributes(function)
            found.append(tuple(part.detach() for part in multipliers))
            values.append(function.target_batch.target_values[batch.num_samples :])
    batch.target_values = torch.cat(values)
    batch.cpu_target_values = batch.target_values.tolist()
    return {leaf: torch.cat([parts[i] for parts in found]) for i, leaf in enumerate(function.leaves)}


def _remove_captum_attributes(function: nn.Module) -> None:
    """captum leaves what it remembers on the modules where it fails."""
    for module in function.modules():
        for name in ("input", "output"):
            if isinstance(module.__dict__.get(name), Tensor):
                delattr(module, name)
