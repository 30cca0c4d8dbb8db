"""A checkpoint as it was found: opened with care, taken apart name by name, so that nothing goes unnoticed."""

import pickle
import re
import tarfile
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from clearhead.errors import InputError, Refusal

#: What checkpoints keep their weights under, the likelier first; a DINO checkpoint's teacher is the one that is used.
_CONTAINERS = ("teacher", "state_dict", "model_state_dict", "model", "net", "module")


class Weights:
    """Tensors by name. What is taken is used up; what is left at the end was not understood."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str = "the file") -> None:
        self.tensors, self.source = dict(tensors), source
        self.left_out: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def unused(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._get(name).shape)

    def take(self, name: str) -> Tensor:
        found = self._get(name)
        del self.tensors[name]
        half = found.dtype in (torch.float16, torch.bfloat16)
        return (found.float() if half else found).detach().contiguous().clone()

    def take_all(self, name: str, to: str) -> dict[str, Tensor]:
        """The weight and, where there is one, the bias of one layer, under another name."""
        parts = [part for part in ("weight", "bias") if part == "weight" or f"{name}.bias" in self]
        return {f"{to}.{part}": self.take(f"{name}.{part}") for part in parts}

    def take_thirds(self, weight: str, bias: str, names: Sequence[str]) -> dict[str, Tensor]:
        """Queries, keys and values out of one matrix."""
        parts = dict(zip(names, self.take(weight).chunk(3), strict=True))
        found = {f"{name}.weight": part.clone() for name, part in parts.items()}
        if bias in self:
            biases = zip(names, self.take(bias).chunk(3), strict=True)
            found |= {f"{name}.bias": part.clone() for name, part in biases}
        return found

    def leave_out(self, pattern: str) -> None:
        """What the model does not need."""
        for name in [name for name in self.tensors if re.search(pattern, name)]:
            self.left_out.append(name)
            del self.tensors[name]

    def without_prefix(self, *prefixes: str) -> None:
        """Take prefixes off, each where any name has it; what has it not is left out."""
        for prefix in prefixes:
            if any(name.startswith(prefix) for name in self.tensors):
                self.left_out += [name for name in self.tensors if not name.startswith(prefix)]
                self.tensors = {
                    name.removeprefix(prefix): part for name, part in self.tensors.items() if name.startswith(prefix)
                }

    def count(self, pattern: str) -> int:
        """How many layers there are: `pattern` has their number in brackets."""
        found = {int(match.group(1)) for name in self.tensors if (match := re.match(pattern, name))}
        if found != set(range(len(found))) or not found:
            raise InputError(f"{self.source} holds no layers that are called {pattern!r}: {some(self.unused)}")
        return len(found)

    def _get(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise InputError(f"{self.source} has no {name}: is it of another family? It has {some(self.unused)}")
        return self.tensors[name]


@dataclass
class Settings:
    """What the user says about a checkpoint."""

    family: str
    labels: Sequence[str] | None = None
    heads: int | None = None
    head: Weights | None = None

    def head_count(self, width: int, own: Mapping[int, int] | None = None, each: int | None = 64) -> int:
        """How many heads a layer of this width has: as was said, as the authors have it, or one for each 64."""
        count = self.heads or (own or {}).get(width) or (width // each if each and width % each == 0 else 0)
        if not count or width % count:
            raise InputError(f"it is not plain how many heads layers of a width of {width} have: say so with heads=")
        return count

    def named(self, count: int) -> dict[str, Any]:
        """The classes, for a configuration."""
        if self.labels is not None and len(self.labels) != count:
            raise InputError(f"{len(self.labels)} labels were given, but the model has {count} classes")
        names = [str(label) for label in self.labels or [f"LABEL_{i}" for i in range(count)]]
        return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


@dataclass
class Converted:
    """A model in the layout of transformers, not written yet."""

    architecture: str
    config: Any
    weights: dict[str, Tensor]
    processor: Any = None
    reads_text: bool = False
    assumed: dict[str, Any] = field(default_factory=dict)


def open_weights(path: str | Path, trusted: bool) -> tuple[Weights, bool]:
    """The tensors of a file, and whether it had to be unpickled in full."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {str(path)!r}")
    if file.suffix == ".safetensors":
        try:
            return Weights(load_file(str(file)), repr(file.name)), False
        except (SafetensorError, OSError) as problem:
            raise InputError(f"{str(path)!r} cannot be opened: {problem}") from None
    if not _saved_by_torch(file):
        raise InputError(f"{str(path)!r} is no checkpoint: neither a .safetensors file nor what torch.save writes")
    if not trusted:
        raise Refusal(
            f"{str(path)!r} is a pickled file, and to open one can be to run whatever code its maker put into it: it "
            "could read, send or delete your files. If you know where it comes from and trust that, say so: "
            "--i-trust-this-file (trusted=True in Python). A .safetensors file needs no such trust"
        )
    found, in_full = _unpickled(file)
    tensors = dict(_tensors(found))
    if not tensors:
        raise InputError(f"{str(path)!r} holds no tensors with names: {type(found).__name__}")
    weights = Weights(tensors, repr(file.name))
    weights.without_prefix("module.")
    return weights, in_full


def _saved_by_torch(file: Path) -> bool:
    """By how it begins: an archive, or a pickle; very old ones are in a tar file."""
    with file.open("rb") as content:
        begins = content.read(4)
    return begins == b"PK\x03\x04" or begins[:1] == b"\x80" or tarfile.is_tarfile(file)


def _unpickled(file: Path) -> tuple[Any, bool]:
    """As plain tensors if that is all it holds; otherwise in full, since the user vouches for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old formats, which old checkpoints have
        return _opened(file)


def _opened(file: Path) -> tuple[Any, bool]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True), False
    except pickle.UnpicklingError as problem:
        if "Weights only load failed" not in str(problem):
            raise InputError(f"{str(file)!r} cannot be opened: {_line(problem)}") from None
    except RuntimeError as problem:
        if "TorchScript" not in str(problem):
            raise InputError(f"{str(file)!r} cannot be opened: {_line(problem)}") from None
        return torch.jit.load(str(file), map_location="cpu").state_dict(), True
    except (OSError, EOFError, KeyError, ValueError) as problem:
        raise InputError(f"{str(file)!r} cannot be opened: {_line(problem)}") from None
    try:
        return torch.load(file, map_location="cpu", weights_only=False), True
    except Exception as problem:  # it runs code that is not ours
        raise InputError(f"{str(file)!r} cannot be opened: {type(problem).__name__}: {_line(problem)}") from None


def _tensors(found: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state dict, wherever a checkpoint keeps it."""
    while True:
        if isinstance(found, nn.Module):
            found = found.state_dict()
        inside = next((name for name in _CONTAINERS if isinstance(found, Mapping) and _holds(found.get(name))), None)
        if inside is None:
            break
        found = found[inside]
    if isinstance(found, Mapping):
        for name, part in found.items():
            if isinstance(part, Tensor):
                yield str(name), part


def _holds(part: Any) -> bool:
    return isinstance(part, nn.Module | Mapping)


def renamed(weights: Weights, names: Mapping[str, str], numbers: Iterable[int] = ()) -> dict[str, Tensor]:
    """Layers under other names, with their weights and biases; `{i}` is each of the numbers."""
    found: dict[str, Tensor] = {}
    for old, new in names.items():
        for i in numbers if "{i}" in old else (0,):
            found |= weights.take_all(old.format(i=i), new.format(i=i))
    return found


def some(names: Collection[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f", … ({len(listed)} in all)" if len(listed) > 8 else "")


def _line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [""])[0]
