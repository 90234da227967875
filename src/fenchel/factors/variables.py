"""Variables: an array of indices of a graph's variables, some of them negated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fenchel._torch import from_cpu

if TYPE_CHECKING:
    from fenchel.factors.graph import FactorGraph

Array = np.ndarray[Any, Any]


class Variables:
    """Binary variables of a factor graph, in an array that is sliced like numpy's.

    Made by :meth:`FactorGraph.variables`. Its shape has no batch dimensions: ``u[:, 0]`` selects the same variables in
    every element of the batch. ``~u`` stands for 1 − u.

    Example:
        >>> import torch, fenchel
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([[0.2, 0.7], [1.4, -1.0]]))
        >>> u[:, 0]
        Variables(shape=(2,))
        >>> solution = graph.solve()
        >>> (~u[:, 0]).value
        tensor([0.8000, 0.0000])
    """

    def __init__(self, graph: FactorGraph, index: Array, negated: Array, dtype: torch.dtype) -> None:
        self.graph = graph
        self.index = index
        self.negated = negated
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, without the batch dimensions."""
        return tuple(self.index.shape)

    @property
    def value(self) -> Tensor:
        """The values that the graph's last ``solve()`` or ``map()`` found: batch dimensions, then ``shape``."""
        flat = self.graph._found()
        index = torch.from_numpy(np.ascontiguousarray(self.index))
        value = flat[..., index.reshape(-1)].reshape((*flat.shape[:-1], *self.shape))
        if self.negated.any():
            negated = torch.from_numpy(np.ascontiguousarray(self.negated)).reshape(self.shape)
            value = torch.where(negated, 1 - value, value)
        return from_cpu(value.to(self.dtype), self.graph.device)

    def __getitem__(self, key: Any) -> Variables:
        key = tuple(map(_as_numpy, key)) if isinstance(key, tuple) else _as_numpy(key)
        return Variables(self.graph, np.asarray(self.index[key]), np.asarray(self.negated[key]), self.dtype)

    def __iter__(self) -> Iterator[Variables]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a single variable has no len()")
        return self.shape[0]

    def __invert__(self) -> Variables:
        return Variables(self.graph, self.index, ~self.negated, self.dtype)

    def __repr__(self) -> str:
        return f"Variables(shape={self.shape})"


def _as_numpy(key: Any) -> Any:
    """An index, with tensors turned into arrays."""
    return key.detach().cpu().numpy() if isinstance(key, Tensor) else key


def joined(variables: Variables | Sequence[Variables]) -> Variables:
    """All variables in nested lists and tuples as one flat array, in their order."""
    parts = list(_flat(variables))
    if not parts or sum(part.index.size for part in parts) == 0:
        raise ValueError("variables must name at least one variable, got none")
    if any(part.graph is not parts[0].graph for part in parts):
        raise ValueError("variables must belong to one graph, got variables of several")
    return Variables(
        parts[0].graph,
        np.concatenate([part.index.reshape(-1) for part in parts]),
        np.concatenate([part.negated.reshape(-1) for part in parts]),
        parts[0].dtype,
    )


def _flat(variables: object) -> Iterator[Variables]:
    if isinstance(variables, Variables):
        yield variables
    elif isinstance(variables, (list, tuple)):
        for part in variables:
            yield from _flat(part)
    else:
        raise TypeError(f"variables must be what graph.variables(…) returns, or slices of it, got {variables!r}")
