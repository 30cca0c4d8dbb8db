"""The record of one captured pass: a `Tape` of `AttentionCall`s, which can be saved and loaded."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clearhead.errors import InputError, unknown_value_error

if TYPE_CHECKING:
    from clearhead.capture.attention.deferred import DeferredCall

Requirement = Literal[
    "attention",
    "attention_gradient",
    "values",
    "output_projection",
    "block_input",
    "block_input_gradient",
    "hidden_state",
    "hidden_state_gradient",
    "inputs",
    "input_gradient",
    "position_x_gradient",
]
Requirements = frozenset[Requirement]

#: The tensor that each gradient belongs to; that of positions is recorded with the inputs.
GRADIENT_SOURCES: dict[Requirement, Requirement] = {
    "attention_gradient": "attention",
    "block_input_gradient": "block_input",
    "hidden_state_gradient": "hidden_state",
    "input_gradient": "inputs",
    "position_x_gradient": "inputs",
}
#: The tensors of a call that can have a gradient.
DIFFERENTIABLE_TENSORS = ("attention", "block_input", "hidden_state")


@dataclass
class AttentionCall:
    """One attention computation of a pass, with the tensors that were required (not one module: a shared module is
    called several times).

    Attributes:
        layer: Number of the layer among those that share the two streams, from 0.
        module: Name of the attention module.
        kind: Whether queries and keys belong to the same stream ("self") or not ("cross").
        query_stream: Stream of the queries, such as "text", "image" or "decoder".
        key_stream: Stream of the keys.
        attention: Attention weights A.
        attention_gradient: ∂y/∂A.
        relevance: Relevance of A under modified backward rules (`backward_rules/`), in place of ∂y/∂A.
        value_zeroing_distance: Cosine distance of each unit's output of the layer with and without the values of
            another unit.
        values: Values, repeated so that each head has its own.
        output_projection: Weight of the linear map after the attention.
        block_input: Input of the layer.
        block_input_gradient: ∂y/∂block_input.
        hidden_state: Output of the layer.
        hidden_state_gradient: ∂y/∂hidden_state.
        deferred: In tiled passes, recomputes reductions of the maps after the pass.
    """

    layer: int
    module: str
    kind: Literal["self", "cross"] = "self"
    query_stream: str = "text"
    key_stream: str = "text"
    attention: Float[Tensor, "batch head query key"] | None = None
    attention_gradient: Float[Tensor, "batch head query key"] | None = None
    relevance: Float[Tensor, "batch head query key"] | None = None
    value_zeroing_distance: Float[Tensor, "batch query key"] | None = None
    values: Float[Tensor, "batch head key width"] | None = None
    output_projection: Float[Tensor, "model heads"] | None = None
    block_input: Float[Tensor, "batch unit model"] | None = None
    block_input_gradient: Float[Tensor, "batch unit model"] | None = None
    hidden_state: Float[Tensor, "batch unit model"] | None = None
    hidden_state_gradient: Float[Tensor, "batch unit model"] | None = None
    deferred: "DeferredCall | None" = field(default=None, repr=False)

    @cached_property
    def positive_product(self) -> Float[Tensor, "batch head query key"]:
        """(A ⊙ ∂y/∂A)⁺, computed once for all methods that receive this call."""
        assert self.attention is not None and self.attention_gradient is not None
        return (self.attention * self.attention_gradient).clamp_(min=0)

    @cached_property
    def mean_attention(self) -> Float[Tensor, "batch query key"]:
        """E_h A, the attention averaged over heads."""
        assert self.attention is not None
        return self.attention.mean(1)

    def select_heads(self, heads: Sequence[int]) -> "AttentionCall":
        """Return a copy of the call with only these heads.

        Args:
            heads: Indices of the heads, in the order of the copy.

        Returns:
            A copy; maps, relevance and values have only these heads, the other tensors are the same objects.

        Example:
            >>> call = AttentionCall(0, "layer.0", attention=torch.rand(1, 8, 5, 5))
            >>> call.select_heads([2, 3]).attention.shape
            torch.Size([1, 2, 5, 5])
        """
        head_indices = list(heads)
        tensors = {name: getattr(self, name) for name in ("attention", "attention_gradient", "relevance", "values")}
        return replace(
            self, **{name: tensor[:, head_indices] for name, tensor in tensors.items() if tensor is not None}
        )

    def select_queries(self, query_slice: slice) -> "AttentionCall":
        """Return a copy of the call whose maps have only these queries.

        Args:
            query_slice: The queries, as a slice of the third axis of the maps.

        Returns:
            A copy; attention and its gradient have only these queries, the other tensors are the same objects.

        Example:
            >>> call = AttentionCall(0, "layer.0", attention=torch.rand(1, 8, 5, 5))
            >>> call.select_queries(slice(0, 2)).attention.shape
            torch.Size([1, 8, 2, 5])
        """
        maps = {name: getattr(self, name) for name in ("attention", "attention_gradient")}
        return replace(self, **{name: map_[:, :, query_slice] for name, map_ in maps.items() if map_ is not None})

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "AttentionCall":
        """Return a copy of the call with all tensors on a device and, if given, in a dtype.

        Args:
            device: Device of the copy.
            dtype: Data type of the copy; None keeps that of each tensor.

        Returns:
            The copy. Tensors that already are on the device in that dtype are shared with it.

        Example:
            >>> AttentionCall(0, "layer.0", attention=torch.rand(1, 8, 5, 5)).to("cpu", torch.float64).attention.dtype
            torch.float64
        """
        tensors = {name: tensor.to(device, dtype) for name, tensor in self.iter_tensors()}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, tensor) of the tensors that the call has.

        Yields:
            Name of the field and the tensor, in the order of the fields; fields that are None are left out.

        Example:
            >>> [name for name, _ in AttentionCall(0, "layer.0", attention=torch.rand(1, 8, 5, 5)).iter_tensors()]
            ['attention']
        """
        for name in _CALL_TENSOR_FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor


