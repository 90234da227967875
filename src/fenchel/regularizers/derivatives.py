"""Derivatives of every RowMap, given the answer: one autograd.Function per step, for both modes and vmap.

Every rule is written with differentiable operations on p, which is itself an output of the rule: derivatives of all
orders are right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import apply_function, is_simple, nested_forward_mode, outside, tracks, tracks_forward

if TYPE_CHECKING:
    from fenchel.regularizers.rowmap import RowMap


def on_support(v: Tensor, p: Tensor) -> Tensor:
    """v where p > 0, 0 where p = 0 (whatever v is there), NaN where p is NaN."""
    return torch.where(p > 0, v, p.detach())


def split_finite(a: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor of parameters with 2 in place of infinities, and where it is finite."""
    finite = a != torch.inf
    return torch.where(finite, a, 2.0), finite


def saturate(x: Tensor) -> Tensor:
    """x with the largest number of its dtype in place of infinity."""
    limit = torch.finfo(x.dtype).max
    return x.clamp(-limit, limit)


def saturated_sum(x: Tensor) -> Tensor:
    """Sum along the last dimension, which is kept; what overflows is the largest number instead of inf or NaN."""
    unit = 0.5 ** x.shape[-1].bit_length()  # a power of two: nothing is rounded
    return saturate((unit * saturate(x)).sum(-1, keepdim=True) / unit)


