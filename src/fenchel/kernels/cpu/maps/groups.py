"""What the kernels of fusedmax, oscarmax and tvmax share: the layout of rows, and the threshold of groups.

An entry far enough below the largest has no mass, whatever the penalty is, and acts as a neighbour of value zero only.
The kernels therefore work on short runs of candidates and read the other entries once. All arithmetic is in double
precision. Masked entries, −inf in the scores, are skipped: the entries on both sides of them are neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import helper
from fenchel.kernels.cpu.maps.places import extremes, list_nonzero
from fenchel.kernels.cpu.maps.simplex import as_rows, each, like
from fenchel.kernels.cpu.threads import over_rows

MORE = 1.0 + 1e-6
"""A factor on bounds, above their rounding error: a few candidates too many do no harm."""


_NO_CLASSES = np.empty(0, np.int64)


def map_rows(rows: Any, z: Tensor, strength: float | Tensor, *layout: int, work: int = 1) -> Tensor:
    """Run a kernel of scores (…, n) and strengths on all rows, and return its result (…, n).

    ``work`` is how many operations an entry takes, as an estimate.
    """
    x, out = as_rows(z), like(z)
    nothing = _NO_CLASSES, np.empty(0, x.dtype), np.empty(0)
    over_rows(rows, len(x), work * x.size, x, each(strength, len(x)), *layout, as_rows(out), *nothing)
    return out


def loss_of_rows(
    rows: Any, z: Tensor, index: Tensor, residual: float, strength: float | Tensor, *layout: int, work: int = 1
) -> tuple[Tensor, Tensor]:
    """Run such a kernel for the losses of classes, (…), and residual·(p − y), (…, n): see the table of kernels."""
    x, out = as_rows(z), like(z)
    loss = torch.empty(z.shape[:-1], dtype=z.dtype, device="cpu")
    classes = index.contiguous().numpy().reshape(-1), loss.numpy().reshape(-1), np.array([residual], np.float64)
    over_rows(rows, len(x), work * x.size, x, each(strength, len(x)), *layout, as_rows(out), *classes)
    return loss, out


def product_of_rows(rows: Any, v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor) -> Tensor:
    """Run a kernel of a result p, scores z, strengths and a direction v on all rows, and return its product (…, n)."""
    q, out = as_rows(p), like(p)
    over_rows(rows, len(q), q.size, q, as_rows(z), each(strength, len(q)), as_rows(v), as_rows(out))
    return out


@helper
def begin_row(x: Any, out: Any) -> tuple[bool, Any, Any]:
    """Set ``out`` to zero, or to NaN if the row x has NaN or +inf.

    Returns whether the row has an entry to choose, its largest and its smallest score.
    """
    top, least, bad = extremes(x, 0, x.size)
    out[:] = np.nan if bad else 0
    return not bad and top > -np.inf, top, least


@helper
def unmasked(x: Any, masked: bool) -> int:
    """Count the unmasked entries of a row; ``masked`` tells whether any is masked."""
    n: int = x.size
    kept = n
    if masked:
        for i in range(n):
            kept -= 1 if x[i] == -np.inf else 0
    return kept


@helper
def finish_class_loss(
    row: int, x: Any, out: Any, maximum: float, top: Any, at_class: float, index: Any, losses: Any, rate: Any
) -> None:
    """The loss of one row, and rate·(p − y) in place of its p.

    ``maximum`` is max_Ω less the largest score, NaN where p is, and ``at_class`` is Ω at the class. The class of a row
    may be left out (negative) or impossible (a score of −inf).
    """
    kind = x.dtype.type
    label = index[row]
    if label < 0:
        losses[row] = 0
        out[:] = 0
        return
    score = x[label]
    if maximum != maximum:
        losses[row] = np.nan
        return
    if score == -np.inf:
        losses[row] = np.inf
    else:
        loss = maximum + (np.float64(top) - np.float64(score)) + at_class
        losses[row] = 0.0 if out[label] == 1 else max(loss, 0.0)  # exactly 0, where its parts may cancel to an ulp more
        out[label] -= kind(1)
    if rate[0] != 1.0:
        factor = kind(rate[0])
        for i in range(out.size):
            out[i] *= factor


@helper
def maximum_of(values: Any, sizes: Any, count: int, best: float, tau: float) -> float:
    """max_Ω from groups, the threshold of their values, and what was taken off these.

    The penalty is homogeneous: λ·penalty(p) = ⟨p, z⟩ − ‖p‖² − τ, so that max_Ω = ½(1 + ‖p‖²) + τ.
    """
    squares = 0.0
    for g in range(count):
        p = max(values[g] - tau, 0.0)
        squares += sizes[g] * p * p
    return 0.5 * (1.0 + squares) + tau + best


@helper
def subtract_largest(values: Any, count: int) -> float:
    """Subtract the largest of ``count`` values from all: beside a huge one, probabilities would be rounded away."""
    best = -np.inf
    for g in range(count):
        best = max(best, values[g])
    for g in range(count):
        values[g] -= best
    return best


@helper
def threshold(values: Any, sizes: Any, count: int) -> float:
    """Find τ with Σ size·[value − τ]₊ = 1 over ``count`` groups, from below: the support shrinks until it stays."""
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


@helper
def begin_product(p: Any, v: Any, index: Any, out: Any) -> tuple[int, float]:
    """Find the support of one row p and the mean of v over it; set ``out`` to zero, or to NaN if p is NaN.

    Returns how many places of the support are in ``index``, 0 if p is NaN, and the mean.
    """
    count = list_nonzero(p, 0, p.size, index)
    bad = count > 0 and p[index[0]] != p[index[0]]
    out[:] = np.nan if bad else 0
    if count == 0 or bad:
        return 0, 0.0
    total = 0.0
    for k in range(count):
        total += v[index[k]]
    return count, total / count
