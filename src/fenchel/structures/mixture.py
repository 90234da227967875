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
from fenchel._torch import tracks_forward
from fenchel.kernels.cpu.interpreted import run
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
        faces: rows whose members do not span the face that marginals move on; others are not among them.
        groups: each row is in one of them.
    """

    gap: Tensor
    iterations: Tensor
    faces: Faces
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
    alone = len(found.groups) == 1
    on_faces = torch.zeros(len(theta), 1, dtype=torch.bool, device=theta.device)
    on_faces[found.faces.rows] = True
    weights, marginals, means = [], [], []
    for group in found.groups:
        rows = theta if alone else theta[group.rows]
        w, higher = group.weights, group.higher
        mixed = w
        own = _own_higher(structure, group, batch, shape)
        if traced() or rows.requires_grad or (own is not None and own.requires_grad):
            higher = higher if own is None else own
            scores = _scores_of(group.parts, rows)
            w = mixed = group.weights + _moved(group.jacobian, scores + higher)
            if len(found.faces.rows):
                rest = torch.where(on_faces[group.rows], scores.detach(), scores)
                mixed = group.weights + _moved(group.jacobian, rest + higher)
        weights.append(w)
        marginals.append(_mixture_of(group.parts, mixed, theta.shape[1]))
        means.append((w * higher).sum(-1))
    if alone:
        return Chosen(tuple(weights), _on_faces(found.faces, theta, marginals[0]), means[0])
    back = torch.argsort(torch.cat([group.rows for group in found.groups]))
    marginal = _on_faces(found.faces, theta, torch.cat(marginals)[back])
    return Chosen(tuple(weights), marginal, torch.cat(means)[back])


def _on_faces(faces: Faces, theta: Tensor, marginals: Tensor) -> Tensor:
    """Marginals (R, D), and in rows that have a face its derivative in the scores (R, D)."""
    if not len(faces.rows) or not (traced() or theta.requires_grad):
        return marginals
    moved = theta[faces.rows] - theta[faces.rows].detach()
    kept = (faces.inverse @ _scores_of(faces.parts, moved).unsqueeze(-1)).squeeze(-1)
    return marginals.index_add(0, faces.rows, faces.free * moved - _mixture_of(faces.parts, kept, theta.shape[1]))


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
    return kernels.ENABLED and x.device.type == "cpu" and not traced()


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
        from fenchel.kernels.cpu.structures.members import add_up

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
        from fenchel.kernels.cpu.structures.members import spread

        ctx.save_for_backward(parts)
        result = weights.new_empty(len(parts), size)
        run(spread, len(parts), parts.numel(), parts.numpy(), weights.detach().contiguous().numpy(), result.numpy())
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (parts,) = ctx.saved_tensors
        return None, _scores_of(parts, grad), None


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
    """Higher-order scores of the members (n, K), as a function of the structure's tensors; None if none can move.

    Where a user's structure keeps its tensors nobody knows: only its scores tell whether they have a derivative.
    """
    if not structure.has_higher or not (traced() or torch.is_grad_enabled()):
        return None
    if isinstance(structure, Searched):
        tensors = own_tensors(structure)
        if not tensors or not (traced() or any(t.requires_grad for t in tensors)):
            return None
    rows, members, _ = group.parts.shape
    y = _members(group, shape).transpose(0, 1)  # members in front: leading dimensions broadcast
    if rows == batch.numel():
        higher, leading = structure.higher(y.reshape(members, *batch, *shape)), (members, *batch)
    else:
        higher, leading = structure.rows(batch, group.rows).higher(y), (members, rows)
    return None if higher is None else higher.double().expand(leading).reshape(members, rows).transpose(0, 1)


def differentiated(structure: Structure, theta: Tensor) -> bool:
    """Whether a derivative in either mode could be asked for, of scores or of the structure's tensors."""
    return traced() or (torch.is_grad_enabled() and theta.requires_grad) or trained(structure)


def trained(structure: Structure) -> bool:
    """Whether a derivative in either mode could be asked for of higher-order scores."""
    if not structure.has_higher or not (traced() or torch.is_grad_enabled()):
        return False
    # Where a user's structure keeps its tensors nobody knows.
    own = own_tensors(structure)
    return not isinstance(structure, Searched) or any(traced() or t.requires_grad for t in own)


def traced() -> bool:
    """Whether derivatives may be on their way that ``requires_grad`` does not tell of."""
    return tracks_forward()
