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

from fenchel.kernels.gpu.arithmetic import jit
from fenchel.kernels.gpu.choices import KINDS, curvature, finite, invalid, inverse, number, smooth
from fenchel.kernels.gpu.launch import constant, eps_of, launch, warps


class Walk(NamedTuple):
    """What derivatives need: the values of the states, and the scores that they came from."""

    values: Tensor
    transition: Tensor
    end: Tensor
    alpha: float
    gamma: float


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
    tensors = unary, transition, start, end, lengths.contiguous(), constant(gamma, unary.device), value, values
    strides = *_strides(transition), _stride(start), _stride(end)
    rules = {"KIND": KINDS[alpha], "KEEP": keep, **_sizes(states, unary.dtype)}
    launch(chain_kernel, (batch,), *tensors, steps, states, *strides, **rules)
    return value, Walk(values, transition, end, alpha, gamma)


def gradient(
    weight: Tensor, value: Tensor, walk: Walk, lengths: Tensor, shape: torch.Size, steps: int
) -> tuple[Tensor, Tensor]:
    """Expected states (B, T, S) and pairs of states (B, steps, S, S), times weights (B,).

    Arguments and results are those of ``cpu.dp.markov.gradient``.
    """
    batch, longest, states = shape
    dtype, device = walk.transition.dtype, walk.transition.device
    found = torch.zeros(shape, dtype=dtype, device=device)
    shared = steps == 1
    pairs = torch.zeros((batch, steps, states, states), dtype=torch.float64 if shared else dtype, device=device)
    tensors = found, pairs, weight.double().contiguous(), value, walk.values, walk.transition, walk.end
    strides = *_strides(walk.transition), _stride(walk.end), steps * states**2
    rules = {"KIND": KINDS[walk.alpha], "SHARED": shared, **_sizes(states, dtype)}
    numbers = lengths.contiguous(), constant(walk.gamma, device)
    launch(chain_gradient_kernel, (batch,), *tensors, *numbers, longest, states, *strides, **rules)
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
    batch, longest, states = unary.shape
    dtype, device = walk.transition.dtype, unary.device
    change = torch.empty(batch, dtype=torch.float64, device=device)
    found = torch.zeros(unary.shape, dtype=dtype, device=device)
    shared = transition.shape[1] == 1
    pairs = torch.zeros((batch, *transition.shape[1:]), dtype=torch.float64 if shared else dtype, device=device)
    unary, transition = unary.double().contiguous(), transition.double().contiguous()
    tensors = found, pairs, change, weight.double().contiguous(), value, walk.values, walk.transition, walk.end
    more = unary, transition, torch.empty_like(walk.values), lengths.contiguous(), constant(gamma, device)
    strides = *_strides(walk.transition), _stride(walk.end), pairs[0].numel(), *_strides(transition)
    rules = {"KIND": KINDS[alpha], "SHARED": shared, **_sizes(states, dtype, 2048)}
    launch(chain_hessian_kernel, (batch,), *tensors, *more, longest, states, *strides, **rules)
    return change, (found, pairs.to(dtype))


def _strides(scores: Tensor) -> tuple[int, int]:
    """How far apart two batch elements and two steps of contiguous scores are; 0 if they share them."""
    return tuple(0 if size == 1 else step for size, step in zip(scores.shape[:2], scores.stride()[:2], strict=True))  # type: ignore[return-value]


def _stride(scores: Tensor) -> int:
    return 0 if len(scores) == 1 else scores.stride(0)


