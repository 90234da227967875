"""Trees with budgets: a dependency tree whose heads may take only so many modifiers, as a factor graph."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel import FactorGraph
from fenchel.factors import Budget, DependencyTree
from fenchel.studies import Context, Figure, Result, Table, arcs, study, style
from fenchel.studies.arcs import Arc
from fenchel.studies.result import Cell

WORDS = ["she", "saw", "the", "man", "with", "the", "telescope"]
HEADS: list[dict[int, float]] = [
    {2: 3.0},
    {0: 3.0},
    {4: 3.0},
    {2: 3.0, 1: 0.4},
    {7: 3.0},
    {7: 3.0, 4: 0.5},
    {2: 1.6, 4: 1.4},
]
"""Scores of heads, for each word; any other arc costs what it is long."""

BUDGETS: tuple[int | None, ...] = (None, 2, 1)

SUMMARY = """
A tree is one factor; what else is known of its arcs is another. Here no head may take more than so many modifiers:

`graph = FactorGraph()`, `u = graph.variables(scores)`, `graph.add(DependencyTree(u))`, and for each head k
`graph.add(Budget(u[:, k], 2))`. After `graph.solve()` the arcs' relaxed marginals are in `u.value`, differentiable like
any attention.

Without a budget the telescope belongs to the seeing, or to the man. With two modifiers a head, “saw” has no room left
for it after “she” and “man”, and it goes to the man. With one, no tree that grammar knows is left: words follow each
other in chains, over arcs that were out of the question before.
"""


@study(
    "A dependency tree with budgets",
    source="Martins (2024), From Sparse Modeling to Sparse Communication, LP-SparseMAP; Niculae & Martins (2020)",
    order=64,
)
def trees_with_budgets(context: Context) -> Result:
    """Draw the arcs as the budget of modifiers falls."""
    marginals = []
    for number, budget in enumerate(BUDGETS, 1):
        marginals.append(solved(scores(), budget))
        context.progress(number / len(BUDGETS), _name(budget))
    return Result(SUMMARY, figures=[_figure(marginals)], tables=[_counts(marginals)])


def scores() -> Tensor:
    """Of arcs, [modifier, head] with head 0 the root."""
    place = torch.arange(len(WORDS) + 1, dtype=torch.float64)
    theta = -(place[1:].unsqueeze(1) - place).abs()
    for word, heads in enumerate(HEADS):
        for head, score in heads.items():
            theta[word, head] = score
    return theta


def solved(theta: Tensor, budget: int | None) -> Tensor:
    """The marginals of arcs in trees whose words take at most ``budget`` modifiers."""
    graph = FactorGraph()
    u = graph.variables(theta)
    graph.add(DependencyTree(u))
    if budget is not None:
        for head in range(1, theta.shape[1]):
            graph.add(Budget(u[:, head], budget))
    graph.solve()
    return u.value


def _name(budget: int | None) -> str:
    return "no budget" if budget is None else f"at most {budget} modifier{'s' if budget > 1 else ''}"


def _figure(marginals: list[Tensor]) -> Figure:
    drawing, panels = style.panels(len(BUDGETS), 1, height=1.5)
    before = marginals[0] > 0
    for axes, budget, p in zip(panels, BUDGETS, marginals, strict=True):
        drawn = [
            Arc(i + 1, j, float(p[i, j]), style.MUTED if before[i, j] else style.PALETTE[1])
            for i, j in (p > 0).nonzero().tolist()
        ]
        arcs.draw(axes, WORDS, drawn)
        axes.set_title(_name(budget))
    return Figure(
        drawing,
        caption="Marginals of the arcs, fainter where they are smaller, as the budget of modifiers a head falls; an "
        "arrow goes from a head to its modifier, the root's from above. In colour: arcs with no mass without a budget.",
        alt="Three trees over one sentence. Without a budget two faint arcs lead to the last word. With two modifiers "
        "a head one of them is left. With one, short arcs in colour join.",
        paper="The talk shows the program, a tree with a budget for each head, and no picture of what comes out.",
    )


def _counts(marginals: list[Tensor]) -> Table:
    rows: list[list[Cell]] = []
    for budget, p in zip(BUDGETS, marginals, strict=True):
        taken = p[:, 1:].sum(0)
        word = int(taken.argmax())
        most = f"{taken[word].item():.2f} ({WORDS[word]})"
        value = float((p * scores()).sum())
        rows.append([_name(budget), most, f"{p[6, 2].item():.2f}", f"{p[6, 4].item():.2f}", int((p > 0).sum()), value])
    return Table(
        ["budget", "most modifiers", "telescope ← saw", "telescope ← man", "arcs with mass", "mean score"],
        rows,
        caption="The largest expected number of modifiers of a word, which the budget bounds; the marginals of the two "
        "arcs in question; how many arcs have mass; and what the budget costs in score.",
    )
