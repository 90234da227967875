"""How kernels are compiled: without the GIL, cached on disk, with sums that may be reordered but NaNs that stay."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

# Sums may be reassociated, or no loop vectorises; NaN and infinity keep their meaning.
_FAST = {"reassoc", "nsz", "arcp", "contract"}

OPTIONS: Any = {"nogil": True, "fastmath": _FAST, "error_model": "numpy", "boundscheck": False}
"""What Numba is told of every loop."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a loop over rows; on disk if the cache folder is writable, in memory if not."""
    return _compiled(function, OPTIONS)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that other kernels call, and Python does not: it gets no wrapper and no file of its own."""
    return numba.njit(**{**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True})(function)


def strict(function: Callable[..., Any]) -> Any:
    """Compile a loop along rows, one to a lane: what is left over after whole vectors is rounded as these are."""
    return _compiled(function, {**OPTIONS, "fastmath": False})


def _compiled(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder that it may write to
        return numba.njit(**options)(function)
    index = compiled._cache._cache_file
    index._source_stamp = (index._source_stamp, source_stamp())
    return compiled


@cache
def source_stamp() -> str:
    """A hash of all files of this folder: what the kernels on disk were compiled from.

    Numba compares the file of a kernel alone, and would go on using one whose inlined parts, in other files, have
    changed.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a small function into the loops that call it."""
    return numba.njit(inline="always", fastmath=_FAST, error_model="numpy")(function)
