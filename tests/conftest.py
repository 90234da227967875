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
    """In Triton's interpreter every test must reach a kernel for GPUs, but for those that choose nothing."""
    from fenchel.kernels.gpu.launch import STARTED

    STARTED.clear()
    yield
    chooses = not any(name in request.node.name for name in ("zero_rows", "bad_input", "omega_is_zero"))
    assert STARTED or not chooses, "no kernel was started"
