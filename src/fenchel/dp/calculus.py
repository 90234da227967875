"""Derivatives of compiled recursions: the gradient of the value is the expected path, its Hessian that of the value.

The backward pass of the value is a differentiable function too: the expected path times a weight. The backward pass of
that one is a Hessian-vector product. Higher derivatives, and all that is not compiled, come from the same recursion in
torch operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import apply_function, concrete, outside_graphs, tracks_forward
from fenchel.dp.graph import Walk
from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.rowmap import RowMap

Inputs = tuple[Tensor, ...]

stays_outside = outside_graphs("a dynamic program", "runs step by step, in a loop of its own")
"""Decorator that breaks a graph of ``torch.compile`` around a function: the compiler would unroll every step."""


class Recursion(ABC):
    """A dynamic program as a function of its inputs: tensors of one dtype, float32 or float64."""

    step: ClassVar[str]
    """What the table of kernels calls it."""

    omega: Regularizer

    @abstractmethod
    def advance(self, inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
        """Compiled: values (B,), in double precision, and the probabilities of all choices if ``keep``."""

    @abstractmethod
    def expect(self, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor) -> Inputs:
        """Compiled: the gradient of ⟨weight, value⟩ in each input."""

    @abstractmethod
    def curve(
        self, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor, directions: Inputs
    ) -> tuple[Tensor, Inputs]:
        """Compiled: the derivatives of the values, and of ``expect``, along directions of the inputs."""

    @abstractmethod
    def walk(self, inputs: Inputs, omega: Regularizer | None = None) -> Walk:
        """In torch operations: the recursion and its random walk, with another Ω if one is given."""

    @abstractmethod
    def collect(self, marginals: Tensor) -> Inputs:
        """The marginals that a program returns, from those of the edges (B, edges)."""

    def kernel(self, inputs: Inputs) -> Any:
        """The kernels that serve this Ω and these inputs, as ``fenchel.kernels.table`` has them; None without any."""
        base, gamma = self.omega.canonical()
        if base.name is None or isinstance(base.parameter, Tensor) or isinstance(gamma, Tensor) or not len(inputs[0]):
            return None
        return kernels.find(self.step, base.name, (base.parameter,), *inputs)

    def is_compiled(self, inputs: Inputs) -> bool:
        """Whether kernels compute the results for these inputs."""
        return not tracks_forward() and self.kernel(inputs) is not None

    @property
    def numbers(self) -> tuple[Any, Any]:
        """The parameter of Ω and its factor γ, as kernels take them."""
        base, gamma = self.omega.canonical()
        return base.parameter, gamma

    def parameters(self) -> tuple[Inputs, Callable[[Inputs], Regularizer]] | None:
        """The tensors that Ω depends on, and a function that makes Ω from them; None if these are not known."""
        base, gamma = self.omega.canonical()
        alpha, rule = base.parameter, base.rule
        if rule is None:
            return None
        given = tuple(t for t in (alpha, gamma) if isinstance(t, Tensor))

        def omega(tensors: Inputs) -> Regularizer:
            each = iter(tensors)
            found = _Member(rule, next(each)) if isinstance(alpha, Tensor) else base
            return (next(each) if isinstance(gamma, Tensor) else gamma) * found

        return given, omega


class _Member(Regularizer):
    """The member of a family of Ω that a tensor selects."""

    def __init__(self, rule: RowMap, parameter: Tensor) -> None:
        super().__init__()
        self.rule, self.selected = rule, parameter

    @property
    def parameter(self) -> Tensor:
        return self.selected


class Run:
    """A recursion on the inputs of a program, run once however often its results are read.

    Every call returns new tensors with a graph of their own, so that they can be differentiated one after the other.
    Results are computed again after an input or a parameter of Ω has been changed in place.
    """

    def __init__(self, recursion: Recursion, inputs: Inputs) -> None:
        self.recursion, self.inputs = recursion, inputs
        self._stamp: Any = None
        self._kept: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stamp": None, "_kept": {}}

    @stays_outside
    def max(self) -> Tensor:
        """max_Ω over all paths, (B,), in double precision."""
        if self.recursion.is_compiled(self.inputs):
            value: Tensor = apply_function(Value, self, *self.inputs)
            return value
        return self._read(_value)[0]

    @stays_outside
    def marginals(self, inputs: Inputs | None = None) -> Inputs:
        """The expected path: the gradient of ``max``, batch element by batch element.

        Args:
            inputs: the same scores in expanded shapes, which the result is to have; used by kernels alone.
        """
        if self.recursion.is_compiled(self.inputs):
            inputs = self.inputs if inputs is None else inputs
            weight = torch.ones(len(inputs[0]), dtype=torch.float64, device="cpu")
            found: Inputs = Expectation.apply(self, weight, True, *inputs)  # type: ignore[no-untyped-call]
            return found
        return self._read(_marginals)

    def advance(self, keep: bool) -> tuple[Tensor, Tensor]:
        """Compiled: what ``Recursion.advance`` finds."""
        found: tuple[Tensor, Tensor, bool] | None = self._memory().get("advance")
        if found is None or (keep and not found[2]):
            found = *self.recursion.advance(self.inputs, keep), keep
            self._kept["advance"] = found
        return found[:2]

    def expect(self, inputs: Inputs) -> Inputs:
        """Compiled: what ``Recursion.expect`` finds for weights of 1."""
        value, walk = self.advance(True)
        key = "expect", *(each.shape for each in inputs)
        if key not in self._kept:
            self._kept[key] = self.recursion.expect(inputs, value, walk, torch.ones_like(value))
        found: Inputs = self._kept[key]
        return tuple(each.clone() for each in found)

    def _read(self, what: Callable[[Recursion, Walk], Inputs]) -> Inputs:
        """In torch operations: a function of the recursion and its random walk."""
        found = self.recursion.parameters()
        if found is None:  # Ω may depend on any tensors, which no stamp would cover
            return what(self.recursion, self.recursion.walk(self.inputs))
        parameters, omega = found
        inputs = (*self.inputs, *parameters)

        def read(*tensors: Tensor) -> Inputs:
            cut = len(self.inputs)
            return what(self.recursion, self.recursion.walk(tensors[:cut], omega(tensors[cut:])))

        if tracks_forward() or not concrete(*inputs):
            return read(*inputs)
        kept: tuple[Inputs, Inputs] | None = self._memory().get(what)
        graph = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        if kept is None or (graph and not any(t.requires_grad for t in kept[1])):
            leaves = tuple(t.detach().requires_grad_(graph and t.requires_grad) for t in inputs)
            kept = self._kept[what] = read(*leaves), leaves
        results: Inputs = Reading.apply(read, kept, *inputs)  # type: ignore[no-untyped-call]
        return results

    def _memory(self) -> dict[Any, Any]:
        """Results that are kept, none after a change of the inputs or of Ω."""
        omega = self.recursion.omega
        numbers = [None if isinstance(a, Tensor) else a for a in self.recursion.numbers]
        tensors = (*self.inputs, *omega.parameters(), *omega.buffers())
        stamp = *numbers, *((id(t), 0 if t.is_inference() else t._version) for t in tensors)
        if stamp != self._stamp:
            self._stamp, self._kept = stamp, {}
        return self._kept


def _value(_: Recursion, walk: Walk) -> Inputs:
    return (walk.value,)


def _marginals(recursion: Recursion, walk: Walk) -> Inputs:
    return recursion.collect(walk.marginals())


class Value(torch.autograd.Function):
    """max_Ω over all paths, (B,)."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor) -> Tensor:
        value, walk = run.advance(any(ctx.needs_input_grad))
        ctx.run, ctx.value, ctx.walk = run, value, walk
        ctx.save_for_backward(*inputs)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Any:
        inputs: Inputs = ctx.saved_tensors
        if not concrete(weight):  # mapped over
            return None, *_expect(ctx.run.recursion, weight, inputs)
        if torch.is_grad_enabled():
            return None, *Expectation.apply(ctx.run, weight, False, *inputs)  # type: ignore[no-untyped-call]
        return None, *_weighted(ctx.run.recursion, inputs, ctx.value, ctx.walk, weight)


