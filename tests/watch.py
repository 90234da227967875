"""The size of the tensors that operations make."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in elements; those without data (meta) do not count."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor) and not each.is_meta:
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result
