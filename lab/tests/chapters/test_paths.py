"""Regularization paths beside closed forms."""

import math
from collections.abc import Callable
from itertools import combinations

import cvxpy
import numpy as np
import pytest
import torch

from fenchel_lab.chapters.paths import BONUS, MAPS, TABULATED, THETA, hard_until, sequential_path
from fenchel_lab.report import Run

SCORES = np.array([1.0716, -1.1221, -0.3288, 0.3368, 0.0425])
LEAD = 1.0716 - 0.3368


def sparsemax(scores: np.ndarray) -> np.ndarray:
    """The projection onto the simplex by the sorted threshold (Martins & Astudillo, 2016, algorithm 1)."""
    ordered = np.sort(scores)[::-1]
    sizes = np.arange(1, len(scores) + 1)
    size = sizes[1 + sizes * ordered > ordered.cumsum()].max()
    return np.clip(scores - (ordered[:size].sum() - 1) / size, 0, None)


def infinity_normmax(scores: np.ndarray) -> np.ndarray:
    """Uniform over the best k scores, for the best k."""
    best = np.argsort(-scores)
    size = max(range(1, len(scores) + 1), key=lambda k: scores[best[:k]].mean() - 1 / k)
    return np.isin(np.arange(len(scores)), best[:size]) / size


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def argmax(scores: np.ndarray) -> np.ndarray:
    return (scores == scores.max()).astype(float)


ORACLES = {
    "1-entmax (softmax)": softmax,
    "2-entmax (sparsemax)": sparsemax,
    "∞-normmax": infinity_normmax,
    "argmax": argmax,
}


def test_the_scores_are_the_papers() -> None:
    assert THETA.tolist() == SCORES.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_lines_are_the_closed_form(name: str, chapter: Callable[[str], Run]) -> None:
    result = chapter("paths").result
    assert result is not None
    [axes] = [axes for axes in result.figures[0].drawing.axes if axes.get_title("left") == name]
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
    temperatures = np.asarray(lines[0].get_xdata())
    drawn = np.stack([np.asarray(line.get_ydata()) for line in lines], -1)
    expected = np.stack([ORACLES[name](SCORES / t) for t in temperatures])[:, np.argsort(-SCORES)]
    np.testing.assert_allclose(drawn, expected, atol=1e-12)


def test_every_map_has_a_panel_with_a_line_a_choice(chapter: Callable[[str], Run]) -> None:
    result = chapter("paths").result
    assert result is not None
    panels = result.figures[0].drawing.axes
    assert [axes.get_title("left") for axes in panels] == [name for name, _ in MAPS]
    for axes in panels:
        assert sum(len(line.get_xdata()) > 2 for line in axes.lines) == len(SCORES)


def test_supports_are_counted_right(chapter: Callable[[str], Run]) -> None:
    result = chapter("paths").result
    assert result is not None
    counted = {row[0]: list(row[1:]) for row in result.tables[0].rows}
    for name, oracle in ORACLES.items():
        assert counted[name] == [int((oracle(SCORES / t) > 0).sum()) for t in TABULATED]


def test_one_hot_up_to_the_lead_over_the_margin(chapter: Callable[[str], Run]) -> None:
    margins = {
        "1-entmax (softmax)": math.inf,
        "1.5-entmax": 2.0,
        "2-entmax (sparsemax)": 1.0,
        "4-entmax": 1 / 3,
        "2-normmax": 1.0,
        "5-normmax": 1.0,
        "∞-normmax": 1.0,
        "argmax": 0.0,
    }
    result = chapter("paths").result
    assert result is not None
    for name, paper, measured in result.tables[1].rows:
        assert paper == measured
        if name == "argmax":
            assert measured == "always"
        elif name == "1-entmax (softmax)":
            assert measured == "never"
        else:
            assert float(measured) == pytest.approx(LEAD / margins[str(name)], abs=1e-4)


@pytest.mark.parametrize("factor", [0.99, 1.01, 8.0])
def test_sequential_subsets_solve_the_quadratic_program_over_all_subsets(factor: float) -> None:
    edge = hard_until(2, BONUS)
    vertices = np.array([[float(i in chosen) for i in range(5)] for chosen in combinations(range(5), 2)])
    values = vertices @ SCORES + BONUS * (vertices[:, 1:] * vertices[:, :-1]).sum(-1)
    weights = cvxpy.Variable(len(vertices), nonneg=True)
    score = weights @ (values / (factor * edge)) - 0.5 * cvxpy.sum_squares(weights @ vertices)
    cvxpy.Problem(cvxpy.Maximize(score), [cvxpy.sum(weights) == 1]).solve(solver=cvxpy.CLARABEL)
    found = sequential_path(2, BONUS, torch.tensor([factor * edge], dtype=torch.float64))[0]
    np.testing.assert_allclose(found, weights.value @ vertices, atol=1e-5)
    assert (sorted(set(found.tolist())) == [0.0, 1.0]) == (factor < 1)
