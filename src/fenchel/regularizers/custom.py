"""Custom: a regularizer made of any strictly convex Ω, written as a torch function of p."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel._checks import check_count, check_number
from fenchel._operators import rows_first
from fenchel._torch import apply_function, concrete, forward_mode, outside_graphs, readable
from fenchel.regularizers.base import Posed, Regularizer
from fenchel.regularizers.closures import Closure, hidden_leaf
from fenchel.regularizers.derivatives import on_support
from fenchel.regularizers.rowmap import RowMap
from fenchel.regularizers.rows import to_rows
from fenchel.regularizers.solvers.interior import TINY, Solution, diagonal_product, minimize, reduce


class Custom(Regularizer):
    r"""Any strictly convex Ω, written as a torch function of p.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \Omega(p)

    The choice, its maximum, its loss and their derivatives of every order follow, in the scores and in every tensor
    that ``fn`` reads (the parameters of a module, a tensor of the enclosing scope). Solved in double precision by
    Newton's method on the support, and where that fails by an interior-point method, until the duality gap of every
    row certifies it. A step takes O(n) per row if Ω is a sum over entries, which is detected; else O(n³), and O(n²)
    memory per row.

    ``fn`` gets p in float64, in the shape of the scores with ``dim`` last (further leading dimensions under
    ``vmap``), each row inside the simplex; masked entries are 0, or 1e-50 where it is differentiated and has infinite
    derivatives at 0. It must be twice differentiable inside, and must not look at more than one row at a time. What Ω
    is at one-hot vectors is up to ``fn``, and part of the loss: :math:`\Omega^*(s) + \Omega(e_y) - s_y` for a class y.

    Runs eagerly: ``torch.compile`` breaks its graph here, ``fullgraph=True`` and ``torch.export`` raise.

    On devices it works in rounds with one host sync each, some 20.

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

    fn: Callable[[Tensor], Tensor]

    def __init__(self, fn: Callable[[Tensor], Tensor], *, tol: float = 1e-12, max_iter: int = 100) -> None:
        super().__init__()
        if not callable(fn):
            raise TypeError(f"fn must be callable, a torch function of p, got {type(fn).__name__}")
        self.fn = fn
        self.tol = check_number(tol, "tol", 0)
        self.max_iter = check_count(max_iter, "max_iter")

    @property
    def parameter_shape(self) -> torch.Size | None:
        """None: ``fn`` may read any tensors."""
        return None

    @property
    def zero_at_vertices(self) -> bool:
        """Whether ``fn`` is zero at one-hot vectors, tried with two and with three entries; False if it refuses these.

        Example:
            >>> from fenchel import Custom
            >>> Custom(lambda p: (p.square().sum(-1) - 1) / 2).zero_at_vertices
            True
            >>> Custom(lambda p: p.square().sum(-1) / 2).zero_at_vertices
            False
        """
        try:
            with torch.no_grad():
                values = torch.cat([self.fn(torch.eye(n, dtype=torch.float64)).reshape(-1) for n in (2, 3)])
                return bool((values.abs() <= 1e-12).all())
        except Exception:  # fn takes rows of one size, tensors of another device, or is being transformed
            return False

    @outside_graphs("Custom")
    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        """Ω(p) of distributions along ``dim``: what ``fn`` returns, computed in double precision."""
        return super().forward(p, dim)

    @outside_graphs("Custom")
    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return super().argmax(scores, dim, mask)

    @outside_graphs("Custom")
    def max(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return super().max(scores, dim, mask)

    @outside_graphs("Custom")
    def loss(self, scores: Tensor, target: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return super().loss(scores, target, dim, mask)

    def extra_repr(self) -> str:
        shown = "" if isinstance(self.fn, torch.nn.Module) else f"{getattr(self.fn, '__name__', self.fn)}, "
        return f"{shown}tol={self.tol:g}, max_iter={self.max_iter}"

    def _pose(self, scores: Tensor, dim: int, mask: Tensor | None = None) -> Posed:
        rows = to_rows(scores, dim, mask).double()
        rule = _Problem(self, rows)
        return Posed(rows, rule, tuple(rule.omega.captured))


class _Problem(RowMap):
    """The problem of one call: Ω, the tensors that ``fn`` reads as parameters, and the result of the solver."""

    name = "custom"

    def __init__(self, omega: Custom, rows: Tensor) -> None:
        n = rows.shape[-1]
        self.custom = omega
        self.omega = Closure(omega.fn, torch.full(rows.shape, 1 / n, dtype=rows.dtype, device=rows.device))
        self.found: Solution | None = None
        self.diagonal = False
        self.masked = 0.0

    def keeps_scores(self, *captured: Any) -> bool:
        return True

    def align(self, z: Tensor, *captured: Any) -> tuple[Any, ...]:
        return captured

    def value(self, p: Tensor, *captured: Any, masked: Tensor | None = None) -> Tensor:
        return self.omega(p, captured)

    def target_value(self, y: Tensor, *captured: Any, masked: Tensor | None = None) -> Tensor:
        value = self.value(y, *captured)
        if concrete(value) and not bool(value.isfinite().all()):
            raise ValueError(
                "fn must be finite at the target for the loss: it is not; write p log p as -torch.special.entr(p), "
                "and if Ω is infinite at the boundary, smooth the target"
            )
        return value

    # -- forward --------------------------------------------------------------------------------------

    def solve(self, z: Tensor, *captured: Any) -> Tensor:
        return self.solve_any(z, *captured)

    def solve_any(self, z: Tensor, *captured: Any) -> Tensor:
        if not readable(z, *captured):
            raise RuntimeError(
                "Custom cannot be traced or exported, and needs data (no fake or meta tensors): its rounds depend on "
                "the scores"
            )
        if z.numel() == 0:
            return torch.zeros_like(z)
        with torch.inference_mode(False):  # the solver differentiates fn
            z, captured = _plain(z), tuple(_plain(c) for c in captured)
            top = z.amax(-1, keepdim=True)
            usable = top.isfinite()
            scores = torch.where(usable, z - top, 0.0)
            free = (z > -torch.inf) | ~usable
            found = minimize(self._checked_omega(captured), scores, free, self.custom.tol, self.custom.max_iter)
        self._warn(found, usable)
        self.found = found
        self.diagonal = found.curvature.dim() == z.dim()
        self.masked = found.masked
        return torch.where(usable, found.p, torch.where(top == -torch.inf, 0.0, torch.nan))

    def _checked_omega(self, captured: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
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

    def product(self, v: Tensor, z: Tensor, p: Tensor, *captured: Any) -> Tensor:
        """J v: the inverse Hessian on the support, along the simplex (002, Proposition 2)."""
        support = p.detach() > 0
        plain = not torch.is_grad_enabled() and not forward_mode() and readable(v, p, *captured)
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

    def pull(self, v: Tensor, z: Tensor, p: Tensor, *captured: Any) -> tuple[Any, ...]:
        """J v, and −vᵀ J ∂ₐ∇Ω for the captured tensors that are floating point."""
        to_scores, q = self.product(v, z, p, *captured), self.point(z, p)
        return to_scores, *_pull_back(lambda c: self.gradient(q, c), captured, -to_scores)

    def push(self, dz: Tensor | None, da: tuple[Tensor | None, ...], z: Tensor, p: Tensor, *captured: Any) -> Tensor:
        direction = torch.zeros_like(p) if dz is None else dz
        if any(t is not None for t in da):
            q = self.point(z, p)
            direction = direction - _push(lambda c: self.gradient(q, c), captured, da)
        return self.product(direction, z, p, *captured)

    def envelope(self, z: Tensor, p: Tensor, *captured: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError("a captured tensor has no value per row: use pull_max and push_max")

    def attained(self, z: Tensor, p: Tensor, *captured: Any) -> Tensor:
        top = z.amax(-1)
        score = torch.where(p == 0, 0.0, p * z).sum(-1)
        value = score - self.omega(self.point(z, p, masked=0.0), captured)
        return torch.where(top == -torch.inf, top, value)

    def pull_max(self, grad: Tensor, z: Tensor, p: Tensor, *captured: Any) -> tuple[Tensor | None, ...]:
        q = self.point(z, p)
        # A row with nothing to choose from has the maximum −inf, whatever Ω is.
        lost = torch.where((z > -torch.inf).any(-1), -grad.squeeze(-1), 0.0)
        return tuple(_pull_back(lambda c: self.omega(q, c), captured, lost))

    def push_max(self, da: tuple[Tensor | None, ...], z: Tensor, p: Tensor, *captured: Any) -> Tensor:
        q = self.point(z, p)
        change = _push(lambda c: self.omega(q, c), captured, da)
        return -torch.where((z > -torch.inf).any(-1), change, 0.0)

    def map_over(
        self, function: type[torch.autograd.Function], info: Any, in_dims: Sequence[int | None], rows: int, args: Any
    ) -> tuple[Tensor, int]:
        """One more leading dimension of the rows; if what ``fn`` reads is mapped too, one problem after the other."""
        if all(d is None for d in in_dims[rows:]):
            return apply_function(function, self, *rows_first(info, in_dims[:rows], args[:rows]), *args[rows:]), 0
        problems = [copy.copy(self) for _ in range(info.batch_size)]
        results = [
            apply_function(
                function, each, *(t if d is None else t.select(d, i) for t, d in zip(args, in_dims, strict=True))
            )
            for i, each in enumerate(problems)
        ]
        self.diagonal = all(each.diagonal for each in problems)
        self.masked = max((each.masked for each in problems), default=0.0)
        return torch.stack(results), 0


def _plain(t: Tensor) -> Tensor:
    """Detach a tensor; inference tensors are copied, because a graph cannot be built on them."""
    return t.clone() if t.is_inference() else t.detach()


def _jacobian(hessian: Tensor, support: Tensor) -> Tensor:
    at, inner, reduced = reduce(hessian, support)
    inverse = torch.linalg.inv_ex(reduced).inverse
    inverse = torch.where(inner.unsqueeze(-1) & inner.unsqueeze(-2), (inverse + inverse.mT) / 2, 0.0)
    one = torch.zeros_like(inverse[..., 0]).scatter(-1, at, 1.0)
    given = inverse.sum(-1)
    cross = one.unsqueeze(-1) * given.unsqueeze(-2)
    return inverse - cross - cross.mT + given.sum(-1)[..., None, None] * one.unsqueeze(-1) * one.unsqueeze(-2)


def _vjp(f: Callable[..., Any], *primals: Tensor) -> tuple[Tensor, Callable[..., tuple[Tensor, ...]]]:
    value, product = torch.func.vjp(f, *primals)  # type: ignore[misc]
    return value, product


def _pull_back(f: Callable[[tuple[Tensor, ...]], Tensor], captured: Sequence[Tensor], v: Tensor) -> list[Tensor | None]:
    """vᵀ ∂f/∂c for the captured tensors that can have a derivative."""
    wanted = [c.is_floating_point() for c in captured]
    value, product = _vjp(*_of_some(f, captured, wanted))
    gradients = iter(product(v.to(value.dtype)))
    return [next(gradients) if w else None for w in wanted]


def _push(
    f: Callable[[tuple[Tensor, ...]], Tensor], captured: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> Tensor:
    """∂f/∂c · dc over the captured tensors with a direction; by reverse mode twice, as forward mode may not nest."""
    value, pull = _vjp(*_of_some(f, captured, [t is not None for t in tangents]))
    _, push = _vjp(pull, torch.zeros_like(value))
    return push(tuple(t for t in tangents if t is not None))[0]


def _of_some(
    f: Callable[[tuple[Tensor, ...]], Tensor], captured: Sequence[Tensor], which: Sequence[bool]
) -> tuple[Any, ...]:
    """f as a function of those captured tensors that ``which`` selects, followed by these tensors."""

    def of_some(*chosen: Tensor) -> Tensor:
        rest = iter(chosen)
        return f(tuple(next(rest) if w else c for c, w in zip(captured, which, strict=True)))

    return of_some, *(c for c, w in zip(captured, which, strict=True) if w)
