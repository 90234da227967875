"""Every workload, and those that are asked for by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fenchel_lab.bench.rooms import (
    attention,
    cliffs,
    cold,
    continuous,
    distributed,
    dynamic,
    losses,
    maps,
    memories,
    sequences,
    structures,
)
from fenchel_lab.bench.workload import Workload

ROOMS = (maps, losses, attention, memories, structures, dynamic, continuous, sequences, distributed, cliffs, cold)


class UnknownWorkloadError(LookupError):
    """No workload has the name that was asked for."""


def find(names: Iterable[str] = ()) -> list[Workload]:
    """The workloads called so, in the order asked for; all if none is named."""
    known = {each.name: each for each in workloads()}
    asked = list(dict.fromkeys(names)) or list(known)
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise UnknownWorkloadError(f"There is no workload called {name!r}.{hint} Workloads: {', '.join(known)}.")
    return [known[name] for name in asked]


def workloads() -> list[Workload]:
    """Every workload, in the order of the report."""
    return [each for room in ROOMS for each in room.workloads()]
