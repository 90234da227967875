"""Entmax attention without a matrix of weights, 1 < α ≤ 2: the forward pass.

A program owns a block of queries, and reads the keys in a few passes: one for the largest scores, a few for Newton's
method on the offset of each row, until it has converged, and one for the output. Which blocks of keys are in use is
kept as bits. The first pass sets them; every later pass reads only the blocks whose bit is set, and clears the bits of
those in which no query has mass any more: offsets only grow. The last pass reads values too, and leaves the bits for
the backward pass. Rows are the queries of all heads that share keys: row = group · length + query.

With u = x − top − A, p = [1 + c·u]₊^(1/c) and s = p^(1 − c), the backward pass needs of each row top, A, and the mean
of the values under s.

Barriers. The bits are the only memory that threads of one program share. A word is read by all threads of a program,
and written by one of them, so two orders must be kept: nobody may read a word in the next pass before it is written in
this one (the barrier after each pass), and the writer may not be so far ahead that another thread has yet to read the
old word (the barrier before each store). All loops and branches around barriers have the same bounds in all threads:
these are arguments, words that all threads have read, or reductions over the whole block. Programs share nothing: each
writes rows and words of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.gpu.arithmetic import ANY, advance, jit, mass
from fenchel.kernels.gpu.launch import (
    INTERPRETED,
    MOST_REGISTERS,
    PRECISION,
    constant,
    eps_of,
    kind_of,
    launch,
    per_row,
)
from fenchel.kernels.gpu.rows import entmax
from fenchel.kernels.table import NotServedError

_STEPS: Any = tl.constexpr(100)
_INTERPRETED: Any = tl.constexpr(INTERPRETED)
_FEW = 16  # up to so many rows share a program: then keys are split over programs
_MANY = 1 << 10  # from so many keys on


class Inputs(NamedTuple):
    """What all kernels of attention read: tensors, how far two entries of each dimension are apart, and sizes."""

    query: Any
    key: Any
    value: Any
    alpha: Any
    mask: Any
    scale: Any
    drop: Any
    of_query: tuple[int, ...]
    of_key: tuple[int, ...]
    of_value: tuple[int, ...]
    of_alpha: tuple[int, ...]
    of_mask: tuple[int, ...]
    heads: int
    groups: int
    length: int
    keys: int
    width: int
    depth: int
    seed: int


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

    def inputs(self) -> Inputs:
        """What the kernels read. Numbers are tensors: Triton would pass them in single precision."""
        query, key, value = self.query.detach(), self.key.detach(), self.value.detach()
        if isinstance(self.alpha, Tensor):
            alpha, of_alpha = self.alpha.detach(), self.alpha.stride()
        else:
            alpha, of_alpha = per_row(self.alpha, query)[0], (0, 0, 0)
        mask = query if self.mask is None else self.mask.detach()
        of_mask = (0,) * 5 if self.mask is None else mask.stride()
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        numbers = constant(float(self.scale), query.device), constant(float(self.dropout), query.device)
        strides = query.stride(), key.stride(), value.stride(), of_alpha, of_mask
        _, heads, groups, length, width = query.shape
        sizes = heads, groups, length, key.shape[2], width, value.shape[3]
        return Inputs(query, key, value, alpha, mask, *numbers, *strides, *sizes, self.seed)

    def options(self, kernel: str) -> dict[str, Any]:
        """Constants of a kernel, and warps per program: see ``blocks``."""
        given = 0 if self.mask is None else 1 if self.mask.dtype == torch.bool else 2
        kind = ANY.value if isinstance(self.alpha, Tensor) else kind_of(self.alpha, False)
        return {
            "KIND": kind,
            "CAUSAL": self.causal,
            "MASK": given,
            "DROPS": self.dropout > 0,
            **blocks(self.query.shape[-1], self.value.shape[-1], self.query.dtype, kernel),
            "EPS": eps_of(self.query.dtype),
            "PRECISION": PRECISION,
        }


def blocks(width: int, depth: int, dtype: torch.dtype, kernel: str = "attend") -> dict[str, int]:
    """Sizes of blocks of queries and keys, widths as powers of two, and warps of a kernel."""
    e, f = (max(16, triton.next_power_of_2(n)) for n in (width, depth))
    if max(e, f) > 256:
        raise NotServedError(f"heads must be at most 256 wide, got {max(width, depth)}")
    wide = max(e, f)
    if dtype == torch.float64:
        rows, keys, warps = 16, 16, 4 if wide <= 128 else 8
    elif dtype == torch.float32:
        rows, keys, warps = 32 if wide <= 64 else 16, 32 if wide <= 128 else 16, 4 if wide <= 32 else 8
    else:
        rows, keys, warps = 64 if wide <= 128 else 32, 32, 4 if wide <= 64 and kernel == "attend" else 8
    return {"BE": e, "BF": f, "BM": rows, "BN": keys, "num_warps": warps, "num_stages": 2, **MOST_REGISTERS}


def attend(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, *, mask: Tensor | None, keep: bool, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output (batch, heads, groups, length, depth), and what the backward pass needs if it is to be kept.

    The other arguments are those of ``Problem``. The backward pass needs per row the largest score, the offset, and the
    mean of the values under s; and one bit per block of rows and block of keys, set if the block is in use.
    """
    problem = Problem(query, key, value, alpha, mask, **options)
    keys, depth = value.shape[2:]
    if not keep and problem.rows <= _FEW and keys >= _MANY and not problem.dropout and not problem.causal:
        return _decode(problem), ()
    rules = problem.options("attend")
    like = problem.query
    exact = torch.promote_types(like.dtype, torch.float32)
    output = like.new_empty(*like.shape[:-1], depth)
    shapes = state_shapes(query, value)
    top, offset = (like.new_empty(shapes[name], dtype=exact) for name in ("top", "offset"))
    mean = like.new_empty(shapes["mean"], dtype=exact) if keep else top
    used = like.new_empty(shapes["used"], dtype=torch.int32)
    grid = triton.cdiv(problem.rows, rules["BM"]), problem.heads
    words = used.shape[-1]
    launch(attend_kernel, grid, problem.inputs(), output, mean, top, offset, used, words, **rules, KEEP=keep)
    return output, (top, offset, mean, used) if keep else ()


