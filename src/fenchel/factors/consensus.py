r"""The quadratic program of a factor graph over the local polytope, by ADMM and Newton's steps, and its derivative.

.. math:: \operatorname{argmin}_\mu \; \tfrac12 \|\mu - \theta\|^2 + \sum_f g_f(C_f \mu)

Each factor f has a copy of its variables, :math:`C_f \mu`, and a convex, piecewise linear :math:`g_f = -h_f` that is
+inf outside of its polytope. ADMM solves each factor's quadratic program (``qp``) by itself and brings the copies to
agreement. Its state is the vector u of scaled multipliers, with :math:`\mu = \theta + \rho \sum_f C_f^\top u_f`. At the
solution, the ``qp`` of every factor maps :math:`C_f \mu - u_f` to :math:`C_f \mu`.

Near the solution the ``qp`` of a factor is linear: an orthogonal projection P onto the directions of one face of its
polytope. With these faces fixed, the solution is that of a linear system, which a Newton step solves to rounding. The
derivative of μ is the projection onto the directions that all faces share. Both need only the matrix
:math:`N = \sum_f C_f^\top (I - P_f) C_f`, which is diagonal but for the variables that can move in a face. If these are
few, it is computed and decomposed once; otherwise conjugate gradients take a few steps.

Structured factors keep their active sets between rounds. The first multipliers are the exact ones for a set of factors
that share no variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fenchel.factors.base import Factor, WarmStart

RELAXATION = 1.6
NEWTON_EVERY = 10
STEP_CHANGE_EVERY = 20
ROUNDING = 2e-13
"""Copies that differ by less are equal: a large step size would multiply their rounding error."""
MAX_DENSE = 1000
"""The largest number of moving variables for which N is computed as a matrix, and not only its products."""
DIRECT = 64
"""The largest number of moving variables for which N is decomposed without trying conjugate gradients first."""
CG_TOLERANCE = 1e-13
"""Tolerance of conjugate gradients: the residual relative to its terms."""
NEWTON_TOLERANCE = 1e-7
"""The same in Newton steps, which are repeated: projections onto faces with hundreds of vertices are less exact."""
GRADIENT_TOLERANCE = 1e-10
"""The same in derivatives."""
MAX_CG_STEPS = 100
"""The largest number of steps of conjugate gradients if N can be decomposed instead."""
STALLED = 20
"""Conjugate gradients stop after this many steps that do not halve the residual."""
ZERO_EIGENVALUE = 1e-10
"""Eigenvalues of N below this are zero; their directions are shared by all faces."""
MAX_STEP_CHANGES = 20
"""The number of times that the step size may change; afterwards it is constant, so that ADMM converges."""


@dataclass
class Group:
    """Factors of one kind and size, stacked.

    Args:
        factor: one of the factors; its ``qp`` solves all of them.
        index: of their variables, (factors, size).
        negated: which of these are negated, (factors, size).
        scores: higher-order scores, (batch or 1, factors, …).
        constants: fixed tensors of the factors, (1, factors, …).
        warm_start: the state between calls of ``qp``, or None.
    """

    factor: Factor
    index: Tensor
    negated: Tensor
    scores: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    warm_start: WarmStart | None = None

    @property
    def takes_masks(self) -> bool:
        """Whether the factors get scores of −inf for variables that must be off."""
        return self.factor.masks and not bool(self.negated.any())

    def flip(self, rows: Tensor) -> Tensor:
        """Variables (…, factors, size) as literals, or literals as variables."""
        return torch.where(self.negated, 1 - rows, rows)

    def qp(self, v: Tensor, scores: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """Solutions of the factors for scores v, (rows, factors · size), for some rows of the batch."""
        literals = self.flip(v.reshape(-1, *self.index.shape))
        tensors = (*scores, *self.constants)
        start = self.warm_start
        found = self.factor.qp(literals, *tensors) if start is None else start.qp(rows, literals, *tensors)
        return self.flip(found).reshape(v.shape)

    def support(self, y: Tensor, scores: tuple[Tensor, ...], free: Tensor) -> Tensor:
        """An upper bound of ⟨y, p⟩ over the polytopes of the factors, (batch,)."""
        y = y.reshape(-1, *self.index.shape)
        signed = torch.where(self.negated, -y, y)
        if self.takes_masks and not bool(free.all()):
            signed = torch.where(free.reshape(y.shape), signed, -torch.inf)
        value = self.factor.support(signed, *map(_zeroed, scores), *self.constants)
        constant = torch.where(self.negated, y, 0.0).sum(-1)
        return (value + constant).sum(-1)


def _zeroed(scores: Tensor) -> Tensor:
    """Zeros of the shape of scores, and −inf where the scores are −inf."""
    return torch.where(scores == -torch.inf, -torch.inf, 0.0)


class Problem:
    """Variables, their factors, and the linear maps between them.

    Args:
        groups: of factors, at least one.
        count: the number of variables.
        batch: the number of elements of the batch.
    """

    def __init__(self, groups: list[Group], count: int, batch: int) -> None:
        self.groups = groups
        for group in groups:
            group.warm_start = group.factor.warm_start(batch, len(group.index))
        self.count = count
        self.edges = torch.cat([g.index.reshape(-1) for g in groups])
        self.sizes = [g.index.numel() for g in groups]
        self.degrees = torch.bincount(self.edges, minlength=count).to(torch.float64)

    def copies(self, mu: Tensor) -> Tensor:
        """C μ: (batch, variables) to (batch, edges)."""
        return mu[:, self.edges]

    def collect(self, p: Tensor) -> Tensor:
        """Cᵀ p: (batch, edges) to (batch, variables)."""
        return p.new_zeros(p.shape[0], self.count).index_add_(1, self.edges, p)

    def disjoint_factors(self) -> Tensor:
        """The edges of a set of factors that share no variable, chosen by decreasing size: boolean (edges,)."""
        taken = np.zeros(self.count, dtype=bool)
        chosen = [np.zeros(g.index.shape, dtype=bool) for g in self.groups]
        for i in np.argsort([-g.index.shape[1] for g in self.groups], kind="stable"):
            index = self.groups[i].index.cpu().numpy()
            for f, variables in enumerate(index):
                if not taken[variables].any():
                    taken[variables] = chosen[i][f] = True
        return torch.from_numpy(np.concatenate([c.reshape(-1) for c in chosen]))

    def qp(self, v: Tensor, scores: list[tuple[Tensor, ...]], free: Tensor, rows: Tensor) -> Tensor:
        """Solutions of all factors for their parts of v, (batch, edges); masked variables get −inf if allowed."""
        parts = torch.split(v, self.sizes, 1)
        if not bool(free.all()):
            allowed = torch.split(self.copies(free), self.sizes, 1)
            parts = tuple(
                torch.where(o, part, -torch.inf) if g.takes_masks else part
                for g, part, o in zip(self.groups, parts, allowed, strict=True)
            )
        return torch.cat([g.qp(part, s, rows) for g, part, s in zip(self.groups, parts, scores, strict=True)], 1)

    def inexact_count(self) -> int:
        """The number of elements of the batch in which an oracle was found not to be exact."""
        found = [g.warm_start.inexact() for g in self.groups if g.warm_start is not None]
        return int(torch.stack(found).any(0).sum()) if found else 0

    def error(self, rows: Tensor) -> Tensor:
        """An upper bound on the distance of the factors' last solutions from the exact ones, per row."""
        errors = [g.warm_start.error().to(rows.device)[rows] for g in self.groups if g.warm_start is not None]
        return torch.stack(errors).amax(0) if errors else torch.zeros(len(rows), device=rows.device)

    def support(self, y: Tensor, scores: list[tuple[Tensor, ...]], free: Tensor) -> Tensor:
        """An upper bound of ⟨y, p⟩ over the polytopes of all factors, (batch,)."""
        parts, allowed = torch.split(y, self.sizes, 1), torch.split(self.copies(free), self.sizes, 1)
        each = zip(self.groups, parts, scores, allowed, strict=True)
        return torch.stack([g.support(part, s, o) for g, part, s, o in each]).sum(0)


