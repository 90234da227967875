"""Mutual information, and the numbers under it: quadrature and intervals of the normal distribution."""

import math

import mpmath
import pytest
import torch
from members import double
from torch.distributions import kl_divergence

from fenchel._quadrature import adapted, log_concave
from fenchel.mixed import GaussianSparsemax, HardConcrete, MixedDirichlet, mutual_information
from fenchel.mixed.boxes import log_interval


def test_what_does_not_depend_tells_nothing_and_what_is_certain_all() -> None:
    same = HardConcrete(double([[0.3, 0.0]] * 4), 0.5, 1.3)
    assert mutual_information(same).value.item() == pytest.approx(0, abs=1e-9)
    apart = MixedDirichlet(60 * (2 * torch.eye(3, dtype=torch.float64) - 1), double([1.0]))
    told = mutual_information(apart, num_samples=200)
    assert told.value.item() == pytest.approx(math.log(3), abs=1e-6)


def test_it_is_the_mean_divergence_from_the_mixture() -> None:
    y = MixedDirichlet(double([[1.0, 0.0, -1.0], [-1.0, 0.5, 0.5]]), double([1.0]))
    weights = double(0.3, 0.7)
    told = mutual_information(y, weights, num_samples=20_000)
    # Dirichlets on a face are the same here: all that is told is told by the face.
    pair = [MixedDirichlet(each, double([1.0])) for each in y.face_logits]
    from fenchel.mixed import faces

    log_prob = torch.stack([each.face_log_prob(faces(3)) for each in pair])
    mixture = (weights.unsqueeze(-1) * log_prob.exp()).sum(0).log()
    exact = (weights.unsqueeze(-1) * log_prob.exp() * (log_prob - mixture)).sum()
    assert (told.value - exact).abs() < 4 * told.error
    assert told.error < 0.02


@pytest.mark.parametrize("k", [2, 3])
def test_what_never_comes_tells_nothing(k: int) -> None:
    logits = torch.zeros(2, k, dtype=torch.float64)
    logits[0, 1] = -math.inf  # the second has faces that the first has not
    told = mutual_information(MixedDirichlet(logits, double([1.0])), double(1.0, 0.0), num_samples=100)
    assert told.value.item() == pytest.approx(0, abs=1e-12)
    assert told.error.item() == pytest.approx(0, abs=1e-12)


def test_two_gaussians_share_at_most_one_bit() -> None:
    y = GaussianSparsemax(double([[0.5, 0.0], [0.0, 0.5]]), scale=torch.ones(2, 2, dtype=torch.float64))
    told = mutual_information(y)
    assert told.error == 0
    assert 0 < told.value < math.log(2)
    both = kl_divergence(
        y.expand((2,)), GaussianSparsemax(double(0.25, 0.25), scale=torch.ones(2, dtype=torch.float64))
    )
    assert told.value <= both.mean() + 1e-12  # the mixture is the nearest of all


def test_bad_arguments_are_reported() -> None:
    y = HardConcrete(torch.zeros(2), 0.5, 1.2)
    with pytest.raises(ValueError, match="one batch dimension"):
        mutual_information(y)
    with pytest.raises(ValueError, match="weights must be 3 probabilities"):
        mutual_information(y.expand((3,)), torch.ones(3))


@pytest.mark.parametrize(
    ("a", "b"),
    [(-1.0, 2.0), (30.0, 31.0), (-50.0, -49.9), (1.0, 1.0 + 1e-7), (-8.0, 8.0), (5.0, math.inf), (200.0, 200.001)],
)
def test_intervals_of_the_normal_distribution(a: float, b: float) -> None:
    def tail(x: float) -> mpmath.mpf:
        return mpmath.erfc(mpmath.mpf(x) / mpmath.sqrt(2)) / 2 if x < math.inf else mpmath.mpf(0)

    with mpmath.workdps(700):
        expected = float(mpmath.log(tail(a) - tail(b)))
    told = log_interval(double(a).reshape(1), double(b).reshape(1)).item()
    assert told == pytest.approx(expected, rel=1e-11)


def test_narrow_peaks_in_wide_intervals_are_found() -> None:
    centre, width = double(3.0, -700.0, 0.0), double(1e-9, 1e-3, 1.0)

    def log_density(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return -((x - centre[row]) / width[row]).square() / 2

    rule = log_concave(log_density, double(-1e3, -1e3, -1e3), double(1e6, 1e3, 0.0))
    told = rule.log_integral(log_density(rule.nodes, rule.rows))
    expected = (width * math.sqrt(2 * math.pi) * double(1.0, 1.0, 0.5)).log()
    torch.testing.assert_close(told, expected, atol=1e-6, rtol=0)


def test_panels_are_halved_where_there_is_need() -> None:
    rule = adapted(lambda x, row: x.abs().sqrt(), double([[-1.0, 1.0]]))
    assert (rule.nodes.abs().sqrt() * rule.weights).sum().item() == pytest.approx(4 / 3, abs=1e-10)
    assert rule.error < 1e-9
