"""Shared set-up: studies, made-up and real, and a clock for benchmarks."""

from collections.abc import Callable

import pytest

from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Run, Study, Table, find, registry, run, studies


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Study]:
    """The registry, empty, for as long as the test lasts."""
    studies()  # the real ones are registered on import: let that happen before
    empty: dict[str, Study] = {}
    monkeypatch.setattr(registry, "_STUDIES", empty)
    return empty


@pytest.fixture
def small() -> Study:
    """A study with one figure and one table, and text that is not HTML."""

    def small(context: Context) -> Result:
        drawing, (axes,) = style.panels(1, 1)
        axes.plot([0, 1], [0, 1])
        return Result(
            "First, 1 < 2 & `a < b`.\n\nSecond.",
            figures=[Figure(drawing, caption="A <line>", alt='It "rises"', paper="The paper's rises too")],
            tables=[Table(["name", "value"], [["a, b", 0.5], ["<c>", float("inf")]], caption="Numbers")],
        )

    return Study("small", "A small <study>", "Somebody (2020)", 1, small)


@pytest.fixture
def broken() -> Study:
    def broken(context: Context) -> Result:
        raise RuntimeError("the <disk> is full")

    return Study("broken", "A broken study", "Nobody (2021)", 2, broken)


@pytest.fixture(scope="session")
def chapter() -> Callable[[str], Run]:
    """Runs a real chapter, once in a session."""
    runs: dict[str, Run] = {}

    def run_once(name: str) -> Run:
        if name not in runs:
            runs[name] = run(find(name), Context(data=None))
        assert runs[name].error is None, runs[name].error
        return runs[name]

    return run_once


class Clock:
    """Seconds that pass when ``takes`` is called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float, name: str = "") -> Callable[[], None]:
        """A call that lasts so long."""

        def call() -> None:
            self.log.append(name)
            self.now += seconds

        return call


@pytest.fixture
def clock() -> Clock:
    return Clock()
