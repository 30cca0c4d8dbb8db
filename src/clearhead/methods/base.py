"""Base classes and registry of attribution methods.

A method is a declaration (name, cost, requirements, ...) and a class that processes the attention calls of a tape, from
the last call of the forward pass to the first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import ceil, floor
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from clearhead.capture.attention.reductions import push_rows as push_rows
from clearhead.capture.tape import AttentionCall, Requirements, Tape, resolve_requirements
from clearhead.errors import InputError, unknown_value_error
from clearhead.methods._tiled import TiledMethod
from clearhead.methods.cost import Cost
from clearhead.methods.options import SHARED_OPTION_PARSERS, LayerRange, validate_option
from clearhead.methods.pass_type import PassType
from clearhead.units import UnitAxis

MethodFamily = Literal["attention", "relevance", "gradient", "perturbation", "control"]


@dataclass(frozen=True)
class Declaration:
    """Properties of a method, as read by the engine, the documentation and the command line.

    Attributes:
        name: Name in the registry.
        family: What the scores are computed from.
        requires: Tensors that must be recorded.
        cost: Number of passes with the default options.
        citation: Authors (year), title, venue.
        signed: Whether scores can be negative.
        target: "any" if the scores depend on the explained target, "none" if they do not.
        pass_type: How the model must be run for the method.
        linear_in_target: Whether the scores of a weighted sum of targets are the weighted sum of their scores.
        layers: Default layers, half-open; a float is a fraction of the depth.
        supports: The shared options that the method accepts: "layers", "heads", "rows".
        layer_scores: "contributions" if per-layer scores sum to the scores, "depths" if each one is the result of
            reading out at that depth, None without per-layer scores.
        sums_over_heads: Whether the scores are a sum over heads.
        axioms: Declared properties, tested on models with known results.
        post_hoc: Whether an unchanged, trained model is explained.
        model_agnostic: Whether only inputs and outputs of the model are used.
        scope: Whether one input is explained or the model as a whole.
        measures: What the scores measure, in a few words.
        misleads: When they mislead.
        note: What a user should know before using the method, such as patent claims of third parties.
        rounding_amplification: Factor by which rounding errors grow, since relevance is divided by activations that may
            be almost zero. Such passes run in float64.
        required_package: A package beyond the dependencies of clearhead.
        pip_extra: The extra of clearhead that installs it.
    """

    name: str
    family: MethodFamily
    requires: Requirements
    cost: Cost
    citation: str
    signed: bool
    target: Literal["any", "none"]
    pass_type: PassType = PassType.TAPE
    linear_in_target: bool = False
    layers: "LayerRange | tuple[float | None, float | None]" = (None, None)
    supports: frozenset[str] = frozenset()
    layer_scores: Literal["contributions", "depths"] | None = None
    sums_over_heads: bool = True
    axioms: tuple[str, ...] = ()
    post_hoc: bool = True
    model_agnostic: bool = False
    scope: Literal["local", "global"] = "local"
    measures: str = ""
    misleads: str = ""
    note: str = ""
    rounding_amplification: float = 1.0
    required_package: str = ""
    pip_extra: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.cost, Cost):
            raise InputError(
                f"{self.name}: cost={self.cost!r} is not valid: use the number of passes, such as "
                "cost=clearhead.Cost(forward=1, backward=1)"
            )

    @property
    def has_head_contributions(self) -> bool:
        """Whether the scores are a sum over heads, so that each head has a contribution."""
        return "heads" in self.supports and self.layer_scores == "contributions" and self.sums_over_heads

    @property
    def guidance(self) -> str:
        """What the scores measure, and when they mislead, as one line; empty if the method does not say."""
        sentences = []
        if self.measures:
            sentences.append(f"Measures {self.measures}.")
        if self.misleads:
            sentences.append(f"Limitation: {self.misleads}.")
        return " ".join(sentences)

    @property
    def taxonomy(self) -> str:
        """The three terms by which surveys classify methods, e.g. "post-hoc, model-specific, local"."""
        agnostic = "model-agnostic" if self.model_agnostic else "model-specific"
        return f"{'post-hoc' if self.post_hoc else 'intrinsic'}, {agnostic}, {self.scope}"


@dataclass(frozen=True)
class UnitContext:
    """Units, masks and read-out weights of one stream of a batch, shared by all methods of a pass.

    Attributes:
        readout: For each read-out, the weight of each unit's row of a relevance matrix.
        valid_mask: False for padding.
        seeds: One seed per sample, derived from its content, so that random scores do not depend on the batch.
        axes: The unit axes of the samples, if known.
        layers: The selected layers.
        stream: Name of the stream (modality, encoder or decoder).
        model_dtype: The dtype of the model's hidden states; methods compute in float32 or float64.
    """

    readout: Float[Tensor, "batch row unit"]
    valid_mask: Bool[Tensor, "batch unit"]
    seeds: Sequence[int]
    axes: tuple[UnitAxis, ...] = ()
    layers: range = range(0)
    stream: str = ""
    model_dtype: torch.dtype = torch.float32

    @cached_property
    def content_mask(self) -> Bool[Tensor, "batch unit"]:
        """Units that are neither padding nor special tokens.

        Falls back to `valid_mask` if the unit axes are unknown, and for samples that have special tokens only.
        """
        if not self.axes:
            return self.valid_mask
        content = self.valid_mask & ~self._pad_per_unit([np.asarray(axis.special, dtype=bool) for axis in self.axes])
        return torch.where(content.any(-1, keepdim=True), content, self.valid_mask)

    @property
    def positions(self) -> Float[Tensor, "batch unit axis"]:
        """Position of each unit in its stream, zero for padding.

        As in `Units.positions`: the fraction of the text before the unit, or (x, y) from the image centre (norm ≤ 1).
        """
        return self._pad_per_unit([axis.positions for axis in self.axes]).to(self.readout.dtype)

    def _pad_per_unit(self, arrays: Sequence[np.ndarray]) -> Shaped[Tensor, "batch unit *axis"]:
        """Stack per-unit arrays of all samples into one tensor, zero-padded."""
        padded = np.zeros((*self.valid_mask.shape, *arrays[0].shape[1:]), dtype=arrays[0].dtype)
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array
        return torch.from_numpy(padded).to(self.valid_mask.device)

    @property
    def lengths(self) -> Int[Tensor, "batch"]:
        """Number of units of each sample, without padding."""
        return self.valid_mask.sum(-1)


@dataclass
class MethodScores:
    """Scores that a method returns for a batch, padding included.

    Attributes:
        scores: One score per unit for each read-out.
        per_layer: Scores by layer, if the method has them and there is a single read-out.
        per_head: Scores by layer and head, under the same condition.
        base_value: The value of the target that the scores add to, such as that at the baseline.
        factors: Named factors that the scores are the product of, if there is a single read-out.
        components: The scores of the methods that a combined method combines, or the terms that the scores are the sum
            of, by name, if there is a single read-out.
        diagnostics: Figures measured per sample during the computation, for the certificate: a completeness gap, an
            integration error.
        resolved_options: Values chosen per sample for options left open, for the provenance: the masking value. With
            `covariances`, "interval_multiplier" is the half-width of an interval in standard deviations.
        covariances: The covariance of the scores of each sample, on the CPU, for methods that estimate intervals.
    """

    scores: Float[Tensor, "batch row unit"]
    per_layer: Float[Tensor, "batch layer unit"] | None = None
    per_head: Float[Tensor, "batch layer head unit"] | None = None
    base_value: Float[Tensor, "batch"] | None = None
    factors: "dict[str, Float[Tensor, 'batch unit']] | None" = None
    components: "dict[str, Float[Tensor, 'batch unit']] | None" = None
    diagnostics: "dict[str, Float[Tensor, 'batch']] | None" = None
    resolved_options: dict[str, list[Any]] | None = None
    covariances: "list[Float[Tensor, 'unit unit']] | None" = None

    def cpu(self) -> "MethodScores":
        """Return a copy with all tensors on the CPU.

        Returns:
            A new object; fields that are None stay None.

        Example:
            >>> MethodScores(torch.ones(1, 1, 3)).cpu().scores.device
            device(type='cpu')
        """
        return replace(
            self,
            scores=self.scores.cpu(),
            per_layer=_move_to_cpu(self.per_layer),
            per_head=_move_to_cpu(self.per_head),
            base_value=_move_to_cpu(self.base_value),
            factors=_move_all_to_cpu(self.factors),
            components=_move_all_to_cpu(self.components),
            diagnostics=_move_all_to_cpu(self.diagnostics),
        )


def _move_to_cpu(tensor: Tensor | None) -> Tensor | None:
    """Move a tensor to the CPU; None stays None."""
    if tensor is None:
        return None
    return tensor.cpu()


def _move_all_to_cpu(tensors: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """Move the tensors of a dictionary to the CPU; None stays None."""
    if tensors is None:
        return None
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@dataclass
class AttributionMethod(TiledMethod):
    """Base class of attribution methods.

    A subclass adds options as dataclass fields and implements `on_call` (one attention call), `request_reduction` (a
    sum of the attention maps, for long inputs) or `compute_scores` (the whole tape). Register it with
    `register_method`. A new instance is made for each batch.

    Attributes:
        declaration: The properties given to `register_method`.
        unit_context: Units, masks and read-out weights of the batch.
    """

    declaration: ClassVar[Declaration]
    unit_context: UnitContext = field(repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self._init_tile_state()
        self.call_scores: list[Float[Tensor, "batch head row unit"]] = []
        self.setup()

    @classmethod
    def get_pass_type(cls, options: Mapping[str, Any]) -> PassType:
        """Return the pass type that the method needs with these options.

        Args:
            options: The options that were set; those not listed have their defaults.

        Returns:
            The declared pass type, unless a subclass chooses another one by its options.
        """
        return cls.declaration.pass_type

    @classmethod
    def get_components(cls, options: Mapping[str, Any]) -> "tuple[Method, ...]":
        """Return the methods that this one combines, with these options; most methods combine none.

        Args:
            options: The options that were set; those not listed have their defaults.

        Returns:
            The methods whose scores `CombinedMethod.combine` receives, in this order.
        """
        return ()

    @classmethod
    def get_cost(cls, options: Mapping[str, Any]) -> Cost:
        """Return the cost with these options: by default the declared one.

        Options that only reproduce an author's code may add a pass that is not counted.

        Args:
            options: The options that were set; those not listed have their defaults.

        Returns:
            The number of passes for one target of one input.
        """
        return cls.declaration.cost

    @property
    def unit_contexts(self) -> dict[str, UnitContext]:
        """The unit context by stream name: of one stream here."""
        return {self.unit_context.stream: self.unit_context}

    @property
    def linear_in_target(self) -> bool:
        """Whether the scores are linear in the target, with these options."""
        return self.declaration.linear_in_target

    @property
    def signed(self) -> bool:
        """Whether scores can be negative, with these options: the sum of a vector can, its norm cannot."""
        reduce = getattr(self, "reduce", None)
        if reduce is None:
            return self.declaration.signed
        return bool(reduce == "sum")

    @property
    def depends_on_readout(self) -> bool:
        """Whether the scores depend, with these options, on the read-out position."""
        return "rows" in self.declaration.supports

    def setup(self) -> None:
        """Initialise the state before the first call, and check the options. Does nothing by default.

        Raises:
            InputError: If an option is invalid (in subclasses).

        Example:
            >>> class Power(AttributionMethod):
            ...     exponent: float = 2.0
            ...
            ...     def setup(self):
            ...         if self.exponent <= 0:
            ...             raise InputError(f"exponent={self.exponent} is not valid: give a positive number")
        """

    def process_call(self, call: AttentionCall) -> None:
        """Process one attention call and keep its contribution, if it has one.

        Args:
            call: The call with the tensors that the method requires; calls come in the order of the backward pass.
        """
        contribution = self._compute_call_scores(call)
        if contribution is not None:
            self.call_scores.append(contribution)

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Return the scores after the last call: by default the sum of the contributions of all calls.

        Args:
            tape: The recorded pass, with inputs, input gradients and the value of the target.

        Returns:
            The scores, by layer and head too if there is a single read-out.

        Example:
            >>> class Uniform(AttributionMethod):  # a control: the same score for every unit
            ...     def compute_scores(self, tape):
            ...         return MethodScores(self.unit_context.valid_mask[:, None].double())
        """
        contributions = torch.stack(self.call_scores[::-1], dim=1)  # batch layer head row unit, the first layer first
        scores = MethodScores(contributions.sum((1, 2)))
        if contributions.shape[3] == 1:
            scores.per_layer = contributions.sum((2, 3))
            if self.declaration.has_head_contributions:
                scores.per_head = contributions.sum(3)
        return scores


