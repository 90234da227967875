"""FactorGraph: binary variables, the factors that constrain them, and the solution of their quadratic program."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_count, check_floats, check_number
from fenchel._torch import from_cpu, on_cpu, outside_graphs
from fenchel.factors.base import Factor
from fenchel.factors.consensus import Agreement, Group, Problem
from fenchel.factors.programs import Call, FinalState, Solve, check_start, linear_program
from fenchel.factors.variables import Variables


@dataclass(frozen=True)
class Solution:
    """The residual and the number of iterations of a solved graph; the values are in its variables.

    Args:
        residual: the largest disagreement of factors and variables, or of their multipliers, (…), on the CPU as all.
        iterations: rounds of ADMM, (…); 0 if no two factors share a variable.
        converged: whether the residual is within the tolerance, boolean (…).
        end: multipliers and active sets, for ``graph.solve(start=solution)``; None if no two factors share a variable.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import Xor
        >>> graph = fenchel.FactorGraph()
        >>> graph.add(Xor(graph.variables(torch.tensor([1.0, 0.6]))))
        >>> graph.solve()
        Solution(residual=0.0e+00, iterations=0, converged=True)
    """

    residual: Tensor
    iterations: Tensor
    converged: Tensor
    end: FinalState | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        largest = self.residual.max().item() if self.residual.numel() else 0.0
        rounds = int(self.iterations.max().item()) if self.iterations.numel() else 0
        return f"Solution(residual={largest:.1e}, iterations={rounds}, converged={bool(self.converged.all())})"


class FactorGraph:
    r"""Binary variables with scores, and factors that constrain their joint values: LP-SparseMAP.

    .. math:: \operatorname{argmax}_{\mu \in \mathcal L} \; \langle \theta, \mu \rangle + \sum_f h_f(\mu_f)
        - \tfrac12 \|\mu\|^2

    :math:`\mathcal L` is the local polytope: all μ of which every factor allows its part :math:`\mu_f`. :math:`h_f` are
    higher-order scores, zero for logic factors. Every variable is regularized once, however many factors it has. So
    with one factor the solution is that of the factor (Xor: sparsemax, Exactly: k_subsets, a structure: SparseMAP).
    On trees of factors it is SparseMAP over all that they allow jointly, and in general a relaxation of that. A
    variable without a factor gets its score, clipped to [0, 1].

    Solved in double precision by ADMM, with one call per kind of factor, until the factors agree to rounding; directly
    if no two factors share a variable. Derivatives are those of the solution, not of the iterations. Runs eagerly, on
    the CPU: scores on another device are copied, all in one piece per dtype, and values and gradients are copied back.
    Scores may differ in size without bound: a score larger than the sum of all smaller ones decides before them.

    A round costs one call per kind of factor; a few dozen rounds are needed. In some rounds, and for derivatives, a
    dense system of the m variables that are not at a bound is solved, in O(m³). A dependency tree of 20 words with as
    many budgets takes about 0.1 s in a batch of 64, backward pass included.

    Example:
        Each of two rows chooses one column, but not both choose the first:

        >>> import torch, fenchel
        >>> from fenchel.factors import Budget, Xor
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([[2.0, 1.0, 0.0], [1.8, 1.0, 0.5]]))
        >>> for row in u:
        ...     graph.add(Xor(row))
        >>> graph.add(Budget(u[:, 0], 1))
        >>> solution = graph.solve()
        >>> u.value
        tensor([[0.5571, 0.4429, 0.0000],
                [0.4429, 0.5286, 0.0286]])

    References: Niculae & Martins (2020), LP-SparseMAP; Martins et al. (2015), AD3.
    """

    def __init__(self) -> None:
        self.batch: torch.Size = torch.Size()
        self.factors: list[Factor] = []
        self._scores: list[Tensor] = []
        self._count = 0
        self._values: Tensor | None = None

    def variables(self, scores: Tensor, *, batch_dims: int = 0) -> Variables:
        """Add one variable per score.

        Args:
            scores: any shape, floating point. A variable with score −inf is off. NaN or +inf makes the values of its
                batch element NaN, and of no other.
            batch_dims: the number of leading dimensions that are a batch of graphs; the batch shape must be the same in
                all calls.

        Returns:
            An array of variables of the shape of ``scores`` without the batch dimensions.
        """
        check_floats(scores, "scores")
        if check_count(batch_dims, "batch_dims", 0) > scores.dim():
            raise ValueError(
                f"batch_dims must be in [0, {scores.dim()}] for scores of shape {tuple(scores.shape)}, got {batch_dims}"
            )
        batch, shape = scores.shape[:batch_dims], scores.shape[batch_dims:]
        if self._scores and batch != self.batch:
            raise ValueError(
                f"scores must have the graph's batch dimensions, {tuple(self.batch)}, in front, got {tuple(batch)} "
                f"(batch_dims = {batch_dims})"
            )
        if math.prod(shape) == 0:
            raise ValueError(f"scores must hold at least one variable, got shape {tuple(scores.shape)}")
        self.batch = batch
        index = np.arange(self._count, self._count + math.prod(shape)).reshape(shape)
        self._count += index.size
        self._scores.append(scores)
        self._values = None
        return Variables(self, index, np.zeros(index.shape, dtype=bool), scores.dtype)

    def add(self, factor: Factor) -> None:
        """Add a factor over variables of this graph."""
        if not isinstance(factor, Factor):
            raise TypeError(f"factor must be a Factor, such as Xor(u), got {type(factor).__name__}")
        if factor.graph is not self:
            raise ValueError("factor must be over variables of this graph, got one over another graph's")
        self.factors.append(factor)
        self._values = None

    @property
    def values(self) -> Tensor:
        """The values of all variables, (…, number of variables) in float64, in the order in which they were added."""
        return from_cpu(self._found(), self.device)

    def _found(self) -> Tensor:
        """``values`` in the CPU's memory."""
        if self._values is None:
            raise RuntimeError("the graph has no values yet: call graph.solve() or graph.map() first")
        return self._values

    @property
    def device(self) -> torch.device:
        """The device of the first variables' scores, where values are returned."""
        return self._scores[0].device if self._scores else torch.device("cpu")

    @outside_graphs("FactorGraph")
    def solve(self, *, tol: float = 1e-9, max_iter: int = 5000, start: Solution | None = None) -> Solution:
        """Compute the relaxed marginals, differentiable; they are the ``value`` of the variables.

        Where a constraint is met with equality although it could be left out, marginals have no derivative, and an
        element of the generalized Jacobian is used.

        Args:
            tol: the largest disagreement among the factors that is allowed.
            max_iter: the largest number of rounds of ADMM; if it is reached, a warning reports the residual.
            start: the solution of a graph with the same variables, factors and batch dimensions to start from, such as
                that of the last training step. It saves rounds, and changes nothing else.

        Returns:
            The residual and the number of rounds. If the constraints are infeasible, a ValueError is raised.

        Example:
            >>> import torch, fenchel
            >>> from fenchel.factors import Budget, Xor
            >>> def solve(scores, start=None):
            ...     graph = fenchel.FactorGraph()
            ...     u = graph.variables(scores)
            ...     for row in u:
            ...         graph.add(Xor(row))
            ...     graph.add(Budget(u[:, 0], 1))
            ...     return graph.solve(start=start)
            >>> scores = torch.tensor([[2.0, 1.0, 0.0], [1.8, 1.0, 0.5]])
            >>> first = solve(scores)
            >>> int(solve(scores + 1e-3, start=first).iterations) < int(first.iterations)
            True
        """
        theta, groups, invalid = self._prepare(tol, max_iter)
        if start is not None and not isinstance(start, Solution):
            raise TypeError(f"start must be a Solution, as graph.solve() returns it, got {type(start).__name__}")
        if _share_no_variable(groups, theta):
            values, found = _solve_each(groups, theta), None
        else:
            problem = Problem(groups, self._count, len(theta))
            call = Call(problem, tol, max_iter, None if start is None else check_start(start.end, problem, len(theta)))
            flat = [s for g in groups for s in g.scores]
            values = Solve.apply(call, theta, *flat)  # type: ignore[no-untyped-call]
            found = call.found
            self._warn_of_inexact_oracles(problem)
        return self._finish(values, found, invalid, tol, max_iter, None if found is None else call.end())

    @outside_graphs("FactorGraph")
    def map(self, *, tol: float = 1e-9, max_iter: int = 5000) -> Solution:
        r"""Compute the relaxed MAP, the linear program without the quadratic term; derivatives of ``value`` are zero.

        .. math:: \operatorname{argmax}_{\mu \in \mathcal L} \; \langle \theta, \mu \rangle + \sum_f h_f(\mu_f)

        Computed by the proximal point method: each step is a quadratic program like that of ``solve``, centred at the
        last step's solution. It ends after finitely many steps. The values are 0 and 1 if the relaxation is tight and
        the maximum is unique.

        Args:
            tol: as in ``solve``; also the largest change of a value in the last step.
            max_iter: the largest number of rounds of ADMM per step.

        Example:
            >>> import torch, fenchel
            >>> graph = fenchel.FactorGraph()
            >>> u = graph.variables(torch.tensor([[1.0, 0.6], [0.9, 0.4]]))
            >>> graph.add(fenchel.factors.Structured(u, fenchel.structures.Matching()))
            >>> bool(graph.map().converged), u.value.tolist()  # scores 0.6 + 0.9 and 1.0 + 0.4
            (True, [[0.0, 1.0], [1.0, 0.0]])
        """
        theta, groups, invalid = self._prepare(tol, max_iter)
        if not groups or theta.shape[0] == 0:
            values, found = (theta.detach() > 0).to(theta.dtype), None
        else:
            values, found = linear_program(Problem(groups, self._count, len(theta)), theta, tol, max_iter)
        zero = torch.where(theta.isfinite(), theta, 0.0) * 0.0
        return self._finish(values + zero, found, invalid, tol, max_iter)

    def __repr__(self) -> str:
        return f"FactorGraph({self._count} variables, {len(self.factors)} factors)"

    def _prepare(self, tol: float, max_iter: int) -> tuple[Tensor, list[Group], Tensor]:
        if not self._scores:
            raise ValueError("the graph has no variables: call graph.variables(scores) first")
        check_number(tol, "tol", 0)
        check_count(max_iter, "max_iter")
        rows = math.prod(self.batch)
        lead = len(self.batch)
        own = [s for factor in self.factors for s in factor.scores]
        here = on_cpu(*self._scores, *own)
        flat = [s.double().unsqueeze(-1).flatten(lead) for s in here[: len(self._scores)]]
        theta = torch.cat(flat, -1).reshape(rows, self._count)
        copies = {id(old): new for old, new in zip(own, here[len(self._scores) :], strict=True)}
        groups = [_stacked(factors, self.batch, copies) for factors in _by_kind(self.factors)]
        invalid = (theta.isnan() | (theta == torch.inf)).any(1)
        for group in groups:
            for s in group.scores:
                invalid = invalid | (s.isnan() | (s == torch.inf)).flatten(1).any(1)
            _check_room(group, theta)
            group.scores = tuple(torch.where(invalid.reshape(-1, *(1,) * (s.dim() - 1)), 0.0, s) for s in group.scores)
        return torch.where(invalid.unsqueeze(1), 0.0, theta), groups, invalid

    def _warn_of_inexact_oracles(self, problem: Problem) -> None:
        if inexact_count := problem.inexact_count():
            warnings.warn(
                f"FactorGraph: in {inexact_count} of {math.prod(self.batch)} graphs the oracle of a structure is not "
                "exact: it returned a structure that scores less than one it had returned before. Values may be wrong "
                "there",
                stacklevel=4,
            )

    def _finish(
        self,
        values: Tensor,
        found: Agreement | None,
        invalid: Tensor,
        tol: float,
        max_iter: int,
        end: FinalState | None = None,
    ) -> Solution:
        values = torch.where(invalid.unsqueeze(1), torch.nan, values)
        self._values = values.reshape(*self.batch, self._count)
        if found is None:
            zero = torch.zeros(self.batch, device=values.device)
            return Solution(zero, zero.long(), zero == 0)
        if bool((off := found.residual > tol).any()):
            warnings.warn(
                f"FactorGraph: {int(off.sum())} of {off.numel()} graphs do not agree to tol {tol:g} after max_iter = "
                f"{max_iter} rounds; the largest residual is {found.residual.max().item():.1e}",
                stacklevel=4,
            )
        residual, rounds = found.residual.reshape(self.batch), found.iterations.reshape(self.batch)
        return Solution(residual, rounds, residual <= tol, end)


