"""Compiled loops on plain arrays, and the table that says which of them serves what.

Nothing here depends on Ω, autograd or modules. A kernel is looked up by ``find``; ``register`` adds one.

``import fenchel`` compiles nothing and does not import Numba. ``FENCHEL_KERNELS`` says what the first calls do:

* ``on``, the default: a child process compiles kernels into the cache on disk; torch operations compute meanwhile;
* ``wait``: kernels are compiled within the call;
* ``off``: there are none, and torch operations compute always;
* ``triton``: as ``wait``, and tensors of the CPU too go to the kernels that are written for GPUs, where there is one:
  with ``TRITON_INTERPRET=1`` these run without a GPU, slowly. For tests.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from fenchel._torch import concrete

_ASKED = os.environ.get("FENCHEL_KERNELS", "on")
if _ASKED not in ("on", "wait", "off", "triton"):
    warnings.warn(
        f"FENCHEL_KERNELS must be 'on', 'wait', 'off' or 'triton', got {_ASKED!r}: taken as 'on'", stacklevel=2
    )

ENABLED = _ASKED != "off"
"""Whether kernels may be used at all."""

TRITON: bool = _ASKED == "triton"
"""Whether kernels for GPUs serve tensors of the CPU."""

WAIT = _ASKED == "wait" or TRITON
"""Whether a call waits for its kernels to be compiled."""

_FLOATS = (torch.float32, torch.float64)


@contextlib.contextmanager
def enabled(on: bool) -> Iterator[None]:
    """Use kernels inside a context, or with False torch operations alone, in all threads.

    Example:
        >>> import torch, fenchel
        >>> with fenchel.kernels.enabled(False):
        ...     fenchel.sparsemax(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.7500, 0.2500, 0.0000])
    """
    global ENABLED
    before, ENABLED = ENABLED, on
    try:
        yield
    finally:
        ENABLED = before


def usable(room: str, *tensors: Tensor) -> bool:
    """Whether kernels of a room may work on these tensors: concrete float32 or float64 data on the CPU."""
    if not ENABLED:
        return False
    for t in tensors:
        if t.dtype not in _FLOATS or not t.is_cpu:
            return False
    return concrete(*tensors) and ready(room, tensors[0].dtype)


from fenchel.kernels.compilation import ready as ready  # noqa: E402 (these ask whether kernels are enabled)
from fenchel.kernels.compilation import waiting  # noqa: E402
from fenchel.kernels.table import HALF as HALF  # noqa: E402
from fenchel.kernels.table import NotCompiledError, find, register  # noqa: E402
from fenchel.kernels.table import exact_dtype as exact_dtype  # noqa: E402
from fenchel.kernels.table import find_again as find_again  # noqa: E402
from fenchel.kernels.table import offers as offers  # noqa: E402

__all__ = ["NotCompiledError", "enabled", "find", "register", "waiting"]
