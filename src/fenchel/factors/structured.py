"""Structured factors: variables that are the parts of one structure, solved by SparseMAP with a MAP oracle."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fenchel import structures
from fenchel.factors.base import Factor, WarmStart
from fenchel.factors.variables import Variables
from fenchel.structures import Chain, SparseMAP, Structure
from fenchel.structures.base import best, module_on_cpu, own_tensors
from fenchel.structures.solver import ActiveSets

TOL = 1e-6
"""Tolerance of SparseMAP: it stops when no structure improves the objective by more than TOL²/2, so that marginals are
exact to about TOL. A smaller tolerance would add structures whose gain is rounding error."""


class Structured(Factor):
    r"""Variables that are the parts of one structure of a set :math:`\mathcal Y` with a MAP oracle.

    .. math:: \operatorname{argmax}_{p \in \operatorname{conv}(\mathcal Y)} \; \langle \theta, p \rangle + h(p)
        - \tfrac12 \|p\|^2

    A graph with this factor alone has the solution of :class:`fenchel.SparseMAP`.

    Args:
        variables: an array of the shape that the structure's scores have.
        structure: a :class:`fenchel.structures.Structure`. The transition of ``Chain`` and ``SequentialSubsets`` gets
            gradients, and may have the graph's batch dimensions. The tensors of other structures with higher-order
            scores must not require grad, and are the same for all elements of a batch.

    Example:
        A matching in which one arc implies another:

        >>> import torch, fenchel
        >>> from fenchel.factors import Imply, Structured
        >>> from fenchel.structures import Matching
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([[1.0, 0.8], [0.0, 0.4]]))
        >>> graph.add(Structured(u, Matching()))
        >>> graph.add(Imply(u[0, 0], u[0, 1]))
        >>> solution = graph.solve()
        >>> u.value
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """

    masks = True

    def __init__(self, variables: Variables, structure: Structure) -> None:
        if not isinstance(variables, Variables):
            raise TypeError(f"variables must be one array of a graph's variables, got {type(variables).__name__}")
        if not isinstance(structure, Structure):
            raise TypeError(f"structure must be a fenchel.structures.Structure, got {type(structure).__name__}")
        self.shape = torch.Size(variables.shape)
        if len(self.shape) != structure.event_dim:
            raise ValueError(
                f"variables must have {structure.event_dim} dimensions for {type(structure).__name__}, "
                f"got shape {tuple(self.shape)}"
            )
        structure.check(variables.graph.batch + self.shape)
        self.structure = structure
        scores = _higher(structure, self.shape)
        given = () if scores is None else (scores,)
        super().__init__(variables, scores=given, event_dims=[structure.transition_dims or 0 for _ in given])

    @property
    def unit_weights(self) -> bool:  # type: ignore[override]
        """True if the higher-order scores are transitions; False for others, whose weights are not known."""
        return self.structure.transition_dims is not None

    @property
    def least(self) -> int:  # type: ignore[override]
        """The smallest number of parts of a structure."""
        return self.structure.least

    @property
    def kind(self) -> Hashable:
        """Equal for equal sets of structures over variables of equal shape."""
        key = self.structure.key()
        return id(self) if key is None else (key, self.shape)

    def qp(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        shaped = theta.reshape(*theta.shape[:2], *self.shape)
        return SparseMAP(self._with(tensors), tol=TOL).argmax(shaped).reshape(theta.shape)

    def warm_start(self, batch: int, factors: int) -> WarmStart | None:
        return _ActiveSetStart(self, batch, factors)

    def support(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        found = best(self._with(tensors), theta.reshape(*theta.shape[:2], *self.shape)).reshape(theta.shape)
        return torch.where(found == 1, theta, 0.0).sum(-1)

    def _with(self, tensors: tuple[Tensor, ...]) -> Structure:
        """The structure with these higher-order scores in place of its own."""
        structure, _ = module_on_cpu(self.structure)
        if not tensors:
            return structure
        if structure.transition_dims is None:
            return _Weighted(structure, tensors[0])
        return structure.with_transitions(tensors[0])


class _ActiveSetStart(WarmStart):
    """The active sets of the structures of a batch."""

    def __init__(self, factor: Structured, batch: int, factors: int) -> None:
        self.factor = factor
        self.sets = ActiveSets(batch * factors)
        self.gap = torch.zeros(batch, factors, dtype=torch.float64, device="cpu")
        self.was_inexact = torch.zeros(batch, factors, dtype=torch.bool, device="cpu")
        self.checked = not factor.structure.has_higher

    def qp(self, rows: Tensor, theta: Tensor, *tensors: Tensor) -> Tensor:
        shaped = theta.reshape(*theta.shape[:2], *self.factor.shape)
        omega = SparseMAP(self.factor._with(tensors), tol=TOL)
        if omega.structure.marginals(shaped, None) is not None:
            return self.factor.qp(theta, *tensors)
        if not self.checked:
            self._check_gradient(omega.structure, shaped.detach())
        rows, factors = rows.cpu(), theta.shape[1]
        at = (rows.unsqueeze(1) * factors + torch.arange(factors, device="cpu")).reshape(-1).numpy()
        p, gap, inexact = omega._repeat(shaped, self.sets, at)
        self.gap[rows] = gap.cpu().reshape(-1, factors)
        self.was_inexact[rows] |= inexact.cpu().reshape(-1, factors)
        return p.reshape(theta.shape)

    def _check_gradient(self, structure: Structure, scores: Tensor) -> None:
        """Raise a ValueError if the higher-order scores of a user's structure require grad, once they are computed."""
        if isinstance(structure, _Weighted):
            with torch.enable_grad():
                structure.higher(best(structure, scores).double())
        self.checked = True

    def adopt(self, other: WarmStart) -> None:
        if not isinstance(other, _ActiveSetStart) or other.gap.shape != self.gap.shape:
            return
        mine, theirs = self.factor, other.factor
        same = mine.structure is theirs.structure or mine.kind == theirs.kind
        if same and mine.shape == theirs.shape:
            self.sets = other.sets

    def inexact(self) -> Tensor:
        return self.was_inexact.any(1)

    def error(self) -> Tensor:
        return (2 * self.gap).sqrt().amax(1)


