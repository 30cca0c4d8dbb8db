"""What the zoo's code models look at, by syntax class: the figures and tables of docs/code-models.md.

    python packages/zoo/train/code_data.py --data ../shared/data --out carry/code
    export PYTHONPATH=packages/zoo/train
    python benchmarks/code_syntax.py questions --data ../shared/data --pairs carry/code
    python benchmarks/code_syntax.py measure [--only java] [--part 0/4] [--seconds 300] [--device cuda]
    python benchmarks/code_syntax.py write

Held-out functions that decided which weights are kept are asked about, not the test files: masked tokens of Java and of
Python (zoo:code), pairs of Python functions (zoo:code-clone, with zoo:code beside it) and translations of Java
(zoo:code-translate). `questions` needs tree-sitter; `measure` does not, so that it can run on another machine, in parts
side by side, each of which leaves one file; what is there is not made again. `write` makes DIR/code-*.png and
DIR/code-models.json, from which benchmarks/code_page.py makes the tables of docs/code-models.md.
"""

import argparse
import json
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clearhead
from clearhead.data.atomic_file import whole
from clearhead.studies.code.attention import Measured, functions_of, looked_at, measure_both
from clearhead.studies.code.syntax import CLASSES, PARTS
from clearhead.studies.code.tasks import Question

