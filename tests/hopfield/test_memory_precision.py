"""Memories at their edges: wide supports, half precision, small β, copies in other chunks, settings that change."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fenchel import Gini, Hard, KSubsets, Norm, Regularizer, Shannon, Tsallis
from fenchel.hopfield import Memory, update
from fenchel.streaming import Plan, using


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """The size of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel())
        return result


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("row", [0.0, math.nan, 1e-6])
def test_one_wide_or_nan_query_holds_no_matrix(row: float, kernels: bool, set_kernels: Callable[[bool], None]) -> None:
    set_kernels(kernels)
    x, queries = normal(20_000, 8, dtype=torch.float32), normal(64, 8, seed=1, dtype=torch.float32)
    queries[5] = row
    memory = Memory(x, Tsallis(1.5), 2.0, chunk_size=1000)
    with Watch() as watch:
        state, energy = memory.step(queries), memory.energy(queries)
    assert watch.largest < 64 * 20_000 / 5
    others = torch.arange(64) != 5
    torch.testing.assert_close(state[others], update(queries[others], x, beta=2.0))
    torch.testing.assert_close(energy, Memory(x, Tsallis(1.5), 2.0).energy(queries), equal_nan=True)
    if math.isnan(row):
        assert bool(state[5].isnan().all())
    else:
        torch.testing.assert_close(state[5:6], update(queries[5:6], x, beta=2.0))


@pytest.mark.parametrize("omega", [Gini(), Norm(2.0), KSubsets(90), 0.5 * Tsallis(1.5)], ids=str)
def test_wide_supports_have_the_values_and_gradients_of_the_whole(omega: Regularizer) -> None:
    found = []
    for chunk_size in (None, 7):
        x, queries = normal(300, 4).requires_grad_(), normal(5, 4, seed=1)
        queries[1:3] *= 1e-4
        queries.requires_grad_()
        memory = Memory(torch.nn.Parameter(x), omega, 1.0, chunk_size)
        state, weights, energy = memory.step(queries), memory.weights(queries), memory.energy(queries)
        assert int((weights[1] > 0).sum()) > 64
        inner = (state * normal(5, 4, seed=2)).sum() + energy.sum()
        found.append((state, weights, energy, *torch.autograd.grad(inner, (queries, memory.patterns))))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("rows", [1, 8])
def test_a_wide_average_is_gathered_in_pieces(rows: int) -> None:
    gradients = []
    for chunk_size in (None, 9):
        x, queries = normal(200, 4).requires_grad_(), 1e-3 * normal(3, 4, seed=1)
        queries[0] *= 300
        memory = Memory(torch.nn.Parameter(x), Gini(), 1.0, chunk_size)
        with using(Plan(rows=rows)):
            state = memory.step(queries)
        gradients.append((state, torch.autograd.grad(state.square().sum(), memory.patterns)[0]))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("chunk_size", [3, 50, 199])