def state_shapes(query: Tensor, value: Tensor) -> dict[str, tuple[int, ...]]:
    """The shapes of what ``attend`` keeps for the backward pass."""
    heads, rows = query.shape[0] * query.shape[1], query.shape[2] * query.shape[3]
    sizes = blocks(query.shape[-1], value.shape[-1], query.dtype)
    words = triton.cdiv(triton.cdiv(value.shape[2], sizes["BN"]), 32)
    shape = heads, rows
    return {
        "top": shape,
        "offset": shape,
        "mean": (*shape, value.shape[-1]),
        "used": (heads, triton.cdiv(rows, sizes["BM"]), words),
    }


# -- blocks of tensors -----------------------------------------------------------------------------------------------


@jit
def load(rows: tl.tuple, B: tl.constexpr) -> Any:
    """Some rows of a tensor, (rows, B), zeros beyond its end: (tensor, where they begin, which exist, step, width)."""
    X, at, inside, per_entry, width = rows
    e = tl.arange(0, B)
    within = inside[:, None] & (e < width)[None, :]
    return tl.load(X + at[:, None] + e.to(tl.int64)[None, :] * per_entry, mask=within, other=0.0)


@jit
def store(X: tl.tensor, at: tl.tensor, inside: tl.tensor, block: tl.tensor, width: tl.tensor, B: tl.constexpr) -> None:
    """Write rows whose entries are contiguous."""
    e = tl.arange(0, B)
    within = inside[:, None] & (e < width)[None, :]
    tl.store(X + at[:, None] + e[None, :], block.to(X.dtype.element_ty), mask=within)


