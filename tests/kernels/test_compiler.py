"""How kernels are compiled: also with a version of Numba whose private classes have other names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core.runtime import _nrt_python, rtsys

import fenchel
from fenchel.kernels.cpu.compiler import kernel
from fenchel.structures import DependencyTree

# A version of Numba in which a class, a method or an argument that the savings rely on has another name.
OTHERS = {
    "class": "del codegen.JITCodeLibrary",
    "method": """
codegen.CPUCodegen._builder_of_passes = codegen.CPUCodegen._pass_builder
del codegen.CPUCodegen._pass_builder
def passes(self, **options):
    options.pop("cost", None)
    builder = self._builder_of_passes(**options)
    return builder.getModulePassManager(), builder
def function_passes(self):
    builder = self._builder_of_passes()
    return builder.getFunctionPassManager(), builder
codegen.CPUCodegen._module_pass_manager, codegen.CPUCodegen._function_pass_manager = passes, function_passes
""",
    "argument": """
created = codegen.JITCodeLibrary.__init__
codegen.JITCodeLibrary.__init__ = lambda self, *, owner, title: created(self, owner, title)
codegen.JITCPUCodegen.create_library = lambda self, name: self._library_class(owner=self, title=name)
""",
    "cache": "del caching.Cache._index_key",
}

CALL = """
import torch, fenchel
from fenchel.kernels.cpu import compiler
scores = torch.tensor([[1.0, 0.5, -1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
p = fenchel.sparsemax(scores)
assert torch.allclose(p, torch.tensor([[0.75, 0.25, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64), atol=1e-15)
print(compiler._compilers() is not None)
"""


@pytest.mark.parametrize("other", ["class", "method", "argument", "cache"])
def test_kernels_compile_where_private_parts_of_numba_have_other_names(other: str, tmp_path: Path) -> None:
    done = _run(f"from numba.core import caching, codegen\n{OTHERS[other]}\n{CALL}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(other == "cache")


def test_resolutions_are_not_kept_where_numba_keeps_no_options(tmp_path: Path) -> None:
    code = """
from numba.core.targetconfig import ConfigStack
from numba.core.types.functions import BaseFunction
search = BaseFunction.get_call_type
del ConfigStack.top_or_none
from fenchel.kernels.cpu.resolution import remembered
with remembered():
    assert BaseFunction.get_call_type is search
"""
    assert _run(code, tmp_path).returncode == 0


def test_what_is_remembered_of_one_compilation_serves_another_and_ends_with_it(tmp_path: Path) -> None:
    code = """
import numba, numpy as np
from numba.core.types.functions import BaseFunction
from fenchel.kernels.cpu import resolution
search = BaseFunction.get_call_type
def first(x, y):
    return min(x, y) + x * y
with resolution.remembered():
    for kind, fast in ((int, False), (float, False), (float, True)):
        for _ in range(2):
            with resolution.remembered():
                assert BaseFunction.get_call_type is not search
                assert numba.njit(first, fastmath=fast)(kind(2), kind(3)) == 8
assert BaseFunction.get_call_type is search
assert resolution._known
try:
    with resolution.remembered():
        numba.njit(lambda x: x + "a")(1)
except numba.TypingError:
    pass
else:
    raise AssertionError("a sum of a number and a text has no type")
assert BaseFunction.get_call_type is search
"""
    done = _run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process with an empty cache that waits for kernels."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "FENCHEL_KERNELS": "wait", "FENCHEL_QUIET": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_kernels_free_what_they_allocate() -> None:
    scores = torch.randn(3, 6, 7, dtype=torch.float64)
    arguments = np.ones((2, 5)), np.ones(2)
    counts = [sys.getrefcount(each) for each in arguments]
    _nrt_python.memsys_enable_stats()
    try:
        before = rtsys.get_allocation_stats()
        for _ in range(3):
            fenchel.SparseMAP(DependencyTree()).argmax(scores)
            fenchel.sparsemax(scores)
            assert fenchel.dp.LinearChain(scores, torch.zeros(7, 7, dtype=torch.float64)).value.isfinite().all()
            row_sums(0, 2, *arguments)
        after = rtsys.get_allocation_stats()
    finally:
        _nrt_python.memsys_disable_stats()
    assert after.alloc - before.alloc == after.free - before.free > 0
    assert after.mi_alloc - before.mi_alloc == after.mi_free - before.mi_free > 0
    assert [sys.getrefcount(each) for each in arguments] == counts


@kernel
def row_sums(first, last, rows, sums):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        row, spare = rows[i], np.zeros(3)
        sums[i] = row[1:].sum() + spare[0]
