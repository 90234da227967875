"""Peak memory of a contestant, beside its inputs and the gradients that it returns, in a process of its own.

The high-water mark of a process never falls, so each measurement wants a fresh one. On Linux it is read from ``/proc``:
``getrusage`` would hand down the peak of the process that started this one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fenchel_lab.bench.workload import Case, Contestant, Workload

_STATUS = Path("/proc/self/status")
_CHILD = "from fenchel_lab.bench import memory; memory.main()"


def peak(workload: Workload, case: Case, contestant: Contestant) -> int | None:
    """Bytes that one run adds to the resident size at its peak; None where the system does not tell."""
    command = [sys.executable, "-c", _CHILD, workload.name, case.label, contestant.name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RuntimeError(f"measuring the memory of {contestant.name} failed: {reason[0]}")
    printed = done.stdout.split()[-1]
    return None if printed == "None" else int(printed)


def main() -> None:
    """In the fresh process: print the bytes of the workload, case and contestant that the arguments name."""
    from fenchel_lab.bench.workloads import find

    name, label, contestant = sys.argv[1:]
    (workload,) = find([name])
    print(extra(workload.contestant(contestant), workload.contestants[0], workload.case(label)))


def extra(contestant: Contestant, first: Contestant, case: Case) -> int | None:
    """Bytes at the peak of one run, without inputs and returned gradients. Only the first call in a process counts."""
    from fenchel_lab.bench.run import call, prepare

    with torch.set_grad_enabled(case.grad):
        call(contestant, first, case, prepare(case, small=True))()  # compile, import, start threads
        inputs = prepare(case)
        once = call(contestant, first, case, inputs)
        before = resident()
        once()
        after = highest()
    if before is None or after is None:
        return None
    gradients = sum(each.nbytes for each in inputs if each.requires_grad)
    return max(0, after - before - gradients)


def resident() -> int | None:
    """Bytes of memory that this process has now; the peak so far where only that is known."""
    return _kilobytes("VmRSS") or highest()


def highest() -> int | None:
    """Bytes of memory that this process had at its peak."""
    return _kilobytes("VmHWM") or _usage()


def _kilobytes(field: str) -> int | None:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _usage() -> int | None:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
