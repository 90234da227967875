"""Rows in memory: where they are, and how results are written, past the caches where the whole output is large.

A store usually reads its place into the caches first. Where an output is larger than these, that read takes as long as
the store, and what it evicts has to be read again. ``stream`` writes without it; rows must begin at a vector boundary.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.core import config as numba_config
from numba.extending import intrinsic, overload

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import INLINED, strict_helper
from fenchel.kernels.cpu.maps.places import fill, list_places
from fenchel.kernels.cpu.powers import call, suffix

_LARGE = 1 << 23  # bytes
_config: Any = numba_config
_builders: Any = cgutils


def _stream(typingctx: Any, x: Any, i: Any, v: Any) -> Any:
    """Write a vector past the caches, from element i on, which must begin a vector's place in memory."""
    if not isinstance(v, vec.Vector) or v.dtype != x.dtype:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[2].type
        size = v.lanes * v.dtype.bitwidth // 8
        store = builder.store(args[2], vec.address(context, builder, sig.args[0], args[0], args[1], kind), align=size)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(x, types.intp, v), codegen


def _insert(typingctx: Any, v: Any, lane: Any, value: Any) -> Any:
    """A vector with a number in place of one lane."""
    if not isinstance(v, vec.Vector):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.insert_element(args[0], args[2], args[1])

    return v(v, types.intp, v.dtype), codegen


