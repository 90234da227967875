"""HardConcrete: the binary one of Louizos et al., the Concrete as its limit, shares of samples above two vertices."""

import math

import pytest
import torch
from members import double
from torch.distributions import RelaxedOneHotCategorical

from fenchel import sparsemax
from fenchel.mixed import HardConcrete, faces


def test_two_vertices_are_the_binary_hard_concrete() -> None:
    """Stretched to (γ, ζ) and clipped: P(s = 0) = σ(β log(−γ/ζ) − log α)."""
    log_alpha, beta, stretch = 0.4, 0.66, 1.2
    zeta, gamma = 0.5 + stretch / 2, 0.5 - stretch / 2
    y = HardConcrete(double(log_alpha, 0.0), beta, stretch)
    zero = torch.sigmoid(double(beta * math.log(-gamma / zeta) - log_alpha))
    one = torch.sigmoid(double(log_alpha - beta * math.log((1 - gamma) / (zeta - 1))))
    torch.testing.assert_close(y.face_log_prob(faces(2)).exp(), torch.stack([one, zero, 1 - one - zero]))
    uniform = torch.rand(50_000, dtype=torch.float64)
    concrete = torch.sigmoid((uniform.logit() + log_alpha) / beta)
    gates = (concrete * (zeta - gamma) + gamma).clamp(0, 1)
    drawn = y.sample((50_000,))[:, 0]
    levels = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    torch.testing.assert_close(gates.quantile(levels), drawn.quantile(levels), atol=0.015, rtol=0)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 3.0])
def test_without_stretch_it_is_the_concrete(temperature: float) -> None:
    logits = double(0.3, -0.5)
    y = HardConcrete(logits, temperature, 1.0)
    concrete = RelaxedOneHotCategorical(double(temperature), logits=logits)
    t = double(0.02, 0.4, 0.9)
    value = torch.stack([t, 1 - t], -1)
    torch.testing.assert_close(y.log_prob(value), concrete.log_prob(value))
    assert (y.face_log_prob(faces(2)) == double(-math.inf, -math.inf, 0.0)).all()
    surprise = -concrete.log_prob(concrete.sample((50_000,)).clamp(1e-300, 1 - 1e-16))
    surprise = surprise[surprise.isfinite()]
    assert (y.entropy() - surprise.mean()).abs() < 6 * surprise.std() / math.sqrt(50_000) + 0.01


def test_no_stretch_leaves_the_temperature_its_gradient() -> None:
    temperature = double(0.7).requires_grad_()
    y = HardConcrete(double(0.3, -0.5), temperature, 1.0)
    [gradient] = torch.autograd.grad(y.log_prob(double(0.3, 0.7)) + y.face_log_prob(faces(2)[2]), temperature)
    assert gradient.isfinite()


def test_more_stretch_means_smaller_faces() -> None:
    sizes = [HardConcrete(torch.zeros(8), 0.7, s).sample_face((2000,)).sum(-1).double().mean() for s in (1.0, 1.5, 3.0)]
    assert sizes[0] == 8
    assert sizes[0] > sizes[1] > sizes[2]


def test_faces_of_three_are_shares_with_their_error() -> None:
    logits = double(0.5, 0.0, -0.5)
    y = HardConcrete(logits, 0.6, 1.4)
    told = y.face_probability(faces(3))
    again = y.sample_face((40_000,))
    counted = (again.unsqueeze(1) == faces(3)).all(-1).double().mean(0)
    assert ((told.value - counted).abs() < 4 * (told.error + (counted / 40_000).sqrt())).all()
    torch.testing.assert_close(told.value.sum(), double(1.0))
    assert (told.error > 0).all()


