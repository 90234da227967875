"""One check for each kind of argument. Every error names the argument, what it was and what is allowed.

A value of the wrong type is a TypeError, one out of range or of the wrong shape a ValueError. Checks return the
argument in the type that the library works with: a Python int or float, or a tensor. Checks that concern one class only
are beside that class.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fenchel._torch import concrete, known

# -- questions -------------------------------------------------------------------------------------------------------


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a real number of Python or NumPy, or a symbolic one in a graph, and not a bool."""
    return isinstance(value, (numbers.Real, torch.SymFloat)) and not isinstance(value, bool)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` expands to the shape ``to`` (and not the other way round)."""
    skipped = len(to) - len(shape)
    return skipped >= 0 and all(a == 1 or a == b for a, b in zip(shape, to[skipped:], strict=True))


# -- numbers ---------------------------------------------------------------------------------------------------------


def check_count(value: Any, name: str, least: int = 1) -> int:
    """Check an integer that is at least ``least``.

    Example:
        >>> check_count(0, "window")
        Traceback (most recent call last):
            ...
        ValueError: window must be at least 1, got 0
    """
    if not is_integer(value):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_number(value: Any, name: str, low: float = -math.inf, high: float = math.inf, ends: str = "()") -> float:
    """Check a number in an interval, which is the finite numbers by default.

    Args:
        value: the number.
        name: of the argument, for errors.
        low: the lower end of the interval.
        high: the upper end.
        ends: a bracket for each end: round if the end is outside, square if it belongs to the interval.

    Example:
        >>> check_number(1.5, "label_smoothing", 0, 1, ends="[]")
        Traceback (most recent call last):
            ...
        ValueError: label_smoothing must satisfy 0 <= label_smoothing <= 1, got 1.5
    """
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    above = value >= low if ends[0] == "[" else value > low
    below = value <= high if ends[1] == "]" else value < high
    if not (above and below):  # NaN is neither
        left, right = ("<=" if bracket in "[]" else "<" for bracket in ends)
        raise ValueError(f"{name} must satisfy {low:g} {left} {name} {right} {high:g}, got {value}")
    return float(value)


def check_integer(value: Any, name: str) -> int:
    """Check an integer of any value, such as ``ignore_index``."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    return int(value)


def check_share(value: Any, name: str) -> float:
    """Check a share in [0, 1), such as a dropout probability."""
    return check_number(value, name, 0, 1, ends="[)")


# -- numbers that may be tensors -------------------------------------------------------------------------------------


def check_real(value: float | Tensor, name: str) -> float | Tensor:
    """Check a number or a floating-point tensor, of any value."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name} must be a number or a floating-point tensor, got dtype {value.dtype}")
        return value
    if not is_number(value):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    return float(value)


def check_parameter(
    value: float | Tensor, name: str, lower: float, allowed: str, *, closed: bool = False, finite: bool = False
) -> float | Tensor:
    """Check that a number, or every entry of a tensor, is allowed; return a float or a floating-point tensor.

    Args:
        value: the number or the tensor; a tensor of integers is converted.
        name: of the argument, for errors.
        lower: the bound that values must exceed …
        allowed: the range in words, for errors.
        closed: … or may equal.
        finite: whether infinity is refused.
    """
    if isinstance(value, Tensor):
        value = _as_float(value, name)
        if known(value):
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


def check_positive(value: float | Tensor, name: str) -> float | Tensor:
    """Check a positive finite number, or a tensor of such numbers."""
    return check_parameter(value, name, 0.0, f"0 < {name} < inf", finite=True)


def _as_float(value: Tensor, name: str) -> Tensor:
    """A tensor of real numbers in floating point; integers are converted."""
    concrete(value)  # raises if the memory was freed, before torch reads it
    if value.is_floating_point():
        return value
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be a number or a tensor of real numbers, got dtype {value.dtype}")
    return value.to(torch.promote_types(torch.get_default_dtype(), torch.float32))


# -- tensors ---------------------------------------------------------------------------------------------------------


def kind(value: object) -> str:
    """What errors say of a value that should be another tensor: its dtype, or its type if it is no tensor."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def check_floats(value: Any, name: str, *sizes: int | str) -> Tensor:
    """Check a floating-point tensor, and its shape if one is given, as in ``check_shape``.

    Example:
        >>> check_floats(torch.tensor([1, 2]), "loc")
        Traceback (most recent call last):
            ...
        TypeError: loc must be a floating-point tensor, got torch.int64; convert with loc.float()
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        hint = f"; convert with {name}.float()" if isinstance(value, Tensor) and not value.is_complex() else ""
        raise TypeError(f"{name} must be a floating-point tensor, got {kind(value)}{hint}")
    return check_shape(value, name, *sizes) if sizes else value


def check_integers(value: Any, name: str, what: str = "integers") -> Tensor:
    """Check a tensor of integers; return it as int64."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of {what}, got {kind(value)}")
    return value.long()


def check_mask(value: Any, name: str = "mask", true: str = "may receive mass") -> Tensor:
    """Check a boolean tensor; ``true`` says what True means."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        raise TypeError(f"{name} must be a boolean tensor (True = {true}), got {kind(value)}")
    concrete(value)  # raises if the memory was freed, before torch reads it
    return value


def check_shape(value: Tensor, name: str, *sizes: int | str) -> Tensor:
    """Check the shape of a tensor, of which no dimension may be empty but those of "…".

    Args:
        value: the tensor.
        name: of the argument, for errors.
        *sizes: one per dimension: a number; or a word for any size, the same wherever the word is the same. "…" in
            front stands for any number of dimensions.

    Example:
        >>> check_shape(torch.zeros(4, 2, 3), "transition", "…", "S", "S")
        Traceback (most recent call last):
            ...
        ValueError: transition must have shape (…, S, S), got (4, 2, 3)
    """
    own = sizes[1:] if sizes[0] == "…" else sizes
    shape = tuple(value.shape)
    known: dict[str, int] = {}
    last = shape[len(shape) - len(own) :] if len(shape) >= len(own) else ()
    fits = len(last) == len(own) and (own is not sizes or len(shape) == len(own))
    expected = [
        size if isinstance(size, int) else known.setdefault(size, n) for size, n in zip(own, last, strict=False)
    ]
    if not fits or list(last) != expected or 0 in last:
        words = ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "")
        filled = " and not be empty" if 0 in last else ""
        raise ValueError(f"{name} must have shape ({words}){filled}, got {shape}")
    return value


def check_width(value: Any, name: str, width: int, whose: str) -> Tensor:
    """Check that the last dimension of a tensor has a width, that of something.

    Example:
        >>> check_width(torch.zeros(2, 3), "query", 4, "the patterns'")
        Traceback (most recent call last):
            ...
        ValueError: query must have the patterns' width, 4, along its last dimension, got shape (2, 3)
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dim() == 0 or value.shape[-1] != width:
        raise ValueError(
            f"{name} must have {whose} width, {width}, along its last dimension, got shape {tuple(value.shape)}"
        )
    return value


def check_like(value: Tensor, name: str, other: Tensor, other_name: str = "scores") -> Tensor:
    """Check that a tensor has the shape of another."""
    if value.shape != other.shape:
        raise ValueError(f"{name} must have the shape of {other_name}, {tuple(other.shape)}, got {tuple(value.shape)}")
    return value


def check_device(beside: Tensor, name: str, **others: Any) -> None:
    """Check that tensors are on the device of the one that ``name`` names; what is not a tensor is not looked at."""
    for other, value in others.items():
        if isinstance(value, Tensor) and value.device != beside.device:
            raise ValueError(f"{other} must be on the device of {name}, {beside.device}, got {value.device}")


def check_expands(value: Tensor, name: str, scores: Tensor, hint: str = "") -> Tensor:
    """Check that a tensor expands to the shape of the scores; ``hint`` ends the error."""
    if not broadcasts(value.shape, scores.shape):
        raise ValueError(
            f"{name} must broadcast to scores: {name} has shape {tuple(value.shape)}, scores "
            f"{tuple(scores.shape)}{hint}"
        )
    return value


def check_broadcast(what: str, *shapes: Sequence[int]) -> torch.Size:
    """Check that shapes broadcast with each other; return the shape that they broadcast to.

    Example:
        >>> check_broadcast("the batch dimensions of loc and scale", (2, 3), (2,))
        Traceback (most recent call last):
            ...
        ValueError: the batch dimensions of loc and scale must broadcast with each other, got (2, 3) and (2,)
    """
    for one, other in combinations(shapes, 2):
        for a, b in zip(reversed(one), reversed(other), strict=False):
            if a != b and a != 1 and b != 1:
                *first, last = (str(tuple(shape)) for shape in shapes)
                raise ValueError(f"{what} must broadcast with each other, got {', '.join(first)} and {last}")
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def check_entries(fine: Tensor, value: Tensor, name: str, allowed: str) -> Tensor:
    """Check the values of a tensor, wherever they can be read.

    Args:
        fine: boolean, of the shape of ``value``: which entries are allowed.
        value: the tensor.
        name: of the argument, for errors.
        allowed: what entries must do or be, for errors: "be finite".
    """
    if known(fine, value) and not bool(fine.all()):
        raise ValueError(f"{name} must {allowed}, got {value[~fine][0].item():g}")
    return value


def check_tril(value: Tensor, name: str) -> Tensor:
    """Check that matrices (…, D, D) are finite and lower triangular with a positive diagonal, if values can be read."""
    fine = value.isfinite() & (value == value.tril())
    if known(fine, value) and not bool(fine.all() & (value.diagonal(dim1=-2, dim2=-1) > 0).all()):
        raise ValueError(f"{name} must be lower triangular with a positive diagonal, and finite")
    return value


def check_one_of(value: Any, name: str, *choices: str) -> str:
    """Check one of several strings.

    Example:
        >>> check_one_of("average", "reduction", "none", "mean", "sum")
        Traceback (most recent call last):
            ...
        ValueError: reduction must be 'none', 'mean' or 'sum', got 'average'
    """
    if not isinstance(value, str) or value not in choices:
        *first, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")
    return str(value)


def check_flag(value: Any, name: str) -> bool:
    """Check a bool.

    Example:
        >>> check_flag("yes", "batch_first")
        Traceback (most recent call last):
            ...
        TypeError: batch_first must be True or False, got 'yes'
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r:.40}")
    return bool(value)


def check_kind(value: Any, name: str, *kinds: type, what: str = "") -> None:
    """Check an object of one of several classes; ``what`` is said in place of their names.

    Example:
        >>> check_kind("ab", "batches", list)
        Traceback (most recent call last):
            ...
        TypeError: batches must be a list, got str
    """
    if not isinstance(value, kinds):
        expected = what or " or ".join(f"a {each.__name__}" for each in kinds)
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


def check_callable(value: Any, name: str, what: str) -> None:
    """Check something that can be called; ``what`` says what it does."""
    if not callable(value):
        raise TypeError(f"{name} must be {what}, got {type(value).__name__}")


def check_one_given(**arguments: object) -> None:
    """Check that exactly one of several arguments is given, and the others are None.

    Example:
        >>> check_one_given(scale=None, scale_tril=None)
        Traceback (most recent call last):
            ...
        ValueError: exactly one of scale and scale_tril must be given, got none
    """
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        *first, last = arguments
        names = f"{', '.join(first)} and {last}"
        raise ValueError(f"exactly one of {names} must be given, got {' and '.join(given) or 'none'}")
