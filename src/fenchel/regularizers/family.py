"""The engine: a family of Ω with one parameter, and the derivative rules that all families share.

A family writes down its mathematics on rows (the last dimension, masked entries at −inf, largest score 0):
how to solve for argmax_Ω, and how to multiply by its Jacobian *given the answer*. The derivatives follow:

* J = ∂ argmax_Ω / ∂ scores is the Hessian of Ω*, hence symmetric: one product serves both modes;
* ∂ argmax_Ω / ∂ a = −J ∂ₐ∇Ω(p) for a parameter a of Ω, from differentiating ∇Ω(p) + μ1 = scores;
* ∂ max_Ω / ∂ scores = argmax_Ω and ∂ max_Ω / ∂ a = −∂ₐΩ(p), the envelope theorem.

Every rule is written with differentiable operations on p, which is itself an output of the rule: derivatives
of all orders are right. Eager mode runs an ``autograd.Function`` (forward mode, vmap); under ``torch.compile``
and ``torch.export`` the same functions run behind a registered operator, which stays one node of the graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

Parameter = float | Tensor
"""A parameter of Ω: a number, or a tensor of the scores' rank with size 1 along the last dimension."""


class Family(ABC):
    """One family of regularizers on the rows of a tensor.

    Subclasses set ``name`` and write the abstract methods; instantiating registers the operators
    ``fenchel::{name}_argmax`` and ``fenchel::{name}_max``.
    """

    name: str

    def __init__(self) -> None:
        self._argmax_op = _register_argmax(self)
        self._max_op = _register_max(self)

    # -- the mathematics, written by each family ---------------------------------------------------

    @abstractmethod
    def value(self, p: Tensor, a: Parameter) -> Tensor:
        """Ω(p), differentiable in ``p`` and ``a``; zero at one-hot vectors."""

    @abstractmethod
    def solve(self, z: Tensor, a: Parameter) -> Tensor:
        """argmax_Ω of finite rows whose largest score is 0. Called without a graph."""

    @abstractmethod
    def jacobian_product(self, v: Tensor, p: Tensor, a: Parameter) -> Tensor:
        """J v at p = argmax_Ω, differentiable in all arguments."""

    @abstractmethod
    def value_sensitivity(self, p: Tensor, a: Tensor) -> Tensor:
        """∂Ω(p)/∂a with p held fixed, one value a row (dimension kept)."""

    @abstractmethod
    def gradient_sensitivity(self, p: Tensor, a: Tensor) -> Tensor:
        """∂∇Ω(p)/∂a with p held fixed, up to a constant a row; anything finite where p = 0."""

    # -- what comes out of it ----------------------------------------------------------------------

    def argmax(self, z: Tensor, a: Parameter) -> Tensor:
        """argmax_Ω of rows, with derivatives of every order that exists."""
        a = _full_rank(a, z)
        if torch.compiler.is_compiling():
            result: Tensor = self._argmax_op(z, *_pack(a))
            return result
        return _Argmax.apply(self, z, a)

    def max(self, z: Tensor, p: Tensor, a: Parameter) -> Tensor:
        """max_Ω of rows given ``p = self.argmax(z, a)``."""
        a = _full_rank(a, z)
        if torch.compiler.is_compiling():
            result: Tensor = self._max_op(z, p, *_pack(a))
            return result
        return _Max.apply(self, z, p, a)

    def attained(self, z: Tensor, p: Tensor, a: Parameter) -> Tensor:
        """⟨p, z⟩ − Ω(p): the value of max_Ω, without derivatives. −inf where nothing may be chosen."""
        score = torch.where(p == 0, 0.0, p * z).sum(-1)
        best = z.amax(-1)
        # The choice of the best vertex attains `best`, so rounding may not push the maximum below it.
        value = torch.maximum(score - self.value(p, a), best)
        return torch.where(best == -torch.inf, best, value)

    def _solve_any(self, z: Tensor, a: Parameter) -> Tensor:
        """``solve`` on any rows: shifted by their maximum, zeros where all is masked, NaN where a score is NaN or +inf."""
        top = z.amax(-1, keepdim=True)
        usable = top.isfinite()
        p = self.solve(z - torch.where(usable, top, 0.0), a)
        return torch.where(usable, p, torch.where(top == -torch.inf, 0.0, torch.nan))

    def _argmax_vjp(self, grad: Tensor, p: Tensor, a: Parameter, wants_a: bool) -> tuple[Tensor, Tensor | None]:
        to_scores = self.jacobian_product(grad, p, a)
        if not (wants_a and isinstance(a, Tensor)):
            return to_scores, None
        to_a = -(to_scores * self.gradient_sensitivity(p, a)).sum(-1, keepdim=True)
        return to_scores, to_a

    def _max_vjp(self, grad: Tensor, p: Tensor, a: Parameter, wants_a: bool) -> tuple[Tensor, Tensor | None]:
        grad = grad.unsqueeze(-1)
        if not (wants_a and isinstance(a, Tensor)):
            return grad * p, None
        return grad * p, -grad * self.value_sensitivity(p, a)


def _full_rank(a: Parameter, z: Tensor) -> Parameter:
    """Expand a tensor parameter to one value a row, so that every rule can assume it."""
    return a.to(z.dtype).expand(*z.shape[:-1], 1) if isinstance(a, Tensor) else a


