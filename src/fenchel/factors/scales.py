r"""Reduction of the range of scores whose sizes differ by many orders of magnitude; the solution stays the same.

A score that is larger than the sum of all smaller ones decides before them, however much larger it is, so it can be
reduced. Several such scores of similar size are reduced together. The factor ``DOMINANT`` is a margin for relaxations:
their vertices differ by a half or a third of a variable, not by less than ``1 / DOMINANT``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

DOMINANT = 1e3
"""The smallest ratio of a score to the sum of all smaller ones at which it decides before them."""

TOO_WIDE = 1e6
"""The smallest ratio of the largest score to that sum at which scores are reduced; below, they stay as they are."""

TARGET_RANGE = 1e4
"""That ratio after the reduction, shared among several jumps in size."""

Array = np.ndarray[Any, Any]


def compressed(entries: list[Tensor], floor: float) -> list[Tensor]:
    """Scores with the same solution and a smaller range of sizes.

    Args:
        entries: (batch, …) each, all scores of a problem; those that are not finite stay as they are.
        floor: a bound on the other terms of the objective.
    """
    flat = torch.cat([e.flatten(1) for e in entries], 1)
    sizes = torch.where(flat.isfinite(), flat.abs(), 0.0)
    ordered = sizes.sort(1).values
    below = floor + torch.cat([torch.zeros_like(ordered[:, :1]), ordered[:, :-1].cumsum(1)], 1)
    dominant = (ordered > DOMINANT * below) & (below > 0) & (ordered[:, -1:] > TOO_WIDE * below)
    rows = dominant.any(1).nonzero().reshape(-1)
    if len(rows) == 0:
        return entries
    shrunk = sizes.clone()
    for row in rows.tolist():
        shrunk[row] = torch.from_numpy(_lowered(sizes[row].cpu().numpy(), floor)).to(shrunk)
    flat = torch.where(flat.isfinite(), flat.sign() * shrunk, flat)
    parts = torch.split(flat, [e[0].numel() for e in entries], 1)
    return [part.reshape(e.shape) for part, e in zip(parts, entries, strict=True)]


def _lowered(sizes: Array, floor: float) -> Array:
    """Sizes ≥ 0 with every jump of a ratio above ``DOMINANT`` reduced as far as is allowed."""
    order = np.argsort(sizes, kind="stable")
    ordered = sizes[order]
    below = floor + np.concatenate([[0.0], np.cumsum(ordered[:-1])])
    jumps = np.flatnonzero((ordered > DOMINANT * below) & (below > 0))
    ratio = max(TARGET_RANGE ** (1 / len(jumps)), 100.0)
    result = ordered.copy()
    total = below[jumps[0]]
    for first, last in zip(jumps, [*jumps[1:], len(ordered)], strict=True):
        cluster = ordered[first:last]
        beyond = cluster - cluster[0]
        # Differences are kept where sizes are nearly equal, ratios elsewhere.
        least = ratio * (total + beyond.sum())
        lowered = beyond + least if least < cluster[0] else cluster * min(1.0, ratio * total / cluster[0])
        result[first:last] = lowered
        total += lowered.sum()
    back = np.empty_like(result)
    back[order] = result
    return back