class Expectation(torch.autograd.Function):
    """The gradient of ⟨weight, value⟩ in each input: expected paths. ``unit`` says that all weights are 1."""

    @staticmethod
    def forward(ctx: Any, run: Run, weight: Tensor, unit: bool, *inputs: Tensor) -> Inputs:
        value, walk = run.advance(True)
        ctx.recursion, ctx.value, ctx.walk = run.recursion, value, walk
        ctx.save_for_backward(weight, *inputs)
        return run.expect(inputs) if unit else _weighted(run.recursion, inputs, value, walk, weight)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> Any:
        weight, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled() or not concrete(*directions):
            invalid = ctx.value.isnan()
            change, *curved = _curve(ctx.recursion, torch.where(invalid, 0.0, weight), tuple(inputs), directions)
            invalid = invalid & _moved(ctx.value, directions)
            weighted = invalid & (weight != 0)
            return None, _mark_invalid(change, invalid), None, *(_mark_invalid(each, weighted) for each in curved)
        change, found = _weighted_curve(ctx.recursion, tuple(inputs), ctx.value, ctx.walk, weight, directions)
        return None, change, None, *found


class Reading(torch.autograd.Function):
    """Results that were computed from detached inputs; only higher derivatives run the recursion again."""

    @staticmethod
    def forward(ctx: Any, read: Callable[..., Inputs], kept: tuple[Inputs, Inputs], *inputs: Tensor) -> Inputs:
        ctx.read, ctx.kept = read, kept
        ctx.save_for_backward(*inputs)
        return tuple(each.detach().clone() for each in kept[0])

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> Any:
        inputs: Inputs = ctx.saved_tensors
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            results, leaves = (ctx.read(*inputs), inputs) if graph else ctx.kept
        return None, None, *_pull_back(results, leaves, weights, graph)


