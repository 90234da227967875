"""An Ω of one's own: a spring between neighbours, written as one line, and what it does to sparsemax."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel import Custom, Gini, Regularizer, support_size
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

THETA = torch.tensor([0.1, 0.9, 0.3, -0.4, 0.8, -0.6], dtype=torch.float64)
COLDEST, HOTTEST = 0.1, 10.0
TABULATED = (0.25, 0.5, 1.0, 2.0, 4.0)

SUMMARY = """
`Custom(fn)` takes any strictly convex function of p and gives back what every Ω of this library has: a choice, a
maximum, a loss, and their derivatives. Here it is half the squared norm, as for sparsemax, plus a spring between
neighbours: `lambda p: 0.5 * p.square().sum(-1) + 0.5 * p.diff().square().sum(-1)`.

The best two scores are not neighbours. Sparsemax takes both early; the springs make each of them bring its neighbours
along. Nobody derived a threshold or a Jacobian for it: a solver finds the choice, and a duality gap certifies it.
"""

CODE = """
import torch, fenchel


def springs(p):  # half the squared norm, plus a spring between neighbours
    return 0.5 * p.square().sum(-1) + 0.5 * p.diff().square().sum(-1)


scores = torch.tensor([0.1, 0.9, 0.3, -0.4, 0.8, -0.6])
print(fenchel.sparsemax(scores))
print(fenchel.Custom(springs).argmax(scores))
"""


@study(
    "An Ω of your own",
    source="Niculae & Blondel (2017): any strongly convex Ω; this one is ours",
    order=15,
    theme="Maps",
    code=CODE,
)
def springs(context: Context) -> Result:
    """Draw both paths as the temperature rises, and tabulate the choices."""
    figure = _paths()
    context.progress(0.7, "drawn")
    return Result(SUMMARY, figures=[figure], tables=[_choices()])


def stretched(p: Tensor) -> Tensor:
    """Half the squared norm, plus a spring between neighbours."""
    return 0.5 * p.square().sum(-1) + 0.5 * p.diff().square().sum(-1)


def path(omega: Regularizer, temperatures: Tensor) -> Tensor:
    """The choice at each temperature, a row each."""
    return omega.argmax(THETA / temperatures.unsqueeze(-1))


def _paths() -> Figure:
    temperatures = torch.logspace(-1, 1, 161, dtype=torch.float64)
    drawing, panels = style.panels(1, 2, height=2.8, sharey=True)
    for axes, name, omega in zip(panels, ("sparsemax", "with springs"), (Gini(), Custom(stretched)), strict=True):
        for colour, row, score in zip(style.PALETTE, path(omega, temperatures).T, THETA.tolist(), strict=False):
            axes.plot(temperatures, row, color=colour, label=f"{score:.1f}".replace("-", "−"))
        axes.set(title=name, xscale="log", xlim=(COLDEST, HOTTEST), ylim=(-0.03, 1.03), yticks=[0, 0.5, 1])
    panels[0].set_ylabel("probability")
    drawing.supxlabel("temperature", fontsize=9)
    panels[1].legend(title="score", title_fontsize=8.5, ncols=2)
    return Figure(
        drawing,
        caption="Probability of each of six entries in a row as the temperature rises.",
        alt="Two panels. On the left the best two of six scores share all mass until others join one by one. On the "
        "right neighbours of the best join at once, and nobody ever has much more than those beside it.",
    )


def _choices() -> Table:
    rows: list[list[Cell]] = []
    for name, omega in (("sparsemax", Gini()), ("with springs", Custom(stretched))):
        for temperature, p in zip(TABULATED, path(omega, torch.tensor(TABULATED).double()), strict=True):
            rows.append([name, f"{temperature:g}", *(f"{x:.3f}" for x in p.tolist()), int(support_size(p))])
    return Table(
        ["", "temperature", *(f"{score:.1f}".replace("-", "−") for score in THETA.tolist()), "chosen"],
        rows,
        caption="The choices at some temperatures.",
    )
