"""Active sets of scores, under torch's transformations of functions too; nothing is differentiated here."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._torch import transformed
from fenchel.structures.base import Array, Problem, Structure, own_tensors
from fenchel.structures.completion import complete
from fenchel.structures.mixture import Faces, Found, Group
from fenchel.structures.solver import ActiveSets, Options, Solver


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
    if transformed():
        own = [t.detach() for t in own_tensors(structure)]
        return _unflatten(_Search.apply(structure, options, scores, mask, start, *own))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        solver = Solver(Problem(structure, scores, mask), options)
        if start is not None:
            solver.offer(start)
        solver.solve()
        return solver.found(complete(solver))


def search_again(
    structure: Structure, scores: Tensor, sets: ActiveSets, rows: Array, options: Options
) -> tuple[Found, Tensor]:
    """``search``, beginning with the active sets of rows that were searched before, and leaving new ones there.

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
    """``search`` on the tensors behind those of a transformation; nothing of it is differentiable."""

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
