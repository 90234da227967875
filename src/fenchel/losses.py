"""Fenchel-Young losses with the arguments of ``torch.nn.functional.cross_entropy``."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from fenchel._checks import check_device, check_floats, check_integer, check_number, check_one_of
from fenchel._torch import autocast_dtype, concrete, distributed_rule, is_distributed, known
from fenchel.regularizers.base import Regularizer, check_omega, simplified
from fenchel.regularizers.norm import Norm
from fenchel.regularizers.packed import Packed, on_packed, packed_dims
from fenchel.regularizers.rows import apply_mask, check_scores
from fenchel.regularizers.tsallis import Gini, Tsallis

__all__ = ["entmax_loss", "fy_loss", "normmax_loss", "sparsemax_loss"]

Reduction = Literal["none", "mean", "sum"]
_REDUCTIONS = ("none", "mean", "sum")


def fy_loss(
    scores: Tensor,
    target: Tensor,
    omega: Regularizer,
    *,
    dim: int | tuple[int, int] = -1,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""The Fenchel-Young loss of any regularizer.

    .. math:: L_\Omega(s, y) = \Omega^*(s) + \Omega(y) - \langle s, y \rangle

    Convex in the scores, never negative, zero exactly where :math:`\operatorname{argmax}_\Omega(s) = y`, with gradient
    :math:`\operatorname{argmax}_\Omega(s) - y`. For class indices Shannon's is cross-entropy; for soft targets and
    label smoothing it has cross-entropy's gradient and differs by the constant :math:`\Omega(y)`.

    The classes are along ``dim``, the last dimension by default, and not along dimension 1 as in torch: for scores
    (N, C, …) pass ``dim=1``. A target of the other layout is refused where the sizes differ; for scores (N, C, C) they
    do not.

    Args:
        scores: any shape, with the classes along ``dim``. Also a jagged nested tensor, with soft targets and masks that
            are nested likewise, and class indices per row: nested, or dense and one per sequence if ``dim`` is ragged.
        target: class indices (integers, shape of scores without ``dim``) or probabilities (shape of scores); for
            ``KSubsets`` a floating-point vector of ones and zeros, or anything between, that sums to its k; for
            ``SparseMAP`` what its own ``loss`` takes.
        omega: the regularizer.
        dim: the class dimension; for ``TotalVariation2d`` the pair of the grid, the last two by default.
        mask: boolean, broadcasts to ``scores``; True = may receive mass. A masked target has loss +inf.
        weight: a factor for each class; with class indices only.
        ignore_index: a target that is left out of the loss and of the mean; with class indices only.
        label_smoothing: the share, in [0, 1], of each target that is spread over the unmasked classes.
        reduction: ``"none"``, ``"mean"`` (weighted, as in ``cross_entropy``) or ``"sum"``.

    Returns:
        A scalar, or the loss of every row for ``reduction="none"``.

    Example:
        >>> import torch, fenchel
        >>> scores = torch.tensor([[3.0, 0.0, 0.0], [0.5, 0.0, 0.0]], requires_grad=True)
        >>> loss = fenchel.fy_loss(scores, torch.tensor([0, 0]), fenchel.Gini(), reduction="none")
        >>> loss
        tensor([0.0000, 0.0833], grad_fn=<ClassLossBackward>)
        >>> loss.sum().backward()
        >>> scores.grad
        tensor([[ 0.0000,  0.0000,  0.0000],
                [-0.3333,  0.1667,  0.1667]])

    References: Blondel, Martins & Niculae (2020).
    """
    _check_options(target, weight, ignore_index, label_smoothing, reduction)
    omega = simplified(check_omega(omega))
    if isinstance(scores, Tensor) and scores.is_nested:
        options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return _packed_loss(scores, target, omega, dim, mask, reduction, options)
    if is_distributed(scores, target, mask, weight):
        found: Tensor = distributed_rule("loss")(
            fy_loss, scores, target, omega, dim, mask, weight, ignore_index, label_smoothing, reduction
        )
        return found
    if isinstance(scores, Tensor):
        scores, target, dim, mask, omega = omega.in_rows(scores, target, dim, mask)
    dim = check_scores(scores, dim)  # type: ignore[arg-type]
    check_device(scores, "scores", target=target, weight=weight)
    narrow = scores.dtype in (torch.float16, torch.bfloat16)
    # As with cross_entropy, autocast means a float32 loss; otherwise it has the dtype of the scores.
    dtype = torch.float32 if narrow and autocast_dtype(scores.device) is not None else scores.dtype
    exact = torch.float32 if narrow else scores.dtype
    if narrow and (target.is_floating_point() or label_smoothing or not omega.reads_half(scores)):
        scores = scores.float()
    if target.is_floating_point():
        if weight is not None:
            raise ValueError(
                "weight goes with class indices only; scale the rows of soft targets after reduction='none'"
            )
        if label_smoothing:
            target = omega.check_target(target, scores, dim, mask).to(scores.dtype)
            target = _smooth(omega.balance(target, scores, dim, mask), label_smoothing, scores, dim, mask)
        return reduced(omega.loss(scores, target, dim, mask), None, reduction).to(dtype)

    if weight is None and not label_smoothing and _keeps_all(target, ignore_index):
        index = omega.check_classes(target, scores, dim, ignore_index)
        return omega.reduced_class_loss(scores, index, dim, mask, reduction).to(dtype)
    kept = is_kept(target, ignore_index)
    index = omega.check_classes(target.masked_fill(~kept, 0), scores, dim, ignore_index)
    weights = kept.to(exact)
    if weight is not None:
        each = _along(weight.to(scores.device, exact), scores, dim)
        weights = weights * each.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    if label_smoothing:
        # Cross-entropy's target is the measure t = (1−ε) w_y e_y + ε w∘u. As a loss of the scores, |t| times that of
        # the distribution t/|t| has the same gradient, |t| p − t.
        scores = torch.where(kept.unsqueeze(dim), scores, 0.0)  # the scores of ignored rows do not matter
        one_hot = torch.zeros_like(scores).scatter(dim, index.unsqueeze(dim), 1.0)
        measure = _smooth(one_hot, label_smoothing, scores, dim, mask)
        measure = measure if weight is None else measure * each
        mass = measure.sum(dim, keepdim=True)
        soft = torch.where(mass > 0, measure / torch.where(mass > 0, mass, 1.0), one_hot)
        loss = torch.where(kept, mass.squeeze(dim) * omega.loss(scores, soft, dim, mask), 0.0)
    else:
        loss = omega.class_loss(scores, torch.where(kept, index, -1), dim, mask)
        loss = loss if weight is None else torch.where(kept, weights * loss, 0.0)
    return reduced(loss, weights, reduction).to(dtype)