@dataclass
class Tape:
    """The attention calls of one pass in order, with the input vectors of the units if they were required.

    Attributes:
        calls: The calls, in the order of the forward pass.
        inputs: Input vectors (embeddings, pixels) by stream.
        input_gradient: ∂y/∂inputs by stream.
        position_x_gradient: P ⊙ ∂y/∂P of the position embeddings P, summed over features, and over layers if they are
            rotary.
        logits: Output of the model, with one row for each target and sample.
        value: The differentiated value y of each sample and target.
        truncated_tokens: How many tokens of each sample were cut off.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    inputs: "dict[str, Float[Tensor, 'batch unit feature']] | None" = None
    input_gradient: "dict[str, Float[Tensor, 'batch unit feature']] | None" = None
    position_x_gradient: Float[Tensor, "batch position"] | None = None
    logits: Float[Tensor, "row label"] | None = None
    value: Float[Tensor, "*target sample"] | None = None
    truncated_tokens: tuple[int, ...] = ()

    TENSOR_FIELDS = ("position_x_gradient", "logits", "value")
    STREAM_FIELDS = ("inputs", "input_gradient")

    def to(self, device: torch.device | str) -> "Tape":
        """Return a copy of the tape with all tensors on a device.

        Args:
            device: Device of the copy.

        Returns:
            The copy.

        Example:
            >>> Tape(value=torch.ones(2)).to("cpu").value
            tensor([1., 1.])
        """
        moved_fields: dict[str, Any] = {}
        for name in self.TENSOR_FIELDS:
            if (tensor := getattr(self, name)) is not None:
                moved_fields[name] = tensor.to(device)
        for name in self.STREAM_FIELDS:
            if (by_stream := getattr(self, name)) is not None:
                moved_fields[name] = {stream: tensor.to(device) for stream, tensor in by_stream.items()}
        return replace(self, calls=[call.to(device) for call in self.calls], **moved_fields)

    def select(self, requires: Requirements) -> "Tape":
        """Return a copy with only those inputs and input gradients that are required.

        Args:
            requires: The tensors to keep, as `resolve_requirements` returns them.

        Returns:
            A copy with the same calls.

        Example:
            >>> tape = Tape(inputs={"text": torch.rand(1, 5, 16)})
            >>> tape.select(frozenset({"attention"})).inputs is None
            True
        """
        left_out: dict[str, Any] = {}
        if "inputs" not in requires:
            left_out["inputs"] = None
        if "input_gradient" not in requires:
            left_out["input_gradient"] = None
        if "position_x_gradient" not in requires:
            left_out["position_x_gradient"] = None
        return replace(self, **left_out)

    def save(self, path: str | Path) -> Path:
        """Write the tape to one safetensors file and return its path.

        Args:
            path: The file; an existing one is replaced.

        Returns:
            The path of the file.

        Example:
            >>> ex.record("A wonderful film", requires="attention").save("pass.safetensors")  # doctest: +SKIP
        """
        tensors = {name: tensor for name in self.TENSOR_FIELDS if (tensor := getattr(self, name)) is not None}
        for name in self.STREAM_FIELDS:
            tensors |= {f"{name}.{stream}": tensor for stream, tensor in (getattr(self, name) or {}).items()}
        for index, call in enumerate(self.calls):
            tensors |= {f"calls.{index}.{name}": tensor for name, tensor in call.iter_tensors()}
        metadata = {
            "schema": "clearhead/tape",
            "version": 1,
            "calls": [{name: getattr(call, name) for name in _METADATA_FIELDS} for call in self.calls],
            "truncated_tokens": self.truncated_tokens,
        }
        save_file(
            {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
            str(path),
            metadata={"clearhead": json.dumps(metadata)},
        )
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Tape":
        """Read a tape that `save` wrote.

        Args:
            path: A safetensors file.

        Returns:
            The tape, on the CPU. `deferred` of its calls is None, because a saved tape has no model to run.

        Raises:
            InputError: The file cannot be read, or is not a tape.

        Example:
            >>> Tape.load("pass.safetensors").calls[0].attention.mean(1)  # doctest: +SKIP
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = json.loads((file.metadata() or {}).get("clearhead", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError, ValueError) as error:
            raise InputError(f"{str(path)!r} cannot be opened as a tape ({error})") from None
        if metadata.get("schema") != "clearhead/tape":
            raise InputError(f"{str(path)!r} is not a tape saved by clearhead")
        calls = [AttentionCall(**call_metadata) for call_metadata in metadata["calls"]]
        for name, tensor in tensors.items():
            if name.startswith("calls."):
                _, index, field_name = name.split(".")
                setattr(calls[int(index)], field_name, tensor)
        tape_fields: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in cls.TENSOR_FIELDS}
        for name in cls.STREAM_FIELDS:
            prefix = f"{name}."
            by_stream = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            tape_fields[name] = by_stream or None
        return cls(calls, **tape_fields, truncated_tokens=tuple(metadata["truncated_tokens"]))


