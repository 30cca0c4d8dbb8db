"""`clearhead convert`: an original checkpoint → a folder that clearhead and transformers open."""

import json
from pathlib import Path
from typing import Annotated

import typer

import clearhead
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.errors import InputError

EXAMPLES = (
    "clearhead convert deit_base_patch16_224.pth deit-base --family deit --i-trust-this-file",
    "clearhead convert dino_vitbase16_pretrain.pth dino --head linear.pth --family dino --i-trust-this-file",
    "clearhead explain chelsea --model deit-base",
)


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The checkpoint: .pth, .pt, .bin or .safetensors.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write; it must not be there yet.")],
    family: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="vit (timm), deit, dino, moco (v3), mae, clip (OpenAI), detr, bert.",
            show_default=False,
        ),
    ],
    i_trust_this_file: Annotated[
        bool,
        typer.Option(
            "--i-trust-this-file",
            metavar="",
            help="You vouch for the file. To open a pickled file can be to run whatever code its maker put into it.",
        ),
    ] = False,
    labels: Annotated[
        str | None, typer.Option(metavar="FILE", help="The names of the classes: one a line, or a JSON list.")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Heads of each layer, which no file says. Default: as the authors have it."),
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="FILE", help="A second file with the classifier (DINO, MoCo).")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A folder or hub name whose tokenizer is written, too (clip, bert)."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Turn an original checkpoint into safetensors in the layout of transformers.

    For the families of the published experiments. Sizes come from the shapes of the tensors; every weight must be
    understood, and nothing is written unless the whole model is.
    """
    import transformers

    transformers.logging.disable_progress_bar()  # nothing is downloaded
    names = None if labels is None else _names(labels)
    with put.waiting(f"converting {source}"):
        done = clearhead.convert(
            *(source, dest, family),
            trusted=i_trust_this_file,
            labels=names,
            heads=heads,
            head=head,
            tokenizer=tokenizer,
        )
    if as_json:
        put.print_json(done.to_dict())
        return
    print(f"{done.architecture} of {done.weights} tensors: {done.folder}")
    if done.left_out:
        print(f"left out, since it does not need them: {len(done.left_out)} tensors ({done.left_out[0]} …)")
    if done.assumed:
        print("taken to be so, since the file does not say: " + ", ".join(f"{k} {v}" for k, v in done.assumed.items()))
    if done.wants:
        print(f"still wanted, since the file has none: {done.wants} (--tokenizer)")


def _names(path: str) -> list[str]:
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"cannot read the labels in {path!r}: {problem}") from None
    if not text.lstrip().startswith("["):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        return [str(name) for name in json.loads(text)]
    except ValueError as problem:
        raise InputError(f"the labels in {path!r} are no JSON list: {problem}") from None
