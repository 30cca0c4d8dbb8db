"""Output of commands: terminal or plain text, JSON, HTML pages and files, and checks of output paths."""

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

    from clearhead.engine.plan import ExecutionPlan
    from clearhead.explanation.multi_stream import AnyExplanation

EXPLANATION_SUFFIX = ".safetensors"
#: Width in columns of text written to a file or a pipe: wide enough that tables are not cut.
PIPED_WIDTH_COLUMNS = 120


def make_console(stderr: bool = False) -> "Console":
    """Return a rich console for standard output or standard error."""
    from rich.console import Console

    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, width=PIPED_WIDTH_COLUMNS if is_piped and not stderr else None, highlight=False)


def is_interactive() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr.isatty()


@contextmanager
def status_spinner(message: str) -> Iterator[None]:
    """Show a spinner on standard error, if it is a terminal."""
    if not is_interactive():
        yield
        return
    with make_console(stderr=True).status(message):
        yield


@contextmanager
def explaining_progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error with rate and remaining time; yields a function that advances it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn

    class Rate(TextColumn):
        def render(self, task: Task) -> Any:
            return f"{task.speed:.1f} rows/s" if task.speed else "–"

    columns = (TextColumn("explaining"), BarColumn(), MofNCompleteColumn(), Rate(""), TimeRemainingColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True, disable=not is_interactive()) as bar:
        task = bar.add_task("explaining", total=total)
        yield lambda rows: bar.advance(task, rows)


