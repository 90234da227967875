"""A clock that only moves when told, for contestants whose times are known."""

from collections.abc import Callable

import pytest


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
