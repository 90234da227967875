r"""The engine of bounds and budgets: max ⟨p, z⟩ − Ω(p) over 0 ≤ p ≤ u with Σp = k, for an Ω that is a sum over entries.

Every entry is at zero, at its bound, or free. The free ones share a level μ = z − Ω′(p), and s = 1/Ω″(p) says how
readily each of them moves. Who gives or takes when the budget moves, w = ∂p/∂k = s/‖s‖₁, says the rest:

* ∂p/∂z = diag(s) − s wᵀ, which is symmetric, and ∂p/∂u = I − w1ᵀ for the entries that are held by their bound;
* ∂max/∂z = p, ∂max/∂k = μ, and ∂max/∂u = z − Ω′(u) − μ where held, the envelope theorem.

Where nothing is free p has a corner in u and k, and w is the mean of its two sides: the held entry that would give way
first, and the zero that would come in first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fenchel import kernels
from fenchel.regularizers.family import (
    Parameter,
    _full_rank,
    _one_a_row,
    _pack,
    _register,
    _same_shape,
    apply_function,
    outside,
    rows_first,
    tracks,
)
from fenchel.regularizers.thresholds import capped_projection, capped_softmax
from fenchel.regularizers.tsallis import Tsallis


class Bounds(NamedTuple):
    """Where p lives: 0 ≤ p ≤ upper (1 if None) with sum ``budget``, a number or one value a row."""

    upper: Tensor | None
    budget: Parameter


class Bounded(ABC):
    """One Ω over boxes and budgets, on the rows of a tensor (the last dimension, masked entries at −inf).

    Subclasses set ``name`` and ``alpha``, Tsallis' index of Ω; instantiating registers the operators
    ``fenchel::{name}_argmax`` and ``fenchel::{name}_max``.
    """

    name: str
    alpha: float

    def __init__(self) -> None:
        family: Any = self  # the registration wants no more of a family than its name
        inputs = "Tensor z, Tensor? upper"
        self._argmax_op = _register(family, "argmax", inputs, self._solve_any, _same_shape, _ArgmaxInGraph)
        inputs = "Tensor z, Tensor p, Tensor? upper"
        self._max_op = _register(family, "max", inputs, self.attained, _one_a_row, _MaxInGraph)

    # -- the mathematics, written by each Ω --------------------------------------------------------

    @abstractmethod
    def solve(self, z: Tensor, upper: Tensor, budget: Parameter) -> Tensor:
        """The maximizer for rows with a largest score; the bounds themselves where they cannot carry the budget."""

    @abstractmethod
    def compiled(self, z: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        """The maximizer for any rows on the CPU, by kernels."""

    @abstractmethod
    def slope(self, p: Tensor) -> Tensor:
        """Ω′(p), entry by entry."""

    @abstractmethod
    def mobility(self, p: Tensor) -> Tensor:
        """1/Ω″(p), entry by entry."""

    # -- what comes out of it ----------------------------------------------------------------------

    def value(self, p: Tensor, _: Bounds) -> Tensor:
        """Ω(p), one value a row."""
        return Tsallis.family.value(p, self.alpha)

    def argmax(self, z: Tensor, bounds: Bounds) -> Tensor:
        """The maximizer, with derivatives of every order that exists."""
        upper, budget = _beside(z, bounds)
        if torch.compiler.is_compiling():
            return self._argmax_op(z, upper, *_pack(budget))
        return apply_function(_Argmax, self, z, upper, budget)

    def max(self, z: Tensor, p: Tensor, bounds: Bounds) -> Tensor:
        """The maximum given ``p = self.argmax(z, bounds)``."""
        upper, budget = _beside(z, bounds)
        if torch.compiler.is_compiling():
            return self._max_op(z, p, upper, *_pack(budget))
        return apply_function(_Max, self, z, p, upper, budget)

    def attained(self, z: Tensor, p: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        """⟨p, z⟩ − Ω(p), without derivatives; −inf where nothing may be chosen."""
        value = torch.where(p == 0, 0.0, p * z).sum(-1) - self.value(p, Bounds(upper, budget))
        return torch.where((z == -torch.inf).all(-1), -torch.inf, value)

    def _solve_any(self, z: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        """``solve`` on any rows: zeros where all is masked, NaN where a score is NaN or +inf."""
        if kernels.usable(z, *_tensors(upper, budget)):
            return self.compiled(z, upper, budget)
        return self._solve_plain(z, upper, budget)

    def _solve_plain(self, z: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        top = z.amax(-1, keepdim=True)
        usable = top.isfinite()
        bound = torch.ones_like(z) if upper is None else upper.clamp_max(budget)  # no entry takes more than all
        bound = torch.where(z == -torch.inf, 0.0, bound)
        p = self.solve(torch.where(usable, z, 0.0), bound, budget)
        return torch.where(usable, p, torch.where(top == -torch.inf, 0.0, torch.nan))

    def product(self, v: Tensor, p: Tensor, upper: Tensor | None) -> Tensor:
        """∂p/∂z · v."""
        if self._runs(v, p, upper):
            result: Tensor = _kernel("product")(v, p, upper, self.alpha == 1)
            return result
        s, w = self._moves(p, upper)
        v = _where(s > 0, v, p)
        return s * (v - (w * v).sum(-1, keepdim=True))

    def pull(self, v: Tensor, z: Tensor, p: Tensor, upper: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """v times ∂p/∂z, ∂p/∂u and ∂p/∂k."""
        if self._runs(v, z, p, upper):
            to_z, to_upper, to_budget = _kernel("pull")(v, z, p, upper, self.alpha == 1)
            return to_z, to_upper, to_budget
        return self.state(z, p, upper).pull(v, p)

    def _runs(self, *tensors: Tensor | None) -> bool:
        """Whether a kernel may do a backward pass: higher derivatives would have to differentiate it."""
        return not tracks(*tensors) and kernels.usable(*_tensors(*tensors))

    def _moves(self, p: Tensor, upper: Tensor | None) -> tuple[Tensor, Tensor]:
        """s and w; both zero where nothing is free."""
        free = (p > 0) & (p < (1.0 if upper is None else upper))
        s = torch.where(free, self.mobility(p), 0.0)
        total = s.sum(-1, keepdim=True)
        return s, s / torch.where(total == 0, 1.0, total)

    def state(self, z: Tensor, p: Tensor, upper: Tensor | None) -> _State:
        """What the derivatives in the bounds and the budget are made of."""
        s, w = self._moves(p, upper)
        unmasked = z > -torch.inf
        level = z - self.slope(p)
        full = unmasked & (p >= (1.0 if upper is None else upper))
        leaving = _first(-level, full & (p > 0))
        entering = _first(level, unmasked & ~full & (p == 0) & (level < torch.inf))
        corner = (leaving + entering) / (leaving + entering).sum(-1, keepdim=True).clamp_min(1)
        w = torch.where((s > 0).any(-1, keepdim=True), w, corner)
        # Free entries agree on the level: its derivatives are theirs, whatever the weights of the mean.
        share = w.detach()
        mu = (share * torch.where(share > 0, level, 0.0)).sum(-1, keepdim=True)
        excess = torch.where(full, level, mu) - mu
        return _State(s, w, mu, excess, full & ((p > 0) | (excess > 0)))  # a bound of 0 holds only what would rise


class _State(NamedTuple):
    s: Tensor
    w: Tensor
    mu: Tensor
    excess: Tensor  # z − Ω′(p) − μ at the bound, 0 elsewhere
    held: Tensor

    def pull(self, v: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v times ∂p/∂z, ∂p/∂u and ∂p/∂k."""
        mean = (self.w * _where(self.w > 0, v, p)).sum(-1, keepdim=True)
        return self.s * (_where(self.s > 0, v, p) - mean), _where(self.held, v - mean, p), mean

    def push(self, dz: Tensor | None, du: Tensor | None, dk: Tensor | None, p: Tensor) -> Tensor:
        """∂p/∂z, ∂p/∂u and ∂p/∂k times a direction."""
        dz = _where(self.s > 0, torch.zeros_like(p) if dz is None else dz, p)
        du = _where(self.held, torch.zeros_like(p) if du is None else du, p)
        taken = du.sum(-1, keepdim=True) - (0.0 if dk is None else dk)
        return self.s * (dz - (self.w * dz).sum(-1, keepdim=True)) + du - self.w * taken


