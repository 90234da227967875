"""Norm-entropy regularizer: distributions that are nearly uniform over a chosen support."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel.regularizers import thresholds
from fenchel.regularizers.base import Regularizer, hold, show
from fenchel.regularizers.family import Family, Parameter
from fenchel.regularizers.rows import check_parameter, from_rows, parameter_rows, to_rows

_ALLOWED = "1 < alpha <= inf"


class _NormFamily(Family):
    """Ω(p) = ‖p‖_α − 1. With N = ‖p‖_α and r = p/N: ∇Ω = r^(α−1), Hessian ((α−1)/N)(diag(r^(α−2)) − ∇Ω ∇Ωᵀ)."""

    name = "norm"

    def value(self, p: Tensor, a: Parameter) -> Tensor:
        return _norm(p, a).squeeze(-1) - 1

    def solve(self, z: Tensor, a: Parameter) -> Tensor:
        return thresholds.normmax(z, a - 1)

    def jacobian_product(self, v: Tensor, p: Tensor, a: Parameter) -> Tensor:
        """J = (N/(α−1)) (I − p1ᵀ) diag(r^(2−α)) (I − 1pᵀ) on the support.

        From dp in the kernel of 1ᵀ with H dp + 1 dμ = v, where Hp = 0 gives dμ = ⟨p, v⟩.
        """
        a, finite = _finite(a)
        support = p != 0
        norm = _norm(p, a)
        r = torch.where(support, p / torch.where(norm == 0, 1.0, norm), 1.0)
        weight = torch.where(support, r.pow(2 - a), 0.0).clamp_max(torch.finfo(p.dtype).max)
        v = torch.where(support, v, 0.0)
        product = norm / (a - 1) * weight * (v - (p * v).sum(-1, keepdim=True))
        product = product - p * product.sum(-1, keepdim=True)
        return torch.where(finite, product, 0.0 * p)

    def value_sensitivity(self, p: Tensor, a: Tensor) -> Tensor:
        a, finite = _finite(a)
        return torch.where(finite, _norm(p, a) * _log_norm_slope(p, a), 0.0)

    def gradient_sensitivity(self, p: Tensor, a: Tensor) -> Tensor:
        a, finite = _finite(a)
        r = _ratio(p, a)
        change = r.pow(a - 1) * (r.log() - (a - 1) * _log_norm_slope(p, a))
        return torch.where(finite & (p != 0), change, 0.0)


def _finite(a: Parameter) -> tuple[Parameter, Tensor]:
    """Alpha with infinities replaced by a number, and where it was finite."""
    a = torch.as_tensor(a) if not isinstance(a, Tensor) else a
    finite = a != torch.inf
    return torch.where(finite, a, 2.0), finite


def _norm(p: Tensor, a: Parameter) -> Tensor:
    """‖p‖_α along the last dimension, which is kept; max p at α = ∞."""
    largest = p.detach().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest)
    if not isinstance(a, Tensor):
        if math.isinf(a):
            return p.amax(-1, keepdim=True)
        return scale * (p / scale).pow(a).sum(-1, keepdim=True).pow(1 / a)
    finite = a != torch.inf
    a = torch.where(finite, a, 2.0)
    norm = scale * (p / scale).pow(a).sum(-1, keepdim=True).pow(1 / a)
    return torch.where(finite, norm, p.amax(-1, keepdim=True))


def _ratio(p: Tensor, a: Tensor) -> Tensor:
    """p / ‖p‖_α on the support, 1 elsewhere."""
    return torch.where(p == 0, 1.0, p / torch.where(p == 0, 1.0, _norm(p, a)))


def _log_norm_slope(p: Tensor, a: Tensor) -> Tensor:
    """∂ log‖p‖_α / ∂α = (1/α) Σ r^α log r."""
    r = _ratio(p, a)
    return (r.pow(a) * r.log()).sum(-1, keepdim=True) / a


_FAMILY = _NormFamily()


class Norm(Regularizer):
    r"""Norm negentropy, :math:`\Omega(p) = \|p\|_\alpha - 1`. Argmax: normmax. Margin: 1, whatever alpha.

    Args:
        alpha: a number in (1, inf], or a tensor with one value a row or a head (size 1 along ``dim``).

    Example:
        >>> import torch
        >>> from fenchel import Norm
        >>> Norm(5.0).argmax(torch.tensor([1.0, 0.8, -1.0]))
        tensor([0.5282, 0.4718, 0.0000])
        >>> Norm(float("inf")).argmax(torch.tensor([1.0, 0.8, -1.0]))
        tensor([0.5000, 0.5000, 0.0000])

    References: Blondel, Martins & Niculae (2020), section 4.3; Santos et al. (2024), appendix B.
    """

    family = _FAMILY
    alpha: float | Tensor

    def __init__(self, alpha: float | Tensor = 2.0) -> None:
        super().__init__()
        hold(self, "alpha", check_parameter(alpha, "alpha", 1.0, _ALLOWED))

    @property
    def parameter(self) -> Parameter:
        return self.alpha

    @property
    def margin(self) -> float:
        """1: a lead of one takes all."""
        return 1.0

    def extra_repr(self) -> str:
        return f"alpha={show(self.alpha)}"


def normmax(scores: Tensor, alpha: float | Tensor = 2.0, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Maximize a linear score minus the α-norm over the simplex.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - (\|p\|_\alpha - 1)

    Sparse for every alpha > 1; as alpha grows the weights on the support even out, and at inf they are equal.
    O(n log n) time: a sort, then a few vectorised passes.

    Args:
        scores: any shape, floating point.
        alpha: a number in (1, inf], or a tensor that broadcasts to ``scores`` with size 1 along ``dim``; differentiable.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to ``scores``; True = may receive mass. Scores of −inf are masked too.

    Returns:
        Probabilities of the shape and dtype of ``scores``; rows with nothing unmasked are zero.

    Example:
        >>> import torch, fenchel
        >>> fenchel.normmax(torch.tensor([1.0, 0.8, -1.0]), alpha=5.0)
        tensor([0.5282, 0.4718, 0.0000])

    References: Santos et al. (2024), appendix B.
    """
    alpha = check_parameter(alpha, "alpha", 1.0, _ALLOWED)
    rows = to_rows(scores, dim, mask)
    return from_rows(_FAMILY.argmax(rows, parameter_rows(alpha, "alpha", scores, dim)), scores, dim)
