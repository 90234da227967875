"""The parameter c = α − 1 of rows, so typed that a kernel contains no more than its parameter needs.

Kernels take an array, which ``simplex.parameters`` makes. Of type ``WITHOUT_POWERS`` it is empty: sparsemax, and
normmax of α = ∞, need no powers. Of type ``SQUARES`` it holds 1/scale: 2 for 1.5-entmax, 1 for normmax of α = 2. Else
it holds c itself in double: alone, for all rows, or one per row. Numba specialises on the type: what other parameters
need is not compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import INLINED, strict_helper

WITHOUT_POWERS, SQUARES = np.int8, np.int16

SOFTMAX = np.empty(0, np.int32)
"""What products take for c = 0, where p itself is the curvature."""

SOFT = 0.25
"""Below this c, (1 + c·u)^(1/c) would magnify the rounding of the sum."""


def rule_of(powers: Any, row: int, rows: int, norm: bool, room: Any) -> Any:
    """The rule of ``newton.solve`` for the rows from ``row`` on, one per lane, and the level to start from."""
    raise NotImplementedError("for compiled code")


@overload(rule_of, strict=False, jit_options=INLINED)
def _rule_of(powers: Any, row: Any, rows: Any, norm: Any, room: Any) -> Any:
    return {types.int8: _no_powers, types.int16: _squares}.get(powers.dtype, _any_power)


def _no_powers(powers: Any, row: int, rows: int, norm: bool, room: Any) -> Any:
    return (), vec.splat(room.dtype.type(-1))


def _squares(powers: Any, row: int, rows: int, norm: bool, room: Any) -> Any:
    size = room.dtype.type(powers[0])
    return (vec.splat(room.dtype.type(1) / size),), vec.splat(-size)


def _any_power(powers: Any, row: int, rows: int, norm: bool, room: Any) -> Any:
    lanes = vec.lanes(room)
    for r in range(lanes):
        c = power_at(powers, row + min(r, rows - 1))
        scale, factor, base, level = _numbers(c, norm)
        room[r], room[lanes + r], room[2 * lanes + r], room[3 * lanes + r] = scale, factor, base, level
    rule = vec.load(room, 0), vec.load(room, lanes), vec.load(room, 2 * lanes)
    return rule, vec.load(room, 3 * lanes)


@strict_helper
def power_at(powers: Any, row: int) -> Any:
    """c of a row, from an array of doubles."""
    return powers[row if powers.size > 1 else 0]


@strict_helper
def _numbers(c: float, norm: bool) -> tuple[float, float, float, float]:
    """Scale, factor and base of a rule, and the level to start from."""
    if norm:
        return 1.0, 1.0 / c, 0.0, -1.0
    if c > 1.0:  # not for Newton on the level: such a row is solved apart
        return 1.0, 0.0, 0.0, -1.0
    return c, 1.0 - c, 1.0 if c < SOFT else 0.0, 0.0 if c < SOFT else -1.0 / c


def is_steep(powers: Any, row: int) -> bool:
    """Whether a row has c > 1."""
    raise NotImplementedError("for compiled code")


@overload(is_steep, strict=False, jit_options=INLINED)
def _is_steep(powers: Any, row: Any) -> Any:
    if isinstance(powers.dtype, types.Integer):
        return lambda powers, row: False
    return lambda powers, row: power_at(powers, row) > 1.0


def reach_of(rule: Any, level: Any) -> Any:
    """How far below the largest score of a row entries may have mass, at this level, by lanes: numbers ≤ 0."""
    raise NotImplementedError("for compiled code")


@overload(reach_of, strict=False, jit_options=INLINED)
def _reach_of(rule: Any, level: Any) -> Any:
    return _reach_by_logarithms if len(rule) == 3 else lambda rule, level: level


def _reach_by_logarithms(rule: Any, level: Any) -> Any:
    scale, base = rule[0], rule[2]
    sparse = scale > 0.0
    reach = vec.select(base > 0.5, 1.00001 / vec.select(sparse, scale, 1.0), 0.0)
    return vec.select(sparse, level - reach, -np.inf)


def offset_of(rule: Any, level: Any) -> Any:
    """A = τ + 1/scale of a level, in double."""
    raise NotImplementedError("for compiled code")


@overload(offset_of, strict=False, jit_options=INLINED)
def _offset_of(rule: Any, level: Any) -> Any:
    return (_offset_one, _offset_scaled, None, _offset_based)[len(rule)]


def _offset_one(rule: Any, level: Any) -> Any:
    return vec.widen(level) + 1.0


def _offset_scaled(rule: Any, level: Any) -> Any:
    return vec.widen(level) + 1.0 / vec.widen(rule[0])


def _offset_based(rule: Any, level: Any) -> Any:
    return vec.widen(level) + vec.select(vec.widen(rule[2]) > 0.5, 0.0, 1.0 / vec.widen(rule[0]))


def scale_of(rule: Any, like: Any) -> Any:
    """c of entmax in double, for a rule of it."""
    raise NotImplementedError("for compiled code")


@overload(scale_of, strict=False, jit_options=INLINED)
def _scale_of(rule: Any, like: Any) -> Any:
    if len(rule) == 0:
        return lambda rule, like: like * 0.0 + 1.0
    return lambda rule, like: vec.widen(rule[0])
