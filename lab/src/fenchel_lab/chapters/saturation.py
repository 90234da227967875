"""Saturation: the lead at which entmax in two classes gives everything to one of them."""

from __future__ import annotations

import torch

from fenchel import entmax
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.measure import first
from fenchel_lab.report.result import Cell

ALPHAS = (1.0, 1.25, 1.5, 2.0, 4.0)
EDGE = 5.0
LIMIT = 64.0

SUMMARY = """
Two classes with scores t and 0: how much does the first get, as t grows? Softmax gives the other class less
and less but never nothing. Every α > 1 reaches exactly 1 at a finite lead and stays there, with zero gradient. The
larger α, the sooner: α interpolates between softmax (1), sparsemax (2) and argmax (∞).

Below α = 2 the curve arrives smoothly, so that the gradient fades out; from sparsemax on, which is piecewise linear,
it arrives with a corner.
"""

CODE = """
import torch, fenchel

for alpha in (1.0, 1.25, 1.5, 2.0, 4.0):
    lead = fenchel.Tsallis(alpha).margin
    below = fenchel.entmax(torch.tensor([min(lead, 20.0) - 0.01, 0.0], dtype=torch.float64), alpha)
    print(f"alpha {alpha}: one-hot from a lead of {lead:.3g}; just below it, the other class has {below[1]:.1e}")
"""


@study(
    "Where entmax saturates",
    source="Peters, Niculae & Martins (2019), Sparse Sequence-to-Sequence Models, figure 3",
    order=11,
    theme="Maps",
    code=CODE,
)
def saturation(context: Context) -> Result:
    """Draw α-entmax([t, 0])₁, and measure where it reaches 1."""
    rows = []
    for number, alpha in enumerate(ALPHAS):
        rows.append(_row(alpha))
        context.progress((number + 1) / len(ALPHAS), f"α = {alpha:g}")
    table = Table(
        ["α", "paper: 1/(α−1)", "measured", "difference"],
        rows,
        caption="The smallest t at which the other class gets exactly zero, in float64, searched for by bisection "
        f"up to t = {LIMIT:g}.",
        paper="All mappings except softmax saturate at t = ±1/(α−1) (caption of figure 3).",
    )
    return Result(SUMMARY, figures=[_figure()], tables=[table])


def saturates_at(alpha: float) -> float | None:
    """The smallest t at which α-entmax([t, 0]) is [1, 0]; None if there is none up to the limit.

    The zero is what to look for: p₁ rounds to 1 while p₂ is still there.
    """
    return first(lambda t: entmax(torch.tensor([t, 0.0], dtype=torch.float64), alpha)[1].item() == 0, 0.0, LIMIT)


def _row(alpha: float) -> list[Cell]:
    paper = None if alpha == 1 else 1 / (alpha - 1)
    measured = saturates_at(alpha)
    difference = "–" if paper is None or measured is None else abs(measured - paper)
    return [f"{alpha:g}", _shown(paper), _shown(measured), difference]


def _shown(t: float | None) -> str:
    return "never" if t is None else f"{t:.4f}"


def _figure() -> Figure:
    t = torch.linspace(-EDGE, EDGE, 1001, dtype=torch.float64)
    scores = torch.stack([t, torch.zeros_like(t)], -1)
    drawing, (axes,) = style.panels(1, 1, height=2.9)
    names = {1.0: "1 (softmax)", 2.0: "2 (sparsemax)"}
    for colour, alpha in zip(style.PALETTE, ALPHAS, strict=False):
        axes.plot(t, entmax(scores, alpha)[:, 0], color=colour, label=f"α = {names.get(alpha, f'{alpha:g}')}")
        if alpha > 1:
            ends = torch.tensor([-1, 1]) / (alpha - 1)
            axes.plot(ends, [0, 1], "o", color=colour, markersize=5, zorder=3, clip_on=False)
    axes.set(
        xlabel="lead t",
        ylabel="probability of the first class",
        xlim=(-EDGE, EDGE),
        ylim=(-0.03, 1.03),
        yticks=[0, 0.5, 1],
    )
    axes.legend(loc="upper left")
    return Figure(
        drawing,
        caption="Probability of the first of two classes against its lead. Dots: the predicted ends, t = ±1/(α−1).",
        alt="Five curves rise from 0 to 1. Softmax never arrives; α = 1.25 arrives at ±4, 1.5 at ±2, 2 at ±1 along a "
        "straight line, and 4 at ±1/3.",
        paper="Figure 3 draws the same five curves. The dots are its formula; the curves meet their ends there.",
    )
