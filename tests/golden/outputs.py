"""The output of commands with `--json` on tiny models: keys and values, without prose and values that vary.

Each output becomes a flat table from a path of keys to a value, so that a diff shows each change in one line.
"""

import contextlib
import io
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from clearhead.cli import main
from tests import models, original_checkpoints
from tests.golden.models import fill_weights

Outputs = dict[str, Any]

#: Keys of values that depend on the machine or the time.
VOLATILE = ("versions", "seconds", "python", "torch", "transformers", "clearhead-zoo", "capture_error", "rebuild_error")
#: Strings with more words than this are prose.
_MOST_WORDS = 3
#: Longer arrays of numbers are replaced by two sums.
_MOST_NUMBERS = 8


@dataclass(frozen=True)
class Invocation:
    """A command line; `needs` names the invocations that must run before it, because it reads their output files."""

    arguments: str
    needs: tuple[str, ...] = ()
    #: Whether its floats are the same on every machine; results of training are not.
    has_stable_floats: bool = True
    #: From this nesting depth on, only the types of values are kept.
    depth: int | None = None
    #: The number of elements that are kept of a list of mappings, besides its length.
    elements: int = 4


_TRAINING = "--label-column label --steps 2 --train-batch-size 2 --held-out 0.5"
INVOCATIONS: dict[str, Invocation] = {
    "attention": Invocation("attention 'I like the movie' -m bert --candidates NEGATIVE,POSITIVE"),
    "attention of several streams": Invocation("attention phone -m zoo:spell"),
    "bench": Invocation(
        "bench --model zoo:logic --data known:logic --protocols truth --limit 4 --methods saliency --out run"
    ),
    "bias code": Invocation(
        "bias code some.py -m code --compare-model code --count 6 --methods saliency --permutations 99"
    ),
    "bias gender": Invocation(
        "bias gender text.txt -m masked --pairs pairs.tsv --names m,f --sentence-set free --limit 2 --plain "
        "--text 'he is here.'"
    ),
    "compare": Invocation("compare 'I like the movie' -m bert --methods generic,attcat,random"),
    "concept densray": Invocation(
        "concept densray a.txt b.txt --text-file text.txt -m masked --save axis.safetensors --plain --names m,f"
    ),
    "concept explain": Invocation(
        "concept explain 'he like the book.' --directions axis.safetensors --layer 1 --at book -m masked "
        "--methods grad-sam",
        needs=("concept densray",),
    ),
    "concept remove": Invocation(
        "concept remove axis.safetensors text.txt -m masked --limit 3", needs=("concept densray",)
    ),
    "concept tcav": Invocation(
        "concept tcav bubbly -m vit --concept dotted --concept mine=bubbly --random checkered --examples 3 --runs 4 "
        "--layers 0,-1 --threshold 0 --target 1"
    ),
    "convert": Invocation("convert original.pth converted --family deit --i-trust-this-file"),
    "explain": Invocation("explain 'I like the movie' -m bert --save saved.safetensors"),
    "explain several ways": Invocation(
        "explain 'I like the movie' 'So boring!' -m bert --methods generic,rollout --target NEGATIVE "
        "--against POSITIVE --scale probability --rows all --layers 1:3 --words"
    ),
    "explain by a profile": Invocation(
        "explain 'I like the movie' -m bert --methods transformer-attribution --profile te_bert_notebook"
    ),
    "explain an image": Invocation("explain bubbly/00.png -m vit --per head"),
    "explain a masked word": Invocation("explain 'He like the [MASK].' -m masked --target book --against it"),
    "explain data": Invocation("explain reviews.csv -m bert --out explained"),
    "explain source and prefix": Invocation("explain phone -m zoo:spell"),
    "lecture": Invocation("lecture 'I like the movie' 'So boring' -m bert"),
    "methods": Invocation("methods", elements=100),
    "methods of a model": Invocation("methods -m bert"),
    "models": Invocation("models", depth=3),
    "probe adversary": Invocation("probe adversary reviews.csv -m bert --steps 2 --tolerance 0.5"),
    "probe correlation": Invocation("probe correlation reviews.csv -m bert --unit token"),
    "probe diagnostic": Invocation(
        f"probe diagnostic labelled.csv -m bert {_TRAINING} --guides uniform,base,generic", has_stable_floats=False
    ),
    "probe frontier": Invocation(
        f"probe frontier labelled.csv -m bert {_TRAINING} --strengths 0,0.1 --seeds 1", has_stable_floats=False
    ),
    "probe heads": Invocation("probe heads reviews.csv -m bert"),
    "probe permutation": Invocation("probe permutation reviews.csv -m bert --draws 3 --by-head"),
    "probe seeds": Invocation(
        f"probe seeds labelled.csv -m bert {_TRAINING} --seeds 2 --fresh 1", has_stable_floats=False
    ),
    "probe skips": Invocation("probe skips reviews.csv -m bert"),
    "probe uniform": Invocation("probe uniform reviews.csv -m bert --frozen"),
    "report": Invocation("report run", needs=("bench",)),
    "show": Invocation("show saved.safetensors --words", needs=("explain",)),
    "show a folder": Invocation("show explained --by word --reduction mean", needs=("explain data",)),
    "verify": Invocation("verify generic,grad-sam -m bert --text 'So boring' --text 'I like it'"),
    "version": Invocation("version"),
}


