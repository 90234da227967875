"""The baselines: memories of ±1 with Hebb's weights, and dense associative memories with steeper energies."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from fenchel._checks import check_count, check_entries, check_number, check_shape, check_width
from fenchel.hopfield.dynamics import Path, iterate


class _Binary(nn.Module):
    """A memory of patterns of ±1 (N, D). A neuron whose input is exactly zero keeps its state."""

    patterns: Tensor

    def __init__(self, patterns: Tensor) -> None:
        super().__init__()
        if not isinstance(patterns, Tensor):
            raise TypeError(f"patterns must be a torch.Tensor, got {type(patterns).__name__}")
        check_shape(patterns, "patterns", "N", "D")
        _check_signs(patterns, "patterns")
        self.register_buffer("patterns", patterns if patterns.is_floating_point() else patterns.float())

    def __len__(self) -> int:
        """The number of stored patterns."""
        return self.patterns.shape[0]

    @abstractmethod
    def energy(self, query: Tensor) -> Tensor:
        """The energy of states of ±1, (…, D): one value per state, (…), in double precision."""

    def step(self, query: Tensor, *, asynchronous: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Update all neurons of states of ±1, (…, D).

        Args:
            query: (…, D).
            asynchronous: whether neurons are updated one after the other, in random order, each from the new states of
                those before it; else all at once.
            generator: of the random order.
        """
        rows = self._check(query)
        if not asynchronous:
            return _signs(self._inputs(rows), rows).reshape(query.shape)
        order = torch.randperm(
            rows.shape[1], generator=generator, device="cpu" if generator is None else generator.device
        )
        return self._update_in_order(rows, order.tolist()).reshape(query.shape)

    def retrieve(
        self,
        query: Tensor,
        max_steps: int = 100,
        *,
        asynchronous: bool = False,
        generator: torch.Generator | None = None,
    ) -> Path:
        """Update states until nothing changes: ``.state``, ``.steps`` (of all neurons) and ``.converged``."""
        check_count(max_steps, "max_steps")

        def step(states: Tensor) -> Tensor:
            return self.step(states, asynchronous=asynchronous, generator=generator)

        path = iterate(step, self._check(query), max_steps=max_steps, tol=0.0, independent=True)
        batch = query.shape[:-1]
        return Path(
            path.state.reshape(query.shape),
            path.before.reshape(query.shape),
            path.steps.reshape(batch),
            path.converged.reshape(batch),
        )

    def forward(self, query: Tensor) -> Tensor:
        """``step``."""
        return self.step(query)

    @abstractmethod
    def _inputs(self, rows: Tensor) -> Tensor:
        """The input of every neuron of states (R, D) from all neurons, (R, D)."""

    @abstractmethod
    def _update_in_order(self, rows: Tensor, order: list[int]) -> Tensor:
        """Update the neurons of states (R, D) one after the other, in the given order."""

    def _check(self, query: Tensor) -> Tensor:
        """Check states (…, D) of ±1; return them as rows (R, D)."""
        width = self.patterns.shape[1]
        check_width(query, "query", width, "the patterns'")
        _check_signs(query, "query")
        return query.reshape(-1, width).to(self.patterns.dtype)


class ClassicalMemory(_Binary):
    r"""Hopfield's network: states of ±1, weights by Hebb's rule.

    .. math:: E(q) = -\tfrac12 q^\top W q, \quad W = X^\top X, \qquad q \leftarrow \operatorname{sign}(W q)

    Stores about 0.138 D random patterns; beyond, they interfere. Energies never increase: all at once because W is
    positive semidefinite, one after the other with ``diagonal=False`` too, where updates at once may run in a cycle.

    Args:
        patterns: (N, D), of ±1.
        diagonal: whether neurons see themselves; ``False`` zeroes the diagonal of W, as Hopfield did.

    Example:
        >>> import torch
        >>> from fenchel.hopfield import ClassicalMemory
        >>> patterns = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [1, -1, 1, -1, 1, -1, 1, -1]])
        >>> memory = ClassicalMemory(patterns)
        >>> memory.retrieve(torch.tensor([-1, 1, 1, 1, 1, 1, 1, 1])).state.int()
        tensor([1, 1, 1, 1, 1, 1, 1, 1], dtype=torch.int32)
        >>> memory.energy(patterns), memory.capacity
        (tensor([-32., -32.], dtype=torch.float64), 1.104)

    References: Hopfield (1982); Amit, Gutfreund & Sompolinsky (1985) for the capacity.
    """

    def __init__(self, patterns: Tensor, *, diagonal: bool = True) -> None:
        super().__init__(patterns)
        self.diagonal = diagonal

    @property
    def capacity(self) -> float:
        """0.138 D: how many random patterns are retrieved with few errors, for large D."""
        return 0.138 * self.patterns.shape[1]

    def energy(self, query: Tensor) -> Tensor:
        rows = self._check(query).double()
        energy = -(rows @ self.patterns.double().T).square().sum(-1) / 2
        diagonal = 0.0 if self.diagonal else len(self) * rows.shape[1] / 2
        return (energy + diagonal).reshape(query.shape[:-1])

    def extra_repr(self) -> str:
        return f"{len(self)} × {self.patterns.shape[1]}" + ("" if self.diagonal else ", diagonal=False")

    def _inputs(self, rows: Tensor) -> Tensor:
        # Whole numbers, which half precision would round, and signs could change.
        rows, table = rows.double(), self.patterns.double()
        return (rows @ table.T) @ table - (0.0 if self.diagonal else len(self)) * rows

    def _update_in_order(self, rows: Tensor, order: list[int]) -> Tensor:
        table, dtype, rows = self.patterns.double(), rows.dtype, rows.to(torch.float64, copy=True)
        overlap = rows @ table.T
        diagonal = 0.0 if self.diagonal else float(len(self))
        for i in order:
            column = table[:, i]
            new = _signs(overlap @ column - diagonal * rows[:, i], rows[:, i])
            overlap = overlap + (new - rows[:, i]).unsqueeze(-1) * column
            rows[:, i] = new
        return rows.to(dtype)


