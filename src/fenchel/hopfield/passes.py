"""One pass over stored patterns, a chunk at a time: no matrix of queries × patterns is ever held.

A sparse Ω that works by a threshold needs no more than that. What has no weight among the patterns seen so far has none
among all of them, for every further pattern raises the threshold: so each query keeps the support of what it has seen,
and at the end the map is solved on that, exactly. Softmax is summed chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fenchel.regularizers.base import Regularizer, Scaled
from fenchel.regularizers.capped import KSubsets
from fenchel.regularizers.norm import Norm
from fenchel.regularizers.tsallis import Tsallis

CHUNK = 1 << 14
"""Patterns that are read at a time from a file, unless told otherwise."""

HELD = 1 << 22
"""Scores, or entries of gathered patterns, that are held at a time."""

Blocks = Callable[[], Iterable[tuple[int, Tensor]]]
"""Makes a pass: the place of each chunk's first pattern, and the chunk."""


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
        return bool(torch.as_tensor(omega.alpha > 1).all())
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


def supports(query: Tensor, blocks: Blocks, omega: Regularizer) -> Tensor:
    """The supports of queries (R, D) that are scaled by β: places of patterns, (R, K), filled up with −1.

    A query with a score that is NaN or +inf has the place −2.
    """
    with torch.no_grad():
        query = query.detach()
        kept: list[_Kept] | None = None
        for first, block in blocks():
            if kept is None:
                size = max(HELD // max(len(block), 1), 1)
                kept = [_Kept(part, omega) for part in torch.split(query, size)]
            for each in kept:
                each.absorb(first, block)
        assert kept is not None
        width = max(each.place.shape[1] for each in kept)
        return torch.cat([_widen(each.finish(), width, -1) for each in kept])


class _Kept:
    """What some queries keep of the patterns that they have seen."""

    def __init__(self, query: Tensor, omega: Regularizer) -> None:
        self.query, self.omega = query, omega
        self.place = torch.empty(len(query), 0, dtype=torch.long, device=query.device)
        self.score = query.new_empty(len(query), 0)
        self.floor = query.new_full((len(query), 1), -torch.inf)
        self.bad = torch.zeros(len(query), dtype=torch.bool, device=query.device)

    def absorb(self, first: int, block: Tensor) -> None:
        scores = self.query @ block.T
        top = scores.amax(-1, keepdim=True)
        self.bad |= (top.isnan() | (top == torch.inf)).squeeze(-1)
        if not self.place.shape[1]:
            place = torch.arange(first, first + len(block), device=block.device).expand(scores.shape)
            self._keep(place, scores.nan_to_num(-torch.inf, -torch.inf))
            return
        rows = (top >= self.floor).squeeze(-1).nonzero().squeeze(-1)
        if not len(rows):
            return
        row, column = (scores[rows] >= self.floor[rows]).nonzero(as_tuple=True)
        row = rows[row]
        count = torch.bincount(row, minlength=len(scores))
        order = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        width = int(count.max())
        place, score = self.place.new_full((len(scores), width), -1), scores.new_full((len(scores), width), -torch.inf)
        place[row, order], score[row, order] = first + column, scores[row, column]
        self._keep(torch.cat([self.place, place], 1), torch.cat([self.score, score], 1))

    def _keep(self, place: Tensor, score: Tensor) -> None:
        """Of these, the support; and the floor below which no later pattern can have weight."""
        weights = self.omega.argmax(score)
        count = (weights > 0).sum(-1, keepdim=True)
        width = max(int(count.max()), 1)
        # The support has the largest scores; what ties with its last entry ties in weight too, and is in it.
        self.score, chosen = score.topk(width, -1)
        self.place, weights = place.gather(-1, chosen), weights.gather(-1, chosen)
        beyond = torch.arange(width, device=score.device) >= count
        self.place, self.score = self.place.masked_fill(beyond, -1), self.score.masked_fill(beyond, -torch.inf)
        self.floor = _floor(self.omega, self.score, weights, count)

    def finish(self) -> Tensor:
        return self.place.masked_fill(self.bad.unsqueeze(-1), -2)


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
    rounding = 64 * torch.finfo(score.dtype).eps * (top.abs() + gamma)
    return torch.where(top > -torch.inf, floor - rounding, -torch.inf)


def on_supports(
    query: Tensor,
    place: Tensor,
    pick: Callable[[Tensor], Tensor],
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    width: int,
) -> Tensor:
    """``function(scores, mask, places)`` of the supports, some queries at a time; differentiable.

    Args:
        query: (R, D), scaled by β.
        place: (R, K) as ``supports`` gives them.
        pick: patterns (R, K, D) at places.
        function: rows of a result; queries that are not finite get NaN.
        width: of a pattern.
    """
    parts = []
    for rows in _parts(place, width):
        q, at = query[rows], place[rows]
        at = at[:, : max(int((at >= 0).sum(-1).max()), 1)]
        mask, bad = at >= 0, at[:, 0] == -2
        at = at.clamp_min(0)
        scores = (pick(at) @ q.unsqueeze(-1)).squeeze(-1)
        result = function(torch.where(mask, scores, -torch.inf), mask, at)
        parts.append(torch.where(bad.reshape(-1, *(1,) * (result.dim() - 1)), torch.nan, result))
    return torch.cat(parts)


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


def softmax(
    query: Tensor, blocks: Callable[[], Iterable[tuple[Tensor, Tensor]]], gamma: float | Tensor
) -> tuple[Tensor, Tensor]:
    """log Σ exp(s/γ) and the softmax average of values, for queries (R, D) scaled by β and pairs of chunks.

    Chunks are computed again in the backward pass.
    """

    def part(q: Tensor, keys: Tensor, values: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ keys.T / gamma.reshape(())
        return scores.logsumexp(-1), torch.softmax(scores, -1) @ values

    logs, means = [], []
    for keys, values in blocks():
        size = max(HELD // max(len(keys), 1), 1)
        pairs = [_again(part, q, keys, values, torch.as_tensor(gamma, dtype=q.dtype)) for q in torch.split(query, size)]
        logs.append(torch.cat([log for log, _ in pairs]))
        means.append(torch.cat([mean for _, mean in pairs]))
    log = torch.stack(logs)
    share = torch.softmax(log, 0).unsqueeze(-1)
    return log.logsumexp(0), (share * torch.stack(means)).sum(0)


def _again(function: Callable[..., Any], *tensors: Tensor) -> Any:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return checkpoint(function, *tensors, use_reentrant=False)
    return function(*tensors)


def _widen(x: Tensor, width: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=fill)


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
