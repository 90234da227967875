"""Passes over stored patterns: the entries of a chunk of scores that may still be in the support of a query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.threads import over_rows

STRIP = 64
"""Scores that are compared together: most strips have nothing to keep."""


def collect(scores: Tensor, floor: Tensor, first: int, count: Tensor, place: Tensor, score: Tensor) -> Tensor:
    """Append to each row's list the scores that are not below its floor; return how long the lists would be, (R,).

    What does not fit into a list is left out. NaN is appended.

    Args:
        scores: (R, N).
        floor: (R, 1).
        first: the index of the first column.
        count: (R,), int64: how many entries each list has.
        place: (R, K), int64: the lists of indices, which entries are appended to.
        score: (R, K): the lists of scores.
    """
    found = torch.empty_like(count)
    given = scores.numpy(), floor.reshape(-1).numpy(), first, count.numpy()
    over_rows(_collect, len(scores), scores.numel(), *given, found.numpy(), place.numpy(), score.numpy())
    return found


@kernel
def _collect(
    first: int, last: int, scores: Any, floors: Any, begin: int, counts: Any, found: Any, place: Any, score: Any
) -> None:
    width, size = scores.shape[1], place.shape[1]
    for row in range(first, last):
        floor = floors[row]
        n = counts[row]
        left = 0
        while left < width:
            right = min(left + STRIP, width)
            kept = 0
            for j in range(left, right):
                kept += 0 if scores[row, j] < floor else 1
            if kept > 0:
                for j in range(left, right):
                    s = scores[row, j]
                    if not s < floor:
                        if n < size:
                            place[row, n] = begin + j
                            score[row, n] = s
                        n += 1
            left = right
        found[row] = n
