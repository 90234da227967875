"""The steps of every RowMap as registered operators ``fenchel::…``: each is one node in a compiled or exported graph.

In a graph the autograd.Functions of ``derivatives`` run behind them. Kernels are looked up when the operator runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._operators import define_operator
from fenchel._torch import apply_function, below_autograd
from fenchel.regularizers.derivatives import Argmax, ClassLoss, Max
from fenchel.regularizers.rows import check_range

if TYPE_CHECKING:
    from fenchel.regularizers.rowmap import RowMap

_rules: dict[str, RowMap] = {}
_MISSING = math.nan  # stands for a parameter that a map does not have


def register_map(rule: RowMap) -> None:
    """Let a map be part of graphs, under its name."""
    _rules[rule.name] = rule


def is_registered(rule: RowMap) -> bool:
    """Whether operators find this very map by its name."""
    return _rules.get(rule.name) is rule


def registered_map(name: str) -> RowMap:
    """The map of this name, for operators, which cannot take it as an argument."""
    return _rules[name]


def pack(a: tuple[Any, ...]) -> tuple[Any, ...]:
    """Up to two parameters as operators take them: each a tensor and a number, of which one counts."""
    packed: list[Any] = []
    for each in (*a, *(_MISSING for _ in range(2 - len(a)))):
        packed += [each, 0.0] if isinstance(each, Tensor) else [None, float(each)]
    return tuple(packed)


def _unpack(*args: Any) -> tuple[Any, ...]:
    """The map and its arguments, from those of an operator."""
    *rest, first, first_number, second, second_number, name = args
    pairs = ((first, first_number), (second, second_number))
    a = [number if tensor is None else tensor for tensor, number in pairs]
    return _rules[name], *rest, *(each for each in a if isinstance(each, Tensor) or each == each)


class _ArgmaxInGraph(Argmax):
    """The same rules when the operator is called: the forward pass is the operator itself, below autograd."""

    @staticmethod
    def forward(rule: RowMap, z: Tensor, *a: Any) -> Tensor:
        with below_autograd():
            chosen: Tensor = argmax_operator(z, *pack(a), rule.name)
        return chosen


class _MaxInGraph(Max):
    @staticmethod
    def forward(rule: RowMap, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        with below_autograd():
            maximum: Tensor = max_operator(z, p, *pack(a), rule.name)
        return maximum


class _ClassLossInGraph(ClassLoss):
    @staticmethod
    def forward(rule: RowMap, z: Tensor, index: Tensor, residual: bool, *a: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            results: tuple[Tensor, Tensor] = class_loss_operator(z, index, residual, *pack(a), rule.name)
        return results


def _define(
    step: str,
    arguments: str,
    results: str,
    compute: Callable[..., Any],
    differentiable: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Register a step of all maps as ``fenchel::{step}``, whose last arguments are the parameters and name of a map.

    Args:
        step: the name of the operator.
        arguments: those before the parameters, as in a schema.
        results: as in a schema.
        compute: called with the map, the arguments and the parameters: the result without derivatives.
        differentiable: called as ``compute``: the result with derivatives.
        fake: called with the arguments of the operator: tensors of the right shape.
    """

    def by_rule(*args: Any) -> Any:
        return compute(*_unpack(*args))

    def with_derivatives(*args: Any) -> Any:
        return differentiable(*_unpack(*args))

    def decomposition(*args: Any) -> Any:
        return by_rule(*args) if _rules[args[-1]].traceable else NotImplemented

    parameters = "Tensor? first, float first_number, Tensor? second, float second_number, str name"
    schema = f"({arguments}, {parameters}) -> {results}"
    return define_operator(step, schema, by_rule, fake, with_derivatives, decomposition)


def _same_shape(tensor: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _pulled(results: tuple[Tensor | None, ...], *a: Any) -> tuple[Tensor, ...]:
    """What ``pull`` returns as three tensors, empty where a parameter is a number or missing."""
    to_scores = results[0]
    assert to_scores is not None
    to_a = [t if isinstance(each, Tensor) else None for t, each in zip(results[1:], a, strict=True)]
    to_a += [None] * (2 - len(a))
    return to_scores, *(to_scores.new_empty(0) if t is None else t for t in to_a)


def _loss_and_residual(rule: RowMap, z: Tensor, index: Tensor, residual: bool, *a: Any) -> tuple[Tensor, Tensor]:
    check_range(index, z.shape[-1], least=-1)
    loss, slope = rule.class_loss_any(z, index, residual, *a)
    return loss, slope if residual else z.new_empty(0)  # kernels need not agree on the shape of what is empty


argmax_operator = _define(
    "argmax",
    "Tensor z",
    "Tensor",
    lambda rule, *args: rule.solve_any(*args),
    partial(apply_function, _ArgmaxInGraph),
    _same_shape,
)
max_operator = _define(
    "max",
    "Tensor z, Tensor p",
    "Tensor",
    lambda rule, *args: rule.attained_any(*args),
    partial(apply_function, _MaxInGraph),
    lambda z, *_: z.new_empty(z.shape[:-1]),
)
product_operator = _define(
    "product",
    "Tensor v, Tensor? z, Tensor p",
    "Tensor",
    lambda rule, *args: rule.jacobian(*args),
    lambda rule, *args: rule.product(*args),
    _same_shape,
)
pull_operator = _define(
    "pull",
    "Tensor v, Tensor? z, Tensor p",
    "(Tensor, Tensor, Tensor)",
    lambda rule, v, z, p, *a: _pulled(rule.pull_any(v, z, p, *a), *a),
    lambda rule, v, z, p, *a: _pulled(rule.pull(v, z, p, *a), *a),
    lambda v, z, p, first, _, second, *__: tuple(
        v.new_empty(0) if t is None else _same_shape(t) for t in (v, first, second)
    ),
)
class_loss_operator = _define(
    "class_loss",
    "Tensor z, Tensor index, bool residual",
    "(Tensor, Tensor)",
    _loss_and_residual,
    partial(apply_function, _ClassLossInGraph),
    lambda z, index, residual, *_: (
        z.new_empty(z.shape[:-1], dtype=kernels.exact_dtype(z)),
        _same_shape(z) if residual else z.new_empty(0),
    ),
)
