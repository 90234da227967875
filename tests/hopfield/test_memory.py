"""Memories: energies, updates and retrieval beside plain loops, closed forms and finite differences."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fenchel
from fenchel import Custom, Gini, Hard, KSubsets, Norm, Regularizer, Shannon, SparseMAP, Tsallis
from fenchel.hopfield import Memory, iterate, update
from fenchel.structures import Chain, SequentialSubsets, Subsets

SIMPLEX = [
    Shannon(),
    Tsallis(1.5),
    Gini(),
    Tsallis(3.0),
    Norm(2.0),
    Norm(5.0),
    Norm(math.inf),
    Hard(),
    0.5 * Tsallis(1.5),
    0.7 * Shannon(),
]
OTHERS = [
    KSubsets(3),
    2.0 * KSubsets(2),
    SparseMAP(Subsets(2)),
    SparseMAP(SequentialSubsets(2, 0.3)),
    Custom(lambda p: 0.5 * (p * p).sum(-1)),
    fenchel.Fused(0.1),
    fenchel.Capped(0.6),
]
CHUNKED = [*SIMPLEX, KSubsets(3), 2.0 * KSubsets(2)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("omega", [*SIMPLEX, *OTHERS], ids=str)
def test_retrieval_is_a_plain_loop(omega: Regularizer) -> None:
    patterns, queries, beta, tol = normal(9, 4), normal(5, 4, seed=1), 0.8, 1e-9
    found = Memory(patterns, omega, beta).retrieve(queries, max_steps=30, tol=tol)
    x = patterns.numpy()
    for number, q in enumerate(queries.numpy()):
        steps, converged = 0, False
        for _ in range(30):
            p = omega.argmax(torch.from_numpy(beta * x @ q)).numpy()
            new = x.T @ p
            moved = np.linalg.norm(new - q)
            steps += moved > 1e-12  # sums in another order repeat to the last digits only
            q = new
            if moved <= tol * max(1.0, np.linalg.norm(new)):
                converged = True
                break
        np.testing.assert_allclose(found.state[number].numpy(), q, atol=1e-8)
        np.testing.assert_allclose(found.weights[number].numpy(), p, atol=1e-8)
        assert bool(found.converged[number]) == converged
        assert abs(int(found.steps[number]) - steps) <= 1


def test_softmax_memory_is_scaled_dot_product_attention() -> None:
    patterns, queries = normal(40, 8), normal(6, 8, seed=1)
    expected = F.scaled_dot_product_attention(queries, patterns, patterns, scale=0.3)
    torch.testing.assert_close(Memory(patterns, Shannon(), 0.3).step(queries), expected)
    values = normal(40, 3, seed=2)
    found = Memory(patterns, Shannon(), 0.3, values=values).retrieve(queries, max_steps=1).value
    torch.testing.assert_close(found, F.scaled_dot_product_attention(queries, patterns, values, scale=0.3))


@pytest.mark.parametrize("omega", SIMPLEX, ids=str)
def test_energy_is_its_fenchel_young_form_and_keeps_its_bounds(omega: Regularizer) -> None:
    """Proposition 1."""
    for seed, beta in ((0, 0.1), (1, 1.0), (2, 7.0)):
        x = normal(12, 5, seed=seed)
        weights = Gini().argmax(3 * normal(20, 12, seed=seed + 9))
        queries = weights @ x  # in the hull
        mean, largest = x.mean(0), torch.linalg.vector_norm(x, dim=-1).max()
        uniform = torch.full((20, 12), 1 / 12, dtype=torch.float64)
        concave = -omega.loss(beta * queries @ x.T, uniform) / beta
        convex = (queries - mean).square().sum(-1) / 2 + (largest**2 - mean.square().sum()) / 2
        energy = Memory(x, omega, beta).energy(queries)
        torch.testing.assert_close(energy, concave + convex)
        assert bool((energy >= 0).all())
        bound = min(float(2 * largest**2), float(-omega(uniform[0]) / beta + largest**2 / 2))
        assert bool((energy <= bound + 1e-12).all())


def test_energy_is_zero_where_all_patterns_are_the_query() -> None:
    x = normal(1, 5).expand(4, 5).contiguous()
    for omega in (Shannon(), Tsallis(1.5), Norm(2.0)):
        energy = Memory(x, omega, 2.0).energy(x[0])
        assert 0 <= energy < 1e-12


@pytest.mark.parametrize("omega", OTHERS, ids=str)
def test_energy_of_any_other_omega_is_by_its_conjugate(omega: Regularizer) -> None:
    x, queries = normal(7, 4), normal(3, 4, seed=1)
    scores = 0.8 * queries @ x.T
    p = omega.argmax(scores)
    conjugate = (p * scores).sum(-1) - omega(p) if not _has_higher(omega) else omega.max(scores)
    expected = queries.square().sum(-1) / 2 - conjugate / 0.8
    torch.testing.assert_close(Memory(x, omega, 0.8).energy(queries), expected, atol=1e-6, rtol=1e-6)


def _has_higher(omega: Regularizer) -> bool:
    return isinstance(omega, SparseMAP) and omega.structure.has_higher


@pytest.mark.parametrize("normalize", [None, "sphere", "layer"])
@pytest.mark.parametrize("omega", [*SIMPLEX, *OTHERS], ids=str)
def test_energies_never_increase(omega: Regularizer, normalize: str | None) -> None:
    memory = Memory(normal(9, 4), omega, 1.3, normalize=normalize)
    state = 2 * normal(30, 4, seed=1)
    energy = memory.energy(state)
    for _ in range(6):
        state = memory.step(state)
        after = memory.energy(state)
        assert bool((after <= energy + 1e-9).all())
        energy = after


@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([0.05, 0.5, 3.0]), st.sampled_from(CHUNKED))
@settings(max_examples=20, deadline=None)
def test_chunks_change_nothing(seed: int, chunk_size: int, beta: float, omega: Regularizer) -> None:
    x = normal(50, 4, seed=seed)
    x[7] = x[31]  # ties
    queries = normal(6, 4, seed=seed + 1)
    whole, parts = Memory(x, omega, beta), Memory(x, omega, beta, chunk_size)
    torch.testing.assert_close(parts.step(queries), whole.step(queries))
    torch.testing.assert_close(parts.weights(queries), whole.weights(queries))
    torch.testing.assert_close(parts.energy(queries), whole.energy(queries))
    torch.testing.assert_close(parts.retrieve(queries, 5).state, whole.retrieve(queries, 5).state)


@pytest.mark.parametrize(
    "omega", [Tsallis(1.5), Shannon(), KSubsets(3), 0.5 * Gini(), fenchel.Capped(0.1), fenchel.Fused(0.1)], ids=str
)
@pytest.mark.parametrize("chunk_size", [7, 30])  # of 30 patterns; 7 cannot hold the mass under bounds of 0.1
def test_chunks_have_the_gradients_of_the_whole(omega: Regularizer, chunk_size: int) -> None:
    gradients = []
    for size in (None, chunk_size):
        x, q = (t.requires_grad_() for t in (normal(30, 4), normal(5, 4, seed=1)))
        beta = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
        memory = Memory(x, omega, beta, size)
        total = (memory.step(q) * normal(5, 4, seed=2)).sum() + memory.energy(q).sum()
        gradients.append(torch.autograd.grad(total, (x, q, beta)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_chunked_softmax_learns_its_temperature() -> None:
    gamma = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    gradients = []
    for chunk_size in (None, 7):
        step = Memory(normal(30, 4), gamma * Shannon(), 1.0, chunk_size).step(normal(5, 4, seed=1))
        gradients.append(torch.autograd.grad((step * normal(5, 4, seed=2)).sum(), gamma)[0])
    torch.testing.assert_close(*gradients)


def test_a_large_memory_in_chunks_holds_no_matrix() -> None:
    """Every tensor that is made has less than a fifth of queries × patterns entries."""
    x, queries = normal(40_000, 8, dtype=torch.float32), normal(64, 8, seed=1, dtype=torch.float32)
    memory = Memory(x, Tsallis(1.5), 2.0, chunk_size=1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, tuple | list) else [result]:
                if isinstance(each, Tensor):
                    largest = max(largest, each.numel())
            return result

    with Watch():
        state = memory.step(queries)
    assert largest < 64 * 40_000 / 5
    torch.testing.assert_close(state, update(queries, x, beta=2.0))


@pytest.mark.parametrize("omega", [Tsallis(1.5), Norm(5.0), KSubsets(4), Hard(), 0.5 * Gini()], ids=str)
def test_many_queries_of_a_large_memory_take_a_pass_that_changes_nothing(omega: Regularizer) -> None:
    x, queries = normal(9000, 4, dtype=torch.float32), normal(500, 4, seed=1, dtype=torch.float32)
    memory = Memory(x, omega, 1.5)
    torch.testing.assert_close(memory.step(queries), update(queries, x, omega=omega, beta=1.5), atol=3e-5, rtol=1e-5)


def test_a_pass_without_kernels_is_the_same(set_kernels: Callable[[bool], None]) -> None:
    x, queries = normal(500, 4), normal(20, 4, seed=1)
    queries[3] = torch.inf
    for omega in (Tsallis(1.5), KSubsets(4)):
        memory = Memory(x, omega, 1.5, chunk_size=90)
        set_kernels(True)
        compiled = memory.step(queries)
        set_kernels(False)
        torch.testing.assert_close(memory.step(queries), compiled, equal_nan=True)
        assert compiled.isnan().any(-1).nonzero().flatten().tolist() == [3]


def test_a_back_end_serves_the_pass_over_patterns() -> None:
    calls: list[int] = []

    def collect(scores: Tensor, floor: Tensor, first: int, count: Tensor, place: Tensor, score: Tensor) -> Tensor:
        """A plain loop over all scores."""
        calls.append(first)
        counts = count.clone()
        for i, j in np.ndindex(*scores.shape):
            if not scores[i, j] < floor[i]:
                if counts[i] < place.shape[1]:
                    place[i, counts[i]], score[i, counts[i]] = first + j, scores[i, j]
                counts[i] += 1
        return counts

    memory, queries = Memory(normal(30, 4), Gini(), 1.5, chunk_size=10), normal(3, 4, seed=1)
    expected = memory.step(queries)
    remove = fenchel.kernels.register("collect", "supports", collect, dtypes=(torch.float64,))
    try:
        torch.testing.assert_close(memory.step(queries), expected)
    finally:
        remove()
    assert calls == [0, 10, 20]


def test_patterns_may_lie_in_a_file(tmp_path: Path) -> None:
    x = normal(100, 6, dtype=torch.float32)
    kept = np.memmap(tmp_path / "patterns", dtype=np.float32, mode="w+", shape=(100, 6))
    kept[:] = x.numpy()
    kept.flush()
    stored = np.memmap(tmp_path / "patterns", dtype=np.float32, mode="r", shape=(100, 6))
    values = np.memmap(tmp_path / "patterns", dtype=np.uint8, mode="r", shape=(100, 3))
    queries = normal(4, 6, seed=1, dtype=torch.float32)
    for omega in (Tsallis(1.5), Shannon()):
        memory = Memory(stored, omega, 2.0)
        assert memory.patterns.data_ptr() == stored.ctypes.data  # the file itself
        whole = Memory(x, omega, 2.0)
        torch.testing.assert_close(memory.retrieve(queries).state, whole.retrieve(queries).state)
        torch.testing.assert_close(memory.energy(queries), whole.energy(queries))
        torch.testing.assert_close(memory.certify().radius, whole.certify().radius)
        numbers = Memory(stored, omega, 2.0, values=values).retrieve(queries).value
        expected = whole.retrieve(queries).weights @ torch.from_numpy(np.array(values)).float()
        torch.testing.assert_close(numbers, expected, atol=1e-2, rtol=1e-4)
    assert not memory.state_dict()
    with pytest.raises(TypeError, match="file"):
        memory.add(queries)


@pytest.mark.parametrize(
    "omega",
    [SparseMAP(SequentialSubsets(3, 0.4)), 0.5 * SparseMAP(SequentialSubsets(3, torch.linspace(-1, 1, 29)))],
    ids=str,
)
def test_an_omega_that_needs_all_scores_is_read_in_chunks(omega: Regularizer, tmp_path: Path) -> None:
    """Sequential subsets cross the boundaries of chunks."""
    x, queries, values = normal(30, 4, dtype=torch.float32), normal(5, 4, seed=1, dtype=torch.float32), normal(30, 2)
    kept = np.memmap(tmp_path / "patterns", dtype=np.float32, mode="w+", shape=(30, 4))
    kept[:] = x.numpy()
    kept.flush()
    stored = np.memmap(tmp_path / "patterns", dtype=np.float32, mode="r", shape=(30, 4))
    weights = omega.argmax(1.2 * queries @ x.T)
    for memory in (Memory(x, omega, 1.2, 7, values=values), Memory(stored, omega, 1.2, values=values)):
        torch.testing.assert_close(memory.weights(queries), weights)
        torch.testing.assert_close(memory.step(queries), weights @ x)
        torch.testing.assert_close(memory.retrieve(queries, 1).value, weights @ values.float())
        energy = queries.square().sum(-1) / 2 - omega.max(1.2 * queries @ x.T) / 1.2
        torch.testing.assert_close(memory.energy(queries), energy)
        assert memory.step(queries[:0]).shape == (0, 4)
    patterns = torch.nn.Parameter(x.double())
    for target in (Memory(patterns, omega, 1.2, 7), Memory(patterns, omega, 1.2)):
        gradient = torch.autograd.grad(target.step(queries.double()).square().sum(), patterns)[0]
        expected = (omega.argmax(1.2 * queries.double() @ patterns.T) @ patterns).square().sum()
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, patterns)[0])


@pytest.mark.parametrize("omega", [Tsallis(1.5), KSubsets(2), Shannon(), fenchel.Hard()], ids=str)
def test_a_memory_in_chunks_is_mapped_by_vmap(omega: Regularizer) -> None:
    x, queries = normal(30, 4), normal(5, 4, seed=1)
    memory = Memory(x, omega, 1.3, chunk_size=7)
    for method in (memory.step, memory.energy, memory.weights):
        torch.testing.assert_close(torch.vmap(method)(queries), method(queries))
    many = torch.stack([x, -x])
    mapped = torch.vmap(lambda held: torch.func.functional_call(memory, {"patterns": held}, queries))(many)
    torch.testing.assert_close(mapped, torch.stack([Memory(held, omega, 1.3).step(queries) for held in many]))


def test_patterns_are_added_and_removed() -> None:
    x, values = normal(10, 4), normal(10, 2, seed=1)
    queries = normal(3, 4, seed=2)
    memory = Memory(x[:6], beta=2.0, values=values[:6])
    memory.add(x[6:9], values[6:9])
    memory.add(x[9], values[9])
    assert len(memory) == 10
    assert torch.equal(memory.weights(queries), Memory(x, beta=2.0).weights(queries))
    assert torch.equal(memory.values, values)
    memory.remove([0, -1])
    mask = torch.zeros(8, dtype=torch.bool)
    mask[2] = True
    memory.remove(mask)
    left = [1, 2, 4, 5, 6, 7, 8]
    assert torch.equal(memory.patterns, x[left])
    assert torch.equal(memory.values, values[left])
    memory.remove(0)
    assert torch.equal(memory.patterns, x[left[1:]])
    with pytest.raises(IndexError, match="number 9"):
        memory.remove([9])
    with pytest.raises(ValueError, match="at least one"):
        memory.remove(list(range(6)))
    with pytest.raises(ValueError, match="values must be given"):
        memory.add(x[:1])
    with pytest.raises(ValueError, match="as many"):
        memory.add(x[:1], values[:2])
    assert len(memory) == 6  # what failed changed nothing
    with pytest.raises(ValueError, match="at most the number of patterns"):
        Memory(x, KSubsets(8)).remove([0, 1, 2])


@pytest.mark.parametrize("normalize", [None, "sphere", "layer"])
def test_learned_patterns_stay_parameters(normalize: str | None) -> None:
    x, queries = normal(6, 4), normal(3, 4, seed=1)
    fixed = Memory(x, beta=2.0, normalize=normalize)
    memory = Memory(nn.Parameter(x[:4].clone()), beta=nn.Parameter(torch.tensor(2.0).double()), normalize=normalize)
    memory.add(x[4:])
    assert [name for name, _ in memory.named_parameters()] == ["beta", "patterns"]
    torch.testing.assert_close(memory.step(queries), fixed.step(queries))
    memory.step(queries).sum().backward()
    assert memory.patterns.grad is not None
    assert memory.beta.grad is not None


def test_state_dict_brings_its_patterns() -> None:
    memory = Memory(normal(7, 4), values=normal(7, 2))
    other = Memory(normal(3, 4, seed=1), values=normal(3, 2))
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other.patterns, memory.patterns)
    assert torch.equal(other.values, memory.values)
    learned = Memory(nn.Parameter(normal(3, 4)))
    learned.load_state_dict(Memory(normal(7, 4)).state_dict())
    assert isinstance(learned.patterns, nn.Parameter)
    assert learned.patterns.shape == (7, 4)
    with pytest.raises(RuntimeError, match="size mismatch"):
        Memory(normal(3, 5)).load_state_dict(Memory(normal(7, 4)).state_dict())


def _loss(memory: Memory, queries: Tensor, implicit: bool) -> Tensor:
    found = memory.retrieve(queries, max_steps=1000, tol=1e-14, implicit=implicit)
    assert bool(found.converged.all())
    return torch.cat([found.state, found.weights, found.value], -1)


IMPLICIT: list[Callable[[Tensor], Regularizer]] = [
    lambda a: Tsallis(a),
    lambda a: Norm(1 + a),
    lambda a: a * Shannon(),
    lambda a: KSubsets(3 * a),
]


@pytest.mark.parametrize(
    ("make", "normalize"),
    [*((make, None) for make in IMPLICIT), (IMPLICIT[0], "sphere"), (IMPLICIT[2], "layer")],
    ids=["entmax", "normmax", "softmax", "k_subsets", "entmax, sphere", "softmax, layer"],
)
def test_implicit_gradients_are_finite_differences_of_the_fixed_point(
    make: Callable[[Tensor], Regularizer], normalize: str | None
) -> None:
    x, values, queries = normal(6, 3), normal(6, 2, seed=1), normal(2, 3, seed=2)
    alpha, beta = torch.tensor(1.4, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)

    def fixed(x: Tensor, values: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        memory = Memory(x, make(alpha), beta, values=values, normalize=normalize)
        return _loss(memory, queries, torch.is_grad_enabled())

    inputs = [t.requires_grad_() for t in (x, values, alpha, beta)]
    assert torch.autograd.gradcheck(fixed, inputs, fast_mode=True)


def test_implicit_gradient_of_the_query_is_zero_and_unrolled_gradients_agree() -> None:
    x, queries = normal(6, 3).requires_grad_(), normal(2, 3, seed=2).requires_grad_()
    grads = []
    for implicit in (False, True):
        memory = Memory(x, Tsallis(1.5), 0.4)
        total = (_loss(memory, queries, implicit) * normal(2, 12, seed=3)).sum()
        grads.append(torch.autograd.grad(total, (x, queries)))
    torch.testing.assert_close(grads[0][0], grads[1][0])
    assert not bool(grads[1][1].any())
    assert float(grads[0][1].abs().max()) < 1e-12


def test_unrolled_steps_pass_gradcheck() -> None:
    values, queries = normal(6, 2, seed=1), normal(2, 3, seed=2)

    def three(x: Tensor, queries: Tensor, beta: Tensor) -> Tensor:
        found = Memory(x, Tsallis(1.5), beta, values=values).retrieve(queries, max_steps=3, tol=0.0)
        return torch.cat([found.state, found.weights, found.value], -1)

    inputs = [t.requires_grad_() for t in (normal(6, 3), queries, torch.tensor(0.6, dtype=torch.float64))]
    assert torch.autograd.gradcheck(three, inputs)
    assert torch.autograd.gradgradcheck(three, inputs)


def test_implicit_derivatives_that_do_not_exist_are_errors() -> None:
    x, queries = normal(6, 3).requires_grad_(), normal(2, 3, seed=2)
    with pytest.raises(RuntimeError, match="have not converged"):
        Memory(x, Shannon(), 0.4).retrieve(queries, max_steps=1, implicit=True)
    state = Memory(x, Shannon(), 0.4).retrieve(queries, implicit=True).state
    with pytest.raises(RuntimeError, match="first order"):
        torch.autograd.grad(state.sum(), x, create_graph=True)
    Memory(x, Shannon(), 0.4).retrieve(queries, max_steps=1)  # without, nothing is asked of them


def test_weights_of_a_memory_that_has_changed_are_refused() -> None:
    memory = Memory(normal(5, 3))
    found = memory.retrieve(normal(2, 3, seed=1))
    memory.add(normal(1, 3, seed=2))
    with pytest.raises(RuntimeError, match="has changed"):
        found.weights  # noqa: B018


def test_a_query_that_stands_still_is_left_alone() -> None:
    x = torch.eye(3, dtype=torch.float64)
    calls: list[int] = []

    def step(states: Tensor) -> Tensor:
        calls.append(len(states))
        return update(states, x, omega=Gini(), beta=2.0)

    queries = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.3, 0.0], [0.5, 0.5, 0.5]], dtype=torch.float64)
    path = iterate(step, queries, independent=True)
    assert calls[0] == 3
    assert all(later <= earlier for earlier, later in pairwise(calls))
    assert path.steps[0] == 0
    together = iterate(lambda q: update(q, x, omega=Gini(), beta=2.0), queries)
    assert torch.equal(together.state, path.state)
    assert torch.equal(together.steps, path.steps)
    assert torch.equal(together.converged, path.converged)


def test_dynamics_go_through_a_compiler() -> None:
    x, queries = normal(6, 4), normal(3, 4, seed=1)

    def three(q: Tensor) -> Tensor:
        return iterate(lambda q: update(q, x, omega=Gini(), beta=2.0), q, max_steps=3).state

    compiled = torch.compile(three, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(queries), three(queries))


def test_nan_stays_in_its_query() -> None:
    queries = normal(4, 3)
    bad = queries.clone()
    bad[1, 0] = torch.nan
    for chunk_size in (None, 2):
        memory = Memory(normal(6, 3, seed=1), chunk_size=chunk_size)
        found, expected = memory.retrieve(bad), memory.retrieve(queries)
        assert bool(found.state[1].isnan().all())
        assert not bool(found.converged[1])
        assert torch.equal(found.state[[0, 2, 3]], expected.state[[0, 2, 3]])


def test_shapes_and_precisions() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        memory = Memory(normal(6, 4).to(dtype), KSubsets(2), beta=3.0)
        for shape in ((4,), (0, 4), (2, 3, 4)):
            found = memory.retrieve(torch.zeros(shape, dtype=dtype) + 0.1)
            assert found.state.dtype == dtype
            assert found.state.shape == shape
            assert found.weights.shape == (*shape[:-1], 6)
            assert found.steps.shape == found.converged.shape == memory.energy(found.state).shape == shape[:-1]
    chunked = Memory(normal(6, 4), chunk_size=2)
    assert chunked.step(normal(0, 4)).shape == (0, 4)
    assert chunked.weights(normal(0, 4)).shape == (0, 6)


def test_normalised_memories_compare_directions() -> None:
    x, queries = normal(6, 4), normal(3, 4, seed=1)
    sphere = Memory(x, beta=3.0, normalize="sphere")
    cosine = F.cosine_similarity(queries.unsqueeze(1), x, dim=-1)
    torch.testing.assert_close(sphere.weights(5 * queries), Tsallis(1.5).argmax(3 * cosine))
    layer = Memory(x, beta=3.0, normalize="layer")
    scores = F.layer_norm(queries, (4,), eps=0) @ F.layer_norm(x, (4,), eps=0).T
    torch.testing.assert_close(layer.weights(queries), Tsallis(1.5).argmax(3 * scores))


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "patterns must be finite: number 1", lambda: Memory(torch.tensor([[0.0], [math.nan]]))),
        (ValueError, "values must be finite", lambda: Memory(torch.zeros(1, 2), values=torch.tensor([[math.inf]]))),
        (ValueError, "values must be as many", lambda: Memory(torch.zeros(2, 2), values=torch.zeros(3, 2))),
        (ValueError, "beta must satisfy 0 < beta < inf, got 0", lambda: Memory(torch.zeros(2, 2), beta=0)),
        (ValueError, "beta must satisfy", lambda: Memory(torch.zeros(2, 2), beta=-1.0)),
        (ValueError, "beta must satisfy", lambda: Memory(torch.zeros(2, 2), beta=math.nan)),
        (ValueError, "got inf", lambda: Memory(torch.zeros(2, 2), beta=math.inf)),
        (ValueError, "beta must satisfy", lambda: Memory(torch.zeros(2, 2), beta=torch.tensor(-1.0))),
        (ValueError, "one number", lambda: Memory(torch.zeros(2, 2), beta=torch.ones(2))),
        (ValueError, r"shape \(N, D\)", lambda: Memory(torch.zeros(2))),
        (ValueError, r"shape \(N, D\)", lambda: Memory(torch.zeros(0, 2))),
        (TypeError, "floating-point", lambda: Memory(torch.ones(2, 2, dtype=torch.long))),
        (TypeError, "tensor or a NumPy array", lambda: Memory([[1.0]])),
        (TypeError, "omega must be a Regularizer", lambda: Memory(torch.zeros(2, 2), "softmax")),
        (ValueError, "k must be at most the number of patterns, 2", lambda: Memory(torch.zeros(2, 2), KSubsets(3))),
        (ValueError, "k must be at most", lambda: Memory(torch.zeros(2, 2), SparseMAP(Subsets(3)))),
        (ValueError, "one dimension", lambda: Memory(torch.zeros(2, 2), SparseMAP(Chain(torch.zeros(2, 2))))),
        (ValueError, "one dimension", lambda: Memory(torch.zeros(2, 2), fenchel.TotalVariation2d(0.1))),
        (
            ValueError,
            "one for all queries",
            lambda: Memory(torch.zeros(2, 2), fenchel.Tsallis(torch.tensor([[1.2], [1.5]]))),
        ),
        (ValueError, "chunk_size must be at least 1", lambda: Memory(torch.zeros(2, 2), chunk_size=0)),
        (ValueError, "normalize must be", lambda: Memory(torch.zeros(2, 2), normalize="unit")),
        (ValueError, r"width, 2.*got shape \(3,\)", lambda: Memory(torch.zeros(2, 2)).step(torch.zeros(3))),
        (
            TypeError,
            "query must be a float",
            lambda: Memory(torch.zeros(2, 2)).step(torch.ones(2).long()),
        ),
        (ValueError, "max_steps must be at least 1", lambda: Memory(torch.zeros(2, 2)).retrieve(torch.ones(2), 0)),
        (ValueError, "tol must satisfy", lambda: Memory(torch.zeros(2, 2)).retrieve(torch.ones(2), tol=-1.0)),
        (ValueError, "width 2", lambda: Memory(torch.zeros(2, 2)).add(torch.zeros(1, 3))),
        (ValueError, "finite", lambda: Memory(torch.zeros(2, 2)).add(torch.full((2,), math.nan))),
    ],
)
def test_bad_input_is_refused_by_name(error: type[Exception], match: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("normalize", [None, "sphere"])
@pytest.mark.parametrize("method", ["step", "energy", "weights"])
def test_forward_mode_reaches_the_patterns_of_a_memory_read_in_chunks(method: str, normalize: str | None) -> None:
    torch.manual_seed(0)
    patterns, query, direction = (torch.randn(n, 3, dtype=torch.float64) for n in (5, 2, 5))

    def compute(held: Tensor) -> Tensor:
        memory = Memory(held, 0.5 * fenchel.Tsallis(1.5), beta=1.3, chunk_size=2, normalize=normalize)
        return getattr(memory, method)(query)

    _, slope = torch.func.jvp(compute, (patterns,), (direction,))
    h = 1e-6
    expected = (compute(patterns + h * direction) - compute(patterns - h * direction)) / (2 * h)
    torch.testing.assert_close(slope, expected, atol=1e-6, rtol=1e-6)
