"""How kernels are compiled: without the GIL, cached on disk, with sums that may be reordered but NaNs that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

# Sums may be reassociated, or no loop vectorises; NaN and infinity keep their meaning.
_FAST = {"reassoc", "nsz", "arcp", "contract"}

OPTIONS: Any = {"nogil": True, "fastmath": _FAST, "error_model": "numpy", "boundscheck": False}
"""What Numba is told of every loop."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a loop over rows; on disk if the cache folder is writable, in memory if not."""
    return _compiled(function, OPTIONS)


def strict(function: Callable[..., Any]) -> Any:
    """Compile a loop along rows, one to a lane: what is left over after whole vectors is rounded as these are."""
    return _compiled(function, {**OPTIONS, "fastmath": False})


def _compiled(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder that it may write to
        return numba.njit(**options)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a small function into the loops that call it."""
    return numba.njit(inline="always", fastmath=_FAST, error_model="numpy")(function)
