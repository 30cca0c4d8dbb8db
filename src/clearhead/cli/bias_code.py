"""`clearhead bias code`: what a code model looks at, by syntax class, and whether that tells when it is wrong."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.inputs import load
from clearhead.data.sources import cells_of, columns_of, open_dataset, read_text, whole
from clearhead.errors import InputError, unknown

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.studies.code.study import CodeStudy
    from clearhead.studies.code.tasks import Question

CODE = (
    "clearhead bias code src/ --count 300 --html code.html",
    "clearhead bias code functions.txt --language java --method saliency,integrated-gradients",
    "clearhead bias code pairs.tsv --task pairs --language java,csharp --model zoo:code-clone --against zoo:code",
    "clearhead bias code java.txt --task translate --answers cs.txt --language java --model zoo:code-translate",
)
#: Task → the model that it is asked of where none is named.
TASKS = {"cloze": "zoo:code", "pairs": "zoo:code-clone", "translate": "zoo:code-translate"}
#: Files that hold one function a line.
LINES = (".txt",)
#: Two functions, and whether they are clones.
COLUMNS = ("first", "second", "label")


def code(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE",
            help="Source files or folders of them, .txt files with one function a line; for --task pairs a table "
            "(.tsv, .csv, .jsonl) with the columns first, second and label.",
            show_default=False,
        ),
    ],
    model: opt.Model = None,
    task: Annotated[
        str,
        typer.Option(metavar="cloze|pairs|translate", help="Guess a masked token, tell clones, or translate."),
    ] = "cloze",
    language: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="python, java, csharp, go, javascript, php or ruby; two for pairs of two languages. Default: as the "
            "files' names end.",
        ),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="translate: the right answers, one a line.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Attribution by class, too: any method that `clearhead methods` lists."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another model with as many heads (pretrained, fine-tuned) to compare with."),
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", min=4, help="So many questions, drawn evenly.")] = 200,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Whether special tokens look and are looked at.")
    ] = True,
    permutations: Annotated[int, typer.Option(metavar="N", min=99, help="Shuffles of each test.")] = 2000,
    seed: Annotated[int, typer.Option(metavar="N", help="For what is drawn at random.")] = 0,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page that it ends in.")] = "code.html",
    as_json: opt.Json = False,
) -> None:
    """Put attention and attribution of a code model beside the syntax of its input.

    tree-sitter says what each token is (identifier, keyword, operator …) and which part of the tree it stands in
    (declaration, condition, loop, call …). Classes are measured in multiples of what chance gives; wrong answers are
    tested against right ones, head by head; and a detector of wrong answers is judged against plain confidence.
    """
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if (answers is not None) != (task == "translate"):
        raise InputError("--answers FILE goes with --task translate: the right answers, one a line")
    put.check_places(html)
    from clearhead.render.reports.code import code_page
    from clearhead.studies.code.study import study

    chosen = [] if method is None else opt.methods([method], [])
    languages = _languages(language)
    ex = load(opt.Loading(model or TASKS[task]))
    questions = _questions(ex, task, sources, answers, languages, count, seed)
    other = None if against is None else load(opt.Loading(against))
    told = {"task": task, "language": ", ".join(dict.fromkeys(one.language for q in questions for one in q.sources))}
    found = study(ex, questions, chosen, other, special, permutations, seed, put.talks(), **told)
    put.wrote(str(code_page(found, html)))
    if as_json:
        put.print_json(found.to_dict())
    else:
        _show(found)


def _show(found: "CodeStudy") -> None:
    lines = [{name: _said(value) for name, value in line.items()} for line in found.table(found.by_class)]
    put.print_table(list(lines[0]), lines)
    print(f"right: {found.accuracy} of {len(found.by_class)} questions")
    if found.attention is not None:
        print(f"wrong against right: {len(found.discoveries())} of {found.attention.tested} heads × classes differ")
    if found.detection is not None:
        parts = [f"{name} {own}" for name, own in found.detection.auroc.items()]
        print(f"telling that it is wrong (AUROC): {', '.join(parts)}")
    if found.change is not None:
        print(f"against {found.other}: {int(found.change.found.sum())} of {found.change.tested} heads × classes differ")
    for words in found.left_out:
        print(f"not done: {words}")


def _said(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _languages(words: str | None) -> list[str]:
    from clearhead.studies.code.syntax import language_named

    return [language_named(one.strip()) for one in words.split(",")] if words else []


def _questions(
    ex: "Explainer",
    task: str,
    sources: Sequence[Path],
    answers: Path | None,
    languages: list[str],
    count: int,
    seed: int,
) -> "list[Question]":
    from clearhead.adapters.generation import Answering
    from clearhead.adapters.masked_lm import MaskedLanguageModel
    from clearhead.studies.code import tasks as asking

    writes = isinstance(ex.subject, Answering)
    if task == "pairs" and (writes or isinstance(ex.subject, MaskedLanguageModel)):
        raise InputError(f"{ex.subject.name} is no classifier: --task pairs needs one, such as zoo:code-clone")
    if task == "translate" and not writes:
        raise InputError(f"{ex.subject.name} writes no text: --task translate needs a model such as zoo:code-translate")
    if task == "pairs":
        if not languages:
            raise InputError("pairs need --language, such as --language java,csharp")
        rows = _evenly([row for path in sources for row in _rows(path)], count)
        return asking.pairs([row[:2] for row in rows], [row[2] for row in rows], (languages[0], languages[-1]))
    if task == "translate":
        assert answers is not None
        if not languages:
            raise InputError("translation needs --language: that of the functions that are translated")
        lines = [line for path in sources for line in read_text(path).splitlines()]
        given = read_text(answers).splitlines()
        if len(lines) != len(given):
            raise InputError(f"{len(lines)} functions have {len(given)} answers: one a line is needed in both files")
        both = _evenly(list(zip(lines, given, strict=True)), count)
        return asking.translations([one for one, _ in both], [other for _, other in both], languages[0])
    found = []
    by_language: dict[str, list[str]] = {}
    for path in sources:
        for name, texts in _functions(path, languages).items():
            by_language.setdefault(name, []).extend(texts)
    share, known = -(-count // len(by_language)), 0
    for name, texts in by_language.items():
        each = -(-share // len(texts))
        own = asking.cloze(ex, _evenly(texts, 2 * share), name, each, seed)
        # every language counts its functions from zero
        found += [replace(one, function=(one.function or 0) + known) for one in own]
        known += len(texts)
    return _evenly(found, count)


def _functions(path: Path, languages: list[str]) -> dict[str, list[str]]:
    """Functions by language: of source files, or the lines of a .txt file."""
    from clearhead.studies.code.syntax import ENDINGS, functions

    if not path.exists():
        raise InputError(f"there is no file or folder {str(path)!r}")
    files = sorted(one for one in path.rglob("*") if one.suffix in ENDINGS) if path.is_dir() else [path]
    found: dict[str, list[str]] = {}
    for file in files:
        name = languages[0] if languages else ENDINGS.get(file.suffix, "")
        if not name:
            raise InputError(f"the language of {str(file)!r} is not known by its name: say it with --language")
        text = read_text(file)
        own = [line for line in text.splitlines() if line.strip()] if file.suffix in LINES else functions(text, name)
        found.setdefault(name, []).extend(own)
    if not any(found.values()):
        raise InputError(f"there are no functions in {str(path)!r}: give source files ({', '.join(ENDINGS)}) or lines")
    return {name: texts for name, texts in found.items() if texts}


def _rows(path: Path) -> list[tuple[str, str, str]]:
    there = columns_of(path)
    if not set(COLUMNS) <= set(there):
        held = ", ".join(there) or "nothing"
        raise InputError(f"{str(path)!r} must have the columns {', '.join(COLUMNS)}, but has {held}")
    *texts, label = COLUMNS
    pairs = whole(path, open_dataset(path, *texts).rows("text"))
    return [(*pair, str(own)) for pair, own in zip(pairs, cells_of(path, label), strict=True)]


def _evenly(some: list[Any], count: int) -> list[Any]:
    """So many of them, evenly from first to last."""
    if len(some) <= count:
        return some
    return [some[place * len(some) // count] for place in range(count)]
