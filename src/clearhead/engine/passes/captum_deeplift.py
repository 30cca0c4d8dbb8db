"""captum's DeepLIFT, for the profile `captum`: rules for activation modules, ordinary gradients of everything else."""

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.capture.recorder import Recorder
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.engine.target_batch import TargetBatch, TargetFunction
from clearhead.errors import UnsupportedError
from clearhead.machine_failures import is_machine_failure


class _TargetModule(nn.Module):
    """The value of the target as a function of the vectors that the graph starts from.

    Args:
        recorder: The recorder of the model.
        batch: The batch, twice: captum runs inputs and references together.
    """

    def __init__(self, recorder: Recorder, batch: TargetBatch) -> None:
        super().__init__()
        self.model = recorder.model
        self.recorder = recorder
        self.target_batch = batch
        self.target_function = TargetFunction(batch)
        self.leaves = [leaf for leaf in batch.leaves if leaf in batch.model_inputs]

    def forward(self, *vectors: Tensor) -> Tensor:
        vectors_by_leaf = dict(zip(self.leaves, vectors, strict=True))
        model_inputs = dict(self.target_batch.model_inputs)
        embeddings = [vector for leaf, vector in vectors_by_leaf.items() if not model_inputs[leaf].is_floating_point()]
        for leaf, vector in vectors_by_leaf.items():
            if model_inputs[leaf].is_floating_point():
                model_inputs[leaf] = vector.to(model_inputs[leaf])
        with self.recorder.scope(), _replaced_embeddings(self.recorder, embeddings):
            return self.target_function(self.model(**model_inputs))


@contextmanager
def _replaced_embeddings(recorder: Recorder, vectors: list[Tensor]) -> Iterator[None]:
    """Inside the `with`, look-ups of tokens in this thread return these vectors, in order."""
    thread_id = threading.get_ident()
    remaining = list(vectors)

    def replace_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not remaining or threading.get_ident() != thread_id:
            return output
        return remaining.pop(0).to(output).clone()

    modules = recorder.get_embedding_modules() if vectors else ()
    with remove_hooks_on_exit([module.register_forward_hook(replace_output) for module in modules]):
        yield


def compute_captum_multipliers(
    recorder: Recorder, batch: TargetBatch, inputs: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Float[Tensor, " batch"]]:
    """Return captum's multipliers of x − x′ for each target, one target after the other, and the values at x′."""
    from captum.attr import DeepLift

    adapter = batch.adapter
    multipliers: list[tuple[Tensor, ...]] = []
    reference_values: list[Tensor] = []
    with recorder.session.running(with_gradients=True):
        for step in range(batch.targets_per_sample):
            targets = [[sample_targets[step]] for sample_targets in batch.targets_by_sample]
            doubled_batch = replace(batch, samples=[*batch.samples] * 2, targets_by_sample=targets * 2)
            module = _TargetModule(recorder, doubled_batch)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about its hooks, which it removes afterwards
                    step_multipliers = DeepLift(module, multiply_by_inputs=False).attribute(
                        tuple(inputs[leaf].detach() for leaf in module.leaves),
                        tuple(reference[leaf].detach() for leaf in module.leaves),
                    )
            except (RuntimeError, AssertionError) as error:
                if isinstance(error, RuntimeError) and is_machine_failure(error):
                    raise
                message = str(error).splitlines()[0]
                raise UnsupportedError(f"captum's DeepLIFT cannot explain {adapter.name}: {message}") from None
            finally:
                _remove_captum_attributes(module)
            multipliers.append(tuple(tensor.detach() for tensor in step_multipliers))
            reference_values.append(module.target_function.result.values[batch.num_samples :])
    by_leaf = {leaf: torch.cat([step[i] for step in multipliers]) for i, leaf in enumerate(module.leaves)}
    return by_leaf, torch.cat(reference_values)


def _remove_captum_attributes(function: nn.Module) -> None:
    """Remove tensors that captum leaves on modules when it fails."""
    for module in function.modules():
        for name in ("input", "output"):
            if isinstance(module.__dict__.get(name), Tensor):
                delattr(module, name)
