"""Models that are not from transformers: a reader says how they take input, and everything else is as for any other.

`clearhead.load(model, clearhead.Tokens(…))` for rows of tokens, `clearhead.load(model, clearhead.Pictures(…))` for
pictures. How the model's modules attend is said by `clearhead.register_attention`; the self-test checks both.
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

from clearhead.adapters.base import Sample, Subject
from clearhead.capture.layers import blocks_of
from clearhead.capture.sources.custom_modules import registered
from clearhead.capture.sources.returned_attentions import attention_modules
from clearhead.capture.tape import ALONG_UNITS
from clearhead.errors import InputError
from clearhead.methods.base import REGISTRY
from clearhead.targets import Target
from clearhead.units import PROBE, Axis, Units

#: The axis of a query that is no unit of the input.
QUERY = "query"


@dataclass(kw_only=True)
class Reader:
    """What a model of one's own does not say about itself.

    labels: the names of the classes; numbered where they are left out
    multi_label: whether each class is there or not, whatever the others are
    logits: where the scores of the classes (batch × label) are in the model's output, if they are not all of it
    pool: the name of the attention module that pools the units with one query, which is no unit itself
    """

    labels: Sequence[str] = ()
    multi_label: bool = False
    logits: Callable[[Any], Tensor] | None = None
    pool: str | None = None

    subject: ClassVar[type["OwnSubject"]]


class OwnSubject(Subject):
    """What all models of one's own share."""

    processor_class = ""
    processor: Any

    def __post_init__(self) -> None:
        self.labels = dict(enumerate(map(str, self.processor.labels)))
        self.multi_label = self.processor.multi_label
        if self.processor.pool is not None and self.readout is not None:
            raise InputError(f"pool={self.processor.pool!r} says what is read, so leave readout={self.readout!r} out")
        modules = dict(self.model.named_modules())
        for option in ("pool", "embedding"):
            named = getattr(self.processor, option, None)
            if named is not None and named not in modules:
                raise InputError(f"{option}={named!r} is no module of {self.model_class}: {_some(modules)}")
        self.readout = self.default_readout() if self.readout is None else self.readout
        self.name = self.name or self.model_class

    def check_answers(self) -> None:
        """A module of one's own may answer as it likes: `logits` finds the scores."""

    @property
    def pools(self) -> bool:
        return self.processor.pool is not None

    def axes(self, units: Units) -> dict[str, Axis]:
        query = Units(stream=QUERY, kind=PROBE, names=("[QUERY]",), special=(True,))
        return {self.stream: Axis.of(units), **({QUERY: Axis.of(query)} if self.pools else {})}

    def units_of(self, sample: Sample) -> Units:
        return sample.axes[self.stream].parts[0]

    def streams_of(self, module: str, nth: int) -> tuple[str, str] | None:
        return (QUERY if module == self.processor.pool else self.stream), self.stream

    def readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        if self.pools:
            return {QUERY: {0: 1.0}}
        return super().readouts(sample, target)

    def expected_calls(self) -> int | None:
        return None  # the self-test sees to it that every module that attends was heard

    def logits(self, output: Any) -> Float[Tensor, "batch label"]:
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
                f"the scores of the classes must be batch × label, but {self.model_class} gives {shape}: say where "
                "they are with logits=, or give target= a function of the model's output"
            )
        return found if found.dim() == 2 else found[:, None]

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        logits = self.logits(output)
        if len(logits) != len(samples):
            raise InputError(f"{self.model_class} gives scores for {len(logits)} inputs, but was given {len(samples)}")
        self.labels = self.labels or {i: str(i) for i in range(logits.shape[1])}
        if len(self.labels) != logits.shape[1]:
            raise InputError(f"labels= names {len(self.labels)} classes, but the model has {logits.shape[1]}")
        return super().scores(SimpleNamespace(logits=logits), samples, targets)

    def arguments(self, *given: Tensor) -> dict[str, Any]:
        """What the model is called with."""
        if self.processor.inputs is None:
            return {next(iter(inspect.signature(self.model.forward).parameters)): given[0]}
        made = self.processor.inputs(*given)
        if not isinstance(made, Mapping):
            raise InputError(f"inputs= must return the model's arguments by name, not {type(made).__name__}")
        return dict(made)

    def arranged_with_query(self, vectors: Float[Tensor, "batch unit feature"]) -> dict[str, Tensor]:
        nothing = {QUERY: vectors.new_zeros(len(vectors), 1, 1)} if self.pools else {}
        return {self.stream: vectors, **nothing}

    @property
    def recurrent(self) -> bool:
        return any(isinstance(module, nn.RNNBase) for module in self.model.modules())

    def scope(self) -> AbstractContextManager[None]:
        # cuDNN's recurrent networks have no backward pass outside of training; torch's own have.
        on_cudnn = self.recurrent and self.device.type == "cuda"
        return torch.backends.cudnn.flags(enabled=False) if on_cudnn else nullcontext()

    def why_not(self, method: str) -> str | None:
        told = REGISTRY[method].declaration
        if told.kind == "rules" and self.recurrent:
            return f"{self.model_class} holds a recurrent network, which relevance propagation has no rule for"
        layered = told.asks & {"block_input", "hidden_state"} or (told.kind == "path" and told.asks & ALONG_UNITS)
        return self.why_no_layers() if layered else None

    def why_no_layers(self) -> str | None:
        """Why what goes into each layer is not known; None where it is."""
        blocks = blocks_of(self.model)
        attending = list(registered(self.model).values()) or attention_modules(self.model)
        layers = [blocks.get(id(module)) for module in attending]
        if None in layers or any(layer is module for layer, module in zip(layers, attending, strict=True)):
            return (
                f"it needs what goes into each layer, but not all attention of {self.model_class} sits in a layer: in "
                "an item of an nn.ModuleList or nn.Sequential"
            )
        if len(set(map(id, layers))) < len(layers):
            return f"it needs what goes into each layer, but one layer of {self.model_class} attends several times"
        return None


def _some(names: Mapping[str, Any]) -> str:
    listed = [name for name in names if name]
    return "it has " + ", ".join(listed[:8]) + (", …" if len(listed) > 8 else "")
