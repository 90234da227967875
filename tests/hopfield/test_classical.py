"""The baselines beside plain loops, and their capacities."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel.hopfield import ClassicalMemory, DenseMemory

MEMORIES = {
    "classical": lambda x: ClassicalMemory(x),
    "classical, no diagonal": lambda x: ClassicalMemory(x, diagonal=False),
    "degree 2": lambda x: DenseMemory(x, 2),
    "degree 3": lambda x: DenseMemory(x, 3),
    "exponential": lambda x: DenseMemory(x, math.inf),
}
every_memory = pytest.mark.parametrize("name", MEMORIES)


def signs(*shape: int, seed: int = 0) -> Tensor:
    return 2.0 * torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)) - 1


def energy(name: str, x: np.ndarray, q: np.ndarray) -> float:
    overlap = x @ q
    if name.startswith("classical"):
        w = x.T @ x
        if "no" in name:
            np.fill_diagonal(w, 0)
        return -q @ w @ q / 2
    if name == "exponential":
        return -np.exp(overlap).sum()
    return -(np.maximum(overlap, 0) ** int(name[-1])).sum()


@every_memory
def test_energy_is_its_formula(name: str) -> None:
    x, q = signs(5, 12), signs(4, 12, seed=1)
    found = MEMORIES[name](x).energy(q)
    np.testing.assert_allclose(found.numpy(), [energy(name, x.double().numpy(), s) for s in q.double().numpy()])


@every_memory
def test_neurons_one_by_one_take_the_sign_of_lower_energy(name: str) -> None:
    x, q = signs(5, 12), signs(6, 12, seed=1)
    found = MEMORIES[name](x).step(q, asynchronous=True, generator=torch.Generator().manual_seed(7))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(7)).tolist()
    for state, row in zip(q.double().numpy(), found.numpy(), strict=True):
        for i in order:
            up, down = state.copy(), state.copy()
            up[i], down[i] = 1, -1
            # A neuron that sees itself holds on to its sign by a lead of the diagonal, N.
            hold = len(x) * state[i] if name == "classical" else 0.0
            gain = energy(name, x.double().numpy(), down) - energy(name, x.double().numpy(), up) + 2 * hold
            state[i] = state[i] if abs(gain) < 1e-9 else np.sign(gain)
        np.testing.assert_array_equal(row, state)


DOWNHILL = [(name, how) for name in MEMORIES for how in (False, True) if how or name != "classical, no diagonal"]


@pytest.mark.parametrize(("name", "asynchronous"), DOWNHILL)
def test_energies_never_increase(name: str, asynchronous: bool) -> None:
    memory, state = MEMORIES[name](signs(9, 20)), signs(30, 20, seed=1)
    before = memory.energy(state)
    for seed in range(5):
        state = memory.step(state, asynchronous=asynchronous, generator=torch.Generator().manual_seed(seed))
        after = memory.energy(state)
        assert bool((after <= before + 1e-9 * before.abs()).all())
        before = after


@every_memory
def test_a_few_patterns_are_restored_from_noise(name: str) -> None:
    x = signs(4, 200)
    noisy = x.clone()
    noisy[:, ::10] *= -1
    for asynchronous in (False, True):
        found = MEMORIES[name](x).retrieve(noisy, asynchronous=asynchronous)
        assert torch.equal(found.state, x)
        assert bool(found.converged.all())
        assert found.steps.tolist() == [1] * 4


def test_updates_at_once_may_run_in_a_cycle_without_a_diagonal() -> None:
    memory = ClassicalMemory(torch.tensor([[1.0, -1.0]]), diagonal=False)
    found = memory.retrieve(torch.tensor([1.0, 1.0]))
    assert not bool(found.converged)
    assert int(found.steps) == 100


def test_beyond_their_capacity_classical_memories_forget() -> None:
    dim = 200
    for load, kept in ((0.05, True), (0.5, False)):
        x = signs(int(load * dim), dim)
        memory = ClassicalMemory(x, diagonal=False)
        some = x[:10]
        overlap = (memory.retrieve(some, 4, asynchronous=True).state * some).mean(-1)
        assert bool((overlap > 0.97).all()) == kept
        assert torch.equal(DenseMemory(x, 4).retrieve(some).state, some)
    assert memory.capacity == pytest.approx(0.138 * dim)


def test_wide_states_do_not_overflow() -> None:
    x = signs(3, 2000)
    for degree in (30, math.inf):
        assert torch.equal(DenseMemory(x, degree).step(x), x)
        assert torch.equal(DenseMemory(x[:, :800], degree).step(x[:, :800], asynchronous=True), x[:, :800])


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "patterns must hold ±1", lambda: ClassicalMemory(torch.zeros(2, 3))),
        (ValueError, "query must hold ±1", lambda: ClassicalMemory(torch.ones(2, 3)).step(torch.zeros(3))),
        (ValueError, "width, 3", lambda: ClassicalMemory(torch.ones(2, 3)).step(torch.ones(4))),
        (ValueError, r"shape \(N, D\)", lambda: DenseMemory(torch.ones(3))),
        (ValueError, "degree must satisfy 2 <= degree", lambda: DenseMemory(torch.ones(2, 3), 1)),
        (TypeError, "degree must be a number", lambda: DenseMemory(torch.ones(2, 3), "exp")),
    ],
)
def test_bad_input_is_refused_by_name(error: type[Exception], match: str, call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=match):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_changes_no_sign(dtype: torch.dtype, diagonal: bool, asynchronous: bool) -> None:
    x, q = signs(100, 2001), signs(3, 2001, seed=1)

    def step(kind: torch.dtype) -> Tensor:
        memory = ClassicalMemory(x.to(kind), diagonal=diagonal)
        return memory.step(q.to(kind), asynchronous=asynchronous, generator=torch.Generator().manual_seed(2))

    assert step(dtype).dtype == dtype
    assert torch.equal(step(dtype).double(), step(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_small_gain_still_has_a_sign(dtype: torch.dtype) -> None:
    """Two patterns cancel in the neuron but for a third, whose overlap is far behind: exp of −120 decides."""
    x = torch.ones(3, 121, dtype=dtype)
    x[1, 0] = -1
    x[2, 1:61] = -1
    x[2, 0] = -1
    q = torch.ones(121, dtype=dtype)
    found = DenseMemory(x, degree=math.inf)._update_in_order(q.unsqueeze(0), [0])
    assert float(found[0, 0]) == -1.0


@pytest.mark.parametrize("kind", [ClassicalMemory, DenseMemory])
def test_a_query_is_left_as_it_is(kind: type[ClassicalMemory] | type[DenseMemory]) -> None:
    x, q = signs(2, 15).double(), signs(4, 15, seed=1).double()
    kept = q.clone()
    assert not torch.equal(kind(x).step(q, asynchronous=True), kept)
    assert torch.equal(q, kept)
