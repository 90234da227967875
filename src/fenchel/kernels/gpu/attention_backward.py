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
from fenchel.kernels.gpu.attention import Problem, kept, load_keys, load_rows, product, scores
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
    tensors, numbers, options = problem.arguments()
    grad = grad.contiguous()
    top, offset, mean, used = state
    depth = value.shape[3]
    delta = (grad.to(mean.dtype).reshape(mean.shape) * mean).sum(-1)
    words = used.shape[-1]
    saved = grad, delta, top, offset, used
    found: list[Tensor | None] = [None] * 4
    if needed[0] or needed[3]:
        to_query = query.new_empty(query.shape)
        to_alpha = delta.new_empty(query.shape[:-1]) if needed[3] else delta
        grid = triton.cdiv(problem.rows, options["BM"]), problem.heads
        results = to_query, to_alpha
        launch(queries_kernel, grid, *tensors, *saved, *results, words, *numbers, **options, LEARNS=needed[3])
        found[0], found[3] = to_query, to_alpha if needed[3] else None
    if needed[1] or needed[2]:
        shape = query.shape[:2]
        to_key, to_value = key.new_empty(*shape, *key.shape[2:]), value.new_empty(*shape, key.shape[2], depth)
        grid = triton.cdiv(key.shape[2], options["BN"]), problem.heads
        launch(keys_kernel, grid, *tensors, *saved, to_key, to_value, words, *numbers, **options)
        found[1], found[2] = to_key, to_value
    return found


