r"""Scores of very different size, brought together without changing what they choose.

A score so large that all smaller ones together cannot make up for it decides first, whatever its size: it may as well
be a little smaller. So may several of them, if they shrink together. In a relaxation one vertex differs from another by
halves or thirds, not by less than ``1 / STEEP`` of a variable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

STEEP = 1e3
"""How much larger than the sum of all smaller ones a score must be to decide before them."""

WIDE = 1e6
"""How much larger than these the largest score must be for anything to change: up to there all is solved as it is."""

RANGE = 1e4
"""How much larger it is in the end; shared among several such steps."""

Array = np.ndarray[Any, Any]


def tempered(entries: list[Tensor], floor: float) -> list[Tensor]:
    """Scores that choose as these do, and differ less in size.

    Args:
        entries: (batch, …) each, all scores of a problem; those that are not finite stay as they are.
        floor: what other terms of the objective can amount to.
    """
    flat = torch.cat([e.flatten(1) for e in entries], 1)
    sizes = torch.where(flat.isfinite(), flat.abs(), 0.0)
    ordered = sizes.sort(1).values
    below = floor + torch.cat([torch.zeros_like(ordered[:, :1]), ordered[:, :-1].cumsum(1)], 1)
    steep = (ordered > STEEP * below) & (below > 0) & (ordered[:, -1:] > WIDE * below)
    rows = steep.any(1).nonzero().reshape(-1)
    if len(rows) == 0:
        return entries
    shrunk = sizes.clone()
    for row in rows.tolist():
        shrunk[row] = torch.from_numpy(_lowered(sizes[row].cpu().numpy(), floor)).to(shrunk)
    flat = torch.where(flat.isfinite(), flat.sign() * shrunk, flat)
    parts = torch.split(flat, [e[0].numel() for e in entries], 1)
    return [part.reshape(e.shape) for part, e in zip(parts, entries, strict=True)]


def _lowered(sizes: Array, floor: float) -> Array:
    """Sizes, not negative, with every step that is steeper than ``STEEP`` made as small as it may be."""
    order = np.argsort(sizes, kind="stable")
    ordered = sizes[order]
    below = floor + np.concatenate([[0.0], np.cumsum(ordered[:-1])])
    steps = np.flatnonzero((ordered > STEEP * below) & (below > 0))
    ratio = max(RANGE ** (1 / len(steps)), 100.0)
    result = ordered.copy()
    total = below[steps[0]]
    for first, last in zip(steps, [*steps[1:], len(ordered)], strict=True):
        cluster = ordered[first:last]
        beyond = cluster - cluster[0]
        # All but equal: what they differ by stays as it is. Else their ratios do.
        least = ratio * (total + beyond.sum())
        lowered = beyond + least if least < cluster[0] else cluster * min(1.0, ratio * total / cluster[0])
        result[first:last] = lowered
        total += lowered.sum()
    back = np.empty_like(result)
    back[order] = result
    return back
