"""Maps and losses beside their peers: ratios to torch.softmax and torch's cross-entropy in one interleaved run.

Machines are shared and noisy, so a time means nothing alone: every row is a ratio of medians of interleaved calls.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import entmax as peer
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import fenchel

SHAPES = [(4096, 64), (2048, 512), (256, 4096), (128, 32000)]
SPREADS = [1.0, 4.0]
SECONDS = 1.0  # for each contestant of a workload

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch softmax": lambda s: s.softmax(-1),
    "sparsemax": fenchel.sparsemax,
    "entmax 1.5": fenchel.entmax,
    "entmax 1.33": lambda s: fenchel.entmax(s, 1.33),
    "normmax 2": fenchel.normmax,
    "constrained_sparsemax": lambda s: fenchel.constrained_sparsemax(s, _bounds(s)),
    "k_subsets 5": lambda s: fenchel.k_subsets(s, 5),
    "k_subsets n/16": lambda s: fenchel.k_subsets(s, s.shape[-1] / 16),
    "peer: sparsemax": peer.sparsemax,
    "peer: entmax15": peer.entmax15,
    "peer: entmax_bisect 1.33": lambda s: peer.entmax_bisect(s, 1.33),
    "peer: budget_bisect 5": lambda s: peer.budget_bisect(s, 5),
}


@functools.cache
def _upper(shape: torch.Size) -> Tensor:
    return (0.5 + 4 * torch.rand(shape)) / shape[-1]


def _bounds(scores: Tensor) -> Tensor:
    """Bounds of which two in five suffice, drawn once a shape."""
    return _upper(scores.shape)


def forward_backward(f: Callable[[Tensor], Tensor], scores: Tensor) -> Callable[[], None]:
    """One call of f and of its backward pass."""
    direction = torch.randn_like(f(scores.detach()))

    def call() -> None:
        scores.grad = None
        f(scores).backward(direction)

    return call


def medians(contestants: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds a call, with all contestants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        call()
    end = time.perf_counter() + SECONDS * len(contestants)
    while time.perf_counter() < end or len(times[next(iter(times))]) < 3:
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the table of ratios."""
    torch.manual_seed(0)
    ratios: dict[str, list[float]] = {name: [] for name in MAPS}
    workloads = [(shape, spread) for shape in SHAPES for spread in SPREADS]
    for shape, spread in track(workloads, "measuring"):
        scores = (spread * torch.randn(shape)).requires_grad_()
        seconds = medians({name: forward_backward(f, scores) for name, f in MAPS.items()})
        for name in MAPS:
            ratios[name].append(seconds[name] / seconds["torch softmax"])
    columns = [f"{rows}×{width} σ={spread:g}" for (rows, width), spread in workloads]
    table = Table("forward + backward, × torch.softmax", *columns, "geometric mean")
    for name, values in ratios.items():
        table.add_row(name, *(f"{v:.2f}" for v in values), f"{statistics.geometric_mean(values):.2f}")
    Console(width=200).print(table)

    scores = torch.randn(128, 32000, requires_grad=True)
    target = torch.randint(32000, (128,))
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "torch cross_entropy": lambda s: F.cross_entropy(s, target),
        "entmax_loss 1.5": lambda s: fenchel.entmax_loss(s, target),
        "sparsemax_loss": lambda s: fenchel.sparsemax_loss(s, target),
        "peer: entmax15_loss": lambda s: peer.entmax15_loss(s, target).mean(),
    }
    seconds = medians({name: forward_backward(f, scores) for name, f in losses.items()})
    table = Table("128×32000, class indices, × torch cross_entropy", "ratio")
    for name in losses:
        table.add_row(name, f"{seconds[name] / seconds['torch cross_entropy']:.2f}")
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
