"""Passes over stored patterns, a chunk at a time: no matrix of queries × patterns is ever held.

A sparse Ω that works by a threshold needs no more than one pass. What has no weight among the patterns seen so far has
none among all of them, for every further pattern raises the threshold: so each query keeps the support of what it has
seen, and at the end the map is solved on that, exactly. A query whose support outgrows a chunk (that of a query of zero
is everything) keeps nothing, and is solved on all its scores later, few such queries at a time. Where partial results
can be merged (softmax), chunks are summed up as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel._torch import recomputed, tracks_forward
from fenchel.kernels import usable
from fenchel.regularizers.base import Regularizer
from fenchel.streaming.plan import Plan
from fenchel.streaming.running_softmax import Stored, softmax_average

Function = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Rows of a result from scores, what of them is a support, and the places of the patterns; None: of all, in order."""


# -- what a memory asks for ------------------------------------------------------------------------------------------


def recall(query: Tensor, keys: Stored, values: Stored, omega: Regularizer, plan: Plan) -> Tensor:
    """argmax_Ω(query · keys) times the values, (R, V), for queries (R, D) that are scaled by β."""
    omega = _simplest(omega)
    if plan.method == "parts":
        return _softmax(query, keys, values, omega, plan)[1]
    if plan.method == "dense":
        return _recall_by_products(query, keys, values, omega, plan)

    def average(scores: Tensor, mask: Tensor | None, place: Tensor | None) -> Tensor:
        weights = omega.argmax(scores, mask=mask)
        if place is None:
            return _average_of_all(weights, values, plan)
        return _average(weights, place, values, plan)

    return _on_supports(query, keys, omega, plan, average)


def maximum(query: Tensor, keys: Stored, omega: Regularizer, plan: Plan) -> Tensor:
    """max_Ω(query · keys), (R,), for queries (R, D) that are scaled by β."""
    omega = _simplest(omega)
    if plan.method == "parts":
        return omega.canonical()[1] * _softmax(query, keys, None, omega, plan)[0]
    if plan.method == "supports":
        return _on_supports(query, keys, omega, plan, lambda scores, mask, _: omega.max(scores, mask=mask))
    every = keys.all()  # converted once, not for each group of queries
    return torch.cat([omega.max(query[here] @ every.T) for here in plan.groups(len(query))])


def weights(query: Tensor, keys: Stored, omega: Regularizer, plan: Plan) -> Tensor:
    """argmax_Ω(query · keys), (R, N), dense, for queries (R, D) that are scaled by β."""
    omega = _simplest(omega)
    if plan.method == "dense":
        return omega.argmax(query @ keys.all().T)
    if plan.method == "parts":
        return omega.argmax(torch.cat([query @ block.T for _, block in keys.blocks(plan.columns)], -1))

    def spread(scores: Tensor, mask: Tensor | None, place: Tensor | None) -> Tensor:
        chosen = omega.argmax(scores, mask=mask)
        if place is None or mask is None:
            return chosen
        return scores.new_zeros(len(scores), len(keys.held)).scatter_add(-1, place, torch.where(mask, chosen, 0.0))

    return _on_supports(query, keys, omega, plan, spread)


def _simplest(omega: Regularizer) -> Regularizer:
    """The same Ω in its simplest form."""
    base, gamma = omega.canonical()
    return base if not isinstance(gamma, Tensor) and gamma == 1 else gamma * base


def _softmax(
    query: Tensor, keys: Stored, values: Stored | None, omega: Regularizer, plan: Plan
) -> tuple[Tensor, Tensor]:
    # Vectorized functions take sixteen entries at a time, and treat those that are left over in another way.
    log, mean = softmax_average(tiled(query, 16), keys, values, omega.canonical()[1], plan)
    return log[: len(query)], mean[: len(query)]


def _recall_by_products(query: Tensor, keys: Stored, values: Stored, omega: Regularizer, plan: Plan) -> Tensor:
    padded = tiled(query, plan.tile)
    every = keys.all()
    recalled = every if values is keys else values.all()
    chosen = []
    for here in plan.groups(len(padded)):
        weights = omega.argmax(products(padded[here], every.T, plan.tile))
        chosen.append(products(weights, recalled, plan.tile))
    return torch.cat(chosen)[: len(query)]


