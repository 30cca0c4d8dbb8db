"""`clearhead bias gender`: trace an axis of word pairs through the layers of a masked language model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.bias_code import CODE_EXAMPLES, code
from clearhead.cli.concept import DEFAULT_MASKED_MODEL, ConceptBatchSizeOption, FewOption, PlainOption
from clearhead.cli.input_sets import parse_name_pair, read_text_lines, select_evenly
from clearhead.cli.inputs import load_explainer
from clearhead.errors import InputError, unknown_value_error

if TYPE_CHECKING:
    from clearhead.studies.gender.study import SentenceSetResult
    from clearhead.studies.gender.templates import BiasTemplate

BIAS_HELP = "Study what models encode: a semantic axis such as gender, or the syntax of code."
GENDER_EXAMPLES = (
    "clearhead bias gender brown.txt --html gender.html",
    "clearhead bias gender brown.txt abc.txt --sentence-set occupations=professions.json "
    "--sentence-set crows-pairs=crows_pairs.csv",
    "clearhead bias gender brown.txt --pairs ages.tsv --names young,old --compared-words boy,man "
    '--text "The [MASK] ran."',
)
BUILT_IN_SETS = ("adjectives", "free", "people")
#: Sets of sentences that are read from a file.
FILE_SETS = ("occupations", "crows-pairs", "winobias", "winogender")


@opt.flatten_option_groups
def gender(
    model_options: opt.CliModelOptions,
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT", help="Files of running text (.txt), or folders of them.")
    ],
    pairs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Word pairs of the axis: one file with two words per line (.tsv, .csv, .json, .txt), or two files "
            "that are paired line by line. Default: masculine and feminine words.",
        ),
    ] = None,
    names: Annotated[str, typer.Option(metavar="A,B", help="Names of the two ends of the axis.")] = "male,female",
    compared_words: Annotated[
        str, typer.Option(metavar="A,B", help="The two words whose probabilities at masked positions are compared.")
    ] = "he,she",
    sentence_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=FILE]",
            help="Set of sentences to analyse; may be repeated. adjectives, free and people are built in; occupations, "
            "crows-pairs, winobias (a pro_stereotyped file) and winogender are read from the given FILE. Default: all "
            "built-in sets.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Additional sentence, with or without the model's mask token; may be repeated."
        ),
    ] = None,
    count: Annotated[
        int, typer.Option(metavar="N", min=10, help="Number of sentences from which the axis is computed.")
    ] = 1000,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of sentences per set, taken at even intervals."),
    ] = None,
    plain: PlainOption = False,
    few: FewOption = False,
    batch_size: ConceptBatchSizeOption = 32,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed for the held-out split.")] = 0,
    save: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Save the directions (.safetensors) for use with clearhead concept."),
    ] = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="Path of the HTML report.")] = "gender.html",
    as_json: opt.JsonOption = False,
) -> None:
    """Trace an axis such as gender through the layers of a masked language model (default: zoo:masked).

    The direction of the axis in each layer is computed with DensRay from sentences that contain a listed word
    (--pairs) and from their counterfactuals, and is tested on held-out words. For each set of sentences, the report
    shows layer-by-token maps of DR (position on the axis), CAT (gradient × input) and both weighted by attention
    (AttDR, AttCAT); the similarity of AttCAT and DR compared with chance; whether AttDR ranks listed words first;
    pronoun probabilities at masked positions before and after the axis is removed; and the resulting loss of
    performance. The word pairs can define any axis.
    """
    put.check_output_paths(html, save)
    from clearhead.concepts.directions import Directions
    from clearhead.concepts.word_pairs import GENDER_PAIRS, read_word_pairs, select_single_token_pairs
    from clearhead.render.reports.concepts import write_axis_report
    from clearhead.studies.gender.study import run_axis_study
    from clearhead.studies.gender.templates import make_people_sentences

    if pairs is not None and len(pairs) > 2:
        raise InputError(f"--pairs takes one file or two, but {len(pairs)} were given")
    sides = parse_name_pair(names, "--names")
    word_pair = parse_name_pair(compared_words, "--compared-words")
    listed_pairs = list(GENDER_PAIRS)
    if pairs is not None:
        listed_pairs = read_word_pairs(*pairs)
    lines = read_text_lines(texts)
    files_by_set: dict[str, str] = {}
    for spec in sentence_set or BUILT_IN_SETS:
        name, _, file = spec.partition("=")
        if name not in (*BUILT_IN_SETS, *FILE_SETS):
            raise unknown_value_error("set of sentences", name, (*BUILT_IN_SETS, *FILE_SETS))
        files_by_set[name] = file
    explainer = load_explainer(model_options.with_model(model_options.model or DEFAULT_MASKED_MODEL))
    mask_token = str(getattr(explainer.adapter.processor, "mask_token", None) or "[MASK]")
    templates: dict[str, list[BiasTemplate]] = {}
    for name, file in files_by_set.items():
        templates |= _load_templates(name, file, mask_token)
    study = run_axis_study(
        explainer,
        lines,
        select_single_token_pairs(explainer, listed_pairs),
        {name: select_evenly(set_templates, limit) for name, set_templates in templates.items()},
        names=sides,
        compared_words=word_pair,
        sentences=text or (),
        people=make_people_sentences() if "people" in files_by_set else (),
        num_sentences=count,
        normalise=not plain,
        few=few,
        batch_size=batch_size,
        seed=seed,
        progress=put.is_interactive(),
    )
    if save is not None:
        put.report_written(Directions(study.directions, explainer.adapter.name).save(save))
    put.report_written(str(write_axis_report(study, html)))
    if as_json:
        put.print_json(study.to_dict())
        return
    put.print_table(
        ["layer", "accuracy", "effect", "count"], [put.format_floats(row) for row in study.directions.to_table()]
    )
    put.print_table(
        ["set", "sentences", "AttCAT–DR", "chance", "p", "apart", "without"],
        [_build_set_row(result) for result in study.set_results],
    )


def _build_set_row(result: "SentenceSetResult") -> dict[str, Any]:
    """Build a table row: similarity of AttCAT and DR, and pronouns with and without the axis."""
    distance = chance = p_value = "–"
    if result.similarity is not None:
        distance = f"{result.similarity.distances['cosine']:.3f}"
        chance = f"{result.similarity.chance['cosine']:.3f}"
        p_value = f"{result.similarity.p:.2g}"
    return {
        "set": result.name,
        "sentences": result.count,
        "AttCAT–DR": distance,
        "chance": chance,
        "p": p_value,
        "apart": str(result.pronouns[""]["apart"]),
        "without": str(result.pronouns["densray"]["apart"]),
    }


BIAS_SUBCOMMANDS: dict[str, tuple[Callable[..., None], Sequence[str]]] = {
    "gender": (gender, GENDER_EXAMPLES),
    "code": (code, CODE_EXAMPLES),
}


def _load_templates(name: str, file: str, mask_token: str) -> "dict[str, list[BiasTemplate]]":
    """Load a sentence set as templates by name; `people` has none, and published data sets need a file."""
    from clearhead.studies.gender.bias_datasets import read_bias_dataset
    from clearhead.studies.gender.templates import ADJECTIVE_AND_SUBJECT_SETS, make_free_templates, read_occupations

    if name == "people":
        return {}
    if name == "adjectives":
        return {template.name: template.fill(mask_token) for template in ADJECTIVE_AND_SUBJECT_SETS}
    if name == "free":
        return {"free": make_free_templates(mask_token)}
    if not file:
        raise InputError(f"--sentence-set {name} needs a file: --sentence-set {name}=FILE")
    if name == "occupations":
        return {name: read_occupations(file).fill(mask_token)}
    return {name: read_bias_dataset(name, file, mask_token)}