class Workspace:
    """A folder with tiny models and files, in which each command runs once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._outputs: dict[str, Outputs] = {}
        with contextlib.chdir(folder):
            _write_models()
            _write_files()

    def run(self, name: str) -> Outputs:
        """Return the flat output of a command, which runs at the first request."""
        if name not in self._outputs:
            invocation = INVOCATIONS[name]
            for other in invocation.needs:
                self.run(other)
            with contextlib.chdir(self.folder):
                printed = run_command([*shlex.split(invocation.arguments), "--json"])
            self._outputs[name] = flatten(json.loads(printed), invocation)
        return self._outputs[name]


def run_command(arguments: list[str]) -> str:
    """Run a command in this process and return its output; it must succeed."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    if code != 0:
        raise RuntimeError(f"clearhead {shlex.join(arguments)} ended with {code}: {errors.getvalue()}")
    return printed.getvalue()


def compute_outputs(folder: Path) -> dict[str, Outputs]:
    """Run all commands in a folder."""
    workspace = Workspace(folder)
    return {name: workspace.run(name) for name in INVOCATIONS}


def flatten(entry: Any, invocation: Invocation) -> Outputs:
    """Return the values of a JSON document by path: prose as `<text>`, and values that vary as their type."""
    return dict(_flatten(entry, (), invocation))


def _flatten(entry: Any, path: tuple[str, ...], invocation: Invocation) -> Iterator[tuple[str, Any]]:
    is_volatile = bool(path) and path[-1] in VOLATILE
    is_deep = invocation.depth is not None and len(path) >= invocation.depth
    if is_volatile or is_deep or (isinstance(entry, float) and not invocation.has_stable_floats):
        yield "/".join(path), f"<{type(entry).__name__}>"
    elif isinstance(entry, dict) and entry:
        for key, inner in entry.items():
            yield from _flatten(inner, (*path, key), invocation)
    elif isinstance(entry, list):
        yield from _flatten_list(entry, path, invocation)
    elif isinstance(entry, str):
        yield "/".join(path), entry if len(entry.split()) <= _MOST_WORDS else "<text>"
    else:
        yield "/".join(path), float(f"{entry:.9g}") if isinstance(entry, float) else entry


def _flatten_list(entry: list[Any], path: tuple[str, ...], invocation: Invocation) -> Iterator[tuple[str, Any]]:
    numbers = _as_numbers(entry)
    if numbers is not None and numbers.size > _MOST_NUMBERS:
        weights = np.cos(np.arange(numbers.size))  # so that a change of order is detected
        summary = {
            "shape": str(numbers.shape),
            "sum": float(np.nansum(numbers)),
            "weighted sum": float(np.nansum(numbers.ravel() * weights)),
        }
        yield from _flatten(summary, path, invocation)
        return
    yield "/".join((*path, "length")), len(entry)
    has_structure = any(isinstance(inner, dict | list) for inner in entry)
    for index, inner in enumerate(entry[: invocation.elements] if has_structure else entry):
        yield from _flatten(inner, (*path, str(index)), invocation)


def _as_numbers(entry: list[Any]) -> np.ndarray | None:
    """Return a list of numbers, or of such lists, as an array; null stands for NaN."""
    try:
        array = np.array(entry, dtype=object)
        flat = array.ravel().tolist()
        if all(item is None or type(item) in (int, float) for item in flat) and any(item is not None for item in flat):
            return array.astype(np.float64)
    except ValueError:  # the lists have different lengths
        pass
    return None


def _write_models() -> None:
    texts = {
        "bert": ("bert", "ForSequenceClassification"),
        "masked": ("bert", "ForMaskedLM"),
        "code": ("roberta", "ForMaskedLM"),
    }
    for folder, (name, head) in texts.items():
        model, tokenizer = models.text_model(name, head)
        if folder == "bert":
            model.config.id2label = {0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"}
            model.config.label2id = {label: index for index, label in model.config.id2label.items()}
        _save_model(folder, model, tokenizer)
    _save_model("vit", *models.image_model("vit"))


def _save_model(folder: str, model: Any, processor: Any) -> None:
    fill_weights(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


_SOURCE = """
class A:
    def the(he, it):
        if he > it:
            return it
        return he + 1

    def book(it):
        for he in it:
            it = he
        return it
"""


def _write_files() -> None:
    sentences = [
        f"{subject} {verb} the {thing}."
        for subject in ("he", "she", "the", "it")
        for verb in ("is", "like")
        for thing in ("book", "mov", "on")
    ]
    texts = {
        "a.txt": "he\nthe\n",
        "b.txt": "she\nit\n",
        "labelled.csv": "text,label\nI like the movie,1\nSo boring,0\nI like it,POSITIVE\nboring,NEGATIVE\n",
        "pairs.tsv": "he\tshe\nthe\tit\n",
        "reviews.csv": "text\nI like the movie\nSo boring\n",
        "some.py": _SOURCE,
        "text.txt": "\n".join(sentences * 2),
    }
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
    from clearhead.concepts.concept_data import draw_textures

    for kind, count in (("bubbly", 3), ("checkered", 18)):
        Path(kind).mkdir()
        for index, image in enumerate(draw_textures(kind, count, 20)):
            Image.fromarray(image).save(f"{kind}/{index:02d}.png")
    original = original_checkpoints.VisionTransformer("token")
    fill_weights(original)
    torch.save({name: weight.float() for name, weight in original.state_dict().items()}, "original.pth")
