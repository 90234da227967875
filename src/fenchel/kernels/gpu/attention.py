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

from fenchel.kernels.gpu import launch as device
from fenchel.kernels.gpu.arithmetic import ANY, advance, jit, mass
from fenchel.kernels.gpu.launch import INTERPRETED, compiled_for, constant, eps_of, is_light, kind_of, launch, per_row
from fenchel.kernels.gpu.rows import entmax
from fenchel.kernels.table import NotServedError, exact_dtype

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


class Rules(NamedTuple):
    """What all kernels of attention are compiled for; see ``launch.compiled_for``."""

    KIND: Any
    """The rule of ``arithmetic``."""
    CAUSAL: Any
    MASK: Any
    """0: none; 1: boolean; 2: added."""
    DROPS: Any
    """Whether there is dropout."""
    BE: Any
    """Width of queries and keys, a power of two."""
    BF: Any
    """Width of values, a power of two."""
    BM: Any
    """Rows of a block."""
    BN: Any
    """Keys of a block."""
    DTYPE: Any
    """In which scores, weights and sums are computed."""
    EPS: Any
    """Its rounding."""
    TERMS: Any
    """Of the series of logarithms."""
    PRECISION: Any
    """See ``launch.PRECISION``."""


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

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and keys of a block."""
        return blocks(self.query, self.value, self.alpha, self.mask, self.dropout)

    def rules(self, rows: int | None = None) -> Rules:
        """What the kernels are compiled for; blocks have so many rows, by default those of ``blocks``."""
        kind = ANY.value if isinstance(self.alpha, Tensor) else kind_of(self.alpha, False)
        given = 0 if self.mask is None else 1 if self.mask.dtype == torch.bool else 2
        widths = (max(16, triton.next_power_of_2(each.shape[-1])) for each in (self.query, self.value))
        sizes = rows or self.blocks[0], self.blocks[1]
        eps = eps_of(self.query.dtype)
        exact = (tl.float64, eps, 11) if eps < 1e-10 else (tl.float32, eps, 5)
        options = kind, self.causal, given, self.dropout > 0, *widths, *sizes, *exact, device.PRECISION
        rules: Rules = compiled_for(Rules(*options))
        return rules

    def options(self, kernel: str) -> dict[str, Any]:
        """Warps of a program, stages of its loops, and an option for the assembler, chosen so that nothing spills.

        AMD's devices give a thread up to 512 registers if a program has four warps. Their compiler fails on masks
        and on powers if it is to read ahead.
        """
        wide = max(self.query.shape[-1], self.value.shape[-1])
        if device.LANES == 64:
            light = not isinstance(self.alpha, Tensor) and is_light(kind_of(self.alpha, False)) and self.mask is None
            return {"num_warps": 4, "num_stages": 2 if light else 1}
        most = {4: 0, 8: 128}.get(self.query.element_size(), 64 if kernel == "attend" else 32)
        return {"num_warps": 4 if wide <= most else 8, "num_stages": 2, **device.MOST_REGISTERS}


def blocks(query: Tensor, value: Tensor, alpha: float | Tensor, mask: Tensor | None, dropout: float) -> tuple[int, int]:
    """Rows and keys of a block, the same in both passes. Logarithms, masks and dropout take registers from others."""
    wide = max(query.shape[-1], value.shape[-1])
    if wide > 256:
        raise NotServedError(f"heads must be at most 256 wide, got {wide}")
    if query.dtype == torch.float64:
        return 16, 16
    light = not isinstance(alpha, Tensor) and is_light(kind_of(alpha, False)) and mask is None and not dropout
    if query.dtype == torch.float32:
        return 32 if 32 < wide <= 64 and light else 16, 32 if wide <= 128 else 16
    return 64 if wide <= 128 and light else 32, 32


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
    like = problem.query
    exact = exact_dtype(like)
    output = like.new_empty(*like.shape[:-1], depth)
    shapes = state_shapes(query, value, alpha, mask, problem.dropout)
    top, offset = (like.new_empty(shapes[name], dtype=exact) for name in ("top", "offset"))
    mean = like.new_empty(shapes["mean"], dtype=exact) if keep else top
    used = like.new_empty(shapes["used"], dtype=torch.int32)
    grid = (used.shape[0] * used.shape[1],)
    state = output, mean, top, offset, used, used.shape[2]
    launch(attend_kernel, grid, problem.inputs(), *state, R=problem.rules(), KEEP=keep, **problem.options("attend"))
    return output, (top, offset, mean, used) if keep else ()


def state_shapes(
    query: Tensor, value: Tensor, alpha: float | Tensor, mask: Tensor | None, dropout: float
) -> dict[str, tuple[int, ...]]:
    """The shapes of what ``attend`` keeps for the backward pass."""
    shape = query.shape[0] * query.shape[1], query.shape[2] * query.shape[3]
    rows, keys = blocks(query, value, alpha, mask, dropout)
    words = triton.cdiv(triton.cdiv(value.shape[2], keys), 32)
    return {
        "top": shape,
        "offset": shape,
        "mean": (*shape, value.shape[-1]),
        "used": (shape[0], triton.cdiv(shape[1], rows), words),
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
def of_queries(X: Inputs, bh: tl.tensor, first: tl.tensor, R: tl.constexpr) -> Any:
    """A block of rows of a head: their numbers, the queries for ``load``, and c = α − 1 of each, (rows, 1)."""
    b, h = (bh // X.heads).to(tl.int64), (bh % X.heads).to(tl.int64)
    rows = first + tl.arange(0, R.BM)
    inside = rows < X.groups * X.length
    group = tl.where(inside, rows // X.length, 0).to(tl.int64)
    at = group * X.of_query[2] + (rows % X.length).to(tl.int64) * X.of_query[3]
    queries = (X.query + b * X.of_query[0] + h * X.of_query[1], at, inside, X.of_query[4], X.width)
    alpha = tl.load(X.alpha + b * X.of_alpha[0] + h * X.of_alpha[1] + group * X.of_alpha[2])
    c = (alpha.to(tl.float64) - 1.0).to(R.DTYPE)
    return rows, queries, tl.where(tl.abs(c) < 1e-20, 1e-20, c)[:, None]


@jit
def of_keys(X: Inputs, bh: tl.tensor, keys: tl.tensor) -> Any:
    """A block of keys of a head, and their values, for ``load``."""
    b, h, at = (bh // X.heads).to(tl.int64), (bh % X.heads).to(tl.int64), keys.to(tl.int64)
    base = X.key + b * X.of_key[0] + h * X.of_key[1]
    values = X.value + b * X.of_value[0] + h * X.of_value[1]
    inside = keys < X.keys
    return (
        (base, at * X.of_key[2], inside, X.of_key[3], X.width),
        (values, at * X.of_value[2], inside, X.of_value[3], X.depth),
    )


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
def seen(X: Inputs, bh: tl.tensor, x: tl.tensor, rows: tl.tensor, keys: tl.tensor, R: tl.constexpr) -> Any:
    """Scores of some rows and keys, from products x: scaled, with the mask, −inf where a query does not see a key."""
    x = x * tl.load(X.scale).to(x.dtype)
    query = rows % X.length
    visible = (rows < X.groups * X.length)[:, None] & (keys < X.keys)[None, :]
    if R.CAUSAL:
        visible = visible & (keys[None, :] <= query[:, None])
    if R.MASK > 0:
        base = X.mask + (bh // X.heads).to(tl.int64) * X.of_mask[0] + (bh % X.heads).to(tl.int64) * X.of_mask[1]
        at = (rows // X.length).to(tl.int64) * X.of_mask[2] + query.to(tl.int64) * X.of_mask[3]
        m = tl.load(base + at[:, None] + keys.to(tl.int64)[None, :] * X.of_mask[4], mask=visible, other=0)
        if R.MASK == 1:
            visible = visible & (m != 0)
        else:
            x = x + m.to(x.dtype)
    return tl.where(visible, x, float("-inf"))


@jit
def scores(
    X: Inputs, bh: tl.tensor, queries: tl.tuple, q: tl.tensor, rows: tl.tensor, keys: tl.tensor, R: tl.constexpr
) -> Any:
    """Scores of some rows and keys, which are read here."""
    others, _values = of_keys(X, bh, keys)
    return seen(X, bh, similarity(queries, q, others, load(others, R.BE), R.BE, R.PRECISION), rows, keys, R)


@jit
def visible_keys(X: Inputs, first: tl.tensor, R: tl.constexpr) -> Any:
    """How many keys the rows of a block see, the first of which is given (or several of them)."""
    last = X.keys + 0 * first
    if R.CAUSAL:
        end = tl.minimum(first + R.BM, X.groups * X.length) - 1
        of_one = first // X.length == end // X.length  # whether all rows are of one group
        last = tl.minimum(last, tl.where(of_one, end % X.length + 1, X.length))
    return last


@jit
def factors(X: Inputs, bh: tl.tensor, rows: tl.tensor, keys: tl.tensor, DTYPE: tl.constexpr) -> Any:
    """What dropout multiplies the weights by: 0, or 1/(1 − drop); the same whenever it is asked."""
    drop = tl.load(X.drop).to(DTYPE)
    row = rows[:, None] + 0 * keys[None, :]
    bits, _, _, _ = tl.philox(X.seed, row, keys[None, :] + 0 * row, bh + 0 * row, 0 * row)
    return tl.where(tl.uint_to_uniform_float(bits) >= drop, 1.0 / (1.0 - drop), 0.0)


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
def over_blocks(
    X: Inputs,
    USED: tl.tensor,
    count: tl.tensor,
    bh: tl.tensor,
    queries: tl.tuple,
    q: tl.tensor,
    rows: tl.tensor,
    c: tl.tensor,
    top: tl.tensor,
    offset: tl.tensor,
    VALUES: tl.constexpr,
    R: tl.constexpr,
) -> Any:
    """One pass over the blocks in use: Σp and Σs of each row and, if VALUES, p and s times the values.

    The bits of blocks in which no row has mass are cleared.
    """
    S = tl.zeros([R.BM], R.DTYPE)
    D = tl.zeros([R.BM], R.DTYPE)
    out = tl.zeros([R.BM, R.BF if VALUES else 1], R.DTYPE)
    mean = tl.zeros([R.BM, R.BF if VALUES else 1], R.DTYPE)
    for w in range(tl.cdiv(count, 32)):
        word = tl.load(USED + w)
        found = tl.zeros([R.BM], tl.int32)
        for _ in range(how_many(word)):
            i, word = take_lowest(word)
            keys = (w * 32 + i) * R.BN + tl.arange(0, R.BN)
            x = scores(X, bh, queries, q, rows, keys, R)
            p, s = mass(x - top[:, None] - offset[:, None], c, c, R.KIND, R.TERMS)
            here = tl.sum(p, axis=1)
            S += here
            D += tl.sum(s, axis=1)
            found = found | tl.where(here > 0.0, 1 << i, 0)
            if VALUES:
                if R.DROPS:
                    factor = factors(X, bh, rows, keys, R.DTYPE)
                    p, s = p * factor, s * factor
                _keys, values = of_keys(X, bh, keys)
                v = load(values, R.BF)
                out += product(p.to(v.dtype), v, R.PRECISION)
                mean += product(s.to(v.dtype), v, R.PRECISION)
        write_word(USED + w, found)
    return S, D, out, mean


@jit
def attend_kernel(
    X: Inputs,
    OUT: tl.tensor,
    MEAN: tl.tensor,
    TOP: tl.tensor,
    OFFSET: tl.tensor,
    USED: tl.tensor,
    words: tl.tensor,
    R: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """One block of rows per program."""
    total = X.groups * X.length
    programs = tl.cdiv(total, R.BM)  # per head
    bh = tl.program_id(0) // programs
    first = tl.program_id(0) % programs * R.BM
    rows, queries, c = of_queries(X, bh, first, R)
    q = load(queries, R.BE)
    count = tl.cdiv(visible_keys(X, first, R), R.BN)  # blocks of keys
    USED += tl.program_id(0).to(tl.int64) * words

    # Largest scores, and which blocks can be used at all: scores within 1/c of the largest so far. NaN and +inf become
    # +inf, and make the row NaN.
    top = tl.full([R.BM], float("-inf"), R.DTYPE)
    for w in range(tl.cdiv(count, 32)):
        found = tl.zeros([R.BM], tl.int32)
        for i in range(tl.minimum(count - 32 * w, 32)):
            x = scores(X, bh, queries, q, rows, (w * 32 + i) * R.BN + tl.arange(0, R.BN), R)
            here = tl.max(tl.where(x != x, float("inf"), x), axis=1)
            top = tl.maximum(top, here)
            near = c * (here - tl.where(top > float("-inf"), top, 0.0))[:, None] > -1.0
            found = found | tl.where(tl.max(near.to(tl.int32), axis=1) > 0, 1 << i, 0)
        write_word(USED + w, found)
    # One thread has written the words; all read them below.
    tl.debug_barrier()
    bad = top == float("inf")
    usable = (top > float("-inf")) & (top < float("inf"))
    top = tl.where(usable, top, 0.0)

    # Newton's method from the left. It never passes the solution: what has no mass now has none later.
    offset = tl.zeros([R.BM], R.DTYPE)
    moving = usable
    go = tl.max(moving.to(tl.int32), axis=0)
    taken = 0
    while go > 0:
        S, D, _out, _mean = over_blocks(X, USED, count, bh, queries, q, rows, c, top, offset, False, R)
        # This pass has written the words anew; the next reads them in all threads.
        tl.debug_barrier()
        step = advance(tl.where(moving, S, 1.0)[:, None], D[:, None], c, c, R.KIND, R.TERMS)
        step = tl.where(moving, tl.sum(step, axis=1), 0.0)
        offset += step
        moving = moving & (step > 8 * R.EPS * tl.maximum(offset, 1.0))
        taken += 1
        go = tl.max(moving.to(tl.int32), axis=0) * tl.where(taken < _STEPS, 1, 0)

    # The bits that this pass leaves are for the kernels of the backward pass, which start when this one has ended.
    S, D, out, mean = over_blocks(X, USED, count, bh, queries, q, rows, c, top, offset, True, R)
    D = tl.where(D > 0.0, D, 1.0)
    mean = mean / D[:, None]
    # The offset is only as fine as its own last digit; the output can be finer.
    rest = tl.where(usable, S - 1.0, 0.0)
    out = tl.where(bad[:, None], float("nan"), out - mean * rest[:, None])
    offset = tl.where(bad, float("nan"), offset + rest / D)
    at = bh.to(tl.int64) * total + rows
    inside = rows < total
    store(OUT, at * X.depth, inside, out, X.depth, R.BF)
    if KEEP:
        store(MEAN, at * X.depth, inside, mean, X.depth, R.BF)
        tl.store(TOP + at, top, mask=inside)
        tl.store(OFFSET + at, offset, mask=inside)


# -- few queries: keys are split over programs -----------------------------------------------------------------------


def _decode(problem: Problem) -> Tensor:
    """The output for a few rows: all their scores, their weights by the map of rows, and the values in use."""
    like, (keys, depth) = problem.query, problem.value.shape[2:]
    rules = problem.rules(max(triton.next_power_of_2(problem.rows), 16))
    options = problem.options("decode")
    exact = exact_dtype(like)
    x = like.new_empty(problem.heads, problem.rows, keys, dtype=exact)
    programs = triton.cdiv(keys, problem.blocks[1])
    launch(decode_scores_kernel, (problem.heads * programs,), problem.inputs(), x, R=rules, **options)
    alpha = problem.alpha
    if isinstance(alpha, Tensor):
        alpha = alpha[..., None, None].expand(*like.shape[:4], 1).reshape(problem.heads, problem.rows, 1)
    p = entmax(x, alpha)
    splits = min(programs, 64)
    parts = like.new_empty(problem.heads, splits, problem.rows, depth, dtype=exact)
    grid = (problem.heads * splits,)
    launch(decode_values_kernel, grid, problem.inputs(), p, parts, splits, R=rules, **options)
    return parts.sum(1).reshape(*like.shape[:-1], depth).to(like.dtype)


@jit
def decode_scores_kernel(X: Inputs, OUT: tl.tensor, R: tl.constexpr) -> None:
    """The scores of all rows for one block of keys, which is read once."""
    programs = tl.cdiv(X.keys, R.BN)
    bh = tl.program_id(0) // programs
    rows, queries, _ = of_queries(X, bh, 0, R)
    keys = tl.program_id(0) % programs * R.BN + tl.arange(0, R.BN)
    x = scores(X, bh, queries, load(queries, R.BE), rows, keys, R)
    total = X.groups * X.length
    at = (bh.to(tl.int64) * total + rows)[:, None] * X.keys + keys[None, :]
    tl.store(OUT + at, x, mask=(rows < total)[:, None] & (keys < X.keys)[None, :])


@jit
def decode_values_kernel(X: Inputs, P: tl.tensor, OUT: tl.tensor, splits: tl.tensor, R: tl.constexpr) -> None:
    """Σ p v of all rows over every so many blocks of keys; each program has an output of its own."""
    bh = tl.program_id(0) // splits
    rows = tl.arange(0, R.BM)
    total = X.groups * X.length
    at = bh.to(tl.int64) * total + rows
    out = tl.zeros([R.BM, R.BF], R.DTYPE)
    for block in range(tl.program_id(0) % splits, tl.cdiv(X.keys, R.BN), splits):
        keys = block * R.BN + tl.arange(0, R.BN)
        within = (rows < total)[:, None] & (keys < X.keys)[None, :]
        p = tl.load(P + at[:, None] * X.keys + keys[None, :], mask=within, other=0.0)
        if tl.max(tl.max((p != 0.0).to(tl.int32), axis=1), axis=0) > 0:  # else the values are not read; NaN is in use
            _keys, values = of_keys(X, bh, keys)
            v = load(values, R.BF)
            out += product(p.to(v.dtype), v, R.PRECISION)
    at = tl.program_id(0).to(tl.int64) * total + rows
    store(OUT, at * X.depth, rows < total, out, X.depth, R.BF)