class _FiniteGradient(torch.autograd.Function):
    """Identity whose derivatives are finite numbers: where terms overflow, the largest number or, for inf − inf, 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return saturate(torch.where(grad.isnan(), 0.0, grad))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def _with_finite_gradient(x: Any) -> Any:
    return apply_function(_FiniteGradient, x) if isinstance(x, Tensor) and x.is_floating_point() else x


class Argmax(torch.autograd.Function):
    """argmax_Ω of rows."""

    @staticmethod
    def forward(rule: RowMap, z: Tensor, *a: Any) -> Tensor:
        return rule.solve_any(z, *a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rule, z, *a = inputs
        remember(ctx, z if ctx.rule.keeps_scores(*a) else None, output, *a)
        # Where only max_Ω is differentiated there is no gradient here: zeros in its place would be plain tensors, also
        # for a DTensor, and their product is not needed.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        if grad is None:
            return (None,) * (2 + len(needed))
        z, p, *a = recall(ctx)
        rule: RowMap = ctx.rule
        if tracks(grad, p, *a):
            p, a = _with_finite_gradient(p), [_with_finite_gradient(each) for each in a]
        if not any(needed):
            return None, rule.jacobian(grad, z, p, *a), *(None for _ in a)
        to_scores, *to_a = rule.pull_any(grad, z, p, *a)
        return None, to_scores, *(each if is_needed else None for each, is_needed in zip(to_a, needed, strict=True))

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, *da: Tensor | None) -> Tensor:
        with nested_forward_mode():
            z, p, *a = map(outside, recall(ctx))
            rule: RowMap = ctx.rule
            if dz is not None and all(each is None for each in da):
                return rule.product(dz, z, p, *a)
            return rule.push(dz, da, z, p, *a)

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: RowMap, z: Tensor, *a: Any) -> tuple[Tensor, int]:
        return rule.map_over(Argmax, info, in_dims[1:], 1, (z, *a))


class Max(torch.autograd.Function):
    """max_Ω of rows, given argmax_Ω."""

    @staticmethod
    def forward(rule: RowMap, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        return rule.attained_any(z, p, *a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rule, z, p, *a = inputs
        remember(ctx, z if ctx.rule.keeps_scores(*a) else None, p, *a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, p, *a = recall(ctx)
        grad = grad.unsqueeze(-1)
        needed = ctx.needs_input_grad[3:]
        if not any(needed):
            return None, grad * p, None, *(None for _ in a)
        to_a = ctx.rule.pull_max(grad, z, p, *a)
        return (
            None,
            grad * p,
            None,
            *(each if is_needed else None for each, is_needed in zip(to_a, needed, strict=True)),
        )

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, dp: Tensor | None, *da: Tensor | None) -> Tensor:
        with nested_forward_mode():
            z, p, *a = map(outside, recall(ctx))
            total = (torch.zeros_like(p) if dz is None else p * dz).sum(-1)
            if any(each is not None for each in da):
                total = total + ctx.rule.push_max(da, z, p, *a)
        return total

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: RowMap, z: Tensor, p: Tensor, *a: Any) -> tuple[Tensor, int]:
        return rule.map_over(Max, info, in_dims[1:], 2, (z, p, *a))


class ClassLoss(torch.autograd.Function):
    """The loss of class indices, and its gradient p − y in the scores, which comes out of the same pass.

    ``residual`` may be a kernel of the loss given p, for parameters that learn: then p itself is the second result.
    """

    @staticmethod
    def forward(rule: RowMap, z: Tensor, index: Tensor, residual: Any, *a: Any) -> tuple[Tensor, Tensor]:
        if callable(residual):
            p = rule.solve_any(z, *a)
            return residual(z, p, index, *a), p
        return rule.class_loss_any(z, index, residual, *a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.rule, z, index, residual, *a = inputs
        ctx.has_choice = callable(residual)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        remember(ctx, z, index, output[1], *a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[4:]
        if grad is None:
            return (None,) * (4 + len(needed))
        z, index, residual, *a = recall(ctx)
        grad = torch.where(index >= 0, grad, 0.0).unsqueeze(-1)  # even if it is NaN, as for the mean of nothing
        if ctx.has_choice and not torch.is_grad_enabled() and not tracks_forward():
            to_scores, to_a = _slopes_at(ctx.rule, grad, z, index, residual, *a)
        elif not ctx.has_choice and not torch.is_grad_enabled() and not any(needed):
            if residual.dtype not in kernels.HALF:
                return None, grad * residual, None, None, *(None for _ in a)
            return None, torch.mul(grad, residual, out=torch.empty_like(residual)), None, None, *(None for _ in a)
        else:
            slope, *slopes = _class_loss_slopes(ctx.rule, z, index, any(needed), *a)
            to_scores, to_a = grad * slope, tuple(grad * each for each in slopes)
        gradients = (each if is_needed else None for each, is_needed in zip(to_a, needed, strict=True))
        return None, to_scores, None, None, *gradients

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, __: None, ___: None, *da: Tensor | None) -> tuple[Tensor, None]:
        with nested_forward_mode():
            z, index, _, *a = map(outside, recall(ctx))
            slopes = _class_loss_slopes(ctx.rule, z, index, any(each is not None for each in da), *a)
            changes = ((dx, slope) for dx, slope in zip((dz, *da), slopes, strict=True) if dx is not None)
            return torch.stack([(dx * slope).sum(-1) for dx, slope in changes]).sum(0), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: RowMap, *args: Any) -> tuple[Any, int]:
        return rule.map_over(ClassLoss, info, in_dims[1:], 3, args)


class ReducedClassLoss(torch.autograd.Function):
    """The mean or the sum of the losses of class indices ≥ 0, for numbers as parameters and reverse mode alone.

    The gradient of the scores is what the forward pass left, for a result whose own is 1: it is handed out once, and
    computed anew if it is asked for again.
    """

    @staticmethod
    def forward(ctx: Any, rule: RowMap, z: Tensor, index: Tensor, mean: bool, *a: float) -> Tensor:
        ctx.rule, ctx.a, ctx.share = rule, a, 1 / index.numel() if mean else 1.0
        loss, ctx.residual = rule.class_loss_any(z, index, ctx.share, *a)
        ctx.save_for_backward(z, index)
        return loss.mean() if mean else loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        residual, ctx.residual = ctx.residual, None
        nothing = (None,) * len(ctx.a)
        if torch.is_grad_enabled():
            z, index = ctx.saved_tensors
            residual, *_ = _class_loss_slopes(ctx.rule, z, index, False, *ctx.a)
            return None, grad * ctx.share * residual, None, None, *nothing
        if residual is None or tracks_forward():
            _, residual = ctx.rule.class_loss_any(*ctx.saved_tensors, ctx.share, *ctx.a)
            return None, grad * residual, None, None, *nothing
        is_one = is_simple(grad) and float(grad) == 1
        return None, residual if is_one else residual.mul_(grad), None, None, *nothing


class SoftLoss(torch.autograd.Function):
    """The losses of probabilities y, without derivatives in y, for numbers as parameters and reverse mode alone."""

    @staticmethod
    def forward(ctx: Any, rule: RowMap, kernel: Any, z: Tensor, y: Tensor, *a: float) -> Tensor:
        p = rule.solve_any(z, *a)
        loss: Tensor = kernel(z, p, y, *a)
        ctx.rule, ctx.a, ctx.residual = rule, a, p
        ctx.save_for_backward(z, y)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        residual, (z, y) = ctx.residual, ctx.saved_tensors
        if torch.is_grad_enabled() or tracks_forward():
            residual = ctx.rule.argmax(z, *ctx.a) - y
        return None, None, grad.unsqueeze(-1) * residual, None, *(None for _ in ctx.a)


def _slopes_at(
    rule: RowMap, grad: Tensor, z: Tensor, index: Tensor, p: Tensor, *a: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradients of the loss in the scores and in the parameters, given p, from that of the loss, (…, 1)."""
    kept, place = (index >= 0).unsqueeze(-1), index.clamp_min(0).unsqueeze(-1)
    possible = kept & (z.gather(-1, place) > -torch.inf)
    to_scores = p.scatter_add(-1, place, -possible.to(p.dtype)).mul_(grad)
    if not bool(kept.all()):
        to_scores = torch.where(kept, to_scores, 0.0)
    slopes = rule.envelope(z if rule.keeps_scores(*a) else None, p, *a)
    return to_scores, tuple(torch.where(kept, grad * each, 0.0) for each in slopes)


