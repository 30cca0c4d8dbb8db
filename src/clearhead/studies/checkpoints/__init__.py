"""Convert original checkpoints of published models to safetensors in the layout of transformers."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import save_file

from clearhead.data.atomic_file import PARTIAL_SUFFIX
from clearhead.errors import InputError, unknown_value_error
from clearhead.studies.checkpoints import bert, clip, detr, vit
from clearhead.studies.checkpoints.reader import (
    CheckpointTensors,
    ConversionSettings,
    ConvertedModel,
    format_names,
    open_checkpoint_file,
)

CONVERTERS = {**vit.VIT_CONVERTERS, "clip": clip.convert_clip, "detr": detr.convert_detr, "bert": bert.convert_bert}
#: Key of the loading report of transformers → description.
_LOADING_PROBLEMS = {"missing_keys": "missing", "unexpected_keys": "unexpected", "mismatched_keys": "wrong shape"}


@dataclass(frozen=True)
class ConversionResult:
    """Result of a checkpoint conversion.

    Attributes:
        folder: Folder that was written.
        family: Family of the checkpoint.
        architecture: Model class of transformers.
        weights: Number of converted tensors.
        skipped_tensors: Names of the tensors that the model does not need.
        assumed: Settings that the file does not contain and that were assumed.
        used_pickle: Whether a file had to be unpickled in full, which can execute code.
        missing: What must be added before the model can be used: "tokenizer", or None.
    """

    folder: str
    family: str
    architecture: str
    weights: int
    skipped_tensors: tuple[str, ...]
    assumed: dict[str, Any]
    used_pickle: bool
    missing: str | None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON-serialisable values, schema "clearhead/conversion".

        Returns:
            A dict of the attributes, with "schema" and "version".

        Example:
            >>> clearhead.convert_checkpoint("vit_b16.pth", "vit", family="vit").to_dict()["weights"]  # doctest: +SKIP
        """
        return {"schema": "clearhead/conversion", "version": 2, **asdict(self)}


def convert_checkpoint(
    source: str | Path,
    dest: str | Path,
    family: str,
    *,
    trusted: bool = False,
    class_names: Sequence[str] | None = None,
    num_heads: int | None = None,
    head_file: str | Path | None = None,
    tokenizer: str | None = None,
) -> ConversionResult:
    """Convert an original checkpoint to a folder that `clearhead.load` and transformers open.

    Every weight must be recognised, and the folder is written only if the model loads completely.

    Args:
        source: Checkpoint file (.pth, .pt, .bin, .safetensors).
        dest: Folder to write; it must not exist, or be empty.
        family: vit (timm), deit, dino, moco, mae, clip (OpenAI), detr or bert.
        trusted: Whether you trust the file: opening a pickled file can execute arbitrary code.
        class_names: Names of the classes.
        num_heads: Number of attention heads per layer, which no file contains; by default that of the family's authors.
        head_file: Second file with the classifier, as the authors of DINO and MoCo publish it.
        tokenizer: Folder or hub name of a tokenizer to save as well, for families that read text.

    Returns:
        The folder, the architecture, skipped tensors and assumptions.

    Raises:
        InputError: The family is unknown, `dest` is not empty, or the weights do not form a model of that family.
        UnsupportedError: The file is pickled and not `trusted`, or the architecture is not supported.

    Example:
        >>> convert_checkpoint("dino_deitsmall16.pth", "dino-s", "dino", trusted=True)  # doctest: +SKIP
    """
    if family not in CONVERTERS:
        raise unknown_value_error("family", family, CONVERTERS)
    folder = Path(dest)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{str(dest)!r} already exists: specify a folder that does not exist or is empty")
    weights, used_pickle = open_checkpoint_file(source, trusted)
    head_weights: CheckpointTensors | None = None
    if head_file is not None:
        head_weights, head_used_pickle = open_checkpoint_file(head_file, trusted)
        used_pickle = used_pickle or head_used_pickle
    if class_names is not None and not class_names:
        raise InputError("class_names= is empty: pass the names of the classes")
    model = CONVERTERS[family](weights, ConversionSettings(family, class_names, num_heads, head_weights))
    _check_all_used(weights, source, family)
    skipped_names = list(weights.skipped_names)
    if head_weights is not None:
        _check_all_used(head_weights, head_file, family)
        skipped_names += head_weights.skipped_names
    _write_model_folder(model, folder, tokenizer)
    return ConversionResult(
        folder=str(folder),
        family=family,
        architecture=model.architecture,
        weights=len(model.weights),
        skipped_tensors=tuple(sorted(skipped_names)),
        assumed=model.assumptions,
        used_pickle=used_pickle,
        missing="tokenizer" if model.reads_text and tokenizer is None else None,
    )


def _check_all_used(weights: CheckpointTensors, path: str | Path | None, family: str) -> None:
    """Raise `InputError` if the file has tensors that were neither converted nor skipped."""
    if weights.remaining_names:
        raise InputError(
            f"{str(path)!r} contains weights that {family} models do not have: {format_names(weights.remaining_names)}"
        )


def _write_model_folder(model: ConvertedModel, folder: Path, tokenizer: str | None) -> None:
    """Write to a temporary folder, check that the model loads, and rename: complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}{PARTIAL_SUFFIX}")
    try:
        partial.mkdir()
        model.config.architectures = [model.architecture]
        model.config.save_pretrained(partial)
        save_file(model.weights, str(partial / "model.safetensors"), metadata={"format": "pt"})
        if model.processor is not None:
            model.processor.save_pretrained(partial)
        if tokenizer is not None:
            _open_tokenizer(tokenizer).save_pretrained(partial)
        _check_loads_completely(model, partial)
        if folder.is_dir():  # empty, as checked above
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _open_tokenizer(name: str) -> Any:
    """Load a tokenizer without running remote code; any failure becomes an `InputError` of one line."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"cannot open the tokenizer of {name!r}: {str(error).strip().splitlines()[0]}") from None


def _check_loads_completely(model: ConvertedModel, folder: Path) -> None:
    """Check that the folder has exactly the weights of the architecture, in the right shapes."""
    import transformers

    model_class: Any = getattr(transformers, model.architecture)
    options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True, "trust_remote_code": False}
    if model.architecture == "ViTModel":
        options["add_pooling_layer"] = False
    _, report = model_class.from_pretrained(folder, ignore_mismatched_sizes=True, **options)
    problems = []
    for report_key, description in _LOADING_PROBLEMS.items():
        names = [entry if isinstance(entry, str) else entry[0] for entry in report[report_key]]
        if names:
            problems.append(f"{description}: {format_names(names)}")
    if problems:
        raise InputError(f"the weights do not form a {model.architecture}: {'; '.join(problems)}")
