"""The chapter on densities: curves and supports beside closed forms."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Drawing

from fenchel.continuous import BetaGaussian
from fenchel_lab.chapters.densities import ellipses, over_words
from fenchel_lab.report import Run


@pytest.mark.slow
def test_curves_are_the_papers(chapter: Callable[[str], Run]) -> None:
    result = chapter("densities").result
    assert result is not None
    left, right = result.figures[0].drawing.axes
    curves = {line.get_label(): line for axes in (left, right) for line in axes.lines}
    height = 0.5 * (3 / 2) ** (2 / 3)
    for name, closed in (
        ("α = 1 (Gaussian)", lambda t: np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)),
        ("α = 2 (parabola)", lambda t: np.maximum(height - t**2 / 2, 0)),
        ("Laplace", lambda t: np.exp(-np.abs(t)) / 2),
        ("triangular", lambda t: np.maximum(1 - np.abs(t), 0)),
    ):
        t, p = (np.asarray(values) for values in curves[name].get_data())
        np.testing.assert_allclose(p, closed(t), atol=1e-12)


@pytest.mark.slow
def test_the_table_agrees_with_quadrature_and_the_paper(chapter: Callable[[str], Run]) -> None:
    result = chapter("densities").result
    assert result is not None
    [table] = result.tables
    radii = {(row[0], row[1]): row[2] for row in table.rows}
    assert radii["α = 2 (parabola)", 1] == f"{1.5 ** (1 / 3):.4f}"
    assert radii["α = 2 (parabola)", 2] == f"{(4 / math.pi) ** 0.25:.4f}"
    assert radii["α = 1 (Gaussian)", 2] == "none"
    for row in table.rows:
        assert float(row[3]) < 1e-9
        assert float(row[5]) < 1e-12
        assert float(row[7]) < 1e-9  # the logarithm at the edge slows Gauss's rule down


@pytest.mark.parametrize("image", [True, False])
def test_ellipses_are_the_edges_of_supports(image: bool) -> None:
    sigma = torch.tensor([[0.04, 0.015], [0.015, 0.01]], dtype=torch.float64)
    p = BetaGaussian(torch.tensor([0.4, 0.6], dtype=torch.float64), sigma=sigma)
    axes = Drawing().subplots()
    ellipses(axes, p, image=image)
    [patch] = axes.patches
    edge = patch.get_patch_transform().transform(patch.get_path().vertices)
    t = torch.from_numpy(edge[:, ::-1].copy() if image else edge)
    square = -2 * p.score(t)
    # The corners of Bézier curves lie on the ellipse, its handles outside of it.
    assert square.min().item() == pytest.approx(p.support_radius.item() ** 2, rel=1e-6)


def test_densities_stand_over_their_words() -> None:
    axes = Drawing().subplots()
    p = BetaGaussian(torch.tensor([0.5]), sigma=torch.tensor([[0.001]]))
    over_words(axes, p, ["a", "small", "town"])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "small", "town"]
    t, height = (np.asarray(v) for v in axes.lines[0].get_data())
    assert abs(t[height.argmax()] - 0.5) < 0.01
    assert height[0] == 0
