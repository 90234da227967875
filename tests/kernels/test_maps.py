"""Compiled kernels: they agree with the torch path, and are safe between threads, after a fork and in any number."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fenchel import Norm, Tsallis, entmax, normmax
from fenchel.kernels import usable
from fenchel.kernels.cpu import threads as pool
from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.maps import simplex as maps
from fenchel.kernels.cpu.powers import exp2, log2
from fenchel.regularizers.solvers import thresholds

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6}
ALPHAS = [1.25, 1.33, 1.5, 1.75, 1.99, 2.0]


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Rows of any width and scale, with ties, masked entries and clusters."""
    width = draw(st.sampled_from([1, 2, 7, 8, 63, 64, 65, 511, 512, 513, 577, 1024, 1500]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(3, width, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "ties", "log", "masked", "one-and-many"]))
    if kind == "ties":
        scores = scores.round()
    elif kind == "log":
        scores = -torch.exp(40 * torch.rand(3, width, generator=generator, dtype=torch.float64) - 35)
    elif kind == "masked":
        scores[scores < 0.3] = -torch.inf
    elif kind == "one-and-many":
        scores = -0.5 + 1e-3 * scores
        scores[:, 0] = 0
    scale = draw(st.sampled_from([1e-3, 1.0, 20.0])) if kind == "normal" else 1.0
    return (scale * scores).to(draw(st.sampled_from([torch.float32, torch.float64])))


def plain(scores: Tensor, alpha: float) -> Tensor:
    top = scores.amax(-1, keepdim=True)
    empty = top == -torch.inf
    return torch.where(empty, 0.0, thresholds.entmax_up_to_2(scores.double() - torch.where(empty, 0.0, top), alpha - 1))


@given(scores=rows(), alpha=st.sampled_from(ALPHAS))
def test_forward_agrees_with_the_torch_path(scores: Tensor, alpha: float) -> None:
    expected = plain(scores, alpha)
    tolerance = TOLERANCE[scores.dtype]
    for a in (alpha, torch.full((3, 1), alpha, dtype=scores.dtype)):
        # An alpha of the scores' own precision is another number than the float.
        p = maps.entmax(scores, a)
        assert p.dtype == scores.dtype
        assert torch.allclose(p.double(), expected, atol=tolerance, rtol=0)


@given(scores=rows(), alpha=st.sampled_from(ALPHAS), seed=st.integers(0, 1000))
def test_product_agrees_with_the_torch_path(scores: Tensor, alpha: float, seed: int) -> None:
    p = maps.entmax(scores, alpha)
    v = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
    expected = Tsallis.rule.product(v.double(), None, p.double(), alpha)
    product = maps.entmax_product(v, None, p, alpha)
    assert torch.allclose(product.double(), expected, atol=20 * TOLERANCE[p.dtype], rtol=0)
    assert (product[p == 0] == 0).all()


