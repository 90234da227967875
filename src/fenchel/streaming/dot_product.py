"""Attention with any regularizer in place of softmax."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fenchel._checks import broadcasts
from fenchel._torch import concrete, recomputed, tracks_forward
from fenchel.regularizers.base import Regularizer, check_omega
from fenchel.regularizers.rowmap import Parameter
from fenchel.regularizers.rows import as_autocast, autocast_dtype, parameter_rows
from fenchel.regularizers.tsallis import Tsallis
from fenchel.streaming.plan import Needs, Plan, Shapes, plan
from fenchel.streaming.supports import NotListedError, Task, attend, joined


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
    enable_gqa: bool = True,
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
    enable_gqa: bool = True,
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
    enable_gqa: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Average values by a regularized choice among keys.

    .. math:: \operatorname{argmax}_\Omega\big(Q K^\top / \sqrt{E}\big)\, V

    The shapes are those of ``torch.nn.functional.scaled_dot_product_attention``, which this equals for ``Shannon()``.
    A query whose keys are all masked gets zeros.

    A large matrix of queries × keys is never held, unless weights are asked for: entmax with 1 < alpha ≤ 2 works on
    supports alone (from 256 keys on, on the CPU), any other Ω but ``Custom`` on some queries at a time, which are
    computed again in the backward pass.

    Args:
        query: (…, L, E).
        key: (…, S, E). With fewer heads (dimension −3) than the query has, each serves a group of query heads.
        value: (…, S, D).
        omega: the regularizer; ``Tsallis(1.5)`` by default.
        attn_mask: broadcasts to (…, L, S); boolean (True = takes part) or added to the scores.
        is_causal: query i attends to keys 0 … i. Excludes ``attn_mask``.
        scale: of the scores; 1/√E by default.
        dropout_p: the share of weights to drop; the rest is scaled up.
        enable_gqa: taken for the sake of torch's signature; heads are grouped wherever they are fewer.
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
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask must be None when is_causal is True")
    result: Tensor | tuple[Tensor, Tensor] = masked_attention(
        query,
        key,
        value,
        omega,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        return_weights=return_weights,
    )
    return result


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_weights: bool | Literal["sparse"] = False,
) -> Any:
    """``attention`` with a mask, or causal, or both: the mask of a causal layer's padding has no L × S entries."""
    _check_tensors(query, key, value)
    if (half := autocast_dtype(query.device)) is not None:
        query, key, value = (as_autocast(t, half) for t in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            return masked_attention(
                query,
                key,
                value,
                omega,
                attn_mask=attn_mask,
                is_causal=is_causal,
                scale=scale,
                dropout_p=dropout_p,
                return_weights=return_weights,
            )
    _check(query, key, value, attn_mask, dropout_p, return_weights)
    _check_heads(query, key, "key")
    _check_heads(query, value, "value")
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    batch = _broadcast(query.shape[:-2], _grouped(query, key), _grouped(query, value))
    shape = (*batch, query.shape[-2], key.shape[-2])
    _check_parameters(omega, shape)
    if attn_mask is not None and not broadcasts(attn_mask.shape, shape):
        raise ValueError(
            f"attn_mask must broadcast to the scores, (…, L, S): it has shape {tuple(attn_mask.shape)}, "
            f"the scores {tuple(shape)}"
        )
    shapes = Shapes(shape[-2], shape[-1], query.shape[-1] + value.shape[-1], math.prod(batch))
    exact = torch.promote_types(query.dtype, torch.float32)
    needs = Needs(
        "attend",
        exact,
        formula=return_weights is True
        or 0 in (*query.shape, *key.shape, *value.shape)
        or (attn_mask is not None and attn_mask.requires_grad)
        or tracks_forward()
        or not concrete(query, key, value),
        causal=is_causal,
        lists=_same_heads(key, value),
        random=dropout_p > 0,
    )
    chosen = plan(omega, shapes, query.device, needs)
    if chosen.method == "supports":
        with contextlib.suppress(NotListedError):
            return _by_supports(
                query, key, value, omega, shape, attn_mask, is_causal, scale, dropout_p, return_weights, chosen
            )
        chosen = plan(omega, shapes, query.device, replace(needs, lists=False))
    key, value = _share_heads(query, key), _share_heads(query, value)
    if chosen.method == "parts" and not return_weights:
        return _by_parts(query, key, value, omega, attn_mask, is_causal, scale, dropout_p, shape, chosen)
    attn_mask = _rows_of_mask(range(shape[-2]), shape[-1], attn_mask, is_causal, query)
    output, weights = _plain(query, key, value, omega, attn_mask, scale, dropout_p, chosen.share)
    if not return_weights:
        return output
    if return_weights == "sparse":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return output, weights.expand(shape).reshape(math.prod(shape[:-1]), shape[-1]).to_sparse_csr()
    return output, weights


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer | _With,
    attn_mask: Tensor | None,
    scale: float,
    dropout_p: float,
    share: float,
) -> tuple[Tensor, Tensor]:
    """Output and weights by the formula, for heads that are not shared.

    Scores, weights and sums are in float32 or better: half precision would lose the order of the keys, and overflow.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(exact) * scale) @ key.to(exact).transpose(-2, -1)
    mask = attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else None
    if attn_mask is not None and mask is None:
        scores = scores + attn_mask.to(exact)
    elif mask is not None and not broadcasts(mask.shape, scores.shape):  # it spans a batch of the values alone
        scores = scores.expand(_broadcast(scores.shape, mask.shape))
    # Without keys there is nothing to choose from: weights of width 0, an output of zeros.
    weights = omega.argmax(scores, dim=-1, mask=mask) if scores.shape[-1] else scores
    output = _average(F.dropout(weights, dropout_p) if dropout_p else weights, value.to(exact), share)
    return output.to(query.dtype), weights.to(query.dtype)


def _average(weights: Tensor, value: Tensor, share: float) -> Tensor:
    """weights @ value; by the entries with weight alone where these are sparse and nothing is differentiated."""
    tensors = (weights, value)
    keys, depth = value.shape[-2:]
    if keys < 256 or not weights.is_cpu or weights.shape[:-2] != value.shape[:-2] or tracks_forward():
        return weights @ value
    if not concrete(*tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return weights @ value
    if int(torch.count_nonzero(weights)) > share * weights.numel():
        return weights @ value
    flat = weights.reshape(-1, keys)
    row, place = flat.nonzero(as_tuple=True)
    offsets = torch.searchsorted(row, torch.arange(len(flat), device=row.device))
    entries, table = flat[row, place], value.reshape(-1, depth)
    if weights.dim() > 2:
        place = place + row // weights.shape[-2] * keys
    output = F.embedding_bag(place, table, offsets, mode="sum", per_sample_weights=entries)
    return output.reshape(*weights.shape[:-1], depth)


def _rows_of_mask(rows: range, keys: int, mask: Tensor | None, is_causal: bool, like: Tensor) -> Tensor | None:
    """What the queries of these rows may see of the first keys: rows of the mask, causal or not."""
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows.start : rows.stop, :]
    if not is_causal:
        return mask
    place = torch.arange(rows.start, rows.stop, device=like.device)
    seen = place.unsqueeze(-1) >= torch.arange(keys, device=like.device)
    if mask is None:
        return seen
    mask = mask[..., :keys]
    return mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)


def _by_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    shape: Sequence[int],
    chosen: Plan,
) -> Tensor:
    """The formula for some queries at a time; what it takes to differentiate it is computed again when it is needed."""
    *batch, length, keys = shape
    dtype = query.dtype
    # Before the parts: the gradients of keys and values are sums over them.
    query, key, value = (t.to(torch.promote_types(dtype, torch.float32)) for t in (query, key, value))
    size = max(chosen.rows // max(math.prod(batch), 1), 1)
    held = dict([*omega.named_parameters(), *omega.named_buffers()])
    learned = {name: tensor for name, tensor in held.items() if tensor.requires_grad}
    parts = []
    for first in range(0, length, size):
        rows = range(first, min(first + size, length))
        seen = min(rows.stop, keys) if is_causal else keys
        mask = _rows_of_mask(rows, seen, attn_mask, is_causal, query)
        arguments = (query[..., rows.start : rows.stop, :], key[..., :seen, :], value[..., :seen, :])

        def part(q: Tensor, k: Tensor, v: Tensor, *own: Tensor, mask: Tensor | None = mask) -> Tensor:
            chooser = _With(omega, dict(zip(learned, own, strict=True))) if own else omega
            return _plain(q, k, v, chooser, mask, scale, dropout_p, chosen.share)[0]

        parts.append(recomputed(part, *arguments, *learned.values(), random=bool(dropout_p)))
    return torch.cat(parts, dim=-2).to(dtype)


class _With(nn.Module):
    """An Ω with other tensors in the place of its own."""

    def __init__(self, omega: Regularizer, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.omega = omega
        self.tensors = {f"omega.{name}": tensor for name, tensor in tensors.items()}

    def argmax(self, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        chosen: Tensor = functional_call(self, self.tensors, (scores, dim, mask))
        return chosen

    def forward(self, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        return self.omega.argmax(scores, dim=dim, mask=mask)


def _by_supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer,
    shape: Sequence[int],
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    return_weights: bool | str,
    chosen: Plan,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that works on supports alone: heads that share keys are joined to one with more rows."""
    base, gamma = omega.canonical()
    rule, parameter, name = base.rule, base.parameter, base.parameter_name
    assert rule is not None
    assert parameter is not None
    *batch, length, keys = shape
    dtype = query.dtype
    exact = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    shared = _broadcast(key.shape[:-2], value.shape[:-2])
    if len(batch) and len(shared) and shared[-1] not in (1, batch[-1]):  # grouped queries
        outer = (*batch[:-1], shared[-1])
        groups = batch[-1] // shared[-1]
    else:
        outer, groups = tuple(batch), 1
    heads = math.prod(outer)
    rows = groups * length
    q = (query.to(exact) * (scale / gamma)).expand(*batch, length, query.shape[-1]).reshape(heads, rows, -1)
    k, v = (t.to(exact).expand(*outer, *t.shape[-2:]).reshape(heads, keys, -1) for t in (key, value))
    if isinstance(parameter, Tensor):
        parameter_rows(parameter, name, q.new_empty(()).expand(shape), -1)  # for its checks
        parameter = parameter.to(exact).expand(*batch, length, 1).reshape(heads, rows)

    full: Tensor | None = None
    if attn_mask is not None:
        full = attn_mask if attn_mask.dtype == torch.bool else attn_mask.to(exact) / gamma
        full = full.expand(shape).reshape(*outer, groups, length, keys) if groups > 1 else full.expand(shape)

    def mask_rows(head: int, some: range) -> Tensor:
        assert full is not None
        place = [int(i) for i in np.unravel_index(head, outer)] if outer else []
        here = full[tuple(place)]
        number = torch.arange(some.start, some.stop, device=here.device)
        return here[number // length, number % length] if groups > 1 else here[some.start : some.stop]

    def dense(q: Tensor, k: Tensor, v: Tensor, a: Parameter, factors: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = q @ k.transpose(-2, -1)
        mask = None if full is None else full.reshape(heads, rows, keys)
        if is_causal:
            seen = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril().repeat(groups, 1)
            scores = torch.where(seen, scores, -torch.inf)
        if mask is not None and mask.dtype != torch.bool:
            scores, mask = scores + mask, None
        weights = rule.choose(scores, -1, mask, name, a.unsqueeze(-1) if isinstance(a, Tensor) else a)
        return (weights if factors is None else weights * factors) @ v, weights

    sparse = return_weights == "sparse"
    mask = None if full is None else mask_rows
    task = Task(rule, chosen, length, is_causal, mask, dropout_p, dense, sparse)
    output, weights = attend(q, k, v, parameter, task)
    output = output.reshape(*batch, length, -1).to(dtype)
    return (output, _csr(task, weights.to(dtype), (heads * rows, keys))) if sparse else output


def _same_heads(key: Tensor, value: Tensor) -> bool:
    heads = {t.shape[-3] for t in (key, value) if t.dim() > 2} - {1}
    return len(heads) < 2


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(np.broadcast_shapes(*map(tuple, shapes)))


def _csr(task: Task, weights: Tensor, shape: tuple[int, int]) -> Tensor:
    """The supports of all rows as one CSR matrix."""
    supports = joined(task.found)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(supports.starts, supports.indices.long(), weights, shape, check_invariants=False)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}")
        concrete(tensor)  # raises if its memory was freed, before torch reads it


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    return_weights: bool | str,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have at least two dimensions (…, length, width), got {tuple(tensor.shape)}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same width, got {query.shape[-1]} and {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have the same length, got {key.shape[-2]} and {value.shape[-2]}")
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(attn_mask).__name__}")
    if attn_mask is not None:
        concrete(attn_mask)
    if attn_mask is not None and attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be boolean or floating point, got {attn_mask.dtype}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    if return_weights not in (True, False, "sparse"):
        raise ValueError(f"return_weights must be True, False or 'sparse', got {return_weights!r}")


def _check_parameters(omega: Regularizer, shape: Sequence[int]) -> None:
    """Refuse parameters (heads, 1): they look like one value per head, and broadcast to one value per query."""
    if len(shape) < 3 or shape[-3] == 1:
        return
    for each in omega.modules():
        if not isinstance(each, Regularizer):
            continue
        for name, tensor in [*each.named_parameters(recurse=False), *each.named_buffers(recurse=False)]:
            if tuple(tensor.shape) == (shape[-3], 1) and each.parameter_shape is not None:
                raise ValueError(
                    f"omega must have parameters that broadcast to (…, heads, L, 1): {name} of {type(each).__name__} "
                    f"has shape {tuple(tensor.shape)}, which would be one value per query; for one value per head use "
                    f"shape ({shape[-3]}, 1, 1), for one value per query (1, {shape[-3]}, 1)"
                )


def _check_heads(query: Tensor, shared: Tensor, name: str) -> None:
    if any(1 not in (q, s) and q != s for q, s in zip(query.shape[-4::-1], shared.shape[-4::-1], strict=False)):
        raise ValueError(
            f"query and {name} must have batch dimensions that broadcast, got {tuple(query.shape)} and "
            f"{tuple(shared.shape)}"
        )
    if _is_grouped(query, shared) and (shared.shape[-3] == 0 or query.shape[-3] % shared.shape[-3]):
        raise ValueError(
            f"query heads must be a multiple of {name} heads, got {query.shape[-3]} and {shared.shape[-3]}"
        )


def _is_grouped(query: Tensor, shared: Tensor) -> bool:
    """Whether each head of keys or values serves several query heads."""
    return (
        query.dim() > 2 and shared.dim() > 2 and query.shape[-3] != 1 and shared.shape[-3] not in (1, query.shape[-3])
    )


def _grouped(query: Tensor, shared: Tensor) -> Sequence[int]:
    """The batch dimensions of keys or values as the queries see them."""
    return (*shared.shape[:-3], query.shape[-3]) if _is_grouped(query, shared) else shared.shape[:-2]


def _share_heads(query: Tensor, shared: Tensor) -> Tensor:
    """Repeat the heads of keys or values for the query heads that share them (grouped queries)."""
    if not _is_grouped(query, shared):
        return shared
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], dim=-3)
