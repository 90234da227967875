"""Peak memory: what a run allocates, without inputs and returned gradients, whatever its parent had."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from fenchel_lab.bench import Case, Contestant, Workload, memory

MEGABYTE = 2**20
BIG = 64 * MEGABYTE
CHILD = f"""
import sys, torch
from fenchel_lab.bench import Case, Contestant, Workload, memory

def case(label, floats):
    return Case(label, lambda: (torch.ones(floats),), small=lambda: (torch.ones(8),))

def hungry(x):
    scratch = torch.ones({BIG} // 4)
    return x.sum() + 0 * scratch[0]

def broken(x):
    raise RuntimeError("out of luck")

contestants = [
    Contestant("modest", lambda x: x.sum()),
    Contestant("hungry", hungry),
    Contestant("broken", broken),
]
cases = [case("small", 100), case("large", {BIG} // 4)]
sys.modules["fenchel_lab.bench.workloads"].workloads = lambda: [Workload("w", "", contestants, cases, [])]
memory.main()
"""
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def peak(label: str, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(memory, "_CHILD", CHILD)
    found = memory.peak(Workload("w", "", [], [], []), Case(label, tuple), Contestant(name, None))
    assert found is not None
    return found


@linux
def test_scratch_counts_and_the_parents_memory_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = torch.ones(4 * BIG // 4)  # a child inherits this in getrusage's peak
    assert peak("small", "hungry", monkeypatch) == pytest.approx(BIG, abs=4 * MEGABYTE)
    assert mine.sum() == mine.numel()


@pytest.mark.slow
@linux
def test_inputs_and_returned_gradients_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak("large", "modest", monkeypatch) < 8 * MEGABYTE


@pytest.mark.slow
def test_a_contestant_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="memory of broken failed: RuntimeError: out of luck"):
        peak("small", "broken", monkeypatch)


@linux
def test_the_resident_size_follows_what_is_allocated() -> None:
    before, highest = memory.resident(), memory.highest()
    with mmap.mmap(-1, BIG) as scratch:  # not from a pool of memory that was freed before, but kept
        for page in range(0, BIG, mmap.PAGESIZE):
            scratch[page] = 1
        during = memory.resident()
    assert during - before == pytest.approx(BIG, abs=4 * MEGABYTE)
    assert memory.resident() < during
    assert memory.highest() >= max(highest, during - 4 * MEGABYTE)


@pytest.mark.skipif(os.name == "nt", reason="needs getrusage")
def test_without_proc_the_peak_comes_from_getrusage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = memory.highest()
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    assert memory.resident() == memory.highest()
    assert memory.highest() >= told - MEGABYTE
