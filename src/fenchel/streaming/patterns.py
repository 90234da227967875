"""One pass over stored patterns, a chunk at a time: no matrix of queries × patterns is ever held.

A sparse Ω that works by a threshold needs no more than that. What has no weight among the patterns seen so far has none
among all of them, for every further pattern raises the threshold: so each query keeps the support of what it has seen,
and at the end the map is solved on that, exactly. A query whose support outgrows a chunk (that of a query of zero is
everything) keeps nothing, and is solved on all its scores later, few such queries at a time. Softmax is summed chunk by
chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fenchel.kernels import usable
from fenchel.regularizers.base import Regularizer, Scaled
from fenchel.regularizers.capped import KSubsets
from fenchel.regularizers.norm import Norm
from fenchel.regularizers.tsallis import Tsallis

CHUNK = 1 << 12
"""Patterns that are read at a time, unless told otherwise."""

MANY = 1 << 13
"""Patterns from which on supports are kept, a chunk of patterns at a time: with fewer, all scores are held."""

ROOM = 64
"""Entries that lists of candidates begin with."""

HELD = 1 << 22
"""Scores, or entries of gathered patterns, that are held at a time."""

CACHED = 1 << 18
"""Scores that are held at a time where they are made, used and forgotten at once."""

TILE = 8
"""Queries come in multiples of so many. Products of matrices take other paths for fewer rows, and for the rows that are
left over: the last digits of a row would depend on how many others there are."""

Blocks = Callable[[], Iterable[tuple[int, Tensor]]]
"""Makes a pass: the place of each chunk's first pattern, and the chunk."""

Function = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Rows of a result from scores, what of them is a support, and the places of the patterns; None: of all, in order."""


def base(omega: Regularizer) -> Regularizer:
    """Ω of γΩ."""
    while isinstance(omega, Scaled):
        omega = omega.omega
    return omega


def number(value: float | Tensor) -> float:
    """A parameter of Ω, which must be one for all queries, as a number."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"omega of a memory must have one value for all queries, got parameters of shape {tuple(value.shape)}"
            )
        return float(value.detach())
    return value


def temperature(omega: Regularizer) -> float | Tensor:
    """γ of γΩ, as it was given; differentiable if it is a tensor."""
    gamma: float | Tensor = 1.0
    while isinstance(omega, Scaled):
        omega, gamma = omega.omega, gamma * cast(Any, omega).gamma
    return gamma


def is_thresholded(omega: Regularizer) -> bool:
    """Whether weights are zero below a threshold that only rises when patterns are added."""
    omega = base(omega)
    if isinstance(omega, Tsallis):
        return bool(torch.as_tensor(omega.alpha > 1, device="cpu").all())
    return isinstance(omega, Norm | KSubsets)


def is_softmax(omega: Regularizer) -> bool:
    """Whether it is Shannon's."""
    omega = base(omega)
    return isinstance(omega, Tsallis) and not isinstance(omega.alpha, Tensor) and omega.alpha == 1


def check_chunks(omega: Regularizer) -> None:
    """Refuse an Ω that needs all scores at once."""
    if not is_thresholded(omega) and not is_softmax(omega):
        raise ValueError(
            "chunk_size, and patterns in a file, go with entmax (alpha > 1), normmax, k_subsets and softmax, which can "
            f"be computed in one pass; omega is {omega}: leave chunk_size out and pass the patterns as a tensor"
        )


