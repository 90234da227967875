"""The size of the tensors that operations make."""

from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in elements; those without data (meta) do not count.

    Args:
        kernels: whether kernels are used although a dispatch mode is on.
    """

    elements = 0

    def __init__(self, *, kernels: bool = False) -> None:
        super().__init__()
        self.patches = [patch("fenchel._torch._dispatch_modes", lambda: 0)] if kernels else []

    def __enter__(self) -> "Largest":
        for each in self.patches:
            each.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for each in self.patches:
            each.stop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor) and not each.is_meta:
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result
