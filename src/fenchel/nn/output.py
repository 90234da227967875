"""Output layers with their loss, in place of ``torch.nn.Linear`` and ``CrossEntropyLoss``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fenchel._checks import check_count, check_flag
from fenchel.losses import Reduction, check_loss
from fenchel.regularizers import Tsallis, entmax
from fenchel.streaming.linear_loss import check_alpha, linear_entmax_loss


class LinearEntmaxLoss(nn.Linear):
    """A linear output layer that returns its entmax loss and never holds all logits; see :func:`linear_entmax_loss`.

    The ``state_dict`` is that of ``torch.nn.Linear``, with a learned alpha and class weights if there are any.

    Args:
        in_features: the width of the hidden states.
        out_features: the number of classes.
        bias: whether to learn one.
        alpha: a number in [1, 2], or a tensor with one element; to learn it, say ``learnable=True``. (An
            ``nn.Parameter`` is trained too, but nothing keeps it inside [1, 2].)
        ignore_index: a target that is left out of the loss and of the mean.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        learnable: train alpha too, from the given start, always inside (1, 2).
        class_weight: (out_features,), a factor for each class; saved with the layer.
        label_smoothing: the share, in [0, 1], of each target that is spread over all classes.
        **factory: ``device`` and ``dtype`` of the parameters.

    Example:
        >>> import torch, fenchel
        >>> layer = fenchel.nn.LinearEntmaxLoss(8, 1000)
        >>> hidden = torch.randn(2, 5, 8)  # (batch, length, width)
        >>> layer(hidden, torch.zeros(2, 5, dtype=torch.long)).backward()
        >>> layer.weight.grad.shape, layer.probabilities(hidden).shape
        (torch.Size([1000, 8]), torch.Size([2, 5, 1000]))
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        alpha: float | Tensor = 1.5,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        learnable: bool = False,
        class_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        **factory: Any,
    ) -> None:
        sizes = check_count(in_features, "in_features"), check_count(out_features, "out_features")
        check_alpha(alpha)
        check_loss(class_weight, ignore_index, label_smoothing, reduction, "class_weight")
        super().__init__(*sizes, check_flag(bias, "bias"), **factory)
        self.omega = Tsallis(alpha, learnable=learnable)
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.register_buffer("class_weight", class_weight)
        self.label_smoothing = label_smoothing

    @property
    def alpha(self) -> float | Tensor:
        """The current entropic index."""
        return self.omega.alpha

    def __call__(self, hidden: Tensor, target: Tensor) -> Tensor:
        """``forward``. Hooks get the target by name: ColwiseParallel passes on one positional argument alone."""
        loss: Tensor = super().__call__(hidden, target=target)
        return loss

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """The loss of hidden states, (…, in_features), against class indices, (…)."""
        return linear_entmax_loss(
            hidden,
            self.weight,
            target,
            self.bias,
            alpha=self.alpha,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            class_weight=self.class_weight,
            label_smoothing=self.label_smoothing,
        )

    def probabilities(self, hidden: Tensor) -> Tensor:
        """The sparse distributions over classes, (…, out_features), that the loss trains."""
        return entmax(super().forward(hidden), self.alpha)

    def extra_repr(self) -> str:
        weight = "" if self.class_weight is None else f", weight of {len(self.class_weight)} classes"
        return (
            f"{super().extra_repr()}, {self.omega.extra_repr()}, ignore_index={self.ignore_index}, "
            f"reduction={self.reduction!r}{weight}, label_smoothing={self.label_smoothing:g}"
        )
