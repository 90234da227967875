"""Alignments of series: distances by the textbook's recursion, and pictures that show zeros as such."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fenchel import Hard
from fenchel_lab.chapters.alignments_of_series import accuracy, distances, made_up
from fenchel_lab.report import Run


def warped(x: np.ndarray, y: np.ndarray) -> float:
    """Dynamic time warping with squared distances, as in the textbooks."""
    table = np.full((len(x) + 1, len(y) + 1), np.inf)
    table[0, 0] = 0
    for i in range(len(x)):
        for j in range(len(y)):
            cost = (x[i] - y[j]) ** 2
            table[i + 1, j + 1] = cost + min(table[i, j], table[i, j + 1], table[i + 1, j])
    return float(table[-1, -1])


def test_hard_distances_are_the_textbooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fenchel_lab.chapters.alignments_of_series.CELLS", 3 * 64)  # several parts
    x, y = made_up(3, 0, length=8).values.double(), made_up(4, 1, length=8).values.double()
    expected = [[warped(a[:, 0].numpy(), b[:, 0].numpy()) for b in y] for a in x]
    np.testing.assert_allclose(distances(x, y, Hard()).numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(distances(x, y, None)[1, 2].item(), ((x[1] - y[2]) ** 2).sum().item())


def test_accuracy_is_that_of_the_nearest() -> None:
    distance = torch.tensor([[0.1, 0.2], [0.3, 0.2], [0.0, 1.0]])
    assert accuracy(torch.tensor([0, 1]), torch.tensor([0, 1, 1]), distance) == pytest.approx(2 / 3)


def test_made_up_series_come_in_three_shapes_and_one_scale() -> None:
    made = made_up(9, 0)
    assert made.classes.tolist() == [0, 1, 2] * 3
    torch.testing.assert_close(made.values.mean(1), torch.zeros(9, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.values.std(1), torch.ones(9, 1))
    assert torch.equal(made.values, made_up(9, 0).values)


def test_the_sparse_alignment_lies_inside_the_dense_one(chapter: Callable[[str], Run]) -> None:
    result = chapter("alignments_of_series").result
    assert result is not None
    hard, dense, sparse = (
        ~np.isnan(np.ma.filled(axes.images[0].get_array(), np.nan)) for axes in result.figures[0].drawing.axes[1:]
    )
    assert hard.sum() < sparse.sum() < dense.sum()
    assert dense[sparse].all()


def test_warping_beats_euclid_on_shapes_that_move(chapter: Callable[[str], Run]) -> None:
    result = chapter("alignments_of_series").result
    assert result is not None
    found = {str(row[1]): float(row[-1]) for row in result.tables[0].rows}
    assert list(found) == ["Euclid", "hard", "Shannon", "Gini"]
    for key in ("hard", "Shannon", "Gini"):
        assert found[key] > found["Euclid"]
