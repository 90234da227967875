"""Loops that have no torch path: active sets, trees. With kernels off the same loops run, interpreted."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from fenchel import kernels


def run(kernel: Any, rows: int, elements: int, *args: np.ndarray[Any, Any] | int) -> None:
    """``kernel(first, last, *args)`` on all rows: compiled and shared among threads, or else interpreted."""
    if rows == 0:
        return
    if not kernels.ENABLED:
        interpreted(kernel)(0, rows, *args)
        return
    from fenchel.kernels.cpu.threads import over_rows

    over_rows(kernel, rows, elements, *args)


def interpreted(kernel: Any) -> Any:
    """The Python function behind a compiled one, with the compiled ones that it calls replaced likewise."""
    function = kernel.py_func
    known = dict(function.__globals__)
    for name in function.__code__.co_names:
        if hasattr(known.get(name), "py_func"):
            known[name] = interpreted(known[name])
    return types.FunctionType(function.__code__, known, function.__name__, function.__defaults__)
