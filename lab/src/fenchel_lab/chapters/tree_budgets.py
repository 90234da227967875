"""A dependency tree with budgets: what a limit on the modifiers of each head does to a parse that is not sure."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch
from torch import Tensor

from fenchel import FactorGraph, softmax
from fenchel.factors import Budget, DependencyTree
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

WORDS = ("She", "saw", "the", "man", "with", "a", "telescope")
HEADS: dict[str, dict[str, float]] = {
    "She": {"saw": 4.0, "man": 0.5},
    "saw": {"*": 4.0},
    "the": {"man": 4.0, "saw": 0.5, "telescope": 0.5},
    "man": {"saw": 3.5, "telescope": 0.5},
    "with": {"saw": 2.0, "man": 1.6, "telescope": 0.8},
    "a": {"telescope": 4.0, "man": 0.8},
    "telescope": {"with": 3.0, "saw": 1.8, "man": 0.5},
}
"""Scores that we made up: what the telescope is with, her seeing or the man, is nearly a tie."""

BUDGETS: tuple[int | None, ...] = (None, 2)

SUMMARY = """
The snippet of the talk, run: `graph.add(DependencyTree(u))`, and for every word `graph.add(Budget(u[:, k], budget))`.
The scores of the arcs are made up, and leave open who has the telescope. Without a budget the answer is SparseMAP's: a
mixture of two whole trees, in which all that is sure is exactly 1 and all that is out of the question exactly 0, where
softmax for each word would leave a little on every head. With two modifiers per word, “saw” has to let one go. It is
the one that was undecided anyway: “with” moves over to “man”, and the telescope with it. All of it is one layer.
"""

CODE = """
import torch, fenchel
from fenchel import factors

graph = fenchel.FactorGraph()
arcs = graph.variables(torch.randn(6, 7))  # [word, head]
graph.add(factors.DependencyTree(arcs))
for head in range(1, 7):
    graph.add(factors.Budget(arcs[:, head], 2))  # no word has more than two modifiers
graph.solve()
print(arcs.value)
"""


@study(
    "A dependency tree with budgets",
    source="Niculae & Martins (2020), LP-SparseMAP; Martins, the talk's example of a factor graph",
    order=3,
    theme="Structures",
    code=CODE,
)
def tree_budgets(context: Context) -> Result:
    """Solve the sentence without budgets and with two modifiers per word, and draw the arcs."""
    marginals = [parse(scores(), budget) for budget in BUDGETS]
    context.progress(0.6, "solved")
    figures = [_arcs(marginals)]
    context.progress(1.0, "drawn")
    return Result(SUMMARY, figures=figures, tables=[_table(marginals)])


def scores() -> Tensor:
    """Arc scores [modifier, head] with head 0 the root; −1 for arcs that nobody asked for."""
    names = ("*", *WORDS)
    arcs = torch.full((len(WORDS), len(names)), -1.0, dtype=torch.float64)
    for modifier, heads in HEADS.items():
        for head, score in heads.items():
            arcs[WORDS.index(modifier), names.index(head)] = score
    return arcs


def parse(arc_scores: Tensor, budget: int | None) -> Tensor:
    """LP-SparseMAP over trees in which a word has no more modifiers than the budget; None: as many as it likes."""
    graph = FactorGraph()
    u = graph.variables(arc_scores)
    graph.add(DependencyTree(u, single_root=True))
    if budget is not None:
        for k in range(1, u.shape[1]):
            graph.add(Budget(u[:, k], budget))
    graph.solve()
    return u.value


def modifiers(marginals: Tensor) -> Tensor:
    """How many modifiers each word has, the root left out."""
    return marginals.sum(0)[1:]


def _arcs(marginals: list[Tensor]) -> Figure:
    drawing, panels = style.panels(len(BUDGETS), 1, height=1.5, sharex=True)
    for axes, budget, mu in zip(panels, BUDGETS, marginals, strict=True):
        axes.set_title("no budget" if budget is None else f"at most {budget} modifiers per word")
        _draw(axes, mu)
    return Figure(
        drawing,
        caption="Arcs from head to modifier, as wide and as strong in colour as their marginal; numbers tell those "
        "that are not sure. The arrow from above is the root's.",
        alt="Two panels with arcs over the sentence. Without a budget all arcs are sure but those to with: 0.7 from "
        "saw, 0.3 from man. With at most two modifiers per word, she and man stay with saw, and with hangs on man.",
    )


def _draw(axes: Axes, mu: Tensor) -> None:
    at = np.arange(len(WORDS), dtype=float)
    for modifier in range(len(WORDS)):
        for head in range(len(WORDS) + 1):
            weight = float(mu[modifier, head])
            if weight < 0.005:
                continue
            sure = weight > 0.995
            colour = style.INK if sure else style.PALETTE[1]
            tip = (at[modifier], 0.0)
            if head == 0:
                start, bend = (at[modifier], 1.5), "arc3,rad=0"
                label = (at[modifier] + 0.3, 1.2)
            else:
                start = (at[head - 1] + 0.14 * np.sign(modifier - head + 1), 0.0)
                span = modifier - (head - 1)
                bend = f"arc3,rad={-0.7 * np.sign(span):.2f}"
                label = (at[modifier] - span / 2, 0.35 * abs(span))
            axes.add_patch(
                FancyArrowPatch(
                    start,
                    tip,
                    connectionstyle=bend,
                    arrowstyle="-|>,head_length=3,head_width=1.6",
                    shrinkA=0,
                    shrinkB=1,
                    linewidth=0.5 + 1.3 * weight,
                    alpha=0.35 + 0.65 * weight,
                    color=colour,
                )
            )
            if not sure:
                box = {"facecolor": style.PAPER, "edgecolor": "none", "pad": 0.6}
                axes.text(*label, f"{weight:.2f}", color=colour, fontsize=7.5, ha="center", va="center", bbox=box)
    axes.set(xlim=(-0.6, len(WORDS) - 0.4), ylim=(-0.1, 1.6), yticks=[], aspect="equal")
    axes.set_xticks(at, WORDS, fontsize=8)
    axes.tick_params(axis="x", length=0, labelbottom=True)
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _table(marginals: list[Tensor]) -> Table:
    rows: list[list[Cell]] = [["softmax for each word", *_counts(softmax(scores()))]]
    for budget, mu in zip(BUDGETS, marginals, strict=True):
        rows.append(["no budget" if budget is None else f"at most {budget}", *_counts(mu)])
    return Table(
        ["", *WORDS, "arcs"],
        rows,
        caption="How many modifiers each word has, in expectation, and how many arcs are not zero.",
    )


def _counts(mu: Tensor) -> list[Cell]:
    return [*(f"{float(count):.2f}" for count in modifiers(mu)), int((mu != 0).sum())]
