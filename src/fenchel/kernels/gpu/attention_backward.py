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
    of_values,
    product,
    seen,
    similarity,
    store,
    take_lowest,
    visible_keys,
)
from fenchel.kernels.gpu.jacobians import sensitivity
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
    inputs = problem.inputs()
    grad = grad.contiguous()
    top, offset, mean, used = state
    delta = (grad.to(mean.dtype).reshape(mean.shape) * mean).sum(-1)
    words = used.shape[-1]
    saved = grad, delta, top, offset, used
    found: list[Tensor | None] = [None] * 4
    if needed[0] or needed[3]:
        to_query = query.new_empty(query.shape)
        to_alpha = delta.new_empty(query.shape[:-1]) if needed[3] else delta
        rules = problem.options("queries")
        grid = triton.cdiv(problem.rows, rules["BM"]), problem.heads
        launch(queries_kernel, grid, inputs, *saved, to_query, to_alpha, words, **rules, LEARNS=needed[3])
        found[0], found[3] = to_query, to_alpha if needed[3] else None
    if needed[1] or needed[2]:
        to_key, to_value = key.new_empty(key.shape), value.new_empty(value.shape)
        rules = problem.options("keys")
        grid = triton.cdiv(key.shape[2], rules["BN"]), problem.heads
        launch(keys_kernel, grid, inputs, *saved, to_key, to_value, words, **rules)
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
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    DROPS: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    LEARNS: tl.constexpr,
) -> None:
    """The gradient of one block of rows, and of alpha there. Nothing is written that this kernel reads."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    TERMS: tl.constexpr = 5 if EPS > 1e-10 else 11
    bh = tl.program_id(1)
    first = tl.program_id(0) * BM
    rows, queries, c = of_queries(X, bh, first, BM, EPS)
    inside = rows < X.groups * X.length
    at = bh.to(tl.int64) * (X.groups * X.length) + rows
    grads, delta, top, offset = of_rows(X, GRAD, DELTA, TOP, OFFSET, at, inside)
    q, grad = load(queries, BE), load(grads, BF)
    out = tl.zeros([BM, BE], DTYPE)
    slope = tl.zeros([BM], DTYPE)
    USED += (bh.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * words
    count = tl.cdiv(visible_keys(X, first, BM, CAUSAL), BN)  # bits beyond were never written
    for w in range(tl.cdiv(count, 32)):
        word = tl.load(USED + w)
        for _ in range(how_many(word)):
            i, word = take_lowest(word)
            keys = (w * 32 + i) * BN + tl.arange(0, BN)
            others = of_keys(X, bh, keys)
            k = load(others, BE)
            x = seen(X, bh, similarity(queries, q, others, k, BE, PRECISION), rows, keys, CAUSAL, MASK)
            p, s = mass(x - top - offset, c, c, KIND, TERMS)
            values = of_values(X, bh, keys)
            g = similarity(grads, grad, values, load(values, BF), BF, PRECISION)
            if DROPS:
                g = g * factors(X, bh, rows, keys, DTYPE)
            to_scores = s * (g - delta)
            out += product(to_scores.to(k.dtype), k, PRECISION)
            if LEARNS:
                slope -= tl.sum(to_scores * sensitivity(p, c, EPS), axis=1)
    out = tl.where(offset == offset, out * tl.load(X.scale).to(DTYPE), offset)  # NaN in rows with NaN
    store(TO_Q, at * X.width, inside, out, X.width, BE)
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
    TO_K: tl.tensor,
    TO_V: tl.tensor,
    words: tl.tensor,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    DROPS: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The gradients of one block of keys and of their values. Nothing is written that this kernel reads.

    The bits of 32 blocks of rows are read at once, and those of this block of keys are put together in a word.
    """
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    TERMS: tl.constexpr = 5 if EPS > 1e-10 else 11
    bh = tl.program_id(1)
    block = tl.program_id(0)
    keys = block * BN + tl.arange(0, BN)
    total = X.groups * X.length
    others, values = of_keys(X, bh, keys), of_values(X, bh, keys)
    k, v = load(others, BE), load(values, BF)
    to_key = tl.zeros([BN, BE], DTYPE)
    to_value = tl.zeros([BN, BF], DTYPE)
    count = tl.cdiv(total, BM)
    bit = tl.arange(0, 32)
    for w in range(tl.cdiv(count, 32)):
        n = w * 32 + bit
        # Bits beyond what a block of rows sees were never written.
        written = (n < count) & (block * BN < visible_keys(X, n * BM, BM, CAUSAL))
        place = (bh.to(tl.int64) * count + n) * words + block // 32
        bits = (tl.load(USED + place, mask=written, other=0) >> (block % 32)) & 1
        word = tl.reduce(bits << bit, 0, either)
        for _ in range(how_many(word)):
            i, word = take_lowest(word)
            rows, queries, c = of_queries(X, bh, (w * 32 + i) * BM, BM, EPS)
            at = bh.to(tl.int64) * total + rows
            grads, delta, top, offset = of_rows(X, GRAD, DELTA, TOP, OFFSET, at, rows < total)
            q, grad = load(queries, BE), load(grads, BF)
            x = seen(X, bh, similarity(queries, q, others, k, BE, PRECISION), rows, keys, CAUSAL, MASK)
            p, s = mass(x - top - offset, c, c, KIND, TERMS)
            g = similarity(grads, grad, values, v, BF, PRECISION)
            if DROPS:
                factor = factors(X, bh, rows, keys, DTYPE)
                p, g = p * factor, g * factor
            to_value += product(tl.trans(p.to(grad.dtype)), grad, PRECISION)
            to_key += product(tl.trans((s * (g - delta)).to(q.dtype)), q, PRECISION)
    at = bh.to(tl.int64) * X.keys + keys
    store(TO_K, at * X.width, keys < X.keys, to_key * tl.load(X.scale).to(DTYPE), X.width, BE)
    store(TO_V, at * X.depth, keys < X.keys, to_value, X.depth, BF)