def _pull_back(results: Inputs, leaves: Inputs, weights: Inputs, graph: bool) -> list[Tensor | None]:
    """The gradients of ⟨weights, results⟩ in those leaves that want one; the graph behind the results is kept."""
    pairs = [(r, w) for r, w in zip(results, weights, strict=True) if r.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves]
    found = iter(
        torch.autograd.grad(
            [r for r, _ in pairs],
            wanted,
            [w for _, w in pairs],
            create_graph=graph,
            retain_graph=True,
            materialize_grads=True,
        )
    )
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _weighted(recursion: Recursion, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor) -> Inputs:
    """``Recursion.expect``; batch elements of weight 0 contribute 0, even if they are NaN."""
    return recursion.expect(inputs, torch.where(weight == 0, -torch.inf, value), walk, weight)


def _weighted_curve(
    recursion: Recursion, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor, directions: Inputs
) -> tuple[Tensor, Inputs]:
    """``Recursion.curve``; batch elements of weight 0 or direction 0 contribute 0, even if they are NaN."""
    moved = _moved(value, directions)
    invalid = value.isnan() & moved
    left_out = ~moved | (invalid & (weight == 0))
    change, curved = recursion.curve(inputs, torch.where(left_out, -torch.inf, value), walk, weight, directions)
    return torch.where(invalid, torch.nan, change), curved


def _mark_invalid(results: Tensor, invalid: Tensor) -> Tensor:
    """Results with NaN for invalid batch elements; all NaN if the batch shares one result and any is invalid."""
    lost = torch.where(invalid, torch.nan, 0.0).to(results.dtype)
    return results + (lost.reshape(-1, *(1,) * (results.dim() - 1)) if len(results) == len(invalid) else lost.sum())


def _moved(value: Tensor, directions: Inputs) -> Tensor:
    """Which batch elements have a direction other than 0, (B,)."""
    moved = torch.zeros_like(value, dtype=torch.bool)
    for each in directions:
        # One direction for all elements, or one for each. A sum: torch can map over it with vmap and vectorize=True.
        moved = moved | (each.abs().sum(tuple(range(1, each.dim()))) != 0)
    return moved


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
