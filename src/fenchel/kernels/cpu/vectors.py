"""Vectors of the processor as a type of compiled code: 16 floats of 32 bits, or 8 of 64 bits, and their operations.

A loop written with them does not depend on what the compiler makes of a scalar loop. Longer or shorter registers do not
matter: LLVM splits a vector into as many as it needs. Kernels that use them are compiled by ``compiler.strict``: every
operation is rounded on its own, ``fma`` once.

``+ - * /`` act on two vectors of a type, or on a vector and a number; ``> >= < <= ==`` make a mask, ``& |`` join masks.
Arrays are contiguous, of any dimension, and ``i`` is an index into their elements in memory order.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import templates
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = {types.float32: 16, types.float64: 8}
"""How many numbers a vector has that is loaded from an array."""

_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_Model: Any = models.PrimitiveModel
_signature: Any = templates.signature
_global: Any = templates.infer_global
_builtin: Any = lower_builtin
_declare: Any = cgutils.get_or_insert_function


class Vector(types.Type):
    """A vector of ``lanes`` floats of one type."""

    def __init__(self, dtype: Any, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype} x {lanes})")


class Mask(types.Type):
    """One truth value per lane."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"Mask({lanes})")


@register_model(Vector)
class _VectorModel(_Model):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.VectorType(_element(kind.dtype), kind.lanes))


@register_model(Mask)
class _MaskModel(_Model):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.VectorType(_I1, kind.lanes))


# What is built from: LLVM instructions on vectors.


def _element(dtype: Any) -> Any:
    return ir.FloatType() if dtype == types.float32 else ir.DoubleType()


def _constant(like: Any, value: float) -> Any:
    """A constant in every lane of a vector type."""
    return ir.Constant(like, [value] * like.count)


def _indices(values: Any) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(values)), list(values))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, _indices([0] * lanes))


def _call(builder: Any, name: str, result: Any, arguments: Any) -> Any:
    """Call an intrinsic of LLVM by its full name."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(_declare(builder.module, kind, name), arguments)


def _suffix(vector: Any) -> str:
    return f"v{vector.count}f{32 if isinstance(vector.element, ir.FloatType) else 64}"


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fmuladd.{_suffix(a.type)}", a.type, [a, b, c])


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, like: Any) -> Any:
    """Where a vector begins in an array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), like.as_pointer())


def _size(vector: Any) -> int:
    return 4 if isinstance(vector.element, ir.FloatType) else 8


def _first(builder: Any, lanes: int, count: Any) -> Any:
    """A mask of the first ``count`` lanes."""
    places = ir.Constant(ir.VectorType(_I64, lanes), list(range(lanes)))
    return builder.icmp_signed("<", places, _splat(builder, count, lanes))


def _halve(builder: Any, vector: Any, join: Any) -> Any:
    """One number out of the lanes: the halves of a vector are joined until one lane is left."""
    nothing = ir.Constant(vector.type, ir.Undefined)
    width = vector.type.count
    while width > 1:
        width //= 2
        low = builder.shuffle_vector(vector, nothing, _indices(range(width)))
        high = builder.shuffle_vector(vector, nothing, _indices(range(width, 2 * width)))
        vector = join(builder, low, high)
        nothing = ir.Constant(vector.type, ir.Undefined)
    return builder.extract_element(vector, _I32(0))


def _vector_of(array: Any) -> Any:
    """The vector type of an array's elements, or None."""
    if isinstance(array, types.Array) and array.layout == "C" and array.dtype in LANES:
        return Vector(array.dtype, LANES[array.dtype])
    return None


# Operators.


