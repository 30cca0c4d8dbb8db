"""Snapshots of everything about a user's model and processor that a call could change, as plain data."""

import json
from typing import Any

import torch
from torch import Tensor, nn


def of_model(model: nn.Module) -> dict[str, Any]:
    """Weights, flags, hooks and attributes of every module, every config, and the global state of torch."""
    from clearhead.capture.topology import ModelTopology

    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "tensors": {name: _bytes(tensor) for name, tensor in tensors},
        "objects": {name: (id(tensor), tensor.data_ptr(), tensor.dtype) for name, tensor in tensors},
        "requires_grad": {name: tensor.requires_grad for name, tensor in tensors},
        "gradients": {name: tensor.grad is None for name, tensor in tensors},
        "tensor hooks": {name: _hooks(tensor._backward_hooks) for name, tensor in tensors},
        "modules": {name: (id(module), type(module)) for name, module in model.named_modules()},
        "attributes": {name: _attributes(module) for name, module in model.named_modules()},
        "hooks": {name: _all_hooks(module) for name, module in model.named_modules()},
        "configs": [(id(config), _config(config)) for config in ModelTopology(model).find_configs()],
        "random numbers": torch.get_rng_state().numpy().tobytes(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }


def of_processor(processor: Any) -> dict[str, Any]:
    if hasattr(processor, "backend_tokenizer"):
        backend = processor.backend_tokenizer
        return {
            "backend": backend.to_str(),
            "padding": backend.padding,
            "truncation": backend.truncation,
            "sides": (processor.truncation_side, processor.padding_side),
            "size": (len(processor), processor.vocab_size, processor.model_max_length),
            "special": processor.special_tokens_map,
            "attributes": sorted(processor.__dict__),
        }
    return {"settings": json.dumps(processor.to_dict(), default=str), "attributes": sorted(processor.__dict__)}


def changes(before: dict[str, Any], after: dict[str, Any], path: str = "") -> list[str]:
    """The differences of two snapshots, as lines of text."""
    differences = []
    for key in before.keys() | after.keys():
        old, new = before.get(key, "absent"), after.get(key, "absent")
        if isinstance(old, dict) and isinstance(new, dict):
            differences += changes(old, new, f"{path}{key} › ")
        elif old != new:
            differences.append(f"{path}{key}: {old!r:.80} → {new!r:.80}")
    return sorted(differences)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def _hooks(table: Any) -> list[tuple[Any, int]]:
    return [(key, id(hook)) for key, hook in (table or {}).items()]


def _all_hooks(module: nn.Module) -> dict[str, Any]:
    """Every hook dictionary of torch (forward, pre, backward, with kwargs, always called, state)."""
    return {name: _hooks(table) for name, table in vars(module).items() if "hooks" in name and isinstance(table, dict)}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain values by value, everything else by identity; hooks and tensors are compared separately."""
    registries = ("_parameters", "_buffers", "_modules")
    plain = (bool, int, float, str, type(None), tuple)
    return {
        name: value if isinstance(value, plain) else id(value)
        for name, value in vars(module).items()
        if name not in registries and not ("hooks" in name and isinstance(value, dict))
    } | {name: sorted(vars(module)[name]) for name in registries}


def _config(config: Any) -> dict[str, Any]:
    return {
        "settings": json.dumps(config.to_dict(), default=str, sort_keys=True),
        "attention": config._attn_implementation_internal,
        "attributes": {name: repr(value) for name, value in vars(config).items()},
    }
