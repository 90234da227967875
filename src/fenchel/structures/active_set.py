"""The search for active sets, under torch's transformations of functions too, and their completion at ties.

At a tie, such as scores that are all zero, few members can give the optimum, and marginals would seem to move along
these only. They move along the smallest face of the structures' convex hull that holds them. There are two ways to know
its directions: members that span it, with weight 0 if need be, or its equations (``Faces``), which are few where the
face has very many dimensions.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fenchel._torch import transformed
from fenchel.kernels.compilation import run
from fenchel.structures.base import Array, Problem, Structure, Sums, own_tensors
from fenchel.structures.mixture import Faces, Found, Group
from fenchel.structures.solver import ActiveSets, Options, Solver, say

_NOISE = 1e-9  # relative to the residual scores: structures within it of a tie compete with those that tie
_MISSES = 2  # directions in which nothing is found, either way, before a face counts as complete
_NEGLIGIBLE = 1e-12  # marginals this close to 0 or 1 count as equal to it, and sums this close to their bounds
_MANY = 64  # missing directions from which on the equations of the face are tried
_STEP = 0.1  # from the marginals towards the nearest bound, to see whether there are mixtures on both sides
_OFF = 1e-3  # of that step: a mixture this close counts as found


def search(structure: Structure, scores: Tensor, mask: Tensor | None, start: Tensor | None, options: Options) -> Found:
    """Find the active sets of scores (…, parts), also under torch's transformations of functions.

    Args:
        structure: what is searched.
        scores: (…, parts).
        mask: boolean, broadcasts to the scores.
        start: structures to begin with, (…, K, parts).
        options: how to search.
    """
    scores = scores.detach()
    if transformed():
        own = [t.detach() for t in own_tensors(structure)]
        return _unflatten(_Search.apply(structure, options, scores, mask, start, *own))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        solver = Solver(Problem(structure, scores, mask), options)
        if start is not None:
            solver.offer(start)
        solver.solve()
        found = solver.found(complete(solver))
        solver.release()
        return found


def search_again(
    structure: Structure, scores: Tensor, sets: ActiveSets, rows: Array, options: Options
) -> tuple[Found, Tensor]:
    """Find the active sets of scores, starting from those of ``rows`` in ``sets``, which are replaced by the new ones.

    Also returns in which rows the oracle was seen not to be exact. The gap is 0 in rows that are solved to the
    tolerance, or to rounding. Not for transformations of functions.
    """
    from fenchel.kernels.cpu.structures import active

    with torch.no_grad():
        solver = Solver(Problem(structure, scores, None), options)
        solver.resume(sets, rows)
        solver.solve()
        sets.put(rows, solver, np.arange(len(rows)))
        closed = solver.gap <= np.maximum(solver.goal, 2 * solver.floor)
        found = solver.found(complete(solver))
        gap = torch.from_numpy(np.where(closed, 0.0, solver.gap))
        return found._replace(gap=gap), torch.from_numpy(solver.state == active.DOUBTED)


def _flatten(found: Found) -> tuple[Tensor, ...]:
    faces = found.faces or ()
    return found.gap, found.iterations, *faces, *(tensor for group in found.groups for tensor in group)


def _unflatten(tensors: tuple[Tensor, ...]) -> Found:
    gap, iterations, *rest = tensors
    size = len(Group._fields)
    start = len(rest) % size  # faces have fewer tensors than a group
    groups = tuple(Group(*rest[i : i + size]) for i in range(start, len(rest), size))
    return Found(gap, iterations, Faces(*rest[:start]) if start else None, groups)


class _Search(torch.autograd.Function):
    """``search`` on the plain tensors of a transformation of functions; not differentiable."""

    @staticmethod
    def forward(
        structure: Structure, options: Options, scores: Tensor, mask: Tensor | None, start: Tensor | None, *own: Tensor
    ) -> tuple[Tensor, ...]:
        tensors = own_tensors(structure)
        plain = copy.deepcopy(structure, {id(old): new for old, new in zip(tensors, own, strict=True)})
        return _flatten(search(plain, scores, mask, start, options))

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


def complete(solver: Solver) -> Faces | None:
    """Make the directions of every row known, by its members or by its equations.

    Structures that tie with the members but lie outside their affine hull are added with weight 0. Where marginals
    have a derivative, the optimum lies inside the face of all that tie, so that noise orthogonal to the members' hull
    is higher somewhere on the face: a call of the oracle finds what is missing. If the first call finds nothing, the
    members span the smallest face that the optimum lies in, and that is an element of the generalized Jacobian.
    Otherwise the search goes on until the whole face is spanned, which is another: until fresh noise and its opposite
    find nothing.

    Returns the faces of rows that are known by their equations; None without any.
    """
    from fenchel.kernels.cpu.structures import members

    faces: Faces | None = None
    if not solver.options.complete:
        return faces
    random = np.random.Generator(np.random.PCG64(0))
    rows, most = len(solver.theta), solver.options.max_iter
    live, misses, scale = solver.live, np.zeros(rows, np.int64), np.full(rows, _NOISE)
    known = np.zeros(rows, dtype=np.bool_)
    for call in range(most):
        noise = random.uniform(-1.0, 1.0, solver.theta.shape[1])
        verdict = _add_tied(solver, live, noise, scale)
        if call == 0:
            live, verdict = live[verdict != 0], verdict[verdict != 0]
            faces = _faces(solver, live, random) if live.size else None
            if faces is not None:
                known[faces.rows.numpy()] = True
            if not solver.options.trained:
                live, verdict = live[~known[live]], verdict[~known[live]]
        misses[live[verdict == 1]] = 0
        missed = live[verdict < 1]
        back = _add_tied(solver, missed, -noise, scale)
        misses[missed] = np.where(back == 1, 0, misses[missed] + 1)
        live = live[misses[live] < _MISSES]
        if live.size == 0:
            break
    if live.size:
        what = "of higher-order scores " if known[live].all() else ""
        say(
            f"SparseMAP: derivatives {what}are incomplete in {live.size} of {rows} rows: more structures tie there "
            f"than max_iter = {most} calls of the oracle find",
            8,
        )
    sets = (solver.capacities, solver.squares, solver.sizes, solver.matrix, solver.inverse)
    run(members.refresh_inverses, len(solver.live), solver.work(solver.live), solver.live, *sets)
    return faces


def _add_tied(solver: Solver, live: Array, noise: Array, scale: Array) -> Array:
    """Try to add a structure that ties, found with noise orthogonal to the members' hull; return a verdict per row.

    1 where one was added, 0 if the best one lies in the hull, −1 if it does not tie: there the noise is made smaller.
    """
    from fenchel.kernels.cpu.structures import members

    verdict = np.zeros(len(live), np.int64)
    if live.size == 0:
        return verdict
    probe = np.empty_like(solver.theta)
    run(members.perturb_residuals, len(live), solver.work(live), live, noise, scale, probe, *solver.arrays())
    parts, bonus = solver.oracle(probe, live)
    solver.reserve(live, parts.shape[1])
    run(members.add_tied, len(live), solver.work(live), live, parts, bonus, verdict, *solver.arrays())
    scale[live[verdict < 0]] /= 10
    return verdict


class _Face(NamedTuple):
    """The face of a row by its equations, as ``Faces`` has it, and how many dimensions it has."""

    free: Array
    parts: Array
    inverse: Array
    dims: int

    def project(self, direction: Array) -> Array:
        """Project a direction (parts,) on the face."""
        size = len(direction)
        kept = self.inverse @ np.append(direction, 0.0)[self.parts].sum(1)
        change = np.zeros(size + 1)
        np.add.at(change, self.parts, kept[:, None])
        projected: Array = self.free * direction - change[:-1]
        return projected


def _faces(solver: Solver, rows: Array, random: np.random.Generator) -> Faces | None:
    """Find the equations of the faces of those rows whose members do not span them; None if there are none."""
    problem = solver.problem
    sums = problem.structure.sums(problem.shape)
    if sums is None:
        return None
    least = 1 if sums.exact else _MANY
    found = {row: _face(sums, solver.mu[row]) for row in rows}
    found = {row: face for row, face in found.items() if face.dims >= solver.sizes[row] - 1 + least}
    if found and not sums.exact:
        fine = _described(solver, found, random)
        found = {row: face for (row, face), good in zip(found.items(), fine, strict=True) if good}
    if not found:
        return None
    free, parts, inverse, _ = zip(*found.values(), strict=True)
    arrays = np.array(list(found)), np.stack(free), np.stack(parts), np.stack(inverse)
    return Faces(*map(torch.from_numpy, arrays))


def _face(sums: Sums, mu: Array) -> _Face:
    """Compute the smallest face that contains μ (parts,), provided that the sums describe it.

    A part that is 0 or 1 on average is so in every structure of the face, and a sum that is at its bound on average is
    so in all of them.
    """
    size = len(mu)
    free = (mu > _NEGLIGIBLE) & (mu < 1 - _NEGLIGIBLE)
    off = np.abs(np.append(mu, 0.0)[sums.groups].sum(1) - sums.bounds)
    still = np.isnan(sums.bounds) | (off <= _NEGLIGIBLE * sums.groups.shape[1])
    inside = np.append(free, False)[sums.groups] & still[:, None]
    parts = np.sort(np.where(inside, sums.groups, size).astype(np.int64), 1)  # what fills up comes last
    ones = np.zeros((len(parts), size + 1))
    np.put_along_axis(ones, parts, 1.0, 1)
    values, vectors = np.linalg.eigh(ones[:, :-1] @ ones[:, :-1].T)
    kept = values > 1e-9 * max(values.max(initial=0.0), 1.0)
    inverse = (vectors[:, kept] / values[kept]) @ vectors[:, kept].T
    return _Face(free.astype(np.float64), parts, inverse, int(free.sum() - kept.sum()))


def _described(solver: Solver, faces: dict[int, _Face], random: np.random.Generator) -> Array:
    """Test in which rows the sums describe the face, boolean (n,).

    If the face has more equations than the sums, a random direction that keeps the sums leads out of the face with
    probability 1: on one side of μ, or on the other, there is no mixture. SparseMAP itself decides that: it projects
    on mixtures.
    """
    problem, rows = solver.problem, np.array(list(faces))
    mu = solver.mu[rows]
    free = np.stack([face.free for face in faces.values()])
    direction = np.stack([face.project(random.normal(size=mu.shape[1])) for face in faces.values()])
    nearest = np.where(free > 0, np.minimum(mu, 1 - mu), np.inf).min(1)
    direction *= (_STEP * nearest / np.abs(direction).max(1))[:, None]
    length = np.linalg.norm(direction, axis=1)
    structure = problem.structure.rows(problem.batch, torch.from_numpy(rows))
    options = Options(solver.options.max_iter, 0.1 * _OFF * float(length.min()), complete=False, quiet=True)
    good = np.ones(len(rows), dtype=np.bool_)
    for wanted in (mu + direction, mu - direction):
        scores = np.where(solver.theta[rows] > -np.inf, wanted, -np.inf).reshape(-1, *problem.shape)
        posed = Problem(structure, torch.from_numpy(scores), None)
        other = Solver(posed, options)
        other.resume(solver, rows)
        other.solve()
        good &= np.linalg.norm(other.mu - wanted, axis=1) <= _OFF * length
    return good
