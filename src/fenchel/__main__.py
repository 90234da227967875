"""`python -m fenchel warmup`: compile every kernel now, so that no first call has to wait for it."""

from __future__ import annotations

import argparse

from fenchel._warmup import warmup
from fenchel.progress import bar


def main() -> None:
    """Read the command line, and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m fenchel", description=__doc__)
    parser.add_argument("command", choices=["warmup"], help="compile every kernel, or load it from the cache")
    parser.parse_args()
    with bar("kernels") as progress:
        warmth = warmup(progress)
    print(warmth)


if __name__ == "__main__":
    main()
