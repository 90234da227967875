"""Logic factors: counts, costs, implications and outputs, each solved in closed form as a projection."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fenchel._checks import is_integer, is_number
from fenchel.factors.base import Factor
from fenchel.factors.projections import band, band_support, or_out, or_out_support
from fenchel.factors.variables import Variables, joined


class Band(Factor):
    r"""Variables whose weighted sum lies between two bounds: all that count, or cost, are of this one kind.

    .. math:: \operatorname{argmin}_{p \in [0, 1]^n,\; l \le \langle a, p \rangle \le b} \; \|p - \theta\|^2
    """

    def __init__(
        self,
        variables: Variables | Sequence[Variables],
        lower: float,
        upper: float,
        costs: Tensor | None = None,
    ) -> None:
        super().__init__(variables)
        if costs is None:
            costs = torch.ones(self.size, dtype=torch.float64, device="cpu")
        bounds = torch.tensor([[[lower, upper]]], dtype=torch.float64, device="cpu")
        self.constants = (costs[None, None], bounds)

    @property
    def kind(self) -> Hashable:
        return "band"

    def qp(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        costs, bounds = tensors
        return band(theta, costs.expand(theta.shape), bounds[..., 0], bounds[..., 1])

    def support(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        costs, bounds = tensors
        return band_support(theta, costs.expand(theta.shape), bounds[..., 0], bounds[..., 1])


class Xor(Band):
    r"""Exactly one of the variables is on: :math:`p \in \Delta`, so alone it is sparsemax.

    Args:
        variables: any number of them, together the ones of which one is chosen.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import Xor
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([1.0, 0.6, -1.0]))
        >>> graph.add(Xor(u))
        >>> solution = graph.solve()
        >>> u.value
        tensor([0.7000, 0.3000, 0.0000])
    """

    def __init__(self, *variables: Variables) -> None:
        super().__init__(variables, 1, 1)


class AtMostOne(Band):
    r"""At most one of the variables is on: :math:`p \ge 0,\ \sum_i p_i \le 1`.

    Args:
        variables: any number of them, taken together.
    """

    def __init__(self, *variables: Variables) -> None:
        super().__init__(variables, 0, 1)


class Or(Band):
    r"""At least one of the variables is on: :math:`p \in [0, 1]^n,\ \sum_i p_i \ge 1`.

    Args:
        variables: any number of them, taken together.
    """

    def __init__(self, *variables: Variables) -> None:
        super().__init__(variables, 1, math.inf)


class Imply(Or):
    r"""If all variables but the last are on, so is the last: :math:`p_n \ge \sum_{i<n} p_i - (n - 2)`.

    Args:
        variables: at least two: ``Imply(premise, conclusion)``, ``Imply(premises, conclusion)``, or one array with the
            conclusion last.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import Imply
        >>> graph = fenchel.FactorGraph()
        >>> rain, wet = graph.variables(torch.tensor([0.9, 0.1]))
        >>> graph.add(Imply(rain, wet))
        >>> solution = graph.solve()
        >>> rain.value, wet.value
        (tensor(0.5000), tensor(0.5000))
    """

    def __init__(self, *variables: Variables) -> None:
        literals = _with_output(type(self).__name__, variables)
        literals.negated[:-1] ^= True
        super().__init__(literals)


class XorOut(Xor):
    r"""At most one variable but the last is on, and the last tells whether one is: :math:`p_n = \sum_{i<n} p_i`.

    Args:
        variables: at least two: ``XorOut(inputs, output)``, or one array with the output last.
    """

    def __init__(self, *variables: Variables) -> None:
        literals = _with_output(type(self).__name__, variables)
        literals.negated[-1] ^= True
        super().__init__(literals)


class Budget(Band):
    r"""At most ``budget`` of the variables are on: :math:`p \in [0, 1]^n,\ \sum_i p_i \le k`.

    Args:
        variables: one array, or several taken together.
        budget: a whole number, 0 or more. One that is larger than the number of variables asks nothing of them.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import Budget
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([1.5, 0.8, 0.6, -1.0]))
        >>> graph.add(Budget(u, 2))
        >>> solution = graph.solve()
        >>> u.value
        tensor([1.0000, 0.6000, 0.4000, 0.0000])
    """

    def __init__(self, variables: Variables | Sequence[Variables], budget: int) -> None:
        super().__init__(variables, 0, _whole(budget, "budget"))


class Exactly(Band):
    r"""Exactly ``count`` of the variables are on: :math:`p \in [0, 1]^n,\ \sum_i p_i = k`. Alone it is ``k_subsets``.

    Args:
        variables: one array, or several taken together.
        count: a whole number from 0 to the number of variables.
    """

    def __init__(self, variables: Variables | Sequence[Variables], count: int) -> None:
        literals = joined(variables)
        count = _whole(count, "count")
        if count > literals.index.size:
            raise ValueError(
                f"count must be at most the number of variables, {literals.index.size}, got {count}: infeasible"
            )
        super().__init__(literals, count, count)


class Knapsack(Band):
    r"""What is on must not cost more than a budget: :math:`p \in [0, 1]^n,\ \langle a, p \rangle \le b`.

    This polytope, not the hull of the sets that fit: with costs that differ, a vertex may have one entry in between.

    Args:
        variables: one array, or several taken together.
        costs: of each of them, not negative: numbers or a tensor, in the order of the variables. Not differentiable.
        budget: a number that is not negative.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import Knapsack
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([0.9, 0.8, 0.7]))
        >>> graph.add(Knapsack(u, costs=[3.0, 1.0, 1.0], budget=2.0))
        >>> solution = graph.solve()
        >>> u.value
        tensor([0.3000, 0.6000, 0.5000])
    """

    def __init__(
        self, variables: Variables | Sequence[Variables], costs: Sequence[float] | Tensor, budget: float
    ) -> None:
        literals = joined(variables)
        if isinstance(costs, Tensor) and costs.requires_grad:
            raise ValueError("costs must not require grad: there is no gradient to them; pass costs.detach()")
        a = torch.as_tensor(costs, dtype=torch.float64, device=getattr(costs, "device", "cpu")).reshape(-1)
        if a.numel() != literals.index.size:
            raise ValueError(f"costs must have one entry a variable, {literals.index.size}, got {a.numel()}")
        if not bool(((a >= 0) & a.isfinite()).all()):
            raise ValueError(f"costs must be finite and not negative, got {a.tolist()}")
        if not is_number(budget):
            raise TypeError(f"budget must be a number, got {type(budget).__name__}")
        if not budget >= 0:
            raise ValueError(f"budget must not be negative, got {budget}")
        super().__init__(literals, 0, float(budget), a)


class OrOut(Factor):
    r"""The last variable is on exactly if one of the others is.

    .. math:: p_i \le p_n \text{ for } i < n, \quad p_n \le \textstyle\sum_{i<n} p_i, \quad p \in [0, 1]^n

    Args:
        variables: at least two: ``OrOut(inputs, output)``, or one array with the output last.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import OrOut
        >>> graph = fenchel.FactorGraph()
        >>> parts, whole = graph.variables(torch.tensor([0.3, 0.8])), graph.variables(torch.tensor(0.2))
        >>> graph.add(OrOut(parts, whole))
        >>> solution = graph.solve()
        >>> parts.value, whole.value
        (tensor([0.3000, 0.5000]), tensor(0.5000))

    References: Martins et al. (2015), AD3, for the projection.
    """

    def __init__(self, *variables: Variables) -> None:
        super().__init__(_with_output(type(self).__name__, variables))

    @property
    def kind(self) -> Hashable:
        return "or out"

    def qp(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        return or_out(theta)

    def support(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        return or_out_support(theta)


class AndOut(OrOut):
    r"""The last variable is on exactly if all others are: ``OrOut`` of the negations.

    Args:
        variables: at least two: ``AndOut(inputs, output)``, or one array with the output last.
    """

    def __init__(self, *variables: Variables) -> None:
        super().__init__(*variables)
        self.negated = ~self.negated


def _with_output(name: str, variables: Sequence[Variables]) -> Variables:
    literals = joined(variables)
    if literals.index.size < 2:
        raise ValueError(f"{name} takes at least two variables, the last of which follows from the others, got one")
    return literals


def _whole(k: int, name: str) -> int:
    if not is_integer(k):
        raise TypeError(f"{name} must be an int, got {type(k).__name__}")
    if k < 0:
        raise ValueError(f"{name} must not be negative, got {k}")
    return int(k)
