"""Custom: any strictly convex Ω that a user writes as a torch function of p becomes a regularizer like the others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fenchel.kernels import concrete, readable
from fenchel.regularizers.base import Regularizer, check_indices, check_probabilities
from fenchel.regularizers.closures import Closure, hidden_leaf
from fenchel.regularizers.family import apply_function, on_support, outside, rows_first
from fenchel.regularizers.graphs import outside_graphs
from fenchel.regularizers.interior import TINY, Solution, diagonal_product, minimize, reduce
from fenchel.regularizers.rows import check_scores, from_rows, is_integer, shifted, to_rows


class Custom(Regularizer):
    r"""Any strictly convex Ω, written as a torch function of p.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \Omega(p)

    The choice, its maximum, its loss and their derivatives of every order follow, in the scores and in every tensor
    that ``fn`` reads (the parameters of a module, a tensor of the enclosing scope). Solved in double precision by
    Newton's method on the support, and where that fails by an interior-point method, until the duality gap of every
    row certifies it. O(n) a step if Ω is a sum over entries, which is noticed; O(n³), and O(n²) memory a row, if not.

    ``fn`` gets p in float64, in the shape of the scores with ``dim`` last (further leading dimensions under
    ``vmap``), each row inside the simplex; masked entries are 0, or 1e-50 where it is differentiated and has infinite
    derivatives at 0. It must be twice differentiable inside, and must not look at more than one row at a time. What Ω
    is at one-hot vectors is up to ``fn``, and part of the loss: :math:`\Omega^*(s) + \Omega(e_y) - s_y` for a class y.

    Runs eagerly: ``torch.compile`` breaks its graph here, ``fullgraph=True`` and ``torch.export`` raise.

    Args:
        fn: maps p of shape (…, n) to Ω(p) of shape (…); a function, or an ``nn.Module``, which is then trained too.
        tol: the duality gap that certifies a row, relative to its terms; a row that does not reach it is warned of.
        max_iter: of the interior-point method.

    Example:
        >>> import torch
        >>> from fenchel import Custom
        >>> omega = Custom(lambda p: 0.5 * p.square().sum(-1) + p.diff().square().sum(-1))  # neighbours alike
        >>> scores = torch.tensor([1.2, 0.0, 1.0, 0.0, -1.0, -2.0])
        >>> omega.argmax(scores)
        tensor([0.4630, 0.2327, 0.2568, 0.0475, 0.0000, 0.0000])
        >>> omega.max(scores), omega.loss(scores, torch.tensor(0))
        (tensor(0.5444), tensor(0.8444))

    References: Peters, Niculae & Martins (2019), proposition 2, for the Jacobian; Blondel, Martins & Niculae (2020).
    """

    zero_at_vertices = False
    fn: Callable[[Tensor], Tensor]

    def __init__(self, fn: Callable[[Tensor], Tensor], *, tol: float = 1e-12, max_iter: int = 100) -> None:
        super().__init__()
        if not callable(fn):
            raise TypeError(f"fn must be callable, a torch function of p, got {type(fn).__name__}")
        if not tol > 0:
            raise ValueError(f"tol must be positive, got {tol}")
        if not is_integer(max_iter) or max_iter < 1:
            raise ValueError(f"max_iter must be a positive integer, got {max_iter}")
        self.fn = fn
        self.tol = tol
        self.max_iter = max_iter

    @outside_graphs("Custom")
    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        """Ω(p) of distributions along ``dim``: what ``fn`` returns, computed in double precision."""
        return self._value(to_rows(p, dim, None).double()).to(p.dtype)

    @outside_graphs("Custom")
    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        rows, _ = shifted(to_rows(scores, dim, mask).double())
        return from_rows(_Problem(self, rows).argmax(rows), scores, dim)

    @outside_graphs("Custom")
    def max(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        rows, top = shifted(to_rows(scores, dim, mask).double())
        return (_Problem(self, rows).max(rows) + top.squeeze(-1)).to(scores.dtype)

    @outside_graphs("Custom")
    def loss(self, scores: Tensor, target: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        dim = check_scores(scores, dim)
        rows, _ = shifted(to_rows(scores, dim, mask).double())
        if target.is_floating_point():
            y = check_probabilities(target, scores, dim).movedim(dim, -1).double()
        else:
            index = check_indices(target, scores, dim).unsqueeze(-1)
            y = torch.zeros_like(rows, memory_format=torch.contiguous_format).detach().scatter(-1, index, 1.0)
        masked = rows == -torch.inf
        maximum = _Problem(self, rows).max(rows)
        maximum = torch.where(maximum == -torch.inf, 0.0, maximum)
        value = maximum - (y * torch.where(masked, 0.0, rows)).sum(-1) + self._finite_value(y)
        # Rounding can leave the sum a hair below zero; the gradient is right as it is.
        value = value + (value.clamp_min(0) - value).detach()
        return (value + torch.where(((y != 0) & masked).any(-1), torch.inf, 0.0)).to(scores.dtype)

    def extra_repr(self) -> str:
        shown = "" if isinstance(self.fn, torch.nn.Module) else f"{getattr(self.fn, '__name__', self.fn)}, "
        return f"{shown}tol={self.tol:g}, max_iter={self.max_iter}"

    def _value(self, p: Tensor) -> Tensor:
        return Closure(self.fn, p)(p)

    def _finite_value(self, y: Tensor) -> Tensor:
        value = self._value(y)
        if concrete(value) and not bool(value.isfinite().all()):
            raise ValueError(
                "fn must be finite at the target for the loss: it is not; write p log p as -torch.special.entr(p), "
                "and if Ω is infinite at the boundary, smooth the target"
            )
        return value


class _Problem:
    """One call: Ω with its captured tensors, and what the solver found on the way."""

    def __init__(self, omega: Custom, rows: Tensor) -> None:
        n = rows.shape[-1]
        self.custom = omega
        self.omega = Closure(omega.fn, torch.full(rows.shape, 1 / n, dtype=rows.dtype, device=rows.device))
        self.found: Solution | None = None
        self.diagonal = False
        self.masked = 0.0

    def argmax(self, z: Tensor) -> Tensor:
        return apply_function(_Argmax, self, z, *self.omega.captured)

    def max(self, z: Tensor) -> Tensor:
        p = self.argmax(z)
        return apply_function(_Max, self, z, p, *self.omega.captured)

    # -- forward --------------------------------------------------------------------------------------

    def solve(self, z: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        if not readable(z, *captured):
            raise RuntimeError(
                "Custom cannot be traced or exported, and needs data (no fake or meta tensors): its rounds depend on "
                "the scores"
            )
        if z.numel() == 0:
            return torch.zeros_like(z)
        with torch.inference_mode(False):  # the solver differentiates fn, whoever calls
            z, captured = _plain(z), tuple(_plain(c) for c in captured)
            top = z.amax(-1, keepdim=True)
            usable = top.isfinite()
            scores = torch.where(usable, z - top, 0.0)
            free = (z > -torch.inf) | ~usable
            found = minimize(self._looked_at(captured), scores, free, self.custom.tol, self.custom.max_iter)
        self._warn(found, usable)
        self.found = found
        self.diagonal = found.curvature.dim() == z.dim()
        self.masked = found.masked
        return torch.where(usable, found.p, torch.where(top == -torch.inf, 0.0, torch.nan))

    def _looked_at(self, captured: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
        def omega(p: Tensor) -> Tensor:
            value = self.omega(p, captured)
            if hidden_leaf(value, p) is not None:
                raise ValueError(
                    "fn reads a tensor that requires grad inside an operation that hides it (an autograd.Function): "
                    "its gradient would be lost. Pass it through a torch operation first, or detach it"
                )
            return value

        return omega

    def _warn(self, found: Solution, usable: Tensor) -> None:
        gap = torch.where(usable, found.gap / found.scale.clamp_min(TINY), 0.0)
        if bool((gap > self.custom.tol).any()):
            warnings.warn(
                f"Custom: {int((gap > self.custom.tol).sum())} of {gap.numel()} rows are not solved to tol "
                f"{self.custom.tol:g} after max_iter = {self.custom.max_iter} steps; the largest relative duality gap "
                f"is {gap.max().item():.1e}. Is fn strictly convex and twice differentiable?",
                stacklevel=6,
            )

    # -- derivatives, all in differentiable operations on p and the captured tensors --------------------

    def point(self, z: Tensor, p: Tensor, masked: float | None = None) -> Tensor:
        """p where it is positive; elsewhere a constant at which Ω is smooth: nearly 0, or ``masked``."""
        masked = self.masked if masked is None else masked
        free = z.detach() > -torch.inf
        dead = ~(p.detach() > 0).any(-1, keepdim=True)
        # A tensor of its own: of two numbers, torch.where makes single precision, in which TINY is 0.
        off = torch.where(free, torch.full_like(p, TINY), masked)
        return torch.where(p > 0, p, torch.where(dead, 1 / p.shape[-1], off))

    def gradient(self, q: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        slope: Tensor = torch.func.grad(lambda x: self.omega(x, captured).sum())(q)
        return slope

    def curvature(self, q: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        _, product = _vjp(lambda x: self.gradient(x, captured), q)
        if self.diagonal:
            return product(torch.ones_like(q))[0]
        n = q.shape[-1]
        basis = torch.eye(n, dtype=q.dtype, device=q.device).reshape(n, *(1,) * (q.dim() - 1), n)
        hessian: Tensor = torch.func.vmap(product)(basis.expand(n, *q.shape))[0].movedim(0, -2)
        return (hessian + hessian.mT) / 2

    def jacobian_product(self, v: Tensor, z: Tensor, p: Tensor, captured: tuple[Tensor, ...]) -> Tensor:
        """J v: the inverse Hessian on the support, along the simplex (002, Proposition 2)."""
        support = p.detach() > 0
        plain = not torch.is_grad_enabled() and forward_ad._current_level < 0 and readable(v, p, *captured)
        if plain and self.found is not None:
            curvature = self.found.curvature
        else:
            curvature = self.curvature(self.point(z, p), captured)
        v = on_support(v, p)
        if self.diagonal:
            some = support | ~support.any(-1, keepdim=True)
            product = diagonal_product(v, torch.where(some, curvature, 1.0), some)
        else:
            product = (_jacobian(curvature, support) * v.unsqueeze(-2)).sum(-1)
        return on_support(product, p)


def _plain(t: Tensor) -> Tensor:
    """Without a graph, and such that one can be built on it."""
    return t.clone() if t.is_inference() else t.detach()


def _jacobian(hessian: Tensor, support: Tensor) -> Tensor:
    at, inner, reduced = reduce(hessian, support)
    inverse = torch.linalg.inv_ex(reduced).inverse
    inverse = torch.where(inner.unsqueeze(-1) & inner.unsqueeze(-2), (inverse + inverse.mT) / 2, 0.0)
    one = torch.zeros_like(inverse[..., 0]).scatter(-1, at, 1.0)
    given = inverse.sum(-1)
    cross = one.unsqueeze(-1) * given.unsqueeze(-2)
    return inverse - cross - cross.mT + given.sum(-1)[..., None, None] * one.unsqueeze(-1) * one.unsqueeze(-2)


class _Argmax(torch.autograd.Function):
    """p(z, a) with dp = J (dz − ∂ₐ∇Ω da)."""

    @staticmethod
    def forward(problem: _Problem, z: Tensor, *captured: Tensor) -> Tensor:
        return problem.solve(z, captured)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.problem, z, *captured = inputs
        _remember(ctx, z, output, *captured)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        z, p, *captured = ctx.saved_tensors
        to_scores = ctx.problem.jacobian_product(grad, z, p, tuple(captured))
        wanted = ctx.needs_input_grad[2:]
        if not any(wanted):
            return None, to_scores, *(None,) * len(captured)
        q = ctx.problem.point(z, p)
        to_captured = _pull_back(lambda c: ctx.problem.gradient(q, c), captured, wanted, -to_scores)
        return None, to_scores, *to_captured

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, *tangents: Tensor | None) -> Tensor:
        with forward_ad._set_fwd_grad_enabled(True):
            z, p, *captured = (outside(t) for t in ctx.saved_tensors)
            direction = torch.zeros_like(p) if dz is None else dz
            if any(t is not None for t in tangents):
                q = ctx.problem.point(z, p)
                direction = direction - _push(lambda c: ctx.problem.gradient(q, c), captured, tangents)
            product: Tensor = ctx.problem.jacobian_product(direction, z, p, tuple(captured))
        return product

    @staticmethod
    def vmap(info: Any, in_dims: Any, problem: _Problem, z: Tensor, *captured: Tensor) -> tuple[Tensor, int]:
        return _mapped(_Argmax, info, in_dims, problem, (z,), captured)


class _Max(torch.autograd.Function):
    """⟨p, z⟩ − Ω(p; a), whose derivatives are p and −∂ₐΩ: the envelope theorem."""

    @staticmethod
    def forward(problem: _Problem, z: Tensor, p: Tensor, *captured: Tensor) -> Tensor:
        top = z.amax(-1)
        score = torch.where(p == 0, 0.0, p * z).sum(-1)
        value = score - problem.omega(problem.point(z, p, masked=0.0), captured)
        return torch.where(top == -torch.inf, top, value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.problem, z, p, *captured = inputs
        _remember(ctx, z, p, *captured)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        z, p, *captured = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        to_captured: list[Tensor | None] = [None] * len(captured)
        if any(wanted):
            q = ctx.problem.point(z, p)
            # A row with nothing to choose from has the maximum −inf, whatever Ω is.
            lost = torch.where((z > -torch.inf).any(-1), -grad, 0.0)
            to_captured = _pull_back(lambda c: ctx.problem.omega(q, c), captured, wanted, lost)
        return None, grad.unsqueeze(-1) * p, None, *to_captured

    @staticmethod
    def jvp(ctx: Any, _: None, dz: Tensor | None, dp: Tensor | None, *tangents: Tensor | None) -> Tensor:
        with forward_ad._set_fwd_grad_enabled(True):
            z, p, *captured = (outside(t) for t in ctx.saved_tensors)
            total = (torch.zeros_like(p) if dz is None else p * dz).sum(-1)
            if any(t is not None for t in tangents):
                q = ctx.problem.point(z, p)
                change = _push(lambda c: ctx.problem.omega(q, c), captured, tangents)
                total = total - torch.where((z > -torch.inf).any(-1), change, 0.0)
        return total

    @staticmethod
    def vmap(info: Any, in_dims: Any, problem: _Problem, z: Tensor, p: Tensor, *captured: Tensor) -> tuple[Tensor, int]:
        return _mapped(_Max, info, in_dims, problem, (z, p), captured)


def _remember(ctx: Any, *tensors: Tensor) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _vjp(f: Callable[..., Any], *primals: Tensor) -> tuple[Tensor, Callable[..., tuple[Tensor, ...]]]:
    value, product = torch.func.vjp(f, *primals)  # type: ignore[misc]
    return value, product


def _pull_back(
    f: Callable[[tuple[Tensor, ...]], Tensor], captured: list[Tensor], wanted: Sequence[bool], v: Tensor
) -> list[Tensor | None]:
    """vᵀ ∂f/∂c for the captured tensors that want it."""
    value, product = _vjp(*_of_some(f, captured, wanted))
    gradients = iter(product(v.to(value.dtype)))
    return [next(gradients) if w else None for w in wanted]


def _push(
    f: Callable[[tuple[Tensor, ...]], Tensor], captured: list[Tensor], tangents: Sequence[Tensor | None]
) -> Tensor:
    """∂f/∂c · dc over the captured tensors that move; reverse mode twice, for forward mode does not nest everywhere."""
    value, pull = _vjp(*_of_some(f, captured, [t is not None for t in tangents]))
    _, push = _vjp(pull, torch.zeros_like(value))
    return push(tuple(t for t in tangents if t is not None))[0]


def _of_some(
    f: Callable[[tuple[Tensor, ...]], Tensor], captured: list[Tensor], which: Sequence[bool]
) -> tuple[Any, ...]:
    """f as a function of some of its tensors, and these."""

    def of_some(*chosen: Tensor) -> Tensor:
        rest = iter(chosen)
        return f(tuple(next(rest) if w else c for c, w in zip(captured, which, strict=True)))

    return of_some, *(c for c, w in zip(captured, which, strict=True) if w)


def _mapped(
    function: type[torch.autograd.Function],
    info: Any,
    in_dims: tuple[int | None, ...],
    problem: _Problem,
    rows: tuple[Tensor, ...],
    captured: tuple[Tensor, ...],
) -> tuple[Tensor, int]:
    """vmap: one more leading dimension of the rows; if what ``fn`` reads is mapped too, one problem after the other."""
    row_dims, captured_dims = in_dims[1 : 1 + len(rows)], in_dims[1 + len(rows) :]
    if all(d is None for d in captured_dims):
        return apply_function(function, problem, *rows_first(info, row_dims, rows), *captured), 0
    tensors, dims = (*rows, *captured), (*row_dims, *captured_dims)
    problems = [copy.copy(problem) for _ in range(info.batch_size)]
    results = [
        apply_function(
            function, each, *(t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True))
        )
        for i, each in enumerate(problems)
    ]
    problem.diagonal = all(each.diagonal for each in problems)
    problem.masked = max((each.masked for each in problems), default=0.0)
    return torch.stack(results), 0
