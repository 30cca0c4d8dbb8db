"""`clearhead` and `python -m clearhead` are the command line."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        from clearhead.cli import main as run

        run()
    except KeyboardInterrupt:  # before the command line itself was there to notice
        print("clearhead: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
