"""Attention whose keys and values are passed around the ranks in a ring: none holds more than two ranks' shares.

The first turn passes keys, and each rank keeps the supports of its queries among the keys seen so far: scores and
places. The second turn passes values. The backward pass takes one turn for each of the two, on which the gradients of
keys and values travel along with them. Blocks of scores are transient, of some queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel._torch import apply_function
from fenchel.distributed.collectives import Group, rank_in, send_around
from fenchel.regularizers.base import Regularizer

_HELD = 1 << 22
"""The most scores that are held at a time."""


@dataclass(frozen=True)
class _Turn:
    """What a turn of the ring needs: the lengths of all ranks' keys, the group, and the places of queries.

    Args:
        sizes: how many keys each rank has.
        group: the process group.
        positions: (L,), the place of each query in the whole sequence, which sees no later keys; None if it sees all.
    """

    sizes: list[int]
    group: Group
    positions: Tensor | None

    def blocks(self, own: Tensor, gradient: Tensor | None = None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Every rank's rows (B, n, E), beginning with this rank's own, each with the place of its first row.

        ``gradient``, zeros of the shape of ``own``, travels along: the caller adds to it, and at the end it is back
        with what all ranks have added. The next block is on its way while one is used.
        """
        ranks, rank = len(self.sizes), rank_in(self.group)
        held, added = own.contiguous(), gradient
        for turn in range(ranks):
            source = (rank - turn) % ranks
            coming, waits = None, []
            if turn < ranks - 1:
                coming = held.new_empty(held.shape[0], self.sizes[(source - 1) % ranks], held.shape[2])
                waits = send_around([held], [coming], self.group)
            yield sum(self.sizes[:source]), held, added
            for wait in waits:
                wait()
            if added is not None:
                after = (source - 1) % ranks
                into = added.new_empty(added.shape[0], self.sizes[after], added.shape[2])
                for wait in send_around([added], [into], self.group):
                    wait()
                added = into
            if coming is not None:
                held = coming
        if gradient is not None and added is not None:
            gradient.copy_(added)

    def pieces(
        self, queries: Tensor, own: Tensor, gradient: Tensor | None = None
    ) -> Iterator[tuple[slice, int, Tensor, Any]]:
        """Some queries of (B, L, …) at a time beside every rank's ``blocks``, but for empty ones."""
        for first, block, added in self.blocks(own, gradient):
            if block.shape[1]:
                for some in self.chunks(queries, block.shape[1]):
                    yield some, first, block, added

    def chunks(self, query: Tensor, keys: int) -> Iterator[slice]:
        """Some queries at a time."""
        size = max(_HELD // max(len(query) * keys, 1), 16)
        for first in range(0, query.shape[1], size):
            yield slice(first, min(first + size, query.shape[1]))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer,
    sizes: list[int],
    positions: Tensor | None,
    scale: float,
    group: Group,
) -> Tensor:
    """Attention of queries (…, L, E) over the keys (…, S, E) and values (…, S, D) of all ranks; Ω has a line."""
    batch = query.shape[:-2]
    exact = torch.promote_types(query.dtype, torch.float32)
    heads = math.prod(batch)
    rows, keys, values = (
        t.to(exact).expand(*batch, *t.shape[-2:]).reshape(heads, *t.shape[-2:]) for t in (query * scale, key, value)
    )
    turn = _Turn(sizes, group, positions)
    with torch.no_grad():
        places, scores = _supports(rows.detach(), keys.detach(), omega, batch, turn)
    scores = apply_function(_Scores, rows, keys, places, scores, turn)
    weights = omega.argmax(scores.reshape(*batch, *scores.shape[1:])).reshape(scores.shape)
    found: Tensor = apply_function(_Average, weights, values, places, turn)
    return found.reshape(*batch, *found.shape[1:]).to(query.dtype)