class DenseMemory(_Binary):
    r"""A dense associative memory: states of ±1 and a steep function F of their overlaps with the patterns.

    .. math:: E(q) = -\sum_i F(x_i^\top q), \qquad q \leftarrow \operatorname{sign}(X^\top F'(X q))

    with :math:`F(x) = \max(x, 0)^n`, or exp for ``degree=inf``. Stores about :math:`D^{n-1}` random patterns, or
    exponentially many in D. Energies never increase: F is convex. One after the other, a neuron takes the sign that has
    the lower energy.

    Args:
        patterns: (N, D), of ±1.
        degree: n, at least 2, or ``math.inf`` for the exponential.

    Example:
        >>> import math, torch
        >>> from fenchel.hopfield import DenseMemory
        >>> patterns = torch.tensor([[1, 1, 1, 1, 1], [1, 1, -1, -1, 1], [-1, 1, -1, 1, -1]])
        >>> DenseMemory(patterns, degree=3).retrieve(torch.tensor([-1, 1, 1, 1, 1])).state.int()
        tensor([1, 1, 1, 1, 1], dtype=torch.int32)
        >>> DenseMemory(patterns, degree=math.inf).energy(patterns[0])
        tensor(-151.4993, dtype=torch.float64)

    References: Krotov & Hopfield (2016); Demircigil et al. (2017).
    """

    def __init__(self, patterns: Tensor, degree: float = 3) -> None:
        super().__init__(patterns)
        self.degree = check_number(degree, "degree", 2, ends="[]")

    def energy(self, query: Tensor) -> Tensor:
        """−Σ F(xᵢᵀq), one value per state, in double precision; −inf where that overflows (exp beyond D ≈ 700)."""
        overlap = self._check(query).double() @ self.patterns.double().T
        value = overlap.exp() if math.isinf(self.degree) else overlap.clamp_min(0).pow(self.degree)
        return -value.sum(-1).reshape(query.shape[:-1])

    def extra_repr(self) -> str:
        return f"{len(self)} × {self.patterns.shape[1]}, degree={self.degree:g}"

    def _inputs(self, rows: Tensor) -> Tensor:
        overlap = rows.double() @ self.patterns.double().T
        if math.isinf(self.degree):
            slope = (overlap - overlap.amax(-1, keepdim=True)).exp()
        else:
            # A positive factor does not change signs; this one keeps powers in range.
            positive = overlap.clamp_min(0)
            slope = (positive / positive.amax(-1, keepdim=True).clamp_min(1.0)).pow(self.degree - 1)
        return slope @ self.patterns.double()

    def _update_in_order(self, rows: Tensor, order: list[int]) -> Tensor:
        rows, table = rows.clone(), self.patterns.double()
        overlap = rows.double() @ table.T
        for i in order:
            column = table[:, i]
            rest = overlap - rows[:, i, None].double() * column
            gain = (self._relative(rest + column, rest) - self._relative(rest - column, rest)).sum(-1)
            new = _signs(gain, rows[:, i])
            overlap = rest + new.unsqueeze(-1).double() * column
            rows[:, i] = new
        return rows

    def _relative(self, overlap: Tensor, rest: Tensor) -> Tensor:
        """F of overlaps up to a factor per state, by which none overflows; the factor depends on ``rest`` alone."""
        top = rest.amax(-1, keepdim=True) + 1
        if math.isinf(self.degree):
            return (overlap - top).exp()
        return (overlap.clamp_min(0) / top.clamp_min(1.0)).pow(self.degree)


def _signs(field: Tensor, now: Tensor) -> Tensor:
    """The signs of inputs; the present state where an input is zero."""
    return torch.where(field > 0, 1.0, torch.where(field < 0, -1.0, now.to(field.dtype))).to(now.dtype)


def _check_signs(x: Tensor, name: str) -> None:
    """Check that all entries are ±1."""
    x = x.detach()
    check_entries(x.abs() == 1, x, name, "hold ±1 alone, as torch.where(x > threshold, 1.0, -1.0) does")
