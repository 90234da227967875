"""`python -m fenchel warmup`: compile kernels now, so that the first calls already use them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from fenchel._warmup import DTYPES, room_names, warmup
from fenchel.progress import bar


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m fenchel", description=__doc__)
    parser.add_argument("command", choices=["warmup"], help="compile kernels, or load them from the cache")
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"{', '.join(room_names())}; all if none is named")
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    parser.add_argument("--dtype", choices=names, help="compile for this precision alone")
    given = parser.parse_args(arguments)
    dtypes = DTYPES if given.dtype is None else (getattr(torch, given.dtype),)
    try:
        with bar("kernels") as progress:
            warmth = warmup(*given.rooms, progress=progress, dtypes=dtypes)
    except ValueError as error:
        parser.error(str(error))
    print(warmth)


if __name__ == "__main__":
    main()
