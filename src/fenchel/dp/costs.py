"""Costs of aligning the points of two series: distances between all pairs of points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fenchel import kernels
from fenchel._checks import check_one_of, kind
from fenchel._torch import apply_function, tracks_forward

Cost = Callable[[Tensor, Tensor], Tensor]
"""A function of series (B, N, D) and (B, M, D) that returns the costs of all pairs of points, (B, N, M)."""


def cost_function(cost: str | Cost) -> Cost:
    """The cost with a name, or a user's function with a check of the shape that it returns."""
    if isinstance(cost, str):
        return COSTS[check_one_of(cost, "cost", *COSTS)]
    if not callable(cost):
        raise TypeError(f"cost must be a function or one of {', '.join(COSTS)}, got {kind(cost)}")

    def checked(x: Tensor, y: Tensor) -> Tensor:
        costs = cost(x, y)
        shape = (len(x), x.shape[1], y.shape[1])
        if not isinstance(costs, Tensor) or costs.shape != shape:
            found = tuple(costs.shape) if isinstance(costs, Tensor) else kind(costs)
            raise ValueError(f"cost must return a tensor of shape (B, N, M), here {shape}, got {found}")
        return costs

    return checked


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Squared Euclidean distances between all points, (B, N, M)."""
    kernel = kernels.find("distances", "squared_euclidean", (), x, y)
    if kernel is not None and x.dtype == y.dtype and not tracks_forward():
        distances: Tensor = apply_function(_Distances, kernel, x, y)
        return distances
    finite, gaps = _differences(x, y)  # not by products, which cancel where series meet
    infinite = torch.where(finite, 0.0, (x.unsqueeze(2) - y.unsqueeze(1)).detach().square().sum(-1))
    return gaps.square().sum(-1) + infinite


def _euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean distances; the gradient is 0 where two points are equal, as it does not exist there."""
    square = squared_distances(x, y)
    apart = square > 0
    return torch.where(apart, torch.where(apart, square, 1.0).sqrt(), square)


def _manhattan(x: Tensor, y: Tensor) -> Tensor:
    """Sums of absolute differences."""
    return (x.unsqueeze(2) - y.unsqueeze(1)).abs().sum(-1)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    """1 − the cosine of the angle between two points, from 0 to 2; 1 for a point at the origin."""
    return 1.0 - functional.normalize(x, dim=-1) @ functional.normalize(y, dim=-1).mT


COSTS: dict[str, Cost] = {
    "sqeuclidean": squared_distances,
    "euclidean": _euclidean,
    "l1": _manhattan,
    "cosine": _cosine,
}
"""Costs by name; those of ``scipy.spatial.distance`` that they are called after, but for "l1" (cityblock)."""


def _differences(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Which pairs of points have finite differences, (B, N, M), and the differences, (B, N, M, D), 0 for the others."""
    gaps = x.unsqueeze(2) - y.unsqueeze(1)
    finite = gaps.isfinite().all(-1)
    return finite, torch.nan_to_num(gaps, 0.0, 0.0, 0.0) * finite.unsqueeze(-1)


class _Distances(torch.autograd.Function):
    """Squared distances between all points, (B, N, M), by a kernel."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        distances: Tensor = kernel(x, y)
        return distances

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[None, Tensor, Tensor]:
        x, y = ctx.saved_tensors
        kernel = kernels.find("distances_backward", "squared_euclidean", (), weight, x, y)
        if torch.is_grad_enabled() or kernel is None:
            each = 2.0 * weight.unsqueeze(-1) * _differences(x, y)[1]
            return None, each.sum(2), -each.sum(1)
        return None, *kernel(weight, x, y)
