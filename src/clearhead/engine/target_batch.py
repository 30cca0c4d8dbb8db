"""`TargetBatch`: the inputs of one batch with their targets, and what methods need to know about its units."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import ModelAdapter
from clearhead.capture.recorder import HeadRows
from clearhead.capture.tape import Tape
from clearhead.errors import InputError
from clearhead.methods.base import UnitContext
from clearhead.sample import Sample
from clearhead.targets import Target, compute_class_target_values

#: Content of at least this size is hashed in threads.
MIN_THREADED_HASH_BYTES = 2**22
#: Largest number of threads that hash content.
MAX_HASH_THREADS = 8


@dataclass(frozen=True)
class TargetValues:
    """Values of the targets of one pass. The batch is target × sample, the first target of all samples first.

    Attributes:
        values: The value of each target.
        class_scores: The scores of the classes from which the values are computed; None if the model has none.
        cpu_values: `values` on the CPU; empty if they were not copied.
        cpu_class_scores: `class_scores` on the CPU, likewise.
    """

    values: Float[Tensor, " batch"]
    class_scores: Float[Tensor, "batch label"] | None
    cpu_values: list[float] = field(default_factory=list)
    cpu_class_scores: Float[Tensor, "batch label"] | None = None


@dataclass(frozen=True, eq=False)
class TargetBatch:
    """One batch with its targets, equally many for each sample.

    With several targets, all per-sample quantities have target × sample as their batch, the first target of all samples
    first.

    Attributes:
        adapter: The adapter of the model.
        samples: The samples.
        targets_by_sample: The targets of each sample.
        seed: Seed of methods that draw random numbers.
    """

    adapter: ModelAdapter
    samples: Sequence[Sample]
    targets_by_sample: Sequence[Sequence[Target]]
    seed: int = 0

    @property
    def num_samples(self) -> int:
        """Number of samples, each counted once."""
        return len(self.samples)

    @property
    def targets_per_sample(self) -> int:
        """Number of targets of each sample."""
        return len(self.targets_by_sample[0])

    @property
    def num_rows(self) -> int:
        """Number of samples × targets."""
        return self.num_samples * self.targets_per_sample

    @property
    def max_units(self) -> int:
        """Number of units of the longest sample, over all its streams."""
        return max(sum(map(len, sample.axes.values())) for sample in self.samples)

    @cached_property
    def targets(self) -> list[Target]:
        """The target of each row: the first target of all samples, then the second, and so on."""
        return [targets[step] for step in range(self.targets_per_sample) for targets in self.targets_by_sample]

    @cached_property
    def repeated_samples(self) -> list[Sample]:
        """The sample of each row, in full length."""
        return [*self.samples] * self.targets_per_sample

    @cached_property
    def truncated_samples(self) -> list[Sample]:
        """The sample of each row, without the units after those that its target depends on."""
        pairs = zip(self.repeated_samples, self.targets, strict=True)
        return [self.adapter.truncate_to_targets(sample, [target]) for sample, target in pairs]

    @cached_property
    def model_inputs(self) -> Mapping[str, Any]:
        """Keyword arguments of the model."""
        return self.adapter.collate(self.samples)

    @cached_property
    def leaves(self) -> Sequence[str]:
        """The inputs that input gradients are taken of."""
        return self.adapter.find_grad_input_names(self.model_inputs)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which methods compute."""
        return torch.float64 if self.adapter.dtype == torch.float64 else torch.float32

    @cached_property
    def dtype_and_device(self) -> dict[str, str]:
        """The model's dtype and device, for the certificate."""
        return {"dtype": str(self.adapter.dtype).removeprefix("torch."), "device": str(self.adapter.device)}

    @cached_property
    def readout_weights(self) -> "dict[str, Float[Tensor, 'batch 1 unit']]":
        """Weights of the read-out rows of each stream."""
        weights = {
            stream: np.zeros(
                (len(self.truncated_samples), 1, max(len(sample.axes[stream]) for sample in self.truncated_samples))
            )
            for stream in self.truncated_samples[0].axes
        }
        for i, (sample, target) in enumerate(zip(self.truncated_samples, self.targets, strict=True)):
            for stream, rows in self.adapter.find_readouts(sample, target).items():
                weights[stream][i, 0, list(rows)] = list(rows.values())
        assert all((array >= 0).all() for array in weights.values()), "kernels rely on it"
        return {
            stream: torch.from_numpy(array).to(self.compute_dtype).to(self.adapter.device)
            for stream, array in weights.items()
        }

    @cached_property
    def unit_contexts(self) -> dict[str, UnitContext]:
        """The units of each stream, as all methods of this batch see them."""
        return {stream: self._build_unit_context(stream) for stream in self.truncated_samples[0].axes}

    def _build_unit_context(self, stream: str) -> UnitContext:
        readout = self.readout_weights[stream]
        axes = tuple(sample.axes[stream] for sample in self.truncated_samples)
        lengths = torch.tensor([len(axis) for axis in axes])
        valid_mask = torch.arange(readout.shape[2]) < lengths[:, None]
        return UnitContext(
            readout,
            valid_mask.to(readout.device),
            ContentSeeds(self),
            axes,
            stream=stream,
            model_dtype=self.adapter.dtype,
        )

    @property
    def head_rows(self) -> HeadRows | None:
        """The row of the model's head that each of several targets comes from, if the adapter can tell."""
        if self.targets_per_sample == 1:
            return None
        head_and_rows = self.adapter.find_head_rows(self.repeated_samples, self.targets)
        if head_and_rows is None:
            return None
        head, rows = head_and_rows
        return HeadRows(head, torch.tensor(rows).unflatten(0, (self.targets_per_sample, self.num_samples)))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """One seed per row, derived from its content."""
        return tuple(derive_seed() for derive_seed in self._pending_seeds)

    def start_deriving_seeds(self) -> None:
        """Hash large content in threads from now on, so that it is done while a GPU computes."""
        _ = self._pending_seeds

    @cached_property
    def _pending_seeds(self) -> list[Callable[[], int]]:
        """A function per row that returns its seed, and waits for the thread that derives it, if there is one."""
        return _submit_seeds(self.truncated_samples, self.seed)

    @cached_property
    def fingerprints(self) -> list[str]:
        """A hash of the content of each row."""
        content_seeds = self.seeds
        if self.seed != 0:
            content_seeds = tuple(derive_seed() for derive_seed in _submit_seeds(self.truncated_samples, 0))
        return [f"{seed:014x}" for seed in content_seeds]

    def compute_target(self, output: Any) -> Float[Tensor, "*target batch"]:
        """Return the value of each target, in the graph of the output; `TargetFunction` keeps the values, too.

        Args:
            output: The model's output.

        Returns:
            The values; without the axis of targets if each sample has one.
        """
        return self.split_targets(self.compute_values(output)[0])

    def split_targets(self, values: Float[Tensor, " batch"]) -> Float[Tensor, "*target batch"]:
        """Give values an axis of targets, if there are several.

        Args:
            values: One value per row; all samples of the first target come first.

        Returns:
            A view.
        """
        if self.targets_per_sample == 1:
            return values
        return values.unflatten(0, (self.targets_per_sample, self.num_samples))

    def compute_values_by_sample(self, output: Any) -> Float[Tensor, "sample target"]:
        """Return the values of the targets of each sample in float64, without a graph, on the CPU.

        Args:
            output: The model's output.

        Returns:
            A contiguous copy.
        """
        values = self.compute_values(output)[0].detach().double().cpu()
        return values.reshape(self.targets_per_sample, self.num_samples).mT.clone()

    def compute_values(
        self, output: Any, scoring_context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch label"] | None]:
        """Compute the values of the targets and the class scores, in the graph of the output.

        Args:
            output: The model's output.
            scoring_context: Makes the context for adapters that multiply tensors of the output to get class scores.

        Returns:
            The value of each row, and the class scores; None for a model without logits whose targets are functions.

        Raises:
            InputError: A function of the caller returned no value per sample, or the model has no such scale.
        """
        functions = {id(target.function): target.function for target in self.targets if target.function is not None}
        visible_output = self.cast_down(output) if functions else output
        computed = {
            key: _call_target_function(function, visible_output, self.num_samples)
            for key, function in functions.items()
        }
        class_scores = None
        has_class_targets = any(target.function is None for target in self.targets)
        if has_class_targets or getattr(output, "logits", None) is not None:
            with scoring_context() if self.adapter.score_is_product else nullcontext():
                class_scores = self.adapter.compute_class_scores(output, self.repeated_samples, self.targets)
        return self._combine_values(computed, class_scores), class_scores

    def _combine_values(self, computed: Mapping[int, Tensor], class_scores: Tensor | None) -> Float[Tensor, " batch"]:
        """The value of each row: from the caller's functions, and from class scores, scale by scale."""
        rows_by_scale: dict[str | None, list[int]] = {}
        for i, target in enumerate(self.targets):
            rows_by_scale.setdefault(None if target.function is not None else target.scale, []).append(i)
        values = [
            torch.stack([computed[id(self.targets[i].function)][i % self.num_samples] for i in rows])
            if scale is None
            else self._compute_class_values(class_scores, scale, rows)
            for scale, rows in rows_by_scale.items()
        ]
        if len(values) == 1:
            return values[0]
        order = torch.tensor([i for rows in rows_by_scale.values() for i in rows]).argsort()
        return torch.cat(values)[order.to(values[0].device)]

    def _compute_class_values(
        self, class_scores: Tensor | None, scale: str, rows: Sequence[int]
    ) -> Float[Tensor, " row"]:
        """The values of these rows. Their classes are found on the CPU: a look there does not wait for a GPU."""
        if self.adapter.is_regression and scale in ("probability", "log-odds"):
            raise InputError(
                f"the model is a regression model without classes, so it has no {scale}: use scale='logit'"
            )
        assert class_scores is not None
        if any(type(self.targets[i]).compute_value is not Target.compute_value for i in rows):
            # unbound: the gradient of a row taken by its index would be a whole tensor of zeros
            scores_by_row = class_scores.unbind()
            return torch.stack([self.targets[i].compute_value(scores_by_row[i], self.adapter) for i in rows])
        cpu_scores = class_scores.detach().cpu()
        classes = [self.targets[i].find_classes(cpu_scores[i], self.adapter) for i in rows]
        selected = class_scores if len(rows) == len(class_scores) else class_scores[list(rows)]
        return compute_class_target_values(selected, classes, scale, self.adapter.multi_label)

    def cast_down(self, output: Any) -> Any:
        """Cast the float64 tensors of a pass in float64 to the dtype in which methods compute.

        Args:
            output: A tensor, or a mapping or tuple of them, nested at will.

        Returns:
            The same structure; tensors of other dtypes are the same objects.
        """
        if isinstance(output, Tensor):
            return output.to(self.compute_dtype) if output.dtype == torch.float64 else output
        if isinstance(output, Mapping):
            return type(output)(**{name: self.cast_down(value) for name, value in output.items()})
        return tuple(map(self.cast_down, output)) if type(output) is tuple else output

    def to_unit_vectors(self, tape: Tape) -> Tape:
        """Turn embeddings, pixels and other inputs on a tape into one vector per unit.

        Args:
            tape: The tape of a pass; changed in place.

        Returns:
            The same tape.
        """
        for name in tape.STREAM_FIELDS:
            vectors = getattr(tape, name)
            if vectors is not None:
                vectors = self.adapter.to_unit_vectors(vectors, self.truncated_samples)
            setattr(tape, name, vectors)
        tape.truncated_tokens = tuple(sample.num_truncated for sample in self.truncated_samples)
        return tape


class ContentSeeds(Sequence[int]):
    """The seeds of a batch, derived when they are first read: few methods are random, and hashing images takes long.

    Args:
        batch: The batch.
    """

    def __init__(self, batch: TargetBatch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        """Return the number of rows, samples × targets, without hashing anything."""
        return self.batch.num_rows

    def __getitem__(self, row: Any) -> Any:
        """Return the seed of a row, or the seeds of a slice of rows; the first call hashes all inputs."""
        return self.batch.seeds[row]


def _submit_seeds(samples: Sequence[Sample], seed: int) -> list[Callable[[], int]]:
    """Return a function per sample that returns its seed; derived in threads if there is much to hash.

    Hashing releases Python's global lock, so it does not hold up the thread that launches kernels.
    """
    num_bytes = sum(tensor.nbytes for sample in samples for tensor in sample.inputs.values())
    if num_bytes < MIN_THREADED_HASH_BYTES:
        return [partial(sample.derive_seed, seed) for sample in samples]
    executor = _make_hash_threads(os.getpid())
    return [executor.submit(sample.derive_seed, seed).result for sample in samples]


@cache
def _make_hash_threads(process: int) -> ThreadPoolExecutor:
    """The threads that hash content; they are started once, which takes longer than to hash an image.

    `process` is part of the cache key, because a forked process has none of its parent's threads.
    """
    return ThreadPoolExecutor(MAX_HASH_THREADS, "clearhead-hash")


class TargetFunction:
    """The target of one pass as the recorder calls it; keeps the values of the last call.

    Args:
        batch: The batch.
        scoring_context: See `TargetBatch.compute_values`.
        before_backward: Receives the values (target × sample) and the tensor that they are computed from, before the
            backward pass.
        copies_to_cpu: Whether values are copied to the CPU, before a backward pass keeps the GPU busy.

    Attributes:
        result: The values, without a graph.
    """

    def __init__(
        self,
        batch: TargetBatch,
        scoring_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        before_backward: Callable[[Tensor, Tensor], None] | None = None,
        copies_to_cpu: bool = True,
    ) -> None:
        self.batch = batch
        self.scoring_context = scoring_context
        self.before_backward = before_backward
        self.copies_to_cpu = copies_to_cpu
        self.result: TargetValues

    def __call__(self, output: Any) -> Float[Tensor, "*target batch"]:
        """Compute the values of the targets from the model's output."""
        batch = self.batch
        values, class_scores = batch.compute_values(output, self.scoring_context)
        source = class_scores if getattr(output, "logits", None) is None else output.logits
        if self.before_backward is not None and source is not None:
            self.before_backward(values.unflatten(0, (batch.targets_per_sample, batch.num_samples)), source)
        detached_values = batch.cast_down(values.detach())
        detached_scores = None if class_scores is None else batch.cast_down(class_scores.detach())
        self.result = TargetValues(detached_values, detached_scores)
        if self.copies_to_cpu:
            cpu_scores = None if detached_scores is None else detached_scores.cpu()
            self.result = TargetValues(detached_values, detached_scores, detached_values.tolist(), cpu_scores)
        return batch.split_targets(values)


def _call_target_function(function: Callable[[Any], Tensor], output: Any, count: int) -> Float[Tensor, "batch"]:
    """Call a target function of the caller, and check that it returns one value per sample."""
    value = function(output)
    if not isinstance(value, Tensor) or value.shape != (count,):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the target function must return one number per sample, ({count},), but returned {shape}")
    return value
