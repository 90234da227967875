"""Regularization paths: how each map moves from a single choice to all of them as the temperature rises."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from torch import Tensor

from fenchel import Gini, Hard, KSubsets, Norm, Regularizer, Shannon, SparseMAP, Tsallis, support_size
from fenchel.structures import SequentialSubsets
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.measure import first

THETA = torch.tensor([1.0716, -1.1221, -0.3288, 0.3368, 0.0425], dtype=torch.float64)

# Two a row: Tsallis on the left, norms and the limit of no regularizer on the right.
MAPS: list[tuple[str, Regularizer]] = [
    ("1-entmax (softmax)", Shannon()),
    ("2-normmax", Norm(2.0)),
    ("1.5-entmax", Tsallis(1.5)),
    ("5-normmax", Norm(5.0)),
    ("2-entmax (sparsemax)", Gini()),
    ("∞-normmax", Norm(math.inf)),
    ("4-entmax", Tsallis(4.0)),
    ("argmax", Hard()),
]

COLDEST, HOTTEST = 0.1, 10.0
SEARCHED = (0.01, 100.0)
BONUS = 2.0
"""For two chosen neighbours, in the panel of sequential subsets."""
TABULATED = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

SUMMARY = """
Five choices have the scores θ = [1.0716, −1.1221, −0.3288, 0.3368, 0.0425]. A map turns them into
probabilities, `omega.argmax(theta / T)`; the temperature T = 1/β says how much the regularizer counts. Cold, all
mass goes to the best score; hot, it spreads until it is uniform.

What differs is the way from one to the other. Softmax gives every choice some mass at every temperature. Entmax
with α > 1 and normmax give exact zeros: choices enter one after the other as it gets hotter. Normmax shares more
evenly among those that are in, and ∞-normmax gives all of them the same. Argmax does not regularize, so the
temperature does not matter to it.

The same can be asked of k choices at once: `KSubsets(k)` gives each choice a share between 0 and 1, with sum k. Cold,
it takes the k best whole; hot, it shares k evenly. `SparseMAP(SequentialSubsets(k, transition))` adds a bonus for every
pair of neighbours that are chosen together, here {bonus:g}: cold, it takes neighbours whose sum of scores and bonuses
is highest.
"""

CODE = """
import torch, fenchel

scores = torch.tensor([1.0, 0.6, 0.2])
for temperature in (0.2, 0.5, 1.0, 2.0):
    rows = {f"{omega}": (temperature * omega).argmax(scores).tolist() for omega in (fenchel.Shannon(), fenchel.Gini())}
    print(temperature, {name: [round(p, 2) for p in row] for name, row in rows.items()})