def _supports(
    query: Tensor, key: Tensor, omega: Regularizer, batch: tuple[int, ...], turn: _Turn
) -> tuple[Tensor, Tensor]:
    """Places (B, L, m) of the keys that may have weight, −1 beyond, and their scores, −inf beyond; one turn."""
    scores = query.new_full((*query.shape[:2], 0), -torch.inf)
    places = torch.zeros_like(scores, dtype=torch.long)
    for first, block, _ in turn.blocks(key):
        if not block.shape[1] or not query.shape[1]:
            continue
        new_scores, new_places = [], []
        for some in turn.chunks(query, block.shape[1]):
            here = query[:, some] @ block.transpose(-2, -1)
            at = torch.arange(first, first + block.shape[1], device=query.device)
            if turn.positions is not None:
                here = here.masked_fill(at > turn.positions[some].unsqueeze(-1), -torch.inf)
            both = torch.cat([scores[:, some], here], -1)
            own = torch.cat([places[:, some], at.expand(*here.shape[:2], -1)], -1)
            top = both.amax(-1, keepdim=True)
            line = omega.line(both.reshape(*batch, *both.shape[1:]))
            assert line is not None
            # Lower by far more than rounding: what has no weight in the end does no harm.
            floor = line.reshape(top.shape) - 64 * torch.finfo(both.dtype).eps * (top.abs() + 1)
            kept = (both >= floor) & (both > -torch.inf)
            width = int(kept.sum(-1).max()) if kept.numel() else 0
            best, order = both.masked_fill(~kept, -torch.inf).topk(width, -1)
            new_scores.append(best)
            new_places.append(own.gather(-1, order))
        width = max(each.shape[-1] for each in new_scores)
        scores = torch.cat([_widened(each, width, -torch.inf) for each in new_scores], 1)
        places = torch.cat([_widened(each, width, 0) for each in new_places], 1)
    if not scores.shape[-1]:
        scores, places = _widened(scores, 1, -torch.inf), _widened(places, 1, 0)
    return places.masked_fill(scores == -torch.inf, -1), scores


def _widened(x: Tensor, width: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=fill)


def _dense(values: Tensor, places: Tensor, first: int, count: int) -> Tensor:
    """Values (B, L, m) at places, as rows (B, L, count) over the keys from ``first`` on."""
    inside = (places >= first) & (places < first + count)
    rows = values.new_zeros(*values.shape[:2], count)
    return rows.scatter_add_(-1, (places - first).clamp(0, count - 1), torch.where(inside, values, 0.0))


class _Scores(torch.autograd.Function):
    """Scores of queries at the places of their supports, which the first turn has computed."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, places: Tensor, scores: Tensor, turn: _Turn) -> Tensor:
        ctx.save_for_backward(query, key, places)
        ctx.turn = turn
        return scores.view_as(scores)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, places = ctx.saved_tensors
        turn: _Turn = ctx.turn
        to_query, to_key = torch.zeros_like(query), torch.zeros_like(key)
        for some, first, block, added in turn.pieces(query, key, to_key):
            here = _dense(grad[:, some], places[:, some], first, block.shape[1])
            to_query[:, some] += here @ block
            added += here.transpose(-2, -1) @ query[:, some]
        return to_query, to_key, None, None, None


class _Average(torch.autograd.Function):
    """Σ weights · values at places, (B, L, D), by one turn."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, places: Tensor, turn: _Turn) -> Tensor:
        ctx.save_for_backward(weights, value, places)
        ctx.turn = turn
        found = value.new_zeros(*weights.shape[:2], value.shape[-1])
        for some, first, block, _ in turn.pieces(weights, value):
            found[:, some] += _dense(weights[:, some], places[:, some], first, block.shape[1]) @ block
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, value, places = ctx.saved_tensors
        turn: _Turn = ctx.turn
        to_weights, to_value = torch.zeros_like(weights), torch.zeros_like(value)
        for some, first, block, added in turn.pieces(weights, value, to_value):
            count = block.shape[1]
            inside = (places[:, some] >= first) & (places[:, some] < first + count)
            own = (places[:, some] - first).clamp(0, count - 1)
            products = (grad[:, some] @ block.transpose(-2, -1)).gather(-1, own)
            to_weights[:, some] += torch.where(inside, products, 0.0)
            added += _dense(weights[:, some], places[:, some], first, count).transpose(-2, -1) @ grad[:, some]
        return to_weights, to_value, None, None
