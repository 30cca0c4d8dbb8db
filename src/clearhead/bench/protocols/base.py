"""Base class, registry and shared helpers of benchmark protocols.

A protocol is a small frozen object that maps (explainer, examples, explanations) to `Measurement`s. Its settings are
hashed, so that results of different settings are never mixed in one table. Explanations are computed for the target
that the protocol selects (so that protocols can share them), and the returned measurements are plain data: a protocol
stores nothing. Only protocols that need further explanations (of a randomised model, of another class) compute
explanations themselves.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float, Int

from clearhead.bench.data.base import Example
from clearhead.errors import InputError, unknown_value_error
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.stats import RATE_BOUNDS

if TYPE_CHECKING:
    from clearhead.bench.output_cache import OutputCache
    from clearhead.explainer import Explainer

#: Class that is explained: "predicted" (by the model), "gold" (the example's label), or a class index.
ExplainedClass = str | int
#: Method name → explanations, in the order of the examples.
ExplanationsByMethod = Mapping[str, Sequence[AnyExplanation]]


@dataclass(frozen=True)
class Measurement:
    """Metrics of one method on one example.

    Attributes:
        example: Id of the example.
        method: Name of the method.
        part: Name of the measured part: the stream, or stream and condition ("text/mask/positive").
        figures: Metric name → value.
        curves: Curve name → points.
    """

    example: str
    method: str
    part: str
    figures: Mapping[str, float]
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchmarkProtocol:
    """Base class of benchmark protocols; every dataclass field is a setting.

    Attributes:
        version: Incremented when the same settings produce different metrics.
        name: Name in `PROTOCOL_REGISTRY`, set by `register_protocol`.
        smaller_is_better_metrics: Metrics where a smaller value is better; for all others a larger one is.
        description: One or two sentences for the reader of a report: what the protocol measures.
        headline_metrics: Metrics shown in short tables.
        rate_metric_prefixes: Beginnings of the names of metrics from 0 to 1 whose values often are exactly 0 or 1.
        depends_on_other_methods: True if the metrics of one method depend on which other methods are measured.
        explained: Class that is explained: "predicted", "gold" or a class index.
        seed: Seed of every random choice, tie-breaking included.
    """

    version: ClassVar[int] = 1
    name: ClassVar[str] = ""
    smaller_is_better_metrics: ClassVar[frozenset[str]] = frozenset()
    description: ClassVar[str] = ""
    headline_metrics: ClassVar[tuple[str, ...]] = ()
    rate_metric_prefixes: ClassVar[tuple[str, ...]] = ()
    depends_on_other_methods: ClassVar[bool] = False

    explained: ExplainedClass = "predicted"
    seed: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    @property
    def hash(self) -> str:
        """Short hash of the name, the version and every setting."""
        content = json.dumps([self.name, self.version, self.settings], sort_keys=True, allow_nan=False)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def check_settings(self) -> None:
        """Validate the settings. A run calls this once before it loads anything, not once for each chunk.

        Raises:
            InputError: If a setting is invalid.
        """
        if self.explained not in ("predicted", "gold") and not isinstance(self.explained, int):
            raise unknown_value_error("class to explain", self.explained, ("predicted", "gold", "a number"))

    def select_target(self, example: Example) -> Any:
        """Return the target to explain for this example, in the form that `Explainer.explain` accepts.

        Args:
            example: The example; its own `target` takes precedence over `explained`.

        Returns:
            A target or class index, or None for the model's prediction.

        Raises:
            InputError: If `explained` is "gold" and the example has no single true class.
        """
        self.check_settings()
        if example.target is not None:
            return example.target
        if example.zero_shot_classes is not None:
            return None  # the class is part of the input, as a caption
        if self.explained == "predicted":
            return None
        if isinstance(self.explained, int):
            return self.explained
        if not isinstance(example.label, int):
            raise InputError(f"explained='gold', but {example.id!r} has no single true class")
        return example.label

    def count_perturbed_inputs(self, num_methods: int) -> int | None:
        """Return an upper bound of the forward inputs per example, without those of explanations.

        Args:
            num_methods: Number of measured methods.

        Returns:
            The bound; None if it depends on the size of the input.
        """
        return 0

    def is_smaller_better(self, metric: str, part_name: str) -> bool:
        """Return whether a smaller value of a metric is better.

        Args:
            metric: Name of the metric.
            part_name: The measured part, on which the direction may depend.

        Returns:
            Whether the metric is in `smaller_is_better_metrics`, unless a subclass decides otherwise.
        """
        return metric in self.smaller_is_better_metrics

    def get_bounds(self, metric: str) -> tuple[float, float] | None:
        """Return the bounds of a metric for its confidence interval.

        Args:
            metric: Name of the metric.

        Returns:
            (0, 1) for rates, whose values often lie at a bound; None for other metrics.
        """
        return RATE_BOUNDS if metric == "correct" or metric.startswith(self.rate_metric_prefixes) else None

    def compute_dataset_metrics(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Compute metrics over all examples that are not means over examples, such as mIoU and COCO AP.

        Args:
            measurements: The measurements of one method and part on all examples.

        Returns:
            Metric name → value; empty for most protocols.
        """
        return {}

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> Sequence[Measurement]:
        """Measure the explanations of these examples.

        Args:
            explainer: The explained model.
            examples: The examples.
            explanations: Method name → explanations, in the order of `examples`.
            output_cache: Model outputs of perturbed inputs, shared by protocols that measure the same examples.

        Returns:
            The measurements; examples to which the protocol does not apply have none.

        Raises:
            InputError: If the settings or the examples do not fit the protocol.
        """
        raise NotImplementedError