"""


@study(
    "Regularization paths",
    source="Santos, Niculae, McNamee & Martins (2024), Sparse and Structured Hopfield Networks, figures 2 and 5",
    order=1,
    theme="Maps",
    code=CODE,
)
def paths(context: Context) -> Result:
    """Draw the path of every map, and count its support along the way."""
    return Result(
        SUMMARY.format(bonus=BONUS),
        figures=[_figure(), _subsets(), _surfaces()],
        tables=[_supports(), _thresholds(context)],
    )


def path(omega: Regularizer, temperatures: Tensor) -> Tensor:
    """argmax_Ω(θ/T), one row per temperature."""
    return omega.argmax(THETA / temperatures.unsqueeze(-1))


def sequential_path(k: int, bonus: float, temperatures: Tensor) -> Tensor:
    """The same for sequential k-subsets: scores and bonuses are both divided by the temperature."""
    structure = SequentialSubsets(k, transition=(bonus / temperatures).unsqueeze(-1).expand(-1, len(THETA) - 1))
    return SparseMAP(structure).argmax(THETA / temperatures.unsqueeze(-1))


def hard_until(k: int, bonus: float = 0.0) -> float:
    """The temperature T up to which one subset is taken whole: it leads every other by T/2 per differing place."""
    subsets = torch.tensor([[i in chosen for i in range(len(THETA))] for chosen in combinations(range(len(THETA)), k)])
    scores = subsets.to(THETA) @ THETA + bonus * (subsets[:, 1:] & subsets[:, :-1]).sum(-1)
    best = int(scores.argmax())
    differing = (subsets ^ subsets[best]).sum(-1)
    leads = 2 * (scores[best] - scores) / differing
    return float(leads[differing > 0].min())


def _figure() -> Figure:
    temperatures = torch.logspace(math.log10(COLDEST), math.log10(HOTTEST), 400, dtype=torch.float64)
    rows = -(-len(MAPS) // 2)
    drawing, panels = style.panels(rows, 2, height=1.5, sharex=True, sharey=True)
    for axes, (name, omega) in zip(panels, MAPS, strict=False):
        _draw(axes, name, path(omega, temperatures), temperatures)
        edge = shared_from(omega)
        if COLDEST < edge < HOTTEST:
            axes.axvline(edge, color=style.MUTED, linewidth=1, linestyle=":")
    for axes in panels[len(MAPS) :]:
        axes.remove()
    _label(drawing, "probability")
    return Figure(
        drawing,
        caption="Probability of each of five choices against the temperature, one panel a map; a line is a choice, "
        "best score first. Left of a dotted line the map is one-hot.",
        alt="Eight panels. Softmax is dense at every temperature. Entmax and normmax start one-hot when cold, then "
        "admit the other choices one after the other; normmax shares more evenly, ∞-normmax in equal steps. "
        "Argmax stays one-hot.",
        paper="Figures 2 and 5 draw such paths for the same θ; the paper reads from them that normmax is closer to "
        "uniform over the chosen support than entmax, that entmax tends to argmax as α grows, and that ∞-normmax is "
        "uniform on a sparse support. All of it is seen here. The axis is ours: logarithmic, so that both ends show.",
    )


def _subsets() -> Figure:
    temperatures = torch.logspace(math.log10(COLDEST), math.log10(HOTTEST), 400, dtype=torch.float64)
    drawing, panels = style.panels(2, 2, height=1.6, sharex=True, sharey=True)
    drawn = {f"{k}-subsets": (path(KSubsets(k), temperatures), hard_until(k)) for k in (2, 3)}
    drawn |= {
        f"sequential {k}-subsets": (sequential_path(k, BONUS, temperatures), hard_until(k, BONUS)) for k in (2, 3)
    }
    for axes, (name, (shares, edge)) in zip(panels, drawn.items(), strict=True):
        _draw(axes, name, shares, temperatures)
        axes.axvline(edge, color=style.MUTED, linewidth=1, linestyle=":")
    _label(drawing, "share")
    return Figure(
        drawing,
        caption="Share of each of five choices when k are made at once, against the temperature. Left of the dotted "
        f"line one subset is taken whole: the k best, or, with a bonus of {BONUS:g} for two neighbours (below), the "
        "last k entries of θ, which stand side by side, although the best score is not among them.",
        alt="Four panels. Cold, two or three choices have share one and the others none: those with the best scores "
        "above, others below. As it gets hotter the rest enter one after the other and the shares come closer.",
        paper="Figures 2 and 5 draw such paths for the same θ, k-hot where it is cold enough for the margin of 1, as "
        "here. The axis is ours, and so is the bonus, which the paper does not tell.",
    )


def _surfaces() -> Figure:
    """The first entry of softmax and of sparsemax of [t₁, t₂, 0], over the plane."""
    drawing = Drawing(figsize=(style.WIDTH, 2.5), layout="constrained")
    shades = LinearSegmentedColormap.from_list("mass", [style.FAINT, style.PALETTE[0]])
    line = torch.linspace(-3, 3, 61, dtype=torch.float64)
    first_score, second_score = torch.meshgrid(line, line, indexing="ij")
    scores = torch.stack([first_score, second_score, torch.zeros_like(first_score)], -1)
    for number, (name, omega) in enumerate((("softmax", Shannon()), ("sparsemax", Gini())), 1):
        axes: Any = drawing.add_subplot(1, 2, number, projection="3d")
        height = omega.argmax(scores)[..., 0]
        axes.plot_surface(
            first_score.numpy(),
            second_score.numpy(),
            height.numpy(),
            cmap=shades,
            vmin=0,
            vmax=1,
            rcount=17,
            ccount=17,
            linewidth=0.25,
            edgecolor=style.MUTED,
        )
        axes.set(xticks=[-3, 0, 3], yticks=[-3, 0, 3], zticks=[0, 0.5, 1], zlim=(0, 1))
        axes.set_xlabel("t₁", labelpad=-6)
        axes.set_ylabel("t₂", labelpad=-6)
        axes.tick_params(pad=-3, labelsize=7)
        axes.set_title(name, loc="center")
        axes.view_init(elev=24, azim=-125)
        for side in (axes.xaxis, axes.yaxis, axes.zaxis):
            side.set_pane_color((0, 0, 0, 0))
    return Figure(
        drawing,
        caption="The probability of the first of three choices with the scores [t₁, t₂, 0], over t₁ and t₂.",
        alt="Two surfaces that rise from 0 to 1 with t₁ and fall with t₂. Softmax's is curved everywhere; sparsemax's "
        "is made of flat pieces: a floor at 0, a ceiling at 1, and ramps between them.",
        paper="Martins's talk draws sparsemax in two and three dimensions: piecewise linear, with plateaus at 0 and 1. "
        "So it is here.",
    )


def _draw(axes: Axes, name: str, shares: Tensor, temperatures: Tensor) -> None:
    """One panel: a line a choice, best score first."""
    for colour, i in zip(style.PALETTE, _best_first(), strict=False):
        axes.plot(temperatures, shares[:, i], color=colour)
    axes.set(title=name, xscale="log", xlim=(COLDEST, HOTTEST), ylim=(-0.03, 1.03), yticks=[0, 0.5, 1])
    axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    axes.minorticks_off()


def _label(drawing: Drawing, quantity: str) -> None:
    """What all panels share: the axes, and which line is which score."""
    drawing.supxlabel("temperature T = 1/β", fontsize=9)
    drawing.supylabel(quantity, fontsize=9)
    keys = [Line2D([], [], color=colour) for colour in style.PALETTE[: len(THETA)]]
    names = [f"{THETA[i]:.2f}".replace("-", "−") for i in _best_first()]
    drawing.legend(
        keys, names, title="score θ", title_fontsize=8.5, ncols=len(keys), loc="outside upper center", columnspacing=1.2
    )


def _best_first() -> list[int]:
    order: list[int] = THETA.argsort(descending=True).tolist()
    return order


def _supports() -> Table:
    temperatures = torch.tensor(TABULATED, dtype=torch.float64)
    return Table(
        ["map, at T =", *(f"{t:g}" for t in TABULATED)],
        [[name, *support_size(path(omega, temperatures)).tolist()] for name, omega in MAPS],
        caption="How many of the five choices have mass at a temperature T.",
        paper="Of entmax and normmax it is said that both tend to be sparse (section 2.2).",
    )


def _thresholds(context: Context) -> Table:
    rows = []
    for number, (name, omega) in enumerate(MAPS, 1):
        predicted = one_hot_until(omega)
        shared = shared_from(omega)
        rows.append([name, _temperature(predicted), _temperature(shared)])
        context.progress(number / len(MAPS), name)
    return Table(
        ["map", "paper: lead/m", "measured"],
        rows,
        caption="Up to which temperature the map is one-hot: predicted, and measured as the lowest temperature at "
        f"which a second choice has mass (float64, bisection between {SEARCHED[0]:g} and {SEARCHED[1]:g}).",
        paper="A loss with margin m is zero, and its map one-hot, exactly when the best score leads by m (Definition "
        f"1), so here up to T = lead/m with a lead of {_lead():.4f}; m is 1/(α−1) for α-entmax and 1 for normmax.",
    )


def one_hot_until(omega: Regularizer) -> float:
    """The temperature up to which theory has the map one-hot: 0 without a margin, ∞ with a margin of 0."""
    margin = omega.margin
    assert isinstance(margin, float)
    return _lead() / margin if margin else math.inf


def shared_from(omega: Regularizer) -> float:
    """The temperature from which on a second choice has mass: 0 if always, ∞ if never."""

    def shared(temperature: float) -> bool:
        return support_size(omega.argmax(THETA / temperature)).item() > 1

    lowest = first(shared, *SEARCHED)
    return math.inf if lowest is None else 0.0 if lowest == SEARCHED[0] else lowest


def _lead() -> float:
    best, second = THETA.topk(2).values.tolist()
    return float(best - second)


def _temperature(t: float) -> str:
    return "never" if t == 0 else "always" if t == math.inf else f"{t:.4f}"
