"""The border between the command line and the process: exit codes, one line for whatever goes wrong, interrupts."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import typer

from clearhead.errors import ClearheadError, ClearheadWarning, InputError

REFUSED, BAD_INPUT, ROWS_FAILED, UNEXPECTED, INTERRUPTED = 1, 2, 3, 70, 130


class Stopped(Exception):
    """A long run was interrupted; the message says what it left and how to go on."""


class _State:
    shows_traceback = False
    interrupted = False


STATE = _State()


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; whatever goes wrong is one line on standard error and an exit code."""
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    if not sys.stderr.isatty():  # nobody watches a bar
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings(), _noticing_interrupts():
        warnings.simplefilter("ignore")  # what libraries say among themselves is no business of the person's
        warnings.simplefilter("default", ClearheadWarning)  # what we say is
        warnings.showwarning = lambda message, *where, **how: say(message, 0)  # type: ignore[assignment]
        code = _code(app, sys.argv[1:] if arguments is None else list(arguments))
    sys.exit(code)


@contextmanager
def _noticing_interrupts() -> Iterator[None]:
    """Remember Ctrl-C as well as raise it: while libraries are being imported, some of them swallow the exception."""
    STATE.interrupted = False

    def notice(number: int, frame: object) -> NoReturn:
        STATE.interrupted = True
        raise KeyboardInterrupt

    try:
        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:  # a background job may have been told to ignore it
            signal.signal(signal.SIGINT, notice)
    except ValueError:  # not the main thread, which alone hears signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _code(app: typer.Typer, arguments: list[str]) -> int:
    STATE.shows_traceback = False
    usage_error = typer.BadParameter.__mro__[1]  # typer carries its own click from some version on
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="clearhead", standalone_mode=False)
        sys.stdout.flush()
        return say("interrupted", INTERRUPTED) if code == INTERRUPTED else code or 0
    except (KeyboardInterrupt, typer.Abort):
        return say("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit) as ended:  # the reader has seen enough, as in clearhead methods | head
        # click turns a pipe that is closed while a command prints into an exit of its own
        if not isinstance(ended, BrokenPipeError) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Stopped as stopped:
        return say(stopped, INTERRUPTED)
    except Exception as problem:
        if STATE.shows_traceback:
            traceback.print_exc()
        if isinstance(problem, InputError):
            return say(problem, BAD_INPUT)
        if isinstance(problem, ClearheadError):
            return say(problem, REFUSED)
        if isinstance(problem, usage_error):
            context = getattr(problem, "ctx", None)
            where = context.command_path if context else "clearhead"
            said = problem.format_message()  # type: ignore[attr-defined]
            # Without a message it has already shown the help: nothing was asked for.
            ends = said if said.endswith("?") else f"{said.rstrip('.')}."
            return say(f"{ends} See {where} --help", BAD_INPUT) if said else BAD_INPUT
        if isinstance(problem, OSError):
            named = f"{problem.filename!r}: {problem.strerror}" if problem.filename else str(problem)
            return say(named, BAD_INPUT)
        if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
            return say(
                "out of memory: try --memory with less than there is, a smaller --batch-size or --max-length", REFUSED
            )
        hint = (
            ""
            if STATE.shows_traceback
            else " Run clearhead --traceback … to see where, and send that along with a report"
        )
        return say(f"unexpected {type(problem).__name__}: {problem}. This is a fault of clearhead.{hint}", UNEXPECTED)


def say(message: object, code: int) -> int:
    """One line on standard error, with nothing in it that a terminal would obey."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(message).split()))
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[1;31mclearhead:\x1b[0m {line}" if colour else f"clearhead: {line}", file=sys.stderr)
    return code
