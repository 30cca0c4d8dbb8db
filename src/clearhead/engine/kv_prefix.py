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

from clearhead.adapters.base import Sample, Subject
from clearhead.adapters.decoder import Decoder
from clearhead.capture.checks.self_test import TOLERANCE
from clearhead.capture.recorder import Recorder
from clearhead.engine.memory_budget import at_most
from clearhead.engine.target_batch import Plan
from clearhead.targets import Target

#: Whether a model's cache was seen to be exact.
_exact: "WeakKeyDictionary[Recorder, bool]" = WeakKeyDictionary()


class Prefix:
    """One input of a decoder, and the keys and values of its first words."""

    def __init__(self, recorder: Recorder, subject: Subject, sample: Sample, targets: Sequence[Target]) -> None:
        self.recorder, self.subject, self.sample, self.targets = recorder, subject, sample, list(targets)
        self.cache, self.length = DynamicCache(), 0
        by_class = all(target.custom is None for target in targets)
        told = getattr(sample, "kept", ()) and subject.accepts("logits_to_keep") and subject.accepts("past_key_values")
        plain = isinstance(subject, Decoder) and not subject.counts_by_length and set(sample.inputs) == {"input_ids"}
        self.able = bool(plain and told and by_class) and not subject.compiled  # compiled passes are of one length

    @property
    def shares(self) -> bool:
        """Whether words in common are run once: until the model's cache was seen to be wrong, with whichever input."""
        return self.able and _exact.get(self.recorder, True)

    def first_change(self, other: Sample) -> int:
        """How many of the first words of an altered input are those of the input, and not needed for what is read."""
        if set(other.inputs) != {"input_ids"} or not getattr(other, "kept", ()):
            return 0
        one, two = self.sample.inputs["input_ids"], other.inputs["input_ids"]
        count = min(len(one), len(two))
        same = int((one[:count] == two[:count]).int().cumprod(0).sum())
        return min(same, len(two) - 1, *other.kept)  # type: ignore[attr-defined]

    def values(self, samples: Sequence[Sample], start: int) -> Float[Tensor, "input target"]:
        """What altered inputs are worth that have the words before `start` in common with the input."""
        plan = Plan(self.subject, samples, [self.targets] * len(samples))
        if start and self.recorder not in _exact:
            _exact[self.recorder] = self._tried(plan, start)
        return _worth(plan, self._after(plan, start) if start and self.shares else self._run(plan.batch))

    def _tried(self, plan: Plan, start: int) -> bool:
        """Whether the model takes a cache, keeps every key in it, and gives the same numbers with it as without."""
        try:
            found = _worth(plan, self._after(plan, start))
        except (AttributeError, TypeError, ValueError, LookupError):  # it has a kind of cache of its own
            return False
        layers = self.cache.layers
        if not layers or any(type(one) is not DynamicLayer or one.get_seq_length() != self.length for one in layers):
            return False
        real = _worth(plan, self._run(plan.batch))
        gap = float((found - real).abs().max() / real.abs().max().clamp(min=1e-12))
        return gap <= TOLERANCE.get(self.subject.dtype, 1e-4)

    def _after(self, plan: Plan, start: int) -> Any:
        """The output for what comes after the words in common."""
        self._extend(start)
        given: dict[str, Any] = {**plan.batch, "input_ids": plan.batch["input_ids"][:, start:], "use_cache": True}
        given["logits_to_keep"] = given["logits_to_keep"] - start
        return self._run({**given, "past_key_values": self._repeated(plan.size, start)})

    def _run(self, batch: dict[str, Any]) -> Any:
        with self.subject.scope():
            return self.subject.unrecorded(**batch)

    def _extend(self, length: int) -> None:
        """Keys and values of so many words: each word goes through the model once."""
        if length <= self.length:
            return
        ids = self.sample.inputs["input_ids"][None, self.length : length].to(self.subject.device)
        told = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        self._run({"input_ids": ids, **told})
        self.length = length

    def _repeated(self, count: int, length: int) -> DynamicCache:
        """The first words' for each of so many inputs."""
        cache = DynamicCache()
        layers: list[Any] = self.cache.layers
        for place, layer in enumerate(layers):
            keys, values = (part[:, :, :length].expand(count, -1, -1, -1) for part in (layer.keys, layer.values))
            cache.update(keys, values, place)
        return cache


def chunks(starts: Sequence[int], lengths: Sequence[int], inputs: int, units: int) -> Iterator[tuple[list[int], int]]:
    """Which altered inputs go together, those that change last first, and how many words they have in common.

    >>> [(places, start) for places, start in chunks([0, 9, 8, 2], [10, 10, 10, 10], 8, 1000)]
    [([1, 2], 8), ([3], 2), ([0], 0)]
    """
    waiting: list[int] = []
    for place in sorted(range(len(starts)), key=lambda place: -starts[place]):
        room = len(waiting) < at_most(inputs, grows=True)
        rest = (len(waiting) + 1) * (max((lengths[one] for one in (*waiting, place)), default=0) - starts[place])
        # to begin much earlier for one would cost more for all of them than another pass
        near = not waiting or 2 * starts[place] >= starts[waiting[0]]
        if waiting and not (room and rest <= units and near):
            yield waiting, starts[waiting[-1]]
            waiting = []
        waiting.append(place)
    if waiting:
        yield waiting, starts[waiting[-1]]


def _worth(plan: Plan, output: Any) -> Float[Tensor, "input target"]:
    values = plan.value(output).detach().double().cpu()
    return values.reshape(plan.steps, plan.size).mT.clone()
