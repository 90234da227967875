"""Attention by one kernel, on devices that have one: no matrix of weights in either pass.

The kernel takes tensors as they are: in half precision, strided or broadcast, with heads that share keys. In graphs it
is the operators ``fenchel::fused_attend`` and ``fenchel::fused_attend_backward``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fenchel import kernels
from fenchel._operators import define_operator, or_empty
from fenchel._torch import apply_function, below_autograd, differentiable_gradients, tracks
from fenchel.regularizers.operators import registered_map
from fenchel.regularizers.rows import combine_masks
from fenchel.streaming.plan import MOST_FUSED, Problem

STEP, BACKWARD = "fused_attend", "fused_attend_backward"
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? alpha"
_REST = "float number, str name, bool causal, float scale, float dropout, SymInt seed"
_STATE = ("top", "offset", "mean", "used")


class _Call(NamedTuple):
    """The arguments of both operators.

    Args:
        query: (B, heads, groups, L, E).
        key: (B, heads, S, E).
        value: (B, heads, S, D).
        mask: (B, heads, groups, L, S), boolean (True = takes part) or added to the scores.
        alpha: (B, heads, groups), or None if it is ``number``.
        number: alpha for all heads, if ``alpha`` is None.
        name: of the map.
        causal: whether query i attends to keys 0 … i.
        scale: of the scores.
        dropout: the share of weights to drop …
        seed: … and the seed that selects them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    alpha: Tensor | None
    number: float
    name: str
    causal: bool
    scale: float
    dropout: float
    seed: int

    def kernel(self, step: str) -> Callable[..., Any]:
        """The kernel of a step, called with these arguments."""
        number = self.number if self.alpha is None else MOST_FUSED
        found = kernels.find(step, self.name, (number,), self.query)
        if found is None:
            raise kernels.NotCompiledError(f"there is no kernel for {step}")
        tensors = self.query, self.key, self.value, self.number if self.alpha is None else self.alpha
        options = {"mask": self.mask, "causal": self.causal, "scale": self.scale}
        drop = {"dropout": self.dropout, "seed": self.seed}
        return lambda *first, **rest: found(*first, *tensors, **options, **drop, **rest)


_SIZE = len(_Call._fields)


def fused_attention(problem: Problem) -> Tensor:
    """Attention for checked arguments, (…, L, D).

    At α = 1 it is torch's own, of which some kernels can be differentiated only once: ``torch.nn.attention`` chooses.

    Raises ``kernels.NotCompiledError`` if the kernel does not serve these tensors.
    """
    query, key, value, omega, (*batch, length, keys), mask, is_causal, scale, dropout, _ = problem
    base, gamma = omega.canonical()
    alpha = base.parameter
    own = max(key.shape[-3] if key.dim() > 2 else 1, value.shape[-3] if value.dim() > 2 else 1)
    heads = batch[-1] if batch else 1
    shared = own if heads % own == 0 else 1
    outer = (math.prod(batch[:-1]), shared)
    groups = heads // shared
    q = query.expand(*batch, *query.shape[-2:]).reshape(*outer, groups, *query.shape[-2:])
    k = _of_heads(key, batch, shared).reshape(*outer, *key.shape[-2:])
    v = _of_heads(value, batch, shared).reshape(*outer, *value.shape[-2:])
    if base.parameter_range == (1.0, 1.0):
        mask = mask if mask is None or mask.dtype == torch.bool else mask / gamma
        output = _softmax_attention(q, k, v, mask, batch, is_causal, scale / float(gamma), dropout)
        return output.reshape(*batch, length, value.shape[-1])
    if isinstance(alpha, Tensor):
        alpha = alpha.to(torch.promote_types(query.dtype, torch.float32)).expand(*batch, 1, 1).reshape(*outer, groups)
    if mask is not None:
        mask = mask if mask.dtype == torch.bool or gamma == 1 else mask / gamma
        mask = _of_scores(mask, batch, length, keys).reshape(*outer, groups, length, keys)
    seed = int(torch.randint(0, 2**31 - 1, (), device="cpu")) if dropout else 0
    own_alpha, number = (alpha, 0.0) if isinstance(alpha, Tensor) else (None, float(alpha or 0.0))
    assert base.name is not None
    call = _Call(q, k, v, mask, own_alpha, number, base.name, is_causal, scale / float(gamma), float(dropout), seed)
    kept = tracks(q, k, v, alpha)
    if torch.compiler.is_compiling():
        output = _operator(*call, kept)[0]
    elif kept:
        output = apply_function(_Fused, (_forward, _backward), *call)[0]
    else:
        output = _forward(call, False)[0]
    return output.reshape(*batch, length, value.shape[-1])


