"""A variational auto-encoder whose code is a vector of bits: relaxed, discrete, or mixed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.nn import functional as F
from torch.nn.functional import logsigmoid

from fenchel.mixed import GaussianSparsemax, HardConcrete, StraightThroughConcrete, maximum_code_length
from fenchel.seq2seq import checkpoints
from fenchel_lab.models.agents import COOLEST, cooled

NODES = 10
"""Of the quadrature over the open edge of a Hard Concrete bit, for entropies to 1e-6."""


@dataclass(frozen=True)
class Setting:
    """The auto-encoder and its training.

    Args:
        bits: how many.
        hidden: width of the one hidden layer of either half.
        rate: of learning (Adam).
        anneal: the share of training after which the temperature is down at 0.5, at an even rate from 1.
        stretch: τ of the Hard Concrete.
        scale: σ of the Gaussian-Sparsemax, before the projection.
        batch: images at a time.
        epochs: how often each is seen.
    """

    bits: int = 64
    hidden: int = 256
    rate: float = 1e-3
    anneal: float = 0.2
    stretch: float = 1.2
    scale: float = 1.0
    batch: int = 128
    epochs: int = 8


class Posterior(ABC):
    """q(bits | image): independent given the encoder's scores (…, D), a score above 0 for a likely 1.

    A value is what was drawn; ``bits`` tells the bits in [0, 1] of it.
    """

    def __init__(self, scores: Tensor, temperature: float, setting: Setting) -> None:
        self.scores, self.temperature, self.setting = scores, temperature, setting

    @property
    def pairs(self) -> Tensor:
        """Scores of 1 and of 0, (…, D, 2)."""
        return torch.stack([self.scores, torch.zeros_like(self.scores)], -1)

    @abstractmethod
    def draw(self, shape: Sequence[int] = ()) -> Tensor:
        """Values, through which gradients reach the scores."""

    def bits(self, value: Tensor) -> Tensor:
        """The bits of a value, (…, D)."""
        return value[..., 0]

    def exact(self, value: Tensor) -> Tensor:
        """Which bits are 0 or 1, and not by rounding."""
        bits = self.bits(value)
        return (bits == 0) | (bits == 1)

    @abstractmethod
    def kl(self) -> Tensor:
        """KL(q ‖ prior) in nats of all bits together, (…)."""

    @abstractmethod
    def log_ratio(self, value: Tensor) -> Tensor:
        """log q − log prior at a value, (…)."""


class Relaxed(Posterior):
    """Binary Concrete: bits in the open interval. A value is a logit, logistic with the score as its place.

    The prior is the Binary Concrete with a score of 0 and the same temperature: a uniform one would charge a bit that
    tells nothing.
    """

    def draw(self, shape: Sequence[int] = ()) -> Tensor:
        value: Tensor = self._distribution.rsample(torch.Size(shape))
        return value

    def bits(self, value: Tensor) -> Tensor:
        return value.sigmoid()

    def exact(self, value: Tensor) -> Tensor:
        return torch.zeros_like(value, dtype=torch.bool)

    def kl(self) -> Tensor:
        """Σ s coth(s/2) − 2: of logistic variables of one width, s apart."""
        s = self.scores
        small = s.abs() < 0.1
        large = torch.where(small, 1.0, s)
        return torch.where(small, s.square() / 6 - s.square().square() / 360, large / (large / 2).tanh() - 2).sum(-1)

    def log_ratio(self, value: Tensor) -> Tensor:
        shifted = self.temperature * value
        return (_log_logistic(shifted - self.scores) - _log_logistic(shifted)).sum(-1)

    @property
    def _distribution(self) -> LogitRelaxedBernoulli:
        return LogitRelaxedBernoulli(self.scores.new_tensor(self.temperature), logits=self.scores, validate_args=False)


class Discrete(Posterior):
    """Bits that are 0 or 1, with the gradient of relaxed ones (straight-through); their prior is a fair coin."""

    def draw(self, shape: Sequence[int] = ()) -> Tensor:
        temperature = self.scores.new_tensor(self.temperature)
        return StraightThroughConcrete(temperature, logits=self.pairs, validate_args=False).rsample(shape)

    def kl(self) -> Tensor:
        one = self.scores.sigmoid()
        return (math.log(2) + one * logsigmoid(self.scores) + (1 - one) * logsigmoid(-self.scores)).sum(-1)

    def log_ratio(self, value: Tensor) -> Tensor:
        log_prob = logsigmoid(torch.where(self.bits(value) == 1, self.scores, -self.scores))
        return (math.log(2) + log_prob).sum(-1)


class Mixed(Posterior):
    """Bits with mass at 0, at 1 and between. Their prior is of maximum entropy: ⅓ each, and uniform between."""

    @property
    @abstractmethod
    def distribution(self) -> GaussianSparsemax | HardConcrete:
        """Of pairs, (…, D) of two vertices."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """The direct-sum entropy of each bit in nats, (…, D)."""

    def draw(self, shape: Sequence[int] = ()) -> Tensor:
        return self.distribution.rsample(shape)

    def kl(self) -> Tensor:
        return (_LARGEST - self.entropy()).sum(-1)

    def log_ratio(self, value: Tensor) -> Tensor:
        return (self.distribution.log_prob(value) + _LARGEST).sum(-1)


class HardConcreteBits(Mixed):
    """A Binary Concrete bit, stretched beyond [0, 1] and cut off there."""

    @property
    def distribution(self) -> HardConcrete:
        return HardConcrete(self.pairs, self.temperature, self.setting.stretch, validate_args=False)

    def entropy(self) -> Tensor:
        """Both ends in closed form, the edge by Gauss-Legendre quadrature of a smooth function.

        With a logistic variable v the bit is τσ((s + v)/λ) − (τ − 1)/2 where that is in (0, 1), so v runs over an
        interval that is as wide for every score.
        """
        stretch, temperature = self.setting.stretch, self.temperature
        cut = temperature * math.log((stretch + 1) / (stretch - 1))
        nodes, weights = (torch.from_numpy(each).to(self.scores) for each in np.polynomial.legendre.leggauss(NODES))
        u = (cut * nodes).reshape(-1, *[1] * self.scores.dim())  # s + v, between −cut and cut
        log_logistic = _log_logistic(u - self.scores)
        known = math.log(temperature / stretch) - _log_logistic(u / temperature)
        edge = -(log_logistic.exp() * (log_logistic + known)) * (cut * weights).reshape(u.shape)
        return _surprise(logsigmoid(self.scores - cut)) + _surprise(logsigmoid(-self.scores - cut)) + edge.sum(0)


class GaussianBits(Mixed):
    """A Gaussian, cut off at 0 and at 1: what Gaussian-Sparsemax is for two vertices."""

    @property
    def distribution(self) -> GaussianSparsemax:
        pairs = self.pairs
        return GaussianSparsemax(pairs, scale=torch.full_like(pairs, self.setting.scale), validate_args=False)

    def entropy(self) -> Tensor:
        return self.distribution.entropy()


KINDS: dict[str, type[Posterior]] = {
    "Gumbel-Softmax": Relaxed,
    "Gumbel-Softmax ST": Discrete,
    "Hard Concrete": HardConcreteBits,
    "Gaussian-Sparsemax": GaussianBits,
}


class AutoEncoder(nn.Module):
    """Pixels that are 0 or 1, given the bits independent."""

    def __init__(self, pixels: int, setting: Setting, kind: type[Posterior]) -> None:
        super().__init__()
        self.setting, self.kind = setting, kind
        self.temperature = 1.0
        self.encode = nn.Sequential(
            nn.Linear(pixels, setting.hidden), nn.ReLU(), nn.Linear(setting.hidden, setting.bits)
        )
        self.decode = nn.Sequential(
            nn.Linear(setting.bits, setting.hidden), nn.ReLU(), nn.Linear(setting.hidden, pixels)
        )

    def posterior(self, images: Tensor) -> Posterior:
        """Of the bits of images (N, pixels)."""
        return self.kind(self.encode(images), self.temperature, self.setting)

    def log_likelihood(self, bits: Tensor, images: Tensor) -> Tensor:
        """log p(image | bits) in nats, (…, N)."""
        logits = self.decode(bits)
        return -F.binary_cross_entropy_with_logits(logits, images.expand_as(logits), reduction="none").sum(-1)


def trained(images: Tensor, setting: Setting, kind: type[Posterior], progress: Callable[[float], None]) -> AutoEncoder:
    """An auto-encoder after so many epochs on images (N, pixels) of zeros and ones."""
    checkpoints.check_rate(setting.rate)
    model = AutoEncoder(images.shape[1], setting, kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.rate, fused=True)
    steps = setting.epochs * -(-len(images) // setting.batch)
    cooling = -math.log(COOLEST) / (setting.anneal * steps)
    done = 0
    for _ in range(setting.epochs):
        for rows in torch.split(torch.randperm(len(images)), setting.batch):
            model.temperature = cooled(done, cooling)
            shown = images[rows]
            posterior = model.posterior(shown)
            value = posterior.draw()
            bound = model.log_likelihood(posterior.bits(value), shown) - posterior.kl()
            checkpoints.step(-bound.mean(), optimizer)
            done += 1
        progress(done / steps)
    checkpoints.check_finite(model)
    return model


@dataclass(frozen=True)
class Outcome:
    """What an auto-encoder does on images it has not learned with; all in nats per image but the shares.

    Args:
        distortion: −log p(image | bits), on average.
        rate: KL(q ‖ prior), on average.
        likelihood: −log p(image) by importance weighting, an upper bound.
        shares: of bits that are 0, 1, and between.
    """

    distortion: float
    rate: float
    likelihood: float
    shares: tuple[float, float, float]

    @property
    def bound(self) -> float:
        """The negative ELBO."""
        return self.distortion + self.rate

    @property
    def exact(self) -> float:
        """The share of bits that are 0 or 1."""
        return self.shares[0] + self.shares[1]


@torch.no_grad()
def measured(model: AutoEncoder, images: Tensor, weighted: int, samples: int) -> Outcome:
    """The bound on all images, and the likelihood of the first ``weighted`` with so many samples each."""
    posterior = model.posterior(images)
    value = posterior.draw()
    bits, exact = posterior.bits(value), posterior.exact(value)
    zero, one = ((exact & (bits == end)).float().mean().item() for end in (0, 1))
    return Outcome(
        -model.log_likelihood(bits, images).mean().item(),
        posterior.kl().mean().item(),
        -importance_weighted(model, images[:weighted], samples).mean().item(),
        (zero, one, (~exact).float().mean().item()),
    )


@torch.no_grad()
def importance_weighted(model: AutoEncoder, images: Tensor, samples: int) -> Tensor:
    """A lower bound of log p(image), (N,), which more samples draw tighter."""
    terms = []
    for some in torch.split(images, 50):
        posterior = model.posterior(some)
        value = posterior.draw((samples,))
        weight = model.log_likelihood(posterior.bits(value), some) - posterior.log_ratio(value)
        terms.append(torch.logsumexp(weight, 0) - math.log(samples))
    return torch.cat(terms)


_LARGEST = math.log(2) * float(maximum_code_length(2, 0.0))
"""The largest direct-sum entropy of a bit, log 3, and what the prior's density is everywhere the negative of."""


def _log_logistic(x: Tensor) -> Tensor:
    """The log-density of the standard logistic distribution."""
    return -x - 2 * F.softplus(-x)


def _surprise(log_prob: Tensor) -> Tensor:
    """−P log P."""
    return -log_prob.exp() * log_prob
