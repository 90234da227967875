"""The engine: a family of Ω with one parameter, and the derivative rules that all families share.

A family writes down its mathematics on rows (the last dimension, masked entries at −inf, largest score 0):
how to solve for argmax_Ω, and how to multiply by its Jacobian *given the answer*. The derivatives follow:

* J = ∂ argmax_Ω / ∂ scores is the Hessian of Ω*, hence symmetric: one product serves both modes;
* ∂ argmax_Ω / ∂ a = −J ∂ₐ∇Ω(p) for a parameter a of Ω, from differentiating ∇Ω(p) + μ1 = scores;
* ∂ max_Ω / ∂ scores = argmax_Ω and ∂ max_Ω / ∂ a = −∂ₐΩ(p), the envelope theorem.

Every rule is written with differentiable operations on p, which is itself an output of the rule: derivatives
of all orders are right. Eager mode runs the ``autograd.Function`` directly, which is faster; under ``torch.compile``
and ``torch.export`` the same Function runs behind a registered operator, which stays one node of the graph.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fenchel import kernels
from fenchel.regularizers.rows import from_rows, parameter_rows, shifted, to_rows

Parameter = float | Tensor
"""A parameter of Ω: a number, or a tensor of the scores' rank with size 1 along the last dimension."""


class Family(ABC):
    """One family of regularizers on the rows of a tensor.

    Subclasses set ``name`` and write the abstract methods; instantiating registers the operators
    ``fenchel::{name}_argmax`` and ``fenchel::{name}_max``.
    """

    name: str
    kernel: str | None = None
    """The map's name in ``kernels.maps``, if it is compiled for the CPU …"""
    steep: float | None = None
    """Up to this, the parameter's own gradient has a kernel too."""
    compiled: tuple[tuple[float, float], ...] = ()
    """… and for parameters of which intervals."""

    def __init__(self) -> None:
        self._argmax_op = _register(self, "argmax", "Tensor z", self._solve_any, _same_shape, _ArgmaxInGraph)
        self._max_op = _register(self, "max", "Tensor z, Tensor p", self.attained, _one_a_row, _MaxInGraph)

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

    def choose(self, scores: Tensor, a: Parameter, dim: int, mask: Tensor | None) -> Tensor:
        """argmax_Ω of scores along a dimension; ``a`` as ``check_parameter`` gives it."""
        # Small inputs feel every line that is passed by here.
        simple = mask is None and dim == -1 and type(a) is float and self.covers(a)
        if simple and kernels.plain(scores) and scores.dim() and scores.shape[-1]:
            return self._by_kernel("", a, scores)
        rows = to_rows(scores, dim, mask)
        return from_rows(self.argmax(rows, parameter_rows(a, "alpha", scores, dim)), scores, dim)

    def argmax(self, z: Tensor, a: Parameter) -> Tensor:
        """argmax_Ω of rows, with derivatives of every order that exists."""
        a = _full_rank(a, z)
        if torch.compiler.is_compiling():
            return self._argmax_op(z, *_pack(a))
        return apply_function(_Argmax, self, z, a) if tracks(z, a) else self._solve_any(z, a)

    def max(self, z: Tensor, p: Tensor, a: Parameter) -> Tensor:
        """max_Ω of rows given ``p = self.argmax(z, a)``."""
        a = _full_rank(a, z)
        return self._max_op(z, p, *_pack(a)) if torch.compiler.is_compiling() else apply_function(_Max, self, z, p, a)

    def hits(self, z: Tensor, index: Tensor, a: Parameter) -> Tensor:
        """max_Ω(z) − z at an index, one value a row: 0 where the index is negative, +inf where its score is −inf."""
        a = _full_rank(a, z)
        if not tracks_forward() and self._is_compiled(a, z) and kernels.concrete(index):
            return apply_function(_Hits, self, z, index, a)
        kept = index >= 0
        z, _ = shifted(torch.where(kept.unsqueeze(-1), z, 0.0))  # what stands in a row that is left out does not matter
        maximum = self.max(z, self.argmax(z, a), a)
        maximum = torch.where(maximum == -torch.inf, 0.0, maximum)  # nothing to choose from: any target is impossible
        reached = z.gather(-1, index.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        impossible = reached == -torch.inf
        value = maximum - torch.where(impossible, 0.0, reached)
        # Added, not chosen: the other classes of such a row keep their gradient, as in cross_entropy.
        return torch.where(kept, value + torch.where(impossible, torch.inf, 0.0), 0.0)

    def attained(self, z: Tensor, p: Tensor, a: Parameter) -> Tensor:
        """⟨p, z⟩ − Ω(p): the value of max_Ω, without derivatives. −inf where nothing may be chosen."""
        score = torch.where(p == 0, 0.0, p * z).sum(-1)
        best = z.amax(-1)
        # The choice of the best vertex attains `best`, so rounding may not push the maximum below it.
        value = torch.maximum(score - self.value(p, a), best)
        return torch.where(best == -torch.inf, best, value)

    def covers(self, a: Parameter) -> bool:
        """Whether a parameter is known, without waiting for a device, to be one that is compiled for."""
        if not isinstance(a, Tensor):
            for low, high in self.compiled:  # noqa: SIM110 (small inputs feel a generator)
                if low <= a <= high:
                    return True
            return False
        if a.device.type != "cpu" or not kernels.concrete(a):
            return False
        inside = [(a >= low) & (a <= high) for low, high in self.compiled]
        return bool(inside) and bool(functools.reduce(torch.logical_or, inside).all())

    def _is_compiled(self, a: Parameter, *tensors: Tensor) -> bool:
        return self.kernel is not None and kernels.usable(*tensors) and self.covers(a)

    def _by_kernel(self, suffix: str, a: Parameter, *tensors: Tensor) -> Tensor:
        """A kernel of the family's, which wants c = a − 1."""
        return _kernel(f"{self.kernel}{suffix}")(*tensors, a - 1)

    def _product(self, v: Tensor, p: Tensor, a: Parameter) -> Tensor:
        """J v in a backward pass; only higher derivatives want to differentiate it, which a kernel cannot."""
        if not tracks(v, p, a) and self._is_compiled(a, v, p):
            return self._by_kernel("_product", a, v, p)
        return self.jacobian_product(v, p, a)

    def _parameter_product(self, v: Tensor, p: Tensor, a: Tensor) -> Tensor:
        """⟨v, ∂p/∂a⟩ in a backward pass, one value a row."""
        known = self.steep is not None and not tracks(v, p, a) and self._is_compiled(a, v, p)
        if known and bool((a <= self.steep).all()):  # type: ignore[operator]
            return self._by_kernel("_alpha", a, v, p)
        # J is symmetric. Taken of the sensitivity it is moderate, taken of v it may be huge and cancel here.
        change = self._product(self.gradient_sensitivity(p, a), p, a)
        return -saturated_sum(on_support(v, p) * change)

    def _solve_any(self, z: Tensor, a: Parameter) -> Tensor:
        """``solve`` on any rows: zeros where all is masked, NaN where a score is NaN or +inf."""
        if self._is_compiled(a, z):
            return self._by_kernel("", a, z)
        top = z.amax(-1, keepdim=True)
        usable = top.isfinite()
        p = self.solve(z - torch.where(usable, top, 0.0), a)
        return torch.where(usable, p, torch.where(top == -torch.inf, 0.0, torch.nan))


@functools.cache
def _kernel(name: str) -> Callable[..., Tensor]:
    """A compiled map; the compiler is imported by the first that is asked for."""
    from fenchel.kernels import maps

    found: Callable[..., Tensor] = getattr(maps, name)
    return found


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
    return apply_function(_FiniteGradient, x) if isinstance(x, Tensor) else x


def _full_rank(a: Parameter, z: Tensor) -> Parameter:
    """A parameter in the precision of the rows, a tensor expanded to one value a row: every rule may assume it."""
    if isinstance(a, Tensor):
        return a.to(z.dtype).expand(*z.shape[:-1], 1)
    return math.inf if a > torch.finfo(z.dtype).max else a


def rows_first(info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[Any]:
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
    def forward(family: Family, z: Tensor, a: Parameter) -> Tensor:
        return family._solve_any(z, a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Family, Tensor, Parameter], output: Tensor) -> None:
        ctx.family, _, a = inputs
        _remember(ctx, output, a)
        # Where only max_Ω is differentiated there is no gradient here: zeros in its place would be plain tensors, also
        # for a DTensor, and their product would be computed in vain.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None, Tensor | None]:
        if grad is None:
            return None, None, None
        p, a = _recall(ctx)
        if tracks(grad, p, a):
            p, a = _with_finite_gradient(p), _with_finite_gradient(a)
        to_scores = ctx.family._product(grad, p, a)
        if not ctx.needs_input_grad[2]:
            return None, to_scores, None
        return None, to_scores, ctx.family._parameter_product(grad, p, a)

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, da: Tensor | None) -> Tensor:
        p, a = _recall(ctx)
        with forward_ad._set_fwd_grad_enabled(True):
            p, a = outside(p), outside(a)
            direction = torch.zeros_like(p) if dz is None else dz
            if da is not None:
                direction = direction - da * ctx.family.gradient_sensitivity(p, a)
            product: Tensor = ctx.family.jacobian_product(direction, p, a)
        return product

    @staticmethod
    def vmap(info: Any, in_dims: Any, family: Family, z: Tensor, a: Parameter) -> tuple[Tensor, int]:
        return apply_function(_Argmax, family, *rows_first(info, in_dims[1:], (z, a))), 0


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(family: Family, z: Tensor, p: Tensor, a: Parameter) -> Tensor:
        return family.attained(z, p, a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Family, Tensor, Tensor, Parameter], output: Tensor) -> None:
        ctx.family, _, p, a = inputs
        _remember(ctx, p, a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, Tensor | None]:
        p, a = _recall(ctx)
        grad = grad.unsqueeze(-1)
        if not ctx.needs_input_grad[3]:
            return None, grad * p, None, None
        return None, grad * p, None, -grad * ctx.family.value_sensitivity(p, a)

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, dp: Tensor | None, da: Tensor | None) -> Tensor:
        p, a = _recall(ctx)
        with forward_ad._set_fwd_grad_enabled(True):
            p, a = outside(p), outside(a)
            change = torch.zeros_like(p) if dz is None else p * dz
            total = change.sum(-1)
            if da is not None:
                total = total - (da * ctx.family.value_sensitivity(p, a)).squeeze(-1)
        return total

    @staticmethod
    def vmap(info: Any, in_dims: Any, family: Family, z: Tensor, p: Tensor, a: Parameter) -> tuple[Tensor, int]:
        return apply_function(_Max, family, *rows_first(info, in_dims[1:], (z, p, a))), 0


