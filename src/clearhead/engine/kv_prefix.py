"""Masked inputs of a decoder: the tokens before the first masked one run once for all inputs.

A causal model computes the keys and values of a token from that token and those before it, so inputs that begin alike
share them. Masked inputs are sorted by the first position at which they differ from the input itself; its keys and
values up to there are cached, and only the rest of each runs through the model.

This is exact where the cache keeps every key (windows are then applied by masks). Models whose cache keeps something
else, such as recurrent states, and those whose outputs differ in a trial, run without a cache.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from clearhead.adapters.decoder import CausalLMAdapter
from clearhead.capture.checks.self_test import RELATIVE_TOLERANCE_BY_DTYPE
from clearhead.engine.memory_budget import limit_rows
from clearhead.engine.target_batch import TargetBatch
from clearhead.sample import Sample
from clearhead.targets import Target

if TYPE_CHECKING:
    from clearhead.engine.capabilities import ModelCapabilities


class KVPrefix:
    """One input of a decoder, with the keys and values of its first tokens.

    Args:
        capabilities: What is known about the model.
        sample: The input.
        targets: The targets of the input and of its masked copies.
    """

    def __init__(self, capabilities: "ModelCapabilities", sample: Sample, targets: Sequence[Target]) -> None:
        adapter = capabilities.adapter
        self.capabilities = capabilities
        self.adapter = adapter
        self.sample = sample
        self.targets = list(targets)
        self.cache = DynamicCache()
        self.cached_length = 0
        has_class_targets = all(target.function is None for target in targets)
        accepts_cache = adapter.forward_accepts("logits_to_keep") and adapter.forward_accepts("past_key_values")
        is_plain_text = (
            isinstance(adapter, CausalLMAdapter)
            and not adapter.positions_depend_on_batch_length
            and set(sample.inputs) == {"input_ids"}
            and bool(getattr(sample, "logit_rows", ()))
        )
        # compiled passes have one length
        self.is_supported = is_plain_text and accepts_cache and has_class_targets and not adapter.is_compiled

    @property
    def is_enabled(self) -> bool:
        """Whether common tokens run once; no longer after the model's cache was inexact for any input."""
        return self.is_supported and self.capabilities.has_exact_kv_cache is not False

    def find_common_length(self, masked: Sample) -> int:
        """Return how many first tokens of a masked input equal those of the input, and are not read out."""
        if set(masked.inputs) != {"input_ids"} or not getattr(masked, "logit_rows", ()):
            return 0
        input_ids = self.sample.inputs["input_ids"]
        masked_ids = masked.inputs["input_ids"]
        length = min(len(input_ids), len(masked_ids))
        common_length = int((input_ids[:length] == masked_ids[:length]).int().cumprod(0).sum())
        return min(common_length, len(masked_ids) - 1, *masked.logit_rows)  # type: ignore[attr-defined]

    def compute_values(self, samples: Sequence[Sample], start: int) -> Float[Tensor, "input target"]:
        """Return the values of masked inputs that share the tokens before `start` with the input."""
        batch = TargetBatch(self.adapter, samples, [self.targets] * len(samples))
        if start and self.capabilities.has_exact_kv_cache is None:
            self.capabilities.has_exact_kv_cache = self._is_cache_exact(batch, start)
        if start and self.is_enabled:
            return batch.compute_values_by_sample(self._forward_suffix(batch, start))
        return batch.compute_values_by_sample(self.adapter.session.forward(batch.model_inputs))

    def _is_cache_exact(self, batch: TargetBatch, start: int) -> bool:
        """Whether the model takes a cache, keeps every key in it, and computes the same values with it."""
        try:
            values = batch.compute_values_by_sample(self._forward_suffix(batch, start))
        except (AttributeError, TypeError, ValueError, LookupError):  # the model has a kind of cache of its own
            return False
        layers = self.cache.layers
        if not layers or any(
            type(layer) is not DynamicLayer or layer.get_seq_length() != self.cached_length for layer in layers
        ):
            return False
        expected = batch.compute_values_by_sample(self.adapter.session.forward(batch.model_inputs))
        gap = float((values - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
        return gap <= RELATIVE_TOLERANCE_BY_DTYPE.get(self.adapter.dtype, 1e-4)

    def _forward_suffix(self, batch: TargetBatch, start: int) -> Any:
        """Run the model on the tokens after the common ones."""
        self._extend_cache(start)
        inputs = dict(batch.model_inputs)
        inputs["input_ids"] = inputs["input_ids"][:, start:]
        inputs["logits_to_keep"] = inputs["logits_to_keep"] - start
        cache = self._repeat_cache(batch.num_samples, start)
        return self.adapter.session.forward({**inputs, "past_key_values": cache, "use_cache": True})

    def _extend_cache(self, length: int) -> None:
        """Compute keys and values up to a length; each token runs through the model once."""
        if length <= self.cached_length:
            return
        ids = self.sample.inputs["input_ids"][None, self.cached_length : length].to(self.adapter.device)
        cache_arguments = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        self.adapter.session.forward({"input_ids": ids, **cache_arguments})
        self.cached_length = length

    def _repeat_cache(self, count: int, length: int) -> DynamicCache:
        """Repeat the first keys and values for each of several inputs."""
        repeated = DynamicCache()
        layers: list[Any] = self.cache.layers
        for i, layer in enumerate(layers):
            keys, values = (tensor[:, :, :length].expand(count, -1, -1, -1) for tensor in (layer.keys, layer.values))
            repeated.update(keys, values, i)
        return repeated


def iter_prefix_chunks(
    starts: Sequence[int], lengths: Sequence[int], max_inputs: int, max_units: int
) -> Iterator[tuple[list[int], int]]:
    """Iterate over batches of masked inputs, those that differ last first, with their number of common tokens.

    >>> list(iter_prefix_chunks([0, 9, 8, 2], [10, 10, 10, 10], 8, 1000))
    [([1, 2], 8), ([3], 2), ([0], 0)]
    """
    chunk: list[int] = []
    for i in sorted(range(len(starts)), key=lambda i: -starts[i]):
        has_room = len(chunk) < limit_rows(max_inputs, remeasure=True)
        num_units = (len(chunk) + 1) * (max(lengths[j] for j in (*chunk, i)) - starts[i])
        # starting much earlier for one input would cost more for all of them than another pass
        is_near = not chunk or 2 * starts[i] >= starts[chunk[0]]
        if chunk and not (has_room and num_units <= max_units and is_near):
            yield chunk, starts[chunk[-1]]
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk, starts[chunk[-1]]
