"""Passes over stored patterns: one Ω in any spelling, and one algorithm per row, whatever the plan and the batch."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import fenchel
from fenchel import Capped, Gini, Hard, KSubsets, Norm, Shannon, Tsallis, kernels
from fenchel.hopfield import Memory
from fenchel.regularizers import Regularizer
from fenchel.streaming import Plan, using
from spellings import spellings

SPELLINGS = spellings(30)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("name", SPELLINGS)
def test_one_omega_in_any_spelling_is_one_memory(name: str, chunk_size: int | None) -> None:
    x, queries = normal(30, 4), normal(5, 4, seed=1)
    memory, expected = Memory(x, SPELLINGS[name], 1.3, chunk_size), Memory(x, Gini(), 1.3)
    for method in ("energy", "step", "weights"):
        assert_close(getattr(memory, method)(queries), getattr(expected, method)(queries), atol=1e-12, rtol=1e-12)
    found = memory.retrieve(queries)
    assert_close(found.state, expected.retrieve(queries).state, atol=1e-10, rtol=1e-10)
    assert_close(memory.certify().radius, expected.certify().radius, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("method", ["dense", "parts", "supports"])
def test_one_omega_in_any_spelling_is_one_attention(name: str, method: str) -> None:
    query, key, value = normal(6, 4), normal(9, 4, seed=1), normal(9, 3, seed=2)
    expected = fenchel.attention(query, key, value, Gini())
    with using(Plan(method, rows=4)):
        assert_close(fenchel.attention(query, key, value, SPELLINGS[name]), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("omega", [Tsallis(1.5), Norm(3.0), KSubsets(3), Capped(0.4), 0.5 * Gini(), Hard()], ids=str)
@pytest.mark.parametrize("plan", [Plan("supports", rows=8, columns=16, entries=4), Plan("dense", rows=8)], ids=str)
def test_a_plan_changes_nothing(omega: Regularizer, plan: Plan) -> None:
    x, queries = normal(200, 3), normal(20, 3, seed=1)
    queries[4], queries[9, 0] = 0.0, math.nan
    memory = Memory(x, omega, 1.5)
    scores = 1.5 * queries @ x.T
    expected = omega.argmax(scores) @ x
    with using(plan):
        state, weights = memory.step(queries), memory.weights(queries)
    assert_close(state, expected, atol=1e-9, rtol=1e-9, equal_nan=True)
    assert_close(weights, omega.argmax(scores), atol=1e-9, rtol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("count", "by_supports"), [(300, True), (60, False)])
def test_a_retrieval_does_not_change_its_engine_as_queries_converge(count: int, by_supports: bool) -> None:
    sizes: list[int] = []
    attend = kernels.find("attend", "tsallis", (1.5,))

    def spy(query: Tensor, *args: Tensor, **options: object) -> object:
        sizes.append(query.shape[1])
        return attend(query, *args, **options)

    x = normal(count, 6)
    queries = torch.cat([x[:40], x[40:44] + 0.8 * normal(4, 6, seed=1)])  # most are where they will stay
    memory = Memory(torch.nn.Parameter(x), Tsallis(1.5), 1.5)
    remove = kernels.register("attend", "tsallis", spy)
    try:
        found = memory.retrieve(queries, 8, tol=1e-9)
    finally:
        remove()
    updates = int(found.steps.max()) + 1
    assert updates > 2
    if by_supports:
        assert len(sizes) >= min(updates, 8)
        assert sizes[0] > sizes[-1]
    else:
        assert not sizes
    for alone in (0, 41, 43):
        single = memory.retrieve(queries[alone], 8, tol=1e-9)
        assert_close(single.state, found.state[alone], atol=1e-12, rtol=1e-12)


def test_forward_mode_goes_through_a_pass() -> None:
    x, queries, direction = normal(60, 3), normal(4, 3, seed=1), normal(4, 3, seed=2)
    for omega in (Tsallis(1.5), Norm(2.0), Shannon()):
        memory, whole = Memory(x, omega, 1.2, chunk_size=9), lambda q, omega=omega: omega.argmax(1.2 * q @ x.T) @ x
        _, ours = torch.func.jvp(memory.step, (queries,), (direction,))
        _, theirs = torch.func.jvp(whole, (queries,), (direction,))
        assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
