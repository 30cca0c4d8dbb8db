"""Models that are not from transformers: a reader says how they take input, and everything else is as for any other.

`clearhead.load(model, clearhead.TokenReader(…))` for rows of tokens, `clearhead.load(model, clearhead.ImageReader(…))`
for images. How the model's modules attend is said by `clearhead.register_attention`; the self-test checks both.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.adapters.base import ModelAdapter
from clearhead.capture.sources.custom_modules import find_custom_modules
from clearhead.capture.tape import UNIT_ALIGNED_REQUIREMENTS
from clearhead.errors import InputError
from clearhead.methods.base import METHOD_REGISTRY
from clearhead.methods.pass_type import PassType
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import POOLING_QUERY, UnitAxis, Units

#: The axis of a query that is no unit of the input.
QUERY_STREAM = "query"


@dataclass(kw_only=True)
class InputReader:
    """Base of `TokenReader` and `ImageReader`: describes the output of your own model.

    Attributes:
        labels: Names of the classes. Default: their indices.
        multi_label: Whether each class has its own probability (sigmoid instead of softmax).
        logits: Function from the model's output to the logits (batch × label). Default: the output's `logits`, or the
            output itself.
        pooling_module: Name of the attention module that pools the units with one query.
    """

    labels: Sequence[str] = ()
    multi_label: bool = False
    logits: Callable[[Any], Tensor] | None = None
    pooling_module: str | None = None

    adapter_class: ClassVar[type["CustomModelAdapter"]]


class CustomModelAdapter(ModelAdapter):
    """What all models of one's own share."""

    processor_class = ""
    processor: Any

    def __post_init__(self) -> None:
        self.labels = dict(enumerate(map(str, self.processor.labels)))
        self.multi_label = self.processor.multi_label
        if self.processor.pooling_module is not None and self.readout is not None:
            raise InputError(
                f"pooling_module={self.processor.pooling_module!r} already defines the read-out: leave out "
                f"readout={self.readout!r}"
            )
        modules = dict(self.model.named_modules())
        for option in ("pooling_module", "embedding_module"):
            named = getattr(self.processor, option, None)
            if named is not None and named not in modules:
                raise InputError(
                    f"{option}={named!r} is not a module of {self.model_class_name}: {_format_module_names(modules)}"
                )
        self.readout = self.choose_default_readout() if self.readout is None else self.readout
        self.name = self.name or self.model_class_name

    def check_return_dict(self) -> None:
        """A module of one's own may answer as it likes: `logits` finds the scores."""

    @property
    def has_pooling_query(self) -> bool:
        return self.processor.pooling_module is not None

    def build_axes(self, units: Units) -> dict[str, UnitAxis]:
        query = Units(stream=QUERY_STREAM, kind=POOLING_QUERY, names=("[QUERY]",), special=(True,))
        return {
            self.stream: UnitAxis.concat(units),
            **({QUERY_STREAM: UnitAxis.concat(query)} if self.has_pooling_query else {}),
        }

    def get_units(self, sample: Sample) -> Units:
        return sample.axes[self.stream].unit_groups[0]

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str] | None:
        return (QUERY_STREAM if module == self.processor.pooling_module else self.stream), self.stream

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        if self.has_pooling_query:
            return {QUERY_STREAM: {0: 1.0}}
        return super().find_readouts(sample, target)

    def count_expected_calls(self) -> int | None:
        return None  # the self-test sees to it that every module that attends was heard

    def get_logits(self, output: Any) -> Float[Tensor, "batch label"]:
        """The scores of the classes, wherever the model's output has them."""
        found = output
        if self.processor.logits is not None:
            found = self.processor.logits(output)
        elif isinstance(output, Mapping) and "logits" in output:
            found = output["logits"]
        elif not isinstance(output, Tensor):
            found = getattr(output, "logits", output[0] if isinstance(output, tuple | list) else None)
        if not isinstance(found, Tensor) or found.dim() not in (1, 2):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"the class scores must be batch × label, but {self.model_class_name} returns {shape}: select them "
                "with logits=, or pass a function of the model's output as target="
            )
        return found if found.dim() == 2 else found[:, None]

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        logits = self.get_logits(output)
        if len(logits) != len(samples):
            raise InputError(
                f"{self.model_class_name} returned scores for {len(logits)} inputs, but received {len(samples)}"
            )
        self.labels = self.labels or {i: str(i) for i in range(logits.shape[1])}
        if len(self.labels) != logits.shape[1]:
            raise InputError(f"labels= names {len(self.labels)} classes, but the model has {logits.shape[1]}")
        return super().compute_class_scores(SimpleNamespace(logits=logits), samples, targets)

    def build_forward_kwargs(self, *tensors: Tensor) -> dict[str, Any]:
        """What the model is called with."""
        if self.processor.inputs is None:
            return {next(iter(inspect.signature(self.model.forward).parameters)): tensors[0]}
        made = self.processor.inputs(*tensors)
        if not isinstance(made, Mapping):
            raise InputError(f"inputs= must return the model's arguments by name, not {type(made).__name__}")
        return dict(made)

    def add_query_vectors(self, vectors: Float[Tensor, "batch unit feature"]) -> dict[str, Tensor]:
        nothing = {QUERY_STREAM: vectors.new_zeros(len(vectors), 1, 1)} if self.has_pooling_query else {}
        return {self.stream: vectors, **nothing}

    @property
    def is_recurrent(self) -> bool:
        return any(issubclass(cls, nn.RNNBase) for cls in self.session.topology.module_classes)

    def forward_context(self) -> AbstractContextManager[None]:
        # cuDNN's recurrent networks have no backward pass outside of training; torch's own have.
        on_cudnn = self.is_recurrent and self.device.type == "cuda"
        return torch.backends.cudnn.flags(enabled=False) if on_cudnn else nullcontext()

    def find_unsupported_reason(self, method: str) -> str | None:
        told = METHOD_REGISTRY[method].declaration
        if told.pass_type is PassType.MODIFIED_BACKWARD and self.is_recurrent:
            return f"{self.model_class_name} contains a recurrent network, for which relevance propagation has no rule"
        layered = told.requires & {"block_input", "hidden_state"} or (
            told.pass_type is PassType.PATH and told.requires & UNIT_ALIGNED_REQUIREMENTS
        )
        return self.find_layers_unsupported_reason() if layered else None

    def find_layers_unsupported_reason(self) -> str | None:
        """Why what goes into each layer is not known; None where it is."""
        blocks = self.session.topology.layer_of_module
        attending = list(find_custom_modules(self.session.topology).values()) or self.session.topology.attention_modules
        layers = [blocks.get(id(module)) for module in attending]
        if None in layers or any(layer is module for layer, module in zip(layers, attending, strict=True)):
            return (
                f"it needs the input of each layer, but not all attention of {self.model_class_name} is inside a layer "
                "(an item of an nn.ModuleList or nn.Sequential)"
            )
        if len(set(map(id, layers))) < len(layers):
            return (
                f"it needs the input of each layer, but one layer of {self.model_class_name} computes attention "
                "several times"
            )
        return None


def _format_module_names(names: Mapping[str, Any]) -> str:
    listed = [name for name in names if name]
    return "it has " + ", ".join(listed[:8]) + (", …" if len(listed) > 8 else "")
