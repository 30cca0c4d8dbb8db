"""What a method is: a declaration and a fold over the calls of a tape, from the last call to the first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import ceil, floor
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from clearhead.capture.attention.reductions import push as push
from clearhead.capture.tape import Asks, Call, Tape, check_asks
from clearhead.errors import InputError, unknown
from clearhead.methods._tiled import Tiled
from clearhead.methods.options import SHARED, Layers, own_option
from clearhead.units import Axis

Family = Literal["attention", "relevance", "gradient", "perturbation", "control"]


@dataclass(frozen=True)
class Declaration:
    """Everything that the planner, the documentation and the command line know about a method."""

    name: str
    family: Family
    asks: Asks
    cost: str
    citation: str
    signed: bool
    target: Literal["any", "none"]
    #: What it is handed: one tape, or something else that `engine/passes` knows.
    kind: str = "tape"
    linear_in_target: bool = False
    #: Half-open; what is no whole number is a share of the depth.
    layers: "Layers | tuple[float | None, float | None]" = (None, None)
    has: frozenset[str] = frozenset()
    parts: Literal["contributions", "depths"] | None = None
    head_shares: bool = True
    axioms: tuple[str, ...] = ()
    post_hoc: bool = True
    model_agnostic: bool = False
    scope: Literal["local", "global"] = "local"
    #: What a user should know before using it, such as that others claim patents on it.
    note: str = ""
    #: By how much rounding errors grow on the way: relevance is divided by activations that may be next to nothing (its
    #: passes are made in float64).
    amplifies: float = 1.0
    #: A package that it needs beyond clearhead's own, and the extra that brings it.
    package: str = ""
    extra: str = ""

    @property
    def has_head_shares(self) -> bool:
        """Whether the scores are a sum over heads, so that each head has a share."""
        return "heads" in self.has and self.parts == "contributions" and self.head_shares

    @property
    def taxonomy(self) -> str:
        agnostic = "model-agnostic" if self.model_agnostic else "model-specific"
        return f"{'post-hoc' if self.post_hoc else 'intrinsic'}, {agnostic}, {self.scope}"


@dataclass(frozen=True)
class Frame:
    """The coordinates that every method of one batch works in.

    `readout` holds, for each row that is read, how much each unit's row of a relevance matrix counts; the rows of
    `noise` seeds are keyed by the content of the input, so that no sample depends on its batch.
    """

    readout: Float[Tensor, "batch row unit"]
    valid: Bool[Tensor, "batch unit"]
    seeds: tuple[int, ...]
    axes: tuple[Axis, ...] = ()  # of the samples, where it is known what their units are
    layers: range = range(0)
    stream: str = ""

    @cached_property
    def words(self) -> Bool[Tensor, "batch unit"]:
        """The units that are neither padding nor special; all but padding where nothing else is left, or known."""
        if not self.axes:
            return self.valid
        inside = self.valid & ~self._filled([np.asarray(axis.special, dtype=bool) for axis in self.axes])
        return torch.where(inside.any(-1, keepdim=True), inside, self.valid)

    @property
    def places(self) -> Float[Tensor, "batch unit axis"]:
        """Where each unit lies in its own stream."""
        return self._filled([axis.places for axis in self.axes]).to(self.readout.dtype)

    def _filled(self, parts: Sequence[np.ndarray]) -> Shaped[Tensor, "batch unit *axis"]:
        """What is known of the units of each sample, and zeros for padding."""
        filled = np.zeros((*self.valid.shape, *parts[0].shape[1:]), dtype=parts[0].dtype)
        for own, part in zip(filled, parts, strict=True):
            own[: len(part)] = part
        return torch.from_numpy(filled).to(self.valid.device)

    @property
    def lengths(self) -> Int[Tensor, "batch"]:
        return self.valid.sum(-1)


@dataclass
class Scores:
    """What a method returns, padding included; `per_layer` and `per_head` only where the method has them."""

    scores: Float[Tensor, "batch row unit"]
    per_layer: Float[Tensor, "batch layer unit"] | None = None
    per_head: Float[Tensor, "batch layer head unit"] | None = None
    base_value: Float[Tensor, "batch"] | None = None
    #: What the scores are a product of, by name, where one row is read.
    factors: "dict[str, Float[Tensor, 'batch unit']] | None" = None
    #: What was measured about each sample on the way, for the certificate: a completeness gap, an error of steps.
    checks: "dict[str, Float[Tensor, 'batch']] | None" = None
    #: What was chosen for each sample where the caller left it open, for the provenance: what stands for hidden units.
    chosen: dict[str, list[str]] | None = None

    def cpu(self) -> "Scores":
        """The same on the CPU."""
        return replace(
            self,
            scores=self.scores.cpu(),
            per_layer=None if self.per_layer is None else self.per_layer.cpu(),
            per_head=None if self.per_head is None else self.per_head.cpu(),
            base_value=None if self.base_value is None else self.base_value.cpu(),
            factors=None if self.factors is None else {name: part.cpu() for name, part in self.factors.items()},
            checks=None if self.checks is None else {name: part.cpu() for name, part in self.checks.items()},
        )


@dataclass
class Fold(Tiled):
    """Base of every method that reads a tape: subclasses add options as fields, and `visit` or `finish`."""

    declaration: ClassVar[Declaration]
    frame: Frame = field(repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self.start()
        self.parts: list[Float[Tensor, "batch head row unit"]] = []
        self.begin()

    @classmethod
    def kind_with(cls, options: Mapping[str, Any]) -> str:
        """What it is handed with these options."""
        return cls.declaration.kind

    @property
    def frames(self) -> dict[str, Frame]:
        return {self.frame.stream: self.frame}

    @property
    def linear_in_target(self) -> bool:
        """With these options."""
        return self.declaration.linear_in_target

    @property
    def signed(self) -> bool:
        """Whether scores can be below zero, with these options: of vectors, a sum can, a length cannot."""
        reduce = getattr(self, "reduce", None)
        return self.declaration.signed if reduce is None else reduce == "sum"

    @property
    def reads_the_readout(self) -> bool:
        """Whether the scores depend, with these options, on which row speaks for the target."""
        return "rows" in self.declaration.has

    def begin(self) -> None:
        """Set up the state before the first call."""

    def fold(self, call: Call) -> None:
        part = self.folded(call)
        if part is not None:
            self.parts.append(part)

    def finish(self, tape: Tape) -> Scores:
        """By default the scores are the sum of all shares."""
        shares = torch.stack(self.parts[::-1], dim=1)  # batch layer head row unit, the first layer first
        one_row = shares.shape[3] == 1
        return Scores(
            scores=shares.sum((1, 2)),
            per_layer=shares.sum((2, 3)) if one_row else None,
            per_head=shares.sum(3) if one_row and self.declaration.has_head_shares else None,
        )


@dataclass
class AcrossFold(Tiled):
    """What a method does where streams look at each other: one fold over the calls of all of them.

    `layers` are the layers that count, for each pair of a stream that looks and one that is looked at. `towers` are the
    modules of towers: such a tower goes on beside a stream whose units it has, too, looks at nothing else, and is added
    to the stream again after each of its layers; before the stream's own first call the two are one. `blocks` say of
    modules which block they are in: in a block each stream sees the others as they were when it began. Subclasses have
    the options of the method for one stream.
    """

    declaration: ClassVar[Declaration]
    frames: dict[str, Frame] = field(repr=False, kw_only=True)
    layers: dict[tuple[str, str], range] = field(repr=False, kw_only=True)
    towers: frozenset[str] = field(default=frozenset(), repr=False, kw_only=True)
    blocks: dict[str, str] = field(default_factory=dict, repr=False, kw_only=True)
    linear_in_target: ClassVar[bool] = False
    reads_the_readout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.start()
        self.begin()

    @property
    def signed(self) -> bool:
        return self.declaration.signed

    def begin(self) -> None:
        """Set up the state before the first call."""

    def fold(self, call: Call) -> None:
        self.folded(call)

    def finish(self, tape: Tape) -> dict[str, Scores]:
        """The scores of each stream's units."""
        raise NotImplementedError

    def speaks(self, stream: str) -> bool:
        """Whether rows of this stream are read."""
        return bool(self.frames[stream].readout.any())


