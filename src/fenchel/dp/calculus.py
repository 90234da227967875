"""The calculus of dynamic programs: the gradient of the value is the expected path, its Hessian that of the value.

The backward pass of the value is a differentiable function too: the expected path times a weight. The backward pass of
that one is a Hessian-vector product. Higher derivatives, and all that is not compiled, come from the same recursion in
torch operations.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import apply_function, concrete, from_cpu, outside_graphs, tracks_forward
from fenchel.dp.graph import Walk
from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.rowmap import RowMap

Inputs = tuple[Tensor, ...]

stays_outside = outside_graphs("a dynamic program", "runs step by step, in a loop of its own")
"""Decorator that breaks a graph of ``torch.compile`` around a function: the compiler would unroll every step."""


class Recursion(ABC):
    """max_Ω over the paths of a graph as a function of its inputs: tensors of one dtype, float32 or float64.

    The recursion runs once however often its results are read, and again after an input or a parameter of Ω has been
    changed in place. Every result is a new tensor with a graph of its own, so that results can be differentiated one
    after the other.
    """

    _step: ClassVar[str]
    """The name of its kernels in ``fenchel.kernels.table``."""

    omega: Regularizer
    _inputs: Inputs
    _results: dict[Any, Any]
    _results_version: Any

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_results": {}, "_results_version": None}

    # -- what a subclass defines ---------------------------------------------------------------------

    @abstractmethod
    def _forward(self, kernel: Any, inputs: Inputs, keep: bool) -> tuple[Tensor, Any]:
        """Compiled: values (B,), in double precision; if ``keep``, what derivatives need, such as the walk."""

    @abstractmethod
    def _gradient(self, kernel: Any, inputs: Inputs, value: Tensor, walk: Any, weight: Tensor) -> Inputs:
        """Compiled: the gradient of ⟨weight, value⟩ in each input; 0 for weights of 0, even where the value is NaN."""

    @abstractmethod
    def _hessian_product(
        self, kernel: Any, inputs: Inputs, value: Tensor, walk: Any, weight: Tensor, directions: Inputs
    ) -> tuple[Tensor, Inputs]:
        """Compiled: the derivatives of the values, and of ``_gradient``, along directions of the inputs."""

    @abstractmethod
    def _walk(self, inputs: Inputs, omega: Regularizer) -> Walk:
        """In torch operations: the recursion and its random walk."""

    @abstractmethod
    def _collect(self, marginals: Tensor) -> Inputs:
        """The marginals that a program returns, from those of the edges (B, edges)."""

    # -- results -------------------------------------------------------------------------------------

    def _kernel(self) -> Any:
        """The kernels for this Ω and these inputs; None if everything is computed in torch operations."""
        return self._find(self.omega, self._inputs) if self._inputs[0].shape[0] else None

    def _find(self, omega: Regularizer, tensors: Inputs) -> Any:
        """The kernels for an Ω and tensors of scores, or None."""
        base, gamma = omega.canonical()
        if tracks_forward() or base.name is None or isinstance(base.parameter, Tensor) or isinstance(gamma, Tensor):
            return None
        return kernels.find(self._step, base.name, (base.parameter,), *tensors)

    def _on_cpu(self) -> Self:
        """The same recursion in the CPU's memory, where everything runs that has no kernel."""
        return self

    @property
    def _numbers(self) -> tuple[Any, Any]:
        """The parameter of Ω and its factor γ, as kernels take them."""
        base, gamma = self.omega.canonical()
        return base.parameter, gamma

    @stays_outside
    def _max(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """max_Ω over all paths, (B,), computed in double precision."""
        kernel = self._kernel()
        if kernel is not None:
            with contextlib.suppress(kernels.NotCompiledError):
                value: Tensor = apply_function(_Value, self, kernel, dtype, *self._inputs)
                return value
        return self._in_torch(_value)[0].to(dtype)

    @stays_outside
    def _expected_path(self, inputs: Inputs | None = None) -> Inputs:
        """The gradient of ``_max``, batch element by batch element.

        Args:
            inputs: the same scores in expanded shapes, which the result is to have; used by kernels alone.
        """
        kernel = self._kernel()
        if kernel is not None:
            inputs = self._inputs if inputs is None else inputs
            weight = torch.ones(len(inputs[0]), dtype=torch.float64, device=inputs[0].device)
            with contextlib.suppress(kernels.NotCompiledError):
                found: Inputs = apply_function(_Gradient, self, kernel, weight, True, *inputs)
                return found
        return self._in_torch(_marginals)

    def _forward_once(self, kernel: Any, keep: bool) -> tuple[Tensor, Any]:
        """What ``_forward`` returns, computed once."""
        key = "forward", id(kernel)  # one that failed to compile may have been replaced
        found: tuple[Tensor, Any, bool] | None = self._cache().get(key)
        if found is None or (keep and not found[2]):
            found = *self._forward(kernel, self._inputs, keep), keep
            self._results[key] = found
        return found[:2]

    def _gradient_once(self, kernel: Any, inputs: Inputs, value: Tensor, walk: Any, ones: Tensor) -> Inputs:
        """What ``_gradient`` returns for weights of 1, computed once per shape of the inputs."""
        key = "gradient", id(kernel), *(each.shape for each in inputs)
        if key not in self._results:
            self._results[key] = self._gradient(kernel, inputs, value, walk, ones)
        found: Inputs = self._results[key]
        return tuple(each.clone() for each in found)

    def _in_torch(self, function: Callable[[Recursion, Walk], Inputs]) -> Inputs:
        """A function of the recursion and its random walk, in torch operations; computed once."""
        here = self._on_cpu()
        if here is not self:
            return tuple(from_cpu(each, self._inputs[0].device) for each in here._in_torch(function))
        found = _parameters(self.omega)
        if found is None:  # Ω may depend on any tensors, whose changes would not be noticed
            return function(self, self._walk(self._inputs, self.omega))
        parameters, omega = found
        inputs = (*self._inputs, *parameters)

        def compute(*tensors: Tensor) -> Inputs:
            cut = len(self._inputs)
            return function(self, self._walk(tensors[:cut], omega(tensors[cut:])))

        if tracks_forward() or not concrete(*inputs):
            return compute(*inputs)
        kept: tuple[Inputs, Inputs] | None = self._cache().get(function)
        graph = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        if kept is None or (graph and not any(t.requires_grad for t in kept[1])):
            leaves = tuple(t.detach().requires_grad_(graph and t.requires_grad) for t in inputs)
            kept = self._results[function] = compute(*leaves), leaves
        results: Inputs = _Cached.apply(compute, kept, *inputs)  # type: ignore[no-untyped-call]
        return results

    def _cache(self) -> dict[Any, Any]:
        """Results by name; empty after a change of the inputs or of Ω."""
        alpha, gamma = self._numbers
        version: list[Any] = [
            None if isinstance(alpha, Tensor) else alpha,
            None if isinstance(gamma, Tensor) else gamma,
        ]
        tensors = self._inputs
        if None in version:
            tensors = *tensors, *self.omega.parameters(), *self.omega.buffers()
        for t in tensors:
            version.append((id(t), 0 if t.is_inference() else t._version))
        if version != self._results_version:
            self._results_version, self._results = version, {}
        return self._results


def _parameters(omega: Regularizer) -> tuple[Inputs, Callable[[Inputs], Regularizer]] | None:
    """The tensors that Ω depends on, and a function that makes Ω from them; None if these are not known."""
    base, gamma = omega.canonical()
    alpha, rule = base.parameter, base.rule
    if rule is None:
        return None
    given = tuple(t for t in (alpha, gamma) if isinstance(t, Tensor))

    def rebuild(tensors: Inputs) -> Regularizer:
        each = iter(tensors)
        member = _Member(rule, next(each)) if isinstance(alpha, Tensor) else base
        return (next(each) if isinstance(gamma, Tensor) else gamma) * member

    return given, rebuild


class _Member(Regularizer):
    """The member of a family of Ω that a tensor selects."""

    def __init__(self, rule: RowMap, parameter: Tensor) -> None:
        super().__init__()
        self.rule, self.selected = rule, parameter

    @property
    def parameter(self) -> Tensor:
        return self.selected


def _value(_: Recursion, walk: Walk) -> Inputs:
    return (walk.value,)


def _marginals(recursion: Recursion, walk: Walk) -> Inputs:
    return recursion._collect(walk.marginals())


class _Value(torch.autograd.Function):
    """max_Ω over all paths, (B,)."""

    @staticmethod
    def forward(ctx: Any, recursion: Recursion, kernel: Any, dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        value, walk = recursion._forward_once(kernel, any(ctx.needs_input_grad))
        ctx.recursion, ctx.kernel, ctx.value, ctx.walk = recursion, kernel, value, walk
        ctx.save_for_backward(*inputs)
        return value.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Any:
        inputs: Inputs = ctx.saved_tensors
        if concrete(weight):  # not mapped over
            with contextlib.suppress(kernels.NotCompiledError):
                if torch.is_grad_enabled():
                    found = apply_function(_Gradient, ctx.recursion, ctx.kernel, weight, False, *inputs)
                else:
                    found = ctx.recursion._gradient(ctx.kernel, inputs, ctx.value, ctx.walk, weight)
                return None, None, None, *found
        return None, None, None, *_gradient_in_torch(ctx.recursion, weight, inputs)


class _Gradient(torch.autograd.Function):
    """The gradient of ⟨weight, value⟩ in each input: expected paths. ``unit`` says that all weights are 1."""

    @staticmethod
    def forward(ctx: Any, recursion: Recursion, kernel: Any, weight: Tensor, unit: bool, *inputs: Tensor) -> Inputs:
        value, walk = recursion._forward_once(kernel, True)
        ctx.recursion, ctx.kernel, ctx.value, ctx.walk = recursion, kernel, value, walk
        ctx.save_for_backward(weight, *inputs)
        if unit:
            return recursion._gradient_once(kernel, inputs, value, walk, weight)
        return recursion._gradient(kernel, inputs, value, walk, weight)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> Any:
        weight, *inputs = ctx.saved_tensors
        moved, lost = _moved(ctx.value, directions), ctx.value.isnan()
        invalid = lost & moved
        if not torch.is_grad_enabled() and concrete(*directions):
            # Batch elements of weight 0 or direction 0 contribute 0, even if they are NaN.
            value = torch.where(~moved | (invalid & (weight == 0)), -torch.inf, ctx.value)
            product = ctx.recursion._hessian_product
            with contextlib.suppress(kernels.NotCompiledError):
                change, found = product(ctx.kernel, tuple(inputs), value, ctx.walk, weight, directions)
                return None, None, torch.where(invalid, torch.nan, change), None, *found
        change, *each = _hessian_in_torch(ctx.recursion, torch.where(lost, 0.0, weight), tuple(inputs), directions)
        weighted = invalid & (weight != 0)
        return None, None, _mark_invalid(change, invalid), None, *(_mark_invalid(one, weighted) for one in each)


class _Cached(torch.autograd.Function):
    """Results that were computed from detached inputs; only higher derivatives run the recursion again."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Inputs], kept: tuple[Inputs, Inputs], *inputs: Tensor) -> Inputs:
        ctx.compute, ctx.kept = compute, kept
        ctx.save_for_backward(*inputs)
        return tuple(each.detach().clone() for each in kept[0])

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> Any:
        inputs: Inputs = ctx.saved_tensors
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            results, leaves = (ctx.compute(*inputs), inputs) if graph else ctx.kept
        return None, None, *_gradients_of_leaves(results, leaves, weights, graph)


def _gradients_of_leaves(results: Inputs, leaves: Inputs, weights: Inputs, graph: bool) -> list[Tensor | None]:
    """The gradients of ⟨weights, results⟩ in those leaves that need one; the graph behind the results is kept."""
    pairs = [(r, w) for r, w in zip(results, weights, strict=True) if r.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves]
    ends, directions = zip(*pairs, strict=True)
    found = iter(
        torch.autograd.grad(ends, wanted, directions, create_graph=graph, retain_graph=True, materialize_grads=True)
    )
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


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


def _gradient_in_torch(recursion: Recursion, weight: Tensor, inputs: Inputs) -> Inputs:
    """What ``Recursion._gradient`` computes, by a derivative of the recursion in torch operations."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = tuple(map(_leaf, inputs))
        value = recursion._walk(leaves, recursion.omega).value
        return torch.autograd.grad(value, leaves, weight.to(value.dtype), create_graph=graph, materialize_grads=True)


def _hessian_in_torch(recursion: Recursion, weight: Tensor, inputs: Inputs, directions: Inputs) -> Inputs:
    """What ``Recursion._hessian_product`` computes, by two derivatives of the recursion in torch operations."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = tuple(map(_leaf, (weight, *inputs)))
        gradients = _gradient_in_torch(recursion, leaves[0], leaves[1:])
        pairs = [(g, d) for g, d in zip(gradients, directions, strict=True) if g.requires_grad]
        ends, along = zip(*pairs, strict=True)
        # They are linear in the weight: their slope there is the change of the values.
        return torch.autograd.grad(ends, leaves, along, create_graph=graph, materialize_grads=True)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
