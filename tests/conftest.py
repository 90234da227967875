"""Set-up that the tests of the library share."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fenchel import kernels


@pytest.fixture
def set_kernels() -> Iterator[Callable[[bool], None]]:
    """A function that turns kernels on or off until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda on: stack.enter_context(kernels.enabled(on))


@pytest.fixture(autouse=kernels.TRITON, scope="session")
def _rounded() -> Iterator[None]:
    """Let Triton's interpreter round to bfloat16 as devices do, to the nearest; it cuts digits off."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    own = InterpreterBuilder.cast_impl

    def cast(self: Any, given: Any, to: Any) -> Any:
        if (given.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return own(self, given, to)
        rounded = torch.from_numpy(np.array(given.data)).bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy(), tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", cast)
        yield


@pytest.fixture(autouse=kernels.TRITON)
def _reached(request: pytest.FixtureRequest) -> Iterator[None]:
    """In Triton's interpreter every test must reach a kernel for GPUs, but for those that choose nothing."""
    from fenchel.kernels.gpu.launch import STARTED

    STARTED.clear()
    yield
    chooses = not any(name in request.node.name for name in ("zero_rows", "bad_input", "omega_is_zero"))
    assert STARTED or not chooses, "no kernel was started"
