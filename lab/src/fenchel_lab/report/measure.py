"""Measuring on a map what theory predicts about it, and telling what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from scipy import stats


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


def over_seeds(scores: Sequence[float], unit: float = 1.0) -> tuple[float, float]:
    """Mean and standard deviation of scores, one per seed, times ``unit`` (100 for percent); one score deviates by 0.

    Example:
        >>> over_seeds([0.25, 0.5, 0.75], 100), over_seeds([2.0])
        ((50.0, 25.0), (2.0, 0.0))
    """
    return unit * statistics.fmean(scores), unit * statistics.stdev(scores) if len(scores) > 1 else 0.0


def spread(mean: float, deviation: float) -> str:
    """A mean and its standard deviation, unless that is 0, as text.

    Example:
        >>> spread(91.234, 0.56), spread(91.234, 0.0)
        ('91.2 ± 0.6', '91.2')
    """
    return f"{mean:.1f} ± {deviation:.1f}" if deviation else f"{mean:.1f}"


def spread_over_seeds(scores: Sequence[float], unit: float = 1.0, digits: int = 2) -> str:
    """Mean and standard deviation of scores as text, or the score of the only seed.

    Example:
        >>> spread_over_seeds([0.25, 0.5, 0.75], 100), spread_over_seeds([2.0])
        ('50.00 ± 25.00', '2.00')
    """
    mean, deviation = over_seeds(scores, unit)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}" if len(scores) > 1 else f"{mean:.{digits}f}"


def half_width(scores: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean (Student's t); NaN for fewer than two scores.

    Example:
        >>> round(half_width([1.0, 2.0, 3.0]), 3), half_width([1.0])
        (2.484, nan)
    """
    count = len(scores)
    if count < 2:
        return math.nan
    return float(stats.t.ppf(0.975, count - 1)) * statistics.stdev(scores) / math.sqrt(count)


def with_interval(scores: Sequence[float], unit: float = 1.0, digits: int = 1) -> str:
    """The mean of scores and half the width of its 95 % confidence interval as text; "–" without scores.

    Example:
        >>> with_interval([0.25, 0.5, 0.75], 100), with_interval([0.5], 100), with_interval([])
        ('50.0 ± 62.1', '50.0', '–')
    """
    if not scores:
        return "–"
    mean, width = unit * statistics.fmean(scores), unit * half_width(scores)
    return f"{mean:.{digits}f}" if math.isnan(width) else f"{mean:.{digits}f} ± {width:.{digits}f}"


ENOUGH = 3
"""Runs, of seeds of their own, without which nothing is said of a claim."""


def judged(holds: str, runs: int) -> str:
    """What is said of a claim after so many runs.

    Example:
        >>> judged("yes", 3), judged("yes", 2)
        ('yes', 'too few runs')
    """
    return holds if runs >= ENOUGH else "too few runs"


def is_higher(differences: Sequence[float]) -> str:
    """What differences say of the claim that their mean is above 0, by its 95 % confidence interval.

    Example:
        >>> is_higher([1.0, 1.1, 0.9]), is_higher([-1.0, 1.0, 0.5]), is_higher([-1.0, -1.1, -0.9]), is_higher([1.0])
        ('yes', 'not shown', 'no', 'too few runs')
    """
    if not differences:
        return judged("", 0)
    mean, width = statistics.fmean(differences), half_width(differences)
    return judged("yes" if mean > width else "no" if mean < -width else "not shown", len(differences))


def is_rarer(failed: int, runs: int, others_failed: int, others: int) -> bool:
    """Whether a method's runs fail more rarely than those of others (Fisher's exact test, one-sided, at 5 %).

    Example:
        >>> is_rarer(0, 10, 5, 30), is_rarer(0, 10, 12, 30)
        (False, True)
    """
    table = [[failed, runs - failed], [others_failed, others - others_failed]]
    return bool(stats.fisher_exact(table, alternative="less").pvalue < 0.05)


class ScoresInPercent:
    """Base of results with ``scores``, shares in [0, 1], one per seed: their mean and standard deviation in percent."""

    scores: Sequence[float]

    @property
    def mean(self) -> float:
        """Over seeds, in percent."""
        return over_seeds(self.scores, 100)[0]

    @property
    def deviation(self) -> float:
        """Over seeds, in percent; 0 for one."""
        return over_seeds(self.scores, 100)[1]
