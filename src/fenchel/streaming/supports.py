"""Attention that never holds a matrix of queries × keys: chunks of scores in, lists of supports out.

For entmax the weights of a query are few. Scores are made for a chunk of queries at a time, their supports kept as
(indices, weights), and everything after, the products with the values and all of the backward pass, works on these
lists. Where supports are not sparse, the products of a chunk are dense, and its weights are forgotten and made again
when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._torch import apply_function

CHUNK = 1 << 21
"""Scores that are held at a time, …"""

ROWS, WIDE = 128, 1 << 24
"""… but so many rows, if they have no more scores than this: fewer take as long, to read all keys."""

SPARSE = 1 / 16
"""The share of a chunk's scores up to which it is worked on by lists, which are kept for the backward pass."""

Array = np.ndarray[Any, Any]


@dataclass
class Lists:
    """The supports of a chunk's rows: row r owns the entries from ``starts[r]`` to ``starts[r + 1]``."""

    starts: Array
    indices: Array
    weights: Array
    kept: Array
    """What dropout makes of the weights: factors, or nothing at all."""


@dataclass(frozen=True)
class Chunk:
    """Queries ``rows`` of the heads ``heads``."""

    heads: range
    rows: range


@dataclass
class Task:
    """What one call asks for.

    Args:
        length: of the queries; a head's rows are a multiple of it if several query heads share its keys.
        causal: query i sees keys 0 … i.
        mask: the rows of a head's mask, (rows, keys), boolean or to be added; None if there is none.
        dropout: the share of weights that is dropped.
        dense: output and weights in plain differentiable operations, given what dropout makes of the weights.
        wants_weights: hand out the weights too, as one list; ``lists`` has their places.
    """

    length: int
    causal: bool
    mask: Callable[[int, range], Tensor] | None
    dropout: float
    dense: Callable[..., tuple[Tensor, Tensor]]
    wants_weights: bool = False
    lists: list[Lists] = field(default_factory=list)


