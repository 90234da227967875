"""The clock: contestants take turns, each within its budget of time, and the median of many runs counts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Call = Callable[[], object]
"""One run of a contestant."""

LEAST_RUNS = 3
"""However slow a contestant is."""

LEAST_SECONDS = 2e-4
"""A shorter call is repeated to this length for one reading of the clock."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median and the quartiles of some runs."""

    median: float
    lower: float
    upper: float
    runs: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summarise runs.

        Example:
            >>> Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
            Timing(median=3.0, lower=2.0, upper=4.0, runs=5)
        """
        if len(seconds) < 2:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, lower, upper, len(seconds))


@dataclass(frozen=True)
class Measured:
    """What one case gave: times, and bytes of memory where these were measured, by contestant."""

    case: str
    timings: dict[str, Timing]
    memory: dict[str, int]

    def ratio(self, of: str, against: str) -> float:
        """The ratio of two medians."""
        return self.timings[of].median / self.timings[against].median


def take_turns(
    calls: Mapping[str, Call],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[float], object] | None = None,
) -> dict[str, Timing]:
    """Time contestants in interleaved rounds until each has used its seconds and run at least three times.

    Every round begins with another contestant, so that none always follows the same one.

    Args:
        calls: one run of each contestant, by name.
        seconds: the budget of each contestant.
        clock: seconds of a clock that does not go back.
        progress: called with the share of all budgets that is used.
    """
    repeats = {name: _warm(call, clock) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    waiting = list(calls)
    while waiting:
        for name in waiting:
            used = _time(calls[name], repeats[name], clock)
            times[name].append(used / repeats[name])
            spent[name] += used
        waiting = [name for name in waiting if spent[name] < seconds or len(times[name]) < LEAST_RUNS]
        waiting = waiting[1:] + waiting[:1]
        if progress is not None:
            progress(statistics.fmean(_share(spent[name], seconds, len(times[name])) for name in calls))
    return {name: Timing.of(values) for name, values in times.items()}


def _share(spent: float, seconds: float, runs: int) -> float:
    """How much of its turn a contestant has had."""
    return min(spent / seconds if seconds else 1.0, runs / LEAST_RUNS, 1.0)


def _warm(call: Call, clock: Callable[[], float]) -> int:
    """Call twice without counting, and return how many calls make one reading; the first may compile kernels."""
    _time(call, 1, clock)
    used = _time(call, 1, clock)
    return max(1, math.ceil(LEAST_SECONDS / used)) if used > 0 else 1


def _time(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return clock() - start
