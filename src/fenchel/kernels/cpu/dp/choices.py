"""Smoothed choices by columns: max_Ω and argmax_Ω at the nodes of a dynamic program, for many nodes at once.

A block of ``choices`` × ``width`` numbers lies flat, row by row; each of its columns is one node, and a row holds the
same predecessor of all of them. Loops run along the rows and have no dependencies, so that the compiler vectorises them
whatever the number of choices. Compiled for AVX2 they take 0.84 to 1.11 of the time that they take for AVX-512: chains,
alignments, binary trees and monotonic alignments, by Shannon, Gini and Tsallis's entropy of 1.5.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.cpu.compiler import helper, strict_routine
from fenchel.kernels.cpu.powers import exp2, log2

HARD, SHANNON, GINI, HALVES = 0, 1, 2, 3
"""Which entropy smooths the maximum: none, Shannon's, Gini's, and Tsallis's with α = 1.5."""

KINDS = {math.inf: HARD, 1.0: SHANNON, 2.0: GINI, 1.5: HALVES}
"""The same, by the α of Tsallis's entropy."""

_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)
_NEWTON = 60  # a handful is enough


def arrays(*tensors: Tensor) -> list[np.ndarray[Any, Any]]:
    """The data of tensors on the CPU as contiguous arrays, in the order of the arguments."""
    found = []
    for each in tensors:  # a comprehension would be one more call; small programs feel every other
        if each.requires_grad:
            each = each.detach()
        found.append((each if each.is_contiguous() else each.contiguous()).numpy())
    return found


@strict_routine
def smooth(kind, choices, width, x, q, excess, work):  # type: ignore[no-untyped-def]
    """The probabilities q of the choices in each column of x, and the excess of the smoothed maximum over the largest.

    The largest entry of a column is 0; entries of −inf cannot be chosen; a column of these alone gets zeros. ``work``
    has room for three rows.
    """
    number = x.dtype.type
    size = choices * width
    zero, one, half = number(0), number(1), number(0.5)
    for w in range(width):
        excess[w] = zero
    if kind == SHANNON:
        # Smaller powers are not normal numbers.
        lowest = number(-126.0) if x.itemsize == 4 else number(-1022.0)
        log2e, ln2 = number(_LOG2E), number(_LN2)
        for i in range(size):
            y = x[i] * log2e
            e = exp2(y)
            q[i] = e if y >= lowest else zero
        for d in range(choices):
            for w in range(width):
                excess[w] += q[d * width + w]
        for w in range(width):
            some = excess[w] > zero
            total = excess[w] if some else one
            work[w] = one / total
            excess[w] = log2(total) * ln2
        for d in range(choices):
            for w in range(width):
                q[d * width + w] *= work[w]
        return
    if kind == HARD:
        for d in range(choices):
            for w in range(width):
                best = one if x[d * width + w] == zero else zero
                q[d * width + w] = best
                excess[w] += best
        for w in range(width):
            work[w] = one / max(excess[w], one)
            excess[w] = zero
        for d in range(choices):
            for w in range(width):
                q[d * width + w] *= work[w]
        return
    # Newton's method from below the threshold: no entry of the support is ever left out.
    for w in range(width):
        work[w] = -one
        work[2 * width + w] = zero
    if kind == GINI:
        for _ in range(choices + 1):
            changed = 0
            for w in range(width):
                excess[w] = zero
                work[width + w] = zero
            for d in range(choices):
                for w in range(width):
                    v = x[d * width + w]
                    inside = v > work[w]
                    excess[w] += v if inside else zero
                    work[width + w] += one if inside else zero
            for w in range(width):
                count = max(work[width + w], one)
                changed += 1 if count != work[2 * width + w] else 0
                work[2 * width + w] = count
                work[w] = (excess[w] - one) / count
            if changed == 0:
                break
        for w in range(width):
            excess[w] = zero
        for d in range(choices):
            for w in range(width):
                v = x[d * width + w]
                p = max(v - work[w], zero)
                q[d * width + w] = p
                gain = p * (v - half * p)
                excess[w] += gain if p > zero else zero
        for w in range(width):
            excess[w] = max(excess[w] + half, zero)
        return
    enough = number(1e-7 if x.itemsize == 4 else 2e-16)
    for _ in range(_NEWTON):
        for w in range(width):
            excess[w] = zero
            work[width + w] = zero
        for d in range(choices):
            for w in range(width):
                r = max(half * x[d * width + w] - work[w], zero)
                excess[w] += r * r
                work[width + w] += r
        going = 0
        for w in range(width):
            slope = work[width + w]
            step = (excess[w] - one) / (number(2) * slope) if slope > zero else zero
            # A column that has converged is not changed again: it must not depend on the others.
            step = max(step, zero) if work[2 * width + w] == zero else zero
            work[w] += step
            more = one if step > enough else zero
            work[2 * width + w] = one - more
            going += 1 if step > enough else 0
        if going == 0:
            break
    for w in range(width):
        work[width + w] = zero
        excess[w] = zero
    for d in range(choices):
        for w in range(width):
            v = x[d * width + w]
            r = max(half * v - work[w], zero)
            q[d * width + w] = r * r
            gain = r * r * v
            excess[w] += gain if r > zero else zero
            work[width + w] += r * r * r
    for w in range(width):
        excess[w] = max(excess[w] - (work[width + w] - one) * number(4.0 / 3.0), zero)


