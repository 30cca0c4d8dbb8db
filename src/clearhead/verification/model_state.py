"""What a call could leave changed in a model."""

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.capture.session import configs_of


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a call could leave changed, by what it is called."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    modules = list(model.modules())
    weights = sha256()
    for name, tensor in tensors:
        weights.update(name.encode() + _bytes(tensor))
    return {
        "weights": weights.hexdigest(),
        "gradients": [
            None if tensor.grad is None else (id(tensor.grad), tensor.grad._version) for _, tensor in tensors
        ],
        "what asks for gradients": [tensor.requires_grad for _, tensor in tensors],
        "mode": [module.training for module in modules],
        "attention implementation": [config._attn_implementation for config in configs_of(model)],
        "hooks": [
            len(table)
            for module in modules
            for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        ],
    }


def _bytes(tensor: Tensor) -> bytes:
    if tensor.is_meta:  # offloaded: not here between passes
        return b""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return bytes(flat.view(torch.uint8).numpy())
