"""Softmax averages over stored patterns, a chunk at a time, in memory that does not grow with their number.

Each chunk is merged into a running log-sum-exp and a running mean. The backward pass reads the chunks again: with the
final log-sum-exp the weights of a chunk are known, and so are its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._torch import apply_function, tracks_forward
from fenchel.streaming.plan import Plan


class Stored(NamedTuple):
    """Rows as they are stored, and what makes some of them ready for products: dtype and normalization."""

    held: Tensor
    ready: Callable[[Tensor], Tensor]

    def all(self) -> Tensor:
        """All rows, ready."""
        return self.ready(self.held)

    def at(self, place: Tensor) -> Tensor:
        """The rows at places (…), (…, D), ready."""
        return self.ready(self.held[place])

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """So many rows at a time, ready, and the place of the first."""
        return ((first, self.ready(self.held[first : first + size])) for first in range(0, len(self.held), size))


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
    task = _Task(keys.ready, None if values is None else values.ready, plan)
    number = torch.as_tensor(gamma, dtype=query.dtype, device=query.device).reshape(())
    tensors = (query, keys.held, keys.held.new_empty(len(keys.held), 0) if values is None else values.held, number)
    if tracks_forward() or torch.compiler.is_compiling():
        return _plain(*tensors, task)
    log, mean = apply_function(_Softmax, *tensors, task)
    return log, mean


class _Task(NamedTuple):
    key: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor] | None
    plan: Plan

    def chunks(self, count: int) -> Iterator[slice]:
        size = self.plan.columns
        return (slice(first, min(first + size, count)) for first in range(0, count, size))

    def read(self, keys: Tensor, values: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk of keys and values, ready for products."""
        return self.key(keys), like.new_empty(len(values), 0) if self.value is None else self.value(values)


def _plain(query: Tensor, keys: Tensor, values: Tensor, gamma: Tensor, task: _Task) -> tuple[Tensor, Tensor]:
    """All scores at once, in operations that can be differentiated in every mode and to every order."""
    key, value = task.read(keys, values, query)
    scores = query @ key.T / gamma
    return scores.logsumexp(-1), torch.softmax(scores, -1) @ value


class _Softmax(torch.autograd.Function):
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
            return (*_differentiable_gradients(inputs, needed, (to_log, to_mean), ctx.task), None)
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
                to_keys[here] = _pulled(ctx.task.key, raw[0], for_key)
            if to_values is not None and for_value is not None and ctx.task.value is not None:
                to_values[here] = _pulled(ctx.task.value, raw[1], for_value)
        return (*grads, None)


def _pulled(ready: Callable[[Tensor], Tensor], raw: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a chunk as it is stored from that of the chunk as it is compared."""
    with torch.enable_grad():
        raw = raw.detach().requires_grad_()
        return torch.autograd.grad(ready(raw), raw, grad)[0]


def _differentiable_gradients(
    inputs: list[Tensor], needed: tuple[bool, ...], grads: tuple[Tensor, Tensor], task: _Task
) -> list[Tensor | None]:
    """The gradients by plain operations, which can be differentiated again; all scores are held."""
    # Views, for one input may be another's past, or be given twice: none is to be counted in another's place.
    query, keys, values, gamma = fresh = [t.view_as(t) for t in inputs]
    outputs = _plain(query, keys, values, gamma, task)
    wanted = [t for t, is_needed in zip(fresh, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if is_needed else None for is_needed in needed]
