"""Passes over stored patterns, a chunk at a time: no matrix of queries × patterns is ever held.

An Ω with a threshold needs one pass. A pattern without weight among those read so far has none among all patterns,
because every further pattern raises the threshold. So only the support of each query among the patterns read so far is
kept, and at the end the map is solved on that, exactly. If the support of a query is larger than a chunk (that of a
query of zeros is all patterns), nothing is kept for it: it is solved on all its scores later, with few others at a
time.

An Ω without a threshold, such as SparseMAP, is solved on all scores of a few queries at a time.

For softmax, whose partial results can be merged, each chunk is merged into a running log-sum-exp and a running mean.
The backward pass reads the chunks again: with the final log-sum-exp the weights of a chunk are known, and so are its
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import apply_function, differentiable_gradients, recomputed, tracks, tracks_forward
from fenchel.regularizers.base import Regularizer, simplified
from fenchel.streaming.plan import Plan

Function = Callable[[Tensor, Tensor | None], Tensor]
"""Rows of a result from scores and the indices of their patterns; the indices are None for all patterns in order."""


class Stored(NamedTuple):
    """Rows as they are stored, (N, D), and a function that prepares some of them for products: dtype and norm."""

    held: Tensor
    prepare: Callable[[Tensor], Tensor]

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Blocks of ``size`` prepared rows, each with the index of its first row."""
        for first in range(0, len(self.held), size):
            yield first, self.prepare(self.held[first : first + size])


# -- what a memory computes ------------------------------------------------------------------------------------------


def recall(query: Tensor, keys: Stored, values: Stored, omega: Regularizer, plan: Plan) -> Tensor:
    """argmax_Ω(query · keys) times the values, (R, V), for queries (R, D) that are scaled by β."""
    omega = simplified(omega)
    rows = pad_rows(query, plan.tile)
    if plan.method == "parts":
        found = softmax_average(rows, keys, values, omega.canonical()[1], plan)[1]
    elif plan.method == "supports" or _by_chunks(keys, plan):

        def average(scores: Tensor, place: Tensor | None) -> Tensor:
            weights = omega.argmax(scores)
            return _average_of_all(weights, values, plan) if place is None else _average(weights, place, values, plan)

        found = _on_supports(rows, keys, omega, plan, average)
    else:
        patterns = keys.prepare(keys.held)
        recalled = patterns if values is keys else values.prepare(values.held)
        groups = []
        for here in plan.groups(len(rows)):
            weights = omega.argmax(_multiply(rows[here], patterns.T, plan))
            groups.append(_multiply(weights, recalled, plan))
        found = torch.cat(groups)
    return found[: len(query)]


def maximum(query: Tensor, keys: Stored, omega: Regularizer, plan: Plan) -> Tensor:
    """max_Ω(query · keys), (R,), for queries (R, D) that are scaled by β."""
    omega = simplified(omega)
    rows = pad_rows(query, plan.tile)
    if plan.method == "parts":
        gamma = omega.canonical()[1]
        found = gamma * softmax_average(rows, keys, None, gamma, plan)[0]
    elif plan.method == "supports" or _by_chunks(keys, plan):
        found = _on_supports(rows, keys, omega, plan, lambda scores, _: omega.max(scores))
    else:
        patterns = keys.prepare(keys.held)  # converted once, not for each group of queries
        found = torch.cat([omega.max(rows[here] @ patterns.T) for here in plan.groups(len(rows))])
    return found[: len(query)]


def weights(query: Tensor, keys: Stored, omega: Regularizer, plan: Plan) -> Tensor:
    """argmax_Ω(query · keys), (R, N), dense, for queries (R, D) that are scaled by β."""
    omega = simplified(omega)
    rows = pad_rows(query, plan.tile)
    if plan.method == "dense" and not _by_chunks(keys, plan):
        found = omega.argmax(rows @ keys.prepare(keys.held).T)
    elif plan.method == "parts":
        found = omega.argmax(torch.cat([rows @ block.T for _, block in keys.blocks(plan.columns)], -1))
    else:

        def scatter(scores: Tensor, place: Tensor | None) -> Tensor:
            chosen = omega.argmax(scores)
            if place is None:
                return chosen
            return scores.new_zeros(len(scores), len(keys.held)).scatter_add(-1, place, chosen)

        found = _on_supports(rows, keys, omega, plan, scatter)
    return found[: len(query)]


