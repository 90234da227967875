"""Running a workload: what is timed, what is weighed, and how goals are judged."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel_lab.bench import Case, Contestant, Goal, Measured, Outcome, Timing, Workload, run


def timing(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds, 3)


def ones() -> tuple[Tensor, ...]:
    return torch.ones(2, 3), torch.zeros(2, dtype=torch.long)


class Spy(torch.autograd.Function):
    """Takes its time in both directions, and remembers the gradients that came back."""

    clock: Any
    seen: list[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        if not x.is_meta:
            Spy.clock.now += factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Spy.clock.now += 10 * ctx.factor
        Spy.seen.append(grad)
        return grad, None


def spies(clock: Any) -> list[Contestant]:
    Spy.clock, Spy.seen = clock, []
    return [
        Contestant("first", lambda x, y: Spy.apply(x, 1.0)),
        Contestant("second", lambda x, y: Spy.apply(x, 2.0)),
        Contestant("absent", None, "absent is absent"),
    ]


def test_forward_and_backward_are_timed_along_one_direction(clock: Any) -> None:
    goals = [Goal("second", 3.0, "first"), Goal("absent", 1.0, "first"), Goal("first", 1.0, "absent")]
    outcome = run(Workload("w", "", spies(clock), [Case("c", ones)], goals), 0.0, clock=clock)
    (measured,) = outcome.measured
    assert measured.timings == {"first": timing(11.0), "second": timing(22.0)}
    assert len(Spy.seen) == 2 * 5
    assert all(torch.equal(each, Spy.seen[0]) for each in Spy.seen)
    assert Spy.seen[0].std() > 0
    assert [verdict.value for verdict in outcome.verdicts] == [2.0, None, None]
    assert [verdict.holds for verdict in outcome.verdicts] == [True, None, None]
    assert outcome.missing == ["absent is absent"]


@pytest.mark.parametrize("grad", [True, False])
def test_forward_only_is_that_with_gradients_on_or_off(clock: Any, grad: bool) -> None:
    modes: list[tuple[bool, bool]] = []

    def look(x: Tensor, y: Tensor) -> Tensor:
        modes.append((torch.is_grad_enabled(), x.requires_grad))
        return x

    contestants = [*spies(clock), Contestant("look", look)]
    outcome = run(Workload("w", "", contestants, [Case("c", ones, backward=False, grad=grad)], []), 0.0, clock=clock)
    assert outcome.measured[0].timings["second"] == timing(2.0)
    assert Spy.seen == []
    assert set(modes) == {(grad, False)}
    assert torch.is_grad_enabled()


def test_a_contestant_with_a_stopwatch_is_called_once_and_believed(clock: Any) -> None:
    contestants = [Contestant("a", lambda: torch.tensor(0.5)), Contestant("b", lambda: torch.tensor(4.0))]
    goals = [Goal("b", 3.0, statistic="seconds"), Goal("a", 0.5, statistic="seconds")]
    case = Case("c", tuple, backward=False)
    outcome = run(Workload("w", "", contestants, [case], goals, stopwatch=True), 1.0, clock=clock)
    assert outcome.measured[0].timings == {"a": Timing(0.5, 0.5, 0.5, 1), "b": Timing(4.0, 4.0, 4.0, 1)}
    assert [verdict.value for verdict in outcome.verdicts] == [4.0, 0.5]
    assert [verdict.holds for verdict in outcome.verdicts] == [False, True]


def test_a_scalar_needs_no_direction(clock: Any) -> None:
    contestants = [Contestant("a", lambda x, y: x.sum()), Contestant("b", lambda x, y: x.mean())]
    outcome = run(Workload("w", "", contestants, [Case("c", ones)], []), 0.0)
    assert outcome.measured[0].timings["b"].median > 0


def test_options_reach_every_contestant(clock: Any) -> None:
    seen: list[bool] = []

    def function(x: Tensor, y: Tensor, *, flag: bool) -> Tensor:
        seen.append(flag)
        return x

    contestants = [Contestant("a", function), Contestant("b", function)]
    run(Workload("w", "", contestants, [Case("c", ones, {"flag": True})], []), 0.0, clock=clock)
    assert len(seen) > 6
    assert all(seen)


def test_memory_is_weighed_where_a_case_asks_for_it(clock: Any) -> None:
    asked: list[tuple[str, str, str]] = []

    def weigh(workload: Workload, case: Case, contestant: Contestant) -> int | None:
        asked.append((workload.name, case.label, contestant.name))
        return 100 if contestant.name == "second" else None

    cases = [Case("without", ones), Case("with", ones, small=ones)]
    goals = [Goal("second", bound, statistic="memory") for bound in (99, 100)] + [Goal("first", 1, statistic="memory")]
    outcome = run(Workload("w", "", spies(clock), cases, goals), 0.0, clock=clock, weigh=weigh)
    assert asked == [("w", "with", "first"), ("w", "with", "second")]
    assert [each.memory for each in outcome.measured] == [{}, {"second": 100}]
    assert [verdict.holds for verdict in outcome.verdicts] == [False, True, None]


def test_one_contestant_alone_is_not_measured(clock: Any) -> None:
    first, _, absent = spies(clock)
    outcome = run(Workload("w", "", [first, absent], [Case("c", ones)], [Goal("absent", 1.0, "first")]), clock=clock)
    assert outcome.measured == []
    assert outcome.verdicts[0].holds is None
    assert clock.now == 0


def test_goals_are_judged_by_their_statistic_and_cases() -> None:
    measured = [
        Measured("one", {"a": timing(1.0), "b": timing(2.0)}, {"b": 5}),
        Measured("two", {"a": timing(1.0), "b": timing(8.0)}, {"b": 7}),
    ]
    goals = {
        Goal("b", 4.0, "a"): 4.0,
        Goal("b", 7.9, "a", "largest"): 8.0,
        Goal("b", 2.0, "a", "largest", ("one",)): 2.0,
        Goal("b", 7, statistic="memory"): 7.0,
        Goal("b", 5, statistic="memory", cases=("one",)): 5.0,
        Goal("a", 0.2, "b", cases=("two",)): 0.125,
    }
    verdicts = Outcome(Workload("w", "", [], [], list(goals)), measured).verdicts
    assert [verdict.value for verdict in verdicts] == pytest.approx(list(goals.values()))
    assert [verdict.holds for verdict in verdicts] == [True, False, True, True, True, True]


def test_progress_names_the_case_and_ends_at_one(clock: Any) -> None:
    seen: list[tuple[float, str]] = []
    cases = [Case("one", ones), Case("two", ones)]
    run(Workload("w", "", spies(clock), cases, []), 0.0, lambda f, note="": seen.append((f, note)), clock)
    assert [fraction for fraction, _ in seen] == sorted(fraction for fraction, _ in seen)
    assert seen[0] == (0.0, "one")
    assert (0.5, "two") in seen
    assert seen[-1][0] == 1.0
