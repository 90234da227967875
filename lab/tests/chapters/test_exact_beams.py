"""Exact beams: shares grow while a model learns, and each part of the training goes on from the last."""

from collections.abc import Callable

import pytest

from fenchel_lab.chapters.exact_beams import FULL, SCALED, TOY
from fenchel_lab.report import Run


@pytest.mark.slow
def test_more_beams_are_exact_the_more_was_learned(chapter: Callable[[str], Run]) -> None:
    result = chapter("exact_beams").result
    assert result is not None
    rows = [[float(str(cell).rstrip(" %").replace(",", "")) for cell in row] for row in result.tables[0].rows]
    assert [row[0] for row in rows] == [7_200, 14_400, 21_600]
    assert rows[-1][1] > rows[0][1]
    assert rows[-1][2] > rows[0][2]
    for _, _, exact, single in rows:
        assert single <= exact


def test_sizes_grow_with_the_protocol() -> None:
    assert TOY.hidden <= SCALED.hidden < FULL.hidden
