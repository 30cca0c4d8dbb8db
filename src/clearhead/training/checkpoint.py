"""Checkpoints as safetensors files with metadata in the header, written atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from clearhead.data.atomic_file import atomic_write


def save_checkpoint(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a checkpoint atomically: if the process is killed, the previous file stays intact.

    Args:
        path: The file.
        tensors: The tensors by name.
        metadata: JSON values to store with them.
        dtype: The dtype for floating-point tensors. Default: unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.detach().to(dtype if tensor.is_floating_point() else None).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    with atomic_write(path) as partial:
        save_file(stored, partial, metadata={"format": "pt", "facts": json.dumps(dict(metadata or {}))})
        partial.chmod(0o644)  # safetensors creates files that only their owner may read


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint. Floating-point tensors become float32, because half-precision weights do not train well.

    Args:
        path: The file.

    Returns:
        The tensors by name, and the metadata.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = json.loads((file.metadata() or {}).get("facts", "{}"))
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.float()
    return tensors, metadata