@given(scores=rows(), alpha=st.sampled_from([1.25, 1.6, 2.0, 5.0, 10.0]), seed=st.integers(0, 1000))
def test_normmax_and_its_product_agree_with_the_torch_path(scores: Tensor, alpha: float, seed: int) -> None:
    top = scores.amax(-1, keepdim=True)
    empty = top == -torch.inf
    shifted = scores.double() - torch.where(empty, 0.0, top)
    p = maps.normmax(scores, alpha)
    expected = torch.where(empty, 0.0, thresholds.normmax(shifted, alpha - 1))
    # Next to the threshold an ulp in a score is its root in mass: there only the scale of it can agree.
    ulp = torch.finfo(scores.dtype).eps
    assert torch.allclose(p.double(), expected, atol=4 * (4 * ulp) ** min(1.0, 1 / (alpha - 1)), rtol=0)
    v = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
    product = maps.normmax_product(v, None, p, alpha)
    exact = Norm.rule.product(v.double(), None, p.double(), alpha)
    assert torch.allclose(product.double(), exact, atol=20 * TOLERANCE[p.dtype] * max(1.0, exact.abs().max().item()))
    assert (product[p == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_zeros_have_no_sign(dtype: torch.dtype) -> None:
    for width in (5, 17, 100, 700):
        scores = 2 * torch.randn(50, width, dtype=dtype)
        for alpha in (1.01, 1.3, 1.5, 1.7, 1.9, 2.0, 3.0):
            assert not entmax(scores, alpha).signbit().any()
            assert not entmax(scores, torch.full((50, 1), alpha, dtype=dtype)).signbit().any()
            assert not normmax(scores, alpha).signbit().any()


def test_what_comes_back_off_the_support_does_not_matter() -> None:
    for width in (5, 700):
        p = maps.entmax(4 * torch.randn(4, width), 1.5)
        v = torch.randn_like(p)
        spoilt = torch.where(p == 0, torch.nan, v)
        assert torch.equal(maps.entmax_product(spoilt, None, p, 1.5), maps.entmax_product(v, None, p, 1.5))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_rows_are_the_same_to_the_bit_whatever_the_threads_and_the_batch(alpha: float) -> None:
    for width in (64, 2000):
        scores, v = torch.randn(301, width), torch.randn(301, width)
        results = []
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                p = maps.entmax(scores, alpha)
                results.append(torch.stack([p, maps.entmax_product(v, None, p, alpha)]))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(r, results[0]) for r in results)
        alone = torch.cat([maps.entmax(scores[i : i + 1], alpha) for i in range(0, 301, 50)])
        assert torch.equal(alone, results[0][0][::50])


def test_several_python_threads_may_call_at_once() -> None:
    batches = [torch.randn(200, 300) for _ in range(16)]
    expected = [maps.entmax(b, 1.5) for b in batches]
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(8) as threads:
            for _ in range(5):
                found = list(threads.map(lambda b: maps.entmax(b, 1.5), batches))
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_a_child_after_a_fork_makes_its_own_threads() -> None:
    code = """
import os, torch, fenchel
torch.set_num_threads(2)
scores = torch.randn(400, 300)
expected = fenchel.sparsemax(scores)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    same = torch.equal(fenchel.sparsemax(scores), expected)
    from fenchel.kernels.cpu import threads as pool
    pool.torch.get_num_threads = lambda: 2
    os._exit(0 if same and torch.equal(fenchel.sparsemax(scores), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_importing_the_library_imports_no_compiler() -> None:
    code = "import sys, fenchel; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_kernels_work_where_nothing_can_be_cached(tmp_path: object) -> None:
    code = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
import torch, fenchel
assert fenchel.sparsemax(torch.tensor([1.0, 0.5, -1.0])).tolist() == [0.75, 0.25, 0.0]
from fenchel.kernels.cpu.maps import rows
assert type(rows.argmax_of_wide._cache).__name__ == "NullCache"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_the_switch_turns_them_off(set_kernels: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable("entmax", torch.randn(3))
    set_kernels(False)
    assert not usable("entmax", torch.randn(3))
    monkeypatch.setattr(maps, "entmax", None)
    assert Tsallis(1.5).argmax(torch.zeros(2)).tolist() == [0.5, 0.5]


def test_only_plain_data_on_the_cpu_is_usable() -> None:
    assert not usable("entmax", torch.randn(3).half())
    assert not usable("entmax", torch.randn(3, device="meta"))
    seen: list[bool] = []
    torch.func.vmap(lambda t: (seen.append(usable("entmax", t)), t)[1])(torch.randn(2, 3))
    assert seen == [False]


@kernel
def _apply_log2(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        out[i] = log2(x[i])


@kernel
def _apply_exp2(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        out[i] = exp2(x[i])


def test_single_precision_powers_are_right_to_two_ulp() -> None:
    generator = np.random.default_rng(0)
    for x in (np.exp(20 * generator.normal(size=9999)), 1 + 1e-3 * generator.normal(size=9999)):
        x = x.astype(np.float32)
        out = np.empty_like(x)
        _apply_log2(x, out)
        exact = np.log2(x.astype(np.float64))
        assert np.all(np.abs(out - exact) <= 2 * np.spacing(np.abs(exact).astype(np.float32)))
    y = -np.abs(40 * generator.normal(size=9999)).clip(0, 125).astype(np.float32)
    out = np.empty_like(y)
    _apply_exp2(y, out)
    exact = np.exp2(y.astype(np.float64))
    assert np.all(np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32)))


def test_small_inputs_stay_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(pool.torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(pool, "_openmp", lambda: None)
    pool.over_rows(lambda first, last: calls.append((first, last)), 8, pool.SERIAL - 1)
    assert calls == [(0, 8)]
    calls.clear()
    pool.over_rows(lambda first, last: calls.append((first, last)), 10, pool.SERIAL)
    assert sorted(calls) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert os.cpu_count()


@pytest.mark.parametrize("sigma", [0.01, 4.0])
@pytest.mark.parametrize("choose", [lambda s: entmax(s, 2.0), entmax, lambda s: entmax(s, 2.5), normmax])
def test_rows_of_an_output_beyond_the_caches_are_those_of_small_ones(
    choose: Callable[..., Tensor], sigma: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (sigma * torch.randn(66, 32768, generator=generator)).requires_grad_()  # 8.7 MB: written past the caches
    scores.data[3, 5], scores.data[4] = torch.nan, -torch.inf
    direction = torch.randn(66, 32768, generator=generator)
    p = choose(scores)
    (gradient,) = torch.autograd.grad(p, scores, direction)
    for i in (0, 3, 4, 65):
        row = scores[i : i + 1].detach().requires_grad_()
        alone = choose(row)
        assert torch.equal(p[i].isnan(), alone[0].isnan())
        assert torch.equal(p[i].nan_to_num(), alone[0].nan_to_num())
        (expected,) = torch.autograd.grad(alone, row, direction[i : i + 1])
        assert torch.equal(gradient[i].nan_to_num(), expected[0].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 16, 21, 64, 130, 512])
def test_narrow_rows_do_not_depend_on_their_neighbours(width: int, dtype: torch.dtype) -> None:
    scores = torch.randn(37, width, generator=torch.Generator().manual_seed(width), dtype=dtype)
    scores *= torch.logspace(-3, 2, 37, dtype=dtype).unsqueeze(1)
    scores[5, width // 2], scores[6], scores[7, 0], scores[20, ::2] = torch.nan, -torch.inf, torch.inf, -torch.inf
    for choose in (lambda s: entmax(s, 2.0), entmax, lambda s: entmax(s, 1.2), lambda s: entmax(s, 0.7), normmax):
        p = choose(scores)
        assert p[5].isnan().all()
        assert p[7].isnan().all()
        assert not p[6].any()
        kept = [i for i in range(37) if i not in (5, 7)]
        assert torch.equal(p[kept], torch.cat([choose(scores[i : i + 1]) for i in kept]))


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.001, 1.2, 1.5, 2.0, 3.0, torch.inf])
def test_values_agree_with_the_torch_path(alpha: float) -> None:
    scores = 3 * torch.randn(9, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores[2, 3:], scores[3, 10:20], scores[4] = -torch.inf, -torch.inf, -torch.inf
    p, rule = entmax(scores, alpha), Tsallis.rule
    column = torch.full((9, 1), alpha, dtype=torch.float64)
    torch.testing.assert_close(maps.entmax_value(p, alpha), rule.value(p, alpha), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(maps.entmax_max(scores, p, column), rule.attained(scores, p, alpha), rtol=1e-13, atol=0)
    expected = -rule.value_sensitivity(None, p, column)
    torch.testing.assert_close(maps.entmax_envelope(p, column), expected, rtol=1e-12, atol=1e-14)
    single = maps.entmax_value(p.float(), alpha)
    torch.testing.assert_close(single.double(), rule.value(p, alpha), rtol=1e-6, atol=1e-7)
    assert maps.entmax_value(torch.full((1, 3), torch.nan), alpha).isnan().all() or alpha == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [0.0625, 0.25, 0.75, 1.5, 3.0])
def test_tiny_probabilities_keep_their_share_of_omega(alpha: float, dtype: torch.dtype) -> None:
    tiny = [1e-20, 1e-36, 1e-39, 1e-44] if dtype == torch.float32 else [1e-20, 1e-60, 1e-150, 1e-300, 1e-310, 5e-324]
    p = torch.tensor([[1.0, 0.0, *tiny]], dtype=dtype)

    def omega(a: mpmath.mpf) -> mpmath.mpf:
        shares = [mpmath.mpf(q) for q in p[0].tolist() if q > 0]
        return mpmath.fsum(q**a - q for q in shares) / (a * (a - 1))

    with mpmath.workdps(400):
        value, slope = omega(mpmath.mpf(alpha)), mpmath.diff(omega, mpmath.mpf(alpha))
    relative = 1e-5 if dtype == torch.float32 else 1e-12
    assert maps.entmax_value(p, alpha).item() == pytest.approx(float(value), rel=relative)
    assert maps.entmax_envelope(p, alpha).item() == pytest.approx(-float(slope), rel=relative)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_omega_and_its_slope_vanish_for_the_largest_alpha(dtype: torch.dtype) -> None:
    p, alpha = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=dtype), torch.finfo(dtype).max
    assert maps.entmax_value(p, alpha).abs().item() < 1e-30
    assert maps.entmax_envelope(p, alpha).abs().item() < 1e-30
