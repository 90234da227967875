"""Long memory: updates by the definition in NumPy, attention by SciPy's quadrature, and where gradients end."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fenchel.continuous import FunctionBasis, GaussianBasis, LongMemory, MemoryState

RIDGE = 0.01


def made(
    num_heads: int = 2, alpha: float = 2.0, size: int = 6, dtype: torch.dtype = torch.float64, **options: Any
) -> LongMemory:
    torch.manual_seed(3)
    basis = GaussianBasis.line(size, widths=(0.12,))
    memory = LongMemory(basis, 4, num_heads, alpha, ridge=RIDGE, prior=0.2, **options).to(dtype)
    with torch.no_grad():  # densities that differ between queries
        memory.loc.weight.mul_(3)
    return memory


def chunks(count: int, length: int = 9, batch: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, batch, length, 4, dtype=torch.float64, generator=generator))


def values_at(memory: LongMemory, t: np.ndarray) -> np.ndarray:
    """ψ(t), (len(t), N), from the formula of normal densities."""
    centers = memory.basis.centers.numpy()[:, 0]  # type: ignore[union-attr]
    width = np.sqrt(memory.basis.covariances.numpy()[:, 0, 0])  # type: ignore[union-attr]
    return np.exp(-0.5 * ((t[:, None] - centers) / width) ** 2) / (width * math.sqrt(2 * math.pi))


def fitted(memory: LongMemory, positions: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Ridge regression as least squares with additional rows."""
    rows = np.concatenate([values_at(memory, positions), math.sqrt(RIDGE) * np.eye(len(memory.basis))])
    padded = np.concatenate([values, np.zeros((len(memory.basis), values.shape[-1]))])
    return np.linalg.lstsq(rows, padded, rcond=None)[0]


def middles(n: int) -> np.ndarray:
    return (np.arange(n) + 0.5) / n


# -- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contraction", [0.5, 0.8, None])
@pytest.mark.parametrize("horizon", [1, 3])
def test_updates_evaluate_contract_and_fit_again(contraction: float | None, horizon: int) -> None:
    memory = made(contraction=contraction, samples=11, horizon=horizon)
    parts = [torch.cat([c[:, :4]] * (1 + k % 2), 1) for k, c in enumerate(chunks(5))]
    state, past = None, 0
    expected = np.zeros((2, len(memory.basis), 4))
    for part in parts:
        state = memory.update(part, state)
        count = part.shape[1]
        share = 0.0 if past == 0 else past / (past + count) if contraction is None else contraction
        for row in range(2):
            where, what = share + (1 - share) * middles(count), part[row].numpy()
            if past:
                old = values_at(memory, middles(11)) @ expected[row]
                where, what = np.concatenate([share * middles(11), where]), np.concatenate([old, what])
            expected[row] = fitted(memory, where, what)
        past += count
        assert state.lengths == past
        np.testing.assert_allclose(state.coefficients.detach().numpy(), expected, atol=1e-9)


def test_the_state_does_not_grow_and_stays_bounded() -> None:
    memory = made(dtype=torch.float32, horizon=2)
    sizes, largest = set(), 0.0
    state, generator = None, torch.Generator().manual_seed(0)
    for _ in range(400):
        state = memory.update(torch.randn(1, 9, 4, generator=generator), state)
        sizes.add((len(state.recent), state.coefficients.shape))
        largest = max(largest, float(memory.function(state)(torch.linspace(0, 1, 50)[:, None]).abs().max()))
    assert sizes == {(1, torch.Size([1, 6, 4])), (2, torch.Size([1, 6, 4]))}
    assert largest < 5  # the values themselves reach 4


def test_a_constant_stays_a_constant() -> None:
    memory = LongMemory(GaussianBasis.line(40, widths=(0.05,)), 1, contraction=0.6, ridge=1e-6).double()
    state = None
    for _ in range(20):
        state = memory.update(torch.full((1, 30, 1), 2.0, dtype=torch.float64), state)
    assert state is not None
    found = memory.function(state)(torch.linspace(0.02, 0.98, 30, dtype=torch.float64)[:, None])
    torch.testing.assert_close(found, torch.full_like(found, 2.0), atol=0.02, rtol=0)


