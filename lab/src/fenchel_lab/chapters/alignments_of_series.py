"""Alignments of time series: dynamic time warping, hard and soft, dense and sparse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fenchel import Gini, Hard, Regularizer, Shannon
from fenchel.dp import Alignment, barycenter, dtw
from fenchel_lab.data import ucr
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

OMEGAS: dict[str, Regularizer] = {"hard": Hard(), "Shannon": Shannon(), "Gini": Gini()}
ALIGNED_GAMMA, AVERAGED_GAMMA = 0.1, 1.0
GAMMAS = (0.01, 0.1, 1.0, 10.0)
WIDE_GAMMAS = tuple(10.0**power for power in range(-4, 4))
SETS = ("ItalyPowerDemand", "GunPoint", "ArrowHead")
MORE_SETS = (*SETS, "OSULeaf")
CELLS = 4_000_000
"""How many cells of alignments are computed at once."""

ARCHIVE = {
    ("ItalyPowerDemand", "Euclid"): 95.53,
    ("ItalyPowerDemand", "hard"): 95.04,
    ("GunPoint", "Euclid"): 91.33,
    ("GunPoint", "hard"): 90.67,
    ("ArrowHead", "Euclid"): 80.00,
    ("ArrowHead", "hard"): 70.29,
}
"""Accuracies that the UCR archive lists for its default splits, in percent."""

AVERAGED = 8
STEPS = 60

SUMMARY = """
Dynamic time warping aligns two series, step by step and without going back, at the lowest cost. Each alignment is a
path through the matrix of squared distances; `Alignment(costs, omega=omega)` replaces the minimum in its recursion
by the smoothed one of Ω, and `.marginals` is the expected alignment: how likely it is that a path of the random walk
passes through a cell. With `gamma * Shannon()` this is soft-DTW, and every cell has some mass, though it may be too
little for a float; with `gamma * Gini()` most have exactly none.

The smoothed cost has a gradient everywhere, so that it can be minimised: the barycenter of some series is the
series that is nearest to all of them. As a distance, it finds the nearest neighbour of a series of unknown class.
"""

EMBEDDED = """
Here with series of the cylinder-bell-funnel kind, made at random as Saito (1994) says: a flat, a rising or a falling
part at some place, of some length, in noise. On series of the UCR archive run the command below with `FENCHEL_DATA`
set.
"""

REAL = """
Series of the UCR archive, its own splits. γ is chosen among {gammas} by leaving one training series out at a time.
"""


@dataclass(frozen=True)
class Labelled:
    """Series (B, N, 1) of equal length, and the number of each one's class."""

    values: Tensor
    classes: Tensor


@dataclass(frozen=True)
class Problem:
    """Series to learn from, and to classify."""

    name: str
    train: Labelled
    test: Labelled


CODE = """
import torch, fenchel
from fenchel.dp import Alignment

x, y = torch.sin(torch.linspace(0, 6, 12)), torch.sin(torch.linspace(-0.5, 6, 10))
costs = (x[:, None] - y).square()[None]  # (pairs, steps of x, steps of y)
for omega in (fenchel.Shannon(), fenchel.Gini()):
    cells = Alignment(costs, omega=omega).marginals
    print(f"{omega}: {int((cells > 0).sum())} of {cells.numel()} cells may be on the path")
"""


@study(
    "Alignments of series",
    source="Blondel (2019), Structured Attention and Differentiable Dynamic Programming, expected alignments; Mensch & "
    "Blondel (2018); Cuturi & Blondel (2017)",
    order=4,
    theme="Dynamic programs",
    code=CODE,
    data=["ucr"],
    full="With `--full` the set OSULeaf is added and eight values of γ are tried, from 1e-4 to 1e3. "
    "The talk classifies no series, so that sets and γ are ours.",
)
def alignments_of_series(context: Context) -> Result:
    """Draw expected alignments and barycenters, and classify by the nearest neighbour."""
    problems, gammas = _setting(context)
    drawn = problems[min(1, len(problems) - 1)]
    text = EMBEDDED if context.data is None else REAL.format(gammas=", ".join(f"{gamma:g}" for gamma in gammas))
    same = drawn.train.values[drawn.train.classes == drawn.train.classes[0]]
    context.progress(0.0, "alignments")
    figures = [_alignments(same[0], same[1], drawn.name), _barycenters(same[:AVERAGED], drawn.name)]
    return Result(SUMMARY + text, figures=figures, tables=[_accuracies(problems, gammas, context)])


