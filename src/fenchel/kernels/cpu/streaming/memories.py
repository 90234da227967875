"""A pass over stored patterns: what may still be in the support of a query, out of a chunk of scores."""

from __future__ import annotations

from typing import Any

from fenchel.kernels.cpu.compiler import kernel

STRIP = 64
"""Scores that are looked at together: most strips have nothing to keep."""


@kernel
def collect(
    first: int, last: int, scores: Any, floors: Any, begin: Any, counts: Any, found: Any, place: Any, score: Any
) -> None:
    """Append scores that are not below a row's floor to its list of ``counts`` entries, as far as there is room.

    ``found`` is how long the list would be. NaN is kept, for whoever looks at the list to find it. ``begin[0]`` is the
    place of the first column.
    """
    width, room = scores.shape[1], place.shape[1]
    for row in range(first, last):
        floor = floors[row]
        n = counts[row]
        left = 0
        while left < width:
            right = min(left + STRIP, width)
            hits = 0
            for j in range(left, right):
                hits += 0 if scores[row, j] < floor else 1
            if hits > 0:
                for j in range(left, right):
                    s = scores[row, j]
                    if not s < floor:
                        if n < room:
                            place[row, n] = begin[0] + j
                            score[row, n] = s
                        n += 1
            left = right
        found[row] = n
