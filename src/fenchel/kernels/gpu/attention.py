"""Entmax attention without a matrix of weights, 1 < α ≤ 2: the forward pass.

A program owns a block of queries, and reads the keys in a few passes: one for the largest scores, a few for Newton's
method on the offset of each row, until it has converged, and one for the output. Blocks of keys that no query of the
block can use are known after the first pass, and are not read again; those that are used are kept as bits, so that the
backward pass reads no others. Rows are the queries of all heads that share keys: row = group · length + query.

With u = x − top − A, p = [1 + c·u]₊^(1/c) and s = p^(1 − c), the backward pass needs of each row top, A, and the mean
of the values under s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.gpu.arithmetic import ANY, advance, jit, mass
from fenchel.kernels.gpu.launch import INTERPRETED, eps_of, is_light, kind_of, launch, per_row
from fenchel.kernels.gpu.rows import entmax
from fenchel.kernels.table import NotServedError

_STEPS: Any = tl.constexpr(100)
_INTERPRETED: Any = tl.constexpr(INTERPRETED)
_FEW = 16  # up to so many rows share a program: then keys are split over programs
_MANY = 1 << 10  # from so many keys on


@dataclass(frozen=True)
class Problem:
    """The tensors of attention, without copies: any of them may be broadcast or strided.

    Args:
        query: (batch, heads, groups, length, width): the queries of ``groups`` heads share keys.
        key: (batch, heads, keys, width).
        value: (batch, heads, keys, depth).
        alpha: a number, or (batch, heads, groups).
        mask: (batch, heads, groups, length, keys), boolean (True = takes part) or added to the scores; or None.
        causal: whether query i attends to keys 0 … i only.
        scale: of the scores.
        dropout: the share of weights that is dropped.
        seed: of the dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: float | Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    dropout: float = 0.0
    seed: int = 0

    @property
    def rows(self) -> int:
        """Queries that share keys."""
        return self.query.shape[2] * self.query.shape[3]

    @property
    def heads(self) -> int:
        """How many sets of keys there are."""
        return self.query.shape[0] * self.query.shape[1]

    def arguments(self) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """Tensors, numbers and options that all kernels of attention share."""
        query, key, value = self.query.detach(), self.key.detach(), self.value.detach()
        if isinstance(self.alpha, Tensor):
            alpha = self.alpha.detach()
            apart = alpha.stride()
        else:
            alpha, apart = per_row(self.alpha, query)[0], (0, 0, 0)
        mask = query if self.mask is None else self.mask.detach()
        given = (0,) * 5 if self.mask is None else mask.stride()
        boolean = self.mask is not None and mask.dtype == torch.bool
        tensors = query, key, value, alpha, mask.view(torch.uint8) if boolean else mask
        strides = *query.stride(), *key.stride(), *value.stride(), *apart, *given
        _, heads, groups, length, width = query.shape
        sizes = heads, groups, length, key.shape[2], width, value.shape[3]
        numbers = *strides, *sizes, float(self.scale), float(self.dropout), self.seed
        kind = ANY.value if isinstance(self.alpha, Tensor) else kind_of(self.alpha, False)
        options: dict[str, Any] = {
            "KIND": kind,
            "CAUSAL": self.causal,
            "MASK": 0 if self.mask is None else 1 if boolean else 2,
            "DROPS": self.dropout > 0,
            **blocks(width, value.shape[3], query.dtype, kind),
            "EPS": eps_of(query.dtype),
        }
        return tensors, numbers, options


def blocks(width: int, depth: int, dtype: torch.dtype, kind: int) -> dict[str, int]:
    """Sizes of blocks of queries and keys, widths as powers of two, and warps."""
    e, f = (max(16, triton.next_power_of_2(n)) for n in (width, depth))
    if max(e, f) > 256:
        raise NotServedError(f"heads must be at most 256 wide, got {max(width, depth)}")
    if dtype == torch.float64:
        size = 16
    elif dtype == torch.float32:
        size = 32 if max(e, f) <= 128 else 16
    else:
        size = 64 if max(e, f) <= 64 or (max(e, f) <= 128 and is_light(kind)) else 32
    return {"BE": e, "BF": f, "BM": size, "BN": size, "num_warps": 4 if max(e, f) <= 128 else 8, "num_stages": 2}


