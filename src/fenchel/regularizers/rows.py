"""Scores, targets, masks and parameters: checked, and laid out as rows with the dimension to choose along last."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._checks import (
    broadcasts,
    check_device,
    check_expands,
    check_floats,
    check_kind,
    check_like,
    check_mask,
    is_integer,
    kind,
)
from fenchel._torch import concrete, known


def check_scores(scores: Tensor, dim: int, name: str = "scores") -> int:
    """Check scores and the dimension to choose along; return it counted from the front."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        check_floats(scores, name)
    if type(dim) is not int and not is_integer(dim):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    concrete(scores)  # raises if the memory was freed, before torch reads it
    rank = scores.dim()
    if rank == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar")
    if not -rank <= dim < rank:
        raise ValueError(f"dim must be in [{-rank}, {rank - 1}] for {name} of shape {tuple(scores.shape)}, got {dim}")
    if scores.shape[dim] == 0:
        raise ValueError(f"{name} must not be empty along dim {dim}, got shape {tuple(scores.shape)}")
    return int(dim) % rank


def check_indices(target: Tensor, scores: Tensor, dim: int, ignored: int | None = None) -> Tensor:
    """Check class indices of the shape of scores without ``dim``; return them as int64.

    ``ignored`` is the index that the caller has left out of them, which the error names as allowed.
    """
    if not isinstance(target, Tensor) or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target must hold integer class indices or floating-point probabilities, got {kind(target)}")
    expected = scores.shape[:dim] + scores.shape[dim + 1 :]
    if target.shape != expected:
        raise ValueError(
            f"target of class indices must have shape {tuple(expected)} for scores of shape "
            f"{tuple(scores.shape)} with classes along dim {dim}, got {tuple(target.shape)}; "
            "for torch's layout (N, C, …) pass dim=1"
        )
    target = target.long()  # before any comparison: eight bits would wrap around
    check_range(target, scores.shape[dim], ignored=ignored)
    return target


def check_range(target: Tensor, classes: int, least: int = 0, ignored: int | None = None) -> None:
    """Check that class indices are below ``classes`` and not below ``least``, which is −1 where rows are left out.

    A graph cannot look at them: operators call it again when they run, before kernels read and write at these places.
    """
    if known(target) and target.numel():
        low, high = map(int, target.aminmax())
        if low < least or high >= classes:
            wrong = target[(target < least) | (target >= classes)]
            other = "" if ignored is None else f" or ignore_index, {ignored}"
            raise ValueError(f"target must hold class indices in [0, {classes - 1}]{other}, got {wrong[0].item()}")


def check_probabilities(target: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Check probabilities of the shape of scores: not negative, with sum 1 along ``dim``."""
    check_like(target, "target of probabilities", scores)
    if known(target):
        tolerance = max(1e-3, 4 * torch.finfo(target.dtype).eps)
        totals = target.sum(dim, dtype=torch.promote_types(target.dtype, torch.float32))
        least = target.amin() if target.numel() else 0.0
        if bool(least < 0) or bool(((totals - 1).abs() > tolerance).any()):
            rows = target.movedim(dim, -1)
            wrong = ((totals - 1).abs() > tolerance) | (rows < 0).any(-1)
            place = wrong.nonzero()[0].tolist()
            row, total = rows[tuple(place)], totals[tuple(place)]
            place.insert(dim, ":")
            raise ValueError(
                f"target must hold probabilities: entries ≥ 0 that sum to 1 along dim {dim}, got entries from "
                f"{row.min().item():.4g} with sum {total.item():.4g} in target[{', '.join(map(str, place))}]"
            )
    return target


def apply_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with −inf wherever the mask is False."""
    if mask is None:
        return scores
    check_expands(check_mask(mask), "mask", scores)
    check_device(scores, "scores", mask=mask)
    return torch.where(mask, scores, -torch.inf)


def combine_masks(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Two masks of attention as one: boolean (True = takes part), or numbers that are added to the scores."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool:
        first, second = second, first
    return torch.where(second, first, -torch.inf) if second.dtype == torch.bool else first + second


def to_rows(scores: Tensor, dim: int, mask: Tensor | None, *, as_they_are: bool = False) -> Tensor:
    """Checked scores with ``dim`` moved last, masked entries at −inf; in float32 or better unless ``as_they_are``."""
    dim = check_scores(scores, dim)
    rows = scores if mask is None else apply_mask(scores, mask)
    if dim != rows.dim() - 1:
        rows = rows.movedim(dim, -1)
    return rows if as_they_are or rows.dtype in (torch.float32, torch.float64) else rows.float()


def shifted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the largest score of each row; return the rows and what was subtracted, (…, 1)."""
    top = rows.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    return rows - top, top


def from_rows(rows: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Undo ``to_rows`` for a result of the same shape."""
    if dim not in (-1, rows.dim() - 1):
        rows = rows.movedim(-1, dim)
    return rows if rows.dtype == scores.dtype else rows.to(scores.dtype)


def beside(value: Tensor, name: str, scores: Tensor, dim: int) -> Tensor:
    """Lay out a parameter beside scores, with their number of dimensions and size 1 along ``dim``."""
    if not broadcasts(value.shape, scores.shape):
        hint = "; for one value per head of (batch, heads, queries, keys) use shape (heads, 1, 1)"
        check_expands(value, name, scores, hint=f"{hint}{_hint(value, scores, dim)}")
    full = on_device(value, scores).reshape((1,) * (scores.dim() - value.dim()) + tuple(value.shape))
    if full.shape[dim] != 1:
        raise ValueError(
            f"{name} must have size 1 along dim {dim} (one value per row), got shape {tuple(value.shape)} "
            f"for scores of shape {tuple(scores.shape)}{_hint(value, scores, dim)}"
        )
    return full


def on_device(value: Tensor, scores: Tensor) -> Tensor:
    """Move a parameter with a single value to the device of the scores, as torch itself does."""
    return value.to(scores.device) if value.dim() == 0 and value.device != scores.device else value


def parameter_rows(value: float | Tensor, name: str, scores: Tensor, dim: int) -> float | Tensor:
    """Lay out a parameter beside ``to_rows(scores)``: size 1 along ``dim``, which is moved last."""
    return beside(value, name, scores, dim).movedim(dim, -1) if isinstance(value, Tensor) else value


def _hint(value: Tensor, scores: Tensor, dim: int) -> str:
    """The end of an error for a parameter that only lacks the dimension to choose along: the right shape."""
    rows = [n for d, n in enumerate(scores.shape) if d != dim % scores.dim()]
    if list(value.shape) != rows:
        return ""
    shape = tuple(1 if d == dim % scores.dim() else n for d, n in enumerate(scores.shape))
    return f"; for one value per row use shape {shape}"


def support_size(p: Tensor, dim: int = -1) -> Tensor:
    """Count the entries that are not zero along ``dim``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.support_size(fenchel.sparsemax(torch.tensor([[1.0, 0.5, -1.0], [2.0, 0.0, 0.0]])))
        tensor([2, 1])
    """
    check_kind(p, "p", Tensor, what="a tensor")
    concrete(p)  # raises if the memory was freed, before torch reads it
    return (p != 0).sum(dim)
