"""Vectorised powers: log2 and exp2 as short polynomials on the bits of the number.

Numba's wheels carry no vector mathematics library, and a scalar ``**`` keeps a loop from vectorising; these do not.
All are right to 2 units in the last place; log2 keeps its relative precision next to 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from fenchel.kernels.cpu.bits import bits, from_bits
from fenchel.kernels.cpu.compiler import inlined

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


# log2(m) = (2/ln 2)·artanh(s) at s = (m − 1)/(m + 1), |s| < 0.172; exp2(f) by its series on [−½, ½].
_A = tuple(2 / (math.log(2) * (2 * k + 1)) for k in range(11))
_B = tuple(math.log(2) ** k / math.factorial(k) for k in range(14))
_A0, _A1, _A2, _A3, _A4, _A5, _A6, _A7, _A8, _A9, _A10 = _A
_B0, _B1, _B2, _B3, _B4, _B5, _B6, _B7, _B8, _B9, _B10, _B11, _B12, _B13 = _B

_ROOT_BITS = 0x3FE6A09E667F3BCD  # of √½
_BIAS = 1023
_NEAREST = 6755399441055744.0  # 1.5 · 2⁵²: adding it rounds to an integer in the low bits
_NEAREST_BITS = 0x4338000000000000


@inlined
def _log2_double(x: Any) -> Any:
    b = bits(x)
    exponent = (b - _ROOT_BITS + (_BIAS << 52)) >> 52  # plus the bias, so never negative
    t = from_bits(b - (exponent << 52) + (_BIAS << 52)) - 1.0
    s = t / (t + 2.0)
    q = s * s
    p = _A10
    p = p * q + _A9
    p = p * q + _A8
    p = p * q + _A7
    p = p * q + _A6
    p = p * q + _A5
    p = p * q + _A4
    p = p * q + _A3
    p = p * q + _A2
    p = p * q + _A1
    p = p * q + _A0
    # By 32 bits, which AVX2 can convert; the other trick, adding and taking off 2⁵², would be reassociated.
    return np.float64(_i(exponent - _BIAS)) + s * p


@inlined
def _exp2_double(y: Any) -> Any:
    y = min(max(y, -1022.0), 1022.0)
    whole = bits(y + _NEAREST) - _NEAREST_BITS
    f = y - np.float64(_i(whole))
    p = _B13
    p = p * f + _B12
    p = p * f + _B11
    p = p * f + _B10
    p = p * f + _B9
    p = p * f + _B8
    p = p * f + _B7
    p = p * f + _B6
    p = p * f + _B5
    p = p * f + _B4
    p = p * f + _B3
    p = p * f + _B2
    p = p * f + _B1
    p = p * f + _B0
    return from_bits(bits(p) + (whole << 52))


def log2(x: Any) -> Any:
    """log2 of a positive normal number."""
    raise NotImplementedError("for compiled code")


def exp2(y: Any) -> Any:
    """2^y, kept between the least and (nearly) the largest normal number."""
    raise NotImplementedError("for compiled code")


# Numba compares the signatures of an overload and of what it returns to the letter: no annotations here.
@overload(log2, inline="always")
def _log2(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _log2_single(x)
    return lambda x: _log2_double(x)


@overload(exp2, inline="always")
def _exp2(y):  # type: ignore[no-untyped-def]
    if y == types.float32:
        return lambda y: _exp2_single(y)
    return lambda y: _exp2_double(y)
