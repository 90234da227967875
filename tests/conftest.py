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


@pytest.fixture(autouse=kernels.TRITON)
def _reached(request: pytest.FixtureRequest) -> Iterator[None]:
    """In Triton's interpreter every test must reach a kernel for GPUs, but for those that compute nothing."""
    from fenchel.kernels.gpu.launch import STARTED

    STARTED.clear()
    yield
    assert STARTED or "zero_rows" in request.node.name or "bad_input" in request.node.name, "no kernel was started"
