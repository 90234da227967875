"""Loops over rows of numbers, for active sets and trees: compiled, and as they are while Python interprets."""

from typing import Any

import numpy as np
import pytest

from fenchel.kernels.compilation import interpreted
from fenchel.kernels.cpu.compiler import strict
from fenchel.kernels.cpu.structures.rows import LANES, add_multiple, combine, copy, dot, largest, merge

SIZES = [1, 2, 7, 8, 9, 31, 32, 33, 70]


@strict
def _combine(weights: Any, rows: Any, at: Any, stride: Any, n: Any, out: Any) -> None:
    combine(weights, rows, at, stride, n, out)


@strict
def _dot(rows: Any, at: Any, x: Any, n: Any) -> Any:
    return dot(rows, at, x, n)


@strict
def _add_multiple(rows: Any, at: Any, factor: Any, v: Any, n: Any) -> None:
    add_multiple(rows, at, factor, v, n)


@strict
def _copy_and_merge(source: Any, at: Any, n: Any, rows: Any, a: Any, b: Any, width: Any) -> None:
    copy(source, at, n, rows, 0)
    copy(source, at + n, n, rows, width)
    merge(rows, 0, a, width, b, 2 * width, width)


@strict
def _largest(rows: Any, at: Any, width: Any) -> Any:
    return largest(rows, at, width)


@pytest.fixture(params=[False, True], ids=["compiled", "interpreted"])
def mode(request: pytest.FixtureRequest) -> Any:
    return interpreted if request.param else lambda kernel: kernel


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_sums_of_rows(mode: Any, n: int, kind: Any) -> None:
    random = np.random.default_rng(n)
    matrix, x = random.normal(size=(n, n + 3)).astype(kind), random.normal(size=n)
    out = np.full(n + 1, 7.0)
    mode(_combine)(x, matrix, 1, n + 3, n, out)
    wanted = [sum(x[i] * float(matrix[i, 1 + j]) for i in range(n)) for j in range(n)]
    assert np.allclose(out, [*wanted, 7.0], rtol=1e-13, atol=1e-13)
    product = sum(float(matrix[0, 2 + j]) * x[j] for j in range(n))
    assert mode(_dot)(matrix, 2, x, n) == pytest.approx(product, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_a_multiple_is_added_to_one_row_alone(mode: Any, n: int) -> None:
    random = np.random.default_rng(n)
    rows, v = random.normal(size=(3, n + 2)), random.normal(size=n)
    wanted = rows.copy()
    for j in range(n):
        wanted[1, j] += 0.3 * v[j]
    mode(_add_multiple)(rows, n + 2, 0.3, v, n)
    assert np.allclose(rows, wanted, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("n", SIZES)
def test_the_better_of_two_rows(mode: Any, n: int) -> None:
    source = np.random.default_rng(n).normal(size=(2, n))
    width = -(-n // LANES) * LANES
    rows = np.full((3, width), np.nan)
    mode(_copy_and_merge)(source, 0, n, rows, 0.5, -0.25, width)
    assert (rows[:2, :n] == source).all()
    assert (rows[:, n:] == -np.inf).all()
    assert (rows[2, :n] == [max(a - 0.5, b + 0.25) for a, b in source.T]).all()


@pytest.mark.parametrize("width", [8, 16, 64, 72, 136])
def test_the_first_of_the_largest(mode: Any, width: int) -> None:
    rows = np.full((2, width), -np.inf)
    assert mode(_largest)(rows, width, width) == -1
    for at in (width - 1, width // 2, 0):  # each time one more, before the others
        rows[1, at] = 2.0
        assert mode(_largest)(rows, width, width) == at
    rows[1, width // 2] = 2.5
    assert mode(_largest)(rows, width, width) == width // 2
