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
from array import array
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
_HEAD = 4  # words of a block before the arguments of the kernel
_LINE = 8  # words of a cache line: as far apart are the counters of two threads

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
    openmp = None if _forked else _openmp()
    if openmp is None:
        _over_pool(kernel, rows, threads, args)
        return
    key: list[Any] = [kernel]
    words = [0, rows, min(threads * _PARTS, rows), threads]
    for arg in args:
        if isinstance(arg, int):
            key.append(int)
            words.append(int(arg))
        else:  # as Numba passes an array: owner, parent, size, item size, data, shape, strides
            key.append((arg.dtype.num, arg.ndim, arg.flags.c_contiguous))
            words += [0, 0, arg.size, arg.itemsize, arg.__array_interface__["data"][0], *arg.shape, *arg.strides]
    words[0] = _addresses.get(tuple(key)) or _addresses.setdefault(tuple(key), _compile(kernel, args))
    count = len(words)
    block = array("q", words + [0] * (threads * _LINE))
    parallel, number = openmp
    parallel(_trampoline(count - _HEAD, number), block.buffer_info()[0], threads, 0)


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
def _openmp() -> tuple[Callable[..., None], int] | None:
    """The function that runs C code on torch's OpenMP threads and the address of the one that numbers these.

    None if torch was built with a runtime that does not have them.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel, number = library.GOMP_parallel, library.omp_get_thread_num
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel, ctypes.cast(number, ctypes.c_void_p).value or 0


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
def _trampoline(words: int, number: int) -> int:
    """C code ``void f(int64 *block)`` that calls a kernel on parts of the rows, on every thread of a team.

    Each thread takes its own parts first, so that rows are where they were in its caches at the last call, and then
    what the others have left. The block holds the kernel's address, the number of rows, of parts and of threads, the
    arguments as so many words, and one counter per thread. ``number`` is the address of C code that numbers threads.
    """
    i64, i32 = ir.IntType(64), ir.IntType(32)
    module = ir.Module(name=f"fenchel_rows_{words}")
    module.triple = llvm.get_process_triple()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [i64.as_pointer()]), name=module.name)
    kernel = ir.FunctionType(i32, [i64.as_pointer(), i64.as_pointer(), i64, i64] + [i64] * words)
    (block,) = function.args
    names = ("entry", "choose", "take", "work", "following", "done")
    entry, choose, take, work, following, done = (function.append_basic_block(name) for name in names)

    builder = ir.IRBuilder(entry)
    result, error = builder.alloca(i64), builder.alloca(i64)

    def word(i: Any) -> Any:
        return builder.gep(block, [i if isinstance(i, ir.Value) else i64(i)])

    def share(count: Any, i: Any, shares: Any) -> Any:
        return builder.sdiv(builder.mul(count, i), shares)

    code = builder.inttoptr(builder.load(word(0)), kernel.as_pointer())
    rows, parts, threads = (builder.load(word(1 + i)) for i in range(3))
    arguments = [builder.load(word(_HEAD + i)) for i in range(words)]
    numbered = builder.inttoptr(i64(number), ir.FunctionType(i32, []).as_pointer())
    me = builder.sext(builder.call(numbered, []), i64)
    builder.branch(choose)
    builder.position_at_end(choose)
    turn = builder.phi(i64)
    turn.add_incoming(i64(0), entry)
    whose = builder.srem(builder.add(me, turn), threads)
    start, end = share(parts, whose, threads), share(parts, builder.add(whose, i64(1)), threads)
    counter = word(builder.add(i64(_HEAD + words), builder.mul(whose, i64(_LINE))))
    builder.branch(take)
    builder.position_at_end(take)
    part = builder.add(start, builder.atomic_rmw("add", counter, i64(1), "monotonic"))
    builder.cbranch(builder.icmp_signed("<", part, end), work, following)
    builder.position_at_end(work)
    first, last = share(rows, part, parts), share(rows, builder.add(part, i64(1)), parts)
    builder.call(code, [result, error, first, last, *arguments])
    builder.branch(take)
    builder.position_at_end(following)
    later = builder.add(turn, i64(1))
    turn.add_incoming(later, following)
    builder.cbranch(builder.icmp_signed("<", later, threads), choose, done)
    builder.position_at_end(done)
    builder.ret_void()

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(module.name)  # type: ignore[no-any-return]