@dataclass
class CrossStreamMethod(TiledMethod):
    """Base class of a method for models whose streams attend to each other: one instance processes all calls.

    A subclass has the options of the method for one stream, and is registered with `register_cross_stream_method`.

    Attributes:
        declaration: The declaration of the method for one stream.
        unit_contexts: The unit context of each stream.
        layers: The selected layers for each pair (query stream, key stream).
        residual_towers: Names of the attention modules of uni-modal towers that run in parallel to a fused stream with
            the same units. Their output is added to the stream after each of its layers (BridgeTower); before the first
            layer of the stream, the two are identical.
        simultaneous_groups: Block of each attention module. Within a block, each stream attends to the other streams as
            they were at the start of the block.
        linear_in_target: Whether the scores are linear in the target.
        depends_on_readout: Whether the scores depend on the read-out position.
    """

    declaration: ClassVar[Declaration]
    unit_contexts: dict[str, UnitContext] = field(repr=False, kw_only=True)
    layers: dict[tuple[str, str], range] = field(repr=False, kw_only=True)
    residual_towers: frozenset[str] = field(default=frozenset(), repr=False, kw_only=True)
    simultaneous_groups: dict[str, str] = field(default_factory=dict, repr=False, kw_only=True)
    linear_in_target: ClassVar[bool] = False
    depends_on_readout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._init_tile_state()
        self.setup()

    @property
    def signed(self) -> bool:
        """Whether scores can be negative."""
        return self.declaration.signed

    def setup(self) -> None:
        """Initialise the state before the first call, and check the options. Does nothing by default."""

    def process_call(self, call: AttentionCall) -> None:
        """Process one attention call.

        Args:
            call: The call, of one stream or between two; calls come in the order of the backward pass.
        """
        self._compute_call_scores(call)

    def compute_scores(self, tape: Tape) -> dict[str, MethodScores]:
        """Return the scores of the units of each stream.

        Args:
            tape: The recorded pass, with inputs, input gradients and the value of the target.

        Returns:
            Scores by stream name.
        """
        raise NotImplementedError

    def has_readout(self, stream: str) -> bool:
        """Whether a read-out position lies in this stream.

        Args:
            stream: Name of the stream.

        Returns:
            True if any sample of the batch is read out at a unit of this stream.
        """
        return bool(self.unit_contexts[stream].readout.any())


