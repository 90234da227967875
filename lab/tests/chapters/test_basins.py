"""The chapter on basins: what is drawn is what a plain loop finds."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from matplotlib.patches import Circle

from fenchel import Gini, KSubsets, Shannon, Tsallis
from fenchel.hopfield import Memory
from fenchel_lab.chapters.basins import BASINS_AT, MAPS, PATTERNS, grid, metastable_sizes, path, reached, size_histogram
from fenchel_lab.report import Run

BETA = BASINS_AT[0]


def sparsemax(scores: np.ndarray) -> np.ndarray:
    """Projection onto the simplex by sorting."""
    ordered = np.sort(scores)[::-1]
    sums = np.cumsum(ordered) - 1
    size = np.flatnonzero(ordered * np.arange(1, len(scores) + 1) > sums)[-1] + 1
    return np.maximum(scores - sums[size - 1] / size, 0)


def test_queries_reach_what_a_plain_loop_reaches() -> None:
    memory, x = Memory(PATTERNS, Gini(), BETA), PATTERNS.numpy()
    queries = grid(8)
    found = reached(memory, queries)
    for query, ends in zip(queries.numpy(), found.numpy(), strict=True):
        for _ in range(60):
            query = x.T @ sparsemax(BETA * x @ query)
        np.testing.assert_array_equal(ends, np.linalg.norm(x - query, axis=-1) < 1e-9)


def test_pairs_are_reached_as_pairs_and_softmax_reaches_nothing_exactly() -> None:
    pairs = reached(Memory(PATTERNS, KSubsets(2), BETA), grid(7))
    assert bool((pairs.sum(-1) == 2).any())
    assert not bool(reached(Memory(PATTERNS, Shannon(), BETA), grid(7)).any())
    assert bool(reached(Memory(PATTERNS, Shannon(), 100.0), grid(7), 0.01).any())


def test_paths_go_downhill() -> None:
    memory = Memory(PATTERNS, Tsallis(1.5), 4.0)
    energy = memory.energy(path(memory, torch.tensor([0.3, 0.2], dtype=torch.float64)))
    assert bool((energy.diff() <= 1e-12).all())


def test_sizes_are_counted_and_the_rest_comes_last() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0.005, 0.005, 0.99]])
    assert metastable_sizes(weights).tolist() == [1, 2, 3, 3]
    assert metastable_sizes(weights, 0.01).tolist() == [1, 2, 3, 1]
    assert metastable_sizes(weights, 0.995).tolist() == [1, 0, 0, 0]
    assert size_histogram(torch.tensor([1, 2, 2, 0, 9]), 2) == pytest.approx([20.0, 40.0, 40.0])


@pytest.mark.slow
def test_circles_are_the_certified_balls(chapter: Callable[[str], Run]) -> None:
    result = chapter("basins").result
    assert result is not None
    panel = dict(zip(MAPS, result.figures[1].drawing.axes, strict=True))["sparsemax"]
    circles = [patch for patch in panel.patches if isinstance(patch, Circle)]
    x, beta = PATTERNS.numpy(), BETA
    for circle, pattern in zip(circles, x, strict=True):
        others = [other for other in x if not np.array_equal(other, pattern)]
        radius = min((pattern @ (pattern - o) - 1 / beta) / math.dist(pattern, o) for o in others)
        assert circle.get_radius() == pytest.approx(radius)


@pytest.mark.slow
def test_more_contrast_ends_at_single_patterns(chapter: Callable[[str], Run]) -> None:
    result = chapter("basins").result
    assert result is not None
    single = {(row[0], row[1]): float(row[3]) for row in result.tables[0].rows}
    for name in ("1.5-entmax", "sparsemax", "2-normmax", "5-normmax"):
        assert single[name, "1"] <= single[name, "4"] <= single[name, "10"] + 1
    assert single["1.5-entmax", "4"] < single["sparsemax", "4"]
    assert all(single["k_subsets 2", beta] == 0 for beta in ("1", "4", "10"))