@pytest.mark.parametrize("copies", [2, 5, 90])
def test_copies_in_different_chunks_share_under_argmax(copies: int, chunk_size: int) -> None:
    """Products of chunks of other sizes, or at other places in them, are rounded in other ways."""
    best = normal(5, seed=3, dtype=torch.float32)
    x = normal(207, 5, dtype=torch.float32) / 2
    places = torch.cat(
        [torch.randperm(206, generator=torch.Generator().manual_seed(1))[: copies - 1], torch.tensor([206])]
    )
    x[places] = 3 * best
    weights = Memory(x, Hard(), 1.7, chunk_size).weights(best + 0.1 * normal(33, 5, seed=4, dtype=torch.float32))
    expected = torch.zeros(33, 207)
    expected[:, places] = 1 / copies
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("chunk_size", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("omega", [Shannon(), Tsallis(1.5), Norm(2.0), KSubsets(2)], ids=str)
def test_energy_is_that_of_double_precision_rounded(
    omega: Regularizer, dtype: torch.dtype, chunk_size: int | None
) -> None:
    x, queries = (10 * normal(80, 64)).to(dtype), (10 * normal(4, 64, seed=1)).to(dtype)
    for beta in (2.0**-20, 1.0):
        energy = Memory(x, omega, beta, chunk_size).energy(queries)
        exact = Memory(x.double(), omega, beta).energy(queries.double())
        assert energy.dtype == dtype
        assert torch.equal(energy, exact.to(dtype)) or torch.allclose(
            energy.double(), exact, rtol=torch.finfo(dtype).eps, atol=0
        )


@pytest.mark.parametrize("beta", [1e-8, 1e-4])
def test_energy_keeps_its_digits_at_a_small_beta(beta: float) -> None:
    """log mean exp of small scores is their mean plus half their variance, up to third order."""
    x = normal(200, 8, dtype=torch.float32)
    q = normal(8, seed=1, dtype=torch.float32)
    products = x.double() @ q.double()
    value = products.mean() + beta * products.var(correction=0) / 2
    expected = q.double().square().sum() / 2 - value + x.double().square().sum(-1).amax() / 2
    memory = Memory(x, Shannon(), beta)
    torch.testing.assert_close(memory.energy(q).double(), expected, rtol=1e-6, atol=0)
    energies = [memory.energy(q)]
    for _ in range(4):
        q = memory.step(q)
        energies.append(memory.energy(q))
    assert all(after <= before for before, after in pairwise(energies))


def test_a_setting_that_changes_makes_weights_stale() -> None:
    memory = Memory(torch.eye(3), Tsallis(1.5), 4.0)
    for change in (("beta", 0.01), ("omega", Gini()), ("normalize", "sphere")):
        found = memory.retrieve(torch.tensor([1.0, 0.4, 0.2]))
        setattr(memory, *change)
        with pytest.raises(RuntimeError, match="has changed"):
            _ = found.weights
    found = memory.retrieve(torch.tensor([1.0, 0.4, 0.2]))
    memory.beta = float("0.01")
    assert found.weights.shape == (3,)


@pytest.mark.parametrize("normalize", ["sphere", "layer"])
def test_loaded_patterns_are_normalised(normalize: str) -> None:
    x, q = 5 * normal(6, 4) + 1, normal(3, 4, seed=1)
    memory = Memory(normal(6, 4, seed=2), normalize=normalize)
    memory.load_state_dict({"patterns": x.clone()})
    assert torch.equal(memory.step(q), Memory(x, normalize=normalize).step(q))
    again = Memory(normal(2, 4), normalize=normalize)
    again.load_state_dict(memory.state_dict())
    assert torch.equal(again.patterns, memory.patterns)


def test_loaded_values_must_be_as_many_as_the_patterns() -> None:
    memory = Memory(normal(4, 3), values=normal(4, 2))
    for state in ({"patterns": normal(5, 3), "values": normal(8, 2)}, {"patterns": normal(5, 3)}):
        with pytest.raises(ValueError, match="as many as the patterns"):
            memory.load_state_dict(state, strict=False)
    assert len(memory) == 4


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_beta_of_any_shape_and_precision_is_one_number(chunk_size: int | None) -> None:
    x, q = normal(12, 3, dtype=torch.float32), normal(5, 3, seed=1, dtype=torch.float32)
    expected = Memory(x, Gini(), 2.0, chunk_size)
    for beta in (torch.full((1, 1, 1), 2.0), torch.tensor(2.0, dtype=torch.float64), torch.tensor([2.0])):
        memory = Memory(x, Gini(), beta, chunk_size)
        for name in ("energy", "step", "weights"):
            got = getattr(memory, name)(q)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, getattr(expected, name)(q))


def test_removing_nothing_changes_nothing() -> None:
    memory = Memory(normal(4, 3))
    memory.remove([])
    memory.remove(())
    assert torch.equal(memory.patterns, normal(4, 3))
