"""Mixtures of structures: what a search found, and the answer as a differentiable function of the scores.

On the members of an active set, weights are an affine function of the members' scores q_k = ⟨θ, y_k⟩ + h_k, with the
Jacobian Q = S − S11ᵀS/1ᵀS1, S the inverse Gram matrix. ``choose`` writes the answer as w + Q(q − q₀), in torch
operations, where q₀ is q without its derivative: derivatives of every order and mode are right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import apply_function, tracks, tracks_forward
from fenchel.kernels.compilation import run
from fenchel.structures.base import Searched, Structure, own_tensors


class Group(NamedTuple):
    """The active sets of n rows with K members or fewer, of L parts or fewer out of D.

    Args:
        rows: (n,), int64, which rows.
        parts: (n, K, L), int64, filled up with D.
        weights: (n, K), float64, filled up with 0.
        higher: (n, K), the members' higher-order scores.
        jacobian: (n, K, K), Q.
    """

    rows: Tensor
    parts: Tensor
    weights: Tensor
    higher: Tensor
    jacobian: Tensor


class Faces(NamedTuple):
    """Faces of n rows by their equations: marginals may move wherever parts are free and some sums stay the same.

    The derivative of marginals is then the projector on these directions, F − BᵀSB.

    Args:
        rows: (n,), int64, which rows.
        free: (n, D), float64, the diagonal of F: 1 where parts may move, 0 elsewhere.
        parts: (n, C, L), int64, the free parts of each sum, filled up with D: the ones in the rows of B.
        inverse: (n, C, C), S, the pseudoinverse of BBᵀ.
    """

    rows: Tensor
    free: Tensor
    parts: Tensor
    inverse: Tensor


class Found(NamedTuple):
    """The active sets of R rows, those of similar size in one group.

    Args:
        gap: (R,), the certified duality gap; NaN in rows that hold NaN or +inf.
        iterations: (R,), structures tried.
        faces: of the rows whose members do not span the face that marginals move on; None without any.
        groups: each row is in one of them.
    """

    gap: Tensor
    iterations: Tensor
    faces: Faces | None
    groups: tuple[Group, ...]


class Chosen(NamedTuple):
    """Differentiable: weights (n, K) of each group, marginals (R, D), mean higher-order scores (R,)."""

    weights: tuple[Tensor, ...]
    marginals: Tensor
    higher: Tensor


def choose(structure: Structure, theta: Tensor, found: Found, batch: torch.Size, shape: torch.Size) -> Chosen:
    """The mixtures of active sets, as functions of the scores and of the structure's tensors.

    Args:
        structure: what was searched.
        theta: scores of rows (R, D), float64, zero where nothing may be chosen.
        found: their active sets.
        batch: the shape that the rows have …
        shape: … and that of the parts.
    """
    alone, faces, learns = len(found.groups) == 1, found.faces, trained(structure)
    weights, marginals, means = [], [], []
    for group in found.groups:
        rows = theta if alone else theta[group.rows]
        own = _own_higher(structure, group, batch, shape) if learns else None
        higher = group.higher if own is None else own
        w = mixed = _weights(group, rows, higher)
        if faces is not None:  # marginals on a face move along the face, and not along the members alone
            fixed = torch.isin(group.rows, faces.rows).unsqueeze(-1)
            mixed = _weights(group, torch.where(fixed, rows.detach(), rows), higher)
        weights.append(w)
        marginals.append(_mixture(group.parts, mixed, theta.shape[1]))
        means.append((w * higher).sum(-1))
    marginal, mean = marginals[0], means[0]
    if not alone:
        back = torch.argsort(torch.cat([group.rows for group in found.groups]))
        marginal, mean = torch.cat(marginals)[back], torch.cat(means)[back]
    if faces is not None and tracks(theta):
        moved = theta[faces.rows] - theta[faces.rows].detach()
        kept = (faces.inverse @ _scores(faces.parts, moved).unsqueeze(-1)).squeeze(-1)
        along = faces.free * moved - _mixture(faces.parts, kept, theta.shape[1])
        marginal = marginal.index_add(0, faces.rows, along)
    return Chosen(tuple(weights), marginal, mean)


def _weights(group: Group, theta: Tensor, higher: Tensor) -> Tensor:
    """The weights (n, K), with the derivative Q in the members' scores: those of their parts, and the higher-order."""
    if not tracks(theta, higher):
        return group.weights
    if tracks_forward():
        q = _scores(group.parts, theta) + higher
        return group.weights + (group.jacobian @ (q - q.detach()).unsqueeze(-1)).squeeze(-1)
    weights: Tensor = apply_function(_Weights, group, theta, higher)
    return weights


