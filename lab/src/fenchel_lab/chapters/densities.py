"""Densities that sparsemax makes of continuous scores, beside those of softmax, on the line and in the plane."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Ellipse
from torch import Tensor
from torch.distributions import Laplace

from fenchel.continuous import BetaGaussian, GaussianBasis, Triangular, expectation
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study

BLUE, VERMILION, GREEN, PINK, *_ = style.PALETTE

FAMILY = (
    ("α = 1 (Gaussian)", 1.0, BLUE),
    ("α = 4/3 (triweight)", 4 / 3, GREEN),
    ("α = 3/2 (biweight)", 1.5, PINK),
    ("α = 2 (parabola)", 2.0, VERMILION),
)

SUMMARY = """
A score need not be a list of numbers: f(t) = −½t² says how good every instant t is. The map is the same, argmax_p
E_p[f] − Ω(p), now over densities. Shannon's Ω gives the Gaussian; Gini's gives the truncated parabola, which is zero
outside of an interval, and Tsallis's what lies between: kernels that density estimation has long known. The score −|t|
gives Laplace's density and the triangular one. In the plane the support is an ellipse: `BetaGaussian(loc, sigma=…,
alpha=2.0)`.

The table holds each against quadrature: its integral, its variance and Shannon's entropy, in double precision.
"""

CODE = """
import torch
from fenchel.continuous import BetaGaussian

for alpha in (1.0, 1.5, 2.0):
    p = BetaGaussian(torch.tensor([0.0]), sigma=torch.tensor([[1.0]]), alpha=alpha)
    print(f"alpha {alpha}: zero beyond {p.support_radius.item():.3g}, entropy {p.entropy().item():.3f}")
"""


@study(
    "Densities with compact support",
    source="Martins et al. (2020), Sparse and Continuous Attention Mechanisms, figure 1; "
    "Martins (2024), From Sparse Modeling to Sparse Communication",
    order=51,
    theme="Continuous attention",
    code=CODE,
)
def densities(context: Context) -> Result:
    """Draw densities of the line and the plane, and integrate them."""
    figures = [_lines(), _planes()]
    context.progress(0.5, "drawn")
    table = _table()
    context.progress(1.0, "integrated")
    return Result(SUMMARY, figures=figures, tables=[table])


def member(alpha: float, dim: int = 1) -> BetaGaussian:
    """The member of a standard score −½‖t‖²."""
    return BetaGaussian(torch.zeros(dim, dtype=torch.float64), sigma=torch.eye(dim, dtype=torch.float64), alpha=alpha)


def _lines() -> Figure:
    drawing, (left, right) = style.panels(1, 2, height=2.6, sharey=True)
    t = torch.linspace(-3, 3, 601, dtype=torch.float64)
    for name, alpha, colour in FAMILY:
        left.plot(t, member(alpha).log_prob(t.unsqueeze(-1)).exp(), color=colour, label=name)
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    right.plot(t, Laplace(zero, one).log_prob(t).exp(), color=BLUE, label="Laplace")  # type: ignore[no-untyped-call]
    right.plot(t, Triangular(zero, one).log_prob(t).exp(), color=VERMILION, label="triangular")
    for axes, title in ((left, "score −½t²"), (right, "score −|t|")):
        axes.set(title=title, xlabel="t", xlim=(-3, 3), ylim=(0, 1.45))
        axes.legend(loc="upper left", fontsize=7.5)
    left.set_ylabel("density")
    return Figure(
        drawing,
        caption="Densities of two scores: softmax's in blue, sparsemax's in vermilion, between them others.",
        alt="Left, bells over t: the Gaussian has tails, the triweight, biweight and parabola end at a finite t, the "
        "parabola first and steepest. Right, the Laplace density peaks at one half with long tails, the triangular one "
        "is a tent from minus one to one.",
        paper="Figure 1, left: Gaussian and truncated parabola (top), Laplace and triangular (bottom).",
    )


def _planes() -> Figure:
    drawing, panels = style.panels(1, 2, height=2.3, sharex=True, sharey=True)
    x = torch.linspace(-2.5, 2.5, 201, dtype=torch.float64)
    points = torch.cartesian_prod(x, x)
    for axes, (title, alpha) in zip(panels, (("Gaussian", 1.0), ("truncated paraboloid", 2.0)), strict=True):
        p = member(alpha, 2)
        shade(axes, p.log_prob(points).exp().reshape(201, 201).mT, (-2.5, 2.5))
        ellipses(axes, p, colour=style.INK)
        axes.set(title=title, aspect="equal")
    return Figure(
        drawing,
        caption="The same score in the plane, −½‖t‖². The line is the edge of the support; the Gaussian has none.",
        alt="Two heat maps. The Gaussian fades out in all directions. The paraboloid is a disc with a sharp edge, "
        "outside of which nothing is.",
        paper="Figure 1, middle and right: the bivariate Gaussian and the truncated paraboloid, as surfaces.",
    )


def shade(axes: Axes, values: Tensor, extent: tuple[float, float]) -> None:
    """A density over a square, [row, column] from the bottom left."""
    axes.imshow(values.numpy(), origin="lower", extent=(*extent, *extent), cmap=style.DENSITY, vmin=0)
    axes.grid(visible=False)


def ellipses(axes: Axes, density: BetaGaussian, colour: str = VERMILION, image: bool = False) -> None:
    """The edges of supports in the plane; for Gaussians, which have none, of two standard deviations if on an image.

    Args:
        axes: to draw on.
        density: of the plane, in any batch.
        colour: of the lines.
        image: positions are (row, column) on the unit square, as ``ContinuousAttention`` has them, and not (x, y).
    """
    radius = density.support_radius.reshape(-1)
    if not bool(torch.isfinite(radius).all()):
        if not image:
            return
        radius = torch.full_like(radius, 2.0)
    centres, matrices = density.loc.reshape(-1, 2), density.sigma.reshape(-1, 2, 2)
    if image:
        centres, matrices = centres.flip(-1), matrices.flip(-1, -2)
    for centre, matrix, r in zip(centres, matrices, radius, strict=True):
        squares, directions = np.linalg.eigh(matrix.detach().numpy())
        angle = math.degrees(math.atan2(directions[1, 1], directions[0, 1]))
        width, height = 2 * float(r) * np.sqrt(squares[::-1])
        patch = Ellipse((float(centre[0]), float(centre[1])), width, height, angle=angle, fill=False, edgecolor=colour)
        axes.add_patch(patch)


def over_words(axes: Axes, density: BetaGaussian, words: list[str], colour: str = VERMILION) -> None:
    """A density of the line over the words of a sentence, each in its cell of [0, 1]."""
    t = torch.linspace(0, 1, 400, dtype=density.loc.dtype).unsqueeze(-1)
    height = density.log_prob(t).exp().detach()
    axes.plot(t.squeeze(-1), height, color=colour)
    axes.fill_between(t.squeeze(-1).numpy(), height.numpy(), color=colour, alpha=0.2, linewidth=0)
    places = (np.arange(len(words)) + 0.5) / len(words)
    axes.set_xticks(places, words, rotation=90)
    axes.set(xlim=(0, 1), ylim=(0, None))


def _table() -> Table:
    rows: list[list[str | int | float]] = []
    for name, alpha, _ in FAMILY:
        for dim in (1, 2):
            p = member(alpha, dim)
            radius = float(p.support_radius)
            # A wide basis function tells the integral: E_p of a constant, as it were.
            flat = GaussianBasis(p.loc.unsqueeze(0), 1e12 * p.sigma.unsqueeze(0))
            total = float(expectation(p.loc, p.sigma, flat, alpha)) * (2 * math.pi * 1e12) ** (dim / 2)
            variance = float(p.integrate(lambda t: t[..., 0].square()))
            entropy = -float(p.integrate(p.log_prob, nodes=400))
            rows.append(
                [
                    name,
                    dim,
                    "none" if math.isinf(radius) else f"{radius:.4f}",
                    f"{abs(total - 1):.0e}",
                    f"{float(p.variance[0]):.4f}",
                    f"{abs(float(p.variance[0]) - variance):.0e}",
                    f"{float(p.entropy()):.4f}",
                    f"{abs(float(p.entropy()) - entropy):.0e}",
                ]
            )
    return Table(
        ["density", "D", "radius", "|∫p − 1|", "variance", "error", "entropy", "error"],
        rows,
        caption="Score −½‖t‖²: the radius of the support, and closed forms against quadrature.",
        paper="Equations 10 and 11: the radius is (3/2)^(1/3) = 1.1447 for α = 2 in one dimension, (4/π)^(1/4) = "
        "1.0623 in two.",
    )
