"""The chapter on an Ω of one's own."""

from collections.abc import Callable
from itertools import pairwise

import cvxpy
import numpy as np
import torch

from fenchel import Custom
from fenchel_lab.chapters.springs import THETA, path, stretched
from fenchel_lab.report import Run


def test_springs_are_the_quadratic_program() -> None:
    p = cvxpy.Variable(len(THETA))
    objective = THETA.numpy() @ p - 0.5 * cvxpy.sum_squares(p) - 0.5 * cvxpy.sum_squares(cvxpy.diff(p))
    cvxpy.Problem(cvxpy.Maximize(objective), [p >= 0, cvxpy.sum(p) == 1]).solve(solver=cvxpy.CLARABEL)
    found = path(Custom(stretched), torch.ones(1, dtype=torch.float64))[0]
    np.testing.assert_allclose(found.numpy(), p.value, atol=1e-6)


def test_neighbours_are_alike_with_springs(chapter: Callable[[str], Run]) -> None:
    result = chapter("springs").result
    assert result is not None
    [table] = result.tables
    steps = {}
    for row in table.rows:
        steps[row[0], row[1]] = max(abs(float(a) - float(b)) for a, b in pairwise(row[2:8]))
    assert all(steps["with springs", t] <= steps["sparsemax", t] for _, t in steps)
