"""Checks of arguments: what they accept and return, and what their errors say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fenchel import _checks


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_counts_become_python_integers(value: Any) -> None:
    assert type(_checks.check_count(value, "n")) is int


@pytest.mark.parametrize("value", [0.5, np.float32(0.5)])
def test_numbers_become_python_floats(value: Any) -> None:
    assert type(_checks.check_number(value, "x", 0, 1)) is float
    assert type(_checks.check_positive(value, "x")) is float


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_become_int64(dtype: torch.dtype) -> None:
    assert _checks.check_integers(torch.ones(2, dtype=dtype), "target").dtype == torch.int64


@pytest.mark.parametrize(
    ("ends", "inside", "outside"),
    [
        ("()", [0.5], [0, 1]),
        ("[)", [0, 0.5], [1, -1e-9]),
        ("(]", [0.5, 1], [0, 1.1]),
        ("[]", [0, 0.5, 1], [-0.1, 1.1]),
    ],
)
def test_brackets_say_which_ends_belong_to_an_interval(ends: str, inside: list[float], outside: list[float]) -> None:
    assert [_checks.check_number(x, "x", 0, 1, ends) for x in inside] == inside
    for x in [*outside, math.nan, math.inf]:
        with pytest.raises(ValueError, match=r"x must satisfy 0 <=? x <=? 1, got"):
            _checks.check_number(x, "x", 0, 1, ends)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((4, 2), ("L", 2)), ((2,), ("…", 2)), ((5, 0, 3, 3), ("…", "D", "D")), ((7,), ("n",)), ((0, 4), ("…", "K"))],
)
def test_shapes_that_fit_pass(shape: tuple[int, ...], sizes: tuple[int | str, ...]) -> None:
    value = torch.zeros(shape)
    assert _checks.check_floats(value, "x", *sizes) is value


def test_shapes_broadcast_as_torch_says() -> None:
    shapes = [(), (1,), (3,), (2, 1), (2, 3), (4, 1, 3), (0, 3), (2, 2)]
    for one in shapes:
        for other in shapes:
            try:
                expected = torch.broadcast_shapes(one, other)
            except RuntimeError:
                with pytest.raises(ValueError, match="a and b must broadcast with each other"):
                    _checks.check_broadcast("a and b", one, other)
                assert not _checks.broadcasts(one, other)
                continue
            assert _checks.check_broadcast("a and b", one, other) == expected
            assert _checks.broadcasts(one, other) == (expected == other)


def test_values_are_not_looked_at_where_they_cannot_be_read() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        return _checks.check_entries(x > 0, x, "x", "be positive")

    wrong = torch.tensor([[-1.0]])
    with pytest.raises(ValueError, match="x must be positive, got -1"):
        checked(wrong)
    assert torch.equal(torch.func.vmap(checked)(wrong), wrong)
    assert torch.equal(torch.compile(checked, fullgraph=True, backend="eager")(wrong), wrong)


ZEROS = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: _checks.check_count(1.5, "n"), TypeError, "n must be an int, got float"),
        (lambda: _checks.check_count(True, "n"), TypeError, "n must be an int, got bool"),
        (lambda: _checks.check_count(1, "n", 2), ValueError, "n must be at least 2, got 1"),
        (lambda: _checks.check_number("1", "x"), TypeError, "x must be a number, got str"),
        (lambda: _checks.check_number(True, "x"), TypeError, "x must be a number, got bool"),
        (lambda: _checks.check_number(math.inf, "x"), ValueError, "x must satisfy -inf < x < inf, got inf"),
        (lambda: _checks.check_share(1, "dropout"), ValueError, "dropout must satisfy 0 <= dropout < 1, got 1"),
        (lambda: _checks.check_real("a", "t"), TypeError, "t must be a number or a tensor, got str"),
        (lambda: _checks.check_real(ZEROS.int(), "t"), TypeError, "t must be a number or a floating-point tensor, got"),
        (lambda: _checks.check_positive(ZEROS, "t"), ValueError, "t must satisfy 0 < t < inf, got a tensor with 0.0"),
        (
            lambda: _checks.check_positive(ZEROS.bool(), "t"),
            TypeError,
            "t must be .* real numbers, got dtype torch.bool",
        ),
        (lambda: _checks.check_floats([1.0], "x"), TypeError, "x must be a floating-point tensor, got list$"),
        (lambda: _checks.check_floats(ZEROS.int(), "x"), TypeError, r"got torch.int32; convert with x.float\(\)"),
        (lambda: _checks.check_floats(ZEROS, "x", 2), ValueError, r"x must have shape \(2,\), got \(2, 3\)"),
        (lambda: _checks.check_floats(ZEROS, "x", "…", "S", "S"), ValueError, r"shape \(…, S, S\), got \(2, 3\)"),
        (lambda: _checks.check_floats(ZEROS[0], "x", "…", "L", 3), ValueError, r"shape \(…, L, 3\), got \(3,\)"),
        (
            lambda: _checks.check_floats(ZEROS[:0], "x", "L", 3),
            ValueError,
            r"shape \(L, 3\) and not be empty, got \(0, 3\)",
        ),
        (lambda: _checks.check_integers(ZEROS, "y"), TypeError, "y must be a tensor of integers, got torch.float32"),
        (
            lambda: _checks.check_integers(ZEROS.bool(), "y"),
            TypeError,
            "y must be a tensor of integers, got torch.bool",
        ),
        (
            lambda: _checks.check_mask(ZEROS),
            TypeError,
            r"mask must be a boolean tensor \(True = may .*, got torch.float32",
        ),
        (
            lambda: _checks.check_like(ZEROS, "y", ZEROS.T),
            ValueError,
            r"y must have the shape of scores, \(3, 2\), got",
        ),
        (
            lambda: _checks.check_expands(ZEROS, "m", ZEROS[0]),
            ValueError,
            r"m must broadcast to scores: m has shape \(2,",
        ),
        (
            lambda: _checks.check_one_of(None, "reduction", "a", "b"),
            ValueError,
            "reduction must be 'a' or 'b', got None",
        ),
    ],
)
def test_errors_name_the_argument_what_it_was_and_what_is_allowed(
    call: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        call()
