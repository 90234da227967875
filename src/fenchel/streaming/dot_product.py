"""Attention with any regularizer in place of softmax."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fenchel import kernels
from fenchel._checks import broadcasts, check_broadcast, check_device, check_flag, check_floats, check_number
from fenchel._torch import (
    as_autocast,
    autocast_dtype,
    concrete,
    distributed_rule,
    is_distributed,
    recomputed,
    tracks_forward,
)
from fenchel.regularizers.base import Regularizer, check_omega, simplified
from fenchel.regularizers.rows import combine_masks, parameter_rows
from fenchel.regularizers.tsallis import Tsallis
from fenchel.streaming.fused import fused_attention
from fenchel.streaming.jagged import packed_attention
from fenchel.streaming.operators import attend_in_graph
from fenchel.streaming.plan import Needs, Plan, Problem, Shapes, plan
from fenchel.streaming.sink import Weights, check_sink, with_sink, without_sink
from fenchel.streaming.supports import NotListedError, Task, attend, joined

_DEFAULT = Tsallis(1.5)


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
    sink: Tensor | None = None,
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
    sink: Tensor | None = None,
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
    sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Average values by a regularized choice among keys.

    .. math:: \operatorname{argmax}_\Omega\big(Q K^\top / \sqrt{E}\big)\, V

    The shapes are those of ``torch.nn.functional.scaled_dot_product_attention``, which this equals for ``Shannon()``.
    A query whose keys are all masked gets zeros. Heads are grouped without being asked for: where dimension −3 of query
    is a multiple of that of key or value, its entries share those of key or value in consecutive groups. torch does so
    with ``enable_gqa=True`` only, and else raises an error.

    A large matrix of queries × keys is never held, unless weights are asked for: entmax with alpha > 1 works on
    supports alone (from 256 keys on, on the CPU), any other Ω but ``Custom`` on some queries at a time, which are
    computed again in the backward pass. Under ``torch.compile`` and ``torch.export`` that holds for every Ω with one
    parameter, such as entmax, softmax and normmax, and without dropout; otherwise the matrix is held there.

    Sequences of different lengths may be packed: jagged nested tensors (B, j, E), or (B, heads, j, E) as torch's own
    attention takes them, for query, key and value alike. Each query attends within its sequence. There are no masks and
    no weights then, but ``is_causal``.

    Args:
        query: (…, L, E).
        key: (…, S, E). With fewer heads (dimension −3) than the query has, each serves a group of query heads.
        value: (…, S, D).
        omega: the regularizer; ``Tsallis(1.5)`` by default. A structure over two dimensions, such as
            ``SparseMAP(Matching())``, chooses in the whole table of queries × keys at once.
        attn_mask: broadcasts to (…, L, S); boolean (True = takes part) or added to the scores.
        is_causal: query i attends to keys 0 … i. Excludes ``attn_mask``.
        scale: of the scores; 1/√E by default.
        dropout_p: the share of weights to drop; the rest is scaled up.
        enable_gqa: taken for the sake of torch's signature; heads are grouped wherever they are fewer.
        return_weights: True: also the weights, (…, L, S); ``"sparse"``: as one CSR matrix, rows flattened.
        sink: a score that competes with those of the keys and has no value, (heads, 1, 1), or what else broadcasts to
            (…, L, 1): the same as one more key whose value is zero. It is neither scaled nor masked. The weights of a
            row sum to 1 less the weight of the sink. An Ω that depends on the order of the keys, and structures, refuse
            it.

    Returns:
        (…, L, D), or a pair of it and the weights (before dropout and without the sink).

    Example:
        >>> import torch, fenchel
        >>> _ = torch.manual_seed(0)
        >>> query, key, value = torch.randn(3, 2, 5, 8).unbind()
        >>> output, weights = fenchel.attention(query, key, value, fenchel.Gini(), return_weights=True)
        >>> output.shape, weights.shape, bool((weights == 0).any())
        (torch.Size([2, 5, 8]), torch.Size([2, 5, 5]), True)
        >>> fenchel.attention(query, key, value, sink=torch.full((2, 1, 1), 100.0)).abs().max()  # all goes to the sink
        tensor(0.)
    """
    if isinstance(omega, Tensor):
        raise TypeError("omega must be a Regularizer, such as fenchel.Gini(), got a Tensor: pass a mask as attn_mask=")
    omega = _DEFAULT if omega is None else check_omega(omega)
    if type(is_causal) is not bool:  # of NumPy, or wrong
        is_causal = check_flag(is_causal, "is_causal")
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
        sink=sink,
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
    sink: Tensor | None = None,
) -> Any:
    """``attention`` with a mask, or causal, or both: the mask of a causal layer's padding has no L × S entries."""
    if is_distributed(query, key, value):
        options: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        options |= {"dropout_p": dropout_p, "return_weights": return_weights, "sink": sink}
        return distributed_rule("attention")(query, key, value, omega, options)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            check_floats(tensor, name)
        concrete(tensor)  # raises if its memory was freed, before torch reads it
    check_device(query, "query", key=key, value=value, attn_mask=attn_mask, sink=sink)
    if query.is_nested or key.is_nested or value.is_nested:
        options = {"is_causal": is_causal, "scale": scale, "dropout_p": dropout_p, "sink": sink}
        return packed_attention(masked_attention, query, key, value, omega, attn_mask, return_weights, options)
    half = autocast_dtype(query.device)
    if half is not None:
        query, key, value = as_autocast(half, query, key, value)
    shape = _check(query, key, value, omega, attn_mask, scale, dropout_p, return_weights)
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    # In its simplest form: a grid of strength 0 would count a sink among its pixels.
    problem = Problem(query, key, value, simplified(omega), shape, attn_mask, is_causal, scale, dropout_p)
    with contextlib.nullcontext() if half is None else torch.autocast(query.device.type, enabled=False):
        if sink is None:
            output, weights = _attend(problem, return_weights)
        else:
            check_sink(sink, omega, shape)
            extended = with_sink(problem, sink)
            output, weights = without_sink(*_attend(extended, return_weights), extended)
            output = output.to(query.dtype)
    if weights is None or not return_weights:
        return output
    if isinstance(weights, Tensor):
        weights = weights.to(query.dtype)
        if return_weights is True:
            return output, weights
    size = math.prod(shape[:-1]), shape[-1]
    with _beta_without_warning():
        if isinstance(weights, Tensor):
            return output, weights.expand(shape).reshape(size).to_sparse_csr()
        starts, indices, entries = weights
        return output, torch.sparse_csr_tensor(starts, indices, entries.to(query.dtype), size, check_invariants=False)


