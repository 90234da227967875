"""`python -m fenchel warmup [rooms]`: compile kernels now, so that no first call has to wait for them."""

from __future__ import annotations

import argparse

from fenchel._warmup import calls, warmup
from fenchel.progress import bar


def main() -> None:
    """Read the command line and run its command."""
    parser = argparse.ArgumentParser(prog="python -m fenchel", description=__doc__)
    parser.add_argument("command", choices=["warmup"], help="compile kernels, or load them from the cache")
    parser.add_argument("rooms", nargs="*", help=f"whose kernels; all of them by default: {', '.join(calls())}")
    arguments = parser.parse_args()
    try:
        with bar("kernels") as progress:
            warmth = warmup(*arguments.rooms, progress=progress)
    except ValueError as error:
        parser.error(str(error))
    print(warmth)


if __name__ == "__main__":
    main()
