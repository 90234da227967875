"""Factor: the base class of constraints on, and scores of, some variables of a graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fenchel.factors.variables import Variables, joined

SHARPNESS = 1e6
"""Scores are multiplied by this where a quadratic program is solved in place of a linear one."""


class WarmStart:
    """State that a group of factors keeps between calls of ``qp``, so that the next call starts near its solution."""

    def qp(self, rows: Tensor, theta: Tensor, *tensors: Tensor) -> Tensor:
        """``Factor.qp`` for some rows of the batch."""
        raise NotImplementedError

    def adopt(self, other: WarmStart) -> None:
        """Take over the state of another warm start, if its factors are of the same kind."""
        raise NotImplementedError

    def inexact(self) -> Tensor:
        """The rows of the batch in which an oracle was found not to be exact, boolean (batch,)."""
        raise NotImplementedError

    def error(self) -> Tensor:
        """An upper bound on the distance between the last solutions and the exact ones, (batch,)."""
        raise NotImplementedError


class Factor:
    r"""A set of allowed joint values of some variables, a polytope :math:`\mathcal M`, and a score h on it.

    .. math:: \operatorname{argmax}_{p \in \mathcal M} \; \langle \theta, p \rangle + h(p) - \tfrac12 \|p\|^2

    To write a factor, subclass this and solve the problem above in ``qp``. The vertices of the polytope have entries 0
    and 1. h(p) is the best score, linear in ``scores``, of a mixture of vertices with marginals p; it is concave and
    piecewise linear, and zero for a factor that only constrains. For a set with a MAP oracle, write a
    :class:`~fenchel.structures.Structure` and use :class:`Structured` instead.

    Args:
        variables: the variables of the factor; a negated variable u enters as 1 − u.
        scores: higher-order scores, floating-point tensors, differentiable; with the graph's batch dimensions in front,
            or with none.
        event_dims: for each of ``scores``, the number of dimensions that are not batch dimensions.

    Example:
        At most one of two neighbours is on (which ``AtMostOne`` does too):

        >>> import torch, fenchel
        >>> from fenchel.factors import Factor
        >>> class NotBoth(Factor):
        ...     def qp(self, theta):
        ...         p = theta.clamp(0, 1)
        ...         excess = (p.sum(-1, keepdim=True) > 1) * 1.0
        ...         return p + excess * (fenchel.sparsemax(theta) - p)
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([0.9, 0.8, 0.4]))
        >>> graph.add(NotBoth(u[:2]))
        >>> graph.add(NotBoth(u[1:]))
        >>> solution = graph.solve()
        >>> u.value
        tensor([0.5500, 0.4500, 0.4000])
    """

    masks = False
    """Whether ``qp`` and ``support`` take scores of −inf for variables that must be off."""

    unit_weights = False
    """Whether each entry of ``scores`` is multiplied by at most about 1 in h, as the scores of variables are."""

    least = 0
    """The smallest number of variables that are on in a vertex; if fewer may be on, the factor is infeasible."""

    def __init__(
        self,
        variables: Variables | Sequence[Variables],
        *,
        scores: Sequence[Tensor] = (),
        event_dims: Sequence[int] = (),
    ) -> None:
        literals = joined(variables)
        self.graph = literals.graph
        self.index = literals.index.reshape(1, -1)
        self.negated = literals.negated.reshape(1, -1)
        self.event_dims = tuple(event_dims)
        self.scores = tuple(s.unsqueeze(s.dim() - k) for s, k in zip(scores, self.event_dims, strict=True))
        self.constants: tuple[Tensor, ...] = ()

    @property
    def size(self) -> int:
        """The number of variables."""
        return int(self.index.shape[1])

    @property
    def kind(self) -> Hashable:
        """A key: factors of equal kind and size are solved in one call of ``qp``. By default every factor differs."""
        return id(self)

    def qp(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        r"""Solve the quadratic program for rows of scores, in differentiable operations.

        Args:
            theta: (batch, factors, size), in float64.
            tensors: the factors' ``scores``, then their ``constants``: (batch or 1, factors, …).

        Returns:
            p, of the shape of ``theta``, differentiable in ``theta`` and in the scores. Rows are independent.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define qp(theta, *tensors), the projection of its scores; for a MAP oracle "
            "use Structured(variables, structure)"
        )

    def warm_start(self, batch: int, factors: int) -> WarmStart | None:
        """An object that solves ``qp`` for the same rows again and again, from its last solution; None by default."""
        return None

    def support(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        r"""An upper bound, tight or nearly so, of :math:`\max_{p \in \mathcal M} \langle \theta, p \rangle`, per row.

        It is used to prove that constraints contradict each other. The scores among ``tensors`` are 0, or −inf where
        the factor's own scores are −inf.
        """
        p = self.qp(SHARPNESS * theta, *tensors)
        return torch.where(theta == -torch.inf, 0.0, theta * p).sum(-1) + theta.shape[-1] / (2 * SHARPNESS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index.size} variables)"
