"""Bounds and budgets: choices with a limit for each entry, and choices of k at once."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._checks import check_expands, check_parameter, check_real
from fenchel._torch import concrete, known
from fenchel.regularizers.base import Posed, Regularizer, check_omega, hold, show
from fenchel.regularizers.bounded import BOUNDED_GINI, BOUNDED_SHANNON, BoundedMap
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.packed import map_parts
from fenchel.regularizers.rowmap import Parameter
from fenchel.regularizers.rows import check_indices, check_scores, from_rows, on_device, parameter_rows, to_rows
from fenchel.regularizers.tsallis import Gini

_MEMBERS: dict[float, BoundedMap] = {1.0: BOUNDED_SHANNON, 2.0: BOUNDED_GINI}


@written_by("upper", "omega")
class Capped(Regularizer):
    r"""The Ω of a base regularizer, restricted to distributions with :math:`p \le u`, entry by entry.

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
        self.rule = _member(self.omega)
        hold(self, "upper", _check_upper(upper))

    def canonical(self) -> tuple[Regularizer, float | Tensor]:
        """The base, where the bound is a number that is not below 1."""
        free = not isinstance(self.upper, Tensor) and self.upper >= 1
        return self.omega.canonical() if free else (self, 1.0)

    def line(self, scores: Tensor, dim: int = -1) -> Tensor | None:
        """The threshold for one bound and the base Gini; −inf where the bounds sum to less than 1. Else None."""
        if isinstance(self.upper, Tensor) or self.rule is BOUNDED_SHANNON:
            return None
        return _line(scores, self.upper, 1.0, dim)

    @property
    def margin(self) -> float | Tensor | None:
        """The margin of the base if every bound is at least 1, else inf. None where values cannot be read."""
        if isinstance(self.upper, Tensor) and not concrete(self.upper):
            return None
        enough = bool((self.upper >= 1).all()) if isinstance(self.upper, Tensor) else self.upper >= 1
        return self.omega.margin if enough else math.inf

    def loss(self, scores: Tensor, target: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The Fenchel-Young loss, one value per row; +inf for targets that exceed their bounds."""
        loss = super().loss(scores, target, dim, mask)
        dim = check_scores(scores, dim)
        upper = torch.as_tensor(_upper_rows(self.upper, scores, dim), device=scores.device)
        upper = upper.expand(scores.movedim(dim, -1).shape)
        if target.is_floating_point():
            slack = 4 * torch.finfo(target.dtype).eps
            excluded = (target.movedim(dim, -1) > upper * (1 + slack)).any(-1)
        else:
            excluded = upper.gather(-1, target.long().unsqueeze(-1)).squeeze(-1) < 1
        return loss + torch.where(excluded, torch.inf, 0.0).to(loss.dtype)

    def extra_repr(self) -> str:
        return f"upper={show(self.upper)}"

    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        """The base's Ω(p), whatever the bounds."""
        value: Tensor = self.omega(p, dim)
        return value

    def _pose(self, scores: Tensor, dim: int, mask: Tensor | None = None) -> Posed:
        return _posed(self.rule, scores, self.upper, 1.0, dim, mask)  # type: ignore[arg-type]


@written_by("k")
class KSubsets(Regularizer):
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

    rule = BOUNDED_GINI
    parameter_name = "k"
    k: float | Tensor

    def __init__(self, k: float | Tensor) -> None:
        super().__init__()
        hold(self, "k", _check_k(k))

    @property
    def name(self) -> str:
        return "k_subsets"

    @property
    def margin(self) -> float:
        """1: k-hot once the k-th best score leads the next by one."""
        return 1.0

    def canonical(self) -> tuple[Regularizer, float | Tensor]:
        """Gini for k = 1."""
        return (Gini() if not isinstance(self.k, Tensor) and self.k == 1 else self), 1.0

    def mass(self, count: int | Tensor) -> float | Tensor:
        """k, or the number of unmasked entries if that is less."""
        if isinstance(count, Tensor):
            count = count if count.is_floating_point() else count.float()
            return count.clamp_max(on_device(self.k, count) if isinstance(self.k, Tensor) else self.k)
        return self.k.clamp_max(count) if isinstance(self.k, Tensor) else min(self.k, float(count))

    def line(self, scores: Tensor, dim: int = -1) -> Tensor:
        """The threshold: the least s − p of the support; −inf where there are fewer than k entries."""
        return _line(scores, 1.0, self.k, dim)

    def check_target(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        """Check a target: entries in [0, 1] that sum to k, or to all unmasked entries if there are fewer."""
        if target.shape != scores.shape:
            raise ValueError(
                f"target must have the shape of scores, {tuple(scores.shape)}, with entries in [0, 1] that sum to k, "
                f"got shape {tuple(target.shape)}"
            )
        if not known(target, scores):
            return target
        rows = to_rows(scores, dim, mask)
        y = target.movedim(dim, -1).to(torch.promote_types(target.dtype, torch.float32))
        k = torch.as_tensor(self._masses(scores, dim, mask)).detach()
        if not known(k):
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

    def check_classes(self, target: Tensor, scores: Tensor, dim: int, ignored: int | None = None) -> Tensor:
        """Check class indices, which name a vertex for k = 1 alone."""
        known = not isinstance(self.k, Tensor) or concrete(self.k)
        if not known or not bool(torch.as_tensor(self.k == 1, device="cpu").all()):
            raise ValueError(
                f"target must be a floating-point tensor of the shape of scores that sums to k = {show(self.k)}, such "
                f"as a k-hot vector, got {target.dtype}: convert with target.float(); class indices go with k = 1 only"
            )
        return check_indices(target, scores, dim, ignored)

    def _pose(self, scores: Tensor, dim: int, mask: Tensor | None = None) -> Posed:
        return _posed(BOUNDED_GINI, scores, 1.0, self.k, dim, mask)


def constrained_softmax(scores: Tensor, upper: float | Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Maximize a linear score plus Shannon's entropy over distributions with an upper bound for each entry.

    .. math:: \operatorname{argmax}_{p \in \Delta,\, p \le u} \; \langle p, s \rangle - \sum_i p_i \log p_i

    A softmax whose mass above a bound goes to the other entries: :math:`p = \min(u, e^{s - \tau})`. Softmax itself
    where every bound is 1 or more. Exact, in O(n log n) time.

    Args:
        scores: any shape, floating point.
        upper: bounds that are not negative: a number, or a tensor that broadcasts to ``scores``; differentiable. What
            is not masked must have bounds that sum to at least 1 in every row; where values cannot be read, in
            graphs, a row that falls short gets its bounds.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to ``scores``; True = may receive mass, as in :func:`entmax`.

    Returns:
        Probabilities, as those of :func:`entmax`.

    Example:
        >>> import torch, fenchel
        >>> fenchel.constrained_softmax(torch.tensor([3.0, 1.0, 0.0]), upper=torch.tensor([0.5, 0.5, 0.5]))
        tensor([0.5000, 0.3655, 0.1345])

    References: Martins & Kreutzer (2017).
    """
    return _choose(BOUNDED_SHANNON, scores, dim, mask, upper=_check_upper(upper))


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
    return _choose(BOUNDED_GINI, scores, dim, mask, upper=_check_upper(upper))


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
    return _choose(BOUNDED_GINI, scores, dim, mask, k=_check_k(k))


def _choose(
    rule: BoundedMap, scores: Tensor, dim: int, mask: Tensor | None, upper: Parameter = 1.0, k: Parameter = 1.0
) -> Tensor:
    """The choice with bounds and a sum, along a dimension."""
    joined = map_parts(partial(_choose, rule), scores, dim, mask, (rule.name, k, 1.0), upper=upper, k=k)
    return from_rows(_posed(rule, scores, upper, k, dim, mask).argmax(), scores, dim) if joined is None else joined


def _posed(
    rule: BoundedMap, scores: Tensor, upper: Parameter, budget: Parameter, dim: int, mask: Tensor | None
) -> Posed:
    """The problem on rows. Bounds that no distribution satisfies are refused."""
    dim = check_scores(scores, dim)
    rows = to_rows(scores, dim, mask)
    bounds = _upper_rows(upper, scores, dim)
    each = parameter_rows(budget, "k", scores, dim)
    if isinstance(each, Tensor):
        # No larger than the number of unmasked entries, beyond which nothing depends on it.
        count = (rows != -torch.inf).sum(-1, keepdim=True).to(rows.dtype)
        each = torch.where(each > count, count, each.to(rows.dtype))
    elif isinstance(bounds, Tensor) or bounds != 1.0:
        _check_room(rows, bounds, each)
    return Posed(rows, rule, (bounds, each))


def _line(scores: Tensor, upper: float, budget: Parameter, dim: int) -> Tensor:
    """The threshold of the projection onto 0 ≤ p ≤ upper with a sum; −inf where too few entries can hold it."""
    with torch.no_grad():
        rows = to_rows(scores, dim, None)
        each = parameter_rows(budget, "k", scores, check_scores(scores, dim))
        p = BOUNDED_GINI.argmax(rows, upper, each)
        level = torch.where(p > 0, rows - p, torch.inf).amin(-1, keepdim=True)
        room = upper * (rows > -torch.inf).sum(-1, keepdim=True) >= each
        return from_rows(torch.where(room & (level < torch.inf), level, -torch.inf), scores, dim)


def _check_upper(upper: float | Tensor) -> float | Tensor:
    upper = check_real(upper, "upper")
    if isinstance(upper, Tensor):  # only values at unmasked positions matter: _check_room checks those
        return upper
    return check_parameter(upper, "upper", 0.0, "upper >= 0", closed=True)


def _check_k(k: float | Tensor) -> float | Tensor:
    return check_parameter(k, "k", 0.0, "k >= 0", closed=True)


def _upper_rows(upper: float | Tensor, scores: Tensor, dim: int) -> float | Tensor:
    """Bounds laid out beside ``to_rows(scores)``, in their own precision; a number stays one."""
    if not isinstance(upper, Tensor):
        return upper
    check_expands(upper, "upper", scores)
    full = on_device(upper, scores).reshape((1,) * (scores.dim() - upper.dim()) + tuple(upper.shape))
    return full.movedim(dim, -1)


def _check_room(rows: Tensor, upper: float | Tensor, budget: float) -> None:
    """Refuse bounds that are negative or NaN, or that sum to less than the budget in a row with something to choose."""
    if not known(rows) or (isinstance(upper, Tensor) and not known(upper)):
        return
    bounds = torch.as_tensor(upper, dtype=None if isinstance(upper, Tensor) else rows.dtype, device=rows.device)
    wrong, room = _bound_sums(rows, bounds)
    if bool(wrong.any()):
        kept = torch.where(rows == -torch.inf, 0.0, bounds)
        raise ValueError(
            f"upper must not be negative or NaN, got an entry of {kept[~(kept >= 0)][0].item():g} "
            "at an unmasked position"
        )
    slack = min((8 + rows.shape[-1] ** 0.5) * torch.finfo(bounds.dtype).eps, 1 / 16)
    short = room < budget - slack
    if bool(short.any()) and bool((short := short & (rows != -torch.inf).any(-1)).any()):
        raise ValueError(
            f"upper must sum to at least {budget:g} over the unmasked entries of every row, got a row with sum "
            f"{room[short][0].item():.6g}"
        )


def _bound_sums(rows: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """How many bounds of unmasked entries are negative or NaN, and the sum of the bounds, of each row."""
    if upper.device.type == rows.device.type:
        kernel = kernels.find("bound_sums", "bounded", (), rows)
        if kernel is not None:
            wrong, total = kernel(rows, upper.to(rows.dtype).expand(rows.shape))
            return wrong, total
    bounds = torch.where(rows == -torch.inf, 0.0, upper)
    return (~(bounds >= 0)).sum(-1), bounds.sum(-1, dtype=torch.float64)


def _member(omega: Regularizer) -> BoundedMap:
    """The bounded counterpart of a base, if it has one."""
    inner, gamma = omega.canonical()
    alpha = inner.parameter
    numbers = isinstance(alpha, float) and isinstance(gamma, float)
    if inner.name == "tsallis" and numbers and alpha in _MEMBERS and gamma == 1:
        return _MEMBERS[alpha]  # type: ignore[index]
    raise ValueError(f"omega must be Gini() or Shannon(), got {omega}")