def _check_room(group: Group, theta: Tensor) -> None:
    """Raise a ValueError if masks leave a structure fewer variables than it needs; with none left it is left out."""
    least = group.factor.least
    if not least or not group.takes_masks:
        return
    left = (theta.detach()[:, group.index.reshape(-1)] != -torch.inf).reshape(-1, *group.index.shape).sum(-1)
    short = ((left > 0) & (left < least)).any(1)
    if bool(short.any()):
        raise ValueError(
            f"{group.factor} is infeasible: {least} of its variables must be on, and scores of −inf leave "
            f"{int(left[short].amin())} in {int(short.sum())} of {len(short)} graphs"
        )


def _by_kind(factors: list[Factor]) -> list[list[Factor]]:
    groups: dict[Hashable, list[Factor]] = {}
    for factor in factors:
        shapes = tuple(tuple(s.shape[s.dim() - k :]) for s, k in zip(factor.scores, factor.event_dims, strict=True))
        groups.setdefault((factor.kind, factor.size, shapes), []).append(factor)
    return list(groups.values())


def _stacked(factors: list[Factor], batch: torch.Size, copies: dict[int, Tensor]) -> Group:
    """Factors of one kind as a group; ``copies`` are their scores in the CPU's memory, by the id of the original."""
    scores = [
        [_batched(copies[id(s)], k, batch, f) for s, k in zip(f.scores, f.event_dims, strict=True)] for f in factors
    ]
    constants = [[c.to("cpu", torch.float64) for c in f.constants] for f in factors]
    return Group(
        factors[0],
        torch.from_numpy(np.concatenate([f.index for f in factors])),
        torch.from_numpy(np.concatenate([f.negated for f in factors])),
        tuple(torch.cat(same, 1) for same in zip(*scores, strict=True)),
        tuple(torch.cat(same, 1) for same in zip(*constants, strict=True)),
    )


