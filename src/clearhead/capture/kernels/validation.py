"""Validates kernels against a float64 reference before use: compilers have bugs, and GPUs have limits."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.tiling import QKVGradients
from clearhead.errors import ClearheadWarning


def validate_kernel(matches_reference: Callable[[], bool], kernel_name: str, fallback: str) -> bool:
    """Return whether a kernel agrees with its formula on this machine; warn if it does not or fails to run.

    Args:
        matches_reference: Runs the kernel and compares it with the formula.
        kernel_name: The name of the kernel in the warning.
        fallback: What is used instead, for the warning.

    Raises:
        torch.OutOfMemoryError: If memory runs out, which proves nothing about the kernel.
    """
    try:
        if matches_reference():
            return True
        reason = "its results differ from the reference formula"
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # compilers raise exceptions of their own
        reason = f"{type(problem).__name__}: {problem}"
    warnings.warn(f"{kernel_name} cannot be used here ({reason}): {fallback}", ClearheadWarning, stacklevel=2)
    return False


class ReferenceAttention(NamedTuple):
    """The results of the attention formula in float64, with which kernels are compared.

    Attributes:
        output: The output of the attention.
        gradients: ∂y/∂query, ∂y/∂key and ∂y/∂value.
        lse: The log-sum-exp of each query's scores.
        product: A ⊙ ∂y/∂A.
    """

    output: Float[Tensor, "batch head query value_width"]
    gradients: QKVGradients
    lse: Float[Tensor, "batch head query"]
    product: Float[Tensor, "batch head query key"]


def compute_reference_attention(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, visible_mask: Tensor | None
) -> ReferenceAttention:
    """Compute attention and its gradients in float64, without autograd: the caller may be inside a checkpointed layer.

    Args:
        query: batch head query width
        key: batch kv_head key width
        value: batch kv_head key value_width
        grad_output: ∂y/∂output, batch head query value_width
        visible_mask: Whether a query sees a key; None if all keys are visible.
    """
    kv_heads = key.shape[1]
    group_size = query.shape[1] // kv_heads
    scale = query.shape[3] ** -0.5
    q = query.double()
    k = key.repeat_interleave(group_size, 1).double()
    v = value.repeat_interleave(group_size, 1).double()
    g = grad_output.double()
    scores = q @ k.mT * scale
    if visible_mask is not None:
        scores = scores.masked_fill(~visible_mask, -torch.inf)
    attention = scores.softmax(-1)
    grad_attention = g @ v.mT
    grad_scores = attention * (grad_attention - (attention * grad_attention).sum(-1, keepdim=True)) * scale
    dq = grad_scores @ k
    dk = (grad_scores.mT @ q).unflatten(1, (kv_heads, group_size)).sum(2)
    dv = (attention.mT @ g).unflatten(1, (kv_heads, group_size)).sum(2)
    return ReferenceAttention(attention @ v, (dq, dk, dv), scores.logsumexp(-1), attention * grad_attention)
