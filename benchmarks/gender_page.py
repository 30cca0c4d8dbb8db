"""Write the tables of docs/gender-by-depth.md from docs/figures/gender.json (benchmarks/concepts.py gender).

python benchmarks/gender_page.py [--page docs/gender-by-depth.md]
"""

import argparse
import json
from pathlib import Path
from textwrap import fill
from typing import Any

from marked import format_interval, render_table, replace_marked_sections, use_minus_sign

from clearhead.stats import adjust_p_values_holm

StudyResults = dict[str, Any]


def layers(found: StudyResults) -> str:
    rows = [[str(one["layer"]), f"{one['accuracy']:.3f}", f"{one['effect']:.1f}"] for one in found["layers"]]
    return render_table(["layer", "held-out accuracy", "effect size (Cohen’s d)"], rows)


def pronouns(found: StudyResults) -> str:
    """DR of the pronoun by layer, for two sentences that differ only in it."""
    rows = []
    for text, own in found["shown"].items():
        if own["mask"] is None:
            rows.append(
                [f"{text} (DR of *{own['tokens'][0]}*)", *(use_minus_sign(f"{layer[0]:.1f}") for layer in own["dr"])]
            )
    return render_table(["", *(f"layer {one['layer']}" for one in found["layers"])], rows)


def similarity(found: StudyResults) -> str:
    sets = found["sets"]
    corrected = adjust_p_values_holm([one["similarity"]["p"] for one in sets])
    rows = []
    for one, p in zip(sets, corrected, strict=True):
        own = one["similarity"]
        pairs = [
            f"{own['distances'][n]:.2f} ({own['chance'][n]:.2f})"
            for n in ("cosine", "euclid", "manhattan", "haversine")
        ]
        rows.append(
            [
                one["name"],
                str(one["count"]),
                *pairs,
                _format_p(own["p"]),
                _format_p(float(p)),
                use_minus_sign(f"{own['spearman']:.2f}"),
            ]
        )
    names = ["cosine (chance)", "Euclid/√n", "Manhattan/n", "haversine", "p", "p (Holm)", "Spearman"]
    return render_table(["set", "sentences", *names], rows)


def ranks(found: StudyResults) -> str:
    lines = [("running text", found["ranks"], None), *((one["name"], one["ranks"], one) for one in found["sets"])]
    kept = [line for line in lines if line[1] is not None]
    corrected = adjust_p_values_holm([own["p"] for _, own, _ in kept])
    rows = []
    for (name, own, one), p in zip(kept, corrected, strict=True):
        share = (
            ["–", "–"]
            if one is None
            else [format_interval(one["share"]), f"{one['largest']} of {one['share']['count']}"]
        )
        maps = [format_interval(own[part]) for part in ("attdr", "dr", "attention")]
        rows.append(
            [
                name,
                *maps,
                f"{own['chance']:.2f}",
                format_interval(own["difference"]),
                _format_p(own["p"]),
                _format_p(float(p)),
                *share,
            ]
        )
    names = ["AttDR", "DR", "attention alone", "chance", "AttDR − DR", "p", "p (Holm)", "share of filler", "largest"]
    return render_table(["sentences", *names], rows)


def at_the_mask(found: StudyResults) -> str:
    """The two words of the axis, for sets whose filler can be masked."""
    rows = []
    for one in found["sets"]:
        before, densray, hard = (one["pronouns"][way] for way in ("", "densray", "hard"))
        if before["size_of_bias"]["count"]:
            first = f"{before['first']['mean']:.2f} / {before['second']['mean']:.2f}"
            figures = [
                format_interval(own[name]) for name in ("apart", "size_of_bias") for own in (before, densray, hard)
            ]
            rows.append([one["name"], first, *figures])
    names = [word for name in ("apart", "size of bias") for word in (name, "without (DensRay)", "without (hard)")]
    return render_table(["set", "p(he) / p(she)", *names], rows)


def own_words(found: StudyResults) -> str:
    rows = []
    for one in found["sets"]:
        before, densray, hard = (one["pronouns"][way] for way in ("", "densray", "hard"))
        if not before["size_of_bias"]["count"]:
            figures = [before["apart"], densray["apart"], hard["apart"], before["leaning"], densray["leaning"]]
            rows.append([one["name"], *map(format_interval, figures)])
    names = ["apart", "without (DensRay)", "without (hard)", "leaning", "without (DensRay)"]
    return render_table(["set", *names], rows)


def costs(found: StudyResults) -> str:
    rows = [
        [way, *(format_interval(own[f"loss_{name}"], 3) for name in ("before", "after", "difference"))]
        for way, own in found["costs"].items()
    ]
    return render_table(["removed", "loss before", "after", "difference"], rows)


def people(found: StudyResults) -> str:
    lines = found["people"]
    further = sum(one["dr_difference"] > 0 for one in lines)
    opposite = sum(one["dr_subject"] > 0 > one["dr_object"] for one in lines)
    mean = sum(one["dr_difference"] for one in lines) / len(lines)
    told = (
        f"In {further} of {len(lines)} sentences such as “{lines[0]['text']}” the DR of the subject is larger than "
        f"that of the object (summed over layers, mean difference {mean:.1f}); in {opposite} of them the two also have "
        "opposite signs. The file contains all sentences, and the mean is over all of them."
    )
    return fill(told, 124)


def _format_p(value: float) -> str:
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=Path("docs/gender-by-depth.md"))
    options = parser.parse_args()
    found = json.loads((options.page.parent / "figures" / "gender.json").read_text(encoding="utf-8"))
    made = (layers, pronouns, similarity, ranks, at_the_mask, own_words, costs, people)
    replace_marked_sections(options.page, {one.__name__.replace("_", " "): one(found) for one in made})


if __name__ == "__main__":
    main()
