"""RowMap: the mathematics of an Ω on rows, and the derivative rules that all of them share.

A map writes down its mathematics on rows (the last dimension, masked entries at −inf, largest score 0): how to solve
for argmax_Ω, and how to differentiate it *given the answer*. With the parameters a of Ω:

* J = ∂ argmax_Ω / ∂ scores is the Hessian of Ω*, hence symmetric: one product serves both modes;
* ∂ max_Ω / ∂ scores = argmax_Ω, and ∂ max_Ω / ∂ a follows from the envelope theorem.

Every rule is written with differentiable operations on p, which is itself an output of the rule: derivatives of all
orders are right. Eager mode runs the autograd.Functions of ``derivatives`` directly, which is faster; under
``torch.compile`` and ``torch.export`` they run behind the operators of ``operators``, which stay one node of the graph,
and so do the products of the backward pass. Kernels are looked up in ``kernels.find`` when the step runs; where there
is none, the torch operations below compute.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._operators import rows_first
from fenchel._torch import apply_function, concrete, is_simple, known, tracks, tracks_forward
from fenchel.regularizers.derivatives import (
    Argmax,
    ClassLoss,
    Max,
    ReducedClassLoss,
    SoftLoss,
    on_support,
    residual_at,
    saturated_sum,
)
from fenchel.regularizers.operators import (
    argmax_operator,
    class_loss_operator,
    is_registered,
    max_operator,
    pack,
    product_operator,
    pull_operator,
)
from fenchel.regularizers.packed import map_parts
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

    zero_at_vertices: bool = False
    """Whether Ω is zero at one-hot vectors."""

    rounded_derivatives: bool = False
    """Whether derivatives may be computed from an answer that was rounded to half precision."""

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
        if mask is None and dim == -1 and type(scores) is Tensor and not scores.is_nested:
            kernel = kernels.find_again(self.name, a, scores)
            if kernel is not None:
                tracked = scores.requires_grad and torch.is_grad_enabled()
                try:
                    chosen: Tensor = apply_function(Argmax, self, scores, *a) if tracked else kernel(scores, *a)
                    return chosen
                except kernels.NotCompiledError:
                    pass

        def part(scores: Tensor, dim: int, mask: Tensor | None, **a: Any) -> Tensor:
            return self.choose(scores, dim, mask, name, *a.values())

        joined = map_parts(part, scores, dim, mask, (self.name, a[0], 1.0), **{name: a[0]})
        if joined is not None:
            return joined
        rows = to_rows(scores, dim, mask, as_they_are=self.reads("argmax", scores, *a))
        return from_rows(self.argmax(rows, *(parameter_rows(each, name, scores, dim) for each in a)), scores, dim)

    def reads(self, step: str, scores: Tensor, *a: Any) -> bool:
        """Whether a kernel takes scores in half precision as they are; derivatives then start from rounded results."""
        if getattr(scores, "dtype", None) not in kernels.HALF or not self.rounded_derivatives or tracks_forward():
            return False
        if torch.compiler.is_compiling():
            return kernels.offers(step, self.name, scores)
        return kernels.find(step, self.name, a, scores) is not None

    def argmax(self, z: Tensor, *a: Any) -> Tensor:
        """argmax_Ω of rows, with derivatives of every order that exists."""
        a = self.align(z, *a)
        if torch.compiler.is_compiling():
            in_graph: Tensor = argmax_operator(z, *pack(a), self.name)
            return in_graph
        chosen: Tensor = apply_function(Argmax, self, z, *a) if tracks(z, *a) else self.solve_any(z, *a)
        return chosen

    def max(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        """max_Ω of rows given ``p = self.argmax(z, *a)``."""
        a = self.align(z, *a)
        if torch.compiler.is_compiling():
            in_graph: Tensor = max_operator(z, p, *pack(a), self.name)
            return in_graph
        maximum: Tensor = apply_function(Max, self, z, p, *a)
        return maximum

    def class_loss(self, z: Tensor, index: Tensor, *a: Any) -> Tensor:
        """max_Ω(z) − z + Ω at an index, one value per row: 0 where it is negative, +inf where its score is −inf."""
        a = self.align(z, *a)
        residual = tracks(z, *a)
        if torch.compiler.is_compiling():
            results = class_loss_operator(z, index, residual, *pack(a), self.name)
        elif residual:
            results = apply_function(ClassLoss, self, z, index, self.loss_given(z, index, *a) or residual, *a)
        else:
            results = self.class_loss_any(z, index, residual, *a)
        loss: Tensor = results[0]
        return loss

    def reduced_class_loss(self, z: Tensor, index: Tensor, mean: bool, *a: Any) -> Tensor:
        """The mean or the sum of ``class_loss`` over all rows, of which none is left out."""
        whole = is_simple(z) and z.dtype not in kernels.HALF
        if whole and z.requires_grad and torch.is_grad_enabled() and all(type(each) is float for each in a):
            reduced: Tensor = apply_function(ReducedClassLoss, self, z, index, mean, *self.align(z, *a))
            return reduced
        loss = self.class_loss(z, index, *a)
        return loss.mean() if mean else loss.sum()

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
        return self.value(y, *a, masked=masked) if kernel is None else kernel(y, *self.align(y, *a))

    def align(self, z: Tensor, *a: Any) -> tuple[Any, ...]:
        """Parameters as rules take them: in the precision of the rows, or float32; tensors with one value per row."""
        aligned = list(a)
        dtype = kernels.exact_dtype(z)
        for i, each in enumerate(a):
            if isinstance(each, Tensor):
                aligned[i] = each.to(dtype).expand(*z.shape[:-1], 1)
            elif each > torch.finfo(dtype).max:
                aligned[i] = math.inf
        return tuple(aligned)

    # -- kernels where there are some --------------------------------------------------------------

    def solve_any(self, z: Tensor, *a: Any) -> Tensor:
        """argmax_Ω on any rows: zeros where all is masked, NaN where a score is NaN or +inf. Without a graph."""
        kernel = kernels.find("argmax", self.name, a, z)
        if kernel is not None:
            with contextlib.suppress(kernels.NotCompiledError):
                chosen: Tensor = kernel(z, *a)
                return chosen
        return self.solve_plainly(z.to(kernels.exact_dtype(z)), *a).to(z.dtype)

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
            if torch.compiler.is_compiling() and is_registered(self):
                return (product_operator if step == "product" else pull_operator)(v, z, p, *pack(a), self.name)
            kernel = kernels.find(step, self.name, a, v, p, *(() if z is None else (z,)))
            if kernel is not None:
                with contextlib.suppress(kernels.NotCompiledError):
                    return kernel(v, z, p, *a)
        if p.dtype not in kernels.HALF:
            return getattr(self, step)(v, z, p, *a)
        found = getattr(self, step)(v.float(), z, p.float(), *a)
        return found.to(v.dtype) if step == "product" else (found[0].to(v.dtype), *found[1:])

    def loss_given(self, z: Tensor, index: Tensor, *a: Any) -> Any:
        """The kernel of the loss given p, if a parameter is a tensor to learn and there is one; else None."""
        if not any(isinstance(each, Tensor) and each.requires_grad for each in a) or not concrete(index):
            return None
        return kernels.find("loss_given", self.name, tuple(map(_detached, a)), z)

    def soft_loss(self, z: Tensor, y: Tensor, *a: Any) -> Tensor | None:
        """The loss of probabilities y without derivatives in y, one value per row; None where no kernel serves it."""
        simple = is_simple(z) and is_simple(y) and not (y.requires_grad and torch.is_grad_enabled())
        if not simple or not z.numel() or not all(type(each) is float for each in a):
            return None
        kernel = kernels.find("loss_given", self.name, a, z, y)
        if kernel is None:
            return None
        least = float(z.detach().amin())
        if least == -math.inf or (math.isnan(least) and bool((z.detach() == -torch.inf).any())):
            return None
        loss: Tensor = apply_function(SoftLoss, self, kernel, z, y, *self.align(z, *a))
        return loss

    def class_loss_any(self, z: Tensor, index: Tensor, residual: float, *a: Any) -> tuple[Tensor, Tensor]:
        """``class_loss``, and residual·(p − y), its gradient in the scores at 1; for 0 it is empty. Without a graph."""
        kernel = kernels.find("class_loss", self.name, a, z) if concrete(index) else None
        if kernel is not None:
            with contextlib.suppress(kernels.NotCompiledError):
                results: tuple[Tensor, Tensor] = kernel(z, index, residual, *a)
                return results
        loss, slope = self.class_loss_plainly(z.to(kernels.exact_dtype(z)), index, residual, *a)
        return loss, slope.to(z.dtype)

    def class_loss_plainly(self, z: Tensor, index: Tensor, residual: float, *a: Any) -> tuple[Tensor, Tensor]:
        """``class_loss_any`` in torch operations."""
        kept = index >= 0
        z, _ = shifted(torch.where(kept.unsqueeze(-1), z, 0.0))  # the scores of ignored rows do not matter
        place = index.clamp_min(0).unsqueeze(-1)
        reached = z.gather(-1, place).squeeze(-1)
        impossible = reached == -torch.inf
        p = self.argmax(z, *a)
        at_class: float | Tensor = 0.0
        if not self.zero_at_vertices:
            y = torch.zeros_like(z).scatter(-1, place, 1.0)
            at_class = self.value(y, *a, masked=(z == -torch.inf) & (y == 0))
        loss = finish_loss(self.max(z, p, *a), torch.where(impossible, 0.0, reached), impossible, at_class)
        loss = torch.where(kept, loss, 0.0)
        if not residual:
            return loss, z.new_empty(0)
        slope = residual_at(p, place, kept, ~impossible)
        return loss, slope if residual == 1 else slope * residual

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


def _detached(parameter: Parameter) -> Parameter:
    return parameter.detach() if isinstance(parameter, Tensor) else parameter


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
