"""The mixed distribution with the largest entropy, for a number of vertices and a precision in bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from fenchel._checks import check_count, check_entries, check_floats, check_number, check_real
from fenchel.mixed.base import SAMPLES, Estimate, Mixed, broadcast_pair, exact_estimate


class MaximumEntropy(Mixed):
    r"""The mixed distribution with the largest entropy: uniform on every face, with precision :math:`2^{-N}`.

    .. math::
        P_F(f) = \frac{2^{N(|f|-1)} / (|f|-1)!}{L^{(1)}_{K-1}(-2^N)}, \qquad
        L^{(1)}_{K-1}(-2^N) = \sum_{n=1}^{K} \binom{K}{n} \frac{2^{N(n-1)}}{(n-1)!}

    with the generalized Laguerre polynomial. ``code_length(N)`` is the binary logarithm of that polynomial; for two
    vertices :math:`\log_2(2 + 2^N)`. For N → −∞ it is uniform over the vertices, for N → ∞ uniform in the interior.

    Args:
        vertices: K.
        precision: N, in bits per coordinate; a number, or a tensor (…) for a batch. 0 gives the largest
            direct-sum entropy.

    Example:
        >>> y = MaximumEntropy(2, precision=torch.tensor([0.0, 3.0]))
        >>> torch.stack([y.code_length(y.precision), torch.log2(2 + 2**y.precision)])
        tensor([[1.5850, 3.3219],
                [1.5850, 3.3219]])
    """

    arg_constraints: ClassVar = {"precision": constraints.real}
    _parameters: ClassVar[dict[str, int]] = {"precision": 0}
    has_rsample = False

    def __init__(self, vertices: int, precision: float | Tensor = 0.0, validate_args: bool | None = None) -> None:
        vertices = check_count(vertices, "vertices")
        self.precision = torch.as_tensor(
            check_real(precision, "precision"),
            dtype=None if isinstance(precision, Tensor) else torch.get_default_dtype(),
            device=precision.device if isinstance(precision, Tensor) else None,
        )
        check_floats(self.precision, "precision")
        super().__init__(self.precision.shape, torch.Size((vertices,)), validate_args)
        if self._validate_args:
            check_entries(self.precision.isfinite(), self.precision, "precision", "be finite")

    @property
    def log_partition(self) -> Tensor:
        """log of the generalized Laguerre polynomial, in nats."""
        return torch.logsumexp(self._sizes, -1).to(self._dtype)

    @property
    def _nats(self) -> Tensor:
        return self.precision.double() * math.log(2)

    @property
    def _sizes(self) -> Tensor:
        """The log-weight of all faces with n vertices together, for n = 1 … K, (…, K)."""
        n = torch.arange(1, self.vertices + 1, dtype=torch.float64, device=self._device)
        choices = math.lgamma(self.vertices + 1) - torch.lgamma(n + 1) - torch.lgamma(self.vertices - n + 1)
        return choices + (n - 1) * self._nats.unsqueeze(-1) - torch.lgamma(n)

    def face_log_prob(self, face: Tensor) -> Tensor:
        face = self._check_face(face)
        size = face.sum(-1).double()
        weight = (size - 1) * self._nats - torch.lgamma(size) - torch.logsumexp(self._sizes, -1)
        return torch.where(size > 0, weight, -torch.inf).to(self._dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        value = self._check_value(value)
        dimension = self.face_of(value).sum(-1).double() - 1
        return self._on_simplex(value, dimension * self._nats - torch.logsumexp(self._sizes, -1))

    def sample_face(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        with torch.no_grad():
            noise = torch.empty(shape, dtype=torch.float64, device=self._device).exponential_(generator=generator)
            size = (self._sizes - noise.log()).argmax(-1, keepdim=True) + 1
            order = torch.rand(shape, dtype=torch.float64, device=self._device, generator=generator).argsort(-1)
            return order.argsort(-1) < size

    def sample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        face = self.sample_face(sample_shape, generator)
        noise = torch.empty(face.shape, dtype=self._dtype, device=self._device).exponential_(generator=generator)
        weights = torch.where(face, noise.clamp_min(torch.finfo(self._dtype).tiny), 0.0)
        return weights / weights.sum(-1, keepdim=True)

    def estimate_face_entropy(
        self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """H(F), in closed form."""
        rest = self._over_sizes(lambda n: torch.lgamma(n) - (n - 1) * self._nats.unsqueeze(-1))
        return exact_estimate(rest + self.log_partition)

    def estimate_mean_dimension(
        self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """E|F| − 1, in closed form."""
        return exact_estimate(self._over_sizes(lambda n: n - 1))

    def estimate_entropy(self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None) -> Estimate:
        return exact_estimate(self.log_partition - self._over_sizes(lambda n: (n - 1) * self._nats.unsqueeze(-1)))

    def estimate_kl(
        self, other: Mixed, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """KL(self ‖ other): exact (error 0) if both are of this class."""
        if not isinstance(other, MaximumEntropy):
            return super().estimate_kl(other, num_samples=num_samples, generator=generator)
        p, q = broadcast_pair(self, other)
        nats = (p._nats - q._nats).unsqueeze(-1)
        return exact_estimate(p._over_sizes(lambda n: (n - 1) * nats) + q.log_partition - p.log_partition)

    def _over_sizes(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        n = torch.arange(1, self.vertices + 1, dtype=torch.float64, device=self._device)
        return (self._sizes.softmax(-1) * function(n)).sum(-1).to(self._dtype)


def maximum_code_length(vertices: int, precision: float) -> float:
    """The largest code length, in bits, of a mixed distribution with K vertices and ``precision`` bits per coordinate.

    Example:
        >>> round(maximum_code_length(2, precision=1), 9)  # log₂(2 + 2¹)
        2.0
    """
    largest = MaximumEntropy(
        vertices, torch.tensor(check_number(precision, "precision"), dtype=torch.float64, device="cpu")
    )
    return float(largest.log_partition / math.log(2))
