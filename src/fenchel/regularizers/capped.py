"""Bounds and budgets: choices with a limit for each entry, and choices of k at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel.kernels import concrete, usable
from fenchel.regularizers.base import Regularizer, check_indices, check_omega, hold, show
from fenchel.regularizers.bounded import BOUNDED_GINI, BOUNDED_SHANNON, Bounded, Bounds
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.family import Parameter
from fenchel.regularizers.rows import (
    broadcasts,
    check_floating,
    check_parameter,
    check_scores,
    from_rows,
    on_device,
    parameter_rows,
    to_rows,
)
from fenchel.regularizers.tsallis import Gini, Tsallis

_MEMBERS: dict[float, Bounded] = {1.0: BOUNDED_SHANNON, 2.0: BOUNDED_GINI}


class _Box(Regularizer):
    """What regularizers of bounds and budgets share."""

    family: Bounded
    zero_at_vertices = False

    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return _choose(self.family, to_rows(scores, dim, mask), self._parameter_rows(scores, dim), scores, dim)

    def loss(self, scores: Tensor, target: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        loss = super().loss(scores, target, dim, mask)
        return loss - loss.clamp_max(0).detach()  # rounding can leave it a hair below zero

    def _max_rows(self, rows: Tensor, a: Bounds) -> Tensor:
        _check_room(rows, a)
        return super()._max_rows(rows, a)


@written_by("upper", "omega")
class Capped(_Box):
    r"""A base's Ω on the part of the simplex where :math:`p \le u`, entry by entry.

    Its argmax is :func:`constrained_sparsemax` for ``Gini()`` and :func:`constrained_softmax` for ``Shannon()``. Where
    every bound is 1 or more it is the base itself. ``omega(p)`` is the base's Ω, whatever the bounds; as a regularizer
    Ω is +inf where they are exceeded, and so is the loss of a target that exceeds them: a class whose bound is less
    than 1 is never right. The gradient of such a loss is ``argmax(scores) − target`` all the same.

    Args:
        upper: bounds that are not negative: a number, or a tensor that broadcasts to the scores; differentiable. Rows
            whose bounds sum to less than 1 over what is not masked leave no choice: a ValueError.
        omega: the base, ``Gini()`` or ``Shannon()``.

    Example:
        >>> import torch
        >>> from fenchel import Capped, Shannon
        >>> Capped(torch.tensor([0.4, 1.0, 1.0])).argmax(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.4000, 0.6000, 0.0000])
        >>> Capped(0.5, Shannon()).argmax(torch.tensor([3.0, 1.0, 0.0]))
        tensor([0.5000, 0.3655, 0.1345])

    References: Malaviya, Ferreira & Martins (2018); Martins & Kreutzer (2017).
    """

    upper: float | Tensor

    def __init__(self, upper: float | Tensor, omega: Regularizer | None = None) -> None:
        super().__init__()
        self.omega = Gini() if omega is None else check_omega(omega)
        _member(self.omega)
        hold(self, "upper", _check_upper(upper))

    @property
    def family(self) -> Bounded:  # type: ignore[override]
        """The base's mathematics with bounds."""
        return _member(self.omega)

    @property
    def margin(self) -> float | Tensor | None:
        """The base's where every bound is 1 or more, else inf: no lead gives all to every class. None in graphs."""
        if isinstance(self.upper, Tensor) and not concrete(self.upper):
            return None
        enough = bool((self.upper >= 1).all()) if isinstance(self.upper, Tensor) else self.upper >= 1
        return self.omega.margin if enough else math.inf

    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        """The base's Ω(p)."""
        value: Tensor = self.omega(p, dim)
        return value

    def loss(self, scores: Tensor, target: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The Fenchel-Young loss, one value per row; +inf for targets that exceed their bounds."""
        loss = super().loss(scores, target, dim, mask)
        dim = check_scores(scores, dim)
        upper = _upper_rows(self.upper, scores, dim).expand(scores.movedim(dim, -1).shape)
        if target.is_floating_point():
            slack = 4 * torch.finfo(target.dtype).eps
            excluded = (target.movedim(dim, -1) > upper * (1 + slack)).any(-1)
        else:
            excluded = upper.gather(-1, target.long().unsqueeze(-1)).squeeze(-1) < 1
        return loss + torch.where(excluded, torch.inf, 0.0).to(loss.dtype)

    def extra_repr(self) -> str:
        return f"upper={show(self.upper)}"

    def _parameter_rows(self, scores: Tensor, dim: int) -> Bounds:
        return Bounds(_upper_rows(self.upper, scores, check_scores(scores, dim)), 1.0)


@written_by("k")
class KSubsets(_Box):
    r"""Gini's negentropy of k choices at once, :math:`\frac12 (\|p\|^2 - k)`, for p in the unit box with sum k.

    Its argmax is :func:`k_subsets`: the marginals of SparseMAP over all subsets of size k. Zero at k-hot vectors. A
    target is a floating-point vector, k-hot or in between, that sums to k; class indices are for k = 1. Margin 1: the
    choice is k-hot, and the loss of that vector zero, exactly when the k-th best score leads the next by 1.

    Args:
        k: how many to choose: a number ≥ 0, whole or not, or a tensor with one value per row (size 1 along
            ``dim``), differentiable. Rows with fewer than k unmasked entries choose them all.

    Example:
        >>> import torch
        >>> from fenchel import KSubsets
        >>> omega, scores = KSubsets(2), torch.tensor([2.0, 1.4, 1.0, -1.0])
        >>> omega.argmax(scores)
        tensor([1.0000, 0.7000, 0.3000, 0.0000])
        >>> omega.loss(scores, torch.tensor([1.0, 1.0, 0.0, 0.0]))
        tensor(0.0900)

    References: Niculae, Martins, Blondel & Cardie (2018); Santos et al. (2024).
    """

    family = BOUNDED_GINI
    k: float | Tensor

    def __init__(self, k: float | Tensor) -> None:
        super().__init__()
        hold(self, "k", _check_k(k))

    @property
    def parameter(self) -> Parameter:
        return self.k

    @property
    def margin(self) -> float:
        """1: k-hot once the k-th best score leads the next by one."""
        return 1.0

    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        r"""Ω(p), computed as :math:`\frac12 \sum_i p_i (p_i - 1)`; zero at k-hot vectors."""
        value: Tensor = Gini()(p, dim)
        return value

    def check_target(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        """Check a target: entries in [0, 1] that sum to k, or to all unmasked entries if there are fewer."""
        if target.shape != scores.shape:
            raise ValueError(
                f"target must have the shape of scores, {tuple(scores.shape)}, with entries in [0, 1] that sum to k, "
                f"got shape {tuple(target.shape)}"
            )
        if not concrete(target, scores):
            return target
        rows = to_rows(scores, dim, mask)
        y = target.movedim(dim, -1).to(torch.promote_types(target.dtype, torch.float32))
        k = self._mass(scores, dim, mask).detach()
        if not concrete(k):
            return target
        slack = max(1e-3, 4 * torch.finfo(target.dtype).eps)
        off = (y.sum(-1) - k).abs() > slack * k.clamp_min(1)
        masked = ((y != 0) & (rows == -torch.inf)).any(-1)  # such a target is impossible, and has loss +inf
        if bool(((y < 0) | (y > 1 + slack)).any()) or bool((off & ~masked).any()):
            wrong = off & ~masked
            found = f"; a row sums to {y.sum(-1)[wrong][0].item():.6g}" if bool(wrong.any()) else ""
            raise ValueError(
                f"target must have entries in [0, 1] that sum to k = {show(self.k)} along dim {dim}{found}"
            )
        return target

    def check_classes(self, target: Tensor, scores: Tensor, dim: int) -> Tensor:
        """Check class indices, which name a vertex for k = 1 alone."""
        known = not isinstance(self.k, Tensor) or concrete(self.k)
        if not known or not bool(torch.as_tensor(self.k == 1, device="cpu").all()):
            raise ValueError(
                f"target must be a floating-point tensor of the shape of scores that sums to k = {show(self.k)}, such "
                f"as a k-hot vector, got {target.dtype}: convert with target.float(); class indices go with k = 1 only"
            )
        return check_indices(target, scores, dim)

    def extra_repr(self) -> str:
        return f"k={show(self.k)}"

    def _parameter_rows(self, scores: Tensor, dim: int) -> Bounds:
        return Bounds(None, parameter_rows(self.k, "k", scores, check_scores(scores, dim)))

    def _max_rows(self, rows: Tensor, a: Bounds) -> Tensor:
        return super()._max_rows(rows, _limited(a, rows))

    def _mass(self, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        rows = to_rows(scores, dim, mask)
        budget = _limited(self._parameter_rows(scores, dim), rows).budget
        if not isinstance(budget, Tensor):
            count = (rows != -torch.inf).sum(-1).to(rows.dtype)
            return count.clamp_max(budget)
        return budget.expand(*rows.shape[:-1], 1).squeeze(-1)


def constrained_softmax(scores: Tensor, upper: float | Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Maximize a linear score plus Shannon's entropy over distributions with an upper bound for each entry.

    .. math:: \operatorname{argmax}_{p \in \Delta,\, p \le u} \; \langle p, s \rangle - \sum_i p_i \log p_i

    A softmax that hands on what exceeds a bound: :math:`p = \min(u, e^{s - \tau})`. Softmax itself where every bound
    is 1 or more. Exact, in O(n log n) time.

    Args:
        scores: any shape, floating point.
        upper: bounds that are not negative: a number, or a tensor that broadcasts to ``scores``; differentiable. What
            is not masked must have bounds that sum to at least 1 in every row; where values cannot be read, in
            graphs, a row that falls short gets its bounds.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to ``scores``; True = may receive mass. Scores of −inf are masked too.

    Returns:
        Probabilities of the shape and dtype of ``scores``; rows with nothing unmasked are zero.

    Example:
        >>> import torch, fenchel
        >>> fenchel.constrained_softmax(torch.tensor([3.0, 1.0, 0.0]), upper=torch.tensor([0.5, 0.5, 0.5]))
        tensor([0.5000, 0.3655, 0.1345])

    References: Martins & Kreutzer (2017).
    """
    bounds = Bounds(_upper_rows(_check_upper(upper), scores, check_scores(scores, dim)), 1.0)
    return _choose(BOUNDED_SHANNON, to_rows(scores, dim, mask), bounds, scores, dim)


def constrained_sparsemax(scores: Tensor, upper: float | Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Project scores onto the distributions with an upper bound for each entry.

    .. math:: \operatorname{argmin}_{p \in \Delta,\, p \le u} \; \|p - s\|^2

    Attention with fertilities: let each word be attended to no more than it still may. Sparsemax where every bound is
    1 or more; exact. Arguments and result as in :func:`constrained_softmax`.

    Example:
        >>> import torch, fenchel
        >>> fenchel.constrained_sparsemax(torch.tensor([1.0, 0.5, -1.0]), upper=torch.tensor([0.4, 1.0, 1.0]))
        tensor([0.4000, 0.6000, 0.0000])

    References: Malaviya, Ferreira & Martins (2018).
    """
    bounds = Bounds(_upper_rows(_check_upper(upper), scores, check_scores(scores, dim)), 1.0)
    return _choose(BOUNDED_GINI, to_rows(scores, dim, mask), bounds, scores, dim)


def k_subsets(scores: Tensor, k: float | Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Choose k at once: project scores onto the vectors in the unit box that sum to k.

    .. math:: \operatorname{argmax}_{p \in [0, 1]^n,\, \sum_i p_i = k} \; \langle p, s \rangle - \tfrac12 \|p\|^2

    The marginals of SparseMAP over all subsets of size k, in closed form. Sparsemax at k = 1; k-hot exactly when the
    k-th best score leads the next by 1. Exact, in O(n log n) time.

    Args:
        scores: any shape, floating point.
        k: a number ≥ 0, whole or not, or a tensor that broadcasts to ``scores`` with size 1 along ``dim``;
            differentiable.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to ``scores``; True = may be chosen. Scores of −inf are masked too.

    Returns:
        A tensor of the shape and dtype of ``scores`` with entries in [0, 1] that sum to k; where fewer than k entries
        are unmasked, ones on all of them.

    Example:
        >>> import torch, fenchel
        >>> fenchel.k_subsets(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), k=2)
        tensor([0.0000, 0.1250, 0.3750, 0.6250, 0.8750])

    References: Niculae, Martins, Blondel & Cardie (2018); Santos et al. (2024), section 4.
    """
    bounds = Bounds(None, parameter_rows(_check_k(k), "k", scores, check_scores(scores, dim)))
    return _choose(BOUNDED_GINI, to_rows(scores, dim, mask), bounds, scores, dim)


def _choose(rules: Bounded, rows: Tensor, bounds: Bounds, scores: Tensor, dim: int) -> Tensor:
    _check_room(rows, bounds)
    return from_rows(rules.argmax(rows, _limited(bounds, rows)), scores, dim)


def _limited(bounds: Bounds, rows: Tensor) -> Bounds:
    """A tensor budget no larger than the number of unmasked entries, beyond which nothing depends on it."""
    upper, budget = bounds
    if upper is not None or not isinstance(budget, Tensor):
        return bounds
    count = (rows != -torch.inf).sum(-1, keepdim=True).to(rows.dtype)
    return Bounds(None, torch.where(budget > count, count, budget.to(rows.dtype)))


def _check_upper(upper: float | Tensor) -> float | Tensor:
    check_floating(upper, "upper")
    if isinstance(upper, Tensor):  # whose values matter at unmasked positions alone: _check_room looks at those
        return upper
    return check_parameter(upper, "upper", 0.0, "upper >= 0", closed=True)


def _check_k(k: float | Tensor) -> float | Tensor:
    return check_parameter(k, "k", 0.0, "k >= 0", closed=True)


def _upper_rows(upper: float | Tensor, scores: Tensor, dim: int) -> Tensor:
    """Bounds laid out beside ``to_rows(scores)``, in their own precision."""
    if not isinstance(upper, Tensor):
        dtype = scores.dtype if scores.dtype == torch.float64 else torch.float32
        return torch.full((1,) * scores.dim(), upper, dtype=dtype, device=scores.device)
    if not broadcasts(upper.shape, scores.shape):
        raise ValueError(
            f"upper must broadcast to scores: upper has shape {tuple(upper.shape)}, scores {tuple(scores.shape)}"
        )
    full = on_device(upper, scores).reshape((1,) * (scores.dim() - upper.dim()) + tuple(upper.shape))
    return full.movedim(dim, -1)


def _check_room(rows: Tensor, bounds: Bounds) -> None:
    """Refuse bounds that are negative or NaN, or that sum to less than the budget in a row with something to choose."""
    upper, budget = bounds
    if upper is None or not concrete(rows, upper):
        return
    wrong, room = _room(rows, upper)
    if bool(wrong.any()):
        kept = torch.where(rows == -torch.inf, 0.0, upper)
        raise ValueError(
            f"upper must not be negative or NaN, got an entry of {kept[~(kept >= 0)][0].item():g} "
            "at an unmasked position"
        )
    slack = min((8 + rows.shape[-1] ** 0.5) * torch.finfo(upper.dtype).eps, 1 / 16)
    short = room < budget - slack
    if bool(short.any()) and bool((short := short & (rows != -torch.inf).any(-1)).any()):
        raise ValueError(
            f"upper must sum to at least {budget:g} over the unmasked entries of every row, got a row with sum "
            f"{room[short][0].item():.6g}"
        )


def _room(rows: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """How many bounds of unmasked entries are negative or NaN, and the sum of the bounds, of each row."""
    if usable(rows) and upper.device.type == "cpu":
        from fenchel.kernels import bounded

        return bounded.room(rows, upper.to(rows.dtype).expand(rows.shape))
    bounds = torch.where(rows == -torch.inf, 0.0, upper)
    return (~(bounds >= 0)).sum(-1), bounds.sum(-1, dtype=torch.float64)


def _member(omega: Regularizer) -> Bounded:
    """The bounded counterpart of a base, if it has one."""
    alpha = omega.alpha if isinstance(omega, Tsallis) else None
    if isinstance(alpha, float) and alpha in _MEMBERS:
        return _MEMBERS[alpha]
    raise ValueError(f"omega must be Gini() or Shannon(), got {omega}")
