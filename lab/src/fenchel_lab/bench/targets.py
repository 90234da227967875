"""Instruction sets that kernels are compiled for: the processor's own, and AVX2 on a processor that has more."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llvmlite.binding as llvm

WIDE, NARROW = "AVX-512", "AVX2"
NO_WIDE = f"This machine has no {WIDE}: figures for {WIDE} are missing."
HASWELL = "haswell"
"""The processor that stands for AVX2."""

CHOICES = ("both", "own", "avx2")
"""What ``fenchel bench --target`` takes."""


@dataclass(frozen=True)
class Target:
    """An instruction set.

    Args:
        name: as tables show it.
        environment: variables of a process whose kernels, and torch's, are compiled for it; none for this process.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)


def chosen(choice: str) -> list[Target]:
    """The targets that ``--target`` selects: one of :data:`CHOICES`.

    Raises:
        ValueError: for a choice that is not known, or AVX2 on a processor without it.
    """
    if choice not in CHOICES:
        raise ValueError(f"--target must be {', '.join(CHOICES[:-1])} or {CHOICES[-1]}, got {choice!r}")
    own = own_target()
    if choice == "own" or (choice == "both" and not own.name.startswith(WIDE)):
        return [own]
    if choice == "avx2" and own.name.startswith(NARROW):
        return [own]
    if not own.name.startswith(WIDE):
        raise ValueError(f"--target avx2 needs a processor with {NARROW}, this one is {own.name}")
    return [own, avx2_target()] if choice == "both" else [avx2_target()]


def own_target() -> Target:
    """What this process compiles kernels for."""
    asked = os.environ.get("NUMBA_CPU_NAME") or None
    processor = asked or llvm.get_host_cpu_name()
    try:
        features = llvm.get_host_cpu_features().flatten() if asked is None else "+avx2" if asked == HASWELL else ""
    except RuntimeError:  # where LLVM does not know the processor
        features = ""
    for feature, name in (("+avx512f", WIDE), ("+avx2", NARROW)):
        if feature in features.split(","):
            return Target(f"{name} ({processor})")
    return Target(processor)


def avx2_target() -> Target:
    """AVX2, in another process with caches of its own; torch's own kernels are held to it as well.

    ``torch.compile`` takes generated code from its cache whatever instruction set that was generated for: loops for
    AVX-512, compiled for AVX2, leave half of their results unwritten.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fenchel"
    return Target(
        f"{NARROW} ({HASWELL})",
        {
            "NUMBA_CPU_NAME": HASWELL,
            "NUMBA_CPU_FEATURES": "",
            "NUMBA_CACHE_DIR": str(caches / "kernels-avx2"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "graphs-avx2"),
            "ATEN_CPU_CAPABILITY": "avx2",
        },
    )


def run_as_avx2(command: Sequence[str]) -> int:
    """Run a command whose kernels are compiled for AVX2 and return its exit code.

    A processor without AVX-512 compiles for AVX2, or less, as it is: nothing is run there, and a line says so.
    """
    own = own_target().name
    if not own.startswith(WIDE):
        print(f"This machine has no {WIDE}: {own} is its only target, which `make test` checks. Nothing was run.")
        return 0
    return subprocess.run(command, env={**os.environ, **avx2_target().environment}, check=False).returncode
