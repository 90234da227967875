"""Vectors of the processor as a type of compiled code: 16 floats of 32 bits, or 8 of 64 bits, and their operations.

A loop written with them does not depend on what the compiler makes of a scalar loop. Longer or shorter registers do not
matter: LLVM splits a vector into as many as it needs. Kernels that use them are compiled by ``compiler.strict``: every
operation is rounded on its own, ``fma`` once.

``+ - * /`` act on two vectors of a type, or on a vector and a number; ``> >= < <= ==`` make a mask, ``& |`` join masks.
Arrays are contiguous, of any dimension, and ``i`` is an index into their elements in memory order.

The file is longer than 600 lines because all operations on vectors are here, some lines each: kernels import one set of
names, and no operation exists twice.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing import templates
from numba.extending import intrinsic, lower_builtin, models, register_model

from fenchel.kernels.cpu.powers import LARGEST, call, exp2_of, fused, larger, log2_of, log2_ratio_of, smaller, suffix

LANES = {types.float32: 16, types.float64: 8}
"""How many numbers a vector has that is loaded from an array."""

_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_Model: Any = models.PrimitiveModel
_signature: Any = templates.signature
_global: Any = templates.infer_global
_builtin: Any = lower_builtin
_pointer_to: Any = types.CPointer


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


def _indices(values: Any) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(values)), list(values))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, _indices([0] * lanes))


def address(context: Any, builder: Any, kind: Any, array: Any, index: Any, like: Any) -> Any:
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
    nothing, width = ir.Constant(vector.type, ir.Undefined), vector.type.count
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
    (operator.iadd, "fadd"),
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
        return builder.load(address(context, builder, sig.args[0], args[0], args[1], kind), align=_size(kind))

    return vector(x, types.intp), codegen


def _load_part(typingctx: Any, x: Any, i: Any, count: Any, fill: Any) -> Any:
    """The first ``count`` lanes from an array, ``fill`` in the others, which are not read."""
    vector = _vector_of(x)
    if vector is None:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = context.get_value_type(vector)
        place = address(context, builder, sig.args[0], args[0], args[1], kind)
        mask, rest = _first(builder, vector.lanes, args[2]), _splat(builder, args[3], vector.lanes)
        name = f"llvm.masked.load.{suffix(kind)}.p0"
        return call(builder, name, kind, [place, _I32(_size(kind)), mask, rest])

    return vector(x, types.intp, types.intp, vector.dtype), codegen


def _load_doubles(typingctx: Any, x: Any, i: Any, count: Any) -> Any:
    """The first ``count`` of eight numbers of an array, in double precision; 0 in the others, which are not read."""
    if _vector_of(x) is None:
        return None
    double = Vector(types.float64, LANES[types.float64])

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(_element(x.dtype), double.lanes)
        place = address(context, builder, sig.args[0], args[0], args[1], kind)
        mask, rest = _first(builder, double.lanes, args[2]), ir.Constant(kind, [0.0] * double.lanes)
        name = f"llvm.masked.load.{suffix(kind)}.p0"
        found = call(builder, name, kind, [place, _I32(_size(kind)), mask, rest])
        return found if x.dtype == types.float64 else builder.fpext(found, context.get_value_type(double))

    return double(x, types.intp, types.intp), codegen


def _store(typingctx: Any, x: Any, i: Any, v: Any) -> Any:
    """Write a vector to an array, from element i on."""
    if _vector_of(x) is None or _vector_of(x) != v:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[2].type
        builder.store(args[2], address(context, builder, sig.args[0], args[0], args[1], kind), align=_size(kind))
        return context.get_dummy_value()

    return types.void(x, types.intp, v), codegen


def _store_part(typingctx: Any, x: Any, i: Any, v: Any, count: Any) -> Any:
    """Write the first ``count`` lanes of a vector to an array."""
    if _vector_of(x) is None or _vector_of(x) != v:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[2].type
        place = address(context, builder, sig.args[0], args[0], args[1], kind)
        mask = _first(builder, v.lanes, args[3])
        name = f"llvm.masked.store.{suffix(kind)}.p0"
        call(builder, name, ir.VoidType(), [args[2], place, _I32(_size(kind)), mask])
        return context.get_dummy_value()

    return types.void(x, types.intp, v, types.intp), codegen


def _pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to floats of the type of those in the array ``like``."""
    if not isinstance(address, types.Integer) or _vector_of(like) is None:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return _pointer_to(like.dtype)(address, like), codegen


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
    if arity == 3:
        return lambda typingctx, a, b, c: typed((a, b, c))
    return lambda typingctx, a, b, c, d: typed((a, b, c, d))


def _sqrt(builder: Any, x: Any) -> Any:
    return call(builder, f"llvm.sqrt.{suffix(x.type)}", x.type, [x])


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


