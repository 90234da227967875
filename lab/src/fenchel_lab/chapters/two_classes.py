"""Two classes: entropies, the losses that they make, and the margins of these."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fenchel import Gini, Hard, Norm, Regularizer, Shannon, Tsallis
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.measure import first

BLUE, VERMILION, GREEN, PINK, AMBER, SKY = style.PALETTE


class Curve(NamedTuple):
    """A regularizer as it is shown: under a name, beside the map that comes out of it."""

    name: str
    omega: Regularizer
    map: str
    colour: str
    line: Literal["-", "--"] = "-"


TSALLIS = (
    Curve("Shannon", Shannon(), "softmax", BLUE),
    Curve("Tsallis 1.5", Tsallis(1.5), "1.5-entmax", VERMILION),
    Curve("Gini", Gini(), "sparsemax", GREEN),
)
NORMS = (
    Curve("Norm 2", Norm(2.0), "2-normmax", PINK),
    Curve("Norm 5", Norm(5.0), "5-normmax", AMBER),
    Curve("Norm ∞", Norm(math.inf), "∞-normmax", SKY),
)
HARD = Curve("Hard", Hard(), "argmax", style.INK, "--")

LIMIT = 32.0

SUMMARY = """
Everything comes out of Ω. Over two classes, −Ω([p, 1 − p]) is an entropy: how uncertain the choice is, zero when it
is certain. The same Ω makes a loss, `omega.loss(scores, target)`: what the scores [s, 0] cost when the first class is
the right one.

The slope of the entropy at the corner tells the two kinds apart. Shannon's is infinite there, so cross-entropy never
reaches zero however large the lead. A finite slope m gives the loss a margin: with a lead of m it is exactly zero, its
gradient too, and the map is one-hot. Without a regularizer (Hard) the entropy is flat, the margin 0, and the loss the
perceptron's.
"""

CODE = """
import torch, fenchel

scores = torch.stack([torch.linspace(-1, 2, 4), torch.zeros(4)], -1)  # the lead of class 0: -1, 0, 1, 2
for omega in (fenchel.Shannon(), fenchel.Tsallis(1.5), fenchel.Gini()):
    loss = omega.loss(scores, torch.zeros(4, dtype=torch.long))
    print(f"{omega}: margin {omega.margin:g}, loss", [round(x, 3) for x in loss.tolist()])
