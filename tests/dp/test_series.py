"""Distances between series and their means: definitions, bands, limits."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from enumeration import solve, table_edges
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fenchel import Gini, Hard, Shannon, Tsallis, kernels
from fenchel.dp import Alignment, LinearChain, barycenter, dtw, dtw_divergence


def plain_dtw(x: torch.Tensor, y: torch.Tensor) -> float:
    """The textbook's table."""
    table = {(-1, -1): 0.0}
    for i, j in itertools.product(range(len(x)), range(len(y))):
        before = [table.get(c, float("inf")) for c in ((i - 1, j - 1), (i - 1, j), (i, j - 1))]
        table[i, j] = float((x[i] - y[j]).square().sum()) + min(before)
    return table[len(x) - 1, len(y) - 1]


def soft_dtw(x: list[list[float]], y: list[list[float]], gamma: float) -> tuple[float, list[list[float]]]:
    """Soft-DTW and its gradient in the costs, by the two recursions of Cuturi & Blondel (2017), in plain Python."""
    n, m = len(x), len(y)
    cost = {(i, j): sum((a - b) ** 2 for a, b in zip(x[i], y[j], strict=True)) for i in range(n) for j in range(m)}
    r = {(-1, -1): 0.0}
    for i, j in itertools.product(range(n), range(m)):
        before = [r[c] for c in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if c in r]
        least = min(before)
        r[i, j] = cost[i, j] + least - gamma * math.log(sum(math.exp((least - v) / gamma) for v in before))
    e = {(n - 1, m - 1): 1.0}
    for i, j in itertools.product(reversed(range(n)), reversed(range(m))):
        after = [c for c in ((i + 1, j + 1), (i + 1, j), (i, j + 1)) if c in cost]
        e.setdefault((i, j), sum(e[c] * math.exp((r[c] - r[i, j] - cost[c]) / gamma) for c in after))
    return r[n - 1, m - 1], [[e[i, j] for j in range(m)] for i in range(n)]


@pytest.mark.parametrize("shape", [(8, 6), (1, 5), (70, 9), (41, 50)], ids=str)  # antidiagonals of many lengths
@pytest.mark.parametrize("gamma", [0.1, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-10)], ids=str)
def test_shannon_is_soft_dtw(shape: tuple[int, int], gamma: float, dtype: torch.dtype, tolerance: float) -> None:
    n, m = shape
    x = torch.randn(3, n, 2, dtype=dtype, requires_grad=True)
    y = torch.randn(3, m, 2, dtype=dtype, requires_grad=True)
    values, expected = [], []
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        value, gradient = soft_dtw(a, b, gamma)
        values.append(value)
        expected.append(gradient)
    value, e = torch.tensor(values, dtype=dtype), torch.tensor(expected, dtype=torch.float64)
    found = dtw(x, y, gamma)
    torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)
    gaps = 2 * (x.detach().double().unsqueeze(2) - y.detach().double().unsqueeze(1)) * e.unsqueeze(-1)
    wanted = gaps.sum(2).to(dtype), -gaps.sum(1).to(dtype)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), (x, y)), wanted, rtol=tolerance, atol=10 * tolerance)


