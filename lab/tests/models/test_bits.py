"""Bits: entropies and divergences against integrals, and bounds that bound."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from fenchel_lab.models import bits
from fenchel_lab.models.bits import KINDS, AutoEncoder, Discrete, Posterior, Setting

SCORES = [-6.0, -1.3, 0.0, 0.02, 0.7, 4.0]
SMALL = Setting(bits=6, hidden=16, rate=1e-2, batch=50, epochs=30)


def posterior(name: str, scores: Tensor, temperature: float = 0.6) -> Posterior:
    return KINDS[name](scores, temperature, SMALL)


def integral(name: str, score: float, temperature: float = 0.6) -> float:
    """KL(q ‖ prior) of one bit, from the definition of each distribution alone."""
    if name == "Gumbel-Softmax":
        q, p = stats.logistic(score), stats.logistic(0)
        return float(integrate.quad(lambda v: q.pdf(v) * (q.logpdf(v) - p.logpdf(v)), score - 40, score + 40)[0])
    if name == "Gumbel-Softmax ST":
        one = 1 / (1 + math.exp(-score))
        return one * math.log(2 * one) + (1 - one) * math.log(2 * (1 - one))
    if name == "Gaussian-Sparsemax":
        q = stats.norm((1 + score) / 2, math.sqrt(0.5) * SMALL.scale)
        zero, one = q.cdf(0), q.sf(1)
        edge = integrate.quad(lambda y: q.pdf(y) * (q.logpdf(y) + math.log(3)), 0, 1, epsabs=1e-12)[0]
    else:
        rest = (SMALL.stretch - 1) / 2

        def logit(y: float) -> float:
            s = (y + rest) / SMALL.stretch
            return temperature * (math.log(s) - math.log1p(-s))

        def density(y: float) -> float:
            s = (y + rest) / SMALL.stretch
            return float(stats.logistic(score).pdf(logit(y))) * temperature / (s * (1 - s) * SMALL.stretch)

        zero, one = stats.logistic(score).cdf(logit(0)), stats.logistic(score).sf(logit(1))
        edge = integrate.quad(lambda y: density(y) * math.log(3 * density(y)), 0, 1, epsabs=1e-12)[0]
    return float(zero * math.log(3 * zero) + one * math.log(3 * one) + edge)


@pytest.mark.parametrize("name", KINDS)
def test_the_divergence_is_the_integral_that_it_should_be(name: str) -> None:
    scores = torch.tensor(SCORES, dtype=torch.float64).unsqueeze(1)
    expected = [integral(name, score) for score in SCORES]
    assert posterior(name, scores).kl().tolist() == pytest.approx(expected, abs=2e-6)
    single = posterior(name, scores.float()).kl().tolist()
    assert single == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_the_divergence_has_the_derivative_of_its_value(name: str) -> None:
    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: posterior(name, s).kl(), (scores,))


@pytest.mark.parametrize("name", KINDS)
def test_log_ratios_are_on_average_the_divergence(name: str) -> None:
    torch.manual_seed(0)
    q = posterior(name, torch.tensor([[-1.0, 0.5, 2.0]]))
    ratio = q.log_ratio(q.draw((40_000,))).squeeze(1)
    error = ratio.std().item() / math.sqrt(len(ratio))
    assert ratio.mean().item() == pytest.approx(q.kl().item(), abs=4.5 * error + 1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_bits_are_in_the_interval_and_exact_as_often_as_their_kind_says(name: str) -> None:
    torch.manual_seed(0)
    score = 0.8
    q = posterior(name, torch.full((50_000, 1), score))
    value = q.draw()
    drawn, exact = q.bits(value), q.exact(value)
    assert ((drawn >= 0) & (drawn <= 1)).all()
    gaussian = stats.norm((1 + score) / 2, math.sqrt(0.5))
    cut = 0.6 * math.log((SMALL.stretch + 1) / (SMALL.stretch - 1))
    ends = {
        "Gumbel-Softmax": (0.0, 0.0),
        "Gumbel-Softmax ST": (stats.logistic.sf(score), stats.logistic.cdf(score)),
        "Hard Concrete": (stats.logistic.sf(score + cut), stats.logistic.cdf(score - cut)),
        "Gaussian-Sparsemax": (gaussian.cdf(0), gaussian.sf(1)),
    }[name]
    shares = [(exact & (drawn == end)).double().mean().item() for end in (0, 1)]
    assert shares == pytest.approx(list(ends), abs=0.01)


def pictures(count: int) -> Tensor:
    """Four patterns of twelve pixels, some pixels turned over."""
    torch.manual_seed(1)
    patterns = (torch.rand(4, 12) > 0.5).float()
    chosen = patterns[torch.randint(4, (count,))]
    return torch.where(torch.rand(count, 12) < 0.05, 1 - chosen, chosen)


@pytest.mark.parametrize("name", KINDS)
def test_training_tightens_the_bound_and_importance_weights_tighten_it_further(name: str) -> None:
    images = pictures(300)
    torch.manual_seed(0)
    before = bits.measured(AutoEncoder(12, SMALL, KINDS[name]), images, 300, 100)
    told: list[float] = []
    model = bits.trained(images, SMALL, KINDS[name], told.append)
    after = bits.measured(model, images, 300, 100)
    assert after.bound < 0.8 * before.bound
    # A pattern is log 4 nats, a pixel of noise 0.2: nothing can be below.
    noise = stats.bernoulli(0.05).entropy()
    assert math.log(4) + 12 * noise - 0.5 < after.likelihood < after.bound
    assert after.bound == after.distortion + after.rate
    assert sum(after.shares) == pytest.approx(1)
    assert told[-1] == 1


def test_the_likelihood_is_exact_where_the_posterior_is_the_prior() -> None:
    model = AutoEncoder(12, SMALL, Discrete)
    with torch.no_grad():
        for weight in (*model.encode.parameters(), *model.decode.parameters()):
            weight.zero_()
        model.decode[2].bias.fill_(1.0)
    images = pictures(7)
    ones = images.sum(1)
    expected = ones * math.log(1 / (1 + math.exp(-1))) + (12 - ones) * math.log(1 / (1 + math.exp(1)))
    assert torch.allclose(bits.importance_weighted(model, images, 3), expected.float(), atol=1e-5)


def test_the_likelihood_of_few_bits_is_the_sum_over_all_of_them() -> None:
    torch.manual_seed(0)
    setting = Setting(bits=3, hidden=8)
    model = AutoEncoder(12, setting, Discrete)
    images = pictures(5)
    codes = torch.tensor(np.stack(np.meshgrid(*[[0.0, 1.0]] * 3), -1).reshape(-1, 3)).float()
    with torch.no_grad():
        each = torch.stack([model.log_likelihood(code.expand(5, 3), images) for code in codes])
        whole = torch.logsumexp(each, 0) - math.log(8)
    estimated = bits.importance_weighted(model, images, 20_000)
    assert torch.allclose(estimated, whole, atol=0.02)
