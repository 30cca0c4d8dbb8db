"""Captures attention through transformers' attention interface.

One registered function delegates to the model's own eager attention, so that position biases, soft caps, sinks, windows
and grouped heads stay exact. Modules that ignore the interface are captured through the attention that they return
(`returned_attentions.py`), and modules that are not from transformers through a registered function
(`custom_modules.py`).
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from clearhead.capture.attention.lazy_mask import HasVisibleKey, compute_has_visible_key, make_lazy_mask
from clearhead.capture.attention.materialised import GradientBuffer, MaskForms, attend_with_maps, compute_model_output
from clearhead.capture.attention.tiled import TiledAttention, get_accumulation_dtype
from clearhead.capture.attention.tiling import TilingConfig, get_fastest_kernel
from clearhead.capture.context import IMPLEMENTATION_NAME, CaptureContext, get_active_context, suspended_capture
from clearhead.capture.session import get_attention_implementation, switched_attention_implementation
from clearhead.capture.sources.base import CaptureSource
from clearhead.errors import UnsupportedError

#: Maps output, attention, values and mask of a call to the output and the attention that replace them.
PatchFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class AttentionInterface(CaptureSource):
    """Switches the model to the attention function that is registered with transformers as "clearhead"."""

    name = "interface"
    shows_computation = True

    def capturing(self, context: CaptureContext) -> AbstractContextManager[None]:
        register_functions()
        return switched_attention_implementation(context.topology, context.implementation)


ATTENTION_INTERFACE = AttentionInterface()


class _ThreadState(threading.local):
    """What the registered attention function does in this thread; context managers below set it."""

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
    context = get_active_context()
    if context is None:  # the flag is switched for all threads
        return _run_original_attention(module, query, key, value, attention_mask, **kwargs)
    if not context.needs_maps:
        return _capture_call_without_map(context, module, query, key, value, attention_mask, kwargs)
    if context.tiling is not None:
        return _capture_tiled_call(context, module, query, key, value, attention_mask, kwargs)
    return _capture_materialised_call(context, module, query, key, value, attention_mask, kwargs)


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
        context.record_call(ATTENTION_INTERFACE, module, meta_attention, value, output)
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
        context.record_call(ATTENTION_INTERFACE, module, tiled_call.meta_attention, value, output, tiled=tiled_call)
    else:
        context.record_call(ATTENTION_INTERFACE, module, tiled_call.meta_attention, tiled=tiled_call)
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
        ATTENTION_INTERFACE,
        module,
        attention,
        value,
        output,
        gradient_buffer=gradient_buffer,
        has_visible_key=has_visible_key,
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

    context = get_active_context()
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
def zeroed_values(unit_index: int | None) -> Iterator[None]:
    """Inside the `with`, the values of one unit are zero in all heads of this thread's attention; no call is captured.

    Args:
        unit_index: Index of the unit among the keys; None for an unchanged pass.

    Yields:
        Nothing: the `with` contains the passes.
    """

    def edit_values(values: Float[Tensor, "batch kv_head key width"]) -> Float[Tensor, "batch kv_head key width"]:
        if unit_index is None:
            return values
        is_unit = torch.arange(values.shape[2], device=values.device) == unit_index
        return values.masked_fill(is_unit[:, None], 0)

    register_functions()
    with suspended_capture():
        _thread_state.edit_values = edit_values
        try:
            yield
        finally:
            _thread_state.edit_values = None


@contextmanager
def patched_attention(patch: PatchFunction) -> Iterator[None]:
    """Inside the `with`, `patch` replaces output and attention of every call captured in this thread.

    Args:
        patch: Receives output, attention, values and mask of a call, and returns the output and attention that replace
            them.

    Yields:
        Nothing: the `with` contains the passes; an outer patch holds again afterwards.
    """
    outer_patch = _thread_state.patch
    _thread_state.patch = patch
    try:
        yield
    finally:
        _thread_state.patch = outer_patch


@contextmanager
def replaced_attention_output(compute_output: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the `with`, every attention call of this thread returns `compute_output(query)`, and none is captured.

    Args:
        compute_output: Computes the output of an attention call from its queries.

    Yields:
        Nothing: the `with` contains the passes.
    """
    register_functions()
    with suspended_capture():
        _thread_state.compute_output = compute_output
        try:
            yield
        finally:
            _thread_state.compute_output = None