def test_hard_is_dynamic_time_warping() -> None:
    x, y = torch.randn(4, 6, 2).double(), torch.randn(4, 9, 2).double()
    expected = torch.tensor([plain_dtw(a, b) for a, b in zip(x, y, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(dtw(x, y, omega=Hard()), expected)
    torch.testing.assert_close(dtw(x, y, gamma=1e-4), expected, rtol=1e-3, atol=1e-3)
    lengths = torch.tensor([[6, 9], [1, 9], [3, 2], [1, 1]])
    cut = [plain_dtw(a[:n], b[:m]) for a, b, (n, m) in zip(x, y, lengths.tolist(), strict=True)]
    torch.testing.assert_close(dtw(x, y, omega=Hard(), lengths=lengths), torch.tensor(cut).double())


@pytest.mark.parametrize("gamma", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("omega", [Shannon(), Gini()], ids=str)
def test_gamma_is_a_temperature(gamma: float, omega) -> None:
    x, y = torch.randn(2, 4, 1).double(), torch.randn(2, 5, 1).double()
    costs = (x - y.mT).square()
    torch.testing.assert_close(dtw(x, y, gamma, omega), gamma * Alignment(costs / gamma, omega=omega).value)


@pytest.mark.parametrize("shape", [(4, 4), (2, 5), (5, 2), (1, 4), (3, 7), (6, 4)])
@pytest.mark.parametrize("band", [0, 1, 2])
def test_a_band_keeps_to_the_diagonal(shape: tuple[int, int], band: int) -> None:
    n, m = shape
    costs = torch.rand(1, n, m).double()

    def near(i: int, j: int, n: int, m: int) -> bool:
        short, steps = (i, j) if n <= m else (j, i)
        ideal = steps * (min(n, m) - 1) / max(max(n, m) - 1, 1)
        return abs(short - ideal) <= band + 0.5 + 1e-9

    lengths = torch.tensor([[n, m]])
    d = Alignment(costs, band=band, omega=Gini())
    answer = solve(*table_edges(0, costs, lengths, near), 2.0, 1.0)
    assert answer.paths  # there always is a path
    torch.testing.assert_close(d.value, -torch.tensor([answer.value]).double())
    torch.testing.assert_close(d.marginals[0], answer.marginals(n * m).reshape(n, m), rtol=0, atol=1e-12)
    if n == m:
        outside = (torch.arange(n)[:, None] - torch.arange(m)).abs() > band
        assert (d.marginals[0][outside] == 0).all()
    padded = torch.full((1, n + 2, m + 1), torch.nan).double()
    padded[:, :n, :m] = costs
    torch.testing.assert_close(Alignment(padded, lengths, Gini(), band).value, d.value)
    turned = Alignment(costs.transpose(1, 2), band=band, omega=Gini())
    torch.testing.assert_close(turned.marginals, d.marginals.transpose(1, 2))


@pytest.mark.parametrize("omega", [Shannon(), Gini(), Tsallis(1.5), Hard()], ids=str)
@pytest.mark.parametrize("gamma", [0.1, 1.0, 10.0])
def test_the_divergence_is_not_negative_and_zero_for_equal_series(omega, gamma: float) -> None:
    for spread in (0.1, 1.0):
        x, y = spread * torch.randn(50, 5, 2).double(), spread * torch.randn(50, 7, 2).double()
        near = x + 0.1 * spread * torch.randn_like(x)
        assert (dtw_divergence(x, y, gamma, omega) >= 0).all()
        assert (dtw_divergence(x, near, gamma, omega) >= 0).all()
        assert (dtw_divergence(x, x.clone(), gamma, omega) == 0).all()
        torch.testing.assert_close(dtw_divergence(x, y, gamma, omega), dtw_divergence(y, x, gamma, omega))
    lengths = torch.tensor([[5, 7], [2, 3]]).repeat(25, 1)
    cut = dtw_divergence(x, y, gamma, omega, lengths=lengths)
    torch.testing.assert_close(cut[1], dtw_divergence(x[1:2, :2], y[1:2, :3], gamma, omega)[0])


def test_the_difference_itself_can_be_negative_for_gini() -> None:
    # Why the positive part is taken there.
    x = torch.tensor([[0.5211, 0.6244, 0.3253, -0.5720]], dtype=torch.float64).unsqueeze(-1)
    y = torch.tensor([[0.5751, 0.6085, 0.2137, -0.6985]], dtype=torch.float64).unsqueeze(-1)
    difference = dtw(x, y, omega=Gini()) - 0.5 * dtw(x, x, omega=Gini()) - 0.5 * dtw(y, y, omega=Gini())
    assert difference.item() < -1e-3
    assert dtw_divergence(x, y, omega=Gini()).item() == 0


def test_derivatives_in_the_series() -> None:
    x, y = torch.randn(2, 3, 2).double().requires_grad_(), torch.randn(2, 4, 2).double().requires_grad_()
    assert gradcheck(lambda a, b: dtw(a, b, 0.7, Shannon(), 1), (x, y))
    assert gradcheck(lambda a, b: dtw_divergence(a, b), (x, y))
    assert gradgradcheck(lambda a, b: dtw(a, b), (x, y), fast_mode=True)


def test_what_stands_after_the_end_of_a_series_does_not_matter() -> None:
    x, y = torch.randn(2, 5, 3), torch.randn(2, 6, 3)
    lengths = torch.tensor([[4, 6], [5, 2]])
    after = [torch.arange(t.shape[1]) >= lengths[:, i, None] for i, t in enumerate((x, y))]
    dirty = [t.masked_fill(a[..., None], math.nan).requires_grad_() for t, a in zip((x, y), after, strict=True)]
    found = dtw(*dirty, lengths=lengths)
    torch.testing.assert_close(found, dtw(x, y, lengths=lengths))
    for gradient, gone in zip(torch.autograd.grad(found.sum(), dirty), after, strict=True):
        assert gradient.isfinite().all()
        assert (gradient[gone] == 0).all()


def test_a_barycenter_of_one_series_is_near_it_and_descends() -> None:
    series = torch.sin(torch.linspace(0, 6, 12)).double().reshape(1, 12, 1)
    mean = barycenter(series, gamma=0.01)
    assert mean.shape == (12, 1)
    torch.testing.assert_close(mean, series[0], rtol=0, atol=0.1)


@pytest.mark.parametrize("omega", [Shannon(), Gini()], ids=str)
def test_a_barycenter_is_better_than_the_mean(omega) -> None:
    bumps = torch.exp(-(torch.arange(16.0) - torch.tensor([[4.0], [10.0]])).square() / 2).unsqueeze(-1)
    weights = torch.tensor([3.0, 1.0])

    def cost(z: torch.Tensor) -> float:
        each = dtw(z.expand(2, *z.shape), bumps, 0.05, omega)
        return float((weights / 4 * each).sum())

    found = barycenter(bumps, weights=weights, gamma=0.05, omega=omega, max_iter=30)
    assert cost(found) < cost(torch.einsum("k,ktd->td", weights / 4, bumps)) - 0.1
    listed = barycenter([b[:, 0] for b in bumps], weights=weights, gamma=0.05, omega=omega, max_iter=30)
    torch.testing.assert_close(listed, found[:, 0])


def test_barycenters_of_series_of_different_lengths() -> None:
    short, long = torch.linspace(0, 1, 5), torch.linspace(0, 1, 9)
    found = barycenter([short, long], gamma=0.01, max_iter=20)
    assert found.shape == (9,)
    torch.testing.assert_close(found, long, rtol=0, atol=0.15)
    padded = torch.full((2, 9, 1), 7.0)
    padded[0, :5, 0], padded[1, :, 0] = short, long
    torch.testing.assert_close(barycenter(padded, lengths=torch.tensor([5, 9]), gamma=0.01, max_iter=20)[:, 0], found)
    assert barycenter(padded, lengths=torch.tensor([5, 9]), init=torch.zeros(4, 1), max_iter=3).shape == (4, 1)
    assert barycenter([short, long], init=torch.zeros(4), max_iter=3).shape == (4,)


def test_a_barycenter_is_the_same_without_derivatives() -> None:
    series = torch.rand(3, 6, 2)
    found = barycenter(series, max_iter=5)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(barycenter(series, max_iter=5), found)
            assert torch.equal(
                barycenter(series.clone(), weights=torch.ones(3), lengths=torch.full((3,), 6), max_iter=5), found
            )


@pytest.mark.parametrize("omega", [Shannon(), Gini()], ids=str)
def test_batch_dimensions_broadcast(omega) -> None:
    x, y = torch.randn(2, 4, 2).double().requires_grad_(), torch.randn(3, 5, 2).double().requires_grad_()
    lengths = torch.tensor([[[4, 5], [2, 3], [1, 4]], [[3, 1], [4, 5], [2, 2]]])
    pairs = [(i, j) for i in range(2) for j in range(3)]
    for function in (dtw, dtw_divergence):
        each = torch.stack([function(x[i : i + 1], y[j : j + 1], omega=omega)[0] for i, j in pairs]).reshape(2, 3)
        found = function(x[:, None], y[None], omega=omega)
        torch.testing.assert_close(found, each)
        weight = torch.randn(2, 3).double()
        torch.testing.assert_close(*(torch.autograd.grad((weight * v).sum(), (x, y)) for v in (found, each)))
        cut = [
            function(x[i : i + 1, : lengths[i, j, 0]], y[j : j + 1, : lengths[i, j, 1]], omega=omega)[0]
            for i, j in pairs
        ]
        found = function(x[:, None], y, omega=omega, lengths=lengths)
        torch.testing.assert_close(found, torch.stack(cut).reshape(2, 3))
        same = function(x[:, None], y[None], omega=omega, lengths=lengths[:1, :1])
        torch.testing.assert_close(same, function(x[:, None], y, omega=omega))
        assert function(x[:, None, :, :], y[:0], omega=omega).shape == (2, 0)
        with pytest.raises(ValueError, match=r"lengths must have shape \(2, 3, 2\)"):
            function(x[:, None], y, lengths=lengths[0])


@pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("function", [dtw, dtw_divergence])
def test_a_series_of_nan_leaves_the_gradients_of_others_alone(
    function: Any, compiled: bool, set_kernels: Callable[[bool], None]
) -> None:
    set_kernels(compiled)
    x, y = torch.randn(2, 4, 2).double(), torch.randn(3, 5, 2).double()
    y[1, 2, 0], x[1, 0, 1] = math.nan, math.inf
    x.requires_grad_()
    y.requires_grad_()
    keep = torch.tensor([[True, False, True], [False, False, False]])
    derivatives = []
    for values in (function(x[:, None], y)[keep], torch.cat([function(x[:1], y[:1]), function(x[:1], y[2:])])):
        first = torch.autograd.grad(values.square().sum(), (x, y), create_graph=True)
        derivatives.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, y))])
    torch.testing.assert_close(*derivatives)
    (gradient,) = torch.autograd.grad(function(x[:, None], y).sum(), y)
    assert gradient[1].isnan().any()  # what is not left out shows