def _by_chunks(keys: Stored, plan: Plan) -> bool:
    """Whether all scores of some queries are computed at a time, and from some patterns at a time."""
    return plan.method == "dense" and plan.columns < len(keys.held)


def _multiply(rows: Tensor, columns: Tensor, plan: Plan) -> Tensor:
    """rows @ columns, differentiable where a derivative may be asked for."""
    return rows @ columns if tracks(rows, columns) else products(rows, columns, plan.tile)


def pad_rows(rows: Tensor, multiple: int) -> Tensor:
    """Rows (R, D), followed by copies of the last row up to a multiple of a number."""
    missing = -len(rows) % multiple
    return torch.cat([rows, rows[-1:].expand(missing, -1)]) if len(rows) and missing else rows


def products(rows: Tensor, columns: Tensor, tile: int) -> Tensor:
    """rows @ columns without derivatives, in products of ``tile`` rows each.

    Rounding depends on the shape of a product, on the threads, and on the addresses of its rows. So all products have
    one shape, and rows begin at multiples of eight entries.
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
        place: (R, K), indices of patterns; the first ``count`` of each row.
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


def candidates(query: Tensor, keys: Stored, omega: Regularizer, plan: Plan) -> Candidates:
    """The supports of queries (R, D) that are scaled by β, in one pass over the patterns."""
    with torch.no_grad():
        query = query.detach()
        lists = [_CandidateLists(query[rows], omega, plan) for rows in plan.groups(len(query))]
        for first, block in keys.blocks(plan.columns):
            block = block.detach()  # tangents of forward mode too
            for each in lists:
                each.add_block(first, block)
        width = 1
        for each in lists:
            each.reduce_to_supports()
            width = max(width, int(each.count.max()))
        return Candidates(
            torch.cat([_resized(each.place, width, 0) for each in lists]),
            torch.cat([_resized(each.score, width, -torch.inf) for each in lists]),
            torch.cat([each.count for each in lists]),
            torch.cat([each.not_finite for each in lists]),
            torch.cat([each.too_wide for each in lists]),
        )


class _CandidateLists:
    """The patterns that may be in the supports of some queries, among those seen so far: their indices and scores."""

    def __init__(self, query: Tensor, omega: Regularizer, plan: Plan) -> None:
        self.plan, self.omega = plan, omega
        self.gamma = _number(omega.canonical()[1])
        self.hard = is_hard(omega)
        self.not_finite = ~query.isfinite().all(-1)
        self.too_wide = torch.zeros_like(self.not_finite)
        self.query = query.masked_fill(self.not_finite.unsqueeze(-1), 0.0)
        self.count = torch.zeros(len(query), dtype=torch.long, device=query.device)
        self.place = torch.zeros((len(query), plan.entries), dtype=torch.long, device=query.device)
        self.score = query.new_full((len(query), plan.entries), -torch.inf)
        self.floor = query.new_full((len(query), 1), -torch.inf)
        self.longest = 0  # longer lists are reduced to supports

    def add_block(self, first: int, block: Tensor) -> None:
        """Append the patterns of a block that may be in a support."""
        scores = products(self.query, block.T, self.plan.tile)
        if first == 0:
            self._set_floor(scores)
        count = self._append(first, scores)
        if int(count.max()) > self.place.shape[1]:  # lists are too short: make them longer, and append again
            self._lengthen(int(count.max()) * 3 // 2)
            count = self._append(first, scores)
        self.count = count
        if int(self.count.max()) > self.longest:
            self.reduce_to_supports()

    def _append(self, first: int, scores: Tensor) -> Tensor:
        """Append scores that are not below the floor, as far as lists are long enough; return the counts of all."""
        kernel = kernels.find("collect", "supports", (), scores)
        if kernel is not None:
            counts: Tensor = kernel(scores, self.floor, first, self.count, self.place, self.score)
            return counts
        row, column = (~(scores < self.floor)).nonzero(as_tuple=True)
        new = torch.bincount(row, minlength=len(scores))
        order = torch.arange(len(row), device=row.device) - (new.cumsum(0) - new)[row] + self.count[row]
        fits = order < self.place.shape[1]
        row, column, order = row[fits], column[fits], order[fits]
        self.place[row, order], self.score[row, order] = first + column, scores[row, column]
        return self.count + new

    def reduce_to_supports(self) -> None:
        """Keep the supports of the lists, and raise the floor below which no later pattern can have weight."""
        width = max(int(self.count.max()), 1)
        place, score = self.place[:, :width], self.score[:, :width]
        invalid = score.isnan() | (score == torch.inf)
        self.not_finite |= invalid.any(-1)
        score = score.masked_fill(invalid, -torch.inf)
        if self.hard:  # what ties up to rounding, which differs from chunk to chunk
            top = score.amax(-1, keepdim=True)
            support = (score >= top - self._rounding(top)) & (score > -torch.inf)
        else:
            short = self._line(score) == -torch.inf  # too few to hold the mass: each of them has some
            support = self.omega.argmax(score.masked_fill(short, -torch.inf)) > 0
            support = torch.where(short, score > -torch.inf, support)
        self.count = support.sum(-1)
        self.too_wide |= self.count > max(self.plan.columns, self.plan.entries)
        # All lists are as long as the longest: those that are not used must not make it longer.
        self.count = self.count.masked_fill(self.not_finite | self.too_wide, 0)
        width = max(int(self.count.max()), 1)
        # The support has the largest scores; what ties with its last entry ties in weight too, and is in it.
        score, chosen = score.topk(width, -1)
        beyond = torch.arange(width, device=score.device) >= self.count.unsqueeze(-1)
        self.score.fill_(-torch.inf)
        self.place[:, :width] = place.gather(-1, chosen)
        self.score[:, :width] = score.masked_fill(beyond, -torch.inf)
        self._set_floor(self.score[:, :width])
        self.longest = 2 * width + self.plan.entries // 2

    def _set_floor(self, scores: Tensor) -> None:
        """Set the floor from scores: a pattern with a lower score is not in a larger support either."""
        top = scores.amax(-1, keepdim=True)
        floor = torch.where(top.isfinite(), self._line(scores) - self._rounding(top), -torch.inf)
        # Nothing is kept for queries whose result is NaN, or that are solved on all their scores.
        self.floor = floor.masked_fill((self.not_finite | self.too_wide).unsqueeze(-1), torch.inf)

    def _line(self, scores: Tensor) -> Tensor:
        """The level below which no other pattern has weight, (R, 1)."""
        line = self.omega.line(scores)
        assert line is not None
        return line

    def _rounding(self, top: Tensor) -> Tensor:
        """A bound of the rounding errors of scores, given the largest of each query."""
        return 64 * torch.finfo(top.dtype).eps * (top.abs() + self.gamma)

    def _lengthen(self, width: int) -> None:
        """Make lists of this length, and remove what was appended beyond the count."""
        beyond = torch.arange(self.place.shape[1], device=self.place.device) >= self.count.unsqueeze(-1)
        self.place = _resized(self.place, width, 0)
        self.score = _resized(self.score.masked_fill(beyond, -torch.inf), width, -torch.inf)


def is_hard(omega: Regularizer) -> bool:
    """Whether the margin of Ω is 0: the best pattern takes all weight, and rounding decides which patterns tie."""
    return omega.margin is not None and _number(omega.margin) == 0


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else value


# -- what is computed on the supports --------------------------------------------------------------------------------


def _on_supports(query: Tensor, keys: Stored, omega: Regularizer, plan: Plan, function: Function) -> Tensor:
    """``function(scores, indices)`` of the supports of queries (R, D), some queries at a time.

    By a dense plan, of all scores: Ω has no level below which nothing has weight.

    Scores are computed again where derivatives are needed, differentiably; and without a margin, where equal patterns
    must have equal scores, to the last bit, wherever they lie.
    """
    if not len(query):
        return function(query.sum(-1, keepdim=True).expand(0, len(keys.held)), None)
    if plan.method == "dense":
        return _on_all(query, keys, plan, function, hard=False)
    found = candidates(query, keys, omega, plan)
    hard = is_hard(omega)
    learns = torch.is_grad_enabled() and (query.requires_grad or keys.held.requires_grad)
    parts = []
    for rows in _row_groups(found.count, keys.held.shape[1], plan):
        # In multiples: sums are then in the same order however long the longest list is.
        width = -(-max(int(found.count[rows].max()), 1) // plan.entries) * plan.entries
        listed = torch.arange(width, device=query.device) < found.count[rows].unsqueeze(-1)
        place = _resized(found.place[rows], width, 0).masked_fill(~listed, 0)
        if hard or learns or tracks_forward():
            patterns = keys.prepare(keys.held[place])
            scores = torch.where(listed, (patterns * query[rows].unsqueeze(-2)).sum(-1), -torch.inf)
        else:
            scores = _resized(found.score[rows], width, -torch.inf)
        result = function(scores, place)
        invalid = found.not_finite[rows].reshape(-1, *(1,) * (result.dim() - 1))
        parts.append(torch.where(invalid, torch.nan, result))
    result = torch.cat(parts)
    wide = (found.too_wide & ~found.not_finite).nonzero().squeeze(-1)
    return result.index_put((wide,), _on_all(query[wide], keys, plan, function, hard)) if len(wide) else result


def _on_all(query: Tensor, keys: Stored, plan: Plan, function: Function, hard: bool) -> Tensor:
    """``function`` of all scores of queries (R, D), as many queries in a pass as a block holds."""

    def score(some: Tensor, block: Tensor) -> Tensor:
        return torch.stack([(block * q).sum(-1) for q in some]) if hard else some @ block.T

    size = max(plan.held // len(keys.held) // plan.tile, 1) * plan.tile
    parts = []
    for some in torch.split(pad_rows(query, plan.tile), size):
        scores = torch.cat([score(some, block) for _, block in keys.blocks(plan.columns)], -1)
        parts.append(function(scores, None))
    return torch.cat(parts)[: len(query)]


def _average(weights: Tensor, place: Tensor, values: Stored, plan: Plan) -> Tensor:
    """Σ weights · values at places, (R, V), of which no more are gathered at a time than a block has entries."""

    def part(weights: Tensor, held: Tensor, place: Tensor) -> Tensor:
        return (weights.unsqueeze(-2) @ values.prepare(held[place])).squeeze(-2)

    most = max(plan.held // max(values.held.shape[1], 1), 1)
    size = max(most // max(min(place.shape[1], most), 1), 1)
    averages = []
    for some_weights, some_places in zip(torch.split(weights, size), torch.split(place, size), strict=True):
        if place.shape[1] <= most:
            averages.append(part(some_weights, values.held, some_places))
            continue
        total = torch.zeros((), dtype=weights.dtype, device=weights.device)
        for w, p in zip(torch.split(some_weights, most, -1), torch.split(some_places, most, -1), strict=True):
            total = total + _checkpointed(part, w, values.held, p)
        averages.append(total)
    return torch.cat(averages)


def _average_of_all(weights: Tensor, values: Stored, plan: Plan) -> Tensor:
    """Weights (R, N) times all values, (R, V), a chunk at a time."""
    total = torch.zeros((), dtype=weights.dtype, device=weights.device)
    for first in range(0, len(values.held), plan.columns):
        here = slice(first, first + plan.columns)
        total = total + _checkpointed(lambda w, held: w @ values.prepare(held), weights[:, here], values.held[here])
    return total


def _row_groups(count: Tensor, width: int, plan: Plan) -> Iterator[slice]:
    """Groups of rows whose gathered patterns, ``count`` per row, have about as many entries as a block."""
    sizes = (count.clamp_min(1) * max(width, 1)).tolist()
    first, largest = 0, 0
    for row, size in enumerate(sizes):
        largest = max(largest, size)
        if row > first and largest * (row - first + 1) > plan.held:
            yield slice(first, row)
            first, largest = row, size
    yield slice(first, len(sizes))


def _checkpointed(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """``function(*tensors)``, computed again in the backward pass: nothing but the tensors is kept for it."""
    if torch.is_grad_enabled() and not tracks_forward() and any(t.requires_grad for t in tensors):
        return recomputed(function, *tensors)
    return function(*tensors)


def _resized(x: Tensor, width: int, fill: float) -> Tensor:
    """The first ``width`` columns of a matrix, with columns of ``fill`` added where there are fewer."""
    return torch.nn.functional.pad(x[:, :width], (0, max(width - x.shape[1], 0)), value=fill)


# -- one pass that merges softmax averages ---------------------------------------------------------------------------


def softmax_average(
    query: Tensor, keys: Stored, values: Stored | None, gamma: float | Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """log Σ exp(s/γ), (R,), and the softmax average of the values, (R, V), for scores s = query · keys.

    Args:
        query: (R, D), scaled by β.
        keys: (N, D).
        values: (N, V); without them the average has width 0.
        gamma: the temperature, one number.
        plan: how many queries are worked on, and rows of keys and values are read, at a time.
    """
    # Vectorized functions take sixteen entries at a time, and treat those that are left over in another way.
    rows = pad_rows(query, 16)
    task = _Task(keys.prepare, None if values is None else values.prepare, plan)
    number = torch.as_tensor(gamma, dtype=query.dtype, device=query.device).reshape(())
    tensors = (rows, keys.held, keys.held.new_empty(len(keys.held), 0) if values is None else values.held, number)
    if tracks_forward() or torch.compiler.is_compiling():
        log, mean = _plain(*tensors, task)
    else:
        log, mean = apply_function(_Softmax, *tensors, task)
    return log[: len(query)], mean[: len(query)]


class _Task(NamedTuple):
    """How chunks of keys and values are read and prepared for products; without ``value`` there are no values."""

    key: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor] | None
    plan: Plan

    def chunks(self, count: int) -> Iterator[slice]:
        """Chunks of the rows of ``count`` patterns."""
        size = self.plan.columns
        return (slice(first, min(first + size, count)) for first in range(0, count, size))

    def read(self, keys: Tensor, values: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk of keys and values, prepared for products; values of width 0 if there are none."""
        return self.key(keys), like.new_empty(len(values), 0) if self.value is None else self.value(values)


