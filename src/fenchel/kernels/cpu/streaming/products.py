"""Scores of a block of queries and keys, in memory that the caller allocated."""

from __future__ import annotations

import torch
from torch import Tensor


def scores(query: Tensor, key: Tensor, mask: Tensor | None, workspace: Tensor) -> Tensor:
    """query keyᵀ, (heads, rows, keys), at the front of ``workspace``, with −inf where a boolean mask is False.

    Args:
        query: (heads, rows, width).
        key: (heads, keys, width).
        mask: (heads, rows, keys), boolean or to be added; None if there is none.
        workspace: at least heads × rows × keys entries.
    """
    heads, rows, keys = query.shape[0], query.shape[1], key.shape[1]
    found = workspace[: heads * rows * keys].view(heads, rows, keys)
    if rows == 1:  # decoding: the same numbers, read in the order of the keys
        torch.bmm(key, query.transpose(1, 2), out=found.view(heads, keys, 1))
    else:
        torch.bmm(query, key.transpose(1, 2), out=found)
    if mask is not None:
        if mask.dtype == torch.bool:
            found.masked_fill_(~mask, -torch.inf)
        else:
            found += mask
    return found
