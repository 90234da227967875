"""The clock: budgets are kept, turns are taken, medians and quartiles are right."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenchel_lab.bench.measure import LEAST_SECONDS, Timing, take_turns


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=30))
def test_timing_is_the_median_and_the_quartiles(seconds: list[float]) -> None:
    timing = Timing.of(seconds)
    expected = np.percentile(seconds, [25, 50, 75])
    assert [timing.lower, timing.median, timing.upper] == pytest.approx(expected)
    assert timing.runs == len(seconds)


def test_every_contestant_uses_its_budget_and_no_more_than_a_run_beyond(clock: Any) -> None:
    lengths = {"quick": 0.01, "middling": 0.07, "slow": 2.0}
    timings = take_turns({name: clock.takes(length, name) for name, length in lengths.items()}, 1.0, clock)
    for name, length in lengths.items():
        assert timings[name].median == pytest.approx(length)
        assert timings[name].lower == pytest.approx(timings[name].upper)
    assert timings["quick"].runs in (100, 101)  # the sum of a hundred hundredths is not quite one
    assert timings["middling"].runs == 15
    assert timings["slow"].runs == 3


def test_every_call_is_warmed_twice(clock: Any) -> None:
    timings = take_turns({"slow": clock.takes(2.0, "slow"), "quick": clock.takes(0.1, "quick")}, 0.0, clock)
    assert clock.log[:4] == ["slow", "slow", "quick", "quick"]
    assert clock.log.count("slow") == timings["slow"].runs + 2
    assert clock.log.count("quick") == timings["quick"].runs + 2


def test_contestants_take_turns_and_turns_at_being_first(clock: Any) -> None:
    take_turns({name: clock.takes(1.0, name) for name in "abc"}, 4.0, clock)
    assert "".join(clock.log) == "aabbcc" + "abc" + "bca" + "cab" + "abc"


def test_a_short_call_is_repeated_for_one_reading(clock: Any) -> None:
    timing = take_turns({"short": clock.takes(1e-6)}, 10 * LEAST_SECONDS, clock)["short"]
    assert timing.median == pytest.approx(1e-6)
    assert timing.runs in (10, 11)
    assert len(clock.log) == pytest.approx(2 + timing.runs * LEAST_SECONDS / 1e-6, rel=0.02)


def test_a_clock_too_coarse_for_a_call_does_no_harm(clock: Any) -> None:
    assert take_turns({"nothing": clock.takes(0.0)}, 0.0, clock)["nothing"] == Timing(0.0, 0.0, 0.0, 3)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_progress_grows_to_one(clock: Any, seconds: float) -> None:
    seen: list[float] = []
    take_turns({"a": clock.takes(0.1), "b": clock.takes(0.7)}, seconds, clock, seen.append)
    assert seen == sorted(seen)
    assert 0 < seen[0] < 1
    assert seen[-1] == 1.0


def test_a_median_shrugs_off_an_interruption(clock: Any) -> None:
    lengths = iter([0.1] * 7 + [50.0] + [0.1] * 100)

    def call() -> None:
        clock.now += next(lengths)

    timing = take_turns({"disturbed": call}, 60.0, clock)["disturbed"]
    assert timing.median == pytest.approx(0.1)