def _softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    batch: Sequence[int],
    is_causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attention by torch's own kernels, (batch, heads, L, D); zeros for queries without keys, where torch has NaN."""
    outer, groups = query.shape[0], query.shape[2]
    query = query.flatten(1, 2)
    empty = None
    if mask is not None:
        if is_causal:
            place = torch.arange(max(query.shape[2], key.shape[2]), device=query.device)
            mask = combine_masks(mask, place[: query.shape[2], None] >= place[: key.shape[2]])
            is_causal = False
        assert mask is not None
        boolean = mask.dtype == torch.bool
        empty = ~mask.any(-1, keepdim=True) if boolean else torch.eq(mask, -torch.inf).all(-1, keepdim=True)
        mask = mask | empty if boolean else torch.where(empty, 0.0, mask).to(query.dtype)
        mask = mask.expand(*batch, *mask.shape[-2:]).reshape(outer, -1, *mask.shape[-2:])
        empty = empty.expand(*batch, *empty.shape[-2:]).reshape(outer, -1, *empty.shape[-2:])
    options: dict[str, Any] = {"dropout_p": dropout, "is_causal": is_causal, "scale": scale, "enable_gqa": groups > 1}
    output = F.scaled_dot_product_attention(query, key, value, mask, **options)
    return output if empty is None else torch.where(empty, 0.0, output)


def _of_scores(mask: Tensor, batch: Sequence[int], length: int, keys: int) -> Tensor:
    """A mask as (batch, heads, L, S), a view but for batch dimensions that have no common stride."""
    batch = (1,) * (2 - len(batch)) + tuple(batch)
    mask = mask.reshape(*(1 for _ in range(len(batch) + 2 - mask.dim())), *mask.shape)
    mask = mask.expand(*batch[:-1], *mask.shape[-3:]).flatten(0, -4)  # not the rest, of which no view may be left then
    return mask.expand(-1, batch[-1], length, keys)


def _of_heads(tensor: Tensor, batch: Sequence[int], shared: int) -> Tensor:
    """Keys or values with the batch dimensions of the scores, and as many heads as there are sets of keys."""
    return tensor.expand(*batch[:-1], shared, *tensor.shape[-2:]) if batch else tensor


# -- both passes -----------------------------------------------------------------------------------------------------


def _forward(call: _Call, keep: bool) -> tuple[Tensor, ...]:
    """The output, and what the backward pass needs: four tensors, or none if it is not kept."""
    output, state = call.kernel(STEP)(keep=keep)
    return output, *state


