"""LPSparseMAP: factor graphs as a regularizer, so that attention and memories can choose by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fenchel._checks import check_count, check_floats, check_like, check_number, kind
from fenchel._torch import concrete
from fenchel.factors.graph import FactorGraph
from fenchel.factors.variables import Variables
from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.rowmap import finish_loss
from fenchel.regularizers.rows import apply_mask


class LPSparseMAP(Regularizer):
    r"""The squared norm over the local polytope of a factor graph, as a regularizer.

    .. math:: \operatorname{argmax}_{\mu \in \mathcal L} \; \langle s, \mu \rangle - \Omega(\mu), \qquad
        \Omega(\mu) = \tfrac12 \|\mu\|^2 - \sum_f h_f(\mu_f)

    :math:`\mathcal L` and the scores :math:`h_f` of the factors are those of :class:`fenchel.FactorGraph`, which solves
    the problem anew in each call. Choices need not sum to the same number (``mass`` is None), and no margin is known.
    A variable whose entry is masked is 0; a row in which all are masked gives zeros. Runs eagerly, and is slow beside
    the closed forms: a few dozen rounds of ADMM unless no two factors share a variable.

    Patterns of a memory, or keys of an attention, are one dimension of variables. Factors over more than one dimension
    take them rearranged: ``u[torch.arange(6).reshape(2, 3)]`` is a table of two rows of six variables.

    Args:
        build: a function ``build(graph, u)`` that adds factors over the variables u to a graph. u has the shape of the
            last ``dims`` dimensions of the scores. Tensors that it reads, such as scores of factors, get gradients.
        dims: over how many last dimensions of the scores a choice is made.
        tol: as in :meth:`fenchel.FactorGraph.solve`.
        max_iter: as there.

    Example:
        At most two of six, and never two neighbours:

        >>> import torch, fenchel
        >>> from fenchel.factors import AtMostOne, Budget
        >>> def build(graph, u):
        ...     graph.add(Budget(u, 2))
        ...     for i in range(len(u) - 1):
        ...         graph.add(AtMostOne(u[i : i + 2]))
        >>> omega = fenchel.LPSparseMAP(build)
        >>> omega.argmax(torch.tensor([1.0, 0.9, 0.2, 0.8, -1.0, 0.3]))
        tensor([0.5500, 0.4500, 0.1000, 0.7000, 0.0000, 0.2000])

        A memory whose six patterns are a table, of which one per column is recalled, in different rows:

        >>> from fenchel.factors import Structured
        >>> from fenchel.structures import Matching
        >>> table = torch.arange(6).reshape(3, 2)
        >>> one_per_column = fenchel.LPSparseMAP(lambda graph, u: graph.add(Structured(u[table], Matching())))
        >>> memory = fenchel.hopfield.Memory(torch.eye(6), one_per_column, beta=4.0)
        >>> memory.weights(torch.tensor([1.0, 0.9, 0.2, 0.8, 0.0, 0.1])).reshape(3, 2)
        tensor([[1., 0.],
                [0., 1.],
                [0., 0.]])

    References: Niculae & Martins (2020); Santos et al. (2024), section 4.2 and appendix C.
    """

    ordered = True

    def __init__(
        self, build: Callable[[FactorGraph, Variables], Any], dims: int = 1, *, tol: float = 1e-9, max_iter: int = 5000
    ) -> None:
        super().__init__()
        if not callable(build):
            raise TypeError(f"build must be callable, a function of a graph and variables, got {type(build).__name__}")
        self.build = build
        self.event_dim = check_count(dims, "dims")
        self.tol = check_number(tol, "tol", 0)
        self.max_iter = check_count(max_iter, "max_iter")

    # -- what an engine may ask ------------------------------------------------------------------------

    @property
    def parameter_shape(self) -> torch.Size | None:
        """None: ``build`` may read any tensors."""
        return None

    def mass(self, count: int | Tensor) -> None:
        """None: what factors allow need not sum to one number."""
        return

    def dims(self, scores: Tensor, dim: Any) -> tuple[int, ...]:
        check_floats(scores, "scores")
        if dim not in (-1, scores.dim() - 1):
            raise ValueError(f"dim must be left out, LPSparseMAP chooses over the last {self.event_dim}; got {dim}")
        if scores.dim() < self.event_dim:
            raise ValueError(
                f"scores must have at least {self.event_dim} dimensions, dims of LPSparseMAP, got shape "
                f"{tuple(scores.shape)}"
            )
        return tuple(range(scores.dim() - self.event_dim, scores.dim()))

    # -- what it does ----------------------------------------------------------------------------------

    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        """½‖p‖², one value per batch entry; an error if factors have scores of their own."""
        dims = self.dims(p, dim)
        self._refuse_scores(p, "omega(p)")
        return (p.double().square().sum(dims) / 2).to(p.dtype)

    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The values of the variables, of the shape of ``scores``."""
        return self._solve(scores, dim, mask)[0].to(scores.dtype)

    def max(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """⟨s, p⟩ − ½‖p‖² at the choice p; −inf where all are masked, an error if factors have scores of their own."""
        self._refuse_scores(scores, "max")
        p, theta, free = self._solve(scores, dim, mask)
        dims = self.dims(scores, dim)
        value = (p * theta - p.square() / 2).sum(dims)
        return torch.where(free.flatten(-len(dims)).any(-1), value, -torch.inf).to(scores.dtype)

    def loss(self, scores: Tensor, target: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The Fenchel-Young loss of a target that the factors allow, one value per batch entry.

        Never negative, and zero exactly where ``argmax(scores)`` is the target; +inf if that is masked. The gradient is
        ``argmax(scores) - target``. An error if factors have scores of their own.
        """
        dims = self.dims(scores, dim)
        self._refuse_scores(scores, "the loss")
        y = self.check_target(target, scores, dim, mask).to(device=scores.device, dtype=torch.float64)
        p, theta, free = self._solve(scores, dim, mask)
        moved = p - y
        # Differences first: with large scores the two sides of the loss would cancel.
        value = (moved * (theta - (p + y) / 2)).sum(dims)
        at_target = (moved.detach() == 0).flatten(-len(dims)).all(-1)
        impossible = ((y != 0) & ~free).flatten(-len(dims)).any(-1)
        return finish_loss(value, torch.zeros_like(value), impossible, at_target=at_target).to(scores.dtype)

    # -- arguments of losses ---------------------------------------------------------------------------

    def check_target(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        """Check a target: values of the variables, of the shape of scores, that the factors allow."""
        if not isinstance(target, Tensor) or not target.is_floating_point():
            raise TypeError(f"target must be a floating-point tensor of values of the variables, got {kind(target)}")
        target = check_like(target, "target", scores)
        if concrete(target, scores):
            with torch.no_grad():
                nearest = self._solve(target.detach(), dim, None)[0]  # Ω is ½‖p‖²: this is the projection
                off = (nearest - target.double()).abs().max() if target.numel() else torch.zeros(())
            if not bool(off <= 1e-5):
                raise ValueError(
                    f"target must be values that the factors allow; the nearest such values differ by {off.item():.2g}"
                )
        return target

    def check_classes(self, target: Tensor, scores: Tensor, dim: int, ignored: int | None = None) -> Tensor:
        raise ValueError("target must be floating-point values of the variables; class indices do not name any")

    def balance(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        raise ValueError("label_smoothing goes with distributions; a factor graph has no even share to smooth with")

    def extra_repr(self) -> str:
        return f"{getattr(self.build, '__name__', self.build)}, dims={self.event_dim}"

    # -- what they are made of -------------------------------------------------------------------------

    def _graph(self, scores: Tensor) -> tuple[FactorGraph, Variables]:
        graph = FactorGraph()
        u = graph.variables(scores, batch_dims=scores.dim() - self.event_dim)
        self.build(graph, u)
        return graph, u

    def _solve(self, scores: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The choice in double precision, the scores with 0 where they are masked, and which are not."""
        dims = self.dims(scores, dim)
        masked = apply_mask(scores, mask).double()
        free = masked != -torch.inf
        theta = torch.where(free, masked, 0.0)
        if scores.numel() == 0:
            return torch.zeros_like(theta), theta, free
        some = free.flatten(-len(dims)).any(-1).reshape(*scores.shape[: -len(dims)], *(1,) * len(dims))
        graph, u = self._graph(torch.where(free | ~some, theta, -torch.inf))
        graph.solve(tol=self.tol, max_iter=self.max_iter)
        return torch.where(some, u.value, 0.0), theta, free

    def _refuse_scores(self, scores: Tensor, what: str) -> None:
        with torch.no_grad():
            graph, _ = self._graph(torch.zeros_like(scores))
        if any(factor.scores for factor in graph.factors):
            raise ValueError(
                f"{what} is not known where factors carry scores of their own: what these add depends on how a value "
                "is mixed. argmax works; for one structure SparseMAP(structure) includes its higher-order scores"
            )
