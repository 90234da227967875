"""Arrays of compiled code that nobody counts references to.

Numba counts the references to an array wherever it is passed on, taken out of a tuple or cut into parts. For a short
row that takes longer than the row where each count is an atomic operation (see ``pipeline.py``). Arrays made here have
no count. A kernel releases what it has allocated; what it was given belongs to its caller.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_builders
from numba.extending import intrinsic
from numba.np import arrayobj as numba_arrays

cgutils: Any = numba_builders
arrayobj: Any = numba_arrays

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_BOUNDARY = 64  # bytes: where the longest vectors of any processor may begin


def _allocate(typingctx: Any, size: Any, dtype: Any) -> Any:
    """An array of so many elements that begins on a vector boundary, to be released; its contents are arbitrary."""
    kind = dtype.dtype if isinstance(dtype, types.DType) else getattr(dtype, "instance_type", None)
    if kind is None or not isinstance(size, types.Integer):
        return None
    array: Any = types.Array(kind, 1, "C")

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        item = _I64(context.get_abi_sizeof(context.get_data_type(kind)))
        whole = builder.add(builder.mul(args[0], item), _I64(2 * _BOUNDARY))
        base = context.nrt.allocate(builder, whole)
        start = builder.add(builder.ptrtoint(base, _I64), _I64(_BOUNDARY + _BOUNDARY - 1))
        start = builder.and_(start, _I64(-_BOUNDARY))
        # What is to be released stands before the first element.
        before = builder.inttoptr(builder.sub(start, _I64(8)), base.type.as_pointer())
        builder.store(base, before)
        found = context.make_array(array)(context, builder)
        data = builder.inttoptr(start, context.get_data_type(kind).as_pointer())
        arrayobj.populate_array(found, data, [args[0]], [item], item, None)
        return found._getvalue()

    return array(types.intp, dtype), codegen


def _release(typingctx: Any, array: Any) -> Any:
    """Give back an array that was allocated here, or any other that begins where it does."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = builder.ptrtoint(context.make_array(sig.args[0])(context, builder, args[0]).data, _I64)
        before = builder.inttoptr(builder.sub(data, _I64(8)), _I8.as_pointer().as_pointer())
        context.nrt.free(builder, builder.load(before))
        return context.get_dummy_value()

    return types.void(array), codegen


def _borrowed(typingctx: Any, array: Any) -> Any:
    """The same array, whose owner outlives it."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = context.make_array(sig.args[0])(context, builder, args[0])
        found.meminfo = cgutils.get_null_value(found.meminfo.type)
        found.parent = cgutils.get_null_value(found.parent.type)
        return found._getvalue()

    return array(array), codegen


allocate: Any = intrinsic(_allocate)
release: Any = intrinsic(_release)
borrowed: Any = intrinsic(_borrowed)
