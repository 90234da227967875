"""A user's function of p as a function of all it depends on: the tensors that it closes over become arguments.

Derivative rules, vmap and double precision need to know, and to replace, what a function reads besides its argument: a
module's parameters, a tensor of the enclosing scope. They are found, and replaced, where they enter torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fenchel._torch import concrete, has_tangent, tree_map


class Closure:
    """``fn`` in double precision, with the tensors it closes over made explicit.

    Args:
        fn: maps p of shape (…, n) to (…).
        p: a point to evaluate it at once, to see what it reads.

    ``captured`` are the tensors that derivatives may be asked of, or that need conversion, in double precision; calling
    with p and others in their place evaluates ``fn`` there.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor], p: Tensor) -> None:
        self.fn = fn
        watch = _Watch(p, {})
        with torch.no_grad(), watch:
            fn(p)
        self._read = [t for t in watch.foreign.values() if _matters(t)]
        self._narrow = watch.narrow
        self.captured = [t.double() if t.is_floating_point() else t for t in self._read]

    def __call__(self, p: Tensor, captured: Sequence[Tensor] | None = None) -> Tensor:
        if not self._read and not self._narrow:
            return _checked(self.fn(p), p)
        captured = self.captured if captured is None else captured
        with _Watch(p, {id(t): c for t, c in zip(self._read, captured, strict=True)}):
            return _checked(self.fn(p), p)


def _matters(t: Tensor) -> bool:
    """Whether a tensor can carry derivatives or a mapped dimension, or is not in double precision."""
    if t.is_floating_point() and (t.requires_grad or t.dtype != torch.float64):
        return True
    if not concrete(t):
        return True
    return has_tangent(t)


class _Watch(TorchFunctionMode):
    """Intercept every operation of ``fn``: record or replace the tensors that it did not make, convert to float64."""

    def __init__(self, p: Tensor, replace: dict[int, Tensor]) -> None:
        super().__init__()
        self.replace = replace
        self.own: dict[int, Tensor] = {id(p): p}  # kept alive, or another tensor could get the identity
        self.foreign: dict[int, Tensor] = {}
        self.narrow = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._take, (args, kwargs or {}))
        result = func(*args, **kwargs)
        tree_map(self._make, result)
        return result

    def _take(self, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if id(t) in self.replace:
            return self.replace[id(t)]
        if id(t) not in self.own:
            self.foreign[id(t)] = t
        if t.is_floating_point() and t.dtype != torch.float64:
            self.narrow = True
            return t.double()
        return t

    def _make(self, t: Any) -> None:
        if isinstance(t, Tensor):
            self.own[id(t)] = t


def _checked(value: Any, p: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"fn must return a tensor, one value per row of p, got {type(value).__name__}")
    if value.shape != p.shape[:-1]:
        raise ValueError(
            f"fn must map p of shape (…, n) to shape (…): for {tuple(p.shape)} it must return {tuple(p.shape[:-1])}, "
            f"got {tuple(value.shape)}; end with .sum(-1), and not with .sum()"
        )
    if not value.is_floating_point():
        raise ValueError(f"fn must return floating-point values, got {value.dtype}")
    return value.double()


def hidden_leaf(value: Tensor, p: Tensor) -> Tensor | None:
    """A tensor other than p that the graph of ``value`` leads to, if any."""
    seen, open_nodes = set(), [value.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None and leaf is not p:
            return leaf
        open_nodes += [n for n, _ in node.next_functions]
    return None