class _Hits(torch.autograd.Function):
    """max_Ω − a score in one pass of a kernel, which leaves the gradient p − y behind."""

    @staticmethod
    def forward(ctx: Any, family: Family, z: Tensor, index: Tensor, a: Parameter) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        loss: Tensor
        loss, ctx.residual = _kernel(f"{family.kernel}_loss")(z, index, a - 1, wanted)
        ctx.family, ctx.number = family, None if isinstance(a, Tensor) else a
        ctx.save_for_backward(z, index, *((a,) if isinstance(a, Tensor) else ()))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        z, index, *rest = ctx.saved_tensors
        a = rest[0] if rest else ctx.number
        kept = (index >= 0).unsqueeze(-1)
        grad = torch.where(kept, grad.unsqueeze(-1), 0.0)  # even if it is NaN, as for the mean of nothing
        if not torch.is_grad_enabled() and not ctx.needs_input_grad[3]:
            return None, grad * ctx.residual, None, None
        p = torch.where(kept, ctx.family.argmax(torch.where(kept, z, 0.0), a), 0.0)
        place = index.clamp_min(0).unsqueeze(-1)
        hit = kept & (z.detach().gather(-1, place) > -torch.inf)
        to_scores = grad * (p - torch.zeros_like(p).scatter(-1, place, hit.to(p.dtype)))
        if not ctx.needs_input_grad[3]:
            return None, to_scores, None, None
        change = torch.where(kept, ctx.family.value_sensitivity(p, a), 0.0)
        return None, to_scores, None, -grad * change


