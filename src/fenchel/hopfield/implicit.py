"""Derivatives through a fixed point: one linear system instead of all the updates that led there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fenchel._torch import apply_function

KRYLOV = 64
"""The number of directions that are kept before a restart."""

RESTARTS = 10


def attach(step: Callable[[Tensor], Tensor], point: Tensor, query: Tensor) -> Tensor:
    r"""A fixed point q* = f(q*, w) as a differentiable function of all that ``step`` reads.

    .. math:: \frac{\partial q^*}{\partial w} = (I - J)^{-1} \frac{\partial f}{\partial w}, \qquad
        J = \frac{\partial f}{\partial q}

    The gradient of the query that led there is zero: all queries nearby lead to the same point. Derivatives of second
    order, and forward mode, raise.

    Args:
        step: f(·, w), of rows (R, D).
        point: (R, D), fixed points of it.
        query: where the search began, of any shape.
    """
    state = step(point)
    fixed: Tensor = apply_function(_Fixed, state, query, step)
    return fixed


class _Fixed(torch.autograd.Function):
    """Identity on f(q*, w) in the forward pass; the backward pass multiplies by (I − J)⁻ᵀ."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, query: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.step, ctx.shape = step, query.shape
        ctx.save_for_backward(state)
        return state.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("implicit derivatives are of first order: for create_graph=True pass implicit=False")
        point = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            new = ctx.step(point)

        def product(v: Tensor) -> Tensor:
            found = torch.autograd.grad(new, point, v, retain_graph=True, allow_unused=True)[0]
            return torch.zeros_like(v) if found is None else found

        query = grad.new_zeros(ctx.shape) if ctx.needs_input_grad[1] else None
        return solve(product, grad), query, None


def solve(product: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    """Solve u − product(u) = b for each row by GMRES, all rows at once.

    Exact after one round more than the rank of the product. At a pattern that is retrieved exactly the product is zero.
    """
    u = torch.zeros_like(b)
    scale = torch.linalg.vector_norm(b, dim=-1, keepdim=True)
    tol = 100 * torch.finfo(b.dtype).eps
    residual = b
    for _ in range(RESTARTS):
        u = u + _krylov(product, residual, tol * scale)
        residual = b - (u - product(u))
        gap = torch.linalg.vector_norm(residual, dim=-1, keepdim=True)
        if not bool((gap > tol * scale).any()):
            return u
    if not bool((gap <= 1e3 * tol * scale).all()):
        raise RuntimeError(
            "the fixed point has no derivative: I − J is singular or nearly so there, or it is NaN; use implicit=False"
        )
    return u


def _krylov(product: Callable[[Tensor], Tensor], r: Tensor, enough: Tensor) -> Tensor:
    """The best correction for a residual r in the space of r, Ar, A²r, …, with A = I − product."""
    length = torch.linalg.vector_norm(r, dim=-1, keepdim=True)
    basis = [_unit(r, length)]
    columns: list[Tensor] = []
    for _ in range(min(KRYLOV, r.shape[-1])):
        w = basis[-1] - product(basis[-1])
        heights = w.new_zeros(len(r), KRYLOV + 1)
        for _ in range(2):  # a second time removes what rounding left
            for i, v in enumerate(basis):
                along = (w * v).sum(-1)
                heights[:, i] += along
                w = w - along.unsqueeze(-1) * v
        length_w = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
        # The rest of a vector in the span is rounding, and not a direction.
        length_w = torch.where(length_w > 8 * torch.finfo(r.dtype).eps, length_w, 0.0)
        heights[:, len(basis)] = length_w.squeeze(-1)
        columns.append(heights)
        if not bool((length_w * length > enough).any()):
            break
        basis.append(_unit(w, length_w))
    rank = len(columns)
    hessenberg = torch.stack(columns, -1)[:, : rank + 1]
    target = r.new_zeros(len(r), rank + 1, 1)
    target[:, 0] = length
    y = torch.linalg.pinv(hessenberg) @ target
    correction: Tensor = (torch.stack(basis[:rank], -1) @ y).squeeze(-1)
    return correction


def _unit(v: Tensor, length: Tensor) -> Tensor:
    """Vectors divided by their lengths; zero where the length is zero."""
    return torch.where(length > 0, v / torch.where(length > 0, length, 1.0), 0.0)
