"""RowMap: the mathematics of an Ω on rows, and the derivative rules that all of them share.

A map writes down its mathematics on rows (the last dimension, masked entries at −inf, largest score 0): how to solve
for argmax_Ω, and how to differentiate it *given the answer*. With the parameters a of Ω:

* J = ∂ argmax_Ω / ∂ scores is the Hessian of Ω*, hence symmetric: one product serves both modes;
* ∂ max_Ω / ∂ scores = argmax_Ω, and ∂ max_Ω / ∂ a follows from the envelope theorem.

Every rule is written with differentiable operations on p, which is itself an output of the rule: derivatives of all
orders are right. Eager mode runs the ``autograd.Function`` directly, which is faster; under ``torch.compile`` and
``torch.export`` the same Function runs behind a registered operator, which stays one node of the graph, and so do the
products of its backward pass. Kernels are looked up in ``kernels.find`` when the step runs; where there is none, the
torch operations below compute.

The file is long because the class, its autograd.Functions and its operators call each other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._operators import define_operator, rows_first
from fenchel._torch import (
    apply_function,
    below_autograd,
    concrete,
    known,
    local_rows,
    nested_forward_mode,
    outside,
    tracks,
    tracks_forward,
)
from fenchel.regularizers.rows import from_rows, parameter_rows, shifted, to_rows

Parameter = float | Tensor
"""A parameter of Ω: a number, or a tensor of the scores' rank with size 1 along the last dimension."""


