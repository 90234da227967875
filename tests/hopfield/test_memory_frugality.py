"""What memories hold, read and convert: counted, not timed; and that a query does not see the rest of its batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fenchel import Gini, KSubsets, Norm, Regularizer, Shannon, Tsallis
from fenchel.hopfield import Hopfield, Memory
from fenchel.streaming import Plan, using


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def peak(call: Callable[[], object]) -> int:
    """The most bytes that were allocated at a time, beyond those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    changes = [(e.start_ns(), e.nbytes()) for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        live += change
        most = max(most, live)
    return most


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """The tensors that are made, as (name of the operation, dtype, number of entries)."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.made.append((func.overloadpacket.__name__, each.dtype, each.numel()))
        return result


# -- whose tensor it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("normalize", [None, "sphere"])
def test_what_becomes_of_a_given_tensor_does_not_change_the_memory(
    chunk_size: int | None, normalize: str | None
) -> None:
    x, values, beta, q = normal(7, 4), normal(7, 2, seed=1), torch.tensor(0.7).double(), normal(5, 4, seed=2)
    memory = Memory(x, Gini(), beta, chunk_size, values=values, normalize=normalize)
    found = memory.retrieve(q)
    before = found.state, memory.energy(q), memory.certify().radius
    for given in (x, values, beta):
        given.mul_(-3.0)
    again = memory.retrieve(q)
    assert torch.equal(again.value, found.value)  # asked for after the change: not refused
    for old, new in zip(before, (again.state, memory.energy(q), memory.certify().radius), strict=True):
        assert torch.equal(old, new)
    memory.load_state_dict({"patterns": normal(7, 4, seed=3), "values": normal(7, 2, seed=3)})
    assert torch.equal(x, -3.0 * normal(7, 4))


def test_parameters_stay_themselves_and_gradients_reach_tensors_through_the_copy() -> None:
    q = normal(5, 4, seed=1)
    learned = nn.Parameter(normal(7, 4))
    memory = Memory(learned, Gini())
    assert memory.patterns is learned
    with torch.no_grad():
        learned.add_(1.0)
    assert torch.equal(memory.step(q), Memory(learned.detach().clone(), Gini()).step(q))
    x = normal(7, 4).requires_grad_()
    expected = torch.autograd.grad(Gini().argmax(q @ x.T).matmul(x).square().sum(), x)[0]
    found = torch.autograd.grad(Memory(x, Gini()).step(q).square().sum(), x)[0]
    torch.testing.assert_close(found, expected)


def test_a_layers_scaling_is_its_own() -> None:
    beta = torch.ones(2)
    layer = Hopfield(8, num_heads=2, scaling=beta)
    beta.mul_(5.0)
    assert torch.equal(layer.scaling, torch.ones(2))


# -- alone and in a batch ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("omega", "count"),
    [
        (Shannon(), 203),
        (KSubsets(3), 203),
        (Tsallis(1.2), 203),
        (Norm(2.0), 203),
        (Tsallis(1.2), 8500),
        (KSubsets(3), 8500),
    ],
    ids=str,
)
def test_a_query_takes_the_same_path_alone_and_in_any_batch(omega: Regularizer, count: int, dtype: torch.dtype) -> None:
    memory = Memory(normal(count, 17, dtype=dtype), omega, 0.5)
    queries = normal(100, 17, seed=1, dtype=dtype)
    together = memory.retrieve(queries, 30)
    for rows in (slice(3, 4), slice(40, 41), slice(99, 100), slice(10, 47)):
        apart = memory.retrieve(queries[rows], 30)
        assert torch.equal(apart.steps, together.steps[rows])
        assert torch.equal(apart.converged, together.converged[rows])
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(apart.state, together.state[rows], atol=2 * eps, rtol=2 * eps)


# -- chunks of a softmax memory ----------------------------------------------------------------------------------------


def test_softmax_in_chunks_needs_no_more_for_more_chunks() -> None:
    """Forward and backward, the query's gradient: a few matrices of queries × width, however many chunks there are."""
    queries = normal(64, 16, seed=1, dtype=torch.float32).requires_grad_()
    one = queries.numel() * 4

    def used(count: int) -> int:
        memory = Memory(normal(count, 16, dtype=torch.float32), Shannon(), 0.3, chunk_size=10)
        return peak(lambda: memory.step(queries).sum().backward())

    used(10)
    few, many = used(200), used(2000)
    assert many < few + 4 * one
    assert many < 40 * one


def test_softmax_in_chunks_has_the_derivatives_of_the_formula() -> None:
    """Of states, values and energies; in patterns, values, queries, β and the temperature; first and second order."""
    x, values, q = normal(11, 3), normal(11, 2, seed=1), normal(4, 3, seed=2)
    gamma, beta = torch.tensor(0.7).double(), torch.tensor(0.9).double()

    def formula(x: Tensor, values: Tensor, q: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        scores = beta * q @ x.T / gamma
        conjugate = gamma * scores.logsumexp(-1)
        largest = x.square().sum(-1).amax()
        energy = q.square().sum(-1) / 2 + largest / 2 - (conjugate - gamma * torch.tensor(11.0).double().log()) / beta
        return torch.cat([torch.softmax(scores, -1) @ values, energy.unsqueeze(-1)], -1)

    def memory(x: Tensor, values: Tensor, q: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        held = Memory(x, gamma * Shannon(), beta, 4, values=values)
        return torch.cat([held._recall(q, "values"), held.energy(q).unsqueeze(-1)], -1)

    inputs = [t.requires_grad_() for t in (x, values, q, gamma, beta)]
    torch.testing.assert_close(memory(*inputs), formula(*inputs))
    g, h = normal(4, 3, seed=5), [normal(*t.shape, seed=6) for t in inputs]
    slopes = []
    for function in (memory, formula):
        first = torch.autograd.grad(function(*inputs), inputs, g, create_graph=True)
        second = torch.autograd.grad(first, inputs, h)
        slopes.append([*first, *second])
        plain = torch.autograd.grad(function(*inputs), inputs, g)
        torch.testing.assert_close(plain, tuple(t.detach() for t in first))
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("normalize", [None, "sphere", "layer"])
def test_softmax_in_chunks_trains_normalised_patterns(normalize: str | None) -> None:
    x, q = nn.Parameter(normal(11, 3)), normal(4, 3, seed=2)
    found = []
    for chunk_size in (None, 4):
        state = Memory(x, Shannon(), 0.8, chunk_size, normalize=normalize).retrieve(q, 3, tol=0.0).state
        found.append(torch.autograd.grad(state, x, normal(4, 3, seed=3))[0])
    torch.testing.assert_close(*found)


# -- what is read, converted and allocated -----------------------------------------------------------------------------


def test_energy_converts_the_patterns_once() -> None:
    x, queries = normal(100, 5, dtype=torch.float32), normal(200, 5, seed=1, dtype=torch.float32)
    memory = Memory(x, Tsallis(1.5), 0.5)
    with Calls() as calls, using(Plan(rows=16)):
        energy = memory.energy(queries)
    converted = [each for each in calls.made if each[:2] == ("_to_copy", torch.float64) and each[2] >= x.numel()]
    assert len([each for each in converted if each[2] == x.numel()]) <= 2  # for products, and for the largest norm
    scores = 0.5 * queries.double() @ x.double().T
    uniform = torch.full((100,), 0.01, dtype=torch.float64)
    largest = x.double().square().sum(-1).amax()
    conjugate = Tsallis(1.5).max(scores) + Tsallis(1.5)(uniform)
    expected = queries.double().square().sum(-1) / 2 + largest / 2 - conjugate / 0.5
    torch.testing.assert_close(energy, expected.float())


@pytest.mark.parametrize("omega", [Tsallis(1.5), Gini(), Shannon(), KSubsets(2)], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 500])
def test_frozen_patterns_get_no_gradient_and_no_room_for_one(omega: Regularizer, chunk_size: int | None) -> None:
    x = normal(5000, 256, dtype=torch.float32) / 4
    memory = Memory(x, omega, 1.0, chunk_size)
    queries = normal(4, 256, seed=1, dtype=torch.float32).requires_grad_()
    loss = memory.step(queries).square().sum()
    assert peak(loss.backward) < x.numel() * 4  # less than one gradient of the patterns
    reference = queries.detach().clone().requires_grad_()
    (omega.argmax(reference @ x.T) @ x).square().sum().backward()
    torch.testing.assert_close(queries.grad, reference.grad, atol=1e-3, rtol=1e-4)


def counted(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the chunks that certificates read, as they are read."""
    sizes: list[int] = []
    read = memory._read_on_cpu

    def reading(size: int) -> Any:
        for first, block in read(size):
            sizes.append(len(block))
            yield first, block

    monkeypatch.setattr(memory, "_read_on_cpu", reading)
    return sizes


def test_certificates_of_some_patterns_read_the_memory_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(1000, 6)
    x[900] = x[20]
    memory = Memory(x, Gini(), 2.0)
    places = torch.arange(20, 1000, 40)  # in every block
    chosen = torch.zeros(len(places), 1000, dtype=torch.bool).scatter_(1, places.unsqueeze(1), True)
    sizes = counted(memory, monkeypatch)
    with using(Plan(columns=50)):
        found = memory.certify(chosen)
    assert max(sizes) == 50
    assert sum(sizes) <= 6 * 1000
    whole = memory.certify()
    for name in ("separation", "stationary", "radius", "min_beta"):
        assert torch.equal(getattr(found, name), getattr(whole, name)[places])
    for row, place in enumerate(places.tolist()):
        others = (x != x[place]).any(-1)
        lead = (x[place] @ (x[place] - x[others]).T).min()
        expected = min(lead, 0.0) if place in (20, 900) else lead
        torch.testing.assert_close(found.separation[row], torch.as_tensor(expected).double())


def test_certificates_of_sets_read_the_memory_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(300, 6)
    memory = Memory(x, KSubsets(2), 2.0)
    pairs = torch.tensor([[0, 7], [299, 3], [150, 151], [7, 8]])
    chosen = torch.zeros(4, 300, dtype=torch.bool).scatter_(1, pairs, True)
    sizes = counted(memory, monkeypatch)
    found = memory.certify(chosen)
    assert sum(sizes) == 2 * 300
    for row, pair in enumerate(pairs):
        q, outside = x[pair].sum(0), x[~chosen[row]]
        leads = (x[pair] @ q).unsqueeze(1) - outside @ q
        distance = (x[pair].unsqueeze(1) - outside).norm(dim=-1)
        # A pair is another one if it has one other pattern, or two.
        two = (x[pair] @ q).sum() - (outside @ q).topk(2).values.sum()
        torch.testing.assert_close(found.separation[row], torch.minimum(leads.min(), two))
        torch.testing.assert_close(found.radius[row], ((leads - 1 / 2.0) / distance).min())


# -- small things ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("omega", [Shannon(), Tsallis(1.5), KSubsets(2)], ids=str)
def test_no_queries_are_no_error(omega: Regularizer, chunk_size: int | None) -> None:
    memory = Memory(normal(9, 3), omega, 1.0, chunk_size, values=normal(9, 2))
    for shape in ((0, 3), (2, 0, 3)):
        none = torch.zeros(shape).double().requires_grad_()
        found = memory.retrieve(none)
        assert found.state.shape == memory.step(none).shape == shape
        assert memory.energy(none).shape == found.steps.shape == shape[:-1]
        assert found.weights.shape == (*shape[:-1], 9)
        assert found.value.shape == (*shape[:-1], 2)
        memory.step(none).sum().backward()


@pytest.mark.parametrize("chunk_size", [None, 20])
@pytest.mark.parametrize("omega", [Shannon(), Tsallis(1.5), KSubsets(2)], ids=str)
def test_autocast_takes_no_digits_from_a_memory(omega: Regularizer, chunk_size: int | None) -> None:
    memory = Memory(normal(90, 8, dtype=torch.float32), omega, 0.7, chunk_size)
    queries = normal(5, 8, seed=1, dtype=torch.float32).requires_grad_()
    expected = memory.step(queries), memory.weights(queries), memory.energy(queries)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = memory.step(queries), memory.weights(queries), memory.energy(queries)
    torch.testing.assert_close(found, expected)
    assert found[0].grad_fn is not None
