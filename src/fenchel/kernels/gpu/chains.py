"""Chains of states: the smoothed recursion, its gradient (the expected path), and Hessian-vector products.

One program per chain; its states, up to 128, are in registers, and the loop over time is inside. Of the pairs of states
a tile is handled at a time, all previous states and some current ones, so that nothing spills. The walk keeps the value
of each state at each step, in double precision, without the scores at the end; the probabilities of steps are computed
again from these. No thread reads what another one has written, except where a comment says so: values of one step
reach the next one in registers, and Triton puts the barriers into their exchange.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.gpu import launch as device
from fenchel.kernels.gpu.arithmetic import jit
from fenchel.kernels.gpu.choices import KINDS, curvature, finite, invalid, inverse, number, smooth
from fenchel.kernels.gpu.launch import compiled_for, constant, eps_of, launch, warps


class Walk(NamedTuple):
    """What derivatives need: the values of the states, and the scores that they came from."""

    values: Tensor
    transition: Tensor
    end: Tensor
    alpha: float
    gamma: float


class Chain(NamedTuple):
    """What all kernels of chains read, or write: tensors, sizes, and how far apart chains and steps are in them."""

    weight: Any
    value: Any
    walk: Any
    transition: Any
    end: Any
    lengths: Any
    gamma: Any
    steps: int
    states: int
    per_chain: int
    per_step: int
    per_end: int


class Rules(NamedTuple):
    """What they are compiled for; see ``launch.compiled_for``."""

    KIND: Any
    BLOCK: Any
    """States, a power of two."""
    TILE: Any
    """How many of them a step reaches at a time."""
    EPS: Any


def forward(
    unary: Tensor,
    transition: Tensor,
    ends: tuple[Tensor, Tensor],
    lengths: Tensor,
    alpha: float,
    gamma: float,
    keep: bool,
) -> tuple[Tensor, Walk]:
    """The value of each chain, in double precision, and the walk. Arguments as in ``cpu.dp.markov.forward``."""
    unary, transition, start, end = (each.detach().contiguous() for each in (unary, transition, *ends))
    batch, steps, states = unary.shape
    value = torch.empty(batch, dtype=torch.float64, device=unary.device)
    values = torch.empty((batch, steps, states) if keep else (0,), dtype=torch.float64, device=unary.device)
    chain = _chain(value, value, Walk(values, transition, end, alpha, gamma), lengths, unary.shape)
    rules = _rules(alpha, states, unary.dtype)
    launch(chain_kernel, (batch,), chain, unary, start, _stride(start), R=rules[0], KEEP=keep, **rules[1])
    return value, Walk(values, transition, end, alpha, gamma)


def gradient(
    weight: Tensor, value: Tensor, walk: Walk, lengths: Tensor, shape: torch.Size, steps: int
) -> tuple[Tensor, Tensor]:
    """Expected states (B, T, S) and pairs of states (B, steps, S, S), times weights (B,).

    Arguments and results are those of ``cpu.dp.markov.gradient``.
    """
    batch, _, states = shape
    dtype, device = walk.transition.dtype, walk.transition.device
    found = torch.zeros(shape, dtype=dtype, device=device)
    shared = steps == 1
    pairs = torch.zeros((batch, steps, states, states), dtype=torch.float64 if shared else dtype, device=device)
    chain, rules = _chain(weight, value, walk, lengths, shape), _rules(walk.alpha, states, dtype)
    launch(chain_gradient_kernel, (batch,), chain, found, pairs, R=rules[0], SHARED=shared, **rules[1])
    return found, pairs.to(dtype)


def hessian_product(
    weight: Tensor,
    value: Tensor,
    walk: Walk,
    lengths: Tensor,
    unary: Tensor,
    transition: Tensor,
    alpha: float,
    gamma: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction (unary, transition)."""
    batch, _, states = unary.shape
    dtype, device = walk.transition.dtype, unary.device
    change = torch.empty(batch, dtype=torch.float64, device=device)
    found = torch.zeros(unary.shape, dtype=dtype, device=device)
    shared = transition.shape[1] == 1
    pairs = torch.zeros((batch, *transition.shape[1:]), dtype=torch.float64 if shared else dtype, device=device)
    unary, transition = unary.double().contiguous(), transition.double().contiguous()
    chain, rules = _chain(weight, value, walk, lengths, unary.shape), _rules(alpha, states, dtype, twice=True)
    along = unary, transition, torch.empty_like(walk.values), *_strides(transition)
    launch(chain_hessian_kernel, (batch,), chain, found, pairs, change, *along, R=rules[0], SHARED=shared, **rules[1])
    return change, (found, pairs.to(dtype))


