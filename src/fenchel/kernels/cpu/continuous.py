"""Integrals of Gaussians over an interval or a disc with the weight (1 − ‖u‖²)^k, and their derivatives.

Everything is in double precision. Along a ray from the centre of the disc, the moments of a Gaussian have a closed
form: a scaled complementary error function, evaluated by a table of polynomials, and one exponential per end point. If
the Gaussian is wider than the ray, these moments would cancel, and the Gauss-Legendre rule is used instead. Over the
angle, the trapezoid rule is used on the range of angles in which the Gaussian is not negligible. If that needs too many
rays, the disc is cut into chords parallel to the long axis of the Gaussian. A Gaussian that lies inside the disc, or
outside of it, needs neither.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import helper, kernel
from fenchel.kernels.cpu.threads import over_rows

Arrays = np.ndarray[Any, Any]

NODES = 24
"""Number of nodes of the Gauss-Legendre rule, for Gaussians wider than the ray."""

_PIECES, _DEGREE = 256, 5
_LIMIT = 256  # largest number of rays; a Gaussian that needs more is narrow, and fewer chords along it are enough
_CHORDS = 48  # nodes of the Gauss-Legendre rule, in each of three parts


# -- on tensors -------------------------------------------------------------------------------------------


def line(
    loc: Tensor, axes: Tensor, centers: Tensor, variances: Tensor, power: int, reach: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """Integrals (B, n), and their slopes (B, n, 2) in loc and the square of the half width.

    Args:
        loc: (B,), float64 like all others.
        axes: (B,): half widths of the supports, squared.
        centers: (n,).
        variances: (n,).
        power: k.
        reach: distance, in standard deviations, beyond which a basis function counts as 0.
        keep: whether to compute the slopes.
    """
    batch, count = len(loc), len(centers)
    value, slopes = _results(batch, count, 2 if keep else 0)
    tables = (np.array([_line_constant(power), reach]), *_tables(-1, power), erfcx_table())
    arrays = [_array(t) for t in (loc, axes, centers, variances)]
    over_rows(_line, batch, 16 * value.numel(), *arrays, *tables, power, value.numpy(), slopes.numpy())
    return value, slopes


def plane(
    loc: Tensor, axes: Tensor, centers: Tensor, covariances: Tensor, power: int, reach: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """Integrals (B, n), and their slopes (B, n, 5) in loc (2) and the support's ellipse (11, 21, 22).

    Args:
        loc: (B, 2), float64 like all others.
        axes: (B, 2, 2), the matrices of the ellipses; only the lower triangle is read.
        centers: (n, 2).
        covariances: (n, 2, 2).
        power: k.
        reach: distance, in standard deviations, beyond which a basis function counts as 0.
        keep: whether to compute the slopes.
    """
    batch, count = len(loc), len(centers)
    value, slopes = _results(batch, count, 5 if keep else 0)
    tables = (np.array([(power + 1) / math.pi, reach]), *_tables(0, power), erfcx_table(), *_tables(-1, power), _rule())
    arrays = [_array(t) for t in (loc, axes, centers, covariances)]
    over_rows(_plane, batch, 256 * value.numel(), *arrays, *tables, power, value.numpy(), slopes.numpy())
    return value, slopes


def _results(batch: int, count: int, slopes: int) -> tuple[Tensor, Tensor]:
    shape = (batch if slopes else 0, count, max(slopes, 1))
    return torch.empty((batch, count), dtype=torch.float64, device="cpu"), torch.empty(
        shape, dtype=torch.float64, device="cpu"
    )


def _array(x: Tensor) -> Arrays:
    array: Arrays = x.detach().contiguous().numpy()
    return array


def _line_constant(power: int) -> float:
    return math.exp(math.lgamma(power + 1.5) - math.lgamma(power + 1)) / math.sqrt(math.pi)


@cache
def _tables(start: int, power: int) -> tuple[Arrays, Arrays]:
    """Three polynomials by rising powers of r, (3, degree + 1), and at Gauss's nodes with their weights, (4, NODES).

    On the line (1−y²)^k, y(1−y²)^(k−1) and (1−y²)^k − 2k y²(1−y²)^(k−1); on a ray r(1−r²)^k, r²(1−r²)^(k−1) and
    r³(1−r²)^(k−1).
    """
    multiply, raise_ = np.polynomial.polynomial.polymul, np.polynomial.polynomial.polypow
    full, less = raise_([1.0, 0.0, -1.0], power), raise_([1.0, 0.0, -1.0], power - 1)
    if start:
        third = full - 2 * power * multiply([0.0, 0.0, 1.0], less)
        found = [full, multiply([0.0, 1.0], less), third]
    else:
        found = [multiply([0.0] * i + [1.0], p) for i, p in ((1, full), (2, less), (3, less))]
    coefficients = np.zeros((3, 2 * power + (1 if start else 2)))
    for row, each in zip(coefficients, found, strict=True):
        row[: len(each)] = each
    x, w = np.polynomial.legendre.leggauss(NODES)
    x, w = start + (1 - start) * (1 + x) / 2, w * (1 - start) / 2
    values = np.stack([x, *(w * np.polynomial.polynomial.polyval(x, row) for row in coefficients)])
    return coefficients, values / np.array([[1.0]] + [[math.sqrt(2 * math.pi)]] * 3)


@cache
def _rule() -> Arrays:
    """Gauss and Legendre's nodes in (0, 1), and their weights."""
    x, w = np.polynomial.legendre.leggauss(_CHORDS)
    return np.stack([(1 + x) / 2, w / 2])