def test_equal_shares_keep_the_time_of_every_value() -> None:
    memory = LongMemory(GaussianBasis.line(40, widths=(0.05,)), 1, contraction=None, ridge=1e-4).double()
    signal = torch.sin(6 * (torch.arange(600, dtype=torch.float64) + 0.5) / 600)
    state = None
    for part in signal.split(60):
        state = memory.update(part[None, :, None], state)
    assert state is not None
    t = torch.linspace(0.05, 0.95, 20, dtype=torch.float64)
    found = memory.function(state)(t[:, None])[0, :, 0]
    torch.testing.assert_close(found, torch.sin(6 * t), atol=0.03, rtol=0)


# -- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contraction", [0.6, None])
def test_padded_sequences_are_those_without_padding(contraction: float | None) -> None:
    memory = made(contraction=contraction)
    lengths = [[9, 9, 4], [0, 5, 9], [3, 0, 9], [9, 0, 0]]  # per sequence, of three chunks
    full = chunks(3, batch=4)
    state, alone = None, [None] * 4
    for number, chunk in enumerate(full):
        mask = torch.zeros(4, 9, dtype=torch.bool)
        for row, each in enumerate(lengths):
            mask[row, -each[number] :] = each[number] > 0
        state = memory.update(torch.where(mask[..., None], chunk, math.nan), state, mask)
        for row, each in enumerate(lengths):
            if each[number]:
                alone[row] = memory.update(chunk[row : row + 1, -each[number] :], alone[row])
    assert state is not None
    assert state.lengths.tolist() == [22, 14, 12, 9]
    for row, each in enumerate(alone):
        torch.testing.assert_close(state.coefficients[row : row + 1], each.coefficients, atol=1e-10, rtol=1e-8)


def test_sequences_without_values_give_zeros_and_no_penalty() -> None:
    memory = made()
    mask = torch.tensor([[True] * 9, [False] * 9])
    state = memory.update(chunks(1)[0], None, mask)
    found = memory.attend(chunks(1, 3, seed=1)[0], state)
    assert float(found.context[0].detach().abs().min()) > 0
    assert not found.context[1].any()
    assert found.penalty[1] == 0
    nothing = memory.attend(chunks(1, 3)[0], None)
    assert not nothing.context.any()
    assert not nothing.penalty.any()
    assert nothing.state is None


def test_masked_queries_count_for_nothing() -> None:
    memory = made(sticky=True)
    state, query = memory.update(chunks(1)[0]), chunks(1, 3, seed=1)[0]
    mask = torch.tensor([[True, False, True], [True, True, False]])
    found = memory.attend(query, state, mask)
    some = memory.attend(query[:1, ::2], memory.update(chunks(1)[0][:1]))
    torch.testing.assert_close(found.context[:1, ::2], some.context)
    torch.testing.assert_close(found.penalty[:1], some.penalty)
    torch.testing.assert_close(found.state.mass[:1], some.state.mass)  # type: ignore[union-attr]
    assert not found.context[~mask].any()


# -- attention -------------------------------------------------------------------------------------------------------


def density(alpha: float, mean: float, variance: float) -> tuple[Any, float, float]:
    """exp_{2−α} of −(t − μ)²/2σ², normalised by quadrature and bisection, and its ends."""
    score = lambda t: -0.5 * (t - mean) ** 2 / variance  # noqa: E731
    if alpha == 1:
        reach = 12 * math.sqrt(variance)
        return lambda t: math.exp(score(t)) / math.sqrt(2 * math.pi * variance), mean - reach, mean + reach
    low, high = -1e3, 0.0
    for _ in range(200):
        tau = 0.5 * (low + high)
        reach = math.sqrt(-2 * tau * variance)
        power = lambda t, tau=tau: max((alpha - 1) * (score(t) - tau), 0) ** (1 / (alpha - 1))  # noqa: E731
        total = integrate.quad(power, mean - reach, mean + reach)[0]
        low, high = (low, tau) if total < 1 else (tau, high)
    return power, mean - reach, mean + reach