def distances(x: Tensor, y: Tensor, omega: Regularizer | None, gamma: float = 1.0) -> Tensor:
    """Between all series x (A, N, 1) and y (B, M, 1): without Ω squared Euclid's, else the smoothed cost to align."""
    if omega is None:
        return (x.unsqueeze(1) - y).square().sum((-1, -2))
    rows, columns = (
        index.flatten() for index in torch.meshgrid(torch.arange(len(x)), torch.arange(len(y)), indexing="ij")
    )
    together = max(1, CELLS // (x.shape[1] * y.shape[1]))
    parts = [
        dtw(x[i], y[j], gamma=gamma, omega=omega)
        for i, j in zip(torch.split(rows, together), torch.split(columns, together), strict=True)
    ]
    return torch.cat(parts).view(len(x), len(y))


def accuracy(train: Tensor, test: Tensor, distance: Tensor) -> float:
    """Of nearest neighbours: classes of the columns, of the rows, and distances (rows, columns)."""
    return (train[distance.argmin(1)] == test).double().mean().item()


@torch.no_grad()
def classify(problem: Problem, omega: Regularizer | None, gammas: Sequence[float]) -> tuple[float, float]:
    """The accuracy on the test series, and the γ that is best on the training series, each without itself."""
    train, test = problem.train, problem.test
    best, chosen = -1.0, 1.0
    for gamma in gammas if len(gammas) > 1 else ():
        among = distances(train.values, train.values, omega, gamma).fill_diagonal_(torch.inf)
        found = accuracy(train.classes, train.classes, among)
        if found > best:
            best, chosen = found, gamma
    return accuracy(train.classes, test.classes, distances(test.values, train.values, omega, chosen)), chosen


def _setting(context: Context) -> tuple[list[Problem], Sequence[float]]:
    if context.data is None:
        return [Problem("cylinder-bell-funnel", made_up(24, context.seed), made_up(60, context.seed + 1))], (0.1, 1.0)
    problems = []
    for name in MORE_SETS if context.full else SETS:
        train, test = ucr.load(name, "train", context.data), ucr.load(name, "test", context.data)
        number = {label: i for i, label in enumerate(sorted(set(train.labels)))}
        problems.append(Problem(name, _labelled(train, number), _labelled(test, number)))
    return problems, WIDE_GAMMAS if context.full else GAMMAS


def _labelled(series: ucr.Series, number: dict[str, int]) -> Labelled:
    values = torch.tensor(np.stack(series.values), dtype=torch.float32)
    return Labelled(values, torch.tensor([number[label] for label in series.labels]))


def made_up(count: int, seed: int, length: int = 64) -> Labelled:
    """Cylinder, bell and funnel in turn, scaled to mean 0 and variance 1."""
    random = torch.Generator().manual_seed(seed)
    classes = torch.arange(count) % 3
    start = torch.randint(length // 8, length // 4, (count, 1), generator=random)
    end = start + torch.randint(length // 4, 3 * length // 4, (count, 1), generator=random)
    time = torch.arange(length)
    height = 6 + torch.randn(count, 1, generator=random)
    within = (time >= start) & (time <= end)
    rising = (time - start) / (end - start)
    shape = torch.stack([torch.ones_like(rising), rising, 1 - rising])[classes, torch.arange(count)]
    values = height * within * shape + torch.randn(count, length, generator=random)
    values = (values - values.mean(1, keepdim=True)) / values.std(1, keepdim=True)
    return Labelled(values.unsqueeze(-1), classes)


def _alignments(x: Tensor, y: Tensor, name: str) -> Figure:
    costs = (x - y.mT).square().unsqueeze(0).double()
    expected = {key: Alignment(costs, omega=ALIGNED_GAMMA * omega).marginals[0] for key, omega in OMEGAS.items()}
    drawing, panels = style.panels(2, 2, height=2.1)
    panels[0].plot(x, label="x")
    panels[0].plot(y, label="y")
    low, high = float(torch.minimum(x, y).min()), float(torch.maximum(x, y).max())
    room = 0.3 * (high - low)  # for the legend
    panels[0].set(title=name, xlabel="step", yticks=[], ylim=(low - room, high + 0.1 * room))
    panels[0].legend(loc="lower center", ncols=2)
    path = Alignment(costs, omega=Hard()).map()[0]
    path = path[(path >= 0).all(-1)]
    for axes, (key, p) in zip(panels[1:], expected.items(), strict=True):
        shown = torch.where(p > 0, p, torch.nan)  # what has no mass stays blank
        axes.imshow(
            shown.numpy(), cmap=style.MASS, vmin=0, vmax=1, interpolation="nearest", origin="lower", aspect="auto"
        )
        if key != "hard":
            axes.plot(path[:, 1], path[:, 0], color=style.PALETTE[1], linewidth=0.8)
        axes.set(title=f"{key}: {int((p > 0).sum())} cells", xlabel="step of y", ylabel="step of x")
        axes.grid(False)
    return Figure(
        drawing,
        caption=f"Two series of one class ({name}), and the probability that an alignment passes through a "
        f"cell, for γ = {ALIGNED_GAMMA:g}; blank is zero in float64, the thin line is the hard alignment. Of "
        f"{costs.numel()} cells, the titles count those with mass.",
        alt="Two series of similar shape. Hard: a staircase from corner to corner. Shannon: a wide cloud around it. "
        "Gini: a cloud with sharp edges that keeps to fewer cells, narrow where the series are steep.",
        paper="The paper draws the expected alignment over the hard one under both regularizers: a dense cloud for the "
        "entropy, fewer cells for the squared norm. So it is here.",
    )


def _barycenters(series: Tensor, name: str) -> Figure:
    centers = {"mean": series.mean(0)}
    centers |= {
        key: barycenter(series, gamma=AVERAGED_GAMMA, omega=omega, max_iter=STEPS) for key, omega in OMEGAS.items()
    }
    drawing, panels = style.panels(2, 2, height=1.7, sharex=True, sharey=True)
    for axes, (key, center) in zip(panels, centers.items(), strict=True):
        axes.plot(series[..., 0].mT, color=style.FAINT, linewidth=0.8)
        axes.plot(center, color=style.PALETTE[0])
        axes.set(title=key, yticks=[])
    drawing.supxlabel("step", fontsize=9)
    return Figure(
        drawing,
        caption=f"{len(series)} series of one class ({name}), and what is nearest to all: their mean, and the minimum "
        "of the mean cost of alignment with no, Shannon's and Gini's regularizer "
        f"(γ = {AVERAGED_GAMMA:g}, found by L-BFGS from the mean).",
        alt="Four panels. The mean blurs what happens at different times; barycenters under alignment keep its shape, "
        "jagged without a regularizer and smooth with one.",
        paper="Cuturi and Blondel draw barycenters of soft-DTW beside those of hard DTW, and find them smoother; "
        "Gini's are ours.",
    )


def _accuracies(problems: Sequence[Problem], gammas: Sequence[float], context: Context) -> Table:
    ways: list[tuple[str, Regularizer | None, Sequence[float]]] = [("Euclid", None, (1.0,)), ("hard", Hard(), (1.0,))]
    ways += [("Shannon", Shannon(), gammas), ("Gini", Gini(), gammas)]
    rows: list[list[Cell]] = []
    for number, problem in enumerate(problems):
        for turn, (key, omega, tried) in enumerate(ways):
            context.progress((number + turn / len(ways)) / len(problems), f"{problem.name}, {key}")
            found, gamma = classify(problem, omega, tried)
            listed = ARCHIVE.get((problem.name, key))
            chosen = f"{gamma:g}" if len(tried) > 1 else "–"
            rows.append([problem.name, key, chosen, "–" if listed is None else f"{listed:.2f}", f"{100 * found:.2f}"])
    return Table(
        ["series", "distance", "γ", "archive", "accuracy"],
        rows,
        caption="Accuracy of the nearest neighbour, in percent, by squared Euclidean distance, and by the cost of "
        "alignment, hard and smoothed.",
        paper="The archive's own accuracies for Euclid and for hard warping without a window stand beside ours.",
    )
