"""Entry point of `clearhead` and `python -m clearhead`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    try:
        from clearhead.cli import main as run

        run()
    except KeyboardInterrupt:  # raised during imports, before the command line can handle it
        print("clearhead: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
