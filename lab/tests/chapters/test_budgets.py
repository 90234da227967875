"""Bounds and budgets in pictures: every point obeys its constraint."""

from collections.abc import Callable

import numpy as np
import torch

from fenchel import softmax, sparsemax
from fenchel_lab.chapters.budgets import BUDGETS, TIGHTEST, chosen
from fenchel_lab.chapters.paths import THETA
from fenchel_lab.report import Run


def test_curves_stay_below_the_cap_and_start_at_the_plain_maps(chapter: Callable[[str], Run]) -> None:
    result = chapter("budgets").result
    assert result is not None
    best_first = THETA.sort(descending=True).values
    for axes, plain in zip(result.figures[0].drawing.axes, (sparsemax, softmax), strict=True):
        cap, *curves = (np.asarray(line.get_ydata()) for line in axes.lines)
        values = np.stack(curves)
        assert (values <= cap + 1e-12).all()
        np.testing.assert_allclose(values.sum(0), 1, atol=1e-12)
        np.testing.assert_allclose(values[:, -1], plain(best_first).numpy(), atol=1e-12)
        np.testing.assert_allclose(values[:, 0], TIGHTEST, atol=1e-12)


def test_entries_rise_with_the_budget_to_which_they_sum(chapter: Callable[[str], Run]) -> None:
    result = chapter("budgets").result
    assert result is not None
    [axes] = result.figures[1].drawing.axes
    budget = np.asarray(axes.lines[0].get_xdata())
    values = np.stack([np.asarray(line.get_ydata()) for line in axes.lines])
    np.testing.assert_allclose(values.sum(0), budget, atol=1e-12)
    assert (np.diff(values, axis=1) >= -1e-12).all()
    assert ((values >= 0) & (values <= 1)).all()


def test_the_table_ends_with_everything_chosen(chapter: Callable[[str], Run]) -> None:
    result = chapter("budgets").result
    assert result is not None
    [table] = result.tables
    assert [row[0] for row in table.rows] == [f"{k:g}" for k in BUDGETS]
    assert list(table.rows[-1][1:-2]) == ["1.0000"] * 5
    assert torch.allclose(chosen(torch.tensor([1.0], dtype=torch.float64))[0], sparsemax(THETA))
