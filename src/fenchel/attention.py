"""Attention with any regularizer in place of softmax."""

from __future__ import annotations

import warnings
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from fenchel.regularizers.base import Regularizer, check_omega
from fenchel.regularizers.rows import broadcasts
from fenchel.regularizers.tsallis import Tsallis


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_weights: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_weights: Literal[True, "sparse"],
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_weights: bool | Literal["sparse"] = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Average values by a regularized choice among keys.

    .. math:: \operatorname{argmax}_\Omega\big(Q K^\top / \sqrt{E}\big)\, V

    The shapes are those of ``torch.nn.functional.scaled_dot_product_attention``, which this equals for ``Shannon()``.
    A query whose keys are all masked gets zeros.

    Args:
        query: (…, L, E).
        key: (…, S, E). With fewer heads (dimension −3) than the query has, each serves a group of query heads.
        value: (…, S, D).
        omega: the regularizer; ``Tsallis(1.5)`` by default.
        attn_mask: broadcasts to (…, L, S); boolean (True = takes part) or added to the scores.
        is_causal: query i attends to keys 0 … i. Excludes ``attn_mask``.
        scale: of the scores; 1/√E by default.
        dropout_p: the share of weights to drop; the rest is scaled up.
        return_weights: True: also the weights, (…, L, S); ``"sparse"``: as one CSR matrix, rows flattened.

    Returns:
        (…, L, D), or a pair of it and the weights (before dropout).

    Example:
        >>> import torch, fenchel
        >>> _ = torch.manual_seed(0)
        >>> query, key, value = torch.randn(3, 2, 5, 8).unbind()
        >>> output, weights = fenchel.attention(query, key, value, fenchel.Gini(), return_weights=True)
        >>> output.shape, weights.shape, bool((weights == 0).any())
        (torch.Size([2, 5, 8]), torch.Size([2, 5, 5]), True)
    """
    omega = Tsallis(1.5) if omega is None else check_omega(omega)
    _check(query, key, value, attn_mask, is_causal, dropout_p, return_weights)
    key, value = _share_heads(query, key, "key"), _share_heads(query, value, "value")
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    if narrow and not torch.is_autocast_enabled(query.device.type):
        # Scores in half precision would lose the order of the keys, and overflow: weights are rounded instead.
        scores = (query.float() * scale) @ key.float().transpose(-2, -1)
        dtype = query.dtype
    else:
        scores = (query * scale) @ key.transpose(-2, -1)
        dtype = scores.dtype
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and not broadcasts(attn_mask.shape, scores.shape):
        raise ValueError(
            f"attn_mask must broadcast to the scores, (…, L, S): it has shape {tuple(attn_mask.shape)}, "
            f"the scores {tuple(scores.shape)}"
        )
    mask = attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else None
    if attn_mask is not None and mask is None:
        scores = scores + attn_mask.to(scores.dtype)
    # Without keys there is nothing to choose from: weights of width 0, an output of zeros.
    weights = (omega.argmax(scores, dim=-1, mask=mask) if scores.shape[-1] else scores).to(dtype)
    output = F.dropout(weights, dropout_p) @ value if dropout_p else weights @ value
    if not return_weights:
        return output
    if return_weights == "sparse":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return output, weights.reshape(-1, weights.shape[-1]).to_sparse_csr()
    return output, weights


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    return_weights: bool | str,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}")
        if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have at least two dimensions (…, length, width), got {tuple(tensor.shape)}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same width, got {query.shape[-1]} and {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have the same length, got {key.shape[-2]} and {value.shape[-2]}")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask must be None when is_causal is True")
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(attn_mask).__name__}")
    if attn_mask is not None and attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be boolean or floating point, got {attn_mask.dtype}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    if return_weights not in (True, False, "sparse"):
        raise ValueError(f"return_weights must be True, False or 'sparse', got {return_weights!r}")


def _share_heads(query: Tensor, shared: Tensor, name: str) -> Tensor:
    """Repeat the heads of keys or values for the query heads that share them (grouped queries)."""
    if any(1 not in (q, s) and q != s for q, s in zip(query.shape[-4::-1], shared.shape[-4::-1], strict=False)):
        raise ValueError(
            f"query and {name} must have batch dimensions that broadcast, got {tuple(query.shape)} and "
            f"{tuple(shared.shape)}"
        )
    if query.dim() < 3 or shared.dim() < 3 or query.shape[-3] in (1, shared.shape[-3]) or shared.shape[-3] == 1:
        return shared
    groups, rest = divmod(query.shape[-3], shared.shape[-3]) if shared.shape[-3] else (0, 1)
    if rest:
        raise ValueError(
            f"query heads must be a multiple of {name} heads, got {query.shape[-3]} and {shared.shape[-3]}"
        )
    return shared.repeat_interleave(groups, dim=-3)
