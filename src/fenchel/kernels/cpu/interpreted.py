"""Loops that have no torch path: active sets, trees. With kernels off, or not compiled yet, Python runs them."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import numpy as np

from fenchel import kernels

ROOM = "structures"
"""What ``fenchel.warmup`` calls these kernels."""

_LARGE = 1 << 17  # elements per row from which Python takes longer than the compiler


def run(kernel: Any, rows: int, elements: int, *args: np.ndarray[Any, Any] | int) -> None:
    """``kernel(first, last, *args)`` on all rows: compiled and shared among threads, or else interpreted.

    While a child process compiles, rows are interpreted one by one; the rest is left to the kernel once there is one.
    """
    first = 0
    while first < rows and not (kernels.ENABLED and (elements > rows * _LARGE or kernels.ready(ROOM))):
        interpreted(kernel)(first, first + 1, *args)
        first += 1
    if 0 < first < rows:
        kernel(first, rows, *args)
    elif first < rows:
        from fenchel.kernels.cpu.threads import over_rows

        over_rows(kernel, rows, elements, *args)


@cache
def interpreted(kernel: Any) -> Any:
    """The Python function behind a compiled one, with the compiled ones that it calls replaced likewise.

    Loops on the processor's vectors have another one, in numpy, as their ``plain``.
    """
    if hasattr(kernel, "plain"):
        return kernel.plain
    function = kernel.py_func
    known = dict(function.__globals__)
    for name in function.__code__.co_names:
        if hasattr(known.get(name), "py_func"):
            known[name] = interpreted(known[name])
    return types.FunctionType(function.__code__, known, function.__name__, function.__defaults__)
