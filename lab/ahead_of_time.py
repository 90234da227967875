"""Compile the kernels for GPUs ahead of time, without a GPU: registers, spills and shared memory of each.

The library is called on tensors of the CPU, and what it would launch is recorded instead: so every kernel is compiled
in the configuration that would be launched. Must run in a process in which TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""The targets by name: A100, H100, B200 and MI300."""

_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs: registers per thread, bytes spilled per thread, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def record(call: Callable[[], Any], target: str = "sm_90") -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The kernels that a call would launch on a target, with their arguments and options."""
    from fenchel.kernels.gpu import launch

    is_amd = target.startswith("gfx")
    own = {
        "LANES": TARGETS[target][2],
        "PRECISION": "ieee" if is_amd else "tf32x3",
        "MOST_REGISTERS": {} if is_amd else {"maxnreg": 255},
    }
    before = {name: getattr(launch, name) for name in own}
    vars(launch).update(own)
    try:
        with launch.recorded() as found:
            call()
    finally:
        vars(launch).update(before)
    return list(found)


def prepare(
    target: str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, dict[str, Any], str]:
    """What Triton's compiler takes for a recorded launch, its options, and a name that only an equal kernel has."""
    import triton
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    constants = {(names.index(k),): v for k, v in options.items() if k not in _OPTIONS}
    signature: dict[str, Any] = dict.fromkeys(names, "constexpr")
    divisible: dict[tuple[int, ...], list[list[Any]]] = {}

    def specialise(given: Any, path: tuple[int, ...]) -> Any:
        """The type of an argument; what the launcher would treat as a constant is added to the constants."""
        if isinstance(given, tuple):
            types = [specialise(each, (*path, i)) for i, each in enumerate(given)]
            return type(given)(*types) if hasattr(given, "_fields") else tuple(types)
        if given is None or (isinstance(given, int) and given == 1):
            constants[path] = given
            return "constexpr"
        if isinstance(given, float):
            return "fp32"
        if isinstance(given, torch.Tensor) or given % 16 == 0:
            divisible[path] = [["tt.divisibility", 16]]
        if isinstance(given, torch.Tensor):
            return _TYPES[given.dtype]
        return "i32" if abs(given) < 1 << 31 else "i64"

    for i, given in enumerate(args):
        signature[names[i]] = specialise(given, (i,))
    chosen = {k: v for k, v in options.items() if k in _OPTIONS}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    parts = triton.__version__, target, code_of(kernel), signature, constants, divisible, chosen
    return source, chosen, hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def code_of(function: Any) -> str:
    """The code of a kernel and of all that it calls, without comments and docstrings."""
    import triton

    code = ast.parse(function.src)
    for each in ast.walk(code):
        if isinstance(each, ast.FunctionDef) and ast.get_docstring(each) is not None:
            each.body = each.body[1:]
    parts = [ast.dump(code)]
    for name in sorted({each.id for each in ast.walk(code) if isinstance(each, ast.Name)}):
        given = function.__globals__.get(name)
        if isinstance(given, triton.JITFunction) and given is not function:
            parts.append(code_of(given))
        elif isinstance(given, triton.language.constexpr):
            parts.append(f"{name} = {given.value!r}")
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def compile_for(target: str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Resources:
    """Compile a recorded launch for a target; what is said of it is the log of that compilation."""
    import triton
    from triton.backends.compiler import GPUTarget

    source, chosen, _ = prepare(target, kernel, args, options)
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=chosen)
    shared = int(compiled.metadata.shared)
    return _amd(compiled.asm["amdgcn"], shared) if target.startswith("gfx") else _nvidia(log.getvalue(), shared)


def _nvidia(log: str, shared: int) -> Resources:
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers is not None
    assert spills is not None
    return Resources(int(registers[1]), int(spills[1]) + int(spills[2]), shared)


def _amd(program: str, shared: int) -> Resources:
    found = {name: re.search(rf"\.{name}:\s+(\d+)", program) for name in ("vgpr_count", "vgpr_spill_count")}
    numbers = [0 if match is None else int(match[1]) for match in found.values()]
    return Resources(numbers[0], 4 * numbers[1], shared)
