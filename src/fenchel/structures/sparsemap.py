"""SparseMAP: a sparse, differentiable mixture of whole structures, for any structure with a MAP oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._checks import check_count, check_entries, check_floats, check_like, check_number, kind
from fenchel._torch import concrete, outside_graphs, tracks
from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.rowmap import finish_loss
from fenchel.structures.active_set import search, search_again
from fenchel.structures.base import Array, Structure, best, check_shape, copied, free_parts
from fenchel.structures.mixture import Found, choose, dense, padded, trained
from fenchel.structures.solver import ActiveSets, Options


@dataclass(frozen=True)
class Mixture:
    """A mixture of structures, as ``SparseMAP.solve`` returns it.

    Args:
        marginals: (…, parts), the mixture; differentiable.
        structures: (…, K, parts), zeros and ones, filled up with structures of zeros.
        weights: (…, K), filled up with 0; differentiable. A structure that ties with the chosen ones may have weight 0.
        gap: (…), what the best structure could still gain; the squared error of the marginals is at most twice that.
        iterations: (…), structures tried.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.structures import SequentialSubsets
        >>> found = fenchel.SparseMAP(SequentialSubsets(2, transition=0.5)).solve(torch.tensor([1.0, 0.2, 0.9]))
        >>> found.structures.shape, found.weights.sum(), found.marginals.sum()
        (torch.Size([3, 3]), tensor(1.), tensor(2.))
    """

    marginals: Tensor
    structures: Tensor
    weights: Tensor
    gap: Tensor
    iterations: Tensor

    def to(self, dtype: torch.dtype) -> Mixture:
        """The same mixture in another precision."""
        marginals, structures, weights, gap = (
            t.to(dtype) for t in (self.marginals, self.structures, self.weights, self.gap)
        )
        return Mixture(marginals, structures, weights, gap, self.iterations)


@written_by("structure", "max_iter", "tol")
class SparseMAP(Regularizer):
    r"""The squared norm of a mixture of structures, as a regularizer.

    .. math:: \operatorname{argmax}_{\mu \in \operatorname{conv}(\mathcal{Y})} \; \langle s, \mu \rangle - \Omega(\mu),
        \qquad \Omega(\mu) = \tfrac12 \|\mu\|^2 - \max_{p : \sum_k p_k y_k = \mu} \sum_k p_k h(y_k)

    where h are the higher-order scores of the structure, such as transitions: part of Ω, and trained as its parameters.
    Few structures get all the weight. The structure fixes the dimensions, so there is no ``dim`` to choose: another
    than the last raises. Without higher-order scores, and if all structures have equally many parts,
    :math:`\frac12 \sum_i \mu_i (\mu_i - 1)` is taken, which is zero at structures.

    Solved by the active-set algorithm, exactly, in double precision: it calls the structure's oracle a few dozen
    times, each time on all rows of the batch that are not done. Closed forms are used where they exist (``Subsets``,
    ``AtMost``). Chains and sequential subsets that a few hundred calls do not solve, such as those with tiny
    transitions, are solved by Newton's method on a smoothed program; the oracle certifies the result. ``argmax`` gives
    the marginals; :meth:`solve` the structures, their weights and a certificate too. Runs eagerly, but for closed
    forms: ``torch.compile`` breaks its graph here, ``fullgraph=True``, ``torch.export`` and ``vmap`` raise.

    Derivatives of every order are right in the scores and in the structure's parameters, wherever they exist. Where the
    optimum lies on the edge of the face of all structures that tie for it, such as scores at which a structure has
    exactly its margin, marginals have a kink: the derivative is then an element of the generalized Jacobian, the limit
    of derivatives at scores nearby. The same holds for transitions where structures with the same marginals tie. Where
    very many structures tie, as they do for scores of zeros, the derivative of marginals is a projection that keeps
    row sums and the like; where there is no such form it takes as many calls of the oracle as the face has dimensions,
    and there is a warning beyond ``max_iter``.

    The choice is a single structure y if and only if :math:`\langle s - y, y - y' \rangle + h(y) - h(y') \ge 0` for
    all others; :meth:`violation` checks that with one call of the oracle.

    Args:
        structure: a :class:`~fenchel.structures.Structure`.
        max_iter: calls of the oracle; a row that is not solved then is warned of.
        tol: how far the marginals may be from the optimum. Rows stop when their duality gap certifies it, at tol²/2, or
            when what is left is rounding error. An oracle that turns out not to be exact is warned of.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.structures import SequentialSubsets
        >>> omega = fenchel.SparseMAP(SequentialSubsets(2, transition=0.3))
        >>> scores = torch.tensor([1.2, 0.8, -0.5, 1.0])
        >>> omega.argmax(scores)
        tensor([0.9667, 0.5667, 0.0000, 0.4667])
        >>> mixture = omega.solve(scores)
        >>> mixture.structures
        tensor([[1., 1., 0., 0.],
                [1., 0., 0., 1.],
                [0., 1., 0., 1.]])
        >>> mixture.weights
        tensor([0.5333, 0.4333, 0.0333])
        >>> omega.loss(scores, torch.tensor([1.0, 1.0, 0.0, 0.0]))
        tensor(0.2033)

    References: Niculae, Martins, Blondel & Cardie (2018); Santos et al. (2024), section 4.
    """

    ordered = True

    def __init__(self, structure: Structure, *, max_iter: int = 1000, tol: float = 1e-6) -> None:
        super().__init__()
        if not isinstance(structure, Structure):
            raise TypeError(
                f"structure must be a fenchel.structures.Structure, such as Matching(), got {type(structure).__name__}"
            )
        self.structure = structure
        self.max_iter = check_count(max_iter, "max_iter")
        self.tol = check_number(tol, "tol", 0)

    def canonical(self) -> tuple[Regularizer, float | Tensor]:
        """That of the Ω in closed form, for structures that have one."""
        omega = self.structure.regularizer()
        return (self, 1.0) if omega is None else omega.canonical()

    def mass(self, count: int | Tensor) -> float | Tensor | None:
        """None, unless the structure has a closed form: structures may differ in size."""
        omega = self.structure.regularizer()
        return None if omega is None else omega.mass(count)

    def line(self, scores: Tensor, dim: int = -1) -> Tensor | None:
        omega = self.structure.regularizer()
        return None if omega is None else omega.line(scores, dim)

    @property
    def parameter_shape(self) -> torch.Size | None:
        """None if the structure holds tensors, whose shapes have a meaning of their own, or joins rows to a table."""
        plain = self.structure.event_dim == 1 and not [*self.parameters(), *self.buffers()]
        return torch.Size() if plain else None

    @property
    def margin(self) -> float | None:
        """1 for structures of one size, None else.

        y is the choice if and only if its score, higher-order scores included, leads that of every other y′ by
        ½‖y − y′‖² times this: by 1 for each part of y that is not in y′. For subsets of k that is a lead of 1 of the
        k-th part over the next one. :meth:`violation` is exact for any structure and scores.
        """
        return self.structure.margin

    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        """Ω of structures or, where there are no higher-order scores, of mixtures of them: (…, parts)."""
        self._check_dim(p, dim)
        self.structure.check(p.shape)
        y = p.double()
        higher = self.structure.higher(y)
        if higher is not None and concrete(p) and not bool(((p == 0) | (p == 1)).all()):
            raise ValueError(
                f"Ω of SparseMAP({self.structure}) is known at structures only, zeros and ones: what the higher-order "
                "score of a mixture is depends on the structures in it"
            )
        return self._omega(y, higher).to(p.dtype)

    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The marginals of the mixture, of the shape of ``scores``."""
        if dim != -1:
            self._check_dim(scores, dim)
        check_shape(self.structure, scores)
        closed = self.structure.marginals(scores, mask)
        return self._search(scores, mask).marginals.to(scores.dtype) if closed is None else closed

    def max(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The regularized maximum, one value per batch entry; −inf where nothing may be chosen."""
        self._check_dim(scores, dim)
        theta, offset, free = self._centered(scores, mask)
        marginals, higher = self._marginals(scores, free)
        value = self._sum(theta * marginals) - self._omega(marginals, higher) + self._sum(offset * marginals.detach())
        return torch.where(self._any(free), value, -torch.inf).to(scores.dtype)

    def loss(self, scores: Tensor, target: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The Fenchel-Young loss of a structure, one value per batch entry.

        Never negative, and zero exactly where ``argmax(scores)`` is the target. A target that is masked has loss +inf.
        The gradient is ``argmax(scores) - target``.

        Args:
            scores: (…, parts).
            target: zeros and ones of the shape of ``scores``; mixtures too where there are no higher-order scores.
                For ``DependencyTree`` also heads, integers (…, N), −1 for words that are not in the sentence.
            dim: must be left out.
            mask: boolean, broadcasts to ``scores``; True = may be chosen.
        """
        self._check_dim(scores, dim)
        y = self.check_target(target, scores, dim, mask).to(device=scores.device, dtype=torch.float64)
        theta, _, free = self._centered(scores, mask)
        marginals, higher = self._marginals(scores, free)
        moved, own = marginals - y, self.structure.higher(y)
        # Differences first: with large scores the two sides of the loss would cancel.
        value = self._sum(moved * (theta - (marginals + y - self._center(own)) / 2))
        if higher is not None and own is not None:
            value = value + (higher - own)
        impossible, at_target = self._any((y != 0) & ~free), ~self._any(moved.detach() != 0)
        return finish_loss(value, torch.zeros_like(value), impossible, at_target=at_target).to(scores.dtype)

    def violation(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        r"""By how much a structure misses its margin: zero if and only if SparseMAP returns it, and its loss is zero.

        .. math:: \max_{y'} \; \langle s - y, y' - y \rangle + h(y') - h(y)

        For structures of one size, y must lead every other one by :math:`\frac12\|y - y'\|^2`. Takes one call of the
        oracle. Not differentiable.
        """
        with torch.no_grad():
            y = self.check_target(target, scores, -1, mask).to(device=scores.device, dtype=torch.float64)
            theta, _, free = self._centered(scores, mask)
            residual = torch.where(free, theta - y, -torch.inf)
            other = best(self.structure, residual, free).double()
            moved = other - y
            gain = self._sum(torch.where(moved != 0, moved * torch.where(free, residual, 0.0), 0.0))
            after, before = self.structure.higher(other), self.structure.higher(y)
            gain = gain if after is None or before is None else gain + after - before
            gain = torch.where(self._any((y != 0) & ~free), torch.inf, gain)
            return gain.clamp_min(0).to(scores.dtype)

    @outside_graphs("SparseMAP")
    def solve(self, scores: Tensor, mask: Tensor | None = None, *, start: Mixture | Tensor | None = None) -> Mixture:
        """The mixture itself: marginals, structures and weights, with a certificate.

        Args:
            scores: (…, parts).
            mask: boolean, broadcasts to ``scores``; True = may be chosen. Scores of −inf are masked too.
            start: an earlier mixture of scores of the same shape, or structures (…, K, parts), to begin with. It
                saves calls of the oracle where the answer is similar, and changes nothing else.
        """
        if isinstance(start, Mixture):
            start = start.structures
        answer = self._search(check_floats(scores, "scores"), mask, start)
        members = dense(answer.found, answer.shape)
        members = members.reshape(*answer.batch, *members.shape[1:])
        empty_or_nan = answer.found.gap.isnan().reshape(*answer.batch, *(1,) * (members.dim() - len(answer.batch)))
        weights = padded(answer.found, answer.weights)
        weights = torch.where(answer.found.gap.isnan().unsqueeze(-1), torch.nan, weights)
        return Mixture(
            answer.marginals.to(scores.dtype),
            torch.where(empty_or_nan, torch.nan, members).to(scores.dtype),
            weights.reshape(*answer.batch, weights.shape[-1]).to(scores.dtype),
            answer.found.gap.reshape(answer.batch).to(scores.dtype),
            answer.found.iterations.reshape(answer.batch),
        )

    def _repeat(self, scores: Tensor, sets: ActiveSets, rows: Array) -> tuple[Tensor, Tensor, Tensor]:
        """The marginals of rows whose active sets are known from similar scores, which are updated.

        Also returns the gaps, and the rows in which the oracle was not exact. It does not warn.

        Args:
            scores: (…, parts).
            sets: the active sets of many rows.
            rows: which of these the scores belong to.
        """
        learns = trained(self.structure)
        options = Options(self.max_iter, self.tol, learns or tracks(scores), learns, quiet=True)
        found, doubted = search_again(self.structure, scores.detach(), sets, rows, options)
        return self._answer(scores, None, found).marginals, found.gap, doubted

    def check_target(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        """Check a target: a structure, of the shape of scores; mixtures where there are no higher-order scores.

        Returns it as zeros and ones, where the structure takes a shorter form.
        """
        if not isinstance(target, Tensor) or target.is_complex():
            raise TypeError(f"target must be a tensor of zeros and ones, got {kind(target)}")
        target = check_like(self.structure.expand_target(target, scores.shape), "target", scores)
        if concrete(target, scores):
            self._check_member(target.detach().double(), free_parts(self.structure, scores, mask))
        return target

    def in_rows(
        self, scores: Tensor, target: Tensor, dim: Any, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Any, Tensor | None, Regularizer]:
        check_shape(self.structure, scores)
        concrete(target)  # raises if its memory was freed, before torch reads it
        target = self.structure.expand_target(target, scores.shape)
        counts = target.shape == scores.shape and not target.is_floating_point() and not target.is_complex()
        return scores, target.double() if counts else target, dim, mask, self

    def check_classes(self, target: Tensor, scores: Tensor, dim: int, ignored: int | None = None) -> Tensor:
        raise ValueError(
            "target must be a floating-point structure of zeros and ones, of the shape of scores; class indices do not "
            f"name one for {self.structure}"
        )

    def balance(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        raise ValueError("label_smoothing goes with distributions; a structure has no even share to smooth with")

    def extra_repr(self) -> str:
        return f"max_iter={self.max_iter}, tol={self.tol:g}"

    # -- what they are made of ------------------------------------------------------------------------

    @outside_graphs("SparseMAP")
    def _search(self, scores: Tensor, mask: Tensor | None, start: Tensor | None = None) -> _Answer:
        if not scores.is_cpu:
            structure, given, mask = copied(self.structure, scores, mask)
            omega = SparseMAP(structure, max_iter=self.max_iter, tol=self.tol)
            answer = omega._search(given, mask, None if start is None else start.cpu())
            marginals, higher = answer.marginals.to(scores.device), answer.higher.to(scores.device)
            return answer._replace(marginals=marginals, higher=higher)
        learns = trained(self.structure)
        options = Options(self.max_iter, self.tol, learns or tracks(scores), learns)
        return self._answer(scores, mask, search(self.structure, scores, mask, start, options))

    def _answer(self, scores: Tensor, mask: Tensor | None, found: Found) -> _Answer:
        structure = self.structure
        batch, shape = scores.shape[: -structure.event_dim], scores.shape[-structure.event_dim :]
        free = free_parts(structure, scores, mask)
        theta = torch.where(free, scores, 0.0).double().reshape(batch.numel(), shape.numel())
        chosen = choose(structure, theta, found, batch, shape)
        bad = found.gap.isnan()
        marginals = torch.where(bad.unsqueeze(-1), torch.nan, chosen.marginals).reshape(scores.shape)
        higher = torch.where(bad, torch.nan, chosen.higher).reshape(batch)
        return _Answer(found, chosen.weights, marginals, higher, batch, shape)

    def _marginals(self, scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """μ, and the mean of higher-order scores if there are any, in double precision."""
        check_shape(self.structure, scores)
        closed = self.structure.marginals(scores.double(), mask)
        if closed is not None:
            return closed, None
        answer = self._search(scores, mask)
        return answer.marginals, answer.higher if self.structure.has_higher else None

    def _omega(self, y: Tensor, higher: Tensor | None) -> Tensor:
        value = self._sum(y * (y - self._center(higher))) / 2
        return value if higher is None else value - higher

    def _center(self, higher: Tensor | None) -> int:
        """1 where Ω is ½Σ μ(μ − 1), so that it is zero at structures; 0 where it is ½‖μ‖²."""
        return int(self.structure.fixed_dims > 0 and higher is None)

    def _centered(self, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Scores in double precision less an offset, the offset, and which parts may be chosen.

        The offset is the largest score of each group of parts of which all structures hold equally many: sums are
        then of small terms. Zero where nothing may be chosen.
        """
        check_shape(self.structure, scores)
        free = free_parts(self.structure, scores, mask)
        theta = torch.where(free, scores, 0.0).double()
        dims = self.structure.fixed_dims
        if dims == 0:
            return theta, torch.zeros_like(theta).detach(), free
        over = tuple(range(-dims, 0))
        top = torch.where(free, theta.detach(), -torch.inf).amax(over, keepdim=True)
        top = torch.where(top.isfinite(), top, 0.0)
        return torch.where(free, theta - top, 0.0), top, free

    def _sum(self, parts: Tensor) -> Tensor:
        return parts.flatten(-self.structure.event_dim).sum(-1)

    def _any(self, parts: Tensor) -> Tensor:
        return parts.flatten(-self.structure.event_dim).any(-1)

    def _check_member(self, y: Tensor, free: Tensor) -> None:
        """Raise a ValueError if y is not a structure: it is one if and only if it is the best for the scores 2y − 1."""
        structure = self.structure
        check_entries((y >= 0) & (y <= 1), y, "target", "hold entries in [0, 1]")
        possible = structure.possible(y.shape, y.device)
        if possible is not None and bool(((y != 0) & ~possible).any()):
            raise ValueError(f"target must be a structure of {structure}: it has a part that no structure has")
        binary = ~self._any((y != 0) & (y != 1))
        if structure.has_higher and not bool(binary.all()):
            raise ValueError(f"target must be a structure, zeros and ones, for {structure}")
        nearest = self._nearest(y, free)
        # A masked target has loss +inf, and need not be looked at.
        ruled_out = self._any((y != 0) & ~free) | self._any(nearest.isnan())
        higher = structure.higher(y)
        ruled_out = ruled_out if higher is None else ruled_out | (higher == -torch.inf)
        wrong = binary & self._any(nearest != y)
        if structure.fixed_dims:
            over = tuple(range(-structure.fixed_dims, 0))
            wrong = wrong | self._any((nearest - y).sum(over, keepdim=True).abs() > 1e-3)
        wrong = wrong & ~ruled_out
        if bool(wrong.any()):
            raise ValueError(
                f"target must be a structure of {structure}: {int(wrong.sum())} of {wrong.numel()} are not, first "
                f"number {int(wrong.flatten().nonzero()[0])}; mask the scores of what is not there, such as padding"
            )

    def _nearest(self, y: Tensor, free: Tensor) -> Tensor:
        """The best structure for the scores M (2y − 1): y itself if it is one, whatever the higher-order scores.

        M grows in a row until y is found, or until higher-order scores cannot be the reason why it is not: if y were a
        structure it would beat y′ by M ‖y − y′‖₁ + h(y) − h(y′).
        """
        structure = self.structure
        before = structure.higher(y)
        if before is None:
            return best(structure, 2 * y - 1, free)
        large = 1 + torch.where(before.isfinite(), before.abs(), 0.0).expand(y.shape[: -structure.event_dim])
        while True:
            each = large.reshape(*large.shape, *(1,) * structure.event_dim)
            found = best(structure, each * (2 * y - 1), free).double()
            after = structure.higher(found)
            assert after is not None
            apart = self._sum((found - y).abs())
            lead = (after - before) / apart.clamp_min(1)
            open_rows = (apart > 0) & (lead >= large) & lead.isfinite() & (large < 1e300)
            if not bool(open_rows.any()):
                return found
            large = torch.where(open_rows, 4 * lead, large)

    def dims(self, scores: Tensor, dim: int) -> tuple[int, ...]:
        self._check_dim(scores, dim)
        check_shape(self.structure, scores)
        return tuple(range(scores.dim() - self.structure.event_dim, scores.dim()))

    def _check_dim(self, scores: Tensor, dim: int) -> None:
        if dim != -1 and not (isinstance(scores, Tensor) and dim == scores.dim() - 1):
            raise ValueError(
                f"dim must be left out, got {dim}: {type(self.structure).__name__} fixes the dimensions, its parts are "
                f"the last {self.structure.event_dim} of the scores; move them there with movedim"
            )


class _Answer(NamedTuple):
    """The result of a search, differentiable: weights by group, marginals (…, parts), mean higher-order scores (…)."""

    found: Found
    weights: tuple[Tensor, ...]
    marginals: Tensor
    higher: Tensor
    batch: torch.Size
    shape: torch.Size
