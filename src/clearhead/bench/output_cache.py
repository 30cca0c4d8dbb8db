"""Cache of class scores for perturbed inputs: each distinct input is run once, in batches of similar length."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions, NamedInputs
from clearhead.bench.data.base import Example
from clearhead.bench.protocols.base import BenchmarkProtocol
from clearhead.bench.zero_shot import ZeroShotTarget
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError
from clearhead.sample import Sample
from clearhead.targets import Target, make_target

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: At most so many inputs, and so many units, go through the model at a time; so many inputs wait at most. A CPU gets a
#: quarter of the units: what it computes on should stay in its cache (zoo:pets, 28 pictures at once instead of 113:
#: 1.3 times as fast).
MAX_BATCH_INPUTS, MAX_BATCH_UNITS, MAX_PENDING_INPUTS = 128, 2**14, 512


@dataclass(frozen=True)
class PreparedExample:
    """An example as the model reads it, with nothing removed, and the target whose class scores are read.

    Attributes:
        example: The example of the data set.
        sample: The input of the model, cut off after what the target depends on.
        target: The target; for zero-shot classes, one of these.
        label_lookup: Looks up class names: the adapter, or the zero-shot classes.
    """

    example: Example
    sample: Sample
    target: Target
    #: What knows the classes that are judged by: the subject, or captions.
    label_lookup: Any


def prepare_example(explainer: "Explainer", example: Example, protocol: BenchmarkProtocol) -> PreparedExample:
    """Encode an example and resolve the target that a protocol selects for it.

    Args:
        explainer: Explainer of the model.
        example: The example.
        protocol: Selects the target.

    Returns:
        The example, ready for perturbation.

    Raises:
        InputError: If the example contains several inputs, or its target stands for several outputs.
    """
    raw = example.input
    if isinstance(raw, dict) and set(raw) <= {"text", "image", "audio", "regions"}:
        raw = NamedInputs(**raw)
    made = explainer.adapter.make_samples(raw, InputOptions(continuation=example.continuation))
    wanted = make_target(protocol.select_target(example), explainer.adapter.target_scales[0])
    if len(made) != 1:
        raise InputError(f"{example.id!r} contains {len(made)} inputs, but a benchmark takes one input per example")
    sample = explainer.adapter.resolve_sample(made[0], wanted)
    steps = explainer.adapter.expand_target(sample, wanted)
    if len(steps) != 1:
        raise InputError(
            f"{example.id!r} has {len(steps)} targets, but a curve follows one target: choose one, such as "
            "GeneratedToken(0)"
        )
    if example.zero_shot_classes is not None:
        return PreparedExample(
            example, sample, example.zero_shot_classes.make_target(raw.text), example.zero_shot_classes
        )
    return PreparedExample(example, explainer.adapter.truncate_to_targets(sample, steps), steps[0], explainer.adapter)


ScoresByKey = dict[bytes, Float[np.ndarray, "label"]]


class OutputCache:
    """Computes class scores of perturbed inputs in batches, each distinct input once.

    Empty inputs, of which nothing is left, are equal for many examples; their scores may be shared by several caches.
    They are forwarded one by one, so that their scores do not depend on the rest of a batch.

    Args:
        explainer: Explainer of the model.
        empty_input_scores: Scores of empty inputs to share with other caches; they are added to it.

    Attributes:
        num_requested: Number of inputs that were requested.
        num_forwarded: Number of inputs that went through the model.
    """

    def __init__(self, explainer: "Explainer", empty_input_scores: ScoresByKey | None = None) -> None:
        self.explainer, self.adapter = explainer, explainer.adapter
        self.scores: ScoresByKey = {}
        self.empty_input_scores: ScoresByKey = {} if empty_input_scores is None else empty_input_scores
        self.pending: dict[bytes, tuple[Sample, Target]] = {}
        self.num_requested = self.num_forwarded = 0

    def request(self, sample: Sample, target: Target, is_empty: bool = False) -> bytes:
        """Request the scores of an input, which is forwarded together with others, at the latest by `flush`.

        Args:
            sample: The perturbed input.
            target: Selects the position in outputs that have many.
            is_empty: Whether nothing is left of the input.

        Returns:
            The key under which the cache has the scores after `flush`.
        """
        key = _compute_key(sample, target)
        self.num_requested += 1
        if is_empty:
            if key not in self.empty_input_scores:
                self.empty_input_scores |= self._forward_batch([key], [(sample, target)])
        elif key not in self.scores and key not in self.pending:
            self.pending[key] = (sample, target)
            if len(self.pending) >= MAX_PENDING_INPUTS:
                self.flush()
        return key

    def flush(self) -> None:
        """Compute the scores of all inputs that wait."""
        for keys in self._iter_batches():
            self.scores |= self._forward_batch(keys, [self.pending[key] for key in keys])
        self.pending = {}

    def _forward_batch(self, keys: list[bytes], batch: list[tuple[Sample, Target]]) -> ScoresByKey:
        """One batch through the model."""
        session = self.adapter.session
        with session.running():
            plan = TargetBatch(self.adapter, [sample for sample, _ in batch], [[target] for _, target in batch])
            output = session.forward(plan.model_inputs)
            target = batch[0][1]
            if isinstance(target, ZeroShotTarget) and target.zero_shot_classes is not None:
                scores: Tensor | None = target.zero_shot_classes.compute_scores(output)
            else:
                _, scores = plan.compute_values(output)
        if scores is None:
            raise InputError(f"{self.adapter.model_class_name} returns no class scores, which a curve needs")
        self.num_forwarded += len(keys)
        return dict(zip(keys, scores.double().cpu().numpy(), strict=True))

    def __getitem__(self, key: bytes) -> Float[np.ndarray, "label"]:
        """Return the class scores of an input after `flush`, by the key that `request` returned."""
        return self.scores[key] if key in self.scores else self.empty_input_scores[key]

    def _iter_batches(self) -> Iterator[list[bytes]]:
        # a model without a padding token cannot tell the end of the shorter ones
        most = MAX_BATCH_UNITS if self.adapter.device.type != "cpu" else MAX_BATCH_UNITS // 4
        exact = getattr(getattr(self.adapter.model, "config", None), "pad_token_id", None) is None

        def shape(key: bytes) -> tuple[tuple[Any, ...], int]:
            sample = self.pending[key][0]
            length = sum(len(axis) for axis in sample.axes.values())
            inputs = {name: tuple(part.shape[1:]) for name, part in sample.inputs.items()}
            pixels = tuple(getattr(sample.inputs.get("pixel_values"), "shape", ()))
            alike = (pixels, tuple(sorted(inputs.items())), sample.batch_key, length if exact else 0)
            return alike, length

        batch: list[bytes] = []
        for key in sorted(self.pending, key=shape):
            full = len(batch) >= MAX_BATCH_INPUTS or (len(batch) + 1) * shape(key)[1] > most
            if batch and (full or shape(key)[0] != shape(batch[0])[0]):
                yield batch
                batch = []
            batch.append(key)
        if batch:
            yield batch


def _compute_key(sample: Sample, target: Target) -> bytes:
    """The content of an input, and which scores are read: those of a class are the same for all classes."""
    digest = hashlib.blake2b(f"{target.position}\0{target.mask_index}".encode(), digest_size=16)
    for name in sorted(sample.inputs):
        part = sample.inputs[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{part.dtype}\0{tuple(part.shape)}\0".encode())
        digest.update(part.numpy().tobytes())
    return digest.digest()


def compute_log_probabilities(scores: Float[np.ndarray, "label"], multi_label: bool) -> Float[np.ndarray, "label"]:
    """ln p of each class, without computing p.

    >>> np.exp(compute_log_probabilities(np.array([0.0, 0.0]), False)).tolist()
    [0.5, 0.5]
    """
    if multi_label:
        return -np.logaddexp(0, -scores)
    top = scores.max()
    return np.asarray(scores - top - np.log(np.exp(scores - top).sum()))
