"""`clearhead concept`: concept directions: test (TCAV), find (DensRay), explain their activation, ablate them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.input_sets import (
    parse_layer_list,
    parse_name_pair,
    read_concept_examples,
    read_input_set,
    read_labelled_texts,
    read_text_lines,
)
from clearhead.cli.inputs import explain_by_input, load_explainer, load_model_and_inputs
from clearhead.data.sources import parse_input_source
from clearhead.errors import InputError
from clearhead.explanation.json_keys import to_snake_case

if TYPE_CHECKING:
    from clearhead.concepts.directions import Directions, LayerIndex
    from clearhead.explainer import Explainer

CONCEPT_HELP = (
    "Analyse concept directions in hidden states: whether a concept influences a class, where it is encoded, which "
    "inputs activate it, and how much removing it degrades the model."
)
TCAV_EXAMPLES = (
    "clearhead concept tcav bengals/ --target Bengal --concept dotted --concept striped --random photos/",
    "clearhead concept tcav good.txt -m zoo:sentiment --target POSITIVE --concept praise:great,superb --random all.txt",
    "clearhead concept tcav zebras/ -m google/vit-base-patch16-224 --target zebra --concept stripes=dir/ --random any/",
)
DENSRAY_EXAMPLES = (
    "clearhead concept densray male.txt female.txt --text-file brown.txt -m zoo:masked --save gender.safetensors",
    "clearhead concept densray praise.txt blame.txt -m zoo:sentiment --few --save tone.safetensors",
)
EXPLAIN_EXAMPLES = (
    'clearhead concept explain "The nurse is here." --directions gender.safetensors --layer 3 --at nurse -m zoo:masked',
)
REMOVE_EXAMPLES = (
    "clearhead concept remove gender.safetensors held_out.txt -m zoo:masked",
    "clearhead concept remove tone.safetensors reviews.tsv -m zoo:sentiment --column sentence --label-column label",
)
#: The default model for texts with masked tokens.
DEFAULT_MASKED_MODEL = "zoo:masked"

ConceptLayersOption = Annotated[
    str,
    typer.Option(
        metavar="N,…",
        help="Layers whose output is used, counting from 0, or from the end if negative; embeddings selects the "
        "output of the embedding layer.",
    ),
]
PoolOption = Annotated[
    str,
    typer.Option(
        metavar="class|mean|token|flat",
        help="How token vectors become activations: class (read-out position), mean, token (one per token) or flat "
        "(concatenated).",
    ),
]
ConceptSeedOption = Annotated[int, typer.Option(metavar="N", help="Random seed.")]
ConceptBatchSizeOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Inputs per pass; a smaller batch needs less memory.")
]
PlainOption = Annotated[
    bool,
    typer.Option(
        "--plain",
        metavar="",
        help="Use DensRay on unnormalised differences: faster; for two sets of equal size, equivalent to the "
        "difference of means.",
    ),
]
FewOption = Annotated[
    bool,
    typer.Option(
        "--few",
        metavar="",
        help="Allow fewer vectors than dimensions; the direction is then partly random, so check its held-out "
        "accuracy.",
    ),
]


@opt.flatten_option_groups
def tcav(
    model_options: opt.CliModelOptions,
    inputs: Annotated[
        str, typer.Argument(metavar="SET", help="Inputs of the class: a folder, a .txt file or a table.")
    ],
    concept: Annotated[
        list[str],
        typer.Option(
            metavar="CONCEPT",
            help="Concept: striped, dotted, bubbly or checkered (generated textures), NAME=FOLDER or NAME=FILE "
            "(inputs that show the concept), or NAME:word,word (the texts of --random that contain one of these "
            "words); may be repeated.",
        ),
    ],
    random: Annotated[
        str,
        typer.Option(
            metavar="SET", help="Arbitrary inputs for the random negative sets: a folder, a .txt file or a table."
        ),
    ],
    target: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Class to explain. Default: the predicted class.")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="SCALE",
            help="Quantity whose gradient is taken: the target's logit (default), log-odds or probability. A direction "
            "can raise the logits of all classes; log-odds show what distinguishes one class from the others.",
        ),
    ] = None,
    layers: ConceptLayersOption = "-3,-2,-1",
    pool: PoolOption = "class",
    classifier: Annotated[
        str,
        typer.Option(
            metavar="logistic|sgd|mean-difference|ridge",
            help="Linear classifier from which the concept vectors are computed.",
        ),
    ] = "logistic",
    runs: Annotated[int, typer.Option(metavar="N", min=3, help="Number of random negative sets.")] = 20,
    examples: Annotated[int, typer.Option(metavar="N", min=3, help="Maximum number of inputs per concept.")] = 40,
    threshold: Annotated[
        float,
        typer.Option(
            metavar="ACCURACY",
            help="Minimum held-out accuracy of the classifier that separates a concept from random inputs; concepts "
            "below it are rejected.",
        ),
    ] = 0.6,
    seed: ConceptSeedOption = 0,
    batch_size: ConceptBatchSizeOption = 16,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder in which the concept vectors are saved, as one file CONCEPT.safetensors per concept.",
        ),
    ] = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="Path of the HTML report.")] = "tcav.html",
    as_json: opt.JsonOption = False,
) -> None:
    """Test whether a concept influences a class more than random concepts do (TCAV).

    The score is the fraction of inputs of the class for which the target increases when the activation moves towards
    the concept. Every concept is compared with many random negative sets. A score is significant if it differs from
    the scores of random concepts and from 0.5 in two-sided tests with Holm's correction over concepts and layers.
    """
    put.check_output_paths(html)
    put.check_output_folder(save, option="--save")
    from clearhead.concepts.directions import Directions
    from clearhead.concepts.tcav import run_tcav
    from clearhead.render.reports.concepts import write_tcav_report

    class_inputs = read_input_set(inputs)
    random_inputs = read_input_set(random)
    concepts = dict(read_concept_examples(spec, random_inputs, examples, seed) for spec in concept)
    concept_texts = {
        example for concept_inputs in concepts.values() for example in concept_inputs if isinstance(example, str)
    }
    layer_list = parse_layer_list(layers)
    explainer = load_explainer(model_options, {_get_stream(class_inputs)})
    result = run_tcav(
        explainer,
        class_inputs,
        {name: concept_inputs[:examples] for name, concept_inputs in concepts.items()},
        [value for value in random_inputs if not isinstance(value, str) or value not in concept_texts],
        layer_list,
        target=target,
        scale=scale,
        pool=pool,
        classifier=classifier,
        runs=runs,
        threshold=threshold,
        seed=seed,
        batch_size=batch_size,
        progress=put.is_interactive(),
    )
    if save is not None:
        Path(save).mkdir(exist_ok=True)
        for name, vectors in result.concept_vectors.items():
            directions = Directions(vectors, explainer.adapter.name)
            put.report_written(directions.save(Path(save) / f"{name}.safetensors"))
    put.report_written(write_tcav_report(result, html))
    if as_json:
        put.print_json(result.to_dict())
        return
    columns = ["concept", "layer", "score", "interval", "accuracy", "effect", "p (Holm)", "significant"]
    rows = [
        {
            "concept": test.concept,
            "layer": test.layer,
            "score": f"{test.score:.2f}",
            "interval": f"{test.low:.2f} to {test.high:.2f}",
            "accuracy": f"{test.accuracy:.2f}",
            "effect": f"{test.effect:+.1f}",
            "p (Holm)": f"{test.corrected:.2g}",
            "significant": test.rejection_reason or test.is_significant,
        }
        for test in result.concept_tests
    ]
    put.print_table(columns, rows)


@opt.flatten_option_groups
def densray(
    model_options: opt.CliModelOptions,
    first: Annotated[
        str,
        typer.Argument(
            metavar="FIRST",
            help="Inputs of the first set: a folder, a .txt file or a table; with --text-file, a file with a word "
            "list.",
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Inputs of the second set, in the same format.")],
    text_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="File of running text; may be repeated. FIRST and SECOND are then word lists that are paired line by "
            "line.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="Layers whose output is used, counting from 0, or from the end if negative; embeddings selects the "
            "output of the embedding layer. Default: all layers.",
        ),
    ] = None,
    pool: PoolOption = "class",
    names: Annotated[
        str | None, typer.Option(metavar="A,B", help="Names of the two sets. Default: the file names.")
    ] = None,
    dimensions: Annotated[int, typer.Option(metavar="N", min=1, help="Number of dimensions of the subspace.")] = 1,
    count: Annotated[
        int,
        typer.Option(
            metavar="N", min=4, help="With --text-file: number of sentences from which the direction is computed."
        ),
    ] = 1000,
    plain: PlainOption = False,
    few: FewOption = False,
    batch_size: ConceptBatchSizeOption = 16,
    seed: ConceptSeedOption = 0,
    save: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Save the directions (.safetensors) for use with clearhead concept."),
    ] = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="Path of the HTML report.")] = "densray.html",
    as_json: opt.JsonOption = False,
) -> None:
    """Find the direction that separates two sets of inputs in each layer (DensRay); test it on held-out vectors.

    The direction points towards the first set; its origin is the midpoint between the means of the two sets.
    """
    put.check_output_paths(html, save)
    sides = (Path(first).stem, Path(second).stem)
    if names:
        sides = parse_name_pair(names, "--names")
    fit_kwargs = {"normalise": not plain, "few": few, "seed": seed, "dimensions": dimensions}
    layer_list = None
    if layers is not None:
        layer_list = parse_layer_list(layers)
    if text_file is None:
        explainer, directions = _fit_directions_to_sets(
            model_options, first, second, layer_list, pool, sides, batch_size, fit_kwargs
        )
    else:
        explainer, directions = _fit_directions_to_word_pairs(
            model_options, first, second, text_file, layer_list, sides, count, batch_size, fit_kwargs
        )
    from clearhead.concepts.directions import Directions
    from clearhead.render.reports.concepts import write_directions_report

    model_name = explainer.adapter.name
    settings = {"pool": "word" if text_file else pool, "normalise": not plain, "dimensions": dimensions, "seed": seed}
    if save is not None:
        put.report_written(Directions(directions, model_name).save(save))
    put.report_written(write_directions_report(directions, model_name, html, settings))
    if as_json:
        header = {"schema": "clearhead/densray", "version": 2, "model": model_name, "names": sides}
        put.print_json({**header, "settings": settings, "layers": directions.to_table()})
        return
    put.print_table(["layer", "accuracy", "effect", "count"], [put.format_floats(row) for row in directions.to_table()])


def _fit_directions_to_word_pairs(
    model_options: opt.CliModelOptions,
    first: str,
    second: str,
    text_files: list[Path],
    layers: "list[LayerIndex] | None",
    names: tuple[str, str],
    count: int,
    batch_size: int,
    fit_kwargs: dict[str, Any],
) -> "tuple[Explainer, Directions]":
    """Find the axis of listed words in running text."""
    from clearhead.concepts.word_pairs import (
        collect_occurrences,
        compute_axis_vectors,
        fit_directions,
        read_word_pairs,
        select_single_token_pairs,
    )

    pairs = read_word_pairs(first, second)
    lines = read_text_lines(text_files)
    explainer = load_explainer(model_options.with_model(model_options.model or DEFAULT_MASKED_MODEL))
    occurrences = collect_occurrences(lines, select_single_token_pairs(explainer, pairs), count)
    vectors = compute_axis_vectors(explainer, occurrences, layers, batch_size=batch_size, progress=put.is_interactive())
    return explainer, fit_directions(vectors, names, **fit_kwargs)


def _fit_directions_to_sets(
    model_options: opt.CliModelOptions,
    first: str,
    second: str,
    layers: "list[LayerIndex] | None",
    pool: str,
    names: tuple[str, str],
    batch_size: int,
    fit_kwargs: dict[str, Any],
) -> "tuple[Explainer, Directions]":
    """Find the direction between the activations of two sets of inputs."""
    from clearhead.concepts.cav import compute_activations
    from clearhead.concepts.layer_hooks import find_self_attention_calls
    from clearhead.concepts.word_pairs import AxisVectors, fit_directions

    input_sets = [read_input_set(first), read_input_set(second)]
    explainer = load_explainer(model_options, {_get_stream(input_sets[0])})
    layer_list = layers or list(range(len(find_self_attention_calls(explainer))))
    first_activations, second_activations = (
        compute_activations(
            explainer, input_set, layer_list, pool, batch_size=batch_size, progress=put.is_interactive()
        )
        for input_set in input_sets
    )
    by_layer = {
        layer: (first_activations[layer].activations, second_activations[layer].activations)
        for layer in first_activations
    }
    first_groups, second_groups = (
        [f"{side}{input_index}" for input_index in next(iter(activations.values())).input_indices]
        for side, activations in (("a", first_activations), ("b", second_activations))
    )
    return explainer, fit_directions(AxisVectors(by_layer, first_groups, second_groups), names, **fit_kwargs)


@opt.flatten_option_groups
def explain(
    model_options: opt.CliModelOptions,
    typed_input: opt.InputArgument,
    directions: Annotated[str, typer.Option(metavar="FILE", help="Saved directions or concept vectors.")],
    layer: Annotated[int, typer.Option(metavar="N", help="Layer whose output is explained, counting from 0.")],
    at: Annotated[
        str,
        typer.Option(
            metavar="WORD|N|class",
            help="Position to explain: a word (its first occurrence), a token index, or class (the read-out position).",
        ),
    ] = "class",
    methods: opt.MethodsOption = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="Path of the HTML report.")] = "fires.html",
    as_json: opt.JsonOption = False,
) -> None:
    """Explain, with any method, which parts of the input activate a direction at one layer and position."""
    put.check_output_paths(html)
    if typed_input is None:
        raise InputError("nothing to explain: pass a text or an image. See clearhead concept explain --help")
    from clearhead.concepts.concept_target import make_concept_explainer
    from clearhead.concepts.directions import Directions

    saved = Directions.load(directions)
    chosen_methods = opt.parse_method_options(methods, [])
    explainer, raw_inputs = load_model_and_inputs(
        model_options, [parse_input_source(typed_input)], opt.CliInputOptions()
    )
    if layer not in saved:
        raise InputError(
            f"{directions!r} has no direction for layer {layer}: it has directions for the layers "
            f"{', '.join(map(str, saved))}"
        )
    _note_if_other_model(saved, directions, explainer.adapter.name)
    position: int | str = int(at) if at.lstrip("-").isdigit() else at
    concept_explainer = make_concept_explainer(explainer, saved[layer], layer, position)
    explanations = explain_by_input(concept_explainer, raw_inputs, chosen_methods)
    put.print_explanations(explanations, html, as_json)


@opt.flatten_option_groups
def remove(
    model_options: opt.CliModelOptions,
    directions: Annotated[str, typer.Argument(metavar="DIRECTIONS", help="Saved directions or concept vectors.")],
    inputs: Annotated[str, typer.Argument(metavar="SET", help="Evaluation data: texts, or a table.")],
    column: opt.ColumnOption = None,
    label_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of labels in a table, for classifiers.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=2, help="Use only the first N inputs.")] = 500,
    html: Annotated[str, typer.Option(metavar="FILE", help="Path of the HTML report.")] = "remove.html",
    as_json: opt.JsonOption = False,
) -> None:
    """Ablate saved directions in their layers, and measure the loss of performance on the model's own task.

    A masked language model is evaluated by its loss at masked tokens, a classifier by accuracy and loss on labelled
    rows.
    """
    put.check_output_paths(html)
    from clearhead.concepts.ablation_cost import compute_classification_cost, compute_masked_lm_cost
    from clearhead.concepts.directions import Directions
    from clearhead.render.reports.concepts import write_ablation_report

    saved = Directions.load(directions)
    if label_column is not None:
        texts, labels = read_labelled_texts(inputs, column, label_column, limit)
        explainer = load_explainer(model_options)
        costs = compute_classification_cost(explainer, texts, labels, saved, progress=put.is_interactive())
    else:
        texts = read_input_set(inputs)[:limit]
        explainer = load_explainer(model_options.with_model(model_options.model or DEFAULT_MASKED_MODEL))
        costs = compute_masked_lm_cost(explainer, texts, saved, progress=put.is_interactive())
    model_name = explainer.adapter.name
    _note_if_other_model(saved, directions, model_name)
    put.report_written(write_ablation_report({Path(directions).stem: costs}, model_name, html, {"inputs": len(texts)}))
    if as_json:
        header = {"schema": "clearhead/removal", "version": 2, "model": model_name, "layers": list(saved)}
        put.print_json({**header, "cost": {to_snake_case(name): vars(value) for name, value in costs.items()}})
        return
    rows = [
        {"figure": name, "mean [95 % interval]": cost.format_without_count(), "inputs": cost.count}
        for name, cost in costs.items()
    ]
    put.print_table(["figure", "mean [95 % interval]", "inputs"], rows)


def _get_stream(input_set: Sequence[Any]) -> str:
    """Return the stream of a set by its first input: a string is text, anything else an image."""
    return "text" if isinstance(input_set[0], str) else "image"


def _note_if_other_model(directions: "Directions", path: str, model_name: str) -> None:
    """Print a note if directions of another model are used: valid only if one was fine-tuned from the other."""
    if directions.model and directions.model != model_name:
        put.print_note(f"{path} was computed with {directions.model}, but is used with {model_name}")


CONCEPT_SUBCOMMANDS: dict[str, tuple[Callable[..., None], Sequence[str]]] = {
    "tcav": (tcav, TCAV_EXAMPLES),
    "densray": (densray, DENSRAY_EXAMPLES),
    "explain": (explain, EXPLAIN_EXAMPLES),
    "remove": (remove, REMOVE_EXAMPLES),
}
