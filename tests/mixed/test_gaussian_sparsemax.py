"""GaussianSparsemax: closed forms, scipy's orthants, limits, gradients through samples."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from members import FACTOR, LOC, SCALE, double
from mpmath.calculus.quadrature import GaussLegendre
from scipy import integrate, stats
from torch.distributions import kl_divergence

from fenchel import sparsemax
from fenchel.mixed import GaussianSparsemax, faces
from fenchel.mixed.base import Mixed


def test_two_vertices_are_the_double_sided_rectified_gaussian() -> None:
    y = GaussianSparsemax(double(0.7, 0.1), scale=double(0.5, 1.2))
    # y₁ = ½ + ½(z₁ − z₂), clipped to [0, 1]
    normal = stats.norm(0.5 + 0.5 * 0.6, 0.5 * math.hypot(0.5, 1.2))
    expected = double(normal.sf(1), normal.cdf(0), normal.cdf(1) - normal.cdf(0))
    torch.testing.assert_close(y.face_log_prob(faces(2)).exp(), expected)
    t = double(0.01, 0.3, 0.99)
    torch.testing.assert_close(
        y.log_prob(torch.stack([t, 1 - t], -1)), torch.as_tensor(normal.logpdf(t.numpy())), rtol=1e-12, atol=0
    )
    surprise = integrate.quad(lambda x: -normal.pdf(x) * normal.logpdf(x), 0, 1)[0]
    ends = sum(-p * math.log(p) for p in (normal.sf(1), normal.cdf(0)))
    assert y.entropy().item() == pytest.approx(surprise + ends, abs=1e-9)


@pytest.mark.parametrize("face", [[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]])
def test_vertices_have_scipys_orthant_probabilities(face: list[int]) -> None:
    """A vertex is reached where its entry leads all others by one: an orthant of three differences."""
    here = face.index(1)
    others = [j for j in range(4) if j != here]
    differences = np.zeros((3, 4))
    differences[range(3), others], differences[:, here] = 1, -1
    covariance = differences @ (FACTOR @ FACTOR.T).numpy() @ differences.T
    normal = stats.multivariate_normal(differences @ LOC.numpy(), covariance, maxpts=10**6, abseps=1e-9)
    y = GaussianSparsemax(LOC, scale_tril=FACTOR)
    told = y.face_probability(torch.tensor(face).bool())
    assert abs(told.value.item() - normal.cdf(-np.ones(3))) < 5 * told.error.item() + 1e-6
    assert 0 < told.error < 2e-4 * told.value


def wide(k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """μ and a Cholesky factor with correlations of all signs."""
    noise = torch.Generator().manual_seed(seed)
    root = torch.randn(k, k, dtype=torch.float64, generator=noise)
    return torch.randn(k, dtype=torch.float64, generator=noise) / 2, torch.linalg.cholesky(
        root @ root.T / k + 0.3 * torch.eye(k, dtype=torch.float64)
    )


@pytest.mark.parametrize("k", [5, 6])
def test_densities_on_an_edge_are_scipys(k: int) -> None:
    """With u = z₀ − z₁ and v_k = z_k less the threshold: y₀ = ½(1 + u), and the edge is where all v < 0."""
    loc, factor = wide(k, 7)
    to = np.zeros((k - 1, k))
    to[0, :2] = 1, -1
    to[1:, :2], to[range(1, k - 1), range(2, k)] = -0.5, 1
    mean, covariance = to @ loc.numpy(), to @ (factor @ factor.T).numpy() @ to.T
    mean[1:] += 0.5
    y = GaussianSparsemax(loc, scale_tril=factor)
    for t in (0.2, 0.9):
        u = 2 * t - 1
        slope = covariance[1:, 0] / covariance[0, 0]
        rest = stats.multivariate_normal(
            mean[1:] + slope * (u - mean[0]),
            covariance[1:, 1:] - np.outer(slope, covariance[0, 1:]),
            maxpts=10**6,
            abseps=1e-8,
            releps=1e-7,
        )
        expected = math.log(2 * rest.cdf(np.zeros(k - 2))) + stats.norm(mean[0], covariance[0, 0] ** 0.5).logpdf(u)
        told = y.estimate_log_prob(double(t, 1 - t, *[0.0] * (k - 2)))
        assert told.value.item() == pytest.approx(expected, abs=5 * told.error.item() + 2e-6)
        assert 0 < told.error < 1e-4


def test_faces_of_five_with_a_full_covariance_have_probability_one_together() -> None:
    loc, factor = wide(5, 8)
    told = GaussianSparsemax(loc, scale_tril=factor).face_probability(faces(5))
    assert told.value.sum().item() == pytest.approx(1, abs=5 * told.error.square().sum().sqrt().item())
    assert told.error.max() < 1e-4


def test_gradients_of_orthants_are_those_of_the_integral_over_the_threshold() -> None:
    """With independent entries there are both ways; and gradcheck of the one by orthants."""
    vertices = torch.eye(6, dtype=torch.float64)
    value = torch.cat([vertices[:2], double([[0.3, 0.0, 0.7, 0.0, 0.0, 0.0]])])
    loc = double(0.4, -0.2, 0.1, -0.5, 0.2, -0.1).requires_grad_()
    scale = double(0.8, 0.5, 1.1, 0.6, 0.9, 0.7).requires_grad_()
    by_threshold = GaussianSparsemax(loc, scale=scale).log_prob(value)
    by_orthant = GaussianSparsemax(loc, scale_tril=scale.diag()).log_prob(value)
    torch.testing.assert_close(by_orthant, by_threshold, atol=2e-4, rtol=0)
    for one, other in zip(by_threshold, by_orthant, strict=True):
        exact, told = (torch.autograd.grad(each, (loc, scale), retain_graph=True) for each in (one, other))
        torch.testing.assert_close(torch.cat(told), torch.cat(exact), atol=1e-3, rtol=0)
    assert torch.autograd.gradcheck(
        lambda m, s: GaussianSparsemax(m, scale_tril=s.diag()).log_prob(value[2]), (loc, scale), atol=1e-6
    )


def test_a_diagonal_covariance_is_a_full_one_without_the_rest() -> None:
    """Two ways: an integral over the threshold, and orthants."""
    sparse, dense = GaussianSparsemax(LOC, scale=SCALE), GaussianSparsemax(LOC, scale_tril=SCALE.diag())
    value = sparse.sample((12,))
    torch.testing.assert_close(sparse.log_prob(value), dense.log_prob(value), atol=2e-5, rtol=0)
    three = GaussianSparsemax(LOC[:3], scale=SCALE[:3]), GaussianSparsemax(LOC[:3], scale_tril=SCALE[:3].diag())
    value = torch.cat([three[0].sample((12,)), torch.eye(3, dtype=torch.float64)])
    torch.testing.assert_close(three[0].log_prob(value), three[1].log_prob(value), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(three[0].face_log_prob(faces(3)), three[1].face_log_prob(faces(3)), atol=1e-12, rtol=0)


def test_faces_of_six_vertices_have_probability_one_together() -> None:
    y = GaussianSparsemax(torch.zeros(6, dtype=torch.float64), scale=torch.full((6,), 0.7, dtype=torch.float64))
    by_size = faces(6)[[0, 6, 21, 41, 56, 62]]  # one of each size: all of a size are alike
    told = y.face_probability(by_size)
    counts = double(6, 15, 20, 15, 6, 1)
    error = (counts * told.error).sum().item()
    assert (counts * told.value).sum().item() == pytest.approx(1, abs=4 * error + 1e-9)
    assert error < 1e-3


def test_little_noise_is_sparsemax() -> None:
    for scale in (1e-2, 1e-6):
        y = GaussianSparsemax(LOC, scale=torch.full_like(LOC, scale))
        p = sparsemax(LOC)
        torch.testing.assert_close(y.sample(), p, atol=10 * scale, rtol=0)
        assert y.face_log_prob(p > 0).item() == pytest.approx(0, abs=1e-3)
        far = torch.eye(4, dtype=torch.float64)[3]
        assert y.log_prob(far) < -1000


def test_scales_of_all_orders_meet() -> None:
    """A step where others are smooth, and wide intervals with narrow peaks; against scipy, told where to look."""
    loc, scale = double(0.0, 0.3, -0.2), double(2.0, 1e-4, 5.0)
    y = GaussianSparsemax(loc, scale=scale)

    def integrand(t: float) -> float:
        return stats.norm.pdf(t + 1, 0, 2) * stats.norm.cdf(t, 0.3, 1e-4) * stats.norm.cdf(t, -0.2, 5)

    pieces = [0.3 - 2e-3, 0.3 - 3e-4, 0.3, 0.3 + 3e-4, 0.3 + 2e-3, 3, 8, 20]
    ends = itertools.pairwise(pieces)
    expected = sum(integrate.quad(integrand, a, b, epsabs=1e-13)[0] for a, b in ends)
    assert y.face_log_prob(torch.tensor([True, False, False])).exp().item() == pytest.approx(expected, rel=1e-9)


def test_densities_for_many_vertices() -> None:
    torch.manual_seed(3)
    y = GaussianSparsemax(torch.randn(300), scale=torch.rand(300) + 0.2)
    value = y.sample((4,))
    log_prob = y.log_prob(value)
    assert log_prob.isfinite().all()
    assert (y.face_of(value).sum(-1) < 30).all()


def test_far_faces_have_finite_log_probabilities() -> None:
    y = GaussianSparsemax(double(60.0, 0.0, 0.0), scale=double(1.0, 1.0, 1.0))
    log_prob = y.face_log_prob(faces(3))
    assert log_prob.isfinite().all()
    assert log_prob[0].item() == pytest.approx(0, abs=1e-12)
    assert log_prob[1].item() == pytest.approx(stats.norm.logcdf(-61 / math.sqrt(2)), rel=1e-9)  # z₂ − z₁ ≥ 1


def test_gradients_through_samples_are_those_of_expectations() -> None:
    """∂E[g(Y)] by integration of the density, by finite differences; and by the mean gradient of samples."""
    loc, scale = double(0.3, -0.1), double(0.6, 0.4)

    def expected(first: float) -> float:
        normal = stats.norm(0.5 + 0.5 * (first + 0.1), 0.5 * math.hypot(0.6, 0.4))
        return normal.sf(1) + integrate.quad(lambda t: t**3 * normal.pdf(t), 0, 1)[0]

    numeric = (expected(0.3 + 1e-5) - expected(0.3 - 1e-5)) / 2e-5
    leaf = loc.clone().requires_grad_()
    value = GaussianSparsemax(leaf, scale=scale).rsample((100_000,))
    [gradient] = torch.autograd.grad((value[:, 0] ** 3).mean(), leaf)
    assert gradient[0].item() == pytest.approx(numeric, abs=0.006)
    assert gradient.sum().item() == pytest.approx(0, abs=1e-9)


def product_of_two(y: GaussianSparsemax) -> float:
    """E[y₀ y₁] of three: over the edge between them and the interior, by quadrature of the density."""
    x, w = np.polynomial.legendre.leggauss(32)
    x, w = torch.as_tensor((x + 1) / 2), torch.as_tensor(w / 2)
    edge = (w * x * (1 - x) * y.log_prob(torch.stack([x, 1 - x, 0 * x], -1)).exp()).sum()
    a, b = torch.meshgrid(x, x, indexing="ij")
    value = torch.stack([a, (1 - a) * b, (1 - a) * (1 - b)], -1)
    inside = torch.outer(w, w) * (1 - a) * value[..., 0] * value[..., 1] * y.log_prob(value).exp()
    return (edge + inside.sum()).item()


def test_gradients_through_samples_reach_a_full_covariance() -> None:
    """Beside finite differences of the expectation, integrated."""
    leaf = FACTOR[:3, :3].clone().requires_grad_()
    noise = torch.Generator().manual_seed(5)
    value = GaussianSparsemax(LOC[:3], scale_tril=leaf.tril()).rsample((200_000,), noise)
    assert (value[:, 0] * value[:, 1]).mean().item() == pytest.approx(
        product_of_two(GaussianSparsemax(LOC[:3], scale_tril=FACTOR[:3, :3])), abs=0.001
    )
    [gradient] = torch.autograd.grad((value[:, 0] * value[:, 1]).mean(), leaf)
    for i, j in ((0, 0), (1, 0), (2, 1)):
        step = torch.zeros(3, 3, dtype=torch.float64)
        step[i, j] = 1e-4
        up, down = (GaussianSparsemax(LOC[:3], scale_tril=FACTOR[:3, :3] + way * step) for way in (1, -1))
        numeric = (product_of_two(up) - product_of_two(down)) / 2e-4
        assert gradient[i, j].item() == pytest.approx(numeric, abs=0.002)
    assert gradient.triu(1).count_nonzero() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loc": torch.zeros(3)}, "exactly one"),
        ({"loc": torch.zeros(3), "scale": torch.ones(3), "scale_tril": torch.eye(3)}, "exactly one"),
        ({"loc": torch.zeros(3), "scale": torch.zeros(3)}, "scale must satisfy 0 < scale < inf"),
        ({"loc": torch.full((3,), math.inf), "scale": torch.ones(3)}, "loc must be finite"),
        ({"loc": torch.zeros(3), "scale_tril": torch.ones(3, 3)}, "lower triangular"),
        ({"loc": torch.zeros(3), "scale_tril": torch.eye(2)}, r"scale_tril must have shape \(…, 3, 3\)"),
        ({"loc": torch.zeros(0), "scale": torch.ones(0)}, "loc must have shape .* and not be empty"),
    ],
)
def test_bad_parameters_are_reported(arguments: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GaussianSparsemax(**arguments)


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="loc must be a floating-point tensor"):
        GaussianSparsemax(torch.zeros(3, dtype=torch.long), scale=torch.ones(3))


def test_a_steep_fall_beside_a_wide_one_is_resolved() -> None:
    """Thresholds spread over hundreds, and a cliff narrower than a thousandth among them; by scipy, in pieces."""
    loc, scale = (0.019, 0.0004, 0.0189), (149.0, 6.2, 4e-5)
    sharp = [loc[2] + scale[2] * step for step in range(-10, 11)]

    def density(tau: np.ndarray) -> np.ndarray:
        below = [stats.norm.cdf(tau, loc[i], scale[i]) for i in (1, 2)]
        return stats.norm.pdf(1 + tau, loc[0], scale[0]) * below[0] * below[1]

    pieces = itertools.pairwise([*sharp, 1, 5, 10, 20, 50, 100, 200, 500, 1000, 2000])
    expected = sum(integrate.fixed_quad(density, a, b, n=40)[0] for a, b in pieces)
    y = GaussianSparsemax(double(*loc), scale=double(*scale))
    vertex = torch.tensor([True, False, False])
    assert y.face_log_prob(vertex).exp().item() == pytest.approx(expected, rel=1e-10)
    assert y.face_log_prob(faces(3)).exp().sum().item() == pytest.approx(1, abs=1e-10)


def test_nan_spoils_its_own_row_and_no_other() -> None:
    loc = double([[math.nan, 0.0, 0.0], [0.0, 0.0, 0.0]])
    values = torch.cat([torch.eye(3, dtype=torch.float64), torch.full((1, 3), 1 / 3, dtype=torch.float64)])
    for scale in ({"scale": torch.ones(3)}, {"scale_tril": torch.eye(3)}):
        y = GaussianSparsemax(loc, **scale, validate_args=False)
        for log_prob in (y.log_prob(values.unsqueeze(1)), y.face_log_prob(faces(3).unsqueeze(1))):
            assert log_prob[:, 0].isnan().all()
            assert log_prob[:, 1].isfinite().all()


@pytest.mark.parametrize("full", [False, True])
def test_two_vertices_by_closed_forms(full: bool) -> None:
    loc = torch.randn(6, 2, dtype=torch.float64) * torch.tensor([[0.1], [1.0], [3.0], [10.0], [40.0], [1.0]])
    loc.requires_grad_()
    size = torch.tensor([0.05, 1.0, 3.0, 1.0, 1.0, 100.0], dtype=torch.float64)
    if full:
        factor = torch.randn(6, 2, 2, dtype=torch.float64).tril(-1) + torch.eye(2)
        p, q = (GaussianSparsemax(m, scale_tril=s * factor) for m, s in ((loc, size[:, None, None]), (loc / 2, 1.3)))
    else:
        p = GaussianSparsemax(loc, scale=size.unsqueeze(-1) * torch.tensor([1.0, 0.5]))
        q = GaussianSparsemax(loc / 2, scale=torch.ones(6, 2))
    pairs = [(p.entropy(), Mixed.estimate_entropy(p).value), (kl_divergence(p, q), Mixed.estimate_kl(p, q).value)]
    for closed, integrated in pairs:
        torch.testing.assert_close(closed, integrated, rtol=1e-9, atol=1e-12)
        slopes = (torch.autograd.grad(each.sum(), loc, retain_graph=True)[0] for each in (closed, integrated))
        torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-15)


def derivatives_by_quadrature(y: list[float], loc: list[float], scale: list[float]) -> tuple[float, list[float]]:
    """log_prob, and its derivatives in loc and scale, as integrals over the threshold in 32 digits."""
    with mpmath.workdps(32):
        face = [v > 0 for v in y]
        shift = [mpmath.mpf(m) - mpmath.mpf(v) for m, v in zip(loc, y, strict=True)]
        sigma = [mpmath.mpf(v) for v in scale]
        marks = [s + k * d for s, d in zip(shift, sigma, strict=True) for k in range(-12, 13, 3)]
        known = [(s, d) for s, d, f in zip(shift, sigma, face, strict=True) if f]
        low, high = max(s - 12 * d for s, d in known), min(s + 12 * d for s, d in known)
        ends = sorted({low, high, *(m for m in marks if low < m < high)})

        def terms(t: mpmath.mpf) -> mpmath.matrix:
            product, slopes, bends = mpmath.mpf(1), [], []
            for s, d, f in zip(shift, sigma, face, strict=True):
                z = (t - s) / d
                value = mpmath.npdf(z) / d if f else mpmath.ncdf(z)
                product *= value
                slopes.append(z / d if f else -mpmath.npdf(z) / d / value)
                bends.append((z * z - 1) / d if f else -z * mpmath.npdf(z) / d / value)
            return mpmath.matrix([product, *(product * v for v in (*slopes, *bends))])

        nodes = GaussLegendre(mpmath.mp).calc_nodes(4, 112)
        total = mpmath.matrix(2 * len(y) + 1, 1)
        for a, b in itertools.pairwise(ends):
            for x, w in nodes:
                total += (b - a) / 2 * w * terms((a + b) / 2 + (b - a) / 2 * x)
        return float(mpmath.log(sum(face) * total[0])), [float(v / total[0]) for v in list(total)[1:]]


NARROW = [
    ([0.6, 0.0, 0.4], [10.0, 1e-5, 1.0]),
    ([0.0, 0.0, 1.0], [10.0, 1e-5, 1.0]),
    ([0.0, 1.0, 0.0], [1.0, 1e-8, 1.0]),
    ([0.6, 0.0, 0.4], [1.0, 1e-10, 1.0]),
    ([0.0, 0.0, 1.0, 0.0], [2.0, 1e-6, 1.0, 0.5]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("y", "scale"), NARROW)
def test_derivatives_in_a_very_narrow_scale_are_those_of_the_integral(y: list[float], scale: list[float]) -> None:
    loc = [0.3, 0.2, -0.1, 0.25][: len(y)]
    value, wanted = derivatives_by_quadrature(y, loc, scale)
    mean, spread = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (loc, scale))
    found = GaussianSparsemax(mean, scale=spread).log_prob(torch.tensor(y, dtype=torch.float64))
    assert found.item() == pytest.approx(value, rel=1e-9)
    slopes = torch.cat(torch.autograd.grad(found, (mean, spread)))
    np.testing.assert_allclose(slopes, wanted, rtol=1e-6)


def test_a_narrow_entry_far_below_the_threshold_takes_no_digits() -> None:
    y, loc, scale = [1.0, 0.0, 0.0, 0.0], [1.0, -1.5, 0.05, 0.0], [1e-6, 1e-8, 0.01, 1.0]
    mean, spread = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (loc, scale))
    found = GaussianSparsemax(mean, scale=spread).log_prob(torch.tensor(y, dtype=torch.float64))
    _, slope = torch.autograd.grad(found, (mean, spread))
    # Next to a threshold of so little spread the rest is a parabola, whose terms are known.
    t = np.array([-5.0, 0.0])
    width = np.array(scale[2:])
    mills = np.exp(stats.norm.logpdf(t) - stats.norm.logcdf(t))
    steep, bend = (mills / width).sum(), (-mills * (t + mills) / width**2).sum()
    np.testing.assert_allclose(slope[0], scale[0] * (steep**2 + bend), rtol=1e-5)


def test_several_narrow_entries_are_steps_whose_widths_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    widths = 10 ** (-6 + 2 * torch.rand(200, 3, generator=generator, dtype=torch.float64))
    scale = torch.cat([torch.ones(200, 2, dtype=torch.float64), widths], -1).requires_grad_()
    value = torch.tensor([0.3, 0.7, 0.0, 0.0, 0.0], dtype=torch.float64)
    (slope,) = torch.autograd.grad(GaussianSparsemax(loc, scale=scale).log_prob(value).sum(), scale)
    # Φ(t/σ) is a step plus O(σ²): its logarithmic derivative in σ is no larger than that, at places of density O(1).
    assert (slope * scale)[:, 2:].abs().max() < 1e-6
