"""Base class and registry of model adapters: a model with its processor, and its inputs as samples with units."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.capture.checks.self_test import count_calls_from_config
from clearhead.capture.session import ModelSession
from clearhead.errors import InputError, UnsupportedError, unknown_value_error
from clearhead.sample import Sample
from clearhead.targets import CLASS_SCALES, MaskedToken, PositionTarget, Target, describe_spec
from clearhead.units import UnitAxis, Units

#: A kind of read-out ("first", "mean" …), or the number of the row that is read.
Readout = str | int


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
        """Return the options of each input; `unit_names` and `continuation` can be lists with one entry per input.

        A list of integers is the continuation of a single input, as token ids.

        Args:
            num_inputs: Number of inputs.

        Returns:
            One object per input.

        Raises:
            InputError: A list has another length than the inputs.

        Example:
            >>> [options.continuation for options in InputOptions(continuation=["yes", "no"]).split_per_input(2)]
            ['yes', 'no']
        """
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
    """One input of several streams, each by name: `explain(text=…, image=…)`.

    Attributes:
        text: A text, or what the text stream of the model takes instead.
        image: A path, a PIL image or an array of uint8.
        audio: A path, or a waveform.
        regions: Precomputed features and boxes of image regions.
    """

    text: Any = None
    image: Any = None
    audio: Any = None
    regions: Any = None


@dataclass
class ModelAdapter(ABC):
    """A model with its processor: takes inputs, names their units, and reads out class scores and relevance.

    Subclass it for a kind of model that clearhead does not know, and register the class with `register_adapter`.

    Attributes:
        model: The model, of transformers or a module of your own.
        processor: Its tokenizer, image processor or processor.
        readout: Which row of a relevance matrix is read: "first", "last", "mean", "patches", … or an index; None for
            the default of the kind of model.
        name: The name that the model was loaded by; otherwise that of its class.
        region_detector: Finds the regions (features and boxes) of an image, for models that read regions.
        is_compiled: Whether passes that record nothing run through torch.compile.
        stream: Name of the stream, such as "text".
        input_names: The keywords of `explain` that name inputs of this kind of model.
        processor_class: The auto class of transformers that opens the processor.
        grad_input_name: The model input whose vectors input gradients belong to.
        task: Name to pass as `task=` to `clearhead.load`; None for the task of the model's class.
        class_suffixes: Endings of the names of the model classes that the adapter accepts.
        embedding_modules: The modules that look up token embeddings, where the model does not name them.
        masked: Whether labels are tokens at a masked position.
        score_is_product: Whether class scores are products of tensors of the output, so that backward rules for
            products apply to them.
        target_scales: Scales of the target's value; the first one is the default.
        multi_label: Whether each class has its own probability (sigmoid).

    Raises:
        UnsupportedError: If the model takes another type of input.

    Example:
        >>> adapter = clearhead.load("zoo:sentiment").adapter  # doctest: +SKIP
        >>> adapter.labels, adapter.readout, adapter.input_names  # doctest: +SKIP
        ({0: 'NEGATIVE', 1: 'POSITIVE'}, 'first', ('text',))
    """

    model: Any
    processor: Any = None
    readout: Readout | None = None
    name: str = ""
    region_detector: Callable[[Any], tuple[Any, Any]] | None = None
    is_compiled: bool = False

    stream: ClassVar[str]
    input_names: ClassVar[tuple[str, ...]]
    processor_class: ClassVar[str]
    grad_input_name: ClassVar[str]
    task: ClassVar[str | None] = None
    class_suffixes: ClassVar[tuple[str, ...]] = ()
    embedding_modules: ClassVar[Sequence[nn.Module] | None] = None

    masked: ClassVar[bool] = False
    score_is_product: ClassVar[bool] = False
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
        """Check that the model returns named outputs, because a plain tuple does not tell which element the logits are.

        Raises:
            InputError: If `config.return_dict` is False.
        """
        if not getattr(self.model.config, "return_dict", True):
            raise InputError(
                f"{type(self.model).__name__} returns a plain tuple (config.return_dict=False), in which its logits "
                "cannot be identified: set model.config.return_dict = True"
            )

    @property
    def labels(self) -> dict[int, str]:
        """Class names by index: those set on the adapter, otherwise those of the model's configuration as it is now."""
        return self.read_config_labels() if self._labels is None else self._labels

    @labels.setter
    def labels(self, named: dict[int, str]) -> None:
        self._labels = named

    def read_config_labels(self) -> dict[int, str]:
        """Read the class names of the configuration, which may change after loading.

        Returns:
            `config.id2label` with integer keys; empty if there is none.
        """
        labels = getattr(self.model.config, "id2label", None) or {}
        key = (id(labels), len(labels))
        if self._checked_labels != key:  # looked up for every class of a prediction, of which there may be thousands
            if not all(isinstance(index, int) for index in labels):
                return {int(index): name for index, name in labels.items()}
            self._checked_labels = key
        return labels

    def get_main_input_name(self) -> str:
        """Return the name of the model's main input.

        Returns:
            "input_ids", "pixel_values", …; `grad_input_name` if the model names none.
        """
        return str(getattr(unwrap_base_model(self.model), "main_input_name", self.grad_input_name))

    @abstractmethod
    def choose_default_readout(self) -> Readout | None:
        """Choose the default read-out: the row of a relevance matrix that the target is computed from.

        Returns:
            A kind of read-out ("first", "mean", …) or an index; None if no row belongs to the target.
        """

    @abstractmethod
    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        """Encode one raw input.

        Args:
            raw: What the user gave: a text, an image, `NamedInputs`, a mapping of model inputs, …
            options: Tokenisation, truncation and generation.

        Returns:
            One sample; several for a mapping of model inputs with a batch axis.

        Raises:
            InputError: If the input cannot be read.
        """

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Combine samples into a batch, padded where lengths differ, on the model's device.

        Args:
            samples: Samples whose `batch_key` is equal.

        Returns:
            Keyword arguments of the model.
        """

    @abstractmethod
    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *grad_input_name']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """Arrange the vectors of inputs (embeddings, pixels, …), or their gradients, as one vector per unit.

        Args:
            vectors: Tensors by name of the model input, as `find_grad_input_names` lists them.
            samples: The samples of the batch.

        Returns:
            Vectors along each axis, by stream; zero for padding.
        """

    @abstractmethod
    def make_example_input(self) -> Any:
        """Make a small valid input, for self-tests where no input of the user is short enough.

        Returns:
            A raw input that `make_samples` accepts.
        """

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        """Compute the logits of all classes, one row for each sample and target.

        Args:
            output: Output of the model for a batch.
            samples: The sample of each row: all samples of the batch, once for each of their targets.
            targets: The target of each row; selects the position in outputs that have many.

        Returns:
            The logits, in the graph of the output.

        Raises:
            InputError: If the model does not have such targets.
        """
        if any(isinstance(target.spec, MaskedToken) or target.mask_index is not None for target in targets):
            raise InputError(f"{type(self.model).__name__} does not predict masked tokens: pass a label or an index")
        return output.logits.repeat(len(samples) // len(output.logits), 1)

    def find_readout_rows(self, sample: Sample, target: Target) -> dict[int, float]:
        """Find the read-out positions of a target, in a model of one stream.

        Args:
            sample: The sample.
            target: The target.

        Returns:
            The weight of each unit whose row of a relevance matrix is read; the weights sum to 1.

        Raises:
            UnsupportedError: If no row belongs to the target.
        """
        return compute_readout_weights(self.readout, sample.units)

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        """Find the read-out positions of a target along each axis.

        Args:
            sample: The sample.
            target: The target.

        Returns:
            By stream, the weight of each unit whose row is read. A stream without a read-out position is left out.
        """
        return {} if self.readout is None else {self.stream: self.find_readout_rows(sample, target)}

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str] | None:
        """Find the streams of the queries and keys of an attention call.

        Args:
            module: Name of the attention module.
            occurrence: How many times the module was called before in this pass.

        Returns:
            Stream of the queries and stream of the keys; None if the call is to be ignored.
        """
        return self.stream, self.stream

    def is_residual_tower(self, module: str) -> bool:
        """Whether an attention module belongs to a tower that runs in parallel to a fused stream of the same units.

        Args:
            module: Name of the attention module.

        Returns:
            True if the output of the tower is added to the fused stream after each of its layers (BridgeTower).
        """
        return False

    def find_simultaneous_group(self, module: str) -> str | None:
        """Find the block of an attention module in which streams attend to each other as they were at its start.

        Args:
            module: Name of the attention module.

        Returns:
            Name of the block; None if the calls take effect one after the other.
        """
        return None

    def count_expected_calls(self) -> int | None:
        """Count the attention calls of one pass from the configuration, for the self-test.

        Returns:
            The number without ignored calls; None if the configuration does not tell.
        """
        return count_calls_from_config(self.model.config)

    def make_padded_batch(self, sample: Sample) -> dict[str, Any] | None:
        """Make a batch with padded rows for the self-test; None if an `attention_mask` is enough to make one.

        Args:
            sample: The sample of the self-test.

        Returns:
            Keyword arguments of the model, or None.

        Raises:
            UnsupportedError: If the model computes other scores for a padded input (in subclasses).
        """
        return None

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the model inputs that input gradients are taken of.

        Args:
            batch: Keyword arguments of the model.

        Returns:
            Names of inputs; token ids stand for their embeddings.
        """
        return (self.grad_input_name,) if self.grad_input_name in batch else ("inputs_embeds",)

    def expand_target(self, sample: Sample, target: Target) -> list[Target]:
        """Expand a target that stands for several outputs, such as every generated token, to one target for each.

        Args:
            sample: The sample.
            target: The target as requested.

        Returns:
            The targets; a list of one for models with one prediction per input.

        Raises:
            InputError: If the model does not have such targets.
        """
        if isinstance(target.spec, PositionTarget):
            raise InputError(
                f"the target is {describe_spec(target.spec)}, but {type(self.model).__name__} makes one prediction per "
                "input: pass a label or an index"
            )
        return [target]

    @property
    def positions_depend_on_batch_length(self) -> bool:
        """Whether positions depend on the longest input of the batch, so that lengths cannot be mixed."""
        return False

    def choose_targets_per_pass(self, samples: Sequence[Sample]) -> int | None:
        """Choose how many targets of an input share a pass.

        Args:
            samples: The samples of a batch.

        Returns:
            The number that is fastest; None for as many as fit into memory.
        """
        return None

    def find_head_rows(
        self, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> tuple[nn.Module, list[int]] | None:
        """Find the head that computes the scores of each row by itself, so that only the targets' rows need gradients.

        Args:
            samples: The sample of each target.
            targets: The targets.

        Returns:
            The module, and for each target the index of the row that it comes from; None if there is no such module.
        """
        return None

    def resolve_sample(self, sample: Sample, target: Target) -> Sample:
        """Add what only the model can tell about the target, such as the text that it generates.

        Args:
            sample: The sample.
            target: The target as requested.

        Returns:
            A new sample, or the same one if nothing is missing.
        """
        return sample

    def is_single_input(self, raw_inputs: list[Any]) -> bool:
        """Whether a list is a single input, such as a conversation, and not a list of inputs.

        Args:
            raw_inputs: The list that the user gave.

        Returns:
            False for most kinds of models.
        """
        return False

    def truncate_to_targets(self, sample: Sample, targets: Sequence[Target]) -> Sample:
        """Cut off units that none of the targets can depend on, such as the tokens after a generated one.

        Args:
            sample: The sample.
            targets: Targets that will share a pass.

        Returns:
            A shorter sample, or the same one.
        """
        return sample

    def truncate_to_shared_prefix(self, sample: Sample) -> Sample:
        """Cut off units that not all targets have in common; random numbers are derived from the rest.

        Args:
            sample: The sample.

        Returns:
            A shorter sample, such as the prompt without the continuation, or the same one.
        """
        return sample

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        """By stream, the adapter that reads it and the model input that holds it; empty for models of one stream."""
        return {}

    @property
    def grad_parameters(self) -> Sequence[nn.Parameter]:
        """Learned vectors that enter attention next to the input, such as object queries; they need gradients."""
        return ()

    def extend_target_description(self, sample: Sample, target: Target, description: dict[str, Any]) -> dict[str, Any]:
        """Add to the description of a target what only the adapter knows, such as the box of a detected object.

        Args:
            sample: The sample.
            target: The target.
            description: The result of `Target.describe`.

        Returns:
            The description for `Explanation.target`.
        """
        return description

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context in which every forward pass runs.

        Returns:
            A context manager that undoes its changes of the model on exit.
        """
        return nullcontext()

    def find_unsupported_reason(self, method: str) -> str | None:
        """Return why a method cannot be applied to this kind of model, beyond what the method requires.

        Args:
            method: Name of the method.

        Returns:
            The reason, as a sentence for users; None if it can be applied.
        """
        return None

    def find_attention_unsupported_reason(self) -> str | None:
        """Return why no method that reads attention can be applied to this kind of model.

        Returns:
            The reason, as a sentence for users; None if they can be applied.
        """
        return None

    def join_step_names(self, names: Sequence[str]) -> str:
        """Join the names of several explained outputs to the name of the whole target.

        Args:
            names: Name of each output, such as a generated token.

        Returns:
            One name.
        """
        return ", ".join(names)

    def select_prediction_scores(self, scores: Float[Tensor, "label"]) -> Float[Tensor, "label"]:
        """Select the scores that the prediction is chosen from.

        Args:
            scores: The class scores of one sample.

        Returns:
            All of them, for most kinds of models.
        """
        return scores

    def label_index(self, label: str | int) -> int:
        """Return the class index of a label, compared exactly first and then without case.

        Args:
            label: Name of the class, or its index as an integer or in digits.

        Returns:
            The index, from 0.

        Raises:
            InputError: If there is no such class, or several have this name.

        Example:
            >>> ex.adapter.label_index("positive")  # "POSITIVE" in the configuration  # doctest: +SKIP
            1
        """
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
        """Whether the outputs are numbers and not classes, so that there are no probabilities."""
        kind = getattr(getattr(self.model, "config", None), "problem_type", None)
        return kind == "regression" or (len(self.labels) == 1 and not self.multi_label)

    def label_name(self, index: int) -> str:
        """Return the name of a class.

        Args:
            index: Index of the class.

        Returns:
            Its name; the index in digits for a class without a name.

        Example:
            >>> ex.adapter.label_name(1)  # doctest: +SKIP
            'POSITIVE'
        """
        return self.labels.get(index, str(index))

    @cached_property
    def session(self) -> ModelSession:
        """The session that runs the model; made on first use, and left out of copies and pickles."""
        return ModelSession(self.model, self.forward_context, self.is_compiled)

    @property
    def model_class_name(self) -> str:
        """Name of the model's class, for messages and results."""
        return type(self.model).__name__

    @property
    def device(self) -> torch.device:
        """The device that inputs are moved to: that of the first weight, or where accelerate runs an offloaded one."""
        return find_module_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's first floating-point weight."""
        return next(part.dtype for part in self.model.parameters() if part.is_floating_point())

    def forward_accepts(self, argument: str) -> bool:
        """Whether the model's `forward` has a parameter of this name.

        Args:
            argument: Name of a keyword argument.

        Returns:
            False also for an argument that only `**kwargs` would take.
        """
        forward = unwrap_base_model(self.model).forward
        if inspect.ismethod(forward):
            return argument in _get_parameter_names(forward.__func__)
        return argument in inspect.signature(forward).parameters  # not cached: it may belong to one model


@lru_cache(maxsize=256)
def _get_parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters of a function."""
    return frozenset(inspect.signature(function).parameters)


def compute_readout_weights(readout: Readout | None, units: Units | UnitAxis) -> dict[int, float]:
    """Compute the weight of each row that a read-out reads.

    Args:
        readout: A kind of read-out, or the index of a row; negative indices count from the end.
        units: The units of the rows.

    Returns:
        Weights by row; they sum to 1.

    Raises:
        UnsupportedError: If there is no read-out.
        InputError: If the kind is unknown.

    Example:
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
    """Return the transformers model inside a model of PEFT, which wraps it; other models unchanged.

    Args:
        model: The model.

    Returns:
        The inner model, with the layers of the low-rank adapters in place.
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def find_module_device(module: nn.Module) -> torch.device:
    """Find the device on which a module computes.

    Args:
        module: A module with at least one weight.

    Returns:
        The device of its first weight. For weights that accelerate offloads (device "meta"), the device to which its
        hooks move them.
    """
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    hooks = [getattr(part, "_hf_hook", None) for part in module.modules()]
    each = [one for hook in hooks for one in getattr(hook, "hooks", [hook])]
    told = [getattr(hook, "execution_device", None) for hook in each]
    return next((torch.device(one) for one in told if one is not None), device)


def list_class_names(model: nn.Module) -> list[str]:
    """List the names of the model's class and its base classes, so that a subclass of a known class is recognised.

    Args:
        model: The model.

    Returns:
        Names in the order of method resolution, the model's class first.
    """
    return [cls.__name__ for cls in type(unwrap_base_model(model)).__mro__]


def find_adapter_class(class_names: Sequence[str], task: str | None = None) -> type[ModelAdapter] | None:
    """Find the adapter for a class of models.

    Args:
        class_names: Names of the model's class and its base classes; the first one that matches decides.
        task: Name of a task that the model's class does not tell, such as "similarity"; None for that of the class.

    Returns:
        The adapter with the longest matching suffix, of several the one registered last; None if none matches.

    Raises:
        InputError: If no adapter has that task.
    """
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
    """Format the endings of supported class names, for the error about an unsupported model."""
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
    """Make the adapter for a model.

    Args:
        model: The model.
        processor: Its tokenizer, image processor or processor.
        readout: Which row of a relevance matrix is read; None for the adapter's default.
        name: Name of the model in results.
        region_detector: Finds the regions of an image, for models that read regions.
        task: Name of a task that the model's class does not tell.
        is_compiled: Whether passes that record nothing run through torch.compile.

    Returns:
        The adapter.

    Raises:
        UnsupportedError: If there is no adapter for this class of models.
        InputError: If no adapter has that task.
    """
    names = list_class_names(model)
    kind = find_adapter_class(names, task)
    if kind is None:
        raise UnsupportedError(f"clearhead does not support {names[0]}; {format_supported_suffixes()}")
    return kind(model, processor, readout, name, region_detector, is_compiled)


def unbatch_inputs(adapter: ModelAdapter, inputs: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Split a mapping of model inputs into samples without a batch axis, on the CPU; `collate` moves them together.

    Args:
        adapter: The adapter of the model that takes the inputs.
        inputs: Tensors, arrays or nested lists, each with a batch axis; None entries are dropped.

    Returns:
        One mapping per row.

    Raises:
        InputError: If the model does not take an input, or the batch sizes differ.
    """
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