@pytest.mark.parametrize("alpha", [1.0, 1.7, 2.0])
def test_attention_is_the_expected_value_of_the_function(alpha: float) -> None:
    memory = made(alpha=alpha)
    state = memory.update(chunks(1)[0][:1])
    query = chunks(1, 3, seed=1)[0][:1]
    found = memory.attend(query, state)
    weights = {name: p.detach().numpy() for name, p in memory.named_parameters()}
    coefficients = state.coefficients[0].detach().numpy()
    heights = memory.heights.numpy()
    for place in range(3):
        heads = []
        for head in range(2):
            part = slice(2 * head, 2 * head + 2)
            q = weights["query.weight"][part] @ query[0, place].numpy()
            keys = coefficients @ weights["key.weight"][part].T
            scores = heights * (keys @ q) / math.sqrt(2)
            mean = 1 / (1 + math.exp(-(weights["loc.weight"][0] @ scores + weights["loc.bias"][0])))
            variance = math.log1p(math.exp(weights["spread.weight"][0] @ scores + weights["spread.bias"][0])) + 1e-6
            assert found.focus.loc[0, place, head].item() == pytest.approx(mean)  # type: ignore[union-attr]
            p, low, high = density(alpha, mean, variance)
            b = coefficients @ weights["value.weight"][part].T
            value = lambda t, i, b=b, p=p: p(t) * (values_at(memory, np.array([t])) @ b)[0, i]  # noqa: E731
            heads += [integrate.quad(value, low, high, args=(i,), limit=200)[0] for i in range(2)]
        np.testing.assert_allclose(
            found.context[0, place].detach().numpy(), weights["out.weight"] @ np.array(heads), atol=1e-7
        )


def test_the_penalty_is_the_divergence_from_the_prior() -> None:
    memory = made()
    found = memory.attend(chunks(1, 5, seed=1)[0], memory.update(chunks(1)[0]))
    assert found.focus is not None
    sigma = found.focus.sigma.squeeze().sqrt()
    each = kl_divergence(Normal(0.0, sigma), Normal(0.0, 0.2))
    torch.testing.assert_close(found.penalty, each.mean((1, 2)))


def test_the_first_densities_have_the_width_of_the_prior() -> None:
    memory = LongMemory(GaussianBasis.line(16, widths=(0.05,)), 4, prior=0.3)
    found = memory.attend(torch.zeros(1, 1, 4), memory.update(torch.randn(1, 10, 4)))
    assert found.focus is not None
    torch.testing.assert_close(found.focus.sigma.flatten(), torch.tensor([0.09 + 1e-6]))
    assert float(found.penalty.detach()) < 1e-6


