"""Memories in the plane: their energies, where queries go, and which pattern each of them reaches."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Circle
from torch import Tensor

from fenchel import Gini, KSubsets, Norm, Regularizer, Shannon, Tsallis
from fenchel.hopfield import Memory
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

PATTERNS = torch.tensor(
    [[0.95, 0.25], [0.2, 1.0], [-0.75, 0.7], [-0.85, -0.4], [-0.1, -1.0], [0.7, -0.65]], dtype=torch.float64
)
STARTS = torch.tensor([[0.35, 0.3], [-0.15, 0.4], [-0.45, 0.05], [0.15, -0.45]], dtype=torch.float64)
SIDE = 1.3
CONTOURS_AT = 4.0
BASINS_AT = (4.0, 10.0)
"""The paper's."""
BETAS = (1.0, 4.0, 10.0)
NEAR = 0.01
"""How close to a pattern softmax, which reaches none, has to end."""

MAPS: dict[str, Regularizer] = {
    "softmax": Shannon(),
    "1.5-entmax": Tsallis(1.5),
    "sparsemax": Gini(),
    "2-normmax": Norm(2.0),
    "5-normmax": Norm(5.0),
    "k_subsets 2": KSubsets(2),
}

DRAWN = {
    4.0: "Six panels. Softmax is blank throughout. Under 1.5-entmax one of six patterns has a coloured sector, and "
    "none has a dashed circle. Under sparsemax and 2-normmax six sectors meet, each with a circle. Under 5-normmax "
    "blank strips lie between sectors. The last panel has six sectors of mixed colours, each between two neighbours.",
    10.0: "Six panels. Under softmax three of six patterns have a coloured sector. Under 1.5-entmax, sparsemax and "
    "both norms six sectors meet, each with a dashed circle, smaller under 1.5-entmax. The last panel has six sectors "
    "of mixed colours, each between two neighbours.",
}
"""What the panels show, by β."""

SUMMARY = """
Six patterns in the plane are the whole memory. Every point is a query; an update moves it downhill, to a mixture of
patterns, and it stops where nothing changes. `Memory(patterns, omega, beta).retrieve(queries)` does all of it at once,
and each query stops on its own.

Softmax ends near patterns, never at one. A sparse Ω with enough contrast ends exactly at one: from anywhere inside the
dashed circles in a single update. `certify()` tells their radius, and it is the largest possible: beyond it, in one
direction, an update mixes in another pattern. From the rest of a coloured basin it takes more updates; what is blank
ends in a metastable state, a mixture of several patterns. As alpha grows entmax ends more often at single patterns;
normmax prefers even mixtures of a few. `KSubsets(2)` retrieves pairs: it ends at the sum of two neighbours.
"""

CODE = """
import torch, fenchel
from fenchel.hopfield import Memory

patterns = torch.tensor([[1.0, 0.0], [-0.5, 0.9], [-0.5, -0.9]])
queries = torch.tensor([[0.5, 0.1], [-0.2, 0.4], [0.0, -0.6]])
for omega in (fenchel.Shannon(), fenchel.Gini()):
    memory = Memory(patterns, omega, beta=3.0)
    found = memory.retrieve(queries)
    print(f"{omega}: energy {memory.energy(found.state)}, equal to a pattern:", (found.weights.amax(-1) == 1).tolist())
"""


@study(
    "Energies and basins of attraction",
    source="Santos et al. (2024), section 5.1, figures 3 and 6",
    order=2,
    theme="Memories",
    code=CODE,
)
def basins(context: Context) -> Result:
    """Draw energies with the paths of queries, and the basins with their certified circles; count where queries end."""
    contours = _contours()
    context.progress(0.3, "energies")
    drawn = [_basins(beta) for beta in BASINS_AT]
    context.progress(0.8, "basins")
    return Result(SUMMARY, figures=[drawn[1], drawn[0], contours], tables=[_ends()])


def grid(points: int, side: float = SIDE) -> Tensor:
    """Queries in a square, (points², 2), row by row from below."""
    line = torch.linspace(-side, side, points, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], -1).reshape(-1, 2)


def path(memory: Memory, query: Tensor, steps: int = 30) -> Tensor:
    """The states that a query goes through, (steps + 1, D)."""
    states = [query]
    for _ in range(steps):
        states.append(memory.step(states[-1]))
    return torch.stack(states)


def reached(memory: Memory, queries: Tensor, near: float = 1e-9) -> Tensor:
    """Which patterns each query ends at, boolean (…, N): one, or k of them; none if it ends in between.

    Softmax has no zeros: a query counts that ends within ``near`` of a pattern.
    """
    found = memory.retrieve(queries, max_steps=500, tol=1e-9)
    if is_dense(memory.omega):
        mode = "donot_use_mm_for_euclid_dist"
        return torch.cdist(found.state, memory.patterns, compute_mode=mode) <= near
    whole = ((found.weights - found.weights.round()).abs() <= near).all(-1, keepdim=True)
    return whole & (found.weights > 0.5)


def metastable_sizes(weights: Tensor, threshold: float = 0.0) -> Tensor:
    """How many patterns are mixed in each state: weights (…, N) that exceed the threshold."""
    return (weights > threshold).sum(-1)


def size_histogram(sizes: Tensor, largest: int) -> list[float]:
    """Shares of states of sizes 1 … largest, and of all others (more, or none) at the end; in percent."""
    counts = [int((sizes == size).sum()) for size in range(1, largest + 1)]
    return [100 * count / sizes.numel() for count in (*counts, sizes.numel() - sum(counts))]


