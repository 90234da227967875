"""The chapter on groups: counts checked by hand, and what the figure shows."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fenchel_lab.chapters.grouping import LENGTH, STRENGTHS, SWEPT, blobs, denoised, regions, signal
from fenchel_lab.report import Run


def test_regions_are_connected_groups_of_equal_entries() -> None:
    assert regions(torch.tensor([0.2, 0.2, 0.0, 0.2, 0.3, 0.1])) == 4
    assert regions(torch.tensor([[0.1, 0.1, 0.0], [0.0, 0.1, 0.2], [0.1, 0.0, 0.2]])) == 3
    assert regions(torch.zeros(3)) == 0


@pytest.mark.parametrize("strength", [0.0, 0.1, 0.8, 4.0, 100.0])
def test_denoising_satisfies_its_optimality_conditions(strength: float) -> None:
    z = signal(1) * 3
    x = denoised(z, strength)
    forces = (z - x).cumsum(0)  # minus the multipliers of the steps: at most λ, and λ where there is a step
    assert float(forces.abs().max()) <= strength + 1e-9
    assert abs(float(forces[-1])) < 1e-9
    steps = x.diff()
    moved = steps.abs() > 1e-9
    np.testing.assert_allclose(forces[:-1][moved], -strength * steps[moved].sign(), atol=1e-9)


def test_scores_depend_on_the_seed_alone() -> None:
    assert torch.equal(signal(3), signal(3))
    assert not torch.equal(blobs(3), blobs(4))


def test_groups_only_get_fewer_than_entries_as_the_penalty_grows(chapter: Callable[[str], Run]) -> None:
    result = chapter("grouping").result
    assert result is not None
    [table] = result.tables
    assert len(table.header) == 1 + len(SWEPT)
    for row in table.rows:
        counts = [tuple(int(n) for n in str(cell).split(" of ")) for cell in row[1:]]
        assert counts[0][0] == counts[0][1]  # sparsemax of noise: everybody alone
        assert counts[-1][0] < counts[0][0]
        assert all(count <= size for count, size in counts)


def test_the_bars_are_distributions_and_those_of_the_grouping_maps_have_equals(chapter: Callable[[str], Run]) -> None:
    result = chapter("grouping").result
    assert result is not None
    panels = {axes.get_title(loc="left"): axes for axes in result.figures[0].drawing.axes}
    for name in ("sparsemax", *STRENGTHS):
        if name not in panels:
            continue
        heights = np.array([bar.get_height() for bar in panels[name].patches])
        assert len(heights) == LENGTH
        assert abs(heights.sum() - 1) < 1e-12
        alone = len(np.unique(heights[heights > 0])) == (heights > 0).sum()
        assert alone == (name == "sparsemax")
