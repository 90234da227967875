"""What workloads are made of: scores of many shapes, goals by the dozen, peers that may not be installed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fenchel_lab.bench.workload import Case, Contestant, Goal, Statistic

SHAPES = [(4096, 64), (2048, 512), (256, 4096), (128, 32000), (32, 128000)]
SPREADS = [1.0, 4.0]
MIDDLE = [(2048, 512), (256, 4096)]
CLASSES = 32000
MEGABYTE = 1e6


def row_cases(shapes: Sequence[tuple[int, int]] = SHAPES, spreads: Sequence[float] = SPREADS) -> list[Case]:
    """Rows of normal scores, of every shape and spread."""
    return [
        Case(f"{rows} × {width}, σ = {sigma:g}", partial(row_scores, rows, width, sigma))
        for (rows, width), sigma in itertools.product(shapes, spreads)
    ]


def bounds(names: Iterable[str], at_most: float, against: str, statistic: Statistic = "geometric mean") -> list[Goal]:
    """One goal for several contestants."""
    return [Goal(name, at_most, against, statistic) for name in names]


def entmax_peer(name: str, call: Callable[..., Tensor] | None = None, suffix: str = "") -> Contestant:
    """A function of the entmax package; ``call(function, *inputs)`` if its arguments are not ours."""
    label = f"entmax.{name}{suffix}"
    try:
        function = getattr(importlib.import_module("entmax"), name)
    except ModuleNotFoundError:
        return Contestant(
            label, None, "entmax is not installed and left out: pip install 'fenchel-lab[bench]' to compare"
        )
    return Contestant(label, function if call is None else lambda *inputs: call(function, *inputs))


def peer(module: str, label: str, call: Callable[..., Tensor]) -> Contestant:
    """A peer of another name than its module; ``call(module, *inputs)``."""
    try:
        package = importlib.import_module(module)
    except ModuleNotFoundError:
        return Contestant(
            label, None, f"{label} is not installed and left out: pip install 'fenchel-lab[bench]' to compare"
        )
    return Contestant(label, partial(call, package))


def row_scores(rows: int, width: int, sigma: float, *others: Tensor) -> tuple[Tensor, ...]:
    """Rows of normal scores, and what else there is."""
    return normal(rows, width, sigma=sigma), *others


def normal(*shape: int, sigma: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers, the same at every call."""
    # In place: a copy would raise the peak of memory before anything is measured.
    return torch.empty(shape).normal_(0.0, sigma, generator=torch.Generator().manual_seed(seed))


def class_numbers(rows: int, classes: int) -> Tensor:
    """A class for every row, the same at every call."""
    return torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(3))