class Sequence(Structured):
    r"""Variables (T, S) that choose one of S states at each of T positions, with scores of transitions.

    .. math:: h(y) = \sum_t A_{y_{t-1}, y_t}

    Args:
        variables: an array of shape (T, S).
        transition: (S, S), or (…, T−1 or 1, S, S) with the graph's batch dimensions in front; [previous, current];
            differentiable. −inf forbids a step.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.factors import Budget, Sequence
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([[1.0, 0.0], [0.0, 0.6], [1.0, 0.0]]))
        >>> graph.add(Sequence(u, 0.3 * torch.eye(2)))
        >>> graph.add(Budget(u[:, 0], 2))
        >>> solution = graph.solve()
        >>> u.value
        tensor([[0.7833, 0.2167],
                [0.4333, 0.5667],
                [0.7833, 0.2167]])
    """

    def __init__(self, variables: Variables, transition: Tensor) -> None:
        super().__init__(variables, Chain(transition))


class DependencyTree(Structured):
    r"""Variables (N, N+1) that are the arcs of a dependency tree over N words.

    Args:
        variables: an array of shape (N, N+1): [modifier, head], head 0 is the root. A word whose arcs all have the
            score −inf is left out of the tree.
        projective: whether arcs must not cross.
        single_root: whether exactly one word must have the root as its head.

    Example:
        A tree in which the first word has at most one modifier:

        >>> import torch, fenchel
        >>> from fenchel.factors import Budget, DependencyTree
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 1.2, 0.0, 0.6], [0.0, 1.5, 0.2, 0.0]]))
        >>> graph.add(DependencyTree(u))
        >>> graph.add(Budget(u[:, 1], 1))
        >>> solution = graph.solve()
        >>> u.value
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.0333, 0.3333, 0.0000, 0.6333],
                [0.0667, 0.6667, 0.2667, 0.0000]])
    """

    def __init__(self, variables: Variables, *, projective: bool = False, single_root: bool = False) -> None:
        super().__init__(variables, structures.DependencyTree(projective, single_root))


class _Weighted(Structure):
    """A structure whose higher-order scores are multiplied by a weight, one per row."""

    def __init__(self, structure: Structure, weight: Tensor) -> None:
        super().__init__()
        self.structure = structure
        self.event_dim = structure.event_dim
        self.fixed_dims = structure.fixed_dims
        self.weight = weight

    def map(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        weight = self.weight.detach().clamp_min(1e-12).reshape(*self.weight.shape, *(1,) * self.event_dim)
        shaped = scores / weight
        return self.structure.map(shaped) if mask is None else self.structure.map(shaped, mask)

    def higher(self, structures: Tensor) -> Tensor | None:
        score = self.structure.higher(structures)
        if score is not None and score.requires_grad:
            raise _no_gradient(self.structure)
        return None if score is None else score * self.weight

    def rows(self, batch: torch.Size, index: Tensor) -> Structure:
        return _Weighted(self.structure, self.weight.expand(batch).reshape(-1)[index])

    def possible(self, shape: torch.Size, device: torch.device) -> Tensor | None:
        return self.structure.possible(shape, device)

    def check(self, shape: torch.Size) -> None:
        self.structure.check(shape)


def _higher(structure: Structure, shape: torch.Size) -> Tensor | None:
    """The transitions of a structure with higher-order scores; a weight of 1 if its scores are of another form."""
    if not structure.has_higher:
        return None
    if structure.transition_dims is not None:
        return structure.transitions(shape)
    if any(t.requires_grad for t in own_tensors(structure)):
        raise _no_gradient(structure)
    return torch.ones((), device="cpu")


def _no_gradient(structure: Structure) -> ValueError:
    return ValueError(
        f"the tensors of {type(structure).__name__} must not require grad: in a factor graph only the transitions "
        "of Chain and SequentialSubsets get gradients. Write a Factor with these as its scores, or detach them"
    )
