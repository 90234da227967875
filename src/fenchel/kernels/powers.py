"""Vectorised float32 powers: log2 and exp2 as short polynomials on the bits of the number.

Numba's wheels carry no vector mathematics library, and a scalar ``**`` keeps a loop from vectorising; these do not.
Both are right to 2 units in the last place; log2 keeps its relative precision next to 1. float64 goes to libm.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from fenchel.kernels.bits import bits, from_bits
from fenchel.kernels.compiler import inlined

_f = np.float32
_i = np.int32

# log2(1 + t) / t on [√½ − 1, √2 − 1] and exp2(f) on [−½, ½]: Chebyshev fits in single precision.
_L = tuple(
    _f(v)
    for v in (
        1.4426950216293335,
        -0.7213473320007324,
        0.4808982014656067,
        -0.3606966435909271,
        0.2885688841342926,
        -0.23961904644966125,
        0.2045752853155136,
        -0.19102497398853302,
        0.18631209433078766,
        -0.11020159721374512,
    )
)
_E = tuple(
    _f(v)
    for v in (
        1.0,
        0.6931471824645996,
        0.24022650718688965,
        0.05550327152013779,
        0.00961802527308464,
        0.0013400432653725147,
        0.00015469732170458883,
    )
)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9 = _L
_E0, _E1, _E2, _E3, _E4, _E5, _E6 = _E

_SQRT_HALF = _i(0x3F3504F3)  # the bits of √½
_ROUND = _f(12582912.0)  # 1.5 · 2²³: adding it rounds to an integer in the low bits
_ROUND_BITS = _i(0x4B400000)
_LOWEST = _f(-126.0)
_HIGHEST = _f(126.0)
_SHIFT = _i(23)


@inlined
def _log2_single(x: Any) -> Any:
    b = bits(x)
    # Numba widens integer arithmetic to 64 bits, which AVX2 cannot convert: narrow every step.
    exponent = _i(_i(b - _SQRT_HALF) >> _SHIFT)
    t = from_bits(_i(b - _i(exponent << _SHIFT))) - _f(1)
    p = _L9
    p = p * t + _L8
    p = p * t + _L7
    p = p * t + _L6
    p = p * t + _L5
    p = p * t + _L4
    p = p * t + _L3
    p = p * t + _L2
    p = p * t + _L1
    p = p * t + _L0
    return _f(exponent) + t * p


@inlined
def _exp2_single(y: Any) -> Any:
    y = min(max(y, _LOWEST), _HIGHEST)
    whole = _i(bits(y + _ROUND) - _ROUND_BITS)
    f = y - _f(whole)
    p = _E6
    p = p * f + _E5
    p = p * f + _E4
    p = p * f + _E3
    p = p * f + _E2
    p = p * f + _E1
    p = p * f + _E0
    return from_bits(_i(bits(p) + _i(whole << _SHIFT)))


def log2(x: Any) -> Any:
    """log2 of a positive normal number, vectorised for float32."""
    raise NotImplementedError("for compiled code")


def exp2(y: Any) -> Any:
    """2^y, vectorised for float32 and there kept between 2⁻¹²⁶ and 2¹²⁶."""
    raise NotImplementedError("for compiled code")


# Numba compares the signatures of an overload and of what it returns to the letter: no annotations here.
@overload(log2, inline="always")
def _log2(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _log2_single(x)
    return lambda x: math.log2(x)


@overload(exp2, inline="always")
def _exp2(y):  # type: ignore[no-untyped-def]
    if y == types.float32:
        return lambda y: _exp2_single(y)
    return lambda y: 2.0**y