def is_dense(omega: Regularizer) -> bool:
    """Whether no lead over the other scores makes their weights zero."""
    return bool(omega.margin == math.inf)


def chooses_several(omega: Regularizer) -> bool:
    """Whether weights sum to more than 1."""
    return bool(omega.mass(len(PATTERNS)) != 1)


def threshold(omega: Regularizer) -> float:
    """From where on a weight counts: softmax has no zeros."""
    return 0.01 if is_dense(omega) else 0.0


def _contours() -> Figure:
    drawing, panels = style.panels(3, 2, height=2.05)
    points = 41
    for axes, (name, omega) in zip(panels, MAPS.items(), strict=True):
        memory, side = Memory(PATTERNS, omega, CONTOURS_AT), _side(omega)
        line = np.linspace(-side, side, points)
        energy = memory.energy(grid(points, side)).reshape(points, points).numpy()
        axes.contour(line, line, energy, levels=8, colors=style.FAINT, linewidths=0.8, linestyles="solid")
        for colour, start in zip(style.PALETTE, STARTS, strict=False):
            x, y = path(memory, start).T.numpy()
            axes.plot(x, y, color=colour, marker=".", markersize=4, linewidth=1.3)
            axes.plot(x[-1], y[-1], marker="o", markersize=6, markerfacecolor="none", color=colour)
        _plane(axes, name, side)
    return Figure(
        drawing,
        caption=f"Contours of the energy at β = {CONTOURS_AT:g}, and the states of four queries, update by update, up "
        "to where they end (ring). Crosses are the patterns; the last panel is drawn smaller, to hold sums of two.",
        alt="Six panels with six crosses around a centre. Under softmax the four paths creep to points between them. "
        "Under 1.5-entmax, sparsemax and 2-normmax they end at crosses or close by, in fewer steps the sparser the "
        "map; under 5-normmax three of them stop halfway between two crosses. With pairs one step leads outside, to "
        "the sum of two neighbours.",
        paper="Figures 3 and 6, left: the same families on other patterns; paths of the sparser maps end at patterns, "
        "those of normmax at even mixtures. Ours agree.",
    )


def _basins(beta: float) -> Figure:
    drawing, panels = style.panels(3, 2, height=2.05)
    points = 121
    colours = np.array([to_rgb(colour) for colour in style.PALETTE])
    for axes, (name, omega) in zip(panels, MAPS.items(), strict=True):
        memory = Memory(PATTERNS, omega, beta)
        ends = reached(memory, grid(points), NEAR if is_dense(omega) else 1e-9).double().numpy()
        count = ends.sum(-1, keepdims=True)
        image = np.concatenate([ends @ colours / np.maximum(count, 1), 0.45 * (count > 0)], -1)
        extent = (-SIDE, SIDE, -SIDE, SIDE)
        axes.imshow(image.reshape(points, points, 4), origin="lower", extent=extent, interpolation="nearest")
        _plane(axes, name, SIDE)
        if chooses_several(omega):
            continue
        for centre, radius in zip(PATTERNS.tolist(), memory.certify().radius.tolist(), strict=True):
            if 0 < radius < math.inf:
                axes.add_patch(Circle(centre, radius, fill=False, color=style.INK, linestyle="--", linewidth=0.9))
    return Figure(
        drawing,
        caption=f"Basins of attraction at β = {beta:g}: the colour tells the pattern at which a query ends; the "
        f"mean of two colours is a pair, and what is blank a metastable state. Softmax counts within {NEAR:g}, the "
        "others exactly. "
        "Dashed: the balls from which one update retrieves exactly, as certified.",
        alt=DRAWN[beta],
        paper="Figures 3 and 6, right: basins at the same β on other patterns, without circles (the radius of "
        "Proposition 2 is smaller than the certified one). There, too, blank gives way to colour as alpha grows for "
        "entmax, and comes back for normmax.",
    )


def _side(omega: Regularizer) -> float:
    return 1.7 * SIDE if chooses_several(omega) else SIDE


def _plane(axes: Axes, name: str, side: float) -> None:
    axes.plot(*PATTERNS.T.numpy(), "x", color=style.INK, markersize=5, markeredgewidth=1.4, zorder=4)
    axes.set(title=name, xlim=(-side, side), ylim=(-side, side), xticks=[], yticks=[], aspect="equal")
    axes.grid(visible=False)


def _ends() -> Table:
    queries = grid(41)
    rows: list[list[Cell]] = []
    for name, omega in MAPS.items():
        for beta in BETAS:
            memory = Memory(PATTERNS, omega, beta)
            found = memory.retrieve(queries, max_steps=500, tol=1e-9)
            shares = size_histogram(metastable_sizes(found.weights, threshold(omega)), 4)
            certified = "" if chooses_several(omega) else str(int(memory.certify().stationary.sum()))
            rows.append([name, f"{beta:g}", certified, *(f"{share:.1f}" for share in shares)])
    return Table(
        ["", "β", "stationary", "1", "2", "3", "4", "more"],
        rows,
        caption="How many of the six patterns are certified as stationary, and the sizes of the states in which "
        "queries end: percent of a grid of 41 × 41 (softmax: weights over 0.01).",
        paper="Section 5.1 tells the trend; Table 1 counts the same on MNIST.",
    )
