"""What is measured: inputs, contestants and the goals that they must reach.

A workload is data. Its first contestant is what all are compared with; a case gives the inputs that every contestant is
called with; a goal bounds a ratio, the memory or the seconds of one contestant.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True)
class Contestant:
    """A function of a case's inputs.

    Args:
        name: as tables show it.
        function: called with the inputs; None where it is not to be had.
        missing: then, one line that says so and what to do.
    """

    name: str
    function: Callable[..., Tensor] | None
    missing: str = ""


@dataclass(frozen=True)
class Case:
    """Inputs that contestants are called with.

    Args:
        label: as tables show it.
        inputs: makes them, the same at every call.
        options: keyword arguments, the same for all contestants.
        backward: measure the gradient of every floating-point input too.
        grad: whether gradients are enabled at all.
        small: makes small inputs that warm everything up; with these, peak memory is measured too.
        rows: the number that a call works on; tables then show rows per second too.
    """

    label: str
    inputs: Callable[[], tuple[Tensor, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = True
    grad: bool = True
    small: Callable[[], tuple[Tensor, ...]] | None = None
    rows: int = 0


Statistic = Literal["geometric mean", "largest", "memory", "seconds"]


@dataclass(frozen=True)
class Goal:
    """A bound: on a ratio of medians between two contestants, on bytes of memory, or on seconds.

    Args:
        of: the contestant that must reach it.
        at_most: the bound, a ratio, bytes or seconds.
        against: the contestant that it is compared with; none for memory and seconds.
        statistic: of the ratios, the memory or the seconds of all cases.
        cases: the labels of the cases that count; all if not given.
    """

    of: str
    at_most: float
    against: str = ""
    statistic: Statistic = "geometric mean"
    cases: tuple[str, ...] = ()

    def covers(self, case: str) -> bool:
        """Whether a case counts."""
        return not self.cases or case in self.cases

    def reduce(self, values: Sequence[float]) -> float:
        """One number of the values of all cases."""
        return statistics.geometric_mean(values) if self.statistic == "geometric mean" else max(values)


@dataclass(frozen=True)
class Workload:
    """Contestants, what they are given, and what must come out.

    Args:
        name: as a user types it.
        title: as tables show it.
        contestants: the first is what all are compared with.
        cases: what they are called with.
        goals: what must be reached.
        environment: variables that the process must be started with; it runs in one of its own if they differ.
        stopwatch: contestants are called once and return their seconds; tables show these, not ratios.
    """

    name: str
    title: str
    contestants: Sequence[Contestant]
    cases: Sequence[Case]
    goals: Sequence[Goal]
    environment: Mapping[str, str] = field(default_factory=dict)
    stopwatch: bool = False

    @property
    def present(self) -> list[Contestant]:
        """The contestants that can be run."""
        return [each for each in self.contestants if each.function is not None]

    def case(self, label: str) -> Case:
        """The case with a label."""
        return next(each for each in self.cases if each.label == label)

    def contestant(self, name: str) -> Contestant:
        """The contestant of a name."""
        return next(each for each in self.contestants if each.name == name)
