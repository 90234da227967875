"""Paths through a layered graph, against all of them: the Gibbs distribution, Newton's equations, flows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.structures import flows, layers

# Python cannot call helpers of kernels.
gibbs, solve = kernel(layers.gibbs.py_func), kernel(layers._solve.py_func)
used_edges, tree_flow = kernel(flows.used_edges.py_func), kernel(flows.tree_flow.py_func)
widest_path, best_path = kernel(flows.widest_path.py_func), kernel(flows.best_path.py_func)

STEPS, STATES = 4, 3
PARTS = np.arange(STEPS * STATES, dtype=np.int32).reshape(STEPS, STATES)


def chain(bonus: np.ndarray, last: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """The graph of all sequences of states; a path may end in some states alone."""
    end = np.ones(STATES, dtype=np.bool_) if last is None else last
    every = np.arange(STATES**2)
    return PARTS, np.arange(STATES + 1) * STATES, every % STATES, every, bonus.reshape(-1, STATES**2), end


def distribution(scores: np.ndarray, bonus: np.ndarray, last: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """All sequences as zeros and ones, and their probabilities."""
    paths = [p for p in itertools.product(range(STATES), repeat=STEPS) if last[p[-1]]]
    ones = np.stack([np.eye(STATES)[list(p)].reshape(-1) for p in paths])
    steps = np.array([sum(bonus[t, a, b] for t, (a, b) in enumerate(itertools.pairwise(p))) for p in paths])
    log = (ones @ scores + steps) / eps
    weight = np.exp(log - log.max())
    return ones, weight / weight.sum()


@pytest.mark.parametrize("eps", [1.0, 0.1])
@pytest.mark.parametrize("ends", [3, 2])
def test_newtons_equations_are_those_of_the_covariance(eps: float, ends: int) -> None:
    random = np.random.default_rng(0)
    theta, nu, bonus = random.normal(size=12), random.uniform(size=12), random.normal(size=(STEPS - 1, STATES, STATES))
    last = np.arange(STATES) < ends
    graph = chain(bonus, last)
    ones, p = distribution(theta - nu, bonus, last, eps)
    value, node, step = np.empty((STEPS, STATES)), np.empty((STEPS, STATES)), np.zeros((STEPS, STATES**2))
    assert gibbs(theta, nu, eps, STEPS, graph, value, step, node)
    np.testing.assert_allclose(node.reshape(-1), p @ ones, atol=1e-14)

    covariance = (ones.T * p) @ ones - np.outer(p @ ones, p @ ones)
    wanted, z = random.normal(size=12), np.empty(12)
    squares, rows = (np.empty((STATES, STATES)) for _ in range(3)), (np.empty(STATES) for _ in range(2))
    filtered = (
        np.empty((STEPS, STATES, STATES)),
        np.empty((STEPS, STATES), np.int64),
        np.empty((STEPS, STATES)),
        np.empty((STEPS, STATES)),
    )
    room = np.empty((STEPS, STATES), np.int64), np.empty(STEPS, np.int64), np.empty(STATES, np.int64)
    solve(wanted, eps, STEPS, graph, step, node, z, *room, (*squares, *rows), filtered)
    np.testing.assert_allclose(z, np.linalg.solve(eps * np.eye(12) + covariance, wanted), rtol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_flows_lose_their_cycles_and_nothing_else(seed: int) -> None:
    random = np.random.default_rng(seed)
    bonus = random.normal(size=(STEPS - 1, STATES, STATES)).round(seed % 2)
    theta = random.normal(size=12)
    graph, last = chain(bonus), np.ones(STATES, dtype=np.bool_)
    value, node, flow = np.empty((STEPS, STATES)), np.empty((STEPS, STATES)), np.zeros((STEPS, STATES**2))
    used = np.empty((STEPS, STATES**2), np.uint8)
    used_edges(theta, np.zeros(12), 1.0, STEPS, graph, value, flow, node, used)
    before, mu = flow.copy(), node.reshape(-1).copy()
    ones, p = distribution(theta, bonus, last, 1.0)
    np.testing.assert_allclose(mu, p @ ones, atol=1e-14)
    assert tree_flow(mu, STEPS, graph, used, flow)
    for t, (old, new) in enumerate(zip(before[:-1], flow[:-1], strict=True)):
        matrix = new.reshape(STATES, STATES)
        np.testing.assert_allclose(matrix.sum(1), node[t], atol=1e-14)
        np.testing.assert_allclose(matrix.sum(0), node[t + 1], atol=1e-14)
        assert matrix.min() > -1e-14
        assert (matrix > 1e-14).sum() < 2 * STATES  # no cycle between 2 · STATES nodes
        assert new @ bonus[t].reshape(-1) >= old @ bonus[t].reshape(-1) - 1e-14

    total, mixture, y = 0.0, np.zeros(12), np.empty(STEPS, np.int32)
    choice, graph = np.empty((STEPS, STATES), np.int64), chain(bonus)
    for _ in range(12):
        amount, score = widest_path(flow, STEPS, graph, value, choice, y)
        path = y % STATES
        if amount > 1e-15:
            assert score == pytest.approx(sum(bonus[t, a, b] for t, (a, b) in enumerate(itertools.pairwise(path))))
            mixture[y] += amount
            total += amount
    assert total == pytest.approx(1.0, abs=1e-13)
    np.testing.assert_allclose(mixture, mu, atol=1e-13)
