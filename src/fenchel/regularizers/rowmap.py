"""RowMap: the mathematics of an Ω on rows, and the derivative rules that all of them share.

A map writes down its mathematics on rows (the last dimension, masked entries at −inf, largest score 0): how to solve
for argmax_Ω, and how to differentiate it *given the answer*. With the parameters a of Ω:

* J = ∂ argmax_Ω / ∂ scores is the Hessian of Ω*, hence symmetric: one product serves both modes;
* ∂ max_Ω / ∂ scores = argmax_Ω, and ∂ max_Ω / ∂ a follows from the envelope theorem.

Every rule is written with differentiable operations on p, which is itself an output of the rule: derivatives of all
orders are right. Eager mode runs the ``autograd.Function`` directly, which is faster; under ``torch.compile`` and
``torch.export`` the same Function runs behind a registered operator, which stays one node of the graph. Kernels are
looked up in ``kernels.find``; where there is none, the torch operations below compute.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import (
    apply_function,
    below_autograd,
    concrete,
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
    """What kernels and operators know it by."""

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
        # Small inputs feel every line that is passed by here.
        if mask is None and dim == -1 and type(scores) is Tensor and type(a[0]) is float and not tracks(scores):
            kernel = kernels.find("argmax", self.name, a, scores)
            if kernel is not None and scores.dim() and scores.shape[-1]:
                chosen: Tensor = kernel(scores, *a)
                return chosen
        rows = to_rows(scores, dim, mask)
        return from_rows(self.argmax(rows, *(parameter_rows(each, name, scores, dim) for each in a)), scores, dim)

    def argmax(self, z: Tensor, *a: Any) -> Tensor:
        """argmax_Ω of rows, with derivatives of every order that exists."""
        a = self.align(z, *a)
        if torch.compiler.is_compiling():
            return argmax_operator(z, *pack(a), self.name)
        chosen: Tensor = apply_function(_Argmax, self, z, *a) if tracks(z, *a) else self.solve_any(z, *a)
        return chosen

    def max(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        """max_Ω of rows given ``p = self.argmax(z, *a)``."""
        a = self.align(z, *a)
        if torch.compiler.is_compiling():
            return _max_operator(z, p, *pack(a), self.name)
        maximum: Tensor = apply_function(_Max, self, z, p, *a)
        return maximum

    def class_loss(self, z: Tensor, index: Tensor, *a: Any) -> Tensor:
        """max_Ω(z) − z at an index, one value per row: 0 where the index is negative, +inf where its score is −inf."""
        a = self.align(z, *a)
        if not tracks_forward() and concrete(index):
            kernel = kernels.find("class_loss", self.name, a, z)
            if kernel is not None:
                loss: Tensor = apply_function(_ClassLoss, self, kernel, z, index, *a)
                return loss
        kept = index >= 0
        z, _ = shifted(torch.where(kept.unsqueeze(-1), z, 0.0))  # what stands in a row that is left out does not matter
        reached = z.gather(-1, index.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        impossible = reached == -torch.inf
        maximum = self.max(z, self.argmax(z, *a), *a)
        return torch.where(kept, finish_loss(maximum, torch.where(impossible, 0.0, reached), impossible), 0.0)

    def attained(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        """⟨p, z⟩ − Ω(p): the value of max_Ω, without derivatives. −inf where nothing may be chosen."""
        masked = z == -torch.inf
        value = torch.where(p == 0, 0.0, p * z).sum(-1) - self.value(p, *a, masked=masked)
        return torch.where(masked.all(-1), -torch.inf, value)

    def target_value(self, y: Tensor, *a: Any, masked: Tensor | None = None) -> Tensor:
        """``value`` of a target of the loss."""
        return self.value(y, *a, masked=masked)

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
        """``product`` in a backward pass; only higher derivatives differentiate it, which a kernel cannot."""
        kernel = self._kernel("product", v, z, p, *a)
        product: Tensor = (self.product if kernel is None else kernel)(v, z, p, *a)
        return product

    def _kernel(self, step: str, v: Tensor, z: Any, p: Tensor, *a: Any) -> Callable[..., Any] | None:
        if tracks(v, z, p, *a):
            return None
        kernel: Callable[..., Any] | None = kernels.find(step, self.name, a, v, p, *(() if z is None else (z,)))
        return kernel

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
            info: what torch tells a vmap rule.
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
        return -self.value_sensitivity(z, p, *a), *(torch.zeros_like(p[..., :1]) for _ in a[1:])


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


def rows_first(info: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> list[Any]:
    """Arguments of a vmap rule with the mapped dimension in front."""
    moved: list[Any] = []
    for arg, dim in zip(args, in_dims, strict=True):
        if not isinstance(arg, Tensor):
            moved.append(arg)
        elif dim is None:
            moved.append(arg.expand(info.batch_size, *arg.shape))
        else:
            moved.append(arg.movedim(dim, 0))
    return moved


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
        kernel = rule._kernel("pull", grad, z, p, *a)
        to_scores, *to_a = (rule.pull if kernel is None else kernel)(grad, z, p, *a)
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
        return rule.attained(z, p, *a)

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
    """max_Ω − a score in one pass of a kernel, which leaves the gradient p − y behind."""

    @staticmethod
    def forward(ctx: Any, rule: RowMap, kernel: Callable[..., Any], z: Tensor, index: Tensor, *a: Any) -> Tensor:
        loss: Tensor
        loss, ctx.residual = kernel(z, index, any(ctx.needs_input_grad), *a)
        ctx.rule = rule
        remember(ctx, z, index, *a)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        z, index, *a = recall(ctx)
        kept = (index >= 0).unsqueeze(-1)
        needed = ctx.needs_input_grad[4:]
        grad = torch.where(kept, grad.unsqueeze(-1), 0.0)  # even if it is NaN, as for the mean of nothing
        if not torch.is_grad_enabled() and not any(needed):
            return None, None, grad * ctx.residual, None, *(None for _ in a)
        scores = torch.where(kept, z, 0.0)
        p = torch.where(kept, ctx.rule.argmax(scores, *a), 0.0)
        place = index.clamp_min(0).unsqueeze(-1)
        hit = kept & (z.detach().gather(-1, place) > -torch.inf)
        to_scores = grad * (p - torch.zeros_like(p).scatter(-1, place, hit.to(p.dtype)))
        if not any(needed):
            return None, None, to_scores, None, *(None for _ in a)
        to_a = (torch.where(kept, each, 0.0) for each in ctx.rule.envelope(scores, p, *a))
        pairs = zip(to_a, needed, strict=True)
        return None, None, to_scores, None, *(grad * each if is_needed else None for each, is_needed in pairs)


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

_LIBRARY: Any = torch.library.Library("fenchel", "FRAGMENT")  # type: ignore[no-untyped-call]
_PARAMETERS = "Tensor? first, float first_number, Tensor? second, float second_number, str name"
_rules: dict[str, RowMap] = {}
_MISSING = math.nan  # stands for a parameter that a map does not have


def register_map(rule: RowMap) -> None:
    """Let a map be part of graphs, under its name."""
    _rules[rule.name] = rule


class _ArgmaxInGraph(_Argmax):
    """The same rules when the operator is called: the forward pass is the operator itself, below autograd."""

    @staticmethod
    def forward(rule: RowMap, z: Tensor, *a: Any) -> Tensor:
        with below_autograd():
            return argmax_operator(z, *pack(a), rule.name)


class _MaxInGraph(_Max):
    @staticmethod
    def forward(rule: RowMap, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        with below_autograd():
            return _max_operator(z, p, *pack(a), rule.name)


def _define(
    step: str,
    tensors: str,
    compute: Callable[..., Tensor],
    like: Callable[[Tensor], Tensor],
    function: type[torch.autograd.Function],
) -> Callable[..., Tensor]:
    """Register ``fenchel::{step}``: the computation, its shape, its vmap rule, and its derivatives.

    The derivatives are the autograd.Function's own, forward mode included, which ``register_autograd`` would drop.
    """

    def by_rule(*args: Any) -> Tensor:
        # Contiguous, whatever the input: the strides of a result are part of what the shape rule promises.
        return compute(_rules[args[-1]], *_unpack(*args)).contiguous()

    def with_derivatives(*args: Any) -> Tensor:
        result: Tensor = apply_function(function, _rules[args[-1]], *_unpack(*args))
        return result

    _LIBRARY.define(f"{step}({tensors}, {_PARAMETERS}) -> Tensor")
    _LIBRARY.impl(step, by_rule, "CompositeExplicitAutograd")
    _LIBRARY.impl(step, with_derivatives, "Autograd")
    operator: Callable[..., Tensor] = getattr(torch.ops.fenchel, step).default
    torch.library.register_fake(f"fenchel::{step}", lambda z, *_: like(z), lib=_LIBRARY)
    torch.library.register_vmap(
        f"fenchel::{step}",
        lambda info, in_dims, *args: (operator(*rows_first(info, in_dims, args)), 0),
        lib=_LIBRARY,
    )
    return operator


def pack(a: tuple[Any, ...]) -> tuple[Any, ...]:
    """Up to two parameters as operators take them: each a tensor and a number, of which one counts."""
    packed: list[Any] = []
    for each in (*a, *(_MISSING for _ in range(2 - len(a)))):
        packed += [each, 0.0] if isinstance(each, Tensor) else [None, float(each)]
    return tuple(packed)


def _unpack(*args: Any) -> tuple[Any, ...]:
    *rest, first, first_number, second, second_number, _ = args
    pairs = ((first, first_number), (second, second_number))
    a = [number if tensor is None else tensor for tensor, number in pairs]
    return *rest, *(each for each in a if isinstance(each, Tensor) or each == each)


def _same_shape(z: Tensor) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _one_per_row(z: Tensor) -> Tensor:
    return z.new_empty(z.shape[:-1])


argmax_operator = _define("argmax", "Tensor z", lambda rule, *args: rule.solve_any(*args), _same_shape, _ArgmaxInGraph)
_max_operator = _define(
    "max", "Tensor z, Tensor p", lambda rule, *args: rule.attained(*args), _one_per_row, _MaxInGraph
)
