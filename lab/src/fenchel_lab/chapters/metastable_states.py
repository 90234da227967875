"""Metastable states: how many patterns a memory mixes when it has come to rest, for every Ω."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from fenchel import Gini, KSubsets, Norm, Regularizer, Shannon, Tsallis
from fenchel.hopfield import Memory
from fenchel_lab.chapters.basins import metastable_sizes, size_histogram, threshold
from fenchel_lab.data import mnist
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

BETAS = (0.1, 1.0)
OMEGAS: dict[str, Regularizer] = {
    "softmax": Shannon(),
    "1.5-entmax": Tsallis(1.5),
    "sparsemax": Gini(),
    "2-normmax": Norm(2.0),
    "5-normmax": Norm(5.0),
    "2-subsets": KSubsets(2),
    "4-subsets": KSubsets(4),
    "8-subsets": KSubsets(8),
}
UPDATES = 5
LARGEST = 10
SIZES = [*map(str, range(1, LARGEST + 1)), f"{LARGEST}⁺"]
TOGETHER = 500
"""Queries at a time."""

_PRINTED = """
 3.5 69.2 88.1 81.4 51.4  0.0  0.0  0.0  97.8 99.9 100.0 100.0 99.8  0.0  0.0  0.0
 2.1  8.6  5.2  6.7 31.4 87.3  0.0  0.0   0.9  0.1   0.0   0.0  0.2 99.9  0.0  0.0
 1.6  3.9  2.6  1.9  7.0  6.1  0.0  0.0   0.4  0.0   0.0   0.0  0.0  0.1  0.0  0.0
 1.2  2.3  1.6  1.0  2.1  2.5 80.0  0.0   0.3  0.0   0.0   0.0  0.0  0.0 99.3  0.0
 1.2  1.6  1.1  0.9  1.5  2.0 11.9  0.0   0.2  0.0   0.0   0.0  0.0  0.0  0.7  0.0
 0.9  0.9  0.8  0.5  1.5  1.1  4.4  0.0   0.1  0.0   0.0   0.0  0.0  0.0  0.1  0.0
 1.1  0.6  0.4  0.4  1.3  0.6  2.1  0.0   0.1  0.0   0.0   0.0  0.0  0.0  0.0  0.0
 0.8  0.6  0.1  0.8  1.0  0.2  1.0 60.0   0.1  0.0   0.0   0.0  0.0  0.0  0.0 95.0
 1.0  0.3  0.0  0.5  0.8  0.1  0.4 26.0   0.1  0.0   0.0   0.0  0.0  0.0  0.0  4.7
 1.1  0.1  0.0  0.5  0.6  0.0  0.1  9.2   0.1  0.0   0.0   0.0  0.0  0.0  0.0  0.2
85.5 11.9  0.1  5.4  1.4  0.1  0.0  4.8   0.1  0.0   0.0   0.0  0.0  0.0  0.0  0.1
"""
PAPER = np.array([[float(cell) for cell in line.split()] for line in _PRINTED.strip().splitlines()]).reshape(
    len(SIZES), len(BETAS), len(OMEGAS)
)
"""Table 1: percent of queries, [size, β, Ω]."""

SUMMARY = f"""
A memory holds all training images, and every test image is a query: {UPDATES} updates
`q ← Xᵀ argmax_Ω(βXq)` from it, and we count the patterns that the last one mixes. Size 1 is a stored image, retrieved
exactly; more is a metastable state. Softmax never gives a pattern no weight, so that its weights count from
{threshold(Shannon()):g} on, and a state in which none does counts as the largest. Sparse Ω need no threshold.
`KSubsets(k)` recalls k patterns at once, and its smallest state has k of them.
"""

EMBEDDED = """
Here on scikit-learn's digits of 8 × 8, scaled to [−1, 1]: {patterns:,} are stored and {queries} are queries. For the
paper's table on MNIST run the command below with `FENCHEL_DATA` set.
"""

REAL = """
MNIST, scaled to [−1, 1]: {patterns:,} patterns, {queries:,} queries, as in the paper; nothing was scaled down. The
largest difference from the paper is {worst:.1f} points, at β = {beta:g}, {omega}, size {size}; the mean over all
{cells} cells is {mean:.2f}.
"""


@dataclass(frozen=True)
class Images:
    """Patterns (N, D) and queries (Q, D) in [−1, 1]."""

    patterns: Tensor
    queries: Tensor


CODE = """
import torch, fenchel
from fenchel.hopfield import Memory

patterns = torch.nn.functional.normalize(torch.randn(200, 20), dim=-1)
for beta in (1.0, 4.0, 16.0):
    found = Memory(patterns, fenchel.Tsallis(1.5), beta=beta).retrieve(patterns)
    sizes = fenchel.support_size(found.weights).float()
    print(f"beta {beta:4}: states mix {sizes.mean():.1f} of 200 patterns on average")
