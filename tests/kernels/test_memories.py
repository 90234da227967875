"""Lists of candidates beside a plain loop."""

import numpy as np
import pytest
import torch

from fenchel.kernels.cpu.streaming.memories import collect


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_scores_that_are_not_below_the_floor_are_appended(width: int, dtype: type) -> None:
    generator = np.random.default_rng(0)
    scores = generator.standard_normal((5, width)).astype(dtype)
    scores[2, 0] = np.nan
    floors = np.array([1.0, -np.inf, 0.5, np.inf, scores[4, 0]], dtype)
    counts = np.array([0, 1, 2, 0, 1])
    place, score = np.full((5, 40), -1), np.full((5, 40), -np.inf, dtype)
    arrays = (scores, floors[:, None], counts, place, score)
    given = [torch.from_numpy(each) for each in arrays]
    found = collect(*given[:2], 1000, *given[2:])
    for row in range(5):
        kept = [j for j in range(width) if not scores[row, j] < floors[row]]
        assert found[row] == counts[row] + len(kept)
        room = kept[: 40 - counts[row]]
        at = slice(counts[row], counts[row] + len(room))
        np.testing.assert_array_equal(place[row, at], [1000 + j for j in room])
        np.testing.assert_array_equal(score[row, at], scores[row, room])
        assert (place[row, at.stop :] == -1).all()