def _attend(problem: Problem, return_weights: bool | str) -> tuple[Tensor, Weights]:
    """The output, (…, L, D), by the method of the plan, and the weights where that has them."""
    query, key, value, omega, shape, mask, is_causal, _, dropout, _ = problem
    if key.dim() > 2 and value.dim() > 2 and key.shape[-3] != value.shape[-3]:  # shared by different groups of queries
        problem = _with_shared_heads(problem)
        _, key, value, *_ = problem
    graph = torch.compiler.is_compiling()
    needs = Needs(
        "attend",
        torch.promote_types(query.dtype, torch.float32),
        formula=return_weights is True
        or 0 in (*query.shape, *key.shape, *value.shape)
        or (mask is not None and mask.requires_grad)
        or tracks_forward()
        or (bool(dropout or return_weights) if graph else not concrete(query, key, value)),
        causal=is_causal,
        fused=not return_weights,
        inputs=query.dtype,
        random=dropout > 0,
        graph=graph,
    )
    shapes = Shapes(shape[-2], shape[-1], query.shape[-1] + value.shape[-1], math.prod(shape[:-2]))
    chosen = plan(omega, shapes, query.device, needs)
    if chosen.method == "fused":
        with contextlib.suppress(kernels.NotCompiledError):
            return fused_attention(problem), None
        chosen = plan(omega, shapes, query.device, replace(needs, fused=False))
    if chosen.method == "supports" or (graph and chosen.method == "parts"):
        with contextlib.suppress(NotListedError):
            return _by_supports(problem, return_weights == "sparse", chosen)
        chosen = plan(omega, shapes, query.device, replace(needs, lists=False))
    problem = _with_shared_heads(problem)
    if chosen.method == "parts" and not return_weights:
        return _by_parts(problem, chosen), None
    mask = _rows_of_mask(range(shape[-2]), shape[-1], mask, is_causal, query)
    return _plain(problem._replace(mask=mask), omega, chosen.share)


def _plain(problem: Problem, omega: Regularizer, share: float) -> tuple[Tensor, Tensor]:
    """Output and weights by the formula, for heads that are not shared; causal only by the mask.

    Scores, weights and sums are in float32 or better: half precision would lose the order of the keys, and overflow.
    """
    query, key, value, _, _, mask, _, scale, dropout, _ = problem
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(exact) * scale) @ key.to(exact).transpose(-2, -1)
    if mask is not None and mask.dtype != torch.bool:
        scores, mask = scores + mask.to(exact), None
    elif mask is not None and not broadcasts(mask.shape, scores.shape):  # it spans a batch of the values alone
        scores = scores.expand(check_broadcast("scores and attn_mask", scores.shape, mask.shape))
    # Without keys there is nothing to choose from: weights of width 0, an output of zeros.
    weights = omega.argmax(scores, dim=-1, mask=mask) if scores.shape[-1] else scores
    output = _average(F.dropout(weights, dropout) if dropout else weights, value.to(exact), share)
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
    """The mask of some queries for the first keys, combined with the causal one; None if all take part."""
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows.start : rows.stop, :]
    if not is_causal:
        return mask
    place = torch.arange(rows.start, rows.stop, device=like.device)
    causal = place.unsqueeze(-1) >= torch.arange(keys, device=like.device)
    return combine_masks(None if mask is None else mask[..., :keys], causal)


