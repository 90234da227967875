"""Numba's compiler for kernels: the same passes, but for those that find nothing in them or make them larger.

All that relies on private classes of Numba is here. ``compiler`` takes Numba's own compiler instead where this module
cannot be imported or ``check`` fails: kernels then take longer to compile, and are the same.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numba
import numpy as np
from llvmlite.binding import (
    create_new_function_pass_manager,
    create_pass_builder,
    create_pipeline_tuning_options,
    parse_assembly,
)
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.runtime import nrtdynmod
from numba.core.runtime.nrt import rtsys

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
"""What kernels use of Numba's runtime: counts of references to an array's memory, which Numba makes atomic.

Nobody else counts them meanwhile: each call of a kernel has counts of its own for the arrays that it is given, and one
thread runs it. An atomic operation waits for all stores before it: in loops over short rows, which take parts of arrays
at every step, that was a fifth of the time.
"""
_RECORD = ["i64", "i8*", "i8*", "i8*", "i64"]  # of an array: count, two of its end, data, size


class _Library(JITCodeLibrary):
    """The LLVM module of a kernel: as Numba optimises it, but for what makes it larger and not faster.

    Loops are not unrolled beyond what the source says: they work on vectors already, and for some processors LLVM
    writes out dozens of rounds, which takes a third of the time that it needs for the whole module.
    """

    unroll = False

    def add_linking_library(self, library: Any) -> None:
        if library is not rtsys.library:  # which has Numba's way of counting references
            super().add_linking_library(library)  # type: ignore[no-untyped-call]

    def _optimize_functions(self, module: Any) -> None:
        """Make each function shorter before it is linked: what else there is to gain, the whole module gains later."""
        codegen: Any = self._codegen
        module.data_layout = codegen._data_layout
        builder, passes = codegen._pass_builder(opt=1), create_new_function_pass_manager()
        passes.add_sroa_pass()
        passes.add_simplify_cfg_pass()
        passes.add_instruction_combine_pass()
        passes.add_refprune_pass()
        for function in module.functions:
            if not function.is_declaration:
                passes.run(function, builder)

    def _optimize_final_module(self) -> None:
        codegen: Any = self._codegen
        cheap, builder = codegen._module_pass_manager(loop_vectorize=False, opt=0, cost="cheap")
        self._final_module.link_in(parse_assembly(_COUNTING))
        cheap.run(self._final_module, builder)
        tuning = create_pipeline_tuning_options(3)
        tuning.loop_vectorization, tuning.loop_interleaving, tuning.loop_unrolling = True, True, self.unroll
        builder = create_pass_builder(codegen._tm, tuning)
        passes = builder.getModulePassManager()
        passes.add_refprune_pass()
        passes.run(self._final_module, builder)


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


class KernelCompiler(Compiler):
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


class UnrollingCompiler(KernelCompiler):
    """The compiler of kernels whose loops are unrolled."""

    library = _UnrolledLibrary


class HelperCompiler(KernelCompiler):
    """The compiler of kernels, with the library of helpers for its result."""

    library = _HelperLibrary


@cache
def _size_of(context: Any, kind: Any) -> int:
    """The size of an LLVM type in bytes: Numba asks for it at each assignment, and LLVM parses a module to tell it."""
    size: int = kind.get_abi_size(context.target_data)
    return size


def check() -> None:
    """Compile a kernel and its helper this way; fail if this version of Numba has other private classes."""
    record = [str(each) for each in nrtdynmod._meminfo_struct_type.elements]
    if record != _RECORD:
        raise RuntimeError(f"the record of an array's references is {record}, not {_RECORD}")
    options: Any = {"nogil": True, "no_cfunc_wrapper": True}
    helper = numba.njit(**options | {"no_cpython_wrapper": True, "pipeline_class": HelperCompiler})(_twice)

    def kernel(x: Any) -> Any:
        total, doubled = 0.0, np.empty(len(x))
        for i in range(len(x)):
            doubled[i] = helper(x[i])
            total += doubled[i]
        return total

    for compiler in (KernelCompiler, UnrollingCompiler):
        found = numba.njit(**options | {"pipeline_class": compiler})(kernel)(np.arange(5.0))
        if found != 20.0:
            raise RuntimeError(f"a kernel gave {found}, not 20")


def _twice(x: float) -> float:
    return 2.0 * x