def _chain(weight: Tensor, value: Tensor, walk: Walk, lengths: Tensor, shape: torch.Size) -> Chain:
    tensors = weight.double().contiguous(), value, walk.values, walk.transition, walk.end, lengths.contiguous()
    per_chain, per_step = _strides(walk.transition)
    sizes = shape[1], shape[2], per_chain, per_step, _stride(walk.end)
    return Chain(*tensors, constant(walk.gamma, value.device), *sizes)


def _strides(scores: Tensor) -> tuple[int, int]:
    """How far apart two batch elements and two steps of contiguous scores are; 0 if they share them."""
    return tuple(0 if size == 1 else step for size, step in zip(scores.shape[:2], scores.stride()[:2], strict=True))  # type: ignore[return-value]


def _stride(scores: Tensor) -> int:
    return 0 if len(scores) == 1 else scores.stride(0)


def _rules(alpha: float, states: int, dtype: torch.dtype, *, twice: bool = False) -> tuple[Rules, dict[str, Any]]:
    """What kernels are compiled for, and options. ``twice``: for the Hessian, which needs twice as many registers."""
    block = max(triton.next_power_of_2(states), 16)
    tile = min(block, (2048 if twice else 4096) // block)
    rules = compiled_for(Rules(KINDS[alpha], block, tile, eps_of(dtype)))
    threads = max(block * tile // 8, (2 if twice else 4) * block)
    return rules, {"num_warps": warps(threads), **(device.MOST_REGISTERS if twice else {})}


@jit
def _choices(
    X: Chain, b: tl.tensor, t: tl.tensor, v: tl.tensor, first: tl.tensor, gamma: tl.tensor, R: tl.constexpr
) -> Any:
    """A step from values v of the states at t − 1 into a tile of the states at t.

    Returns the states of the tile; where its pairs are in a matrix, and which of them exist; their weights [previous,
    current]; the values that are reached, without what the states score; whether a score is not valid.
    """
    s = tl.arange(0, R.BLOCK)
    c = first + tl.arange(0, R.TILE)
    at, pair = s[:, None] * X.states + c[None, :], (s < X.states)[:, None] & (c < X.states)[None, :]
    step = X.transition + b * X.per_chain + tl.cast(t - 1, tl.int64) * X.per_step
    w = tl.load(step + at, mask=pair, other=float("-inf"))
    reached = v[:, None] + w.to(tl.float64)
    top = tl.max(reached, axis=0)
    q, excess = smooth(number((reached - finite(top)[None, :]) * (1.0 / gamma), R.EPS), R.KIND, R.BLOCK)
    return c, at, pair, q, top + gamma * excess.to(tl.float64), tl.max(tl.max(invalid(w), axis=1), axis=0)


@jit
def _ends(X: Chain, b: tl.tensor, v: tl.tensor, gamma: tl.tensor, R: tl.constexpr) -> Any:
    """The weights of the last states, (BLOCK,), given their values; the value of the chain; whether a score is bad."""
    s = tl.arange(0, R.BLOCK)
    end = tl.load(X.end + b * X.per_end + s, mask=s < X.states, other=0.0).to(tl.float64)
    v = v + end
    highest = tl.max(v, axis=0)
    x = number((v - finite(highest)) * (1.0 / gamma), R.EPS)
    q, excess = smooth(x[:, None], R.KIND, R.BLOCK)
    value = highest + gamma * tl.sum(excess.to(tl.float64), axis=0)
    return tl.sum(q, axis=1).to(tl.float64), value, tl.max(invalid(end), axis=0)


@jit
def _columns(x: tl.tensor, c: tl.tensor, R: tl.constexpr) -> Any:
    """The entries of a tile out of one per state."""
    if R.TILE == R.BLOCK:
        found = x
    else:
        found = tl.gather(x, c, 0)
    return found


@jit
def _into(x: tl.tensor, part: tl.tensor, first: tl.tensor, R: tl.constexpr) -> Any:
    """x, one entry per state, with those of a tile in their place."""
    if R.TILE == R.BLOCK:
        found = part
    else:
        s = tl.arange(0, R.BLOCK)
        found = tl.where(s // R.TILE == first // R.TILE, tl.gather(part, s % R.TILE, 0), x)
    return found


@jit
def chain_kernel(
    X: Chain, UNARY: tl.tensor, START: tl.tensor, per_start: tl.tensor, R: tl.constexpr, KEEP: tl.constexpr
) -> None:
    """The value of one chain, and the values of its states if KEEP."""
    b = tl.program_id(0).to(tl.int64)
    length, gamma = tl.load(X.lengths + b).to(tl.int32), tl.load(X.gamma)
    s = tl.arange(0, R.BLOCK)
    here = s < X.states
    unary, walk = UNARY + b * X.steps * X.states, X.walk + b * X.steps * X.states
    u = tl.load(unary + s, mask=here, other=float("-inf")).to(tl.float64)
    start = tl.load(START + b * per_start + s, mask=here, other=0.0).to(tl.float64)
    bad = tl.max(invalid(u) + invalid(start), axis=0)
    v = u + start
    if KEEP:
        tl.store(walk + s, v, mask=here)
    for t in range(1, length):
        u = tl.load(unary + t * X.states + s, mask=here, other=float("-inf")).to(tl.float64)
        bad += tl.max(invalid(u), axis=0)
        onward = u
        for first in range(0, R.BLOCK, R.TILE):
            _c, _at, _pair, _q, some, wrong = _choices(X, b, t, v, first, gamma, R)
            bad += wrong
            onward = _into(onward, some, first, R)
        v = onward + u
        if KEEP:
            tl.store(walk + t * X.states + s, v, mask=here)  # read by later kernels alone
    _, value, wrong = _ends(X, b, v, gamma, R)
    tl.store(X.value + b, tl.where(bad + wrong > 0, float("nan"), value))


@jit
def _fill(X: Chain, STATES: tl.tensor, PAIRS: tl.tensor, SHARED: tl.constexpr, R: tl.constexpr) -> None:
    """NaN in all results of a chain."""
    s = tl.arange(0, R.BLOCK)
    lost = s * 0.0 + float("nan")
    for t in range(X.steps):
        tl.store(STATES + t * X.states + s, lost.to(STATES.dtype.element_ty), mask=s < X.states)
    if SHARED:
        rows = X.states
    else:
        rows = X.states * (X.steps - 1)
    for p in range(rows):
        tl.store(PAIRS + tl.cast(p, tl.int64) * X.states + s, lost.to(PAIRS.dtype.element_ty), mask=s < X.states)


@jit
def _put(
    PAIRS: tl.tensor,
    x: tl.tensor,
    t: tl.tensor,
    at: tl.tensor,
    pair: tl.tensor,
    states: tl.tensor,
    SHARED: tl.constexpr,
) -> None:
    """Write results for the pairs of one tile, or add them to those of other steps.

    The thread that adds to an entry may be another one than wrote it for the step before: the caller has a barrier
    between two steps.
    """
    if SHARED:
        tl.store(PAIRS + at, x + tl.load(PAIRS + at, mask=pair, other=0.0), mask=pair)
    else:
        there = PAIRS + tl.cast(t - 1, tl.int64) * states * states + at
        tl.store(there, x.to(PAIRS.dtype.element_ty), mask=pair)


@jit
def _results(X: Chain, b: tl.tensor, STATES: tl.tensor, PAIRS: tl.tensor, SHARED: tl.constexpr) -> Any:
    """Where the results of a chain begin, its walk, and the number of its steps."""
    if SHARED:
        matrices = 1
    else:
        matrices = X.steps - 1
    size = b * X.steps * X.states
    return STATES + size, PAIRS + b * matrices * X.states * X.states, X.walk + size, tl.load(X.lengths + b).to(tl.int32)


@jit
def chain_gradient_kernel(X: Chain, STATES: tl.tensor, PAIRS: tl.tensor, R: tl.constexpr, SHARED: tl.constexpr) -> None:
    """The expected states and steps of one chain, from its end to its start. Results hold zeros.

    SHARED: whether the steps of a chain are to be summed.
    """
    b = tl.program_id(0).to(tl.int64)
    found, pairs, walk, length = _results(X, b, STATES, PAIRS, SHARED)
    gamma, weight, value = tl.load(X.gamma), tl.load(X.weight + b), tl.load(X.value + b)
    s = tl.arange(0, R.BLOCK)
    here = s < X.states
    if value > float("-inf"):
        v = tl.load(walk + (length - 1) * X.states + s, mask=here, other=float("-inf"))
        last, _value, _bad = _ends(X, b, v, gamma, R)
        mass = weight * last * inverse(tl.sum(last, axis=0))
        for i in range(1, length):
            t = length - i
            tl.store(found + t * X.states + s, mass.to(STATES.dtype.element_ty), mask=here)
            v = tl.load(walk + (t - 1) * X.states + s, mask=here, other=float("-inf"))
            earlier = tl.zeros([R.BLOCK], tl.float64)
            for first in range(0, R.BLOCK, R.TILE):
                c, at, pair, q, _top, _wrong = _choices(X, b, t, v, first, gamma, R)
                q = q.to(tl.float64)
                taken = q * (_columns(mass, c, R) * inverse(tl.sum(q, axis=0)))[None, :]
                _put(pairs, taken, t, at, pair, X.states, SHARED)
                earlier += tl.sum(taken, axis=1)
            mass = earlier
            tl.debug_barrier()  # for ``_put``
        tl.store(found + s, mass.to(STATES.dtype.element_ty), mask=here)
    elif (value != value) & (weight != 0.0):
        _fill(X, found, pairs, SHARED, R)


@jit
def chain_hessian_kernel(
    X: Chain,
    STATES: tl.tensor,
    PAIRS: tl.tensor,
    CHANGE: tl.tensor,
    UNARY: tl.tensor,
    ALONG: tl.tensor,
    MOVED: tl.tensor,
    along_chain: tl.tensor,
    along_step: tl.tensor,
    R: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    """How the results of ``chain_gradient_kernel`` change along a direction (UNARY, ALONG).

    MOVED is room for the changes of the states' values.
    """
    b = tl.program_id(0).to(tl.int64)
    found, pairs, walk, length = _results(X, b, STATES, PAIRS, SHARED)
    gamma, weight, value = tl.load(X.gamma), tl.load(X.weight + b), tl.load(X.value + b)
    s = tl.arange(0, R.BLOCK)
    here = s < X.states
    moved, unary = MOVED + b * X.steps * X.states, UNARY + b * X.steps * X.states
    ALONG += b * along_chain
    if value > float("-inf"):
        dv = tl.load(unary + s, mask=here, other=0.0)
        v = tl.load(walk + s, mask=here, other=float("-inf"))
        tl.store(moved + s, dv, mask=here)
        for t in range(1, length):
            onward = dv
            for first in range(0, R.BLOCK, R.TILE):
                _c, at, pair, q, _top, _wrong = _choices(X, b, t, v, first, gamma, R)
                q = q.to(tl.float64)
                dw = tl.load(ALONG + tl.cast(t - 1, tl.int64) * along_step + at, mask=pair, other=0.0)
                some = tl.sum(q * (dv[:, None] + dw), axis=0) * inverse(tl.sum(q, axis=0))
                onward = _into(onward, some, first, R)
            dv = onward + tl.load(unary + t * X.states + s, mask=here, other=0.0)
            tl.store(moved + t * X.states + s, dv, mask=here)
            v = tl.load(walk + t * X.states + s, mask=here, other=float("-inf"))
        # MOVED is read below by other threads than wrote it above.
        tl.debug_barrier()
        last, _value, _bad = _ends(X, b, v, gamma, R)
        last = last * inverse(tl.sum(last, axis=0))
        tl.store(CHANGE + b, tl.sum(last * dv, axis=0))
        bend = curvature(last, R.KIND)
        mass = weight * last
        mass_moved = weight / gamma * bend * (dv - tl.sum(bend * dv, axis=0) * inverse(tl.sum(bend, axis=0)))
        for i in range(1, length):
            t = length - i
            tl.store(found + t * X.states + s, mass_moved.to(STATES.dtype.element_ty), mask=here)
            v = tl.load(walk + (t - 1) * X.states + s, mask=here, other=float("-inf"))
            dv = tl.load(moved + (t - 1) * X.states + s, mask=here, other=0.0)
            earlier, earlier_moved = tl.zeros([R.BLOCK], tl.float64), tl.zeros([R.BLOCK], tl.float64)
            for first in range(0, R.BLOCK, R.TILE):
                c, at, pair, q, _top, _wrong = _choices(X, b, t, v, first, gamma, R)
                q = q.to(tl.float64)
                share = q * inverse(tl.sum(q, axis=0))[None, :]
                k = curvature(share, R.KIND)
                dw = tl.load(ALONG + tl.cast(t - 1, tl.int64) * along_step + at, mask=pair, other=0.0)
                change = dv[:, None] + dw
                mean = tl.sum(k * change, axis=0) * inverse(tl.sum(k, axis=0))
                some = _columns(mass, c, R)
                change = k * (change - mean[None, :]) * (some / gamma)[None, :]
                change += share * _columns(mass_moved, c, R)[None, :]
                _put(pairs, change, t, at, pair, X.states, SHARED)
                earlier += tl.sum(share * some[None, :], axis=1)
                earlier_moved += tl.sum(change, axis=1)
            mass, mass_moved = earlier, earlier_moved
            tl.debug_barrier()  # for ``_put``
        tl.store(found + s, mass_moved.to(STATES.dtype.element_ty), mask=here)
    else:
        lost = value != value
        tl.store(CHANGE + b, tl.where(lost, float("nan"), 0.0).to(tl.float64))
        if lost:
            _fill(X, found, pairs, SHARED, R)
