"""Saturation of entmax in two classes: measured on the map, predicted by 1/(α−1)."""

from collections.abc import Callable

import numpy as np
import pytest

from fenchel_lab.chapters.saturation import ALPHAS, saturates_at
from fenchel_lab.report import Run


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.7, 2.0, 3.0, 4.0, 10.0])
def test_entmax_saturates_at_one_over_alpha_minus_one(alpha: float) -> None:
    assert saturates_at(alpha) == pytest.approx(1 / (alpha - 1), rel=1e-9)


def test_softmax_does_not_saturate() -> None:
    assert saturates_at(1.0) is None


def test_the_table_has_the_formula_beside_the_measurement(chapter: Callable[[str], Run]) -> None:
    result = chapter("saturation").result
    assert result is not None
    [table] = result.tables
    assert [row[0] for row in table.rows] == [f"{alpha:g}" for alpha in ALPHAS]
    assert list(table.rows[0][1:]) == ["never", "never", "–"]
    for alpha, row in zip(ALPHAS[1:], table.rows[1:], strict=True):
        assert row[1] == row[2] == f"{1 / (alpha - 1):.4f}"
        assert isinstance(row[3], float)
        assert row[3] < 1e-9


def test_curves_are_the_closed_forms_where_there_are_some(chapter: Callable[[str], Run]) -> None:
    result = chapter("saturation").result
    assert result is not None
    [axes] = result.figures[0].drawing.axes
    curves = {line.get_label(): line for line in axes.lines}
    for name, closed in (
        ("α = 1 (softmax)", lambda t: 1 / (1 + np.exp(-t))),
        ("α = 2 (sparsemax)", lambda t: np.clip((1 + t) / 2, 0, 1)),
    ):
        t, p = (np.asarray(values) for values in curves[name].get_data())
        np.testing.assert_allclose(p, closed(t), atol=1e-12)


def test_dots_stand_at_both_ends_of_every_sparse_curve(chapter: Callable[[str], Run]) -> None:
    result = chapter("saturation").result
    assert result is not None
    [axes] = result.figures[0].drawing.axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(np.round(np.asarray(dot.get_xdata()), 6)) for dot in dots] == [
        [-4, 4],
        [-2, 2],
        [-1, 1],
        [-0.333333, 0.333333],
    ]
