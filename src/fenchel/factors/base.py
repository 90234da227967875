"""Factor: a constraint on, or a score of, some variables of a graph, and the projection that it needs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fenchel.factors.variables import Variables, joined

COLD = 1e6
"""The inverse temperature at which a quadratic program stands in for a linear one."""


class Memory:
    """State that a group of factors keeps from one call of ``qp`` to the next, as a warm start."""

    def qp(self, rows: Tensor, theta: Tensor, *tensors: Tensor) -> Tensor:
        """``Factor.qp`` for some rows of the batch."""
        raise NotImplementedError

    def adopt(self, other: Memory) -> None:
        """Take over the state of another memory, if its factors are of the same kind."""
        raise NotImplementedError

    def doubted(self) -> Tensor:
        """Which rows of the batch have met an oracle that was not exact, boolean (batch,)."""
        raise NotImplementedError

    def error(self) -> Tensor:
        """A bound on the distance of the last answers from the exact ones, per row of the batch."""
        raise NotImplementedError


class Factor:
    r"""The allowed joint values of some variables of a graph: a polytope :math:`\mathcal M`, and a score h on it.

    .. math:: \operatorname{argmax}_{p \in \mathcal M} \; \langle \theta, p \rangle + h(p) - \tfrac12 \|p\|^2

    A factor of your own is a subclass that solves this one problem in ``qp``. The polytope's vertices have entries 0
    and 1; h is concave and piecewise linear: the best score, linear in ``scores``, of a mixture of vertices with
    marginals p. Zero, for a factor that only constrains. If what you have is a MAP oracle, write a
    :class:`~fenchel.structures.Structure` and use :class:`Structured` instead.

    Args:
        variables: those that it constrains; negated ones enter as 1 − u.
        scores: higher-order scores, floating-point tensors, differentiable; the graph's batch dimensions in front, or
            none of them.
        own: for each of ``scores``, how many dimensions follow the batch dimensions.

    Example:
        At most one of two neighbours, written by hand (``AtMostOne`` has it built in):

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
    """Whether ``qp`` and ``support`` take scores of −inf, for variables that must be off."""

    counted = False
    """Whether each entry of ``scores`` enters h with a weight of about 1 at most, as the scores of variables do."""

    least = 0
    """How many variables are on in every vertex: if fewer may be on, no vertex is allowed."""

    def __init__(
        self,
        variables: Variables | Sequence[Variables],
        scores: Sequence[Tensor] = (),
        own: Sequence[int] = (),
    ) -> None:
        literals = joined(variables)
        self.graph = literals.graph
        self.index = literals.index.reshape(1, -1)
        self.negated = literals.negated.reshape(1, -1)
        self.own = tuple(own)
        self.scores = tuple(s.unsqueeze(s.dim() - k) for s, k in zip(scores, self.own, strict=True))
        self.constants: tuple[Tensor, ...] = ()

    @property
    def size(self) -> int:
        """The number of variables."""
        return int(self.index.shape[1])

    @property
    def kind(self) -> Hashable:
        """Factors of one kind and size are solved together, in one call of ``qp``: by default none is."""
        return id(self)

    def qp(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        r"""Solve the quadratic program, in torch operations or with a derivative of its own.

        Args:
            theta: (batch, factors, size), in float64.
            tensors: the factors' ``scores``, then their ``constants``: (batch or 1, factors, …).

        Returns:
            p, of the shape of ``theta``, differentiable in it and in the scores, each row by itself.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define qp(theta, *tensors), the projection of its scores; for a MAP oracle "
            "use Structured(variables, structure)"
        )

    def memory(self, batch: int, factors: int) -> Memory | None:
        """An object that solves ``qp`` with a warm start for rows that come again; None if there is none."""
        return None

    def support(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        r"""An upper bound, tight or nearly so, of :math:`\max_{p \in \mathcal M} \langle \theta, p \rangle`, per row.

        Proves that constraints contradict each other. Given ``tensors`` with scores that are zero, or −inf where they
        are.
        """
        p = self.qp(COLD * theta, *tensors)
        return torch.where(theta == -torch.inf, 0.0, theta * p).sum(-1) + theta.shape[-1] / (2 * COLD)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index.size} variables)"
