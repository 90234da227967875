"""Entmax, and its loss for class indices, of scores whose last dimension is spread over the ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fenchel import losses
from fenchel._checks import check_floats, check_integers
from fenchel._torch import apply_function, differentiable_once, known, outside_graphs, tracks
from fenchel.distributed.collectives import Group, all_sum, check_group, check_same, layout
from fenchel.distributed.thresholds import Alpha, Solution, choose, slope_in_alpha, solve_rows
from fenchel.losses import Reduction, check_reduction, is_kept
from fenchel.regularizers import tsallis
from fenchel.regularizers.rows import apply_mask, parameter_rows

_ALLOWED = "1 <= alpha <= 2"
_INSTEAD = "for second derivatives gather the scores and use the function of one process"


@outside_graphs("fenchel.distributed.entmax", "talks to other ranks")
def entmax(scores: Tensor, alpha: Alpha = 1.5, mask: Tensor | None = None, *, group: Group = None) -> Tensor:
    r"""α-entmax along the last dimension, whose entries are spread over the ranks of a group.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \Omega_\alpha(p)

    The same as :func:`fenchel.entmax` of all parts side by side. No scores are exchanged: one all-reduce of three
    numbers per row, then a few of three numbers, in double precision, until the threshold is found. The backward pass
    has one all-reduce.

    Args:
        scores: (…, n), this rank's part of every row, floating point. The other dimensions must be equal on all ranks,
            n may differ and be 0.
        alpha: a number in [1, 2], or a tensor with one value per row (size 1 along the last dimension), equal on all
            ranks. Its gradient is complete, and equal on all ranks.
        mask: boolean, broadcasts to ``scores``; True = may receive mass.
        group: the process group; None for the default group.

    Returns:
        This rank's part of the probabilities, the shape and dtype of ``scores``. Differentiable once.

    Example:
        >>> import torch, fenchel.distributed
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> fenchel.distributed.entmax(torch.tensor([2.0, 1.0, -1.0]))  # a group of this process alone
        tensor([0.8307, 0.1693, 0.0000])
        >>> distributed.destroy_process_group()
    """
    ranks = check_group(group)
    rows, a, batch = _pose(scores, alpha, mask)
    if ranks == 1 and scores.shape[-1]:
        return tsallis.entmax(scores, alpha, mask=mask)
    check_same(scores.device, group, {"scores": layout(scores, -1), "alpha": alpha})
    p: Tensor = (
        apply_function(_Entmax, rows, a, ranks, group) if tracks(rows, a) else _solve_map(rows, a, ranks, group)[0]
    )
    return p.reshape(*batch, scores.shape[-1]).to(scores.dtype)


@outside_graphs("fenchel.distributed.entmax_loss", "talks to other ranks")
def entmax_loss(
    scores: Tensor,
    target: Tensor,
    alpha: Alpha = 1.5,
    *,
    mask: Tensor | None = None,
    group: Group = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""The entmax loss of class indices, for classes that are spread over the ranks of a group.

    The same as :func:`fenchel.entmax_loss` of all parts side by side; with ``alpha=1`` it is the cross-entropy of a
    vocabulary-parallel output layer. Every rank gets the whole loss. The gradient of the scores needs no collective in
    the backward pass.

    Args:
        scores: (…, n), this rank's part of the classes, in the order of the ranks. n may differ and be 0.
        target: (…), class indices among the classes of all ranks, equal on all ranks.
        alpha: a number in [1, 2], or a tensor with one value per row (size 1 along the last dimension), equal on all
            ranks. Its gradient is complete, and equal on all ranks.
        mask: boolean, broadcasts to ``scores``; True = may receive mass. A masked target has loss +inf.
        group: the process group; None for the default group.
        ignore_index: a target that is left out of the loss and of the mean.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        A scalar, or the loss of every row for ``reduction="none"``; equal on all ranks. Differentiable once.

    Example:
        >>> import torch, fenchel.distributed
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> fenchel.distributed.entmax_loss(torch.tensor([[0.5, 0.0], [2.0, 0.0]]), torch.tensor([0, 0]))
        tensor(0.0922)
        >>> distributed.destroy_process_group()
    """
    ranks = check_group(group)
    check_reduction(reduction)
    rows, a, batch = _pose(scores, alpha, mask)
    index = check_targets(target, batch, ignore_index)
    if ranks == 1 and scores.shape[-1]:
        options: Any = {"mask": mask, "ignore_index": ignore_index, "reduction": reduction}
        return losses.entmax_loss(scores, target, alpha, **options)
    same = {"target": target, "alpha": alpha, "ignore_index": ignore_index, "reduction": reduction}
    check_same(scores.device, group, {"scores": layout(scores, -1), **same})
    flat = index.reshape(-1)
    loss: Tensor = (
        apply_function(_ClassLoss, rows, flat, a, ranks, group)
        if tracks(rows, a)
        else _solve_loss(rows, flat, a, ranks, group)[0]
    )
    return losses.reduced(loss.reshape(batch), index >= 0, reduction).to(scores.dtype)


