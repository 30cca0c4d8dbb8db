"""`clearhead verify`: what methods declare, and what the laws promise, measured on a model."""

from typing import Annotated

import typer

import clearhead
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli import runtime
from clearhead.cli.inputs import load, opened

EXAMPLES = (
    "clearhead verify generic",
    'clearhead verify generic,integrated-gradients --model zoo:sentiment --text "I like the movie" --text "So boring"',
    "clearhead verify all --model zoo:recall --example 3 --json",
    "clearhead verify rollout --image chelsea",
)


@opt.in_groups
def verify(
    read: opt.Read,
    loading: opt.Loading,
    method: Annotated[
        list[str],
        typer.Argument(metavar="METHOD", help="Methods by name, or all that apply.", show_default=False),
    ],
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Measure what a method declares and what is promised of every method, on inputs of this model.

    Each line says what was measured, what is allowed, and whether it holds; what cannot be asked here says why. Without
    inputs a small one is taken. The exit code is 3 if something does not hold.
    """
    chosen = "all" if [word.strip() for word in method] == ["all"] else opt.methods(method, [])
    if read.named or read.example is not None:
        ex, raws = opened(loading, [], read)
    else:
        ex, raws = load(loading), {}
    found = clearhead.verify(chosen, ex, **raws, seed=seed, progress=put.talks())
    if as_json:
        put.print_json(found.to_dict())
    else:
        put.console().print(found)
    if not found.ok:
        broken = "; ".join(f"{row.method}: {row.what}" for row in found.failed)
        runtime.say(f"does not hold: {broken}", runtime.ROWS_FAILED)
        raise typer.Exit(runtime.ROWS_FAILED)
