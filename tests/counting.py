"""What kernels for GPUs read, write and compute, counted in Triton's interpreter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor
from triton.runtime import interpreter


@contextmanager
def counted(**tensors: Tensor) -> Iterator[dict[tuple[str, str], float]]:
    """Reads and writes of each tensor in the interpreter, per entry of it; and what is computed, whatever the tensors.

    ``found["multiplied", ""]`` are multiplications and additions in products of matrices, ``found["single", ""]``
    other operations on floats, one by one: sums, products, comparisons, square roots, of blocks with two dimensions.
    """
    builder = interpreter.InterpreterBuilder
    own = {name: getattr(builder, name) for name in ("create_dot", "unary_op", "binary_op", "ternary_op")}
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

    def counting_dot(self: object, a: object, b: object, *rest: object) -> object:
        found["multiplied", ""] = found.get(("multiplied", ""), 0.0) + 2.0 * a.data.size * b.data.shape[-1]
        return own["create_dot"](self, a, b, *rest)

    def counting_operation(name: str) -> Callable[..., object]:
        def operate(self: object, *args: object) -> object:
            out = own[name](self, *args)
            if args[0].data.dtype.kind == "f" and out.data.ndim > 1:
                found["single", ""] = found.get(("single", ""), 0.0) + out.data.size
            return out

        return operate

    builder.create_masked_load, builder.create_masked_store = counting_load, counting_store
    builder.create_dot = counting_dot
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, counting_operation(name))
    try:
        yield found
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        for name, operation in own.items():
            setattr(builder, name, operation)
