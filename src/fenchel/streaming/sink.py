"""A sink of attention: one more key without a value, whose score is given.

It is added to the tensors, so that every path of attention serves it: queries get one more feature, the score of the
sink, which is zero in all keys but a first one. That key is zero but for this feature, and its value is zero. Where
attention is causal there is one more query too, at the front: query i then sees the sink and keys 0 … i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fenchel._checks import broadcasts, check_floats
from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.rows import combine_masks
from fenchel.streaming.plan import Problem

Weights = Tensor | tuple[Tensor, Tensor, Tensor] | None
"""A matrix of weights (…, L, S), or the lists of a sparse one, (starts, indices, entries), rows flattened."""


def check_sink(sink: Tensor, omega: Regularizer, shape: Sequence[int]) -> None:
    """Refuse a sink that does not broadcast to one score per query, and an Ω that depends on the order of the keys."""
    check_floats(sink, "sink")
    rows = (*shape[:-1], 1)
    if not broadcasts(sink.shape, rows):
        raise ValueError(
            f"sink must broadcast to one score per query, (…, L, 1), such as (heads, 1, 1): it has shape "
            f"{tuple(sink.shape)}, the queries have {rows}"
        )
    base, _ = omega.canonical()
    own = base.parameter_shape
    if base.ordered or (own is not None and len(own) > 0 and own[-1] > 1):
        raise ValueError(
            "sink must be None for an Ω that depends on the order of the keys, or on each of them: a sink has no place "
            f"among them; omega is {omega}"
        )


def with_sink(problem: Problem, sink: Tensor) -> Problem:
    """The problem with a sink as its first key, in float32 or better, and scores that are not scaled any more."""
    query, key, value, omega, (*batch, length, keys), mask, is_causal, scale, dropout, _ = problem
    exact = torch.promote_types(query.dtype, torch.float32)
    own = omega.parameter_shape
    rows = int(is_causal)
    if is_causal and (own is None or (len(own) > 1 and own[-2] > 1)):  # one parameter per query: none for another one
        visible = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril()
        mask, is_causal, rows = combine_masks(mask, visible), False, 0
    # Finite, so that the sink's score times zero is zero for the other keys.
    score = sink.to(device=query.device, dtype=exact).clamp_min(torch.finfo(exact).min)
    wide = torch.broadcast_shapes(query.shape[:-1], score.shape[:-1])  # type: ignore[no-untyped-call]
    query = (query.to(exact) * scale).expand(*wide, query.shape[-1])
    query = F.pad(torch.cat([query, score.expand(*wide, 1)], -1), (0, 0, rows, 0))
    place = torch.zeros(key.shape[-1] + 1, dtype=exact, device=key.device)
    place[-1] = 1.0
    key = torch.cat([place.expand(*key.shape[:-2], 1, -1), F.pad(key.to(exact), (0, 1))], -2)
    value = F.pad(value.to(exact), (0, 0, 1, 0))
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], keys)
        above = rows if mask.dim() > 1 and mask.shape[-2] > 1 else 0
        mask = F.pad(mask, (1, 0), value=1.0 if mask.dtype == torch.bool else 0.0)
        mask = F.pad(mask, (0, 0, above, 0), value=1.0 if mask.dtype == torch.bool else 0.0) if above else mask
    shape = (*batch, length + rows, keys + 1)
    return Problem(query, key, value, omega, shape, mask, is_causal, 1.0, dropout, rows)


def without_sink(output: Tensor, weights: Weights, problem: Problem) -> tuple[Tensor, Weights]:
    """The output and the weights of a problem with a sink, without its first key and the queries that were added."""
    rows, length = problem.rows, problem.shape[-2]
    output = output[..., rows:, :]
    if weights is None or isinstance(weights, Tensor):
        return output, None if weights is None else weights[..., rows:, 1:]
    starts, indices, entries = weights
    row = torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), starts.diff())
    kept = ((indices > 0) & ((row % length >= rows) if rows else True)).nonzero().squeeze(-1)
    counts = torch.bincount(row[kept], minlength=len(starts) - 1)
    if rows:
        counts = counts.reshape(-1, length)[:, rows:].flatten()
    return output, (F.pad(counts.cumsum(0), (1, 0)), indices[kept] - 1, entries[kept])