def _packed_loss(
    scores: Tensor,
    target: Tensor,
    omega: Regularizer,
    dim: Any,
    mask: Tensor | None,
    reduction: Reduction,
    options: dict[str, Any],
) -> Tensor:
    """The loss of packed scores: the rows are those of all sequences, or one per sequence where ``dim`` is ragged."""
    packed = Packed(scores)
    dims, others = packed_dims(omega, packed, dim), {"target": target, "mask": mask}
    if packed.ragged not in dims:  # a mean is one over all rows
        return on_packed(
            partial(fy_loss, omega=omega, reduction=reduction, **options), packed, dim, dims, others, per_row=True
        )
    kept = None if target.is_floating_point() or target.is_nested else is_kept(target, options["ignore_index"])
    if options["weight"] is not None:
        raise ValueError("weight goes with as many classes for each row: not where dim is the ragged one")
    call = partial(fy_loss, omega=omega, reduction="none", **options)
    loss = on_packed(call, packed, dim, dims, others, per_row=True, kept=kept)
    return reduced(loss, None if kept is None else kept.to(loss.dtype), reduction)


class LossOptions(TypedDict, total=False):
    """The keyword arguments that all losses share; :func:`fy_loss` explains them."""

    dim: int
    mask: Tensor | None
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: Reduction


def sparsemax_loss(scores: Tensor, target: Tensor, **options: Unpack[LossOptions]) -> Tensor:
    """The loss of sparsemax: :func:`fy_loss` with ``Gini()``. Zero at a lead of 1.

    The classes are along ``dim``, −1 by default; torch's layout (N, C, …) is ``dim=1``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.sparsemax_loss(torch.tensor([[0.5, 0.0], [2.0, 0.0]]), torch.tensor([0, 0]), reduction="none")
        tensor([0.0625, 0.0000])

    References: Martins & Astudillo (2016).
    """
    return fy_loss(scores, target, _omega(Gini), **options)


def entmax_loss(scores: Tensor, target: Tensor, alpha: float | Tensor = 1.5, **options: Unpack[LossOptions]) -> Tensor:
    """The loss of α-entmax: :func:`fy_loss` with ``Tsallis(alpha)``. Zero at a lead of 1/(alpha − 1).

    Cross-entropy at alpha 1, the sparsemax loss at 2; differentiable in a tensor alpha too. The classes are along
    ``dim``, −1 by default; torch's layout (N, C, …) is ``dim=1``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.entmax_loss(torch.tensor([[0.5, 0.0], [2.0, 0.0]]), torch.tensor([0, 0]), reduction="none")
        tensor([0.1844, 0.0000])

    References: Peters, Niculae & Martins (2019), section 3.2.
    """
    return fy_loss(scores, target, _omega(Tsallis, alpha), **options)