@jit
def queries_kernel(
    Q: tl.tensor,
    K: tl.tensor,
    V: tl.tensor,
    ALPHA: tl.tensor,
    M: tl.tensor,
    GRAD: tl.tensor,
    DELTA: tl.tensor,
    TOP: tl.tensor,
    OFFSET: tl.tensor,
    USED: tl.tensor,
    TO_Q: tl.tensor,
    TO_ALPHA: tl.tensor,
    words: tl.tensor,
    qb: tl.tensor,
    qh: tl.tensor,
    qg: tl.tensor,
    ql: tl.tensor,
    qe: tl.tensor,
    kb: tl.tensor,
    kh: tl.tensor,
    ks: tl.tensor,
    ke: tl.tensor,
    vb: tl.tensor,
    vh: tl.tensor,
    vs: tl.tensor,
    ve: tl.tensor,
    ab: tl.tensor,
    ah: tl.tensor,
    ag: tl.tensor,
    mb: tl.tensor,
    mh: tl.tensor,
    mg: tl.tensor,
    ml: tl.tensor,
    ms: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    length: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    scale: tl.tensor,
    drop: tl.tensor,
    seed: tl.tensor,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    DROPS: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EPS: tl.constexpr,
    LEARNS: tl.constexpr,
) -> None:
    """The gradient of one block of rows, and of alpha there."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    TERMS: tl.constexpr = 5 if EPS > 1e-10 else 11
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    total = groups * length
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.arange(0, BN)
    K, V, M = K + b * kb + h * kh, V + b * vb + h * vh, M + b * mb + h * mh
    q = load_rows(Q + b * qb + h * qh, rows, total, length, qg, ql, qe, width, BE)
    at = bh.to(tl.int64) * total + rows
    grad = load_keys(GRAD + bh.to(tl.int64) * total * depth, rows, total, depth, 1, depth, BF)
    c, top, offset, delta = _of_rows(ALPHA + b * ab + h * ah, DELTA, TOP, OFFSET, rows, at, total, length, ag, DTYPE)
    out = tl.zeros([BM, BE], DTYPE)
    slope = tl.zeros([BM, 1], DTYPE)
    own = (bh.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * words
    last = count
    if CAUSAL:  # words beyond were never written
        start = tl.program_id(0) * BM
        end = tl.minimum(start + BM, total)
        one = start // length == (end - 1) // length
        last = tl.minimum(count, tl.where(one, (end - 1) % length + 1, length))
    for w in range(0, tl.cdiv(last, 32 * BN)):
        word = tl.load(USED + own + w)
        for i in range(0, 32):
            if ((word >> i) & 1) != 0:
                keys = (w * 32 + i) * BN + j
                k = load_keys(K, keys, count, ks, ke, width, BE)
                x = scores(q, k, rows, keys, total, count, length, scale, M, mg, ml, ms, CAUSAL, MASK)
                p, s = mass(x - top - offset, c, c, KIND, TERMS)
                v = load_keys(V, keys, count, vs, ve, depth, BF)
                g = product(grad, tl.trans(v))
                if DROPS:
                    g = g * kept(seed, bh, rows, keys, count, drop)
                to_scores = s * (g - delta)
                out += product(to_scores.to(k.dtype), k)
                if LEARNS:
                    slope -= tl.sum(to_scores * sensitivity(p, c, EPS), axis=1, keep_dims=True)
    out = tl.where(offset == offset, out * scale, offset)  # NaN in rows with NaN
    e = tl.arange(0, BE)
    inside = (rows < total)[:, None] & (e < width)[None, :]
    tl.store(TO_Q + at[:, None] * width + e[None, :], out.to(TO_Q.dtype.element_ty), mask=inside)
    if LEARNS:
        tl.store(TO_ALPHA + at[:, None], tl.where(offset == offset, slope, offset), mask=(rows < total)[:, None])


@jit
def keys_kernel(
    Q: tl.tensor,
    K: tl.tensor,
    V: tl.tensor,
    ALPHA: tl.tensor,
    M: tl.tensor,
    GRAD: tl.tensor,
    DELTA: tl.tensor,
    TOP: tl.tensor,
    OFFSET: tl.tensor,
    USED: tl.tensor,
    TO_K: tl.tensor,
    TO_V: tl.tensor,
    words: tl.tensor,
    qb: tl.tensor,
    qh: tl.tensor,
    qg: tl.tensor,
    ql: tl.tensor,
    qe: tl.tensor,
    kb: tl.tensor,
    kh: tl.tensor,
    ks: tl.tensor,
    ke: tl.tensor,
    vb: tl.tensor,
    vh: tl.tensor,
    vs: tl.tensor,
    ve: tl.tensor,
    ab: tl.tensor,
    ah: tl.tensor,
    ag: tl.tensor,
    mb: tl.tensor,
    mh: tl.tensor,
    mg: tl.tensor,
    ml: tl.tensor,
    ms: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    length: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    scale: tl.tensor,
    drop: tl.tensor,
    seed: tl.tensor,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    DROPS: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """The gradients of one block of keys and of their values."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    TERMS: tl.constexpr = 5 if EPS > 1e-10 else 11
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    total = groups * length
    block = tl.program_id(0)
    keys = block * BN + tl.arange(0, BN)
    M = M + b * mb + h * mh
    k = load_keys(K + b * kb + h * kh, keys, count, ks, ke, width, BE)
    v = load_keys(V + b * vb + h * vh, keys, count, vs, ve, depth, BF)
    to_key = tl.zeros([BN, BE], DTYPE)
    to_value = tl.zeros([BN, BF], DTYPE)
    all_blocks = tl.cdiv(total, BM)
    for n in range(0, all_blocks):
        visible = 1
        if CAUSAL:  # words beyond what a block of rows sees were never written
            end = tl.minimum(n * BM + BM, total)
            one = (n * BM) // length == (end - 1) // length
            visible = tl.where(block * BN < tl.where(one, (end - 1) % length + 1, length), 1, 0)
        word = tl.load(USED + (bh.to(tl.int64) * all_blocks + n) * words + block // 32, mask=visible > 0, other=0)
        if ((word >> (block % 32)) & 1) != 0:
            rows = n * BM + tl.arange(0, BM)
            at = bh.to(tl.int64) * total + rows
            q = load_rows(Q + b * qb + h * qh, rows, total, length, qg, ql, qe, width, BE)
            grad = load_keys(GRAD + bh.to(tl.int64) * total * depth, rows, total, depth, 1, depth, BF)
            c, top, offset, delta = _of_rows(
                ALPHA + b * ab + h * ah, DELTA, TOP, OFFSET, rows, at, total, length, ag, DTYPE
            )
            x = scores(q, k, rows, keys, total, count, length, scale, M, mg, ml, ms, CAUSAL, MASK)
            p, s = mass(x - top - offset, c, c, KIND, TERMS)
            g = product(grad, tl.trans(v))
            if DROPS:
                factor = kept(seed, bh, rows, keys, count, drop)
                p, g = p * factor, g * factor
            to_value += product(tl.trans(p).to(grad.dtype), grad)
            to_key += product(tl.trans(s * (g - delta)).to(q.dtype), q)
    at = bh.to(tl.int64) * count + keys
    e, f = tl.arange(0, BE), tl.arange(0, BF)
    inside = (keys < count)[:, None]
    to = TO_K + at[:, None] * width + e[None, :]
    tl.store(to, (to_key * scale).to(TO_K.dtype.element_ty), mask=inside & (e < width)[None, :])
    to = TO_V + at[:, None] * depth + f[None, :]
    tl.store(to, to_value.to(TO_V.dtype.element_ty), mask=inside & (f < depth)[None, :])


@jit
def _of_rows(
    ALPHA: tl.tensor,
    DELTA: tl.tensor,
    TOP: tl.tensor,
    OFFSET: tl.tensor,
    rows: tl.tensor,
    at: tl.tensor,
    total: tl.tensor,
    length: tl.tensor,
    ag: tl.tensor,
    DTYPE: tl.constexpr,
) -> Any:
    """c, the largest score, the offset and ⟨grad, mean⟩ of some rows, each (rows, 1)."""
    inside = rows < total
    group = tl.where(inside, rows // length, 0).to(tl.int64)
    c = (tl.load(ALPHA + group * ag).to(tl.float64) - 1.0).to(DTYPE)
    c = tl.where(tl.abs(c) < 1e-20, 1e-20, c)
    top = tl.load(TOP + at, mask=inside, other=0.0)
    offset = tl.load(OFFSET + at, mask=inside, other=0.0)
    delta = tl.load(DELTA + at, mask=inside, other=0.0)
    return c[:, None], top[:, None], offset[:, None], delta[:, None]
