"""Mixed distributions: probability on the corners, the edges and the inside of a simplex, drawn face by face."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.patches import Polygon
from torch import Tensor
from torch.distributions import Distribution

from fenchel import mixed
from fenchel.mixed import Concrete, GaussianSparsemax, HardConcrete, LogisticNormal, MaximumEntropy, Mixed
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study

BLUE, VERMILION, GREEN, PINK, *_ = style.PALETTE
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])
"""Of the triangle that three vertices make, counter-clockwise from the bottom left."""
GRID = 48
"""How fine the inside of a triangle is drawn."""
BITS = 8
SAMPLES = 20_000
LOC, SCALE = (0.2, 0.05, -0.15), 0.6

SUMMARY = f"""
Is John's location discrete or continuous? He is 15 hours at home, 8 at work, and 1 on the way: it is mixed. A
distribution on the closed simplex has a probability for each face (corner, edge, inside) and a density on it. Corners
alone are a categorical distribution; the inside alone is what a Dirichlet, a Logistic-Normal or a Concrete has;
`fenchel.mixed` has what lies between. `GaussianSparsemax` is sparsemax of a Gaussian, `HardConcrete` sparsemax of a
stretched Concrete, and `MixedDirichlet` draws a face by a score for each vertex, then a point on it. All are torch
distributions.

The entropy of the face and of the point on it, H(F) + H(Y | F), is the length of a code: faces without loss,
coordinates with N bits each. No distribution over two vertices needs more than log₂(2 + 2ᴺ) bits. The first table tells
the bits for N = 0 and N = {BITS}, the second counts samples beside the probabilities of faces.
"""

CODE = """
import torch
from fenchel.mixed import GaussianSparsemax

