"""Below the arrays: floats as integers, in an order that integer comparisons understand, sets as bits, and addresses.

Integer maxima vectorise without a promise that there are no NaNs, which floating-point maxima need.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_INT: dict[Any, Any] = {types.float32: types.int32, types.float64: types.int64}
_pointer_to: Any = types.CPointer
_FLOAT: dict[Any, Any] = {i: f for f, i in _INT.items()}


def _bits(typingctx: Any, x: Any) -> Any:
    """The bits of a float."""
    if x not in _INT:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return _INT[x](x), codegen


def _from_bits(typingctx: Any, b: Any) -> Any:
    """The float with these bits."""
    if b not in _FLOAT:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return _FLOAT[b](b), codegen


def _flip(builder: Any, i: Any) -> Any:
    """The other bits of negative numbers turned over: an involution between bits and order."""
    width = i.type.width
    negative = builder.ashr(i, ir.Constant(i.type, width - 1))
    return builder.xor(i, builder.and_(negative, ir.Constant(i.type, (1 << (width - 1)) - 1)))


def _ordered(typingctx: Any, x: Any) -> Any:
    """An integer in the order of floats: NaN beyond the infinity of its sign."""
    if x not in _INT:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _flip(builder, builder.bitcast(args[0], context.get_value_type(signature.return_type)))

    return _INT[x](x), codegen


def _from_ordered(typingctx: Any, i: Any) -> Any:
    """The float at that place of the order."""
    if i not in _FLOAT:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(_flip(builder, args[0]), context.get_value_type(signature.return_type))

    return _FLOAT[i](i), codegen


bits: Any = intrinsic(_bits)
from_bits: Any = intrinsic(_from_bits)
ordered: Any = intrinsic(_ordered)
from_ordered: Any = intrinsic(_from_ordered)


def _pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to floats of the type of those in the array ``like``."""
    if not isinstance(address, types.Integer) or not isinstance(like, types.Array) or like.dtype not in _INT:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return _pointer_to(like.dtype)(address, like), codegen


pointer: Any = intrinsic(_pointer)


LANES = 64
"""How many entries ``above`` compares."""


def _load(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:
    """LANES entries of an array as one vector."""
    values = context.make_array(kind)(context, builder, array)
    several = ir.VectorType(context.get_value_type(kind.dtype), LANES)
    place = builder.bitcast(builder.gep(values.data, [start]), several.as_pointer())
    return builder.load(place, align=kind.dtype.bitwidth // 8)


def _spread(builder: Any, value: Any) -> Any:
    """A number in every lane of a vector."""
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _is_row(x: Any) -> bool:
    return isinstance(x, types.Array) and x.dtype in _INT and x.ndim == 1


def _above(typingctx: Any, x: Any, start: Any, offset: Any, line: Any) -> Any:
    """Which of ``x[start : start + LANES] - offset`` are above the line, or NaN, as the bits of an integer."""
    if not _is_row(x):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = _load(context, builder, signature.args[0], args[0], args[1])
        high = builder.fcmp_unordered(">", builder.fsub(block, _spread(builder, args[2])), _spread(builder, args[3]))
        return builder.bitcast(high, ir.IntType(LANES))

    return types.uint64(x, types.intp, x.dtype, x.dtype), codegen


def _undecided(typingctx: Any, z: Any, u: Any, start: Any, low: Any, high: Any) -> Any:
    """Which of LANES entries have z > low and z − high < u, as the bits of an integer."""
    if not _is_row(z) or not _is_row(u) or z.dtype != u.dtype:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = _load(context, builder, signature.args[0], args[0], args[2])
        bound = _load(context, builder, signature.args[1], args[1], args[2])
        some = builder.fcmp_ordered(">", block, _spread(builder, args[3]))
        room = builder.fcmp_ordered("<", builder.fsub(block, _spread(builder, args[4])), bound)
        return builder.bitcast(builder.and_(some, room), ir.IntType(LANES))

    return types.uint64(z, u, types.intp, z.dtype, z.dtype), codegen


def _lowest(typingctx: Any, mask: Any) -> Any:
    """The place of the lowest bit that is set."""
    if mask != types.uint64:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.intp(mask), codegen


def _ones(typingctx: Any, mask: Any) -> Any:
    """How many bits are set."""
    if mask != types.uint64:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.intp(mask), codegen


above: Any = intrinsic(_above)
undecided: Any = intrinsic(_undecided)
lowest: Any = intrinsic(_lowest)
ones: Any = intrinsic(_ones)
