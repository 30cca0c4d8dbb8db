"""Read checkpoint files safely, and account for every tensor by name, so that none is silently dropped."""

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

from clearhead.errors import InputError, UnsupportedError

#: Keys under which checkpoints store their state dict, in order of preference; DINO is used with its teacher.
_STATE_DICT_KEYS = ("teacher", "state_dict", "model_state_dict", "model", "net", "module")


class CheckpointTensors:
    """Tensors of a checkpoint by name. Converted tensors are removed; the names that remain were not recognised.

    Args:
        tensors: Name → tensor.
        source: Name of the file, for error messages.
    """

    def __init__(self, tensors: Mapping[str, Tensor], source: str = "the file") -> None:
        self.tensors = dict(tensors)
        self.source = source
        self.skipped_names: list[str] = []

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of this name is in the checkpoint and was not taken out yet."""
        return name in self.tensors

    @property
    def remaining_names(self) -> list[str]:
        """Sorted names of the tensors that are neither converted nor skipped."""
        return sorted(self.tensors)

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            InputError: There is no tensor of that name.
        """
        return tuple(self._get_tensor(name).shape)

    def pop(self, name: str) -> Tensor:
        """Remove a tensor and return a contiguous copy; half precision becomes float32.

        Args:
            name: Name of the tensor.

        Returns:
            The copy.

        Raises:
            InputError: There is no tensor of that name.
        """
        tensor = self._get_tensor(name)
        del self.tensors[name]
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()
        return tensor.detach().contiguous().clone()

    def pop_layer(self, name: str, new_name: str) -> dict[str, Tensor]:
        """Remove the weight and, if there is one, the bias of a layer, and return them under another name."""
        tensors = {f"{new_name}.weight": self.pop(f"{name}.weight")}
        if f"{name}.bias" in self:
            tensors[f"{new_name}.bias"] = self.pop(f"{name}.bias")
        return tensors

    def pop_fused_qkv(self, weight_name: str, bias_name: str, new_names: Sequence[str]) -> dict[str, Tensor]:
        """Remove a fused projection and return its query, key and value projections under `new_names`."""
        weights = zip(new_names, self.pop(weight_name).chunk(3), strict=True)
        tensors = {f"{name}.weight": tensor.clone() for name, tensor in weights}
        if bias_name in self:
            biases = zip(new_names, self.pop(bias_name).chunk(3), strict=True)
            tensors |= {f"{name}.bias": tensor.clone() for name, tensor in biases}
        return tensors

    def skip(self, pattern: str) -> None:
        """Drop the tensors whose names match, which the model does not need."""
        for name in [name for name in self.tensors if re.search(pattern, name)]:
            self.skipped_names.append(name)
            del self.tensors[name]

    def strip_prefixes(self, *prefixes: str) -> None:
        """Remove each prefix that any name has, and skip the tensors without it."""
        for prefix in prefixes:
            if any(name.startswith(prefix) for name in self.tensors):
                self.skipped_names += [name for name in self.tensors if not name.startswith(prefix)]
                self.tensors = {
                    name.removeprefix(prefix): tensor
                    for name, tensor in self.tensors.items()
                    if name.startswith(prefix)
                }

    def count_layers(self, pattern: str) -> int:
        """Count the layers; the first group of `pattern` is the layer index.

        Args:
            pattern: A regular expression that matches names from their start.

        Returns:
            The number of layers, at least 1.

        Raises:
            InputError: No name matches, or the indices have gaps.
        """
        indices = {int(match.group(1)) for name in self.tensors if (match := re.match(pattern, name))}
        if indices != set(range(len(indices))) or not indices:
            raise InputError(
                f"{self.source} has no layers with names like {pattern!r}: {format_names(self.remaining_names)}"
            )
        return len(indices)

    def _get_tensor(self, name: str) -> Tensor:
        """Return a tensor, or raise `InputError` with the names of those that are left."""
        if name not in self.tensors:
            raise InputError(
                f"{self.source} has no {name}: check --family; the file has {format_names(self.remaining_names)}"
            )
        return self.tensors[name]


@dataclass
class ConversionSettings:
    """User settings of a conversion.

    Attributes:
        family: Family of the checkpoint.
        class_names: Names of the classes.
        num_heads: Number of attention heads per layer.
        head_tensors: Tensors of a second file with the classifier.
    """

    family: str
    class_names: Sequence[str] | None = None
    num_heads: int | None = None
    head_tensors: CheckpointTensors | None = None

    def get_num_heads(
        self, width: int, heads_by_width: Mapping[int, int] | None = None, head_size: int | None = 64
    ) -> int:
        """Return the number of heads: the user's, the one listed for this width, or width / head size.

        Args:
            width: Hidden size.
            heads_by_width: Numbers of heads that differ from width / head size.
            head_size: Default head size; None if it is unknown.

        Raises:
            InputError: The number cannot be inferred, or does not divide the width.
        """
        num_heads = self.num_heads or (heads_by_width or {}).get(width)
        if not num_heads and head_size and width % head_size == 0:
            num_heads = width // head_size
        if not num_heads or width % num_heads:
            raise InputError(f"cannot infer the number of heads for hidden size {width}: pass num_heads= (--num-heads)")
        return num_heads

    def build_label_config(self, num_classes: int) -> dict[str, Any]:
        """Build the label options of a configuration.

        Raises:
            InputError: The number of class names differs from the number of classes.
        """
        if self.class_names is not None and len(self.class_names) != num_classes:
            raise InputError(f"{len(self.class_names)} class names were given, but the model has {num_classes} classes")
        names = [str(label) for label in self.class_names or [f"LABEL_{index}" for index in range(num_classes)]]
        return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


