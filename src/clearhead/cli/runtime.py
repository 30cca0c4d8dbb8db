"""Process-level behaviour of the command line: exit codes, one-line errors, warnings and interrupts."""

import logging
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

EXIT_UNSUPPORTED = 1
EXIT_BAD_INPUT = 2
EXIT_ROWS_FAILED = 3
EXIT_UNEXPECTED = 70
EXIT_INTERRUPTED = 130


class RunInterruptedError(Exception):
    """A long run was interrupted; the message says what was stored and how to resume."""


class _CliState:
    """State of the running command."""

    show_traceback = False
    is_interrupted = False
    #: Whether --json was given: then no notes are printed.
    prints_json = False


CLI_STATE = _CliState()


def run_cli(app: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; every error is one line on standard error and an exit code."""
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings(), _recorded_interrupts(), _logged_notes():
        warnings.simplefilter("ignore")  # warnings between libraries do not help the user of a command
        warnings.simplefilter("default", ClearheadWarning)
        warnings.showwarning = lambda message, *args, **kwargs: print_error(message, 0)  # type: ignore[assignment]
        code = _run_command(app, sys.argv[1:] if arguments is None else list(arguments))
    sys.exit(code)


class _NoteHandler(logging.Handler):
    """Prints what the package logs as notes on standard error; with --json nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        if not CLI_STATE.prints_json:
            print(f"note: {record.getMessage()}", file=sys.stderr)


@contextmanager
def _logged_notes() -> Iterator[None]:
    """Inside the `with`, messages that the package logs at INFO or above are printed as notes."""
    logger = logging.getLogger("clearhead")
    handler = _NoteHandler(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def _recorded_interrupts() -> Iterator[None]:
    """Record Ctrl-C in `CLI_STATE` and raise it: some libraries swallow the exception while they are imported."""
    CLI_STATE.is_interrupted = False

    def record_and_raise(signal_number: int, frame: object) -> NoReturn:
        CLI_STATE.is_interrupted = True
        raise KeyboardInterrupt

    try:
        previous_handler = signal.getsignal(signal.SIGINT)
        if previous_handler is signal.default_int_handler:  # a background job may ignore the signal
            signal.signal(signal.SIGINT, record_and_raise)
    except ValueError:  # only the main thread receives signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _run_command(app: typer.Typer, arguments: list[str]) -> int:
    """Run the app and return its exit code: 130 if interrupted, 0 if the reader closed the pipe."""
    CLI_STATE.show_traceback = False
    CLI_STATE.prints_json = False
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="clearhead", standalone_mode=False)
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:
            return print_error("interrupted", EXIT_INTERRUPTED)
        return code or 0
    except (KeyboardInterrupt, typer.Abort):
        return print_error("interrupted", EXIT_INTERRUPTED)
    except (BrokenPipeError, SystemExit) as ended:  # the reader closed the pipe, as in clearhead methods | head
        # click turns a pipe that is closed while a command prints into a SystemExit
        if not isinstance(ended, BrokenPipeError) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RunInterruptedError as interruption:
        return print_error(interruption, EXIT_INTERRUPTED)
    except Exception as error:
        if CLI_STATE.show_traceback:
            traceback.print_exc()
        return _report_exception(error)


def _report_exception(error: Exception) -> int:
    """Print one line for an exception and return the exit code."""
    if isinstance(error, InputError):
        return print_error(error, EXIT_BAD_INPUT)
    if isinstance(error, ClearheadError):
        return print_error(error, EXIT_UNSUPPORTED)
    usage_error = typer.BadParameter.__mro__[1]  # recent versions of typer vendor click
    if isinstance(error, usage_error):
        context = getattr(error, "ctx", None)
        command_path = getattr(context, "command_path", "clearhead")
        message = error.format_message()  # type: ignore[attr-defined]
        if not message:  # the help has been printed: no command was given
            return EXIT_BAD_INPUT
        sentence = message if message.endswith("?") else f"{message.rstrip('.')}."
        return print_error(f"{sentence} See {command_path} --help", EXIT_BAD_INPUT)
    if isinstance(error, OSError):
        return print_error(f"{error.filename!r}: {error.strerror}" if error.filename else error, EXIT_BAD_INPUT)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return print_error(
            "out of memory: set --memory below the available memory, or use a smaller --batch-size or --max-length",
            EXIT_UNSUPPORTED,
        )
    message = f"unexpected {type(error).__name__}: {error}. This is a bug in clearhead."
    if not CLI_STATE.show_traceback:
        message += " Run clearhead --traceback … and add the output to your bug report"
    return print_error(message, EXIT_UNEXPECTED)


def print_error(message: object, exit_code: int) -> int:
    """Print one line on standard error, without terminal control characters; return the exit code."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(message).split()))
    has_colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[1;31mclearhead:\x1b[0m {line}" if has_colour else f"clearhead: {line}", file=sys.stderr)
    return exit_code