"""


@study(
    "Entropies, losses and margins in two classes",
    source="Santos et al. (2024), section 2.2, Definition 1; Blondel, Martins & Niculae (2020), Proposition 7; "
    "Martins (2024), From Sparse Modeling to Sparse Communication",
    order=12,
    theme="Maps",
    code=CODE,
)
def two_classes(context: Context) -> Result:
    """Draw entropies and losses of two classes, and measure the margins."""
    rows = []
    curves = (*TSALLIS, *NORMS, HARD)
    for number, (name, omega, map, *_) in enumerate(curves):
        theory = omega.margin
        assert isinstance(theory, float)
        rows.append([name, map, _lead(theory), _lead(zero_loss_from(omega)), _lead(one_hot_from(omega))])
        context.progress((number + 1) / len(curves), name)
    table = Table(
        ["Ω", "map", "margin: paper", "loss is 0 from", "one-hot from"],
        rows,
        caption="Margins: the formula, and the smallest lead s at which the loss is exactly zero and at which the map "
        f"is exactly one-hot, measured in float64 by bisection up to s = {LIMIT:g}.",
        paper="Tsallis negentropies have margin 1/(α−1) for α > 1 and norm negentropies 1; cross-entropy has none. "
        "For a Fenchel-Young loss, zero loss and a one-hot map are the same event (Definition 1).",
    )
    return Result(SUMMARY, figures=[_figure(), _maxima()], tables=[table])


def zero_loss_from(omega: Regularizer) -> float | None:
    """The smallest lead at which the loss of the leading class is exactly zero; None up to the limit."""
    target = torch.tensor(0)
    return first(lambda s: omega.loss(_scores(s), target).item() == 0, 0.0, LIMIT)


def one_hot_from(omega: Regularizer) -> float | None:
    """The smallest lead at which the other class gets exactly nothing; None up to the limit."""
    return first(lambda s: omega.argmax(_scores(s))[1].item() == 0, 0.0, LIMIT)


def _scores(s: float) -> torch.Tensor:
    return torch.tensor([s, 0.0], dtype=torch.float64)


def _lead(s: float | None) -> str:
    return "none" if s is None or s == math.inf else f"{s:.4f}"


def _figure() -> Figure:
    drawing, (left, right, bottom_left, bottom_right) = style.panels(2, 2, height=2.2, sharey="row")
    for top, bottom, title, family in ((left, bottom_left, "Tsallis", TSALLIS), (right, bottom_right, "Norm", NORMS)):
        top.set_title(title)
        for curve in (*family, HARD):
            _draw(top, bottom, curve)
        top.set(xlim=(0, 1), xticks=[0, 0.5, 1], xlabel="probability p", ylim=(-0.02, 0.75))
        bottom.set(xlim=(-2, 3), ylim=(-0.06, 2.2), xlabel="lead s")
    left.set_ylabel("entropy")
    bottom_left.set_ylabel("loss")
    # A legend fills column by column: this order makes its rows the families.
    entries = [curve for pair in zip_longest((*TSALLIS, HARD), NORMS) for curve in pair if curve]
    drawing.legend(
        [Line2D([], [], color=curve.colour, linestyle=curve.line) for curve in entries],
        [curve.name for curve in entries],
        ncols=4,
        loc="outside upper center",
        columnspacing=1.2,
    )
    return Figure(
        drawing,
        caption="Entropies −Ω([p, 1−p]) (top) and losses of the scores [s, 0] when the first class is right (bottom), "
        "by family. A dot marks the margin: from there on the loss is zero.",
        alt="Entropies are arches over p, zero at both ends and highest in the middle: Shannon the highest, Norm ∞ a "
        "tent, Hard flat. Losses fall with the lead: Shannon's never reaches zero, Tsallis 1.5 does at 2, Gini and all "
        "norms at 1, Hard at 0.",
        paper="The papers state the margins as formulas (table below). The talk relates them to the slope of the "
        "entropy at the corners of the simplex: the slopes at p = 0 in the top row.",
    )


def _maxima() -> Figure:
    """max_Ω([t, 0]) and its slope, the first entry of argmax_Ω([t, 0])."""
    drawing, (value, slope) = style.panels(1, 2, height=2.3)
    t = torch.linspace(-3, 3, 601, dtype=torch.float64)
    scores = torch.stack([t, torch.zeros_like(t)], -1)
    for curve in (*TSALLIS, HARD):
        value.plot(t, curve.omega.max(scores), color=curve.colour, linestyle=curve.line, label=curve.map)
        slope.plot(t, curve.omega.argmax(scores)[:, 0], color=curve.colour, linestyle=curve.line)
    value.set(title="max of [t, 0]", xlabel="t")
    slope.set(title="its slope", xlabel="t", yticks=[0, 0.5, 1])
    drawing.legend(*value.get_legend_handles_labels(), ncols=4, loc="outside upper center", columnspacing=1.2)
    return Figure(
        drawing,
        caption="Smoothed maxima max_Ω([t, 0]) of two scores, and their derivatives argmax_Ω([t, 0])₁. Outside of its "
        "margin a sparse Ω has the hard maximum and a slope of exactly 0 or 1.",
        alt="Left, four curves that bend from 0 to the diagonal: the hard maximum with a corner at 0, sparsemax and "
        "1.5-entmax above it near 0 and equal to it further out, softmax above it everywhere. Right, a step, a ramp "
        "from −1 to 1, and two smooth curves from 0 to 1.",
        paper="Blondel's slides on structured attention and differentiable dynamic programming (2019) "
        "draw argmax, softmax and sparsemax of [t, 0] so. With Ω zero at one-hot vectors, as here, no smoothed maximum "
        "is below the hard one.",
    )


def _draw(top: Axes, bottom: Axes, curve: Curve) -> None:
    p = torch.linspace(0, 1, 401, dtype=torch.float64)
    top.plot(p, -curve.omega(torch.stack([p, 1 - p], -1)), color=curve.colour, linestyle=curve.line)
    s = torch.linspace(-2, 3, 501, dtype=torch.float64)
    loss = curve.omega.loss(torch.stack([s, torch.zeros_like(s)], -1), torch.zeros(len(s), dtype=torch.long))
    bottom.plot(s, loss, color=curve.colour, linestyle=curve.line)
    margin = zero_loss_from(curve.omega)
    if margin is not None:
        bottom.plot(margin, 0, "o", color=curve.colour, markersize=5, zorder=3)
