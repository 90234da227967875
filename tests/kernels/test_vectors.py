"""Vectors in compiled code: every operation against NumPy, in both precisions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict

KINDS = pytest.mark.parametrize("kind", [np.float32, np.float64])


def lanes(kind: Any) -> int:
    return 16 if kind is np.float32 else 8


def numbers(kind: Any, *shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(kind)


@strict
def _arithmetic(a: Any, b: Any, c: Any, out: Any) -> None:
    n = a.size
    x, y, z = vec.load(a, 0), vec.load(b, 0), vec.load(c, 0)
    vec.store(out, 0, x + y)
    vec.store(out, n, x - y)
    vec.store(out, 2 * n, x * y)
    vec.store(out, 3 * n, x / y)
    vec.store(out, 4 * n, vec.fma(x, y, z))
    vec.store(out, 5 * n, vec.maximum(x, y))
    vec.store(out, 6 * n, vec.minimum(x, y))
    vec.store(out, 7 * n, vec.sqrt(vec.maximum(x, 0.0)))
    vec.store(out, 8 * n, x * 2.0 - vec.splat(b[0]))
    vec.store(out, 9 * n, vec.select((x > y) & (z <= 0.5) | (x == x) & (x < -1.0), x, y))
    vec.store(out, 10 * n, vec.select(x >= 0.0, 1.0, y))
    vec.store(out, 11 * n, vec.narrow(vec.widen(x) * 3.0, x))


@KINDS
def test_arithmetic_is_that_of_numpy(kind: Any) -> None:
    n = lanes(kind)
    a, b, c = numbers(kind, 3, n)
    out = np.empty((12, n), kind)
    _arithmetic(a, b, c, out)
    expected = [
        a + b,
        a - b,
        a * b,
        a / b,
        a * b + c,
        np.maximum(a, b),
        np.minimum(a, b),
        np.sqrt(np.maximum(a, 0)),
        a * 2 - b[0],
        np.where((a > b) & (c <= 0.5) | (a < -1), a, b),
        np.where(a >= 0, 1, b),
        (a.astype(np.float64) * 3).astype(kind),
    ]
    for k, wanted in enumerate(expected):
        if k == 4:
            assert np.allclose(out[k], wanted, rtol=8 * np.finfo(kind).eps, atol=np.finfo(kind).eps)
        else:
            assert np.array_equal(out[k], wanted.astype(kind)), k


@strict
def _reductions(a: Any, out: Any) -> None:
    x = vec.load(a, 0)
    out[0], out[1], out[2] = vec.sum_lanes(x), vec.max_lanes(x), vec.sum_double(x)
    found = vec.bits_of(x > 0.0)
    out[3], out[4], out[5] = vec.count_bits(found), vec.lowest_bit(found), np.float64(vec.any_lane(x > 10.0))
    out[6] = np.float64(vec.any_lane(vec.unordered(x, x)))
    out[7] = np.float64(found)


@KINDS
def test_reductions_are_those_of_numpy(kind: Any) -> None:
    a = numbers(kind, lanes(kind))
    out = np.empty(8)
    _reductions(a, out)
    exact = a.astype(np.float64).sum()
    assert abs(out[0] - exact) <= 8 * np.finfo(kind).eps * np.abs(a).sum()
    assert out[1] == a.max()
    assert abs(out[2] - exact) <= 1e-15 * np.abs(a).sum()
    assert out[3:7].tolist() == [(a > 0).sum(), np.flatnonzero(a > 0)[0], 0, 0]
    assert out[7] == (2.0 ** np.flatnonzero(a > 0)).sum()
    a[3] = np.nan
    _reductions(a, out)
    assert out[6] == 1
    a[3] = 11
    _reductions(a, out)
    assert out[5:7].tolist() == [1, 0]


@strict
def _parts(a: Any, count: int, out: Any) -> None:
    n = a.size
    vec.store_part(out, 0, vec.load(a, 0), count)
    vec.store(out, n, vec.load_part(a, 0, count, -2.0))


@KINDS
def test_parts_of_vectors_leave_the_rest_alone(kind: Any) -> None:
    n = lanes(kind)
    a = numbers(kind, n)
    for count in range(n + 1):
        out = np.full((2, n), 7, kind)
        _parts(a, count, out)
        assert np.array_equal(out[0], np.where(np.arange(n) < count, a, 7))
        assert np.array_equal(out[1], np.where(np.arange(n) < count, a, -2))


@strict
def _transpose(x: Any, i: int, stride: int, columns: Any, out: Any) -> None:
    vec.load_square(x, i, stride, columns, 0)
    vec.store_square(columns, 0, out, i, stride)


@KINDS
def test_rows_become_lanes_and_rows_again(kind: Any) -> None:
    n = lanes(kind)
    x = numbers(kind, n, 3 * n + 1)
    columns, out = np.empty((n, n), kind), np.zeros_like(x)
    _transpose(x, n + 2, x.shape[1], columns, out)
    wanted = x[:, n + 2 : 2 * n + 2]
    assert np.array_equal(columns.T, wanted)
    filled = np.zeros_like(x)
    filled[:, n + 2 : 2 * n + 2] = wanted
    assert np.array_equal(out, filled)


@strict
def _everywhere(a: Any, out: Any) -> int:
    n = vec.lanes(a)
    vec.store(out, 0, vec.sum_everywhere(vec.load(a, 0)))
    vec.store(out, n, vec.max_everywhere(vec.load(a, 0)))
    return vec.to_boundary(a[1:])  # type: ignore[no-any-return]


@KINDS
def test_reductions_may_stand_in_every_lane(kind: Any) -> None:
    n = lanes(kind)
    a, out = numbers(kind, n), np.empty((2, n), kind)
    ahead = _everywhere(a, out)
    assert (out[0] == out[0, 0]).all()
    assert abs(out[0, 0] - a.astype(np.float64).sum()) <= 8 * np.finfo(kind).eps * np.abs(a).sum()
    assert (out[1] == a.max()).all()
    assert (a.ctypes.data + (1 + ahead) * a.itemsize) % 64 == 0


@strict
def _log2_ratio(u: Any, scale: float, base: float, out: Any) -> None:
    inverse = 1.0 / scale if scale != 0.0 else 1.0
    for i in range(0, u.size, vec.lanes(u)):
        vec.store(out, i, vec.log2_ratio(vec.load(u, i), scale, inverse, base))


@KINDS
def test_the_logarithm_over_its_scale_is_precise_down_to_scale_zero(kind: Any) -> None:
    u = -np.exp(6 * np.random.default_rng(0).normal(size=9984)).astype(kind)
    exact = u.astype(np.longdouble)
    for scale in (kind(-0.9), kind(-0.1), kind(-1e-6), kind(0), kind(1e-6), kind(0.2)):
        inside = 1 + scale * exact > 0.01
        out = np.empty_like(u)
        _log2_ratio(u, scale, 1.0, out)
        wanted = np.log1p(scale * exact[inside]) / np.longdouble(scale) if scale else exact[inside]
        wanted = wanted / np.log(np.longdouble(2))
        # A digit of 1 + scale·u is lost where that is small.
        limit = 4 * np.finfo(kind).eps * (np.abs(wanted) + 100 * np.abs(scale * exact[inside]))
        assert np.all(np.abs(out[inside] - wanted) <= limit)
    for scale in (kind(0.3), kind(0.75), kind(1)):
        out = np.empty_like(u)
        _log2_ratio(-u, scale, 0.0, out)
        wanted = np.log2(-scale * exact) / scale
        assert np.all(np.abs(out - wanted) <= 4 * np.finfo(kind).eps * np.maximum(np.abs(wanted), 2))


@strict
def _log2(x: Any, out: Any) -> None:
    for i in range(0, x.size, 64 // x.itemsize):
        vec.store(out, i, vec.log2(vec.load(x, i)))


@strict
def _exp2(x: Any, out: Any) -> None:
    for i in range(0, x.size, 64 // x.itemsize):
        vec.store(out, i, vec.exp2(vec.load(x, i)))


@KINDS
def test_powers_are_right_to_the_last_digits(kind: Any) -> None:
    generator = np.random.default_rng(0)
    ulps = 2 if kind is np.float32 else 3

    def errors(function: Callable[..., None], x: Any, exact: Any) -> Any:
        out = np.empty_like(x)
        function(x, out)
        return np.abs(out - exact) / np.spacing(np.abs(exact).astype(kind))

    for x in (np.exp(20 * generator.normal(size=9984)), 1 + 1e-3 * generator.normal(size=9984)):
        x = x.astype(kind)
        assert errors(_log2, x, np.log2(x.astype(np.longdouble))).max() <= ulps
    y = (40 * generator.normal(size=9984)).clip(-125, 125).astype(kind)
    assert errors(_exp2, y, np.exp2(y.astype(np.longdouble))).max() <= ulps
    out = np.empty(16, kind)
    _exp2(np.full(16, -1e9, kind), out)
    assert 0 < out.max() < 1e-37


@strict
def _load_doubles(x: Any, i: Any, count: Any, out: Any) -> None:
    vec.store(out, 0, vec.load_doubles(x, i, count))


@KINDS
@pytest.mark.parametrize("count", [-3, 0, 1, 7, 8, 20])
def test_numbers_of_either_precision_in_double(kind: Any, count: int) -> None:
    x, out = numbers(kind, 12), np.full(8, np.nan)
    _load_doubles(x, 3, count, out)
    kept = max(min(count, 8), 0)
    assert (out == [*x[3 : 3 + kept].astype(np.float64), *[0.0] * (8 - kept)]).all()
