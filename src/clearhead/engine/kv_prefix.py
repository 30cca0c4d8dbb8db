"""What a decoder is worth without some units, when what comes before the first of them is run once for all.

A causal model computes the keys and values of a word from that word and those before it: inputs that begin alike have
them in common. Altered inputs are sorted by the first place at which they differ from the input itself; its keys and
values up to there are kept, and only the rest of each goes through the model.

That is exact where a cache keeps every key (a window is then the mask's). Models that keep something else, as recurrent
states are, and those whose numbers come out otherwise when it is tried, go the plain way.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from clearhead.adapters.base import ModelAdapter, Sample
from clearhead.adapters.decoder import CausalLMAdapter
from clearhead.capture.checks.self_test import RELATIVE_TOLERANCE_BY_DTYPE
from clearhead.capture.recorder import Recorder
from clearhead.engine.memory_budget import limit_rows
from clearhead.engine.target_batch import TargetBatch
from clearhead.targets import Target

#: Whether a model's cache was seen to be exact.
_exact_cache_by_recorder: "WeakKeyDictionary[Recorder, bool]" = WeakKeyDictionary()


class KVPrefix:
    """One input of a decoder, and the keys and values of its first words."""

    def __init__(self, recorder: Recorder, adapter: ModelAdapter, sample: Sample, targets: Sequence[Target]) -> None:
        self.recorder, self.adapter, self.sample, self.targets = recorder, adapter, sample, list(targets)
        self.cache, self.cached_length = DynamicCache(), 0
        by_class = all(target.function is None for target in targets)
        told = (
            getattr(sample, "logit_rows", ())
            and adapter.forward_accepts("logits_to_keep")
            and adapter.forward_accepts("past_key_values")
        )
        plain = (
            isinstance(adapter, CausalLMAdapter)
            and not adapter.positions_depend_on_batch_length
            and set(sample.inputs) == {"input_ids"}
        )
        self.is_supported = (
            bool(plain and told and by_class) and not adapter.is_compiled
        )  # compiled passes are of one length

    @property
    def is_enabled(self) -> bool:
        """Whether words in common are run once: until the model's cache was seen to be wrong, with whichever input."""
        return self.is_supported and _exact_cache_by_recorder.get(self.recorder, True)

    def find_common_length(self, other: Sample) -> int:
        """How many of the first words of an altered input are those of the input, and not needed for what is read."""
        if set(other.inputs) != {"input_ids"} or not getattr(other, "logit_rows", ()):
            return 0
        one, two = self.sample.inputs["input_ids"], other.inputs["input_ids"]
        count = min(len(one), len(two))
        same = int((one[:count] == two[:count]).int().cumprod(0).sum())
        return min(same, len(two) - 1, *other.logit_rows)  # type: ignore[attr-defined]

    def compute_values(self, samples: Sequence[Sample], start: int) -> Float[Tensor, "input target"]:
        """What altered inputs are worth that have the words before `start` in common with the input."""
        plan = TargetBatch(self.adapter, samples, [self.targets] * len(samples))
        if start and self.recorder not in _exact_cache_by_recorder:
            _exact_cache_by_recorder[self.recorder] = self._is_cache_exact(plan, start)
        if start and self.is_enabled:
            return _compute_values(plan, self._forward_suffix(plan, start))
        return _compute_values(plan, self.adapter.session.forward(plan.model_inputs))

    def _is_cache_exact(self, plan: TargetBatch, start: int) -> bool:
        """Whether the model takes a cache, keeps every key in it, and gives the same numbers with it as without."""
        try:
            found = _compute_values(plan, self._forward_suffix(plan, start))
        except (AttributeError, TypeError, ValueError, LookupError):  # it has a kind of cache of its own
            return False
        layers = self.cache.layers
        if not layers or any(
            type(one) is not DynamicLayer or one.get_seq_length() != self.cached_length for one in layers
        ):
            return False
        real = _compute_values(plan, self.adapter.session.forward(plan.model_inputs))
        gap = float((found - real).abs().max() / real.abs().max().clamp(min=1e-12))
        return gap <= RELATIVE_TOLERANCE_BY_DTYPE.get(self.adapter.dtype, 1e-4)

    def _forward_suffix(self, plan: TargetBatch, start: int) -> Any:
        """The output for what comes after the words in common."""
        self._extend_cache(start)
        given: dict[str, Any] = {
            **plan.model_inputs,
            "input_ids": plan.model_inputs["input_ids"][:, start:],
            "use_cache": True,
        }
        given["logits_to_keep"] = given["logits_to_keep"] - start
        return self.adapter.session.forward({**given, "past_key_values": self._repeat_cache(plan.num_samples, start)})

    def _extend_cache(self, length: int) -> None:
        """Keys and values of so many words: each word goes through the model once."""
        if length <= self.cached_length:
            return
        ids = self.sample.inputs["input_ids"][None, self.cached_length : length].to(self.adapter.device)
        told = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        self.adapter.session.forward({"input_ids": ids, **told})
        self.cached_length = length

    def _repeat_cache(self, count: int, length: int) -> DynamicCache:
        """The first words' for each of so many inputs."""
        cache = DynamicCache()
        layers: list[Any] = self.cache.layers
        for place, layer in enumerate(layers):
            keys, values = (part[:, :, :length].expand(count, -1, -1, -1) for part in (layer.keys, layer.values))
            cache.update(keys, values, place)
        return cache


def iter_prefix_chunks(
    starts: Sequence[int], lengths: Sequence[int], max_inputs: int, max_units: int
) -> Iterator[tuple[list[int], int]]:
    """Which altered inputs go together, those that change last first, and how many words they have in common.

    >>> [(places, start) for places, start in iter_prefix_chunks([0, 9, 8, 2], [10, 10, 10, 10], 8, 1000)]
    [([1, 2], 8), ([3], 2), ([0], 0)]
    """
    waiting: list[int] = []
    for place in sorted(range(len(starts)), key=lambda place: -starts[place]):
        room = len(waiting) < limit_rows(max_inputs, remeasure=True)
        rest = (len(waiting) + 1) * (max((lengths[one] for one in (*waiting, place)), default=0) - starts[place])
        # to begin much earlier for one would cost more for all of them than another pass
        near = not waiting or 2 * starts[place] >= starts[waiting[0]]
        if waiting and not (room and rest <= max_units and near):
            yield waiting, starts[waiting[-1]]
            waiting = []
        waiting.append(place)
    if waiting:
        yield waiting, starts[waiting[-1]]


def _compute_values(plan: TargetBatch, output: Any) -> Float[Tensor, "input target"]:
    values = plan.compute_target(output).detach().double().cpu()
    return values.reshape(plan.targets_per_sample, plan.num_samples).mT.clone()
