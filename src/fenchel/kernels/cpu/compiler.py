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
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy.ma  # noqa: F401  (or Numba imports it at the first call, where a fork would inherit the import's lock)
from llvmlite.binding import create_pass_builder, create_pipeline_tuning_options, ffi, parse_assembly
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.types import unliteral

from fenchel.kernels import store

# Sums may be reassociated, or no loop vectorises; NaN and infinity keep their meaning.
_FAST = {"reassoc", "nsz", "arcp", "contract"}

_UNUSED_PASSES = {
    "WithLifting",
    "InlineClosureLikes",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "InlineInlinables",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "InlineOverloads",
    "NopythonRewrites",
    "AnnotateTypes",
    "DumpParforDiagnostics",
}


class _Library(JITCodeLibrary):
    """The LLVM module of a kernel: as Numba optimises it, but for what makes it larger and not faster.

    Loops are not unrolled beyond what the source says: they work on vectors already, and for some processors LLVM
    writes out dozens of rounds, which takes a third of the time that it needs for the whole module.
    """

    unroll = False

    def add_linking_library(self, library: Any) -> None:
        if library is not rtsys.library:
            super().add_linking_library(library)

    def _optimize_functions(self, module: Any) -> None:
        codegen: Any = self._codegen
        module.data_layout = codegen._data_layout
        passes, builder = codegen._function_pass_manager()
        for function in module.functions:
            if not function.is_declaration:
                passes.run(function, builder)

    def _optimize_final_module(self) -> None:
        codegen: Any = self._codegen
        cheap, builder = codegen._module_pass_manager(loop_vectorize=False, opt=0, cost="cheap")
        self._final_module.link_in(_counting())
        cheap.run(self._final_module, builder)
        tuning = create_pipeline_tuning_options(3)
        tuning.loop_vectorization, tuning.loop_interleaving, tuning.loop_unrolling = True, True, self.unroll
        builder = create_pass_builder(codegen._tm, tuning)
        passes = builder.getModulePassManager()
        passes.add_refprune_pass()
        passes.run(self._final_module, builder)


_COUNTING = """
declare void @NRT_MemInfo_call_dtor(ptr)

define linkonce_odr void @NRT_incref(ptr %info) alwaysinline {
  %none = icmp eq ptr %info, null
  br i1 %none, label %end, label %count
count:
  %before = load i64, ptr %info
  %after = add i64 %before, 1
  store i64 %after, ptr %info
  br label %end
end:
  ret void
}

define linkonce_odr void @NRT_decref(ptr %info) alwaysinline {
  %none = icmp eq ptr %info, null
  br i1 %none, label %end, label %count
count:
  %before = load i64, ptr %info
  %after = add i64 %before, -1
  store i64 %after, ptr %info
  %unused = icmp eq i64 %after, 0
  br i1 %unused, label %release, label %end
release:
  call void @NRT_MemInfo_call_dtor(ptr %info)
  br label %end
end:
  ret void
}

define linkonce_odr ptr @NRT_MemInfo_data_fast(ptr %info) alwaysinline {
  %place = getelementptr i8, ptr %info, i64 24
  %data = load ptr, ptr %place
  ret ptr %data
}
"""


def _counting() -> Any:
    return parse_assembly(_COUNTING)


class _UnrolledLibrary(_Library):
    """The LLVM module of a kernel whose loops are unrolled."""

    unroll = True


class _HelperLibrary(_Library):
    """The LLVM module of a helper, as it is linked into kernels: neither optimised nor translated to machine code."""

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Do nothing: there is no machine code that could ask for the environment of Python objects."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True


class _Compiler(Compiler):
    """Numba's compiler without the passes that find nothing in kernels, and take a twentieth of the time.

    They are for closures and comprehensions, `with` blocks, messages of exceptions that are put together at run time,
    functions that are inlined as source, literal types, expressions of whole arrays, and the text of type annotations.
    """

    library = _Library

    def __init__(self, typing_context: Any, target_context: Any, library: Any, *args: Any) -> None:
        library = self.library(target_context.codegen(), "kernel")  # type: ignore[no-untyped-call]
        library.enable_object_caching()
        super().__init__(typing_context, target_context, library, *args)  # type: ignore[no-untyped-call]
        self.state.targetctx.get_abi_sizeof = partial(_size_of, target_context)

    def define_pipelines(self) -> list[Any]:
        pipelines: list[Any] = super().define_pipelines()  # type: ignore[no-untyped-call]
        for pipeline in pipelines:
            pipeline.passes = [each for each in pipeline.passes if each[0].__name__ not in _UNUSED_PASSES]
            pipeline.finalize()
        return pipelines


class _UnrollingCompiler(_Compiler):
    """The compiler of kernels whose loops are unrolled."""

    library = _UnrolledLibrary


class _HelperCompiler(_Compiler):
    """The compiler of kernels, with the library of helpers for its result."""

    library = _HelperLibrary


@cache
def _size_of(context: Any, kind: Any) -> int:
    """The size of an LLVM type in bytes: Numba asks for it at each assignment, and LLVM parses a module to tell it."""
    size: int = kind.get_abi_size(context.target_data)
    return size


OPTIONS: Any = {
    "nogil": True,
    "fastmath": _FAST,
    "error_model": "numpy",
    "boundscheck": False,
    "no_cfunc_wrapper": True,
    "pipeline_class": _Compiler,
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
    compiled = numba.njit(**options | {"pipeline_class": _HelperCompiler, "no_cpython_wrapper": True})(function)
    compile_now = compiled.compile
    compiled.compile = lambda signature: compile_now(tuple(map(unliteral, signature)))
    return compiled


def strict(function: Callable[..., Any]) -> Any:
    """Compile a loop along rows, one to a lane: what is left over after whole vectors is rounded as these are."""
    return _compiled(function, STRICT)


def unrolled(function: Callable[..., Any]) -> Any:
    """Compile a loop along rows as ``strict`` does, and unroll it: that saves a tenth of the time of long rows."""
    return _compiled(function, {**STRICT, "pipeline_class": _UnrollingCompiler})


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
            with _no_garbage_collection():
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


INLINED: Any = {**STRICT, "forceinline": True, "no_cpython_wrapper": True, "pipeline_class": _HelperCompiler}
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
        key = self._index_key(signature, target.codegen())  # type: ignore[no-untyped-call]
        try:
            found, data = pickle.loads(self._path(key).read_bytes())
            if found == repr(key):
                return self._impl.rebuild(target, data)
        except Exception:  # whatever a damaged file leads to
            pass
        store.announce()
        return None

    def _save_overload(self, signature: Any, result: Any) -> None:
        if not self._impl.check_cachable(result):
            return
        key = self._index_key(signature, result.codegen)  # type: ignore[no-untyped-call]
        path = self._path(key)
        part = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
        with contextlib.suppress(OSError):  # the folder is gone or full: the kernel serves this process alone
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


def _hold() -> None:
    """Wait until no thread compiles: a lock that another thread holds would stay locked in the forked process."""
    global_compiler_lock.acquire()  # type: ignore[no-untyped-call]
    ffi.lib._lock.__enter__()


def _let_go() -> None:
    ffi.lib._lock.__exit__()
    global_compiler_lock.release()  # type: ignore[no-untyped-call]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go)
