"""`clearhead verify`: test declared properties and invariants of attribution methods on a model."""

from typing import Annotated, Any

import typer

import clearhead
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli import runtime
from clearhead.cli.inputs import load_explainer, load_model_and_inputs

VERIFY_EXAMPLES = (
    "clearhead verify generic",
    'clearhead verify generic,integrated-gradients --model zoo:sentiment --text "I like the movie" --text "So boring"',
    "clearhead verify all --model zoo:recall --example 3 --json",
    "clearhead verify rollout --image chelsea",
)


@opt.flatten_option_groups
def verify(
    input_options: opt.CliInputOptions,
    model_options: opt.CliExplainModelOptions,
    method: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD",
            help="Methods, separated by commas or spaces; all selects every applicable method.",
            show_default=False,
        ),
    ],
    seed: opt.SeedOption = 0,
    as_json: opt.JsonOption = False,
) -> None:
    """Test the declared properties of methods on a model, and the invariants that hold for all methods.

    Each line shows the measured value, the bound, and whether the check passed or failed; a check that does not apply
    to this model is listed with the reason. Without an input, a small example is used. The exit code is 3 if a check
    failed.
    """
    chosen_methods: Any = "all"
    if [name.strip() for name in method] != ["all"]:
        chosen_methods = opt.parse_method_options(method, [])
    if input_options.values_by_stream or input_options.example is not None:
        explainer, raw_inputs = load_model_and_inputs(model_options, [], input_options)
    else:
        explainer = load_explainer(model_options)
        raw_inputs = {}
    result = clearhead.verify(chosen_methods, explainer, **raw_inputs, seed=seed, progress=put.is_interactive())
    if as_json:
        put.print_json(result.to_dict())
    else:
        put.make_console().print(result)
    if not result.ok:
        failures = "; ".join(f"{row.method}: {row.property}" for row in result.failed)
        runtime.print_error(f"failed: {failures}", runtime.EXIT_ROWS_FAILED)
        raise typer.Exit(runtime.EXIT_ROWS_FAILED)
