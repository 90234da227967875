"""Independent answers: 50-digit arithmetic and textbook definitions, sharing no code with the library."""

from collections.abc import Callable, Sequence

import mpmath
import torch
from mpmath import mpf
from torch import Tensor

mpmath.mp.dps = 50


def exact(values: Sequence[float]) -> list[mpf]:
    """Floating-point numbers as they are, without rounding."""
    return [mpf(v) for v in values]


def sparsemax(z: Sequence[float]) -> list[float]:
    """Sparsemax by its textbook algorithm (Martins & Astudillo, 2016, algorithm 1)."""
    ordered, total, tau = sorted(z, reverse=True), 0.0, 0.0
    for k, value in enumerate(ordered, 1):
        total += value
        if 1 + k * value > total:
            tau = (total - 1) / k
    return [max(v - tau, 0.0) for v in z]


def entmax_threshold(z: list[mpf], alpha: mpf) -> mpf:
    """τ with Σ [(α−1) z − τ]₊^(1/(α−1)) = 1, for 1 < α ≤ 2, by Newton from the left end (convex and decreasing)."""
    c = alpha - 1
    scaled = sorted((c * v for v in z), reverse=True)
    tau = scaled[0] - 1
    while True:
        kept = [b for v in scaled if (b := v - tau) > 0]
        scaled = scaled[: len(kept)]
        step = (sum(b ** (1 / c) for b in kept) - 1) / (sum(b ** (1 / c - 1) for b in kept) / c)
        if abs(step) < mpf(10) ** -35:
            return tau + step
        tau += step


def entmax(scores: Sequence[float], alpha: float) -> list[mpf]:
    """α-entmax for 0 < α ≤ 2 to more than 30 digits."""
    top = max(exact(scores))
    z = [v - top for v in exact(scores)]
    alpha = mpf(alpha)
    c = alpha - 1
    if c == 0:
        weights = [mpmath.exp(v) for v in z]
        return [w / sum(weights) for w in weights]
    if c > 0:
        tau = entmax_threshold(z, alpha)
        return [(c * v - tau) ** (1 / c) if c * v > tau else mpf(0) for v in z]
    # dense: p = (1 + c(z − A))^(1/c) with Σp decreasing in A; Newton on (Σp)^c, which is concave and increasing
    a = mpf(0)
    while True:
        p = [(1 + c * (v - a)) ** (1 / c) for v in z]
        total = sum(p)
        step = (total - total ** (1 - c)) / c / sum(q ** (1 - c) for q in p)
        if abs(step) < mpf(10) ** -35:
            return p
        a += step


def entmax_backward_error(scores: Sequence[float], p: Sequence[float], alpha: float, eps: float, tiny: float) -> mpf:
    """How far scores must move for ``p`` to be their exact α-entmax, up to 4 units in p's last place, for α > 1.

    The optimality conditions are z − p^(α−1)/(α−1) = μ on the support and z ≤ μ off it.
    """
    c = mpf(alpha) - 1
    return _backward_error(scores, p, eps, tiny, lambda q: q**c / c)


def normmax_backward_error(scores: Sequence[float], p: Sequence[float], alpha: float, eps: float, tiny: float) -> mpf:
    """The same for α-normmax: z − (p/‖p‖)^(α−1) = μ on the support and z ≤ μ off it."""
    a = mpf(alpha)
    norm = sum(v**a for v in exact(p)) ** (1 / a)
    return _backward_error(scores, p, eps, tiny, lambda q: (q / norm) ** (a - 1))


def _backward_error(
    scores: Sequence[float], p: Sequence[float], eps: float, tiny: float, gradient: Callable[[mpf], mpf]
) -> mpf:
    """The smallest ε for which one μ lies in every [z − gradient(p̄) − ε, z − gradient(p̲) + ε]."""
    lower, upper = [], []
    for z, q in zip(exact(scores), exact(p), strict=True):
        lower.append(z - gradient(q * (1 + 4 * mpf(eps)) + mpf(tiny)))
        if q > 0:
            upper.append(z - gradient(max(mpf(0), q * (1 - 4 * mpf(eps)) - mpf(tiny))))
    return max(mpf(0), (max(lower) - min(upper)) / 2)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Entmax attention with all weights, 1 < α ≤ 2, in the precision of the tensors: thresholds by bisection.

    The derivatives are those of the implicit function: one Newton step on Σ p = 1 that is differentiated.
    """
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    key, value = (t.repeat_interleave(groups, -3) if groups > 1 else t for t in (key, value))
    x = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else x + mask
    if causal:
        ahead = torch.arange(x.shape[-1]) > torch.arange(x.shape[-2])[:, None]
        x = x.masked_fill(ahead, -torch.inf)
    hidden = x == -torch.inf
    empty = hidden.all(-1, keepdim=True)
    c = torch.as_tensor(alpha, dtype=x.dtype) - 1
    z = torch.where(hidden & ~empty, -torch.inf, c * torch.where(hidden, 0.0, x) / temperature)  # c has a derivative
    high = z.detach().amax(-1, keepdim=True)
    low = high - 1
    for _ in range(80):
        middle = (low + high) / 2
        above = (z.detach() - middle).clamp_min(0).pow(1 / c.detach()).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    excess = torch.where(z > low, z - low, 1.0)
    p = torch.where(z > low, excess.pow(1 / c), 0.0)
    slope = torch.where(z > low, excess.pow(1 / c - 1) / c, 0.0)
    # d threshold = d Σ p / Σ slope; its value is right to the last digits already.
    shift = (p.sum(-1, keepdim=True) - 1) / slope.sum(-1, keepdim=True).detach()
    p = p - slope.detach() * (shift - shift.detach())
    return torch.where(empty, 0.0, p) @ value
