"""Attention over packed sequences: jagged nested tensors, sequences of similar lengths at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.packed import Packed, is_packed, similar


def packed_attention(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer,
    attn_mask: Tensor | None,
    return_weights: bool | str,
    options: dict[str, Any],
) -> Tensor:
    """Attention within each sequence of jagged nested tensors (B, …, j, E).

    Args:
        attend: ``masked_attention``, for dense tensors.
        query: nested, with the ragged dimension before the last.
        key: the same, with as many sequences; their lengths may be others.
        value: the same, with the lengths of the keys.
        omega: the regularizer.
        attn_mask: must be None.
        return_weights: must be False.
        options: the other keyword arguments of ``attend``.

    Returns:
        A nested tensor with the sequences of the queries.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not is_packed(tensor):
            raise TypeError(
                f"query, key and value must all be nested or all dense, got {name} of type {type(tensor).__name__}"
            )
    if attn_mask is not None:
        raise ValueError("attn_mask must be None for packed sequences: each query sees the keys of its own sequence")
    if return_weights:
        raise ValueError(
            "return_weights must be False for packed sequences, whose weights have two ragged dimensions; call "
            "attention for single sequences instead"
        )
    shape = omega.parameter_shape
    if shape is not None and (len(shape) > 3 or (len(shape) > 1 and shape[-2] != 1) or shape[-1:] not in ((), (1,))):
        raise ValueError(
            "omega must have parameters that all queries of packed sequences share, a number or one per head, "
            f"(heads, 1, 1); got {omega}"
        )
    packed = [Packed(tensor, name) for name, tensor in (("query", query), ("key", key), ("value", value))]
    queries, keys, values = packed
    for each in packed:
        if each.ragged != each.rank - 2:
            raise ValueError(
                f"{each.name} must be ragged in the dimension before the last, (B, heads, j, width) or (B, j, width), "
                f"got {each.shape}; transpose it"
            )
        if len(each.lengths) != len(queries.lengths) or each.rank != queries.rank:
            raise ValueError(f"{each.name} must have as many sequences and dimensions as query, got {each.shape}")
    if not torch.equal(keys.lengths, values.lengths):
        raise ValueError("value must have sequences of the lengths of key")
    sink = options["sink"]
    if (
        isinstance(sink, Tensor)
        and sink.numel() > 1
        and (queries.rank != 4 or sink.shape[-2:] != (1, 1) or sink.dim() > 3)
    ):
        raise ValueError(
            "sink must be one score, or one per head, (heads, 1, 1), for packed sequences (B, heads, j, E); got shape "
            f"{tuple(sink.shape)}"
        )
    segments = queries.segments()
    parts = []
    for groups in similar(torch.maximum(queries.lengths, keys.lengths)) if queries.size else ():
        rows, others = segments.of(groups), keys.segments().of(groups)
        mask = others.present
        if mask is not None:  # (m, …, 1, S)
            mask = mask.reshape(len(mask), *[1] * (queries.rank - 2), -1)
        q = rows.entries(queries.along(), 0.0)
        k, v = (
            others.entries(each.along(), 0.0) if each.size else _none(each, rows.shape[0]) for each in (keys, values)
        )
        q, k, v = (each.movedim(1, -2) for each in (q, k, v))
        output = attend(q, k, v, omega, attn_mask=mask, **options)
        parts.append((rows, output.movedim(-2, 1)))
    if not parts:
        width = values.values.shape[-1]
        return queries.nested(queries.values.new_zeros(*queries.values.shape[:-1], width))
    return queries.nested(segments.join(parts).movedim(0, -2))


def _none(packed: Packed, rows: int) -> Tensor:
    """One key per row that is not there, for sequences without any."""
    like = packed.along()
    return like.new_zeros(rows, 1, *like.shape[1:])