class _Weights(torch.autograd.Function):
    """Weights that are known, with their derivative Q in the members' scores."""

    @staticmethod
    def forward(ctx: Any, group: Group, theta: Tensor, higher: Tensor) -> Tensor:
        ctx.group, ctx.size = group, theta.shape[1]
        return group.weights.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor]:
        moved = (ctx.group.jacobian @ grad.unsqueeze(-1)).squeeze(-1)
        return None, _mixture(ctx.group.parts, moved, ctx.size) if ctx.needs_input_grad[1] else None, moved


def _scores(parts: Tensor, theta: Tensor) -> Tensor:
    """Aᵀθ: the sums (R, K) of scores (R, D) over the members' parts."""
    if kernels.ENABLED and not tracks_forward():
        scores: Tensor = apply_function(_Scores, parts, theta)
        return scores
    padded = torch.cat([theta, theta.new_zeros(len(theta), 1)], -1)
    return padded.gather(1, parts.flatten(1)).reshape(parts.shape).sum(-1)


def _mixture(parts: Tensor, weights: Tensor, size: int) -> Tensor:
    """Aw: the mixture (R, size) of members with weights (R, K)."""
    if kernels.ENABLED and not tracks_forward():
        mixture: Tensor = apply_function(_Mixture, parts, weights, size)
        return mixture
    repeated = weights.unsqueeze(-1).expand(parts.shape).flatten(1)
    return weights.new_zeros(len(weights), size + 1).scatter_add(1, parts.flatten(1), repeated)[:, :-1]


class _Scores(torch.autograd.Function):
    """The sum of theta over the parts of each member, (R, K): linear, its backward pass is ``_Mixture``."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, theta: Tensor) -> Tensor:
        from fenchel.kernels.cpu.structures.members import sum_scores

        ctx.save_for_backward(parts)
        ctx.size = theta.shape[1]
        result = theta.new_empty(parts.shape[:2])
        run(sum_scores, len(parts), parts.numel(), parts.numpy(), theta.detach().contiguous().numpy(), result.numpy())
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (parts,) = ctx.saved_tensors
        return None, _mixture(parts, grad, ctx.size)


class _Mixture(torch.autograd.Function):
    """The sum of the members times their weights, (R, size): linear, its backward pass is ``_Scores``."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, weights: Tensor, size: int) -> Tensor:
        from fenchel.kernels.cpu.structures.members import mix

        ctx.save_for_backward(parts)
        result = weights.new_empty(len(parts), size)
        run(mix, len(parts), parts.numel(), parts.numpy(), weights.detach().contiguous().numpy(), result.numpy())
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (parts,) = ctx.saved_tensors
        return None, _scores(parts, grad), None


def dense(found: Found, shape: torch.Size) -> Tensor:
    """The members of all rows as zeros and ones, (R, K, *shape)."""
    most = max(group.parts.shape[1] for group in found.groups)
    rows = found.gap.new_zeros(len(found.gap), most, *shape)
    for group in found.groups:
        rows[group.rows, : group.parts.shape[1]] = _members(group, shape)
    return rows


def padded(found: Found, weights: tuple[Tensor, ...]) -> Tensor:
    """Weights of groups side by side, (R, K), filled up with 0."""
    if len(found.groups) == 1:
        return weights[0]
    most = max(w.shape[1] for w in weights)
    rows = torch.cat([torch.nn.functional.pad(w, (0, most - w.shape[1])) for w in weights])
    return rows[torch.argsort(torch.cat([group.rows for group in found.groups]))]


def _members(group: Group, shape: torch.Size) -> Tensor:
    """The members of a group as zeros and ones, (n, K, *shape)."""
    rows, members, _ = group.parts.shape
    y = group.weights.new_zeros(rows, members, shape.numel() + 1).scatter(2, group.parts, 1.0)
    return y[..., :-1].reshape(rows, members, *shape)


def _own_higher(structure: Structure, group: Group, batch: torch.Size, shape: torch.Size) -> Tensor | None:
    """Higher-order scores of the members (n, K), as a function of the structure's tensors; None if it has none."""
    rows, members, _ = group.parts.shape
    y = _members(group, shape).transpose(0, 1)  # members in front: leading dimensions broadcast
    if rows == batch.numel():
        higher, leading = structure.higher(y.reshape(members, *batch, *shape)), (members, *batch)
    else:
        higher, leading = structure.rows(batch, group.rows).higher(y), (members, rows)
    return None if higher is None else higher.double().expand(leading).reshape(members, rows).transpose(0, 1)


def trained(structure: Structure) -> bool:
    """Whether a derivative in either mode could be asked for of higher-order scores."""
    if not structure.has_higher or not (tracks_forward() or torch.is_grad_enabled()):
        return False
    # It is not known where a user's structure keeps its tensors.
    own = own_tensors(structure)
    return not isinstance(structure, Searched) or (len(own) > 0 and tracks(*own))