def test_barycenters_of_a_batch_are_those_of_its_sets() -> None:
    sets, lengths = torch.randn(2, 2, 3, 6, 2), torch.randint(2, 7, (2, 2, 3))
    weights, init = torch.rand(2, 2, 3) + 0.1, torch.randn(2, 2, 4, 2)
    found = barycenter(sets, weights=weights, lengths=lengths, gamma=0.5, max_iter=4)
    started = barycenter(sets, gamma=0.5, max_iter=4, init=init)
    common = barycenter(sets, weights=weights[0, 0], lengths=lengths[1, 1], max_iter=2, init=init[0, 1])
    assert found.shape == (2, 2, 6, 2)
    for i, j in itertools.product(range(2), range(2)):
        assert torch.equal(
            found[i, j], barycenter(sets[i, j], weights=weights[i, j], lengths=lengths[i, j], gamma=0.5, max_iter=4)
        )
        assert torch.equal(started[i, j], barycenter(sets[i, j], gamma=0.5, max_iter=4, init=init[i, j]))
        assert torch.equal(
            common[i, j],
            barycenter(sets[i, j], weights=weights[0, 0], lengths=lengths[1, 1], max_iter=2, init=init[0, 1]),
        )
    assert barycenter(sets[:0], max_iter=1).shape == (0, 2, 6, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dtw(torch.zeros(2, 4, 3), torch.zeros(3, 4, 3)), "x and y must have batch dimensions that broadcast"),
        (lambda: dtw(torch.zeros(2, 4, 3), torch.zeros(2, 4, 2)), "x and y must agree in D"),
        (lambda: dtw(torch.zeros(2, 0, 1), torch.zeros(2, 3, 1)), "x must have shape"),
        (
            lambda: dtw(torch.zeros(60, 3), torch.zeros(60, 3)),
            r"x must have shape \(…, N, D\).*got \(60, 3\).*x\[None\]",
        ),
        (lambda: dtw(torch.zeros(1, 60, 3), torch.zeros(60, 3)), r"y must have shape \(…, M, D\).*got \(60, 3\)"),
        (lambda: dtw_divergence(torch.zeros(60, 3), torch.zeros(60, 3)), r"x must have shape \(…, N, D\)"),
        (lambda: dtw_divergence(torch.zeros(60), torch.zeros(60)), r"x must have shape \(…, N, D\)"),
        (lambda: Alignment(torch.zeros(60, 3)), r"costs must have shape \(B, N, M\).*got \(60, 3\)"),
        (lambda: LinearChain(torch.zeros(60, 3), torch.zeros(3, 3)), r"unary must have shape \(B, T, S\)"),
        (lambda: barycenter([]), "series must be"),
        (lambda: barycenter(torch.zeros(60, 3)), r"series must have shape \(…, K, T, D\).*got \(60, 3\)"),
        (lambda: barycenter(torch.zeros(2, 3, 1), weights=torch.tensor([1.0, -1.0])), "weights must be at least 0"),
        (lambda: barycenter(torch.zeros(2, 3, 1), weights=torch.tensor([1.0])), r"weights must have shape \(2,\)"),
        (lambda: barycenter(torch.zeros(2, 3, 1), max_iter=0), "max_iter must be"),
        (lambda: barycenter(torch.zeros(2, 3, 1), lengths=torch.tensor([0, 3])), "lengths must be in"),
        (
            lambda: barycenter(torch.zeros(4, 2, 3, 1), lengths=torch.ones(4).long()),
            r"lengths must have shape \(4, 2\)",
        ),
        (lambda: barycenter(torch.zeros(2, 3, 1), init=torch.zeros(3, 2)), r"init must have shape \(N, 1\)"),
    ],
)
def test_bad_series_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("function", [dtw, dtw_divergence])
@pytest.mark.parametrize(
    ("lengths", "error"),
    [(torch.tensor([5, 6]), ValueError), ([[5, 6], [2, 3]], TypeError), (torch.ones(2, 2), TypeError)],
)
def test_lengths_are_checked_before_they_are_used(function: Any, lengths: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="lengths must"):
        function(torch.randn(2, 5, 1), torch.randn(2, 6, 1), lengths=lengths)


@pytest.mark.parametrize(
    "series",
    [
        [torch.randn(20), torch.randn(25, 1)],
        [torch.randn(5, 2), torch.randn(6, 3)],
        [torch.randn(5), torch.randn(6, dtype=torch.float64)],
    ],
)
def test_series_that_do_not_fit_each_other_are_named(series: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="series must agree"):
        barycenter(series)


def test_a_back_end_serves_the_distances_of_series() -> None:
    calls: list[str] = []

    def distances(x: Tensor, y: Tensor) -> Tensor:
        calls.append("forward")
        return (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(-1)

    def backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        calls.append("backward")
        each = 2 * grad.unsqueeze(-1) * (x.unsqueeze(2) - y.unsqueeze(1))
        return each.sum(2), -each.sum(1)

    x, y = (torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    expected = torch.autograd.grad(dtw(x, y).sum(), (x, y))
    steps = (("distances", distances), ("distances_backward", backward))
    removers = [kernels.register(step, "squared_euclidean", each, dtypes=(torch.float64,)) for step, each in steps]
    try:
        torch.testing.assert_close(torch.autograd.grad(dtw(x, y).sum(), (x, y)), expected)
    finally:
        for remove in removers:
            remove()
    assert calls == ["forward", "backward"]
