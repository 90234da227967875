"""Instruction sets: named by what a process compiles for; a workload with other variables has its own process."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fenchel_lab.bench import Case, Contestant, Goal, Target, Workload, apart, chosen, run_for, targets
from fenchel_lab.bench.rooms import cliffs, cold

CHILD = """
import os, sys, torch
from fenchel_lab.bench import Case, Contestant, Workload, apart

def seen(scale):
    if os.environ["ABACUS"] == "broken":
        raise RuntimeError("out of luck")
    return torch.tensor(scale * float(os.environ["ABACUS"]))

contestants = [Contestant("one", lambda: seen(1.0)), Contestant("two", lambda: seen(2.0))]
cases = [Case("a", tuple, backward=False), Case("b", tuple, backward=False)]
found = Workload("w", "", contestants, cases, [], stopwatch=True)
sys.modules["fenchel_lab.bench.workloads"].workloads = lambda: [found]
apart.main()
"""


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Pretends that this process runs on another processor."""

    class Features:
        def __init__(self, text: str) -> None:
            self.text = text

        def flatten(self) -> str:
            return self.text

    def pretend(name: str, features: str) -> None:
        monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
        monkeypatch.setattr(targets.llvm, "get_host_cpu_name", lambda: name)
        monkeypatch.setattr(targets.llvm, "get_host_cpu_features", lambda: Features(features))

    return pretend


def test_a_processor_with_avx512_is_measured_twice(processor: Any) -> None:
    processor("znver4", "+avx2,+avx512f,-amx")
    assert [each.name for each in chosen("both")] == ["AVX-512 (znver4)", "AVX2 (haswell)"]
    assert [each.name for each in chosen("own")] == ["AVX-512 (znver4)"]
    (narrow,) = chosen("avx2")
    assert narrow.environment["NUMBA_CPU_NAME"] == "haswell"
    assert narrow.environment["NUMBA_CPU_FEATURES"] == ""
    assert narrow.environment["ATEN_CPU_CAPABILITY"] == "avx2"
    assert narrow.environment["NUMBA_CACHE_DIR"]
    assert narrow.environment["TORCHINDUCTOR_CACHE_DIR"]  # torch would take code that was generated for AVX-512


def test_a_processor_without_avx512_is_measured_as_it_is(processor: Any) -> None:
    processor("znver3", "+avx2,-avx512f")
    for choice in targets.CHOICES:
        assert chosen(choice) == [Target("AVX2 (znver3)")]
    processor("apple-m1", "+neon")
    assert chosen("both") == chosen("own") == [Target("apple-m1")]
    with pytest.raises(ValueError, match="--target avx2 needs a processor with AVX2, this one is apple-m1"):
        chosen("avx2")


def test_the_processor_that_numba_was_told_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    assert chosen("both") == chosen("avx2") == [Target("AVX2 (haswell)")]


def test_a_command_runs_as_avx2_where_that_is_another_target(processor: Any, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.environ['NUMBA_CPU_NAME']); sys.exit(3)"]
    processor("znver4", "+avx2,+avx512f")
    assert targets.run_as_avx2(command) == 3
    assert capfd.readouterr().out == "haswell\n"
    processor("znver3", "+avx2")
    assert targets.run_as_avx2(command) == 0
    assert capfd.readouterr().out.startswith("This machine has no AVX-512: AVX2 (znver3) is its only target")


def apart_from(monkeypatch: pytest.MonkeyPatch, value: str) -> Any:
    """The outcome of CHILD's workload in a process of its own, and the progress that it told."""
    monkeypatch.setattr(apart, "_CHILD", CHILD)
    told: list[tuple[float, str]] = []
    workload = Workload(
        "w",
        "",
        [Contestant("one", lambda: pytest.fail("not here")), Contestant("two", None)],
        [Case("a", tuple), Case("b", tuple)],
        [Goal("two", 2.0, "one", "largest")],
        environment={"ABACUS": value},
    )
    target = Target("AVX2 (test)", {"FENCHEL_KERNELS": "off"})
    return run_for(workload, target, 0.0, lambda share, note="": told.append((share, note))), told


def test_other_variables_mean_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, told = apart_from(monkeypatch, "0.25")
    assert outcome.target == "AVX2 (test)"
    assert [each.case for each in outcome.measured] == ["a", "b"]
    assert [each.timings["two"].median for each in outcome.measured] == [0.5, 0.5]
    assert outcome.verdicts[0].holds
    assert told == sorted(told)
    assert told[0] == (0.0, "a")
    assert told[-1] == (1.0, "")


@pytest.mark.slow
def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"w failed in its process \(exit code 1\):\n[\s\S]*out of luck"):
        apart_from(monkeypatch, "broken")


def test_the_same_variables_mean_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABACUS", "1")
    here = []
    contestants = [Contestant(name, lambda: here.append(os.getpid())) for name in "ab"]
    workload = Workload("w", "", contestants, [Case("c", tuple, backward=False)], [], environment={"ABACUS": "1"})
    assert run_for(workload, Target("own"), 0.0).target == "own"
    assert set(here) == {os.getpid()}


@pytest.mark.slow
@pytest.mark.parametrize("pair", cliffs.pairs(), ids=lambda pair: pair.label)
def test_every_pair_of_neighbours_runs(pair: cliffs.Pair) -> None:
    for call in pair.make():
        call()


@pytest.mark.parametrize("name", [*cold.row_calls(), *cold.program_calls()])
def test_first_calls_are_timed_forward_and_backward(name: str) -> None:
    scores = cold.normal(64, 512).requires_grad_()
    seconds = cold.measure({**cold.row_calls(), **cold.program_calls()}[name], scores)
    assert 0 < seconds[cold.FORWARD] <= seconds[cold.BACKWARD]
    assert seconds[cold.FORWARD + cold.WALL] <= seconds[cold.BACKWARD + cold.WALL]
