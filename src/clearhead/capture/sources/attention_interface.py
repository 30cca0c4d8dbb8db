"""Captures attention through transformers' attention interface.

One registered function delegates to the model's own eager attention, so that position biases, soft caps, sinks, windows
and grouped heads stay exact. Modules that ignore the interface are captured through the attention that they return
(`returned_attentions.py`), and modules that are not from transformers through a registered function
(`custom_modules.py`).
"""

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from clearhead.capture.activation_checkpointing import checkpointed_layers
from clearhead.capture.attention.lazy_mask import HasVisibleKey, compute_has_visible_key, make_lazy_mask
from clearhead.capture.attention.materialised import GradientBuffer, MaskForms, attend_with_maps, compute_model_output
from clearhead.capture.attention.tiled import TiledAttention, get_accumulation_dtype
from clearhead.capture.attention.tiling import TilingConfig, get_fastest_kernel
from clearhead.capture.layers import LayerIO, LayerRecorder
from clearhead.capture.session import (
    get_attention_implementation,
    remove_hooks_on_exit,
    switched_attention_implementation,
)
from clearhead.capture.sources import custom_modules, returned_attentions
from clearhead.capture.topology import ModelTopology
from clearhead.errors import UnsupportedError

IMPLEMENTATION_NAME = "clearhead"
_CROSS_ATTENTION_PATTERN = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


@dataclass
class CapturedCall:
    """One attention call of a forward pass; its tensors are still in the graph.

    Attributes:
        module: Name of the attention module.
        attention: Attention weights; in a tiled pass a tensor on the meta device that has their shape.
        values: Values, one per key–value head.
        output: Output of the attention, before the output projection.
        output_projection: Weight of the output projection.
        layer_io: Input and output of the layer.
        occurrence: Number of the call among those of its module, which may be shared.
        is_custom: Whether a registered function replaced the module's forward.
        tiled: In a tiled pass, computes the maps tile by tile.
        gradient_buffer: Memory of ∂y/∂attention, which may be reused once every method has read it.
        has_visible_key: The queries that see at least one key; None if all do. For the others, torch's kernel has no
            attention, whereas a softmax has some.
    """

    module: str
    attention: Float[Tensor, "batch head query key"]
    values: Float[Tensor, "batch kv_head key width"] | None = None
    output: Float[Tensor, "batch query head width"] | None = None
    output_projection: Float[Tensor, "model heads"] | None = None
    layer_io: LayerIO | None = None
    occurrence: int = 0
    is_custom: bool = False
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
        """Return the values with one entry per attention head; grouped-query heads share theirs."""
        assert self.values is not None
        return self.values.repeat_interleave(self.attention.shape[1] // self.values.shape[1], dim=1)

    def rebuild_output(self) -> Float[Tensor, "batch query head width"]:
        """Compute A·V, in the model's dtype."""
        values = self.repeat_values_per_head()
        return (self.attention.to(values.dtype) @ values).transpose(1, 2)

    def compute_rebuild_error(self) -> float:
        """Return the largest difference between A·V and the output that the model used, relative to its magnitude."""
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
        needs_maps: bool = True,
        zero_attention: bool = False,
        tiling: TilingConfig | None = None,
        keep_values: bool = True,
        use_tiled_gradients: bool = False,
    ) -> None:
        self.topology = topology
        self.model_name = type(topology.model).__name__
        self.layer_recorder = layer_recorder
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
        module: nn.Module,
        attention: Tensor | None,
        values: Tensor | None = None,
        output: Tensor | None = None,
        is_custom: bool = False,
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
                values=values,
                output=output,
                layer_io=self.layer_recorder.get_latest(self.topology.layer_of_module.get(id(module))),
                occurrence=self.call_counts[id(module)] - 1,
                is_custom=is_custom,
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
    def suspended(self) -> Iterator[None]:
        """Inside the `with`, no call is captured, and attention runs as without clearhead."""
        _thread_state.context = None
        try:
            yield
        finally:
            _thread_state.context = self

    @property
    def is_active(self) -> bool:
        """Whether this context captures in the current thread. Hooks fire in every thread that uses the model."""
        return _thread_state.context is self


#: Maps output, attention, values and mask of a call to the output and the attention that replace them.
PatchFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class _ThreadState(threading.local):
    """What the registered attention function does in this thread; context managers below set it."""

    context: CaptureContext | None = None
    edit_values: Callable[[Tensor], Tensor] | None = None
    patch: PatchFunction | None = None
    compute_output: Callable[[Tensor], Tensor] | None = None


_thread_state = _ThreadState()
#: By eager mask of a captured pass: the mask for torch's kernel, a function that makes the lazy mask of a tiled pass,
#: and the queries that see at least one key.
_mask_forms: MutableMapping[Tensor, tuple[Tensor | None, Callable[[], Tensor | None], HasVisibleKey]] = (
    WeakIdKeyDictionary()
)


