"""Running a workload: prepare every contestant, let them take turns, weigh their memory, judge the goals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fenchel.progress import Progress
from fenchel_lab.bench import apart, memory
from fenchel_lab.bench.measure import Call, Measured, Timing, take_turns
from fenchel_lab.bench.targets import Target
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload


@dataclass(frozen=True)
class Verdict:
    """A goal beside what was measured; ``value`` is None where a contestant was missing."""

    goal: Goal
    value: float | None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None if nobody knows."""
        return None if self.value is None else self.value <= self.goal.at_most


@dataclass(frozen=True)
class Outcome:
    """A workload, all that was measured of it, and the instruction set that it ran with."""

    workload: Workload
    measured: Sequence[Measured]
    target: str = ""

    @property
    def missing(self) -> list[str]:
        """What to say of contestants that could not be run, each line once."""
        return list(dict.fromkeys(each.missing for each in self.workload.contestants if each.function is None))

    @property
    def verdicts(self) -> list[Verdict]:
        """Every goal, judged."""
        return [Verdict(goal, self._reached(goal)) for goal in self.workload.goals]

    def _reached(self, goal: Goal) -> float | None:
        values: list[float] = []
        for each in self.measured:
            if not goal.covers(each.case):
                continue
            if goal.statistic == "memory":
                values += [each.memory[goal.of]] if goal.of in each.memory else []
            elif goal.statistic == "seconds":
                values += [each.timings[goal.of].median] if goal.of in each.timings else []
            elif {goal.of, goal.against} <= each.timings.keys():
                values.append(each.ratio(goal.of, goal.against))
        return goal.reduce(values) if values else None


def run_for(workload: Workload, target: Target, seconds: float = 1.0, progress: Progress | None = None) -> Outcome:
    """Measure every case of a workload with one instruction set, in a process of its own where it needs one."""
    environment = {**target.environment, **workload.environment}
    if apart.holds(environment):
        return replace(run(workload, seconds, progress), target=target.name)
    return Outcome(workload, apart.measure(workload, seconds, progress, environment), target.name)


def run(
    workload: Workload,
    seconds: float = 1.0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    weigh: Callable[[Workload, Case, Contestant], int | None] = memory.peak,
) -> Outcome:
    """Measure every case of a workload.

    Args:
        workload: what to measure.
        seconds: for each contestant of each case; slow ones run at least three times.
        progress: called as the work advances.
        clock: seconds of a clock that does not go back.
        weigh: measures the peak memory of a contestant in a case that asks for it.
    """
    contestants = workload.present
    if len(contestants) < 2:
        return Outcome(workload, [])
    measured: list[Measured] = []
    for number, case in enumerate(workload.cases):

        def tell(share: float, number: int = number, case: Case = case) -> None:
            if progress is not None:
                progress((number + share) / len(workload.cases), case.label)

        tell(0.0)
        inputs = prepare(case)
        with torch.set_grad_enabled(case.grad):
            calls = {each.name: call(each, contestants[0], case, inputs) for each in contestants}
            if workload.stopwatch:
                timings = {name: Timing.of([float(torch.as_tensor(once()))]) for name, once in calls.items()}
            else:
                timings = take_turns(calls, seconds, clock, tell)
        weights = [(each.name, weigh(workload, case, each)) for each in contestants] if case.small is not None else []
        measured.append(Measured(case.label, timings, {name: size for name, size in weights if size is not None}))
    if progress is not None:
        progress(1.0)
    return Outcome(workload, measured)


def prepare(case: Case, small: bool = False) -> tuple[Tensor, ...]:
    """The inputs of a case, as leaves where their gradients are measured."""
    make = case.small if small and case.small is not None else case.inputs
    return tuple(each.requires_grad_(case.backward and each.is_floating_point()) for each in make())


def call(contestant: Contestant, first: Contestant, case: Case, inputs: Sequence[Tensor]) -> Call:
    """One run of a contestant: forward, and backward along a fixed direction of the shape of the first's result."""
    function, reference = contestant.function, first.function
    assert function is not None
    assert reference is not None
    if not case.backward:
        return lambda: function(*inputs, **case.options)
    leaves = [each for each in inputs if each.requires_grad]
    shape = reference(*(each.detach().to("meta") for each in inputs), **case.options).shape
    direction = torch.empty(shape).normal_(generator=torch.Generator().manual_seed(4)) if shape else None
    return lambda: torch.autograd.grad(function(*inputs, **case.options), leaves, direction)
