"""Set-up that the tests of the library share."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from fenchel import kernels


@pytest.fixture
def set_kernels() -> Iterator[Callable[[bool], None]]:
    """A function that turns kernels on or off until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda on: stack.enter_context(kernels.enabled(on))
