"""Registered operators ``fenchel::…``: each stays one node in the graphs of ``torch.compile`` and ``torch.export``.

Eager code calls kernels and autograd.Functions directly, because the dispatcher costs as much as a small kernel. Code
that is compiled or exported calls an operator in their place, which calls the same kernels when the graph runs. A graph
that is to run without this library holds torch operations instead: one that ``torch.onnx.export`` captures, and every
exported one if kernels are off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import below_autograd, tracks

_LIBRARY: Any = torch.library.Library("fenchel", "FRAGMENT")  # type: ignore[no-untyped-call]

DECOMPOSITIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Every operator in torch operations, for programs that run without this library:
``program.run_decompositions({**torch.export.default_decompositions(), **DECOMPOSITIONS})``.

Not in torch's own table: with symbolic shapes torch would trace these to find a shape that ``fake`` knows.
"""


def define_operator(
    name: str,
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any],
    decomposition: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register ``fenchel::{name}`` and return a function that calls it, or its decomposition in an export.

    All functions take the arguments of the schema by position.

    Args:
        name: of the operator.
        schema: its arguments and results, such as ``"(Tensor z, float alpha) -> Tensor"``.
        compute: the result for any device, without derivatives: by a kernel where there is one, else in torch
            operations. It returns a tensor, or a tuple of tensors, none of which shares memory with an argument.
        fake: contiguous tensors of the right shape and dtype in place of the result; their values do not matter.
        autograd: the result with its derivatives, where an argument has any. It calls the operator inside
            ``_torch.below_autograd()``, mostly from the forward pass of an autograd.Function, whose own rules then
            serve forward mode and higher orders too.
        decomposition: the result in torch operations that a graph can hold, or NotImplemented if there are none. By
            default ``compute``, which finds no kernel for the tensors of a trace.

    Where vmap maps, the operator takes any number of leading dimensions, and the mapped one is put in front of them.
    """

    def contiguous(*args: Any) -> Any:
        # Whatever the strides of the inputs: those of a result are part of what ``fake`` promises.
        result = compute(*args)
        return tuple(t.contiguous() for t in result) if isinstance(result, tuple) else result.contiguous()

    def with_derivatives(*args: Any) -> Any:
        if tracks(*args):
            return autograd(*args)
        with below_autograd():
            return operator(*args)

    def over_leading_dimensions(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, int]:
        return operator(*rows_first(info, in_dims, args)), 0

    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, contiguous, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, with_derivatives, "Autograd")
    operator: Callable[..., Any] = getattr(torch.ops.fenchel, name).default
    torch.library.register_fake(f"fenchel::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"fenchel::{name}", over_leading_dimensions, lib=_LIBRARY)
    DECOMPOSITIONS[operator] = decomposed = decomposition or compute

    def call(*args: Any) -> Any:
        result = decomposed(*args) if exports_plainly() else NotImplemented
        return operator(*args) if result is NotImplemented else result

    return call


def exports_plainly() -> bool:
    """Whether an export is at work whose graph holds torch operations in place of operators of this library."""
    if not torch.compiler.is_exporting():
        return False
    return not kernels.ENABLED or torch.onnx.is_in_onnx_export()


def or_empty(gradients: Sequence[Tensor | None], needed: Sequence[bool], like: Tensor) -> tuple[Tensor, ...]:
    """Gradients as an operator returns them: empty tensors in place of those that are not needed."""
    pairs = zip(gradients, needed, strict=True)
    return tuple(t if t is not None and is_needed else like.new_empty(0) for t, is_needed in pairs)


def rows_first(info: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> list[Any]:
    """Arguments of a vmap rule with the mapped dimension in front."""
    moved: list[Any] = []
    for arg, dim in zip(args, in_dims, strict=True):
        if not isinstance(arg, Tensor):
            moved.append(arg)
        elif dim is None:
            moved.append(arg.expand(info.batch_size, *arg.shape))
        else:
            moved.append(arg.movedim(dim, 0))
    return moved
