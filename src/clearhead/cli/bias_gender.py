"""`clearhead bias gender`: an axis of word pairs through the layers of a masked language model, as a page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.bias_code import CODE, code
from clearhead.cli.input_sets import first_of_each, read_texts, two_names
from clearhead.cli.inputs import load
from clearhead.errors import InputError, unknown

if TYPE_CHECKING:
    from clearhead.studies.gender.templates import Template

HELP = "What information flows where: an axis such as gender, and syntax in models of code."
GENDER = (
    "clearhead bias gender brown.txt --html gender.html",
    "clearhead bias gender brown.txt abc.txt --set occupations=professions.json --set crows-pairs=crows_pairs.csv",
    'clearhead bias gender brown.txt --pairs ages.tsv --names young,old --words boy,man --sentence "The [MASK] ran."',
)
BUILT_IN = ("adjectives", "free", "people")


def gender(
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT", help="Files of running text (.txt), or folders of them.")
    ],
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="NAME", help="A masked language model: zoo:NAME, a folder, a hub name."),
    ] = "zoo:masked",
    pairs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="The axis: one file with two words a line (.tsv, .csv, .json, .txt), or two files, line by line a "
            "pair. Default: masculine and feminine words.",
        ),
    ] = None,
    names: Annotated[str, typer.Option(metavar="A,B", help="What the two sides are called.")] = "male,female",
    words: Annotated[str, typer.Option(metavar="A,B", help="The two words compared at masks.")] = "he,she",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME[=FILE]",
            help="Sentences to look at; may be given several times: adjectives, free and people are built in; "
            "occupations, crows-pairs, winobias (a pro_stereotyped file) and winogender come from their files. "
            "Default: all that are built in.",
        ),
    ] = None,
    sentence: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A sentence of your own, with the model's mask or without.")
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", min=10, help="Sentences that the axis is found with.")] = 1000,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of each set: N sentences, evenly.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", metavar="", help="DensRay of plain differences: faster, the difference of means.")
    ] = False,
    few: Annotated[
        bool, typer.Option("--few", metavar="", help="Allow fewer vectors than dimensions: look at what is held out.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="For what is held out.")] = 0,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Keep the directions (.safetensors), for clearhead concept.")
    ] = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page that it ends in.")] = "gender.html",
    as_json: opt.Json = False,
) -> None:
    """Follow an axis such as gender through the layers of a masked language model.

    Sentences with listed words and their counterfactuals give a direction in every layer (DensRay), tested on words it
    was not found with. Then, for sets of sentences: DR, CAT, AttCAT and AttDR by layer and token; how alike AttCAT and
    DR are beside chance; whether AttDR ranks listed words first; pronouns at the mask with and without the axis; and
    what removing it costs. Any axis will do: the word pairs are an input.
    """
    put.check_places(html, save)
    from clearhead.concepts.directions import Directions
    from clearhead.concepts.word_pairs import GENDER as PAIRS
    from clearhead.concepts.word_pairs import known_pairs, read_pairs
    from clearhead.render.reports.concepts import axis_page
    from clearhead.studies.gender.study import study
    from clearhead.studies.gender.templates import people

    if pairs is not None and len(pairs) > 2:
        raise InputError(f"--pairs takes one file or two, but {len(pairs)} were given")
    sides, compared = two_names(names, "--names"), two_names(words, "--words")
    listed = list(PAIRS) if pairs is None else read_pairs(*pairs)
    lines = read_texts(texts)
    asked = [one.partition("=")[::2] for one in sets or BUILT_IN]
    for name, _ in asked:
        if name not in (*BUILT_IN, "occupations", "crows-pairs", "winobias", "winogender"):
            raise unknown("set of sentences", name, (*BUILT_IN, "occupations", "crows-pairs", "winobias", "winogender"))
    ex = load(opt.Loading(model))
    mask = str(getattr(ex.subject.processor, "mask_token", None) or "[MASK]")
    chosen = {name: own for wanted in asked for name, own in _templates(*wanted, mask).items()}
    found = study(
        ex,
        lines,
        known_pairs(ex, listed),
        {name: first_of_each(own, limit) for name, own in chosen.items()},
        names=sides,
        words=compared,
        sentences=sentence or (),
        people=people() if any(name == "people" for name, _ in asked) else (),
        count=count,
        normalise=not plain,
        few=few,
        seed=seed,
        progress=put.talks(),
    )
    if save is not None:
        put.wrote(Directions(found.directions, ex.subject.name).save(save))
    put.wrote(str(axis_page(found, html)))
    if as_json:
        put.print_json(found.to_dict())
        return
    put.print_table(["layer", "accuracy", "effect", "count"], [put.rounded(line) for line in found.directions.table()])
    put.print_table(
        ["set", "sentences", "AttCAT–DR", "chance", "p", "apart", "without"],
        [
            {
                "set": one.name,
                "sentences": one.count,
                "AttCAT–DR": "–" if one.similarity is None else f"{one.similarity.distances['cosine']:.3f}",
                "chance": "–" if one.similarity is None else f"{one.similarity.chance['cosine']:.3f}",
                "p": "–" if one.similarity is None else f"{one.similarity.p:.2g}",
                "apart": str(one.pronouns[""]["apart"]),
                "without": str(one.pronouns["densray"]["apart"]),
            }
            for one in found.sets
        ],
    )


VERBS: dict[str, tuple[Callable[..., None], Sequence[str]]] = {"gender": (gender, GENDER), "code": (code, CODE)}


def _templates(name: str, file: str, mask: str) -> "dict[str, list[Template]]":
    from clearhead.studies.gender.bias_datasets import read_source
    from clearhead.studies.gender.templates import ADJECTIVES_AND_SUBJECTS, free, occupations

    if name == "people":
        return {}
    if name == "adjectives":
        return {one.name: one.filled(mask) for one in ADJECTIVES_AND_SUBJECTS}
    if name == "free":
        return {"free": free(mask)}
    if not file:
        raise InputError(f"--set {name} comes from a file: --set {name}=FILE")
    if name == "occupations":
        return {name: occupations(file).filled(mask)}
    return {name: read_source(name, file, mask)}