def compat_option(default: Any) -> Any:
    """Declare an option that only reproduces an author's code.

    Declared properties are verified for the other options, not for these.

    Args:
        default: The value with which the method is as published.

    Returns:
        A dataclass field.
    """
    return field(default=default, metadata={"of authors": True})


METHOD_REGISTRY: dict[str, type[AttributionMethod]] = {}
#: The variants of methods for models whose streams attend to each other.
CROSS_STREAM_REGISTRY: dict[str, type[CrossStreamMethod]] = {}
CrossStreamMethodT = TypeVar("CrossStreamMethodT", bound=type[CrossStreamMethod])
MethodT = TypeVar("MethodT", bound=type[AttributionMethod])


def register_method(
    name: str, *, requires: tuple[str, ...] = (), **declaration_fields: Any
) -> Callable[[MethodT], MethodT]:
    """Register a method under a name, from inside or outside the package.

    Args:
        name: Name for `explain(method=...)` and the command line.
        requires: Tensors that must be recorded, such as "attention" or "attention_gradient".
        **declaration_fields: The other fields of `Declaration`; `family`, `cost`, `citation`, `signed` and `target`
            have no default.

    Returns:
        A class decorator. It makes the class a dataclass, whose fields are the options of the method.

    Raises:
        InputError: Another class has this name, or the cost is not a `Cost`.

    Example:
        >>> @register_method("flat", family="control", cost=Cost(forward=1), citation="–", signed=False, target="none")
        ... class Flat(AttributionMethod):
        ...     def compute_scores(self, tape):
        ...         return MethodScores(self.unit_context.valid_mask[:, None].double())
        >>> METHOD_REGISTRY.pop("flat").declaration.taxonomy
        'post-hoc, model-specific, local'
    """

    def decorate(cls: MethodT) -> MethodT:
        supports = frozenset(declaration_fields.pop("supports", ()))
        registered = METHOD_REGISTRY.get(name)
        if registered is not None and (registered.__module__, registered.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise InputError(
                f"a method named {name!r} is already registered by {registered.__module__}: choose another name"
            )
        cls.declaration = Declaration(
            name=name, requires=resolve_requirements(requires), supports=supports, **declaration_fields
        )
        method_class = dataclass(cls)  # options are plain fields of the class
        METHOD_REGISTRY[name] = method_class
        return method_class  # type: ignore[return-value]

    return decorate


def register_cross_stream_method(name: str) -> Callable[[CrossStreamMethodT], CrossStreamMethodT]:
    """Register the variant of a registered method for models whose streams attend to each other.

    Args:
        name: The name of the method, which must be registered already.

    Returns:
        A class decorator. It makes the class a dataclass with the declaration of the registered method.

    Raises:
        KeyError: The method is not registered (by the decorator).
    """

    def decorate(cls: CrossStreamMethodT) -> CrossStreamMethodT:
        cls.declaration = METHOD_REGISTRY[name].declaration
        method_class = dataclass(cls)
        CROSS_STREAM_REGISTRY[name] = method_class
        return method_class  # type: ignore[return-value]

    return decorate


@dataclass(frozen=True)
class Method:
    """A method with its options: `clearhead.Method("generic", layers=(-4, None))`.

    Attributes:
        options: The options that were set, as pairs sorted by name.

    Args:
        name: The name of a registered method.
        **options: Options of the method, and `layers`, `heads` and `rows` if it supports them. A value of None for
            one of these three means the default.

    Raises:
        InputError: The method or the option is unknown, or the value is not accepted.

    Example:
        >>> str(Method("grad-sam", received=True))
        'grad-sam(received=True)'
    """

    name: str
    options: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, **options: Any) -> None:
        if name not in METHOD_REGISTRY:
            raise unknown_value_error("method", name, sorted(METHOD_REGISTRY))
        accepted = {*self.option_names(name), *METHOD_REGISTRY[name].declaration.supports}
        for option in options:
            if option not in accepted and option not in SHARED_OPTION_PARSERS:
                raise unknown_value_error(f"option of {name}", option, sorted(accepted))
        set_options = {
            key: value for key, value in options.items() if value is not None or key not in SHARED_OPTION_PARSERS
        }
        for key in set_options:
            if key in SHARED_OPTION_PARSERS and key not in METHOD_REGISTRY[name].declaration.supports:
                supporting = sorted(n for n, cls in METHOD_REGISTRY.items() if key in cls.declaration.supports)
                raise InputError(f"{name} does not accept {key}=; methods that accept it: {', '.join(supporting)}")
        hints = get_type_hints(METHOD_REGISTRY[name])
        validated = {}
        for key, value in set_options.items():
            if key in SHARED_OPTION_PARSERS:
                validated[key] = SHARED_OPTION_PARSERS[key](value)
            else:
                validated[key] = validate_option(key, value, hints[key])
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", tuple(sorted(validated.items())))

    @staticmethod
    def option_names(name: str) -> list[str]:
        """Return the names of the options that only this method has (without `layers`, `heads` and `rows`).

        Args:
            name: Name of a registered method.

        Returns:
            Names of the dataclass fields of its class, in the order of their declaration.

        Raises:
            KeyError: If the method is not registered.

        Example:
            >>> Method.option_names("grad-sam")
            ['received']
        """
        return [f.name for f in fields(METHOD_REGISTRY[name]) if f.name != "unit_context"]

    @property
    def declaration(self) -> Declaration:
        """The declared properties of the method."""
        return METHOD_REGISTRY[self.name].declaration

    @property
    def pass_type(self) -> PassType:
        """The pass type that the method needs with these options."""
        return METHOD_REGISTRY[self.name].get_pass_type(dict(self.options))

    @property
    def components(self) -> "tuple[Method, ...]":
        """The methods that this one combines, if it is a combined method.

        >>> [component.name for component in Method("ensemble").components]
        ['deeplift-shap', 'saliency']
        """
        return METHOD_REGISTRY[self.name].get_components(dict(self.options))

    @property
    def cost(self) -> Cost:
        """The number of passes that the method takes with these options.

        >>> print(Method("integrated-gradients", steps=20).cost)
        32 forward and 31 backward passes, one and a half per step, batched
        """
        return METHOD_REGISTRY[self.name].get_cost(dict(self.options))

    @property
    def constructor_kwargs(self) -> dict[str, Any]:
        """The options that the class of the method takes; the engine handles `layers`, `heads` and `rows`."""
        return {key: value for key, value in self.options if key in self.option_names(self.name)}

    def get_option(self, name: str, default: Any = None) -> Any:
        """Return the value of an option if it was set, else `default`.

        Args:
            name: Name of the option.
            default: Value for an option that was not set.

        Returns:
            The value that was set. The default of the method itself is not looked up.

        Example:
            >>> Method("grad-sam", received=True).get_option("received"), Method("grad-sam").get_option("received")
            (True, None)
        """
        return dict(self.options).get(name, default)

    def with_defaults(self, **options: Any) -> "Method":
        """Return the method with these options added; options already set, and values of None, are left out.

        Args:
            **options: Options by name.

        Returns:
            A new method.

        Raises:
            InputError: If the method does not accept an option.

        Example:
            >>> str(Method("generic", layers=(-4, None)).with_defaults(layers=(0, 2), heads=None))
            'generic(layers=(-4, None))'
        """
        extra = {key: value for key, value in options.items() if value is not None and key not in dict(self.options)}
        return Method(self.name, **dict(self.options), **extra)

    def __str__(self) -> str:
        """Return the name with the options that were set, e.g. "grad-sam(received=True)": the key in results."""
        if not self.options:
            return self.name
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.options)
        return f"{self.name}({arguments})"