def _kernel(name: str) -> Callable[..., Any]:
    """A compiled function; the compiler is imported by the first that is asked for."""
    from fenchel.kernels import bounded

    found: Callable[..., Any] = getattr(bounded, name)
    return found


def _tensors(*values: Any) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _beside(z: Tensor, bounds: Bounds) -> tuple[Tensor | None, Parameter]:
    """Bounds in the precision of the rows and of their shape."""
    upper, budget = bounds
    return None if upper is None else upper.to(z.dtype).expand(z.shape), _full_rank(budget, z)


def _where(condition: Tensor, v: Tensor, p: Tensor) -> Tensor:
    """v where the condition holds, 0 elsewhere (whatever v is there), NaN in rows where p is NaN."""
    return torch.where(condition, v, 0.0 * p.detach())


def _first(key: Tensor, among: Tensor) -> Tensor:
    """One-hot at the largest key of a row among some entries; zero if there are none."""
    key = torch.where(among, key.detach(), -torch.inf)
    return torch.zeros_like(key).scatter(-1, key.argmax(-1, keepdim=True), 1.0) * among


class _Argmax(torch.autograd.Function):
    @staticmethod
    def forward(rule: Bounded, z: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        return rule._solve_any(z, upper, budget)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Bounded, Tensor, Tensor | None, Parameter], output: Tensor) -> None:
        ctx.rule, z, upper, budget = inputs
        movable = upper is not None or isinstance(budget, Tensor)  # else the result alone is enough
        _remember(ctx, output, z if movable else None, upper)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, z, upper = ctx.saved_tensors
        *_, of_upper, of_budget = ctx.needs_input_grad
        if not of_upper and not of_budget:
            return None, ctx.rule.product(grad, p, upper), None, None
        to_z, to_upper, to_budget = ctx.rule.pull(grad, z, p, upper)
        return None, to_z, to_upper if of_upper else None, to_budget if of_budget else None

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, du: Tensor | None, dk: Tensor | None) -> Tensor:
        p, z, upper = ctx.saved_tensors
        with forward_ad._set_fwd_grad_enabled(True):
            p, z, upper = outside(p), outside(z), outside(upper)
            if du is None and dk is None:
                assert dz is not None
                product: Tensor = ctx.rule.product(dz, p, upper)
            else:
                product = ctx.rule.state(z, p, upper).push(dz, du, dk, p)
        return product

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: Bounded, *args: Any) -> tuple[Tensor, int]:
        return apply_function(_Argmax, rule, *rows_first(info, in_dims[1:], args)), 0


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(rule: Bounded, z: Tensor, p: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        return rule.attained(z, p, upper, budget)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Bounded, Tensor, Tensor, Tensor | None, Parameter], _: Tensor) -> None:
        ctx.rule, z, p, upper, _budget = inputs
        _remember(ctx, p, z, upper)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, z, upper = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        *_, of_upper, of_budget = ctx.needs_input_grad
        if not of_upper and not of_budget:
            return None, grad * p, None, None, None
        state = ctx.rule.state(z, p, upper)
        to_upper = grad * _where(state.held, state.excess, p) if of_upper else None
        return None, grad * p, None, to_upper, grad * state.mu if of_budget else None

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Any, dp: Any, du: Tensor | None, dk: Tensor | None) -> Tensor:
        p, z, upper = ctx.saved_tensors
        with forward_ad._set_fwd_grad_enabled(True):
            p, z, upper = outside(p), outside(z), outside(upper)
            total = (torch.zeros_like(p) if dz is None else p * dz).sum(-1)
            if du is not None or dk is not None:
                state = ctx.rule.state(z, p, upper)
                if du is not None:
                    total = total + _where(state.held, state.excess * du, p).sum(-1)
                if dk is not None:
                    total = total + (state.mu * dk).squeeze(-1)
        return total

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: Bounded, *args: Any) -> tuple[Tensor, int]:
        return apply_function(_Max, rule, *rows_first(info, in_dims[1:], args)), 0


