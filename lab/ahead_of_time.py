"""Compile the kernels for GPUs ahead of time, without a GPU: registers, spills and shared memory of each.

The library is called on tensors of the CPU, and what it would launch is recorded instead: so every kernel is compiled
in the configuration that would be launched. Must run in a process in which TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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

    before, launch.LANES = launch.LANES, TARGETS[target][2]
    try:
        with launch.recorded() as found:
            call()
    finally:
        launch.LANES = before
    return list(found)


def compile_for(target: str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Resources:
    """Compile a recorded launch for a target."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target.startswith("gfx"):  # see ``launch.PRECISION`` and ``launch.MOST_REGISTERS``
        options = {k: "ieee" if k == "PRECISION" else v for k, v in options.items() if k != "maxnreg"}
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
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    compiled = triton.compile(
        source, target=GPUTarget(*TARGETS[target]), options={k: v for k, v in options.items() if k in _OPTIONS}
    )
    return _amd(compiled) if target.startswith("gfx") else _nvidia(compiled, target)


def _nvidia(compiled: Any, target: str) -> Resources:
    import triton

    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    number = int(target.removeprefix("sm_"))
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        program = binaries / ("ptxas" if number < 100 else "ptxas-blackwell")
        name = target + ("a" if number >= 90 else "")
        command = [str(program), "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None
    assert spills is not None
    return Resources(int(registers[1]), int(spills[1]) + int(spills[2]), int(compiled.metadata.shared))


def _amd(compiled: Any) -> Resources:
    text = compiled.asm["amdgcn"]
    found = {name: re.search(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count")}
    numbers = [0 if match is None else int(match[1]) for match in found.values()]
    return Resources(numbers[0], 4 * numbers[1], int(compiled.metadata.shared))