def _in_every_lane(join: Any) -> Any:
    """A reduction whose result stands in every lane: lanes are joined with those 1, 2, 4, … places further."""

    def typed(typingctx: Any, v: Any) -> Any:
        if not isinstance(v, Vector):
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            vector, step = args[0], v.lanes // 2
            while step:
                nothing = ir.Constant(vector.type, ir.Undefined)
                other = builder.shuffle_vector(vector, nothing, _indices([k ^ step for k in range(v.lanes)]))
                vector, step = join(builder, vector, other), step // 2
            return vector

        return v(v), codegen

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


def _first_lane(typingctx: Any, v: Any) -> Any:
    """The number in lane 0."""
    if not isinstance(v, Vector):
        return None
    return v.dtype(v), lambda context, builder, sig, args: builder.extract_element(args[0], _I32(0))


def _everywhere(typingctx: Any, mask: Any) -> Any:
    """True in every lane if any lane of a mask is."""
    if not isinstance(mask, Mask):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.IntType(mask.lanes)
        found = builder.icmp_unsigned("!=", builder.bitcast(args[0], kind), kind(0))
        return _splat(builder, found, mask.lanes)

    return mask(mask), codegen


def _any(typingctx: Any, mask: Any) -> Any:
    """Whether any lane of a mask is true."""
    if not isinstance(mask, Mask):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.IntType(mask.lanes)
        return builder.icmp_unsigned("!=", builder.bitcast(args[0], kind), kind(0))

    return types.boolean(mask), codegen


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


def _squares(outer: Any, inner: Any) -> Any:
    """The vector type of ``inner``, and one of as many lanes for ``outer``, which may be of single precision."""
    vector, other = _vector_of(inner), _vector_of(outer)
    if vector is None or other is None or vector.lanes > other.lanes:
        return None, None
    return vector, Vector(outer.dtype, vector.lanes)


def _places(context: Any, builder: Any, kind: Any, array: Any, start: Any, stride: Any, vector: Any) -> Any:
    """Where as many vectors as they have lanes begin in an array, ``stride`` apart."""
    places = [builder.add(start, builder.mul(_I64(r), stride)) for r in range(vector.lanes)]
    return [address(context, builder, kind, array, place, context.get_value_type(vector)) for place in places]


def _load_square(typingctx: Any, x: Any, i: Any, stride: Any, columns: Any, j: Any) -> Any:
    """Transpose the square of x at i, whose rows are ``stride`` apart, to ``columns[j:]``, one vector per column."""
    vector, outer = _squares(x, columns)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole, size = context.get_value_type(vector), x.dtype.bitwidth // 8
        rows = _places(context, builder, sig.args[0], args[0], args[1], args[2], outer)
        rows = [builder.load(place, align=size) for place in rows]
        rows = rows if outer == vector else [builder.fpext(row, whole) for row in rows]
        to = _places(context, builder, sig.args[3], args[3], args[4], _I64(vector.lanes), vector)
        for column, place in zip(_transposed(builder, rows), to, strict=True):
            builder.store(column, place, align=_size(whole))
        return context.get_dummy_value()

    return vector and (types.void(x, types.intp, types.intp, columns, types.intp), codegen)


def _load_square_part(
    typingctx: Any, x: Any, i: Any, stride: Any, rows: Any, count: Any, fill: Any, columns: Any, j: Any
) -> Any:
    """As ``load_square`` of so many rows and of ``count`` columns, ``fill`` elsewhere, which is not read."""
    vector = _vector_of(x)
    if vector is None or vector != _vector_of(columns):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        source, i, stride, rows, count, fill, to, j = args
        kind = context.get_value_type(vector)
        mask, rest = _first(builder, vector.lanes, count), _splat(builder, fill, vector.lanes)
        name = f"llvm.masked.load.{suffix(kind)}.p0"
        found = []
        for r, place in enumerate(_places(context, builder, sig.args[0], source, i, stride, vector)):
            inside = _splat(builder, builder.icmp_signed("<", _I64(r), rows), vector.lanes)
            found.append(call(builder, name, kind, [place, _I32(_size(kind)), builder.and_(mask, inside), rest]))
        places = _places(context, builder, sig.args[6], to, j, _I64(vector.lanes), vector)
        for column, place in zip(_transposed(builder, found), places, strict=True):
            builder.store(column, place, align=_size(kind))
        return context.get_dummy_value()

    number, index = vector.dtype, types.intp
    return types.void(x, index, index, index, index, number, columns, index), codegen


def _store_square(typingctx: Any, columns: Any, j: Any, x: Any, i: Any, stride: Any) -> Any:
    """The inverse of ``load_square``."""
    vector, outer = _squares(x, columns)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        part, size = context.get_value_type(outer), columns.dtype.bitwidth // 8
        found = _places(context, builder, sig.args[0], args[0], args[1], _I64(vector.lanes), vector)
        rows = _transposed(builder, [builder.load(place, align=size) for place in found])
        rows = rows if outer == vector else [builder.fptrunc(row, part) for row in rows]
        found = _places(context, builder, sig.args[2], args[2], args[3], args[4], outer)
        for row, place in zip(rows, found, strict=True):
            builder.store(row, place, align=_size(part))
        return context.get_dummy_value()

    return vector and (types.void(columns, types.intp, x, types.intp, types.intp), codegen)


