"""Integrals over unions of intervals whose ends may depend on parameters, as supports of densities do.

A piece [a, b] is mapped to [0, 1] by a polynomial that is flat at both ends, so that integrands with powers or
logarithms at an end are smooth in the new variable. Panels are halved until the sum of their parts is stable. Nodes
move with the ends of their piece, so that derivatives of every order are those of the integral.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._quadrature import POINTS, refined
from fenchel.continuous.basis import Basis, GaussianBasis

At = Callable[[Tensor, Tensor], Tensor]
"""f(t, row): values (Q, …) at points t (Q,), each of the integrand with the index row (Q,)."""

MAX_PANELS = 4000


@dataclass(frozen=True)
class Pieces:
    """Intervals of ``count`` integrands.

    Args:
        start: (P,).
        end: (P,), greater than ``start``.
        rows: (P,), the index of the integrand of each, ascending.
        count: the number of integrands.
    """

    start: Tensor
    end: Tensor
    rows: Tensor
    count: int

    def detach(self) -> Pieces:
        """The same intervals, without gradients."""
        return Pieces(self.start.detach(), self.end.detach(), self.rows, self.count)

    @torch.no_grad()
    def rule(self, function: At, tolerance: float = 1e-11, longest: float | None = None) -> Nodes:
        """Nodes for integrands, by panels that are halved where they must be.

        Args:
            function: the integrands; several values per point use the same nodes.
            tolerance: of the difference between a panel and its parts, relative to the absolute integral.
            longest: panels that are longer are halved in any case.
        """
        fixed, size = self.detach(), len(self.rows)
        number = torch.arange(size, device=self.rows.device)

        # The variable of integration is the number of the piece plus a share of it.
        def mapped(x: Tensor, piece: Tensor) -> Tensor:
            t, stretch = fixed._place(piece, x.squeeze(-1))
            values = function(t, self.rows[piece])
            stretch = stretch.reshape(-1, *(1,) * (values.dim() - 1))
            return torch.where(stretch > 0, values * stretch, 0.0)

        def coarse(start: Tensor, width: Tensor, piece: Tensor) -> Tensor:
            ends = [fixed._place(piece, (start + share * width).squeeze(-1))[0] for share in (0.0, 1.0)]
            return ends[1] - ends[0] > (longest or torch.inf)

        zeros = torch.zeros(size, 1, dtype=self.start.dtype, device=self.rows.device)
        found = refined(
            _by_piece(mapped, size),
            zeros + number.unsqueeze(-1),
            zeros + 1,
            self.rows,
            self.count,
            tolerance=tolerance,
            max_panels=MAX_PANELS,
            coarse=None if longest is None else _of_pieces(coarse, size),
        )
        u = found.nodes.squeeze(-1).reshape(-1, POINTS)
        piece = u.mean(-1).floor().long().clamp_max(size - 1)
        share = (u - piece.unsqueeze(-1)).clamp(0, 1)
        order = torch.argsort(piece + share.mean(-1), stable=True)
        weights = found.weights.reshape(-1, POINTS)
        return Nodes(piece[order], share[order], weights[order], found.error)

    def _place(self, piece: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Points at shares of pieces, and how far the map stretches there."""
        start, length = self.start[piece], self.end[piece] - self.start[piece]
        place, slope = _smooth(share)
        return start + length * place, length * slope

    def place(self, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        """The points (Q,) of the nodes, their weights (Q,) and rows (Q,); with gradients in the ends."""
        piece = nodes.piece.unsqueeze(-1).expand_as(nodes.share).reshape(-1)
        t, stretch = self._place(piece, nodes.share.reshape(-1))
        return t, nodes.weights.reshape(-1) * stretch, self.rows[piece]

    def sums(self, values: Tensor, rows: Tensor) -> Tensor:
        """Sums (count, …) of values (Q, …) by row."""
        return torch.zeros(self.count, *values.shape[1:], dtype=values.dtype, device=values.device).index_add(
            0, rows, values
        )


@dataclass(frozen=True)
class Nodes:
    """Nodes of panels inside pieces, in ascending order.

    Args:
        piece: (panels,), the index of the piece of each panel.
        share: (panels, POINTS), the places of nodes in the piece, in [0, 1]; the ends of panels are nodes.
        weights: (panels, POINTS), in units of the piece.
        error: the estimated error of each integral.
    """

    piece: Tensor
    share: Tensor
    weights: Tensor
    error: Tensor


def _smooth(share: Tensor) -> tuple[Tensor, Tensor]:
    """A map of [0, 1] onto itself whose first two derivatives are zero at the ends, and its slope."""
    # From the nearer end, so that places next to 1 do not lose their distance from it.
    near = torch.minimum(share, 1 - share)
    place = near**3 * (10 + near * (-15 + 6 * near))
    return torch.where(share > 0.5, 1 - place, place), 30 * (near * (1 - near)) ** 2


def _by_piece(mapped: At, size: int) -> At:
    """The integrand of ``refined``: the integer part of its variable is the piece, the rest a share of it."""

    def function(x: Tensor, row: Tensor) -> Tensor:
        # The nodes of a panel stand together, and the middle one is inside the piece for sure.
        middle = x.reshape(-1, POINTS)[:, POINTS // 2]
        piece = middle.floor().long().clamp(0, size - 1).repeat_interleave(POINTS)
        return mapped((x - piece.unsqueeze(-1)).clamp(0, 1), piece)

    return function


def _of_pieces(coarse: Callable[[Tensor, Tensor, Tensor], Tensor], size: int) -> Callable[..., Tensor]:
    def function(start: Tensor, width: Tensor, rows: Tensor) -> Tensor:
        piece = (start + width / 2).squeeze(-1).floor().long().clamp(0, size - 1)
        return coarse(start - piece.unsqueeze(-1), width, piece)

    return function


def expected(basis: Basis, pieces: Pieces, log_density: At, tolerance: float) -> Tensor:
    """E_p[ψ(t)], (count, n), over pieces that end where the density or its slope does.

    Args:
        basis: n functions of one dimension.
        pieces: the support.
        log_density: log p.
        tolerance: as in ``Pieces.rule``.
    """

    def values(t: Tensor, rows: Tensor) -> Tensor:
        p = log_density(t, rows).exp().unsqueeze(-1)
        functions: Tensor = basis(t.unsqueeze(-1))
        return p * functions.to(p.dtype)

    longest = None
    if isinstance(basis, GaussianBasis):  # so that no function is overlooked between two nodes
        longest = 2 * float(basis.covariances.detach().amin().sqrt())
    t, weights, rows = pieces.place(pieces.rule(values, tolerance, longest))
    log = log_density(t, rows)
    kept = ~(log == -math.inf)
    p = torch.where(kept, torch.where(kept, log, 0.0).exp() * weights, 0.0)
    return pieces.sums(p.unsqueeze(-1) * basis(t.unsqueeze(-1)).to(p.dtype), rows)