class _Arithmetic(templates.AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        """Two vectors of a type, or a vector and a number."""
        a, b = args
        vector = a if isinstance(a, Vector) else b
        if not isinstance(vector, Vector):
            return None
        if all(x == vector or isinstance(x, types.Number) for x in args):
            return _signature(vector, *(x if x == vector else vector.dtype for x in args))
        return None


class _Comparison(_Arithmetic):
    def generic(self, args: Any, kws: Any) -> Any:
        found = super().generic(args, kws)
        return found and _signature(Mask(found.return_type.lanes), *found.args)


class _Logic(templates.AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        a, b = args
        return _signature(a, a, b) if isinstance(a, Mask) and a == b else None


def _spread(builder: Any, kinds: Any, args: Any) -> Any:
    """The arguments as vectors, numbers in every lane."""
    lanes = next(kind.lanes for kind in kinds if isinstance(kind, Vector))
    return [a if isinstance(kind, Vector) else _splat(builder, a, lanes) for kind, a in zip(kinds, args, strict=True)]


def _define(function: Any, template: Any, build: Any) -> None:
    _global(function)(type(f"_{function.__name__}", (template,), {"key": function}))

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return build(builder, *(args if template is _Logic else _spread(builder, sig.args, args)))

    kinds = ((Mask, Mask),) if template is _Logic else ((Vector, Vector), (Vector, types.Float), (types.Float, Vector))
    for pair in kinds:
        _builtin(function, *pair)(lower)


for _function, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define(_function, _Arithmetic, lambda b, x, y, name=_name: getattr(b, name)(x, y))
for _function, _name in (
    (operator.gt, ">"),
    (operator.ge, ">="),
    (operator.lt, "<"),
    (operator.le, "<="),
    (operator.eq, "=="),
):
    _define(_function, _Comparison, lambda b, x, y, name=_name: b.fcmp_ordered(name, x, y))
_define(operator.and_, _Logic, lambda b, x, y: b.and_(x, y))
_define(operator.or_, _Logic, lambda b, x, y: b.or_(x, y))


# Memory.


def _load(typingctx: Any, x: Any, i: Any) -> Any:
    """The vector that begins at element i of an array."""
    vector = _vector_of(x)
    if vector is None:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = context.get_value_type(vector)
        return builder.load(_address(context, builder, sig.args[0], args[0], args[1], kind), align=_size(kind))

    return vector(x, types.intp), codegen


def _load_part(typingctx: Any, x: Any, i: Any, count: Any, fill: Any) -> Any:
    """The first ``count`` lanes from an array, ``fill`` in the others, which are not read."""
    vector = _vector_of(x)
    if vector is None:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = context.get_value_type(vector)
        place = _address(context, builder, sig.args[0], args[0], args[1], kind)
        mask, rest = _first(builder, vector.lanes, args[2]), _splat(builder, args[3], vector.lanes)
        name = f"llvm.masked.load.{_suffix(kind)}.p0"
        return _call(builder, name, kind, [place, _I32(_size(kind)), mask, rest])

    return vector(x, types.intp, types.intp, vector.dtype), codegen


def _store(typingctx: Any, x: Any, i: Any, v: Any) -> Any:
    """Write a vector to an array, from element i on."""
    if _vector_of(x) is None or _vector_of(x) != v:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[2].type
        builder.store(args[2], _address(context, builder, sig.args[0], args[0], args[1], kind), align=_size(kind))
        return context.get_dummy_value()

    return types.void(x, types.intp, v), codegen


def _store_part(typingctx: Any, x: Any, i: Any, v: Any, count: Any) -> Any:
    """Write the first ``count`` lanes of a vector to an array."""
    if _vector_of(x) is None or _vector_of(x) != v:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[2].type
        place = _address(context, builder, sig.args[0], args[0], args[1], kind)
        mask = _first(builder, v.lanes, args[3])
        name = f"llvm.masked.store.{_suffix(kind)}.p0"
        _call(builder, name, ir.VoidType(), [args[2], place, _I32(_size(kind)), mask])
        return context.get_dummy_value()

    return types.void(x, types.intp, v, types.intp), codegen


def _compress(typingctx: Any, x: Any, i: Any, v: Any, mask: Any) -> Any:
    """Write the lanes of a mask next to each other, from element i on; a whole vector's room is overwritten."""
    if _vector_of(x) is None or _vector_of(x) != v or not isinstance(mask, Mask):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[2].type
        place = _address(context, builder, sig.args[0], args[0], args[1], kind)
        nothing = ir.Constant(kind, ir.Undefined)
        name = f"llvm.experimental.vector.compress.{_suffix(kind)}"
        builder.store(_call(builder, name, kind, [args[2], args[3], nothing]), place, align=_size(kind))
        return context.get_dummy_value()

    return types.void(x, types.intp, v, mask), codegen


# Lane by lane.


def _splat_like(typingctx: Any, value: Any) -> Any:
    """A number in every lane."""
    if value not in LANES:
        return None
    vector = Vector(value, LANES[value])
    return vector(value), lambda context, builder, sig, args: _splat(builder, args[0], vector.lanes)


def _elementwise(build: Any, arity: int) -> Any:
    """An intrinsic of vectors of one type, of which all but the first may be numbers."""

    def typed(kinds: Any) -> Any:
        vector = kinds[0]
        if not isinstance(vector, Vector):
            return None
        if not all(kind == vector or isinstance(kind, types.Number) for kind in kinds):
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return build(builder, *_spread(builder, sig.args, args))

        return vector(*(kind if kind == vector else vector.dtype for kind in kinds)), codegen

    if arity == 1:
        return lambda typingctx, a: typed((a,))
    if arity == 2:
        return lambda typingctx, a, b: typed((a, b))
    return lambda typingctx, a, b, c: typed((a, b, c))


def _sqrt(builder: Any, x: Any) -> Any:
    return _call(builder, f"llvm.sqrt.{_suffix(x.type)}", x.type, [x])


def _select(typingctx: Any, mask: Any, a: Any, b: Any) -> Any:
    """Lanes of a where the mask is true, of b elsewhere; one of the two may be a number."""
    vector = a if isinstance(a, Vector) else b
    if not isinstance(mask, Mask) or not isinstance(vector, Vector) or mask.lanes != vector.lanes:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(args[0], *_spread(builder, sig.args[1:], args[1:]))

    return vector(mask, *(kind if kind == vector else vector.dtype for kind in (a, b))), codegen


def _unordered(typingctx: Any, a: Any, b: Any) -> Any:
    """Where a or b is NaN."""
    if not isinstance(a, Vector) or a != b:
        return None
    return Mask(a.lanes)(a, b), lambda context, builder, sig, args: builder.fcmp_unordered("uno", args[0], args[1])


def _widen(typingctx: Any, v: Any) -> Any:
    """The same numbers in double precision."""
    if not isinstance(v, Vector):
        return None
    double = Vector(types.float64, v.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0] if v == double else builder.fpext(args[0], context.get_value_type(double))

    return double(v), codegen


def _narrow(typingctx: Any, v: Any, like: Any) -> Any:
    """The numbers of v, rounded to the type of the vector ``like``."""
    if not isinstance(v, Vector) or not isinstance(like, Vector) or v.lanes != like.lanes:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0] if v == like else builder.fptrunc(args[0], context.get_value_type(like))

    return like(v, like), codegen


# From lanes to one value.


def _reduction(join: Any) -> Any:
    def typed(typingctx: Any, v: Any) -> Any:
        if not isinstance(v, Vector):
            return None
        return v.dtype(v), lambda context, builder, sig, args: _halve(builder, args[0], join)

    return typed


def _sum_double(typingctx: Any, v: Any) -> Any:
    """The sum of all lanes, in double precision."""
    if not isinstance(v, Vector):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = args[0] if v.dtype == types.float64 else builder.fpext(args[0], ir.VectorType(ir.DoubleType(), v.lanes))
        return _halve(builder, wide, lambda b, x, y: b.fadd(x, y))

    return types.float64(v), codegen


def _bits(typingctx: Any, mask: Any) -> Any:
    """A mask as an integer, lane 0 in the lowest bit."""
    if not isinstance(mask, Mask):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.bitcast(args[0], ir.IntType(mask.lanes)), _I64)

    return types.uint64(mask), codegen


