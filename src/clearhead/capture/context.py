"""`CapturedCall`, one attention call of a running pass, and `CaptureContext`, which collects those of a thread."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.capture.attention.lazy_mask import HasVisibleKey
from clearhead.capture.attention.materialised import GradientBuffer
from clearhead.capture.attention.tiled import TiledAttention
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.layers import LayerIO, LayerRecorder
from clearhead.capture.topology import ModelTopology
from clearhead.errors import UnsupportedError

if TYPE_CHECKING:
    from clearhead.capture.sources.base import CaptureSource

#: Name of the attention implementation that is registered with transformers.
IMPLEMENTATION_NAME = "clearhead"
_CROSS_ATTENTION_PATTERN = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


@dataclass
class CapturedCall:
    """One attention call of a forward pass; its tensors are still in the graph.

    Attributes:
        module: Name of the attention module.
        attention: Attention weights; in a tiled pass a tensor on the meta device that has their shape.
        source: How the call was captured.
        values: Values, one per key–value head.
        output: Output of the attention, before the output projection.
        output_projection: Weight of the output projection.
        layer_io: Input and output of the layer.
        occurrence: Number of the call among those of its module, which may be shared.
        tiled: In a tiled pass, computes the maps tile by tile.
        gradient_buffer: Memory of ∂y/∂attention, which may be reused once every method has read it.
        has_visible_key: The queries that see at least one key; None if all do. For the others, torch's kernel has no
            attention, whereas a softmax has some.
    """

    module: str
    attention: Float[Tensor, "batch head query key"]
    source: "CaptureSource"
    values: Float[Tensor, "batch kv_head key width"] | None = None
    output: Float[Tensor, "batch query head width"] | None = None
    output_projection: Float[Tensor, "model heads"] | None = None
    layer_io: LayerIO | None = None
    occurrence: int = 0
    tiled: TiledAttention | None = None
    gradient_buffer: GradientBuffer | None = None
    has_visible_key: HasVisibleKey = None

    @property
    def block_input(self) -> Float[Tensor, "batch unit *vectors model"] | None:
        """Input of the layer, if layer inputs and outputs are kept."""
        return self.layer_io.input if self.layer_io is not None else None

    @property
    def hidden_state(self) -> Float[Tensor, "batch unit *vectors model"] | None:
        """Output of the layer, if layer inputs and outputs are kept."""
        return self.layer_io.output if self.layer_io is not None else None

    @property
    def kind(self) -> Literal["self", "cross"]:
        """Self- or cross-attention, judged by the name of the module."""
        return "cross" if _CROSS_ATTENTION_PATTERN.search(self.module) else "self"

    def repeat_values_per_head(self) -> Float[Tensor, "batch head key width"]:
        """Return the values with one entry per attention head; grouped-query heads share theirs.

        Returns:
            V, repeated for the heads of a group; a copy.
        """
        assert self.values is not None
        return self.values.repeat_interleave(self.attention.shape[1] // self.values.shape[1], dim=1)

    def rebuild_output(self) -> Float[Tensor, "batch query head width"]:
        """Compute A·V, in the model's dtype.

        Returns:
            The output of the attention before its output projection.
        """
        values = self.repeat_values_per_head()
        return (self.attention.to(values.dtype) @ values).transpose(1, 2)

    def compute_rebuild_error(self) -> float:
        """Return the largest difference between A·V and the output that the model used, relative to its magnitude.

        Returns:
            The error relative to the largest absolute output; queries that see no key are left out.
        """
        assert self.output is not None
        rebuilt = self.rebuild_output()
        if self.has_visible_key is not None:
            rebuilt = rebuilt * self.has_visible_key.transpose(1, 2)
        gap = (rebuilt.reshape(-1) - self.output.reshape(-1)).abs().max()
        return float(gap / self.output.abs().max().clamp(min=1e-12))


class CaptureContext:
    """Collects the attention calls of the pass that runs in this thread.

    Args:
        topology: The modules of the model.
        layer_recorder: Keeps inputs and outputs of the layers.
        implementation: Attention implementation to switch the model to; "eager" for models that do not use
            transformers' table of attention functions.
        needs_maps: Whether attention maps are captured; if not, the model's own kernels run as without clearhead.
        zero_attention: Whether attention outputs are replaced by zeros.
        tiling: Settings of a tiled pass; None for materialised maps.
        keep_values: Whether calls of a tiled pass keep values and outputs.
        use_tiled_gradients: Whether gradients in half precision are computed as in a tiled pass.
    """

    def __init__(
        self,
        topology: ModelTopology,
        layer_recorder: LayerRecorder,
        implementation: str = IMPLEMENTATION_NAME,
        needs_maps: bool = True,
        zero_attention: bool = False,
        tiling: TilingConfig | None = None,
        keep_values: bool = True,
        use_tiled_gradients: bool = False,
    ) -> None:
        self.topology = topology
        self.model_name = type(topology.model).__name__
        self.layer_recorder = layer_recorder
        self.implementation = implementation
        self.needs_maps = needs_maps
        self.zero_attention = zero_attention
        self.tiling = tiling
        self.keep_values = keep_values
        self.use_tiled_gradients = use_tiled_gradients
        self.is_recomputing = False  # whether activation checkpointing recomputes a layer that was captured before
        self.calls: list[CapturedCall] = []
        self.call_counts: Counter[int] = Counter()  # calls of each module, by its id
        self.free_buffers: list[Tensor] = []  # memory of gradients that every method has read

    def get_module_name(self, module: nn.Module) -> str:
        """Return the module's name in the model, or its class if it is not part of the model."""
        return self.topology.names.get(id(module), type(module).__name__)

    def record_call(
        self,
        source: "CaptureSource",
        module: nn.Module,
        attention: Tensor | None,
        values: Tensor | None = None,
        output: Tensor | None = None,
        tiled: TiledAttention | None = None,
        gradient_buffer: GradientBuffer | None = None,
        has_visible_key: HasVisibleKey = None,
    ) -> None:
        """Append one call; the arguments are fields of `CapturedCall`.

        Raises:
            UnsupportedError: The eager attention of the module returns no attention weights.
        """
        self.call_counts[id(module)] += 1
        module_name = self.get_module_name(module)
        if attention is None:
            raise UnsupportedError(
                f"{self.model_name}: the eager attention of {module_name} ({type(module).__name__}) returns no "
                "probabilities to record"
            )
        self.calls.append(
            CapturedCall(
                module=module_name,
                attention=attention,
                source=source,
                values=values,
                output=output,
                layer_io=self.layer_recorder.get_latest(self.topology.layer_of_module.get(id(module))),
                occurrence=self.call_counts[id(module)] - 1,
                tiled=tiled,
                gradient_buffer=gradient_buffer,
                has_visible_key=has_visible_key,
            )
        )

    def clear(self) -> None:
        """Drop the captured calls; the caller keeps its own list of them.

        Checkpointed layers reference this context and the graph references the layers, so that a graph without a
        backward pass would be kept alive in a reference cycle.
        """
        self.calls = []
        self.layer_recorder.latest_io.clear()

    def maybe_zero_output(self, output: Any) -> Any:
        """Return an attention's output as the model gets it: zeros if `zero_attention` is set."""
        if not self.zero_attention:
            return output
        if isinstance(output, tuple | list):
            return type(output)([self.maybe_zero_output(output[0]), *output[1:]])
        if isinstance(output, Tensor):
            return torch.zeros_like(output)
        return output

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the `with`, this context captures the calls of this thread."""
        with _active_context(self):
            yield

    @property
    def is_active(self) -> bool:
        """Whether this context captures in the current thread. Hooks fire in every thread that uses the model."""
        return _thread_state.context is self


class _ThreadState(threading.local):
    """The context that captures in this thread."""

    context: CaptureContext | None = None


_thread_state = _ThreadState()


def get_active_context() -> CaptureContext | None:
    """Return the context that captures the calls of this thread; None if none does."""
    return _thread_state.context


@contextmanager
def suspended_capture() -> Iterator[None]:
    """Inside the `with`, no call of this thread is captured, and attention runs as without clearhead."""
    with _active_context(None):
        yield


@contextmanager
def _active_context(context: CaptureContext | None) -> Iterator[None]:
    outer_context = _thread_state.context
    _thread_state.context = context
    try:
        yield
    finally:
        _thread_state.context = outer_context