def row_groups(count: int, width: int, tile: int = TILE, held: int | None = None) -> Iterator[slice]:
    """Groups of rows with about HELD scores, ``width`` per row, in multiples of a tile; one group if there are none."""
    size = max((HELD if held is None else held) // max(width, 1) // tile, 1) * tile
    return (slice(first, min(first + size, count)) for first in range(0, max(count, 1), size))


def tiled(rows: Tensor, tile: int = TILE) -> Tensor:
    """Rows (R, D), and copies of the last up to a multiple of a number."""
    missing = -len(rows) % tile
    return torch.cat([rows, rows[-1:].expand(missing, -1)]) if len(rows) and missing else rows


def products(rows: Tensor, columns: Tensor, tile: int = TILE) -> Tensor:
    """rows @ columns without derivatives, in products of one shape: rounding depends on the shape and the threads.

    It depends on where rows begin, too: they are moved apart to multiples of eight entries.
    """
    if rows.shape[1] % 8:
        rows = rows.new_empty(len(rows), rows.shape[1] + -rows.shape[1] % 8)[:, : rows.shape[1]].copy_(rows)
    result = rows.new_empty(len(rows), columns.shape[1])
    for first in range(0, len(rows), tile):
        torch.mm(rows[first : first + tile], columns, out=result[first : first + tile])
    return result


def supports(query: Tensor, blocks: Blocks, omega: Regularizer) -> tuple[Tensor, Tensor]:
    """The supports of queries (R, D) that are scaled by β: places of patterns, (R, K), and their scores.

    Filled up with places of −1 and scores of −inf. A query with a score that is NaN or +inf has the place −2, one with
    a support that outgrew a chunk −3.
    """
    with torch.no_grad():
        query = query.detach()
        kept: list[_Kept] | None = None
        for first, block in blocks():
            if kept is None:
                most = max(len(block), ROOM)
                kept = [_Kept(query[rows], omega, most) for rows in row_groups(len(query), len(block))]
            for each in kept:
                each.absorb(first, block)
        assert kept is not None
        found = [each.finish() for each in kept]
        width = max(place.shape[1] for place, _ in found)
        return (
            torch.cat([_resized(place, width, -1) for place, _ in found]),
            torch.cat([_resized(score, width, -torch.inf) for _, score in found]),
        )


class _Kept:
    """What some queries keep of the patterns that they have seen: lists of places and scores, side by side."""

    def __init__(self, query: Tensor, omega: Regularizer, most: int) -> None:
        self.bad = ~query.isfinite().all(-1)
        self.wide, self.most = torch.zeros_like(self.bad), most
        self.query, self.omega = query.masked_fill(self.bad.unsqueeze(-1), 0.0), omega
        self.count = torch.zeros(len(query), dtype=torch.long, device=query.device)
        self.place = torch.full((len(query), ROOM), -1, dtype=torch.long, device=query.device)
        self.score = query.new_full((len(query), ROOM), -torch.inf)
        self.floor = query.new_full((len(query), 1), -torch.inf)
        self.enough = 0

    def absorb(self, first: int, block: Tensor) -> None:
        scores = products(self.query, block.T)
        if first == 0:
            self._raise(_first_floor(self.omega, scores))
        count = self._collect(first, scores)
        if int(count.max()) > self.place.shape[1]:  # no room for all: make some, and look again
            self._widen(int(count.max()) * 3 // 2)
            count = self._collect(first, scores)
        self.count = count
        if int(self.count.max()) > self.enough:
            self._refine()

    def _collect(self, first: int, scores: Tensor) -> Tensor:
        """Append what is not below the floor; how many entries each list would have if there were room for all."""
        if usable(scores):
            return self._collect_compiled(first, scores)
        row, column = (~(scores < self.floor)).nonzero(as_tuple=True)
        new = torch.bincount(row, minlength=len(scores))
        order = torch.arange(len(row), device=row.device) - (new.cumsum(0) - new)[row] + self.count[row]
        room = order < self.place.shape[1]
        row, column, order = row[room], column[room], order[room]
        self.place[row, order], self.score[row, order] = first + column, scores[row, column]
        return self.count + new

    def _collect_compiled(self, first: int, scores: Tensor) -> Tensor:
        from fenchel.kernels.memories import collect
        from fenchel.kernels.pool import over_rows

        count = torch.empty_like(self.count)
        arrays = (
            t.numpy() for t in (scores, self.floor.reshape(-1), torch.tensor([first], device="cpu"), self.count, count)
        )
        over_rows(collect, len(scores), scores.numel(), *arrays, self.place.numpy(), self.score.numpy())
        return count

    def _refine(self) -> None:
        """Of what was kept, the support; and the floor below which no later pattern can have weight."""
        width = max(int(self.count.max()), 1)
        place, score = self.place[:, :width], self.score[:, :width]
        wrong = score.isnan() | (score == torch.inf)
        self.bad |= wrong.any(-1)
        score = score.masked_fill(wrong, -torch.inf)
        weights = self.omega.argmax(score)
        self.count = _in_support(self.omega, score, weights).sum(-1)
        self.wide |= self.count > self.most
        # Lists lie side by side, as long as the longest: what has no use for one must not make it longer.
        self.count = self.count.masked_fill(self.bad | self.wide, 0)
        width = max(int(self.count.max()), 1)
        # The support has the largest scores; what ties with its last entry ties in weight too, and is in it.
        score, chosen = score.topk(width, -1)
        place, weights = place.gather(-1, chosen), weights.gather(-1, chosen)
        beyond = torch.arange(width, device=score.device) >= self.count.unsqueeze(-1)
        self.place.fill_(-1)
        self.score.fill_(-torch.inf)
        self.place[:, :width], self.score[:, :width] = (
            place.masked_fill(beyond, -1),
            score.masked_fill(beyond, -torch.inf),
        )
        self._raise(_floor(self.omega, self.score[:, :width], weights, self.count.unsqueeze(-1)))
        self.enough = 2 * width + ROOM // 2

    def _raise(self, floor: Tensor) -> None:
        # Nothing is kept for what will be NaN, or is solved on its own.
        self.floor = floor.masked_fill((self.bad | self.wide).unsqueeze(-1), torch.inf)

    def _widen(self, width: int) -> None:
        """Room for so many entries, and what was appended beyond the count forgotten."""
        beyond = torch.arange(self.place.shape[1], device=self.place.device) >= self.count.unsqueeze(-1)
        self.place = _resized(self.place.masked_fill(beyond, -1), width, -1)
        self.score = _resized(self.score.masked_fill(beyond, -torch.inf), width, -torch.inf)

    def finish(self) -> tuple[Tensor, Tensor]:
        self._refine()
        width = max(int(self.count.max()), 1)
        place = self.place[:, :width].masked_fill(self.wide.unsqueeze(-1), -3)
        return place.masked_fill(self.bad.unsqueeze(-1), -2), self.score[:, :width].contiguous()


def is_hard(omega: Regularizer) -> bool:
    """Whether the best pattern takes all, with no margin: rounding then tells what ties."""
    omega = base(omega)
    return isinstance(omega, Tsallis) and math.isinf(number(omega.alpha))


def _in_support(omega: Regularizer, score: Tensor, weights: Tensor) -> Tensor:
    """What has weight; without a margin also what ties up to rounding, which differs from chunk to chunk."""
    if not is_hard(omega):
        return weights > 0
    top = score.amax(-1, keepdim=True)
    return (score >= top - _rounding(top, number(temperature(omega)))) & (score > -torch.inf)


def _rounding(top: Tensor, gamma: float) -> Tensor:
    return 64 * torch.finfo(top.dtype).eps * (top.abs() + gamma)


def _first_floor(omega: Regularizer, scores: Tensor) -> Tensor:
    """A floor for the first chunk: no entry of a support is more than the margin below the best, or the k-th best."""
    inner, gamma = base(omega), number(temperature(omega))
    top = scores.amax(-1, keepdim=True)
    if isinstance(inner, KSubsets):
        k = math.ceil(number(inner.k))
        if k > scores.shape[1]:
            return torch.full_like(top, -torch.inf)
        below = scores.topk(k, -1).values[:, -1:]
        reach = gamma
    else:
        below = top
        lead = margin(omega, torch.ones(1, device="cpu"))
        assert lead is not None
        reach = float(lead)
    return torch.where(top.isfinite(), below - reach - _rounding(top, gamma), -torch.inf)


def _floor(omega: Regularizer, score: Tensor, weights: Tensor, count: Tensor) -> Tensor:
    """The threshold of supports (R, K), rounded down: a pattern with a lower score is not in a larger support either.

    At the threshold s − γ∇Ω(p) is the same for all of the support.
    """
    omega, gamma = base(omega), number(temperature(omega))
    top, p = score[:, :1], weights[:, :1]
    if isinstance(omega, KSubsets):
        slack = torch.where(weights > 0, score - gamma * weights, torch.inf).amin(-1, keepdim=True)
        floor = torch.where(count < omega.k, -torch.inf, slack)
    elif isinstance(omega, Norm):
        alpha = number(omega.alpha)
        norm = torch.linalg.vector_norm(weights, alpha, dim=-1, keepdim=True)
        floor = top - gamma * (p / norm).clamp_max(1.0).pow(alpha - 1)
    else:
        assert isinstance(omega, Tsallis)
        alpha = number(omega.alpha)
        floor = top if math.isinf(alpha) else top - gamma * p.pow(alpha - 1) / (alpha - 1)
    return torch.where(top > -torch.inf, floor - _rounding(top, gamma), -torch.inf)


def on_supports(
    query: Tensor,
    found: tuple[Tensor, Tensor],
    blocks: Blocks,
    pick: Callable[[Tensor], Tensor],
    function: Function,
    width: int,
    learns: bool,
    alike: bool,
) -> Tensor:
    """``function(scores, mask, places)`` of the supports, some queries at a time.

    Args:
        query: (R, D), scaled by β.
        found: what ``supports`` gives.
        blocks: makes another pass, for queries with wide supports.
        pick: patterns (R, K, D) at places.
        function: see ``Function``; queries that are not finite get NaN.
        width: of a pattern.
        learns: whether derivatives are wanted: the scores are then made again, differentiably.
        alike: whether equal patterns must have equal scores, to the last bit, wherever they lie.
    """
    parts = []
    for rows in _parts(found[0], width):
        at = found[0][rows]
        # In multiples of ROOM: sums are then in the same order however long the longest list is.
        longest = -(-max(int((at >= 0).sum(-1).max()), 1) // ROOM) * ROOM
        at, scores = _resized(at, longest, -1), _resized(found[1][rows], longest, -torch.inf)
        mask, bad = at >= 0, at[:, 0] == -2
        at = at.clamp_min(0)
        if learns or alike:
            scores = torch.where(mask, (pick(at) * query[rows].unsqueeze(-2)).sum(-1), -torch.inf)
        result = function(scores, mask, at)
        parts.append(torch.where(bad.reshape(-1, *(1,) * (result.dim() - 1)), torch.nan, result))
    result = torch.cat(parts)
    wide = (found[0][:, 0] == -3).nonzero().squeeze(-1)
    return result.index_put((wide,), _on_all(query[wide], blocks, function, alike)) if len(wide) else result


def _on_all(query: Tensor, blocks: Blocks, function: Function, alike: bool) -> Tensor:
    """``function`` of all scores, as many queries in a pass as there is room for."""

    def score(some: Tensor, block: Tensor) -> Tensor:
        return torch.stack([(block * q).sum(-1) for q in some]) if alike else some @ block.T

    count = sum(len(block) for _, block in blocks())
    rows = tiled(query)
    parts = []
    for here in row_groups(len(rows), count):
        scores = torch.cat([score(rows[here], block) for _, block in blocks()], -1)
        parts.append(function(scores, None, None))
    return torch.cat(parts)[: len(query)]


def average(weights: Tensor, place: Tensor, pick: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """Σ weights · pick(places), (R, V): CHUNK places at a time, of as many rows as HELD entries have room for."""

    def part(weights: Tensor, place: Tensor) -> Tensor:
        return (weights.unsqueeze(-2) @ pick(place)).squeeze(-2)

    def pieces(weights: Tensor, place: Tensor) -> Tensor:
        pairs = list(zip(torch.split(weights, CHUNK, -1), torch.split(place, CHUNK, -1), strict=True))
        if len(pairs) == 1:
            return part(weights, place)
        total: Tensor = sum(_again(part, *pair) for pair in pairs)
        return total

    size = max(HELD // max(min(place.shape[1], CHUNK) * width, 1), 1)
    split = zip(torch.split(weights, size), torch.split(place, size), strict=True)
    return torch.cat([pieces(*each) for each in split])


def average_of_all(weights: Tensor, blocks: Blocks) -> Tensor:
    """Weights (R, N) times all rows, (R, V), a chunk at a time."""
    pieces = (_again(torch.matmul, weights[:, first : first + len(block)], block) for first, block in blocks())
    total: Tensor = sum(pieces, torch.zeros((), dtype=weights.dtype, device=weights.device))
    return total


def _parts(place: Tensor, width: int) -> Iterator[slice]:
    """Rows whose gathered patterns are about HELD entries."""
    counts = ((place >= 0).sum(-1).clamp_min(1) * max(width, 1)).tolist()
    first, largest = 0, 0
    for row, count in enumerate(counts):
        largest = max(largest, count)
        if row > first and largest * (row - first + 1) > HELD:
            yield slice(first, row)
            first, largest = row, count
    yield slice(first, len(counts))


def _again(function: Callable[..., Any], *tensors: Tensor) -> Any:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return checkpoint(function, *tensors, use_reentrant=False)
    return function(*tensors)


def _resized(x: Tensor, width: int, fill: float) -> Tensor:
    """The first ``width`` columns, filled up where there are fewer."""
    return torch.nn.functional.pad(x[:, :width], (0, max(width - x.shape[1], 0)), value=fill)


def margin(omega: Regularizer, copies: Tensor) -> Tensor | None:
    """The lead that some copies of one pattern need to share all weight, one value each; None if it is not known.

    For one copy that is Ω's margin. Copies have equal scores and share evenly, at p = 1/c: the lead is γ times the
    slope of Ω there, relative to that at 0.
    """
    inner, gamma = base(omega), number(temperature(omega))
    c = copies.double()
    if isinstance(inner, Tsallis):
        alpha = number(inner.alpha)
        if alpha <= 1:
            return torch.full_like(c, math.inf)
        return torch.zeros_like(c) if math.isinf(alpha) else gamma * c.pow(1 - alpha) / (alpha - 1)
    if isinstance(inner, Norm):
        alpha = number(inner.alpha)
        return gamma / c if math.isinf(alpha) else gamma * c.pow(1 / alpha - 1)
    if isinstance(inner, KSubsets) and number(inner.k) == 1:
        return gamma / c
    return None
