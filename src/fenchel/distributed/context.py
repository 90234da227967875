"""Attention over sequences that are spread over ranks (context parallelism)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fenchel._checks import check_floats
from fenchel._torch import apply_function, outside_graphs, recomputed
from fenchel.distributed import ring
from fenchel.distributed.collectives import (
    Group,
    all_sizes,
    check_group,
    checks_ranks,
    described,
    exchange,
    gather_rows,
    layout,
    rank_in,
    sum_rows,
)
from fenchel.regularizers.base import Regularizer, check_omega
from fenchel.regularizers.tsallis import Tsallis
from fenchel.streaming.dot_product import masked_attention, with_tensors

_DEFAULT = Tsallis(1.5)
GATHERED = 1 << 30
"""The most bytes of keys and values of all ranks that are gathered; beyond, they are passed around in a ring."""

_MASKED = 1 << 24
"""The most entries of a causal mask that are held at a time."""


@outside_graphs("fenchel.distributed.attention", "talks to other ranks")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer | None = None,
    *,
    group: Group = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    r"""Average values by a regularized choice among keys, for sequences that are spread over the ranks of a group.

    .. math:: \operatorname{argmax}_\Omega\big(Q K^\top / \sqrt{E}\big)\, V

    The same as :func:`fenchel.attention` of the whole sequences. Keys and values of all ranks are gathered, once; no
    matrix of queries × keys is held. Where they would take more than a gigabyte on each rank, and Ω is sparse, they are
    passed around in a ring instead: keys first, of which the supports are kept, then values. With ``is_causal`` late
    queries have more keys than early ones: rank r exchanges half of its queries with rank R − 1 − r, so that all ranks
    have as much to do, and gets their results back.

    Args:
        query: (…, L, E), this rank's part of the sequence, in the order of the ranks. L may differ and be 0.
        key: (…, S, E), this rank's part. With fewer heads (dimension −3) than the query has, each serves a group.
        value: (…, S, D), this rank's part.
        omega: the regularizer, equal on all ranks; ``Tsallis(1.5)`` by default. The gradients of its parameters are
            those of this rank's queries, as in data parallelism: sum them over the ranks.
        group: the process group; None for the default group.
        is_causal: the query at place i of the whole sequence attends to keys 0 … i.
        scale: of the scores; 1/√E by default.

    Returns:
        (…, L, D), the results of this rank's queries.

    Example:
        >>> import torch, fenchel.distributed
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> query, key, value = torch.randn(3, 2, 5, 8).unbind()
        >>> fenchel.distributed.attention(query, key, value, fenchel.Gini(), is_causal=True).shape
        torch.Size([2, 5, 8])
        >>> distributed.destroy_process_group()
    """
    ranks = check_group(group)
    omega = _DEFAULT if omega is None else check_omega(omega)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_floats(tensor, name)
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have shape (…, length, width), got {tuple(tensor.shape)}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have one length, got {key.shape[-2]} and {value.shape[-2]}")
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    same = {name: layout(tensor, -2) for name, tensor in (("query", query), ("key", key), ("value", value))}
    same |= {"is_causal": repr(is_causal), "scale": repr(scale)}
    if checks_ranks():
        same["omega"] = described(omega)
    queries, keys = all_sizes([query.shape[-2], key.shape[-2]], query.device, group, same)
    if is_causal and queries != keys:
        raise ValueError(f"is_causal needs as many queries as keys on every rank, got {queries} and {keys}")
    turns = _takes_ring(query, key, value, omega, keys)
    own = all_keys, all_values = (key, value) if turns else _gathered(key, value, keys, group)
    if not is_causal:
        if turns:
            return ring.attend(query, *own, omega, keys, None, scale, group)
        return _call(query, all_keys, all_values, omega, None, scale)
    rank = rank_in(group)
    partner = ranks - 1 - rank
    starts = [sum(queries[:r]) for r in range(ranks)]
    kept = queries[rank] - queries[rank] // 2 if partner != rank else queries[rank]
    first, second = query[..., :kept, :], query[..., kept:, :]
    begin = queries[partner] - queries[partner] // 2
    count = queries[partner] - begin if partner != rank else 0
    theirs = apply_function(_Exchange, second, count, partner, group) if partner != rank else second
    pieces = [(first, starts[rank]), (theirs, starts[partner] + begin)]
    if turns:
        device = query.device
        places = torch.cat([torch.arange(s, s + q.shape[-2], device=device) for q, s in pieces])
        both = ring.attend(torch.cat([first, theirs], -2), *own, omega, keys, places, scale, group)
        results = [both[..., :kept, :], both[..., kept:, :]]
    else:
        results = [_causal(q, all_keys, all_values, omega, s, scale) for q, s in pieces]
    if partner == rank:
        return results[0]
    back: Tensor = apply_function(_Exchange, results[1], second.shape[-2], partner, group)
    return torch.cat([results[0], back], -2)


def _takes_ring(query: Tensor, key: Tensor, value: Tensor, omega: Regularizer, sizes: list[int]) -> bool:
    """Whether all keys and values are too large to be gathered; for an Ω whose supports can be kept instead."""
    entries = sum(sizes) * (key.shape[:-2].numel() * key.shape[-1] + value.shape[:-2].numel() * value.shape[-1])
    if entries * key.element_size() <= GATHERED or key.shape[:-2] != query.shape[:-2]:
        return False
    return not omega.ordered and omega.line(query.detach().new_zeros(*query.shape[:-2], 1, 1)) is not None


def _gathered(key: Tensor, value: Tensor, sizes: list[int], group: Group) -> tuple[Tensor, Tensor]:
    """All ranks' keys and values, by one all-gather."""
    if key.shape[:-1] == value.shape[:-1] and key.dtype == value.dtype:
        both = apply_function(_Gather, torch.cat([key, value], -1), sizes, group)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]
    return apply_function(_Gather, key, sizes, group), apply_function(_Gather, value, sizes, group)