@cache
def erfcx_table() -> Arrays:
    """½ erfcx(x/√2) for x ≥ 0 as polynomials in pieces of 4/(4 + x), (pieces, degree + 1), rising powers."""
    from scipy.special import erfcx

    nodes = np.cos(np.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1))
    table = np.empty((_PIECES, _DEGREE + 1))
    for piece in range(_PIECES):
        t = (piece + 0.5 + 0.5 * nodes) / _PIECES
        x = 4 / t - 4
        fit = np.polynomial.chebyshev.chebfit(nodes, 0.5 * erfcx(x / math.sqrt(2)), _DEGREE)
        table[piece] = np.polynomial.chebyshev.cheb2poly(fit)
    return table


# -- on arrays --------------------------------------------------------------------------------------------


@helper
def _mills(x, table):  # type: ignore[no-untyped-def]
    """½ erfcx(x/√2), x ≥ 0: the tail of the normal law over exp(−x²/2)."""
    t = _PIECES * 4.0 / (4.0 + x)
    piece = min(int(t), _PIECES - 1)
    y = 2.0 * (t - piece) - 1.0
    total = table[piece, _DEGREE]
    for i in range(_DEGREE - 1, -1, -1):
        total = total * y + table[piece, i]
    return total


@helper
def _mass(u, v, whole, at_u, at_v, table):  # type: ignore[no-untyped-def]
    """The normal mass of [u, v] times a weight; ``at_u`` and ``at_v`` are the weight times exp(−½z²) at the ends."""
    if u >= 0.0:
        return at_u * _mills(u, table) - at_v * _mills(v, table)
    if v <= 0.0:
        return at_v * _mills(-v, table) - at_u * _mills(-u, table)
    return whole - at_u * _mills(-u, table) - at_v * _mills(v, table)


@helper
def _is_beyond(x, y, m11, m12, m22, c11, c12, c22, reach):  # type: ignore[no-untyped-def]
    """Whether a tangent of the disc is at least ``reach`` standard deviations away from a Gaussian; two are tried."""
    for which in range(2):
        n1, n2 = (x, y) if which == 0 else (m11 * x + m12 * y, m12 * x + m22 * y)
        size = math.sqrt(n1 * n1 + n2 * n2)
        gap = n1 * x + n2 * y - size
        if gap > reach * math.sqrt(c11 * n1 * n1 + 2.0 * c12 * n1 * n2 + c22 * n2 * n2):
            return True
    return False


