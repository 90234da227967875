"""Grouping: what fusedmax, oscarmax and tvmax2d choose that sparsemax, from the same scores, leaves scattered."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fenchel import fusedmax, oscarmax, sparsemax, support_size, tvmax2d
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

LENGTH, SIDE = 24, 16
STRENGTHS = {"fusedmax": 0.2, "oscarmax": 0.022, "tvmax2d": 0.06}
DENOISING = (0.1, 0.8, 4.0)
SWEPT = (0.0, 0.005, 0.015, 0.05, 0.15, 0.5)

SUMMARY = """
Sparsemax looks at one score at a time: when scores are noisy, so is the support. A penalty beside Gini's Ω says what
belongs together. Fusedmax pays for every step between neighbours and chooses whole segments of a sequence. Oscarmax
pays for pairs, wherever they stand, and gives near equals the same weight: clusters. Tvmax2d pays for every step
between neighbouring pixels and chooses regions of an image.

In all three the members of a group have probabilities that are equal to the bit, and the gradient of a group is shared
by its members. At strength 0 they are sparsemax; when it grows there are fewer groups, until everything is one.
"""

CODE = """
import torch, fenchel

scores = torch.tensor([0.1, 1.0, 0.9, 1.1, -0.5, 0.95])
print(fenchel.sparsemax(scores))
print(fenchel.fusedmax(scores, strength=0.2))  # neighbours share
print(fenchel.oscarmax(scores, strength=0.05))  # equals share, wherever they are
"""


@study(
    "Choices that come in groups",
    source="Niculae & Blondel (2017), A Regularized Framework for Sparse and Structured Neural Attention, section 3",
    order=14,
    theme="Maps",
    code=CODE,
)
def grouping(context: Context) -> Result:
    """Draw the three maps beside sparsemax, and count groups as the penalty grows."""
    sequence, image = signal(context.seed), blobs(context.seed)
    context.progress(0.3, "scores")
    figure = _figure(sequence, image)
    context.progress(0.7, "drawn")
    return Result(SUMMARY, figures=[figure, _denoised(context.seed)], tables=[_counts(sequence, image)])


def signal(seed: int) -> Tensor:
    """Scores of a sequence: two segments stand out, in noise."""
    level = torch.zeros(LENGTH, dtype=torch.float64)
    level[4:10], level[15:20] = 0.55, 0.45
    return level + 0.1 * _noise((LENGTH,), seed)


def blobs(seed: int) -> Tensor:
    """Scores of an image: a larger disc and a smaller one, in noise."""
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    large = ((y - 5) ** 2 + (x - 5) ** 2 <= 8).double()
    small = ((y - 11) ** 2 + (x - 11) ** 2 <= 4).double()
    return 0.35 * large + 0.4 * small + 0.07 * _noise((SIDE, SIDE), seed)


def _noise(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flat_sparsemax(image: Tensor) -> Tensor:
    """Sparsemax over all pixels."""
    return sparsemax(image.flatten()).view_as(image)


def regions(p: Tensor) -> int:
    """How many connected groups of equal, positive neighbours there are in a row or an image."""
    grid = p if p.dim() == 2 else p.unsqueeze(0)
    waiting = {(i, j) for i, j in (grid > 0).nonzero().tolist()}
    count = 0
    while waiting:
        count += 1
        edge = [waiting.pop()]
        while edge:
            i, j = edge.pop()
            beside = {(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)} & waiting
            joined = {place for place in beside if grid[place] == grid[i, j]}
            waiting -= joined
            edge.extend(joined)
    return count


def _figure(sequence: Tensor, image: Tensor) -> Figure:
    drawing, panels = style.panels(3, 2, height=1.7)
    panels[0].bar(range(LENGTH), sequence.numpy(), width=0.85, color=style.MUTED)
    panels[0].set(title="scores", xticks=[])
    chosen = {"sparsemax": sparsemax(sequence)}
    for name, choose in (("fusedmax", fusedmax), ("oscarmax", oscarmax)):
        chosen[name] = choose(sequence, STRENGTHS[name])
    for axes, (name, p) in zip(panels[1:4], chosen.items(), strict=True):
        axes.bar(range(LENGTH), p.numpy(), width=0.85, color=style.PALETTE[0])
        axes.set(title=name, ylim=(0, 0.23), yticks=[0, 0.1, 0.2], xticks=[])
    images = {"sparsemax": flat_sparsemax(image), "tvmax2d": tvmax2d(image, STRENGTHS["tvmax2d"])}
    for axes, (name, p) in zip(panels[4:], images.items(), strict=True):
        shown = torch.where(p > 0, p, torch.nan)  # what has no mass stays blank
        axes.imshow(shown.numpy(), cmap=style.MASS, vmin=0, vmax=0.08, interpolation="nearest")
        axes.set(title=f"{name}, {SIDE} × {SIDE}", xticks=[], yticks=[])
        axes.grid(False)
        axes.spines[:].set_visible(False)
    return Figure(
        drawing,
        caption="Scores of a sequence with two segments in noise, and the probabilities that three maps make of them: "
        "sparsemax of many heights, fusedmax level along segments, oscarmax of few heights wherever they stand. Below, "
        "an image of scores with two discs in noise: shade is probability, blank is zero.",
        alt="Sparsemax: bars of many heights and pixels of many shades, with holes. Fusedmax: two segments, nearly "
        "level. Oscarmax: bars of few heights. Tvmax2d: two solid discs.",
        paper="The paper draws fusedmax and oscarmax attention over words: contiguous segments for the one, clusters "
        "of equal weight that need not be adjacent for the other. Tvmax2d is fusedmax's penalty on a grid.",
    )


def denoised(signal: Tensor, strength: float) -> Tensor:
    """Total-variation denoising of a signal (n,): argmin_x ½‖x − signal‖² + strength · Σ |xᵢ₊₁ − xᵢ|, by fusedmax.

    Fusedmax is the projection of this onto the simplex. Scaled down until nothing leaves the support, it is the
    denoised signal but for a constant, and the mean of a signal does not change by denoising.
    """
    spread = float(signal.max() - signal.min())
    scale = 0.5 / (len(signal) * spread) if spread else 1.0
    p = fusedmax(scale * signal, scale * strength)
    return (p - p.mean()) / scale + signal.mean()


def _denoised(seed: int) -> Figure:
    drawing, panels = style.panels(3, 1, height=1.3, sharex=True, sharey=True)
    level = torch.tensor([0.0, 1.0, 0.4, 0.4, -0.5, 0.2], dtype=torch.float64).repeat_interleave(25)
    noisy = level + 0.25 * _noise((len(level),), seed)
    for axes, strength in zip(panels, DENOISING, strict=True):
        axes.plot(noisy, ".", markersize=2.5, color=style.MUTED)
        axes.plot(level, color=style.FAINT, linewidth=1.2)
        axes.plot(denoised(noisy, strength), color=style.PALETTE[0], linewidth=1.4)
        axes.set(title=f"λ = {strength:g}")
    return Figure(
        drawing,
        caption="Total-variation denoising, which is inside of fusedmax: a signal of level segments (grey line) in "
        "noise (dots), and the signal next to the dots that pays λ for every step between neighbours (blue).",
        alt="Three panels. With a small λ the blue line follows the noise, with a larger one it is level along the "
        "segments, with a still larger one the steps are smaller than they should be.",
        paper="Fusedmax is this denoising followed by sparsemax (Niculae & Blondel, 2017, proposition 1).",
    )


def _counts(sequence: Tensor, image: Tensor) -> Table:
    cases: tuple[tuple[str, Callable[[float], Tensor], Callable[[Tensor], int]], ...] = (
        ("fusedmax: segments", lambda s: fusedmax(sequence, s), regions),
        ("oscarmax: heights", lambda s: oscarmax(sequence, s), lambda p: len(set(p[p > 0].tolist()))),
        ("tvmax2d: regions", lambda s: tvmax2d(image, s), regions),
    )
    rows: list[list[Cell]] = []
    for name, choose, count in cases:
        chosen = [choose(strength) for strength in SWEPT]
        rows.append([name, *(f"{count(p)} of {int(support_size(p.flatten()))}" for p in chosen)])
    return Table(
        ["groups of entries, at λ =", *(f"{s:g}" for s in SWEPT)],
        rows,
        caption="How many groups the entries with mass form, of how many entries, as the penalty grows from 0, which "
        "is sparsemax.",
    )