"""


@study(
    "Metastable states",
    source="Santos, Niculae, McNamee & Martins (2024), Sparse and Structured Hopfield Networks, table 1",
    order=6,
    theme="Memories",
    code=CODE,
    data=["mnist"],
)
def metastable_states(context: Context) -> Result:
    """Let every query come to rest under every Ω, and count what it rests on."""
    images = embedded() if context.data is None else real(context)
    shares = np.empty_like(PAPER)
    total = len(BETAS) * len(OMEGAS)
    for i, beta in enumerate(BETAS):
        for j, (name, omega) in enumerate(OMEGAS.items()):
            memory = Memory(images.patterns, omega, beta=beta)
            counted = []
            for start in range(0, len(images.queries), TOGETHER):
                part = (i * len(OMEGAS) + j + start / len(images.queries)) / total
                context.progress(part, f"β = {beta:g}, {name}")
                counted.append(sizes(memory, images.queries[start : start + TOGETHER]))
            shares[:, i, j] = size_histogram(torch.cat(counted), LARGEST)
    context.progress(1.0, "drawn")
    text = SUMMARY + _setting(images, shares, context.data is not None)
    return Result(text, figures=[_figure(shares)], tables=_tables(shares, context.data is not None))


@torch.no_grad()
def sizes(memory: Memory, queries: Tensor, updates: int = UPDATES) -> Tensor:
    """How many patterns the last of some updates mixes, for each query."""
    state = queries if updates == 1 else memory.retrieve(queries, max_steps=updates - 1, tol=0.0).state
    return metastable_sizes(memory.weights(state), threshold(memory.omega))


def embedded() -> Images:
    """Scikit-learn's digits: 1,500 to store, the others to ask with."""
    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    return Images(digits[:1500], digits[1500:])


def real(context: Context) -> Images:
    """MNIST: the training set to store, the test set to ask with."""
    train, test = (
        torch.tensor(mnist.load(split, context.data).images).flatten(1) / 127.5 - 1 for split in ("train", "test")
    )
    return Images(train, test)


def _setting(images: Images, shares: np.ndarray, on_mnist: bool) -> str:
    counts = {"patterns": len(images.patterns), "queries": len(images.queries)}
    if not on_mnist:
        return EMBEDDED.format(**counts)
    apart = np.abs(shares - PAPER)
    size, i, j = np.unravel_index(apart.argmax(), apart.shape)
    return REAL.format(
        **counts,
        worst=apart.max(),
        beta=BETAS[i],
        omega=list(OMEGAS)[j],
        size=SIZES[size],
        cells=apart.size,
        mean=apart.mean(),
    )


def _figure(shares: np.ndarray) -> Figure:
    drawing, panels = style.panels(len(BETAS), 1, height=2.6)
    for axes, beta, table in zip(panels, BETAS, shares.transpose(1, 0, 2), strict=True):
        axes.imshow(table, cmap=style.DENSITY, vmin=0, vmax=100, aspect="auto")
        for size, omega in zip(*np.nonzero(table >= 0.05), strict=True):
            share = table[size, omega]
            colour = style.ON_COLOUR if share > 55 else style.INK
            axes.text(
                omega,
                size,
                f"{share:.0f}" if share >= 10 else f"{share:.1f}",
                ha="center",
                va="center",
                color=colour,
                fontsize=6.5,
            )
        axes.set(title=f"β = {beta:g}", ylabel="patterns mixed")
        axes.set_yticks(range(len(SIZES)), SIZES)
        axes.set_xticks(range(len(OMEGAS)), list(OMEGAS), rotation=40, ha="right")
        axes.grid(False)
    return Figure(
        drawing,
        caption="Percent of queries (columns add up to 100) that come to rest on so many patterns. Blank is less than "
        "0.05 percent.",
        alt="Two tables of shares, by the number of patterns and by Ω. From β = 0.1 to β = 1 the mass moves to a "
        "single pattern, and for k-subsets to k of them; softmax is the last to follow.",
        paper="The paper's numbers stand in the tables, beside ours.",
    )


def _tables(shares: np.ndarray, on_mnist: bool) -> Sequence[Table]:
    tables = []
    for i, beta in enumerate(BETAS):
        rows: list[list[Cell]] = []
        for size, label in enumerate(SIZES):
            cells = [
                f"{ours:.1f} ({theirs:.1f})" if on_mnist else f"{ours:.1f}"
                for ours, theirs in zip(shares[size, i], PAPER[size, i], strict=True)
            ]
            rows.append([label, *cells])
        tables.append(
            Table(
                ["size", *OMEGAS],
                rows,
                caption=f"Metastable states at β = {beta:g}: percent of queries that rest on so many patterns.",
                paper="Table 1 of the paper in parentheses." if on_mnist else "The paper's table is on MNIST.",
            )
        )
    return tables