def _compress(typingctx: Any, x: Any, i: Any, v: Any, mask: Any) -> Any:
    """Write the lanes of a mask next to each other, from element i on; a whole vector's room is overwritten."""
    if not isinstance(v, vec.Vector) or v.dtype != x.dtype or not isinstance(mask, vec.Mask):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[2].type
        place = vec.address(context, builder, sig.args[0], args[0], args[1], kind)
        nothing = ir.Constant(kind, ir.Undefined)
        name = f"llvm.experimental.vector.compress.{suffix(kind)}"
        builder.store(call(builder, name, kind, [args[2], args[3], nothing]), place, align=v.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(x, types.intp, v, mask), codegen


def _compress_by_table(typingctx: Any, x: Any, i: Any, v: Any, line: Any) -> Any:
    """``compress_above`` by AVX2, half a vector of floats at a time."""
    if not isinstance(v, vec.Vector) or v.dtype != types.float32 or v.dtype != x.dtype or v != line:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        # Its signs are the mask: LLVM makes of a comparison three times the code.
        below = builder.fsub(args[3], args[2])
        return _pack_by_table(context, builder, sig.args[0], args[0], args[1], args[2], below, 0)

    return types.intp(x, types.intp, v, line), codegen


def _list_lanes(typingctx: Any, index: Any, i: Any, first: Any, mask: Any) -> Any:
    """Write the lanes of a mask, counted from ``first``, from element i of a list on; 16 elements are overwritten."""
    if not isinstance(mask, vec.Mask) or index.dtype != types.int32:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = _lanes_from(builder, args[2], mask.lanes)
        place = vec.address(context, builder, sig.args[0], args[0], args[1], lanes.type)
        name = f"llvm.experimental.vector.compress.v{mask.lanes}i32"
        packed = call(builder, name, lanes.type, [lanes, args[3], ir.Constant(lanes.type, ir.Undefined)])
        builder.store(packed, place, align=4)
        return context.get_dummy_value()

    return types.void(index, types.intp, types.intp, mask), codegen


def _list_by_table(typingctx: Any, index: Any, i: Any, first: Any, lead: Any) -> Any:
    """As ``list_lanes`` by AVX2, of those lanes of a vector of floats whose sign is +; returns how many there are."""
    if not isinstance(lead, vec.Vector) or lead.dtype != types.float32 or index.dtype != types.int32:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = builder.bitcast(_lanes_from(builder, args[2], lead.lanes), args[3].type)
        return _pack_by_table(context, builder, sig.args[0], args[0], args[1], lanes, args[3], 255)

    return types.intp(index, types.intp, types.intp, lead), codegen


def _lanes_from(builder: Any, first: Any, lanes: int) -> Any:
    """first, first + 1, … as a vector of int32."""
    kind = ir.VectorType(ir.IntType(32), lanes)
    nothing, zeros = ir.Constant(kind, ir.Undefined), ir.Constant(kind, [0] * lanes)
    start = builder.insert_element(nothing, builder.trunc(first, ir.IntType(32)), ir.IntType(32)(0))
    return builder.add(builder.shuffle_vector(start, nothing, zeros), ir.Constant(kind, list(range(lanes))))


def _pack_by_table(context: Any, builder: Any, kind: Any, x: Any, i: Any, v: Any, signs: Any, flip: int) -> Any:
    """By AVX2, write those lanes of a vector, 16 times 32 bits, next to each other whose sign is −, or + if flipped.

    Half a vector at a time; returns how many there are.
    """
    i32, i64 = ir.IntType(32), ir.IntType(64)
    single, places = ir.VectorType(ir.FloatType(), 8), ir.VectorType(i32, 8)
    table = _builders.global_constant(builder, "fenchel_orders", ir.Constant(ir.ArrayType(i64, 256), _ORDERS))
    count: Any = i64(0)
    for half in range(2):
        lanes = ir.Constant(places, list(range(8 * half, 8 * half + 8)))
        part, sign = (builder.shuffle_vector(each, each, lanes) for each in (v, signs))
        found = builder.zext(builder.xor(call(builder, "llvm.x86.avx.movmsk.ps.256", i32, [sign]), i32(flip)), i64)
        order = builder.bitcast(builder.load(builder.gep(table, [i64(0), found])), ir.VectorType(ir.IntType(8), 8))
        part = call(builder, "llvm.x86.avx2.permps", single, [part, builder.zext(order, places)])
        place = vec.address(context, builder, kind, x, builder.add(i, count), single)
        builder.store(part, place, align=4)
        count = builder.add(count, builder.ctpop(found))
    return count


# For every choice of 8 lanes: which lane comes first, which second, …, one byte each, the first in the lowest.
_ORDERS = [
    sum(lane << (8 * k) for k, lane in enumerate(lane for lane in range(8) if chosen >> lane & 1))
    for chosen in range(256)
]


def _extract(typingctx: Any, v: Any, lane: Any) -> Any:
    """The number in one lane."""
    if not isinstance(v, vec.Vector):
        return None
    return v.dtype(v, types.intp), lambda context, builder, sig, args: builder.extract_element(args[0], args[1])


def _finish_streams(typingctx: Any) -> Any:
    """Wait until what was streamed is visible to other threads."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


stream: Any = intrinsic(_stream)
insert: Any = intrinsic(_insert)
extract: Any = intrinsic(_extract)
compress_lanes: Any = intrinsic(_compress)
compress_by_table: Any = intrinsic(_compress_by_table)
list_lanes: Any = intrinsic(_list_lanes)
list_by_table: Any = intrinsic(_list_by_table)
finish_streams: Any = intrinsic(_finish_streams)


def compress_above(x: Any, i: int, v: Any, line: Any) -> int:
    """Write the lanes of v above a line next to each other, from element i on, and return how many.

    x has room for a vector there. Lanes that are NaN, or as infinite as the line, may be among them.
    """
    raise NotImplementedError("for compiled code")


@overload(compress_above, strict=False, jit_options=INLINED)
def _compress_above(x: Any, i: Any, v: Any, line: Any) -> Any:
    if _has("avx512f"):
        return _compress_at_once
    if _has("avx2") and v.dtype == types.float32:
        return lambda x, i, v, line: compress_by_table(x, i, v, line)
    return _compress_one_by_one


def _compress_at_once(x: Any, i: int, v: Any, line: Any) -> int:
    above = v > line
    compress_lanes(x, i, v, above)
    count: int = vec.count_bits(vec.bits_of(above))
    return count


def _compress_one_by_one(x: Any, i: int, v: Any, line: Any) -> int:
    found = vec.bits_of(v > line)
    count = 0
    while found != 0:
        x[i + count] = extract(v, vec.lowest_bit(found))
        count += 1
        found &= found - np.uint64(1)
    return count


def list_lanes_above(index: Any, i: int, first: int, v: Any, line: Any) -> int:
    """Write the lanes of v that are not below a line, counted from ``first``, from element i on, and return how many.

    The list has room for a vector there. Lanes as infinite as the line may be among them.
    """
    raise NotImplementedError("for compiled code")


@overload(list_lanes_above, strict=False, jit_options=INLINED)
def _list_lanes_above(index: Any, i: Any, first: Any, v: Any, line: Any) -> Any:
    if _has("avx512f"):
        return _list_at_once
    if _has("avx2") and v.dtype == types.float32:
        return lambda index, i, first, v, line: list_by_table(index, i, first, v - line)
    return lambda index, i, first, v, line: list_places(vec.bits_of(v >= line), first, index, i) - i


def _list_at_once(index: Any, i: int, first: int, v: Any, line: Any) -> int:
    above = v >= line
    list_lanes(index, i, first, above)
    count: int = vec.count_bits(vec.bits_of(above))
    return count


def _has(feature: str) -> bool:
    """Whether the processor that kernels are compiled for has a set of instructions: LLVM's code without is long."""
    if _config.CPU_NAME:
        asked = (_config.CPU_FEATURES or "").split(",")
        return f"+{feature}" in asked or (feature == "avx2" and _config.CPU_NAME == "haswell" and "-avx2" not in asked)
    return bool(llvm.get_host_cpu_features().get(feature, False))


@strict_helper
def matrix(address: int, size: int, n: int, like: Any) -> Any:
    """``size`` floats at an address, n per row, of the type of ``like``.

    Kernels take addresses, and not arrays: to make these in Python takes longer than a row.
    """
    return carray(vec.pointer(address, like), (size // n, n))


@strict_helper
def is_streamed(out: Any, n: int) -> Any:
    """Whether rows of n entries of an output are streamed: it is large, and every row begins at a vector boundary."""
    aligned = n % vec.lanes(out) == 0 and vec.to_boundary(out) == 0
    return aligned and out.size * out.itemsize >= _LARGE


@strict_helper
def put(out: Any, i: int, v: Any, streamed: bool) -> None:
    """Write a vector from element i on."""
    if streamed:
        stream(out, i, v)
    else:
        vec.store(out, i, v)


@strict_helper
def stream_zeros(out: Any, start: int, end: int) -> None:
    """Zeros from one element to another, a whole number of vectors."""
    zero = vec.splat(out.dtype.type(0))
    for i in range(start, end, vec.lanes(out)):
        stream(out, i, zero)


@strict_helper
def store_candidates(w: Any, count: int, index: Any, out: Any, start: int, n: int) -> None:
    """Write the candidates of a row to their places, which increase, and zeros elsewhere."""
    if is_streamed(out, n):
        _stream_candidates(w, count, index, out, start, n)
    else:
        fill(out, start, n, 0)
        for i in range(count):
            out[start + index[i]] = w[i]


@strict_helper
def _stream_candidates(w: Any, count: int, index: Any, out: Any, start: int, n: int) -> None:
    lanes = vec.lanes(out)
    zero = vec.splat(out.dtype.type(0))
    place, k = 0, 0
    while k < count:
        end = index[k] // lanes * lanes
        stream_zeros(out, start + place, start + end)
        found = zero
        place = end + lanes
        while k < count and index[k] < place:
            found = insert(found, index[k] - end, out.dtype.type(w[k]))
            k += 1
        stream(out, start + end, found)
    stream_zeros(out, start + place, start + n)


@strict_helper
def store_row(w: Any, out: Any, start: int, n: int) -> None:
    """Write one row."""
    lanes = vec.lanes(out)
    streamed = is_streamed(out, n)
    for i in range(0, n - lanes + 1, lanes):
        put(out, start + i, vec.load(w, i), streamed)
    rest = n % lanes
    if rest:
        vec.store_part(out, start + n - rest, vec.load(w, n - rest), rest)