class _ArgmaxInGraph(_Argmax):
    """The same rules when the operator is called: the forward pass is the operator itself, below autograd."""

    @staticmethod
    def forward(rule: Bounded, z: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return rule._argmax_op(z, upper, *_pack(budget))


class _MaxInGraph(_Max):
    @staticmethod
    def forward(rule: Bounded, z: Tensor, p: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return rule._max_op(z, p, upper, *_pack(budget))


def _remember(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


class _Quadratic(Bounded):
    """Ω(p) = ½ Σ (p² − p): the projection onto a box and a budget."""

    name = "bounded_gini"
    alpha = 2.0

    def solve(self, z: Tensor, upper: Tensor, budget: Parameter) -> Tensor:
        return capped_projection(z, upper, budget)

    def compiled(self, z: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        p: Tensor = _kernel("project")(z, upper, budget)
        return p

    def slope(self, p: Tensor) -> Tensor:
        return p - 0.5

    def mobility(self, p: Tensor) -> Tensor:
        return torch.ones_like(p)


class _Entropic(Bounded):
    """Ω(p) = Σ p log p: a softmax that hands on what exceeds a bound."""

    name = "bounded_shannon"
    alpha = 1.0

    def solve(self, z: Tensor, upper: Tensor, budget: Parameter) -> Tensor:
        return capped_softmax(z, upper, budget)

    def compiled(self, z: Tensor, upper: Tensor | None, budget: Parameter) -> Tensor:
        p: Tensor
        p, failed = _kernel("cap")(torch.softmax(z, -1), upper, budget)
        if bool(failed.any()):  # little is left once the best are at their bounds, or there was nothing to choose
            of_row = budget[failed] if isinstance(budget, Tensor) else budget
            p[failed] = self._solve_plain(z[failed], None if upper is None else upper[failed], of_row)
        return p

    def slope(self, p: Tensor) -> Tensor:
        return torch.where(p == 0, -torch.inf, 1 + torch.where(p == 0, 1.0, p).log())

    def mobility(self, p: Tensor) -> Tensor:
        return p


BOUNDED_GINI = _Quadratic()
BOUNDED_SHANNON = _Entropic()
