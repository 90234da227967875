"""Rows over threads: torch's own OpenMP team where it can be reached, else a small thread pool.

A kernel handles a range of rows without the GIL; rows are independent, so results do not depend on how they are shared
out. Numba's threading layers are unsafe after a fork or between threads. Any second set of threads competes with
torch's, which keep spinning for a while after their work. So kernels run on torch's own threads, through the OpenMP
runtime that torch was loaded with; the workers never touch Python. After a fork these threads do not exist: a child
uses a pool of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import int64, typeof

SERIAL = 1 << 14
"""Below this many elements, starting a second thread costs more than it saves."""

_PARTS = 4  # per thread, so that a slow thread does not delay the result

_pool: ThreadPoolExecutor | None = None
_forked = False


def _forget() -> None:
    global _pool, _forked
    _pool, _forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def over_rows(kernel: Any, rows: int, elements: int, *args: np.ndarray[Any, Any] | int) -> None:
    """Run ``kernel(first, last, *args)`` on all rows, split among threads; arguments are arrays and integers."""
    threads = 1 if elements < SERIAL else min(torch.get_num_threads(), rows)
    if threads < 2:
        kernel(0, rows, *args)
        return
    team = None if _forked else _team()
    if team is None:
        _over_pool(kernel, rows, threads, args)
        return
    key: list[Any] = [kernel]
    words = [0, 0, rows, min(threads * _PARTS, rows)]
    for arg in args:
        if isinstance(arg, int):
            key.append(int)
            words.append(int(arg))
        else:  # as Numba passes an array: owner, parent, size, item size, data, shape, strides
            key.append((arg.dtype.num, arg.ndim, arg.flags.c_contiguous))
            words += [0, 0, arg.size, arg.itemsize, arg.__array_interface__["data"][0], *arg.shape, *arg.strides]
    words[0] = _addresses.get(tuple(key)) or _addresses.setdefault(tuple(key), _compile(kernel, args))
    block = np.array(words, dtype=np.int64)
    team(_trampoline(len(words) - 4), block.__array_interface__["data"][0], threads, 0)


def entry_point(kernel: Any, *args: np.ndarray[Any, Any] | int) -> Callable[..., None]:
    """The compiled code of a kernel for arguments of these types, which it must be called with: it does not look."""
    signature = tuple(map(typeof, args))
    kernel.compile(signature)
    found: Callable[..., None] = kernel.overloads[signature].entry_point
    return found


def _over_pool(kernel: Any, rows: int, threads: int, args: tuple[Any, ...]) -> None:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="fenchel")
    cuts = [rows * i // threads for i in range(threads + 1)]
    waiting = [_pool.submit(kernel, cuts[i], cuts[i + 1], *args) for i in range(1, threads)]
    kernel(cuts[0], cuts[1], *args)
    for task in waiting:
        task.result()


@cache
def _team() -> Callable[..., None] | None:
    """The function that runs C code on torch's OpenMP threads, if torch was built with a runtime that has it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


_addresses: dict[tuple[Any, ...], int] = {}  # of kernels by the types of their arguments


def _compile(kernel: Any, args: tuple[Any, ...]) -> int:
    """The address of the machine code of a kernel for arguments of these types."""
    signature = (int64, int64, *map(typeof, args))
    kernel.compile(signature)
    compiled = kernel.overloads[signature]
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


_engines: list[Any] = []  # machine code lives as long as its engine


@cache
def _trampoline(words: int) -> int:
    """C code ``void f(int64 *block)`` that takes parts of the rows off a counter and calls a kernel on each.

    The block holds the kernel's address, the counter, the number of rows and of parts, and the arrays as so many words.
    """
    i64, i32 = ir.IntType(64), ir.IntType(32)
    module = ir.Module(name=f"fenchel_rows_{words}")
    module.triple = llvm.get_process_triple()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [i64.as_pointer()]), name=module.name)
    kernel = ir.FunctionType(i32, [i64.as_pointer(), i64.as_pointer(), i64, i64] + [i64] * words)
    (block,) = function.args
    entry, take, work, done = (function.append_basic_block(name) for name in ("entry", "take", "work", "done"))

    builder = ir.IRBuilder(entry)
    result, error = builder.alloca(i64), builder.alloca(i64)

    def word(i: int) -> Any:
        return builder.gep(block, [i64(i)])

    code = builder.inttoptr(builder.load(word(0)), kernel.as_pointer())
    rows, parts = builder.load(word(2)), builder.load(word(3))
    arguments = [builder.load(word(4 + i)) for i in range(words)]
    builder.branch(take)
    builder.position_at_end(take)
    part = builder.atomic_rmw("add", word(1), i64(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", part, parts), work, done)
    builder.position_at_end(work)
    first = builder.sdiv(builder.mul(part, rows), parts)
    last = builder.sdiv(builder.mul(builder.add(part, i64(1)), rows), parts)
    builder.call(code, [result, error, first, last, *arguments])
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(module.name)  # type: ignore[no-any-return]