@jit
def of_queries(X: Inputs, bh: tl.tensor, first: tl.tensor, BM: tl.constexpr, EPS: tl.constexpr) -> Any:
    """A block of rows of a head: their numbers, the queries for ``load``, and c = α − 1 of each, (rows, 1)."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    b, h = (bh // X.heads).to(tl.int64), (bh % X.heads).to(tl.int64)
    rows = first + tl.arange(0, BM)
    inside = rows < X.groups * X.length
    group = tl.where(inside, rows // X.length, 0).to(tl.int64)
    at = group * X.of_query[2] + (rows % X.length).to(tl.int64) * X.of_query[3]
    queries = (X.query + b * X.of_query[0] + h * X.of_query[1], at, inside, X.of_query[4], X.width)
    alpha = tl.load(X.alpha + b * X.of_alpha[0] + h * X.of_alpha[1] + group * X.of_alpha[2])
    c = (alpha.to(tl.float64) - 1.0).to(DTYPE)
    return rows, queries, tl.where(tl.abs(c) < 1e-20, 1e-20, c)[:, None]


@jit
def of_keys(X: Inputs, bh: tl.tensor, keys: tl.tensor) -> Any:
    """A block of keys of a head for ``load``."""
    base = X.key + (bh // X.heads).to(tl.int64) * X.of_key[0] + (bh % X.heads).to(tl.int64) * X.of_key[1]
    return base, keys.to(tl.int64) * X.of_key[2], keys < X.keys, X.of_key[3], X.width


@jit
def of_values(X: Inputs, bh: tl.tensor, keys: tl.tensor) -> Any:
    """The values of a block of keys of a head for ``load``."""
    base = X.value + (bh // X.heads).to(tl.int64) * X.of_value[0] + (bh % X.heads).to(tl.int64) * X.of_value[1]
    return base, keys.to(tl.int64) * X.of_value[2], keys < X.keys, X.of_value[3], X.depth


@jit
def product(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> Any:
    """a b, to the precision of its factors: tensor cores would round float32 to ten bits, see ``launch.PRECISION``."""
    if _INTERPRETED and a.dtype != tl.float64:  # the interpreter's own product does not know bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    if a.dtype == tl.float32:
        out = tl.dot(a, b, input_precision=PRECISION)
    elif a.dtype == tl.float64:
        out = tl.dot(a, b, input_precision="ieee", out_dtype=tl.float64)
    else:
        out = tl.dot(a, b)
    return out


@jit
def similarity(
    rows: tl.tuple, a: tl.tensor, others: tl.tuple, b: tl.tensor, B: tl.constexpr, PRECISION: tl.constexpr
) -> Any:
    """a bᵀ for blocks (rows, B) of two tensors, given both as rows for ``load`` and as loaded.

    Where blocks are wide for their precision they are read again, some columns at a time: a program that holds the
    factors of a whole product in registers spills. What was loaded and is not used, the compiler leaves out.
    """
    CHUNK: tl.constexpr = 16 if a.dtype == tl.float64 else 32 if a.dtype == tl.float32 else B
    if B <= CHUNK:
        out = product(a, tl.trans(b), PRECISION)
    else:
        X, at, inside, per_entry, width = rows
        Y, place, exist, per_other, _ = others
        out = tl.zeros([a.shape[0], b.shape[0]], a.dtype)
        for e in range(0, width, CHUNK):  # not B: loops of known length are unrolled, and all is held again
            some = load((X + tl.cast(e, tl.int64) * per_entry, at, inside, per_entry, width - e), CHUNK)
            more = load((Y + tl.cast(e, tl.int64) * per_other, place, exist, per_other, width - e), CHUNK)
            out += product(some, tl.trans(more), PRECISION)
    return out


@jit
def seen(
    X: Inputs, bh: tl.tensor, x: tl.tensor, rows: tl.tensor, keys: tl.tensor, CAUSAL: tl.constexpr, MASK: tl.constexpr
) -> Any:
    """Scores of some rows and keys, from products x: scaled, with the mask, −inf where a query does not see a key."""
    x = x * tl.load(X.scale).to(x.dtype)
    query = rows % X.length
    visible = (rows < X.groups * X.length)[:, None] & (keys < X.keys)[None, :]
    if CAUSAL:
        visible = visible & (keys[None, :] <= query[:, None])
    if MASK > 0:
        base = X.mask + (bh // X.heads).to(tl.int64) * X.of_mask[0] + (bh % X.heads).to(tl.int64) * X.of_mask[1]
        at = (rows // X.length).to(tl.int64) * X.of_mask[2] + query.to(tl.int64) * X.of_mask[3]
        m = tl.load(base + at[:, None] + keys.to(tl.int64)[None, :] * X.of_mask[4], mask=visible, other=0)
        if MASK == 1:
            visible = visible & (m != 0)
        else:
            x = x + m.to(x.dtype)
    return tl.where(visible, x, float("-inf"))


@jit
def scores(
    X: Inputs,
    bh: tl.tensor,
    queries: tl.tuple,
    q: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    BE: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """Scores of some rows and keys, which are read here."""
    others = of_keys(X, bh, keys)
    x = similarity(queries, q, others, load(others, BE), BE, PRECISION)
    return seen(X, bh, x, rows, keys, CAUSAL, MASK)


@jit
def visible_keys(X: Inputs, first: tl.tensor, BM: tl.constexpr, CAUSAL: tl.constexpr) -> Any:
    """How many keys the rows of a block see, the first of which is given (or several of them)."""
    last = X.keys + 0 * first
    if CAUSAL:
        end = tl.minimum(first + BM, X.groups * X.length) - 1
        of_one = first // X.length == end // X.length  # whether all rows are of one group
        last = tl.minimum(last, tl.where(of_one, end % X.length + 1, X.length))
    return last


@jit
def factors(X: Inputs, bh: tl.tensor, rows: tl.tensor, keys: tl.tensor, DTYPE: tl.constexpr) -> Any:
    """What dropout multiplies the weights by: 0, or 1/(1 − drop); the same whenever it is asked."""
    drop = tl.load(X.drop).to(DTYPE)
    place = rows.to(tl.uint32)[:, None] * X.keys + keys.to(tl.uint32)[None, :]
    return tl.where(tl.rand(X.seed + bh, place) >= drop, 1.0 / (1.0 - drop), 0.0)


# -- bits, one per block of keys -------------------------------------------------------------------------------------


@jit
def how_many(word: tl.tensor) -> Any:
    """How many bits of a word are set."""
    n = word.to(tl.uint32, bitcast=True)
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    n = n + (n >> 8)
    return ((n + (n >> 16)) & 0x3F).to(tl.int32)


@jit
def take_lowest(word: tl.tensor) -> Any:
    """The place of the lowest bit that is set in a word, and the word without it."""
    rest = word & (word - 1)
    power = (word ^ rest).to(tl.uint32, bitcast=True).to(tl.float32)  # exact, so its exponent is the place
    return (power.to(tl.int32, bitcast=True) >> 23) - 127, rest


@jit
def either(a: tl.tensor, b: tl.tensor) -> Any:
    """The bits of both words."""
    return a | b


@jit
def write_word(USED: tl.tensor, word: tl.tensor) -> None:
    """Put the bits that any row has set, (rows,), in the place of a word that all threads have read."""
    word = tl.reduce(word, 0, either)
    tl.debug_barrier()
    tl.store(USED, word)


# -- the forward pass ------------------------------------------------------------------------------------------------


@jit
def attend_kernel(
    X: Inputs,
    OUT: tl.tensor,
    MEAN: tl.tensor,
    TOP: tl.tensor,
    OFFSET: tl.tensor,
    USED: tl.tensor,
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
    KEEP: tl.constexpr,
) -> None:
    """One block of rows per program."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    TERMS: tl.constexpr = 5 if EPS > 1e-10 else 11
    bh = tl.program_id(1)
    first = tl.program_id(0) * BM
    j = tl.arange(0, BN)
    rows, queries, c = of_queries(X, bh, first, BM, EPS)
    q = load(queries, BE)
    count = tl.cdiv(visible_keys(X, first, BM, CAUSAL), BN)  # blocks of keys
    USED += (bh.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * words

    # Largest scores, and which blocks can be used at all: scores within 1/c of the largest so far. NaN and +inf become
    # +inf, and make the row NaN.
    top = tl.full([BM], float("-inf"), DTYPE)
    for w in range(tl.cdiv(count, 32)):
        found = tl.zeros([BM], tl.int32)
        for i in range(tl.minimum(count - 32 * w, 32)):
            keys = (w * 32 + i) * BN + j
            x = scores(X, bh, queries, q, rows, keys, BE, CAUSAL, MASK, PRECISION)
            here = tl.max(tl.where(x != x, float("inf"), x), axis=1)
            top = tl.maximum(top, here)
            near = c * (here - tl.where(top > float("-inf"), top, 0.0))[:, None] > -1.0
            found = found | tl.where(tl.max(near.to(tl.int32), axis=1) > 0, 1 << i, 0)
        write_word(USED + w, found)
    tl.debug_barrier()
    bad = top == float("inf")
    usable = (top > float("-inf")) & (top < float("inf"))
    top = tl.where(usable, top, 0.0)

    # Newton's method from the left. It never passes the solution: what has no mass now has none later.
    offset = tl.zeros([BM], DTYPE)
    moving = usable
    go = tl.max(moving.to(tl.int32), axis=0)
    taken = 0
    while go > 0:
        S = tl.zeros([BM], DTYPE)
        D = tl.zeros([BM], DTYPE)
        for w in range(tl.cdiv(count, 32)):
            word = tl.load(USED + w)
            found = tl.zeros([BM], tl.int32)
            for _ in range(how_many(word)):
                i, word = take_lowest(word)
                keys = (w * 32 + i) * BN + j
                x = scores(X, bh, queries, q, rows, keys, BE, CAUSAL, MASK, PRECISION)
                p, s = mass(x - (top + offset)[:, None], c, c, KIND, TERMS)
                here = tl.sum(p, axis=1)
                S += here
                D += tl.sum(s, axis=1)
                found = found | tl.where(here > 0.0, 1 << i, 0)
            write_word(USED + w, found)
        tl.debug_barrier()
        step = advance(tl.where(moving, S, 1.0)[:, None], D[:, None], c, c, KIND, TERMS)
        step = tl.where(moving, tl.sum(step, axis=1), 0.0)
        offset += step
        moving = moving & (step > 8 * EPS * tl.maximum(offset, 1.0))
        taken += 1
        go = tl.max(moving.to(tl.int32), axis=0) * tl.where(taken < _STEPS, 1, 0)

    S = tl.zeros([BM], DTYPE)
    D = tl.zeros([BM], DTYPE)
    out = tl.zeros([BM, BF], DTYPE)
    mean = tl.zeros([BM, BF], DTYPE)
    for w in range(tl.cdiv(count, 32)):
        word = tl.load(USED + w)
        found = tl.zeros([BM], tl.int32)
        for _ in range(how_many(word)):
            i, word = take_lowest(word)
            keys = (w * 32 + i) * BN + j
            x = scores(X, bh, queries, q, rows, keys, BE, CAUSAL, MASK, PRECISION)
            p, s = mass(x - (top + offset)[:, None], c, c, KIND, TERMS)
            here = tl.sum(p, axis=1)
            S += here
            D += tl.sum(s, axis=1)
            found = found | tl.where(here > 0.0, 1 << i, 0)
            if DROPS:
                factor = factors(X, bh, rows, keys, DTYPE)
                p, s = p * factor, s * factor
            v = load(of_values(X, bh, keys), BF)
            out += product(p.to(v.dtype), v, PRECISION)
            mean += product(s.to(v.dtype), v, PRECISION)
        write_word(USED + w, found)  # for the kernels of the backward pass, which start when this one has ended
    D = tl.where(D > 0.0, D, 1.0)
    mean = mean / D[:, None]
    # The offset is only as fine as its own last digit; the output can be finer.
    rest = tl.where(usable, S - 1.0, 0.0)
    out = tl.where(bad[:, None], float("nan"), out - mean * rest[:, None])
    offset = tl.where(bad, float("nan"), offset + rest / D)
    at = bh.to(tl.int64) * (X.groups * X.length) + rows
    inside = rows < X.groups * X.length
    store(OUT, at * X.depth, inside, out, X.depth, BF)
    if KEEP:
        store(MEAN, at * X.depth, inside, mean, X.depth, BF)
        tl.store(TOP + at, top, mask=inside)
        tl.store(OFFSET + at, offset, mask=inside)


# -- few queries: keys are split over programs -----------------------------------------------------------------------


def _decode(problem: Problem) -> Tensor:
    """The output for a few rows: all their scores, their weights by the map of rows, and the values in use."""
    like, (keys, depth) = problem.query, problem.value.shape[2:]
    rules = problem.options("decode")
    sizes = {name: rules[name] for name in ("BN", "PRECISION", "num_warps", "num_stages", *MOST_REGISTERS)}
    sizes["BM"] = max(triton.next_power_of_2(problem.rows), 16)
    exact = torch.promote_types(like.dtype, torch.float32)
    x = like.new_empty(problem.heads, problem.rows, keys, dtype=exact)
    grid = triton.cdiv(keys, sizes["BN"]), problem.heads
    own = {name: rules[name] for name in ("BE", "MASK", "EPS")}
    launch(decode_scores_kernel, grid, problem.inputs(), x, **own, **sizes)
    alpha = problem.alpha
    if isinstance(alpha, Tensor):
        alpha = alpha[..., None, None].expand(*like.shape[:4], 1).reshape(problem.heads, problem.rows, 1)
    p = entmax(x, alpha)
    splits = min(grid[0], 64)
    parts = like.new_empty(splits, problem.heads, problem.rows, depth, dtype=exact)
    launch(decode_values_kernel, (splits, problem.heads), problem.inputs(), p, parts, BF=rules["BF"], **sizes)
    return parts.sum(0).reshape(*like.shape[:-1], depth).to(like.dtype)


@jit
def decode_scores_kernel(
    X: Inputs,
    OUT: tl.tensor,
    BE: tl.constexpr,
    MASK: tl.constexpr,
    EPS: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """The scores of all rows for one block of keys, which is read once."""
    bh = tl.program_id(1)
    rows, queries, _ = of_queries(X, bh, 0, BM, EPS)
    keys = tl.program_id(0) * BN + tl.arange(0, BN)
    x = scores(X, bh, queries, load(queries, BE), rows, keys, BE, False, MASK, PRECISION)
    at = (bh.to(tl.int64) * (X.groups * X.length) + rows)[:, None] * X.keys + keys[None, :]
    tl.store(OUT + at, x, mask=(rows < X.groups * X.length)[:, None] & (keys < X.keys)[None, :])


@jit
def decode_values_kernel(
    X: Inputs,
    P: tl.tensor,
    OUT: tl.tensor,
    BF: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """Σ p v of all rows over every so many blocks of keys; each program has an output of its own."""
    bh = tl.program_id(1)
    rows = tl.arange(0, BM)
    total = X.groups * X.length
    at = bh.to(tl.int64) * total + rows
    out = tl.zeros([BM, BF], OUT.dtype.element_ty)
    for block in range(tl.program_id(0), tl.cdiv(X.keys, BN), tl.num_programs(0)):
        keys = block * BN + tl.arange(0, BN)
        within = (rows < total)[:, None] & (keys < X.keys)[None, :]
        p = tl.load(P + at[:, None] * X.keys + keys[None, :], mask=within, other=0.0)
        if tl.max(tl.max((p != 0.0).to(tl.int32), axis=1), axis=0) > 0:  # else the values are not read; NaN is in use
            v = load(of_values(X, bh, keys), BF)
            out += product(p.to(v.dtype), v, PRECISION)
    at = (tl.program_id(0) * tl.num_programs(1) + bh).to(tl.int64) * total + rows
    store(OUT, at * X.depth, rows < total, out, X.depth, BF)