def test_shares_have_unbiased_gradients() -> None:
    """In logits and temperature; beside finite differences with common noise."""
    leaves = [double(0.5, 0.0, -0.5).requires_grad_(), double(0.6).requires_grad_()]
    face = torch.tensor([True, True, False])
    share = HardConcrete(*leaves, 1.4).face_probability(face, num_samples=100_000).value
    logits, temperature = torch.autograd.grad(share, leaves)

    def counted(first: float, temperature: float, stretch: float) -> float:
        noise = torch.rand(400_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        relaxed = ((double(first, 0.0, -0.5) - (-noise.log()).log()) / temperature).softmax(-1)
        return ((sparsemax(stretch * relaxed) > 0) == face).all(-1).double().mean().item()

    h = 0.05
    assert logits[0].item() == pytest.approx(
        (counted(0.5 + h, 0.6, 1.4) - counted(0.5 - h, 0.6, 1.4)) / (2 * h), abs=0.02
    )
    assert temperature.item() == pytest.approx(
        (counted(0.5, 0.6 + h, 1.4) - counted(0.5, 0.6 - h, 1.4)) / (2 * h), abs=0.03
    )
    with pytest.raises(NotImplementedError, match="no gradient in stretch"):
        HardConcrete(*leaves, double(1.4).requires_grad_()).face_log_prob(face)


def test_densities_above_two_vertices_say_that_they_do_not_exist() -> None:
    y = HardConcrete(torch.zeros(3), 0.5, 1.2)
    with pytest.raises(NotImplementedError, match="log_prob of a HardConcrete has a closed form for 2 vertices"):
        y.log_prob(torch.tensor([1.0, 0.0, 0.0]))
    with pytest.raises(NotImplementedError, match="entropy of a HardConcrete"):
        y.entropy()


def test_gradients_through_samples_are_those_of_expectations() -> None:
    logits = double(0.2, -0.1).requires_grad_()
    value = HardConcrete(logits, 0.7, 1.5).rsample((100_000,))
    [gradient] = torch.autograd.grad(value[:, 0].square().mean(), logits)

    def expected(first: float) -> float:
        return HardConcrete(double(first, -0.1), 0.7, 1.5).expect(lambda v: v[..., 0].square()).item()

    assert gradient[0].item() == pytest.approx((expected(0.2 + 1e-4) - expected(0.2 - 1e-4)) / 2e-4, abs=0.004)


def test_gradients_through_samples_of_four_are_those_of_the_same_noise() -> None:
    """Beside finite differences of the mean over samples, made from the definition."""
    leaves = [double(0.5, 0.0, -0.5, 0.2).requires_grad_(), double(0.6).requires_grad_(), double(1.4).requires_grad_()]
    weight = double(1.0, -1.0, 2.0, 0.5)
    value = HardConcrete(*leaves).rsample((100_000,), torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((value.square() @ weight).mean(), leaves)
    noise = torch.empty(100_000, 4, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(2))

    def mean(logits: torch.Tensor, temperature: torch.Tensor, stretch: torch.Tensor) -> float:
        relaxed = ((logits - noise.log()) / temperature).softmax(-1)
        return (sparsemax(stretch * relaxed).square() @ weight).mean().item()

    points = [each.detach() for each in leaves]
    for place, gradient in enumerate(gradients):
        for entry in range(gradient.numel()):
            step = torch.zeros_like(points[place]).reshape(-1)
            step[entry] = 1e-6
            ends = [
                mean(*(p + way * step.reshape(p.shape) if i == place else p for i, p in enumerate(points)))
                for way in (1, -1)
            ]
            assert gradient.reshape(-1)[entry].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)


def test_the_mean_dimension_of_many_is_a_mean_with_its_error_and_gradient() -> None:
    logits = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
    told = HardConcrete(logits, 0.6, 1.4).estimate_mean_dimension(
        num_samples=100_000, generator=torch.Generator().manual_seed(3)
    )
    [gradient] = torch.autograd.grad(told.value, logits)
    noise = torch.empty(400_000, 8, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(4))

    def counted(last: float) -> float:
        moved = torch.cat([logits.detach()[:-1], double([last])])
        drawn = sparsemax(1.4 * ((moved - noise.log()) / 0.6).softmax(-1)) > 0
        return drawn.sum(-1).double().mean().item() - 1

    assert 0 < told.error < 0.01
    assert told.value.item() == pytest.approx(counted(1.0), abs=5 * told.error.item())
    assert gradient[-1].item() == pytest.approx((counted(1.05) - counted(0.95)) / 0.1, abs=0.03)
    for name in ("face_entropy", "code_length"):
        with pytest.raises(NotImplementedError, match="2 vertices only"):
            getattr(HardConcrete(torch.zeros(3), 0.5, 1.2), name)(*[3] * (name == "code_length"))


def test_batches_of_many_vertices_are_their_elements() -> None:
    logits = torch.tensor([[0.5, 0.0, -0.5], [2.0, 0.0, 0.0]])
    y = HardConcrete(logits, torch.tensor([0.6, 0.3]), 1.4)
    assert y.sample((4,)).shape == (4, 2, 3)
    assert y.expand((5, 2)).sample().shape == (5, 2, 3)
    told = y.face_probability(faces(3).unsqueeze(1), generator=torch.Generator().manual_seed(0))
    again = y.face_probability(faces(3).unsqueeze(1), generator=torch.Generator().manual_seed(0))
    assert told.value.shape == told.error.shape == (7, 2)
    assert told.value.dtype == y.mean_dimension().dtype == torch.float32
    assert torch.equal(told.value, again.value)
    for i in range(2):
        one = HardConcrete(logits[i], y.temperature[i], 1.4).face_probability(faces(3))
        assert ((told.value[:, i] - one.value).abs() <= 5 * (told.error[:, i] + one.error)).all()
    dimension = ((faces(3).sum(-1, keepdim=True) - 1) * told.value).sum(0)
    torch.testing.assert_close(y.mean_dimension(), dimension, atol=0.06, rtol=0)
    assert y.face_log_prob(faces(3)[:0].unsqueeze(1)).shape == (0, 2)


@pytest.mark.parametrize(
    ("temperature", "stretch", "message"),
    [
        (0.0, 1.2, "temperature must satisfy 0 < temperature < inf"),
        (0.5, 0.9, "stretch must be finite and at least 1"),
        (0.5, math.inf, "stretch"),
    ],
)
def test_bad_parameters_are_reported(temperature: float, stretch: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HardConcrete(torch.zeros(3), temperature, stretch)


def test_shares_have_unbiased_gradients_at_low_temperatures_in_single_precision() -> None:
    """Near zero temperature a vertex is drawn by softmax of the logits, whose derivatives are known."""
    logits = torch.tensor([0.5, 0.0, -0.3], requires_grad=True)
    y = HardConcrete(logits, 0.005, 1.3)
    share = y.face_probability(
        torch.tensor([True, False, False]), num_samples=100_000, generator=torch.Generator().manual_seed(0)
    ).value
    [gradient] = torch.autograd.grad(share, logits)
    p = logits.detach().softmax(-1)
    torch.testing.assert_close(gradient, p[0] * (torch.eye(3)[0] - p), atol=0.01, rtol=0)


def test_no_derivative_in_stretch_is_passed_over_in_forward_mode() -> None:
    def share(stretch: torch.Tensor) -> torch.Tensor:
        return HardConcrete(torch.zeros(3), 0.5, stretch).face_probability(faces(3)[:1], num_samples=10).value

    one = torch.tensor(1.4)
    with pytest.raises(NotImplementedError, match="no gradient in stretch"):
        torch.func.jvp(share, (one,), (one,))
    y = HardConcrete(torch.zeros(3), torch.tensor(0.5), one)
    with torch.autograd.forward_ad.dual_level():
        assert y.face_probability(faces(3), num_samples=10).value.shape == (7,)


def test_a_face_that_was_never_drawn_is_not_told_to_be_impossible() -> None:
    told = HardConcrete(torch.tensor([20.0, 0.0, 0.0]), 0.5, 1.3).face_probability(faces(3), num_samples=1000)
    assert told.value[1] == 0
    torch.testing.assert_close(told.error[1].item(), 1e-3, rtol=0.01, atol=0)
    assert (told.error > 0).all()


def test_a_batch_of_nothing_over_many_vertices_has_no_shares() -> None:
    none = HardConcrete(torch.zeros(0, 3), 0.5, 1.2)
    assert none.face_probability(faces(3).unsqueeze(1)).value.shape == (7, 0)
    assert none.face_log_prob(faces(3)[0]).shape == (0,)
