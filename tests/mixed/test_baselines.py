"""Densities of the open simplex to compare with."""

import math

import numpy as np
import pytest
import torch
from members import FACTOR, LOC, double
from scipy import stats

from fenchel.mixed import Concrete, LogisticNormal, StraightThroughConcrete


def test_logistic_normal_is_softmax_of_a_gaussian() -> None:
    y = LogisticNormal(double(0.5, -0.2), scale=double(0.6, 0.9))
    logit = stats.norm(0.7, math.hypot(0.6, 0.9))  # z₁ − z₂
    t = double(0.1, 0.5, 0.8)
    expected = logit.logpdf(t.logit().numpy()) - np.log(t.numpy() * (1 - t.numpy()))
    torch.testing.assert_close(y.log_prob(torch.stack([t, 1 - t], -1)), torch.as_tensor(expected))
    full = LogisticNormal(LOC, scale_tril=FACTOR)
    value = full.rsample((20_000,))
    drawn = (LOC + torch.randn(20_000, 4, dtype=torch.float64) @ FACTOR.T).softmax(-1)
    torch.testing.assert_close(value.mean(0), drawn.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(value.T.cov(), drawn.T.cov(), atol=0.003, rtol=0)
    assert full.expand((2, 3)).log_prob(value[:3]).shape == (2, 3)
    assert (value > 0).all()


def test_logistic_normal_integrates_to_one() -> None:
    y = LogisticNormal(LOC[:3], scale_tril=FACTOR[:3, :3])
    x, w = np.polynomial.legendre.leggauss(60)
    x, w = torch.as_tensor((x + 1) / 2), torch.as_tensor(w / 2)
    a, b = torch.meshgrid(x, x, indexing="ij")
    density = y.log_prob(torch.stack([a, (1 - a) * b, (1 - a) * (1 - b)], -1)).exp() * (1 - a)
    assert (torch.outer(w, w) * density).sum().item() == pytest.approx(1, abs=1e-6)


def test_straight_through_is_hard_forward_and_concrete_backward() -> None:
    logits = double(0.5, 0.0, -0.5).requires_grad_()
    torch.manual_seed(0)
    hard = StraightThroughConcrete(double(0.7), logits=logits).rsample((100,))
    torch.manual_seed(0)
    soft = Concrete(double(0.7), logits=logits).rsample((100,))
    assert torch.equal(hard.detach().sort(-1).values, double(0.0, 0.0, 1.0).expand(100, 3))
    assert torch.equal(hard.argmax(-1), soft.argmax(-1))
    weight = torch.arange(3.0, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad((y * weight).sum(), logits) for y in (hard, soft)))


def test_straight_through_draws_vertices_without_gradients_too() -> None:
    y = StraightThroughConcrete(double(0.7), logits=double(0.5, 0.0, -0.5).requires_grad_())
    value = y.sample((20,))
    assert not value.requires_grad
    assert torch.equal(value.sort(-1).values, double(0.0, 0.0, 1.0).expand(20, 3))


def test_one_scale_is_asked_for() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        LogisticNormal(torch.zeros(3))
