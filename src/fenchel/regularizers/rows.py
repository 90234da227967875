"""Scores, masks and parameters laid out as rows: checked, with the dimension to choose along last."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._checks import broadcasts, check_expands, check_mask, check_scores
from fenchel._torch import concrete


def apply_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with −inf wherever the mask is False."""
    if mask is None:
        return scores
    check_expands(check_mask(mask), "mask", scores)
    return torch.where(mask, scores, -torch.inf)


def to_rows(scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """Checked scores with ``dim`` moved last, masked entries at −inf, in float32 or better."""
    dim = check_scores(scores, dim)
    rows = apply_mask(scores, mask)
    if dim != rows.dim() - 1:
        rows = rows.movedim(dim, -1)
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


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
    concrete(p)  # raises if the memory was freed, before torch reads it
    return (p != 0).sum(dim)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast is set to on a device; None where it is off, or the device has none."""
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def as_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as torch's own operations get it under autocast to ``dtype``: float64 and integers are left alone."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
