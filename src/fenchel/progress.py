"""Progress of long computations: the type of the function that they call, and a progress bar for a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import Protocol, TextIO

__all__ = ["Progress", "bar", "silent"]

WIDTH = 20
"""The width of a bar, in characters."""


class Progress(Protocol):
    """A function that is called with the finished fraction, in [0, 1], and a note about what is being done.

    Example:
        >>> def progress(fraction, note=""):
        ...     print(f"{fraction:.0%} {note}")
        >>> def work(progress: Progress = silent) -> None:
        ...     progress(0.5, "epoch 1")
        >>> work(progress)
        50% epoch 1
    """

    def __call__(self, fraction: float, note: str = "") -> None: ...


def silent(fraction: float, note: str = "") -> None:
    """Do nothing: the default where progress is not shown.

    Example:
        >>> silent(0.5, "epoch 1")
    """


@contextmanager
def bar(title: str = "", stream: TextIO | None = None) -> Iterator[Progress]:
    """A context whose function draws progress on one line of a terminal, and elsewhere prints one line per 10 %.

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
