"""Files are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

#: How a file that is being written ends, until it is complete.
PARTIAL = ".partial"


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """A path to write to: it takes the place of `path` when the block ends well, and is removed when it does not.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with whole(folder / "a.txt") as partial:
    ...     _ = partial.write_text("all of it")
    >>> [file.name for file in folder.iterdir()]
    ['a.txt']
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():  # a pipe or a device such as /dev/null is written to, never replaced
        yield final
        return
    partial = final.with_name(f".{final.name}.{uuid4().hex[:8]}{PARTIAL}")
    try:
        yield partial
        os.replace(partial, final)
    except OSError as problem:
        if problem.filename is not None and Path(problem.filename) == partial:
            problem.filename = str(path)  # the caller never heard of the other
        raise
    finally:
        partial.unlink(missing_ok=True)