def _class_loss_slopes(rule: RowMap, z: Tensor, index: Tensor, learns: bool, *a: Any) -> tuple[Tensor, ...]:
    """The gradient of the loss in the scores and in the parameters (zero unless asked for); differentiable."""
    kept = index >= 0
    place = index.clamp_min(0).unsqueeze(-1)
    scores = torch.where(kept.unsqueeze(-1), z.to(kernels.exact_dtype(z)), 0.0)
    p = rule.argmax(scores, *a)
    residual = residual_at(p, place, kept, z.detach().gather(-1, place).squeeze(-1) > -torch.inf)
    envelope = rule.envelope(scores, p, *a) if learns else (torch.zeros_like(p[..., :1]) for _ in a)
    return residual, *(torch.where(kept.unsqueeze(-1), each, 0.0) for each in envelope)


def residual_at(p: Tensor, place: Tensor, kept: Tensor, possible: Tensor) -> Tensor:
    """p − y with y one-hot at an index (…, 1), or 0 where that is not possible; 0 in rows that are not kept."""
    y = torch.zeros_like(p).scatter(-1, place, possible.unsqueeze(-1).to(p.dtype))
    return torch.where(kept.unsqueeze(-1), p - y, 0.0)


def remember(ctx: Any, *args: Any) -> None:
    """Save tensors for derivatives in both modes, and other arguments beside them."""
    tensors: list[Tensor] = []
    others: list[Any] = []
    for each in args:
        if isinstance(each, Tensor):
            tensors.append(each)
            others.append(None)
        else:
            others.append((each,))
    ctx.others = others
    ctx.save_for_backward(*tensors)
    if tracks_forward():
        ctx.save_for_forward(*tensors)


def recall(ctx: Any) -> list[Any]:
    """What was remembered."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if other is None else other[0] for other in ctx.others]