@helper
def _segment(place, width, coefficients, nodes, table, moments, sums):  # type: ignore[no-untyped-def]
    """Write the integrals of three polynomials times a Gaussian over [−1, 1] to ``sums``."""
    sums[:] = 0.0
    if width <= 1.0:
        variance, scale = width * width, width / math.sqrt(2.0 * math.pi)
        u, v = (-1.0 - place) / width, (1.0 - place) / width
        at_u = math.exp(-0.5 * u * u)
        at_v = math.exp(-0.5 * v * v)
        moments[0] = _mass(u, v, 1.0, at_u, at_v, table)
        at_u *= scale
        at_v *= scale
        moments[1] = place * moments[0] - at_v + at_u
        for i in range(2, len(moments)):
            at_u = -at_u
            moments[i] = place * moments[i - 1] + (i - 1) * variance * moments[i - 2] - at_v + at_u
        for i in range(len(moments)):
            for which in range(3):
                sums[which] += coefficients[which, i] * moments[i]
    else:
        for i in range(nodes.shape[1]):
            z = (nodes[0, i] - place) / width
            bell = math.exp(-0.5 * z * z) / width
            for which in range(3):
                sums[which] += nodes[1 + which, i] * bell


@helper
def _chords(x, y, n11, n21, n22, reach, power, coefficients, nodes, table, rule, moments, sums):  # type: ignore[no-untyped-def]
    """The six integrals of a narrow Gaussian over the disc, by chords parallel to its long axis.

    The same rule as ``fenchel.continuous.integrals._chords``. A chord is at distance s = sin φ from the centre. The
    range of φ has up to three parts: in the middle one no chord ends inside the Gaussian.
    """
    turn = 0.5 * math.atan2(2.0 * n21 * n22, n11 * n11 + n21 * n21 - n22 * n22)
    cos, sin = math.cos(turn), math.sin(turn)
    along1, along2 = -sin * n11, cos * n22 - sin * n21
    precision = along1 * along1 + along2 * along2
    tilt = (cos * n11 * along1 + (sin * n22 + cos * n21) * along2) / precision
    middle, beside = cos * x + sin * y, cos * y - sin * x
    width, narrow = 1.0 / math.sqrt(precision), math.sqrt(precision) / (n11 * n22)
    last = math.acos(min(max(abs(beside) - reach * width, 0.0), 1.0))
    inner = math.acos(min(abs(beside) + reach * width, 1.0))
    low = math.asin(min(max(middle - reach * narrow, -1.0), 1.0))
    high = math.asin(min(max(middle + reach * narrow, -1.0), 1.0))
    low, high = min(max(low, -last), last), min(max(high, -last), last)
    total, u1, u2, t11, t12, t22 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    start = low
    for part in range(3):
        end = high
        if part < 2:
            end = min(max(inner if part else -inner, low), high)
        length = end - start
        if length > 0.0:
            for i in range(rule.shape[1]):
                angle = start + length * rule[0, i]
                s, half = math.sin(angle), math.cos(angle)
                z = (s - middle) / narrow
                weight = length * rule[1, i] * math.exp(-0.5 * z * z) * half ** (2 * power - 1)
                _segment((beside - tilt * (s - middle)) / half, width / half, coefficients, nodes, table, moments, sums)
                square = (sums[0] - sums[2]) / (2 * power)  # of z²(1 − z²)^(k−1)
                flat = sums[0] + square  # of (1 − z²)^(k−1)
                total += weight * half * half * sums[0]
                u1 += weight * s * flat
                u2 += weight * half * sums[1]
                t11 += weight * s * s * flat
                t12 += weight * s * half * sums[1]
                t22 += weight * half * half * square
        start = end
    scale = 1.0 / (narrow * math.sqrt(2.0 * math.pi))
    return (
        scale * total,
        scale * (cos * u1 - sin * u2),
        scale * (sin * u1 + cos * u2),
        scale * (cos * cos * t11 - 2.0 * cos * sin * t12 + sin * sin * t22),
        scale * (cos * sin * (t11 - t22) + (cos * cos - sin * sin) * t12),
        scale * (sin * sin * t11 + 2.0 * cos * sin * t12 + cos * cos * t22),
    )


@kernel
def _line(
    first: int,
    last: int,
    loc: Arrays,
    axes: Arrays,
    centers: Arrays,
    variances: Arrays,
    constants: Arrays,
    coefficients: Arrays,
    nodes: Arrays,
    table: Arrays,
    power: int,
    value: Arrays,
    slopes: Arrays,
) -> None:
    keep = slopes.shape[0] > 0
    count = len(centers)
    sums = np.zeros(3)
    moments = np.zeros(coefficients.shape[1])
    for b in range(first, last):
        a = math.sqrt(axes[b])
        for j in range(count):
            place, width = (centers[j] - loc[b]) / a, math.sqrt(variances[j] / axes[b])
            sums[:] = 0.0
            if not (abs(place) < math.inf and 0.0 < width < math.inf):
                sums[:] = math.nan
            elif abs(place) <= 1.0 + constants[1] * width:
                _segment(place, width, coefficients, nodes, table, moments, sums)
            value[b, j] = constants[0] / a * sums[0]
            if keep:
                slopes[b, j, 0] = 2 * power * constants[0] / axes[b] * sums[1]
                slopes[b, j, 1] = -0.5 * constants[0] / (a * axes[b]) * sums[2]


