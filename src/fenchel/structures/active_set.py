"""The active-set algorithm: the quadratic program of SparseMAP, by calls of a structure's oracle.

    argmax_μ ⟨θ, μ⟩ + h(μ) − ½‖μ‖²   over the convex hull of the structures

``search`` finds the members of the optimal mixture and their weights; nothing is differentiated here. ``Found`` holds
what derivatives need: on the members, weights are an affine function of the scores q_k = ⟨θ, y_k⟩ + h_k of these, with
the Jacobian Q = S − S11ᵀS/1ᵀS1, S the inverse Gram matrix. So ``choose`` writes the answer as w + Q(q − q₀), in torch
operations, where q₀ is q without its derivative: derivatives of every order and mode are right.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fenchel import kernels
from fenchel.kernels import concrete
from fenchel.kernels.host import run
from fenchel.structures.base import Array, Problem, Searched, Structure, check_scores, own_tensors, places

_NOISE = 1e-8
_MEMBERS = 32  # there is room for, to begin with
_FAR = 1e12  # from what higher-order scores could change


class Found(NamedTuple):
    """The active sets of R rows with K members or fewer, of L parts or fewer out of D.

    Args:
        parts: (R, K, L), int64, filled up with D.
        weights: (R, K), float64, filled up with 0.
        higher: (R, K), the members' higher-order scores.
        jacobian: (R, K, K), Q.
        gap: (R,), the certified duality gap; NaN in rows that hold NaN or +inf.
        iterations: (R,), structures tried.
    """

    parts: Tensor
    weights: Tensor
    higher: Tensor
    jacobian: Tensor
    gap: Tensor
    iterations: Tensor


class ActiveSets(NamedTuple):
    """What a later search of the same rows can begin with: members, their weights, and M⁻¹, as the kernels have them.

    Args:
        sizes: (R,), members of each row.
        members: (R, K, L), the places of their ones.
        counts: (R, K), how many these are.
        weights: (R, K).
        inverse: (R, K+1, K+1).
    """

    sizes: Array
    members: Array
    counts: Array
    weights: Array
    inverse: Array

    @staticmethod
    def empty(rows: int) -> ActiveSets:
        """No members at all."""
        counts, ones = np.zeros(rows, np.int64), np.zeros((rows, 1, 1), np.int32)
        return ActiveSets(counts, ones, ones[..., 0].astype(np.int64), np.zeros((rows, 1)), np.zeros((rows, 2, 2)))

    def take(self, rows: Array) -> ActiveSets:
        """Those of some rows."""
        return ActiveSets(*(array[rows] for array in self))

    def updated(self, rows: Array, later: ActiveSets) -> ActiveSets:
        """With later ones in place of some rows."""
        arrays = []
        for old, new in zip(self, later, strict=True):
            shape = (len(old), *(max(n, m) for n, m in zip(old.shape[1:], new.shape[1:], strict=True)))
            merged = old
            if shape != old.shape:
                merged = np.zeros(shape, old.dtype)
                merged[tuple(slice(0, n) for n in old.shape)] = old
            merged[(rows, *(slice(0, n) for n in new.shape[1:]))] = new
            arrays.append(merged)
        return ActiveSets(*arrays)


@dataclass(frozen=True)
class Options:
    """How to search.

    Args:
        max_iter: calls of the oracle.
        tol: rows stop when marginals are known to be this close to the optimum, and the gap so below tol²/2.
        complete: also look for structures that tie with the members, without which derivatives at ties are wrong.
        quiet: leave it to the caller to look at the gap, and to warn.
    """

    max_iter: int = 1000
    tol: float = 1e-6
    complete: bool = True
    quiet: bool = False


def search(structure: Structure, scores: Tensor, mask: Tensor | None, start: Tensor | None, options: Options) -> Found:
    """The active sets of scores (…, parts), whatever transformation of functions is at work.

    Args:
        structure: what is searched.
        scores: (…, parts).
        mask: boolean, broadcasts to the scores.
        start: structures to begin with, (…, K, parts).
        options: how to search.
    """
    scores = scores.detach()
    tensors = [t.detach() for t in own_tensors(structure)]
    if torch._C._are_functorch_transforms_active():
        return Found(*_Search.apply(structure, options, scores, mask, start, *tensors))  # type: ignore[no-untyped-call]
    return _search(structure, scores, mask, start, options)


def search_again(
    structure: Structure, scores: Tensor, sets: ActiveSets | None, options: Options
) -> tuple[Found, ActiveSets]:
    """``search``, beginning with the active sets of an earlier search of these rows, and with those to begin the next.

    Not for transformations of functions.
    """
    with torch.no_grad():
        solver = _Solver(Problem(structure, scores, None), options)
        if sets is not None:
            solver.resume(sets)
        solver.solve()
        return solver.found(), solver.sets()


def choose(
    structure: Structure, theta: Tensor, found: Found, batch: torch.Size, shape: torch.Size
) -> tuple[Tensor, ...]:
    """Weights (R, K), marginals (R, D) and higher-order scores (R, K), differentiable.

    Args:
        structure: what was searched.
        theta: scores of rows (R, D), float64, zero where nothing may be chosen.
        found: their active sets.
        batch: the shape that the rows have …
        shape: … and that of the parts.
    """
    weights, higher = found.weights, found.higher
    own = _own_higher(structure, found, batch, shape)
    if _differentiated(theta, own):
        higher = higher if own is None else own
        q = _scores_of(found.parts, theta) + higher
        weights = weights + _moved(found.jacobian, q)
    return weights, _mixture_of(found.parts, weights, theta.shape[1]), higher


def _moved(jacobian: Tensor, q: Tensor) -> Tensor:
    """Q(q − q₀), where q₀ is q without its derivative: zero, but for derivatives."""
    if _compiled(q):
        moved: Tensor = _Moved.apply(jacobian, q)  # type: ignore[no-untyped-call]
        return moved
    return (jacobian @ (q - q.detach()).unsqueeze(-1)).squeeze(-1)


def _scores_of(parts: Tensor, theta: Tensor) -> Tensor:
    """Aᵀθ: the sums (R, K) of scores (R, D) over the members' parts."""
    if _compiled(theta):
        scores: Tensor = _Scores.apply(parts, theta)  # type: ignore[no-untyped-call]
        return scores
    padded = torch.cat([theta, theta.new_zeros(len(theta), 1)], -1)
    return padded.gather(1, parts.flatten(1)).reshape(parts.shape).sum(-1)


