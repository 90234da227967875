"""Below the arrays: floats as integers, in an order that integer comparisons understand, and arrays by their address.

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
    """An address as a pointer to floats of the type of ``like``."""
    if not isinstance(address, types.Integer) or like not in _INT:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return _pointer_to(like)(address, like), codegen


pointer: Any = intrinsic(_pointer)
