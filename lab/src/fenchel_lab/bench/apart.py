"""Workloads in a process of their own: with other variables of the environment than this process was started with."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fenchel.progress import Progress
from fenchel_lab.bench.measure import Measured, Timing

if TYPE_CHECKING:
    from fenchel_lab.bench.workload import Workload

_CHILD = "from fenchel_lab.bench import apart; apart.main()"


def holds(environment: Mapping[str, str]) -> bool:
    """Whether this process was started with these variables."""
    return all(os.environ.get(name) == value for name, value in environment.items())


def measure(
    workload: Workload, seconds: float, progress: Progress | None, environment: Mapping[str, str]
) -> list[Measured]:
    """Run a workload in a new process with more variables, and return what it measured.

    Raises:
        RuntimeError: with the last lines of the process if it failed.
    """
    command = [sys.executable, "-c", _CHILD, workload.name, str(seconds)]
    record: list[dict[str, object]] | None = None
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as complaints,
        subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            encoding="utf-8",
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                told = json.loads(line) if line.startswith("{") else {}
                if "share" in told and progress is not None:
                    progress(told["share"], told["note"])
                record = told.get("measured", record)
        except BaseException:
            child.kill()
            raise
        if child.wait() or record is None:
            complaints.seek(0)
            reason = "\n".join(complaints.read().strip().splitlines()[-8:])
            raise RuntimeError(f"{workload.name} failed in its process (exit code {child.returncode}):\n{reason}")
    return [_read(each) for each in record]


def main() -> None:
    """In the new process: run the workload that the arguments name; tell progress and results as lines of JSON."""
    from fenchel_lab.bench.run import run
    from fenchel_lab.bench.workloads import find

    name, seconds = sys.argv[1:]
    (workload,) = find([name])

    def tell(fraction: float, note: str = "") -> None:
        print(json.dumps({"share": fraction, "note": note}), flush=True)

    outcome = run(workload, float(seconds), tell)
    print(json.dumps({"measured": [dataclasses.asdict(each) for each in outcome.measured]}), flush=True)


def _read(record: dict[str, object]) -> Measured:
    timings, memory = record["timings"], record["memory"]
    assert isinstance(timings, dict)
    assert isinstance(memory, dict)
    return Measured(str(record["case"]), {name: Timing(**each) for name, each in timings.items()}, memory)