def _any(typingctx: Any, mask: Any) -> Any:
    """Whether any lane of a mask is true."""
    if not isinstance(mask, Mask):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.IntType(mask.lanes)
        return builder.icmp_unsigned("!=", builder.bitcast(args[0], kind), kind(0))

    return types.boolean(mask), codegen


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


def _polynomial(builder: Any, coefficients: tuple[float, ...], t: Any) -> Any:
    """Horner's rule."""
    value = _constant(t.type, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = _fused(builder, value, t, _constant(t.type, c))
    return value


def _log2(builder: Any, x: Any) -> Any:
    lanes, single = x.type.count, _size(x.type) == 4
    whole = ir.VectorType(_I32 if single else _I64, lanes)
    shift, root = (23, 0x3F3504F3) if single else (52, 0x3FE6A09E667F3BCD)  # the bits of √½
    bits = builder.bitcast(x, whole)
    exponent = builder.ashr(builder.sub(bits, _constant(whole, root)), _constant(whole, shift))
    scaled = builder.sub(bits, builder.shl(exponent, _constant(whole, shift)))
    t = builder.fsub(builder.bitcast(scaled, x.type), _constant(x.type, 1.0))
    # By 32 bits, which every processor can convert.
    number = builder.sitofp(exponent if single else builder.trunc(exponent, ir.VectorType(_I32, lanes)), x.type)
    if single:
        return _fused(builder, t, _polynomial(builder, _LOG_SINGLE, t), number)
    s = builder.fdiv(t, builder.fadd(t, _constant(x.type, 2.0)))
    return _fused(builder, s, _polynomial(builder, _LOG_DOUBLE, builder.fmul(s, s)), number)


def _exp2(builder: Any, y: Any) -> Any:
    lanes, single = y.type.count, _size(y.type) == 4
    whole = ir.VectorType(_I32 if single else _I64, lanes)
    limit, shift = (126.0, 23) if single else (1022.0, 52)
    # Adding 1.5 · 2²³ (2⁵²) rounds to an integer in the low bits.
    number, bits = (12582912.0, 0x4B400000) if single else (6755399441055744.0, 0x4338000000000000)
    y = _smaller(builder, _larger(builder, y, _constant(y.type, -limit)), _constant(y.type, limit))
    rounded = builder.fadd(y, _constant(y.type, number))
    f = builder.fsub(y, builder.fsub(rounded, _constant(y.type, number)))
    value = _polynomial(builder, _EXP_SINGLE if single else _EXP_DOUBLE, f)
    power = builder.sub(builder.bitcast(rounded, whole), _constant(whole, bits))
    lifted = builder.add(builder.bitcast(value, whole), builder.shl(power, _constant(whole, shift)))
    return builder.bitcast(lifted, y.type)


# Rows as lanes.


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Rows and columns of a square exchanged, in log2(n) rounds of two-vector shuffles."""
    n = len(rows)
    step = 1
    while step < n:
        turned = list(rows)
        low = [k if not k & step else n + (k ^ step) for k in range(n)]
        high = [k | step if not k & step else n + k for k in range(n)]
        for i in range(n):
            if not i & step:
                turned[i] = builder.shuffle_vector(rows[i], rows[i | step], _indices(low))
                turned[i | step] = builder.shuffle_vector(rows[i], rows[i | step], _indices(high))
        rows, step = turned, 2 * step
    return rows


def _load_rows(typingctx: Any, x: Any, i: Any, stride: Any, rows: Any, square: Any, j: Any) -> Any:
    """``square[j:]`` = the square of ``x`` at i, whose rows are ``stride`` apart, transposed; the last row is repeated.

    Lane r of column k goes to ``square[j + k · lanes + r]``. There are ``rows`` ≥ 1 rows in the array.
    """
    vector = _vector_of(x)
    if vector is None or vector != _vector_of(square):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = context.get_value_type(vector)
        last = builder.sub(args[3], _I64(1))
        loaded = []
        for r in range(vector.lanes):
            row = builder.select(builder.icmp_signed("<", last, _I64(r)), last, _I64(r))
            place = builder.add(args[1], builder.mul(row, args[2]))
            loaded.append(
                builder.load(_address(context, builder, sig.args[0], args[0], place, kind), align=_size(kind))
            )
        for k, column in enumerate(_transposed(builder, loaded)):
            place = builder.add(args[5], _I64(k * vector.lanes))
            builder.store(column, _address(context, builder, sig.args[4], args[4], place, kind), align=_size(kind))
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, types.intp, square, types.intp), codegen


def _store_rows(typingctx: Any, square: Any, j: Any, x: Any, i: Any, stride: Any, rows: Any) -> Any:
    """The inverse of ``load_rows``: writes the first ``rows`` rows to x, and may overwrite ``square``."""
    vector = _vector_of(x)
    if vector is None or vector != _vector_of(square):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = context.get_value_type(vector)
        loaded = []
        for k in range(vector.lanes):
            place = builder.add(args[1], _I64(k * vector.lanes))
            loaded.append(
                builder.load(_address(context, builder, sig.args[0], args[0], place, kind), align=_size(kind))
            )
        nowhere = _address(context, builder, sig.args[0], args[0], args[1], kind)
        for r, row in enumerate(_transposed(builder, loaded)):
            place = builder.add(args[3], builder.mul(_I64(r), args[4]))
            wanted = _address(context, builder, sig.args[2], args[2], place, kind)
            wanted = builder.select(builder.icmp_signed("<", _I64(r), args[5]), wanted, nowhere)
            builder.store(row, wanted, align=_size(kind))
        return context.get_dummy_value()

    return types.void(square, types.intp, x, types.intp, types.intp, types.intp), codegen


def _count_bits(typingctx: Any, bits: Any) -> Any:
    """How many bits of an integer are set."""
    if bits != types.uint64:
        return None
    return types.intp(bits), lambda context, builder, sig, args: builder.ctpop(args[0])


def _lowest_bit(typingctx: Any, bits: Any) -> Any:
    """The place of the lowest bit that is set; there must be one."""
    if bits != types.uint64:
        return None
    return types.intp(bits), lambda context, builder, sig, args: builder.cttz(args[0], _I1(1))


load: Any = intrinsic(_load)
load_part: Any = intrinsic(_load_part)
store: Any = intrinsic(_store)
store_part: Any = intrinsic(_store_part)
compress: Any = intrinsic(_compress)
load_rows: Any = intrinsic(_load_rows)
store_rows: Any = intrinsic(_store_rows)
splat: Any = intrinsic(_splat_like)
select: Any = intrinsic(_select)
unordered: Any = intrinsic(_unordered)
widen: Any = intrinsic(_widen)
narrow: Any = intrinsic(_narrow)

fma: Any = intrinsic(_elementwise(_fused, 3))
"""a · b + c, rounded once where the processor can."""
maximum: Any = intrinsic(_elementwise(_larger, 2))
"""The larger of two; b if either is NaN."""
minimum: Any = intrinsic(_elementwise(_smaller, 2))
"""The smaller of two; b if either is NaN."""
sqrt: Any = intrinsic(_elementwise(_sqrt, 1))
"""The square root."""
log2: Any = intrinsic(_elementwise(_log2, 1))
"""log2 of positive normal numbers, right to 2 (in double 3) units in the last place."""
exp2: Any = intrinsic(_elementwise(_exp2, 1))
"""2^y, kept between the least and (nearly) the largest normal number, as right as ``log2``."""

sum_lanes: Any = intrinsic(_reduction(lambda b, x, y: b.fadd(x, y)))
"""The sum of all lanes, in their own precision."""
max_lanes: Any = intrinsic(_reduction(_larger))
"""The largest lane, if none is NaN."""
sum_double: Any = intrinsic(_sum_double)
bits_of: Any = intrinsic(_bits)
any_lane: Any = intrinsic(_any)
count_bits: Any = intrinsic(_count_bits)
lowest_bit: Any = intrinsic(_lowest_bit)
