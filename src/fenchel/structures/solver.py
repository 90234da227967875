"""The search for active sets: the quadratic program of SparseMAP, by calls of a structure's oracle.

    argmax_μ ⟨θ, μ⟩ + h(μ) − ½‖μ‖²   over the convex hull of the structures

``Solver`` finds the members of the optimal mixture of every row, and their weights.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.compilation import run
from fenchel.structures.base import Array, Problem, places
from fenchel.structures.mixture import Faces, Found, Group

_MEMBERS = 56  # the capacity of a row at first: trees of 20 words need up to 52
_SMALL = 64  # members: rows with at most so many form one group
_FAR = 1e12  # scores larger than any higher-order score
_KEPT = 1 << 25  # bytes: larger arrays are not kept for the next search
_spare = threading.local()  # by type, the largest array that the last searches of a thread have left


@dataclass(frozen=True)
class Options:
    """How to search.

    Args:
        max_iter: calls of the oracle.
        tol: rows stop when marginals are known to be this close to the optimum, and the gap so below tol²/2.
        complete: also look for structures that tie with the members, without which derivatives at ties are wrong.
        trained: whether higher-order scores may have a derivative too.
        quiet: leave it to the caller to look at what was found, and to warn.
    """

    max_iter: int
    tol: float
    complete: bool
    trained: bool = False
    quiet: bool = False


class ActiveSets:
    """The arrays of the active sets of rows, as ``kernels/cpu/structures/active.py`` lays them out.

    Args:
        rows: how many.
        capacity: how many members each row has space for at first …
        most: … and how many parts members have at most.
    """

    def __init__(self, rows: int, capacity: int = 1, most: int = 1) -> None:
        self.sizes = np.zeros(rows, np.int64)
        self.capacities = np.full(rows, capacity)
        self._allocate(most)

    def _allocate(self, most: int) -> None:
        """Allocate arrays for ``capacities`` members per row, of at most so many parts each."""
        slots, entries = self.capacities + 1, (self.capacities + 1) ** 2
        self.starts, self.squares = np.cumsum(slots) - slots, np.cumsum(entries) - entries
        total = int(slots.sum())
        self.members = _array(total * most, np.int32).reshape(total, most)
        self.counts = np.empty(total, np.int64)
        self.weights, self.solution, self.values, self.higher = np.empty((4, total))
        # Float32 holds the integers of Gram matrices exactly.
        self.matrix, self.inverse = _array(int(entries.sum()), np.float32), _array(int(entries.sum()), np.float64)

    def _sets(self, rows: Array | None = None) -> tuple[Array, ...]:
        """All arrays of the active sets, as kernels take them; with ``rows``, the first three for these rows alone."""
        places: tuple[Array, ...] = (self.starts, self.capacities, self.squares)
        places = places if rows is None else tuple(place[rows] for place in places)
        scores = (self.weights, self.solution, self.values, self.higher)
        return *places, self.members, self.counts, *scores, self.matrix, self.inverse

    def release(self) -> None:
        """Leave the largest arrays to the next search of this thread; the sets cannot be used any more."""
        for array in (self.members, self.matrix, self.inverse):
            whole = array if array.base is None else array.base
            kept = getattr(_spare, whole.dtype.name, None)
            if whole.nbytes <= _KEPT and (kept is None or kept.size < whole.size):
                setattr(_spare, whole.dtype.name, whole)
        del self.members, self.matrix, self.inverse

    def reserve(self, rows: Array, most: int) -> None:
        """Enlarge rows that are full by half, and lists of parts to so many parts."""
        full = rows[self.sizes[rows] >= self.capacities[rows]]
        if full.size == 0 and most <= self.members.shape[1]:
            return
        self._enlarge(full, self.capacities[full] + np.maximum(self.capacities[full] // 2, 1), most)

    def _enlarge(self, rows: Array, capacities: Array, most: int) -> None:
        """Give some rows larger capacities, and all lists of parts space for so many parts."""
        from fenchel.kernels.cpu.structures import members

        most = max(most, self.members.shape[1])
        if rows.size == 0 and most == self.members.shape[1]:
            return
        old = self._sets()
        self.capacities = self.capacities.copy()
        self.capacities[rows] = capacities
        self._allocate(most)
        if self.sizes.any():
            run(members.copy_rows, len(self.sizes), self.inverse.size, self.sizes, *old, *self._sets())

    def put(self, rows: Array, other: ActiveSets, of: Array) -> None:
        """Replace the active sets of some rows by those of rows of others."""
        from fenchel.kernels.cpu.structures import members

        narrow = self.capacities[rows] < other.capacities[of]
        self.sizes[rows[narrow]] = 0
        self._enlarge(rows[narrow], other.capacities[of[narrow]], other.members.shape[1])
        self.sizes[rows] = other.sizes[of]
        work = int((self.sizes[rows] ** 2).sum())
        run(members.copy_rows, len(rows), work, self.sizes[rows], *other._sets(of), *self._sets(rows))


class Solver(ActiveSets):
    """The search for the active sets of a problem's rows."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self.problem, self.options = problem, options
        self.oracle = problem.structure.oracle(problem.batch, problem.shape)
        self.theta = problem.theta
        dims = problem.structure.fixed_dims
        if dims:  # less the largest score of each group of parts of which all structures hold equally many
            grouped = problem.theta.reshape(-1, *problem.shape)
            top = grouped.max(tuple(range(-dims, 0)), keepdims=True, initial=-np.inf)
            self.theta = (grouped - np.where(np.isfinite(top), top, 0.0)).reshape(problem.theta.shape)
        rows, parts = self.theta.shape
        self.explorer = problem.structure.explorer(problem.batch, problem.shape)
        super().__init__(rows, min(_MEMBERS, parts + 1), 1 if self.explorer is None else self.explorer[1])
        self.mu = np.zeros((rows, parts))
        self.residual = self.theta.copy()
        self.state = np.zeros(rows, np.int64)
        self.gap = np.where(problem.bad, np.nan, 0.0)
        self.floor = np.zeros(rows)
        self.iterations = np.zeros(rows, np.int64)
        self.goal = np.array([options.tol**2 / 2])
        self.live = problem.live

    def arrays(self) -> tuple[Array, ...]:
        """The arrays that the kernels get: scores, active sets and the state of all rows."""
        places: tuple[Array, ...] = (self.starts, self.capacities, self.squares)
        members = (self.members, self.counts, self.sizes, self.weights, self.solution, self.values, self.higher)
        state = (self.mu, self.residual, self.gap, self.floor, self.state)
        return self.theta, *places, *members, self.matrix, self.inverse, *state

    def work(self, live: Array) -> int:
        """An estimate of the operations of one step of these rows."""
        return int(len(live) * self.theta.shape[1] + (self.sizes[live] ** 2).sum())

    def _advance(self, live: Array, parts: Array, bonus: Array, mode: int) -> None:
        from fenchel.kernels.cpu.structures import active

        self.reserve(live, parts.shape[1])
        run(active.advance, len(live), self.work(live), live, parts, bonus, *self.arrays(), mode, self.goal)

    def _explore(self, rows: Array, tried: Array, most: int, kernel: Any, parts: int, *own: Any) -> None:
        """Run a kernel of ``exploration.py`` on rows; rows whose active set is full are enlarged.

        ``tried`` counts the structures that rows have tried, up to ``most``; ``parts`` is the size of the largest one.
        """
        while rows.size:
            self.reserve(rows, parts)
            members = np.minimum(self.capacities[rows], 2 * parts)  # an estimate: most rows need fewer
            work = len(rows) * self.theta.shape[1] + int((members**2).sum())
            run(kernel, len(rows), work * _MEMBERS, rows, *self.arrays(), self.goal, tried, most, *own)
            rows = self._unfinished(rows[self.sizes[rows] == self.capacities[rows]], tried, most)

    def offer(self, start: Tensor) -> None:
        """Begin with given structures (…, K, parts): those that improve become members."""
        from fenchel.kernels.cpu.structures import active

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
            ones = (y == 1).numpy()  # a row of NaN has none
            allowed = ones.any(-1) & ~(ones & (self.theta == -np.inf)).any(-1)
            higher = problem.structure.higher(y.double().reshape(*problem.batch, *problem.shape))
            bonus = np.zeros(len(y)) if higher is None else higher.expand(problem.batch).reshape(-1).numpy().copy()
            kept = self.live[(allowed & (bonus > -np.inf))[self.live]]
            kept = kept[self._are_structures(ones, kept)]
            self._advance(kept, parts[kept], bonus[kept], active.OFFER)

    def resume(self, sets: ActiveSets, rows: Array) -> None:
        """Begin with active sets of an earlier search, whose scores may have been others."""
        from fenchel.kernels.cpu.structures import active

        self.put(np.arange(len(rows)), sets, rows)
        self._score_members()
        held = self.live[self.sizes[self.live] > 0]
        run(active.resume, len(held), self.work(held), held, *self.arrays())

    def _score_members(self) -> None:
        """The members' higher-order scores, under this problem's structure."""
        problem, structure = self.problem, self.problem.structure
        self.higher[:] = 0.0
        if not structure.has_higher:
            return
        most, width = int(self.sizes.max(initial=1)), self.theta.shape[1]
        k = np.arange(most)
        slots = self.starts[:, None] + np.minimum(k, np.maximum(self.sizes[:, None] - 1, 0))
        held = k < self.sizes[:, None]
        parts = np.arange(self.members.shape[1]) < np.where(held, self.counts[slots], 0)[..., None]
        y = np.zeros((*slots.shape, width + 1))
        np.put_along_axis(y, np.where(parts, self.members[slots], width).astype(np.int64), 1.0, -1)
        posed = torch.from_numpy(y[..., :-1]).transpose(0, 1)
        higher = structure.higher(posed.reshape(most, *problem.batch, *problem.shape))
        assert higher is not None
        scores = higher.double().expand(most, *problem.batch).reshape(most, len(slots)).T.numpy()
        self.higher[slots[held]] = scores[held]

    def _are_structures(self, ones: Array, rows: Array) -> Array:
        """Which rows of ``ones`` are structures: those that the oracle returns for scores that favour them strongly."""
        posed = np.where(self.theta == -np.inf, -np.inf, np.where(ones, _FAR, -_FAR))
        best, _ = self.oracle(posed, rows)
        found = np.zeros((len(rows), ones.shape[1] + 1), dtype=bool)
        found[np.arange(len(rows))[:, None], best] = True  # −1 is the extra column
        same: Array = (found[:, :-1] == ones[rows]).all(-1)
        return same

    def solve(self) -> None:
        """Call the oracle for the best structure of the residual and add it, until none is better than the mixture."""
        from fenchel.kernels.cpu.structures import active

        most, patience = self.options.max_iter, self.problem.structure.patience
        stopped = self._search(self.live, most if patience is None else min(patience, most))
        if patience is not None and patience < most and stopped.size:
            self._restart(stopped)
            stopped = self._search(stopped, most)
        if stopped.size:
            run(active.refine, len(stopped), self.work(stopped), stopped, *self.arrays())
            parts, bonus = self.oracle(self.residual, stopped)
            self._advance(stopped, parts, bonus, active.CERTIFY)
        unsolved = self.gap > np.maximum(self.goal, 2 * self.floor)
        doubted = self.state == active.DOUBTED
        if not self.options.quiet and (unsolved.any() or doubted.any()):
            self._warn(unsolved, doubted)

    def _search(self, live: Array, most: int) -> Array:
        """Search until rows are done or have tried ``most`` structures; return the rows that are not done."""
        from fenchel.kernels.cpu.structures import active

        while True:
            live = self._unfinished(live, self.iterations, most)
            if self.explorer is not None:
                self._explore(live, self.iterations, most, *self.explorer)
                live = self._unfinished(live, self.iterations, most)
            if live.size == 0:
                return self._unfinished(self.live, self.iterations, most + 1)
            parts, bonus = self.oracle(self.residual, live)
            self.problem.check_feasible(live, bonus)
            self.iterations[live] += 1
            self._advance(live, parts, bonus, active.SOLVE)

    def _restart(self, rows: Array) -> None:
        """Replace the members of hard rows by paths along those edges of a layered graph that the optimum uses."""
        from fenchel.kernels.cpu.structures import active, exploration, layers

        problem = self.problem
        graph = problem.structure.layers(problem.batch, problem.shape, self.theta)
        work = graph.ends.size * graph.parts.size
        if work > problem.structure.largest_graph:
            return
        nus, limits, eps = np.empty_like(self.theta), np.empty_like(self.theta), np.zeros(len(self.theta))
        run(layers.anneal, len(rows), 100 * work * len(rows), rows, self.theta, *graph, nus, limits, eps)
        rows = rows[eps[rows] > 0]
        self._enlarge(rows, np.maximum(self.capacities[rows], 1 + (limits[rows] > 0).sum(1)), len(graph.parts))
        run(exploration.decompose, len(rows), 100 * work * len(rows), rows, *self.arrays(), *graph, nus, limits, eps)
        rows = rows[self.sizes[rows] == 0]
        tried, most = np.zeros_like(self.iterations), 4 * self.theta.shape[1]
        self._explore(rows, tried, most, exploration.explore_paths, len(graph.parts), *graph, nus, eps)
        self.state[rows] = active.LIVE

    def _unfinished(self, rows: Array, tried: Array, most: int) -> Array:
        """Those of the rows that are not done and have tried fewer than ``most`` structures."""
        from fenchel.kernels.cpu.structures import active

        state = self.state[rows]
        unfinished: Array = rows[((state == active.LIVE) | (state == active.FRESH)) & (tried[rows] < most)]
        return unfinished

    def _warn(self, unsolved: Array, doubted: Array) -> None:
        if unsolved.any():
            say(
                f"SparseMAP: {int(unsolved.sum())} of {len(unsolved)} rows are not solved to tol "
                f"{self.options.tol:g} after at most max_iter = {self.options.max_iter} calls of the oracle; the "
                f"largest gap is {self.gap[unsolved].max():.1e}",
                9,
            )
        if doubted.any():
            say(
                f"SparseMAP: {type(self.problem.structure).__name__}.map is not exact: in {int(doubted.sum())} of "
                f"{len(doubted)} rows it returned a structure that scores less than one it had returned before. "
                "Marginals and gaps may be wrong there",
                9,
            )

    def found(self, faces: Faces | None) -> Found:
        """The active sets as tensors."""
        from fenchel.kernels.cpu.structures import members

        rows, parts = self.theta.shape
        kinds = np.ceil(np.log2(np.maximum(self.sizes, _SMALL)))
        groups = []
        for kind in np.unique(kinds) if rows else (0.0,):
            inside = np.flatnonzero(kinds == kind)
            n, size, most = len(inside), max(int(self.sizes[inside].max(initial=1)), 1), self.members.shape[1]
            index = np.empty((n, size, most), np.int64)
            weights, higher, jacobian = np.empty((n, size)), np.empty((n, size)), np.empty((n, size, size))
            held = (self.members, self.counts, self.sizes, self.weights, self.higher, self.inverse)
            places = (inside, self.starts, self.capacities, self.squares)
            work = index.size + jacobian.size
            run(members.gather, n, work, *places, *held, parts, index, weights, higher, jacobian)
            groups.append(Group(*map(torch.from_numpy, (inside, index, weights, higher, jacobian))))
        return Found(torch.from_numpy(self.gap), torch.from_numpy(self.iterations), faces, tuple(groups))


def _array(size: int, dtype: type[np.generic]) -> Array:
    """An array (size,) with arbitrary contents: where possible the start of one that an earlier search has released.

    The first touch of fresh memory is a page fault per 4 KB, which for thousands of small searches would take as long
    as their steps.
    """
    name = np.dtype(dtype).name
    kept = getattr(_spare, name, None)
    if kept is None or kept.size < size:
        return np.empty(size, dtype)
    setattr(_spare, name, None)
    found: Array = kept[:size]
    return found


def say(message: str, depth: int) -> None:
    """Warn with the source line ``depth`` calls above: where argmax was called."""
    warnings.warn(message, stacklevel=depth)