@dataclass
class State:
    """The state of the solver, per element of the batch.

    Args:
        theta: scores, (batch, variables); not used for variables that are not ``free``.
        free: whether a variable may be on, (batch, variables).
        scores: of the groups, (batch, factors, …).
        u: scaled multipliers, (batch, edges).
        rho: step sizes, (batch, 1).
        mu: the values, (batch, variables). They follow from ``u``, but as a small difference of large numbers.
        rows: the indices of the elements in the whole batch.
    """

    theta: Tensor
    free: Tensor
    scores: list[tuple[Tensor, ...]]
    u: Tensor
    rho: Tensor
    mu: Tensor
    rows: Tensor

    def take(self, rows: Tensor) -> State:
        """The state of some elements of the batch."""
        scores = [tuple(s[rows] for s in group) for group in self.scores]
        own = (self.u[rows], self.rho[rows], self.mu[rows], self.rows[rows])
        return State(self.theta[rows], self.free[rows], scores, *own)

    @property
    def scaled(self) -> list[tuple[Tensor, ...]]:
        """Higher-order scores divided by ρ, the weight of the quadratic term."""
        return [tuple(s / self.rho.reshape(-1, *(1,) * (s.dim() - 1)) for s in group) for group in self.scores]


class Linear:
    """The linearization of all factors' ``qp`` at a state, p = P v + b: products with P."""

    def __init__(self, problem: Problem, state: State) -> None:
        self.problem = problem
        with torch.enable_grad():
            self.v = (problem.copies(state.mu) - state.u).detach().requires_grad_()
            self.scores = [tuple(s.detach().requires_grad_() for s in group) for group in state.scaled]
            self.p = problem.qp(self.v, self.scores, state.free, state.rows)
        self.flat = [s for group in self.scores for s in group]

    def project(self, x: Tensor) -> Tensor:
        """P x, by a backward pass: P is symmetric."""
        if not self.p.requires_grad:
            return torch.zeros_like(x)
        (product,) = torch.autograd.grad(self.p, self.v, x, retain_graph=True, allow_unused=True)
        return torch.zeros_like(x) if product is None else product

    def rest(self, x: Tensor) -> Tensor:
        """(I − P) x."""
        return x - self.project(x)

    def to_scores(self, x: Tensor) -> list[Tensor]:
        """Eᵀ x, where E is the derivative of p in the higher-order scores s: p = P v + E s."""
        if not self.flat:
            return []
        found = torch.autograd.grad(self.p, self.flat, x, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(s) if g is None else g for g, s in zip(found, self.flat, strict=True)]

    def from_scores(self, directions: list[Tensor]) -> Tensor:
        """E s, the transpose of ``to_scores``, by differentiating that once more."""
        x = torch.zeros_like(self.p, requires_grad=True)
        with torch.enable_grad():
            found = torch.autograd.grad(self.p, self.flat, x, create_graph=True, allow_unused=True)
            pairs = [(g, d) for g, d in zip(found, directions, strict=True) if g is not None and g.requires_grad]
        if not pairs:
            return torch.zeros_like(self.p)
        outputs, cotangents = zip(*pairs, strict=True)
        (product,) = torch.autograd.grad(outputs, x, cotangents, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.p) if product is None else product


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], right: Tensor, start: Tensor, goal: Tensor, max_iter: int
) -> tuple[Tensor, Tensor]:
    """Solve one positive semidefinite, consistent system per row; return the solutions and the norms of the residuals.

    The solution is the nearest to ``start``. A row stops when the norm of its residual is at most ``goal``: further
    steps would add rounding errors outside of the range of the matrix.
    """
    x = start
    residual = right - apply(x)
    direction = residual
    size = residual.square().sum(1)
    best, smallest, since = x, size.sqrt(), torch.zeros_like(size)
    for _ in range(max_iter):
        active = ((size.sqrt() > goal) & (since < STALLED)).unsqueeze(1)
        if not bool(active.any()):
            break
        image = apply(direction)
        curvature = (direction * image).sum(1)
        step = torch.where(curvature > 0, size / torch.where(curvature > 0, curvature, 1.0), 0.0).unsqueeze(1)
        x = torch.where(active, x + step * direction, x)
        residual = torch.where(active, residual - step * image, residual)
        new = residual.square().sum(1)
        direction = residual + (new / torch.where(size > 0, size, 1.0)).unsqueeze(1) * direction
        size = new
        since = torch.where(size.sqrt() < smallest / 2, 0.0, since + 1)
        better = size.sqrt() < smallest
        best = torch.where(better.unsqueeze(1), x, best)
        smallest = torch.where(better, size.sqrt(), smallest)
    return best, smallest


