"""Sparsemax after the proximal maps of grouping penalties, and the products with its Jacobian.

An entry far below the best has no mass, whatever the penalty does, and then it takes part as a neighbour of height zero
only: rows fall apart into short runs of candidates, and the rest is not looked at twice. All arithmetic is in double
precision. Masked entries, −inf in the scores, do not part their neighbours in a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.compiler import kernel
from fenchel.kernels.maps import as_rows, each, like
from fenchel.kernels.pool import over_rows
from fenchel.kernels.selection import BLOCK, block_maxima, collect, support

_FEW = 48  # so many numbers are sorted by insertion
_HARD = 100  # the work of an entry of a grid, in those of a row
_MORE = 1.0 + 1e-6  # a few candidates too many do no harm
_ROUNDING = 64 * 2.2e-16  # an excess that is no more than rounding


def fused(z: Tensor, strength: float | Tensor) -> Tensor:
    """Fusedmax along the last dimension; strength: a number, or one value per row."""
    return _map(_fused_rows, z, strength)


def fused_product(v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor) -> Tensor:
    """J v of fusedmax given its result p for z."""
    return _product(_fused_product_rows, v, z, p, strength)


def oscar(z: Tensor, strength: float | Tensor) -> Tensor:
    """Oscarmax along the last dimension; strength: a number, or one value per row."""
    return _map(_oscar_rows, z, strength)


def oscar_product(v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor) -> Tensor:
    """J v of oscarmax given its result p for z."""
    return _product(_oscar_product_rows, v, z, p, strength)


def grid(z: Tensor, strength: float | Tensor, width: float) -> Tensor:
    """Tvmax along the last dimension, which holds the rows of a grid of that width one after the other."""
    x, out = as_rows(z), like(z)
    over_rows(_grid_rows, len(x), _HARD * x.size, x, each(strength, len(x)), int(width), as_rows(out))
    return out


def grid_product(v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor, width: float) -> Tensor:
    """J v of tvmax given its result p."""
    q, out = as_rows(p), like(p)
    over_rows(_grid_product_rows, len(q), q.size, q, each(strength, len(q)), int(width), as_rows(v), as_rows(out))
    return out


def _map(rows: Any, z: Tensor, strength: float | Tensor) -> Tensor:
    x, out = as_rows(z), like(z)
    over_rows(rows, len(x), x.size, x, each(strength, len(x)), as_rows(out))
    return out


def _product(rows: Any, v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor) -> Tensor:
    q, out = as_rows(p), like(p)
    over_rows(rows, len(q), q.size, q, as_rows(z), each(strength, len(q)), as_rows(v), as_rows(out))
    return out


# -- what the rows of both maps share ---------------------------------------------------------------------


@kernel
def _unmasked(x: Any, masked: bool) -> int:
    """How many entries of a row are not masked."""
    n: int = x.size
    kept = n
    if masked:
        for i in range(n):
            kept -= 1 if x[i] == -np.inf else 0
    return kept


@kernel
def _threshold(values: Any, sizes: Any, count: int) -> float:
    """τ with Σ size·[value − τ]₊ = 1, from below: the support shrinks until it stays."""
    tau, before = -np.inf, np.inf
    while True:
        size, total = 0.0, 0.0
        for g in range(count):
            on = 1.0 if values[g] > tau else 0.0
            size += on * sizes[g]
            total += on * sizes[g] * values[g]
        if size >= before:  # rounding may let one in again
            return tau
        before = size
        tau = (total - 1.0) / size


# -- fusedmax ---------------------------------------------------------------------------------------------


@kernel
def _variation(w: Any, n: int, strength: float, y: Any, lower: Any, upper: Any, at: Any, slope: Any, rise: Any) -> None:
    """y = argmin ½‖y − w‖² + λ Σ |yᵢ − yᵢ₊₁|, by dynamic programming over the derivative of the best value.

    That of the first i terms, as a function of yᵢ₊₁, is f(b) = clip(b − wᵢ + f(b)) between −λ and λ: piecewise
    linear and increasing. It is kept as a queue of knots, each with the change of slope and of intercept from its left
    to its right; every entry adds two, at both ends, and removes those that are clipped away. yᵢ is yᵢ₊₁ between
    the two ends, and the nearer of them beyond.
    """
    left, right = n, n - 1
    for i in range(n):
        bound = strength if i < n - 1 else 0.0
        # From the left, where the derivative of all before is −λ, up to where it is −λ in total …
        a, b = 1.0, -w[i] - (strength if i > 0 else 0.0)
        while left <= right and a * at[left] + b <= -bound:
            a += slope[left]
            b += rise[left]
            left += 1
        lower[i] = (-bound - b) / a
        if i == n - 1:
            break
        # … and from the right, down to where it is λ.
        c, d = 1.0, -w[i] + (strength if i > 0 else 0.0)
        while left <= right and c * at[right] + d >= bound:
            c -= slope[right]
            d -= rise[right]
            right -= 1
        upper[i] = (bound - d) / c
        left -= 1
        at[left], slope[left], rise[left] = lower[i], a, b + bound
        right += 1
        at[right], slope[right], rise[right] = upper[i], -c, bound - d
    y[n - 1] = lower[n - 1]
    for i in range(n - 2, -1, -1):
        y[i] = min(max(y[i + 1], lower[i]), upper[i])


@kernel
def _adjacent(x: Any, masked: bool, i: int, j: int) -> bool:
    """Whether nothing but masked entries stands between two places of a row; the ends count as places."""
    if j == i + 1:
        return True
    if not masked:
        return False
    k = i + 1
    while k < j and x[k] == -np.inf:
        k += 1
    return k == j


@kernel
def _fused_rows(first: int, last: int, x: Any, strengths: Any, out: Any) -> None:
    n = x.shape[1]
    kind = x.dtype.type
    maxima = np.empty(n // BLOCK + 1, x.dtype)
    index = np.empty(n + 1, np.int32)
    w, y, lower, upper = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    at, slope, rise = np.empty(2 * n + 2), np.empty(2 * n + 2), np.empty(2 * n + 2)
    values, sizes = np.empty(n), np.empty(n, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        top, least, bad = block_maxima(source, maxima)
        if bad or top == -np.inf:
            target[:] = np.nan if bad else 0
            continue
        masked = least == -np.inf
        target[:] = 0
        strength = strengths[row]
        count = collect(source, top, kind(-_MORE * (1.0 + 4.0 * strength)), maxima, index)
        groups, start = 0, 0
        while start < count:
            stop = start + 1
            while stop < count and _adjacent(source, masked, index[stop - 1], index[stop]):
                stop += 1
            length = stop - start
            low, high = np.inf, -np.inf
            for k in range(length):
                w[k] = np.float64(source[index[start + k]]) - top
            if not _adjacent(source, masked, -1, index[start]):
                w[0] -= strength
            if not _adjacent(source, masked, index[stop - 1], n):
                w[length - 1] -= strength
            for k in range(length):
                low, high = min(low, w[k]), max(high, w[k])
            if length * (high - low) <= strength:
                y[:length] = w[0]
            elif strength == 0.0:
                y[:length] = w[:length]
            else:
                _variation(w, length, strength, y, lower, upper, at, slope, rise)
            begin = 0
            while begin < length:
                level = y[begin]
                end = begin + 1
                while end < length and y[end] == level:
                    end += 1
                # The groups are known: their means once more, without what the queue has rounded.
                rest = 0.0
                for k in range(begin, end):
                    rest += w[k] - level
                if begin > 0:
                    rest -= strength if level > y[begin - 1] else -strength
                if end < length:
                    rest -= strength if level > y[end] else -strength
                values[groups] = level + rest / (end - begin)
                sizes[groups] = end - begin
                groups += 1
                begin = end
            start = stop
        tau = _threshold(values, sizes, groups)
        k = 0
        for g in range(groups):
            p = kind(max(values[g] - tau, 0.0))
            for _ in range(sizes[g]):
                target[index[k]] = p
                k += 1


@kernel
def _fused_product_rows(first: int, last: int, p: Any, x: Any, strengths: Any, v: Any, out: Any) -> None:
    n = p.shape[1]
    kind = p.dtype.type
    masks, index = np.empty(n // BLOCK, np.uint64), np.empty(n + 1, np.int32)
    for row in range(first, last):
        source, scores, g, target = p[row], x[row], v[row], out[row]
        count = support(source, masks, index, n)
        target[:] = 0
        if count == 0:
            continue
        if source[index[0]] != source[index[0]]:
            target[:] = np.nan
            continue
        total = 0.0
        for k in range(count):
            total += g[index[k]]
        mean = total / count
        alone = strengths[row] == 0.0
        start = 0
        while start < count:
            level = source[index[start]]
            part = g[index[start]] - mean
            stop = start + 1
            while (
                stop < count
                and not alone
                and source[index[stop]] == level
                and _adjacent(scores, True, index[stop - 1], index[stop])
            ):
                part += g[index[stop]] - mean
                stop += 1
            share = kind(part / (stop - start))
            for k in range(start, stop):
                target[index[k]] = share
            start = stop


# -- oscarmax ---------------------------------------------------------------------------------------------


@kernel
def _sort_by_digits(bits: Any, n: int, keys: Any, spare: Any, counts: Any) -> None:
    digit = 8 if n < 2048 else 11
    passes = 4 if n < 2048 else 3
    mask = np.uint32((1 << digit) - 1)
    size = 1 << digit
    counts[: passes * size] = 0
    for i in range(n):
        # The order of floats is that of their bits, backwards if negative.
        b = bits[i]
        key = np.uint32(b ^ (np.uint32(0xFFFFFFFF) if b >> np.uint32(31) else np.uint32(0x80000000)))
        keys[i] = key
        for k in range(passes):
            counts[k * size + ((key >> np.uint32(k * digit)) & mask)] += 1
    for k in range(passes):
        place = 0
        for d in range(k * size, (k + 1) * size):
            c = counts[d]
            counts[d] = place
            place += c
        for i in range(n):
            key = keys[i]
            d = k * size + ((key >> np.uint32(k * digit)) & mask)
            spare[counts[d]] = key
            counts[d] += 1
        keys, spare = spare, keys
    for i in range(n):
        key = keys[i]
        bits[i] = key ^ (np.uint32(0x80000000) if key >> np.uint32(31) else np.uint32(0xFFFFFFFF))


@kernel
def _sort(a: Any, n: int, keys: Any, spare: Any, counts: Any) -> None:
    """Sort a[:n] upwards: by insertion if short, by digits in single precision, by comparison in double."""
    if n <= _FEW:
        for i in range(1, n):
            v = a[i]
            j = i
            while j > 0 and a[j - 1] > v:
                a[j] = a[j - 1]
                j -= 1
            a[j] = v
    elif a.itemsize == 8:
        a[:n].sort()
    else:
        _sort_by_digits(a.view(np.uint32), n, keys, spare, counts)


@kernel
def _find(edges: Any, count: int, value: Any) -> int:
    """The first of the descending edges that value reaches; count if none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if value >= edges[middle]:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def _oscar_rows(first: int, last: int, x: Any, strengths: Any, out: Any) -> None:
    n = x.shape[1]
    kind = x.dtype.type
    maxima = np.empty(n // BLOCK + 1, x.dtype)
    index = np.empty(n + 1, np.int32)
    ordered = np.empty(n, x.dtype)
    keys, spare, counts = np.empty(n, np.uint32), np.empty(n, np.uint32), np.empty(3 << 11, np.int32)
    edges = np.empty(n, x.dtype)
    z, sums, values, sizes = np.empty(n), np.empty(n), np.empty(n), np.empty(n, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        top, least, bad = block_maxima(source, maxima)
        if bad or top == -np.inf:
            target[:] = np.nan if bad else 0
            continue
        strength = strengths[row]
        masked = least == -np.inf
        target[:] = 0
        kept = _unmasked(source, masked)
        if masked:
            least = top
            for i in range(n):
                v = source[i]
                least = min(least, v if v > -np.inf else top)
        if strength > 0.0 and strength * kept >= 2.0 * (np.float64(top) - least):
            # No group of best ones has a mean that far above the others': all are pooled.
            share = kind(1.0 / kept)
            for i in range(n):
                target[i] = share if source[i] > -np.inf else target[i]
            continue
        # The penalty can lift an entry over the best by λ(n − 1) at most; and without those who have no mass
        # whatever happens, it is the penalty of fewer.
        count = collect(source, top, kind(-_MORE * (1.0 + (kept - 1) * strength)), maxima, index)
        for k in range(count):
            ordered[k] = source[index[k]]
        while True:
            line = kind(-_MORE * (1.0 + (count - 1) * strength))
            fewer = 0
            for k in range(count):
                v = ordered[k]
                ordered[fewer] = v
                fewer += 1 if v - top > line else 0
            if fewer == count:
                break
            count = fewer
        _sort(ordered, count, keys, spare, counts)
        for k in range(count):  # in a loop of its own, or the compiler would take the ranks off first
            z[k] = np.float64(ordered[count - 1 - k]) - top
        groups = 0
        for k in range(count):
            level = z[k] + strength * k
            total, size = level, 1
            while groups > 0 and strength > 0.0 and values[groups - 1] <= level:
                groups -= 1
                total += sums[groups]
                size += sizes[groups]
                level = total / size
            sums[groups], sizes[groups], values[groups] = total, size, level
            edges[groups] = ordered[count - 1 - k]
            groups += 1
        k = 0
        for g in range(groups):
            # Once more, without the ranks, which are large beside the scores and known.
            rest, middle = 0.0, strength * (k + 0.5 * (sizes[g] - 1))
            base = values[g] - middle
            for j in range(k, k + sizes[g]):
                rest += z[j] - base
            values[g] += rest / sizes[g]
            k += sizes[g]
        tau = _threshold(values, sizes, groups)
        while values[groups - 1] <= tau:
            groups -= 1
        for g in range(groups):
            values[g] -= tau
        lowest = edges[groups - 1]
        for block in range((n + BLOCK - 1) // BLOCK):
            if maxima[block] >= lowest:
                for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
                    if source[i] >= lowest:
                        target[i] = kind(values[_find(edges, groups, source[i])])


@kernel
def _oscar_product_rows(first: int, last: int, p: Any, x: Any, strengths: Any, v: Any, out: Any) -> None:
    n = p.shape[1]
    kind = p.dtype.type
    masks, index = np.empty(n // BLOCK, np.uint64), np.empty(n + 1, np.int32)
    edges = np.empty(n, p.dtype)
    keys, spare, counts = np.empty(n, np.uint32), np.empty(n, np.uint32), np.empty(3 << 11, np.int32)
    sums, sizes = np.empty(n), np.empty(n, np.int32)
    for row in range(first, last):
        source, g, target = p[row], v[row], out[row]
        count = support(source, masks, index, n)
        target[:] = 0
        if count == 0:
            continue
        if source[index[0]] != source[index[0]]:
            target[:] = np.nan
            continue
        alone = strengths[row] == 0.0
        even = not alone
        level = source[index[0]]
        for k in range(count):
            even = even and source[index[k]] == level
        if even:  # one group: its mean is that of the support
            continue
        total = 0.0
        for k in range(count):
            total += g[index[k]]
        mean = total / count
        if alone:
            for k in range(count):
                target[index[k]] = kind(g[index[k]] - mean)
            continue
        for k in range(count):
            edges[k] = -source[index[k]]
        _sort(edges, count, keys, spare, counts)
        groups = 0
        for k in range(count):
            if k == 0 or edges[k] != edges[groups - 1]:
                edges[groups] = edges[k]
                groups += 1
        for k in range(groups):
            edges[k] = -edges[k]
            sums[k], sizes[k] = 0.0, 0
        for k in range(count):
            i = _find(edges, groups, source[index[k]])
            sums[i] += g[index[k]] - mean
            sizes[i] += 1
        for k in range(count):
            i = _find(edges, groups, source[index[k]])
            target[index[k]] = kind(sums[i] / sizes[i])


# -- tvmax2d ----------------------------------------------------------------------------------------------


@kernel
def _ways(i: int, n: int, width: int, ways: Any) -> int:
    """The neighbours of i on the grid: right, left, below, above; how many there are.

    An edge is named after the one of its ends that comes first, with n added if it goes down.
    """
    count = 0
    if (i + 1) % width != 0:
        ways[count, 0], ways[count, 1], ways[count, 2] = i + 1, i, 1
        count += 1
    if i % width != 0:
        ways[count, 0], ways[count, 1], ways[count, 2] = i - 1, i - 1, -1
        count += 1
    if i + width < n:
        ways[count, 0], ways[count, 1], ways[count, 2] = i + width, n + i, 1
        count += 1
    if i >= width:
        ways[count, 0], ways[count, 1], ways[count, 2] = i - width, n + i - width, -1
        count += 1
    return count


@kernel
def _route(
    n: int,
    width: int,
    strength: float,
    slack: float,
    group: Any,
    excess: Any,
    flow: Any,
    far: Any,
    queue: Any,
    ways: Any,
) -> None:
    """Send excess to where it is missing, inside the groups and no more than λ over an edge: a maximum flow.

    In waves: measure the distance to the nearest need, then let everybody, the farthest first, pass on what they
    have to those who are nearer. Afterwards ``far`` is negative where no need can be reached.
    """
    while True:
        tail = 0
        for i in range(n):
            far[i] = -1
            if group[i] >= 0 and excess[i] < -slack:
                far[i] = 0
                queue[tail] = i
                tail += 1
        head, stuck = 0, True
        while head < tail:
            j = queue[head]
            head += 1
            for k in range(_ways(j, n, width, ways)):
                i, edge, sign = ways[k, 0], ways[k, 1], -ways[k, 2]
                if group[i] == group[j] and far[i] < 0 and sign * flow[edge] < strength:
                    far[i] = far[j] + 1
                    queue[tail] = i
                    tail += 1
                    stuck = stuck and excess[i] <= slack
        if stuck:
            return
        for place in range(tail - 1, -1, -1):
            i = queue[place]
            if far[i] == 0:
                break
            if excess[i] <= 0.0:
                continue
            for k in range(_ways(i, n, width, ways)):
                j, edge, sign = ways[k, 0], ways[k, 1], ways[k, 2]
                if group[i] == group[j] and far[j] == far[i] - 1:
                    room = strength - sign * flow[edge]
                    if excess[i] >= room:
                        excess[i] -= room
                        excess[j] += room
                        flow[edge] = sign * strength
                    else:
                        flow[edge] += sign * excess[i]
                        excess[j] += excess[i]
                        excess[i] = 0.0
                        break


@kernel
def _regions(
    n: int, width: int, strength: float, w: Any, group: Any, flow: Any, level: Any, size: Any, queue: Any, ways: Any
) -> int:
    """argmin ½‖y − w‖² + λ Σ |yᵢ − yⱼ| over the edges of a grid between entries with group ≥ 0, all 0 at first.

    Groups are parted until each can even out its excess over its mean; ``flow`` is then the solution of the dual
    problem. Returns how many groups there are, numbered in ``group``, with their values in ``level``.
    """
    excess, far = np.empty(n), np.empty(n, np.int32)
    spill, needy = np.empty(n), np.empty(n, np.int32)
    scale = strength
    for i in range(n):
        scale = max(scale, abs(w[i]) if group[i] >= 0 else 0.0)
    slack = _ROUNDING * scale
    flow[:] = 0.0
    groups, settled, size[0] = 1, 0, 0
    for i in range(n):
        if group[i] >= 0:
            size[0] += 1
    while True:
        for i in range(n):
            excess[i] = w[i] if group[i] >= 0 else 0.0
        for i in range(n):
            if group[i] >= 0:
                for k in range(_ways(i, n, width, ways)):
                    if group[ways[k, 0]] >= 0:
                        excess[i] -= ways[k, 2] * flow[ways[k, 1]]
        level[:groups] = 0.0
        for _ in range(2):  # the mean, and what it has rounded away
            spill[:groups] = 0.0
            for i in range(n):
                if group[i] >= 0:
                    spill[group[i]] += excess[i]
            for i in range(n):
                if group[i] >= 0:
                    excess[i] -= spill[group[i]] / size[group[i]]
            for g in range(groups):
                level[g] += spill[g] / size[g]
        if settled == groups:
            return groups
        _route(n, width, strength, slack, group, excess, flow, far, queue, ways)
        spill[:groups] = 0.0
        for i in range(n):
            if group[i] >= 0 and far[i] < 0:
                spill[group[i]] += excess[i]
        before = groups
        for g in range(before):
            needy[g] = -1
            if spill[g] > slack * (4 + size[g]):  # what cannot be routed belongs above
                needy[g] = groups
                size[groups] = 0
                groups += 1
        settled = groups if groups == before else 0
        for i in range(n):
            g = group[i]
            if g >= 0 and far[i] < 0 and needy[g] >= 0:
                for k in range(_ways(i, n, width, ways)):
                    j = ways[k, 0]
                    if group[j] == g and far[j] >= 0:
                        flow[ways[k, 1]] = ways[k, 2] * strength
        for i in range(n):
            g = group[i]
            if g >= 0 and g < before and far[i] < 0 and needy[g] >= 0:
                group[i] = needy[g]
                size[needy[g]] += 1
                size[g] -= 1


@kernel
def _grid_rows(first: int, last: int, x: Any, strengths: Any, width: int, out: Any) -> None:
    n = x.shape[1]
    kind = x.dtype.type
    maxima = np.empty(n // BLOCK + 1, x.dtype)
    ways = np.empty((4, 3), np.int64)
    w, flow, level, size = np.empty(n), np.empty(2 * n), np.empty(n), np.empty(n, np.int32)
    group, queue = np.empty(n, np.int32), np.empty(n, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        top, _, bad = block_maxima(source, maxima)
        if bad or top == -np.inf:
            target[:] = np.nan if bad else 0
            continue
        target[:] = 0
        strength = strengths[row]
        line = -(1.0 + 8.0 * strength)
        low = 0.0
        for i in range(n):
            w[i] = np.float64(source[i]) - top
            group[i] = 0 if w[i] > line else -1
            low = min(low, w[i] if w[i] > line else line if source[i] > -np.inf else 0.0)
        strength = min(strength, -n * low)
        for i in range(n):
            if group[i] == 0:
                for k in range(_ways(i, n, width, ways)):
                    j = ways[k, 0]
                    w[i] -= strength if group[j] < 0 and source[j] > -np.inf else 0.0
        groups = 1
        if strength > 0.0:
            groups = _regions(n, width, strength, w, group, flow, level, size, queue, ways)
        else:
            groups = 0
            for i in range(n):
                if group[i] == 0:
                    group[i], level[groups], size[groups] = groups, w[i], 1
                    groups += 1
        tau = _threshold(level, size, groups)
        for i in range(n):
            if group[i] >= 0:
                target[i] = kind(max(level[group[i]] - tau, 0.0))


@kernel
def _grid_product_rows(first: int, last: int, p: Any, strengths: Any, width: int, v: Any, out: Any) -> None:
    n = p.shape[1]
    kind = p.dtype.type
    ways = np.empty((4, 3), np.int64)
    queue, seen = np.empty(n, np.int32), np.empty(n, np.bool_)
    for row in range(first, last):
        source, g, target = p[row], v[row], out[row]
        total, count = 0.0, 0
        bad = False
        for i in range(n):
            target[i] = 0
            seen[i] = source[i] == 0
            bad = bad or source[i] != source[i]
            if not seen[i]:
                total += g[i]
                count += 1
        if bad:
            target[:] = np.nan
            continue
        mean = total / max(count, 1)
        alone = strengths[row] == 0.0
        for start in range(n):
            if seen[start]:
                continue
            seen[start] = True
            queue[0] = start
            head, tail = 0, 1
            part = 0.0
            while head < tail:
                i = queue[head]
                head += 1
                part += g[i] - mean
                if alone:
                    continue
                for k in range(_ways(i, n, width, ways)):
                    j = ways[k, 0]
                    if not seen[j] and source[j] == source[i]:
                        seen[j] = True
                        queue[tail] = j
                        tail += 1
            share = kind(part / tail)
            for k in range(tail):
                target[queue[k]] = share