def parse_methods(methods: Any) -> list[Method]:
    """Return a list of methods from one or several names or `Method` objects.

    Args:
        methods: A name, a `Method`, or an iterable of them.

    Returns:
        One `Method` per item.

    Raises:
        InputError: A method is unknown, or there is none.

    Example:
        >>> [str(method) for method in parse_methods(["generic", Method("tam", steps=5)])]
        ['generic', 'tam(steps=5)']
    """
    if isinstance(methods, str | Method):
        methods = [methods]
    try:
        items = list(methods)
    except TypeError:
        raise unknown_value_error("method", methods, sorted(METHOD_REGISTRY)) from None
    if not items:
        raise InputError("no method was given")
    return [item if isinstance(item, Method) else Method(item) for item in items]


def resolve_layer_range(layers: LayerRange | tuple[float | None, float | None] | None, num_layers: int) -> range:
    """Return the layers that a half-open range selects.

    Args:
        layers: (first, stop) as in a slice, negative from the end; a float is a fraction of the depth. None for all.
        num_layers: The number of layers of the model.

    Returns:
        The selected layers, counted from 0.

    Raises:
        InputError: No layer is selected.

    Example:
        >>> [resolve_layer_range(layers, 12) for layers in [(-4, None), None, (0.25, None)]]
        [range(8, 12), range(0, 12), range(3, 12)]
        >>> resolve_layer_range((None, 0.5), 1)
        range(0, 1)
    """
    first, stop = layers or (None, None)
    if isinstance(first, float):
        first = floor(first * num_layers + 1e-9)
    if isinstance(stop, float):
        stop = ceil(stop * num_layers - 1e-9)  # rounded up, so that a fraction selects at least one layer
    selected = range(num_layers)[slice(first, stop)]
    if not selected:
        raise InputError(
            f"layers={layers} selects none of the {num_layers} layers: choose another range; ranges are half-open, as "
            "in layers=(-4, None)"
        )
    return selected