def _backward(grad: Tensor, state: Sequence[Tensor], call: _Call, needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of query, key, value and alpha; None for those that are not needed."""
    try:
        to = call.kernel(BACKWARD)(grad, state, needed=needed)
    except kernels.NotCompiledError:  # which has been said
        with torch.enable_grad():
            to = _plain_gradients(grad, call, needed)
        return [None if t is None else t.detach() for t in to]
    return [*to[:3], None if call.alpha is None or to[3] is None else to[3].sum(-1).to(call.alpha.dtype)]


def _plain(call: _Call) -> Tensor:
    """The output by the formula, without dropout."""
    query, key, value, mask, alpha, *_ = call
    exact = torch.promote_types(query.dtype, torch.float32)
    x = call.scale * query.to(exact) @ key.to(exact).transpose(-2, -1).unsqueeze(2)
    if mask is not None:
        x = torch.where(mask, x, -torch.inf) if mask.dtype == torch.bool else x + mask.to(exact)
    if call.causal:
        x = torch.where(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(), x, -torch.inf)
    p = registered_map(call.name).argmax(x, call.number if alpha is None else alpha[..., None, None].to(exact))
    return (p @ value.to(exact).unsqueeze(2)).to(query.dtype)


def _plain_gradients(grad: Tensor, call: _Call, needed: Sequence[bool]) -> list[Any]:
    """The gradients by the formula, which can be differentiated again."""
    if call.dropout:
        raise NotImplementedError("attention with dropout on a GPU is differentiable once, by its kernel")

    def output(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor | None) -> Tensor:
        return _plain(call._replace(query=query, key=key, value=value, alpha=alpha))

    return differentiable_gradients(output, (*call[:3], call.alpha), needed, (grad,))


class _Fused(torch.autograd.Function):
    """Attention by two functions, one per pass. Second derivatives are those of the formula, with all weights."""

    @staticmethod
    def forward(ctx: Any, passes: tuple[Callable[..., Any], Callable[..., Any]], *args: Any) -> tuple[Tensor, ...]:
        forward, ctx.backward_pass = passes
        output, *state = forward(_Call(*args[:_SIZE]), True)
        ctx.rest = args[5:_SIZE]
        ctx.save_for_backward(*state, *args[:5])
        ctx.mark_non_differentiable(*state)
        ctx.set_materialize_grads(False)
        return output, *state

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
        count = len(ctx.needs_input_grad)
        if grad is None:
            return (None,) * count
        state, call = ctx.saved_tensors[:4], _Call(*ctx.saved_tensors[4:], *ctx.rest)
        needed = [*ctx.needs_input_grad[1:4], ctx.needs_input_grad[5]]
        with torch.autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled():
                to = _plain_gradients(grad, call, needed)
            else:
                to = ctx.backward_pass(grad, state, call, needed)
        return None, *to[:3], None, to[3], *(None for _ in range(count - 6))


# -- operators, for graphs -------------------------------------------------------------------------------------------


def _in_graph(*args: Any) -> tuple[Tensor, ...]:
    """The results of the operator; by the formula if there is no kernel when the graph runs."""
    try:
        output, *state = _forward(_Call(*args[:_SIZE]), args[-1])
    except kernels.NotCompiledError:
        return _in_torch_operations(*args)
    return output, *(state or _empty(*args)[1:])


def _empty(*args: Any) -> tuple[Tensor, ...]:
    """The results, not filled in."""
    query, _, value, mask, alpha, number, _, _, _, dropout, _, keep = args
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    exact = torch.promote_types(query.dtype, torch.float32)
    a = number if alpha is None else alpha
    shapes = _shapes(query, value, a, mask, dropout) if keep else dict.fromkeys(_STATE, (0,))
    types = {name: torch.int32 if name == "used" else exact for name in _STATE}
    return output, *(query.new_empty(shapes[name], dtype=types[name]) for name in _STATE)


def _shapes(*args: Any) -> dict[str, tuple[int, ...]]:
    from fenchel.kernels.gpu.attention import state_shapes  # which imports Triton

    return state_shapes(*args)


def _in_torch_operations(*args: Any) -> tuple[Tensor, ...]:
    """The results by torch operations. What the backward pass needs is zero, because it does not read it."""
    return _plain(_Call(*args[:_SIZE])), *(torch.zeros_like(each) for each in _empty(*args)[1:])


def _with_derivatives(*args: Any) -> Any:
    if tracks(*args):
        return apply_function(_Fused, (_below, _backward_below), *args)
    return _below(_Call(*args[:_SIZE]), args[-1])


def _below(call: _Call, keep: bool) -> Any:
    with below_autograd():
        return _operator(*call, keep)


def _backward_below(grad: Tensor, state: Sequence[Tensor], call: _Call, needed: Sequence[bool]) -> list[Tensor | None]:
    with below_autograd():
        found = _backward_operator(grad, *state, *call, needed)
    return [t if n else None for t, n in zip(found, needed, strict=True)]


def _backward_in_graph(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return or_empty(_backward(grad, rest[:4], _Call(*rest[4:-1]), rest[-1]), rest[-1], grad)


def _backward_empty(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    wanted = *rest[4:7], rest[8]
    found = [t.new_empty(t.shape) if n else None for t, n in zip(wanted, rest[-1], strict=True)]
    return or_empty(found, rest[-1], grad)


def _backward_in_torch_operations(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return or_empty(_plain_gradients(grad, _Call(*rest[4:-1]), rest[-1]), rest[-1], grad)


def _backward_with_derivatives(*args: Any) -> Any:
    if tracks(*args):
        return _backward_in_torch_operations(*args)
    with below_autograd():
        return _backward_operator(*args)


_operator = define_operator(
    "fused_attend",
    f"({_TENSORS}, {_REST}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _in_graph,
    _empty,
    _with_derivatives,
    decomposition=_in_torch_operations,
)
_backward_operator = define_operator(
    "fused_attend_backward",
    f"(Tensor grad, {', '.join(f'Tensor {name}' for name in _STATE)}, {_TENSORS}, {_REST}, bool[] needed)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_in_graph,
    _backward_empty,
    _backward_with_derivatives,
    decomposition=_backward_in_torch_operations,
)