def attend(query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """entmax(query keyᵀ) value for (heads, rows, width), with a number or one alpha a row, (heads, rows).

    Returns the output, and the weights that are not zero, row by row, if the task wants them. Scores that are not
    finite: NotFiniteError.
    """
    output, weights = apply_function(_Attend, query, key, value, alpha, task)
    return output, weights


class NotFiniteError(Exception):
    """A score is NaN or +inf: its row, and what it reaches, is NaN all over, and lists are no help."""


def chunks(heads: int, rows: int, keys: int) -> Iterator[Chunk]:
    """Rows of one head, or several heads if they have few rows, with about CHUNK scores."""
    size = max(CHUNK // max(keys, 1), min(ROWS, WIDE // max(keys, 1)), 16) // 8 * 8
    if rows >= size:
        for head in range(heads):
            for first in range(0, rows, size):
                yield Chunk(range(head, head + 1), range(first, min(first + size, rows)))
    else:
        step = max(size // max(rows, 1), 1)
        for first in range(0, heads, step):
            yield Chunk(range(first, min(first + step, heads)), range(rows))


class _Pass:
    """Forward and backward over the chunks, on arrays."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, task: Task) -> None:
        from fenchel.kernels import attention, maps, pool, rows

        self.loops, self.maps, self.over_rows = attention, rows, pool.over_rows
        self.task = task
        self.query, self.key, self.value = (t.detach().contiguous() for t in (query, key, value))
        self.heads, self.rows, _ = query.shape
        self.keys = key.shape[1]
        self.powers = maps.parameter(alpha - 1, maps.as_rows(self.key))
        self.flat_key, self.flat_value = maps.as_rows(self.key), maps.as_rows(self.value)
        self._room = torch.empty(0, dtype=query.dtype, device="cpu")
        self._places: Array = np.empty(0, np.int32)

    def chunks(self) -> Iterator[Chunk]:
        return chunks(self.heads, self.rows, self.keys)

    def each(self, chunk: Chunk, array: Array) -> Array:
        """A parameter of the rows of a chunk, if it is not one for all."""
        if array.size == 1:
            return array
        rows = array.reshape(self.heads, self.rows)[chunk.heads.start : chunk.heads.stop]
        return np.ascontiguousarray(rows[:, chunk.rows.start : chunk.rows.stop]).reshape(-1)

    def part(self, chunk: Chunk, tensor: Tensor) -> Tensor:
        return tensor[chunk.heads.start : chunk.heads.stop, chunk.rows.start : chunk.rows.stop]

    def scores(self, chunk: Chunk) -> tuple[Tensor, Array]:
        """The scores of a chunk, (heads, rows, keys that any of them sees), masked, and how many keys each row sees."""
        limits = np.array([self.keys])
        seen = self.keys
        if self.task.causal:
            limits = np.minimum(np.arange(chunk.rows.start, chunk.rows.stop) % self.task.length + 1, self.keys)
            limits = np.tile(limits, len(chunk.heads))
            seen = int(limits.max())
        shape = (len(chunk.heads), len(chunk.rows), seen)
        count = len(chunk.heads) * len(chunk.rows)
        if self._room.numel() < count * seen:  # room for any chunk, however many keys it sees
            self._room = torch.empty(count * self.keys, dtype=self.query.dtype, device="cpu")
        scores = self._room[: count * seen].view(shape)
        keys = self.key[chunk.heads.start : chunk.heads.stop, :seen]
        queries = self.part(chunk, self.query)
        if len(chunk.rows) == 1:  # decoding: the same numbers, read in the order of the keys
            torch.bmm(keys, queries.transpose(1, 2), out=scores.view(len(chunk.heads), seen, 1))
        else:
            torch.bmm(queries, keys.transpose(1, 2), out=scores)
        if self.task.mask is not None:
            mask = torch.stack([self.task.mask(head, chunk.rows) for head in chunk.heads])
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores += mask
        return scores, limits

    def lists(self, chunk: Chunk, most: float = math.inf) -> Lists | None:
        """The supports of a chunk, from its scores; None if they have more than ``most`` entries."""
        scores, limits = self.scores(chunk)
        count, seen = scores.shape[0] * scores.shape[1], scores.shape[2]
        if self._places.size < count * seen:
            self._places = np.empty(count * self.keys, np.int32)
        x, places = scores.view(count, seen).numpy(), self._places[: count * seen].reshape(count, seen)
        counts = np.empty(count, np.int64)
        self.over_rows(self.loops.select, count, x.size, x, self.each(chunk, self.powers), limits, places, counts)
        if counts.min(initial=0) < 0:
            raise NotFiniteError
        starts = np.concatenate([[0], np.cumsum(counts)])
        if starts[-1] > most:
            return None
        weights, indices = np.empty(starts[-1], x.dtype), np.empty(starts[-1], np.int32)
        self.over_rows(self.loops.pack, count, starts[-1], x, places, starts, weights, indices)
        kept: Array = np.empty(0, x.dtype)
        if self.task.dropout:
            ones = torch.ones(weights.size, dtype=self.query.dtype, device="cpu")
            kept = torch.nn.functional.dropout(ones, self.task.dropout).numpy()
        return Lists(starts, indices, weights, kept)

    def weights(self, chunk: Chunk) -> Tensor:
        """All weights of a chunk, (heads, rows, keys that any of them sees), in place of its scores."""
        scores, limits = self.scores(chunk)
        if self.task.causal:
            hidden = torch.arange(scores.shape[2], device="cpu") >= torch.from_numpy(limits).unsqueeze(-1)
            scores.masked_fill_(hidden.view(scores.shape), -torch.inf)
        x = scores.view(-1, scores.shape[2]).numpy()
        self.over_rows(self.maps.entmax, len(x), x.size, x, self.each(chunk, self.powers), x)
        return scores

    def sees(self, chunk: Chunk, weights: Tensor, tensor: Tensor) -> Tensor:
        """What belongs to the keys that a chunk has weights for."""
        return tensor[chunk.heads.start : chunk.heads.stop, : weights.shape[2]]

    def offsets(self, chunk: Chunk) -> Array:
        """Where the keys of each row's head begin."""
        return np.repeat(np.arange(chunk.heads.start, chunk.heads.stop) * self.keys, len(chunk.rows))

    def forward(self, keep: bool) -> tuple[Tensor, list[Lists | None]]:
        """The output, and the supports of the chunks that are sparse."""
        output = self.value.new_empty(self.heads, self.rows, self.value.shape[-1])
        found: list[Lists | None] = []
        by_lists = self.task.wants_weights or self.task.dropout > 0
        dense = False
        for chunk in self.chunks():
            most = SPARSE * len(chunk.heads) * len(chunk.rows) * self.keys
            lists = None if dense else self.lists(chunk, math.inf if by_lists else most)
            if lists is None:
                weights = self.weights(chunk)
                values = self.sees(chunk, weights, self.value)
                self.part(chunk, output).copy_(torch.bmm(weights, values))
                if not bool(weights.sum().isfinite()):
                    raise NotFiniteError
                dense = int(torch.count_nonzero(weights)) > most  # so will be the next, in all likelihood
            else:
                self._combine(chunk, lists, output)
            if self.task.wants_weights and lists is not None:
                self.task.lists.append(lists)
            found.append(lists if keep else None)
        return output, found

    def _combine(self, chunk: Chunk, lists: Lists, output: Tensor) -> None:
        """The output of a chunk from its supports."""
        out = self.part(chunk, output)
        out = out if out.is_contiguous() else torch.empty_like(out)
        rows = out.view(-1, out.shape[-1]).numpy()
        used = lists.weights * lists.kept if lists.kept.size else lists.weights
        work = max(used.size * rows.shape[1], rows.size)
        offsets = self.offsets(chunk)
        self.over_rows(
            self.loops.combine, len(rows), work, lists.starts, used, lists.indices, offsets, self.flat_value, rows
        )
        self.part(chunk, output).copy_(out)

    def _pull_back(
        self, chunk: Chunk, grad: Tensor, to: tuple[Tensor, Tensor | None, Tensor | None, Tensor], learns: bool
    ) -> None:
        """``backward`` of a chunk whose supports are not sparse, by dense products."""
        weights = self.weights(chunk)
        to_query, to_key, to_value, to_alpha = to
        g, q = self.part(chunk, grad), self.part(chunk, self.query)
        keys, values = (self.sees(chunk, weights, t) for t in (self.key, self.value))
        pulls = torch.bmm(g, values.transpose(1, 2))
        slopes = torch.empty_like(pulls)
        if to_value is not None:
            self.sees(chunk, weights, to_value).add_(torch.bmm(weights.transpose(1, 2), g))
        p, dp, ds = (t.view(-1, t.shape[2]).numpy() for t in (weights, pulls, slopes))
        powers = self.each(chunk, self.powers)
        if learns:
            alphas = np.empty(len(p), p.dtype)
            self.over_rows(self.maps.entmax_alpha, len(p), p.size, p, powers, dp, alphas)
            self.part(chunk, to_alpha).copy_(torch.from_numpy(alphas).view(g.shape[:2]))
        self.over_rows(self.maps.entmax_product, len(p), p.size, p, powers, dp, ds)
        self.part(chunk, to_query).copy_(torch.bmm(slopes, keys))
        if to_key is not None:
            self.sees(chunk, weights, to_key).add_(torch.bmm(slopes.transpose(1, 2), q))

    def backward(
        self,
        found: list[Lists | None],
        grad: Tensor,
        weight_grad: Tensor,
        learns: bool,
        needed: tuple[bool, bool] = (True, True),
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Gradients of query, key, value and alpha from those of the output and of weights that were handed out.

        Those of keys and of values, which may be a large memory, only if they are ``needed``.
        """
        to_query = torch.empty_like(self.query)
        to_key = torch.zeros_like(self.key) if needed[0] else None
        to_value = torch.zeros_like(self.value) if needed[1] else None
        to_alpha = self.query.new_empty((self.heads, self.rows) if learns else 0)
        for chunk, kept in zip(self.chunks(), found, strict=True):
            if kept is None:
                self._pull_back(chunk, grad, (to_query, to_key, to_value, to_alpha), learns)
                continue
            lists = kept
            g, q = (self.part(chunk, t).reshape(-1, t.shape[-1]).contiguous().numpy() for t in (grad, self.query))
            slopes = np.empty_like(lists.weights)
            queries = np.empty_like(q)
            alphas = np.empty(len(q) if learns else 0, q.dtype)
            offsets = self.offsets(chunk)
            direct = weight_grad[: lists.weights.size].contiguous().numpy() if weight_grad.numel() else slopes[:0]
            weight_grad = weight_grad[lists.weights.size :]
            work = lists.weights.size * (g.shape[1] + q.shape[1]) + q.size
            self.over_rows(
                self.loops.pull_back,
                len(q),
                work,
                lists.starts,
                lists.weights,
                lists.indices,
                lists.kept,
                direct,
                offsets,
                self.each(chunk, self.powers),
                g,
                self.flat_key,
                self.flat_value,
                slopes,
                queries,
                alphas,
            )
            self.part(chunk, to_query).copy_(torch.from_numpy(queries).view(len(chunk.heads), len(chunk.rows), -1))
            if learns:
                self.part(chunk, to_alpha).copy_(torch.from_numpy(alphas).view(len(chunk.heads), len(chunk.rows)))
            used = lists.weights * lists.kept if lists.kept.size else lists.weights
            for weights, table, out in ((slopes, q, to_key), (used, g, to_value)):
                if out is None:
                    continue
                parts = -(-table.shape[1] // self.loops.PART)
                self.over_rows(
                    self.loops.scatter,
                    parts * len(chunk.heads),
                    weights.size * table.shape[1] + 1,
                    np.array([parts]),
                    np.arange(len(chunk.heads) + 1) * len(chunk.rows),
                    lists.starts,
                    weights,
                    lists.indices,
                    offsets,
                    table,
                    out.view(-1, out.shape[-1]).numpy(),
                )
        return to_query, to_key, to_value, to_alpha


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, task: Task
    ) -> tuple[Tensor, Tensor]:
        ctx.task, ctx.number = task, None if isinstance(alpha, Tensor) else alpha
        ctx.save_for_backward(query, key, value, *((alpha,) if isinstance(alpha, Tensor) else ()))
        ctx.set_materialize_grads(False)
        output, ctx.found = _Pass(query, key, value, alpha, task).forward(keep=any(ctx.needs_input_grad))
        if task.wants_weights:
            return output, torch.from_numpy(np.concatenate([each.weights for each in task.lists]))
        weights = query.new_empty(0)
        ctx.mark_non_differentiable(weights)
        return output, weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, weight_grad: Tensor | None) -> tuple[Any, ...]:
        with torch.autocast("cpu", enabled=False):
            return _gradients(ctx, grad, weight_grad)


def _gradients(ctx: Any, grad: Tensor | None, weight_grad: Tensor | None) -> tuple[Any, ...]:
    """The backward pass: in the precision of the forward pass, whatever autocast is set to when it is called."""
    query, key, value, *rest = ctx.saved_tensors
    alpha = rest[0] if rest else ctx.number
    grad = query.new_zeros(*query.shape[:2], value.shape[-1]) if grad is None else grad
    if torch.is_grad_enabled():
        return (*_dense_gradients(ctx, (query, key, value, alpha), grad, weight_grad), None)
    _, key_learns, value_learns, learns = ctx.needs_input_grad[:4]
    weight_grad = query.new_empty(0) if weight_grad is None else weight_grad
    passed = _Pass(query, key, value, alpha, ctx.task)
    needed = (key_learns, value_learns)
    to_query, to_key, to_value, to_alpha = passed.backward(ctx.found, grad, weight_grad, learns, needed)
    return to_query, to_key, to_value, to_alpha if learns else None, None


def _dense_gradients(
    ctx: Any, inputs: tuple[Any, ...], grad: Tensor, weight_grad: Tensor | None
) -> list[Tensor | None]:
    """The gradients by plain operations, which can be differentiated again."""
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:4]) if needed]
    output, weights = ctx.task.dense(*inputs, _factors(ctx, inputs[0], inputs[1]))
    outputs, grads = [output], [grad]
    if weight_grad is not None:
        outputs.append(weights[_places(ctx, inputs[0])])
        grads.append(weight_grad)
    found = torch.autograd.grad(outputs, [inputs[i] for i in wanted], grads, create_graph=True)
    gradients: list[Tensor | None] = [None] * 4
    for i, gradient in zip(wanted, found, strict=True):
        gradients[i] = gradient
    return gradients


def _places(ctx: Any, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Head, row and key of every entry of the lists."""
    rows = query.shape[1]
    counts = np.concatenate([np.diff(each.starts) for each in ctx.found])
    row = np.repeat(np.arange(counts.size), counts)
    indices = np.concatenate([each.indices for each in ctx.found])
    return torch.from_numpy(row // rows), torch.from_numpy(row % rows), torch.from_numpy(indices).long()


def _factors(ctx: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """What dropout made of the weights, as a matrix."""
    if not ctx.task.dropout:
        return None
    factors = torch.zeros(*query.shape[:2], key.shape[1], dtype=query.dtype, device="cpu")
    factors[_places(ctx, query)] = torch.from_numpy(np.concatenate([each.kept for each in ctx.found]))
    return factors