def _batched(score: Tensor, own: int, batch: torch.Size, factor: Factor) -> Tensor:
    """Scores of a factor as (batch, factors, …); one without batch dimensions is the same for all elements."""
    lead, rest = score.shape[: score.dim() - own - 1], score.shape[score.dim() - own - 1 :]
    try:
        full = score.double().expand(*batch, *rest)
    except RuntimeError:
        raise ValueError(
            f"scores of {factor} must have the graph's batch dimensions, {tuple(batch)}, in front, or none, "
            f"got {tuple(lead)}"
        ) from None
    return full.reshape(math.prod(batch), *rest)


def _share_no_variable(groups: list[Group], theta: Tensor) -> bool:
    """Whether every variable has at most one factor, so that each factor can be solved by itself."""
    if not groups or theta.shape[0] == 0:
        return True
    edges = torch.cat([g.index.reshape(-1) for g in groups])
    once = int(torch.bincount(edges).max()) <= 1
    return once and (not bool((theta == -torch.inf).any()) or all(g.takes_masks for g in groups))


def _solve_each(groups: list[Group], theta: Tensor) -> Tensor:
    """The solution of each factor by itself, and the clipped scores of variables without a factor."""
    values = theta.clamp(0, 1)
    if theta.shape[0] == 0:
        return values
    rows = torch.arange(theta.shape[0], device=theta.device)
    for group in groups:
        at = group.index.reshape(-1)
        values = values.index_copy(1, at, group.qp(theta[:, at], group.scores, rows))
    return values