@dataclass
class ConvertedModel:
    """A model in the layout of transformers, before it is written.

    Attributes:
        architecture: Model class of transformers.
        config: Configuration.
        weights: State dict.
        processor: Image processor, if the model takes images.
        reads_text: Whether the model needs a tokenizer.
        assumptions: Settings that the file does not contain and that were assumed.
    """

    architecture: str
    config: Any
    weights: dict[str, Tensor]
    processor: Any = None
    reads_text: bool = False
    assumptions: dict[str, Any] = field(default_factory=dict)


def open_checkpoint_file(path: str | Path, trusted: bool) -> tuple[CheckpointTensors, bool]:
    """Open a checkpoint file.

    Args:
        path: A .safetensors file, or one of `torch.save` or TorchScript.
        trusted: Whether pickled files may be opened.

    Returns:
        The tensors, and whether the file had to be unpickled in full.

    Raises:
        InputError: The file is missing or is not a checkpoint.
        UnsupportedError: The file is pickled and not trusted.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {str(path)!r}")
    if file.suffix == ".safetensors":
        try:
            return CheckpointTensors(load_file(str(file)), repr(file.name)), False
        except (SafetensorError, OSError) as error:
            raise InputError(f"{str(path)!r} cannot be opened: {error}") from None
    if not _is_torch_file(file):
        raise InputError(
            f"{str(path)!r} is not a checkpoint: neither a .safetensors file nor a file written by torch.save"
        )
    if not trusted:
        raise UnsupportedError(
            f"{str(path)!r} is a pickled file, and opening it can execute arbitrary code that reads, sends or deletes "
            "your files. If you know its origin and trust it, pass --i-trust-this-file (trusted=True in Python). "
            "A .safetensors file cannot execute code"
        )
    content, is_unpickled = _load_without_warnings(file)
    tensors = dict(_iter_named_tensors(content))
    if not tensors:
        raise InputError(f"{str(path)!r} contains no named tensors: {type(content).__name__}")
    weights = CheckpointTensors(tensors, repr(file.name))
    weights.strip_prefixes("module.")
    return weights, is_unpickled


def _is_torch_file(file: Path) -> bool:
    """Check the magic bytes for a zip archive or a pickle; very old checkpoints are tar files."""
    with file.open("rb") as stream:
        magic = stream.read(4)
    return magic == b"PK\x03\x04" or magic[:1] == b"\x80" or tarfile.is_tarfile(file)


def _load_without_warnings(file: Path) -> tuple[Any, bool]:
    """Load as plain tensors if possible, otherwise unpickle in full, since the user trusts the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings of old checkpoint formats
        return _load_torch_file(file)


def _load_torch_file(file: Path) -> tuple[Any, bool]:
    """Load as plain tensors, else by TorchScript or pickle; also return whether code of the file may have run."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True), False
    except pickle.UnpicklingError as error:
        if "Weights only load failed" not in str(error):
            raise InputError(f"{str(file)!r} cannot be opened: {_format_first_line(error)}") from None
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise InputError(f"{str(file)!r} cannot be opened: {_format_first_line(error)}") from None
        return torch.jit.load(str(file), map_location="cpu").state_dict(), True
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise InputError(f"{str(file)!r} cannot be opened: {_format_first_line(error)}") from None
    try:
        return torch.load(file, map_location="cpu", weights_only=False), True
    except Exception as error:  # unpickling runs foreign code, which may raise anything
        raise InputError(
            f"{str(file)!r} cannot be opened: {type(error).__name__}: {_format_first_line(error)}"
        ) from None


def _iter_named_tensors(content: Any) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of the state dict, at whatever nesting level the checkpoint stores it."""
    while True:
        if isinstance(content, nn.Module):
            content = content.state_dict()
        if not isinstance(content, Mapping):
            return
        container_key = next((key for key in _STATE_DICT_KEYS if _is_container(content.get(key))), None)
        if container_key is None:
            break
        content = content[container_key]
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield str(name), value


def _is_container(value: Any) -> bool:
    """Whether an entry of a checkpoint can contain the weights: a module or a mapping."""
    return isinstance(value, nn.Module | Mapping)


def pop_renamed_layers(
    weights: CheckpointTensors, names: Mapping[str, str], layer_indices: Iterable[int] = ()
) -> dict[str, Tensor]:
    """Remove layers and return their weights and biases under other names.

    Args:
        weights: Tensors to take the layers from.
        names: Old name → new name; `{i}` stands for the layer index.
        layer_indices: Values of `{i}`.

    Raises:
        InputError: A weight is missing.
    """
    tensors: dict[str, Tensor] = {}
    for old, new in names.items():
        for index in layer_indices if "{i}" in old else (0,):
            tensors |= weights.pop_layer(old.format(i=index), new.format(i=index))
    return tensors


def format_names(names: Collection[str]) -> str:
    """Format up to eight names, sorted, with the total number if there are more."""
    sorted_names = sorted(names)
    listed = ", ".join(sorted_names[:8])
    if len(sorted_names) > 8:
        return f"{listed}, … ({len(sorted_names)} in all)"
    return listed


def _format_first_line(error: Exception) -> str:
    """Return the first line of an error's message, or an empty string."""
    return (str(error).strip().splitlines() or [""])[0]
