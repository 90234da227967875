"""Structured factors: variables that make up one structure, solved by SparseMAP with the structure's oracle."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fenchel import structures
from fenchel.factors.base import Factor, Memory
from fenchel.factors.variables import Variables
from fenchel.structures import Chain, SparseMAP, Structure
from fenchel.structures.base import best, own_tensors
from fenchel.structures.solver import ActiveSets

TOL = 1e-6
"""How exactly a structure is solved: until no structure gains more than TOL²/2, which moves marginals by about as much.
A tighter one would add structures whose gain is rounding."""


class Structured(Factor):
    r"""Variables that make up one structure of a set :math:`\mathcal Y` with a MAP oracle.

    .. math:: \operatorname{argmax}_{p \in \operatorname{conv}(\mathcal Y)} \; \langle \theta, p \rangle + h(p)
        - \tfrac12 \|p\|^2

    Alone in its graph it gives :class:`fenchel.SparseMAP`'s answer.

    Args:
        variables: an array of the shape that the structure's scores have.
        structure: a :class:`fenchel.structures.Structure`, yours or ours. The transition of ``Chain`` and
            ``SequentialSubsets`` gets gradients, and may have the graph's batch dimensions; the tensors of other
            structures with higher-order scores must not require grad, and are the same for all of a batch.

    Example:
        A matching, one arc of which asks for another:

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
        super().__init__(variables, given, [structure.transition_dims or 0 for _ in given])

    @property
    def counted(self) -> bool:  # type: ignore[override]
        """True if the higher-order scores are transitions; for other tensors that is not known."""
        return self.structure.transition_dims is not None

    @property
    def least(self) -> int:  # type: ignore[override]
        """The ``least`` of the structure."""
        return self.structure.least

    @property
    def kind(self) -> Hashable:
        """Equal for equal sets of structures over variables of one shape."""
        key = self.structure.key()
        return id(self) if key is None else (key, self.shape)

    def qp(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        posed = theta.reshape(*theta.shape[:2], *self.shape)
        return SparseMAP(self._with(tensors), tol=TOL).argmax(posed).reshape(theta.shape)

    def memory(self, batch: int, factors: int) -> Memory | None:
        return _Kept(self, batch, factors)

    def support(self, theta: Tensor, *tensors: Tensor) -> Tensor:
        found = best(self._with(tensors), theta.reshape(*theta.shape[:2], *self.shape)).reshape(theta.shape)
        return torch.where(found == 1, theta, 0.0).sum(-1)

    def _with(self, tensors: tuple[Tensor, ...]) -> Structure:
        """The structure with these higher-order scores in place of its own."""
        if not tensors:
            return self.structure
        if self.structure.transition_dims is None:
            return _Weighted(self.structure, tensors[0])
        return self.structure.with_transitions(tensors[0])


class _Kept(Memory):
    """The active sets of the structures of a batch."""

    def __init__(self, factor: Structured, batch: int, factors: int) -> None:
        self.factor = factor
        self.sets = ActiveSets(batch * factors)
        self.gap = torch.zeros(batch, factors, dtype=torch.float64, device="cpu")
        self.doubt = torch.zeros(batch, factors, dtype=torch.bool, device="cpu")
        self.checked = not factor.structure.has_higher

    def qp(self, rows: Tensor, theta: Tensor, *tensors: Tensor) -> Tensor:
        posed = theta.reshape(*theta.shape[:2], *self.factor.shape)
        omega = SparseMAP(self.factor._with(tensors), tol=TOL)
        if omega.structure.marginals(posed, None) is not None:
            return self.factor.qp(theta, *tensors)
        if not self.checked:
            self._check_gradient(omega.structure, posed.detach())
        rows, factors = rows.cpu(), theta.shape[1]
        at = (rows.unsqueeze(1) * factors + torch.arange(factors, device="cpu")).reshape(-1).numpy()
        p, gap, doubted = omega._repeat(posed, self.sets, at)
        self.gap[rows] = gap.cpu().reshape(-1, factors)
        self.doubt[rows] |= doubted.cpu().reshape(-1, factors)
        return p.reshape(theta.shape)

    def _check_gradient(self, structure: Structure, scores: Tensor) -> None:
        """Refuse a user's structure whose higher-order scores have a derivative: only these scores can tell."""
        if isinstance(structure, _Weighted):
            with torch.enable_grad():
                structure.higher(best(structure, scores).double())
        self.checked = True

    def adopt(self, other: Memory) -> None:
        if not isinstance(other, _Kept) or other.gap.shape != self.gap.shape:
            return
        mine, theirs = self.factor, other.factor
        same = mine.structure is theirs.structure or mine.kind == theirs.kind
        if same and mine.shape == theirs.shape:
            self.sets = other.sets

    def doubted(self) -> Tensor:
        return self.doubt.any(1)

    def error(self) -> Tensor:
        return (2 * self.gap).sqrt().amax(1)


class Sequence(Structured):
    r"""One state at each of T positions, with a score for each step from one to the next.

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
    r"""Arcs that make up a dependency tree.

    Args:
        variables: an array of shape (N, N+1): [modifier, head], head 0 is the root. Words of which all arcs
            have the score −inf are not in the sentence.
        projective: only trees whose arcs do not cross.
        single_root: only trees with exactly one word on the root.

    Example:
        A tree in which the first word takes no more than one modifier:

        >>> import torch, fenchel
        >>> from fenchel.factors import Budget, DependencyTree
        >>> graph = fenchel.FactorGraph()
        >>> u = graph.variables(torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 1.2, 0.0, 0.6], [0.0, 1.5, 0.2, 0.0]]))
        >>> graph.add(DependencyTree(u))
        >>> graph.add(Budget(u[:, 1], budget=1))
        >>> solution = graph.solve()
        >>> u.value
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.0333, 0.3333, 0.0000, 0.6333],
                [0.0667, 0.6667, 0.2667, 0.0000]])
    """

    def __init__(self, variables: Variables, projective: bool = False, single_root: bool = False) -> None:
        super().__init__(variables, structures.DependencyTree(projective, single_root))


class _Weighted(Structure):
    """A structure whose higher-order scores count by a weight, one for each row."""

    def __init__(self, structure: Structure, weight: Tensor) -> None:
        super().__init__()
        self.structure = structure
        self.event_dim = structure.event_dim
        self.fixed_dims = structure.fixed_dims
        self.weight = weight

    def map(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        weight = self.weight.detach().clamp_min(1e-12).reshape(*self.weight.shape, *(1,) * self.event_dim)
        posed = scores / weight
        return self.structure.map(posed) if mask is None else self.structure.map(posed, mask)

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
    """The tensor of higher-order scores of a structure; a weight of 1 for those that are no such tensor."""
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
