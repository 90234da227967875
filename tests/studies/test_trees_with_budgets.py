"""Trees with budgets: bounds that hold, and arcs as they are drawn."""

from collections.abc import Callable
from itertools import product

import cvxpy as cp
import numpy as np
import pytest
from matplotlib.patches import Arc as Curve

from fenchel.studies import Run, arcs, style
from fenchel.studies.arcs import Arc
from fenchel.studies.trees_with_budgets import BUDGETS, WORDS, scores, solved


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_word_has_a_head_and_no_head_too_many(budget: int | None) -> None:
    p = solved(scores(), budget)
    np.testing.assert_allclose(p.sum(1).numpy(), 1, atol=1e-7)
    assert p[:, 1:].sum(0).max() <= (len(WORDS) if budget is None else budget) + 1e-7
    assert all(p[word, word + 1] == 0 for word in range(len(WORDS)))


def trees(n: int) -> np.ndarray:
    """All trees over n words, as (trees, n, n + 1)."""

    def reaches(heads: tuple[int, ...], word: int) -> bool:
        for _ in range(n):
            word = heads[word - 1] if word else 0
        return word == 0

    found = [h for h in product(range(n + 1), repeat=n) if all(reaches(h, word) for word in range(1, n + 1))]
    return np.stack([np.eye(n + 1)[list(heads)] for heads in found])


def test_marginals_are_the_nearest_of_all_mixtures_of_trees_within_budget() -> None:
    theta = scores()[:3, :4]
    all_trees = trees(3)
    weights = cp.Variable(len(all_trees), nonneg=True)
    mean = sum(weights[k] * tree for k, tree in enumerate(all_trees))
    bounds = [cp.sum(weights) == 1, cp.sum(mean[:, 1:], axis=0) <= 1]
    cp.Problem(cp.Minimize(cp.sum_squares(mean - theta.numpy())), bounds).solve()
    np.testing.assert_allclose(solved(theta, 1).numpy(), mean.value, atol=1e-4)


def test_a_budget_takes_the_last_word_from_the_verb(chapter: Callable[[str], Run]) -> None:
    result = chapter("trees_with_budgets").result
    assert result is not None
    free, two, _ = result.tables[0].rows
    assert (float(free[2]), float(free[3])) == pytest.approx((0.6, 0.4))
    assert (float(two[2]), float(two[3])) == (0.0, 1.0)


def test_arcs_are_curves_and_the_root_a_line() -> None:
    _, (axes,) = style.panels(1, 1)
    arcs.draw(axes, ["a", "b", "c"], [Arc(1, 2), Arc(2, 0), Arc(3, 2, weight=0.5)])
    curves = [patch for patch in axes.patches if isinstance(patch, Curve)]
    assert sorted(curve.get_alpha() for curve in curves) == [0.625, 1.0]
    assert [text.get_text() for text in axes.texts] == ["a", "b", "c"]
    assert len(axes.lines) == 4  # three points and the root's line