FAMILIES = ("saliency", "integrated-gradients", "gradient-shap", "deeplift", "deeplift-shap")
#: The model that is asked each kind of question, and by which methods its answers are explained.
ASKED = {
    "java": ("zoo:code", (*FAMILIES, "generic")),
    "python": ("zoo:code", (*FAMILIES, "generic")),
    "pairs": ("zoo:code-clone", FAMILIES),
    "translation": ("zoo:code-translate", FAMILIES),
}
#: Questions are measured, and what was measured is stored, so many at a time.
CHUNK = 2
#: By class, by part of the tree, and what the model before fine-tuning looks at.
Part = tuple[Measured, Measured, np.ndarray | None]
#: The models that others were fine-tuned from.
BEFORE = {"pairs": "zoo:code"}
#: Python functions of more characters are left out: they would take most of the time. Every word of a translation is
#: explained by itself: short functions only.
LONGEST, EVERY, PYTHON, PAIRS, TRANSLATED, SHORT = 900, 5, 300, 220, 60, 200


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    {"questions": prepare, "measure": measure, "write": write}[options.step](options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["questions", "measure", "write"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with code/")
    parser.add_argument("--pairs", type=Path, default=Path("carry/code"), help="folder that code_data.py wrote")
    parser.add_argument(
        "--work", type=Path, default=Path("build/code-study"), help="where questions and parts are kept"
    )
    parser.add_argument("--only", choices=list(ASKED), help="one kind of question")
    parser.add_argument("--part", default="0/1", help="which of how many parts of the questions")
    parser.add_argument("--count", type=int, help="so many questions of each kind at most")
    parser.add_argument("--seconds", type=float, help="begin no more questions after so long")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs", "figures"), help="where the figures go")
    return parser.parse_args()


# -- questions


def prepare(options: argparse.Namespace) -> None:
    from code_data import python_functions

    from clearhead.studies.code.tasks import cloze, translations

    masked = clearhead.load("zoo:code")
    java, cs = (_lines(options.data / "code" / f"valid.java-cs.txt.{end}") for end in ("java", "cs"))
    python = [text for text in python_functions("valid") if len(text) < LONGEST][::EVERY]
    short = [(one, other) for one, other in zip(java, cs, strict=True) if len(one) < SHORT][:TRANSLATED]
    asked = {
        "java": cloze(masked, java, "java"),
        "python": cloze(masked, python, "python")[:PYTHON],
        "pairs": clones(options.pairs),
        "translation": translations(*zip(*short, strict=True), "java"),
    }
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "questions.pickle").write_bytes(pickle.dumps(asked))
    print({name: len(own) for name, own in asked.items()})


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def clones(folder: Path) -> list[Question]:
    """Pairs of Python functions as in training: half of them the same, most of the others near misses.

    A function and its changed form (most near misses) are about one, however they are renamed and rewritten.
    """
    from code_clone import Pairs
    from code_data import read_clones
    from tokenizers import Tokenizer

    from clearhead.studies.code.tasks import pairs

    stored = read_clones(folder, "valid")
    drawn = Pairs(stored, torch.device("cpu"))
    chosen, same = drawn.draw(np.random.default_rng(5), PAIRS, "Python")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(place: int) -> str:
        start, size = int(drawn.rows.start[place]), int(drawn.rows.size[place])
        return str(tokenizer.decode(drawn.rows.ids[start : start + size].tolist(), skip_special_tokens=False))

    texts = [(text(one), text(other)) for one, other in chosen]
    origin = origins(stored.forms, stored.near)
    forms_of = [(str(origin[one]), str(origin[other])) for one, other in chosen]
    return pairs(texts, ["same" if alike else "different" for alike in same], ("python", "python"), forms_of)


def origins(forms: np.ndarray, near: np.ndarray) -> dict[int, int]:
    """For each form the function that it was made of.

    code_data.py names the changed form of a function, and of a changed form the function, in the second half of `near`.
    """
    half = near[:, near.shape[1] // 2 :]
    partner = np.where((half == half[:, :1]).all(1) & (half[:, 0] >= 0), half[:, 0], np.arange(len(near)))
    return {int(form): min(place, int(partner[place])) for place, own in enumerate(forms) for form in own if form >= 0}


# -- measuring


def measure(options: argparse.Namespace) -> None:
    part, of = map(int, options.part.split("/"))
    asked: dict[str, list[Question]] = pickle.loads((options.work / "questions.pickle").read_bytes())
    for name in [options.only] if options.only else list(ASKED):
        path = options.work / f"{name}-{part}-{of}.pickle"
        if path.exists():
            continue
        mine, parts, started = asked[name][part::of][: options.count], [], time.monotonic()
        models = Models(name, options.device)
        for start in range(0, len(mine), CHUNK):
            if options.seconds and time.monotonic() - started > options.seconds:
                break
            parts.append(models.measured(mine[start : start + CHUNK]))
            store(path, parts)
            print(f"{name} {part}/{of}: {start + len(parts[-1][0])} of {len(mine)} questions", flush=True)


def store(path: Path, parts: Sequence[Part]) -> None:
    """After every few questions, and the file whole or not at all: a run that is cut keeps what it has."""
    by_class, by_part = (joined([one[n] for one in parts], (CLASSES, PARTS)[n]) for n in range(2))
    others = [among(one[2], one[0].classes, by_class.classes) for one in parts if one[2] is not None]
    with whole(path) as partial:
        partial.write_bytes(pickle.dumps((by_class, by_part, np.concatenate(others) if others else None)))


class Models:
    """The model that is asked one kind of question, and the one that it was fine-tuned from."""

    def __init__(self, name: str, device: str) -> None:
        model, self.methods = ASKED[name]
        self.model = clearhead.load(model, device=device, dtype=torch.float32)
        self.before = clearhead.load(BEFORE[name], device=device, dtype=torch.float32) if name in BEFORE else None

    def measured(self, questions: Sequence[Question]) -> Part:
        by_class, by_part = measure_both(self.model, questions, methods=self.methods)
        seen = None if self.before is None else looked_at(self.before, questions, by_class.classes)
        return by_class, by_part, seen


def joined(parts: Sequence[Measured], every: Sequence[str]) -> Measured:
    """The questions of several parts together; a part knows only the classes that it met."""
    names = tuple(name for name in every if any(name in part.classes for part in parts))
    spread = [_spread(part, names) for part in parts]

    def end_to_end(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in spread])

    first = spread[0]
    return replace(
        first,
        **{name: end_to_end(name) for name in ("received", "paid", "counts", "correct", "confidence", "functions")},
        said=sum((part.said for part in spread), ()),
        about=sum((part.about for part in spread), ()),
        attributed={
            method: np.concatenate([part.attributed[method] for part in spread]) for method in first.attributed
        },
    )


def _spread(part: Measured, names: Sequence[str]) -> Measured:
    """With all of these classes: NaN, and no tokens, in those that it did not meet."""
    return replace(
        part,
        classes=tuple(names),
        received=among(part.received, part.classes, names),
        paid=among(among(part.paid, part.classes, names).swapaxes(-1, -2), part.classes, names).swapaxes(-1, -2),
        counts=np.nan_to_num(among(part.counts.astype(float), part.classes, names)).astype(int),
        attributed={method: among(own, part.classes, names) for method, own in part.attributed.items()},
    )


def among(values: np.ndarray, classes: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """The last axis, which is over some classes, over all of these."""
    made = np.full((*values.shape[:-1], len(names)), np.nan)
    made[..., [names.index(name) for name in classes]] = values
    return made


# -- writing


def write(options: argparse.Namespace) -> None:
    from clearhead.render.mpl import code
    from clearhead.studies.code.study import compared, concluded

    asked = pickle.loads((options.work / "questions.pickle").read_bytes())
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in ASKED:
        paths = sorted(options.work.glob(f"{name}-*.pickle"))
        parts = [pickle.loads(path.read_bytes()) for path in paths]
        if not parts:
            continue
        by_class, by_part = (joined([part[n] for part in parts], (CLASSES, PARTS)[n]) for n in range(2))
        # a part counts its own functions; pairs that share one may be in different parts
        mine = [one for path, part in zip(paths, parts, strict=True) for one in _asked(asked[name], path, len(part[0]))]
        own = concluded(replace(by_class, functions=functions_of(mine)), by_part)
        if name in BEFORE:
            other = np.concatenate([among(part[2], part[0].classes, by_class.classes) for part in parts])
            own = compared(own, other, BEFORE[name])
        found[name] = replace(own, settings={"questions": len(by_class)})
        figures = {"by-layer": code.by_layer(by_class)}
        if own.attention is not None:
            figures |= {"boxes": code.boxes(by_class), "p": code.p_map(own.attention, by_class.classes)}
        for kind, figure in figures.items() if name == "java" else ():
            figure.savefig(options.out / f"code-{name}-{kind}.png", dpi=80)
    told = {name: own.to_dict() for name, own in found.items()}
    text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
    (options.out / "code-models.json").write_text(text, encoding="utf-8")


def _asked(questions: Sequence[Question], path: Path, count: int) -> Sequence[Question]:
    """The questions of one part's file: the first so many of every so-manieth."""
    part, of = map(int, path.stem.split("-")[1:])
    return questions[part::of][:count]


if __name__ == "__main__":
    main()
