"""A concept as a target: how strongly does a direction fire at layer k, at one unit, and what in the input does it?

`firing(ex, direction, layer, position)` is an explainer of the model up to that layer, whose one answer is h^k_p·q.
Every method explains it as it explains a class; attention above the layer is left out, since nothing goes through it.

>>> firing(ex, gender[6], layer=6, position="nurse").explain("The nurse is here.")        # doctest: +SKIP
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import How, Sample, Subject
from clearhead.concepts.directions import Direction, Directions
from clearhead.concepts.hidden_states import read
from clearhead.concepts.layer_hooks import Site, acting, layer_number, own_calls, sites, tested_of
from clearhead.errors import ClearheadWarning, InputError, Refusal
from clearhead.explainer import Explainer
from clearhead.targets import Target
from clearhead.units import Units

#: The number of a unit (negative from the end), a word of the text, or "class": where the model's own answer is read.
Position = int | str


def firing(
    ex: Explainer, direction: Direction, layer: int, position: Position = "class", name: str | None = None
) -> Explainer:
    """An explainer whose one answer is how strongly the direction fires: h^k·q, at one unit of the input.

    layer: k of h^k
    position: the number of a unit, a word, or "class" for the rows that the model's own answer is read from
    """
    if not isinstance(direction, Direction):
        hint = ": give directions[k]" if isinstance(direction, Directions) else ", as densray and TCAV find it"
        raise InputError(f"the Direction of one layer is wanted{hint}, not {type(direction).__name__}")
    if len(ex.subject.takes) != 1 or tested_of(ex).crosses:
        raise Refusal(f"{ex.subject.name} has several streams: a concept's firing is explained in models of one")
    own, there = own_calls(ex), sites(ex)
    number = layer_number(layer, len(own))
    if not number:
        raise InputError("layer 0 is what goes into the first layer: no attention lies below it, give at least 1")
    called = name or f"{direction.names[0]} at layer {number}"
    known = _Firing(ex, direction, there[number], own[:number], position, called)
    return Explainer(_made(ex, known, (ex, direction, layer, position, name)))


def _again(*given: Any) -> Subject:
    return firing(*given).subject


@dataclass
class Read(Sample):
    """A sample that is read at certain units; by its type, none of them may be moved (`subjects/hidden_words`)."""

    at: tuple[int, ...] = ()


class _Firing:
    """What is known of one concept's firing; `heard` is what the latest pass of each thread left at the layer."""

    def __init__(
        self, ex: Explainer, direction: Direction, site: Site, kept: Sequence[int], position: Position, name: str
    ) -> None:
        self.ex, self.direction, self.site, self.position, self.name = ex, direction, site, position, name
        self.heard = threading.local()
        places = tested_of(ex).places
        counted: dict[str, int] = {}
        self.kept: set[tuple[str, int]] = set()
        for i, place in enumerate(places):
            nth = counted.get(place.module, 0)
            counted[place.module] = nth + 1
            if i in kept:
                self.kept.add((place.module, nth))

    def hear(self, states: Tensor) -> None:
        self.heard.states = states

    def placed(self, sample: Sample) -> Read:
        return Read(**vars(sample), at=self._at(sample))

    def _at(self, sample: Sample) -> tuple[int, ...]:
        units, wanted, subject = sample.units, self.position, self.ex.subject
        if wanted == "class":
            if subject.masked and not sample.masks:
                raise InputError("position='class' is where a mask is, and the text has none: give a word or a number")
            return tuple(subject.readouts(sample, Target(lambda output: output))[subject.stream])
        if isinstance(wanted, str):
            return _word(units, wanted)
        if not -len(units) <= wanted < len(units):
            raise InputError(f"position={wanted}, but the input has {len(units)} units, counted from 0")
        return (wanted % len(units),)


def _rows(sample: Sample) -> dict[int, float]:
    assert isinstance(sample, Read)
    return dict.fromkeys(sample.at, 1 / len(sample.at))


def _word(units: Units, word: str) -> tuple[int, ...]:
    """The units of the first word of this name, all of its pieces together; of others like it, it is said."""
    if units.kind != "token":
        raise InputError(f"position={word!r} names a word, but the input has none: give the number of a unit")
    merged, parents = units.merged("word")
    fits = [
        tuple(i for i, parent in enumerate(parents) if parent == place)
        for place, own in enumerate(merged.names)
        if own.casefold() == word.casefold() and not merged.special[place]
    ]
    if not fits:
        words = ", ".join(merged.names)
        raise InputError(f"position={word!r}, but that word is not in the text: its words are {words}")
    if len(fits) > 1:
        places = ", ".join(str(own[0]) for own in fits)
        warnings.warn(
            f"{word!r} stands {len(fits)} times in the text, and the first is meant: for another, give the number of "
            f"its unit ({places})",
            ClearheadWarning,
            stacklevel=2,
        )
    return fits[0]


def _made(ex: Explainer, own: _Firing, given: tuple[Any, ...]) -> Subject:
    """The same kind of subject with another answer; `given` is what a copy of it is made of."""
    kind = type(ex.subject)

    class Fires(kind):  # type: ignore[valid-type, misc]
        """A model up to a layer, and how strongly a direction fires there."""

        masked: ClassVar[bool] = False
        multiplies: ClassVar[bool] = False

        def __reduce__(self) -> Any:  # its class is known in here alone, and `own` listens to one model
            return _again, given

        def samples(self, raw: Any, how: How) -> list[Sample]:
            return [own.placed(sample) for sample in read(own.ex, raw, how)]

        def rows(self, sample: Sample, target: Target) -> dict[int, float]:
            return _rows(sample)

        def readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
            return {self.stream: _rows(sample)}

        def streams_of(self, module: str, nth: int) -> tuple[str, str] | None:
            return kind.streams_of(self, module, nth) if (module, nth) in own.kept else None

        def expected_calls(self) -> int | None:
            return len(own.kept)

        def scope(self) -> Any:
            return _listening(kind.scope(self), self.model, own.site, own.hear)

        def scores(
            self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
        ) -> Float[Tensor, "batch label"]:
            along = own.direction.projection(own.heard.states)
            weights = torch.zeros(len(samples), along.shape[1], dtype=along.dtype, device=along.device)
            for i, sample in enumerate(samples):
                rows = _rows(sample)
                weights[i, list(rows)] = torch.tensor(list(rows.values())).to(weights)
            return (along.repeat(len(samples) // len(along), 1) * weights).sum(1, keepdim=True)

        @property
        def regression(self) -> bool:
            return True

        def label_index(self, label: str | int) -> int:
            return Subject.label_index(self, label)

        def label_name(self, index: int) -> str:
            return Subject.label_name(self, index)

        def head_rows(self, samples: Sequence[Sample], targets: Sequence[Target]) -> None:
            return None

    Fires.__name__ = kind.__name__
    subject = Fires(ex.subject.model, ex.subject.processor, ex.subject.readout, ex.subject.name)
    subject.labels, subject.multi_label = {0: own.name}, False
    return subject


@contextmanager
def _listening(outer: Any, model: Any, site: Site, hear: Callable[[Tensor], None]) -> Iterator[None]:
    with outer, acting(model, {site: hear}):
        yield
