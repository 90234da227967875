"""Factor: a set of variables with what they may be together, and how to find the best of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fenchel.factors.variables import Variables, joined

COLD = 1e6
"""The inverse temperature at which a quadratic program stands in for a linear one."""


class Memory:
    """What a group of factors keeps between the rounds of one solution, to begin the next with."""

    def qp(self, rows: Tensor, theta: Tensor, *tensors: Tensor) -> Tensor:
        """``Factor.qp`` for some rows of the batch."""
        raise NotImplementedError

    def adopt(self, other: Memory) -> None:
        """Begin with what another memory has, if its factors are like these."""
        raise NotImplementedError

    def doubted(self) -> Tensor:
        """Rows of the batch in which an oracle was seen not to be exact."""
        raise NotImplementedError

    def error(self) -> Tensor:
        """A bound on the distance of the last answers from the exact ones, per row of the batch."""
        raise NotImplementedError


class Factor:
    r"""What some variables of a graph may be together: a polytope :math:`\mathcal M`, and a score of its own.

    .. math:: \operatorname{argmax}_{p \in \mathcal M} \; \langle \theta, p \rangle + h(p) - \tfrac12 \|p\|^2

    A factor of your own is a subclass that solves this one problem in ``qp``. The polytope's vertices have entries 0
    and 1; h is concave and piecewise linear: the best score, linear in ``scores``, of a mixture of vertices with
    marginals p. Zero, for a factor that only constrains. If what you have is a MAP oracle, write a
    :class:`~fenchel.structures.Structure` and use :class:`Structured` instead.

    Args:
        variables: what it is about; negated ones enter as 1 − u.
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
    """Whether each of ``scores`` counts at most about once in h, so that its size is comparable with the variables'."""

    least = 0
    """How many variables are on, whatever the choice: with fewer that are not forced off there is none."""

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
        """How many variables it ties."""
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
        """An object that solves ``qp`` as well, faster if the same rows come again; None if there is no such thing."""
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