class _Gather(torch.autograd.Function):
    """The rows (…, n, E) of all ranks, one after another; the backward pass sums the gradients of each rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return gather_rows(rows.movedim(-2, 0), sizes, group).movedim(0, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        own = sum_rows(grad.movedim(-2, 0).contiguous(), ctx.sizes, ctx.group)
        return own.movedim(0, -2), None, None


class _Exchange(torch.autograd.Function):
    """The partner's rows (…, n, E) in exchange for one's own; the backward pass exchanges the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, partner: int, group: Group) -> Tensor:
        ctx.count, ctx.partner, ctx.group = rows.shape[-2], partner, group
        return _exchanged(rows, count, partner, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.count, ctx.partner, ctx.group), None, None, None


def _exchanged(rows: Tensor, count: int, partner: int, group: Group) -> Tensor:
    into = rows.new_empty(*rows.shape[:-2], count, rows.shape[-1])
    exchange([rows], [into], partner, group)
    return into


def _causal(query: Tensor, key: Tensor, value: Tensor, omega: Regularizer, start: int, scale: float | None) -> Tensor:
    """Queries from a place of the sequence on, each with the keys up to its own place; some queries at a time.

    Masks are made again in the backward pass.
    """
    length = query.shape[-2]
    if not length:  # part of the graph all the same: the backward passes of all ranks have the same collectives
        nothing = query.new_zeros(*query.shape[:-1], value.shape[-1])
        learned = [t for t in omega.parameters() if t.requires_grad]
        return nothing + sum(0.0 * t.sum() for t in (query, key, value, *learned))
    if not start:
        return _call(query, key[..., :length, :], value[..., :length, :], omega, None, scale, causal=True)
    size = max(16, _MASKED // (start + length))
    parts = []
    for i in range(0, length, size):
        end = min(i + size, length)
        some = slice(0, start + end)
        parts.append(_call(query[..., i:end, :], key[..., some, :], value[..., some, :], omega, start + i, scale))
    return torch.cat(parts, -2)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer,
    start: int | None,
    scale: float | None,
    causal: bool = False,
) -> Tensor:
    """Attention; with a start, queries have places from there on and no later keys."""
    if start is None:
        plain: Tensor = masked_attention(query, key, value, omega, attn_mask=None, is_causal=causal, scale=scale)
        return plain
    learned = {name: t for name, t in omega.named_parameters() if t.requires_grad}

    def part(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        places = torch.arange(start, start + q.shape[-2], device=q.device)
        mask = torch.arange(k.shape[-2], device=q.device) <= places.unsqueeze(-1)

        def call(chosen: Regularizer) -> Any:
            return masked_attention(q, k, v, chosen, attn_mask=mask, is_causal=False, scale=scale)

        found: Tensor = with_tensors(omega, dict(zip(learned, own, strict=True)), call)
        return found

    made: Tensor = recomputed(part, query, key, value, *learned.values())
    return made
