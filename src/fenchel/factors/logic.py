"""Logic factors: bounds on counts and costs, implications and outputs, each solved by a projection in closed form."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_count, check_kind, check_number
from fenchel.factors.base import Factor
from fenchel.factors.projections import band, band_support, or_out, or_out_support
from fenchel.factors.variables import Variables, joined


class Band(Factor):
    r"""Variables whose weighted sum lies between two bounds; base class of all factors that count variables or costs.

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
    r"""Exactly one of the variables is on: :math:`p \in \Delta`. A graph with this factor alone computes sparsemax.

    Args:
        variables: one or more arrays, taken together.

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
        variables: one or more arrays, taken together.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import AtMostOne
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([0.9, 0.7, -1.0]))
        >>> graph.add(AtMostOne(u))
        >>> solution = graph.solve()
        >>> u.value
        tensor([0.6000, 0.4000, 0.0000])
    """

    def __init__(self, *variables: Variables) -> None:
        super().__init__(variables, 0, 1)


class Or(Band):
    r"""At least one of the variables is on: :math:`p \in [0, 1]^n,\ \sum_i p_i \ge 1`.

    Args:
        variables: one or more arrays, taken together.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import Or
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([0.4, 0.2, -1.0]))
        >>> graph.add(Or(u))
        >>> solution = graph.solve()
        >>> u.value
        tensor([0.6000, 0.4000, 0.0000])
    """

    def __init__(self, *variables: Variables) -> None:
        super().__init__(variables, 1, math.inf)


class Imply(Or):
    r"""The last variable is on if all others are: :math:`p_n \ge \sum_{i<n} p_i - (n - 2)`.

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
    r"""At most one of the inputs is on, and the output, the last variable, is their sum: :math:`p_n = \sum_{i<n} p_i`.

    Args:
        variables: at least two: ``XorOut(inputs, output)``, or one array with the output last.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import XorOut
        >>> graph = fenchel.FactorGraph()
        >>> parts, whole = graph.variables(torch.tensor([0.3, 0.6])), graph.variables(torch.tensor(0.6))
        >>> graph.add(XorOut(parts, whole))
        >>> solution = graph.solve()
        >>> parts.value, whole.value
        (tensor([0.2000, 0.5000]), tensor(0.7000))
    """

    def __init__(self, *variables: Variables) -> None:
        literals = _with_output(type(self).__name__, variables)
        literals.negated[-1] ^= True
        super().__init__(literals)


class Budget(Band):
    r"""At most ``k`` of the variables are on: :math:`p \in [0, 1]^n,\ \sum_i p_i \le k`.

    Args:
        variables: one array, or a list of arrays, taken together.
        k: an integer ≥ 0. One that is at least the number of variables is no constraint.

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

    def __init__(self, variables: Variables | Sequence[Variables], k: int) -> None:
        super().__init__(variables, 0, check_count(k, "k", 0))


class Exactly(Band):
    r"""Exactly ``k`` of the variables are on: :math:`p \in [0, 1]^n,\ \sum_i p_i = k`.

    A graph with this factor alone computes ``k_subsets``.

    Args:
        variables: one array, or a list of arrays, taken together.
        k: an integer from 0 to the number of variables.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import Exactly
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([1.5, 0.5, 0.1, -1.0]))
        >>> graph.add(Exactly(u, 2))
        >>> solution = graph.solve()
        >>> u.value
        tensor([1.0000, 0.7000, 0.3000, 0.0000])
    """

    def __init__(self, variables: Variables | Sequence[Variables], k: int) -> None:
        literals = joined(variables)
        if check_count(k, "k", 0) > literals.index.size:
            raise ValueError(f"k must be at most the number of variables, {literals.index.size}, got {k}: infeasible")
        super().__init__(literals, k, k)


class Knapsack(Band):
    r"""The variables that are on cost at most a budget: :math:`p \in [0, 1]^n,\ \langle a, p \rangle \le b`.

    This polytope contains the convex hull of the sets that fit the budget, and is larger if costs differ: a vertex may
    have one entry between 0 and 1.

    Args:
        variables: one array, or a list of arrays, taken together.
        costs: one number ≥ 0 per variable: a sequence or a tensor, in the order of the variables. Not differentiable.
        budget: a number ≥ 0.

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
            raise ValueError("costs must not require grad: they get no gradient; pass costs.detach()")
        if not isinstance(costs, Tensor):
            check_kind(costs, "costs", Sequence, np.ndarray, what="a sequence of numbers or a tensor")
            costs = [check_number(cost, "costs") for cost in costs]
        a = torch.as_tensor(costs, dtype=torch.float64, device=getattr(costs, "device", "cpu")).reshape(-1)
        if a.numel() != literals.index.size:
            raise ValueError(f"costs must have one entry per variable, {literals.index.size}, got {a.numel()}")
        if not bool(((a >= 0) & a.isfinite()).all()):
            raise ValueError(f"costs must be finite and not negative, got {a.tolist()}")
        super().__init__(literals, 0, check_number(budget, "budget", 0, ends="[]"), a)


class OrOut(Factor):
    r"""The output, the last variable, is on exactly if one of the inputs is.

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
    r"""The output, the last variable, is on exactly if all inputs are: ``OrOut`` of the negations.

    Args:
        variables: at least two: ``AndOut(inputs, output)``, or one array with the output last.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import AndOut
        >>> graph = fenchel.FactorGraph()
        >>> parts, whole = graph.variables(torch.tensor([0.4, 1.5])), graph.variables(torch.tensor(0.8))
        >>> graph.add(AndOut(parts, whole))
        >>> solution = graph.solve()
        >>> parts.value, whole.value
        (tensor([0.6000, 1.0000]), tensor(0.6000))
    """

    def __init__(self, *variables: Variables) -> None:
        super().__init__(*variables)
        self.negated = ~self.negated


def _with_output(name: str, variables: Sequence[Variables]) -> Variables:
    literals = joined(variables)
    if literals.index.size < 2:
        raise ValueError(f"{name} takes at least two variables, inputs and then an output, got one")
    return literals