def _mixture_of(parts: Tensor, weights: Tensor, size: int) -> Tensor:
    """Aw: the mixture (R, size) of members with weights (R, K)."""
    if _compiled(weights):
        mixture: Tensor = _Mixture.apply(parts, weights, size)  # type: ignore[no-untyped-call]
        return mixture
    spread = weights.unsqueeze(-1).expand(parts.shape).flatten(1)
    return weights.new_zeros(len(weights), size + 1).scatter_add(1, parts.flatten(1), spread)[:, :-1]


def _compiled(x: Tensor) -> bool:
    return kernels.ENABLED and x.device.type == "cpu" and not _traced()


class _Moved(torch.autograd.Function):
    """Nothing, with the derivative Q, which is symmetric."""

    @staticmethod
    def forward(ctx: Any, jacobian: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(jacobian)
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (jacobian,) = ctx.saved_tensors
        return None, (jacobian @ grad.unsqueeze(-1)).squeeze(-1)


class _Scores(torch.autograd.Function):
    """Linear, and the adjoint of ``_Mixture``: each is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, theta: Tensor) -> Tensor:
        from fenchel.kernels.active import add_up

        ctx.save_for_backward(parts)
        ctx.size = theta.shape[1]
        result = theta.new_empty(parts.shape[:2])
        run(add_up, len(parts), parts.numel(), parts.numpy(), theta.detach().contiguous().numpy(), result.numpy())
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (parts,) = ctx.saved_tensors
        return None, _mixture_of(parts, grad, ctx.size)


class _Mixture(torch.autograd.Function):
    """Linear, and the adjoint of ``_Scores``."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, weights: Tensor, size: int) -> Tensor:
        from fenchel.kernels.active import spread

        ctx.save_for_backward(parts)
        result = weights.new_empty(len(parts), size)
        run(spread, len(parts), parts.numel(), parts.numpy(), weights.detach().contiguous().numpy(), result.numpy())
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (parts,) = ctx.saved_tensors
        return None, _scores_of(parts, grad), None


def dense(found: Found, batch: torch.Size, shape: torch.Size) -> Tensor:
    """The members as zeros and ones, (K, *batch, *shape)."""
    rows, members, _ = found.parts.shape
    y = found.weights.new_zeros(rows, members, shape.numel() + 1).scatter(2, found.parts, 1.0)
    return y[..., :-1].transpose(0, 1).reshape(members, *batch, *shape)


def _own_higher(structure: Structure, found: Found, batch: torch.Size, shape: torch.Size) -> Tensor | None:
    """Higher-order scores of the members (R, K), as a function of the structure's tensors; None if none can move.

    Where a user's structure keeps its tensors nobody knows: only its scores tell whether they have a derivative.
    """
    if not structure.has_higher or not (_traced() or torch.is_grad_enabled()):
        return None
    if isinstance(structure, Searched):
        tensors = own_tensors(structure)
        if not tensors or not (_traced() or any(t.requires_grad for t in tensors)):
            return None
    higher = structure.higher(dense(found, batch, shape))  # members in front: leading dimensions broadcast
    if higher is None:
        return None
    members = found.parts.shape[1]
    return higher.double().expand(members, *batch).reshape(members, len(found.parts)).transpose(0, 1)


def _differentiated(theta: Tensor, own: Tensor | None) -> bool:
    """Whether a derivative in either mode could be asked for."""
    return _traced() or theta.requires_grad or (own is not None and own.requires_grad)


def _traced() -> bool:
    """Whether derivatives may be on their way that ``requires_grad`` does not tell of."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


class _Search(torch.autograd.Function):
    """``search`` on the tensors behind those of a transformation; nothing of it is differentiable."""

    @staticmethod
    def forward(
        structure: Structure, options: Options, scores: Tensor, mask: Tensor | None, start: Tensor | None, *own: Tensor
    ) -> tuple[Tensor, ...]:
        tensors = own_tensors(structure)
        plain = copy.deepcopy(structure, {id(old): new for old, new in zip(tensors, own, strict=True)})
        return tuple(_search(plain, scores, mask, start, options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("the search has no derivative")

    @staticmethod
    def vmap(info: Any, in_dims: Any, structure: Structure, *args: Any) -> tuple[Any, Any]:
        raise RuntimeError(
            f"SparseMAP over {type(structure).__name__} cannot be mapped by vmap: leading dimensions are batch, "
            "so pass them at once"
        )


def _search(structure: Structure, scores: Tensor, mask: Tensor | None, start: Tensor | None, options: Options) -> Found:
    check_scores(structure, scores)
    if not concrete(scores):
        raise RuntimeError("SparseMAP cannot be compiled or exported: how long it runs depends on the scores")
    with torch.no_grad():
        problem = Problem(structure, scores, mask)
        solver = _Solver(problem, options)
        if start is not None:
            solver.offer(start)
        solver.solve()
        return solver.found()


class _Solver:
    """Rows of active sets, as the loops in ``kernels.active`` know them."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self.problem, self.options = problem, options
        self.oracle = problem.oracle()
        self.theta = centered(problem)
        rows, parts = self.theta.shape
        self.mu = np.zeros((rows, parts))
        self.residual = self.theta.copy()
        self.sizes = np.zeros(rows, np.int64)
        self.state = np.zeros(rows, np.int64)
        self.gap = np.where(problem.bad, np.nan, 0.0)
        self.iterations = np.zeros(rows, np.int64)
        self.goal = np.array([options.tol**2 / 2])
        self.live = problem.live()
        self.explorer = problem.structure.explorer(problem.batch, problem.shape)
        self._allocate(min(_MEMBERS, parts + 1), 1)

    def _allocate(self, members: int, most: int) -> None:
        """Make room for so many members with so many parts, and keep what is there."""
        rows = len(self.theta)
        old = self.__dict__.copy()
        self.members = np.zeros((rows, members, most), np.int32)
        self.counts = np.zeros((rows, members), np.int64)
        self.weights, self.values, self.higher = (np.zeros((rows, members)) for _ in range(3))
        self.solution = np.zeros((rows, members + 1))
        self.inverse = np.empty((rows, members + 1, members + 1))
        for name in ("members", "counts", "weights", "values", "higher", "solution", "inverse"):
            if name in old:
                before = old[name]
                getattr(self, name)[tuple(slice(0, n) for n in before.shape)] = before

    def _advance(self, live: Array, parts: Array, bonus: Array, mode: int) -> None:
        from fenchel.kernels import active

        members, most = self.members.shape[1:]
        if self.sizes.max(initial=0) >= members or parts.shape[1] > most:
            self._allocate(2 * members if self.sizes.max(initial=0) >= members else members, max(most, parts.shape[1]))
        work = len(live) * (self.theta.shape[1] + int(self.sizes.max(initial=0)) ** 2)
        run(active.advance, len(live), work, live, parts, bonus, *self._rows(), mode, self.goal)

    def _rows(self) -> tuple[Array, ...]:
        """What the loops know of every row."""
        active_sets = (self.members, self.counts, self.sizes, self.weights, self.solution)
        scores = (self.values, self.higher, self.inverse)
        return self.theta, *active_sets, *scores, self.mu, self.residual, self.gap, self.state

    def _explored(self, live: Array) -> Array:
        """Let the structure search by itself, where it can: the rows that are left."""
        from fenchel.kernels import active

        if self.explorer is None:
            return live
        kernel, most, *own = self.explorer
        if self.members.shape[2] < most:
            self._allocate(self.members.shape[1], most)
        rows = live
        while rows.size:
            if self.sizes.max() == self.members.shape[1]:
                self._allocate(2 * self.members.shape[1], self.members.shape[2])
            work = len(rows) * self.members.shape[1] * (self.theta.shape[1] + self.members.shape[1] ** 2)
            limits = (self.goal, self.iterations, self.options.max_iter)
            run(kernel, len(rows), work, rows, *self._rows(), *limits, *own)
            rows = rows[(self.sizes[rows] == self.members.shape[1]) & (self.state[rows] == active.LIVE)]
        return self._going_on(live)

    def offer(self, start: Tensor) -> None:
        """Begin with structures that may be right: those that improve become members."""
        from fenchel.kernels import active

        problem = self.problem
        event = problem.structure.event_dim
        if start.dim() != problem.scores.dim() + 1 or (*start.shape[: -event - 1], *start.shape[-event:]) != (
            *problem.batch,
            *problem.shape,
        ):
            raise ValueError(
                f"start must hold structures of shape (…, K, parts) for scores of shape {tuple(problem.scores.shape)}, "
                f"got {tuple(start.shape)}"
            )
        rows = start.detach().movedim(-event - 1, 0)
        rows = rows.reshape(len(rows), len(self.theta), problem.shape.numel())
        for y in rows:
            parts = places(y)
            ones = (y == 1).cpu().numpy()  # a row of NaN has none
            allowed = ones.any(-1) & ~(ones & (self.theta == -np.inf)).any(-1)
            higher = problem.structure.higher(y.double().reshape(*problem.batch, *problem.shape))
            bonus = (
                np.zeros(len(y)) if higher is None else higher.cpu().expand(problem.batch).reshape(-1).numpy().copy()
            )
            kept = self.live[(allowed & (bonus > -np.inf))[self.live]]
            kept = kept[self._are_structures(ones, kept)]
            self._advance(kept, parts[kept], bonus[kept], active.OFFER)

    def resume(self, sets: ActiveSets) -> None:
        """Begin with the active sets of an earlier search of as many rows, whose scores may have been others."""
        from fenchel.kernels import active

        self._allocate(sets.members.shape[1] + _MEMBERS, sets.members.shape[2])
        for name in ("members", "counts", "weights", "inverse"):
            before = getattr(sets, name)
            getattr(self, name)[tuple(slice(0, n) for n in before.shape)] = before
        self.higher[:, : sets.members.shape[1]] = self._higher_of(sets)
        rows = self.live[sets.sizes[self.live] > 0]
        self.sizes[rows] = sets.sizes[rows]
        work = len(rows) * int(self.sizes.max(initial=0)) ** 2
        run(active.resume, len(rows), work, rows, *self._rows()[:-2])

    def _higher_of(self, sets: ActiveSets) -> Array:
        """The members' higher-order scores under this problem's structure."""
        problem, parts = self.problem, self.theta.shape[1]
        if not problem.structure.has_higher:
            return np.zeros_like(sets.weights)
        rows, members, most = sets.members.shape
        held = np.arange(most) < sets.counts[..., None]
        y = np.zeros((rows, members, parts + 1))
        np.put_along_axis(y, np.where(held, sets.members, parts).astype(np.int64), 1.0, -1)
        posed = torch.from_numpy(y[..., :-1]).to(problem.scores.device).transpose(0, 1)
        higher = problem.structure.higher(posed.reshape(members, *problem.batch, *problem.shape))
        assert higher is not None
        found: Array = higher.double().expand(members, *problem.batch).reshape(members, rows).T.cpu().numpy().copy()
        return found

    def sets(self) -> ActiveSets:
        """The active sets, to begin another search with."""
        room = max(int(self.sizes.max(initial=1)), 1)
        held = (self.members[:, :room], self.counts[:, :room], self.weights[:, :room])
        return ActiveSets(self.sizes, *held, self.inverse[:, : room + 1, : room + 1])

    def _are_structures(self, ones: Array, rows: Array) -> Array:
        """Which rows of zeros and ones are structures, given the mask: those that the oracle finds if asked for."""
        posed = np.where(self.theta == -np.inf, -np.inf, np.where(ones, _FAR, -_FAR))
        best, _ = self.oracle(posed, rows)
        found = np.zeros((len(rows), ones.shape[1] + 1), dtype=bool)
        found[np.arange(len(rows))[:, None], best] = True  # −1 is the extra column
        same: Array = (found[:, :-1] == ones[rows]).all(-1)
        return same

    def solve(self) -> None:
        """Ask for the best structure of what is left, take it in, until nothing is better."""
        from fenchel.kernels import active

        live = self._explored(self.live)
        while live.size:
            parts, bonus = self.oracle(self.residual, live)
            self.problem.check_feasible(live, bonus)
            self.iterations[live] += 1
            self._advance(live, parts, bonus, active.SOLVE)
            live = self._explored(self._going_on(live))
        live = self.live[self.state[self.live] == active.LIVE]
        if live.size:
            parts, bonus = self.oracle(self.residual, live)
            self._advance(live, parts, bonus, active.CERTIFY)
            self._warn()
        if self.options.complete:
            self._complete()

    def _going_on(self, live: Array) -> Array:
        """Those rows that are not done and may try more."""
        from fenchel.kernels import active

        going: Array = live[(self.state[live] == active.LIVE) & (self.iterations[live] < self.options.max_iter)]
        return going

    def _warn(self) -> None:
        open_rows = self.gap > self.options.tol
        if open_rows.any() and not self.options.quiet:
            warnings.warn(
                f"SparseMAP: {int(open_rows.sum())} of {len(open_rows)} rows are not solved to tol "
                f"{self.options.tol:g} after max_iter = {self.options.max_iter} calls of the oracle; the largest gap "
                f"is {self.gap[open_rows].max():.1e}",
                stacklevel=7,
            )

    def _complete(self) -> None:
        """Take in, with weight 0, structures that tie with the members but lie outside their affine hull.

        At a tie, such as scores that are all zero, few members can give the optimum, and marginals would seem to move
        along these only. Where marginals have a derivative, the optimum lies inside its face, so that noise across the
        members' hull is higher somewhere on the face: one more call of the oracle finds what is missing.
        """
        from fenchel.kernels import active

        parts = self.theta.shape[1]
        noise = np.random.Generator(np.random.PCG64(0)).uniform(-1.0, 1.0, parts)
        probe, scale = np.empty_like(self.theta), np.array([_NOISE])
        live = self.live
        self.state[live] = active.LIVE
        while live.size:
            work = len(live) * (parts + int(self.sizes.max()) ** 2)
            arrays = (noise, self.theta, self.members, self.counts, self.sizes, self.inverse, self.mu, probe, scale)
            run(active.outward, len(live), work, live, *arrays)
            found, bonus = self.oracle(probe, live)
            self._advance(live, found, bonus, active.COMPLETE)
            live = live[self.state[live] == active.LIVE]

    def found(self) -> Found:
        """The active sets as tensors beside the scores."""
        from fenchel.kernels import active

        rows, parts = self.theta.shape
        room, most = max(int(self.sizes.max(initial=1)), 1), self.members.shape[2]
        index = np.empty((rows, room, most), np.int64)
        weights, higher, jacobian = np.empty((rows, room)), np.empty((rows, room)), np.empty((rows, room, room))
        held = (self.members, self.counts, self.sizes, self.weights, self.higher, self.inverse)
        run(active.collect, rows, index.size + jacobian.size, *held, parts, index, weights, higher, jacobian)
        device = self.problem.scores.device
        arrays = (index, weights, higher, jacobian, self.gap, self.iterations)
        return Found(*(torch.from_numpy(a).to(device) for a in arrays))


def centered(problem: Problem) -> Array:
    """Scores less the largest of each group of parts of which all structures hold equally many."""
    dims = problem.structure.fixed_dims
    if dims == 0:
        return problem.theta
    grouped = problem.theta.reshape(-1, *problem.shape)
    axes = tuple(range(grouped.ndim - dims, grouped.ndim))
    top = grouped.max(axes, keepdims=True, initial=-np.inf)
    shifted: Array = grouped - np.where(np.isfinite(top), top, 0.0)
    return shifted.reshape(problem.theta.shape)
