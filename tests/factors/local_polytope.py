"""Independent answers for factor graphs: vertices by enumeration, the local polytope's programs by cvxpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import cvxpy as cp
import numpy as np
from scipy.optimize import nnls

Array = np.ndarray


def allowed(n: int, rule: Callable[[tuple[int, ...]], bool]) -> Array:
    """All assignments of n bits that a rule allows."""
    return np.array([y for y in itertools.product((0, 1), repeat=n) if rule(y)], dtype=float)


def knapsack_vertices(costs: Sequence[float], budget: float) -> Array:
    """The vertices of {p in the unit box : ⟨costs, p⟩ ≤ budget}: all entries but one are 0 or 1."""
    n, found = len(costs), []
    for y in itertools.product((0.0, 1.0), repeat=n):
        total = float(np.dot(costs, y))
        if total <= budget:
            found.append(y)
        for i in range(n):
            rest = total - costs[i] * y[i]
            if costs[i] > 0 and 0 < (budget - rest) / costs[i] < 1:
                found.append((*y[:i], (budget - rest) / costs[i], *y[i + 1 :]))
    return np.unique(np.array(found), axis=0)


def in_hull(p: Array, vertices: Array) -> float:
    """How far p is from the convex hull of the vertices."""
    a = np.concatenate([vertices.T, np.ones((1, len(vertices)))])
    return float(nnls(a, np.concatenate([p, [1.0]]))[1])


@dataclass
class Part:
    """A factor: its variables, which of them it negates, its vertices and their higher-order scores."""

    index: Sequence[int]
    vertices: Array
    negated: Sequence[bool] | None = None
    scores: Array | None = None


@dataclass
class Local:
    """A factor graph as one program over the weights of all factors' vertices."""

    count: int
    parts: list[Part] = field(default_factory=list)

    def solve(self, theta: Array, quadratic: bool = True) -> tuple[Array, float]:
        """The best μ, and its value."""
        mu = cp.Variable(self.count)
        constraints: list = [mu >= 0, mu <= 1]
        value = theta @ mu
        for part in self.parts:
            weights = cp.Variable(len(part.vertices), nonneg=True)
            y = part.vertices.copy()
            if part.negated is not None:
                y[:, np.asarray(part.negated)] = 1 - y[:, np.asarray(part.negated)]
            constraints += [cp.sum(weights) == 1, y.T @ weights == mu[np.asarray(part.index)]]
            if part.scores is not None:
                value = value + part.scores @ weights
        if quadratic:
            value = value - cp.sum_squares(mu) / 2
        problem = cp.Problem(cp.Maximize(value), constraints)
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
        if problem.status not in ("optimal", "optimal_inaccurate"):
            raise ValueError(problem.status)
        return mu.value, float(problem.value)

    def joint(self) -> Part:
        """All assignments that every factor allows, as one factor."""
        rows, scores = [], []
        for y in itertools.product((0, 1), repeat=self.count):
            total = 0.0
            for part in self.parts:
                literals = np.array(y, dtype=float)[np.asarray(part.index)]
                if part.negated is not None:
                    literals = np.where(part.negated, 1 - literals, literals)
                (hit,) = np.nonzero((part.vertices == literals).all(1))
                if len(hit) == 0:
                    break
                total += 0.0 if part.scores is None else part.scores[hit[0]]
            else:
                rows.append(y)
                scores.append(total)
        return Part(range(self.count), np.array(rows, dtype=float), None, np.array(scores))
