"""Matchings: every row of a matrix is paired with one column."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch

from fenchel.regularizers.configs import written_by
from fenchel.structures.base import Array, Oracle, Searched, Sums


@written_by()
class Matching(Searched):
    r"""All matchings of as many pairs as possible between N rows and M columns.

    .. math:: \max_{y \in \{0,1\}^{N \times M}} \; \sum_{ij} s_{ij} y_{ij} \quad
        \text{with row and column sums at most 1, and } \min(N, M) \text{ pairs}

    Scores (…, N, M); permutations if N = M. Rows and columns that are masked altogether are left out. Solved by the
    shortest augmenting paths of ``scipy.optimize.linear_sum_assignment``, O(N³).

    Example:
        >>> import torch, fenchel
        >>> from fenchel.structures import Matching
        >>> scores = torch.tensor([[1.0, 0.9, 0.0], [0.9, 0.2, 0.0]])
        >>> Matching().map(scores)
        tensor([[0., 1., 0.],
                [1., 0., 0.]])
        >>> fenchel.SparseMAP(Matching()).argmax(scores)
        tensor([[0.3714, 0.6286, 0.0000],
                [0.6286, 0.2857, 0.0857]])

    References: Niculae, Martins, Blondel & Cardie (2018).
    """

    event_dim = 2
    fixed_dims = 2

    def key(self) -> Hashable | None:
        return (Matching,) if type(self) is Matching else None

    def sums(self, shape: torch.Size) -> Sums | None:
        n, m = shape
        parts, longest = np.arange(n * m).reshape(n, m), max(n, m)
        groups = [np.pad(g, ((0, 0), (0, longest - g.shape[1])), constant_values=n * m) for g in (parts, parts.T)]
        return Sums(np.concatenate(groups), np.ones(n + m), exact=True)

    def oracle(self, batch: torch.Size, shape: torch.Size) -> Oracle:
        def best(scores: Array, rows: Array) -> tuple[Array, Array]:
            places, bonus = np.full((len(rows), min(shape)), -1, np.int32), np.zeros(len(rows))
            for i, row in enumerate(scores[rows].reshape(-1, *shape)):
                found = _match(row)
                if found is None:
                    bonus[i] = -np.inf
                else:
                    places[i, : len(found)] = found
            return places, bonus

        return best


def _match(scores: Array) -> Array | None:
    """The places of the best matching's pairs; None if there is none."""
    from scipy.optimize import linear_sum_assignment

    allowed = scores > -np.inf
    if allowed.all():
        row, column = linear_sum_assignment(scores, maximize=True)
        return row * scores.shape[1] + column  # type: ignore[no-any-return]
    rows, columns = np.flatnonzero(allowed.any(1)), np.flatnonzero(allowed.any(0))
    try:
        row, column = linear_sum_assignment(scores[np.ix_(rows, columns)], maximize=True)
    except ValueError:  # scipy's word for infeasible
        return None
    return rows[row] * scores.shape[1] + columns[column]  # type: ignore[no-any-return]
