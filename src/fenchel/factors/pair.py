"""Pair: a score for two variables that are both on."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_real
from fenchel.factors.base import Factor
from fenchel.factors.projections import pair
from fenchel.factors.variables import Variables


class Pair(Factor):
    r"""A score for two variables that are both on; positive attracts them, negative separates them.

    .. math:: h(p_1, p_2) = \max_{p_{12}} \; s \, p_{12}, \quad
        \max(0, p_1 + p_2 - 1) \le p_{12} \le \min(p_1, p_2)

    Args:
        first: variables of any shape, the first of each pair.
        second: variables of the same shape, the second of each pair.
        score: a number, or a tensor that broadcasts to that shape, with the graph's batch dimensions in front if there
            are any; differentiable.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import Pair
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([1.0, 0.2, -0.5, 0.4]))
        >>> graph.add(Pair(u[:-1], u[1:], 0.5))
        >>> solution = graph.solve()
        >>> u.value
        tensor([1.0000, 0.7000, 0.4500, 0.4500])

    References: Martins et al. (2015), AD3, for the closed form.
    """

    unit_weights = True

    def __init__(self, first: Variables, second: Variables, score: float | Tensor) -> None:
        for name, half in (("first", first), ("second", second)):
            if not isinstance(half, Variables):
                raise TypeError(f"{name} must be variables of a graph, got {type(half).__name__}")
        if first.shape != second.shape:
            raise ValueError(f"first and second must have one shape, got {first.shape} and {second.shape}")
        super().__init__([first, second])
        self.index = np.stack([first.index.reshape(-1), second.index.reshape(-1)], -1)
        self.negated = np.stack([first.negated.reshape(-1), second.negated.reshape(-1)], -1)
        self.event_dims = (0,)
        self.scores = (_per_pair(score, first),)

    @property
    def kind(self) -> Hashable:
        return "pair"

    def qp(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        return pair(theta, tensors[0])

    def support(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        return theta.clamp_min(0).sum(-1)


def _per_pair(score: float | Tensor, variables: Variables) -> Tensor:
    """One score per pair: (…, pairs)."""
    score = check_real(score, "score")
    value = score if isinstance(score, Tensor) else torch.tensor(score, dtype=torch.float64, device="cpu")
    if bool((value.detach() == -torch.inf).any()):
        raise ValueError("score must not be −inf; to rule out both at once, add AtMostOne(first, second)")
    shape, batch = variables.shape, tuple(variables.graph.batch)
    lead = batch if value.dim() > len(shape) else ()
    try:
        return value.expand((*lead, *shape)).reshape(*lead, -1)
    except RuntimeError:
        raise ValueError(
            f"score must broadcast to the pairs, {shape}, or with batch dimensions to {batch + shape}, "
            f"got shape {tuple(value.shape)}"
        ) from None
