"""What kernels for GPUs read and write, counted in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor
from triton.runtime import interpreter


@contextmanager
def counted(**tensors: Tensor) -> Iterator[dict[tuple[str, str], float]]:
    """Reads and writes of each tensor in the interpreter, per entry of it."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    found: dict[tuple[str, str], float] = {}

    def count(kind: str, pointers: object, mask: object) -> None:
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        touched = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape).astype(bool)]
        for name, t in tensors.items():
            first, last = t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()
            here = int(((touched >= first) & (touched < last)).sum())
            found[kind, name] = found.get((kind, name), 0.0) + here / t.numel()

    def counting_load(self: object, pointers: object, mask: object, *rest: object) -> object:
        count("read", pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(self: object, pointers: object, value: object, mask: object, *rest: object) -> object:
        count("written", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counting_load, counting_store
    try:
        yield found
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
