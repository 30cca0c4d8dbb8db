"""What a method is: a declaration and a fold over the calls of a tape, from the last call to the first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import ceil, floor
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.errors import InputError, unknown
from clearhead.methods.options import SHARED, Layers, own_option
from clearhead.recording.reduce import Reduce
from clearhead.recording.reduce import push as push
from clearhead.recording.tape import Asks, Call, Tape, check_asks

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
    #: What it is handed: one tape, or something else that `passes.py` knows.
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
    #: By how much rounding errors grow on the way: relevance is divided by activations that may be next to nothing.
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
    places: Float[Tensor, "batch unit axis"]
    layers: range = range(0)
    stream: str = ""
    special: Bool[Tensor, "batch unit"] | None = None

    @property
    def words(self) -> Bool[Tensor, "batch unit"]:
        """The units that are neither padding nor special; all but padding where nothing else is left, or known."""
        if self.special is None:
            return self.valid
        inside = self.valid & ~self.special
        return torch.where(inside.any(-1, keepdim=True), inside, self.valid)

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


@dataclass
class Fold:
    """Base of every method that reads a tape: subclasses add options as fields, and `visit` or `finish`."""

    declaration: ClassVar[Declaration]
    #: How often `tile` must see every tile of a call.
    sweeps: ClassVar[int] = 0
    #: Whether `tile` reads the gradient also where attention is hidden by a mask, and so zero.
    reads_hidden: ClassVar[bool] = False
    frame: Frame = field(repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self.heads: list[int] | None = None  # the heads that were chosen; None for all
        self.parts: list[Float[Tensor, "batch head row unit"]] = []
        self.tile_sums: list[Tensor] = []  # of the tiles of one call, sweep by sweep
        self.begin()

    @property
    def needs_whole(self) -> bool:
        """Whether it needs whole maps, with these options, and tiles of them are not enough."""
        return not self.sweeps

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

    def reduce(self, call: Call) -> Reduce | None:
        """The sum of a call's maps that is all it wants of them (where their rows sum to one), if there is one.

        `call` has no maps here.
        """
        return None

    def tile(self, call: Call, queries: slice, known: Tensor | None) -> Tensor:
        """What these queries' rows of the maps add to a sum over tiles; `known` is the sum of the sweep before."""
        wanted = self.reduce(call)
        assert wanted is not None
        return wanted.of_tile(call, queries, self.frame.valid.shape[1])

    def joined(self, call: Call, total: Tensor) -> Float[Tensor, "batch head row unit"] | None:
        """Fold the sum over the tiles of a call, which has no maps any more, into the state; returns as `visit`."""
        return total

    def visit(self, call: Call) -> Float[Tensor, "batch head row unit"] | None:
        """Fold one call into the state; what is returned is this call's share of the scores, head by head.

        By default the whole maps are one tile.
        """
        if not self.sweeps:
            return None
        assert call.attention is not None
        total = None
        for _ in range(self.sweeps):
            total = self.tile(call, slice(0, call.attention.shape[2]), total)
        assert total is not None
        return self.joined(call, total)

    def fold(self, call: Call) -> None:
        if self.tile_sums:
            part = self.joined(call, self.tile_sums[-1])
            self.tile_sums = []
        else:
            part = self.visit(call if self.heads is None else call.with_heads(self.heads))
        if part is not None:
            self.parts.append(part)

    def fold_tile(self, call: Call, queries: slice, sweep: int) -> None:
        """One tile of a call, in one of the sweeps over all of them."""
        if sweep < self.sweeps:
            chosen = call if self.heads is None else call.with_heads(self.heads)
            part = self.tile(chosen, queries, self.tile_sums[sweep - 1] if sweep else None)
            if len(self.tile_sums) == sweep:
                self.tile_sums.append(part)
            else:
                self.tile_sums[sweep] += part

    def fold_sum(self, call: Call, total: Tensor) -> None:
        """The sum that `reduce` asked for, made at once."""
        self.tile_sums = [total]

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
class AcrossFold:
    """What a method does where streams look at each other: one fold over the calls of all of them.

    `layers` are the layers that count, for each pair of a stream that looks and one that is looked at. Subclasses have
    the options of the method for one stream.
    """

    declaration: ClassVar[Declaration]
    frames: dict[str, Frame] = field(repr=False, kw_only=True)
    layers: dict[tuple[str, str], range] = field(repr=False, kw_only=True)
    linear_in_target: ClassVar[bool] = False
    reads_the_readout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.heads: list[int] | None = None
        self.begin()

    @property
    def signed(self) -> bool:
        return self.declaration.signed

    def begin(self) -> None:
        """Set up the state before the first call."""

    def visit(self, call: Call) -> None:
        """Fold one call into the state."""

    def fold(self, call: Call) -> None:
        self.visit(call if self.heads is None else call.with_heads(self.heads))

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
        accepted = {*self.option_names(name), *SHARED}
        for option in options:
            if option not in accepted:
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
        raise InputError(f"layers={layers} leaves none of the {count} layers; it is half-open, e.g. (-4, None)")
    return chosen