def of_authors(default: Any) -> Any:
    """The default of an option that is there to reproduce an author's code: laws bind defaults, not such options."""
    return field(default=default, metadata={"of authors": True})


REGISTRY: dict[str, type[Fold]] = {}
#: What a method does where streams look at each other, for those that say.
ACROSS: dict[str, type[AcrossFold]] = {}
A = TypeVar("A", bound=type[AcrossFold])
M = TypeVar("M", bound=type[Fold])


def register(name: str, *, asks: tuple[str, ...] = (), **declared: Any) -> Callable[[M], M]:
    """Add a method to the registry, from inside or outside the package.

    >>> @register("flat", family="control", cost="nothing", citation="–", signed=False, target="none")
    ... class Flat(Fold):
    ...     def finish(self, tape):
    ...         return Scores(self.frame.valid[:, None].double())
    >>> REGISTRY.pop("flat").declaration.taxonomy
    'post-hoc, model-specific, local'
    """

    def decorate(cls: M) -> M:
        has = frozenset(declared.pop("has", ()))
        taken = REGISTRY.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InputError(
                f"a method named {name!r} is registered already, by {taken.__module__}: choose another name"
            )
        cls.declaration = Declaration(name=name, asks=check_asks(asks), has=has, **declared)
        made = dataclass(cls)  # options are plain fields of the class
        REGISTRY[name] = made
        return made  # type: ignore[return-value]

    return decorate


