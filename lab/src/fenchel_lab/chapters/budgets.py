"""Bounds and budgets: what a limit for each choice, and a number of choices, do to the same scores."""

from __future__ import annotations

import torch
from matplotlib import figure as mpl
from matplotlib.lines import Line2D
from torch import Tensor

from fenchel import constrained_softmax, constrained_sparsemax, k_subsets, support_size
from fenchel_lab.chapters.paths import THETA
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

LOOSEST, TIGHTEST = 1.0, 0.2
BUDGETS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0)

SUMMARY = """
The same five scores as in the paths. First, no choice may get more than a cap: `constrained_sparsemax(theta, cap)`
and `constrained_softmax(theta, cap)`. As the cap falls, what the best choice may not have is handed on to the next,
until at 1/5 all get the same. With a cap for each word, lowered by what the word has already got, this is attention
with fertilities: a decoder that may not read a word for longer than it deserves.

Second, not one choice but k: `k_subsets(theta, k)` has entries between 0 and 1 that sum to k. At k = 1 it is
sparsemax, at k = 5 everything is chosen; between them the entries rise from 0 to 1 in straight lines, the best first.
It is SparseMAP over all subsets of size k, without a solver.
"""

CODE = """
import torch, fenchel

scores = torch.tensor([2.0, 1.4, 0.2, 0.1, -0.3])
print(fenchel.constrained_sparsemax(scores, upper=torch.full((5,), 0.4)))  # nobody gets more than 0.4
print(fenchel.k_subsets(scores, k=2))  # two at once: weights in [0, 1] that sum to 2
"""


@study(
    "Bounds and budgets",
    source="Malaviya, Ferreira & Martins (2018), Sparse and Constrained Attention; Santos et al. (2024), section 4",
    order=13,
    theme="Maps",
    code=CODE,
)
def budgets(context: Context) -> Result:
    """Draw both maps as the cap falls, and k-subsets as k grows from one choice to all."""
    figures = [_caps(), _budget()]
    context.progress(1.0, "drawn")
    return Result(SUMMARY, figures=figures, tables=[_marginals()])


def chosen(budget: Tensor) -> Tensor:
    """k-subsets of the scores, one row per budget."""
    return k_subsets(THETA.expand(len(budget), -1), budget.unsqueeze(-1))


def _caps() -> Figure:
    caps = torch.linspace(TIGHTEST, LOOSEST, 401, dtype=torch.float64)
    drawing, panels = style.panels(1, 2, height=2.6, sharey=True)
    scores = THETA.expand(len(caps), -1)
    for axes, name, choose in zip(
        panels,
        ("constrained sparsemax", "constrained softmax"),
        (constrained_sparsemax, constrained_softmax),
        strict=True,
    ):
        p = choose(scores, caps.unsqueeze(-1))
        axes.plot(caps, caps, color=style.MUTED, linewidth=1, linestyle=":")
        for colour, i in zip(style.PALETTE, _best_first(), strict=False):
            axes.plot(caps, p[:, i], color=colour)
        axes.set(title=name, xlim=(LOOSEST, TIGHTEST), ylim=(-0.03, 1.03), yticks=[0, 0.5, 1], xticks=[1, 0.6, 0.2])
    drawing.supxlabel("cap on every choice", fontsize=9)
    panels[0].set_ylabel("probability")
    _legend(drawing)
    return Figure(
        drawing,
        caption="Probability of each of five choices as the cap falls, from left to right; the dotted line is the cap.",
        alt="Two panels. From the left the best choice meets the falling cap and follows it down; the others rise one "
        "after the other and meet it too, until all five have a fifth. All move in straight lines; sparsemax has exact "
        "zeros, softmax none.",
    )


def _budget() -> Figure:
    k = torch.linspace(0.01, len(THETA), 500, dtype=torch.float64)
    drawing, (axes,) = style.panels(1, 1, height=2.9)
    p = chosen(k)
    for colour, i in zip(style.PALETTE, _best_first(), strict=False):
        axes.plot(k, p[:, i], color=colour)
    axes.set(
        xlabel="budget k", ylabel="entry of k-subsets", xlim=(0, len(THETA)), ylim=(-0.03, 1.03), yticks=[0, 0.5, 1]
    )
    _legend(drawing)
    return Figure(
        drawing,
        caption="Each of five entries as the budget k grows; at every k they sum to it.",
        alt="Five lines rise from 0 to 1 one after the other, the best score first, each in straight pieces; at k = 5 "
        "all are 1.",
        paper="Figures 2 and 5 of Santos et al. draw paths of the same θ against the temperature; here that is 1, "
        "and k moves.",
    )


def _marginals() -> Table:
    budget = torch.tensor(BUDGETS, dtype=torch.float64)
    p = chosen(budget)
    rows: list[list[Cell]] = [
        [f"{k:g}", *(f"{p[row, i]:.4f}" for i in _best_first()), f"{p[row].sum():.4f}", int(support_size(p[row]))]
        for row, k in enumerate(BUDGETS)
    ]
    return Table(
        ["k", *(f"θ = {THETA[i]:.2f}".replace("-", "−") for i in _best_first()), "sum", "chosen"],
        rows,
        caption="k-subsets at some budgets, and how many entries are not zero.",
    )


def _best_first() -> list[int]:
    order: list[int] = THETA.argsort(descending=True).tolist()
    return order


def _legend(drawing: mpl.Figure) -> None:
    keys = [Line2D([], [], color=colour) for colour in style.PALETTE[: len(THETA)]]
    names = [f"{THETA[i]:.2f}".replace("-", "−") for i in _best_first()]
    drawing.legend(
        keys, names, title="score θ", title_fontsize=8.5, ncols=len(keys), loc="outside upper center", columnspacing=1.2
    )