# -- what comes in ---------------------------------------------------------------------------------------------------


def _pose(scores: Tensor, alpha: Alpha, mask: Tensor | None) -> tuple[Tensor, Alpha, torch.Size]:
    """Checked scores as rows (R, n) in float32 or better, alpha as a number or one per row, (R, 1), and the batch."""
    check_floats(scores, "scores")
    if scores.dim() == 0:
        raise ValueError("scores must have at least one dimension, got a scalar")
    batch = scores.shape[:-1]
    rows = apply_mask(scores, mask).to(torch.promote_types(scores.dtype, torch.float32))
    return rows.reshape(batch.numel(), scores.shape[-1]), check_alpha(alpha, scores), batch


def check_alpha(alpha: Alpha, scores: Tensor) -> Alpha:
    """Alpha as a number in [1, 2], or as a tensor (R, 1) in double precision, differentiable."""
    alpha = tsallis.check_alpha(alpha)
    if not isinstance(alpha, Tensor):
        if not 1 <= alpha <= 2:
            raise ValueError(f"alpha must satisfy {_ALLOWED} where rows are spread over ranks, got {alpha:g}")
        return float(alpha)
    if known(alpha) and not bool(((alpha >= 1) & (alpha <= 2)).all()):
        raise ValueError(f"alpha must satisfy {_ALLOWED} where rows are spread over ranks, got {alpha.detach()}")
    batch = scores.shape[:-1]
    beside: Any = parameter_rows(alpha, "alpha", scores.new_empty(*batch, 1), -1)
    laid_out: Tensor = beside.double().expand(*batch, 1).reshape(batch.numel(), 1)
    return laid_out


def check_targets(target: Tensor, batch: torch.Size, ignore_index: int) -> Tensor:
    """Class indices as int64, −1 where one is ignored."""
    index = check_integers(target, "target", "integer class indices")
    if target.shape != batch:
        raise ValueError(f"target must have shape {tuple(batch)}, one class index per row, got {tuple(target.shape)}")
    kept = is_kept(target, ignore_index)
    if known(target):
        wrong = index[kept & (index < 0)]
        if wrong.numel():
            raise ValueError(
                f"target must hold class indices or ignore_index, {ignore_index}, got {int(wrong.reshape(-1)[0])}"
            )
    return torch.where(kept, index, -1)


def check_classes(index: Tensor, classes: int) -> None:
    """Check class indices once the number of classes of all ranks is known."""
    if not classes:
        raise ValueError("scores must not be empty along the last dimension on all ranks")
    if known(index) and index.numel() and int(index.max()) >= classes:
        raise ValueError(f"target must hold class indices in [0, {classes - 1}], got {int(index.max())}")


# -- derivatives -----------------------------------------------------------------------------------------------------


def _solve_map(rows: Tensor, alpha: Alpha, ranks: int, group: Group) -> tuple[Tensor, Solution]:
    alpha = alpha.detach() if isinstance(alpha, Tensor) else alpha
    solution, bounds, _ = solve_rows(rows.detach(), alpha, ranks, group)
    if not bounds.total:
        raise ValueError("scores must not be empty along the last dimension on all ranks")
    return solution.spread(solution.probabilities(), rows.shape[-1], rows.dtype), solution


