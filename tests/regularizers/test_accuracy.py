"""To the last digit: against 50-digit arithmetic, on random rows and on rows made to be hard."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fenchel
import oracles

ABSOLUTE = {torch.float64: 1e-12, torch.float32: 1e-6}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@pytest.fixture(autouse=True, params=["compiled", "plain", "device"])
def _path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels, on the torch path, and on the torch path as devices take it: without a look at values."""
    if request.param != "compiled":
        set_kernels(False)
    if request.param == "device":
        monkeypatch.setattr("fenchel.regularizers.solvers.thresholds.known", lambda *t: False)


RANDOM = {
    "unit": lambda n: torch.randn(n, dtype=torch.float64),
    "flat": lambda n: 1e-2 * torch.randn(n, dtype=torch.float64),
    "peaked": lambda n: 10 * torch.randn(n, dtype=torch.float64),
    "ties": lambda n: torch.randint(-2, 3, (n,)).double() / 2,
    "offset": lambda n: 1e4 + torch.randn(n, dtype=torch.float64),
    "log-uniform": lambda n: -torch.exp(40 * torch.rand(n, dtype=torch.float64) - 35),
    "one-huge": lambda n: torch.cat([torch.tensor([1e30], dtype=torch.float64), torch.randn(n - 1).double()]),
    "one-and-many": lambda n: torch.cat([torch.zeros(1).double(), -0.5 + 1e-3 * torch.randn(n - 1).double()]),
}
rows = pytest.mark.parametrize("kind", RANDOM)


def near_ties(n: int, margin: float, dtype: torch.dtype) -> Tensor:
    """Rows whose last score stands within a few units in the last place of the threshold of the others."""
    made = []
    base = torch.randn(n - 1, dtype=dtype)
    for ulps in (-2, -1, 0, 1, 2):
        last = base.max() - margin * 0.37
        last = last + ulps * torch.finfo(dtype).eps * last.abs()
        made.append(torch.cat([base, last[None]]))
    return torch.stack(made)


@functools.cache
def exact_answer(scores: tuple[float, ...], alpha: float) -> tuple[list[oracles.mpf], oracles.mpf]:
    """Entmax of a row and, above alpha 1, the threshold of (α − 1)(z − max z): once for all paths of the library."""
    top = max(scores)
    shifted = [z - oracles.mpf(top) for z in oracles.exact(scores)]
    tau = oracles.entmax_threshold(shifted, oracles.mpf(alpha)) if alpha > 1 else oracles.mpf(0)
    return oracles.entmax(scores, alpha), tau


def exact_errors(scores: Tensor, alpha: float) -> None:
    """Values within the promised tolerance, rows that sum to 1, and the right support."""
    p = fenchel.entmax(scores, alpha)
    expected, tau = exact_answer(tuple(scores.tolist()), alpha)
    tolerance = ABSOLUTE[scores.dtype]
    found = oracles.exact(p.tolist())
    assert max(abs(x - y) for x, y in zip(found, expected, strict=True)) <= tolerance
    assert abs(sum(found) - 1) <= tolerance
    if alpha > 1:
        # The support, wherever rounding of the score cannot decide it: there the exact p is away from zero, or the
        # score is below the threshold by more than a few units in the last place.
        info = torch.finfo(scores.dtype)
        top = max(oracles.exact(scores.tolist()))
        c = oracles.mpf(alpha) - 1
        for q, z in zip(found, oracles.exact(scores.tolist()), strict=True):
            excess = c * (z - top) - tau
            if excess > 8 * info.eps and excess ** (1 / c) > info.tiny:
                assert q > 0
            if excess < -8 * info.eps:
                assert q == 0


@pytest.mark.slow
@DTYPES
@rows
@pytest.mark.parametrize("alpha", [0.3, 0.9, 1 - 1e-9, 1.0, 1 + 1e-9, 1.01, 1.33, 1.5, 1.75, 2.0])
def test_entmax_up_to_alpha_2_is_right_to_the_last_digits(alpha: float, kind: str, dtype: torch.dtype) -> None:
    for width in (1, 2, 3, 17, 60):
        exact_errors(RANDOM[kind](width).to(dtype), alpha)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_wide_rows_are_right_to_the_last_digits(alpha: float, dtype: torch.dtype) -> None:
    exact_errors(torch.randn(2_000, dtype=dtype), alpha)
    exact_errors(1e-4 * torch.randn(1_000, dtype=dtype), alpha)


_LEVELS = torch.cat([torch.full((2**j,), 2.0**-j, dtype=torch.float64) for j in range(17)])[:100_000]
_RANKS = torch.arange(1, 100_001, dtype=torch.float64)
WIDE = {
    "unit": torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "flat": 1e-6 * torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    "one and many": torch.cat([torch.zeros(1).double(), -1 + 1e-7 * torch.rand(99_999).double()]),
    # Newton's method from the left leaves few of these behind in each step.
    "powers of the rank": _RANKS**-1.0,
    "roots of the rank": 2 * _RANKS**-0.5,
    "levels": _LEVELS,
    "square levels": 2 * _LEVELS**2,
}


