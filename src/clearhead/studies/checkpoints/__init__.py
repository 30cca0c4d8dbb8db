"""Original checkpoints → safetensors in the layout of transformers, for the families of the published experiments."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import save_file

from clearhead.data.atomic_file import PARTIAL
from clearhead.errors import InputError, unknown
from clearhead.studies.checkpoints import bert, clip, detr, vit
from clearhead.studies.checkpoints.reader import Converted, Settings, open_weights, some

FAMILIES = {**vit.FAMILIES, "clip": clip.convert, "detr": detr.convert, "bert": bert.convert}


@dataclass(frozen=True)
class Conversion:
    """What was written, what was left out, and what the file did not say and was taken to be so."""

    folder: str
    family: str
    architecture: str
    weights: int
    left_out: tuple[str, ...]
    assumed: dict[str, Any]
    unpickled: bool
    wants: str | None

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "clearhead/conversion", "version": 1, **asdict(self)}


def convert(
    source: str | Path,
    dest: str | Path,
    family: str,
    *,
    trusted: bool = False,
    labels: Sequence[str] | None = None,
    heads: int | None = None,
    head: str | Path | None = None,
    tokenizer: str | None = None,
) -> Conversion:
    """Turn an original checkpoint into a folder that `clearhead.load` and transformers open.

    source: the file (.pth, .pt, .bin, .safetensors); dest: the folder to write, which must not exist yet
    family: vit (timm), deit, dino, moco, mae, clip (OpenAI), detr, bert
    trusted: whether you vouch for the file: to open a pickled file can be to run whatever code it holds
    labels: the names of the classes
    heads: how many heads each layer has, which no file says; by default as its family's authors have it
    head: a second file with the classifier, as DINO's and MoCo's authors give it
    tokenizer: a folder or hub name whose tokenizer is written, too, for families that read texts
    """
    if family not in FAMILIES:
        raise unknown("family", family, FAMILIES)
    folder = Path(dest)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{str(dest)!r} is there already: name a folder that is not")
    weights, unpickled = open_weights(source, trusted)
    extra, unpickled_too = open_weights(head, trusted) if head is not None else (None, False)
    if labels is not None and not labels:
        raise InputError("labels= names no class")
    made = FAMILIES[family](weights, Settings(family, labels, heads, extra))
    for left in (weights, extra):
        if left is not None and left.unused:
            raise InputError(
                f"{str(source if left is weights else head)!r} holds weights that {family} models do not have: "
                f"{some(left.unused)}"
            )
    wants = _write(made, folder, tokenizer)
    return Conversion(
        folder=str(folder),
        family=family,
        architecture=made.architecture,
        weights=len(made.weights),
        left_out=tuple(sorted([*weights.left_out, *(extra.left_out if extra else ())])),
        assumed=made.assumed,
        unpickled=unpickled or unpickled_too,
        wants=wants,
    )


def _write(made: Converted, folder: Path, tokenizer: str | None) -> str | None:
    """The folder, whole or not at all; what it still wants for texts to be read."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}{PARTIAL}")
    try:
        partial.mkdir()
        made.config.architectures = [made.architecture]
        made.config.save_pretrained(partial)
        save_file(made.weights, str(partial / "model.safetensors"), metadata={"format": "pt"})
        if made.processor is not None:
            made.processor.save_pretrained(partial)
        if tokenizer is not None:
            _open_tokenizer(tokenizer).save_pretrained(partial)
        _check(made, partial)
        if folder.is_dir():  # it is empty
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return "a tokenizer" if made.reads_text and tokenizer is None else None


def _open_tokenizer(name: str) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as problem:
        raise InputError(f"cannot open the tokenizer of {name!r}: {str(problem).strip().splitlines()[0]}") from None


def _check(made: Converted, folder: Path) -> None:
    """Every weight that the architecture has must be there, in its size, and no other."""
    import transformers

    opener: Any = getattr(transformers, made.architecture)
    extra = {"add_pooling_layer": False} if made.architecture == "ViTModel" else {}
    how = {"use_safetensors": True, "output_loading_info": True, "trust_remote_code": False}
    _, report = opener.from_pretrained(folder, ignore_mismatched_sizes=True, **how, **extra)
    said = {"missing_keys": "missing", "unexpected_keys": "too many", "mismatched_keys": "of another size"}
    found = "; ".join(
        f"{what}: {some([key if isinstance(key, str) else key[0] for key in report[kind]])}"
        for kind, what in said.items()
        if report[kind]
    )
    if found:
        raise InputError(f"the weights do not make up a {made.architecture}: {found}")
