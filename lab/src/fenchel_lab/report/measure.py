"""Measuring on a map what theory predicts about it, and telling what was measured."""

from __future__ import annotations

from collections.abc import Callable


def first(condition: Callable[[float], bool], low: float, high: float) -> float | None:
    """The smallest x in [low, high] from which on a condition is true, by bisection; None if there is none.

    Example:
        >>> round(first(lambda x: x * x >= 2, 0.0, 4.0), 12), first(lambda x: x > 9, 0.0, 4.0)
        (1.414213562373, None)
    """
    if condition(low):
        return low
    if not condition(high):
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if condition(middle) else (middle, high)
    return high


def spread(mean: float, deviation: float) -> str:
    """A mean and its standard deviation, in words.

    Example:
        >>> spread(91.234, 0.56), spread(91.234, 0.0)
        ('91.2 ± 0.6', '91.2')
    """
    return f"{mean:.1f} ± {deviation:.1f}" if deviation else f"{mean:.1f}"