def print_json(data: Any) -> None:
    """Print a JSON document on standard output, indented on a terminal."""
    from clearhead.explanation.explanation import to_json_value

    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps(to_json_value(data), ensure_ascii=False, indent=indent, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of these columns on standard output."""
    from clearhead.render.terminal_tables import build_terminal_table

    make_console().print(build_terminal_table(columns, rows))


def format_floats(row: Mapping[str, Any]) -> dict[str, Any]:
    """Format the floats of a table row with three decimals."""
    return {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in row.items()}


def build_model_row(model_name: str, model_card: Mapping[str, Any]) -> dict[str, str]:
    """Build one row of the table of models."""
    figures = model_card.get("figures") or {}
    size = f"{model_card['bytes'] / 1e6:.1f} MB" if "bytes" in model_card else "?"
    return {
        "model": f"zoo:{model_name}",
        "task": str(model_card.get("task", "?")),
        "size": size,
        "figures": "\n".join(f"{name} {value}" for name, value in list(figures.items())[:2]) or "not measured",
        "summary": str(model_card.get("summary", "")),
    }


def pluralize_stream(stream: str) -> str:
    """Return the plural of a stream's name for messages."""
    return {"text": "texts", "image": "images"}.get(stream, stream)


def format_count(count: int, noun: str) -> str:
    """Format a number with its noun, in the plural unless the number is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def merge_units(explanation: "AnyExplanation", words: bool, sentences: bool) -> "AnyExplanation":
    """Merge tokens into words or sentences, as requested by --words and --sentences."""
    if words and sentences:
        raise InputError("--words and --sentences cannot be combined: choose one")
    if words:
        return explanation.words()
    if sentences:
        return explanation.sentences()
    return explanation


def print_explanations(explanations: Sequence["AnyExplanation"], html: str | None, as_json: bool) -> None:
    """Print explanations as text or JSON, and write the HTML page if a path is given."""
    if html is not None:
        write_explanations_page(explanations, html)
    if as_json:
        documents = [explanation.to_dict() for explanation in explanations]
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    for index, explanation in enumerate(explanations):
        if index:
            make_console().print()
        make_console().print(explanation)


def print_plan(plan: "ExecutionPlan", as_json: bool) -> None:
    """Print planned passes as text or JSON."""
    if as_json:
        print_json(plan.to_dict())
    else:
        make_console().print(str(plan), markup=False, highlight=False, soft_wrap=True)


def print_folder_summary(folder: Path, group_by: str, reduction: str, as_json: bool) -> int:
    """Print the aggregate of all explanations of a folder by method; return the number of unreadable files."""
    from clearhead.render.terminal import render_aggregate

    files = sorted(folder.rglob(f"*{EXPLANATION_SUFFIX}"))
    if not files:
        raise InputError(f"the folder {str(folder)!r} contains no explanations ({EXPLANATION_SUFFIX})")
    by_method: dict[str, list[AnyExplanation]] = {}
    errors: list[InputError] = []
    for file in files:
        try:
            explanation = clearhead.load_explanation(file)
        except InputError as problem:
            errors.append(problem)
        else:
            by_method.setdefault(explanation.method, []).append(explanation)
    if not by_method:
        raise errors[0]
    for error in errors:
        runtime.print_error(f"skipped: {error}", runtime.EXIT_ROWS_FAILED)
    aggregates = {
        name: clearhead.aggregate(explanations, group_by, reduction)  # type: ignore[arg-type]
        for name, explanations in by_method.items()
    }
    if as_json:
        print_json({name: aggregate.to_dict() for name, aggregate in aggregates.items()})
        return len(errors)
    for name, aggregate in aggregates.items():
        make_console().print(f"{name}, {format_count(len(by_method[name]), 'explanation')}")
        make_console().print(render_aggregate(aggregate))
    return len(errors)


def report_written(path: str | Path) -> None:
    """Print the path of a file or folder that was written, on standard error."""
    print(f"wrote {path}", file=sys.stderr)


def print_note(message: str) -> None:
    """Print a note on standard error; the command continues."""
    print(f"note: {message}", file=sys.stderr)


def write_explanations_page(explanations: Sequence["AnyExplanation"], path: str) -> None:
    """Write explanations to a self-contained HTML page, and print its path."""
    clearhead.write_report(explanations, path)
    report_written(path)


def save_explanations(explanations: Sequence["AnyExplanation"], path: str | None) -> None:
    """Save one explanation to a file, or several to a folder; existing files are kept."""
    if path is None:
        return
    if _is_explanation_file(path):
        explanations[0].save(path)
        report_written(path)
        return
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [
        int(file.name.split(".")[0])
        for file in folder.glob(f"*{EXPLANATION_SUFFIX}")
        if file.name.split(".")[0].isdigit()
    ]
    for number, explanation in enumerate(explanations, 1 + max(numbers, default=0)):
        name = str(explanation.provenance.get("method", explanation.method))
        explanation.save(folder / f"{number:03d}.{name}{EXPLANATION_SUFFIX}")
    print(f"wrote {format_count(len(explanations), 'file')} into {path}", file=sys.stderr)


def _is_explanation_file(path: str) -> bool:
    """Whether a path ends in the suffix of saved explanations and is not a folder."""
    return path.endswith(EXPLANATION_SUFFIX) and not os.path.isdir(path)


def check_output_folder(folder: str | None, option: str = "--out") -> None:
    """Raise if a folder cannot be written to, before anything is computed; `option` is named in the error."""
    if folder is None:
        return
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InputError(f"{option} {folder!r} exists and is not a folder: choose another path")
    target = folder
    if not os.path.isdir(folder):
        target = _get_parent_folder(folder)
    _check_writable(folder, target)


def check_output_paths(
    file_path: str | None, save_path: str | None = None, num_explanations: int = 1, option: str = "--html"
) -> None:
    """Raise if an output path cannot be written, before anything is computed; `option` is the option of `file_path`."""
    for path in (file_path, save_path):
        if path is not None:
            # A device such as /dev/null is written to and never replaced, so its own permissions count.
            is_replaced = os.path.isfile(path) or not os.path.exists(path)
            target = path
            if is_replaced:
                target = _get_parent_folder(path)
            _check_writable(path, target)
    if file_path is not None and os.path.isdir(file_path):
        raise InputError(f"{option} {file_path!r} is a folder: specify a file")
    if save_path is None:
        return
    if os.path.exists(os.path.join(save_path, "settings.json")):
        raise InputError(f"--save {save_path!r} contains the results of a run with --out: choose another folder")
    if _is_explanation_file(save_path) and num_explanations > 1:
        raise InputError(
            f"--save {save_path!r} names one file, but there are {num_explanations} explanations: specify a folder"
        )
    if os.path.exists(save_path) and not os.path.isdir(save_path) and not _is_explanation_file(save_path):
        raise InputError(
            f"--save {save_path!r} exists and is not a folder: specify a folder, or a file that ends in "
            f"{EXPLANATION_SUFFIX}"
        )
    has_suffix = Path(save_path).suffix[1:].isalpha() and not save_path.endswith(os.sep)
    if has_suffix and not os.path.exists(save_path) and not _is_explanation_file(save_path):
        raise InputError(
            f"--save {save_path!r} must end in {EXPLANATION_SUFFIX}, or be a folder: for a folder, write "
            f"{save_path + os.sep!r}"
        )


def _get_parent_folder(path: str) -> str:
    """Return the absolute path of the folder that contains a path, also for a bare file name."""
    return str(Path(path).absolute().parent)


def _check_writable(path: str, target: str) -> None:
    """Raise `InputError` about `path` if `target` does not exist or cannot be written to."""
    if not os.path.exists(target):
        raise InputError(f"cannot write {path!r}: there is no folder {target!r}")
    if not os.access(target, os.W_OK):
        raise InputError(f"cannot write {path!r}: no permission to write to {target!r}")