@helper
def smooth_three(kind, width, x, q, excess, work):  # type: ignore[no-untyped-def]
    """``smooth`` for three choices: what alignments have at each of their cells."""
    if kind == SHANNON:
        _three_by_shannon(width, x, q, excess)
    elif kind == GINI:
        _three_by_gini(width, x, q, excess)
    else:
        smooth(kind, 3, width, x, q, excess, work)


@helper
def _three_by_shannon(width, x, q, excess):  # type: ignore[no-untyped-def]
    number = x.dtype.type
    zero, one = number(0), number(1)
    lowest = number(-126.0) if x.itemsize == 4 else number(-1022.0)
    log2e, ln2 = number(_LOG2E), number(_LN2)
    u0, u1, u2 = x[:width], x[width : 2 * width], x[2 * width : 3 * width]
    v0, v1, v2 = q[:width], q[width : 2 * width], q[2 * width : 3 * width]
    for w in range(width):
        x0, x1, x2 = u0[w], u1[w], u2[w]
        more, less = max(x0, x1), min(x0, x1)
        middle, least = max(less, min(more, x2)), min(less, x2)
        # The power of the largest is exp(0) = 1: two powers are enough for three.
        y, z = middle * log2e, least * log2e
        second, third = exp2(y), exp2(z)
        second = second if y >= lowest else zero
        third = third if z >= lowest else zero
        total = one + second + third
        share = one / total
        second *= share
        third *= share
        q0 = second if x0 == middle else third
        q1 = second if x1 == middle else third
        q2 = second if x2 == middle else third
        v0[w] = share if x0 == zero else q0
        v1[w] = share if x1 == zero else q1
        v2[w] = share if x2 == zero else q2
        excess[w] = log2(total) * ln2


@helper
def _three_by_gini(width, x, q, excess):  # type: ignore[no-untyped-def]
    number = x.dtype.type
    zero, one, half, third = number(0), number(1), number(0.5), number(1.0 / 3.0)
    u0, u1, u2 = x[:width], x[width : 2 * width], x[2 * width : 3 * width]
    v0, v1, v2 = q[:width], q[width : 2 * width], q[2 * width : 3 * width]
    for w in range(width):
        x0, x1, x2 = u0[w], u1[w], u2[w]
        more, less = max(x0, x1), min(x0, x1)
        middle, least = max(less, min(more, x2)), min(less, x2)
        # The threshold is the highest of those of the one, two and three largest.
        tau = max(max(-one, (middle - one) * half), (middle + least - one) * third)
        p0, p1, p2 = max(x0 - tau, zero), max(x1 - tau, zero), max(x2 - tau, zero)
        v0[w] = p0
        v1[w] = p1
        v2[w] = p2
        g0, g1, g2 = p0 * (x0 - half * p0), p1 * (x1 - half * p1), p2 * (x2 - half * p2)
        g0 = g0 if p0 > zero else zero
        g1 = g1 if p1 > zero else zero
        g2 = g2 if p2 > zero else zero
        excess[w] = max(half + (g0 + g1 + g2), zero)


@strict_routine
def deficits(q, gap):  # type: ignore[no-untyped-def]
    """1 minus the sum of each column of q (choices, width): what rounding took from the probabilities.

    Over thousands of steps the errors would multiply. Products with q are therefore multiplied by 1 + gap, after which
    the error is of the order of gap².
    """
    choices, width = q.shape
    for w in range(width):
        gap[w] = 1.0
    for d in range(choices):
        for w in range(width):
            gap[w] -= q[d, w]


@strict_routine
def jacobian_product(kind, choices, width, q, change, response, work):  # type: ignore[no-untyped-def]
    """J v by columns, the derivative of the probabilities q along a change v of the scores. ``work`` holds two rows.

    J = diag(s) − ssᵀ/‖s‖₁ with s = q^(2−α) on the support; all in double precision but q.
    """
    size = choices * width
    for i in range(size):
        p = np.float64(q[i])
        if kind == SHANNON:
            response[i] = p
        elif kind == GINI:
            response[i] = 1.0 if p > 0.0 else 0.0
        elif kind == HALVES:
            response[i] = math.sqrt(p)
        else:
            response[i] = 0.0
    for w in range(width):
        work[w] = 0.0
        work[width + w] = 0.0
    for d in range(choices):
        for w in range(width):
            work[w] += response[d * width + w] * change[d * width + w]
            work[width + w] += response[d * width + w]
    for w in range(width):
        work[w] = work[w] / work[width + w] if work[width + w] > 0.0 else 0.0
    for d in range(choices):
        for w in range(width):
            response[d * width + w] *= change[d * width + w] - work[w]


@helper
def count_invalid(x):  # type: ignore[no-untyped-def]
    """How many entries of a flat array are NaN or +inf."""
    count = 0
    for i in range(x.size):
        count += 0 if x[i] < np.inf else 1
    return count
