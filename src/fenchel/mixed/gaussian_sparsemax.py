"""GaussianSparsemax: a Gaussian vector projected onto the simplex."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.special import log_ndtr, ndtr

from fenchel._checks import check_broadcast, check_entries, check_floats, check_one_given, check_positive, check_tril
from fenchel._quadrature import log_concave
from fenchel.mixed.base import (
    SAMPLES,
    Estimate,
    Mixed,
    broadcast_pair,
    exact_estimate,
)
from fenchel.mixed.boxes import MAX_DEVIATIONS, log_box
from fenchel.regularizers import sparsemax

_NARROW = 0.1  # standard deviations of an entry, relative to the threshold's, below which it is treated as a step


class GaussianSparsemax(Mixed):
    r"""Sparsemax of a Gaussian vector (…, K), with positive probability on every face.

    .. math:: Y = \operatorname{sparsemax}(Z), \qquad Z \sim \mathcal{N}(\mu, \Sigma)

    With softmax in place of sparsemax it would be the Logistic-Normal. With two vertices it is the double-sided
    rectified Gaussian, in closed form. The density at a value with face f is the Gaussian density of the entries in the
    face, times the probability that the other entries are below the threshold: for a diagonal covariance one integral
    over the threshold, to about ten digits, for a full one an orthant probability in as many dimensions as there are
    zeros. Probabilities of faces are integrals in K − 1 dimensions. Up to two dimensions adaptive quadrature is used;
    above, quasi-Monte Carlo with fixed random shifts, so that results and gradients are the same in every call. It
    gives 4 digits where it converges (usually up to 6 dimensions): ``face_probability`` and ``estimate_log_prob``
    return the error.

    Args:
        loc: μ, (…, K).
        scale: standard deviations of independent entries, (…, K); either this or ``scale_tril``.
        scale_tril: the Cholesky factor L of Σ = L Lᵀ, (…, K, K).

    Example:
        >>> y = GaussianSparsemax(torch.zeros(2), scale=torch.ones(2))
        >>> y.face_log_prob(torch.tensor([[True, False], [False, True], [True, True]])).exp()
        tensor([0.2398, 0.2398, 0.5205])

    References:
        Farinhas, Aziz, Niculae & Martins (2022), Sparse communication via mixed distributions.
    """

    arg_constraints: ClassVar = {
        "loc": constraints.real_vector,
        "scale": constraints.independent(constraints.positive, 1),  # type: ignore[no-untyped-call]
        "scale_tril": constraints.lower_cholesky,
    }
    _parameters: ClassVar[dict[str, int]] = {"loc": 1, "scale": 1, "scale_tril": 2}
    has_rsample = True
    scale: Tensor | None
    scale_tril: Tensor | None

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor | None = None,
        scale_tril: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        check_floats(loc, "loc", "…", "K")
        check_one_given(scale=scale, scale_tril=scale_tril)
        if scale is not None:
            check_floats(scale, "scale", "…", "K")
            check_broadcast("the shapes of loc and scale", loc.shape, scale.shape)
            self.loc, self.scale = torch.broadcast_tensors(loc, scale)  # type: ignore[no-untyped-call]
            self.scale_tril = None
        else:
            assert scale_tril is not None
            check_floats(scale_tril, "scale_tril", "…", loc.shape[-1], loc.shape[-1])
            what = "the batch dimensions of loc and scale_tril"
            batch = check_broadcast(what, loc.shape[:-1], scale_tril.shape[:-2])
            self.loc = loc.expand(*batch, -1)
            self.scale_tril = scale_tril.expand(*batch, -1, -1)
            self.scale = None
        super().__init__(self.loc.shape[:-1], self.loc.shape[-1:], validate_args)
        if self._validate_args:
            check_entries(loc.isfinite(), loc, "loc", "be finite")
            if scale is not None:
                check_positive(scale, "scale")
            elif scale_tril is not None:
                check_tril(scale_tril, "scale_tril")

    def rsample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=self._dtype, device=self._device, generator=generator)
        if self.scale is not None:
            return sparsemax(self.loc + self.scale * noise)
        assert self.scale_tril is not None
        return sparsemax(self.loc + (self.scale_tril @ noise.unsqueeze(-1)).squeeze(-1))

    def face_log_prob(self, face: Tensor) -> Tensor:
        return self._face_terms(face)[0].to(self._dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.estimate_log_prob(value).value

    def estimate_log_prob(self, value: Tensor) -> Estimate:
        """``log_prob`` and its standard error: 0 unless the covariance is full and values have at least three zeros."""
        value = self._check_value(value)
        y, face = value.double(), self.face_of(value)
        rows = y.reshape(-1, self.vertices), face.reshape(-1, self.vertices)
        terms = (self._by_threshold if self._diagonal else self._by_orthant)(*rows, self._rows(value.shape))
        density, error = (each.reshape(value.shape[:-1]) for each in terms)
        return Estimate(self._on_simplex(value, density), error.to(self._dtype))

    def estimate_entropy(self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None) -> Estimate:
        if self.vertices != 2:
            return super().estimate_entropy(num_samples=num_samples, generator=generator)
        edge = self._edge()
        return exact_estimate((edge.ends * -edge.log_ends).sum(0).add(edge.cross_entropy(edge)).to(self._dtype))

    def estimate_kl(
        self, other: Mixed, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        if self.vertices != 2 or not isinstance(other, GaussianSparsemax):
            return super().estimate_kl(other, num_samples=num_samples, generator=generator)
        p, q = (each._edge() for each in broadcast_pair(self, other))
        ends = torch.where(p.ends > 0, p.ends * (p.log_ends - q.log_ends), 0.0).sum(0)
        return exact_estimate((ends + p.cross_entropy(q) - p.cross_entropy(p)).to(self._dtype))

    def _edge(self) -> _Edge:
        """For two vertices, the distribution of the first entry: a Gaussian clipped to [0, 1]."""
        loc, factor = self._rows(self.loc.shape)
        factor = torch.diag_embed(factor) if factor.dim() == 2 else factor
        centre = 0.5 * (1 + loc[:, 0] - loc[:, 1])
        width = 0.5 * (factor[:, 0] - factor[:, 1]).norm(dim=-1)
        return _Edge(centre.reshape(self.batch_shape), width.reshape(self.batch_shape))

    @property
    def _diagonal(self) -> bool:
        return self.scale is not None and self.vertices > 2

    def _rows(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """μ (R, K) and standard deviations (R, K) or the Cholesky factor (R, K, K), in double precision."""
        k = self.vertices
        loc = self.loc.double().expand(shape).reshape(-1, k)
        if self.scale is not None:
            return loc, self.scale.double().expand(shape).reshape(-1, k)
        assert self.scale_tril is not None
        return loc, self.scale_tril.double().expand(*shape, k).reshape(-1, k, k)

    def _face_terms(self, face: Tensor) -> tuple[Tensor, Tensor]:
        face = self._check_face(face)
        rows = face.reshape(-1, self.vertices)
        zero = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
        parameters = self._rows(face.shape)
        single = rows.sum(-1) <= 1
        log_prob, error = zero.sum(-1), zero.sum(-1)
        if self._diagonal and bool(single.any()):  # a vertex: the density of one point
            some = parameters[0][single], parameters[1][single]
            log_prob[single], _ = self._by_threshold(rows[single].double(), rows[single], some)
        if not self._diagonal:
            single = torch.zeros_like(single)
        if not bool(single.all()):
            some = parameters[0][~single], parameters[1][~single]
            log_prob[~single], error[~single] = log_box(*self._region(rows[~single], some))
        log_prob = torch.where(rows.any(-1), log_prob, -torch.inf)
        return log_prob.reshape(face.shape[:-1]), error.reshape(face.shape[:-1])

    def _by_threshold(self, y: Tensor, face: Tensor, parameters: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The density |f| ∫ Π_f φ(y + τ) Π_rest Φ(τ) dτ: given the threshold τ, entries are independent."""
        loc, scale = parameters
        order = torch.where(face, scale.detach(), torch.inf).argsort(dim=-1, stable=True)
        shift, scale = (loc - y).gather(-1, order), scale.gather(-1, order)
        size = face.sum(-1)
        inside = torch.arange(self.vertices, device=y.device) < size.unsqueeze(-1)
        log_face, mean, variance = _product(shift - shift[:, :1], scale, inside)
        # The mean of the threshold minus that of each other entry.
        above = mean.unsqueeze(-1) - (shift - shift[:, :1])
        log_rest = _log_below(above, scale, variance, size)
        return size.clamp_min(1).double().log() + log_face + log_rest, torch.zeros_like(log_face)

    def _region(self, face: Tensor, parameters: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The event of a face as a box: mean and factor of K − 1 variables, and the number that are entries of y.

        With the entries of the face in front, the variables are its first |f| − 1 entries of y, then the threshold
        minus each other entry.
        """
        loc, factor = parameters
        factor = torch.diag_embed(factor) if factor.dim() == 2 else factor
        order = _order(face, loc)
        loc = loc.gather(-1, order)
        factor = factor.gather(-2, order.unsqueeze(-1).expand_as(factor))
        size = face.sum(-1, keepdim=True).clamp_min(1)
        mean, free = _difference(loc.unsqueeze(-1), size), (size - 1).squeeze(-1)
        of_face = torch.arange(self.vertices - 1, device=size.device) < size - 1
        mean = mean.squeeze(-1) + torch.where(of_face, 1.0, -1.0).double() / size
        spread = _difference(factor, size)
        return mean, _lower(spread), free

    def _by_orthant(self, y: Tensor, face: Tensor, parameters: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The Gaussian density of the entries of y, times the conditional probability of the other entries."""
        mean, tril, free = self._region(face, parameters)
        y = y.gather(-1, _order(face, parameters[0]))
        parts, error = torch.zeros_like(y[:, 0]), torch.zeros_like(y[:, 0])
        for known in range(self.vertices):
            chosen = (free == known).nonzero().squeeze(-1)
            if not len(chosen):
                continue
            m, f = mean[chosen], tril[chosen]
            head = f[:, :known, :known]
            x = torch.linalg.solve_triangular(head, (y[chosen, :known] - m[:, :known]).unsqueeze(-1), upper=False)
            log_head = -x.square().sum((-1, -2)) / 2 - head.diagonal(dim1=-1, dim2=-2).log().sum(-1)
            rest = m[:, known:] + (f[:, known:, :known] @ x).squeeze(-1)
            nothing = torch.zeros_like(chosen)
            tail, spread = log_box(rest, f[:, known:, known:], nothing)
            parts = parts.index_add(0, chosen, log_head - known * 0.5 * math.log(2 * math.pi) + tail)
            error = error.index_add(0, chosen, spread)
        return parts, error

    def _edge_breaks(self) -> Tensor:
        edge = self._edge()
        centre, width = edge.centre.flatten(), edge.width.flatten()
        steps = torch.tensor([-9, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 9], device=centre.device).unsqueeze(-1)
        ends = torch.tensor([0.0, 1.0], dtype=torch.float64, device=centre.device).unsqueeze(-1).expand(-1, len(centre))
        inside = torch.cat([centre + width * steps, ends]).clamp(0, 1).logit()
        wide = (
            torch.linspace(-40, 40, 9, dtype=torch.float64, device=centre.device).unsqueeze(-1).expand(-1, len(centre))
        )
        breaks = torch.cat([inside.clamp(-40, 40), wide]).sort(0).values
        return breaks.reshape(len(breaks), *self.batch_shape)


class _Edge:
    """A Gaussian clipped to [0, 1], in closed form."""

    def __init__(self, centre: Tensor, width: Tensor) -> None:
        self.centre, self.width = centre, width
        self.low, self.high = -centre / width, (1 - centre) / width
        self.log_ends = torch.stack([log_ndtr(self.low), log_ndtr(-self.high)])
        """Log-probabilities of both ends, (2, …)."""
        self.ends = self.log_ends.exp()
        """Probabilities of both ends, (2, …)."""

    def cross_entropy(self, other: _Edge) -> Tensor:
        """∫ −p log q between the ends, by the first three moments of a truncated Gaussian."""
        a, b = _normal(self.low), _normal(self.high)
        # Both are reflected to the lower tail, where their difference is precise.
        right = self.low > 0
        far, near = torch.where(right, -self.low, self.high), torch.where(right, -self.high, self.low)
        mass: Tensor = ndtr(far) - ndtr(near)
        first, second = a - b, mass + self.low * a - self.high * b
        moved = self.centre - other.centre
        square = self.width.square() * second + 2 * self.width * moved * first + moved.square() * mass
        return square / (2 * other.width.square()) + mass * (other.width.log() + 0.5 * math.log(2 * math.pi))


def _product(shift: Tensor, scale: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Π N(τ; shift, scale²) over the entries inside, written as a factor times one N(τ; mean, variance).

    Entries are sorted by scale, and shifts are relative to the first, the narrowest. Densities are multiplied one after
    the other, and each factor is a density of a difference, without cancellation, however narrow an entry is.

    Returns:
        The logarithm of the factor, the mean and the variance, (R,) each.
    """
    first = scale[:, :1]
    share = torch.where(inside, (first / scale).square(), 0.0)  # precisions, relative to the first
    precision = share.cumsum(-1)
    mean = (share * shift).cumsum(-1) / precision
    apart = torch.where(inside[:, 1:], shift[:, 1:] - mean[:, :-1], 0.0)
    variance = torch.where(inside[:, 1:], scale[:, 1:].square() + first.square() / precision[:, :-1], 1.0)
    logs = -0.5 * (apart.square() / variance + variance.log() + math.log(2 * math.pi))
    return torch.where(inside[:, 1:], logs, 0.0).sum(-1), mean[:, -1], first[:, 0].square() / precision[:, -1]


def _log_below(above: Tensor, scale: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    """The log-probability that all entries but the first ``size`` are below the threshold τ.

    Closed for one entry, an orthant probability for two, an integral over τ for more; simpler if τ has little variance.

    Args:
        above: the mean of τ minus those of the entries, (R, K).
        scale: standard deviations of the entries, (R, K).
        variance: of τ, (R,).
        size: the number of entries that are left out, (R,).
    """
    rest = above.shape[-1] - size
    with torch.no_grad():
        uncertain = _uncertain(above, scale, variance, size)
        slopes = torch.where(uncertain, (1 + _mills(above / scale)) / scale, 0.0).sum(-1) * variance.sqrt()
    flat, tiny = slopes < 0.3, slopes < 1e-5
    parts = torch.zeros_like(variance)
    cases = (
        (rest == 1, _below_one),
        ((rest == 2) & ~flat, _below_two),
        ((rest >= 3) & ~flat, _below_many),
        ((rest >= 2) & flat & ~tiny, _below_smooth),
        ((rest >= 2) & tiny, _below_flat),
    )
    for chosen, log_prob in cases:
        rows = chosen.nonzero().squeeze(-1)
        if len(rows):
            found = log_prob(above[rows], scale[rows], variance[rows], size[rows])
            parts = parts.index_add(0, rows, found)
    return parts


def _uncertain(above: Tensor, scale: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    """Whether an entry is outside of the face and not certain to be below τ, boolean (R, K).

    τ is at least 9 standard deviations below its mean: that the other entries are below τ can only raise it.
    """
    outside = torch.arange(above.shape[-1], device=above.device) >= size.unsqueeze(-1)
    lowest = above.detach() - 9 * variance.detach().sqrt().unsqueeze(-1)
    return outside & ~(lowest > MAX_DEVIATIONS * scale.detach())


def _below_flat(above: Tensor, scale: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    """``_log_below`` for a threshold so narrow that log Π Φ is quadratic over it."""
    inside = torch.arange(above.shape[-1], device=above.device) >= size.unsqueeze(-1)
    t = above / scale
    mills = torch.where(inside, _mills(t), 0.0)
    slope, bend = (mills / scale).sum(-1), -(mills * (t + mills) / scale.square()).sum(-1)
    return torch.where(inside, log_ndtr(t), 0.0).sum(-1) + 0.5 * variance * (bend + slope.square())


def _below_smooth(above: Tensor, scale: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    """``_log_below`` for a threshold that is narrow relative to the entries, by Gauss-Hermite quadrature."""
    inside = (torch.arange(above.shape[-1], device=above.device) >= size.unsqueeze(-1)).unsqueeze(-2)
    x, w = (above.new_tensor(v) for v in np.polynomial.hermite_e.hermegauss(24))
    t = (above.unsqueeze(-2) + (variance.sqrt().unsqueeze(-1) * x).unsqueeze(-1)) / scale.unsqueeze(-2)
    values = torch.where(inside, log_ndtr(t), 0.0).sum(-1) + (w / w.sum()).log()
    return torch.logsumexp(values, -1)


def _mills(t: Tensor) -> Tensor:
    """The ratio φ(t)/Φ(t)."""
    return torch.exp(-0.5 * t.square() - log_ndtr(t)) / math.sqrt(2 * math.pi)


def _below_one(above: Tensor, scale: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    value: Tensor = log_ndtr(above[:, -1] * (variance + scale[:, -1].square()).rsqrt())
    return value


def _below_two(above: Tensor, scale: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    above, square = above[:, -2:], scale[:, -2:].square()
    total = variance + square[:, 0]
    root = total.sqrt()
    zero = torch.zeros_like(root)
    corner = (square[:, 1] + variance * square[:, 0] / total).sqrt()
    tril = torch.stack([torch.stack([root, zero], -1), torch.stack([variance / root, corner], -1)], -2)
    return log_box(above, tril, torch.zeros_like(size))[0]


def _below_many(above: Tensor, scale: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    """``_log_below`` for three or more entries: E Π Φ((τ − place)/width) over a standard normal τ.

    The origin is the place of the highest narrow entry, so that its step is resolved precisely. Entries that are
    certain to be below τ are left out: with an origin far away, τ would lose its digits.
    """
    inside = _uncertain(above, scale, variance, size)
    unit = variance.rsqrt().unsqueeze(-1)
    narrow = inside & (unit * scale).detach().lt(_NARROW)
    highest = torch.where(narrow, above.detach(), torch.inf).argmin(-1, keepdim=True)
    origin = -(unit * above.gather(-1, highest)).squeeze(-1)
    place = torch.where(inside, unit * (above.gather(-1, highest) - above), 0.0)
    width = torch.where(inside, unit * scale, 1.0)

    def log_density(x: Tensor, row: Tensor, origin: Tensor, place: Tensor, width: Tensor) -> Tensor:
        t = (x.unsqueeze(-1) - place[row]) / width[row]
        return -0.5 * (x + origin[row]).square() + torch.where(inside[row], log_ndtr(t), 0.0).sum(-1)

    fixed = origin.detach(), place.detach(), width.detach()
    with torch.no_grad():
        furthest = torch.where(inside, fixed[1] + MAX_DEVIATIONS * fixed[2], -torch.inf).max(-1).values
        ends = -fixed[0] - 9, torch.maximum(-fixed[0], furthest) + 9
        rule = log_concave(lambda x, row: log_density(x, row, *fixed), *ends, _marks(narrow, *fixed[1:]))
    rule = rule.moved(lambda x, row: _moved_with_entries(x, place[row], torch.where(inside, width, 1.0)[row]))
    values = log_density(rule.nodes, rule.rows, origin, place, width)
    return rule.log_integral(values) - 0.5 * math.log(2 * math.pi)


def _marks(narrow: Tensor, place: Tensor, width: Tensor) -> Tensor | None:
    """Ends of panels (R, M) around the steps of the highest narrow entries (R, K), at most four entries per row."""
    most = min(int(narrow.sum(-1).max()), 4)
    if most == 0:
        return None
    height, which = torch.where(narrow, place, -torch.inf).topk(most, -1)
    steps = torch.tensor([-12.0, -6.0, -3.0, 0.0, 3.0, 6.0, 12.0], dtype=place.dtype, device=place.device)
    marks = height.unsqueeze(-1) + width.gather(-1, which).unsqueeze(-1) * steps
    return marks.flatten(1)


def _moved_with_entries(x: Tensor, place: Tensor, width: Tensor) -> Tensor:
    """Points x (P,) with derivatives in the places and widths of the narrow entries (P, K) that they lie in.

    Within 8 widths of an entry a point moves with it; from 8 to 12 widths ever less. With a sudden stop, the common end
    of two panels, which differs by rounding, could move in one of them and not in the other.
    """
    order = width.detach().argsort(-1)
    place, width = place.gather(-1, order), width.gather(-1, order)
    t = (x.unsqueeze(-1) - place.detach()) / width.detach()
    share = torch.where(width.detach() < _NARROW, (3 - t.abs() / 4).clamp(0, 1), 0.0)
    left = torch.cat([torch.ones_like(share[:, :1]), (1 - share).cumprod(-1)[:, :-1]], -1)
    moves = (place - place.detach()) + torch.where(share > 0, t, 0.0) * (width - width.detach())
    return x + (left * share * moves).sum(-1)


def _normal(z: Tensor) -> Tensor:
    return (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)


def _order(face: Tensor, loc: Tensor) -> Tensor:
    """An order of entries, (R, K): those of the face first, then the others by decreasing mean."""
    return torch.where(face, -torch.inf, -loc.detach()).argsort(dim=-1, stable=True)


def _difference(z: Tensor, size: Tensor) -> Tensor:
    """Entries of the face (in front) but the last, minus their mean; then that mean minus each other entry."""
    place = torch.arange(z.shape[1], device=z.device)
    inside = (place < size).unsqueeze(-1)
    mean = torch.where(inside, z, 0.0).sum(1, keepdim=True) / size.unsqueeze(-1)
    return torch.where((place < size - 1).unsqueeze(-1)[:, :-1], z[:, :-1] - mean, mean - z[:, 1:])


def _lower(spread: Tensor) -> Tensor:
    """The Cholesky factor of spread spreadᵀ, by a QR decomposition, without forming the product."""
    upper = torch.linalg.qr(spread.mT).R
    sign = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    lower: Tensor = (upper * sign.unsqueeze(-1)).mT
    return lower
