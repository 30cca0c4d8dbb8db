"""Base class and registry of model adapters: a model with its processor, and its inputs as samples with units."""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from clearhead.capture.checks.self_test import count_calls_from_config
from clearhead.capture.session import ModelSession
from clearhead.errors import InputError, UnsupportedError, unknown_value_error
from clearhead.images import RenderedOnAccess
from clearhead.targets import CLASS_SCALES, MaskedToken, PositionTarget, Target, describe_spec
from clearhead.units import UnitAxis, Units

#: A kind of read-out ("first", "mean" …), or the number of the row that is read.
Readout = str | int


@dataclass
class Sample:
    """One input, ready for the model (tensors without a batch axis), and the units along each axis of attention."""

    inputs: dict[str, Tensor]
    axes: dict[str, UnitAxis]
    num_truncated: int = 0
    mask_positions: tuple[int, ...] = ()
    #: What samples of one batch must have in common, beside their kinds of inputs.
    batch_key: tuple[int, ...] = ()
    #: The image as the model sees it; it may be set to a function that renders it.
    image: UInt8[np.ndarray, "height width 3"] | None = RenderedOnAccess()  # type: ignore[assignment]  # noqa: RUF009

    @property
    def unrendered_image(self) -> Any:
        """The image, or the function that will render it."""
        return self.__dict__["image"]

    @classmethod
    def from_units(cls, inputs: dict[str, Tensor], units: Units, **fields: Any) -> "Sample":
        """A sample of one stream."""
        return cls(inputs, {units.stream: UnitAxis.concat(units)}, **fields)

    @property
    def units(self) -> Units:
        """The units of a sample of one stream."""
        (axis,) = self.axes.values()
        (units,) = axis.unit_groups
        return units

    def derive_seed(self, seed: int) -> int:
        """A random seed that depends on the content alone, never on the place in a batch."""
        digest = hashlib.blake2b(str(seed).encode(), digest_size=7)
        for name in sorted(self.inputs):
            tensor = self.inputs[name].detach().cpu()
            digest.update(name.encode() + str(tuple(tensor.shape)).encode())
            digest.update(np.ascontiguousarray(tensor.double().numpy()).data)
        return int.from_bytes(digest.digest(), "big")


@dataclass
class InputOptions:
    """How inputs are read: tokenisation, truncation and generation.

    Attributes:
        max_length: Maximum number of tokens of a text; None for the model's maximum.
        truncation: Whether longer texts are truncated; if False, they are refused.
        truncation_side: The side from which tokens are removed, "left" or "right"; None for the tokenizer's.
        unit_names: Names of the units of given model inputs (`tokens=` of `explain`).
        continuation: Continuation to explain, as a text or token ids (`answer=` of `explain`).
        max_new_tokens: Maximum number of generated tokens.
        keep_padding: Whether padding in given model inputs is kept, as in the code of some authors.

    Raises:
        InputError: An option is invalid.
    """

    max_length: int | None = None
    truncation: bool = True
    truncation_side: str | None = None
    unit_names: Sequence[str] | Sequence[Sequence[str]] | None = None
    continuation: Any = None
    max_new_tokens: int = 32
    keep_padding: bool = False

    def __post_init__(self) -> None:
        if self.truncation_side not in (None, "left", "right"):
            raise InputError(f"truncation_side={self.truncation_side!r} is not valid: use 'left' or 'right'")

    def split_per_input(self, num_inputs: int) -> "list[InputOptions]":
        """Return the options of each input; `unit_names` and `continuation` can be lists with one entry per input."""
        hows = [self] * num_inputs
        if self.unit_names is not None and num_inputs > 1:
            if len(self.unit_names) != num_inputs or any(isinstance(names, str) for names in self.unit_names):
                raise InputError(
                    f"tokens= must name the units of each of the {num_inputs} inputs: pass a list of lists"
                )
            hows = [replace(how, unit_names=names) for how, names in zip(hows, self.unit_names, strict=True)]
        ids = isinstance(self.continuation, list) and all(isinstance(one, int) for one in self.continuation)
        if isinstance(self.continuation, list) and not (ids and num_inputs == 1):
            if len(self.continuation) != num_inputs:
                raise InputError(
                    f"answer= has {len(self.continuation)} texts for {num_inputs} "
                    f"input{'s' if num_inputs > 1 else ''}: pass one for each, a text or its token ids"
                )
            hows = [replace(how, continuation=answer) for how, answer in zip(hows, self.continuation, strict=True)]
        return hows


