"""How kernels are compiled: without the GIL, cached on disk, with sums that may be reordered but NaNs that stay.

A kernel is compiled once per machine: processes that need the same one at the same time wait for the first. The cache
has one file per kernel and signature, written as a whole, so that a process may end at any time; a file that cannot be
read is compiled anew. Without a folder to write to, kernels are compiled in memory.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import pickle
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy.ma  # noqa: F401  (or Numba imports it at the first call, where a fork would inherit the import's lock)
from llvmlite.binding import ffi
from numba.core.caching import FunctionCache
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps
from numba.core.types import unliteral

from fenchel.kernels import store
from fenchel.kernels.cpu.resolution import remembered

# Sums may be reassociated, or no loop vectorises; NaN and infinity keep their meaning.
_FAST = {"reassoc", "nsz", "arcp", "contract"}


@cache
def _compilers() -> Any:
    """The compilers of ``pipeline``, or None where this version of Numba has other private classes."""
    try:
        from fenchel.kernels.cpu import pipeline

        pipeline.check()
    except Exception:  # whatever a class, a method or an argument of another name leads to
        return None
    return pipeline


def _compiler(name: str) -> Callable[..., Any]:
    """What makes the compiler of this name of ``pipeline``, or Numba's own."""

    def make(*args: Any) -> Any:
        return getattr(_compilers(), name, Compiler)(*args)

    return make


OPTIONS: Any = {
    "nogil": True,
    "fastmath": _FAST,
    "error_model": "numpy",
    "boundscheck": False,
    "no_cfunc_wrapper": True,
    "pipeline_class": _compiler("KernelCompiler"),
}
"""The options with which Numba compiles every loop."""

STRICT: Any = {**OPTIONS, "fastmath": False}
"""The same for loops whose every operation is rounded as it is written."""


COMPILED: list[Any] = []
"""Every loop that Python calls, with its signatures and what the cache had of them."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a loop over rows; on disk if the cache folder is writable, in memory if not."""
    return _compiled(function, OPTIONS)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call, and Python does not: it has no wrapper, no file and no machine code.

    It is optimised and translated as a part of each kernel that calls it, and not on its own before: with several
    levels of calls that would repeat the work at every level. Numbers that Numba knows at compile time are arguments
    like others: it would compile the function for each of them, and for the first value of each counter.
    """
    return _uncalled(function, OPTIONS)


def strict_routine(function: Callable[..., Any]) -> Any:
    """Compile a function as ``helper`` does, for kernels compiled by ``strict``: a large one is called, not inlined."""
    return _uncalled(function, STRICT)


def _uncalled(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    compiled = numba.njit(**options | {"pipeline_class": _compiler("HelperCompiler"), "no_cpython_wrapper": True})(
        function
    )
    compile_now = compiled.compile
    compiled.compile = lambda signature: compile_now(tuple(map(unliteral, signature)))
    return compiled


def strict(function: Callable[..., Any]) -> Any:
    """Compile a loop along rows, one to a lane: what is left over after whole vectors is rounded as these are."""
    return _compiled(function, STRICT)


def unrolled(function: Callable[..., Any]) -> Any:
    """Compile a loop along rows as ``strict`` does, and unroll it: that saves a tenth of the time of long rows."""
    return _compiled(function, {**STRICT, "pipeline_class": _compiler("UnrollingCompiler")})


def strict_helper(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels compiled by ``strict`` call, and Python does not."""
    return numba.njit(**INLINED)(function)


