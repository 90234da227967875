"""Losses as modules, drop-in for ``torch.nn.CrossEntropyLoss`` (the classes are along ``dim``, −1 by default)."""

from __future__ import annotations

from torch import Tensor, nn

from fenchel.losses import Reduction, check_loss, fy_loss
from fenchel.regularizers import Gini, Norm, Regularizer, Tsallis
from fenchel.regularizers.base import check_omega


class FenchelYoungLoss(nn.Module):
    """The Fenchel-Young loss of any Ω between scores (…, C) and targets; :func:`fenchel.fy_loss` has the arguments.

    Example:
        >>> import torch, fenchel
        >>> criterion = fenchel.nn.FenchelYoungLoss(fenchel.Tsallis(1.5), ignore_index=0)
        >>> criterion(torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 9.0]]), torch.tensor([0, 2]))
        tensor(0.)
    """

    weight: Tensor | None

    def __init__(
        self,
        omega: Regularizer,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        dim: int | tuple[int, int] = -1,
    ) -> None:
        super().__init__()
        self.omega = check_omega(omega)
        check_loss(weight, ignore_index, label_smoothing, reduction)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.label_smoothing = label_smoothing
        self.dim = dim

    def forward(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """The loss of scores against class indices or probabilities; ``mask`` is True where a class is allowed."""
        return fy_loss(
            scores,
            target,
            self.omega,
            dim=self.dim,
            mask=mask,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        weight = "" if self.weight is None else f"weight of {len(self.weight)} classes, "
        return (
            f"{weight}ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing:g}, dim={self.dim}"
        )


class SparsemaxLoss(FenchelYoungLoss):
    """The sparsemax loss, in place of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.SparsemaxLoss()(torch.tensor([[0.5, 0.0]]), torch.tensor([0]))
        tensor(0.0625)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        dim: int = -1,
    ) -> None:
        super().__init__(Gini(), weight, ignore_index, reduction, label_smoothing, dim)


class EntmaxLoss(FenchelYoungLoss):
    """The entmax loss, in place of ``torch.nn.CrossEntropyLoss``; alpha fixed or learned.

    With ``learnable=True`` alpha is a parameter inside ``bounds``, initially ``alpha``, as in :class:`Entmax`.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.EntmaxLoss(1.5)(torch.tensor([[0.5, 0.0]]), torch.tensor([0]))
        tensor(0.1844)
    """

    def __init__(
        self,
        alpha: float | Tensor = 1.5,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        dim: int = -1,
        learnable: bool = False,
        bounds: tuple[float, float] = (1.0, 2.0),
    ) -> None:
        omega = Tsallis(alpha, learnable=learnable, bounds=bounds)
        super().__init__(omega, weight, ignore_index, reduction, label_smoothing, dim)


class NormmaxLoss(FenchelYoungLoss):
    """The normmax loss, in place of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.NormmaxLoss(2.0)(torch.tensor([[0.5, 0.0]]), torch.tensor([0]))
        tensor(0.0886)
    """

    def __init__(
        self,
        alpha: float | Tensor = 2.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        dim: int = -1,
    ) -> None:
        super().__init__(Norm(alpha), weight, ignore_index, reduction, label_smoothing, dim)
