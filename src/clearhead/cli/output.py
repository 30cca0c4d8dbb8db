"""What the verbs of the command line hand out: a coloured terminal or plain text, JSON, pages and files."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clearhead
from clearhead.cli import runtime
from clearhead.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.explanation.multi_stream import AnyExplanation

SUFFIX = ".safetensors"
#: Columns of a text that goes into a file or a pipe: wide enough that tables are not cut.
PLAIN_WIDTH = 120


def console(stderr: bool = False) -> "Console":
    from rich.console import Console

    plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, width=PLAIN_WIDTH if plain and not stderr else None, highlight=False)


def talks() -> bool:
    """Whether a person is watching standard error."""
    return sys.stderr.isatty()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    if not talks():
        yield
        return
    with console(stderr=True).status(what):
        yield


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error with rate and time left; the function that is handed out moves it on."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn

    class Rate(TextColumn):
        def render(self, task: Task) -> Any:
            return f"{task.speed:.1f} rows/s" if task.speed else "–"

    columns = (TextColumn("explaining"), BarColumn(), MofNCompleteColumn(), Rate(""), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True, disable=not talks()) as bar:
        task = bar.add_task("explaining", total=total)
        yield lambda rows: bar.advance(task, rows)


def print_json(data: Any) -> None:
    from clearhead.explanation.explanation import plain

    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps(plain(data), ensure_ascii=False, indent=indent, allow_nan=False))


def print_table(columns: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> None:
    from clearhead.render.terminal_tables import table

    console().print(table(columns, lines))


def rounded(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a table with its numbers short."""
    return {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in line.items()}


def of_card(name: str, card: Mapping[str, Any]) -> dict[str, str]:
    """One line of the table of models."""
    figures = card.get("figures") or {}
    size = f"{card['bytes'] / 1e6:.1f} MB" if "bytes" in card else "?"
    return {
        "model": f"zoo:{name}",
        "task": str(card.get("task", "?")),
        "size": size,
        "figures": "\n".join(f"{what} {figure}" for what, figure in list(figures.items())[:2]) or "not measured",
        "summary": str(card.get("summary", "")),
    }


def plural(stream: str) -> str:
    return {"text": "texts", "image": "pictures", "audio": "sounds"}.get(stream, stream)


def merged(explanation: "AnyExplanation", words: bool, sentences: bool) -> "AnyExplanation":
    if words and sentences:
        raise InputError("--words and --sentences do not go together: choose one")
    if words:
        return explanation.words()
    return explanation.sentences() if sentences else explanation


def show(explanations: Sequence["AnyExplanation"], html: str | None, as_json: bool) -> None:
    if html is not None:
        write_page(explanations, html)
    if as_json:
        forms = [explanation.to_dict() for explanation in explanations]
        print_json(forms[0] if len(forms) == 1 else forms)
    else:
        for number, explanation in enumerate(explanations):
            console().print(*([""] if number else []), explanation, sep="\n")


def show_folder(folder: Path, by: str, how: str, as_json: bool) -> int:
    """What matters most in all explanations of a folder, method by method; gives the number of files left out."""
    from clearhead.render.terminal import render_aggregate

    files = sorted(folder.rglob(f"*{SUFFIX}"))
    if not files:
        raise InputError(f"the folder {str(folder)!r} holds no explanations ({SUFFIX})")
    by_method: dict[str, list[AnyExplanation]] = {}
    bad: list[InputError] = []
    for file in files:
        try:
            explanation = clearhead.open_explanation(file)
        except InputError as problem:
            bad.append(problem)
        else:
            by_method.setdefault(explanation.method, []).append(explanation)
    if not by_method:
        raise bad[0]
    for left_out in bad:
        runtime.say(f"left out: {left_out}", runtime.ROWS_FAILED)
    aggregates = {name: clearhead.aggregate(some, by, how) for name, some in by_method.items()}  # type: ignore[arg-type]
    if as_json:
        print_json({name: aggregate.to_dict() for name, aggregate in aggregates.items()})
        return len(bad)
    for name, aggregate in aggregates.items():
        count = len(by_method[name])
        console().print(f"{name}, {count} explanation{'' if count == 1 else 's'}")
        console().print(render_aggregate(aggregate))
    return len(bad)


def wrote(place: str | Path) -> None:
    print(f"wrote {place}", file=sys.stderr)


def note(words: str) -> None:
    """What a person should know although the command goes on."""
    print(f"note: {words}", file=sys.stderr)


def write_page(explanations: Sequence["AnyExplanation"], path: str) -> None:
    clearhead.report(explanations, path)
    print(f"wrote {path}", file=sys.stderr)


def save(explanations: Sequence["AnyExplanation"], place: str | None) -> None:
    """One explanation into a file, several into a folder."""
    if place is None:
        return
    if _is_file(place):
        explanations[0].save(place)
        print(f"wrote {place}", file=sys.stderr)
        return
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(file.name.split(".")[0]) for file in folder.glob(f"*{SUFFIX}") if file.name.split(".")[0].isdigit()]
    for number, explanation in enumerate(explanations, 1 + max(numbers, default=0)):  # what is there stays
        name = str(explanation.provenance.get("method", explanation.method))
        explanation.save(folder / f"{number:03d}.{name}{SUFFIX}")
    files = "1 file" if len(explanations) == 1 else f"{len(explanations)} files"
    print(f"wrote {files} into {place}", file=sys.stderr)


def _is_file(place: str) -> bool:
    return place.endswith(SUFFIX) and not os.path.isdir(place)


def check_folder(out: str | None, option: str = "--out") -> None:
    """Before anything is computed: can a folder be there? `option` names it."""
    if out is None:
        return
    if os.path.exists(out) and not os.path.isdir(out):
        raise InputError(f"{option} {out!r} is there and is no folder: name a folder")
    _check_writable(out, out if os.path.isdir(out) else _parent(out))


def check_places(html: str | None, place: str | None = None, count: int = 1, option: str = "--html") -> None:
    """Before anything is computed: can what is asked for be written where it shall go? `option` names the first."""
    for path in (html, place):
        if path is not None:
            # A device such as /dev/null is written to, never replaced: it is its own place.
            _check_writable(path, path if os.path.exists(path) and not os.path.isfile(path) else _parent(path))
    if html is not None and os.path.isdir(html):
        raise InputError(f"{option} {html!r} is a folder: name a file")
    if place is None:
        return
    if os.path.exists(os.path.join(place, "settings.json")):
        raise InputError(f"--save {place!r} holds the results of --out: name another folder")
    if _is_file(place) and count > 1:
        raise InputError(f"--save {place!r} is one file for {count} explanations: name a folder")
    if os.path.exists(place) and not os.path.isdir(place) and not _is_file(place):
        raise InputError(f"--save {place!r} is there and is no folder: name a folder, or a file that ends in {SUFFIX}")
    ending = Path(place).suffix[1:].isalpha() and not place.endswith(os.sep)
    if ending and not os.path.exists(place) and not _is_file(place):
        raise InputError(f"--save {place!r} must end in {SUFFIX}, or be a folder: {place + os.sep!r} if you mean one")


def _parent(path: str) -> str:
    return str(Path(path).absolute().parent)


def _check_writable(path: str, there: str) -> None:
    if not os.path.exists(there):
        raise InputError(f"cannot write {path!r}: there is no folder {there!r}")
    if not os.access(there, os.W_OK):
        raise InputError(f"cannot write {path!r}: you may not write to {there!r}")
