"""Checkpoints as safetensors with their facts in the header. No pickles, and never half a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def save_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write tensors (in `dtype`, if given) and facts; a killed process leaves the previous file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.detach().to(dtype if tensor.is_floating_point() else None).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    unfinished = path.with_name(path.name + ".part")
    save_file(stored, unfinished, metadata={"format": "pt", "facts": json.dumps(dict(facts or {}))})
    unfinished.chmod(0o644)  # safetensors creates files that only their owner may read
    os.replace(unfinished, path)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, real ones in float32 (half-precision weights do not train), and its facts."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        facts = json.loads((file.metadata() or {}).get("facts", "{}"))
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, facts
