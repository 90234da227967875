"""Checks of the arguments of Hopfield layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fenchel._checks import broadcasts, check_callable, check_count, check_floats, check_positive, kind


def default_hidden_size(input_size: int | None, hidden_size: int | None, num_heads: int) -> int:
    """The width of the association space of each head: ``hidden_size``, or input_size // num_heads if it is None."""
    if hidden_size is not None:
        return check_count(hidden_size, "hidden_size")
    if input_size is None:
        raise ValueError("hidden_size must be given where input_size is not")
    if check_count(input_size, "input_size") % num_heads:
        raise ValueError(
            f"input_size must be a multiple of num_heads where hidden_size is not given, got {input_size} and "
            f"{num_heads}"
        )
    return int(input_size) // int(num_heads)


def check_scaling(scaling: float | Tensor, num_heads: int) -> float | Tensor:
    """Check β: one number, or one per head."""
    scaling = check_positive(scaling, "scaling")
    if isinstance(scaling, Tensor) and scaling.shape not in ((), (1,), (num_heads,)):
        raise ValueError(f"scaling must have one entry per head, {num_heads}, got shape {tuple(scaling.shape)}")
    return scaling


def activation(name: str, given: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The given function, or the function of torch or torch.nn.functional with this name."""
    if not isinstance(given, str):
        check_callable(given, name, "a function or its name")
        return given
    found: Callable[[Tensor], Tensor] | None = getattr(torch, given, getattr(F, given, None))
    if not callable(found):
        raise ValueError(f"{name} must name a function of torch, such as 'relu', got {given!r}")
    return found


def check_input(name: str, x: Tensor, width: int) -> None:
    """Check one of the three inputs: (batch, length, width), or (length, batch, width)."""
    check_floats(x, f"input: the {name}")
    if x.dim() != 3:
        raise ValueError(f"input: the {name} must have 3 dimensions, batch, length and width, got {tuple(x.shape)}")
    if x.shape[-1] != width:
        raise ValueError(f"input: the {name} must have width {width}, got shape {tuple(x.shape)}")


def check_association(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Check an association mask; return it in a shape that broadcasts to (batch, heads, L, S)."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"association_mask must be boolean (True = may not be associated) or added, got {kind(mask)}")
    batch, heads, states, stored = shape
    if mask.dim() == 3 and mask.shape == (batch * heads, states, stored):
        return mask.reshape(shape)
    if mask.dim() in (2, 4) and broadcasts(mask.shape, shape):
        return mask
    raise ValueError(
        f"association_mask must have shape {(states, stored)} or {(batch * heads, states, stored)}, or broadcast to "
        f"{shape}, got {tuple(mask.shape)}"
    )
