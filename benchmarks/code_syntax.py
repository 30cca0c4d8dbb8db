"""What the zoo's code models look at, by syntax class: the figures and tables of docs/code-models.md.

    python packages/zoo/train/code_data.py --data ../shared/data --out carry/code
    PYTHONPATH=packages/zoo/train python benchmarks/code_syntax.py --data ../shared/data --pairs carry/code

Held-out functions that decided which weights are kept are asked about, not the test files: masked tokens of Java and of
Python (zoo:code), and pairs of Python functions (zoo:code-clone, with zoo:code beside it). Writes DIR/code-*.png and
DIR/code-models.json. Some minutes on one core.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from code_clone import Pairs
from code_data import python_functions, read_clones

import clearhead
from clearhead.bias.code_study import CodeStudy, study
from clearhead.bias.questions import Question, cloze, pairs
from clearhead.show import code

METHODS = ("saliency", "generic")
#: Python functions of more characters are left out: they would take most of the time.
LONGEST, EVERY, PYTHON, PAIRS = 900, 5, 300, 220


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    masked, clone = clearhead.load("zoo:code"), clearhead.load("zoo:code-clone")
    java = (options.data / "code" / "valid.java-cs.txt.java").read_text(encoding="utf-8").splitlines()
    python = [text for text in python_functions("valid") if len(text) < LONGEST][::EVERY]
    found = {
        "java": study(masked, cloze(masked, java, "java"), METHODS),
        "python": study(masked, cloze(masked, python, "python")[:PYTHON], METHODS),
        "pairs": study(clone, clones(clone, options.pairs), METHODS[:1], against=masked),
    }
    write(found, options.out)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with code/")
    parser.add_argument("--pairs", type=Path, required=True, help="folder that code_data.py wrote")
    parser.add_argument("--out", type=Path, default=Path("docs", "figures"), help="where the figures go")
    return parser.parse_args()


def clones(ex: clearhead.Explainer, folder: Path) -> list[Question]:
    """Pairs of Python functions as in training: half of them the same, most of the others near misses."""
    drawn = Pairs(read_clones(folder, "valid"), torch.device("cpu"))
    chosen, same = drawn.draw(np.random.default_rng(5), PAIRS, "Python")
    decode = ex.subject.processor.decode

    def text(place: int) -> str:
        start, size = int(drawn.rows.start[place]), int(drawn.rows.size[place])
        return str(decode(drawn.rows.ids[start : start + size].tolist()))

    texts = [(text(one), text(other)) for one, other in chosen]
    return pairs(texts, ["same" if alike else "different" for alike in same], ("python", "python"))


def write(found: dict[str, CodeStudy], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in found.items():
        figures = {"by-layer": code.by_layer(own.by_class), "looking": code.looking(own.by_class)}
        if own.attention is not None:
            figures |= {"boxes": code.boxes(own.by_class), "p": code.p_map(own.attention, own.by_class.classes)}
        if own.change is not None:
            figures["change"] = code.p_map(own.change, own.by_class.classes)
        for kind, figure in figures.items():
            figure.savefig(folder / f"code-{name}-{kind}.png", dpi=80)
    told = {name: own.to_dict() for name, own in found.items()}
    text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
    (folder / "code-models.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
