"""The chapter on mixed distributions: John's hours, bits, and shares of samples."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fenchel import mixed
from fenchel_lab.chapters.faces import a_day, duration
from fenchel_lab.report import Run


@pytest.mark.parametrize("hours", [(15.0, 8.0), (13.0, 8.0, 2.0)])
def test_john_is_where_the_talk_says(hours: tuple[float, ...]) -> None:
    y = a_day(*hours, way=1.0)
    told = 24 * y.face_log_prob(mixed.faces(len(hours))).exp()
    torch.testing.assert_close(told[: len(hours)], torch.tensor(hours, dtype=torch.float64))
    assert told[len(hours) :].sum().item() == pytest.approx(1)


def test_durations_are_read_as_a_clock() -> None:
    assert [duration(p) for p in (13 / 24, 1 / 24, 42 / 1440, 1e-4)] == ["13 h", "1 h", "42 min", "9 s"]


def test_curves_and_ends_are_those_of_the_distributions(chapter: Callable[[str], Run]) -> None:
    """The area under the curve and both ends make one."""
    result = chapter("faces").result
    assert result is not None
    panels = result.figures[2].drawing.axes
    assert len(panels) == 4
    for axes in panels:
        t, density = (np.asarray(values) for values in axes.lines[0].get_data())
        ends = np.asarray(axes.lines[1].get_data()[1])
        assert np.trapezoid(density, t) + ends.sum() == pytest.approx(1, abs=0.01)


def test_no_code_is_longer_than_the_longest(chapter: Callable[[str], Run]) -> None:
    result = chapter("faces").result
    assert result is not None
    *rows, most = result.tables[0].rows
    assert [float(bits) for bits in most[5:]] == [math.log2(3), math.log2(258)]
    lengths = np.array([[float(bits) for bits in row[5:]] for row in rows])
    assert (lengths <= np.array([math.log2(3), math.log2(258)]) + 1e-9).all()
    assert lengths[-2:].diagonal() == pytest.approx([math.log2(3), math.log2(258)])


def test_samples_are_counted_as_told(chapter: Callable[[str], Run]) -> None:
    result = chapter("faces").result
    assert result is not None
    rows = result.tables[1].rows
    assert sum(float(row[1]) for row in rows) == pytest.approx(1, abs=5e-5)
    assert max(abs(float(row[3])) for row in rows) < 4
