"""Atomic writing of files: a file is complete or does not exist."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

#: Suffix of temporary files that are being written.
PARTIAL_SUFFIX = ".partial"


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path that replaces `path` when the block succeeds.

    If the block raises an error, the temporary file is removed and `path` stays unchanged.

    Args:
        path: The file to write. Pipes and devices such as /dev/null are written directly.

    Yields:
        The path to write to.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_write(folder / "a.txt") as partial:
        ...     _ = partial.write_text("content")
        >>> [file.name for file in folder.iterdir()]
        ['a.txt']
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():  # a pipe or device such as /dev/null must not be replaced
        yield final
        return
    partial = final.with_name(f".{final.name}.{uuid4().hex[:8]}{PARTIAL_SUFFIX}")
    try:
        yield partial
        os.replace(partial, final)
    except OSError as error:
        if error.filename is not None and Path(error.filename) == partial:
            error.filename = str(path)  # the caller does not know the temporary file
        raise
    finally:
        partial.unlink(missing_ok=True)
