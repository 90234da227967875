"""Tsallis entropies: from softmax over entmax and sparsemax to argmax, one family with one parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fenchel._checks import broadcasts, check_count, check_flag, check_number, check_parameter
from fenchel._operators import rows_first
from fenchel._torch import apply_function, known, nested_forward_mode, outside, tracks
from fenchel.regularizers.base import Regularizer, hold, range_of, show
from fenchel.regularizers.configs import register_kind, written_by
from fenchel.regularizers.derivatives import (
    on_support,
    recall,
    remember,
    saturate,
    saturated_sum,
    split_finite,
)
from fenchel.regularizers.operators import register_map
from fenchel.regularizers.packed import takes_packed_itself
from fenchel.regularizers.rowmap import Parameter, ParameterMap
from fenchel.regularizers.rows import beside, from_rows, to_rows
from fenchel.regularizers.solvers.thresholds import entmax_from_2, entmax_up_to_2

_ALLOWED = "0 < alpha <= inf"
_MOST_LEARNED = 1 << 20
_FARTHEST = 1e30


class _TsallisMap(ParameterMap):
    r"""Ω(p) = Σ (pᵅ − p) / (α(α−1)): Shannon's Σ p log p at α = 1, Gini's ½(‖p‖² − 1) at α = 2, 0 at α = ∞.

    With c = α − 1, ∇Ω(p) = ln_c(p) + constant, where ln_c(p) = (p^c − 1)/c, and the Hessian is diag(p^(α−2)).
    """

    name = "tsallis"
    zero_at_vertices = True
    rounded_derivatives = True

    def value(self, p: Tensor, a: Parameter, *, masked: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if isinstance(a, Tensor):
            a, finite = split_finite(a)
            return torch.where(finite, _p_tsallis_log(p, a - 1) / a, 0.0).sum(-1)
        if a == 1:
            return _negative_entropy(p).sum(-1)
        if math.isinf(a):
            return torch.zeros_like(p[..., 0])
        if abs(a - 1) < 0.25:
            return _p_tsallis_log(p, p.new_full((), a - 1)).sum(-1) / a
        return (p.pow(a) - p).sum(-1) / (a * (a - 1))

    def solve(self, z: Tensor, a: Parameter) -> Tensor:
        if isinstance(a, Tensor):
            finite_a, finite = split_finite(a)
            c = finite_a - 1
            if known(a) and bool((a <= 2).all()):
                return entmax_up_to_2(z, c)
            p = torch.where(c > 1, entmax_from_2(z, c.clamp_min(1)), entmax_up_to_2(z, c.clamp_max(1)))
            p = torch.where(finite, p, _one_hot(z))
            return p if known(a) else p.masked_fill(~(a > 0), torch.nan)  # values that were not checked
        if a == 1:
            return torch.softmax(z, -1)
        if math.isinf(a):
            return _one_hot(z)
        return entmax_up_to_2(z, a - 1) if a <= 2 else entmax_from_2(z, a - 1)

    def product(self, v: Tensor, z: Any, p: Tensor, a: Parameter) -> Tensor:
        """J = diag(s) − ssᵀ/‖s‖₁ with s = p^(2−α) on the support (002, Proposition 1)."""
        v = on_support(v, p)
        if not isinstance(a, Tensor) and a <= 2 and not tracks(v, p):
            s = p.sign() if a == 2 else p if a == 1 else p.pow(2 - a)
            total = s.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)  # 0 in a row without a choice
            return s * (v - (s * v).sum(-1, keepdim=True) / total)
        if isinstance(a, Tensor):
            a, finite = split_finite(a)
            return torch.where(finite, _steep_product(v, p, a), 0.0)
        if math.isinf(a):
            return 0.0 * p * v
        if a > 2:
            return _steep_product(v, p, a)
        support = p != 0
        s = p if a == 1 else torch.where(support, torch.where(support, p, 1.0).pow(2 - a), 0.0)
        total = s.sum(-1, keepdim=True)
        mean = (s * v).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total)
        return s * (v - mean)

    def value_sensitivity(self, z: Any, p: Tensor, a: Tensor) -> Tensor:
        a, finite = split_finite(a)
        change = p * _tsallis_log_slope(p, a - 1) / a - _p_tsallis_log(p, a - 1) / a**2
        return torch.where(finite, change, 0.0).sum(-1, keepdim=True)

    def gradient_sensitivity(self, z: Any, p: Tensor, a: Tensor) -> Tensor:
        a, finite = split_finite(a)
        return torch.where(finite, _tsallis_log_slope(p, a - 1), 0.0)


def _one_hot(z: Tensor) -> Tensor:
    """argmax of rows with largest score 0; ties share."""
    best = (z == 0).to(z.dtype)
    return best / best.sum(-1, keepdim=True)


def _steep_product(v: Tensor, p: Tensor, a: Parameter) -> Tensor:
    """J v for any α, with derivatives. Products that are too large for their dtype are its largest number."""
    return apply_function(_Steep, v, p, a) if tracks(v, p, a) else _steep(v, p, a)


class _Steep(torch.autograd.Function):
    """F = J v at p. With ṡ/s = (2 − α) dp/p − log p dα, its derivative is dF = J (dv + (ṡ/s)(v − v̄)), v̄ = ⟨s, v⟩/‖s‖₁.

    By rules of its own: where p^(2−α) overflows, the derivatives of its terms do so too, and cancel to NaN.
    """

    @staticmethod
    def forward(v: Tensor, p: Tensor, a: Parameter) -> Tensor:
        return _steep(v, p, a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Parameter], output: Tensor) -> None:
        remember(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        v, p, a = recall(ctx)
        product = _steep_product(on_support(grad, p), p, a)
        safe = torch.where(p == 0, 1.0, p)
        spread = product * _centred(v, p, a, _flattest(p, a))
        to_p = torch.where(p == 0, 0.0 * p, saturate((2 - a) * (spread / safe)))
        return product, to_p, -saturated_sum(safe.log() * spread) if ctx.needs_input_grad[2] else None

    @staticmethod
    def jvp(ctx: Any, dv: Tensor | None, dp: Tensor | None, da: Tensor | None) -> Tensor:
        with nested_forward_mode():
            v, p, a = map(outside, recall(ctx))
            safe = torch.where(p == 0, 1.0, p)
            change = torch.zeros_like(p) if dp is None else (2 - a) * (dp / safe)
            change = change if da is None else change - safe.log() * da
            direction = saturate(change * _centred(v, p, a, _flattest(p, a)))
            direction = direction if dv is None else direction + dv
            product: Tensor = _steep_product(on_support(direction, p), p, a)
        return product

    @staticmethod
    def vmap(info: Any, in_dims: Any, v: Tensor, p: Tensor, a: Parameter) -> tuple[Tensor, int]:
        return apply_function(_Steep, *rows_first(info, in_dims, (v, p, a))), 0


def _steep(v: Tensor, p: Tensor, a: Parameter) -> Tensor:
    """J v for any α. Above 2, s = p^(2−α) is huge for small p and J the difference of huge numbers.

    So v is taken relative to its entry k with the largest s. The product of that entry is minus the sum of the others
    (J1 = 0), and the others are computed without cancellation.
    """
    zero = p == 0
    s = p.masked_fill(zero, 1.0).pow(2 - a).masked_fill(zero, 0.0).clamp_max(torch.finfo(p.dtype).max)
    k = _flattest(p, a)
    product = saturate(s * _centred(v, p, a, k)).scatter(-1, k, 0.0)
    return on_support(product.scatter(-1, k, -saturated_sum(product)), p)


def _flattest(p: Tensor, a: Parameter) -> Tensor:
    """Where the largest s = p^(2−α) of each row stands."""
    p = p.detach()
    least = p.masked_fill(p == 0, torch.inf)
    if isinstance(a, Tensor):
        return torch.where(a > 2, -least, p).argmax(-1, keepdim=True)
    return least.argmin(-1, keepdim=True) if a > 2 else p.argmax(-1, keepdim=True)


def _centred(v: Tensor, p: Tensor, a: Parameter, k: Tensor) -> Tensor:
    """v − v̄ with the mean v̄ = ⟨s, v⟩/‖s‖₁; k is where the largest s stands."""
    zero = p == 0
    safe = p.masked_fill(zero, 1.0)
    relative = (safe / safe.gather(-1, k)).pow(2 - a).masked_fill(zero, 0.0)  # between 0 and 1
    # Smaller by a power of two, so that no sum overflows.
    unit = 0.5 ** (p.shape[-1].bit_length() + 1)
    v = unit * v
    v = v - v.gather(-1, k)
    mean = (relative * v).sum(-1, keepdim=True) / relative.sum(-1, keepdim=True).clamp_min(1)
    return saturate((v - mean) / unit)


def _negative_entropy(p: Tensor) -> Tensor:
    """p log p, 0 at p = 0."""
    entropy: Tensor = torch.special.entr(p)
    return -entropy


def _p_tsallis_log(p: Tensor, c: Tensor) -> Tensor:
    """p·ln_c(p) with ln_c(p) = (p^c − 1)/c = log p · (expm1(x)/x) at x = c·log p; smooth through c = 0.

    At p = 0 it is 0, with the one-sided slope −1/c for c > 0 and −inf for c ≤ 0.
    """
    positive = p > 0
    log_p = torch.where(positive, p, 1.0).log()
    inside = torch.where(positive, p, 0.0) * log_p * _exponential_moment(c * log_p, 0)
    smooth = (p.pow(c.detach().clamp_min(0) + 1) - p) / torch.where(c > 0, c, 1.0)  # its derivatives in p, at p = 0
    vertical = _negative_entropy(torch.where(positive | (c > 0), 1.0, p))
    return torch.where(positive, inside, torch.where(c > 0, smooth, vertical))


def _tsallis_log_slope(p: Tensor, c: Tensor) -> Tensor:
    """∂ ln_c(p) / ∂c = log²p · ∫₀¹ t exp(xt) dt at x = c·log p; zero where p = 0."""
    log_p = torch.where(p == 0, 1.0, p).log()
    return log_p**2 * _exponential_moment(c * log_p, 1)


def _exponential_moment(x: Tensor, order: int) -> Tensor:
    """∫₀¹ tᵐ exp(xt) dt for m = 0, 1; by its series near zero, where every derivative stays exact too."""
    near = x.abs() < 1
    small = torch.where(near, x, 0.0)
    series = torch.zeros_like(x)
    for k in range(20, -1, -1):
        series = series * small + 1 / (math.factorial(k) * (k + order + 1))
    large = torch.where(near, 1.0, x)
    closed = torch.expm1(large) / large if order == 0 else (1 + (large - 1) * large.exp()) / large**2
    return torch.where(near, series, closed)


TSALLIS = _TsallisMap()
register_map(TSALLIS)


class Tsallis(Regularizer):
    r"""Tsallis negentropy, :math:`\Omega(p) = \frac{1}{\alpha(\alpha-1)} (\sum_i p_i^\alpha - 1)`.

    Its argmax is α-entmax: dense for alpha ≤ 1, sparse above, with margin 1/(alpha − 1).

    Args:
        alpha: a number in (0, inf], or a tensor with one value per row or per head (size 1 along ``dim``).
            An ``nn.Parameter`` is trained as it is.
        learnable: make alpha a parameter that stays inside ``bounds``: a sigmoid of ``raw_alpha``.
        bounds: the open interval of a learnable alpha, within 1e-30 and 1e30.
        shape: of a learnable alpha, such as ``(heads, 1, 1)`` for scores of shape (batch, heads, queries, keys).

    Example:
        >>> import torch
        >>> from fenchel import Tsallis
        >>> omega = Tsallis(1.5)
        >>> scores = torch.tensor([2.0, 1.0, -1.0])
        >>> omega.argmax(scores)
        tensor([0.8307, 0.1693, 0.0000])
        >>> omega.loss(scores, torch.tensor(0)), omega.margin
        (tensor(0.0617), 2.0)
        >>> Tsallis(1.5, learnable=True, shape=(4, 1, 1))
        Tsallis(alpha=tensor of shape (4, 1, 1), learnable, bounds=(1, 2))

    References: Tsallis (1988); Peters, Niculae & Martins (2019); Correia, Niculae & Martins (2019).
    """

    rule = TSALLIS
    given_alpha: float | Tensor | None
    raw_alpha: nn.Parameter | None

    def __init__(
        self,
        alpha: float | Tensor = 1.5,
        *,
        learnable: bool = False,
        bounds: tuple[float, float] = (1.0, 2.0),
        shape: Sequence[int] = (),
    ) -> None:
        super().__init__()
        alpha = check_alpha(alpha)
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise TypeError(f"shape must be a sequence of sizes, got {type(shape).__name__}")
        if not isinstance(bounds, Sequence) or isinstance(bounds, str):
            raise TypeError(f"bounds must be a pair (low, high), got {type(bounds).__name__}")
        if len(bounds) != 2:
            raise ValueError(f"bounds must be a pair (low, high), got {bounds}")
        low, high = check_number(bounds[0], "bounds"), check_number(bounds[1], "bounds")
        self.bounds = (low, high) if check_flag(learnable, "learnable") else None
        if self.bounds is None and (low, high) != (1.0, 2.0):
            raise ValueError("bounds go with learnable=True: a given alpha has none")
        if self.bounds is None:
            if shape:
                raise ValueError("shape goes with learnable=True; pass a tensor alpha for fixed values")
            hold(self, "given_alpha", alpha)
        else:
            shape = tuple(check_count(size, "shape") for size in shape)
            self.raw_alpha = nn.Parameter(_unsqueeze_alpha(alpha, self.bounds, shape))

    @property
    def alpha(self) -> Parameter:
        """The entropic index: a number, or a tensor (differentiable if learnable)."""
        if self.bounds is None:
            assert self.given_alpha is not None
            return self.given_alpha
        assert self.raw_alpha is not None
        low, high = self.bounds
        raw = self.raw_alpha if self.raw_alpha.dtype == torch.float64 else self.raw_alpha.float()
        return (low + (high - low) * torch.sigmoid(raw)).clamp(low, high)

    parameter = alpha

    @property
    def parameter_range(self) -> tuple[float, float] | None:
        """The least and the largest alpha: those that are allowed, if it is learnable."""
        return range_of(self.parameter) if self.bounds is None else self.bounds  # compilers do not know super() here

    @property
    def associative(self) -> bool:  # type: ignore[override]
        """True at alpha 1."""
        return not isinstance(self.alpha, Tensor) and self.alpha == 1

    def line(self, scores: Tensor, dim: int = -1) -> Tensor | None:
        """The threshold of the support, s − p^(alpha−1)/(alpha−1) at the best score; None for alpha ≤ 1."""
        alpha = self.alpha
        if not isinstance(alpha, Tensor) and alpha <= 1:
            return None
        with torch.no_grad():
            top = scores.amax(dim, keepdim=True)
            p = self.argmax(scores, dim).amax(dim, keepdim=True)
            if not isinstance(alpha, Tensor):
                reach = 0.0 * p if math.isinf(alpha) else p.pow(alpha - 1) / (alpha - 1)
            else:
                alpha, finite = split_finite(beside(alpha, "alpha", scores, dim))
                sparse = alpha > 1
                reach = p.pow(alpha - 1) / torch.where(sparse, alpha - 1, 1.0)
                reach = torch.where(finite, torch.where(sparse, reach, torch.inf), 0.0)
            return torch.where(top == -torch.inf, top, top - reach)

    @takes_packed_itself
    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return TSALLIS.choose(scores, dim, mask, "alpha", self.alpha)

    def log_argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        if not self.associative:
            return super().log_argmax(scores, dim, mask)
        rows = to_rows(scores, dim, mask)
        masked = rows == -torch.inf
        logs = torch.log_softmax(torch.where(masked.all(-1, keepdim=True), 0.0, rows), -1)
        return from_rows(torch.where(masked, -torch.inf, logs), scores, dim)

    @property
    def margin(self) -> float | Tensor:
        """1/(alpha − 1) for alpha > 1; inf below, where no lead is enough."""
        alpha = self.alpha
        if isinstance(alpha, Tensor):
            return torch.where(alpha > 1, 1 / torch.where(alpha > 1, alpha - 1, 1.0), torch.inf)
        return 1 / (alpha - 1) if alpha > 1 else math.inf

    def extra_repr(self) -> str:
        learnable = "" if self.bounds is None else f", learnable, bounds=({self.bounds[0]:g}, {self.bounds[1]:g})"
        return f"alpha={show(self.alpha)}{learnable}"


def check_alpha(alpha: Parameter) -> Parameter:
    """Check α: a number in (0, inf], or a tensor of such numbers."""
    # The usual case first: for small inputs the time of a call is that of its Python lines.
    return alpha if type(alpha) is float and alpha > 0 else check_parameter(alpha, "alpha", 0.0, _ALLOWED)


def _arguments(omega: Tsallis) -> dict[str, Any]:
    if omega.bounds is None:
        return {"alpha": omega.given_alpha}
    return {"bounds": omega.bounds, "raw_alpha": omega.raw_alpha}


def _make(
    alpha: float | Tensor | None = None,
    bounds: Sequence[float] | None = None,
    raw_alpha: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Tsallis:
    """The Ω that was written; files of the first version have the shape of a learned alpha, and not its values."""
    if raw_alpha is None and alpha is None:
        raise TypeError("alpha must be a number or a tensor, and there is none")
    if bounds is None:
        if alpha is None or shape is not None:
            raise TypeError("there are no bounds of a learned alpha")
        return Tsallis(alpha)
    low, high = bounds
    if raw_alpha is None:
        if alpha is None or shape is None:
            raise TypeError("there is no raw_alpha")
        if math.prod(shape) > _MOST_LEARNED:
            raise ValueError(f"shape must have at most {_MOST_LEARNED} elements, got {tuple(shape)}")
        return Tsallis(alpha, learnable=True, bounds=(low, high), shape=shape)
    omega = Tsallis((low + high) / 2, learnable=True, bounds=(low, high))
    omega.raw_alpha = nn.Parameter(raw_alpha)
    return omega


register_kind(Tsallis, _arguments, _make)


def _unsqueeze_alpha(alpha: float | Tensor, bounds: tuple[float, float], shape: tuple[int, ...]) -> Tensor:
    """The raw parameter whose sigmoid, scaled to the bounds, is alpha."""
    low, high = bounds
    if not 1 / _FARTHEST <= low < high <= _FARTHEST:  # so that no alpha between overflows in float32, or is lost in it
        raise ValueError(
            f"bounds must satisfy {1 / _FARTHEST:g} <= low < high <= {_FARTHEST:g}, got ({low:g}, {high:g})"
        )
    dtype = alpha.dtype if isinstance(alpha, Tensor) else torch.get_default_dtype()
    start = alpha.detach() if isinstance(alpha, Tensor) else torch.tensor(alpha)
    share = (start.double() - low) / (high - low)
    if known(share) and not bool(((share > 0) & (share < 1)).all()):
        raise ValueError(f"alpha must start strictly inside bounds ({low:g}, {high:g}), got {show(alpha)}")
    if not broadcasts(share.shape, shape or share.shape):
        raise ValueError(f"shape must be one that alpha, of shape {tuple(share.shape)}, expands to, got {shape}")
    return torch.logit(share).to(dtype).expand(shape or share.shape).clone()


@written_by()
class Shannon(Tsallis):
    r"""Shannon's negentropy, :math:`\sum_i p_i \log p_i`. Argmax: softmax. Loss: cross-entropy. No margin.

    Example:
        >>> import torch
        >>> from fenchel import Shannon
        >>> Shannon().argmax(torch.tensor([1.0, 0.0]))
        tensor([0.7311, 0.2689])
    """

    def __init__(self) -> None:
        super().__init__(1.0)

    def extra_repr(self) -> str:
        return ""


@written_by()
class Gini(Tsallis):
    r"""Gini's negentropy, :math:`\frac12 (\|p\|^2 - 1)`. Argmax: sparsemax. Margin: 1.

    Example:
        >>> import torch
        >>> from fenchel import Gini
        >>> Gini().argmax(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.7500, 0.2500, 0.0000])
    """

    def __init__(self) -> None:
        super().__init__(2.0)

    def extra_repr(self) -> str:
        return ""


@written_by()
class Hard(Tsallis):
    r"""No regularizer, :math:`\Omega = 0`. Argmax: one-hot, ties share, zero gradient. Margin: 0.

    Example:
        >>> import torch
        >>> from fenchel import Hard
        >>> Hard().argmax(torch.tensor([3.0, 1.0, 3.0]))
        tensor([0.5000, 0.0000, 0.5000])
    """

    def __init__(self) -> None:
        super().__init__(math.inf)

    def extra_repr(self) -> str:
        return ""


def entmax(scores: Tensor, alpha: float | Tensor = 1.5, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Maximize a linear score plus the Tsallis α-entropy over the simplex.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle
              - \frac{1}{\alpha(\alpha-1)} \Big(\sum_i p_i^\alpha - 1\Big)

    Softmax at alpha 1, sparsemax at 2, argmax at inf; sparse for every alpha > 1, dense below. A lead of
    1/(alpha − 1) takes all.

    Alpha 0 is refused although the map has a limit, p = 1/(τ − s): Ω has none. Its factor 1/(α(α − 1)) is infinite, and
    what is left of Ω without a constant, −Σ log p, is infinite at one-hot vectors, and so is every loss. Where that is
    wanted, ``Custom(lambda p: -p.log().sum(-1)).argmax`` computes it.

    On the CPU rows are sorted for alpha > 2 only, O(n log n); up to 2 a few passes over each row are enough. Other
    devices sort if alpha is 1.5, 2, larger than 2 or a tensor; else the number of passes does not depend on the scores.

    Args:
        scores: any shape, floating point.
        alpha: a number in (0, inf], or a tensor that broadcasts to ``scores`` with size 1 along ``dim``.
            Differentiable, at alpha 1 too.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to ``scores``; True = may receive mass. Scores of −inf are masked too.

    Returns:
        Probabilities of the shape and dtype of ``scores``; rows with nothing unmasked are zero.

    As all maps and losses, it takes jagged nested tensors too, whose sequences have different lengths: ``dim`` is the
    ragged dimension (one choice per sequence) or a later one. A tensor alpha and a mask are nested likewise, or have
    size 1 in the ragged dimension. Torch differentiates nested tensors once; :func:`segment_entmax` of their values has
    derivatives of every order.

    Example:
        >>> import torch, fenchel
        >>> fenchel.entmax(torch.tensor([2.0, 1.0, -1.0]), alpha=1.5)
        tensor([0.8307, 0.1693, 0.0000])
        >>> bags = [torch.tensor([2.0, 1.0, -1.0]), torch.tensor([0.5])]
        >>> fenchel.entmax(torch.nested.nested_tensor(bags, layout=torch.jagged), alpha=1.5).values()
        tensor([0.8307, 0.1693, 0.0000, 1.0000])

    References: Peters, Niculae & Martins (2019), section 3.
    """
    if type(alpha) is int and alpha < 0:
        raise ValueError(f"alpha must satisfy {_ALLOWED}, got {alpha}; for the dimension write dim={alpha}")
    return TSALLIS.choose(scores, dim, mask, "alpha", check_alpha(alpha))


def sparsemax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Project scores onto the simplex: the sparse counterpart of softmax, piecewise linear.

    .. math:: \operatorname{argmin}_{p \in \Delta} \; \|p - s\|^2

    Arguments and result as in :func:`entmax`, of which this is ``alpha=2``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.sparsemax(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.7500, 0.2500, 0.0000])

    References: Martins & Astudillo (2016).
    """
    return TSALLIS.choose(scores, dim, mask, "alpha", 2.0)


def softmax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Maximize a linear score plus Shannon's entropy over the simplex: torch's softmax, with a mask.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \sum_i p_i \log p_i

    Arguments and result as in :func:`entmax`, of which this is ``alpha=1``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.softmax(torch.tensor([1.0, 0.0, 5.0]), mask=torch.tensor([True, True, False]))
        tensor([0.7311, 0.2689, 0.0000])
    """
    return entmax(scores, 1.0, dim, mask)


def argmax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Maximize a linear score over the simplex: one-hot, ties share, zero gradient.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle

    Arguments and result as in :func:`entmax`, of which this is ``alpha=inf``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.argmax(torch.tensor([3.0, 1.0, 3.0]))
        tensor([0.5000, 0.0000, 0.5000])
    """
    return entmax(scores, math.inf, dim, mask)
