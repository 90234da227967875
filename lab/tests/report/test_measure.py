"""Bisection for the point where a condition becomes true."""

import math

import pytest

from fenchel_lab.report.measure import first


@pytest.mark.parametrize("edge", [1e-6, 0.1, math.pi, 31.999])
def test_the_edge_is_found_to_rounding(edge: float) -> None:
    found = first(lambda x: x >= edge, 0.0, 32.0)
    assert found == pytest.approx(edge, abs=1e-14)
    assert found is not None
    assert found >= edge


def test_true_from_the_start_is_the_start_and_never_is_none() -> None:
    assert first(lambda x: True, 2.0, 3.0) == 2.0
    assert first(lambda x: False, 2.0, 3.0) is None