def _clearhead_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function that is registered with transformers as "clearhead"."""
    state = _thread_state
    if state.compute_output is not None:
        return state.compute_output(query), None
    if state.edit_values is not None:
        eager = find_eager_forward(module)
        masks = _get_mask_forms(attention_mask)
        sdpa = _get_sdpa_forward(module, kwargs)
        value = state.edit_values(value)
        return compute_model_output(eager, sdpa, module, query, key, value, masks, kwargs), None
    if state.context is None:  # the flag is switched for all threads
        return _run_original_attention(module, query, key, value, attention_mask, **kwargs)
    if not state.context.needs_maps:
        return _capture_call_without_map(state.context, module, query, key, value, attention_mask, kwargs)
    if state.context.tiling is not None:
        return _capture_tiled_call(state.context, module, query, key, value, attention_mask, kwargs)
    return _capture_materialised_call(state.context, module, query, key, value, attention_mask, kwargs)


def _run_original_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run the attention that the model uses without clearhead."""
    implementation = get_attention_implementation(module.config)
    if implementation == "eager":
        return find_eager_forward(module)(module, *args, **kwargs)
    return _get_attention_function(implementation)(module, *args, **kwargs)


def _capture_call_without_map(
    context: CaptureContext,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Run the model's own attention, and record the call with a map on the meta device that has only its shape."""
    output, attention = _run_original_attention(module, query, key, value, mask, **kwargs)
    if not context.is_recomputing:
        meta_attention = query.new_empty((*query.shape[:3], key.shape[2]), device="meta")
        context.record_call(module, meta_attention, value, output)
    return context.maybe_zero_output(output), attention


def _find_exact_eager_forward(context: CaptureContext, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the module's eager attention; errors name the model and the module."""
    module_name = context.get_module_name(module)
    return find_eager_forward(
        module, f"{context.model_name}: the attention of {module_name} cannot be recorded exactly: "
    )


def _capture_tiled_call(
    context: CaptureContext,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Record a call of a tiled pass, and return its output."""
    assert context.tiling is not None
    eager = _find_exact_eager_forward(context, module)
    argument = _find_differentiable_argument(mask, kwargs)
    if argument is not None:
        raise UnsupportedError(
            f"{context.model_name}: the attention of {context.get_module_name(module)} takes {argument}, which depends "
            "on the input, in addition to queries, keys and values: it cannot be computed tile by tile"
        )
    tiled_call = _build_tiled_attention(eager, module, query.shape[2], mask, kwargs, context.tiling)
    output = tiled_call.forward(query, key, value)
    if context.is_recomputing:
        tiled_call.release()  # autograd saved its tensors; keeping them here would close a reference cycle
    elif context.keep_values:
        context.record_call(module, tiled_call.meta_attention, value, output, tiled=tiled_call)
    else:
        context.record_call(module, tiled_call.meta_attention, tiled=tiled_call)
    return context.maybe_zero_output(output), None


def _capture_materialised_call(
    context: CaptureContext,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Record a call with its full attention map, and return its output and the map."""
    eager = _find_exact_eager_forward(context, module)
    sdpa = _get_sdpa_forward(module, kwargs)
    masks = _get_mask_forms(mask)
    gradient_buffer = GradientBuffer(context.free_buffers)
    patch = _thread_state.patch
    tiled_call = None
    # In half precision gradients are rounded, too, so that they depend on how they are computed.
    is_rounded = query.dtype != get_accumulation_dtype(query.dtype)
    if (
        context.use_tiled_gradients
        and patch is None
        and is_rounded
        and _find_differentiable_argument(mask, kwargs) is None
    ):
        tiling = TilingConfig(kernel=get_fastest_kernel(query.device))
        tiled_call = _build_tiled_attention(eager, module, query.shape[2], masks.make_lazy_mask(), kwargs, tiling)
    output, attention, has_visible_key = attend_with_maps(
        eager, sdpa, module, query, key, value, masks, kwargs, gradient_buffer, tiled_call
    )
    if patch is not None and attention is not None:
        output, attention = patch(output, attention, value, mask)
    context.record_call(
        module, attention, value, output, gradient_buffer=gradient_buffer, has_visible_key=has_visible_key
    )
    return context.maybe_zero_output(output), attention


def _build_tiled_attention(
    eager: Callable[..., tuple[Tensor, Tensor]],
    module: nn.Module,
    num_queries: int,
    mask: Tensor | None,
    kwargs: dict[str, Any],
    tiling: TilingConfig,
) -> TiledAttention:
    """Build the tiled call, with torch's kernel for outputs unless the model runs with eager attention."""
    if _is_eager(module.config):
        return TiledAttention(eager, None, module, mask, False, kwargs, tiling)
    # As in transformers: no mask means a causal mask if the module is causal.
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    uses_causal_mask = mask is None and num_queries > 1 and bool(is_causal)
    return TiledAttention(eager, _get_sdpa_forward(module, kwargs), module, mask, uses_causal_mask, kwargs, tiling)


def _find_differentiable_argument(mask: Tensor | None, kwargs: dict[str, Any]) -> str | None:
    """Name of an argument other than query, key and value that depends on the input: tiles would lose its gradient."""
    for name, argument in {"mask": mask, **kwargs}.items():
        if isinstance(argument, Tensor) and argument.requires_grad:
            return name
    return None


def _get_sdpa_forward(module: nn.Module, kwargs: dict[str, Any]) -> Callable[..., tuple[Tensor, Any]] | None:
    """Torch's own kernel if the model does not run with eager attention: it then computes the output.

    It also stands in for other kernels (flash, flex). None where the model is eager, or passes an argument that torch's
    kernel ignores.
    """
    has_unsupported_argument = any(kwargs.get(name) is not None for name in ("softcap", "s_aux"))
    if has_unsupported_argument or _is_eager(module.config):
        return None
    return _get_attention_function("sdpa")


def _get_mask_forms(mask: Tensor | None) -> MaskForms:
    """All forms of a mask. A mask that the model has built, sliced or moved itself is used as it is."""
    if mask is None or mask not in _mask_forms:
        return MaskForms(mask, mask, lambda: mask)
    return MaskForms(mask, *_mask_forms[mask])


def _is_eager(config: Any) -> bool:
    """Whether the model would run with eager attention if it were not captured."""
    return config is not None and get_attention_implementation(config) == "eager"


def _clearhead_mask(config: Any = None, **kwargs: Any) -> Tensor | None:
    """The mask function that is registered with transformers as "clearhead"."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    context = _thread_state.context
    if config is not None and (context is None or not context.needs_maps):
        return AttentionMaskInterface()[get_attention_implementation(config)](config=config, **kwargs)
    if context is not None and context.tiling is not None:
        return _build_lazy_mask(config, kwargs)
    mask = eager_mask(config=config, **kwargs)
    if mask is not None and mask.dtype == torch.float64:
        # Float64's minimum is −∞ to a softmax in float32, which makes NaN of a padded row that sees no key.
        mask = mask.clamp(min=torch.finfo(torch.float32).min)
    if mask is not None and context is not None:
        sdpa_mask = None
        if not _is_eager(config):
            sdpa_mask = AttentionMaskInterface()["sdpa"](config=config, **kwargs)
        make_mask = cache(partial(_build_lazy_mask, config, kwargs))
        _mask_forms[mask] = (sdpa_mask, make_mask, compute_has_visible_key(sdpa_mask))
    return mask


def _build_lazy_mask(config: Any, mask_kwargs: Mapping[str, Any]) -> Tensor | None:
    """Make the lazy mask; None where nothing is hidden, or where torch's kernel masks causally by itself."""
    # torch's kernel applies a causal mask by itself
    allow_causal_skip = mask_kwargs.get("allow_is_causal_skip", True) and not _is_eager(config)
    return make_lazy_mask(config=config, **{**mask_kwargs, "allow_is_causal_skip": allow_causal_skip})


def _get_attention_function(name: str) -> Callable[..., tuple[Tensor, Any]]:
    """Return the function that transformers registers under this name."""
    from transformers.modeling_utils import AttentionInterface

    return AttentionInterface()[name]


@cache
def register_functions() -> None:
    """Register the attention implementation "clearhead" with transformers.

    On first use, not on import: importing transformers' model code takes two seconds.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION_NAME, _clearhead_attention_forward)
    # Without a mask function of the same name, transformers silently drops the padding mask.
    AttentionMaskInterface.register(IMPLEMENTATION_NAME, _clearhead_mask)


def find_eager_forward(module: nn.Module, error_prefix: str = "") -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the `eager_attention_forward` of the Python module that defines the attention's class.

    Args:
        module: An attention module of transformers.
        error_prefix: Text before the error message.

    Raises:
        UnsupportedError: There is no such function.
    """
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise UnsupportedError(
        f"{error_prefix}{type(module).__module__}, which defines {type(module).__name__}, has no "
        "eager_attention_forward"
    )


@contextmanager
def capture_attention_calls(
    topology: ModelTopology,
    keep_layer_io: bool = False,
    find_projections: bool = False,
    needs_maps: bool = True,
    implementation: str = IMPLEMENTATION_NAME,
    zero_attention: bool = False,
    tiling: TilingConfig | None = None,
    keep_values: bool = True,
    use_tiled_gradients: bool = False,
) -> Iterator[list[CapturedCall]]:
    """Collect every attention call that the model makes in this thread inside the `with`.

    Args:
        topology: The modules of the model.
        keep_layer_io: Whether calls keep the input and output of their layer.
        find_projections: Whether to find the output projection of each call.
        needs_maps: Whether calls have attention maps; if not, the model's own kernels run.
        implementation: Attention implementation to switch to; "eager" for models that do not use transformers' table
            of attention functions.
        zero_attention: Whether attention outputs are replaced by zeros after they are captured.
        tiling: Settings of a tiled pass: calls have no maps, but a `TiledAttention` that computes them.
        keep_values: Whether calls of a tiled pass keep values and outputs.
        use_tiled_gradients: Whether gradients in half precision are computed as in a tiled pass, also where maps are
            materialised.

    Yields:
        The list that receives the calls.
    """
    register_functions()
    layer_recorder = LayerRecorder(topology.layers if keep_layer_io else ())
    context = CaptureContext(
        topology, layer_recorder, needs_maps, zero_attention, tiling, keep_values, use_tiled_gradients
    )
    handles = [*layer_recorder.handles, *returned_attentions.register_output_hooks(topology, context)]
    if find_projections:
        hook = _make_projection_hook(context)
        handles += [module.register_forward_pre_hook(hook) for module in topology.matrix_modules]
    outer_context = _thread_state.context
    with ExitStack() as stack:
        stack.enter_context(remove_hooks_on_exit(handles))
        stack.enter_context(custom_modules.captured_custom_modules(topology, context))
        stack.enter_context(switched_attention_implementation(topology, implementation))
        if tiling is not None and tiling.checkpoint_layers and torch.is_grad_enabled():
            make_recompute_context = partial(_recompute_context, implementation, context)
            stack.enter_context(checkpointed_layers(topology.layers, make_recompute_context))
        _thread_state.context = context
        try:
            yield context.calls
        finally:
            _thread_state.context = outer_context
            context.clear()


@contextmanager
def _recompute_context(implementation: str, context: CaptureContext) -> Iterator[None]:
    """State while activation checkpointing recomputes a layer in the backward pass, in whichever thread that is."""
    outer_context = _thread_state.context
    with switched_attention_implementation(context.topology, implementation):
        _thread_state.context = context
        context.is_recomputing = True
        if context.tiling is not None:
            context.tiling.kernel_log.has_recomputed_layers = True
        try:
            yield
        finally:
            _thread_state.context = outer_context
            context.is_recomputing = False


@contextmanager
def zeroed_values(unit_index: int | None) -> Iterator[None]:
    """Inside the `with`, the values of one unit are zero in all heads of this thread's attention; no call is captured.

    Args:
        unit_index: Index of the unit among the keys; None for an unchanged pass.
    """

    def edit_values(values: Float[Tensor, "batch kv_head key width"]) -> Float[Tensor, "batch kv_head key width"]:
        if unit_index is None:
            return values
        is_unit = torch.arange(values.shape[2], device=values.device) == unit_index
        return values.masked_fill(is_unit[:, None], 0)

    register_functions()
    outer_context = _thread_state.context
    _thread_state.context = None
    _thread_state.edit_values = edit_values
    try:
        yield
    finally:
        _thread_state.context = outer_context
        _thread_state.edit_values = None


@contextmanager
def patched_attention(patch: PatchFunction) -> Iterator[None]:
    """Inside the `with`, `patch` replaces output and attention of every call captured in this thread."""
    outer_patch = _thread_state.patch
    _thread_state.patch = patch
    try:
        yield
    finally:
        _thread_state.patch = outer_patch


@contextmanager
def replaced_attention_output(compute_output: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the `with`, every attention call of this thread returns `compute_output(query)`, and none is captured."""
    register_functions()
    outer_context = _thread_state.context
    _thread_state.context = None
    _thread_state.compute_output = compute_output
    try:
        yield
    finally:
        _thread_state.context = outer_context
        _thread_state.compute_output = None


def _make_projection_hook(context: CaptureContext) -> Callable[..., None]:
    """Make a hook that recognises the output projection: the linear map whose input is the attention's output."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not context.is_active or not context.calls or not args or not isinstance(args[0], Tensor):
            return
        call = context.calls[-1]
        if call.output is None or call.output_projection is not None:
            return
        if _has_same_values(args[0], call.output):
            weight = module.weight
            assert isinstance(weight, Tensor)
            # GPT-2's Conv1D stores its weight as input × output.
            call.output_projection = weight if isinstance(module, nn.Linear) else weight.T
            if call.tiled is not None:
                call.output = None  # a tiled pass keeps only what it needs

    return hook


def _has_same_values(tensor: Tensor, reference: Tensor) -> bool:
    """Whether two tensors hold the same values in the same order, whatever their shapes."""
    if tensor.numel() != reference.numel():
        return False
    return tensor.data_ptr() == reference.data_ptr() or torch.equal(tensor.reshape(-1), reference.reshape(-1))