def attend(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, *, mask: Tensor | None, keep: bool, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output (batch, heads, groups, length, depth), and what the backward pass needs if it is to be kept.

    The other arguments are those of ``Problem``. The backward pass needs per row the largest score, the offset, and the
    mean of the values under s; and one bit per block of rows and block of keys, set if the block is in use.
    """
    problem = Problem(query, key, value, alpha, mask, **options)
    keys, depth = problem.value.shape[2:]
    if not keep and problem.rows <= _FEW and keys >= _MANY and not problem.dropout and not problem.causal:
        return _decode(problem), ()
    tensors, numbers, options = problem.arguments()
    like = problem.query
    exact = torch.promote_types(like.dtype, torch.float32)
    output = like.new_empty(*like.shape[:-1], depth)
    top, offset = like.new_empty(2, problem.heads, problem.rows, dtype=exact).unbind()
    mean = like.new_empty(problem.heads, problem.rows, depth, dtype=exact) if keep else top
    blocks_of_rows = triton.cdiv(problem.rows, options["BM"])
    words = triton.cdiv(triton.cdiv(keys, options["BN"]), 32)
    needed, used = like.new_empty(2, problem.heads, blocks_of_rows, words, dtype=torch.int32).unbind()
    grid = blocks_of_rows, problem.heads
    results = output, mean, top, offset, needed, used
    launch(attend_kernel, grid, *tensors, *results, words, *numbers, **options, KEEP=keep)
    return output, (top, offset, mean, used) if keep else ()


@jit
def load_rows(
    X: tl.tensor,
    rows: tl.tensor,
    total: tl.tensor,
    length: tl.tensor,
    per_group: tl.tensor,
    per_row: tl.tensor,
    per_entry: tl.tensor,
    width: tl.tensor,
    B: tl.constexpr,
) -> Any:
    """Some rows of a tensor (groups, length, width) with any strides, (rows, B); zeros beyond its end."""
    e = tl.arange(0, B)
    at = (rows // length).to(tl.int64) * per_group + (rows % length).to(tl.int64) * per_row
    inside = (rows < total)[:, None] & (e < width)[None, :]
    return tl.load(X + at[:, None] + e[None, :] * per_entry, mask=inside, other=0.0)


@jit
def load_keys(
    X: tl.tensor,
    keys: tl.tensor,
    count: tl.tensor,
    per_key: tl.tensor,
    per_entry: tl.tensor,
    width: tl.tensor,
    B: tl.constexpr,
) -> Any:
    """Some keys or values, (keys, B); zeros beyond the end."""
    e = tl.arange(0, B)
    inside = (keys < count)[:, None] & (e < width)[None, :]
    return tl.load(X + keys.to(tl.int64)[:, None] * per_key + e[None, :] * per_entry, mask=inside, other=0.0)


@jit
def product(a: tl.tensor, b: tl.tensor) -> Any:
    """a b, in full precision where that is single: tensor cores would round to ten bits."""
    if _INTERPRETED and a.dtype != tl.float64:  # the interpreter's own product does not know bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def scores(
    q: tl.tensor,
    k: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    total: tl.tensor,
    count: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    M: tl.tensor,
    mg: tl.tensor,
    ml: tl.tensor,
    ms: tl.tensor,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
) -> Any:
    """Scores of some rows and keys, −inf where a query does not see a key."""
    x = product(q, tl.trans(k)) * scale
    visible = (rows < total)[:, None] & (keys < count)[None, :]
    query = rows % length
    if CAUSAL:
        visible = visible & (keys[None, :] <= query[:, None])
    if MASK > 0:
        at = (rows // length).to(tl.int64) * mg + query.to(tl.int64) * ml
        m = tl.load(M + at[:, None] + keys.to(tl.int64)[None, :] * ms, mask=visible, other=0)
        if MASK == 1:
            visible = visible & (m != 0)
        else:
            x = x + m.to(x.dtype)
    return tl.where(visible, x, float("-inf"))


@jit
def kept(seed: tl.tensor, bh: tl.tensor, rows: tl.tensor, keys: tl.tensor, count: tl.tensor, drop: tl.tensor) -> Any:
    """What dropout multiplies the weights by: 0, or 1/(1 − drop); the same whenever it is asked."""
    place = rows.to(tl.uint32)[:, None] * count.to(tl.uint32) + keys.to(tl.uint32)[None, :]
    return tl.where(tl.rand(seed + bh, place) >= drop, 1.0 / (1.0 - drop), 0.0)


@jit
def attend_kernel(
    Q: tl.tensor,
    K: tl.tensor,
    V: tl.tensor,
    ALPHA: tl.tensor,
    M: tl.tensor,
    OUT: tl.tensor,
    MEAN: tl.tensor,
    TOP: tl.tensor,
    OFFSET: tl.tensor,
    NEEDED: tl.tensor,
    USED: tl.tensor,
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
    KEEP: tl.constexpr,
) -> None:
    """One block of rows per program. The names of strides are those of the tensor and of the dimension."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    TERMS: tl.constexpr = 5 if EPS > 1e-10 else 11
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    total = groups * length
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.arange(0, BN)
    K, V, M = K + b * kb + h * kh, V + b * vb + h * vh, M + b * mb + h * mh
    q = load_rows(Q + b * qb + h * qh, rows, total, length, qg, ql, qe, width, BE)
    group = tl.where(rows < total, rows // length, 0).to(tl.int64)
    c = (tl.load(ALPHA + b * ab + h * ah + group * ag).to(tl.float64) - 1.0).to(DTYPE)
    c = tl.where(tl.abs(c) < 1e-20, 1e-20, c)[:, None]
    last = count
    if CAUSAL:
        start = tl.program_id(0) * BM
        end = tl.minimum(start + BM, total)
        one = start // length == (end - 1) // length  # whether all rows are of one group
        last = tl.minimum(count, tl.where(one, (end - 1) % length + 1, length))
    own = (bh.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * words

    # First pass: largest scores, and which blocks can be used at all: scores within 1/c of the largest so far.
    top = tl.full([BM, 1], float("-inf"), DTYPE)
    bad = tl.zeros([BM, 1], tl.int32)
    for w in range(0, tl.cdiv(last, 32 * BN)):
        word = 0
        for i in range(0, 32):
            first = (w * 32 + i) * BN
            if first < last:
                keys = first + j
                k = load_keys(K, keys, count, ks, ke, width, BE)
                x = scores(q, k, rows, keys, total, count, length, scale, M, mg, ml, ms, CAUSAL, MASK)
                bad += tl.max(tl.where((x != x) | (x == float("inf")), 1, 0), axis=1, keep_dims=True)
                top = tl.maximum(top, tl.max(tl.where(x != x, float("-inf"), x), axis=1, keep_dims=True))
                near = c * (x - tl.where(top > float("-inf"), top, 0.0)) > -1.0
                word = word | (tl.max(tl.max(tl.where(near, 1, 0), axis=1), axis=0) << i)
        tl.store(NEEDED + own + w, word)
    # All threads read these words below, and one of them has written each: nobody may be ahead.
    tl.debug_barrier()
    usable = (top > float("-inf")) & (bad == 0)
    top = tl.where(usable, top, 0.0)

    offset = tl.zeros([BM, 1], DTYPE)
    moving = usable
    go = tl.max(tl.max(tl.where(moving, 1, 0), axis=1), axis=0)
    taken = 0
    while go > 0:
        S = tl.zeros([BM, 1], DTYPE)
        D = tl.zeros([BM, 1], DTYPE)
        for w in range(0, tl.cdiv(last, 32 * BN)):
            word = tl.load(NEEDED + own + w)
            for i in range(0, 32):
                if ((word >> i) & 1) != 0:
                    keys = (w * 32 + i) * BN + j
                    k = load_keys(K, keys, count, ks, ke, width, BE)
                    x = scores(q, k, rows, keys, total, count, length, scale, M, mg, ml, ms, CAUSAL, MASK)
                    p, s = mass(x - top - offset, c, c, KIND, TERMS)
                    S += tl.sum(p, axis=1, keep_dims=True)
                    D += tl.sum(s, axis=1, keep_dims=True)
        step = tl.where(moving, advance(tl.where(moving, S, 1.0), D, c, c, KIND, TERMS), 0.0)
        offset += step
        moving = moving & (step > 8 * EPS * tl.maximum(offset, 1.0))
        taken += 1
        go = tl.max(tl.max(tl.where(moving, 1, 0), axis=1), axis=0) * tl.where(taken < _STEPS, 1, 0)

    S = tl.zeros([BM, 1], DTYPE)
    D = tl.zeros([BM, 1], DTYPE)
    out = tl.zeros([BM, BF], DTYPE)
    mean = tl.zeros([BM, BF], DTYPE)
    for w in range(0, tl.cdiv(last, 32 * BN)):
        word = tl.load(NEEDED + own + w)
        used = 0
        for i in range(0, 32):
            if ((word >> i) & 1) != 0:
                keys = (w * 32 + i) * BN + j
                k = load_keys(K, keys, count, ks, ke, width, BE)
                x = scores(q, k, rows, keys, total, count, length, scale, M, mg, ml, ms, CAUSAL, MASK)
                p, s = mass(x - top - offset, c, c, KIND, TERMS)
                here = tl.max(tl.max(tl.where(p > 0.0, 1, 0), axis=1), axis=0)
                used = used | (here << i)
                if here > 0:  # else the values are not read
                    S += tl.sum(p, axis=1, keep_dims=True)
                    D += tl.sum(s, axis=1, keep_dims=True)
                    if DROPS:
                        factor = kept(seed, bh, rows, keys, count, drop)
                        p, s = p * factor, s * factor
                    v = load_keys(V, keys, count, vs, ve, depth, BF)
                    out += product(p.to(v.dtype), v)
                    mean += product(s.to(v.dtype), v)
        tl.store(USED + own + w, used)  # read by the kernels of the backward pass, after this one
    D = tl.where(D > 0.0, D, 1.0)
    mean = mean / D
    # The offset is only as fine as its own last digit; the output can be finer.
    rest = tl.where(usable, S - 1.0, 0.0)
    out = tl.where(bad > 0, float("nan"), out - mean * rest)
    offset = tl.where(bad > 0, float("nan"), offset + rest / D)
    f = tl.arange(0, BF)
    at = bh.to(tl.int64) * total + rows
    inside = (rows < total)[:, None] & (f < depth)[None, :]
    tl.store(OUT + at[:, None] * depth + f[None, :], out.to(OUT.dtype.element_ty), mask=inside)
    if KEEP:
        tl.store(MEAN + at[:, None] * depth + f[None, :], mean, mask=inside)
        tl.store(TOP + at[:, None], top, mask=(rows < total)[:, None])
        tl.store(OFFSET + at[:, None], offset, mask=(rows < total)[:, None])


# -- few queries: keys are split over programs -----------------------------------------------------------------------


def _decode(problem: Problem) -> Tensor:
    """The output for a few rows: all their scores, their weights by the map of rows, and the values in use."""
    tensors, numbers, options = problem.arguments()
    like, (keys, depth) = problem.query, problem.value.shape[2:]
    exact = torch.promote_types(like.dtype, torch.float32)
    for name in ("KIND", "CAUSAL", "DROPS", "BM", "EPS"):
        options.pop(name)
    x = like.new_empty(problem.heads, problem.rows, keys, dtype=exact)
    grid = triton.cdiv(keys, options["BN"]), problem.heads
    rows = triton.next_power_of_2(max(problem.rows, 16))
    masked = {name: options.pop(name) for name in ("MASK",)}
    values = options.pop("BF")
    launch(decode_scores_kernel, grid, *tensors, x, *numbers, **options, **masked, BM=rows)
    alpha = problem.alpha
    if isinstance(alpha, Tensor):
        shape = *like.shape[:4], 1
        alpha = alpha[..., None, None].expand(shape).reshape(problem.heads, problem.rows, 1)
    p = entmax(x, alpha)
    splits = min(triton.cdiv(keys, options["BN"]), 64)
    parts = like.new_empty(splits, problem.heads, problem.rows, depth, dtype=exact)
    options.pop("BE")
    launch(decode_values_kernel, (splits, problem.heads), tensors[2], p, parts, *numbers, **options, BF=values, BM=rows)
    return parts.sum(0).reshape(*like.shape[:-1], depth).to(like.dtype)


@jit
def decode_scores_kernel(
    Q: tl.tensor,
    K: tl.tensor,
    V: tl.tensor,
    ALPHA: tl.tensor,
    M: tl.tensor,
    X: tl.tensor,
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
    BE: tl.constexpr,
    BN: tl.constexpr,
    MASK: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """The scores of all rows for one block of keys, which is read once."""
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    total = groups * length
    rows = tl.arange(0, BM)
    keys = tl.program_id(0) * BN + tl.arange(0, BN)
    q = load_rows(Q + b * qb + h * qh, rows, total, length, qg, ql, qe, width, BE)
    k = load_keys(K + b * kb + h * kh, keys, count, ks, ke, width, BE)
    M = M + b * mb + h * mh
    x = scores(q, k, rows, keys, total, count, length, scale, M, mg, ml, ms, False, MASK)
    at = (bh.to(tl.int64) * total + rows)[:, None] * count + keys[None, :]
    tl.store(X + at, x, mask=(rows < total)[:, None] & (keys < count)[None, :])


@jit
def decode_values_kernel(
    V: tl.tensor,
    P: tl.tensor,
    OUT: tl.tensor,
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
    BN: tl.constexpr,
    BF: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """Σ p v of all rows over every so many blocks of keys; each program has an output of its own."""
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    total = groups * length
    rows, f = tl.arange(0, BM), tl.arange(0, BF)
    row = bh.to(tl.int64) * total + rows
    out = tl.zeros([BM, BF], OUT.dtype.element_ty)
    for block in range(tl.program_id(0), tl.cdiv(count, BN), tl.num_programs(0)):
        keys = block * BN + tl.arange(0, BN)
        inside = (rows < total)[:, None] & (keys < count)[None, :]
        p = tl.load(P + row[:, None] * count + keys[None, :], mask=inside, other=0.0)
        if tl.max(tl.max(tl.where(p == 0.0, 0, 1), axis=1), axis=0) > 0:  # else the values are not read
            v = load_keys(V + b * vb + h * vh, keys, count, vs, ve, depth, BF)
            out += product(p.to(v.dtype), v)
    at = (tl.program_id(0) * tl.num_programs(1) + bh).to(tl.int64) * total + rows
    inside = (rows < total)[:, None] & (f < depth)[None, :]
    tl.store(OUT + at[:, None] * depth + f[None, :], out, mask=inside)