def across(name: str) -> Callable[[A], A]:
    """Say what a registered method does where streams look at each other."""

    def decorate(cls: A) -> A:
        cls.declaration = REGISTRY[name].declaration
        made = dataclass(cls)
        ACROSS[name] = made
        return made  # type: ignore[return-value]

    return decorate


@dataclass(frozen=True)
class Method:
    """A method with its own arguments: `clearhead.Method("generic", layers=(-4, None))`.

    >>> str(Method("grad-sam", received=True))
    'grad-sam(received=True)'
    """

    name: str
    options: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, **options: Any) -> None:
        if name not in REGISTRY:
            raise unknown("method", name, sorted(REGISTRY))
        accepted = {*self.option_names(name), *REGISTRY[name].declaration.has}
        for option in options:
            if option not in accepted and option not in SHARED:
                raise unknown(f"option of {name}", option, sorted(accepted))
        given = {key: value for key, value in options.items() if value is not None or key not in SHARED}
        for key in given:
            if key in SHARED and key not in REGISTRY[name].declaration.has:
                with_it = ", ".join(sorted(n for n, cls in REGISTRY.items() if key in cls.declaration.has))
                raise InputError(f"{name} has no {key}=: methods that have it are {with_it}")
        hints = get_type_hints(REGISTRY[name])
        frozen = {
            key: SHARED[key](value) if key in SHARED else own_option(key, value, hints[key])
            for key, value in given.items()
        }
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", tuple(sorted(frozen.items())))

    @staticmethod
    def option_names(name: str) -> list[str]:
        return [f.name for f in fields(REGISTRY[name]) if f.name != "frame"]

    @property
    def declaration(self) -> Declaration:
        return REGISTRY[self.name].declaration

    @property
    def kind(self) -> str:
        return REGISTRY[self.name].kind_with(dict(self.options))

    @property
    def own_options(self) -> dict[str, Any]:
        return {key: value for key, value in self.options if key in self.option_names(self.name)}

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)

    def defaults(self, **options: Any) -> "Method":
        """This method with options that it has and was not given."""
        extra = {key: value for key, value in options.items() if value is not None and key not in dict(self.options)}
        return Method(self.name, **dict(self.options), **extra)

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in self.options)
        return f"{self.name}({inside})" if inside else self.name


def methods_of(given: Any) -> list[Method]:
    """A method or several, by name or with arguments of their own.

    >>> [str(method) for method in methods_of(["generic", Method("tam", steps=5)])]
    ['generic', 'tam(steps=5)']
    """
    try:
        several = [given] if isinstance(given, str | Method) else list(given)
    except TypeError:
        raise unknown("method", given, sorted(REGISTRY)) from None
    if not several:
        raise InputError("no method was given")
    return [one if isinstance(one, Method) else Method(one) for one in several]


def layer_range(layers: Layers | tuple[float | None, float | None] | None, count: int) -> range:
    """Half-open, negative from the end, as in a slice; what is no whole number is a share of the depth.

    >>> layer_range((-4, None), 12), layer_range(None, 3), layer_range((0.25, None), 24), layer_range((None, 0.5), 1)
    (range(8, 12), range(0, 3), range(6, 24), range(0, 1))
    """
    first, stop = layers or (None, None)
    first = floor(first * count + 1e-9) if isinstance(first, float) else first
    stop = ceil(stop * count - 1e-9) if isinstance(stop, float) else stop  # a share is never nothing
    chosen = range(count)[slice(first, stop)]
    if not chosen:
        raise InputError(
            f"layers={layers} leaves none of the {count} layers: give others; it is half-open, e.g. layers=(-4, None)"
        )
    return chosen
