"""Attention by one kernel, on devices that have one: no matrix of weights in either pass.

The kernel takes tensors as they are: in half precision, strided or broadcast, with heads that share keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import apply_function, differentiable_gradients, tracks
from fenchel.regularizers.base import Regularizer
from fenchel.streaming.plan import MOST_FUSED, Problem

STEP, BACKWARD = "fused_attend", "fused_attend_backward"


def fused_attention(problem: Problem) -> Tensor:
    """Attention for checked arguments, (…, L, D).

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
    if isinstance(alpha, Tensor):
        alpha = alpha.to(torch.promote_types(query.dtype, torch.float32)).expand(*batch, 1, 1).reshape(*outer, groups)
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask / gamma
        mask = mask.expand(*batch, length, keys).reshape(*outer, groups, length, keys)
    seed = int(torch.randint(0, 2**31 - 1, (), device="cpu")) if dropout else 0
    options = {"causal": is_causal, "scale": scale / float(gamma), "dropout": dropout, "seed": seed}
    if tracks(q, k, v, alpha):
        output: Tensor = apply_function(_Fused, q, k, v, mask, alpha, base, options)
    else:
        output, _ = _kernel(STEP, base, alpha, q)(q, k, v, alpha, mask=mask, keep=False, **options)
    return output.reshape(*batch, length, value.shape[-1])


def _of_heads(tensor: Tensor, batch: Sequence[int], shared: int) -> Tensor:
    """Keys or values with the batch dimensions of the scores, and as many heads as there are sets of keys."""
    return tensor.expand(*batch[:-1], shared, *tensor.shape[-2:]) if batch else tensor


def _kernel(step: str, base: Regularizer, alpha: Any, like: Tensor) -> Any:
    number = alpha if not isinstance(alpha, Tensor) else MOST_FUSED
    kernel = kernels.find(step, base.name or "", (number,), like)
    if kernel is None:
        raise kernels.NotCompiledError(f"there is no kernel for {step}")
    return kernel


class _Fused(torch.autograd.Function):
    """The kernel and its backward pass. Second derivatives are those of the formula, with all weights."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        alpha: float | Tensor,
        base: Regularizer,
        options: dict[str, Any],
    ) -> Tensor:
        kernel = _kernel(STEP, base, alpha, query)
        output: Tensor
        output, state = kernel(query, key, value, alpha, mask=mask, keep=True, **options)
        ctx.base, ctx.options, ctx.number = base, options, None if isinstance(alpha, Tensor) else alpha
        ctx.save_for_backward(query, key, value, mask, alpha if isinstance(alpha, Tensor) else None, *state)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, alpha, *state = ctx.saved_tensors
        a = ctx.number if alpha is None else alpha
        needed = (*ctx.needs_input_grad[:3], ctx.needs_input_grad[4])
        with torch.autocast(query.device.type, enabled=False):
            if torch.is_grad_enabled():
                to = _plain_gradients(ctx.base, (query, key, value, a), mask, ctx.options, grad, needed)
            else:
                kernel = _kernel(BACKWARD, ctx.base, a, query)
                to = kernel(grad, state, query, key, value, a, mask=mask, needed=needed, **ctx.options)
                to[3] = None if to[3] is None else to[3].sum(-1).to(alpha.dtype)
        return *(t if n else None for t, n in zip(to[:3], needed[:3], strict=True)), None, to[3], None, None


def _plain_gradients(
    base: Regularizer,
    inputs: tuple[Any, ...],
    mask: Tensor | None,
    options: dict[str, Any],
    grad: Tensor,
    needed: Sequence[bool],
) -> list[Any]:
    """The gradients by the formula, which can be differentiated again."""
    if options["dropout"]:
        raise NotImplementedError("attention with dropout on a GPU is differentiable once")
    assert base.rule is not None
    rule = base.rule

    def formula(query: Tensor, key: Tensor, value: Tensor, a: Any) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        x = options["scale"] * query.to(exact) @ key.to(exact).transpose(-2, -1).unsqueeze(2)
        if mask is not None:
            x = torch.where(mask, x, -torch.inf) if mask.dtype == torch.bool else x + mask.to(exact)
        if options["causal"]:
            x = torch.where(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(), x, -torch.inf)
        p = rule.argmax(x, a[..., None, None].to(exact) if isinstance(a, Tensor) else a)
        return (p @ value.to(exact).unsqueeze(2)).to(query.dtype)

    return differentiable_gradients(formula, inputs, needed, (grad,))
