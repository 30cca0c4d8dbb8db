"""`clearhead convert`: an original checkpoint to a folder that clearhead and transformers can load."""

import json
from pathlib import Path
from typing import Annotated

import typer

import clearhead
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.errors import InputError

CONVERT_EXAMPLES = (
    "clearhead convert deit_base_patch16_224.pth deit-base --family deit --i-trust-this-file",
    "clearhead convert dino_vitbase16_pretrain.pth dino --head-file linear.pth --family dino --i-trust-this-file",
    "clearhead explain chelsea --model deit-base",
)


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint: .pth, .pt, .bin or .safetensors.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder to create; it must not exist yet.")],
    family: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Model family: vit (timm), deit, dino, moco (v3), mae, clip (OpenAI), detr or bert.",
            show_default=False,
        ),
    ],
    i_trust_this_file: Annotated[
        bool,
        typer.Option(
            "--i-trust-this-file",
            metavar="",
            help="Confirm that you trust the file: opening a pickled checkpoint can execute arbitrary code.",
        ),
    ] = False,
    class_names: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File with the class names: one per line, or a JSON list."),
    ] = None,
    num_heads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of attention heads per layer (not stored in the checkpoint). Default: the number in the "
            "authors' models.",
        ),
    ] = None,
    head_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Second file with the classification head (DINO, MoCo).")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Folder or hub name of a tokenizer to store with the model (clip, bert)."),
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Convert a checkpoint from its authors' format to the safetensors format of transformers.

    Supports the model families listed under --family. Model sizes are inferred from tensor shapes. Nothing is written
    unless every weight is recognised.
    """
    import transformers

    transformers.logging.disable_progress_bar()  # nothing is downloaded
    names = None if class_names is None else _read_class_names(class_names)
    with put.status_spinner(f"converting {source}"):
        result = clearhead.convert_checkpoint(
            *(source, dest, family),
            trusted=i_trust_this_file,
            class_names=names,
            num_heads=num_heads,
            head_file=head_file,
            tokenizer=tokenizer,
        )
    if as_json:
        put.print_json(result.to_dict())
        return
    print(f"{result.architecture} with {result.weights} tensors: {result.folder}")
    if result.skipped_tensors:
        print(f"not needed by the model: {len(result.skipped_tensors)} tensors ({result.skipped_tensors[0]} …)")
    if result.assumed:
        assumptions = ", ".join(f"{name} {value}" for name, value in result.assumed.items())
        print(f"assumed, not contained in the file: {assumptions}")
    if result.missing:
        print(f"not contained in the file, but needed: {result.missing} (--{result.missing})")


def _read_class_names(path: str) -> list[str]:
    """Read class names from a JSON list, or from a file with one name per line."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"cannot read the class names in {path!r}: {problem}") from None
    if not text.lstrip().startswith("["):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        return [str(name) for name in json.loads(text)]
    except ValueError as problem:
        raise InputError(f"the class names in {path!r} are not a JSON list: {problem}") from None
