"""`clearhead concept`: does a concept drive a class, where does it lie, what fires it, and what is lost without it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.input_sets import layer_numbers, read_concept, read_labelled, read_set, read_texts, two_names
from clearhead.cli.inputs import load, opened
from clearhead.data.sources import recognise
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.concepts.directions import Directions
    from clearhead.explainer import Explainer

HELP = (
    "Directions in hidden space: whether a concept drives a class, where it lies, what fires it, what removing costs."
)
TCAV = (
    "clearhead concept tcav bengals/ --target Bengal --concept dotted --concept striped --random photos/",
    "clearhead concept tcav good.txt -m zoo:sentiment --target POSITIVE --concept praise:great,superb --random all.txt",
    "clearhead concept tcav zebras/ -m google/vit-base-patch16-224 --target zebra --concept stripes=dir/ --random any/",
)
DENSRAY = (
    "clearhead concept densray male.txt female.txt --text brown.txt -m zoo:masked --save gender.safetensors",
    "clearhead concept densray praise.txt blame.txt -m zoo:sentiment --few --save tone.safetensors",
)
EXPLAIN = (
    'clearhead concept explain "The nurse is here." --directions gender.safetensors --layer 4 --at nurse -m zoo:masked',
)
REMOVE = (
    "clearhead concept remove gender.safetensors held_out.txt -m zoo:masked",
    "clearhead concept remove tone.safetensors reviews.tsv -m zoo:sentiment --column sentence --label label",
)

Layers = Annotated[
    str, typer.Option(metavar="N,…", help="k of h^k: 0 goes into the first layer, −1 comes out of the last.")
]
Pool = Annotated[
    str, typer.Option(metavar="class|mean|token|flat", help="How the units of an input become one activation.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="For what is drawn at random.")]
BatchSize = Annotated[int, typer.Option(metavar="N", min=1, help="Inputs in one pass.")]


def tcav(
    inputs: Annotated[str, typer.Argument(metavar="SET", help="Inputs of the class: a folder, a .txt file, a table.")],
    concept: Annotated[
        list[str],
        typer.Option(
            metavar="CONCEPT",
            help="Several times: striped, dotted, bubbly or checkered (drawn here), NAME=FOLDER or NAME=FILE (inputs "
            "that show it), NAME:word,word (the texts of --random that hold one of these words).",
        ),
    ],
    random: Annotated[str, typer.Option(metavar="SET", help="Inputs of any kind, for the random counter-sets.")],
    target: Annotated[str | None, typer.Option(metavar="LABEL", help="The class. Default: what is predicted.")] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="SCALE",
            help="The target's logit (default), log-odds or probability. Logits of all classes may grow together: "
            "log-odds tell what sets one apart.",
        ),
    ] = None,
    model: opt.Model = None,
    layers: Layers = "-3,-2,-1",
    pool: Pool = "class",
    classifier: Annotated[
        str, typer.Option(metavar="logistic|sgd|mean-difference|ridge", help="What the concept vectors are found with.")
    ] = "logistic",
    runs: Annotated[int, typer.Option(metavar="N", min=3, help="Random counter-sets.")] = 20,
    examples: Annotated[int, typer.Option(metavar="N", min=3, help="Inputs that show a concept, at most.")] = 40,
    threshold: Annotated[
        float, typer.Option(metavar="ACCURACY", help="Refuse concepts that are told from random inputs less often.")
    ] = 0.6,
    seed: Seed = 0,
    batch_size: BatchSize = 16,
    save: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep the vectors, one CONCEPT.safetensors for each.")
    ] = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page that it ends in.")] = "tcav.html",
    as_json: opt.Json = False,
) -> None:
    """Say whether a concept drives a class, more than random concepts do (TCAV).

    The score is the share of inputs of the class whose answer grows when its activation moves towards the concept.
    Every concept is held against many random counter-sets, and a score counts only if it differs from those of random
    concepts and from one half, two-sided, after Holm's correction over concepts and layers.
    """
    put.check_places(html)
    put.check_folder(save, option="--save")
    from clearhead.concepts.directions import Directions
    from clearhead.concepts.tcav import inquire
    from clearhead.render.reports.concepts import tcav_page

    own, others = read_set(inputs), read_set(random)
    concepts = dict(read_concept(one, others, examples, seed) for one in concept)
    taken = {one for shown in concepts.values() for one in shown if isinstance(one, str)}
    ex = load(opt.Loading(model), {"text" if isinstance(own[0], str) else "image"})
    found = inquire(
        ex,
        own,
        {name: shown[:examples] for name, shown in concepts.items()},
        [one for one in others if not isinstance(one, str) or one not in taken],
        layer_numbers(layers),
        target=target,
        scale=scale,
        pool=pool,
        classifier=classifier,
        runs=runs,
        threshold=threshold,
        seed=seed,
        batch_size=batch_size,
        progress=put.talks(),
    )
    if save is not None:
        Path(save).mkdir(exist_ok=True)
        for name, vectors in found.vectors.items():
            put.wrote(Directions(vectors, ex.subject.name).save(Path(save) / f"{name}.safetensors"))
    put.wrote(tcav_page(found, html))
    if as_json:
        put.print_json(found.to_dict())
        return
    columns = ["concept", "layer", "score", "interval", "accuracy", "effect", "p (Holm)", "significant"]
    lines = [
        {
            "concept": line.concept,
            "layer": line.layer,
            "score": f"{line.score:.2f}",
            "interval": f"{line.low:.2f} to {line.high:.2f}",
            "accuracy": f"{line.accuracy:.2f}",
            "effect": f"{line.effect:+.1f}",
            "p (Holm)": f"{line.corrected:.2g}",
            "significant": line.refused or line.significant,
        }
        for line in found.lines
    ]
    put.print_table(columns, lines)


def densray(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A word list with --text, otherwise a set of inputs.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="The same for the other side.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Running text: FIRST and SECOND are word lists, line by line a pair."),
    ] = None,
    model: opt.Model = None,
    layers: Annotated[str | None, typer.Option(metavar="N,…", help="k of h^k. Default: all layers.")] = None,
    pool: Pool = "class",
    names: Annotated[str | None, typer.Option(metavar="A,B", help="What the two sides are called.")] = None,
    dimensions: Annotated[int, typer.Option(metavar="N", min=1, help="How many dimensions the direction has.")] = 1,
    count: Annotated[int, typer.Option(metavar="N", min=4, help="With --text: sentences to find it with.")] = 1000,
    plain: Annotated[
        bool, typer.Option("--plain", metavar="", help="Plain differences: faster, the difference of means.")
    ] = False,
    few: Annotated[
        bool, typer.Option("--few", metavar="", help="Allow fewer vectors than dimensions: look at what is held out.")
    ] = False,
    seed: Seed = 0,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Keep the directions (.safetensors).")] = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page that it ends in.")] = "densray.html",
    as_json: opt.Json = False,
) -> None:
    """Find the direction that tells two sets apart in every layer (DensRay), tested on what it was not found with.

    It points to the first set, and its zero lies midway between them.
    """
    put.check_places(html, save)
    sides = two_names(names, "--names") if names else (Path(first).stem, Path(second).stem)
    ex, found = _directions(model, first, second, text, layers, pool, sides, count, seed, plain, few, dimensions)
    from clearhead.concepts.directions import Directions
    from clearhead.render.reports.concepts import directions_page

    settings = {"pool": "word" if text else pool, "normalise": not plain, "dimensions": dimensions, "seed": seed}
    if save is not None:
        put.wrote(Directions(found, ex.subject.name).save(save))
    put.wrote(directions_page(found, ex.subject.name, html, settings))
    if as_json:
        about = {"schema": "clearhead/densray", "version": 1, "model": ex.subject.name, "names": sides}
        put.print_json({**about, "settings": settings, "layers": found.table()})
        return
    put.print_table(["layer", "accuracy", "effect", "count"], [put.rounded(line) for line in found.table()])


def _directions(
    model: str | None,
    first: str,
    second: str,
    text: list[Path] | None,
    layers: str | None,
    pool: str,
    names: tuple[str, str],
    count: int,
    seed: int,
    plain: bool,
    few: bool,
    dimensions: int,
) -> "tuple[Explainer, Directions]":
    from clearhead.concepts.cav import activations
    from clearhead.concepts.layer_hooks import own_calls
    from clearhead.concepts.word_pairs import (
        AxisVectors,
        axis_vectors,
        collect,
        directions_of,
        known_pairs,
        read_pairs,
    )

    how: dict[str, Any] = {"normalise": not plain, "few": few, "seed": seed, "dimensions": dimensions}
    wanted = None if layers is None else layer_numbers(layers)
    if text is not None:
        pairs, lines = read_pairs(first, second), read_texts(text)
        ex = load(opt.Loading(model or "zoo:masked"))
        found = collect(lines, known_pairs(ex, pairs), count)
        return ex, directions_of(axis_vectors(ex, found, wanted, progress=put.talks()), names, **how)
    sets = [read_set(first), read_set(second)]
    ex = load(opt.Loading(model), {"text" if isinstance(sets[0][0], str) else "image"})
    every = wanted or list(range(1, len(own_calls(ex)) + 1))
    a, b = (activations(ex, own, every, pool, progress=put.talks()) for own in sets)
    by_layer = {k: (a[k].activations, b[k].activations) for k in a}
    owners = [[f"{side}{owner}" for owner in own[next(iter(own))].owners] for side, own in (("a", a), ("b", b))]
    return ex, directions_of(AxisVectors(by_layer, owners[0], owners[1]), names, **how)


def explain(
    given: opt.Input,
    directions: Annotated[str, typer.Option(metavar="FILE", help="Saved directions or concept vectors.")],
    layer: Annotated[int, typer.Option(metavar="N", help="k of h^k, at least 1.")],
    at: Annotated[
        str,
        typer.Option(
            metavar="WORD|N|class",
            help="A word (the first, if several), the number of a unit, or where the answer is read.",
        ),
    ] = "class",
    model: opt.Model = None,
    method: opt.Methods = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page that it ends in.")] = "fires.html",
    as_json: opt.Json = False,
) -> None:
    """Say which parts of the input make a direction fire at one layer and place; any method will do."""
    put.check_places(html)
    if given is None:
        raise InputError("nothing to explain: give a text or a picture. See clearhead concept explain --help")
    from clearhead.concepts.concept_target import firing
    from clearhead.concepts.directions import Directions

    found = Directions.load(directions)
    chosen = opt.methods(method, ["generic"])
    ex, raws = opened(opt.Loading(model), [recognise(given)], opt.Read())
    if layer not in found:
        raise InputError(
            f"{directions!r} has no direction of layer {layer}: it has those of {', '.join(map(str, found))}"
        )
    _say_where_found(found, directions, ex.subject.name)
    place: int | str = int(at) if at.lstrip("-").isdigit() else at
    by_method = firing(ex, found[layer], layer, place).explain(**raws, method=chosen)
    explanations = [one for row in zip(*by_method.values(), strict=True) for one in row]
    put.show(explanations, html, as_json)


def remove(
    directions: Annotated[
        str, typer.Argument(metavar="DIRECTIONS", help="Saved directions: those of clearhead concept.")
    ],
    inputs: Annotated[str, typer.Argument(metavar="SET", help="What the cost is measured on: texts, or a table.")],
    model: opt.Model = None,
    column: opt.Column = None,
    label: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column of labels of a table, for classifiers.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=2, help="The first N inputs alone.")] = 500,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page that it ends in.")] = "remove.html",
    as_json: opt.Json = False,
) -> None:
    """Take directions out of every layer they are of, and say what that costs on the model's own task.

    A masked language model is measured by its loss at masked words, a classifier by accuracy and loss on labelled rows.
    """
    put.check_places(html)
    from clearhead.concepts.ablation_cost import cost_at_masks, cost_with_labels
    from clearhead.concepts.directions import Directions
    from clearhead.render.reports.concepts import removal_page

    found = Directions.load(directions)
    if label is not None:
        texts, labels = read_labelled(inputs, column, label, limit)
        ex = load(opt.Loading(model))
        costs = cost_with_labels(ex, texts, labels, found, progress=put.talks())
    else:
        texts = read_set(inputs)[:limit]
        ex = load(opt.Loading(model or "zoo:masked"))
        costs = cost_at_masks(ex, texts, found, progress=put.talks())
    _say_where_found(found, directions, ex.subject.name)
    about = {"schema": "clearhead/removal", "version": 1, "model": ex.subject.name, "layers": list(found)}
    put.wrote(removal_page({Path(directions).stem: costs}, ex.subject.name, html, {"inputs": len(texts)}))
    if as_json:
        put.print_json({**about, "cost": {name: vars(value) for name, value in costs.items()}})
        return
    lines = [{"figure": name, "mean [95 % interval]": str(own), "inputs": own.count} for name, own in costs.items()]
    put.print_table(["figure", "mean [95 % interval]", "inputs"], lines)


def _say_where_found(found: "Directions", file: str, model: str) -> None:
    """A direction of one model means nothing in another, unless one was fine-tuned from the other."""
    if found.model and found.model != model:
        put.note(f"{file} was found in {found.model}, and is used in {model}")


VERBS: dict[str, tuple[Callable[..., None], Sequence[str]]] = {
    "tcav": (tcav, TCAV),
    "densray": (densray, DENSRAY),
    "explain": (explain, EXPLAIN),
    "remove": (remove, REMOVE),
}
