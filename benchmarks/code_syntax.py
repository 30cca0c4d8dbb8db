"""Attention and attribution of the zoo's code models by syntax class: figures and tables of docs/code-models.md.

    python packages/zoo/train/code_data.py --data ../shared/data --out carry/code
    export PYTHONPATH=packages/zoo/train
    python benchmarks/code_syntax.py questions --data ../shared/data --pairs carry/code
    python benchmarks/code_syntax.py measure [--only java] [--part 0/4] [--seconds 300] [--device cuda]
    python benchmarks/code_syntax.py write

The questions are about held-out functions that were used for checkpoint selection, not about the test files: masked
tokens of Java and of Python (zoo:code), pairs of Python functions (zoo:code-clone, compared with zoo:code) and
translations of Java (zoo:code-translate). `questions` needs tree-sitter; `measure` does not, so it can run on another
machine and in parallel parts, each of which writes one file; existing files are not computed again. `write` writes
DIR/code-*.png and DIR/code-models.json, from which benchmarks/code_page.py writes the tables of docs/code-models.md.
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
from clearhead.data.atomic_file import atomic_write
from clearhead.studies.code.attention import (
    CodeAttention,
    compute_received_attention,
    get_function_ids,
    measure_by_groupings,
)
from clearhead.studies.code.syntax import SYNTAX_PARTS, TOKEN_CLASSES
from clearhead.studies.code.tasks import CodeQuestion

GRADIENT_METHODS = ("saliency", "integrated-gradients", "gradient-shap", "deeplift", "deeplift-shap")
#: The model that is asked each kind of question, and by which methods its answers are explained.
TASKS = {
    "java": ("zoo:code", (*GRADIENT_METHODS, "generic")),
    "python": ("zoo:code", (*GRADIENT_METHODS, "generic")),
    "pairs": ("zoo:code-clone", GRADIENT_METHODS),
    "translation": ("zoo:code-translate", GRADIENT_METHODS),
}
#: Questions are measured, and what was measured is stored, so many at a time.
CHUNK_SIZE = 2
#: By class, by part of the tree, and what the model before fine-tuning looks at.
ChunkResult = tuple[CodeAttention, CodeAttention, np.ndarray | None]
#: The models that others were fine-tuned from.
PRETRAINED_MODELS = {"pairs": "zoo:code"}
#: Python functions of more characters are left out: they would take most of the time. Every word of a translation is
#: explained by itself: short functions only.
MAX_PYTHON_CHARS, PYTHON_STRIDE, MAX_PYTHON_QUESTIONS, NUM_CLONE_PAIRS, MAX_TRANSLATIONS, MAX_TRANSLATION_CHARS = (
    900,
    5,
    300,
    220,
    60,
    200,
)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    {"questions": write_questions, "measure": measure, "write": write_study}[options.step](options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["questions", "measure", "write"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with code/")
    parser.add_argument("--pairs", type=Path, default=Path("carry/code"), help="output folder of code_data.py")
    parser.add_argument(
        "--work", type=Path, default=Path("build/code-study"), help="folder for questions and partial results"
    )
    parser.add_argument("--only", choices=list(TASKS), help="only this kind of question")
    parser.add_argument("--part", default="0/1", help="part of the questions, such as 0/4")
    parser.add_argument("--count", type=int, help="maximum number of questions of each kind")
    parser.add_argument("--seconds", type=float, help="start no new question after this time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs", "figures"), help="where to write the results")
    return parser.parse_args()


# -- questions


def write_questions(options: argparse.Namespace) -> None:
    from code_data import iter_python_functions

    from clearhead.studies.code.tasks import make_cloze_questions, make_translation_questions

    masked = clearhead.load("zoo:code")
    java, cs = (_read_lines(options.data / "code" / f"valid.java-cs.txt.{end}") for end in ("java", "cs"))
    python = [text for text in iter_python_functions("valid") if len(text) < MAX_PYTHON_CHARS][::PYTHON_STRIDE]
    short = [(one, other) for one, other in zip(java, cs, strict=True) if len(one) < MAX_TRANSLATION_CHARS][
        :MAX_TRANSLATIONS
    ]
    asked = {
        "java": make_cloze_questions(masked, java, "java"),
        "python": make_cloze_questions(masked, python, "python")[:MAX_PYTHON_QUESTIONS],
        "pairs": draw_clone_questions(options.pairs),
        "translation": make_translation_questions(*zip(*short, strict=True), "java"),
    }
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "questions.pickle").write_bytes(pickle.dumps(asked))
    print({name: len(own) for name, own in asked.items()})


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def draw_clone_questions(folder: Path) -> list[CodeQuestion]:
    """Pairs of Python functions as in training: half of them the same, most of the others near misses.

    A function and its changed form (most near misses) are about one, however they are renamed and rewritten.
    """
    from code_clone import ClonePairSampler
    from code_data import read_clones
    from tokenizers import Tokenizer

    from clearhead.studies.code.tasks import make_clone_questions

    stored = read_clones(folder, "valid")
    drawn = ClonePairSampler(stored, torch.device("cpu"))
    chosen, same = drawn.draw(np.random.default_rng(5), NUM_CLONE_PAIRS, "Python")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(place: int) -> str:
        start, size = int(drawn.rows.row_starts[place]), int(drawn.rows.row_sizes[place])
        return str(tokenizer.decode(drawn.rows.ids[start : start + size].tolist(), skip_special_tokens=False))

    texts = [(text(one), text(other)) for one, other in chosen]
    origin = find_origins(stored.forms, stored.lookalikes)
    forms_of = [(str(origin[one]), str(origin[other])) for one, other in chosen]
    return make_clone_questions(
        texts, ["same" if alike else "different" for alike in same], ("python", "python"), forms_of
    )


def find_origins(forms: np.ndarray, near_misses: np.ndarray) -> dict[int, int]:
    """For each form the function that it was made of.

    code_data.py names the changed form of a function, and of a changed form the function, in the second half of `near`.
    """
    half = near_misses[:, near_misses.shape[1] // 2 :]
    partner = np.where((half == half[:, :1]).all(1) & (half[:, 0] >= 0), half[:, 0], np.arange(len(near_misses)))
    return {int(form): min(place, int(partner[place])) for place, own in enumerate(forms) for form in own if form >= 0}


# -- measuring


def measure(options: argparse.Namespace) -> None:
    part, of = map(int, options.part.split("/"))
    asked: dict[str, list[CodeQuestion]] = pickle.loads((options.work / "questions.pickle").read_bytes())
    for name in [options.only] if options.only else list(TASKS):
        path = options.work / f"{name}-{part}-{of}.pickle"
        if path.exists():
            continue
        mine, parts, started = asked[name][part::of][: options.count], [], time.monotonic()
        models = TaskModels(name, options.device)
        for start in range(0, len(mine), CHUNK_SIZE):
            if options.seconds and time.monotonic() - started > options.seconds:
                break
            parts.append(models.measure(mine[start : start + CHUNK_SIZE]))
            write_chunk_results(path, parts)
            print(f"{name} {part}/{of}: {start + len(parts[-1][0])} of {len(mine)} questions", flush=True)


def write_chunk_results(path: Path, results: Sequence[ChunkResult]) -> None:
    """After every few questions, and the file whole or not at all: a run that is cut keeps what it has."""
    by_class, by_part = (
        concat_measurements([one[n] for one in results], (TOKEN_CLASSES, SYNTAX_PARTS)[n]) for n in range(2)
    )
    others = [expand_class_axis(one[2], one[0].classes, by_class.classes) for one in results if one[2] is not None]
    with atomic_write(path) as partial:
        partial.write_bytes(pickle.dumps((by_class, by_part, np.concatenate(others) if others else None)))


class TaskModels:
    """The model that is asked one kind of question, and the one that it was fine-tuned from."""

    def __init__(self, name: str, device: str) -> None:
        model, self.methods = TASKS[name]
        self.model = clearhead.load(model, device=device, dtype=torch.float32)
        self.pretrained = (
            clearhead.load(PRETRAINED_MODELS[name], device=device, dtype=torch.float32)
            if name in PRETRAINED_MODELS
            else None
        )

    def measure(self, questions: Sequence[CodeQuestion]) -> ChunkResult:
        by_class, by_part = measure_by_groupings(self.model, questions, methods=self.methods)
        seen = (
            None
            if self.pretrained is None
            else compute_received_attention(self.pretrained, questions, by_class.classes)
        )
        return by_class, by_part, seen


def concat_measurements(measurements: Sequence[CodeAttention], all_classes: Sequence[str]) -> CodeAttention:
    """The questions of several parts together; a part knows only the classes that it met."""
    names = tuple(name for name in all_classes if any(name in part.classes for part in measurements))
    spread = [_expand_classes(part, names) for part in measurements]

    def end_to_end(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in spread])

    first = spread[0]
    measured_fields = (
        "received_attention",
        "paid_attention",
        "token_counts",
        "is_correct",
        "confidence",
        "function_ids",
    )
    return replace(
        first,
        **{name: end_to_end(name) for name in measured_fields},
        predictions=sum((part.predictions for part in spread), ()),
        question_types=sum((part.question_types for part in spread), ()),
        attributions={
            method: np.concatenate([part.attributions[method] for part in spread]) for method in first.attributions
        },
    )


def _expand_classes(part: CodeAttention, names: Sequence[str]) -> CodeAttention:
    """With all of these classes: NaN, and no tokens, in those that it did not meet."""
    return replace(
        part,
        classes=tuple(names),
        received_attention=expand_class_axis(part.received_attention, part.classes, names),
        paid_attention=expand_class_axis(
            expand_class_axis(part.paid_attention, part.classes, names).swapaxes(-1, -2), part.classes, names
        ).swapaxes(-1, -2),
        token_counts=np.nan_to_num(expand_class_axis(part.token_counts.astype(float), part.classes, names)).astype(int),
        attributions={method: expand_class_axis(own, part.classes, names) for method, own in part.attributions.items()},
    )


def expand_class_axis(values: np.ndarray, classes: Sequence[str], all_classes: Sequence[str]) -> np.ndarray:
    """The last axis, which is over some classes, over all of these."""
    made = np.full((*values.shape[:-1], len(all_classes)), np.nan)
    made[..., [all_classes.index(name) for name in classes]] = values
    return made


# -- writing


def write_study(options: argparse.Namespace) -> None:
    from clearhead.render.mpl import code
    from clearhead.studies.code.study import add_model_comparison, analyse_measurements

    asked = pickle.loads((options.work / "questions.pickle").read_bytes())
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in TASKS:
        paths = sorted(options.work.glob(f"{name}-*.pickle"))
        parts = [pickle.loads(path.read_bytes()) for path in paths]
        if not parts:
            continue
        by_class, by_part = (
            concat_measurements([part[n] for part in parts], (TOKEN_CLASSES, SYNTAX_PARTS)[n]) for n in range(2)
        )
        # a part counts its own functions; pairs that share one may be in different parts
        mine = [
            one
            for path, part in zip(paths, parts, strict=True)
            for one in _select_measured_questions(asked[name], path, len(part[0]))
        ]
        own = analyse_measurements(replace(by_class, function_ids=get_function_ids(mine)), by_part)
        if name in PRETRAINED_MODELS:
            other = np.concatenate([expand_class_axis(part[2], part[0].classes, by_class.classes) for part in parts])
            own = add_model_comparison(own, other, PRETRAINED_MODELS[name])
        found[name] = replace(own, settings={"questions": len(by_class)})
        figures = {"by-layer": code.plot_class_attention(by_class)}
        if own.attention_differences is not None:
            figures |= {
                "boxes": code.plot_correctness_boxes(by_class),
                "p": code.plot_p_values(own.attention_differences, by_class.classes),
            }
        for kind, figure in figures.items() if name == "java" else ():
            figure.savefig(options.out / f"code-{name}-{kind}.png", dpi=80)
    told = {name: own.to_dict() for name, own in found.items()}
    text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
    (options.out / "code-models.json").write_text(text, encoding="utf-8")


def _select_measured_questions(questions: Sequence[CodeQuestion], path: Path, count: int) -> Sequence[CodeQuestion]:
    """The questions of one part's file: the first so many of every so-manieth."""
    part, of = map(int, path.stem.split("-")[1:])
    return questions[part::of][:count]


if __name__ == "__main__":
    main()