class _ArgmaxInGraph(_Argmax):
    """The same rules when the operator is called: the forward pass is the operator itself, below autograd."""

    @staticmethod
    def forward(family: Family, z: Tensor, a: Parameter) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return family._argmax_op(z, *_pack(a))


class _MaxInGraph(_Max):
    @staticmethod
    def forward(family: Family, z: Tensor, p: Tensor, a: Parameter) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return family._max_op(z, p, *_pack(a))


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """``function.apply``, faster."""
    result: Tensor
    if torch._C._are_functorch_transforms_active():
        result = function.apply(*args)  # type: ignore[no-untyped-call]
    else:  # what `apply` comes to, without its look at the signature, which takes as long as a small kernel
        result = super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return result


def tracks_forward() -> bool:
    """Whether forward mode or a transformation of functions is at work."""
    return forward_ad._current_level >= 0 or bool(torch._C._are_functorch_transforms_active())


def tracks(*args: Any) -> bool:
    """Whether a derivative in either mode could be asked of tensors."""
    if tracks_forward():
        return True
    if torch.is_grad_enabled():
        for t in args:
            if isinstance(t, Tensor) and t.requires_grad:
                return True
    return False


def _remember(ctx: Any, p: Tensor, a: Parameter) -> None:
    ctx.number = None if isinstance(a, Tensor) else a
    saved = (p, a) if isinstance(a, Tensor) else (p,)
    ctx.save_for_backward(*saved)
    if tracks_forward():
        ctx.save_for_forward(*saved)


