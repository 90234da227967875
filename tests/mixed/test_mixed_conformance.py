"""What holds for every mixed distribution: each test over all members."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from members import MEMBERS, Member
from scipy import integrate, stats
from torch import Tensor
from torch.autograd import forward_ad as fwAD
from torch.distributions import Distribution, kl_divergence

from fenchel.mixed import GaussianSparsemax, HardConcrete, Mixed, MixedDirichlet, closed_simplex, faces

every = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
small = pytest.mark.parametrize("member", [m for m in MEMBERS if m.vertices < 4], ids=lambda member: member.name)
binary = pytest.mark.parametrize("member", [m for m in MEMBERS if m.vertices == 2], ids=lambda member: member.name)


def edge_density(y: Mixed, pair: tuple[int, int]) -> Callable[[np.ndarray], np.ndarray]:
    """The density on an edge, as a function of the coordinate that is free: the first."""

    def density(t: np.ndarray) -> np.ndarray:
        value = torch.zeros(np.size(t), y.vertices, dtype=torch.float64)
        value[:, pair[0]] = torch.as_tensor(np.atleast_1d(t))
        value[:, pair[1]] = 1 - value[:, pair[0]]
        return y.log_prob(value).exp().numpy()

    return density


def on_edge(y: Mixed, pair: tuple[int, int], upper: float = 1.0) -> float:
    return integrate.quad(lambda t: edge_density(y, pair)(t)[0], 0, upper, epsabs=1e-9, epsrel=1e-9)[0]


def in_triangle(y: Mixed) -> float:
    """∫ of the density over the interior of three vertices, by Gauss-Legendre in a square folded onto it."""
    x, w = np.polynomial.legendre.leggauss(60)
    x, w = (x + 1) / 2, w / 2
    slope = 30 * x**2 * (1 - x) ** 2
    x = x**3 * (10 - 15 * x + 6 * x**2)  # crowded at the sides, where a Dirichlet may be infinite
    a, b = np.meshgrid(x, x, indexing="ij")
    value = torch.as_tensor(np.stack([a, (1 - a) * b, (1 - a) * (1 - b)], -1))
    jacobian = np.multiply.outer(w * slope, w * slope) * (1 - a)
    return float((y.log_prob(value).exp().numpy() * jacobian).sum())


@every
def test_it_is_one_of_torchs_distributions(member: Member) -> None:
    y = member()
    assert isinstance(y, Distribution)
    assert y.event_shape == (member.vertices,)
    assert y.support is closed_simplex
    assert type(y).__name__ in repr(y)


@every
def test_faces_have_probability_one_together(member: Member) -> None:
    total = member().face_log_prob(faces(member.vertices)).exp().sum().item()
    by_lattice = member.name in ("gaussian-4", "gaussian-full-4")
    assert total == pytest.approx(1, abs=1e-5 if by_lattice else 1e-12)


@every
def test_samples_land_on_faces_as_often_as_reported(member: Member) -> None:
    y, n = member(), 20_000
    every_face = faces(member.vertices)
    expected = y.face_log_prob(every_face).exp().numpy()
    for drawn in (y.face_of(y.sample((n,))), y.sample_face((n,))):
        counts = (drawn.unsqueeze(1) == every_face).all(-1).sum(0).numpy()
        assert counts.sum() == n
        chi2 = ((counts - n * expected) ** 2 / (n * expected)).sum()
        assert stats.chi2.sf(chi2, len(expected) - 1) > 1e-3


@small
def test_samples_on_an_edge_follow_its_density(member: Member) -> None:
    y, pair = member(), (0, member.vertices - 1)
    value = y.sample((8000,))
    face = torch.zeros(member.vertices, dtype=torch.bool)
    face[list(pair)] = True
    there = value[(y.face_of(value) == face).all(-1)][:, pair[0]].numpy()
    assert len(there) > 200
    grid = np.sin(np.linspace(0, math.pi / 2, 4001)) ** 2
    middle = (grid[1:] + grid[:-1]) / 2
    mass = np.concatenate([[0], np.cumsum(edge_density(y, pair)(middle) * np.diff(grid))])
    assert stats.kstest(there, lambda t: np.interp(t, grid, mass / mass[-1])).pvalue > 1e-3


@small
def test_total_probability_is_one(member: Member) -> None:
    y, k = member(), member.vertices
    total = y.log_prob(torch.eye(k, dtype=torch.float64)).exp().sum().item()
    total += sum(on_edge(y, (i, j)) for i in range(k) for j in range(i + 1, k))
    total += in_triangle(y) if k == 3 else 0
    assert total == pytest.approx(1, abs=1e-6)


@small
def test_the_density_of_a_face_integrates_to_its_probability(member: Member) -> None:
    y, k = member(), member.vertices
    face = torch.zeros(k, dtype=torch.bool)
    face[:2] = True
    assert on_edge(y, (0, 1)) == pytest.approx(y.face_log_prob(face).exp().item(), abs=1e-7)
    vertices = torch.eye(k, dtype=torch.float64)
    torch.testing.assert_close(y.log_prob(vertices), y.face_log_prob(vertices.bool()))


@every
def test_entropy_is_the_mean_of_minus_log_prob(member: Member) -> None:
    y = member()
    surprise = -y.log_prob(y.sample((1000,)))
    error = surprise.std() / math.sqrt(1000)
    told = y.estimate_entropy(num_samples=1000)
    assert (told.value - surprise.mean()).abs() < 4 * (error + told.error)
    if member.vertices == 2:
        assert told.error == 0
        torch.testing.assert_close(y.entropy(), told.value)


@every
def test_face_entropy_and_mean_dimension_are_sums_over_faces(member: Member) -> None:
    y = member()
    log_prob = y.face_log_prob(faces(member.vertices))
    torch.testing.assert_close(y.face_entropy(), -(log_prob.exp() * log_prob).sum(), atol=1e-12, rtol=0)
    dimension = (log_prob.exp() * (faces(member.vertices).sum(-1) - 1)).sum()
    torch.testing.assert_close(y.mean_dimension(), dimension, atol=1e-12, rtol=0)
    for told in (y.estimate_face_entropy(), y.estimate_mean_dimension()):
        by_lattice = member.name in ("gaussian-4", "gaussian-full-4")
        assert 0 < told.error < 1e-4 if by_lattice else told.error == 0
    told = y.face_probability(faces(member.vertices))
    torch.testing.assert_close(told.value, log_prob.exp())


@binary
def test_code_length_counts_the_bits_of_coordinates(member: Member) -> None:
    y = member()
    edge = y.face_log_prob(torch.tensor([True, True])).exp()
    expected = y.entropy() / math.log(2) + 7 * edge
    torch.testing.assert_close(y.code_length(7), expected)


@every
def test_kl_divergence_is_zero_at_equality_and_its_own_mean_elsewhere(member: Member) -> None:
    p, moved = member(), [each * 1.2 + 0.1 for each in member.parameters]
    q = member(*moved)
    n = 1000
    same = p.estimate_kl(member(), num_samples=50)
    assert abs(same.value.item()) < 1e-9
    told = p.estimate_kl(q, num_samples=n)
    value = p.sample((n,))
    gain = p.log_prob(value) - q.log_prob(value)
    error = gain.std() / math.sqrt(n)
    assert (told.value - gain.mean()).abs() < 5 * (error + told.error)
    assert told.value > -4 * told.error
    assert told.value > 0.001


@binary
@pytest.mark.parametrize("other", [m for m in MEMBERS if m.vertices == 2], ids=lambda member: member.name)
def test_kl_divergence_between_any_two_is_exact_for_two_vertices(member: Member, other: Member) -> None:
    p, q = member(), other()
    value = p.sample((20_000,))
    gain = p.log_prob(value) - q.log_prob(value)
    told = kl_divergence(p, q)
    assert told >= -1e-9
    assert (told - gain.mean()).abs() < 5 * gain.std() / math.sqrt(20_000) + 1e-9


@small
def test_log_prob_has_the_right_gradients_in_parameters(member: Member) -> None:
    torch.manual_seed(1)
    k = member.vertices
    value = member().sample((3,))
    value = torch.cat([value, torch.eye(k, dtype=torch.float64)[:1], torch.full((1, k), 1 / k, dtype=torch.float64)])
    parameters = [each.clone().requires_grad_() for each in member.parameters]
    assert torch.autograd.gradcheck(lambda *p: member(*p).log_prob(value), parameters, atol=1e-5)
    face = faces(k)
    assert torch.autograd.gradcheck(lambda *p: member(*p).face_log_prob(face), parameters, atol=1e-5)


@every
def test_log_prob_has_derivatives_in_forward_mode_of_second_order_and_in_values(member: Member) -> None:
    k, parameters = member.vertices, [each.clone().requires_grad_() for each in member.parameters]
    value = torch.cat([torch.eye(k, dtype=torch.float64)[:1], torch.full((1, k), 1 / k, dtype=torch.float64)])

    def log_prob(*parameters: Tensor) -> Tensor:
        return member(*parameters).log_prob(value)

    with fwAD.dual_level():
        duals = [fwAD.make_dual(each, torch.ones_like(each)) for each in member.parameters]
        forward = fwAD.unpack_dual(log_prob(*duals)).tangent
    rows = [torch.autograd.grad(each, parameters, retain_graph=True) for each in log_prob(*parameters)]
    torch.testing.assert_close(forward, torch.stack([sum(each.sum() for each in row) for row in rows]))
    if k < 4:
        assert torch.autograd.gradgradcheck(log_prob, parameters, atol=1e-4)
    free = torch.full((k - 1,), 0.9 / k, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda first: member().log_prob(torch.cat([first, 1 - first.sum(-1, keepdim=True)], -1)), (free,)
    )


@binary
def test_entropy_and_kl_have_the_right_gradients_for_two_vertices(member: Member) -> None:
    parameters = [each.clone().requires_grad_() for each in member.parameters]
    assert torch.autograd.gradcheck(lambda *p: member(*p).entropy(), parameters)
    q = member(*(each + 0.2 for each in member.parameters))
    assert torch.autograd.gradcheck(lambda *p: kl_divergence(member(*p), q), parameters)


@every
def test_batches_are_their_elements(member: Member) -> None:
    shift = torch.tensor([0.0, 0.1, 0.3], dtype=torch.float64)
    first, *rest = member.parameters
    column = shift.reshape(3, *[1] * first.dim())
    y = member(first + column, *(each.expand(3, *each.shape) for each in rest))
    value = y.sample((2,))
    assert value.shape == (2, 3, member.vertices)
    for i in range(3):
        one = member(first + shift[i], *rest)
        torch.testing.assert_close(y.log_prob(value)[:, i], one.log_prob(value[:, i]))
        torch.testing.assert_close(y.face_log_prob(value > 0)[:, i], one.face_log_prob(value[:, i] > 0))
    assert y.face_entropy().shape == y.mean_dimension().shape == (3,)


@every
def test_expand_repeats_and_broadcasts(member: Member) -> None:
    y = member()
    wide = y.expand((2, 3))
    value = y.sample((3,))
    assert wide.batch_shape == (2, 3)
    assert wide.sample().shape == (2, 3, member.vertices)
    assert wide.sample((4,)).shape == (4, 2, 3, member.vertices)
    torch.testing.assert_close(wide.log_prob(value), y.log_prob(value).expand(2, 3))
    torch.testing.assert_close(wide.log_prob(value[:1]), y.log_prob(value[:1]).expand(2, 3))
    tall = y.expand((2, 1))
    several = y.sample((2, 3))
    torch.testing.assert_close(tall.log_prob(several), y.log_prob(several))
    assert y.expand((0,)).log_prob(value[:0]).shape == (0,)


@every
def test_batches_of_nothing_and_whole_numbers_are_taken(member: Member) -> None:
    y, k = member(), member.vertices
    none = y.expand((0,))
    assert (
        none.estimate_entropy(num_samples=10).value.shape == none.estimate_kl(none, num_samples=10).value.shape == (0,)
    )
    assert none.face_probability(faces(k).unsqueeze(1)).value.shape == (len(faces(k)), 0)
    vertices = torch.eye(k, dtype=torch.long)
    torch.testing.assert_close(y.log_prob(vertices), y.log_prob(vertices.double()))


@every
def test_the_same_generator_draws_the_same(member: Member) -> None:
    y = member()

    def draw(seed: int) -> Tensor:
        return y.sample((5,), generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    state = torch.get_rng_state()
    draw(3)
    y.sample_face((2,), generator=torch.Generator())
    assert torch.equal(state, torch.get_rng_state())


@every
def test_float32_in_float32_out(member: Member) -> None:
    single = member(*(each.float() for each in member.parameters))
    value = single.sample((50,))
    assert (
        value.dtype
        == single.estimate_entropy(num_samples=10).value.dtype
        == single.log_prob(value).dtype
        == torch.float32
    )
    assert single.face_log_prob(value > 0).dtype == torch.float32
    torch.testing.assert_close(single.log_prob(value).double(), member().log_prob(value.double()), atol=1e-4, rtol=1e-4)


@every
def test_bad_values_and_faces_are_reported(member: Member) -> None:
    y, k = member(), member.vertices
    with pytest.raises(ValueError, match="support"):
        y.log_prob(torch.full((k,), 0.4, dtype=torch.float64))
    with pytest.raises(ValueError, match="support"):
        y.log_prob(torch.tensor([1.5, -0.5] + [0] * (k - 2), dtype=torch.float64))
    with pytest.raises(ValueError, match="at least one True"):
        y.face_log_prob(torch.zeros(k, dtype=torch.bool))
    with pytest.raises(TypeError, match="boolean"):
        y.face_log_prob(torch.ones(k))
    with pytest.raises(ValueError, match=rf"face must have shape \(…, {k}\)"):
        y.face_log_prob(torch.ones(k + 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="num_samples must be at least 2, got 1"):
        y.estimate(lambda value: value.sum(-1), num_samples=1)


@every
def test_without_validation_there_is_no_mass_off_the_simplex(member: Member) -> None:
    y, k = member(), member.vertices
    y._validate_args = False
    off = torch.tensor([[1.5, -0.5] + [0] * (k - 2), [math.nan] * k], dtype=torch.float64)
    log_prob = y.log_prob(off)
    assert log_prob[0] == -math.inf
    assert log_prob[1].isnan()
    assert y.face_log_prob(torch.zeros(k, dtype=torch.bool)) == -math.inf


@pytest.mark.parametrize("name", ["gaussian-2", "gaussian-full-2", "concrete-2", "dirichlet-3", "largest-3"])
def test_estimates_have_unbiased_gradients(name: str) -> None:
    """Where the entropy is exact, its gradient beside that of an estimate from samples, by the score function."""
    member = next(m for m in MEMBERS if m.name == name)
    leaves = [each.clone().requires_grad_() for each in member.parameters]
    y, parts = member(*leaves), 20
    noise = torch.Generator().manual_seed(3)
    exact = torch.cat([each.reshape(-1) for each in torch.autograd.grad(y.entropy(), leaves)])
    drawn = [
        torch.autograd.grad(
            y.estimate(lambda value: -y.log_prob(value), num_samples=10_000, generator=noise).value, leaves
        )
        for _ in range(parts)
    ]
    told = torch.stack([torch.cat([each.reshape(-1) for each in part]) for part in drawn])
    error = told.std(0) / math.sqrt(parts)
    assert error.max() < 0.006
    assert ((told.mean(0) - exact).abs() <= 5 * error + 1e-12).all()


@pytest.mark.parametrize("name", ["gaussian-3", "gaussian-full-3", "dirichlet-shared-3"])
def test_entropy_of_three_is_its_integral(name: str) -> None:
    """All faces by quadrature, beside the estimate; and both parts: H(F) + H(Y | F)."""
    y = next(m for m in MEMBERS if m.name == name)()
    exact = _entropy_of_three(y)
    told = y.estimate_entropy(num_samples=4000, generator=torch.Generator().manual_seed(1))
    assert told.value.item() == pytest.approx(exact, abs=4 * told.error.item() + 1e-6)
    assert told.error < 0.02
    length = y.estimate_code_length(5.0, num_samples=4000, generator=torch.Generator().manual_seed(1))
    expected = exact / math.log(2) + 5 * y.mean_dimension().item()
    assert length.value.item() == pytest.approx(expected, abs=4 * length.error.item() + 1e-5)


def _entropy_of_three(y: Mixed) -> float:
    x, w = np.polynomial.legendre.leggauss(40)
    x, w = (x + 1) / 2, w / 2
    slope = torch.as_tensor(30 * x**2 * (1 - x) ** 2)
    x, w = torch.as_tensor(x**3 * (10 - 15 * x + 6 * x**2)), torch.as_tensor(w) * slope

    def surprise(value: Tensor) -> Tensor:
        log_prob = y.log_prob(value)
        return -log_prob.exp() * log_prob

    total = surprise(torch.eye(3, dtype=torch.float64)).sum()
    for i in range(3):
        value = torch.stack([x, 1 - x, 0 * x], -1).roll(i, -1)
        total += (w * surprise(value)).sum()
    a, b = torch.meshgrid(x, x, indexing="ij")
    inside = surprise(torch.stack([a, (1 - a) * b, (1 - a) * (1 - b)], -1)) * (1 - a)
    return float(total + (torch.outer(w, w) * inside).sum())


def test_what_cannot_be_reparametrised_says_so() -> None:
    for member in MEMBERS:
        y = member()
        if y.has_rsample:
            parameters = [each.clone().requires_grad_() for each in member.parameters]
            assert member(*parameters).rsample().requires_grad
        else:
            with pytest.raises(NotImplementedError, match="has no rsample"):
                y.rsample()


def test_different_numbers_of_vertices_do_not_compare() -> None:
    with pytest.raises(ValueError, match="the same number of vertices"):
        kl_divergence(MEMBERS[0](), HardConcrete(torch.zeros(3), 1.0, 1.2))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MixedDirichlet(torch.zeros(4), torch.ones(3)), r"face_logits and concentration .* \(4,\) and \(3,\)"),
        (lambda: GaussianSparsemax(torch.zeros(3), torch.ones(4)), r"loc and scale .* \(3,\) and \(4,\)"),
        (lambda: GaussianSparsemax(torch.zeros(2, 3), scale_tril=torch.eye(3).expand(5, 3, 3)), "loc and scale_tril"),
        (
            lambda: HardConcrete(torch.zeros(2, 3), torch.ones(3), 1.2),
            r"logits, and temperature .* \(2,\), \(3,\) and \(\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_told_by_name(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
