"""A protocol is a small frozen object: (explainer, examples, their explanations) → figures, one measurement each.

Its settings are hashed, so that figures of different settings never meet in one table by mistake. What a protocol is
handed was explained for the target that it named (so that protocols share explanations), and what it returns is plain
data: it stores nothing. Only those that ask for other explanations beside (of a randomised model, of another class)
explain for themselves.
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
from clearhead.errors import InputError, unknown
from clearhead.explanation.multi_stream import AnyExplanation

if TYPE_CHECKING:
    from clearhead.bench.output_cache import Looks
    from clearhead.explainer import Explainer

#: Which class is explained: the model's own, the true one, or the one with this number.
Explained = str | int
#: By method, the explanations of the examples in their order.
Explanations = Mapping[str, Sequence[AnyExplanation]]


@dataclass(frozen=True)
class Measurement:
    """What one protocol says about one method on one example; `part` is the stream, or whatever else is apart."""

    example: str
    method: str
    part: str
    figures: Mapping[str, float]
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Protocol:
    """What all protocols have. `explained` and `seed` are settings like any other."""

    #: Goes up when the same settings come to mean other figures.
    version: ClassVar[int] = 1
    name: ClassVar[str] = ""
    #: Figures that are better the smaller they are; all others are better the larger.
    smaller_is_better: ClassVar[frozenset[str]] = frozenset()

    #: What it asks, in a sentence or two, for the reader of a report.
    about: ClassVar[str] = ""
    #: What a short table shows.
    headline: ClassVar[tuple[str, ...]] = ()
    #: Whether its figures of one method depend on which others are there.
    together: ClassVar[bool] = False

    explained: Explained = "predicted"
    seed: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def hash(self) -> str:
        """One short word for the name, the version and every setting."""
        said = json.dumps([self.name, self.version, self.settings], sort_keys=True, allow_nan=False)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def check(self) -> None:
        """Refuse settings that cannot be: a run asks before anything is opened, not chunk by chunk."""
        if self.explained not in ("predicted", "gold") and not isinstance(self.explained, int):
            raise unknown("class to explain", self.explained, ("predicted", "gold", "a number"))

    def target(self, example: Example) -> Any:
        """What is to be explained of this example, as `Explainer.explain` takes it."""
        self.check()
        if example.target is not None:
            return example.target
        if example.among is not None:
            return None  # the class is in the input, as a caption
        if self.explained == "predicted":
            return None
        if isinstance(self.explained, int):
            return self.explained
        if not isinstance(example.label, int):
            raise InputError(f"explained='gold', but {example.id!r} has no single true class")
        return example.label

    def altered(self, methods: int) -> int | None:
        """At most so many inputs go through the model for one example, explanations aside; None: as its size is."""
        return 0

    def smaller(self, figure: str, part: str) -> bool:
        """Whether this figure is better the smaller it is."""
        return figure in self.smaller_is_better

    def overall(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Figures of one method and part over all examples, where they are no means over examples."""
        return {}

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> Sequence[Measurement]:
        """`looks` holds what the model said about altered inputs, for other protocols on the same examples."""
        raise NotImplementedError


PROTOCOLS: dict[str, type[Protocol]] = {}
P = TypeVar("P", bound=type[Protocol])


def register(name: str) -> Callable[[P], P]:
    """Make a protocol known by name, from inside or outside the package."""

    def add(cls: P) -> P:
        cls.name = name
        PROTOCOLS[name] = cls
        return cls

    return add


def protocol(name: str, **settings: Any) -> Protocol:
    """A protocol by name, with some of its settings.

    >>> protocol("truth", seed=3).settings["seed"]
    3
    """
    if name not in PROTOCOLS:
        raise unknown("protocol", name, sorted(PROTOCOLS))
    accepted = [one.name for one in fields(PROTOCOLS[name])]
    for setting in settings:
        if setting not in accepted:
            raise unknown(f"setting of {name}", setting, accepted)
    return PROTOCOLS[name](**settings)


def ranking(scores: Float[np.ndarray, "unit"], *key: Any) -> Int[np.ndarray, "unit"]:
    """Places from the largest score to the smallest. Ties fall as the key says, always the same; NaN comes last.

    >>> ranking(np.array([0.1, 0.7, 0.3])).tolist()
    [1, 2, 0]
    """
    digest = hashlib.sha256("\0".join(map(str, key)).encode()).digest()
    shuffled = np.random.default_rng(int.from_bytes(digest[:8], "little")).permutation(len(scores))
    values = np.asarray(scores, dtype=np.float64)[shuffled]
    values = np.where(np.isnan(values), -math.inf, values)
    return np.asarray(shuffled[np.argsort(-values, kind="stable")])
