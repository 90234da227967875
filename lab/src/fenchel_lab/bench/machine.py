"""Where the figures come from: the processor and its instruction set, the threads, the versions, the day."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from dataclasses import dataclass

import torch

from fenchel_lab.bench import targets
from fenchel_lab.report.origin import cpu_model


@dataclass(frozen=True)
class Machine:
    """What a reader needs to place the figures of a benchmark."""

    cpu: str
    target: str
    cores: int
    torch_threads: int
    kernels: str
    python: str
    torch: str
    numba: str
    fenchel: str
    entmax: str | None
    system: str
    date: str

    def __str__(self) -> str:
        versions = [f"{name} {getattr(self, name)}" for name in ("fenchel", "torch", "numba", "python", "entmax")]
        return (
            f"{self.cpu}, {self.target}, {_count(self.cores, 'core')}, {_count(self.torch_threads, 'torch thread')}; "
            f"{', '.join(versions if self.entmax else versions[:-1])}; {self.system}; {self.date[:10]}"
        )


def machine() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=cpu_model(),
        target=targets.own_target().name,
        cores=os.cpu_count() or 1,
        torch_threads=torch.get_num_threads(),
        kernels="off" if os.environ.get("FENCHEL_KERNELS") == "off" else "on",
        python=platform.python_version(),
        torch=str(torch.__version__),
        numba=importlib.metadata.version("numba"),
        fenchel=importlib.metadata.version("fenchel"),
        entmax=_version("entmax"),
        system=f"{platform.system()} {platform.machine()}",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
