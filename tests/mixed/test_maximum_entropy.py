"""MaximumEntropy: the generalized Laguerre polynomial, and that nothing needs more bits."""

import math

import pytest
import torch
from members import MEMBERS
from scipy.special import eval_genlaguerre

from fenchel.mixed import MaximumEntropy, faces, maximum_code_length


@pytest.mark.parametrize("k", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("bits", [-2.0, 0.0, 3.0, 8.0])
def test_the_code_length_is_that_of_laguerre(k: int, bits: float) -> None:
    expected = math.log2(eval_genlaguerre(k - 1, 1, -(2**bits)))
    assert maximum_code_length(k, bits) == pytest.approx(expected, abs=1e-9)
    y = MaximumEntropy(k, torch.tensor(bits, dtype=torch.float64))
    assert y.code_length(bits).item() == pytest.approx(expected, abs=1e-9)


def test_two_vertices_take_log_of_two_and_a_power() -> None:
    for bits in (0, 1, 5, 10):
        assert maximum_code_length(2, bits) == pytest.approx(math.log2(2 + 2**bits))


@pytest.mark.parametrize("bits", [0.0, 4.0])
def test_nothing_needs_more_bits(bits: float) -> None:
    for member in MEMBERS:
        if member.vertices == 2 or member.name.startswith(("dirichlet", "largest")):
            length = member().code_length(bits).item()
            assert length <= maximum_code_length(member.vertices, bits) + 1e-9


def test_faces_of_six_are_those_of_the_definition() -> None:
    bits, every = 2.0, faces(6)
    y = MaximumEntropy(6, torch.tensor(bits, dtype=torch.float64))
    size = every.sum(-1).double()
    weight = 2 ** (bits * (size - 1)) / torch.exp(torch.lgamma(size))
    prob = weight / weight.sum()
    torch.testing.assert_close(y.face_log_prob(every).exp(), prob)
    torch.testing.assert_close(y.face_entropy(), -(prob * prob.log()).sum())
    torch.testing.assert_close(y.mean_dimension(), (prob * (size - 1)).sum())
    # Uniform on a face of volume 1/(n − 1)!, whatever the precision
    torch.testing.assert_close(y.entropy(), -(prob * (prob.log() + torch.lgamma(size))).sum())


def test_divergences_between_two_are_exact() -> None:
    p, q = MaximumEntropy(5, torch.tensor([1.0, 3.0])), MaximumEntropy(5, torch.tensor(2.0))
    told = p.estimate_kl(q)
    assert (told.error == 0).all()
    assert (told.value > 0).all()
    over_faces = p.face_log_prob(faces(5).unsqueeze(1)), q.face_log_prob(faces(5)).unsqueeze(-1)
    expected = (over_faces[0].exp() * (over_faces[0] - over_faces[1])).sum(0)
    torch.testing.assert_close(told.value, expected)
    torch.testing.assert_close(p.estimate_kl(p).value, torch.zeros(2), atol=1e-6, rtol=0)


def test_without_precision_it_is_a_choice_of_vertices() -> None:
    y = MaximumEntropy(4, -60.0)
    torch.testing.assert_close(y.face_log_prob(faces(4)).exp()[:4], torch.full((4,), 0.25))
    assert y.entropy().item() == pytest.approx(math.log(4))
    assert MaximumEntropy(4, 60.0).mean_dimension().item() == pytest.approx(3)


def test_many_vertices_and_bits_do_not_overflow() -> None:
    y = MaximumEntropy(2000, 64.0)
    assert y.log_partition.isfinite()
    assert y.sample().sum().item() == pytest.approx(1, abs=1e-4)


def test_bad_parameters_are_reported() -> None:
    with pytest.raises(ValueError, match="vertices must be at least 1, got 0"):
        MaximumEntropy(0)
    with pytest.raises(ValueError, match="precision must be finite"):
        MaximumEntropy(2, math.nan)
    with pytest.raises(TypeError, match="floating-point"):
        MaximumEntropy(2, torch.tensor(3))