@DTYPES
@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.75, 2.0])
def test_rows_of_100_000_satisfy_the_optimality_conditions(alpha: float, kind: str, dtype: torch.dtype) -> None:
    """Σp = 1, and (α−1) z − p^(α−1) is the threshold on the support, which no score outside exceeds."""
    scores = WIDE[kind].to(dtype)
    p = fenchel.entmax(scores, alpha).double()
    y = (alpha - 1) * (scores.double() - scores.double().max())
    slack = 8 * torch.finfo(dtype).eps
    assert abs(math.fsum(p.tolist()) - 1) <= ABSOLUTE[dtype]
    tau = (y - p.pow(alpha - 1))[p > 0]
    # p is known to rounding, and p^(α−1) is steep where p is small: there only the other entries tell the threshold.
    level = tau[p[p > 0] >= p.max() / 2].mean()
    assert bool((y[p == 0] <= level + slack).all())
    assert bool(((y - level).clamp_min(0).pow(1 / (alpha - 1)) - p).abs().max() <= slack)


@DTYPES
@pytest.mark.parametrize("alpha", [1.33, 1.5, 2.0])
def test_near_ties_at_the_threshold(alpha: float, dtype: torch.dtype) -> None:
    scores = torch.randn(6, dtype=dtype)
    top = scores.max().item()
    tau = float(oracles.entmax_threshold([z - top for z in oracles.exact(scores.tolist())], oracles.mpf(alpha)))
    threshold = torch.tensor(top + tau / (alpha - 1), dtype=dtype)
    for _ in range(3):
        exact_errors(torch.cat([scores, threshold[None]]), alpha)
        threshold = torch.nextafter(threshold, torch.tensor(math.inf, dtype=dtype))


@DTYPES
@rows
@pytest.mark.parametrize("alpha", [2.0, 2.01, 2.5, 3.0, 10.0, 50.0, 1000.0])
def test_steep_entmax_is_exact_for_scores_moved_by_an_ulp(alpha: float, kind: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for width in (1, 2, 3, 17, 200):
        scores = RANDOM[kind](width).to(dtype)
        shifted = scores - scores.max()  # what any method sees; the move is measured against it
        p = fenchel.entmax(scores, alpha)
        error = oracles.entmax_backward_error(shifted.tolist(), p.tolist(), alpha, info.eps, info.tiny)
        assert error <= info.eps
        assert abs(sum(oracles.exact(p.tolist())) - 1) <= ABSOLUTE[dtype]


@pytest.mark.slow
@DTYPES
@rows
@pytest.mark.parametrize("alpha", [1.01, 1.2, 1.5, 2.0, 5.0, 50.0, 1000.0])
def test_normmax_is_exact_for_scores_moved_by_an_ulp(alpha: float, kind: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for width in (1, 2, 3, 17, 200):
        scores = RANDOM[kind](width).to(dtype)
        shifted = scores - scores.max()
        p = fenchel.normmax(scores, alpha)
        error = oracles.normmax_backward_error(shifted.tolist(), p.tolist(), alpha, info.eps, info.tiny)
        assert error <= info.eps
        assert abs(sum(oracles.exact(p.tolist())) - 1) <= ABSOLUTE[dtype]


@DTYPES
@pytest.mark.parametrize("alpha", [3.0, 10.0, 50.0])
def test_steep_maps_survive_near_ties(alpha: float, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for scores in near_ties(8, 1 / (alpha - 1), dtype):
        shifted = (scores - scores.max()).tolist()
        p = fenchel.entmax(scores, alpha).tolist()
        assert oracles.entmax_backward_error(shifted, p, alpha, info.eps, info.tiny) <= info.eps
    for scores in near_ties(8, 1.0, dtype):
        shifted = (scores - scores.max()).tolist()
        p = fenchel.normmax(scores, alpha).tolist()
        assert oracles.normmax_backward_error(shifted, p, alpha, info.eps, info.tiny) <= info.eps


def test_steep_entmax_against_high_precision_bisection() -> None:
    """At α = 50 an error of one ulp in the threshold would be 0.3 in mass."""
    with oracles.mpmath.workdps(200):
        for seed in range(5):
            scores = 0.02 * torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            z = oracles.exact(scores.tolist())
            c = oracles.mpf(49)
            low, high = c * max(z) - 1, c * max(z)
            for _ in range(600):
                middle = (low + high) / 2
                mass = sum((c * v - middle) ** (1 / c) for v in z if c * v > middle)
                low, high = (middle, high) if mass > 1 else (low, middle)
            expected = [(c * v - low) ** (1 / c) if c * v > low else oracles.mpf(0) for v in z]
            p = fenchel.entmax(scores, 50.0).tolist()
            assert max(abs(x - y) for x, y in zip(oracles.exact(p), expected, strict=True)) < 1e-13


@DTYPES
def test_the_loss_is_right_to_the_last_digits(dtype: torch.dtype) -> None:
    for alpha in (0.5, 1.0, 1 + 1e-9, 1.1, 1.5, 2.0):
        for scale in (0.1, 1.0, 5.0):
            scores = (scale * torch.randn(12, dtype=torch.float64)).to(dtype)
            z = oracles.exact(scores.tolist())
            p = oracles.entmax(scores.tolist(), alpha)
            a = oracles.mpf(alpha)
            if alpha == 1.0:
                omega = sum(q * oracles.mpmath.log(q) for q in p)
            else:
                omega = (sum(q**a for q in p) - 1) / (a * (a - 1))
            expected = sum(q * v for q, v in zip(p, z, strict=True)) - omega - z[3]
            found = fenchel.Tsallis(alpha).loss(scores, torch.tensor(3)).item()
            assert abs(oracles.mpf(found) - expected) <= 8 * torch.finfo(dtype).eps * max(1, abs(expected))