class Faces:
    """The matrix N of the faces at a point, restricted to variables that are free and have a factor.

    Only variables that move in some face are coupled; for all others N is diagonal, the number of their factors. The
    coupled part is decomposed at once if it is small, and otherwise if conjugate gradients do not converge.

    Args:
        linear: the linearization of the factors at the point.
        free: whether a variable may be on, (batch, variables).
    """

    def __init__(self, linear: Linear, free: Tensor) -> None:
        self.linear, self.problem = linear, linear.problem
        self.tied = free & (self.problem.degrees > 0)
        probe = torch.randn(
            linear.p.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
        )
        moving = linear.project(probe.to(linear.p).expand(linear.p.shape)) != 0
        self.moving = moving & self.problem.copies(self.tied)
        self.coupled = self.problem.collect(self.moving.to(linear.p)) > 0
        self.width = int(self.coupled.sum(1).max())
        self.fits = self.width <= MAX_DENSE and len(free) * self.width**2 <= 64 * MAX_DENSE**2
        self.dense = self.fits and self.width <= DIRECT and self._columns() <= DIRECT
        if self.dense and self.width:
            self._decompose(self.coupled)

    def _shaped(self) -> list[Tensor]:
        """``moving`` by groups of factors: which variables can move within the face, (batch, factors, size) each."""
        parts = torch.split(self.moving, self.problem.sizes, 1)
        return [part.reshape(-1, *g.index.shape) for g, part in zip(self.problem.groups, parts, strict=True)]

    def _columns(self) -> int:
        """The largest number of variables that move in one factor."""
        return max(int(part.sum(-1).max()) for part in self._shaped())

    def _decompose(self, coupled: Tensor) -> None:
        problem, width, batch = self.problem, self.width, len(coupled)
        order = (~coupled).to(torch.int8).sort(dim=1, stable=True).indices[:, :width]
        inside = coupled.gather(1, order)
        self.at = torch.where(inside, order, problem.count)  # one more column, for padding
        place = order.new_full((batch, problem.count + 1), width)
        place = place.scatter(1, self.at, torch.arange(width, device=order.device).expand(batch, -1))
        place = torch.where(torch.arange(problem.count + 1, device=order.device) == problem.count, width, place)
        rows = place[:, problem.edges]
        matrix = self.linear.p.new_zeros(batch, (width + 1) ** 2)
        for direction, column in self._directions(place):
            matrix.scatter_add_(1, rows * (width + 1) + column, -self.linear.project(direction))
        matrix = matrix.reshape(batch, width + 1, width + 1)[:, :-1, :-1]
        padded = torch.cat([problem.degrees, problem.degrees.new_ones(1)])
        matrix = (matrix + matrix.mT) / 2 + torch.diag_embed(padded[self.at])
        values, self.vectors = torch.linalg.eigh(matrix)
        self.inverse = torch.where(values > ZERO_EIGENVALUE, 1 / values.clamp_min(ZERO_EIGENVALUE), 0.0)

    def _directions(self, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Vectors with one unit entry per factor that together cover all moving variables, and their columns of N."""
        problem, shaped = self.problem, self._shaped()
        orders = [(~part).to(torch.int8).sort(dim=-1, stable=True).indices for part in shaped]
        for k in range(self._columns()):
            directions, columns = [], []
            for group, part, order in zip(problem.groups, shaped, orders, strict=True):
                which = order[..., min(k, part.shape[-1] - 1)].unsqueeze(-1)
                alive = part.gather(-1, which) & (k < part.shape[-1])
                directions.append(torch.zeros_like(part, dtype=place.dtype).scatter(-1, which, alive.long()).flatten(1))
                variable = group.index.expand(part.shape).gather(-1, which).flatten(1)
                columns.append(place.gather(1, variable).repeat_interleave(part.shape[-1], 1))
            yield torch.cat(directions, 1).to(self.linear.p), torch.cat(columns, 1)

    def normal(self, x: Tensor) -> Tensor:
        """N x."""
        return torch.where(self.tied, self.problem.collect(self.linear.rest(self.problem.copies(x))), 0.0)

    def nearest(
        self, x: Tensor, right: Tensor, terms: Tensor, tolerance: float = NEWTON_TOLERANCE, share: float = 0.5
    ) -> tuple[Tensor, Tensor]:
        """The solution of N μ = right that is nearest to x, and the norm of its residual.

        Args:
            x: (batch, variables).
            right: in the range of N, up to rounding.
            terms: the numbers that ``right`` was computed from, (batch, any); their norm scales its rounding error.
            tolerance: the largest residual, relative to that norm, with which N is not decomposed.
            share: the share of the batch that may exceed it. Newton steps are repeated, so that half may.
        """
        x, right = torch.where(self.tied, x, 0.0), torch.where(self.tied, right, 0.0)
        if not self.dense:
            size = x.norm(dim=1) + terms.norm(dim=1)
            limit = MAX_CG_STEPS if self.fits else 4 * self.problem.count + 100
            y, left = conjugate_gradients(self.normal, right, x, CG_TOLERANCE * size, limit)
            if not self.fits or float((left > tolerance * size).double().mean()) <= share:
                return y, left
            self.dense = True
            self._decompose(self.coupled)
        y = torch.where(self.tied, right / self.problem.degrees.clamp_min(1), 0.0)
        return self._within(x, right, y) if self.width else y, x.new_zeros(len(x))

    def _within(self, x: Tensor, right: Tensor, elsewhere: Tensor) -> Tensor:
        """The solution by the decomposition of N; ``elsewhere`` is the solution of variables that are not coupled."""
        along, across = (self.vectors.mT @ self._picked(t) for t in (x, right))
        inverse = self.inverse.unsqueeze(-1)
        image = (self.vectors @ torch.where(inverse == 0, along, inverse * across)).squeeze(-1)
        return torch.cat([elsewhere, x.new_zeros(len(x), 1)], 1).scatter(1, self.at, image)[:, :-1]

    def _picked(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(len(x), 1)], 1).gather(1, self.at).unsqueeze(-1)


def consensus(problem: Problem, state: State) -> Tensor:
    """The values μ that follow from the multipliers; zero where a variable is not free."""
    return torch.where(state.free, state.theta + state.rho * problem.collect(state.u), 0.0)


def step(problem: Problem, state: State) -> tuple[State, Tensor]:
    """One round of ADMM: the next state, and the differences between the factors' solutions and μ, (batch, edges)."""
    now = problem.copies(state.mu)
    p = problem.qp(now - state.u, state.scaled, state.free, state.rows)
    relaxed = now + RELAXATION * (p - now)
    mu = (state.theta / state.rho + problem.collect(relaxed + state.u)) / (1 / state.rho + problem.degrees)
    mu = torch.where(state.free, mu, 0.0)
    return replace(state, u=state.u + relaxed - problem.copies(mu), mu=mu), p - now


def newton(problem: Problem, state: State) -> State:
    """A Newton step: the multipliers and μ at which all factors agree if their faces do not change."""
    linear = Linear(problem, state)
    b = linear.p.detach() - linear.project(linear.v.detach())
    inside = linear.project(b)
    faces = Faces(linear, state.free)
    # The point in the planes of all faces that is nearest to the scores, with the multipliers along the faces fixed …
    base = torch.where(state.free, state.theta + state.rho * problem.collect(inside), 0.0)
    mu, _ = faces.nearest(base, problem.collect(b - inside), b)
    # … and the multipliers orthogonal to the faces, nearest to the present ones, of which it is the solution.
    across = linear.rest(state.u)
    right = (mu - base) / state.rho - problem.collect(across)
    terms = torch.cat([mu / state.rho, base / state.rho, b, state.u], 1)
    missing, _ = faces.nearest(torch.zeros_like(mu), right, terms)
    mu = torch.where(problem.degrees > 0, mu, base)
    return replace(state, u=inside + across + linear.rest(problem.copies(missing)), mu=mu)


def contradiction(problem: Problem, state: State, gap: Tensor) -> Tensor:
    """Whether the differences between factors prove that they have no common point, boolean (batch,).

    For y with Cᵀy = 0 every μ has ⟨y, Cμ⟩ = 0; if ⟨y, p⟩ < 0 for all p in the factors' polytopes, no μ is in them all.
    """
    y = -gap
    surplus = torch.where(state.free, problem.collect(y), 0.0) / problem.degrees.clamp_min(1)
    y = y - problem.copies(surplus)
    largest = y.abs().amax(1, keepdim=True)
    y = y / torch.where(largest > 0, largest, 1.0)
    return problem.support(y, state.scores, state.free) < -1e-7 * y.abs().sum(1)


@dataclass
class Agreement:
    """The result of the solver, per element of the batch.

    Args:
        p: the factors' copies, (batch, edges).
        state: the final multipliers and step sizes.
        residual: the largest disagreement, as a distance between copies or between multipliers, (batch,).
        iterations: rounds of ADMM, (batch,).
        infeasible: whether a contradiction was proved, (batch,).
    """

    p: Tensor
    state: State
    residual: Tensor
    iterations: Tensor
    infeasible: Tensor

    def updated(self, later: Agreement, rows: Tensor) -> Agreement:
        """Replace some rows by those of a later result, and add up the rounds."""
        self.p[rows], self.residual[rows] = later.p, later.residual
        self.iterations[rows] += later.iterations
        return self


def agree(problem: Problem, start: State, tol: float, max_iter: int) -> Agreement:
    """Run ADMM with Newton steps until every element of the batch has converged or is infeasible."""
    batch = start.theta.shape[0]
    live = torch.arange(batch, device=start.theta.device)
    final = start.take(live)
    residual = start.theta.new_full((batch,), torch.inf)
    iterations = torch.zeros_like(live)
    infeasible = torch.zeros(batch, dtype=torch.bool, device=start.theta.device)
    state, when = _from_disjoint_factors(problem, start), _Schedule(1 if bool((start.u != 0).any()) else NEWTON_EVERY)
    for k in range(1, max_iter + 1):
        if live.numel() == 0:
            break
        after, gap = step(problem, state)
        off = _disagreement(gap, state.rho)
        if bool((done := off <= tol).any()):
            _store(final, state, live, done)
            residual[live[done]], iterations[live[done]] = off[done], k
            keep = ~done
            live, state, after, gap, off = live[keep], state.take(keep), after.take(keep), gap[keep], off[keep]
            if live.numel() == 0:
                break
        previous, state = state, after
        if when.newton(k):
            state = _newton_if_better(problem, state)
            lost = contradiction(problem, previous, gap)
            if bool(lost.any()):
                infeasible[live[lost]] = True
                live, state, off = live[~lost], state.take(~lost), off[~lost]
        elif when.change_step(k):
            state = _with_step_changed(problem, previous, state, gap)
        residual[live], iterations[live] = off, k
    _store(final, state, live, torch.ones_like(live, dtype=torch.bool))
    if bool((rough := (residual > ROUNDING) & ~infeasible).any()):
        rows = rough.nonzero().reshape(-1)
        _store(final, _newton_if_better(problem, final.take(rows)), rows, torch.ones_like(rows, dtype=torch.bool))
    v = problem.copies(final.mu) - final.u
    p = problem.qp(v, final.scaled, final.free, final.rows)
    return Agreement(p, final, torch.maximum(residual, problem.error(final.rows)), iterations, infeasible)


def _from_disjoint_factors(problem: Problem, state: State) -> State:
    """A state with the exact multipliers of a set of factors that share no variable.

    If the constraints of all other factors hold already, it is the solution.
    """
    fresh = (state.u == 0).all(1, keepdim=True)
    chosen = problem.disjoint_factors().to(state.u.device)
    if not bool(fresh.any()) or not bool(chosen.any()):
        return state
    alone = replace(state, rho=torch.ones_like(state.rho))
    theta = problem.copies(state.theta)
    p = problem.qp(theta, alone.scaled, state.free, state.rows)
    chosen = chosen & problem.copies(state.free)
    u = torch.where(chosen, p - theta, 0.0) / state.rho
    mu = torch.where(problem.collect(chosen.to(p)) > 0, problem.collect(torch.where(chosen, p, 0.0)), state.mu)
    return replace(state, u=torch.where(fresh, u, state.u), mu=torch.where(fresh, mu, state.mu))


class _Schedule:
    """The rounds with a Newton step, at growing distances, and those in which the step size may change.

    Args:
        first: the round of the first Newton step; 1 if multipliers of similar scores are known.
    """

    def __init__(self, first: int) -> None:
        self.next_newton = first
        self.changes = 0

    def newton(self, k: int) -> bool:
        if k < self.next_newton:
            return False
        self.next_newton = k + max(NEWTON_EVERY, k // 4)
        return True

    def change_step(self, k: int) -> bool:
        if k % STEP_CHANGE_EVERY or self.changes >= MAX_STEP_CHANGES:
            return False
        self.changes += 1
        return True


def _disagreement(gap: Tensor, rho: Tensor) -> Tensor:
    """The largest difference between copies or, multiplied by ρ, between multipliers, (batch,), without rounding."""
    size = gap.abs()
    return torch.where(size > ROUNDING, size * rho.clamp_min(1), size).amax(1)


def _newton_if_better(problem: Problem, state: State) -> State:
    """A Newton step in the rows where it reduces the differences between factors."""
    moved = newton(problem, state)
    before, after = (step(problem, s)[1].square().sum(1) for s in (state, moved))
    better = (after < before).unsqueeze(1)
    u, mu = torch.where(better, moved.u, state.u), torch.where(better, moved.mu, state.mu)
    return replace(state, u=u, mu=mu)


def _with_step_changed(problem: Problem, before: State, after: State, gap: Tensor) -> State:
    """Double the step size where the primal residual is ten times the dual one, halve it in the opposite case."""
    moved = problem.copies(after.mu - before.mu)
    primal, dual = gap.norm(dim=1, keepdim=True), after.rho * moved.norm(dim=1, keepdim=True)
    factor = torch.where(primal > 10 * dual, 2.0, torch.where(dual > 10 * primal, 0.5, 1.0))
    return replace(after, u=after.u / factor, rho=after.rho * factor)


def _store(final: State, state: State, live: Tensor, rows: Tensor) -> None:
    """Write rows of a state to their places in the state of the whole batch."""
    for name in ("u", "rho", "mu"):
        getattr(final, name)[live[rows]] = getattr(state, name)[rows]