def _sizes(states: int, dtype: torch.dtype, most: int = 4096) -> dict[str, Any]:
    """States, and columns of a tile of at most so many entries; a thread holds up to 8 of these."""
    block = max(triton.next_power_of_2(states), 16)
    tile = min(block, most // block)
    return {
        "BLOCK": block,
        "TILE": tile,
        "EPS": eps_of(dtype),
        "num_warps": warps(max(block * tile // 8, 4 * block)),
    }


@jit
def _choices(
    v: tl.tensor,
    TRANSITION: tl.tensor,
    at: tl.tensor,
    pair: tl.tensor,
    gamma: tl.tensor,
    rate: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> Any:
    """A step from values v of the previous states into some states: weights [previous, current], maxima, faults."""
    w = tl.load(TRANSITION + at, mask=pair, other=float("-inf"))
    reached = v[:, None] + w.to(tl.float64)
    top = tl.max(reached, axis=0)
    q, excess = smooth(number((reached - finite(top)[None, :]) * rate, EPS), KIND, BLOCK)
    return q, top + gamma * excess.to(tl.float64), tl.max(tl.max(invalid(w), axis=1), axis=0)


@jit
def _ends(
    v: tl.tensor, gamma: tl.tensor, rate: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr
) -> Any:
    """The weights of the last states, (BLOCK,), given their values, and the value of the chain."""
    highest = tl.max(v, axis=0)
    x = number((v - finite(highest)) * rate, EPS)
    q, excess = smooth(x[:, None], KIND, BLOCK)
    return tl.sum(q, axis=1), highest + gamma * tl.sum(excess.to(tl.float64), axis=0)


@jit
def _columns(x: tl.tensor, c: tl.tensor, BLOCK: tl.constexpr, TILE: tl.constexpr) -> Any:
    """The entries of a tile out of one per state."""
    if TILE == BLOCK:
        found = x
    else:
        found = tl.gather(x, c, 0)
    return found


@jit
def _into(x: tl.tensor, part: tl.tensor, first: tl.tensor, BLOCK: tl.constexpr, TILE: tl.constexpr) -> Any:
    """x, one entry per state, with those of a tile in their place."""
    if TILE == BLOCK:
        found = part
    else:
        s = tl.arange(0, BLOCK)
        found = tl.where(s // TILE == first // TILE, tl.gather(part, s % TILE, 0), x)
    return found


@jit
def chain_kernel(
    UNARY: tl.tensor,
    TRANSITION: tl.tensor,
    START: tl.tensor,
    END: tl.tensor,
    LENGTHS: tl.tensor,
    GAMMA: tl.tensor,
    VALUE: tl.tensor,
    WALK: tl.tensor,
    steps: tl.tensor,
    states: tl.tensor,
    per_chain: tl.tensor,
    per_step: tl.tensor,
    per_start: tl.tensor,
    per_end: tl.tensor,
    KIND: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """The value of one chain, and the values of its states if KEEP."""
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(LENGTHS + b).to(tl.int32)
    gamma = tl.load(GAMMA)
    rate = 1.0 / gamma
    s = tl.arange(0, BLOCK)
    here = s < states
    unary, walk = UNARY + b * steps * states, WALK + b * steps * states
    u = tl.load(unary + s, mask=here, other=float("-inf")).to(tl.float64)
    start = tl.load(START + b * per_start + s, mask=here, other=0.0).to(tl.float64)
    end = tl.load(END + b * per_end + s, mask=here, other=0.0).to(tl.float64)
    bad = tl.max(invalid(u) + invalid(start) + invalid(end), axis=0)
    v = u + start
    if KEEP:
        tl.store(walk + s, v, mask=here)
    for t in range(1, length):
        u = tl.load(unary + t * states + s, mask=here, other=float("-inf")).to(tl.float64)
        bad += tl.max(invalid(u), axis=0)
        step = TRANSITION + b * per_chain + tl.cast(t - 1, tl.int64) * per_step
        onward = u
        for first in range(0, BLOCK, TILE):
            c = first + tl.arange(0, TILE)
            pair = here[:, None] & (c < states)[None, :]
            _q, some, wrong = _choices(v, step, s[:, None] * states + c[None, :], pair, gamma, rate, KIND, BLOCK, EPS)
            bad += wrong
            onward = _into(onward, some, first, BLOCK, TILE)
        v = onward + u
        if KEEP:
            tl.store(walk + t * states + s, v, mask=here)  # read by later kernels alone
    _, value = _ends(v + end, gamma, rate, KIND, BLOCK, EPS)
    tl.store(VALUE + b, tl.where(bad > 0, float("nan"), value))


@jit
def _fill(
    STATES: tl.tensor, PAIRS: tl.tensor, steps: tl.tensor, states: tl.tensor, SHARED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """NaN in all results of a chain."""
    s = tl.arange(0, BLOCK)
    lost = s * 0.0 + float("nan")
    for t in range(steps):
        tl.store(STATES + t * states + s, lost.to(STATES.dtype.element_ty), mask=s < states)
    if SHARED:
        rows = states
    else:
        rows = states * (steps - 1)
    for p in range(rows):
        tl.store(PAIRS + tl.cast(p, tl.int64) * states + s, lost.to(PAIRS.dtype.element_ty), mask=s < states)


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
def chain_gradient_kernel(
    STATES: tl.tensor,
    PAIRS: tl.tensor,
    WEIGHT: tl.tensor,
    VALUE: tl.tensor,
    WALK: tl.tensor,
    TRANSITION: tl.tensor,
    END: tl.tensor,
    LENGTHS: tl.tensor,
    GAMMA: tl.tensor,
    steps: tl.tensor,
    states: tl.tensor,
    per_chain: tl.tensor,
    per_step: tl.tensor,
    per_end: tl.tensor,
    per_pairs: tl.tensor,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """The expected states and steps of one chain, from its end to its start. Results hold zeros.

    SHARED: whether the steps of a chain are to be summed.
    """
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(LENGTHS + b).to(tl.int32)
    gamma, weight, value = tl.load(GAMMA), tl.load(WEIGHT + b), tl.load(VALUE + b)
    rate = 1.0 / gamma
    s = tl.arange(0, BLOCK)
    here = s < states
    found, walk, pairs = STATES + b * steps * states, WALK + b * steps * states, PAIRS + b * per_pairs
    if value > float("-inf"):
        v = tl.load(walk + (length - 1) * states + s, mask=here, other=float("-inf"))
        end = tl.load(END + b * per_end + s, mask=here, other=0.0).to(tl.float64)
        last, _value = _ends(v + end, gamma, rate, KIND, BLOCK, EPS)
        last = last.to(tl.float64)
        mass = weight * last * inverse(tl.sum(last, axis=0))
        for i in range(1, length):
            t = length - i
            tl.store(found + t * states + s, mass.to(STATES.dtype.element_ty), mask=here)
            v = tl.load(walk + (t - 1) * states + s, mask=here, other=float("-inf"))
            step = TRANSITION + b * per_chain + tl.cast(t - 1, tl.int64) * per_step
            earlier = tl.zeros([BLOCK], tl.float64)
            for first in range(0, BLOCK, TILE):
                c = first + tl.arange(0, TILE)
                at, pair = s[:, None] * states + c[None, :], here[:, None] & (c < states)[None, :]
                q, _top, _wrong = _choices(v, step, at, pair, gamma, rate, KIND, BLOCK, EPS)
                q = q.to(tl.float64)
                taken = q * (_columns(mass, c, BLOCK, TILE) * inverse(tl.sum(q, axis=0)))[None, :]
                _put(pairs, taken, t, at, pair, states, SHARED)
                earlier += tl.sum(taken, axis=1)
            mass = earlier
            tl.debug_barrier()  # for ``_put``
        tl.store(found + s, mass.to(STATES.dtype.element_ty), mask=here)
    elif (value != value) & (weight != 0.0):
        _fill(found, pairs, steps, states, SHARED, BLOCK)


@jit
def chain_hessian_kernel(
    STATES: tl.tensor,
    PAIRS: tl.tensor,
    CHANGE: tl.tensor,
    WEIGHT: tl.tensor,
    VALUE: tl.tensor,
    WALK: tl.tensor,
    TRANSITION: tl.tensor,
    END: tl.tensor,
    UNARY: tl.tensor,
    ALONG: tl.tensor,
    MOVED: tl.tensor,
    LENGTHS: tl.tensor,
    GAMMA: tl.tensor,
    steps: tl.tensor,
    states: tl.tensor,
    per_chain: tl.tensor,
    per_step: tl.tensor,
    per_end: tl.tensor,
    per_pairs: tl.tensor,
    along_chain: tl.tensor,
    along_step: tl.tensor,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """How the results of ``chain_gradient_kernel`` change along a direction (UNARY, ALONG).

    MOVED is room for the changes of the states' values.
    """
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(LENGTHS + b).to(tl.int32)
    gamma, weight, value = tl.load(GAMMA), tl.load(WEIGHT + b), tl.load(VALUE + b)
    rate = 1.0 / gamma
    s = tl.arange(0, BLOCK)
    here = s < states
    found, walk, pairs = STATES + b * steps * states, WALK + b * steps * states, PAIRS + b * per_pairs
    moved, unary = MOVED + b * steps * states, UNARY + b * steps * states
    if value > float("-inf"):
        dv = tl.load(unary + s, mask=here, other=0.0)
        v = tl.load(walk + s, mask=here, other=float("-inf"))
        tl.store(moved + s, dv, mask=here)
        for t in range(1, length):
            step = TRANSITION + b * per_chain + tl.cast(t - 1, tl.int64) * per_step
            along = ALONG + b * along_chain + tl.cast(t - 1, tl.int64) * along_step
            onward = dv
            for first in range(0, BLOCK, TILE):
                c = first + tl.arange(0, TILE)
                at, pair = s[:, None] * states + c[None, :], here[:, None] & (c < states)[None, :]
                q, _top, _wrong = _choices(v, step, at, pair, gamma, rate, KIND, BLOCK, EPS)
                q = q.to(tl.float64)
                dw = tl.load(along + at, mask=pair, other=0.0)
                some = tl.sum(q * (dv[:, None] + dw), axis=0) * inverse(tl.sum(q, axis=0))
                onward = _into(onward, some, first, BLOCK, TILE)
            dv = onward + tl.load(unary + t * states + s, mask=here, other=0.0)
            tl.store(moved + t * states + s, dv, mask=here)
            v = tl.load(walk + t * states + s, mask=here, other=float("-inf"))
        # MOVED is read below by other threads than wrote it above.
        tl.debug_barrier()
        end = tl.load(END + b * per_end + s, mask=here, other=0.0).to(tl.float64)
        last, _value = _ends(v + end, gamma, rate, KIND, BLOCK, EPS)
        last = last.to(tl.float64)
        last = last * inverse(tl.sum(last, axis=0))
        tl.store(CHANGE + b, tl.sum(last * dv, axis=0))
        bend = curvature(last, KIND)
        mass = weight * last
        mass_moved = weight * rate * bend * (dv - tl.sum(bend * dv, axis=0) * inverse(tl.sum(bend, axis=0)))
        for i in range(1, length):
            t = length - i
            tl.store(found + t * states + s, mass_moved.to(STATES.dtype.element_ty), mask=here)
            v = tl.load(walk + (t - 1) * states + s, mask=here, other=float("-inf"))
            dv = tl.load(moved + (t - 1) * states + s, mask=here, other=0.0)
            step = TRANSITION + b * per_chain + tl.cast(t - 1, tl.int64) * per_step
            along = ALONG + b * along_chain + tl.cast(t - 1, tl.int64) * along_step
            earlier, earlier_moved = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
            for first in range(0, BLOCK, TILE):
                c = first + tl.arange(0, TILE)
                at, pair = s[:, None] * states + c[None, :], here[:, None] & (c < states)[None, :]
                q, _top, _wrong = _choices(v, step, at, pair, gamma, rate, KIND, BLOCK, EPS)
                q = q.to(tl.float64)
                share = q * inverse(tl.sum(q, axis=0))[None, :]
                k = curvature(share, KIND)
                change = dv[:, None] + tl.load(along + at, mask=pair, other=0.0)
                mean = tl.sum(k * change, axis=0) * inverse(tl.sum(k, axis=0))
                some = _columns(mass, c, BLOCK, TILE)
                change = k * (change - mean[None, :]) * (some * rate)[None, :]
                change += share * _columns(mass_moved, c, BLOCK, TILE)[None, :]
                _put(pairs, change, t, at, pair, states, SHARED)
                earlier += tl.sum(share * some[None, :], axis=1)
                earlier_moved += tl.sum(change, axis=1)
            mass, mass_moved = earlier, earlier_moved
            tl.debug_barrier()  # for ``_put``
        tl.store(found + s, mass_moved.to(STATES.dtype.element_ty), mask=here)
    else:
        lost = value != value
        tl.store(CHANGE + b, tl.where(lost, float("nan"), 0.0).to(tl.float64))
        if lost:
            _fill(found, pairs, steps, states, SHARED, BLOCK)
