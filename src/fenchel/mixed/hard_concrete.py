"""HardConcrete: a Concrete vector, stretched beyond the simplex and projected back onto it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid

from fenchel._checks import check_broadcast, check_entries, check_floats, check_positive, check_real
from fenchel.mixed.base import (
    SAMPLES,
    Estimate,
    Mixed,
    exact_estimate,
    is_differentiated,
)
from fenchel.regularizers import sparsemax


class HardConcrete(Mixed):
    r"""Sparsemax of a stretched Concrete vector (…, K); for two vertices the binary Hard Concrete.

    .. math:: Y = \operatorname{sparsemax}(\tau Y'), \qquad
        Y' = \operatorname{softmax}\bigl((z + G)/\lambda\bigr), \quad G_k \sim \mathrm{Gumbel}(0, 1)

    The larger the stretch, the larger the probability of small faces; with a stretch of 1 it is the Concrete
    distribution, whose values are in the interior. For two vertices everything has a closed form but entropy and KL
    divergence, which are computed by quadrature. For more vertices, ``log_prob`` and ``entropy`` have no closed form
    and raise a ``NotImplementedError``, and probabilities of faces are estimated by samples: ``face_probability``
    takes ``num_samples`` and a ``generator``, and returns the error.

    Args:
        logits: z, (…, K).
        temperature: λ > 0, a number or one per row, (…).
        stretch: τ ≥ 1, a number or one per row, (…).

    Example:
        >>> y = HardConcrete(torch.zeros(2), temperature=0.5, stretch=1.2)
        >>> y.face_log_prob(torch.tensor([[True, False], [False, True], [True, True]])).exp()
        tensor([0.2317, 0.2317, 0.5367])

    References:
        Louizos, Welling & Kingma (2018), Learning sparse neural networks through L0 regularization; Farinhas, Aziz,
        Niculae & Martins (2022), Sparse communication via mixed distributions.
    """

    arg_constraints: ClassVar = {
        "logits": constraints.real_vector,
        "temperature": constraints.positive,
        "stretch": constraints.greater_than_eq(1),  # type: ignore[no-untyped-call]
    }
    _parameters: ClassVar[dict[str, int]] = {"logits": 1, "temperature": 0, "stretch": 0}
    _max_enumerated = 2
    has_rsample = True

    def __init__(
        self, logits: Tensor, temperature: float | Tensor, stretch: float | Tensor, validate_args: bool | None = None
    ) -> None:
        check_floats(logits, "logits", "…", "K")
        temperature, stretch = (
            torch.as_tensor(check_real(value, name), dtype=logits.dtype, device=logits.device)
            for value, name in ((temperature, "temperature"), (stretch, "stretch"))
        )
        shapes = logits.shape[:-1], temperature.shape, stretch.shape
        batch = check_broadcast("the batch dimensions of logits, and temperature and stretch,", *shapes)
        self.logits = logits.expand(*batch, -1)
        self.temperature, self.stretch = temperature.expand(batch), stretch.expand(batch)
        super().__init__(batch, logits.shape[-1:], validate_args)
        if self._validate_args:
            check_entries(logits.isfinite(), logits, "logits", "be finite")
            check_positive(temperature, "temperature")
            check_entries((stretch >= 1) & (stretch < torch.inf), stretch, "stretch", "be finite and at least 1")

    def rsample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        return self._project(self._log_concrete(sample_shape, generator))

    def _log_concrete(self, sample_shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        """Samples of log Y′, (…, K); at low temperatures Y′ would underflow."""
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.empty(shape, dtype=self._dtype, device=self._device).exponential_(generator=generator)
        gumbel = -noise.clamp_min(torch.finfo(self._dtype).tiny).log()
        return ((self.logits + gumbel) / self.temperature.unsqueeze(-1)).log_softmax(-1)

    def face_log_prob(self, face: Tensor) -> Tensor:
        if self.vertices == 2:
            return self._binary_face(self._check_face(face)).to(self._dtype)
        estimate = self.face_probability(face).value
        return estimate.log()

    def face_probability(
        self, face: Tensor, *, num_samples: int = 4 * SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """P(F = face), exact (error 0) for two vertices, else the share of samples on it, with its standard error.

        The error is computed as if there were one sample more on the face and one more off it, so that it is never 0.
        """
        face = self._check_face(face)
        if self.vertices == 2:
            return exact_estimate(self._binary_face(face).exp().to(self._dtype))
        with torch.no_grad():
            logs = self._log_concrete((num_samples,), generator)
            drawn = self._project(logs) > 0
        score = self._score(logs) if self._differentiable else None

        def share(face: Tensor) -> Tensor:
            on_face = (drawn == face).all(-1).to(self._dtype)
            # The share is not differentiable in the samples; its gradient is E[1 ∇log p].
            return on_face.mean(0) if score is None else (on_face * (score - score.detach()).exp()).mean(0)

        count = math.prod(face.shape[: face.dim() - 1 - len(self.batch_shape)])
        one_each = face.reshape(count, *self.batch_shape, self.vertices)
        value = torch.stack([share(each) for each in one_each]) if len(one_each) else one_each[..., 0].to(self._dtype)
        value = value.reshape(face.shape[:-1])
        p = (num_samples * value.detach() + 1) / (num_samples + 2)
        return Estimate(value, (p * (1 - p) / num_samples).sqrt())

    def _draw(self, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if self.vertices == 2:
            return super()._draw(n, generator)
        with torch.no_grad():
            logs = self._log_concrete((n,), generator)
        return self._project(logs).detach(), self._score(logs)

    def _project(self, logs: Tensor) -> Tensor:
        return sparsemax(self.stretch.unsqueeze(-1) * logs.exp())

    def _score(self, logs: Tensor) -> Tensor:
        """The log-density of Y′ at samples of log Y′, up to a constant."""
        if is_differentiated(self.stretch):
            raise NotImplementedError("expectations above 2 vertices have no gradient in stretch: detach it")
        k = self.vertices
        terms = self.logits - self.temperature.unsqueeze(-1) * logs
        return terms.sum(-1) - k * torch.logsumexp(terms, -1) + (k - 1) * self.temperature.log()

    def log_prob(self, value: Tensor) -> Tensor:
        self._only_two("log_prob")
        value = self._check_value(value)
        y, face = value.double(), self.face_of(value)
        stretch, temperature = self.stretch.double(), self.temperature.double()
        inner = torch.where(face.all(-1, keepdim=True), y, 0.5)
        log_one, log_other = ((inner + (stretch.unsqueeze(-1) - 1) / 2) / stretch.unsqueeze(-1)).log().unbind(-1)
        u = temperature * (log_one - log_other) - self._logit
        density = logsigmoid(u) + logsigmoid(-u) + temperature.log() - log_one - log_other - stretch.log()
        return self._on_simplex(value, torch.where(face.all(-1), density, self._binary_face(face)))

    def estimate_entropy(self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None) -> Estimate:
        self._only_two("entropy")
        return super().estimate_entropy(num_samples=num_samples, generator=generator)

    def estimate_face_entropy(
        self, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        self._only_two("face_entropy")
        return super().estimate_face_entropy(num_samples=num_samples, generator=generator)

    def estimate_kl(
        self, other: Mixed, *, num_samples: int = SAMPLES, generator: torch.Generator | None = None
    ) -> Estimate:
        """KL(self ‖ other), for two vertices."""
        self._only_two("kl_divergence")
        return super().estimate_kl(other, num_samples=num_samples, generator=generator)

    def _only_two(self, name: str) -> None:
        if self.vertices != 2:
            raise NotImplementedError(
                f"{name} of a HardConcrete has a closed form for 2 vertices only, and this has {self.vertices}; "
                "GaussianSparsemax and MixedDirichlet have one for any number"
            )

    @property
    def _logit(self) -> Tensor:
        return self.logits[..., 0].double() - self.logits[..., 1].double()

    def _binary_face(self, face: Tensor) -> Tensor:
        """Log-probabilities of faces (…, 2): a logistic variable is below two cuts, above them, or between."""
        stretch = self.stretch.double()
        stretched = stretch > 1
        gap = torch.where(stretched, stretch, 2.0)
        cut = self.temperature.double() * ((gap + 1).log() - (gap - 1).log())  # λ logit of where the stretch meets 1
        one = torch.where(stretched, logsigmoid(self._logit - cut), -torch.inf)
        other = torch.where(stretched, logsigmoid(-self._logit - cut), -torch.inf)
        between = logsigmoid(cut - self._logit) + logsigmoid(cut + self._logit) + (-(-2 * cut).expm1()).log()
        edge = torch.where(stretched, between, 0.0)
        first, second = face.unbind(-1)
        nothing = torch.full_like(edge, -torch.inf)
        return torch.where(first, torch.where(second, edge, one), torch.where(second, other, nothing))

    def _edge_breaks(self) -> Tensor:
        steps = [-40, -20, -10, -6, -4, -2, -1, 0, 1, 2, 4, 6, 10, 20, 40]
        c = torch.tensor(steps, dtype=torch.float64, device=self._device).reshape(-1, *[1] * len(self.batch_shape))
        v, stretch = (c + self._logit) / self.temperature.double(), self.stretch.double()
        rest = (stretch - 1) / 2
        one, other = stretch * v.sigmoid() - rest, stretch * (-v).sigmoid() - rest
        reached = torch.where(one <= 0, -torch.inf, torch.where(other <= 0, torch.inf, 0.0))
        inside = one.clamp_min(1e-300).log() - other.clamp_min(1e-300).log() + reached
        furthest = torch.where(stretch > 1, 40.0, 700.0)
        wide = torch.linspace(-1, 1, 9, dtype=torch.float64, device=self._device).reshape(
            -1, *[1] * len(self.batch_shape)
        )
        ends = torch.minimum(furthest, 40.0 * (1 + 1 / self.temperature.double()))
        return torch.cat([torch.maximum(torch.minimum(inside, furthest), -furthest), wide * ends]).sort(0).values