def _by_parts(problem: Problem, chosen: Plan) -> Tensor:
    """The formula for some queries at a time; the backward pass computes scores and weights again."""
    query, key, value, omega, (*batch, length, keys), attn_mask, is_causal, _, dropout, _ = problem
    dtype = query.dtype
    # Before the parts: the gradients of keys and values are sums over them.
    query, key, value = (t.to(torch.promote_types(dtype, torch.float32)) for t in (query, key, value))
    size = max(chosen.rows // max(math.prod(batch), 1), 1)
    held = dict([*omega.named_parameters(), *omega.named_buffers()])
    learned = {name: tensor for name, tensor in held.items() if tensor.requires_grad}
    parts = []
    for first in range(0, length, size):
        rows = range(first, min(first + size, length))
        visible = min(rows.stop, keys) if is_causal else keys
        mask = _rows_of_mask(rows, visible, attn_mask, is_causal, query)
        arguments = (query[..., rows.start : rows.stop, :], key[..., :visible, :], value[..., :visible, :])

        # An argument too: one that is changed before the backward pass is noticed.
        masks = () if mask is None else (mask,)

        def part(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
            own = rest[: len(learned)]
            mask = rest[-1] if len(rest) > len(own) else None
            some = problem._replace(query=q, key=k, value=v, mask=mask)
            tensors = dict(zip(learned, own, strict=True))
            output: Tensor = with_tensors(omega, tensors, lambda chooser: _plain(some, chooser, chosen.share)[0])
            return output

        parts.append(recomputed(part, *arguments, *learned.values(), *masks, random=bool(dropout)))
    return torch.cat(parts, dim=-2).to(dtype)


def with_tensors(omega: Regularizer, tensors: Mapping[str, Tensor], call: Callable[..., Any], *args: Any) -> Any:
    """``call(omega, *args)`` with other tensors in place of those that Ω has under these names."""
    if not tensors:
        return call(omega, *args)
    return functional_call(_Call(omega, call), {f"omega.{name}": t for name, t in tensors.items()}, args)


class _Call(nn.Module):
    """A function of an Ω as a module, whose tensors ``functional_call`` replaces."""

    def __init__(self, omega: Regularizer, call: Callable[..., Any]) -> None:
        super().__init__()
        self.omega, self.call = omega, call

    def forward(self, *args: Any) -> Any:
        return self.call(self.omega, *args)


def _by_supports(problem: Problem, sparse: bool, chosen: Plan) -> tuple[Tensor, Weights]:
    """Attention by blocks of rows and their supports: heads that share keys are joined to one with more rows.

    Also returns the weights, if a ``sparse`` matrix of them is wanted, by its lists: starts, indices and entries.
    """
    query, key, value, omega, shape, attn_mask, is_causal, scale, dropout, _ = problem
    base, gamma = omega.canonical()
    rule, parameter, name = base.rule, base.parameter, base.parameter_name
    assert rule is not None
    assert parameter is not None
    *batch, length, keys = shape
    dtype = query.dtype
    exact = torch.promote_types(dtype, torch.float32)
    outer, groups = tuple(batch), 1
    heads_of_keys = max(key.shape[-3] if key.dim() > 2 else 1, value.shape[-3] if value.dim() > 2 else 1)
    if batch and heads_of_keys not in (1, batch[-1]):  # grouped queries
        outer, groups = (*batch[:-1], heads_of_keys), batch[-1] // heads_of_keys
    heads = math.prod(outer)
    q = (query.to(exact) * (scale / gamma)).expand(*batch, length, query.shape[-1])
    q = q.reshape(heads, groups * length, query.shape[-1])
    k = key.to(exact).expand(*outer, *key.shape[-2:]).reshape(heads, keys, key.shape[-1])
    v = value.to(exact).expand(*outer, *value.shape[-2:]).reshape(heads, keys, value.shape[-1])
    if isinstance(parameter, Tensor):
        parameter_rows(parameter, name, q.new_empty(()).expand(shape), -1)  # for its checks
        parameter = parameter.to(exact).expand(*batch, length, 1).reshape(heads, groups * length)
    if attn_mask is not None:
        attn_mask = attn_mask if attn_mask.dtype == torch.bool else attn_mask.to(exact) / gamma
        if attn_mask.dim() > 2:  # (…, heads of the keys, groups, L, S)
            own = (1, 1) if attn_mask.shape[-3] == 1 else (outer[-1], groups)
            attn_mask = attn_mask.reshape(*attn_mask.shape[:-3], *own, *attn_mask.shape[-2:])
    entries = int(chosen.share * keys) if chosen.method == "supports" else None
    task = Task(rule, chosen.rows, entries, outer, length, is_causal, dropout, sparse)
    if torch.compiler.is_compiling():
        output, weights = attend_in_graph(q, k, v, attn_mask, parameter, task), q
    else:
        output, weights = attend(q, k, v, attn_mask, parameter, task)
    output = output.reshape(*batch, length, value.shape[-1]).to(dtype)
    if not sparse:
        return output, None
    supports = joined(task.found)
    return output, (supports.starts, supports.indices.long(), weights)


@contextlib.contextmanager
def _beta_without_warning() -> Iterator[None]:
    """Make a CSR matrix without torch's warning that they are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        yield


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer,
    attn_mask: Tensor | None,
    scale: float | None,
    dropout_p: float,
    return_weights: bool | str,
) -> tuple[int, ...]:
    """Check the arguments of ``attention``; return the shape of the scores, (…, L, S)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have at least two dimensions (…, length, width), got {tuple(tensor.shape)}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same width, got {query.shape[-1]} and {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have the same length, got {key.shape[-2]} and {value.shape[-2]}")
    # The usual case first: for small inputs the time of a call is that of its Python lines.
    if type(dropout_p) is not float or dropout_p != 0:
        check_number(dropout_p, "dropout_p", 0, 1, ends="[]")
    if scale is not None:
        check_number(scale, "scale")
    if not isinstance(return_weights, bool) and not (isinstance(return_weights, str) and return_weights == "sparse"):
        raise ValueError(f"return_weights must be True, False or 'sparse', got {return_weights!r}")
    batch: tuple[int, ...] = query.shape[:-2]
    for name, shared in (("key", key), ("value", value)):
        own: tuple[int, ...] = shared.shape[:-2]
        if _is_grouped(query, shared):
            if shared.shape[-3] == 0 or query.shape[-3] % shared.shape[-3]:
                raise ValueError(
                    f"query heads, dimension -3, must be a multiple of {name} heads, got query of shape "
                    f"{tuple(query.shape)} and {name} of shape {tuple(shared.shape)}"
                )
            own = (*own[:-1], query.shape[-3])
        if own != batch:
            batch = check_broadcast(f"the batch dimensions of query and {name}", batch, own)
    shape = (*batch, query.shape[-2], key.shape[-2])
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise TypeError(f"attn_mask must be a tensor, got {type(attn_mask).__name__}")
        concrete(attn_mask)
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"attn_mask must be boolean or floating point, got {attn_mask.dtype}")
        if not broadcasts(attn_mask.shape, shape):
            raise ValueError(
                f"attn_mask must broadcast to the scores, (…, L, S): it has shape {tuple(attn_mask.shape)}, "
                f"the scores {tuple(shape)}"
            )
    if len(batch) and batch[-1] != 1:
        _check_parameters(omega, batch[-1])
    return shape


def _check_parameters(omega: Regularizer, heads: int) -> None:
    """Refuse parameters (heads, 1): they look like one value per head, and broadcast to one value per query."""
    for each in omega.modules():
        if not isinstance(each, Regularizer):
            continue
        for name, tensor in [*each.named_parameters(recurse=False), *each.named_buffers(recurse=False)]:
            if tuple(tensor.shape) == (heads, 1) and each.parameter_shape is not None:
                raise ValueError(
                    f"omega must have parameters that broadcast to (…, heads, L, 1): {name} of {type(each).__name__} "
                    f"has shape {tuple(tensor.shape)}, which would be one value per query; for one value per head use "
                    f"shape ({heads}, 1, 1), for one value per query (1, {heads}, 1)"
                )


def _is_grouped(query: Tensor, shared: Tensor) -> bool:
    """Whether each head of keys or values serves several query heads."""
    return (
        query.dim() > 2 and shared.dim() > 2 and query.shape[-3] != 1 and shared.shape[-3] not in (1, query.shape[-3])
    )


def _with_shared_heads(problem: Problem) -> Problem:
    """Repeat the heads of keys and values for the query heads that share them (grouped queries)."""
    query, key, value, *_ = problem
    key, value = (
        each.repeat_interleave(query.shape[-3] // each.shape[-3], dim=-3) if _is_grouped(query, each) else each
        for each in (key, value)
    )
    return problem._replace(key=key, value=value)
