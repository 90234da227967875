"""Tensors as rows, sizes of blocks, and the one call through which every kernel is started."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.gpu import arithmetic
from fenchel.kernels.table import NotCompiledError

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels; it is asked when Triton is imported."""

MOST = 1 << 14
"""The widest rows that are held in registers; see ``fits``."""

LANES = 64 if torch.version.hip else 32
"""Threads of a warp."""

STARTED: Counter[str] = Counter()
"""How often each kernel was started."""

EPS = {torch.float64: 2.0**-52}
_SINGLE = 2.0**-23

PRECISION = "ieee" if torch.version.hip else "tf32x3"
"""How products of float32 are computed. Nvidia's tensor cores round to ten bits of a factor; three of their products,
of the rounded factors and of what was cut off, are nearly as good as float32. AMD's have products of float32."""

MOST_REGISTERS: dict[str, Any] = {} if torch.version.hip else {"maxnreg": 255}
"""An option for Nvidia's assembler: all registers. Else it may choose to spill, for the sake of more programs."""

Parameter = float | Tensor


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a kernel on the device of the first argument that is a tensor.

    Raises NotCompiledError if it does not compile, or needs more than the device has.
    """
    if _recorded is not None:
        _recorded.append((kernel, args, options))
        return
    STARTED[kernel.__name__] += 1
    try:
        with _context(next(each for each in args if isinstance(each, Tensor))):
            kernel[grid](*args, **options)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise NotCompiledError(f"{kernel.__name__}: {type(error).__name__}: {error}") from error


_recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Collect the kernels that would be started, with their arguments and options, and start none of them."""
    global _recorded
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    _recorded = found
    try:
        yield found
    finally:
        _recorded = None


@contextlib.contextmanager
def _context(tensor: Tensor) -> Iterator[None]:
    """The device of a tensor as the current one; silence about infinities in the interpreter, which is NumPy."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            yield
    else:
        with np.errstate(all="ignore"):
            yield


def compiled_for(rules: Any) -> Any:
    """A named tuple of numbers that a kernel is compiled for. The interpreter takes them as they are."""
    return rules if INTERPRETED else type(rules)(*map(tl.constexpr, rules))


def eps_of(dtype: torch.dtype) -> float:
    """The rounding of the arithmetic inside kernels: that of float64 for float64, of float32 for all others."""
    return EPS.get(dtype, _SINGLE)


def is_light(kind: int) -> bool:
    """Whether a rule takes no logarithm: such kernels need few registers per entry."""
    return kind in (arithmetic.SPARSEMAX.value, arithmetic.HALF.value)


def fits(n: int, dtype: torch.dtype, kind: int, *, plain: bool = False) -> bool:
    """Whether a row of n entries is held in registers, without spills; ``plain`` for a map, which has no target."""
    light = is_light(kind) or (plain and kind == arithmetic.ANY.value and dtype != torch.float64)
    most = MOST if light else MOST // 4
    return n <= (most // 4 if dtype == torch.float64 and light else most // 2 if dtype == torch.float64 else most)


def sizes(n: int, dtype: torch.dtype, kind: int) -> dict[str, int]:
    """Rows per program, entries of a block, warps and registers, for rows that fit; one row where alpha is a tensor.

    A thread holds 16 entries of a block if the rule is light, else 8; in double precision 4, or 8 of the widest.
    """
    block = max(triton.next_power_of_2(n), 16)
    rows = 1 if kind == arithmetic.TOTAL.value else max(2048 // block, 1)
    each = 4 if dtype == torch.float64 else 16 if is_light(kind) else 8
    options = of_warps(warps(rows * block // each))
    if not is_light(kind) and rows * block > 512 * each:  # most warps, and threads hold more than ``each``
        options = {"num_warps": options["num_warps"]}  # the assembler spills if it is told of registers, else not
    return {"R": rows, "BLOCK": block, **options}


def warps(threads: int) -> int:
    """Warps for so many threads, at most 16; where warps are wider, there are more threads than that."""
    return max(1, min(threads // 32, 16))


def of_warps(count: int) -> dict[str, int]:
    """The options for so many warps: ``MOST_REGISTERS`` too, of the 65,536 that they have together."""
    return {"num_warps": count} | {name: min(most, 65536 // (32 * count)) for name, most in MOST_REGISTERS.items()}


def as_rows(tensor: Tensor) -> Tensor:
    """The rows of a tensor as a matrix, copied only if they are not contiguous."""
    return tensor.detach().contiguous().reshape(-1, tensor.shape[-1])


def constant(value: float, device: torch.device) -> Tensor:
    """One number on a device, in double precision; kept for later calls.

    What is made while a CUDA graph is captured belongs to the graph, and has no value before the graph runs: it is not
    kept. Otherwise the device is waited for once, so that other streams may read what is kept.
    """
    return _make_constant(value, device) if _is_capturing(device) else _kept_constant(value, device)


def _make_constant(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float64, device=device)


@lru_cache(1 << 10)
def _kept_constant(value: float, device: torch.device) -> Tensor:
    made = _make_constant(value, device)
    if made.is_cuda:
        torch.cuda.current_stream(device).synchronize()
    return made


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def per_row(value: Parameter, like: Tensor) -> tuple[Tensor, int]:
    """A parameter of rows ``like`` as a tensor, and how far two rows are apart in it: 0 if they share one value.

    Numbers are in double precision: Triton would pass them in single precision.
    """
    if not isinstance(value, Tensor):
        return constant(float(value), like.device), 0
    value = value.detach().expand(*like.shape[:-1], 1)
    if all(size == 1 or stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
        return value, 0
    return value.reshape(-1), 1


def per_entry(value: Parameter, like: Tensor) -> tuple[Tensor, int, bool]:
    """Bounds of entries of rows ``like``: a tensor, how far two rows are apart in it, and whether entries differ."""
    if not isinstance(value, Tensor):
        return constant(float(value), like.device), 0, False
    value = value.detach()
    if all(size == 1 or stride == 0 for size, stride in zip(value.shape[:-1], value.stride()[:-1], strict=True)):
        return value[(0,) * (value.dim() - 1)].contiguous(), 0, True
    return as_rows(value), value.shape[-1], True


def kind_of(alpha: Parameter, norm: bool) -> int:
    """Which rule of ``arithmetic`` serves alpha."""
    if isinstance(alpha, Tensor):
        return int(arithmetic.ANY.value if norm else arithmetic.TOTAL.value)
    if alpha == (math.inf if norm else 2.0):
        return int(arithmetic.SPARSEMAX.value)
    if norm:
        return int(arithmetic.ANY.value)
    if alpha == 1.5:
        return int(arithmetic.HALF.value)
    return int(arithmetic.STEEP.value if alpha > 2 else arithmetic.ANY.value)
