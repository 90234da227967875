"""Runs of equal entries of an index: where they begin and how long they are, in one pass that threads share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from fenchel.kernels.cpu.compiler import strict
from fenchel.kernels.cpu.threads import over_rows
from fenchel.kernels.cpu.vectors import address, lowest_bit

_BLOCK = 1 << 14
_STEP = 16  # entries that are compared at once


def runs(index: Tensor) -> tuple[Tensor, tuple[int, int, int, int, int]]:
    """The runs of equal entries of an index (n,), int64, n ≥ 1.

    Returns:
        (3, G): where each run begins, how many entries it has, and their value; and five numbers: the sizes of the
        shortest and of the longest run, the first and the last value, and how many values are less than the one before.
    """
    values = index.contiguous().numpy()
    count = values.size
    blocks = -(-count // _BLOCK)
    table, counts = np.empty((3, count), np.int64), np.empty(max(2 * blocks, 6), np.int64)
    over_rows(_find_runs, blocks, count, values, table, counts)
    _join_runs(values, blocks, table, counts)
    found, *facts = counts[:6].tolist()
    return torch.from_numpy(table[:, :found]), tuple(facts)


def _changes_of(typingctx: Any, x: Any, i: Any) -> Any:
    """One bit for each of 16 integers of an array from index i on: whether it differs from the one before it."""
    if not isinstance(x, types.Array) or x.layout != "C" or x.dtype != types.int64:
        return None
    word = ir.IntType(64)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(word, _STEP)
        here, before = (
            builder.load(address(context, builder, sig.args[0], args[0], place, kind), align=8)
            for place in (args[1], builder.sub(args[1], word(1)))
        )
        return builder.zext(builder.bitcast(builder.icmp_signed("!=", here, before), ir.IntType(_STEP)), word)

    return types.uint64(x, types.intp), codegen


_changes: Any = intrinsic(_changes_of)


@strict
def _find_runs(first, last, values, table, counts):  # type: ignore[no-untyped-def]
    """Per block of the index: where runs begin, in the block's part of ``table[0]``; how many, and how many fall."""
    for block in range(first, last):
        start, stop = block * _BLOCK, min(block * _BLOCK + _BLOCK, values.size)
        count, falls, i = 0, 0, start
        if i == 0:
            table[0, 0] = 0
            count, i = 1, 1
        while i < stop:
            if i + _STEP <= stop:
                bits = _changes(values, i)
                width = _STEP
            else:
                bits = np.uint64(1 if values[i] != values[i - 1] else 0)
                width = 1
            while bits != np.uint64(0):
                place = i + lowest_bit(bits)
                bits &= bits - np.uint64(1)
                table[0, start + count] = place
                falls += 1 if values[place] < values[place - 1] else 0
                count += 1
            i += width
        counts[2 * block], counts[2 * block + 1] = count, falls


@strict
def _join_runs(values, blocks, table, counts):  # type: ignore[no-untyped-def]
    """Move the runs of all blocks together; ``counts`` gets their number and what ``runs`` says of them."""
    g, falls = 0, 0
    for block in range(blocks):
        falls += counts[2 * block + 1]
        for k in range(block * _BLOCK, block * _BLOCK + counts[2 * block]):
            table[0, g] = table[0, k]
            g += 1
    least, most = values.size, 0
    for k in range(g):
        start = table[0, k]
        size = (table[0, k + 1] if k + 1 < g else values.size) - start
        table[1, k] = size
        table[2, k] = values[start]
        least, most = min(least, size), max(most, size)
    counts[0], counts[1], counts[2] = g, least, most
    counts[3], counts[4], counts[5] = values[0], values[values.size - 1], falls