_METADATA_FIELDS = ("layer", "module", "kind", "query_stream", "key_stream")
_CALL_TENSOR_FIELDS = tuple(f.name for f in fields(AttentionCall) if f.name not in (*_METADATA_FIELDS, "deferred"))


def resolve_requirements(requirements: str | Iterable[str]) -> Requirements:
    """Check the names of required tensors, and add the tensor that each required gradient belongs to.

    Args:
        requirements: One name or several, see `Requirement`.

    Returns:
        The names, with those of the tensors that gradients belong to.

    Raises:
        InputError: A name is unknown.

    Example:
        >>> sorted(resolve_requirements("attention_gradient"))
        ['attention', 'attention_gradient']
    """
    names = {requirements} if isinstance(requirements, str) else set(requirements)
    for name in sorted(names - set(get_args(Requirement))):
        raise unknown_value_error("requirement", name, get_args(Requirement))
    resolved: set[Any] = names | {GRADIENT_SOURCES[name] for name in names if name in GRADIENT_SOURCES}
    return frozenset(resolved)


#: Requirements whose tensors belong to attention calls; a pass without them leaves the model's attention alone.
CALL_REQUIREMENTS: Requirements = frozenset(get_args(Requirement)) - {
    "inputs",
    "input_gradient",
    "position_x_gradient",
}
#: Requirements whose tensors have one row per unit, so that their length must be the number of units.
UNIT_ALIGNED_REQUIREMENTS: Requirements = resolve_requirements(f"{name}_gradient" for name in DIFFERENTIABLE_TENSORS)