y = GaussianSparsemax(torch.zeros(3), scale=torch.ones(3))
values = y.rsample((1000,))
sizes = (values > 0).sum(-1)
print("on a vertex, an edge, inside:", [f"{(sizes == n).float().mean():.0%}" for n in (1, 2, 3)])
"""


@study(
    "Between discrete and continuous",
    source="Martins (2024), From Sparse Modeling to Sparse Communication: John's life, Logistic-Normal against "
    "Gaussian-Sparsemax; Farinhas et al. (2022), Sparse Communication via Mixed Distributions",
    order=81,
    theme="Between discrete and continuous",
    code=CODE,
)
def faces(context: Context) -> Result:
    """Draw mixed distributions over two and three vertices, tell their bits, count their samples."""
    figures = [_john(), _triangles(), _lines()]
    context.progress(0.6, "drawn")
    tables = [_bits(), _counts()]
    context.progress(1.0, "counted")
    return Result(SUMMARY, figures=figures, tables=tables)


def a_day(*hours: float, way: float) -> mixed.MixedDirichlet:
    """So many hours in each place, ``way`` hours between them: one score a place, uniform on the way.

    With weights t·hours for the corners, those of all faces together are Π(1 + t·hours) − 1. The hours on the way are
    what they have beyond t·Σhours, which grows with t: bisection.
    """
    places = torch.tensor(hours, dtype=torch.float64)
    low, high = 0.0, 1.0
    for _ in range(60):
        t = (low + high) / 2
        corners = t * places.sum()
        beyond = torch.log1p(t * places).sum().expm1() - corners
        low, high = (t, high) if beyond * places.sum() < way * corners else (low, t)
    return mixed.MixedDirichlet((t * places).log(), torch.ones(1, dtype=torch.float64))


def duration(p: float) -> str:
    """A share of a day in hours, minutes or seconds."""
    for seconds, name in ((3600, "h"), (60, "min")):
        if 86400 * p > 0.999 * seconds:
            return f"{86400 * p / seconds:.0f} {name}"
    return f"{86400 * p:.0f} s"


def _john() -> Figure:
    drawing, (line, triangle) = style.panels(2, 1, height=2.5)
    work = a_day(15.0, 8.0, way=1.0)
    hours = 24 * work.face_log_prob(mixed.faces(2)).exp()
    line.vlines([0, 1], 0, hours[:2], color=VERMILION, linewidth=5)
    line.fill_between([0, 1], float(hours[2]), color=BLUE, alpha=0.35, linewidth=0)
    for x, y, text in (
        (0.03, 13, f"{hours[0]:.0f} h"),
        (0.9, 6.5, f"{hours[1]:.0f} h"),
        (0.43, 2, f"{hours[2]:.0f} h"),
    ):
        line.text(x, y, text)
    line.set(title="two places", xlim=(-0.06, 1.06), ylim=(0, 16), ylabel="hours")
    line.set_xticks([0, 0.5, 1], ["home", "half way", "work"])
    pub = a_day(13.0, 8.0, 2.0, way=1.0)
    ternary(triangle, ("home", "work", "pub"), title="three places")
    masses(triangle, pub, duration, profile=3)
    return Figure(
        drawing,
        caption="John's day, without and with two hours in the pub: areas of circles and heights over edges are time. "
        "How the hour on the way splits follows from one score a place.",
        alt="Top: spikes of 15 hours at home and 8 at work, and one hour spread evenly between them. Bottom: a "
        "triangle with circles for 13 hours at home, 8 at work and 2 in the pub; thin bands along its edges for the "
        "minutes on the way, most between home and work.",
        paper="The talk has the hours (home and work 15 and 8 without the pub, 2 in it) and the question; the two "
        "hours are taken off home here, and the split of the hour on the way is ours.",
    )


def _triangles() -> Figure:
    drawing, panels = style.panels(1, 2, height=2.0)
    loc = torch.tensor(LOC, dtype=torch.float64)
    scale = torch.full_like(loc, SCALE)
    names = ("1", "2", "3")
    for axes, title, y in (
        (panels[0], "Logistic-Normal", LogisticNormal(loc, scale=scale)),
        (panels[1], "Gaussian-Sparsemax", GaussianSparsemax(loc, scale=scale)),
    ):
        ternary(axes, names, title=title)
        inside(axes, y)
        if isinstance(y, Mixed):
            masses(axes, y, lambda p: f"{p:.0%}")
    return Figure(
        drawing,
        caption=f"Softmax and sparsemax of one Gaussian, μ = ({', '.join(f'{m:g}' for m in LOC)}), σ = {SCALE:g}. "
        "Blue: the density inside. Vermilion: circles for corners, their area the probability; profiles over edges, "
        "the density there. Figures are the probabilities of faces.",
        alt="Two triangles. The Logistic-Normal is a smooth blue hill in the middle with nothing on the boundary. The "
        "Gaussian-Sparsemax is cut off by the boundary: circles on its corners, profiles outside of its edges.",
        paper="The talk's picture shows the same: all mass inside for the Logistic-Normal, some on every face for the "
        "Gaussian-Sparsemax.",
    )


def ternary(axes: Axes, names: tuple[str, str, str], title: str) -> None:
    """An empty triangle, its corners named."""
    axes.add_patch(Polygon(CORNERS, fill=False, edgecolor=style.INK, linewidth=0.8, zorder=3))
    for (x, y), name, sideways, up in zip(CORNERS, names, (-0.05, 0.05, 0.0), (-0.15, -0.15, 0.13), strict=True):
        axes.text(x + sideways, y + up, name, ha="center", va="center", fontsize=8, color=style.MUTED)
    axes.set(title=title, aspect="equal", xlim=(-0.28, 1.28), ylim=(-0.28, 1.06))
    axes.axis("off")


def inside(axes: Axes, y: Distribution) -> None:
    """The density on the inside of three vertices, shaded."""
    steps = [(i, j, GRID - i - j) for i in range(GRID + 1) for j in range(GRID + 1 - i)]
    value = torch.tensor(steps, dtype=torch.float64) / GRID
    x = value.numpy() @ CORNERS
    within = 0.999 * value + 0.001 / 3  # next to the boundary, not on it
    density = y.log_prob(within).exp().numpy()
    axes.tripcolor(x[:, 0], x[:, 1], density, shading="gouraud", cmap=style.DENSITY, vmin=0, rasterized=True)


def masses(axes: Axes, y: Mixed, text: Callable[[float], str], profile: float = 0.35) -> None:
    """Circles for corners, profiles for edges, and what ``text`` says of each face's probability.

    ``profile`` is how high a density of one over an edge is drawn, in lengths of an edge.
    """
    probabilities = y.face_log_prob(mixed.faces(3)).exp().tolist()
    outline = [patheffects.withStroke(linewidth=2, foreground=style.PAPER)]
    middle = CORNERS.mean(0)
    label: dict[str, Any] = {"va": "center", "fontsize": 8, "path_effects": outline, "zorder": 5}
    for corner, p, sideways, align in zip(
        CORNERS, probabilities, (-0.11, 0.1, 0.06), ("right", *["left"] * 2), strict=False
    ):
        axes.scatter(corner[0], corner[1], s=700 * p, color=VERMILION, zorder=4, linewidth=0)
        axes.text(corner[0] + sideways, corner[1] + 0.02, text(p), ha=align, **label)
    t = torch.linspace(0, 1, 61, dtype=torch.float64)[1:-1]
    for face, p in zip(mixed.faces(3)[3:6], probabilities[3:6], strict=True):
        i, j = face.nonzero().flatten().tolist()
        value = torch.zeros(len(t), 3, dtype=torch.float64)
        value[:, i], value[:, j] = t, 1 - t
        outward = (CORNERS[i] + CORNERS[j]) / 2 - middle
        outward /= np.linalg.norm(outward)
        height = profile * y.log_prob(value).exp().numpy()
        outer = np.concatenate([CORNERS[[j]], value.numpy() @ CORNERS + height[:, None] * outward, CORNERS[[i]]])
        axes.add_patch(Polygon(outer, color=VERMILION, alpha=0.45, linewidth=0, zorder=2))
        x, up = (CORNERS[i] + CORNERS[j]) / 2 + outward * (height[len(height) // 2] + 0.08)
        align = "center" if abs(outward[0]) < 0.1 else "left" if outward[0] > 0 else "right"
        axes.text(x, up, text(p), ha=align, **label)
    axes.text(middle[0], middle[1], text(probabilities[6]), ha="center", **label)


def _members() -> list[tuple[str, Mixed, Distribution | None, str]]:
    loc, logits = (torch.tensor(each, dtype=torch.float64) for each in ((0.35, 0.0), (0.4, 0.0)))
    temperature, scale = torch.tensor(0.7, dtype=torch.float64), torch.full((2,), 0.6, dtype=torch.float64)
    w, alpha = (torch.tensor(each, dtype=torch.float64) for each in ((0.3, -0.3), (2.0, 3.0)))
    return [
        (
            "Gaussian-Sparsemax",
            GaussianSparsemax(loc, scale=scale),
            LogisticNormal(loc, scale=scale),
            "Logistic-Normal",
        ),
        ("Hard Concrete", HardConcrete(logits, temperature, 1.3), Concrete(temperature, logits=logits), "Concrete"),
        ("Mixed Dirichlet", mixed.MixedDirichlet(w, alpha), None, ""),
        ("largest entropy, N = 0", MaximumEntropy(2, torch.zeros((), dtype=torch.float64)), None, ""),
    ]


def _lines() -> Figure:
    drawing, panels = style.panels(2, 2, height=2.1, sharex=True, sharey=True)
    t = torch.linspace(0, 1, 203, dtype=torch.float64)[1:-1]
    value = torch.stack([t, 1 - t], -1)
    for axes, (name, y, rival, rivals_name) in zip(panels, _members(), strict=True):
        axes.plot(t, y.log_prob(value).exp(), color=BLUE)
        axes.fill_between(t.numpy(), y.log_prob(value).exp().numpy(), color=BLUE, alpha=0.2, linewidth=0)
        first, second, _ = y.face_log_prob(mixed.faces(2)).exp().tolist()
        axes.vlines([0, 1], 0, [second, first], color=VERMILION, linewidth=3)
        axes.plot([0, 1], [second, first], "o", color=VERMILION, markersize=5, clip_on=False)
        if rival is not None:
            density = rival.log_prob(value).exp()
            axes.plot(t, density, "--", color=style.MUTED, linewidth=1, label=rivals_name)
            axes.legend(loc="upper left", fontsize=7.5)
        axes.set(title=name.split(",")[0], xlim=(-0.05, 1.05), ylim=(0, 2.7))
    for axes in panels[2:]:
        axes.set_xlabel("y₁")
    for axes in panels[::2]:
        axes.set_ylabel("density, probability")
    return Figure(
        drawing,
        caption="Two vertices. Blue: the density between them; vermilion: the probability of each. Dashed, what "
        "softmax has in place of sparsemax: no probability at the ends.",
        alt="Four panels over the unit interval, each with a density and a spike at both ends. The dashed "
        "Logistic-Normal and Concrete have no spikes. That of largest entropy is flat, as high as "
        "both spikes, one third.",
        paper="The talk names both truncated densities of the binary case, the rectified Gaussian and the binary Hard "
        "Concrete.",
    )


def _bits() -> Table:
    rows: list[list[str | int | float]] = []
    for name, y, _, _ in _members():
        first, second, edge = y.face_log_prob(mixed.faces(2)).exp().tolist()
        lengths = [float(y.code_length(bits)) for bits in (0, BITS)]
        rows.append([name, first, second, edge, float(y.face_entropy()) / math.log(2), *lengths])
    largest = MaximumEntropy(2, torch.tensor(float(BITS), dtype=torch.float64))
    probabilities = largest.face_log_prob(mixed.faces(2)).exp().tolist()
    lengths = [float(largest.code_length(bits)) for bits in (0, BITS)]
    rows.append([f"largest entropy, N = {BITS}", *probabilities, float(largest.face_entropy()) / math.log(2), *lengths])
    most = [maximum_bits(0), maximum_bits(BITS)]
    rows.append(["at most", "", "", "", "", *most])
    return Table(
        ["distribution", "P(1)", "P(2)", "P(edge)", "H(F), bits", "bits, N = 0", f"bits, N = {BITS}"],
        rows,
        caption="Two vertices: probabilities of faces, the entropy of the face, and the length of a code. All exact or "
        "by quadrature.",
        paper="log₂(2 + 2ᴺ) bits at most, against log₂ 2 = 1 for two vertices alone.",
    )


def maximum_bits(precision: float) -> float:
    """The closed form for two vertices."""
    return math.log2(2 + 2**precision)


def _counts() -> Table:
    loc = torch.tensor(LOC, dtype=torch.float64)
    y = GaussianSparsemax(loc, scale=torch.full_like(loc, SCALE))
    every = mixed.faces(3)
    drawn = y.sample_face((SAMPLES,), torch.Generator().manual_seed(0))
    counted = (drawn.unsqueeze(1) == every).all(-1).double().mean(0)
    told = y.face_log_prob(every).exp()
    errors: Tensor = (told * (1 - told) / SAMPLES).sqrt()
    names = ["".join(str(k + 1) for k in face.nonzero().flatten().tolist()) for face in every]
    rows: list[list[str | int | float]] = [
        [name, f"{p:.5f}", f"{share:.5f}", f"{(share - p) / error:+.1f}"]
        for name, p, share, error in zip(names, told.tolist(), counted.tolist(), errors.tolist(), strict=True)
    ]
    return Table(
        ["face", "probability", "share of samples", "standard errors apart"],
        rows,
        caption=f"The Gaussian-Sparsemax of the picture: probabilities of faces by quadrature, and shares of "
        f"{SAMPLES:,} samples.",
    )
