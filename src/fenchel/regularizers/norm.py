"""Norm-entropy regularizer: distributions that are nearly uniform over a chosen support."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fenchel._checks import check_parameter
from fenchel._torch import known, tracks
from fenchel.regularizers.base import Regularizer, hold
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.derivatives import on_support, split_finite
from fenchel.regularizers.operators import register_map
from fenchel.regularizers.packed import takes_packed_itself
from fenchel.regularizers.rowmap import Parameter, ParameterMap
from fenchel.regularizers.rows import from_rows, parameter_rows, to_rows
from fenchel.regularizers.solvers import thresholds

_ALLOWED = "1 < alpha <= inf"


class _NormMap(ParameterMap):
    """Ω(p) = ‖p‖_α − 1. With N = ‖p‖_α and r = p/N: ∇Ω = r^(α−1), Hessian ((α−1)/N)(diag(r^(α−2)) − ∇Ω ∇Ωᵀ)."""

    name = "norm"
    zero_at_vertices = True
    rounded_derivatives = True

    def value(self, p: Tensor, a: Parameter, *, masked: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return _norm(p, a).squeeze(-1) - 1

    def solve(self, z: Tensor, a: Parameter) -> Tensor:
        p = thresholds.normmax(z, a - 1)
        return p.masked_fill(~(a > 1), torch.nan) if isinstance(a, Tensor) and not known(a) else p

    def product(self, v: Tensor, z: Any, p: Tensor, a: Parameter) -> Tensor:
        """J = (N/(α−1)) (I − p1ᵀ) diag(r^(2−α)) (I − 1pᵀ) on the support.

        From dp in the kernel of 1ᵀ with H dp + 1 dμ = v, where Hp = 0 gives dμ = ⟨p, v⟩.
        """
        if isinstance(a, Tensor):
            a, finite = split_finite(a)
            return torch.where(finite, self._finite_product(v, p, a), 0.0 * p)
        return 0.0 * p * v if math.isinf(a) else self._finite_product(v, p, a)

    def _finite_product(self, v: Tensor, p: Tensor, a: Parameter) -> Tensor:
        if not tracks(v, p, a):
            return _plain_product(on_support(v, p), p, a)
        support = p != 0
        weight = torch.where(support, _ratio(p, a).pow(2 - a), 0.0).clamp_max(torch.finfo(p.dtype).max)
        v = on_support(v, p)
        product = _finite_norm(p, a, support_only=True) / (a - 1) * weight * (v - (p * v).sum(-1, keepdim=True))
        return product - p * product.sum(-1, keepdim=True)

    def value_sensitivity(self, z: Any, p: Tensor, a: Tensor) -> Tensor:
        a, finite = split_finite(a)
        return torch.where(finite, _finite_norm(p, a, support_only=True) * _log_norm_slope(p, a), 0.0)

    def gradient_sensitivity(self, z: Any, p: Tensor, a: Tensor) -> Tensor:
        a, finite = split_finite(a)
        r = _ratio(p, a)
        change = r.pow(a - 1) * (r.log() - (a - 1) * _log_norm_slope(p, a))
        return torch.where(finite & (p != 0), change, 0.0)


def _plain_product(v: Tensor, p: Tensor, a: Parameter) -> Tensor:
    """The product of ``_NormMap`` without derivatives, in fewer operators; v is zero where p is."""
    largest = p.amax(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    relative = p / largest
    norm = relative.pow(a).sum(-1, keepdim=True).pow(1 / a)
    weight = (relative / norm).pow(2 - a).masked_fill(p == 0, 0.0).clamp_max(torch.finfo(p.dtype).max)
    product = largest * norm / (a - 1) * weight * (v - (p * v).sum(-1, keepdim=True))
    return product - p * product.sum(-1, keepdim=True)


def _norm(p: Tensor, a: Parameter) -> Tensor:
    """‖p‖_α along the last dimension, which is kept; max p at α = ∞."""
    if isinstance(a, Tensor):
        a, finite = split_finite(a)
        return torch.where(finite, _finite_norm(p, a), p.amax(-1, keepdim=True))
    return p.amax(-1, keepdim=True) if math.isinf(a) else _finite_norm(p, a)


def _finite_norm(p: Tensor, a: Parameter, support_only: bool = False) -> Tensor:
    """‖p‖_α. With ``support_only`` zeros of p are constants, so that their infinite higher derivatives play no role."""
    largest = p.detach().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest)  # the norm does not depend on it, its rounding does
    # At p = 0 the power has derivatives in p, but none in α, where 0^α log 0 would be NaN.
    at_zero = 0.0 if support_only else (p / scale).pow(a.detach() if isinstance(a, Tensor) else a)
    terms = torch.where(p == 0, at_zero, torch.where(p == 0, 1.0, p / scale).pow(a))
    total = terms.sum(-1, keepdim=True)
    # A row of zeros has norm 0; the power 1/α must not see it, its slope there is infinite.
    return torch.where(largest == 0, 0.0, scale * torch.where(largest == 0, 1.0, total).pow(1 / a))


def _ratio(p: Tensor, a: Parameter) -> Tensor:
    """p / ‖p‖_α on the support, 1 elsewhere."""
    return torch.where(p == 0, 1.0, p / torch.where(p == 0, 1.0, _finite_norm(p, a, support_only=True)))


def _best_ratio(p: Tensor, a: Parameter) -> Tensor:
    """max p / ‖p‖_α, at most 1."""
    return (p / _finite_norm(p, a)).amax(-1, keepdim=True).clamp_max(1.0)


def _log_norm_slope(p: Tensor, a: Tensor) -> Tensor:
    """∂ log‖p‖_α / ∂α = (1/α) Σ r^α log r."""
    r = _ratio(p, a)
    return (r.pow(a) * r.log()).sum(-1, keepdim=True) / a


NORM = _NormMap()
register_map(NORM)


@written_by("alpha")
class Norm(Regularizer):
    r"""Norm negentropy, :math:`\Omega(p) = \|p\|_\alpha - 1`. Argmax: normmax. Margin: 1, whatever alpha.

    Args:
        alpha: a number in (1, inf], or a tensor with one value per row or per head (size 1 along ``dim``).

    Example:
        >>> import torch
        >>> from fenchel import Norm
        >>> Norm(5.0).argmax(torch.tensor([1.0, 0.8, -1.0]))
        tensor([0.5221, 0.4779, 0.0000])
        >>> Norm(float("inf")).argmax(torch.tensor([1.0, 0.8, -1.0]))
        tensor([0.5000, 0.5000, 0.0000])

    References: Blondel, Martins & Niculae (2020), section 4.3; Santos et al. (2024), appendix B.
    """

    rule = NORM
    alpha: float | Tensor

    def __init__(self, alpha: float | Tensor = 2.0) -> None:
        super().__init__()
        hold(self, "alpha", check_parameter(alpha, "alpha", 1.0, _ALLOWED))

    @takes_packed_itself
    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return NORM.choose(scores, dim, mask, "alpha", self.alpha)

    def line(self, scores: Tensor, dim: int = -1) -> Tensor:
        """The threshold of the support: s − (p/‖p‖)^(alpha−1) at the best score."""
        with torch.no_grad():
            rows = to_rows(scores, dim, None)
            a = parameter_rows(self.alpha, "alpha", scores, dim)
            top = rows.amax(-1, keepdim=True)
            p = NORM.argmax(rows, a)
            # At alpha = ∞ the support is even, and the excesses over the threshold sum to 1.
            even = (torch.where(p > 0, rows, 0.0).sum(-1, keepdim=True) - 1) / (p > 0).sum(-1, keepdim=True)
            if isinstance(a, Tensor):
                a, finite = split_finite(a)
                level = torch.where(finite, top - _best_ratio(p, a).pow(a - 1), even)
            else:
                level = even if math.isinf(a) else top - _best_ratio(p, a).pow(a - 1)
            return from_rows(torch.where(top == -torch.inf, top, level), scores, dim)

    @property
    def margin(self) -> float:
        """1: a lead of one takes all."""
        return 1.0


def normmax(scores: Tensor, alpha: float | Tensor = 2.0, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Maximize a linear score minus the α-norm over the simplex.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - (\|p\|_\alpha - 1)

    Sparse for every alpha > 1; as alpha grows the weights on the support even out, and at inf they are equal.

    On the CPU a few passes over each row, without a sort. Other devices sort if alpha is 2 or inf; else the number of
    passes does not depend on the scores.

    Arguments and result as in :func:`entmax`, but for alpha, which is in (1, inf].

    Example:
        >>> import torch, fenchel
        >>> fenchel.normmax(torch.tensor([1.0, 0.8, -1.0]), alpha=5.0)
        tensor([0.5221, 0.4779, 0.0000])

    References: Santos et al. (2024), appendix B.
    """
    alpha = check_parameter(alpha, "alpha", 1.0, _ALLOWED)
    return NORM.choose(scores, dim, mask, "alpha", alpha)
