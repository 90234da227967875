"""Baselines for mixed distributions: densities on the open simplex, built from torch's distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    MultivariateNormal,
    RelaxedOneHotCategorical,
    TransformedDistribution,
    constraints,
)
from torch.distributions.transforms import Transform

from fenchel._checks import check_floats, check_one_given

Concrete = RelaxedOneHotCategorical
"""The Gumbel-Softmax distribution, ``torch.distributions.RelaxedOneHotCategorical(temperature, logits=z)``."""


class StraightThroughConcrete(RelaxedOneHotCategorical):
    """A Concrete distribution whose ``rsample`` is one-hot, with the gradient of the relaxed sample.

    The gradient is biased, as straight-through gradients are; ``log_prob`` is that of the Concrete distribution.

    Example:
        >>> y = StraightThroughConcrete(torch.tensor(1.0), logits=torch.zeros(3))
        >>> sorted(y.rsample().tolist())
        [0.0, 0.0, 1.0]
    """

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        relaxed = super().rsample(torch.Size(sample_shape))
        hard = torch.zeros_like(relaxed).scatter(-1, relaxed.argmax(-1, keepdim=True), 1.0)
        return hard + (relaxed - relaxed.detach())


class AdditiveLogistic(Transform):
    """The bijection from x in ℝᴷ⁻¹ to softmax([x, 0]) in the open simplex."""

    domain = constraints.real_vector
    codomain = constraints.simplex
    bijective = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdditiveLogistic)

    __hash__ = Transform.__hash__

    def _call(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 1)).softmax(-1)

    def _inverse(self, y: Tensor) -> Tensor:
        return y[..., :-1].log() - y[..., -1:].log()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 1)).log_softmax(-1).sum(-1)

    def forward_shape(self, shape: Any) -> torch.Size:
        return torch.Size((*shape[:-1], shape[-1] + 1))

    def inverse_shape(self, shape: Any) -> torch.Size:
        return torch.Size((*shape[:-1], shape[-1] - 1))


class LogisticNormal(TransformedDistribution):
    r"""Softmax of a Gaussian: :math:`Y = \operatorname{softmax}(Z)`, :math:`Z \sim \mathcal{N}(\mu, \Sigma)`.

    The arguments are those of ``GaussianSparsemax``. ``torch.distributions.LogisticNormal`` is another distribution: it
    uses stick breaking. Densities are with respect to the first K − 1 coordinates.

    Example:
        >>> y = LogisticNormal(torch.zeros(3), scale=torch.ones(3))
        >>> y.log_prob(torch.full((3,), 1 / 3)).exp()
        tensor(2.4810)
    """

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor | None = None,
        scale_tril: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        check_one_given(scale=scale, scale_tril=scale_tril)
        check_floats(loc, "loc")
        if scale is not None:
            check_floats(scale, "scale")
        if scale_tril is not None:
            check_floats(scale_tril, "scale_tril", "…", "K", "K")
        if loc.dim() == 0 or (scale is not None and scale.dim() == 0):
            raise ValueError("loc and scale must have at least one dimension, got a scalar")
        factor = torch.diag_embed(scale) if scale is not None else scale_tril
        assert factor is not None
        if loc.shape[-1] < 2 or factor.shape[-1] != loc.shape[-1]:
            raise ValueError(f"loc must have at least two entries and the scale as many, got {tuple(loc.shape)}")
        spread = factor[..., :-1, :] - factor[..., -1:, :]
        base = MultivariateNormal(loc[..., :-1] - loc[..., -1:], spread @ spread.mT, validate_args=validate_args)
        super().__init__(base, AdditiveLogistic(), validate_args=validate_args)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> LogisticNormal:
        new: LogisticNormal = self._get_checked_instance(LogisticNormal, _instance)  # type: ignore[no-untyped-call]
        super().expand(torch.Size(batch_shape), _instance=new)  # type: ignore[no-untyped-call]
        return new
