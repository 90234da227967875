"""The parameter c = α − 1 of the rows, so typed that a kernel compiles no more than its parameter needs.

An array of reals holds c itself, one for all rows or one per row. Where 1/c is whole, as for sparsemax and 1.5-entmax,
an array of one integer holds 1/c: Numba specialises on the type, and what only other powers need is never compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import overload

from fenchel.kernels.cpu.compiler import OPTIONS


def by_type(whole: Callable[..., Any], real: Callable[..., Any], argument: int) -> Callable[..., Any]:
    """A function for kernels: one of two, by whether an argument (or what it is an array of) is integer or real."""

    def chosen(*args: Any) -> Any:
        raise NotImplementedError("for kernels only")

    @overload(chosen, strict=False, jit_options=OPTIONS)
    def _choose(*args: Any) -> Any:
        kind = getattr(args[argument], "dtype", args[argument])
        return whole if isinstance(kind, types.Integer) else real

    return chosen


def _whole_exponent(powers: Any, row: int, x: Any) -> Any:
    one = x.dtype.type(1)
    return one / x.dtype.type(powers[0]), powers[0], powers[0] - 1


def _real_exponent(powers: Any, row: int, x: Any) -> Any:
    one, c = x.dtype.type(1), powers[row if powers.size > 1 else 0]
    return c, one / c, one / c - one


exponent = by_type(_whole_exponent, _real_exponent, 0)
"""c, 1/c and 1/c − 1 of a row of x."""
