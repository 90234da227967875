"""Entropies, losses and margins of two classes beside closed forms."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from fenchel import Gini, Hard, Norm, Regularizer, Shannon, Tsallis
from fenchel_lab.chapters.two_classes import one_hot_from, zero_loss_from
from fenchel_lab.drawing import style
from fenchel_lab.report import Run

MARGINS = [
    (Tsallis(1.5), 2.0),
    (Gini(), 1.0),
    (Tsallis(3.0), 0.5),
    (Norm(2.0), 1.0),
    (Norm(5.0), 1.0),
    (Norm(math.inf), 1.0),
    (Hard(), 0.0),
    (2.0 * Gini(), 2.0),
]


@pytest.mark.parametrize(("omega", "margin"), MARGINS, ids=str)
def test_loss_vanishes_and_map_is_one_hot_from_the_margin_on(omega: Regularizer, margin: float) -> None:
    # A loss that arrives smoothly rounds to zero a little before its margin.
    assert zero_loss_from(omega) == pytest.approx(margin, abs=5e-5)
    assert one_hot_from(omega) == pytest.approx(margin, abs=1e-7)


def test_cross_entropy_has_no_margin() -> None:
    assert zero_loss_from(Shannon()) is None
    assert one_hot_from(Shannon()) is None


def test_measured_margins_stand_beside_the_papers(chapter: Callable[[str], Run]) -> None:
    result = chapter("two_classes").result
    assert result is not None
    [table] = result.tables
    rows = {row[0]: list(row[2:]) for row in table.rows}
    expected = {
        "Shannon": None,
        "Tsallis 1.5": 2.0,
        "Gini": 1.0,
        "Norm 2": 1.0,
        "Norm 5": 1.0,
        "Norm ∞": 1.0,
        "Hard": 0.0,
    }
    assert list(rows) == list(expected)
    for name, margin in expected.items():
        assert rows[name] == ["none" if margin is None else f"{margin:.4f}"] * 3


def curve(run: Run, panel: int, colour: str) -> tuple[np.ndarray, np.ndarray]:
    assert run.result is not None
    axes = run.result.figures[0].drawing.axes[panel]
    [line] = [line for line in axes.lines if line.get_color() == colour and len(line.get_xdata()) > 1]
    x, y = line.get_data()
    return np.asarray(x), np.asarray(y)


def shannon(p: np.ndarray) -> np.ndarray:
    q = np.clip(p, 1e-300, 1)
    return -p * np.log(q)


@pytest.mark.parametrize(
    ("panel", "colour", "closed"),
    [
        (0, style.PALETTE[0], lambda p: shannon(p) + shannon(1 - p)),
        (0, style.PALETTE[1], lambda p: (1 - p**1.5 - (1 - p) ** 1.5) / 0.75),
        (0, style.PALETTE[2], lambda p: p * (1 - p)),
        (0, style.INK, lambda p: 0 * p),
        (1, style.PALETTE[3], lambda p: 1 - np.hypot(p, 1 - p)),
        (1, style.PALETTE[4], lambda p: 1 - (p**5 + (1 - p) ** 5) ** 0.2),
        (1, style.PALETTE[5], lambda p: np.minimum(p, 1 - p)),
        (2, style.PALETTE[0], lambda s: np.log1p(np.exp(-s))),
        (2, style.PALETTE[2], lambda s: np.where(s >= 1, 0, np.where(s <= -1, -s, (1 - s) ** 2 / 4))),
        (2, style.INK, lambda s: np.maximum(-s, 0)),
        (3, style.PALETTE[5], lambda s: np.maximum(np.maximum(-s, (1 - s) / 2), 0)),
    ],
)
def test_curves_are_the_closed_forms(
    panel: int, colour: str, closed: Callable[[np.ndarray], np.ndarray], chapter: Callable[[str], Run]
) -> None:
    x, y = curve(chapter("two_classes"), panel, colour)
    np.testing.assert_allclose(y, closed(x), atol=1e-12)


def test_smoothed_maxima_have_their_closed_forms(chapter: Callable[[str], Run]) -> None:
    result = chapter("two_classes").result
    assert result is not None
    value, slope = result.figures[1].drawing.axes[:2]
    drawn = {line.get_label(): line.get_xydata() for line in value.lines}
    t = drawn["softmax"][:, 0]
    inside = np.abs(t) < 1
    np.testing.assert_allclose(drawn["softmax"][:, 1], np.logaddexp(t, 0), atol=1e-12)
    np.testing.assert_allclose(
        drawn["sparsemax"][:, 1], np.where(inside, (t + 1) ** 2 / 4, np.maximum(t, 0)), atol=1e-12
    )
    np.testing.assert_allclose(drawn["argmax"][:, 1], np.maximum(t, 0))
    ramp = slope.lines[2].get_ydata()
    np.testing.assert_allclose(ramp, np.clip((t + 1) / 2, 0, 1), atol=1e-12)