def _lanes(typingctx: Any, x: Any) -> Any:
    """How many numbers a vector of an array's elements has, a constant."""
    vector = _vector_of(x)
    if vector is None:
        return None
    return types.intp(x), lambda context, builder, sig, args: _I64(vector.lanes)


def _exponent_limit(typingctx: Any, v: Any) -> Any:
    """The largest y whose 2^y ``exp2`` tells from larger ones, for the lanes of a vector; −y is the smallest."""
    if not isinstance(v, Vector):
        return None
    return v.dtype(v), lambda context, builder, sig, args: ir.Constant(_element(v.dtype), LARGEST[v.dtype])


def _polynomial(typingctx: Any, t: Any, coefficients: Any) -> Any:
    """Σ coefficients[k] · t^k, where the coefficients are a tuple of constants."""
    if not isinstance(t, Vector) or not isinstance(coefficients, types.UniTuple):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = None
        for k in reversed(range(coefficients.count)):
            c = context.cast(builder, builder.extract_value(args[1], k), coefficients.dtype, t.dtype)
            c = _splat(builder, c, t.lanes)
            value = c if value is None else fused(builder, value, args[0], c)
        return value

    return t(t, coefficients), codegen


def _precision(typingctx: Any, x: Any) -> Any:
    """Two units in the last place of 1 for the elements of an array, in double."""
    if _vector_of(x) is None:
        return None
    value = 2.0**-22 if x.dtype == types.float32 else 2.0**-50
    return types.float64(x), lambda context, builder, sig, args: ir.Constant(ir.DoubleType(), value)


def _to_boundary(typingctx: Any, x: Any) -> Any:
    """How many elements of an array come before the first that begins a vector's place in memory."""
    vector = _vector_of(x)
    if vector is None:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = builder.ptrtoint(context.make_array(sig.args[0])(context, builder, args[0]).data, _I64)
        size = x.dtype.bitwidth // 8
        rest = builder.and_(builder.neg(data), _I64(vector.lanes * size - 1))
        return builder.udiv(rest, _I64(size))

    return types.intp(x), codegen


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
load_doubles: Any = intrinsic(_load_doubles)
store: Any = intrinsic(_store)
store_part: Any = intrinsic(_store_part)
pointer: Any = intrinsic(_pointer)
load_square: Any = intrinsic(_load_square)
load_square_part: Any = intrinsic(_load_square_part)
store_square: Any = intrinsic(_store_square)
lanes: Any = intrinsic(_lanes)
precision: Any = intrinsic(_precision)
exponent_limit: Any = intrinsic(_exponent_limit)
polynomial: Any = intrinsic(_polynomial)
to_boundary: Any = intrinsic(_to_boundary)
splat: Any = intrinsic(_splat_like)
select: Any = intrinsic(_select)
unordered: Any = intrinsic(_unordered)
widen: Any = intrinsic(_widen)
narrow: Any = intrinsic(_narrow)

fma: Any = intrinsic(_elementwise(fused, 3))
"""a · b + c, rounded once where the processor can."""
maximum: Any = intrinsic(_elementwise(larger, 2))
"""The larger of two; b if either is NaN."""
minimum: Any = intrinsic(_elementwise(smaller, 2))
"""The smaller of two; b if either is NaN."""
sqrt: Any = intrinsic(_elementwise(_sqrt, 1))
"""The square root."""
log2: Any = intrinsic(_elementwise(log2_of, 1))
"""log2 of positive normal numbers, right to 2 (in double 3) units in the last place."""
exp2: Any = intrinsic(_elementwise(exp2_of, 1))
"""2^y, kept between the least and (nearly) the largest normal number, as right as ``log2``."""

log2_ratio: Any = intrinsic(_elementwise(log2_ratio_of, 4))
"""log2(base + scale · u) / scale of u, scale, 1/scale and base: see ``powers.log2_ratio_of``."""

sum_lanes: Any = intrinsic(_reduction(lambda b, x, y: b.fadd(x, y)))
"""The sum of all lanes, in their own precision."""
max_lanes: Any = intrinsic(_reduction(larger))
"""The largest lane, if none is NaN."""
sum_everywhere: Any = intrinsic(_in_every_lane(lambda b, x, y: b.fadd(x, y)))
"""The sum of all lanes, in every lane."""
max_everywhere: Any = intrinsic(_in_every_lane(larger))
"""The largest lane, if none is NaN, in every lane."""
sum_double: Any = intrinsic(_sum_double)
bits_of: Any = intrinsic(_bits)
first_lane: Any = intrinsic(_first_lane)
everywhere: Any = intrinsic(_everywhere)
any_lane: Any = intrinsic(_any)
count_bits: Any = intrinsic(_count_bits)
lowest_bit: Any = intrinsic(_lowest_bit)
