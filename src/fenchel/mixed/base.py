"""Mixed: base class of random vectors in the closed simplex with positive probability on vertices, edges and faces."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.kl import register_kl

from fenchel._checks import check_broadcast, check_count, check_floats, check_kind, check_mask, check_shape
from fenchel._quadrature import line
from fenchel._torch import forward_mode, has_tangent, is_mapped

SAMPLES = 4096
"""The default number of samples of an estimate."""

Self = TypeVar("Self", bound="Mixed")
ValueFunction = Callable[[Tensor, Tensor], Tensor]
"""A function of values (or faces) and their log-probabilities."""


@dataclass(frozen=True)
class Estimate:
    """A number that is estimated by sampling, and its standard error.

    Args:
        value: the estimate, differentiable; its derivatives of every order are estimates too, as unbiased as the value.
        error: the standard error; 0 where the value is exact.

    Example:
        >>> from fenchel.mixed import MaximumEntropy
        >>> MaximumEntropy(3).estimate_mean_dimension()  # 3 vertices, 3 edges, 1 triangle of area ½
        Estimate(value=tensor(0.6154), error=tensor(0.))
    """

    value: Tensor
    error: Tensor


class _ClosedSimplex(constraints.Constraint):
    """The constraint of vectors with entries ≥ 0 that sum to 1, up to rounding.

    Example:
        >>> closed_simplex.check(torch.tensor([[0.3, 0.7, 0.0], [0.5, 0.6, -0.1]]))
        tensor([ True, False])
    """

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        rounding = max(1e-6, 4 * eps * math.sqrt(value.shape[-1]))
        return (value >= 0).all(-1) & ((value.sum(-1) - 1).abs() < rounding)


closed_simplex = _ClosedSimplex()


def faces(vertices: int, *, device: torch.device | None = None) -> Tensor:
    """All 2ᴷ − 1 faces of the simplex with K vertices, boolean (2ᴷ − 1, K): the vertices first, the interior last.

    Example:
        >>> faces(2).int().tolist()
        [[1, 0], [0, 1], [1, 1]]
    """
    check_count(vertices, "vertices")
    bits = torch.arange(1, 2**vertices, device=device).unsqueeze(-1) >> torch.arange(vertices, device=device) & 1
    return bits[bits.sum(-1).argsort(stable=True)].bool()


class Mixed(Distribution):
    r"""A random vector in the closed simplex, with a probability for every face and a density on each.

    .. math:: \Pr(Y \in A) = \sum_f P_F(f) \int_{A \cap \operatorname{ri}(f)} p_{Y|F}(y \mid f)

    A face is a boolean vector: which entries are positive. Densities on a face are with respect to its first
    :math:`|f| - 1` coordinates, as in torch's ``Dirichlet``; a vertex has a probability. Together they are a density
    with respect to the direct-sum measure; entropy, KL divergence and mutual information are those of this density.

    ==========================  =====================================================================================
    ``y.log_prob(value)``       log P(f) + log p(value | f), f the face of the value
    ``y.face_log_prob(face)``   log P(f)
    ``y.face_of(value)``        which entries are positive
    ``y.sample_face()``         a face, with its probability
    ``y.sample()``              a value; ``rsample`` where gradients can pass through it (``has_rsample``)
    ``y.entropy()``             H(F) + H(Y | F), in nats
    ``y.face_entropy()``        H(F)
    ``y.mean_dimension()``      the expected dimension of the face, E|F| − 1
    ``y.code_length(n)``        average bits of a code that stores faces exactly and each coordinate with n bits
    ==========================  =====================================================================================

    Sampling takes a ``generator``. For two vertices everything is exact. A quantity without a closed form is estimated
    by sampling, and has a counterpart that takes ``num_samples`` and a ``generator`` and also returns the standard
    error: ``estimate_entropy``, ``estimate_kl`` (whose value is ``torch.distributions.kl_divergence``),
    ``estimate_face_entropy``, ``estimate_mean_dimension``, ``estimate_code_length``; for faces ``face_probability``.
    ``estimate`` estimates the expectation of any function of values.

    Example:
        >>> from fenchel.mixed import GaussianSparsemax
        >>> y = GaussianSparsemax(torch.tensor([1.0, 0.0]), scale=torch.full((2,), 0.5))
        >>> y.face_of(torch.tensor([0.25, 0.75]))
        tensor([True, True])
        >>> y.mean_dimension()  # the probability of the edge
        tensor(0.4977)
    """

    support = closed_simplex
    _validate_args = True  # torch.compile switches off torch's default for all distributions
    _parameters: ClassVar[dict[str, int]]
    """The names of the parameters, and the number of dimensions of each that are not batch dimensions."""
    _max_enumerated = 6
    """The largest number of vertices for which sums over faces are computed face by face, and not estimated."""

    def __init__(self, batch_shape: torch.Size, event_shape: torch.Size, validate_args: bool | None = None) -> None:
        super().__init__(batch_shape, event_shape, validate_args=False)
        self._validate_args = Mixed._validate_args if validate_args is None else validate_args

    @abstractmethod
    def face_log_prob(self, face: Tensor) -> Tensor:
        """The log-probability of faces, boolean (…, K): that exactly these entries are positive."""

    @abstractmethod
    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of values (…, K) with respect to the direct-sum measure."""

    @property
    def vertices(self) -> int:
        """K, the length of a value."""
        return self.event_shape[-1]

    def face_of(self, value: Tensor) -> Tensor:
        """The face in whose relative interior values lie: which entries are positive."""
        check_kind(value, "value", Tensor)
        return value > 0

    def sample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw values, (*sample_shape, *batch, K)."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def rsample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw values (*sample_shape, *batch, K) that are differentiable in the parameters."""
        raise NotImplementedError(f"{type(self).__name__} has no rsample: its faces are sampled from a discrete choice")

    def sample_face(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw faces, boolean (*sample_shape, *batch, K)."""
        return self.face_of(self.sample(sample_shape, generator))

    def entropy(self) -> Tensor:
        """H(F) + H(Y | F) in nats: the value of ``estimate_entropy``, which also returns the error."""
        return self.estimate_entropy().value

    def estimate_entropy(self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None) -> Estimate:
        """The entropy: exact (error 0) for two vertices, else the mean of −log_prob over samples."""
        return self._mean(lambda value, log_prob: -log_prob, num_samples, generator)

    def face_entropy(self) -> Tensor:
        """The entropy H(F) of the face, in nats: the value of ``estimate_face_entropy``."""
        return self.estimate_face_entropy().value

    def estimate_face_entropy(
        self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """H(F): a sum over all faces for few vertices, else a mean over sampled faces."""

        if self.vertices <= self._max_enumerated:
            return self._over_faces(lambda face, log_prob: -log_prob)
        return self._over_drawn_faces(lambda face, log_prob: -log_prob, num_samples, generator)

    def mean_dimension(self) -> Tensor:
        """The expected dimension of the face, E|F| − 1: the value of ``estimate_mean_dimension``."""
        return self.estimate_mean_dimension().value

    def estimate_mean_dimension(
        self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """E|F| − 1: a sum over all faces for few vertices, else a mean over samples."""
        if self.vertices <= self._max_enumerated:
            return self._over_faces(lambda face, log_prob: face.sum(-1).to(log_prob.dtype) - 1)
        return self.estimate(
            lambda value: (self.face_of(value).sum(-1) - 1).to(value.dtype),
            num_samples=num_samples,
            generator=generator,
        )

    def code_length(self, precision: float | Tensor) -> Tensor:
        """The average bits of an optimal code: the face exactly, and each coordinate with ``precision`` bits."""
        return self.estimate_code_length(precision).value

    def estimate_code_length(
        self, precision: float | Tensor, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """The code length, and an upper bound of its standard error: the sum of the errors of its two parts."""
        entropy, dimension = (
            self.estimate_entropy(num_samples=num_samples, generator=generator),
            self.estimate_mean_dimension(num_samples=num_samples, generator=generator),
        )
        error = (
            entropy.error / math.log(2)
            + torch.as_tensor(precision, device=dimension.error.device).abs() * dimension.error
        )
        return Estimate(entropy.value / math.log(2) + precision * dimension.value, error)

    def face_probability(self, face: Tensor) -> Estimate:
        """P(F = face), and its standard error: 0 where it is exact or by quadrature."""
        log_prob, error = self._face_terms(face)
        return Estimate(log_prob.exp().to(self._dtype), (error * log_prob.detach().exp()).to(self._dtype))

    def expect(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The expectation of a function of values for two vertices, by quadrature on the edge."""
        if self.vertices != 2:
            raise NotImplementedError("expect is for two vertices; for more see estimate")
        return self._expect(lambda value, _: function(value))

    def estimate(
        self,
        function: Callable[[Tensor], Tensor],
        *,
        num_samples: int = SAMPLES,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """The expectation of a function of values, estimated from samples.

        The gradient is that of the score function estimator: log-densities are discontinuous between faces, which a
        gradient through samples does not see.
        """
        if self._differentiable:
            return self._estimate(lambda value, _: function(value), num_samples, generator)
        h = function(self.sample((check_count(num_samples, "num_samples", 2),), generator))
        return Estimate(h.mean(0), standard_error(h))

    def estimate_kl(
        self, other: Mixed, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """KL(self ‖ other): exact (error 0) for two vertices, else a mean over samples."""
        p, q = broadcast_pair(self, other)
        return p._mean(lambda value, log_prob: log_prob - q.log_prob(value), num_samples, generator)

    def expand(self: Self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        new: Self = self._get_checked_instance(type(self), _instance)  # type: ignore[no-untyped-call]
        shape = torch.Size(batch_shape)
        for name, dims in self._parameters.items():
            value = getattr(self, name)
            setattr(new, name, value if value is None else value.expand(shape + value.shape[value.dim() - dims :]))
        Distribution.__init__(new, shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name}: {tuple(value.shape)}" for name in self._parameters if (value := getattr(self, name)) is not None
        )
        return f"{type(self).__name__}({shapes})"

    # -- for subclasses ----------------------------------------------------------------------------

    def _edge_breaks(self) -> Tensor:
        """Ascending logits (P, *batch) that divide the edge of two vertices into intervals for quadrature."""
        breaks = torch.linspace(-40, 40, 17, dtype=torch.float64, device=self._device)
        return breaks.reshape(-1, *[1] * len(self.batch_shape)).expand(-1, *self.batch_shape)

    def _mean(self, function: ValueFunction, num_samples: int, generator: torch.Generator | None) -> Estimate:
        if self.vertices == 2:
            return exact_estimate(self._expect(function).to(self._dtype))
        return self._estimate(function, num_samples, generator)

    def _expect(self, function: ValueFunction) -> Tensor:
        ends = torch.eye(2, dtype=torch.float64, device=self._device)
        ends = ends.reshape(2, *[1] * len(self.batch_shape), 2).expand(2, *self.batch_shape, 2)

        def mass(value: Tensor) -> Tensor:
            log_prob = self.log_prob(value)
            possible = log_prob > -torch.inf
            return torch.where(possible, log_prob.exp() * torch.where(possible, function(value, log_prob), 0.0), 0.0)

        def edge(t: Tensor) -> Tensor:  # a function of logits, which resolve both ends
            value = torch.stack([t.sigmoid(), (-t).sigmoid()], -1)
            return mass(value) * value.prod(-1)

        return mass(ends).sum(0) + line(edge, self._edge_breaks().detach())

    def _estimate(self, function: ValueFunction, num_samples: int, generator: torch.Generator | None) -> Estimate:
        value, log_prob = self._draw(check_count(num_samples, "num_samples", 2), generator)
        return score_estimate(function(value, log_prob), log_prob)

    def _draw(self, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Sampled values, and log-probabilities of the random variables behind them, whose gradient is the score."""
        value = self.sample((n,), generator)
        return value, self.log_prob(value)

    def _face_terms(self, face: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of faces, and relative standard errors of the probabilities."""
        log_prob = self.face_log_prob(face)
        return log_prob, torch.zeros_like(log_prob)

    def _over_faces(self, function: ValueFunction) -> Estimate:
        face = faces(self.vertices, device=self._device)
        face = face.reshape(len(face), *[1] * len(self.batch_shape), -1).expand(-1, *self.batch_shape, -1)
        log_prob, error = self._face_terms(face)
        possible = log_prob > -torch.inf
        h = function(face, torch.where(possible, log_prob, 0.0))
        prob = log_prob.exp()
        value = torch.where(possible, prob * h, 0.0).sum(0)
        # The errors of different faces are correlated, so their sum is an upper bound.
        worst = (error * (prob * (h.abs() + 1)).detach()).sum(0)
        return Estimate(value.to(self._dtype), worst.to(self._dtype))

    def _over_drawn_faces(
        self, function: ValueFunction, num_samples: int, generator: torch.Generator | None
    ) -> Estimate:
        face = self.sample_face((check_count(num_samples, "num_samples", 2),), generator)
        log_prob, error = self._face_terms(face)
        mean = score_estimate(function(face, log_prob), log_prob)
        return Estimate(mean.value.to(self._dtype), (mean.error + error.mean(0)).to(self._dtype))

    @property
    def _differentiable(self) -> bool:
        """Whether any derivative in the parameters may be asked for."""
        parameters = [value for name in self._parameters if (value := getattr(self, name)) is not None]
        if forward_mode() or any(map(is_mapped, parameters)):
            return True
        return torch.is_grad_enabled() and any(value.requires_grad for value in parameters)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(self, next(iter(self._parameters))).dtype
        return dtype

    @property
    def _device(self) -> torch.device:
        device: torch.device = getattr(self, next(iter(self._parameters))).device
        return device

    def _check_face(self, face: Tensor) -> Tensor:
        """Check a face and broadcast it with the batch."""
        check_shape(check_mask(face, "face", true="the entry is positive"), "face", "…", self.vertices)
        if self._validate_args and not bool(face.any(-1).all()):
            raise ValueError("face must have at least one True entry")
        return face.expand(self._batched("face", face))

    def _check_value(self, value: Tensor) -> Tensor:
        """Check a value and broadcast it with the batch."""
        if self._validate_args:
            self._validate_sample(value)
        return value.expand(self._batched("value", value))

    def _batched(self, name: str, value: Tensor) -> torch.Size:
        """The shape of values or faces (…, K) after broadcasting with the batch."""
        what = f"the shape of {name} and that of a sample"
        return check_broadcast(what, value.shape, self.batch_shape + self.event_shape)

    def _on_simplex(self, value: Tensor, log_prob: Tensor) -> Tensor:
        """Log-densities, −inf for values outside of the simplex, NaN for NaN, in the dtype of values and parameters."""
        log_prob = torch.where(closed_simplex.check(value), log_prob, -torch.inf)
        log_prob = torch.where(value.isnan().any(-1), torch.nan, log_prob)
        return log_prob.to(torch.promote_types(self._dtype, value.dtype))


def exact_estimate(value: Tensor) -> Estimate:
    """An estimate with error 0."""
    return Estimate(value, torch.zeros_like(value))


def standard_error(h: Tensor) -> Tensor:
    """The standard error of the mean over the first dimension. (``torch.std`` warns for empty tensors.)"""
    n, h = len(h), h.detach()
    return ((h - h.mean(0)).square().sum(0) / (n * (n - 1))).sqrt()


def score_estimate(h: Tensor, log_prob: Tensor) -> Estimate:
    """The mean of values h over the first dimension, and its error; derivatives of every order are unbiased.

    Each value is multiplied by a ratio of probabilities that equals 1 and has the derivatives of the score function
    (Foerster et al. 2018). The mean of all other values is subtracted as a baseline, to reduce the variance.
    """
    n, mean = len(h), h.mean(0)
    others = ((mean - h / n) * (n / (n - 1))).detach()
    weighted = ((h - others) * (log_prob - log_prob.detach()).exp() + others).mean(0)
    value = torch.where(mean.isfinite(), weighted, mean)
    return Estimate(value, standard_error(h))


def is_differentiated(value: Tensor) -> bool:
    """Whether derivatives with respect to a tensor are computed, in reverse or forward mode."""
    return has_tangent(value) or (torch.is_grad_enabled() and value.requires_grad)


P = TypeVar("P", bound=Mixed)
Q = TypeVar("Q", bound=Mixed)


def broadcast_pair(p: P, q: Q) -> tuple[P, Q]:
    """Broadcast two distributions to one batch shape."""
    if p.event_shape != q.event_shape:
        raise ValueError(f"both must have the same number of vertices, got {p.vertices} and {q.vertices}")
    shape = check_broadcast("the batch dimensions of both distributions", p.batch_shape, q.batch_shape)
    return p.expand(shape), q.expand(shape)


@register_kl(Mixed, Mixed)  # type: ignore[no-untyped-call,untyped-decorator]
def _kl(p: Mixed, q: Mixed) -> Tensor:
    return p.estimate_kl(q).value


def mutual_information(
    y: Mixed, weights: Tensor | None = None, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
) -> Estimate:
    r"""The mutual information, in nats, of a mixed random vector and the variable that it depends on.

    .. math:: I(X; Y) = \sum_x P(x) \; \mathrm{KL}(p_{Y|X=x} \,\|\, p_Y), \qquad p_Y = \sum_x P(x)\, p_{Y|X=x}

    Args:
        y: p(y | x), a batch (N,) of mixed distributions, one for each of N values of x.
        weights: P(x), (N,); uniform if None.
        num_samples: the number of samples of each distribution.
        generator: of the random numbers; torch's default if None.

    Returns:
        The estimate, and its standard error; exact (error 0) for two vertices.

    Example:
        >>> from fenchel.mixed import GaussianSparsemax
        >>> y = GaussianSparsemax(torch.tensor([[9.0, 0.0], [0.0, 9.0]]), scale=torch.ones(2, 2))
        >>> round(mutual_information(y).value.item() / math.log(2), 3)  # nearly one bit
        1.0
    """
    check_kind(y, "y", Mixed, what="a mixed distribution")
    if len(y.batch_shape) != 1:
        raise ValueError(f"y must have one batch dimension, a distribution for each x, got {tuple(y.batch_shape)}")
    count = y.batch_shape[0]
    if weights is None:
        weights = torch.full((count,), 1 / count, dtype=y._dtype, device=y._device)
    check_floats(weights, "weights")
    if weights.shape != (count,) or not bool((weights >= 0).all()) or abs(weights.sum().item() - 1) > 1e-6:
        raise ValueError(f"weights must be {count} probabilities that sum to 1, got shape {tuple(weights.shape)}")

    def gain(value: Tensor, log_prob: Tensor) -> Tensor:
        each = y.log_prob(value.unsqueeze(-2))  # (…, N drawn from, N)
        ratio = log_prob - torch.logsumexp(each + weights.log(), -1)
        return torch.where(weights > 0, ratio, 0.0)  # terms of probability zero are left out, even if infinite

    part = y._mean(gain, num_samples, generator)
    return Estimate((weights * part.value).sum(-1), (weights * part.error).square().sum(-1).sqrt())
