"""log2 and exp2 as short polynomials on the bits of a number, for numbers and for vectors.

Numba's wheels carry no vector mathematics library, and a scalar ``**`` keeps a loop from vectorising; these do not.
All are right to 2 (in double 3) units in the last place; log2 keeps its relative precision next to 1.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_declare: Any = cgutils.get_or_insert_function

# log2(1 + t) / t on [√½ − 1, √2 − 1] and exp2(f) on [−½, ½]: Chebyshev fits in single precision.
_LOG_SINGLE = (
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
_EXP_SINGLE = (
    1.0,
    0.6931471824645996,
    0.24022650718688965,
    0.05550327152013779,
    0.00961802527308464,
    0.0013400432653725147,
    0.00015469732170458883,
)
# In double log2(m) = (2/ln 2)·artanh(s) at s = (m − 1)/(m + 1), |s| < 0.172, and exp2(f) by its series on [−½, ½].
_LOG_DOUBLE = tuple(2 / (math.log(2) * (2 * k + 1)) for k in range(11))
_EXP_DOUBLE = tuple(math.log(2) ** k / math.factorial(k) for k in range(14))

LARGEST = {types.float32: 126.0, types.float64: 1022.0}
"""2 to this power, and to its negative, are the ends of what ``exp2`` returns."""


# On LLVM values: a float or double, or a vector of them.


def constant(kind: Any, value: float) -> Any:
    """A constant, in every lane if the type is a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def is_single(kind: Any) -> bool:
    """Whether a type is float, or a vector of floats, and not of doubles."""
    return isinstance(kind.element if isinstance(kind, ir.VectorType) else kind, ir.FloatType)


def _like(kind: Any, element: Any) -> Any:
    """A type of as many lanes as another."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def call(builder: Any, name: str, result: Any, arguments: Any) -> Any:
    """Call an intrinsic of LLVM by its full name."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(_declare(builder.module, kind, name), arguments)


def suffix(kind: Any) -> str:
    """How LLVM names a type in the names of its intrinsics."""
    lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    return f"{lanes}f{32 if is_single(kind) else 64}"


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once where the processor can."""
    return call(builder, f"llvm.fmuladd.{suffix(a.type)}", a.type, [a, b, c])


def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two; b if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def smaller(builder: Any, a: Any, b: Any) -> Any:
    """The smaller of two; b if either is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def polynomial(builder: Any, coefficients: tuple[float, ...], t: Any) -> Any:
    """Horner's rule."""
    value = constant(t.type, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = fused(builder, value, t, constant(t.type, c))
    return value


def _exponent(builder: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    """e with x = m·2^e and √½ ≤ m < √2, as integer and as number; the bits of x, and the place of e in them."""
    single = is_single(x.type)
    whole = _like(x.type, _I32 if single else _I64)
    shift, root = (23, 0x3F3504F3) if single else (52, 0x3FE6A09E667F3BCD)  # the bits of √½
    bits = builder.bitcast(x, whole)
    exponent = builder.ashr(builder.sub(bits, constant(whole, root)), constant(whole, shift))
    # By 32 bits, which every processor can convert.
    number = builder.sitofp(exponent if single else builder.trunc(exponent, _like(x.type, _I32)), x.type)
    return exponent, number, bits, constant(whole, shift)


def log2_of(builder: Any, x: Any) -> Any:
    """log2 of a positive normal number."""
    exponent, number, bits, shift = _exponent(builder, x)
    one = constant(x.type, 1.0)
    t = builder.fsub(builder.bitcast(builder.sub(bits, builder.shl(exponent, shift)), x.type), one)
    if is_single(x.type):
        return fused(builder, t, polynomial(builder, _LOG_SINGLE, t), number)
    s = builder.fdiv(t, builder.fadd(t, constant(x.type, 2.0)))
    return fused(builder, s, polynomial(builder, _LOG_DOUBLE, builder.fmul(s, s)), number)


def exp2_of(builder: Any, y: Any) -> Any:
    """2^y, kept between the least and (nearly) the largest normal number."""
    single = is_single(y.type)
    whole = _like(y.type, _I32 if single else _I64)
    limit, shift = (126.0, 23) if single else (1022.0, 52)
    # Adding 1.5 · 2²³ (2⁵²) rounds to an integer in the low bits.
    number, bits = (12582912.0, 0x4B400000) if single else (6755399441055744.0, 0x4338000000000000)
    y = smaller(builder, larger(builder, y, constant(y.type, -limit)), constant(y.type, limit))
    rounded = builder.bitcast(builder.fadd(y, constant(y.type, number)), whole)
    power = builder.sub(rounded, constant(whole, bits))
    # Converted, not subtracted again: loops that may reorder sums would cancel the two.
    f = builder.fsub(y, builder.sitofp(power if single else builder.trunc(power, _like(y.type, _I32)), y.type))
    value = polynomial(builder, _EXP_SINGLE if single else _EXP_DOUBLE, f)
    lifted = builder.add(builder.bitcast(value, whole), builder.shl(power, constant(whole, shift)))
    return builder.bitcast(lifted, y.type)


def log2_ratio_of(builder: Any, u: Any, scale: Any, inverse: Any, base: Any) -> Any:
    """log2(base + scale·u) / scale, where base is 0 or 1 and ``inverse`` is 1/scale.

    With base 1 it keeps its relative precision for small scale·u, and is u/ln 2 at scale 0, where ``inverse`` may be
    any number. What is not positive makes a number without meaning.
    """
    kind = u.type
    single = is_single(kind)
    one, limit = constant(kind, 1.0), constant(kind, 2.0**120 if single else 2.0**1000)
    x = smaller(builder, builder.fmul(scale, u), limit)
    exponent, number, _, shift = _exponent(builder, builder.fadd(base, x))
    bias = constant(exponent.type, 127 if single else 1023)
    lowered = builder.bitcast(builder.shl(builder.sub(bias, exponent), shift), kind)  # 2^−e
    t = fused(builder, x, lowered, builder.fsub(builder.fmul(base, lowered), one))
    near = builder.and_(
        builder.icmp_signed("==", exponent, constant(exponent.type, 0)),
        builder.fcmp_ordered(">", base, constant(kind, 0.5)),
    )
    if single:
        slope = polynomial(builder, _LOG_SINGLE, t)
        small, large = builder.fmul(u, slope), fused(builder, t, slope, number)
    else:
        below = builder.fdiv(one, builder.fadd(t, constant(kind, 2.0)))
        s = builder.fmul(t, below)
        slope = polynomial(builder, _LOG_DOUBLE, builder.fmul(s, s))
        small, large = builder.fmul(builder.fmul(u, below), slope), fused(builder, s, slope, number)
    return builder.select(near, small, builder.fmul(large, inverse))


# On numbers of compiled code.


def _of_number(build: Any) -> Any:
    def typed(typingctx: Any, x: Any) -> Any:
        if x not in LARGEST:
            return None
        return x(x), lambda context, builder, sig, args: build(builder, args[0])

    return typed


log2: Any = intrinsic(_of_number(log2_of))
"""log2 of a positive normal number."""
exp2: Any = intrinsic(_of_number(exp2_of))
"""2^y, kept between the least and (nearly) the largest normal number."""