def _rows_first(info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[Any]:
    """The vmap rule: rows are independent, so a mapped dimension is one more leading dimension."""
    moved: list[Any] = []
    for arg, dim in zip(args, in_dims, strict=True):
        if not isinstance(arg, Tensor):
            moved.append(arg)
        elif dim is None:
            moved.append(arg.expand(info.batch_size, *arg.shape))
        else:
            moved.append(arg.movedim(dim, 0))
    return moved


class _Argmax(torch.autograd.Function):
    @staticmethod
    def forward(family: Family, z: Tensor, a: Parameter) -> Tensor:  # type: ignore[override]
        return family._solve_any(z, a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Family, Tensor, Parameter], output: Tensor) -> None:
        ctx.family, _, a = inputs
        _remember(ctx, a, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor | None]:  # type: ignore[override]
        (p,), a = _recall(ctx)
        return None, *ctx.family._argmax_vjp(grad, p, a, ctx.needs_input_grad[2])

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, da: Tensor | None) -> Tensor:  # type: ignore[override]
        (p,), a = _recall(ctx)
        direction = torch.zeros_like(p) if dz is None else dz
        if da is not None and isinstance(a, Tensor):
            direction = direction - da * ctx.family.gradient_sensitivity(p, a)
        return ctx.family.jacobian_product(direction, p, a)

    @staticmethod
    def vmap(info: Any, in_dims: Any, family: Family, z: Tensor, a: Parameter) -> tuple[Tensor, int]:  # type: ignore[override]
        return _Argmax.apply(family, *_rows_first(info, in_dims[1:], (z, a))), 0


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(family: Family, z: Tensor, p: Tensor, a: Parameter) -> Tensor:  # type: ignore[override]
        return family.attained(z, p, a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Family, Tensor, Tensor, Parameter], output: Tensor) -> None:
        ctx.family, _, p, a = inputs
        _remember(ctx, a, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, Tensor | None]:  # type: ignore[override]
        (p,), a = _recall(ctx)
        to_scores, to_a = ctx.family._max_vjp(grad, p, a, ctx.needs_input_grad[3])
        return None, to_scores, None, to_a

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, dp: Tensor | None, da: Tensor | None) -> Tensor:  # type: ignore[override]
        (p,), a = _recall(ctx)
        tangent = torch.zeros_like(p) if dz is None else p * dz
        if da is not None and isinstance(a, Tensor):
            return tangent.sum(-1) - (da * ctx.family.value_sensitivity(p, a)).squeeze(-1)
        return tangent.sum(-1)

    @staticmethod
    def vmap(info: Any, in_dims: Any, family: Family, z: Tensor, p: Tensor, a: Parameter) -> tuple[Tensor, int]:  # type: ignore[override]
        return _Max.apply(family, *_rows_first(info, in_dims[1:], (z, p, a))), 0


def _remember(ctx: Any, a: Parameter, *tensors: Tensor) -> None:
    ctx.number = None if isinstance(a, Tensor) else a
    saved = (*tensors, a) if isinstance(a, Tensor) else tensors
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)


def _recall(ctx: Any) -> tuple[tuple[Tensor, ...], Parameter]:
    saved = ctx.saved_tensors
    return (saved, ctx.number) if ctx.number is not None else (saved[:-1], saved[-1])


# -- the same rules behind registered operators, for graphs ---------------------------------------------

_PARAMETER = "Tensor? tensor, float number"


def _pack(a: Parameter) -> tuple[Tensor | None, float]:
    return (a, 0.0) if isinstance(a, Tensor) else (None, float(a))


def _unpack(tensor: Tensor | None, number: float) -> Parameter:
    return number if tensor is None else tensor


def _register_argmax(family: Family) -> Any:
    def forward(z: Tensor, tensor: Tensor | None, number: float) -> Tensor:
        return family._solve_any(z, _unpack(tensor, number))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, tensor, ctx.number = inputs
        ctx.save_for_backward(output, tensor)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        p, tensor = ctx.saved_tensors
        return *family._argmax_vjp(grad, p, _unpack(tensor, ctx.number), ctx.needs_input_grad[1]), None

    return _register(f"{family.name}_argmax", "Tensor z", forward, torch.empty_like, setup_context, backward)


def _register_max(family: Family) -> Any:
    def forward(z: Tensor, p: Tensor, tensor: Tensor | None, number: float) -> Tensor:
        return family.attained(z, p, _unpack(tensor, number))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, p, tensor, ctx.number = inputs
        ctx.save_for_backward(p, tensor)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        p, tensor = ctx.saved_tensors
        to_scores, to_a = family._max_vjp(grad, p, _unpack(tensor, ctx.number), ctx.needs_input_grad[2])
        return to_scores, None, to_a, None

    def row_values(z: Tensor) -> Tensor:
        return z.new_empty(z.shape[:-1])

    return _register(f"{family.name}_max", "Tensor z, Tensor p", forward, row_values, setup_context, backward)


def _register(name: str, tensors: str, forward: Any, like: Any, setup_context: Any, backward: Any) -> Any:
    """Register a row-wise operator with its shape rule, its vmap rule and its backward pass."""
    schema = f"({tensors}, {_PARAMETER}) -> Tensor"
    operator = torch.library.custom_op(f"fenchel::{name}", forward, mutates_args=(), schema=schema)
    operator.register_fake(lambda z, *_: like(z))
    operator.register_autograd(backward, setup_context=setup_context)
    operator.register_vmap(lambda info, in_dims, *args: (operator(*_rows_first(info, in_dims, args)), 0))
    return operator
