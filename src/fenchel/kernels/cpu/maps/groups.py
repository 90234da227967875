"""What the kernels of the grouping maps share: the threshold of groups, and rows laid out for them.

An entry far below the best has no mass, whatever the penalty does, and then it takes part as a neighbour of height zero
only: rows fall apart into short runs of candidates, and the rest is not looked at twice. All arithmetic is in double
precision. Masked entries, −inf in the scores, do not part their neighbours in a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.maps.simplex import as_rows, each, like
from fenchel.kernels.cpu.threads import over_rows

MORE = 1.0 + 1e-6
"""A factor on bounds: a few candidates too many do no harm."""


def map_rows(rows: Any, z: Tensor, strength: float | Tensor) -> Tensor:
    """Run a kernel of scores and strengths on all rows."""
    x, out = as_rows(z), like(z)
    over_rows(rows, len(x), x.size, x, each(strength, len(x)), as_rows(out))
    return out


def product_of_rows(rows: Any, v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor) -> Tensor:
    """Run a kernel of a result, scores, strengths and a direction on all rows."""
    q, out = as_rows(p), like(p)
    over_rows(rows, len(q), q.size, q, as_rows(z), each(strength, len(q)), as_rows(v), as_rows(out))
    return out


@kernel
def unmasked(x: Any, masked: bool) -> int:
    """How many entries of a row are not masked."""
    n: int = x.size
    kept = n
    if masked:
        for i in range(n):
            kept -= 1 if x[i] == -np.inf else 0
    return kept


@kernel
def threshold(values: Any, sizes: Any, count: int) -> float:
    """τ with Σ size·[value − τ]₊ = 1, from below: the support shrinks until it stays."""
    tau, before = -np.inf, np.inf
    while True:
        size, total = 0.0, 0.0
        for g in range(count):
            on = 1.0 if values[g] > tau else 0.0
            size += on * sizes[g]
            total += on * sizes[g] * values[g]
        if size >= before:  # rounding may let one in again
            return tau
        before = size
        tau = (total - 1.0) / size
