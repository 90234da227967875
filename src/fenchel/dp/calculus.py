"""Derivatives of compiled recursions: the gradient is the expected path, the Hessian how that responds.

The value's backward pass is another differentiable function, the expected path times a weight; its backward pass is a
Hessian-vector product, by one tangent pass forward and one back. Derivatives beyond that, and everything that is not
compiled, come from the same recursion in torch operations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from fenchel.dp.graph import Walk, unscaled
from fenchel.kernels import concrete, usable
from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.family import apply_function, tracks_forward
from fenchel.regularizers.graphs import outside_graphs
from fenchel.regularizers.tsallis import Tsallis

Inputs = tuple[Tensor, ...]

stays_outside = outside_graphs("a dynamic program", "runs step by step, in a loop of its own")
"""Breaks a graph of ``torch.compile`` around a function: the compiler would write out every step."""


class Recursion(ABC):
    """A dynamic program as a function of its inputs: tensors of one dtype, float32 or float64."""

    omega: Regularizer

    @abstractmethod
    def advance(self, inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
        """Compiled: values (B,), in double precision, and the walk behind them if it is to be kept."""

    @abstractmethod
    def expect(self, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor) -> Inputs:
        """Compiled: the gradient of ⟨weight, value⟩ in each input."""

    @abstractmethod
    def curve(
        self, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor, directions: Inputs
    ) -> tuple[Tensor, Inputs]:
        """Compiled: along directions of the inputs, the change of the values and that of ``expect``."""

    @abstractmethod
    def walk(self, inputs: Inputs, omega: Regularizer | None = None) -> Walk:
        """In torch operations: the recursion and its random walk, for another Ω if one is given."""

    @abstractmethod
    def collect(self, marginals: Tensor) -> Inputs:
        """From the marginals of edges, those that are shown."""

    @stays_outside
    def max(self, inputs: Inputs) -> Tensor:
        """max_Ω over all paths, (B,), in double precision."""
        if self._is_compiled(inputs):
            return apply_function(Value, self, *inputs)
        return self.walk(inputs).value

    @stays_outside
    def marginals(self, inputs: Inputs) -> Inputs:
        """The expected path: the gradient of ``max``, batch element by batch element."""
        if self._is_compiled(inputs):
            weight = torch.ones(len(inputs[0]), dtype=torch.float64, device=inputs[0].device)
            found: Inputs = Expectation.apply(self, weight, *inputs)  # type: ignore[no-untyped-call]
            return found
        return self.collect(self.walk(inputs).marginals())

    def _is_compiled(self, inputs: Inputs) -> bool:
        return kind_of(self.omega) is not None and not tracks_forward() and usable(*inputs) and len(inputs[0]) > 0

    @property
    def kind(self) -> tuple[int, float]:
        """As kernels take Ω: which entropy, and γ."""
        found = kind_of(self.omega)
        assert found is not None
        return found


def kind_of(omega: Regularizer) -> tuple[int, float] | None:
    """As kernels take Ω: which entropy, and γ; None if they do not know it."""
    base, gamma = unscaled(omega)
    if not isinstance(base, Tsallis) or isinstance(base.alpha, Tensor) or isinstance(gamma, Tensor):
        return None
    kind = _KINDS.get(base.alpha)
    return None if kind is None else (kind, float(gamma))


_KINDS = {math.inf: 0, 1.0: 1, 2.0: 2, 1.5: 3}  # of kernels.columns, which is imported by the first call that needs it


class Value(torch.autograd.Function):
    """max_Ω over all paths, (B,)."""

    @staticmethod
    def forward(ctx: Any, recursion: Recursion, *inputs: Tensor) -> Tensor:
        value, walk = recursion.advance(inputs, any(ctx.needs_input_grad))
        ctx.recursion, ctx.value, ctx.walk = recursion, value, walk
        ctx.save_for_backward(*inputs)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Any:
        if not concrete(weight):  # mapped over
            return None, *_expect(ctx.recursion, weight, ctx.saved_tensors)
        if torch.is_grad_enabled():
            return None, *Expectation.apply(ctx.recursion, weight, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, *ctx.recursion.expect(ctx.saved_tensors, ctx.value, ctx.walk, weight)


class Expectation(torch.autograd.Function):
    """The gradient of ⟨weight, value⟩ in each input: expected paths."""

    @staticmethod
    def forward(ctx: Any, recursion: Recursion, weight: Tensor, *inputs: Tensor) -> Inputs:
        value, walk = recursion.advance(inputs, True)
        ctx.recursion, ctx.value, ctx.walk = recursion, value, walk
        ctx.save_for_backward(weight, *inputs)
        return recursion.expect(inputs, value, walk, weight)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> Any:
        weight, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled() or not concrete(*directions):
            return None, *_curve(ctx.recursion, weight, tuple(inputs), directions)
        change, bent = ctx.recursion.curve(tuple(inputs), ctx.value, ctx.walk, weight, directions)
        return None, change, *bent


def _expect(recursion: Recursion, weight: Tensor, inputs: Inputs) -> Inputs:
    """What ``Recursion.expect`` computes, by a derivative of the recursion in torch operations."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = tuple(map(_leaf, inputs))
        value = recursion.walk(leaves).value
        return torch.autograd.grad(value, leaves, weight.to(value.dtype), create_graph=graph, materialize_grads=True)


def _curve(recursion: Recursion, weight: Tensor, inputs: Inputs, directions: Inputs) -> Inputs:
    """What ``Recursion.curve`` computes, by two derivatives of the recursion in torch operations."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = tuple(map(_leaf, (weight, *inputs)))
        each = _expect(recursion, leaves[0], leaves[1:])
        curved = [(e, d) for e, d in zip(each, directions, strict=True) if e.requires_grad]
        # They are linear in the weight: their slope there is the change of the values.
        return torch.autograd.grad(
            [e for e, _ in curved], leaves, [d for _, d in curved], create_graph=graph, materialize_grads=True
        )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
