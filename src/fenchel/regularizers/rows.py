"""What a user passes in (scores, dim, mask, parameters, targets), checked and laid out as rows."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from itertools import combinations
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from fenchel._torch import concrete


def check_scores(scores: Tensor, dim: int) -> int:
    """Check scores and the dimension to choose along; return it counted from the front."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise TypeError(f"scores must have a floating-point dtype, got {scores.dtype}; convert with scores.float()")
    if not is_integer(dim):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    concrete(scores)  # raises if the memory was freed, before torch reads it
    rank = scores.dim()
    if rank == 0:
        raise ValueError("scores must have at least one dimension, got a scalar")
    if not -rank <= dim < rank:
        raise ValueError(f"dim must be in [{-rank}, {rank - 1}] for scores of shape {tuple(scores.shape)}, got {dim}")
    if scores.shape[dim] == 0:
        raise ValueError(f"scores must not be empty along dim {dim}, got shape {tuple(scores.shape)}")
    return int(dim) % rank


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number of Python's or NumPy's, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a real number of Python's or NumPy's, or stands for one in a graph, and is not a bool."""
    return isinstance(value, numbers.Real | torch.SymFloat) and not isinstance(value, bool)


def check_floating(value: float | Tensor, name: str) -> None:
    """Refuse tensors that are not in floating point."""
    if isinstance(value, Tensor) and not value.is_floating_point():
        raise TypeError(f"{name} must be a number or a floating-point tensor, got dtype {value.dtype}")


def as_float(value: Tensor, name: str) -> Tensor:
    """A tensor of real numbers in floating point; integers are converted."""
    concrete(value)  # raises if the memory was freed, before torch reads it
    if value.is_floating_point():
        return value
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be a number or a tensor of real numbers, got dtype {value.dtype}")
    return value.to(torch.promote_types(torch.get_default_dtype(), torch.float32))


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` expands to the shape ``to`` (and not the other way round)."""
    return len(shape) <= len(to) and all(a == 1 or a == b for a, b in zip(reversed(shape), reversed(to), strict=False))


def broadcasting(*shapes: Sequence[int]) -> bool:
    """Whether shapes broadcast with each other."""
    return all(
        a == b or a == 1 or b == 1
        for one, other in combinations(shapes, 2)
        for a, b in zip(reversed(one), reversed(other), strict=False)
    )


def apply_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with −inf wherever the mask is False."""
    if mask is None:
        return scores
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a boolean tensor (True = may receive mass), got {kind}")
    concrete(mask)  # as for the scores
    if not broadcasts(mask.shape, scores.shape):
        raise ValueError(
            f"mask must broadcast to scores: mask has shape {tuple(mask.shape)}, scores {tuple(scores.shape)}"
        )
    return torch.where(mask, scores, -torch.inf)


def to_rows(scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """Checked scores with ``dim`` moved last, masked entries at −inf, in float32 or better."""
    dim = check_scores(scores, dim)
    rows = apply_mask(scores, mask)
    if dim != rows.dim() - 1:
        rows = rows.movedim(dim, -1)
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def shifted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with largest score 0, and what was taken off: all that follows is then a sum of small terms."""
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
        raise ValueError(
            f"{name} must broadcast to scores: {name} has shape {tuple(value.shape)}, scores {tuple(scores.shape)}; "
            f"for one value per head of (batch, heads, queries, keys) use shape (heads, 1, 1)"
            f"{_hint(value, scores, dim)}"
        )
    full = on_device(value, scores).reshape((1,) * (scores.dim() - value.dim()) + tuple(value.shape))
    if full.shape[dim] != 1:
        raise ValueError(
            f"{name} must have size 1 along dim {dim} (one value per row), got shape {tuple(value.shape)} "
            f"for scores of shape {tuple(scores.shape)}{_hint(value, scores, dim)}"
        )
    return full


def on_device(value: Tensor, scores: Tensor) -> Tensor:
    """A parameter on the device of the scores, if it is a single number: torch itself mixes devices so."""
    return value.to(scores.device) if value.dim() == 0 and value.device != scores.device else value


def parameter_rows(value: float | Tensor, name: str, scores: Tensor, dim: int) -> float | Tensor:
    """Lay out a parameter beside ``to_rows(scores)``: size 1 along ``dim``, which is moved last."""
    return beside(value, name, scores, dim).movedim(dim, -1) if isinstance(value, Tensor) else value


def _hint(value: Tensor, scores: Tensor, dim: int) -> str:
    """What shape would be right for a parameter that just lacks the dimension to choose along."""
    rows = [n for d, n in enumerate(scores.shape) if d != dim % scores.dim()]
    if list(value.shape) != rows:
        return ""
    shape = tuple(1 if d == dim % scores.dim() else n for d, n in enumerate(scores.shape))
    return f"; for one value a row use shape {shape}"


def check_parameter(
    value: float | Tensor, name: str, lower: float, allowed: str, *, closed: bool = False, finite: bool = False
) -> float | Tensor:
    """Check that a number, or every entry of a tensor, is allowed; return a float or a floating-point tensor.

    Args:
        value: the number or the tensor.
        name: of the argument, for errors.
        lower: the bound that values must exceed …
        allowed: the range in words, for errors.
        closed: … or may equal.
        finite: whether infinity is refused.
    """
    if isinstance(value, Tensor):
        value = as_float(value, name)
        if concrete(value):
            fine = (value >= lower) if closed else (value > lower)
            fine = fine & (value < torch.inf) if finite else fine
            if not bool(fine.all()):
                raise ValueError(f"{name} must satisfy {allowed}, got a tensor with {value[~fine].flatten()[0].item()}")
        return value
    if not is_number(value):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    if not (value >= lower if closed else value > lower) or (finite and value == torch.inf):
        raise ValueError(f"{name} must satisfy {allowed}, got {value}")
    return float(value)


def check_share(name: str, share: float) -> float:
    """Check the share of something that is dropped in training; return a float."""
    if not is_number(share):
        raise TypeError(f"{name} must be a number, got {type(share).__name__}")
    if not 0.0 <= share < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {share}")
    return float(share)


def check_temperature(temperature: float | Tensor) -> float | Tensor:
    """Check a temperature, or every one of a tensor."""
    return check_parameter(temperature, "temperature", 0.0, "0 < temperature < inf", finite=True)


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
