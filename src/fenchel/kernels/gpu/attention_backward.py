"""Entmax attention without a matrix of weights: the backward pass.

With g = grad vᵀ, the gradient of the scores is s(g − ⟨s, g⟩/‖s‖₁), where ⟨s, g⟩/‖s‖₁ = ⟨grad, mean⟩ is one number per
row. One kernel owns blocks of queries, another blocks of keys: no two programs add to the same memory. Both compute
scores again, and read those pairs of blocks alone whose bit the forward pass has set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.gpu.arithmetic import jit, mass
from fenchel.kernels.gpu.attention import (
    Inputs,
    Problem,
    either,
    factors,
    how_many,
    load,
    of_keys,
    of_queries,
    product,
    seen,
    similarity,
    store,
    take_lowest,
    visible_keys,
)
from fenchel.kernels.gpu.jacobians import entropy_sensitivity
from fenchel.kernels.gpu.launch import launch


def attend_backward(
    grad: Tensor,
    state: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    mask: Tensor | None,
    needed: Sequence[bool],
    **rest: Any,
) -> list[Tensor | None]:
    """Gradients of query, key and value, and of alpha per row, (batch, heads, groups, length).

    Those that are not needed are None. The state is what ``attend`` returned, and the other arguments are its own.
    """
    problem = Problem(query, key, value, alpha, mask, **rest)
    inputs, rules = problem.inputs(), problem.rules()
    grad = grad.contiguous()
    top, offset, mean, used = state
    delta = (grad.to(mean.dtype).reshape(mean.shape) * mean).sum(-1)
    words = used.shape[-1]
    saved = grad, delta, top, offset, used
    found: list[Tensor | None] = [None] * 4
    if needed[0] or needed[3]:
        to_query = query.new_empty(query.shape)
        to_alpha = delta.new_empty(query.shape[:-1]) if needed[3] else delta
        grid = (problem.heads * triton.cdiv(problem.rows, problem.blocks[0]),)
        options = problem.options("queries")
        launch(queries_kernel, grid, inputs, *saved, to_query, to_alpha, words, R=rules, LEARNS=needed[3], **options)
        found[0], found[3] = to_query, to_alpha if needed[3] else None
    if needed[1] or needed[2]:
        to_key, to_value = key.new_empty(key.shape), value.new_empty(value.shape)
        grid = (problem.heads * triton.cdiv(key.shape[2], problem.blocks[1]),)
        lost = (0.0 * offset).sum(-1)  # per head: NaN if a row of weights is NaN, which has mass on no key, else 0
        launch(keys_kernel, grid, inputs, *saved, lost, to_key, to_value, words, R=rules, **problem.options("keys"))
        found[1], found[2] = to_key, to_value
    return found


@jit
def of_rows(
    X: Inputs,
    GRAD: tl.tensor,
    DELTA: tl.tensor,
    TOP: tl.tensor,
    OFFSET: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
) -> Any:
    """The gradients of a block of rows for ``load``; ⟨grad, mean⟩, largest score and offset of each, (rows, 1)."""
    grads = (GRAD, at * X.depth, inside, 1, X.depth)
    delta = tl.load(DELTA + at, mask=inside, other=0.0)
    top = tl.load(TOP + at, mask=inside, other=0.0)
    offset = tl.load(OFFSET + at, mask=inside, other=0.0)
    return grads, delta[:, None], top[:, None], offset[:, None]


@jit
def of_pair(
    X: Inputs,
    bh: tl.tensor,
    rows: tl.tensor,
    queries: tl.tuple,
    q: tl.tensor,
    c: tl.tensor,
    saved: tl.tuple,
    grad: tl.tensor,
    keys: tl.tensor,
    others: tl.tuple,
    k: tl.tensor,
    values: tl.tuple,
    v: tl.tensor,
    R: tl.constexpr,
) -> Any:
    """For a block of rows and one of keys: p, p after dropout, and the gradients of the scores."""
    grads, delta, top, offset = saved
    x = seen(X, bh, similarity(queries, q, others, k, R.BE, R.PRECISION), rows, keys, R)
    p, s = mass(x - top - offset, c, c, R.KIND, R.TERMS)
    g = similarity(grads, grad, values, v, R.BF, R.PRECISION)
    kept = p
    if R.DROPS:
        factor = factors(X, bh, rows, keys, R.DTYPE)
        kept, g = p * factor, g * factor
    return p, kept, s * (g - delta)


@jit
def queries_kernel(
    X: Inputs,
    GRAD: tl.tensor,
    DELTA: tl.tensor,
    TOP: tl.tensor,
    OFFSET: tl.tensor,
    USED: tl.tensor,
    TO_Q: tl.tensor,
    TO_ALPHA: tl.tensor,
    words: tl.tensor,
    R: tl.constexpr,
    LEARNS: tl.constexpr,
) -> None:
    """The gradient of one block of rows, and of alpha there. Nothing is written that this kernel reads."""
    total = X.groups * X.length
    programs = tl.cdiv(total, R.BM)  # per head
    bh = tl.program_id(0) // programs
    first = tl.program_id(0) % programs * R.BM
    rows, queries, c = of_queries(X, bh, first, R)
    inside = rows < total
    at = bh.to(tl.int64) * total + rows
    saved = of_rows(X, GRAD, DELTA, TOP, OFFSET, at, inside)
    grads, _delta, _top, offset = saved
    q, grad = load(queries, R.BE), load(grads, R.BF)
    out = tl.zeros([R.BM, R.BE], R.DTYPE)
    slope = tl.zeros([R.BM], R.DTYPE)
    USED += tl.program_id(0).to(tl.int64) * words
    count = tl.cdiv(visible_keys(X, first, R), R.BN)  # bits beyond were never written
    for w in range(tl.cdiv(count, 32)):
        word = tl.load(USED + w)
        for _ in range(how_many(word)):
            i, word = take_lowest(word)
            keys = (w * 32 + i) * R.BN + tl.arange(0, R.BN)
            others, values = of_keys(X, bh, keys)
            k, v = load(others, R.BE), load(values, R.BF)
            p, _kept, change = of_pair(X, bh, rows, queries, q, c, saved, grad, keys, others, k, values, v, R)
            out += product(change.to(k.dtype), k, R.PRECISION)
            if LEARNS:
                slope -= tl.sum(change * entropy_sensitivity(p, c, R.EPS), axis=1)
    out = tl.where(offset == offset, out * tl.load(X.scale).to(R.DTYPE), offset)  # NaN in rows with NaN
    store(TO_Q, at * X.width, inside, out, X.width, R.BE)
    if LEARNS:
        known = tl.sum(offset, axis=1)
        tl.store(TO_ALPHA + at, tl.where(known == known, slope, known), mask=inside)


@jit
def keys_kernel(
    X: Inputs,
    GRAD: tl.tensor,
    DELTA: tl.tensor,
    TOP: tl.tensor,
    OFFSET: tl.tensor,
    USED: tl.tensor,
    LOST: tl.tensor,
    TO_K: tl.tensor,
    TO_V: tl.tensor,
    words: tl.tensor,
    R: tl.constexpr,
) -> None:
    """The gradients of one block of keys and of their values. Nothing is written that this kernel reads.

    The bits of 32 blocks of rows are read at once, and those of this block of keys are put together in a word. LOST is
    added to all gradients of a head.
    """
    programs = tl.cdiv(X.keys, R.BN)  # per head
    bh = tl.program_id(0) // programs
    block = tl.program_id(0) % programs
    keys = block * R.BN + tl.arange(0, R.BN)
    total = X.groups * X.length
    others, values = of_keys(X, bh, keys)
    k, v = load(others, R.BE), load(values, R.BF)
    to_key = tl.zeros([R.BN, R.BE], R.DTYPE)
    to_value = tl.zeros([R.BN, R.BF], R.DTYPE)
    count = tl.cdiv(total, R.BM)
    bit = tl.arange(0, 32)
    for w in range(tl.cdiv(count, 32)):
        n = w * 32 + bit
        # Bits beyond what a block of rows sees were never written.
        written = (n < count) & (block * R.BN < visible_keys(X, n * R.BM, R))
        place = (bh.to(tl.int64) * count + n) * words + block // 32
        bits = (tl.load(USED + place, mask=written, other=0) >> (block % 32)) & 1
        word = tl.reduce(bits << bit, 0, either)
        for _ in range(how_many(word)):
            i, word = take_lowest(word)
            rows, queries, c = of_queries(X, bh, (w * 32 + i) * R.BM, R)
            at = bh.to(tl.int64) * total + rows
            saved = of_rows(X, GRAD, DELTA, TOP, OFFSET, at, rows < total)
            q, grad = load(queries, R.BE), load(saved[0], R.BF)
            _p, kept, change = of_pair(X, bh, rows, queries, q, c, saved, grad, keys, others, k, values, v, R)
            to_value += product(tl.trans(kept.to(grad.dtype)), grad, R.PRECISION)
            to_key += product(tl.trans(change.to(q.dtype)), q, R.PRECISION)
    at = bh.to(tl.int64) * X.keys + keys
    lost = tl.load(LOST + bh)
    store(TO_K, at * X.width, keys < X.keys, to_key * tl.load(X.scale).to(R.DTYPE) + lost, X.width, R.BE)
    store(TO_V, at * X.depth, keys < X.keys, to_value + lost, X.depth, R.BF)