class RowMap(ABC):
    """The mathematics of one Ω on the rows of a tensor, and everything that follows from it.

    Subclasses set ``name`` and write the abstract methods. ``*a`` are the parameters of Ω, in the precision of the rows
    and expanded to one value per row; a number where it is one for all rows.
    """

    name: str
    """The name by which kernels and operators find the map."""

    traceable: bool = True
    """Whether the torch operations of ``solve`` do not depend on the data, so that a graph can hold them."""

    def keeps_scores(self, *a: Any) -> bool:
        """Whether derivatives read the scores, and not the answer alone; if not, z is None in them."""
        return False

    # -- the mathematics, written by each map ------------------------------------------------------

    @abstractmethod
    def value(self, p: Tensor, *a: Any, masked: Tensor | None = None) -> Tensor:
        """Ω(p), one value per row, differentiable in p and a.

        Args:
            p: rows.
            a: the parameters.
            masked: which entries do not take part, boolean, for an Ω to which that matters; None if all do.
        """

    @abstractmethod
    def solve(self, z: Tensor, *a: Any) -> Tensor:
        """argmax_Ω of rows whose largest score is 0, in torch operations. Called without a graph."""

    @abstractmethod
    def product(self, v: Tensor, z: Any, p: Tensor, *a: Any) -> Tensor:
        """J v at p = argmax_Ω(z), differentiable in all arguments."""

    @abstractmethod
    def pull(self, v: Tensor, z: Any, p: Tensor, *a: Any) -> tuple[Tensor | None, ...]:
        """J v, and v times the derivative of p in each parameter, of its shape; differentiable."""

    @abstractmethod
    def push(self, dz: Tensor | None, da: tuple[Tensor | None, ...], z: Any, p: Tensor, *a: Any) -> Tensor:
        """The derivative of p along a direction of the scores and of the parameters; None stands for zero."""

    @abstractmethod
    def envelope(self, z: Any, p: Tensor, *a: Any) -> tuple[Tensor, ...]:
        """The derivative of max_Ω in each parameter, of its shape, at p = argmax_Ω(z); differentiable."""

    # -- what comes out of it ----------------------------------------------------------------------

    def choose(self, scores: Tensor, dim: int, mask: Tensor | None, name: str, *a: Any) -> Tensor:
        """argmax_Ω of scores along a dimension.

        Args:
            scores: any shape.
            dim: the dimension to choose along.
            mask: boolean, or None.
            name: of the parameters, for errors.
            a: the parameters, checked: numbers, or tensors that broadcast to the scores.
        """
        # The usual case first: for small inputs the time of a call is that of its Python lines.
        if mask is None and dim == -1 and type(scores) is Tensor:
            chosen = kernels.choose(self.name, a, scores)
            if chosen is not None:
                return chosen
        rows = to_rows(scores, dim, mask)
        return from_rows(self.argmax(rows, *(parameter_rows(each, name, scores, dim) for each in a)), scores, dim)

    def argmax(self, z: Tensor, *a: Any) -> Tensor:
        """argmax_Ω of rows, with derivatives of every order that exists."""
        part = local_rows(z)
        if part is not None and not any(isinstance(each, Tensor) for each in a):
            rows, whole = part
            return whole(self.argmax(rows, *a))
        a = self.align(z, *a)
        if torch.compiler.is_compiling():
            in_graph: Tensor = argmax_operator(z, *pack(a), self.name)
            return in_graph
        chosen: Tensor = apply_function(_Argmax, self, z, *a) if tracks(z, *a) else self.solve_any(z, *a)
        return chosen

    def max(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        """max_Ω of rows given ``p = self.argmax(z, *a)``."""
        a = self.align(z, *a)
        if torch.compiler.is_compiling():
            in_graph: Tensor = max_operator(z, p, *pack(a), self.name)
            return in_graph
        maximum: Tensor = apply_function(_Max, self, z, p, *a)
        return maximum

    def class_loss(self, z: Tensor, index: Tensor, *a: Any) -> Tensor:
        """max_Ω(z) − z at an index, one value per row: 0 where the index is negative, +inf where its score is −inf."""
        a = self.align(z, *a)
        residual = tracks(z, *a)
        if torch.compiler.is_compiling():
            results = class_loss_operator(z, index, residual, *pack(a), self.name)
        elif residual:
            results = apply_function(_ClassLoss, self, z, index, residual, *a)
        else:
            results = self.class_loss_any(z, index, residual, *a)
        loss: Tensor = results[0]
        return loss

    def attained(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        """⟨p, z⟩ − Ω(p): the value of max_Ω, without derivatives. −inf where nothing may be chosen."""
        if known(z) and z.numel() and bool(z.amin() > -torch.inf):  # nothing is masked
            return (p * z).sum(-1) - self.value(p, *a)
        masked = z == -torch.inf
        value = torch.where(p == 0, 0.0, p * z).sum(-1) - self.value(p, *a, masked=masked)
        return torch.where(masked.all(-1), -torch.inf, value)

    def attained_any(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        """``attained``, by a kernel if there is one."""
        kernel = None if tracks(z, p, *a) else kernels.find("max", self.name, a, z, p)
        value: Tensor = (self.attained if kernel is None else kernel)(z, p, *a)
        return value

    def target_value(self, y: Tensor, *a: Any, masked: Tensor | None = None) -> Tensor:
        """``value`` of a target of the loss, by a kernel if there is one."""
        kernel = None if tracks(y, *a) else kernels.find("value", self.name, a, y)
        return self.value(y, *a, masked=masked) if kernel is None else kernel(y, *a)

    def align(self, z: Tensor, *a: Any) -> tuple[Any, ...]:
        """Parameters in the precision of the rows, tensors with one value per row: every rule may assume it."""
        aligned = list(a)
        for i, each in enumerate(a):
            if isinstance(each, Tensor):
                aligned[i] = each.to(z.dtype).expand(*z.shape[:-1], 1)
            elif each > torch.finfo(z.dtype).max:
                aligned[i] = math.inf
        return tuple(aligned)

    # -- kernels where there are some --------------------------------------------------------------

    def solve_any(self, z: Tensor, *a: Any) -> Tensor:
        """argmax_Ω on any rows: zeros where all is masked, NaN where a score is NaN or +inf. Without a graph."""
        kernel = kernels.find("argmax", self.name, a, z)
        if kernel is not None:
            chosen: Tensor = kernel(z, *a)
            return chosen
        return self.solve_plainly(z, *a)

    def solve_plainly(self, z: Tensor, *a: Any) -> Tensor:
        """``solve_any`` in torch operations."""
        top = z.amax(-1, keepdim=True)
        gone = top - top  # 0, or NaN where the largest score is not finite
        unusable = gone != 0
        p = self.solve(z - top.masked_fill(unusable, 0.0), *a)
        return torch.where(unusable, gone.masked_fill(top == -torch.inf, 0.0), p)

    def jacobian(self, v: Tensor, z: Any, p: Tensor, *a: Any) -> Tensor:
        """``product``, by a kernel if there is one and no derivative of the product is needed."""
        product: Tensor = self._differentiate("product", v, z, p, *a)
        return product

    def pull_any(self, v: Tensor, z: Any, p: Tensor, *a: Any) -> tuple[Tensor | None, ...]:
        """``pull``, by a kernel if there is one and no derivative of its results is needed."""
        pulled: tuple[Tensor | None, ...] = self._differentiate("pull", v, z, p, *a)
        return pulled[: 1 + len(a)]

    def _differentiate(self, step: str, v: Tensor, z: Any, p: Tensor, *a: Any) -> Any:
        if not tracks(v, z, p, *a):
            if torch.compiler.is_compiling() and _rules.get(self.name) is self:
                return (product_operator if step == "product" else pull_operator)(v, z, p, *pack(a), self.name)
            kernel = kernels.find(step, self.name, a, v, p, *(() if z is None else (z,)))
            if kernel is not None:
                return kernel(v, z, p, *a)
        return getattr(self, step)(v, z, p, *a)

    def class_loss_any(self, z: Tensor, index: Tensor, residual: bool, *a: Any) -> tuple[Tensor, Tensor]:
        """``class_loss`` and, if asked for, its gradient p − y in the scores; else an empty tensor. Without a graph."""
        kernel = kernels.find("class_loss", self.name, a, z) if concrete(index) else None
        results: tuple[Tensor, Tensor] = (self.class_loss_plainly if kernel is None else kernel)(z, index, residual, *a)
        return results

    def class_loss_plainly(self, z: Tensor, index: Tensor, residual: bool, *a: Any) -> tuple[Tensor, Tensor]:
        """``class_loss_any`` in torch operations."""
        kept = index >= 0
        z, _ = shifted(torch.where(kept.unsqueeze(-1), z, 0.0))  # the scores of ignored rows do not matter
        place = index.clamp_min(0).unsqueeze(-1)
        reached = z.gather(-1, place).squeeze(-1)
        impossible = reached == -torch.inf
        p = self.argmax(z, *a)
        loss = finish_loss(self.max(z, p, *a), torch.where(impossible, 0.0, reached), impossible)
        loss = torch.where(kept, loss, 0.0)
        return loss, _residual(p, place, kept, ~impossible) if residual else z.new_empty(0)

    # -- rules for the autograd.Functions ----------------------------------------------------------

    def pull_max(self, grad: Tensor, z: Any, p: Tensor, *a: Any) -> tuple[Tensor | None, ...]:
        """The gradient of max_Ω in the parameters, given that of its value, (…, 1)."""
        return tuple(grad * each for each in self.envelope(z, p, *a))

    def push_max(self, da: tuple[Tensor | None, ...], z: Any, p: Tensor, *a: Any) -> Tensor:
        """The derivative of max_Ω along a direction of the parameters, one value per row."""
        total = torch.zeros_like(p[..., 0])
        for change, slope in zip(da, self.envelope(z, p, *a), strict=True):
            total = total if change is None else total + (change * slope).sum(-1)
        return total

    def map_over(
        self, function: type[torch.autograd.Function], info: Any, in_dims: Sequence[int | None], rows: int, args: Any
    ) -> tuple[Tensor, int]:
        """The vmap rule of a Function of this map: rows are independent, so a mapped dimension is one more in front.

        Args:
            function: of the map and ``args``.
            info: the first argument of the rule.
            in_dims: which dimension of each argument is mapped.
            rows: how many of the arguments are rows; the others are parameters.
            args: the arguments.
        """
        return apply_function(function, self, *rows_first(info, in_dims, args)), 0


class ParameterMap(RowMap):
    """A RowMap over the simplex with one parameter a.

    From differentiating ∇Ω(p) + μ1 = scores: ∂ argmax_Ω / ∂a = −J ∂ₐ∇Ω(p), and ∂ max_Ω / ∂a = −∂ₐΩ(p).
    """

    zero_at_vertices: bool = True
    """Whether Ω is zero at one-hot vectors."""

    def attained(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        value = super().attained(z, p, *a)
        # The choice of the best vertex attains its score, so rounding may not push the maximum below it.
        return torch.maximum(value, z.amax(-1)) if self.zero_at_vertices else value

    @abstractmethod
    def value_sensitivity(self, z: Any, p: Tensor, *a: Any) -> Tensor:
        """∂Ω(p)/∂a with p held fixed, one value per row (dimension kept)."""

    @abstractmethod
    def gradient_sensitivity(self, z: Any, p: Tensor, *a: Any) -> Tensor:
        """∂∇Ω(p)/∂a with p held fixed, up to a constant per row; anything finite where p = 0."""

    def pull(self, v: Tensor, z: Any, p: Tensor, *a: Any) -> tuple[Tensor | None, ...]:
        # J is symmetric. Taken of the sensitivity it is moderate, taken of v it may be huge and cancel here.
        change = self.jacobian(self.gradient_sensitivity(z, p, *a), z, p, *a)
        return self.jacobian(v, z, p, *a), -saturated_sum(on_support(v, p) * change), *(None for _ in a[1:])

    def push(self, dz: Tensor | None, da: tuple[Tensor | None, ...], z: Any, p: Tensor, *a: Any) -> Tensor:
        direction = torch.zeros_like(p) if dz is None else dz
        if da[0] is not None:
            direction = direction - da[0] * self.gradient_sensitivity(z, p, *a)
        return self.product(direction, z, p, *a)

    def envelope(self, z: Any, p: Tensor, *a: Any) -> tuple[Tensor, ...]:
        kernel = None if tracks(p, *a) else kernels.find("envelope", self.name, a, p)
        slope = -self.value_sensitivity(z, p, *a) if kernel is None else kernel(p, *a)
        return slope, *(torch.zeros_like(p[..., :1]) for _ in a[1:])


def finish_loss(
    maximum: Tensor, reached: Tensor, impossible: Tensor, value: float | Tensor = 0.0, at_target: Tensor | None = None
) -> Tensor:
    """The Fenchel-Young loss max_Ω − ⟨scores, y⟩ + Ω(y), one value per row, from its terms.

    Args:
        maximum: max_Ω; −inf where there is nothing to choose from, so that any target is impossible.
        reached: ⟨scores, y⟩ over the entries that are not masked.
        impossible: whether y has mass where it is masked: such a row has loss +inf.
        value: Ω(y).
        at_target: whether y is known to be the choice, so that the loss is zero; None if that is not known.
    """
    loss = torch.where(maximum == -torch.inf, 0.0, maximum) - reached + value
    # Rounding can leave the sum just below zero, or above it at the target; the gradient is right as it is.
    excess = loss.clamp_max(0) if at_target is None else torch.where(at_target, loss, loss.clamp_max(0))
    # Added, not chosen: the other classes of an impossible row keep their gradient, as in cross_entropy.
    return loss - excess.detach() + torch.where(impossible, torch.inf, 0.0)


def on_support(v: Tensor, p: Tensor) -> Tensor:
    """v where p > 0, 0 where p = 0 (whatever v is there), NaN where p is NaN."""
    return torch.where(p > 0, v, p.detach())


def saturate(x: Tensor) -> Tensor:
    """x with the largest number of its dtype in place of infinity."""
    limit = torch.finfo(x.dtype).max
    return x.clamp(-limit, limit)


def saturated_sum(x: Tensor) -> Tensor:
    """Sum along the last dimension, which is kept; what overflows is the largest number instead of inf or NaN."""
    unit = 0.5 ** x.shape[-1].bit_length()  # a power of two: nothing is rounded
    return saturate((unit * saturate(x)).sum(-1, keepdim=True) / unit)


# -- the autograd.Functions ------------------------------------------------------------------------------------------


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


class _Argmax(torch.autograd.Function):
    @staticmethod
    def forward(rule: RowMap, z: Tensor, *a: Any) -> Tensor:
        return rule.solve_any(z, *a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rule, z, *a = inputs
        remember(ctx, z if ctx.rule.keeps_scores(*a) else None, output, *a)
        # Where only max_Ω is differentiated there is no gradient here: zeros in its place would be plain tensors, also
        # for a DTensor, and their product would be computed in vain.
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
        return rule.map_over(_Argmax, info, in_dims[1:], 1, (z, *a))


class _Max(torch.autograd.Function):
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
        return rule.map_over(_Max, info, in_dims[1:], 2, (z, p, *a))


class _ClassLoss(torch.autograd.Function):
    """The loss of class indices, and its gradient p − y in the scores, which comes out of the same pass."""

    @staticmethod
    def forward(rule: RowMap, z: Tensor, index: Tensor, residual: bool, *a: Any) -> tuple[Tensor, Tensor]:
        return rule.class_loss_any(z, index, residual, *a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.rule, z, index, _, *a = inputs
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
        if not torch.is_grad_enabled() and not any(needed):
            return None, grad * residual, None, None, *(None for _ in a)
        to_scores, *to_a = _class_loss_slopes(ctx.rule, z, index, any(needed), *a)
        gradients = (grad * each if is_needed else None for each, is_needed in zip(to_a, needed, strict=True))
        return None, grad * to_scores, None, None, *gradients

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, __: None, ___: None, *da: Tensor | None) -> tuple[Tensor, None]:
        with nested_forward_mode():
            z, index, _, *a = map(outside, recall(ctx))
            slopes = _class_loss_slopes(ctx.rule, z, index, any(each is not None for each in da), *a)
            changes = ((dx, slope) for dx, slope in zip((dz, *da), slopes, strict=True) if dx is not None)
            return torch.stack([(dx * slope).sum(-1) for dx, slope in changes]).sum(0), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: RowMap, *args: Any) -> tuple[Any, int]:
        return rule.map_over(_ClassLoss, info, in_dims[1:], 3, args)


def _class_loss_slopes(rule: RowMap, z: Tensor, index: Tensor, learns: bool, *a: Any) -> tuple[Tensor, ...]:
    """The gradient of the loss in the scores and in the parameters (zero unless asked for); differentiable."""
    kept = index >= 0
    place = index.clamp_min(0).unsqueeze(-1)
    scores = torch.where(kept.unsqueeze(-1), z, 0.0)
    p = rule.argmax(scores, *a)
    residual = _residual(p, place, kept, z.detach().gather(-1, place).squeeze(-1) > -torch.inf)
    envelope = rule.envelope(scores, p, *a) if learns else (torch.zeros_like(p[..., :1]) for _ in a)
    return residual, *(torch.where(kept.unsqueeze(-1), each, 0.0) for each in envelope)


def _residual(p: Tensor, place: Tensor, kept: Tensor, possible: Tensor) -> Tensor:
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


# -- the operators, which stay whole in graphs -----------------------------------------------------------------------

_rules: dict[str, RowMap] = {}
_MISSING = math.nan  # stands for a parameter that a map does not have


def register_map(rule: RowMap) -> None:
    """Let a map be part of graphs, under its name."""
    _rules[rule.name] = rule


def registered_map(name: str) -> RowMap:
    """The map of this name, for operators, which cannot take it as an argument."""
    return _rules[name]


def pack(a: tuple[Any, ...]) -> tuple[Any, ...]:
    """Up to two parameters as operators take them: each a tensor and a number, of which one counts."""
    packed: list[Any] = []
    for each in (*a, *(_MISSING for _ in range(2 - len(a)))):
        packed += [each, 0.0] if isinstance(each, Tensor) else [None, float(each)]
    return tuple(packed)


def _unpack(*args: Any) -> tuple[Any, ...]:
    """The map and its arguments, from those of an operator."""
    *rest, first, first_number, second, second_number, name = args
    pairs = ((first, first_number), (second, second_number))
    a = [number if tensor is None else tensor for tensor, number in pairs]
    return _rules[name], *rest, *(each for each in a if isinstance(each, Tensor) or each == each)


class _ArgmaxInGraph(_Argmax):
    """The same rules when the operator is called: the forward pass is the operator itself, below autograd."""

    @staticmethod
    def forward(rule: RowMap, z: Tensor, *a: Any) -> Tensor:
        with below_autograd():
            chosen: Tensor = argmax_operator(z, *pack(a), rule.name)
        return chosen


class _MaxInGraph(_Max):
    @staticmethod
    def forward(rule: RowMap, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        with below_autograd():
            maximum: Tensor = max_operator(z, p, *pack(a), rule.name)
        return maximum


class _ClassLossInGraph(_ClassLoss):
    @staticmethod
    def forward(rule: RowMap, z: Tensor, index: Tensor, residual: bool, *a: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            results: tuple[Tensor, Tensor] = class_loss_operator(z, index, residual, *pack(a), rule.name)
        return results


def _define(
    step: str,
    arguments: str,
    results: str,
    compute: Callable[..., Any],
    differentiable: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Register a step of all maps as ``fenchel::{step}``, whose last arguments are the parameters and name of a map.

    Args:
        step: the name of the operator.
        arguments: those before the parameters, as in a schema.
        results: as in a schema.
        compute: called with the map, the arguments and the parameters: the result without derivatives.
        differentiable: called as ``compute``: the result with derivatives.
        fake: called with the arguments of the operator: tensors of the right shape.
    """

    def by_rule(*args: Any) -> Any:
        return compute(*_unpack(*args))

    def with_derivatives(*args: Any) -> Any:
        if tracks(*args):
            return differentiable(*_unpack(*args))
        with below_autograd():
            return operator(*args)

    def decomposition(*args: Any) -> Any:
        return by_rule(*args) if _rules[args[-1]].traceable else NotImplemented

    parameters = "Tensor? first, float first_number, Tensor? second, float second_number, str name"
    schema = f"({arguments}, {parameters}) -> {results}"
    operator = define_operator(step, schema, by_rule, fake, with_derivatives, decomposition=decomposition)
    return operator


def _same_shape(tensor: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _pulled(results: tuple[Tensor | None, ...], *a: Any) -> tuple[Tensor, ...]:
    """What ``pull`` returns as three tensors, empty where a parameter is a number or missing."""
    to_scores = results[0]
    assert to_scores is not None
    to_a = [t if isinstance(each, Tensor) else None for t, each in zip(results[1:], a, strict=True)]
    to_a += [None] * (2 - len(a))
    return to_scores, *(to_scores.new_empty(0) if t is None else t for t in to_a)


def _loss_and_residual(rule: RowMap, z: Tensor, index: Tensor, residual: bool, *a: Any) -> tuple[Tensor, Tensor]:
    loss, slope = rule.class_loss_any(z, index, residual, *a)
    return loss, slope if residual else z.new_empty(0)  # kernels need not agree on the shape of what is empty


argmax_operator = _define(
    "argmax",
    "Tensor z",
    "Tensor",
    lambda rule, *args: rule.solve_any(*args),
    partial(apply_function, _ArgmaxInGraph),
    _same_shape,
)
max_operator = _define(
    "max",
    "Tensor z, Tensor p",
    "Tensor",
    lambda rule, *args: rule.attained_any(*args),
    partial(apply_function, _MaxInGraph),
    lambda z, *_: z.new_empty(z.shape[:-1]),
)
product_operator = _define(
    "product",
    "Tensor v, Tensor? z, Tensor p",
    "Tensor",
    lambda rule, *args: rule.jacobian(*args),
    lambda rule, *args: rule.product(*args),
    _same_shape,
)
pull_operator = _define(
    "pull",
    "Tensor v, Tensor? z, Tensor p",
    "(Tensor, Tensor, Tensor)",
    lambda rule, v, z, p, *a: _pulled(rule.pull_any(v, z, p, *a), *a),
    lambda rule, v, z, p, *a: _pulled(rule.pull(v, z, p, *a), *a),
    lambda v, z, p, first, _, second, *__: tuple(
        v.new_empty(0) if t is None else _same_shape(t) for t in (v, first, second)
    ),
)
class_loss_operator = _define(
    "class_loss",
    "Tensor z, Tensor index, bool residual",
    "(Tensor, Tensor)",
    _loss_and_residual,
    partial(apply_function, _ClassLossInGraph),
    lambda z, index, residual, *_: (z.new_empty(z.shape[:-1]), _same_shape(z) if residual else z.new_empty(0)),
)
