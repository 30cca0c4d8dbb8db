"""Read and write golden files: the same arrays always give the same bytes."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

GOLDEN_FOLDER = Path(__file__).parent / "data"


def save_arrays(folder: Path, model_name: str, arrays: dict[str, np.ndarray]) -> None:
    """Write the golden scores of one model as a compressed safetensors file."""
    path = folder / "scores" / f"{model_name}.safetensors.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    path.write_bytes(gzip.compress(save(contiguous), mtime=0))


def load_arrays(folder: Path, model_name: str) -> dict[str, np.ndarray]:
    """Read the golden scores of one model."""
    return load(gzip.decompress((folder / "scores" / f"{model_name}.safetensors.gz").read_bytes()))


def save_json(folder: Path, name: str, content: Any) -> None:
    """Write a golden table with one entry per line, so that a diff shows each change."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(
        json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def load_json(folder: Path, name: str) -> Any:
    """Read a golden table."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
