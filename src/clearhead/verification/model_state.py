"""Snapshot of a model's state, to detect calls that leave it changed."""

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.capture.topology import ModelTopology


def snapshot_model_state(model: nn.Module) -> dict[str, Any]:
    """Record everything that a call could leave changed in a model.

    Args:
        model: The model.

    Returns:
        Comparable values by name: hash of the weights, gradients, requires_grad flags, training modes, attention
        implementations and numbers of hooks.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    modules = list(model.modules())
    weights = sha256()
    for name, tensor in tensors:
        weights.update(name.encode() + _get_tensor_bytes(tensor))
    return {
        "weights": weights.hexdigest(),
        "gradients": [_get_gradient_version(tensor) for _, tensor in tensors],
        "requires_grad": [tensor.requires_grad for _, tensor in tensors],
        "mode": [module.training for module in modules],
        "attention implementation": [config._attn_implementation for config in ModelTopology(model).find_configs()],
        "hooks": [
            len(hooks)
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        ],
    }


def _get_gradient_version(tensor: Tensor) -> tuple[int, int] | None:
    """Return identity and version of a gradient, one of which changes with it; None without one."""
    if tensor.grad is None:
        return None
    return id(tensor.grad), tensor.grad._version


def _get_tensor_bytes(tensor: Tensor) -> bytes:
    """Return the memory of a tensor; nothing for offloaded weights."""
    if tensor.is_meta:  # offloaded by accelerate between passes
        return b""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return bytes(flat.view(torch.uint8).numpy())