def _compiled(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    compiled = numba.njit(**options)(function)
    cached = False
    with contextlib.suppress(RuntimeError):  # Numba found no folder that it may write to
        compiled._cache = _Cache(function)
        cached = True
    compile_now = compiled.compile

    def compile_once(signature: Any) -> Any:
        """Compile for these types while other processes that want the same wait, then read what was written."""
        with global_compiler_lock, store.locked(f"{function.__module__}.{function.__qualname__} {signature}"):
            if not cached:
                store.announce()
            with _no_garbage_collection(), remembered():
                return compile_now(signature)

    compiled.compile = compile_once
    COMPILED.append(compiled)
    return compiled


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python from searching for garbage: a compilation makes many objects, of which few go before its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


INLINED: Any = {
    **STRICT,
    "forceinline": True,
    "no_cpython_wrapper": True,
    "pipeline_class": _compiler("HelperCompiler"),
}
"""The options of functions that become part of the kernels which call them, compiled by ``strict``."""


class _Cache(FunctionCache):
    """Numba's cache of a function, but with one file per signature, named after all that it depends on.

    Numba's own has an index, which processes overwrite for each other, and which may name a file that an ended process
    did not write.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        name = re.sub(r"\W", "-", f"{function.__module__.rpartition('.')[2]}-{function.__qualname__}")
        self._base = f"{name}.py{sys.version_info[0]}{sys.version_info[1]}-{numba.__version__}."
        self._stamp = source_stamp(Path(function.__code__.co_filename))[:12]
        self._line = function.__code__.co_firstlineno

    def _path(self, key: Any) -> Path:
        digest = hashlib.sha256(repr((key, self._line)).encode()).hexdigest()
        return Path(self._cache_path) / f"{self._base}{self._stamp}.{digest[:16]}.nbc"

    def _load_overload(self, signature: Any, target: Any) -> Any:
        try:
            key = self._index_key(signature, target.codegen())  # type: ignore[no-untyped-call]
            found, data = pickle.loads(self._path(key).read_bytes())
            if found == repr(key):
                return self._impl.rebuild(target, data)
        except Exception:  # whatever a damaged file leads to
            pass
        store.announce()
        return None

    def _save_overload(self, signature: Any, result: Any) -> None:
        # The folder is gone or full, or Numba has other private methods: the kernel serves this process alone.
        with contextlib.suppress(OSError, AttributeError, TypeError):
            if not self._impl.check_cachable(result):
                return
            key = self._index_key(signature, result.codegen)  # type: ignore[no-untyped-call]
            path = self._path(key)
            part = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
            self._impl.locator.ensure_cache_path()
            for old in path.parent.glob(f"{self._base}*"):
                if not old.name.startswith(self._base + self._stamp):
                    old.unlink(missing_ok=True)
            part.write_bytes(dumps((repr(key), self._impl.reduce(result))))  # type: ignore[no-untyped-call]
            part.replace(path)


_FOLDER = Path(__file__).parent
_IMPORTS = re.compile(r"^\s*from fenchel\.kernels\.cpu(\S*) import (\([^)]*\)|.*)", re.MULTILINE)


@cache
def source_stamp(file: Path) -> str:
    """A hash of a file and of all that it imports of this folder: what the machine code of its kernels depends on.

    Numba compares the file of a kernel alone, and would go on using one whose inlined parts, in other files, have
    changed.
    """
    digest = hashlib.sha256()
    for path in sorted(_closure(file)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _closure(file: Path) -> set[Path]:
    """A file and those of this folder that it imports, directly or through others."""
    found, waiting = {file}, [file]
    while waiting:
        new = _imported(waiting.pop()) - found
        found |= new
        waiting += new
    return found


@cache
def _imported(file: Path) -> frozenset[Path]:
    found = set()
    for package, names in _IMPORTS.findall(file.read_text(encoding="utf-8")):
        module = _FOLDER.joinpath(*package.split("."))
        candidates = [module.with_suffix(".py"), *(module / f"{name}.py" for name in re.findall(r"\w+", names))]
        found |= {path for path in candidates if path.exists()}
    return frozenset(found)


_llvm_lock: Any = getattr(ffi.lib, "_lock", contextlib.nullcontext())


def _hold() -> None:
    """Wait until no thread compiles: a lock that another thread holds would stay locked in the forked process."""
    global_compiler_lock.acquire()  # type: ignore[no-untyped-call]
    _llvm_lock.__enter__()


def _let_go() -> None:
    _llvm_lock.__exit__(None, None, None)
    global_compiler_lock.release()  # type: ignore[no-untyped-call]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go)