def test_any_module_may_be_the_basis() -> None:
    class Hats(torch.nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return torch.relu(1 - 4 * (t - torch.linspace(0, 1, 5, dtype=t.dtype)).abs())

    memory = LongMemory(Hats(), 4, 2).double()
    assert isinstance(memory.basis, FunctionBasis)
    state = memory.update(chunks(1)[0])
    found = memory.attend(chunks(1, 3)[0], state)
    assert found.focus is not None
    mean, variance = found.focus.loc[0, 0, 0].item(), found.focus.sigma[0, 0, 0].item()
    p, low, high = density(2.0, mean, variance)
    knots = [k for k in np.linspace(0, 1, 5) if low < k < high] + [k for k in (-0.25, 1.25) if low < k < high]
    coefficients = memory.value(state.coefficients)[0].detach().numpy()[:, :2]
    hats = lambda t: np.maximum(1 - 4 * np.abs(t - np.linspace(0, 1, 5)), 0)  # noqa: E731
    head = [integrate.quad(lambda t: p(t) * (hats(t) @ coefficients)[i], low, high, points=knots)[0] for i in range(2)]  # noqa: B023
    alone = copy.deepcopy(memory)
    with torch.no_grad():
        alone.out.weight.copy_(torch.eye(4))
    np.testing.assert_allclose(alone.attend(chunks(1, 3)[0], state).context[0, 0, :2].detach().numpy(), head, atol=1e-6)


# -- sticky memories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_the_mass_is_that_of_the_densities_and_adds_up(alpha: float) -> None:
    memory = made(alpha=alpha, sticky=True)
    state = memory.update(chunks(1)[0][:1])
    found = memory.attend(chunks(1, 3, seed=1)[0][:1], state)
    assert found.focus is not None
    assert found.state is not None
    assert found.state.mass is not None
    expected = np.zeros(6)
    for mean, variance in zip(found.focus.loc.flatten().tolist(), found.focus.sigma.flatten().tolist(), strict=True):
        p, low, high = density(alpha, mean, variance)
        for cell in range(6):
            ends = max(low, cell / 6), min(high, (cell + 1) / 6)
            expected[cell] += integrate.quad(p, *ends)[0] if ends[0] < ends[1] else 0
    np.testing.assert_allclose(found.state.mass[0].numpy(), expected, atol=1e-7)
    again = memory.attend(chunks(1, 3, seed=1)[0][:1], found.state)
    torch.testing.assert_close(again.state.mass, 2 * found.state.mass)  # type: ignore[union-attr]
    assert memory.update(chunks(1)[0][:1], found.state).mass is None


def with_mass(state: MemoryState, mass: Tensor) -> MemoryState:
    return MemoryState(state.coefficients, state.lengths, mass, state.base, state.recent)


def test_sticky_places_are_quantiles_of_the_mass() -> None:
    memory = made(sticky=True, samples=7)
    state = memory.update(chunks(1)[0])
    mass = torch.tensor([[1.0, 0, 5, 2, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    new = memory.update(chunks(2)[1], with_mass(state, mass))
    for row, weights in enumerate([[1, 0, 5, 2, 0, 0], [1, 1, 1, 1, 1, 1]]):  # no mass at all: even places
        ends = np.concatenate([[0], np.cumsum(weights)]) / sum(weights)
        places = np.array([_inverse(ends, q) for q in middles(7)])
        old = values_at(memory, places) @ state.coefficients[row].detach().numpy()
        where = np.concatenate([0.5 * middles(7), 0.5 + 0.5 * middles(9)])
        expected = fitted(memory, where, np.concatenate([old, chunks(2)[1][row].numpy()]))
        np.testing.assert_allclose(new.coefficients[row].detach().numpy(), expected, atol=1e-9)


def _inverse(ends: np.ndarray, level: float) -> float:
    cell = next(k for k in range(6) if ends[k + 1] >= level)
    return float(cell + (level - ends[cell]) / (ends[cell + 1] - ends[cell])) / 6


def test_sticky_places_are_drawn_by_a_generator_if_there_is_one() -> None:
    memory = made(sticky=True, samples=4000, size=6)
    state = memory.update(chunks(1)[0])
    mass = torch.tensor([[0.0, 0, 1, 3, 0, 0]] * 2)
    draws = [memory._sticky_places(with_mass(state, mass), torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert draws[0] is not None
    assert draws[1] is not None
    assert draws[2] is not None
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert bool((draws[0].diff(dim=-1) >= 0).all())
    share = ((draws[0] > 0.5) & (draws[0] < 4 / 6)).double().mean()
    assert float(share) == pytest.approx(0.75, abs=0.03)  # three standard deviations are 0.02
    assert bool(((draws[0] >= 2 / 6) & (draws[0] <= 4 / 6)).all())


def test_sticky_memories_keep_more_of_what_was_attended_to() -> None:
    t = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    signal = torch.sin(40 * t)[None, :, None]
    memory = LongMemory(GaussianBasis.line(32, widths=(0.03,)), 1, contraction=0.5, sticky=True).double()
    state = memory.update(signal)
    mass = torch.zeros(1, 32)
    mass[:, :8] = 1.0  # attention to the first quarter
    errors = []
    for each in (with_mass(state, mass), state):
        new = memory.update(torch.zeros(1, 64, 1, dtype=torch.float64), each)
        # Where the first quarter is now: on all of [0, ½], or on its first quarter.
        now = 2 * t[:16] if each.mass is not None else 0.5 * t[:16]
        errors.append(float((memory.function(new)(now[:, None])[0, :, 0] - signal[0, :16, 0]).square().mean()))
    assert errors[0] < 0.2 * errors[1]


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("horizon", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_end_after_the_horizon_and_are_whole_before(horizon: int, masked: bool) -> None:
    parts = [c.requires_grad_() for c in chunks(5)]
    mask = torch.ones(2, 9, dtype=torch.bool) if masked else None
    results = []
    for reach in (horizon, 5):
        memory, state = made(horizon=reach), None
        for part in parts:
            state = memory.update(part, state, mask)
        assert state is not None
        results.append(torch.autograd.grad(state.coefficients.square().sum(), parts, allow_unused=True))
    for back, (found, whole) in enumerate(zip(reversed(results[0]), reversed(results[1]), strict=True)):
        if back < horizon:
            torch.testing.assert_close(found, whole)
        else:
            assert found is None
            assert whole is not None


def test_a_detached_state_has_the_same_function_and_no_gradients() -> None:
    memory, parts = made(horizon=3), [c.requires_grad_() for c in chunks(3)]
    first = memory.update(parts[1], memory.update(parts[0]))
    new, apart = memory.update(parts[2], first), memory.update(parts[2], first.detach())
    torch.testing.assert_close(new.coefficients, apart.coefficients)
    found = torch.autograd.grad(apart.coefficients.sum(), parts, allow_unused=True)
    assert [each is None for each in found] == [True, True, False]


@pytest.mark.parametrize(("alpha", "sticky"), [(1.0, False), (2.0, False), (1.6, False), (2.0, True)])
def test_derivatives_agree_with_finite_differences(alpha: float, sticky: bool) -> None:
    memory = made(alpha=alpha, size=4, horizon=2, sticky=sticky)
    old, new, query = (c.requires_grad_() for c in (*chunks(2, 3, 1), chunks(1, 2, 1, seed=2)[0]))

    def function(old: Tensor, new: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        found = memory.attend(query, memory.update(new, memory.update(old)))
        return found.context, found.penalty

    assert torch.autograd.gradcheck(function, (old, new, query))
    if alpha != 1.6:
        assert torch.autograd.gradgradcheck(function, (old, new, query))


def test_parameters_get_gradients() -> None:
    memory = made()
    found = memory.attend(chunks(1, 3, seed=1)[0], memory.update(chunks(1)[0]))
    (found.context.square().sum() + found.penalty.sum()).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in memory.parameters())


# -- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close(dtype: torch.dtype) -> None:
    exact, low = made(), made(dtype=dtype)
    query = chunks(1, 3, seed=1)[0]
    expected = exact.attend(query, exact.update(chunks(1)[0])).context
    found = low.attend(query.to(dtype), low.update(chunks(1)[0].to(dtype))).context
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0)


def test_a_saved_memory_computes_the_same() -> None:
    first, second = made(), LongMemory(GaussianBasis.line(6, widths=(0.12,)), 4, 2, ridge=RIDGE, prior=0.2).double()
    second.load_state_dict(first.state_dict())
    state, query = first.update(chunks(1)[0]), chunks(1, 3)[0]
    torch.testing.assert_close(second.attend(query, state).context, first.attend(query, state).context)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "embed_dim must be a multiple of num_heads, got 4 and 3"),
        ({"contraction": 1.0}, "contraction must satisfy 0 < contraction < 1"),
        ({"prior": 0.0}, "prior must satisfy"),
        ({"horizon": 0}, "horizon must be"),
        ({"alpha": -1.0}, "alpha must satisfy"),
        ({"samples": 0}, "samples must be"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongMemory(GaussianBasis.line(4), 4, **options)


def test_bad_input_is_refused() -> None:
    memory = made()
    state = memory.update(chunks(1)[0])
    with pytest.raises(ValueError, match="one dimension"):
        LongMemory(GaussianBasis.grid(2), 4)
    with pytest.raises(TypeError, match="basis must be a Basis, or a module"):
        LongMemory(torch.relu, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="values must have shape"):
        memory.update(torch.zeros(2, 9, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="values"):
        memory.update(torch.zeros(2, 0, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="values must have the 2 sequences of state, got 3"):
        memory.update(torch.zeros(3, 9, 4, dtype=torch.float64), state)
    with pytest.raises(ValueError, match="mask"):
        memory.update(chunks(1)[0], None, torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(TypeError, match="state must be the result of update"):
        memory.attend(chunks(1)[0], torch.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="query must have shape"):
        memory.attend(torch.zeros(2, 3, 5, dtype=torch.float64), state)