def normmax_loss(scores: Tensor, target: Tensor, alpha: float | Tensor = 2.0, **options: Unpack[LossOptions]) -> Tensor:
    """The loss of α-normmax: :func:`fy_loss` with ``Norm(alpha)``. Zero at a lead of 1.

    The classes are along ``dim``, −1 by default; torch's layout (N, C, …) is ``dim=1``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.normmax_loss(torch.tensor([[0.5, 0.0], [1.0, 0.0]]), torch.tensor([0, 0]), reduction="none")
        tensor([0.0886, 0.0000])

    References: Blondel, Martins & Niculae (2020), section 4.3.
    """
    return fy_loss(scores, target, _omega(Norm, alpha), **options)


def _omega(kind: type[Regularizer], *parameters: float | Tensor) -> Regularizer:
    """The Ω of a loss. Those of numbers are made once: to make one takes as long as the loss of some rows."""
    plain = {*map(type, parameters)} <= {float} and not torch.compiler.is_compiling()
    make: Any = _kept_omega if plain else kind
    omega: Regularizer = make(kind, *parameters) if plain else make(*parameters)
    return omega


@lru_cache
def _kept_omega(kind: type[Regularizer], *parameters: float) -> Regularizer:
    return kind(*parameters)


def _check_options(
    target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, reduction: str
) -> None:
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    if reduction not in _REDUCTIONS:
        check_reduction(reduction)
    if type(ignore_index) is not int:
        check_integer(ignore_index, "ignore_index")
    if type(label_smoothing) is not float or label_smoothing:
        check_smoothing(label_smoothing)
    if weight is not None and not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a tensor with one value per class, got {type(weight).__name__}")
    # Whether or not values are looked at: ``known`` raises if the memory was freed, before torch reads it.
    if weight is not None and known(weight) and label_smoothing and bool((weight < 0).any()):
        raise ValueError("weight must not be negative with label_smoothing: the smoothed target would not be a measure")


def check_reduction(reduction: str) -> None:
    """Check the argument ``reduction``."""
    check_one_of(reduction, "reduction", *_REDUCTIONS)


def check_smoothing(label_smoothing: float) -> None:
    """Check the argument ``label_smoothing``."""
    check_number(label_smoothing, "label_smoothing", 0, 1, ends="[]")


def check_loss(
    weight: Tensor | None, ignore_index: int, label_smoothing: float, reduction: str, name: str = "weight"
) -> None:
    """Check the arguments that all modules of losses share; ``name`` is that of the class weights."""
    check_reduction(reduction)
    check_integer(ignore_index, "ignore_index")
    check_smoothing(label_smoothing)
    if weight is not None:
        check_floats(weight, name, "C")


def is_kept(target: Tensor, ignore_index: int) -> Tensor:
    """Which class indices take part in the loss."""
    check_integer(ignore_index, "ignore_index")
    concrete(target)  # raises if its memory was freed, before torch reads it
    numbers = None if target.dtype == torch.bool or target.dtype.is_complex else torch.iinfo(target.dtype)
    if numbers is not None and numbers.min <= ignore_index <= numbers.max:
        return target != ignore_index
    return torch.ones_like(target, dtype=torch.bool)  # a comparison with what the dtype cannot hold would wrap around


def _keeps_all(target: Tensor, ignore_index: int) -> bool:
    """Whether it is known that every class index takes part in the loss."""
    if not known(target) or target.dtype == torch.bool or target.dtype.is_complex or not target.numel():
        return False
    low, high = target.aminmax()
    return not int(low) <= ignore_index <= int(high)


def _along(weight: Tensor, scores: Tensor, dim: int) -> Tensor:
    """One weight per class, laid out along the class dimension of the scores."""
    if weight.shape != scores.shape[dim : dim + 1]:
        raise ValueError(f"weight must have shape ({scores.shape[dim]},), one per class, got {tuple(weight.shape)}")
    return weight.reshape([-1 if d == dim else 1 for d in range(scores.dim())]).expand_as(scores)


def _smooth(target: Tensor, share: float, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """Spread a share of each target over the unmasked classes of its row, if there are any."""
    free = (apply_mask(scores.detach(), mask) != -torch.inf).to(scores.dtype)
    count = free.sum(dim, keepdim=True)
    even = target.sum(dim, keepdim=True) * free / count.clamp_min(1)
    return torch.where(count > 0, target + share * (even - target), target)


def reduced(loss: Tensor, weights: Tensor | None, reduction: Reduction) -> Tensor:
    """The losses of all rows, their sum, or their mean by weights; rows that are left out have loss and weight 0."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.mean() if weights is None else loss.sum() / weights.sum()