def _recall(ctx: Any) -> tuple[Tensor, Any]:
    p, *rest = ctx.saved_tensors
    return p, rest[0] if rest else ctx.number


def outside(saved: Any) -> Any:
    """A saved tensor as the level of forward mode around this one sees it.

    Torch turns forward mode off inside ``jvp``, so that nested levels would silently get zero; with it turned on
    again, inputs must not bring the tangents that this level is just propagating.
    """
    return forward_ad.unpack_dual(saved).primal if isinstance(saved, Tensor) else saved  # type: ignore[no-untyped-call]


_LIBRARY: Any = torch.library.Library("fenchel", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register(
    family: Family,
    verb: str,
    tensors: str,
    compute: Callable[..., Tensor],
    like: Callable[[Tensor], Tensor],
    function: type[torch.autograd.Function],
) -> Callable[..., Tensor]:
    """Register ``fenchel::{family}_{verb}``: the computation, its shape, its vmap rule, and its derivatives.

    The derivatives are the autograd.Function's own, forward mode included, which ``register_autograd`` would drop.
    """
    name = f"{family.name}_{verb}"
    _LIBRARY.define(f"{name}({tensors}, Tensor? tensor, float number) -> Tensor")
    # Contiguous, whatever the input: the strides of a result are part of what the shape rule promises.
    _LIBRARY.impl(name, lambda *args: compute(*_unpack(*args)).contiguous(), "CompositeExplicitAutograd")
    _LIBRARY.impl(name, lambda *args: apply_function(function, family, *_unpack(*args)), "Autograd")
    operator: Callable[..., Tensor] = getattr(torch.ops.fenchel, name).default
    torch.library.register_fake(f"fenchel::{name}", lambda z, *_: like(z), lib=_LIBRARY)
    torch.library.register_vmap(
        f"fenchel::{name}",
        lambda info, in_dims, *args: (operator(*rows_first(info, in_dims, args)), 0),
        lib=_LIBRARY,
    )
    return operator


def _pack(a: Parameter) -> tuple[Tensor | None, float]:
    """A parameter as operators take it: a tensor, or else a number."""
    return (a, 0.0) if isinstance(a, Tensor) else (None, float(a))


def _unpack(*args: Any) -> tuple[Any, ...]:
    *rest, tensor, number = args
    return *rest, number if tensor is None else tensor


def _same_shape(z: Tensor) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _one_a_row(z: Tensor) -> Tensor:
    return z.new_empty(z.shape[:-1])
