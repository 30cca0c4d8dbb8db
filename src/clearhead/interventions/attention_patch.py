"""Attention patching: replaces the attention weights of chosen layers, heads and query rows during a forward pass.

Weights are replaced after the softmax and before the multiplication with the values. The new weights stay in the
autograd graph, so gradients flow to the tensors they were computed from. Masked keys keep the weight zero, and each row
keeps its sum. In a live pass, later layers compute their attention from the changed hidden states; in a frozen pass,
their attention is pinned to that of a clean pass, and only the direct path remains.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from clearhead.capture.attention_calls import capture_attention_calls
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.context import CapturedCall
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.sources.attention_interface import patched_attention
from clearhead.capture.sources.base import CaptureSource
from clearhead.capture.sources.custom_modules import replaced_custom_attention
from clearhead.capture.sources.returned_attentions import RETURNED_ATTENTIONS
from clearhead.capture.tape import Requirements
from clearhead.capture.topology import ModelTopology
from clearhead.errors import InputError, UnsupportedError

AttentionWeights = Float[Tensor, "batch head query key"]
VisibleKeys = Bool[Tensor, "#batch #head query key"]
#: The attention of a layer, the keys that each query can see, and the layer index → the weights that replace it.
ReplacementFunction = Callable[[AttentionWeights, VisibleKeys, int], AttentionWeights]

#: An additive mask of this value or less hides a key.
MASKED_SCORE_THRESHOLD = -1e4
_SOFTMAX_FUNCTIONS = (functional.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class AttentionPatch:
    """Replacement of attention weights, and where it applies.

    Attributes:
        compute_weights: Computes the new weights from the attention of a layer, its visible keys and its index.
        layers: The layer indices to patch; None for all.
        heads: The head indices to patch; None for all.
        query_mask: The query rows to patch; None for all.
        keep_row_sums: Whether the new rows are scaled to the sums of the old ones. Without it, weights of zero silence
            a head.
    """

    compute_weights: ReplacementFunction
    layers: Collection[int] | None = None
    heads: Collection[int] | None = None
    query_mask: Bool[Tensor, "batch query"] | None = None
    keep_row_sums: bool = True

    def apply(self, attention: AttentionWeights, visible: VisibleKeys, layer: int) -> AttentionWeights:
        """Return the attention of one layer after the patch.

        Args:
            attention: The attention weights of the layer.
            visible: The keys that each query can see.
            layer: The index of the layer.

        Returns:
            New weights, or the same tensor for a layer that is not patched.

        Raises:
            InputError: If a head index is out of range.
        """
        if self.layers is not None and layer not in self.layers:
            return attention
        weights = self.compute_weights(attention, visible, layer).to(attention.dtype) * visible
        if self.keep_row_sums:
            sums = weights.sum(-1, keepdim=True)
            weights = weights * (attention.sum(-1, keepdim=True) / torch.where(sums == 0, 1, sums))
        return torch.where(self._build_selection_mask(attention), weights, attention)

    def _build_selection_mask(self, attention: AttentionWeights) -> Bool[Tensor, "#batch head #query 1"]:
        """Return which heads and queries are patched; an index out of range is an error."""
        num_heads = attention.shape[1]
        heads = range(num_heads) if self.heads is None else self.heads
        if any(not 0 <= head < num_heads for head in heads):
            raise InputError(f"heads={list(heads)} is not valid: the model has {num_heads} heads, counted from 0")
        selected = torch.zeros(1, num_heads, 1, 1, dtype=torch.bool, device=attention.device)
        selected[:, list(heads)] = True
        if self.query_mask is None:
            return selected
        return selected & self.query_mask.to(attention.device)[:, None, :, None]


class _Patcher:
    """Applies patches call by call, and records the attention that each call should have used."""

    def __init__(self, patches: Sequence[AttentionPatch], clean_attention: Sequence[AttentionWeights] | None) -> None:
        self.patches = patches
        self.clean_attention = clean_attention
        self.applied: list[AttentionWeights] = []

    def apply_patches(self, attention: AttentionWeights, visible: VisibleKeys) -> AttentionWeights:
        """Return the patched attention of the next call; in a frozen pass, patches apply to the clean attention."""
        layer = len(self.applied)
        patched = attention
        if self.clean_attention is not None:
            patched = self.clean_attention[layer].to(attention)
        for patch in self.patches:
            patched = patch.apply(patched, visible, layer)
        self.applied.append(patched)
        return patched

    def patch_call(
        self, output: Tensor, attention: AttentionWeights, values: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, AttentionWeights]:
        """Patch a call through the attention interface, as O + (A' − A)·V: unpatched rows stay bit-identical."""
        patched = self.apply_patches(attention, find_visible_keys(attention, mask))
        if patched is attention:
            return output, attention
        per_head = values.repeat_interleave(attention.shape[1] // values.shape[1], dim=1)
        delta = ((patched - attention).to(per_head.dtype) @ per_head).transpose(1, 2)
        return output + delta.reshape(output.shape), patched

    def patch_with_inferred_mask(self, attention: AttentionWeights) -> AttentionWeights:
        """Patch a call whose mask is unknown: a key counts as visible where any head gives it weight."""
        return self.apply_patches(attention, find_visible_keys(attention, None))

    def check_recorded(self, calls: Sequence[CapturedCall], model: nn.Module) -> None:
        """Check that the recorded attention is the patched one.

        Raises:
            UnsupportedError: If the model computes attention elsewhere, or does not use the patched weights.
        """
        name = type(model).__name__
        if len(calls) != len(self.applied):
            raise UnsupportedError(
                f"the attention of {name} cannot be replaced: {len(self.applied)} calls were patched, but {len(calls)} "
                "calls were recorded"
            )
        for call, patched in zip(calls, self.applied, strict=True):
            if call.attention.shape != patched.shape or not torch.equal(call.attention, patched.to(call.attention)):
                raise UnsupportedError(
                    f"the attention of {name} cannot be replaced: {call.module} does not use the replaced weights"
                )


def find_visible_keys(attention: AttentionWeights, mask: Tensor | None) -> VisibleKeys:
    """Return the keys that each query can see.

    Args:
        attention: The attention weights of a call.
        mask: Its Boolean or additive mask. Without one, a key is visible if any head gives it weight.

    Returns:
        True for visible keys; one map for all heads where the mask has one.
    """
    if mask is None:
        return (attention > 0).any(1, keepdim=True)
    mask = mask[..., : attention.shape[-1]]
    if mask.dtype != torch.bool:
        mask = mask > MASKED_SCORE_THRESHOLD
    return mask.expand(-1, -1, attention.shape[2], -1)


class _SoftmaxPatchMode(TorchFunctionMode):
    """Replaces the output of softmax in attention modules, for models that ignore the attention interface."""

    def __init__(self, patcher: _Patcher) -> None:
        super().__init__()
        self.patcher = patcher
        self.thread_id = threading.get_ident()
        self.current_module: nn.Module | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.current_module is None or func not in _SOFTMAX_FUNCTIONS or output.dim() != 4:
            return output
        return self.patcher.patch_with_inferred_mask(output)

    def register_hooks(self, topology: ModelTopology) -> list[torch.utils.hooks.RemovableHandle]:
        """Register hooks that note which attention module is running."""
        modules = topology.attention_modules
        return [
            *(module.register_forward_pre_hook(self._pre_forward_hook) for module in modules),
            *(module.register_forward_hook(self._forward_hook) for module in modules),
        ]

    def _pre_forward_hook(self, module: nn.Module, args: Any) -> None:
        """Note the module that begins, if it runs in the thread of this mode."""
        if threading.get_ident() == self.thread_id:
            self.current_module = module

    def _forward_hook(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that no attention module is running any more."""
        if threading.get_ident() == self.thread_id:
            self.current_module = None


@contextmanager
def _applied_patches(topology: ModelTopology, capture_source: CaptureSource, patcher: _Patcher) -> Iterator[None]:
    """Apply patches inside the `with`, where the model's attention is captured."""
    if capture_source is not RETURNED_ATTENTIONS:
        with patched_attention(patcher.patch_call), replaced_custom_attention(patcher.patch_with_inferred_mask):
            yield
        return
    mode = _SoftmaxPatchMode(patcher)
    with remove_hooks_on_exit(mode.register_hooks(topology)), mode:
        yield


def run_patched_forward(
    recorder: Recorder,
    inputs: Mapping[str, Any],
    patches: Sequence[AttentionPatch],
    clean_attention: Sequence[AttentionWeights] | None = None,
    leaves: Sequence[str] = (),
    requires: Requirements = frozenset({"attention"}),
) -> tuple[Any, list[CapturedCall], dict[str, Tensor]]:
    """Run one recorded forward pass with patched attention.

    Args:
        recorder: Recorder of the model.
        inputs: The model's keyword arguments.
        patches: The patches, applied in this order.
        clean_attention: The attention of every call in a clean pass, which replaces all attention that is not patched
            (frozen). Without it, later layers compute their attention from the changed hidden states (live).
        leaves: Names of the embeddings at which the graph starts.
        requires: The tensors to record.

    Returns:
        The model's output, the recorded attention calls, and the leaf tensors by name.

    Raises:
        UnsupportedError: If the model does not use the patched weights.

    Example:
        >>> patch = AttentionPatch(lambda attention, visible, layer: visible.to(attention.dtype))  # doctest: +SKIP
        >>> output, calls, _ = run_patched_forward(ex.recorder, model_inputs, [patch])  # doctest: +SKIP
    """
    session = recorder.session
    patcher = _Patcher(patches, clean_attention)
    capture_source = recorder.run_self_test(inputs).capture_source
    with (
        session.running(with_gradients=torch.is_grad_enabled()),
        _applied_patches(session.topology, capture_source, patcher),
    ):
        output, calls, leaf_tensors = recorder.forward(inputs, requires, leaves)
    patcher.check_recorded(calls, recorder.model)
    return output, calls, leaf_tensors


def run_training_forward(
    topology: ModelTopology, self_test: SelfTest, inputs: Mapping[str, Any], patches: Sequence[AttentionPatch] = ()
) -> tuple[Any, list[CapturedCall]]:
    """Run one forward pass of a model in training, with gradients to its parameters and in its current mode.

    Args:
        topology: The modules of the model, a copy of the one that `self_test` tested.
        self_test: The result of the recorder's self-test.
        inputs: The model's keyword arguments.
        patches: The attention patches.

    Returns:
        The model's output and the captured attention calls.
    """
    patcher = _Patcher(patches, None)
    with (
        _applied_patches(topology, self_test.capture_source, patcher) if patches else nullcontext(),
        capture_attention_calls(topology, implementation=self_test.implementation) as calls,
    ):
        output = topology.model(**inputs)
    return output, calls