@kernel
def _plane(
    first: int,
    last: int,
    loc: Arrays,
    axes: Arrays,
    centers: Arrays,
    covariances: Arrays,
    constants: Arrays,
    coefficients: Arrays,
    nodes: Arrays,
    table: Arrays,
    chord_coefficients: Arrays,
    chord_nodes: Arrays,
    rule: Arrays,
    power: int,
    value: Arrays,
    slopes: Arrays,
) -> None:
    keep = slopes.shape[0] > 0
    count, degree = len(centers), coefficients.shape[1]
    reach = constants[1]
    moments, chord_moments = np.zeros(degree), np.zeros(chord_coefficients.shape[1])
    sums = np.zeros(3)
    scale = 1.0 / math.sqrt(2.0 * math.pi)
    turn = 2.0 * math.pi
    for b in range(first, last):
        # The disc is mapped to the ellipse by a lower triangular root.
        a11 = math.sqrt(axes[b, 0, 0])
        a21 = 0.5 * (axes[b, 0, 1] + axes[b, 1, 0]) / a11
        a22 = math.sqrt(axes[b, 1, 1] - a21 * a21)
        for j in range(count):
            l11 = math.sqrt(covariances[j, 0, 0])
            l21 = 0.5 * (covariances[j, 0, 1] + covariances[j, 1, 0]) / l11
            l22 = math.sqrt(covariances[j, 1, 1] - l21 * l21)
            x = (centers[j, 0] - loc[b, 0]) / a11
            y = (centers[j, 1] - loc[b, 1] - a21 * x) / a22
            # Its precision in the disc, M = NᵀN with N = L⁻¹A, and the inverse of that.
            n11, n22 = a11 / l11, a22 / l22
            n21 = (a21 - l21 * n11) / l22
            m11, m12, m22 = n11 * n11 + n21 * n21, n21 * n22, n22 * n22
            size = 1.0 / (n11 * n11 * n22 * n22)
            c11, c12, c22 = m22 * size, -m12 * size, m11 * size
            half, gap = 0.5 * (c11 + c22), math.sqrt(0.25 * (c11 - c22) * (c11 - c22) + c12 * c12)
            wide = math.sqrt(half + gap)
            narrow = math.sqrt(size) / wide
            distance = math.sqrt(x * x + y * y)
            total, ux, uy, txx, txy, tyy = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            if not (distance < math.inf and wide < math.inf and narrow > 0.0):
                total = math.nan
                ux, uy, txx, txy, tyy = total, total, total, total, total
            elif distance > 1.0 and _is_beyond(x, y, m11, m12, m22, c11, c12, c22, reach):
                pass
            elif power == 1 and distance + reach * wide <= 1.0:
                total = (1.0 - distance * distance - c11 - c22) / (a11 * a22)
                if keep:
                    inner = 1.0 / (a11 * a22)
                    ux, uy = x * inner, y * inner
                    txx, txy, tyy = (x * x + c11) * inner, (x * y + c12) * inner, (y * y + c22) * inner
            else:
                square = m11 * x * x + 2.0 * m12 * x * y + m22 * y * y
                low, high = -math.pi, math.pi
                if square > reach * reach:
                    w1, w2 = n11 * x, n21 * x + n22 * y
                    sine = reach / math.sqrt(square)
                    cosine = math.sqrt(1.0 - sine * sine)
                    for side in range(2):
                        sine = -sine
                        b1, b2 = cosine * w1 - sine * w2, sine * w1 + cosine * w2
                        e1 = b1 / n11
                        e2 = (b2 - n21 * e1) / n22
                        end = math.atan2(x * e2 - y * e1, x * e1 + y * e2)
                        if side == 0:
                            low = end
                        else:
                            high = end
                around = min(distance + reach * wide, 1.0)
                needed = (high - low) / turn * reach * reach / math.asinh(reach * narrow / around) + 6.0
                angles = int(min(needed, _LIMIT))
                step = (high - low) / angles
                weight = step * scale / (l11 * l22)
                if needed > _LIMIT:
                    tables = chord_coefficients, chord_nodes, table, rule, chord_moments, sums
                    total, ux, uy, txx, txy, tyy = _chords(x, y, n11, n21, n22, reach, power, *tables)
                    angles, weight = 0, 1.0 / (a11 * a22)
                angle = math.atan2(y, x) + low + 0.5 * step
                cos, sin = math.cos(angle), math.sin(angle)
                cos_step, sin_step = math.cos(step), math.sin(step)
                v1, v2 = m11 * x + m12 * y, m12 * x + m22 * y
                middle, flat, limit = math.exp(-0.5 * square), 1.0 / size, reach * reach
                for _ in range(angles):
                    precision = m11 * cos * cos + 2.0 * m12 * cos * sin + m22 * sin * sin
                    root = math.sqrt(precision)
                    width = 1.0 / root
                    variance = width * width
                    place = (v1 * cos + v2 * sin) * variance
                    cross = cos * y - sin * x
                    beside = cross * cross * variance * flat
                    first_ray, second_ray, third_ray = 0.0, 0.0, 0.0
                    u, v = -place * root, (1.0 - place) * root
                    if (v < 0.0 and beside + v * v > limit) or (u > 0.0 and square > limit):
                        pass  # inside the disc, the ray stays farther than ``reach`` from the Gaussian
                    elif width <= 1.0:
                        at_u = middle
                        at_v = math.exp(-0.5 * (beside + v * v))
                        whole = 0.0
                        if u < 0.0 < v:
                            whole = math.exp(-0.5 * beside)
                        mass = _mass(u, v, whole, at_u, at_v, table)
                        at_u *= scale * width
                        at_v *= scale * width
                        if power == 1:
                            m1 = place * mass - at_v + at_u
                            second_ray = place * m1 + variance * mass - at_v
                            third_ray = place * second_ray + 2.0 * variance * m1 - at_v
                            first_ray = m1 - third_ray
                        else:
                            moments[0] = mass
                            moments[1] = place * mass - at_v + at_u
                            for i in range(2, degree):
                                moments[i] = place * moments[i - 1] + (i - 1) * variance * moments[i - 2] - at_v
                            for i in range(1, degree):
                                first_ray += coefficients[0, i] * moments[i]
                                second_ray += coefficients[1, i] * moments[i]
                                third_ray += coefficients[2, i] * moments[i]
                    else:
                        for i in range(nodes.shape[1]):
                            z = (nodes[0, i] - place) * root
                            bell = math.exp(-0.5 * (z * z + beside)) * root
                            first_ray += nodes[1, i] * bell
                            second_ray += nodes[2, i] * bell
                            third_ray += nodes[3, i] * bell
                    total += width * first_ray
                    second_ray *= width
                    ux += second_ray * cos
                    uy += second_ray * sin
                    third_ray *= width
                    txx += third_ray * cos * cos
                    txy += third_ray * cos * sin
                    tyy += third_ray * sin * sin
                    cos, sin = cos * cos_step - sin * sin_step, sin * cos_step + cos * sin_step
                total *= weight
                ux *= weight
                uy *= weight
                txx *= weight
                txy *= weight
                tyy *= weight
            value[b, j] = constants[0] * total
            if keep:
                # Back through A⁻ᵀ, and A⁻ᵀ [·] A⁻¹.
                g2 = uy / a22
                g1 = (ux - a21 * g2) / a11
                slopes[b, j, 0] = 2.0 * power * constants[0] * g1
                slopes[b, j, 1] = 2.0 * power * constants[0] * g2
                h11 = total - 2.0 * power * txx
                h12 = -2.0 * power * txy
                h22 = total - 2.0 * power * tyy
                k22 = h22 / (a22 * a22)
                k12 = (h12 / a22 - a21 * k22) / a11
                k11 = (h11 - 2.0 * a11 * a21 * k12 - a21 * a21 * k22) / (a11 * a11)
                slopes[b, j, 2] = -0.5 * constants[0] * k11
                slopes[b, j, 3] = -0.5 * constants[0] * k12
                slopes[b, j, 4] = -0.5 * constants[0] * k22
