"""What one recorded pass leaves behind: a `Tape` of attention `Call`s. Pure data."""

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

from clearhead.errors import InputError, unknown

if TYPE_CHECKING:
    from clearhead.capture.attention.deferred import Aside

Ask = Literal[
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
]
Asks = frozenset[Ask]

#: Each gradient and what it is the gradient of.
GRADIENTS: dict[Ask, Ask] = {
    "attention_gradient": "attention",
    "block_input_gradient": "block_input",
    "hidden_state_gradient": "hidden_state",
    "input_gradient": "inputs",
}
#: The tensors of a call that can have a gradient.
DIFFERENTIABLE = ("attention", "block_input", "hidden_state")


@dataclass
class Call:
    """One attention computation (not one module: a shared module is called several times).

    `block_input` is what goes into its layer, `hidden_state` what comes out of it.
    """

    layer: int
    module: str
    kind: Literal["self", "cross"] = "self"
    query_stream: str = "text"
    key_stream: str = "text"
    attention: Float[Tensor, "batch head query key"] | None = None
    attention_gradient: Float[Tensor, "batch head query key"] | None = None
    #: What arrives at the attention under rules other than calculus has (`rules/`).
    relevance: Float[Tensor, "batch head query key"] | None = None
    #: How far each unit's state moves in this layer when another's values are zero (a cosine distance).
    moved: Float[Tensor, "batch query key"] | None = None
    values: Float[Tensor, "batch head key width"] | None = None
    output_projection: Float[Tensor, "model heads"] | None = None
    block_input: Float[Tensor, "batch unit model"] | None = None
    block_input_gradient: Float[Tensor, "batch unit model"] | None = None
    hidden_state: Float[Tensor, "batch unit model"] | None = None
    hidden_state_gradient: Float[Tensor, "batch unit model"] | None = None
    #: Where maps are never whole: makes sums of them after the pass, as often as they are asked for.
    aside: "Aside | None" = field(default=None, repr=False)

    @cached_property
    def positive(self) -> Float[Tensor, "batch head query key"]:
        """(A ⊙ ∂y/∂A)⁺, shared by every method that is handed this call."""
        assert self.attention is not None and self.attention_gradient is not None
        return (self.attention * self.attention_gradient).clamp_(min=0)

    @cached_property
    def mean_attention(self) -> Float[Tensor, "batch query key"]:
        """E_h A."""
        assert self.attention is not None
        return self.attention.mean(1)

    def with_heads(self, heads: Sequence[int]) -> "Call":
        """The same call with only these heads."""
        chosen = list(heads)
        parts = {name: getattr(self, name) for name in ("attention", "attention_gradient", "relevance", "values")}
        return replace(self, **{name: part[:, chosen] for name, part in parts.items() if part is not None})

    def of_queries(self, queries: slice) -> "Call":
        """The same call with the maps of some queries alone."""
        return replace(
            self,
            attention=None if self.attention is None else self.attention[:, :, queries],
            attention_gradient=None if self.attention_gradient is None else self.attention_gradient[:, :, queries],
        )

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Call":
        tensors = {name: part.to(device, dtype) for name, part in self.tensors()}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in _TENSORS:
            part = getattr(self, name)
            if part is not None:
                yield name, part


@dataclass
class Tape:
    """The calls of one pass in order, with the input vectors of the units, by stream, if they were asked for."""

    calls: list[Call] = field(default_factory=list)
    inputs: "dict[str, Float[Tensor, 'batch unit feature']] | None" = None
    input_gradient: "dict[str, Float[Tensor, 'batch unit feature']] | None" = None
    logits: Float[Tensor, "batch label"] | None = None
    value: Float[Tensor, "batch"] | None = None
    truncated_tokens: tuple[int, ...] = ()

    WHOLE = ("logits", "value")
    BY_STREAM = ("inputs", "input_gradient")

    def to(self, device: torch.device | str) -> "Tape":
        whole = {name: getattr(self, name) for name in self.WHOLE}
        moved: dict[str, Any] = {name: part.to(device) for name, part in whole.items() if part is not None}
        for name in self.BY_STREAM:
            if (parts := getattr(self, name)) is not None:
                moved[name] = {stream: part.to(device) for stream, part in parts.items()}
        return replace(self, calls=[call.to(device) for call in self.calls], **moved)

    def save(self, path: str | Path) -> Path:
        """Write every tensor to one safetensors file."""
        tensors = {name: part for name in self.WHOLE if (part := getattr(self, name)) is not None}
        for name in self.BY_STREAM:
            tensors |= {f"{name}.{stream}": part for stream, part in (getattr(self, name) or {}).items()}
        for place, call in enumerate(self.calls):
            tensors |= {f"calls.{place}.{name}": part for name, part in call.tensors()}
        about = [{name: getattr(call, name) for name in _PLAIN} for call in self.calls]
        cut = {"truncated_tokens": self.truncated_tokens}
        save_file(
            {name: part.detach().cpu().contiguous().clone() for name, part in tensors.items()},
            str(path),
            metadata={"clearhead": json.dumps({"schema": "clearhead/tape", "version": 1, "calls": about, **cut})},
        )
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Tape":
        try:
            with safe_open(str(path), framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("clearhead", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError, ValueError) as problem:
            raise InputError(f"{str(path)!r} cannot be opened as a tape ({problem})") from None
        if about.get("schema") != "clearhead/tape":
            raise InputError(f"{str(path)!r} is no tape that clearhead saved")
        calls = [Call(**plain) for plain in about["calls"]]
        for name, part in tensors.items():
            if name.startswith("calls."):
                _, place, which = name.split(".")
                setattr(calls[int(place)], which, part)
        whole: dict[str, Any] = {name: part for name, part in tensors.items() if name in cls.WHOLE}
        for name in cls.BY_STREAM:
            found = {key.removeprefix(f"{name}."): part for key, part in tensors.items() if key.startswith(f"{name}.")}
            whole[name] = found or None
        return cls(calls, **whole, truncated_tokens=tuple(about["truncated_tokens"]))


_PLAIN = ("layer", "module", "kind", "query_stream", "key_stream")
_TENSORS = tuple(f.name for f in fields(Call) if f.name not in (*_PLAIN, "aside"))


def check_asks(asks: str | Iterable[str]) -> Asks:
    """Every ask spelled right; a gradient brings along what it is the gradient of.

    >>> sorted(check_asks("attention_gradient"))
    ['attention', 'attention_gradient']
    """
    given = {asks} if isinstance(asks, str) else set(asks)
    for ask in sorted(given - set(get_args(Ask))):
        raise unknown("ask", ask, get_args(Ask))
    wanted: set[Any] = given | {GRADIENTS[ask] for ask in given if ask in GRADIENTS}
    return frozenset(wanted)


#: Asks whose tensors lie along the units, so that they must have the units' length.
ALONG_UNITS: Asks = check_asks(f"{name}_gradient" for name in DIFFERENTIABLE)