def _plain(query: Tensor, keys: Tensor, values: Tensor, gamma: Tensor, task: _Task) -> tuple[Tensor, Tensor]:
    """``softmax_average`` of all scores at once, in operations with derivatives of every mode and order."""
    key, value = task.read(keys, values, query)
    scores = query @ key.T / gamma
    return scores.logsumexp(-1), torch.softmax(scores, -1) @ value


class _Softmax(torch.autograd.Function):
    """``softmax_average``, chunk by chunk in both passes."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, gamma: Tensor, task: _Task
    ) -> tuple[Tensor, Tensor]:
        log = query.new_full((len(query),), -torch.inf)
        mean = query.new_zeros(len(query), 0 if task.value is None else values.shape[1])
        for here in task.chunks(len(keys)):
            key, value = task.read(keys[here], values[here], query)
            for rows in task.plan.groups(len(query)):
                scores = query[rows] @ key.T / gamma
                p = torch.softmax(scores, -1)
                # Of the chunk, log Σ exp: the largest weight is that of the largest score.
                here_log = scores.amax(-1) - p.amax(-1).log()
                both = torch.stack([log[rows], here_log], -1)
                share = torch.softmax(both, -1)
                log[rows] = both.logsumexp(-1)
                if task.value is not None:
                    mean[rows] = share[:, :1] * mean[rows] + share[:, 1:] * (p @ value)
        ctx.task = task
        ctx.save_for_backward(query, keys, values, gamma, log, mean)
        return log, mean

    @staticmethod
    def backward(ctx: Any, to_log: Tensor, to_mean: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, log, mean = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            again = partial(_plain, task=ctx.task)  # in plain operations: all scores are held
            return (*differentiable_gradients(again, inputs, needed, (to_log, to_mean)), None)
        query, keys, values, gamma = inputs
        grads = [torch.zeros_like(t) if is_needed else None for t, is_needed in zip(inputs, needed, strict=True)]
        to_query, to_keys, to_values, to_gamma = grads
        # d mean / d s = p (v − mean) and d log / d s = p.
        level = to_log - (to_mean * mean).sum(-1)
        for here in ctx.task.chunks(len(keys)):
            raw = keys[here], values[here]
            key, value = ctx.task.read(*raw, query)
            for_key = torch.zeros_like(key) if to_keys is not None else None
            for_value = torch.zeros_like(value) if to_values is not None else None
            for rows in ctx.task.plan.groups(len(query)):
                q, g = query[rows], to_mean[rows]
                scores = q @ key.T / gamma
                p = (scores - log[rows].unsqueeze(-1)).exp()
                if for_value is not None:
                    for_value += p.T @ g
                slope = p * (g @ value.T + level[rows].unsqueeze(-1))
                if to_query is not None:
                    to_query[rows] += slope @ key / gamma
                if for_key is not None:
                    for_key += slope.T @ q / gamma
                if to_gamma is not None:
                    to_gamma -= (slope * scores).sum() / gamma
            if to_keys is not None and for_key is not None:
                to_keys[here] = _pull_back(ctx.task.key, raw[0], for_key)
            if to_values is not None and for_value is not None and ctx.task.value is not None:
                to_values[here] = _pull_back(ctx.task.value, raw[1], for_value)
        return (*grads, None)


def _pull_back(prepare: Callable[[Tensor], Tensor], raw: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a chunk as it is stored, from the gradient of the prepared chunk."""
    with torch.enable_grad():
        raw = raw.detach().requires_grad_()
        return torch.autograd.grad(prepare(raw), raw, grad)[0]
