"""SoftDTW: values by a plain recursion on scipy's distances, its arguments, peers."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from torch import Tensor
from torch.autograd import gradcheck

from fenchel import Gini, Hard, Shannon
from fenchel.dp import Alignment, dtw, dtw_divergence
from fenchel.nn import SoftDTW

NAMES = {"sqeuclidean": "sqeuclidean", "euclidean": "euclidean", "l1": "cityblock", "cosine": "cosine"}


def plain(costs: np.ndarray, gamma: float, allowed: Callable[[int, int], bool] = lambda i, j: True) -> float:
    """Soft-DTW of one table of costs, cell by cell."""
    n, m = costs.shape
    r = np.full((n + 1, m + 1), np.inf)
    r[0, 0] = 0.0
    for i in range(n):
        for j in range(m):
            before = [v for v in (r[i, j], r[i, j + 1], r[i + 1, j]) if v < np.inf]
            if before and allowed(i, j):
                least = min(before)
                total = sum(math.exp((least - v) / gamma) for v in before)
                r[i + 1, j + 1] = costs[i, j] + least - gamma * math.log(total)
    return float(r[n, m])


def pair(batch: int = 3, n: int = 6, m: int = 8, depth: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(batch, size, depth, dtype=torch.float64, generator=g) for size in (n, m))  # type: ignore[return-value]


@pytest.mark.parametrize("cost", NAMES)
@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_values_are_those_of_a_plain_recursion(cost: str, gamma: float) -> None:
    x, y = pair()
    lengths = torch.tensor([[6, 8], [4, 8], [6, 1]])
    found = SoftDTW(gamma, cost=cost)(x, y, lengths)
    for b, (n, m) in enumerate(lengths.tolist()):
        assert found[b].item() == pytest.approx(plain(cdist(x[b, :n], y[b, :m], NAMES[cost]), gamma), abs=1e-9)


@pytest.mark.parametrize("cost", NAMES)
@pytest.mark.parametrize("normalize", [False, True])
def test_it_has_derivatives_for_every_cost(cost: str, normalize: bool) -> None:
    x, y = pair(2, 3, 4)
    module = SoftDTW(0.7, normalize, cost=cost)
    assert gradcheck(module, (x.requires_grad_(), y.requires_grad_()))


@pytest.mark.parametrize("cost", NAMES)
def test_points_that_meet_have_a_finite_gradient(cost: str) -> None:
    x = torch.zeros(1, 4, 2, dtype=torch.float64, requires_grad=True)
    SoftDTW(cost=cost)(x, x.detach().clone()).sum().backward()
    assert x.grad is not None
    assert (x.grad == 0).all()


def test_a_function_is_a_cost_and_its_shape_is_checked() -> None:
    x, y = pair()
    found = SoftDTW(cost=lambda a, b: torch.cdist(a, b, p=1.0))(x, y)
    torch.testing.assert_close(found, SoftDTW(cost="l1")(x, y))
    with pytest.raises(ValueError, match=r"cost must return a tensor of shape \(B, N, M\), here \(3, 6, 8\), got \(3,"):
        SoftDTW(cost=lambda a, b: torch.cdist(b, a))(x, y)


@pytest.mark.parametrize("omega", [Shannon(), Gini(), Hard()], ids=str)
def test_gamma_may_be_one_per_pair(omega: Shannon) -> None:
    x, y = pair()
    gammas = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
    for normalize in (False, True):
        found = SoftDTW(gammas, normalize, omega=omega)(x, y)
        each = [SoftDTW(g, normalize, omega=omega)(x[i : i + 1], y[i : i + 1]) for i, g in enumerate(gammas.tolist())]
        torch.testing.assert_close(found, torch.cat(each))


def test_gamma_is_trained_if_it_is_a_parameter() -> None:
    x, y = pair()
    assert gradcheck(lambda g: SoftDTW(g)(x, y), torch.full((3,), 0.8, dtype=torch.float64, requires_grad=True))
    assert gradcheck(lambda g: SoftDTW(g, True)(x, y), torch.tensor(0.8, dtype=torch.float64, requires_grad=True))
    module = SoftDTW(torch.nn.Parameter(torch.ones(3)))
    assert [name for name, _ in module.named_parameters()] == ["gamma"]
    assert not SoftDTW(torch.ones(3)).state_dict()
    with torch.no_grad():  # a point at infinity forbids what it is aligned with, and spoils no gradient
        x[0, 2] = torch.inf
    gamma = torch.ones(3, dtype=torch.float64, requires_grad=True)
    SoftDTW(gamma)(x, y).nan_to_num(posinf=0.0).sum().backward()
    assert gamma.grad is not None
    assert gamma.grad.isfinite().all()


def test_normalize_is_the_divergence_and_omega_any_other() -> None:
    x, y = pair()
    torch.testing.assert_close(SoftDTW(2.0, True)(x, y), dtw_divergence(x, y, 2.0))
    torch.testing.assert_close(SoftDTW(2.0, omega=Gini())(x, y), dtw(x, y, 2.0, Gini()))
    assert SoftDTW(normalize=True)(x, x).tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(SoftDTW()(x[:, None], x)[1, 2], SoftDTW()(x[1:2], x[2:3])[0])


def test_bandwidth_is_a_band_around_the_diagonal() -> None:
    x, y = pair(n=8)
    for width in (0, 2):
        found = SoftDTW(bandwidth=width)(x, y)
        for b in range(3):
            expected = plain(cdist(x[b], y[b], "sqeuclidean"), 1.0, lambda i, j, w=width: abs(i - j) <= w)
            assert found[b].item() == pytest.approx(expected)
    x, y = pair(n=3, m=9)  # theirs would have no alignment
    expected_value = Alignment(torch.cdist(x, y).square(), band=1).value
    torch.testing.assert_close(SoftDTW(bandwidth=1)(x, y), expected_value)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SoftDTW(True), TypeError, "there is no argument use_cuda here"),
        (lambda: SoftDTW(0.0), ValueError, "gamma must satisfy 0 < gamma < inf"),
        (lambda: SoftDTW(torch.tensor([1.0, -1.0])), ValueError, "gamma must satisfy 0 < gamma < inf"),
        (lambda: SoftDTW(bandwidth=-1), ValueError, "bandwidth must be at least 0"),
        (lambda: SoftDTW(cost="chebyshev"), ValueError, "cost must be"),
        (lambda: SoftDTW(cost=3), TypeError, "cost must be a function or one of sqeuclidean"),  # type: ignore[arg-type]
        (lambda: SoftDTW()(torch.zeros(2, 3), torch.zeros(2, 3)), ValueError, "x must have shape"),
        (
            lambda: SoftDTW(torch.ones(2))(torch.zeros(3, 4, 1), torch.zeros(3, 5, 1)),
            ValueError,
            r"gamma must broadcast with the batch dimensions of the series, \(3,\), got shape \(2,\)",
        ),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_it_shows_what_it_is() -> None:
    assert repr(SoftDTW(0.5, bandwidth=3)) == "SoftDTW(gamma=0.5, normalize=False, bandwidth=3, cost='sqeuclidean')"


def test_values_and_gradients_are_those_of_pysdtw() -> None:
    peer = pytest.importorskip("pysdtw")
    x, y = (each.float().requires_grad_() for each in pair(4, 12, 15))
    for gamma in (0.1, 1.0):
        found, expected = SoftDTW(gamma)(x, y), peer.SoftDTW(gamma=gamma, use_cuda=False)(x, y)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        mine, theirs = (torch.autograd.grad(each.sum(), x)[0] for each in (found, expected))
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_values_are_those_of_tslearn() -> None:
    peer = pytest.importorskip("tslearn.metrics")
    x, y = pair()
    found = SoftDTW(0.5)(x, y)
    expected = [peer.soft_dtw(a.numpy(), b.numpy(), gamma=0.5) for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
