"""What certificates ask of an Ω: its temperature, and the lead that copies of a pattern need."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel.regularizers.base import Regularizer


def base(omega: Regularizer) -> Regularizer:
    """Ω of γΩ, in its simplest form."""
    return omega.canonical()[0]


def temperature(omega: Regularizer) -> float | Tensor:
    """γ of γΩ."""
    return omega.canonical()[1]


def number(value: float | Tensor) -> float:
    """A parameter of Ω, which must be one for all queries, as a number."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"omega of a memory must have one value for all queries, got parameters of shape {tuple(value.shape)}"
            )
        return float(value.detach())
    return value


def margin(omega: Regularizer, copies: Tensor) -> Tensor | None:
    """The lead that some copies of one pattern need to share all weight, one value each; None if it is not known.

    For one copy that is Ω's margin. Copies have equal scores and share evenly: what is a lead of c scores of zero below
    them has no weight, and that is the level ``omega.line`` of these. Inf where no lead is enough.
    """
    inner, gamma = omega.canonical()
    mass = inner.mass(2)
    if mass is None or float(mass) != 1:
        return None
    if inner.line(torch.zeros(1, device="cpu")) is None:
        known = inner.margin is not None and number(inner.margin) == math.inf
        return torch.full_like(copies, math.inf, dtype=torch.float64) if known else None
    counts, each = torch.unique(copies, return_inverse=True)
    leads = [_level(inner, int(count)) for count in counts]
    return -number(gamma) * torch.tensor(leads, dtype=torch.float64, device="cpu")[each]


def _level(omega: Regularizer, count: int) -> float:
    line = omega.line(torch.zeros(count, dtype=torch.float64, device="cpu"))
    assert line is not None
    return float(line)
