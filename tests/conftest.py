"""Shared set-up: reproducible, unhurried hypothesis, one thread a test process, and a clock for benchmarks."""

import os
from collections.abc import Callable

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None, max_examples=12, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


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