PROTOCOL_REGISTRY: dict[str, type[BenchmarkProtocol]] = {}
ProtocolT = TypeVar("ProtocolT", bound=type[BenchmarkProtocol])


def register_protocol(name: str) -> Callable[[ProtocolT], ProtocolT]:
    """Class decorator that adds a protocol to `PROTOCOL_REGISTRY`, from inside or outside the package.

    Args:
        name: Name by which `make_protocol` and the command line find the protocol.

    Returns:
        The decorator.

    Example:
        >>> @register_protocol("my-protocol")  # doctest: +SKIP
        ... @dataclass(frozen=True)
        ... class MyProtocol(BenchmarkProtocol): ...
    """

    def add(cls: ProtocolT) -> ProtocolT:
        cls.name = name
        PROTOCOL_REGISTRY[name] = cls
        return cls

    return add


def make_protocol(name: str, **settings: Any) -> BenchmarkProtocol:
    """Create a registered protocol with the given settings.

    Args:
        name: Name of the protocol.
        **settings: Settings that differ from their defaults.

    Returns:
        The protocol.

    Raises:
        InputError: If the protocol or one of the settings is unknown.

    Example:
        >>> make_protocol("truth", seed=3).settings["seed"]
        3
    """
    if name not in PROTOCOL_REGISTRY:
        raise unknown_value_error("protocol", name, sorted(PROTOCOL_REGISTRY))
    accepted = [setting.name for setting in fields(PROTOCOL_REGISTRY[name])]
    for setting_name in settings:
        if setting_name not in accepted:
            raise unknown_value_error(f"setting of {name}", setting_name, accepted)
    return PROTOCOL_REGISTRY[name](**settings)


def argsort_descending(scores: Float[np.ndarray, "unit"], *tie_break_key: Any) -> Int[np.ndarray, "unit"]:
    """Return the indices that sort scores from largest to smallest, NaN last; ties are broken reproducibly.

    Args:
        scores: The scores.
        *tie_break_key: Values that seed the random order of tied scores (the seed, the example's id).

    Returns:
        Indices into `scores`.

    Example:
        >>> argsort_descending(np.array([0.1, 0.7, 0.3])).tolist()
        [1, 2, 0]
    """
    digest = hashlib.sha256("\0".join(map(str, tie_break_key)).encode()).digest()
    shuffled = np.random.default_rng(int.from_bytes(digest[:8], "little")).permutation(len(scores))
    values = np.asarray(scores, dtype=np.float64)[shuffled]
    values = np.where(np.isnan(values), -math.inf, values)
    return np.asarray(shuffled[np.argsort(-values, kind="stable")])
