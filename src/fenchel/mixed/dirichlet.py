"""MixedDirichlet: a Gibbs distribution over the faces, and a Dirichlet distribution on each face."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid, softplus

from fenchel._checks import check_broadcast, check_count, check_floats, check_positive
from fenchel._torch import has_tangent, is_mapped, standard_gamma
from fenchel.mixed.base import (
    SAMPLES,
    Estimate,
    Mixed,
    broadcast_pair,
    exact_estimate,
    faces,
    score_estimate,
)

MAX_ENUMERATED = 12
"""The largest number of vertices for which sums without a closed form are computed face by face."""


class MixedDirichlet(Mixed):
    r"""A random face with one score per vertex, and a Dirichlet distribution on that face.

    .. math::
        P_F(f) = \frac{\exp \langle w, f \rangle}{\prod_k (1 + e^{w_k}) - 1}, \qquad
        Y \mid F = f \sim \mathrm{Dirichlet}(\alpha_f), \qquad f \in \{0, 1\}^K \setminus \{0\}

    Log-probabilities, face entropy and the expected dimension have closed forms and sampling is exact for any K, in
    O(K). Entropy and KL divergence have a closed form, in O(K²), if all vertices share one concentration: of size 1
    along its last dimension, or constant and without a gradient. Otherwise they are a sum over faces for K ≤ 12; for
    more vertices a part of them is estimated, and ``estimate_entropy`` and ``estimate_kl`` return the error.

    Args:
        face_logits: w, (…, K): real, −inf for vertices that are never in a face; not all −inf.
        concentration: α > 0, broadcastable with it.

    Faces are discrete, so samples have no gradient (``has_rsample`` is False); on a given face ``rsample_on`` is
    differentiable in the concentration.

    Example:
        >>> y = MixedDirichlet(torch.tensor([1.0, 0.0, -1.0]), torch.ones(3))
        >>> y.face_log_prob(torch.tensor([True, False, True])).exp()  # e⁰ / ((1 + e)(1 + 1)(1 + 1/e) − 1)
        tensor(0.1090)
        >>> y.log_prob(torch.tensor([0.25, 0.0, 0.75])).exp()  # uniform on that edge
        tensor(0.1090)

    References:
        Farinhas, Aziz, Niculae & Martins (2022), Sparse communication via mixed distributions.
    """

    arg_constraints: ClassVar = {
        "face_logits": constraints.real_vector,
        "concentration": constraints.independent(constraints.positive, 1),  # type: ignore[no-untyped-call]
    }
    _parameters: ClassVar[dict[str, int]] = {"face_logits": 1, "concentration": 1}
    has_rsample = False

    def __init__(self, face_logits: Tensor, concentration: Tensor, validate_args: bool | None = None) -> None:
        check_floats(face_logits, "face_logits", "…", "K")
        check_floats(concentration, "concentration", "…", "K")
        check_broadcast("the shapes of face_logits and concentration", face_logits.shape, concentration.shape)
        self.face_logits, self.concentration = torch.broadcast_tensors(face_logits, concentration)  # type: ignore[no-untyped-call]
        batch, event = self.face_logits.shape[:-1], self.face_logits.shape[-1:]
        super().__init__(batch, event, validate_args)
        if self._validate_args:
            check_positive(concentration, "concentration")
            if not bool(((face_logits < torch.inf) & (face_logits > -torch.inf).any(-1, keepdim=True)).all()):
                raise ValueError("face_logits must be below +inf, and in each row at least one above −inf")
        self._shared = concentration.shape[-1] == 1 or _constant(concentration)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> MixedDirichlet:
        new = super().expand(batch_shape, _instance)
        new._shared = self._shared
        return new

    # -- faces ---------------------------------------------------------------------------------------

    @property
    def log_partition(self) -> Tensor:
        """log(Π(1 + e^w) − 1), as a sum over the first vertex of a face, without cancellation or overflow."""
        return torch.logsumexp(self._first, -1).to(self._dtype)

    @property
    def inclusion(self) -> Tensor:
        """The probability that vertex k is in the face, for each k, (…, K)."""
        return self._inclusion.to(self._dtype)

    @property
    def _w(self) -> Tensor:
        w: Tensor = self.face_logits.double()
        return w

    @property
    def _first(self) -> Tensor:
        """The log-weight of all faces whose first vertex is k, (…, K); later vertices are in or out independently."""
        later: Tensor = softplus(self._w).flip(-1).cumsum(-1).flip(-1)
        first: Tensor = self._w + torch.cat([later[..., 1:], torch.zeros_like(later[..., :1])], -1)
        return first

    @property
    def _inclusion(self) -> Tensor:
        total = softplus(self._w).sum(-1, keepdim=True) - torch.logsumexp(self._first, -1, keepdim=True)
        return (logsigmoid(self._w) + total).exp()

    @property
    def _face_entropy(self) -> Tensor:
        expected = (self._inclusion * torch.where(self._w > -torch.inf, self._w, 0.0)).sum(-1)
        return torch.logsumexp(self._first, -1) - expected

    def face_log_prob(self, face: Tensor) -> Tensor:
        face = self._check_face(face)
        score = torch.where(face, self._w, 0.0).sum(-1) - torch.logsumexp(self._first, -1)
        return torch.where(face.any(-1), score, -torch.inf).to(self._dtype)

    def sample_face(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        with torch.no_grad():
            noise = torch.empty(shape, dtype=torch.float64, device=self._device).exponential_(generator=generator)
            first = (self._first - noise.log()).argmax(-1, keepdim=True)
            later = torch.rand(shape, dtype=torch.float64, device=self._device, generator=generator) < self._w.sigmoid()
            place = torch.arange(self.vertices, device=self._device)
            return (place == first) | (later & (place > first))

    def estimate_face_entropy(
        self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """H(F), in closed form."""
        return exact_estimate(self._face_entropy.to(self._dtype))

    def estimate_mean_dimension(
        self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """E|F| − 1, in closed form."""
        return exact_estimate((self._inclusion.sum(-1) - 1).to(self._dtype))

    def size_log_prob(self) -> Tensor:
        """log P(|F| = n) for n = 1 … K, (…, K), in O(K²)."""
        return self._size_log_prob.to(self._dtype)

    @property
    def _size_log_prob(self) -> Tensor:
        sums = self._w.new_full((*self.batch_shape, self.vertices + 1), -torch.inf)
        sums = torch.cat([torch.zeros_like(sums[..., :1]), sums[..., 1:]], -1)
        for w in self._w.unbind(-1):
            sums = torch.cat([sums[..., :1], log_add(sums[..., 1:], sums[..., :-1] + w.unsqueeze(-1))], -1)
        return sums[..., 1:] - torch.logsumexp(self._first, -1, keepdim=True)

    # -- values --------------------------------------------------------------------------------------

    def log_prob(self, value: Tensor) -> Tensor:
        value = self._check_value(value)
        face = self.face_of(value)
        alpha = torch.where(face, self.concentration.double(), 1.0)
        logs = torch.where(face, value.double(), 1.0).log()
        total = torch.where(face, alpha, 0.0).sum(-1)
        density = ((alpha - 1) * logs - torch.lgamma(alpha)).sum(-1) + torch.lgamma(torch.where(total > 0, total, 1.0))
        of_face = torch.where(face, self._w, 0.0).sum(-1) - torch.logsumexp(self._first, -1)
        return self._on_simplex(value, of_face + density)

    def sample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        face = self.sample_face(sample_shape, generator)
        with torch.no_grad():
            return self.rsample_on(face, generator)

    def rsample_on(self, face: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one value per face, (…, K), differentiable in the concentration.

        Gamma variables are computed as logarithms, so that small concentrations do not underflow before they are
        normalised. Entries in the face are at least the smallest normal number.
        """
        face = self._check_face(face)
        alpha = torch.where(face, self.concentration, 1.0)
        uniform = torch.rand(alpha.shape, dtype=alpha.dtype, device=alpha.device, generator=generator)
        tiny = torch.finfo(alpha.dtype).tiny
        gamma = standard_gamma(alpha + 1, generator=generator)
        logs = gamma.clamp_min(tiny).log() + uniform.clamp_min(tiny).log() / alpha
        value = torch.where(face, logs, -torch.inf).softmax(-1)
        return torch.where(face, value.clamp_min(tiny), 0.0)

    # -- information ---------------------------------------------------------------------------------

    def estimate_entropy(self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None) -> Estimate:
        """The entropy; exact (error 0) for a concentration with equal entries or few vertices.

        Otherwise the part that depends on the sum of the concentration over the face is a mean over ``num_samples``
        faces, and the rest is exact.
        """
        alpha = self.concentration.double()
        each = torch.lgamma(alpha) - (alpha - 1) * torch.digamma(alpha)
        known = self._face_entropy + (self._inclusion * each).sum(-1)

        def rest(total: Tensor, size: Tensor) -> Tensor:
            return (total - size) * torch.digamma(total) - torch.lgamma(total)

        part = self._over_sums(lambda a, _, size: rest(a, size), self, num_samples, generator)
        return Estimate((known + part.value).to(self._dtype), part.error.to(self._dtype))

    def estimate_kl(
        self, other: Mixed, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """KL(self ‖ other): exact (error 0) if both are of this class and their entropies are exact."""
        if not isinstance(other, MixedDirichlet):
            return super().estimate_kl(other, num_samples=num_samples, generator=generator)
        p, q = broadcast_pair(self, other)
        alpha, beta, inclusion = p.concentration.double(), q.concentration.double(), p._inclusion
        ever = p._w > -torch.inf
        ratio = torch.where(ever, p._w, 0.0) - torch.where(ever, q._w, 0.0)
        logits = torch.where(inclusion > 0, inclusion * ratio, 0.0).sum(-1)
        over_faces = logits - torch.logsumexp(p._first, -1) + torch.logsumexp(q._first, -1)
        each = torch.lgamma(beta) - torch.lgamma(alpha) + (alpha - beta) * torch.digamma(alpha)

        def rest(a: Tensor, b: Tensor, size: Tensor) -> Tensor:
            return torch.lgamma(a) - torch.lgamma(b) - (a - b) * torch.digamma(a)

        part = p._over_sums(rest, q, num_samples, generator)
        value = over_faces + (inclusion * each).sum(-1) + part.value
        return Estimate(value.to(p._dtype), part.error.to(p._dtype))

    def _over_sums(
        self, function: Any, other: MixedDirichlet, num_samples: int, generator: torch.Generator | None
    ) -> Estimate:
        """The expectation of a function of |F| and the sums over F of this concentration and another's."""
        alpha, beta = self.concentration.double(), other.concentration.double()
        if self._shared and other._shared:
            size = torch.arange(1, self.vertices + 1, dtype=torch.float64, device=self._device)
            values = function(alpha[..., :1] * size, beta[..., :1] * size, size)
            return exact_estimate((self._size_log_prob.exp() * values).sum(-1))
        enumerated = self.vertices <= MAX_ENUMERATED
        if enumerated:
            face = faces(self.vertices, device=self._device)
            face = face.reshape(len(face), *[1] * len(self.batch_shape), -1).expand(-1, *self.batch_shape, -1)
        else:
            face = self.sample_face((check_count(num_samples, "num_samples", 2),), generator)
        log_prob = self.face_log_prob(face).double()
        values = function((alpha * face).sum(-1), (beta * face).sum(-1), face.sum(-1).double())
        return exact_estimate((log_prob.exp() * values).sum(0)) if enumerated else score_estimate(values, log_prob)

    def _edge_breaks(self) -> Tensor:
        a, b = self.concentration.double().unbind(-1)
        centre = torch.digamma(a) - torch.digamma(b)
        width = (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()
        steps = torch.tensor([-40, -20, -10, -5, -3, -2, -1, 0, 1, 2, 3, 5, 10, 20, 40], device=self._device)
        return (centre + width * steps.reshape(-1, *[1] * len(self.batch_shape))).clamp(-700, 700)


def _constant(concentration: Tensor) -> bool:
    """Whether all entries of a row are equal, and no derivatives in them are computed."""
    if concentration.requires_grad or is_mapped(concentration) or has_tangent(concentration):
        return False
    return bool((concentration == concentration[..., :1]).all())


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """log(eᵃ + eᵇ), with a gradient of zero where both are −inf."""
    nothing = (a == -torch.inf) & (b == -torch.inf)
    return torch.where(nothing, -torch.inf, torch.logaddexp(torch.where(nothing, 0.0, a), torch.where(nothing, 0.0, b)))
