"""Bisection for the point where a condition becomes true, and what runs say of a claim."""

import math

import pytest

from fenchel_lab.report.measure import first, is_higher, is_rarer, judged


@pytest.mark.parametrize("edge", [1e-6, 0.1, math.pi, 31.999])
def test_the_edge_is_found_to_rounding(edge: float) -> None:
    found = first(lambda x: x >= edge, 0.0, 32.0)
    assert found == pytest.approx(edge, abs=1e-14)
    assert found is not None
    assert found >= edge


def test_true_from_the_start_is_the_start_and_never_is_none() -> None:
    assert first(lambda x: True, 2.0, 3.0) == 2.0
    assert first(lambda x: False, 2.0, 3.0) is None


def test_nothing_is_said_of_a_claim_after_one_run_or_two() -> None:
    assert {is_higher(differences) for differences in ([], [1.0], [1.0, 1.0])} == {"too few runs"}
    assert is_higher([1.0, 1.0, 1.0]) == "yes"
    assert (judged("no", 2), judged("no", 3)) == ("too few runs", "no")


def test_failures_are_rarer_if_chance_gives_so_few_in_less_than_one_case_of_20() -> None:
    for failed, runs, others_failed, others in ((0, 3, 5, 9), (0, 10, 13, 30), (2, 10, 20, 30), (1, 4, 6, 6)):
        total = failed + others_failed
        ways = sum(math.comb(runs, k) * math.comb(others, total - k) for k in range(failed + 1))
        assert is_rarer(failed, runs, others_failed, others) == (ways < 0.05 * math.comb(runs + others, total))