@dataclass
class NamedInputs:
    """One input of several streams, each by name: `explain(text=…, image=…)`."""

    text: Any = None
    image: Any = None
    audio: Any = None
    regions: Any = None


@dataclass
class ModelAdapter(ABC):
    """A model with its processor, as something to be explained."""

    model: Any
    processor: Any = None
    readout: Readout | None = None
    #: What the model was asked for by; without that, its class.
    name: str = ""
    #: What finds the regions of a picture (features and boxes), for models that read regions.
    region_detector: Callable[[Any], tuple[Any, Any]] | None = None
    #: Whether passes in which nothing is captured go through torch.compile.
    is_compiled: bool = False

    stream: ClassVar[str]
    #: The inputs that it takes by name; one of them alone need not be named.
    input_names: ClassVar[tuple[str, ...]]
    #: The class of transformers that opens its processor.
    processor_class: ClassVar[str]
    grad_input_name: ClassVar[str]
    #: What must be asked for by name when a model is loaded; None for what its class is made for.
    task: ClassVar[str | None] = None
    #: Endings of the class names of models that this subject stands for.
    class_suffixes: ClassVar[tuple[str, ...]] = ()
    #: The modules that look words up, where the model itself does not say.
    embedding_modules: ClassVar[Sequence[nn.Module] | None] = None

    #: Whether the labels are words at a masked position.
    masked: ClassVar[bool] = False
    #: Whether its scores are products of what the model puts out, so that rules for products hold for them.
    score_is_product: ClassVar[bool] = False
    #: The scales that a target can have; the first is meant where none is given.
    target_scales: ClassVar[tuple[str, ...]] = CLASS_SCALES

    multi_label: bool = field(init=False)
    _labels: dict[int, str] | None = field(init=False, default=None)
    #: Identity and size of the configuration's labels when all of their keys were integers.
    _checked_labels: tuple[int, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        config, takes = self.model.config, self.get_main_input_name()
        if takes != self.grad_input_name:
            name = type(unwrap_base_model(self.model)).__name__
            raise UnsupportedError(f"{name} takes {takes}: clearhead does not support that type of input yet")
        self.multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
        self.readout = self.choose_default_readout() if self.readout is None else self.readout
        self.name = self.name or str(getattr(config, "name_or_path", "") or type(self.model).__name__)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the session out of copies and pickles: a copy may run another model."""
        return {name: value for name, value in vars(self).items() if name != "session"}

    def check_return_dict(self) -> None:
        """Refuse a model that answers without names: what stands where in a bare tuple differs from model to model."""
        if not getattr(self.model.config, "return_dict", True):
            raise InputError(
                f"{type(self.model).__name__} returns a plain tuple (config.return_dict=False), in which its logits "
                "cannot be identified: set model.config.return_dict = True"
            )

    @property
    def labels(self) -> dict[int, str]:
        """What the classes are called: by the kind of subject, or by the configuration as it is now."""
        return self.read_config_labels() if self._labels is None else self._labels

    @labels.setter
    def labels(self, named: dict[int, str]) -> None:
        self._labels = named

    def read_config_labels(self) -> dict[int, str]:
        """The names in the configuration, which people write there after loading, too."""
        labels = getattr(self.model.config, "id2label", None) or {}
        key = (id(labels), len(labels))
        if self._checked_labels != key:  # looked up for every class of a prediction, of which there may be thousands
            if not all(isinstance(index, int) for index in labels):
                return {int(index): name for index, name in labels.items()}
            self._checked_labels = key
        return labels

    def get_main_input_name(self) -> str:
        """What the model says that it takes."""
        return str(getattr(unwrap_base_model(self.model), "main_input_name", self.grad_input_name))

    @abstractmethod
    def choose_default_readout(self) -> Readout | None:
        """Which row of a relevance matrix speaks for the target; None where no row does."""

    @abstractmethod
    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        """One raw input as a list of one sample (a mapping of model inputs may hold several)."""

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The batch that the model is called with, padded where lengths differ."""

    @abstractmethod
    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *grad_input_name']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """The leaves (embeddings, pixels …) as one vector per unit, along each axis."""

    @abstractmethod
    def make_example_input(self) -> Any:
        """Any small valid input, to test the recorder on."""

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        """The scores of all classes. Samples may come several times, all of them once for each step."""
        if any(isinstance(target.spec, MaskedToken) or target.mask_index is not None for target in targets):
            raise InputError(f"{type(self.model).__name__} does not predict masked tokens: pass a label or an index")
        return output.logits.repeat(len(samples) // len(output.logits), 1)

    def find_readout_rows(self, sample: Sample, target: Target) -> dict[int, float]:
        """Which units' rows are read, and how much each counts, in a model of one stream."""
        return compute_readout_weights(self.readout, sample.units)

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        """The rows that are read along each axis; an axis that only others look at has none."""
        return {} if self.readout is None else {self.stream: self.find_readout_rows(sample, target)}

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str] | None:
        """Whose queries look at whose keys in the n-th call of an attention module; None if it is to be left out."""
        return self.stream, self.stream

    def is_residual_tower(self, module: str) -> bool:
        """Whether a call is of a tower that goes on beside its stream, and is added to it again after each layer."""
        return False

    def find_simultaneous_group(self, module: str) -> str | None:
        """The block of calls in which each stream sees the others as they were when it began; None for a call alone."""
        return None

    def count_expected_calls(self) -> int | None:
        """How many attention calls one pass makes, those left out not counted; None where that is not known."""
        return count_calls_from_config(self.model.config)

    def make_padded_batch(self, sample: Sample) -> dict[str, Any] | None:
        """Make a batch with padded rows for the self-test; None if an `attention_mask` is enough to make one."""
        return None

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        """The inputs whose vectors the gradients go to."""
        return (self.grad_input_name,) if self.grad_input_name in batch else ("inputs_embeds",)

    def expand_target(self, sample: Sample, target: Target) -> list[Target]:
        """The targets that one request stands for: one, unless it asks for several steps or detections."""
        if isinstance(target.spec, PositionTarget):
            raise InputError(
                f"the target is {describe_spec(target.spec)}, but {type(self.model).__name__} makes one prediction per "
                "input: pass a label or an index"
            )
        return [target]

    @property
    def positions_depend_on_batch_length(self) -> bool:
        """Whether positions are counted by the length of the longest input of a batch: then each needs its own."""
        return False

    def choose_targets_per_pass(self, samples: Sequence[Sample]) -> int | None:
        """How many targets are best explained together; None for as many as there is room for."""
        return None

    def find_head_rows(
        self, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> tuple[nn.Module, list[int]] | None:
        """The module that makes scores of each row by itself, and the row that each target comes from; None if none."""
        return None

    def resolve_sample(self, sample: Sample, target: Target) -> Sample:
        """The sample with what the target is about and only the model can say: the words that it generates."""
        return sample

    def is_single_input(self, raw_inputs: list[Any]) -> bool:
        """Whether a list is one input (a conversation), and not several."""
        return False

    def truncate_to_targets(self, sample: Sample, targets: Sequence[Target]) -> Sample:
        """The sample without what none of these targets can depend on."""
        return sample

    def truncate_to_shared_prefix(self, sample: Sample) -> Sample:
        """What all targets of a sample have in common, however many of them are explained together."""
        return sample

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        """Of a model of several streams: what reads each (it has `words`, or patches), and the input it reads."""
        return {}

    @property
    def grad_parameters(self) -> Sequence[nn.Parameter]:
        """Learned vectors that attention starts from beside the input, such as a detector's object queries."""
        return ()

    def extend_target_description(self, sample: Sample, target: Target, description: dict[str, Any]) -> dict[str, Any]:
        """What is said about a target, with what else is known of it, such as where an object was found."""
        return description

    def forward_context(self) -> AbstractContextManager[None]:
        """What must hold while the model runs, recorded; whatever it changes about the model, it puts back."""
        return nullcontext()

    def find_unsupported_reason(self, method: str) -> str | None:
        """Why one method cannot speak for this model; None where it can."""
        return None

    def find_attention_unsupported_reason(self) -> str | None:
        """Why no method that reads attention can speak for this model; None where they can."""
        return None

    def join_step_names(self, names: Sequence[str]) -> str:
        """What several steps together are called."""
        return ", ".join(names)

    def select_prediction_scores(self, scores: Float[Tensor, "label"]) -> Float[Tensor, "label"]:
        """The scores that a prediction is chosen from: of all classes."""
        return scores

    def label_index(self, label: str | int) -> int:
        if isinstance(label, str):
            for same in (str, str.casefold):
                found = [index for index, name in self.labels.items() if same(name) == same(label)]
                if len(found) > 1:
                    places = ", ".join(map(str, found))
                    raise InputError(f"{len(found)} labels are named {label!r}: choose one by its index ({places})")
                if found:
                    return found[0]
            if not label.lstrip("-").isdigit():
                raise unknown_value_error("label", label, self.labels.values())
            label = int(label)
        count = max(self.labels, default=-1) + 1  # a configuration may leave some without a name
        if label not in range(count):
            raise InputError(f"label {label} does not exist: the model has {count} labels, counted from 0")
        return label

    @property
    def is_regression(self) -> bool:
        """Whether the outputs are measures, not classes: they have no probabilities."""
        kind = getattr(getattr(self.model, "config", None), "problem_type", None)
        return kind == "regression" or (len(self.labels) == 1 and not self.multi_label)

    def label_name(self, index: int) -> str:
        return self.labels.get(index, str(index))

    @cached_property
    def session(self) -> ModelSession:
        """Runs the model."""
        return ModelSession(self.model, self.forward_context, self.is_compiled)

    @property
    def model_class_name(self) -> str:
        return type(self.model).__name__

    @property
    def device(self) -> torch.device:
        return find_module_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return next(part.dtype for part in self.model.parameters() if part.is_floating_point())

    def forward_accepts(self, argument: str) -> bool:
        """Whether the model's forward takes this argument."""
        forward = unwrap_base_model(self.model).forward
        if inspect.ismethod(forward):
            return argument in _get_parameter_names(forward.__func__)
        return argument in inspect.signature(forward).parameters  # not cached: it may belong to one model


@lru_cache(maxsize=256)
def _get_parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters of a function."""
    return frozenset(inspect.signature(function).parameters)


def compute_readout_weights(readout: Readout | None, units: Units | UnitAxis) -> dict[int, float]:
    """Which rows a read-out reads, with their weights.

    >>> from clearhead.units import build_patch_units
    >>> compute_readout_weights("first + patches", build_patch_units((1, 2), special_names=["[CLS]"]))
    {0: 0.5, 1: 0.25, 2: 0.25}
    """
    if readout is None:
        raise UnsupportedError("this model's attention has no read-out position for the target")
    if isinstance(readout, int):
        return {readout % len(units): 1.0}
    if readout not in _READOUT_WEIGHTS:
        raise unknown_value_error("readout", readout, _READOUT_WEIGHTS)
    return _READOUT_WEIGHTS[readout](units)


def _compute_patch_mean_weights(units: Units | UnitAxis) -> dict[int, float]:
    """Read-out weights of the mean over patches: 1/n for each of the n units that are not special."""
    inside = [i for i, special in enumerate(units.special) if not special]
    return {i: 1 / len(inside) for i in inside}


#: The kinds of read-outs.
_READOUT_WEIGHTS: dict[str, Callable[[Units | UnitAxis], dict[int, float]]] = {
    "first": lambda units: {0: 1.0},
    "first two": lambda units: {0: 0.5, 1: 0.5},
    "last": lambda units: {len(units) - 1: 1.0},
    "mean": lambda units: {i: 1 / len(units) for i in range(len(units))},
    "patches": _compute_patch_mean_weights,
    "first + patches": lambda units: {
        0: 0.5,
        **{i: weight / 2 for i, weight in _compute_patch_mean_weights(units).items()},
    },
}


ADAPTER_CLASSES: list[type[ModelAdapter]] = []


S = TypeVar("S", bound=type[ModelAdapter])


def register_adapter(cls: S) -> S:
    """Register an adapter class for a kind of model.

    Where several adapters accept a model, the one that was registered last is used.

    Args:
        cls: A subclass of `ModelAdapter`.

    Returns:
        The class, so that the function can be used as a decorator.

    Example:
        >>> @register_adapter  # doctest: +SKIP
        ... class MyAdapter(ModelAdapter): ...
    """
    ADAPTER_CLASSES.insert(0, cls)
    return cls


def unwrap_base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside, where adapters wrap it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def find_module_device(module: nn.Module) -> torch.device:
    """Where a module computes. Weights that accelerate keeps elsewhere are on "meta": its hooks say where they go."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    hooks = [getattr(part, "_hf_hook", None) for part in module.modules()]
    each = [one for hook in hooks for one in getattr(hook, "hooks", [hook])]
    told = [getattr(hook, "execution_device", None) for hook in each]
    return next((torch.device(one) for one in told if one is not None), device)


def list_class_names(model: nn.Module) -> list[str]:
    """The model's class and those it is made from: a class of one's own is taken for what it extends."""
    return [cls.__name__ for cls in type(unwrap_base_model(model)).__mro__]


def find_adapter_class(class_names: Sequence[str], task: str | None = None) -> type[ModelAdapter] | None:
    """The kind of subject that stands for a class of models, given by its name and those it is made from."""
    tasks = {cls.task for cls in ADAPTER_CLASSES}
    if task not in tasks:
        raise unknown_value_error("task", task, sorted(filter(None, tasks)))
    for name in class_names:
        fits = [
            (len(ending), -place)
            for place, cls in enumerate(ADAPTER_CLASSES)
            for ending in cls.class_suffixes
            if cls.task == task and name.endswith(ending)
        ]
        if fits:  # the one that says most about the name; of several, the last one added
            return ADAPTER_CLASSES[-max(fits)[1]]
    return None


def format_supported_suffixes() -> str:
    return "supported architectures are " + ", ".join(
        f"*{ending}" for cls in ADAPTER_CLASSES if cls.task is None for ending in cls.class_suffixes
    )


def make_adapter(
    model: nn.Module,
    processor: Any = None,
    readout: Readout | None = None,
    name: str = "",
    region_detector: Callable[[Any], tuple[Any, Any]] | None = None,
    task: str | None = None,
    is_compiled: bool = False,
) -> ModelAdapter:
    """The subject that stands for this class of model."""
    names = list_class_names(model)
    kind = find_adapter_class(names, task)
    if kind is None:
        raise UnsupportedError(f"clearhead does not support {names[0]}; {format_supported_suffixes()}")
    return kind(model, processor, readout, name, region_detector, is_compiled)


def unbatch_inputs(adapter: ModelAdapter, inputs: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Split a mapping of model inputs into samples without a batch axis, on the CPU; `collate` moves them together."""
    strange = [name for name in inputs if not adapter.forward_accepts(name)]
    if strange:  # most models swallow arguments that they do not know
        raise InputError(
            f"{type(adapter.model).__name__} does not take {', '.join(strange)}: remove "
            f"{'it' if len(strange) == 1 else 'them'} from the model inputs"
        )
    try:
        parts = {name: torch.as_tensor(part).cpu() for name, part in inputs.items() if part is not None}
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InputError(f"model inputs must be tensors with a batch axis ({problem})") from None
    if not parts or any(part.dim() == 0 for part in parts.values()):
        raise InputError("model inputs must be tensors with a batch axis")
    sizes = {name: len(part) for name, part in parts.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise InputError(f"model inputs must have the same batch size, at least 1, but have {sizes}")
    count = next(iter(sizes.values()))
    return [{name: part[i] for name, part in parts.items()} for i in range(count)]
