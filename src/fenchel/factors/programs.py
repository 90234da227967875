"""The programs of a factor graph: the quadratic one of ``solve`` with its derivatives, the linear one of ``map``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fenchel.factors.base import WarmStart
from fenchel.factors.consensus import (
    GRADIENT_TOLERANCE,
    Agreement,
    Faces,
    Linear,
    Problem,
    State,
    agree,
    consensus,
)
from fenchel.factors.scales import compressed

AT_BOUND = 1e-9
"""A mean of copies is rounded to 0 or 1 if it is this close and one of the copies is exactly there."""

MAX_STEP = 1e12
"""The largest initial step size ρ of ADMM."""
MAX_PROXIMAL_STEPS = 100
FIRST_RANGE, RANGE_FACTOR, LAST_RANGE = 10.0, 100.0, 1e6
"""In each step of the proximal point method for ``map``, scores are scaled so that the largest has this size: at first,
the factor from step to step, and at last. Small scores are solved fast, large ones separate scores that are nearly
equal."""


@dataclass(frozen=True)
class FinalState:
    """The final state of the solver, from which another solution can start.

    Args:
        u: scaled multipliers, (batch, edges).
        rho: step sizes, (batch, 1).
        edges: the variables of all factors, (edges,); the other graph must have the same.
        warm_starts: one per group of factors, or None.
    """

    u: Tensor
    rho: Tensor
    edges: Tensor
    warm_starts: tuple[WarmStart | None, ...]


def check_start(end: FinalState | None, problem: Problem, batch: int) -> FinalState | None:
    """Check that an earlier solution is of the same graph; pass its warm starts on, and return its final state."""
    if end is None:
        return None
    if len(end.u) != batch or not torch.equal(end.edges, problem.edges) or len(end.warm_starts) != len(problem.groups):
        raise ValueError(
            "start must be the solution of a graph with the same variables, factors and batch dimensions, added in the "
            f"same order: it had {len(end.u)} graphs with {len(end.edges)} edges between factors and variables, this "
            f"one has {batch} with {len(problem.edges)}"
        )
    for group, earlier in zip(problem.groups, end.warm_starts, strict=True):
        if group.warm_start is not None and earlier is not None:
            group.warm_start.adopt(earlier)
    return end


def _feasible(found: Agreement) -> Agreement:
    if bool(found.infeasible.any()):
        rows = found.infeasible.nonzero().reshape(-1).tolist()
        where = "" if found.infeasible.numel() == 1 else f", in {len(rows)} graphs of the batch, the first {rows[0]}"
        raise ValueError(f"the factors of the graph contradict each other: infeasible constraints{where}")
    return found


def _start(problem: Problem, theta: Tensor, floor: float) -> State:
    free = theta != -torch.inf
    scores = [tuple(s.detach() for s in g.scores) for g in problem.groups]
    if all(g.factor.unit_weights for g in problem.groups if g.scores):
        tied = problem.degrees > 0
        small, *rest = compressed([torch.where(tied, theta, 0.0), *(s for group in scores for s in group)], floor)
        theta, others = torch.where(tied, small, theta), iter(rest)
        scores = [tuple(next(others) for _ in group) for group in scores]
    u = theta.new_zeros(theta.shape[0], len(problem.edges))
    rows = torch.arange(theta.shape[0], device=theta.device)
    theta = torch.where(free, theta, 0.0)
    state = State(theta, free, scores, u, theta.new_ones(theta.shape[0], 1), theta, rows)
    # Multipliers are as large as the scores, copies are in [0, 1]: the step size is the ratio of the two.
    state.rho = (_largest(problem, state) / FIRST_RANGE).clamp(1, MAX_STEP).unsqueeze(1)
    return state


def _largest(problem: Problem, state: State) -> Tensor:
    """The size of the largest finite score of a factor or of its variables, (batch,)."""
    largest = torch.where(problem.degrees > 0, state.theta.abs(), 0.0).amax(1)
    for group in state.scores:
        for s in group:
            sizes = torch.where(s.isfinite(), s.abs(), 0.0).flatten(1)
            largest = torch.maximum(largest, sizes.amax(1)) if sizes.numel() else largest
    return largest


def _mean_of_copies(problem: Problem, found: Agreement, theta: Tensor) -> Tensor:
    """The mean of all copies of a variable, rounded to a bound if one of them is there."""
    mean = problem.collect(found.p) / problem.degrees.clamp_min(1)
    for bound in (0.0, 1.0):
        there = problem.collect((found.p == bound).to(mean.dtype)) > 0
        mean = torch.where(there & ((mean - bound).abs() < AT_BOUND), bound, mean)
    mean = torch.where(theta == -torch.inf, 0.0, mean)
    return torch.where(problem.degrees == 0, theta.clamp(0, 1), mean)


@torch.no_grad()
def linear_program(problem: Problem, theta: Tensor, tol: float, max_iter: int) -> tuple[Tensor, Agreement]:
    """Proximal point steps until the solution no longer changes."""
    state = _start(problem, theta, 0.0)
    free, scores = state.free, state.scores
    largest = _largest(problem, state)
    state.rho.fill_(1.0)  # scores are scaled to the size of copies at first
    reach = (FIRST_RANGE / torch.where(largest > 0, largest, 1.0)).unsqueeze(1)
    furthest = reach * LAST_RANGE / FIRST_RANGE
    values = torch.where(problem.degrees > 0, 0.0, (state.theta > 0).to(theta.dtype))
    live = torch.arange(theta.shape[0], device=theta.device)
    total: Agreement | None = None
    for _ in range(MAX_PROXIMAL_STEPS):
        near = State(
            values[live] + reach[live] * state.theta[live],
            free[live],
            [tuple(s[live] * reach[live].reshape(-1, *(1,) * (s.dim() - 1)) for s in group) for group in scores],
            state.u[live],
            state.rho[live],
            values[live],
            live,
        )
        near.mu = consensus(problem, near)
        found = _feasible(agree(problem, near, tol, max_iter))
        new = torch.where(problem.degrees > 0, _mean_of_copies(problem, found, near.theta), values[live])
        moved = (new - values[live]).abs().amax(1)
        values[live] = torch.where(free[live], new, 0.0)
        state.u[live], state.rho[live] = found.state.u, found.state.rho
        at_rest = (moved <= tol) & (reach[live] >= furthest[live]).squeeze(1)
        onward = ~at_rest & (found.residual <= tol)
        found.residual = torch.maximum(found.residual, moved)
        total = found if total is None else total.updated(found, live)
        live = live[onward]
        if live.numel() == 0:
            break
        further = torch.minimum(RANGE_FACTOR * reach, furthest)
        state.u *= further / reach
        reach = further
    assert total is not None
    return values, total


class Call:
    """One call of ``solve``: the problem, the solution, and its derivative."""

    def __init__(self, problem: Problem, tol: float, max_iter: int, start: FinalState | None) -> None:
        self.problem, self.tol, self.max_iter, self.start = problem, tol, max_iter, start
        self.found: Agreement
        self.theta: Tensor

    def solve(self, theta: Tensor) -> Tensor:
        """The values of all variables for their scores; the solution is kept for its derivative."""
        self.theta = theta
        start = _start(self.problem, theta, self.problem.count)
        if self.start is not None:
            start.u, start.rho = self.start.u.clone(), self.start.rho.clone()
            start.mu = consensus(self.problem, start)
        self.found = _feasible(agree(self.problem, start, self.tol, self.max_iter))
        return _mean_of_copies(self.problem, self.found, theta)

    def end(self) -> FinalState:
        """The final state, from which the next call can start."""
        state = self.found.state
        return FinalState(state.u, state.rho, self.problem.edges, tuple(g.warm_start for g in self.problem.groups))

    @cached_property
    def linear(self) -> Linear:
        """The linearization of the factors at the solution."""
        return Linear(self.problem, self.found.state)

    @cached_property
    def faces(self) -> Faces:
        """The faces of the factors at the solution."""
        return Faces(self.linear, self.theta != -torch.inf)

    def project(self, x: Tensor) -> Tensor:
        """J x: the projection of x onto the directions that all faces share; for variables without a factor, the
        derivative of clipping to [0, 1]."""
        theta = self.theta
        alone = (self.problem.degrees == 0) & (theta > 0) & (theta < 1)
        along, left = self.faces.nearest(x, torch.zeros_like(x), x, GRADIENT_TOLERANCE, share=0.0)
        if bool((left > 1e-8 * x.norm(dim=1)).any()):
            warnings.warn(
                "FactorGraph: the gradient's linear system is not solved; the largest residual is "
                f"{left.max().item():.1e}",
                stacklevel=2,
            )
        return torch.where(alone, x, along)


class _Push(torch.autograd.Function):
    """(dθ, ds) → dμ = J (dθ + Cᵀ E ds), linear; the backward pass is ``_Pull``."""

    @staticmethod
    def forward(call: Call, dtheta: Tensor, *tangents: Tensor) -> Tensor:
        return _push(call, dtheta.detach(), [t.detach() for t in tangents])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call = inputs[0]
        ctx.count = len(inputs) - 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *_Pull.apply(ctx.call, ctx.count, grad)  # type: ignore[no-untyped-call]


class Solve(_Push):
    """μ(θ, s), piecewise linear, with the derivative ``_Push``."""

    @staticmethod
    def forward(call: Call, theta: Tensor, *scores: Tensor) -> Tensor:
        return call.solve(theta.detach())

    @staticmethod
    def jvp(ctx: Any, _: None, dtheta: Tensor | None, *tangents: Tensor | None) -> Tensor:
        return _push(ctx.call, dtheta, list(tangents))


class _Pull(torch.autograd.Function):
    """The transpose of ``_Push``, x → (J x, Eᵀ C J x)."""

    @staticmethod
    def forward(call: Call, count: int, x: Tensor) -> tuple[Tensor, ...]:
        moved = call.project(x.detach())
        return moved, *(call.linear.to_scores(call.problem.copies(moved)) if count else ())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.count, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, _Push.apply(ctx.call, grad, *grads)  # type: ignore[no-untyped-call]


def _push(call: Call, dtheta: Tensor | None, tangents: list[Tensor | None] | list[Tensor]) -> Tensor:
    """dμ for directions of the scores of variables and of factors, where None is zero."""
    direction = torch.zeros_like(call.theta) if dtheta is None else dtheta
    if any(t is not None for t in tangents):
        like = call.linear.flat
        filled = [torch.zeros_like(s) if t is None else t for s, t in zip(like, tangents, strict=True)]
        direction = direction + call.problem.collect(call.linear.from_scores(filled))
    return call.project(direction)
