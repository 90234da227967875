"""Compiled loops on plain arrays, and the table that says which of them serves what.

Nothing here knows of Ω, autograd or modules. A kernel is looked up by ``find``; ``register`` adds one.

``import fenchel`` compiles nothing and does not import Numba; the first call that can use a kernel does, and the result
is cached on disk. ``FENCHEL_KERNELS=off`` keeps everything on the torch path; ``on`` and ``wait`` compile within that
call.
"""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor

from fenchel._torch import concrete

_ASKED = os.environ.get("FENCHEL_KERNELS", "on")
if _ASKED not in ("on", "wait", "off"):
    warnings.warn(f"FENCHEL_KERNELS must be 'on', 'wait' or 'off', got {_ASKED!r}: taken as 'on'", stacklevel=2)

ENABLED = _ASKED != "off"
"""Whether kernels may be used at all."""

_FLOATS = (torch.float32, torch.float64)


def usable(*tensors: Tensor) -> bool:
    """Whether compiled kernels may work on these tensors: concrete float32 or float64 data on the CPU."""
    for t in tensors:
        if t.dtype not in _FLOATS:
            return False
    return reachable(*tensors)


def reachable(*tensors: Tensor) -> bool:
    """Whether kernels may work on what these tensors hold, once it is in a precision of theirs."""
    if not ENABLED:
        return False
    for t in tensors:
        if not t.is_cpu:
            return False
    return concrete(*tensors)


from fenchel.kernels.table import find, register  # noqa: E402 (the table asks whether kernels are enabled)

__all__ = ["ENABLED", "find", "reachable", "register", "usable"]