def tiled(rows: Tensor, tile: int) -> Tensor:
    """Rows (R, D), and copies of the last up to a multiple of a number."""
    missing = -len(rows) % tile
    return torch.cat([rows, rows[-1:].expand(missing, -1)]) if len(rows) and missing else rows


def products(rows: Tensor, columns: Tensor, tile: int) -> Tensor:
    """rows @ columns without derivatives, in products of one shape: rounding depends on the shape and the threads.

    It depends on where rows begin, too: they are moved apart to multiples of eight entries.
    """
    if rows.shape[1] % 8:
        rows = rows.new_empty(len(rows), rows.shape[1] + -rows.shape[1] % 8)[:, : rows.shape[1]].copy_(rows)
    result = rows.new_empty(len(rows), columns.shape[1])
    for first in range(0, len(rows), tile):
        torch.mm(rows[first : first + tile], columns, out=result[first : first + tile])
    return result


# -- one pass that keeps supports ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """The supports of queries among all patterns.

    Args:
        place: (R, K), which patterns; the first ``count`` of each row.
        score: (R, K), their scores; −inf beyond the count.
        count: (R,), how many there are.
        not_finite: (R,), whether a score is NaN or +inf: nothing is kept then.
        too_wide: (R,), whether the support has outgrown a chunk: nothing is kept then.
    """

    place: Tensor
    score: Tensor
    count: Tensor
    not_finite: Tensor
    too_wide: Tensor

    def of(self, rows: slice, width: int) -> Candidates:
        """Some of the queries, with lists of this width."""
        return Candidates(
            _resized(self.place[rows], width, 0),
            _resized(self.score[rows], width, -torch.inf),
            self.count[rows],
            self.not_finite[rows],
            self.too_wide[rows],
        )


def candidates(query: Tensor, keys: Stored, omega: Regularizer, plan: Plan) -> Candidates:
    """The supports of queries (R, D) that are scaled by β, in one pass over the patterns."""
    with torch.no_grad():
        query = query.detach()
        kept = [_Kept(query[rows], omega, plan) for rows in plan.groups(len(query))]
        for first, block in keys.blocks(plan.columns):
            for each in kept:
                each.absorb(first, block)
        found = [each.finish() for each in kept]
        width = max(each.place.shape[1] for each in found)
        return Candidates(
            torch.cat([_resized(each.place, width, 0) for each in found]),
            torch.cat([_resized(each.score, width, -torch.inf) for each in found]),
            torch.cat([each.count for each in found]),
            torch.cat([each.not_finite for each in found]),
            torch.cat([each.too_wide for each in found]),
        )


class _Kept:
    """What some queries keep of the patterns that they have seen: lists of places and scores, side by side."""

    def __init__(self, query: Tensor, omega: Regularizer, plan: Plan) -> None:
        self.plan, self.omega = plan, omega
        self.most = max(plan.columns, plan.entries)
        self.gamma = _number(omega.canonical()[1])
        self.hard = is_hard(omega)
        self.bad = ~query.isfinite().all(-1)
        self.wide = torch.zeros_like(self.bad)
        self.query = query.masked_fill(self.bad.unsqueeze(-1), 0.0)
        self.count = torch.zeros(len(query), dtype=torch.long, device=query.device)
        self.place = torch.zeros((len(query), plan.entries), dtype=torch.long, device=query.device)
        self.score = query.new_full((len(query), plan.entries), -torch.inf)
        self.floor = query.new_full((len(query), 1), -torch.inf)
        self.enough = 0

    def absorb(self, first: int, block: Tensor) -> None:
        scores = products(self.query, block.T, self.plan.tile)
        if first == 0:
            self._raise(scores)
        count = self._collect(first, scores)
        if int(count.max()) > self.place.shape[1]:  # no room for all: make some, and look again
            self._widen(int(count.max()) * 3 // 2)
            count = self._collect(first, scores)
        self.count = count
        if int(self.count.max()) > self.enough:
            self._refine()

    def _collect(self, first: int, scores: Tensor) -> Tensor:
        """Append what is not below the floor; how many entries each list would have if there were room for all."""
        if usable("memories", scores):
            return self._collect_compiled(first, scores)
        row, column = (~(scores < self.floor)).nonzero(as_tuple=True)
        new = torch.bincount(row, minlength=len(scores))
        order = torch.arange(len(row), device=row.device) - (new.cumsum(0) - new)[row] + self.count[row]
        room = order < self.place.shape[1]
        row, column, order = row[room], column[room], order[room]
        self.place[row, order], self.score[row, order] = first + column, scores[row, column]
        return self.count + new

    def _collect_compiled(self, first: int, scores: Tensor) -> Tensor:
        from fenchel.kernels.cpu.streaming.memories import collect
        from fenchel.kernels.cpu.threads import over_rows

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
        self.count = self._in_support(score).sum(-1)
        self.wide |= self.count > self.most
        # Lists lie side by side, as long as the longest: what has no use for one must not make it longer.
        self.count = self.count.masked_fill(self.bad | self.wide, 0)
        width = max(int(self.count.max()), 1)
        # The support has the largest scores; what ties with its last entry ties in weight too, and is in it.
        score, chosen = score.topk(width, -1)
        beyond = torch.arange(width, device=score.device) >= self.count.unsqueeze(-1)
        self.score.fill_(-torch.inf)
        self.place[:, :width] = place.gather(-1, chosen)
        self.score[:, :width] = score.masked_fill(beyond, -torch.inf)
        self._raise(self.score[:, :width])
        self.enough = 2 * width + self.plan.entries // 2

    def _in_support(self, score: Tensor) -> Tensor:
        """What has weight; without a margin also what ties up to rounding, which differs from chunk to chunk."""
        if not self.hard:
            return self.omega.argmax(score) > 0
        top = score.amax(-1, keepdim=True)
        return (score >= top - self._rounding(top)) & (score > -torch.inf)

    def _raise(self, scores: Tensor) -> None:
        """Set the floor from scores: a pattern with a lower score is not in a larger support either."""
        top, line = scores.amax(-1, keepdim=True), self.omega.line(scores)
        assert line is not None
        floor = torch.where(top.isfinite(), line - self._rounding(top), -torch.inf)
        # Nothing is kept for what will be NaN, or is solved on its own.
        self.floor = floor.masked_fill((self.bad | self.wide).unsqueeze(-1), torch.inf)

    def _rounding(self, top: Tensor) -> Tensor:
        return 64 * torch.finfo(top.dtype).eps * (top.abs() + self.gamma)

    def _widen(self, width: int) -> None:
        """Room for so many entries, and what was appended beyond the count forgotten."""
        beyond = torch.arange(self.place.shape[1], device=self.place.device) >= self.count.unsqueeze(-1)
        self.place = _resized(self.place, width, 0)
        self.score = _resized(self.score.masked_fill(beyond, -torch.inf), width, -torch.inf)

    def finish(self) -> Candidates:
        self._refine()
        width = max(int(self.count.max()), 1)
        return Candidates(self.place[:, :width], self.score[:, :width], self.count, self.bad, self.wide)


def is_hard(omega: Regularizer) -> bool:
    """Whether the best pattern takes all, with no margin: rounding then tells what ties."""
    return omega.margin is not None and _number(omega.margin) == 0


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else value


# -- what is computed on the supports --------------------------------------------------------------------------------


def _on_supports(query: Tensor, keys: Stored, omega: Regularizer, plan: Plan, function: Function) -> Tensor:
    """``function(scores, mask, places)`` of the supports of queries (R, D), some queries at a time.

    Scores are made again where derivatives are wanted, differentiably; and without a margin, where equal patterns must
    have equal scores, to the last bit, wherever they lie.
    """
    if not len(query):
        scores = query.sum(-1, keepdim=True)
        return function(scores, scores > -torch.inf, scores.long())
    found = candidates(query, keys, omega, plan)
    alike = is_hard(omega)
    learns = torch.is_grad_enabled() and (query.requires_grad or keys.held.requires_grad)
    again = alike or learns or tracks_forward()
    parts = []
    for rows in _parts(found.count, keys.held.shape[1], plan):
        # In multiples: sums are then in the same order however long the longest list is.
        width = -(-max(int(found.count[rows].max()), 1) // plan.entries) * plan.entries
        here = found.of(rows, width)
        mask = torch.arange(width, device=query.device) < here.count.unsqueeze(-1)
        place, scores = here.place.masked_fill(~mask, 0), here.score
        if again:
            scores = torch.where(mask, (keys.at(place) * query[rows].unsqueeze(-2)).sum(-1), -torch.inf)
        result = function(scores, mask, place)
        spoiled = here.not_finite.reshape(-1, *(1,) * (result.dim() - 1))
        parts.append(torch.where(spoiled, torch.nan, result))
    result = torch.cat(parts)
    wide = (found.too_wide & ~found.not_finite).nonzero().squeeze(-1)
    return result.index_put((wide,), _on_all(query[wide], keys, plan, function, alike)) if len(wide) else result


def _on_all(query: Tensor, keys: Stored, plan: Plan, function: Function, alike: bool) -> Tensor:
    """``function`` of all scores, as many queries in a pass as a block has room for."""

    def score(some: Tensor, block: Tensor) -> Tensor:
        return torch.stack([(block * q).sum(-1) for q in some]) if alike else some @ block.T

    rows = tiled(query, plan.tile)
    size = max(plan.held // len(keys.held) // plan.tile, 1) * plan.tile
    parts = []
    for some in torch.split(rows, size):
        scores = torch.cat([score(some, block) for _, block in keys.blocks(plan.columns)], -1)
        parts.append(function(scores, None, None))
    return torch.cat(parts)[: len(query)]


def _average(weights: Tensor, place: Tensor, values: Stored, plan: Plan) -> Tensor:
    """Σ weights · values at places, (R, V), of which no more are gathered at a time than a block has entries."""

    def part(weights: Tensor, held: Tensor, place: Tensor) -> Tensor:
        return (weights.unsqueeze(-2) @ values.ready(held[place])).squeeze(-2)

    width = max(values.held.shape[1], 1)
    most = max(plan.held // width, 1)

    def pieces(weights: Tensor, place: Tensor) -> Tensor:
        pairs = list(zip(torch.split(weights, most, -1), torch.split(place, most, -1), strict=True))
        if len(pairs) == 1:
            return part(weights, values.held, place)
        total: Tensor = sum(_again(part, w, values.held, p) for w, p in pairs)
        return total

    size = max(most // max(min(place.shape[1], most), 1), 1)
    split = zip(torch.split(weights, size), torch.split(place, size), strict=True)
    return torch.cat([pieces(*each) for each in split])


def _average_of_all(weights: Tensor, values: Stored, plan: Plan) -> Tensor:
    """Weights (R, N) times all values, (R, V), a chunk at a time."""
    total = torch.zeros((), dtype=weights.dtype, device=weights.device)
    for first in range(0, len(values.held), plan.columns):
        here = slice(first, first + plan.columns)
        total = total + _again(lambda w, held: w @ values.ready(held), weights[:, here], values.held[here])
    return total


def _parts(count: Tensor, width: int, plan: Plan) -> Iterator[slice]:
    """Rows whose gathered patterns have about as many entries as a block."""
    counts = (count.clamp_min(1) * max(width, 1)).tolist()
    first, largest = 0, 0
    for row, size in enumerate(counts):
        largest = max(largest, size)
        if row > first and largest * (row - first + 1) > plan.held:
            yield slice(first, row)
            first, largest = row, size
    yield slice(first, len(counts))


def _again(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """``function(*tensors)``, which keeps nothing of its own for derivatives."""
    if torch.is_grad_enabled() and not tracks_forward() and any(t.requires_grad for t in tensors):
        return recomputed(function, *tensors)
    return function(*tensors)


def _resized(x: Tensor, width: int, fill: float) -> Tensor:
    """The first ``width`` columns, filled up where there are fewer."""
    return torch.nn.functional.pad(x[:, :width], (0, max(width - x.shape[1], 0)), value=fill)
