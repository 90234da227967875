"""Attention by blocks as operators, ``fenchel::attend`` and ``fenchel::attend_backward``, for graphs.

The shapes of a graph cannot depend on data. The supports of all blocks are therefore one list with space for a fixed
number of entries per row; memory that no entry is written to is never touched. A block without entries was computed by
dense products, and is computed again in the backward pass.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fenchel._operators import define_operator, or_empty
from fenchel._torch import apply_function, below_autograd, tracks
from fenchel.regularizers.operators import registered_map
from fenchel.streaming.supports import Blocks, Supports, Task, masked_scores, plain_gradients

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? parameter"
_REST = "float number, str name, SymInt[] batch, SymInt length, bool causal, SymInt rows, SymInt? entries"


def attend_in_graph(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, parameter: float | Tensor, task: Task
) -> Tensor:
    """The output of ``attend`` as part of a graph; without dropout."""
    kept = tracks(query, key, value, parameter)
    own = (parameter, 0.0) if isinstance(parameter, Tensor) else (None, parameter)
    rest = task.rule.name, task.batch, task.length, task.causal, task.rows, task.entries
    output: Tensor = attend_operator(query, key, value, mask, *own, *rest, kept)[0]
    return output


def _problem(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, parameter: Tensor | None, number: float, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float | Tensor, Task]:
    """The arguments of ``attend``, from those of an operator."""
    name, batch, length, causal, rows, entries = rest
    task = Task(registered_map(name), rows, entries, tuple(batch), length, causal)
    return query, key, value, mask, number if parameter is None else parameter, task


# -- the forward pass ------------------------------------------------------------------------------------------------


def _attend(*args: Any) -> tuple[Tensor, ...]:
    *problem, keep = args
    run = Blocks(*_problem(*problem))
    output, found = run.forward(keep)
    _, starts, indices, weights = _empty(*args)
    row, place = 0, 0
    starts[:1] = 0
    for block, supports in zip(run.blocks, found, strict=True):
        own = starts[row + 1 : row + 1 + math.prod(each.stop - each.start for each in block)]
        row += len(own)
        if supports is None:
            own.fill_(place)
            continue
        torch.add(supports.starts[1:], place, out=own)
        end = place + supports.weights.numel()
        indices[place:end], weights[place:end] = supports.indices, supports.weights
        place = end
    return output, starts, indices, weights


def _empty(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The results, not filled in: output, and starts, indices and weights of all supports (of size 0 if not kept)."""
    *_, entries, keep = rest
    keep = keep and entries is not None
    heads, rows, _ = query.shape
    size = heads * rows * entries if keep else 0
    return (
        value.new_empty(heads, rows, value.shape[-1]),
        query.new_empty(heads * rows + 1 if keep else 0, dtype=torch.int64),
        query.new_empty(size, dtype=torch.int32),
        query.new_empty(size),
    )


def _attend_plainly(*args: Any) -> tuple[Tensor, ...]:
    """The results in torch operations that a graph can hold."""
    query, key, value, mask, parameter, task = _problem(*args[:-1])
    x = masked_scores(query, key, mask, task)
    p = task.rule.argmax(x, parameter.unsqueeze(-1) if isinstance(parameter, Tensor) else parameter)
    _, starts, *lists = _empty(*args)
    return p @ value, torch.zeros_like(starts), *lists


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            output, *lists = attend_operator(*args)
        ctx.rest = args[5:-1]
        ctx.save_for_backward(*lists, *args[:5])
        ctx.mark_non_differentiable(*lists)
        ctx.set_materialize_grads(False)
        return output, *lists

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        needed = [*ctx.needs_input_grad[:3], ctx.needs_input_grad[4]]
        found = attend_backward_operator(grad, *ctx.saved_tensors, *ctx.rest, needed)
        to = [each if is_needed else None for each, is_needed in zip(found, needed, strict=True)]
        return *to[:3], None, to[3], *(None for _ in ctx.needs_input_grad[5:])


# -- the backward pass -----------------------------------------------------------------------------------------------


def _attend_backward(grad: Tensor, starts: Tensor, indices: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *problem, needed = rest
    run = Blocks(*_problem(*problem))
    found: list[Supports | None] = []
    row = 0
    for block in run.blocks:
        own = starts[row : row + 1 + math.prod(each.stop - each.start for each in block)]
        row += len(own) - 1
        first, last = (int(own[0]), int(own[-1])) if len(own) else (0, 0)
        lists = indices[first:last], weights[first:last], weights[:0]
        found.append(Supports(own - first, *lists) if last > first else None)
    return or_empty(run.backward(found, grad.contiguous(), None, needed), needed, grad)


def _backward_empty(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    query, key, value = rest[3:6]
    shapes = query.shape, key.shape, value.shape, query.shape[:2]
    return or_empty([grad.new_empty(shape) for shape in shapes], rest[-1], grad)


def _backward_plainly(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients in torch operations that a graph can hold, and that can be differentiated again."""
    *problem, needed = rest[3:]
    return or_empty(plain_gradients(*_problem(*problem), grad, needed), needed, grad)


attend_operator = define_operator(
    "attend",
    f"({_TENSORS}, {_REST}, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
    _attend,
    _empty,
    partial(apply_function, _Attend),
    _attend_plainly,
)
attend_backward_operator = define_operator(
    "attend_backward",
    f"(Tensor grad, Tensor starts, Tensor indices, Tensor weights, {_TENSORS}, {_REST}, bool[] needed)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _attend_backward,
    _backward_empty,
    _backward_plainly,
    _backward_plainly,
)