class _Entmax(torch.autograd.Function):
    """The map. J = diag(s) − ssᵀ/‖s‖₁ with s = p^(2−α), and ∂p/∂α = −J g with the derivative g of ∇Ω in alpha."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, alpha: Alpha, ranks: int, group: Group) -> Tensor:
        p, ctx.solution = _solve_map(rows, alpha, ranks, group)
        ctx.group = group
        ctx.save_for_backward(rows, alpha if isinstance(alpha, Tensor) else None)
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _Entmax.gradients(ctx, grad)
        return differentiable_once("fenchel.distributed.entmax", _INSTEAD, found, grad, *ctx.saved_tensors)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Those of the scores and of alpha."""
        solution: Solution = ctx.solution
        entries, learns = solution.entries, ctx.needs_input_grad[1]
        p, s = choose(entries.scores - solution.offset, solution.alpha)
        v = grad if entries.place is None else grad.gather(-1, entries.place)
        v = torch.where(p > 0, v.to(p.dtype), 0.0)
        sums = [s * v, s]
        if learns:
            assert isinstance(solution.alpha, Tensor)
            slope = tsallis.TSALLIS.gradient_sensitivity(None, p, solution.alpha)
            sums += [s * v * slope, s * slope]
        shared = all_sum(torch.cat([each.sum(-1, keepdim=True) for each in sums], -1), ctx.group)
        size = torch.where(shared[:, 1:2] > 0, shared[:, 1:2], 1.0)
        product = s * (v - shared[:, :1] / size)
        to_alpha = None
        if learns:
            to_alpha = shared[:, :1] * shared[:, 3:] / size - shared[:, 2:3]
        return solution.spread(product, grad.shape[-1], grad.dtype), to_alpha, None, None


def _solve_loss(
    rows: Tensor, index: Tensor, alpha: Alpha, ranks: int, group: Group
) -> tuple[Tensor, Solution, Tensor, Tensor]:
    """Losses (R,), the solution, the place of the class in this rank's part, −1 if not here, and where it is masked."""
    alpha = alpha.detach() if isinstance(alpha, Tensor) else alpha
    solution, bounds, place = solve_rows(rows.detach(), alpha, ranks, group, index)
    check_classes(index, bounds.total)
    assert place is not None
    return class_losses(solution, index).to(rows.dtype), solution, place, solution.reached.squeeze(-1) == -torch.inf


def class_losses(solution: Solution, index: Tensor) -> Tensor:
    """The losses of rows, (R,), in double precision: 0 where the index is negative, +inf where the class is masked."""
    loss = (solution.value - solution.reached).clamp_min(0)
    return torch.where(index >= 0, torch.where(solution.broken, torch.nan, loss).squeeze(-1), 0.0)


class _ClassLoss(torch.autograd.Function):
    """The losses of rows. Their gradients are p − y, and the derivative of max_Ω in alpha, whose sums travel here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, alpha: Alpha, ranks: int, group: Group) -> Tensor:
        loss, ctx.solution, place, masked = _solve_loss(rows, index, alpha, ranks, group)
        ctx.index, ctx.place = index, torch.where(masked, -1, place)
        ctx.slope = slope_in_alpha(ctx.solution, group) if ctx.needs_input_grad[2] else None
        ctx.width = rows.shape[-1]
        ctx.save_for_backward(rows, alpha if isinstance(alpha, Tensor) else None)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _ClassLoss.gradients(ctx, grad)
        return differentiable_once("fenchel.distributed.entmax_loss", _INSTEAD, found, grad, *ctx.saved_tensors)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Those of the scores and of alpha."""
        solution: Solution = ctx.solution
        kept = (ctx.index >= 0).unsqueeze(-1)
        rate = torch.where(kept, grad.unsqueeze(-1).to(solution.offset.dtype), 0.0)
        values = solution.probabilities()
        values = values.mul_(rate.to(values.dtype))
        to_rows = solution.spread(values, ctx.width, grad.dtype)
        if bool(solution.broken.any()):
            to_rows = to_rows.masked_fill_(~kept, 0.0)
        subtract_at(to_rows, ctx.place, grad)
        to_alpha = None if ctx.slope is None else torch.where(kept, rate * ctx.slope, 0.0)
        return to_rows, None, to_alpha, None, None


def subtract_at(rows: Tensor, place: Tensor, amount: Tensor) -> Tensor:
    """Subtract one amount per row (R,) at a place of rows (R, n), in place; none where the place is −1."""
    if not rows.shape[-1]:
        return rows
    here = place >= 0
    amount = torch.where(here, amount, 0.0).to(rows.dtype).unsqueeze(-1)
    return rows.scatter_add_(-1, place.clamp_min(0).unsqueeze(-1), -amount)
