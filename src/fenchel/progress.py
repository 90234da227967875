"""Progress of long work: the function that it calls, and a bar for a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import Protocol, TextIO

__all__ = ["Progress", "bar", "silent"]

WIDTH = 20
"""Characters of a bar."""


class Progress(Protocol):
    """Told how far a work is: a fraction in [0, 1], and what it is doing, or how it goes."""

    def __call__(self, fraction: float, note: str = "") -> None: ...


def silent(fraction: float, note: str = "") -> None:
    """Nobody listens."""


@contextmanager
def bar(title: str = "", stream: TextIO | None = None) -> Iterator[Progress]:
    """A function that draws progress on one line of a terminal; elsewhere it writes one line per tenth of the work.

    Args:
        title: written before the bar.
        stream: where to write; standard error by default.

    Example:
        >>> with bar("squares", sys.stdout) as progress:
        ...     for x in range(3):
        ...         progress(x / 2, f"x = {x}")
        squares   0%   0:00  x = 0
        squares  50%   0:00  x = 1
        squares 100%   0:00  x = 2
    """
    out = sys.stderr if stream is None else stream
    terminal, start, tenth = out.isatty(), time.monotonic(), -1

    def progress(fraction: float, note: str = "") -> None:
        nonlocal tenth
        minutes, seconds = divmod(int(time.monotonic() - start), 60)
        if terminal:
            full = round(WIDTH * fraction)
            line = f"{title} {'█' * full}{'░' * (WIDTH - full)} {minutes:3}:{seconds:02}  {note}"
            out.write(f"\r{line[: get_terminal_size().columns - 1]}\x1b[K")
        elif int(10 * fraction) > tenth:
            tenth = int(10 * fraction)
            out.write(f"{title} {fraction:4.0%} {minutes:3}:{seconds:02}  {note}".strip() + "\n")
        out.flush()

    try:
        yield progress
    finally:
        if terminal:
            out.write("\n")
