"""Expected basis functions against quadrature, and what holds for every map."""

import math
from collections.abc import Callable

import mpmath as mp
import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel.continuous import BetaGaussian, GaussianBasis, expectation, generalized_covariance

ALPHAS = [0.0, 0.6, 1.0, 1.2, 1.25, 4 / 3, 1.5, 1.7, 2.0, 3.0]
PLANE = [0.4, 1.0, 4 / 3, 1.5, 2.0]
D = torch.float64


@pytest.fixture(params=["compiled", "plain"])
def _both(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> None:
    if request.param == "plain":
        set_kernels(False)


def line_oracle(loc: float, variance: float, alpha: float, center: float, width: float) -> float:
    """∫ p(t) N(t; centre, width²) dt in 20 digits, p from its definition: a height that makes the integral 1."""
    with mp.workdps(20):
        c, s = mp.mpf(alpha) - 1, mp.sqrt(variance)
        if c == 0:
            return float(mp.npdf(loc, center, mp.sqrt(variance + width**2)))
        if c > 0:
            k = 1 / c
            a = s * (mp.gamma(k + 1.5) * (2 * k) ** k / (mp.sqrt(mp.pi) * mp.gamma(k + 1)) / s) ** (1 / (2 * k + 1))
            shape, ends = lambda y: (1 - y * y) ** k, (mp.mpf(-1), mp.mpf(1))
            norm = mp.beta(mp.mpf(1) / 2, k + 1)
        else:
            m = -1 / c
            # ∫ (1 + |c| u²/(2 p₀ᶜ))^(−m) is √(2m p₀ᶜ) B(½, m − ½) s, times p₀ it is 1.
            norm = mp.beta(mp.mpf(1) / 2, m - mp.mpf(1) / 2)
            peak = (s * mp.sqrt(2 * m) * norm) ** (-1 / (1 + c / 2))
            a = s * mp.sqrt(2 * m * peak**c)
            shape, ends = lambda y: (1 + y * y) ** (-m), (mp.mpf(-10) ** 9, mp.mpf(10) ** 9)
        place, spread = (mp.mpf(center) - loc) / a, width / a
        marks = [place + z * spread for z in (-12, -6, -3, -1, 0, 1, 3, 6, 12)] + [mp.mpf(0), mp.mpf(-1), mp.mpf(1)]
        cuts = sorted({p for p in marks if ends[0] <= p <= ends[1]})
        value = mp.quad(lambda y: shape(y) * mp.npdf(y, place, spread), cuts, maxdegree=6) / norm / a
        return float(value)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_line_is_right_from_very_narrow_to_very_wide(alpha: float, set_kernels: Callable[[bool], None]) -> None:
    functions = [(0.0, 0.1), (0.3, 0.03), (0.9, 0.5)]
    centers, widths = torch.tensor(functions, dtype=D).unbind(1)
    basis = GaussianBasis(centers.unsqueeze(-1), widths.square().reshape(-1, 1, 1))
    for sigma in (1e-4, 0.02, 0.3, 1e2):
        wanted = np.array([line_oracle(0.4, sigma**2, alpha, *each) for each in functions])
        for on in (True, False):
            set_kernels(on)
            found = expectation(torch.tensor([0.4], dtype=D), torch.tensor([[sigma**2]], dtype=D), basis, alpha)
            np.testing.assert_allclose((found * widths).numpy(), wanted * widths.numpy(), atol=1e-12)


def plane_oracle(p: BetaGaussian, center: np.ndarray, covariance: np.ndarray, n: int = 240) -> float:
    """By Gauss and Legendre's rule in r² over many rings of the ellipse, with p's own value there."""
    x, w = np.polynomial.legendre.leggauss(n)
    r, w = (1 + x) / 2, w / 2
    angle = 2 * np.pi * np.arange(4 * n) / (4 * n)
    root = (p.scale_tril * p.support_radius).numpy()
    u = r[:, None, None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    t = p.loc.numpy() + u @ root.T
    away = t - center
    square = np.einsum("rai,ij,raj->ra", away, np.linalg.inv(covariance), away)
    bell = np.exp(-0.5 * square) / (2 * np.pi * math.sqrt(np.linalg.det(covariance)))
    density = np.exp(p.log_prob(torch.from_numpy(t)).numpy())
    return float((w[:, None] * r[:, None] * density * bell).sum() * 2 * np.pi / len(angle) * np.linalg.det(root))


ELLIPSES = [
    torch.tensor(m, dtype=D)
    for m in ([[0.02, 0.005], [0.005, 0.01]], [[2.0, -0.3], [-0.3, 0.5]], [[1e-4, 0], [0, 2e-4]])
]


@pytest.mark.slow
@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize("alpha", [4 / 3, 1.5, 2.0])
def test_the_plane_is_right_for_narrow_and_wide_functions(alpha: float) -> None:
    covariances = np.array([[[0.01, 0.003], [0.003, 0.004]], [[0.3, 0.0], [0.0, 0.2]]])
    centers = np.array([[0.5, 0.5], [0.9, 0.2]])
    basis = GaussianBasis(torch.from_numpy(centers), torch.from_numpy(covariances))
    loc = torch.tensor([0.45, 0.55], dtype=D)
    for sigma in ELLIPSES:
        p = BetaGaussian(loc, sigma=sigma, alpha=alpha)
        found = expectation(loc, sigma, basis, alpha)
        wanted = [plane_oracle(p, *each) for each in zip(centers, covariances, strict=True)]
        peaks = 1 / (2 * np.pi * np.sqrt(np.linalg.det(covariances)))
        np.testing.assert_allclose(found.numpy() / peaks, np.array(wanted) / peaks, atol=1e-10)


def ball(dim: int, scale: float) -> tuple[Tensor, Tensor, GaussianBasis]:
    sigma = scale**2 * torch.tensor([[1.0, 0.3], [0.3, 0.6]], dtype=D)[:dim, :dim]
    return torch.tensor([0.5, 0.4], dtype=D)[:dim], sigma, basis_of(dim)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 10.0])
def test_alpha_next_to_one_meets_the_gaussian_from_both_sides(dim: int, scale: float) -> None:
    loc, sigma, basis = ball(dim, scale)
    middle = expectation(loc, sigma, basis, 1.0)
    for step in (1e-2, 1e-3, 1e-4, 1e-6, 1e-9, 1e-12):
        above, below = (expectation(loc, sigma, basis, 1 + side * step) for side in (1, -1))
        assert (above - middle).abs().max() < 10 * step * middle.max()
        # What is odd in the step cancels: a parabola is left.
        assert (above + below - 2 * middle).abs().max() < (100 * step**2 + 3e-13) * middle.max()


THIN = [([4.0, 1e-10], 0.0), ([1e4, 1e-4], 0.3), ([1e-6, 1e-2], 1.0)]


def thin_oracle(p: BetaGaussian, center: Tensor, covariance: Tensor, panels: int = 1000) -> float:
    """By Gauss and Legendre's rule over short panels of the long axis of the ellipse near the centre, and across it."""
    squares, axes = np.linalg.eigh(p.sigma.numpy())
    half = np.sqrt(squares) * float(p.support_radius)  # of the axes, the long one last
    x, w = np.polynomial.legendre.leggauss(6)
    across, weights = np.polynomial.legendre.leggauss(60)
    inverse = np.linalg.inv(covariance.numpy())
    middle = axes[:, 1] @ (center - p.loc).numpy() / half[1]
    reach = 12 * math.sqrt(np.linalg.eigvalsh(covariance.numpy())[-1]) / half[1]
    ends = np.linspace(max(middle - reach, -1), min(middle + reach, 1), panels + 1)
    along = (ends[:-1, None] + (1 + x) / 2 * np.diff(ends)[:, None]).ravel()
    share = (w / 2 * np.diff(ends)[:, None]).ravel()
    chord = np.sqrt(1 - along**2)[:, None]
    u = np.stack(np.broadcast_arrays(chord * across, along[:, None]), -1)
    away = (p.loc - center).numpy() + (u * half) @ axes.T
    bell = np.exp(-0.5 * np.einsum("rai,ij,raj->ra", away, inverse, away))
    k = 1 / (p.alpha - 1)
    height = (1 - (u**2).sum(-1)).clip(0) ** k
    total = float((share[:, None] * chord * weights * height * bell).sum())
    return total * (k + 1) / math.pi / (2 * math.pi * math.sqrt(np.linalg.det(covariance.numpy())))


@pytest.mark.slow
@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize(("squares", "turn"), THIN)
def test_thin_ellipses_are_right(alpha: float, squares: list[float], turn: float) -> None:
    rotation = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]], dtype=D)
    sigma = symmetric(rotation @ torch.diag(torch.tensor(squares, dtype=D)) @ rotation.mT)
    loc = torch.tensor([0.45, 0.55], dtype=D)
    covariances = torch.stack(
        [0.03**2 * torch.eye(2, dtype=D), torch.tensor([[0.01, 0.0099], [0.0099, 0.01]], dtype=D)]
    )
    basis = GaussianBasis(torch.tensor([[0.46, 0.55], [0.5, 0.6]], dtype=D), covariances)
    p = BetaGaussian(loc, sigma=sigma, alpha=alpha)
    wanted = torch.tensor([thin_oracle(p, m, s) for m, s in zip(basis.centers, covariances, strict=True)], dtype=D)
    assert torch.allclose(expectation(loc, sigma, basis, alpha), wanted, rtol=1e-8, atol=1e-12)
    mapped = torch.func.vmap(lambda m, s: expectation(m, s, basis, alpha))(loc[None], sigma[None])
    assert torch.allclose(mapped[0], wanted, rtol=1e-8, atol=1e-12)


def test_a_needle_is_a_density_of_the_line() -> None:
    # In the limit the density lives on its long axis, where one dimension of the ellipse is integrated out.
    loc, sigma = torch.tensor([0.45, 0.55], dtype=D), torch.diag(torch.tensor([4.0, 1e-10], dtype=D))
    basis = GaussianBasis(
        torch.tensor([[0.5, 0.5], [30.0, 0.6]], dtype=D), 0.1**2 * torch.eye(2, dtype=D).expand(2, 2, 2)
    )
    for alpha in (1.5, 2.0):
        length = 2 * BetaGaussian(loc, sigma=sigma, alpha=alpha).support_radius.item()
        power = 1 / (alpha - 1) + 0.5
        x = np.linspace(-1, 1, 40001)
        weight = (1 - x * x) ** power
        points = torch.tensor(np.stack([0.45 + length * x, np.full_like(x, 0.55)], -1))
        wanted = torch.from_numpy(weight / weight.sum()) @ basis(points)
        assert torch.allclose(expectation(loc, sigma, basis, alpha), wanted, rtol=1e-3)


def test_heavy_tails_and_gaussians_of_the_plane_agree_with_quadrature() -> None:
    basis = GaussianBasis.grid(3, widths=(0.4,)).double()
    loc, sigma = torch.tensor([0.5, 0.4], dtype=D), ELLIPSES[1]
    width = basis.covariances[0, 0, 0].sqrt().item()  # 0.4, but for the rounding of the basis
    for alpha in (0.4, 0.8, 1.0):
        p = BetaGaussian(loc, sigma=sigma, alpha=alpha)
        x, w = np.polynomial.hermite_e.hermegauss(150)  # over the basis function, which is the narrow one
        for j in range(len(basis)):
            t = basis.centers[j].numpy() + width * np.stack(np.meshgrid(x, x), -1)
            weight = np.multiply.outer(w, w) / (2 * np.pi)
            wanted = (weight * np.exp(p.log_prob(torch.from_numpy(t)).numpy())).sum()
            assert expectation(loc, sigma, basis, alpha)[j].item() == pytest.approx(wanted, rel=1e-9)


def test_powers_without_a_closed_form_agree_with_gauss_and_jacobi() -> None:
    basis = GaussianBasis.grid(3, widths=(0.2,)).double()
    loc, sigma = torch.tensor([0.5, 0.4], dtype=D), ELLIPSES[0]
    for alpha in (1.1, 1.7, 2.5):
        wanted = BetaGaussian(loc, sigma=sigma, alpha=alpha).integrate(lambda t: basis(t), nodes=80, angles=100)
        assert torch.allclose(expectation(loc, sigma, basis, alpha), wanted, atol=1e-10)


def test_gaussians_in_any_dimension_are_products_of_normal_densities() -> None:
    for dim in (1, 2, 3, 4):
        roots = torch.randn(6, dim, dim, dtype=D)
        matrices = roots @ roots.mT + torch.eye(dim)
        basis = GaussianBasis(torch.randn(5, dim, dtype=D), matrices[:5])
        loc = torch.randn(dim, dtype=D)
        wanted = [
            torch.distributions.MultivariateNormal(basis.centers[j], basis.covariances[j] + matrices[5]).log_prob(loc)
            for j in range(5)
        ]
        assert torch.allclose(expectation(loc, matrices[5], basis, 1.0), torch.stack(wanted).exp(), rtol=1e-10)
    heavy = expectation(loc, matrices[5], basis, 0.7)
    p = BetaGaussian(loc, sigma=matrices[5], alpha=0.7)
    torch.manual_seed(0)
    assert torch.allclose(heavy, basis(p.sample((200000,))).mean(0), rtol=0.05)


# -- derivatives -----------------------------------------------------------------------------------------------------


def inputs(dim: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    root = 0.3 * torch.randn(batch, dim, dim, dtype=D)
    sigma = root @ root.mT + 0.02 * torch.eye(dim, dtype=D)
    return torch.rand(batch, dim, dtype=D, requires_grad=True), sigma.requires_grad_()


def basis_of(dim: int) -> GaussianBasis:
    return (
        GaussianBasis.line(4, widths=(0.1, 0.6)) if dim == 1 else GaussianBasis.grid(2, widths=(0.25, 0.6))
    ).double()


def symmetric(sigma: Tensor) -> Tensor:
    return 0.5 * (sigma + sigma.mT)


@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize(("dim", "alpha"), [(1, a) for a in ALPHAS] + [(2, a) for a in PLANE])
def test_first_derivatives_are_right(dim: int, alpha: float) -> None:
    basis = basis_of(dim)
    f = lambda loc, sigma: expectation(loc, symmetric(sigma), basis, alpha)  # noqa: E731
    assert torch.autograd.gradcheck(f, inputs(dim))


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "alpha"), [(1, a) for a in (1.0, 4 / 3, 1.5, 2.0)] + [(2, a) for a in (1.0, 1.5, 2.0)])
def test_second_derivatives_are_right(dim: int, alpha: float) -> None:
    basis = basis_of(dim)
    f = lambda loc, sigma: expectation(loc, symmetric(sigma), basis, alpha)  # noqa: E731
    assert torch.autograd.gradgradcheck(f, inputs(dim, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "alpha"), [(1, 2.0), (1, 1.7), (2, 1.0), (2, 2.0)])
def test_the_basis_has_its_derivatives(dim: int, alpha: float) -> None:
    loc, sigma = inputs(dim, 1)
    basis = basis_of(dim)

    def f(centers: Tensor, covariances: Tensor) -> Tensor:
        return expectation(loc.detach(), sigma.detach(), GaussianBasis(centers, symmetric(covariances)), alpha)

    leaves = basis.centers[:2].clone().requires_grad_(), basis.covariances[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize(("dim", "alpha"), [(1, 1.0), (1, 1.5), (1, 2.0), (2, 1.5), (2, 2.0)])
def test_the_jacobian_is_the_generalized_covariance(dim: int, alpha: float) -> None:
    basis = basis_of(dim)
    precision = torch.tensor([[9.0, 2.0], [2.0, 6.0]], dtype=D)[:dim, :dim]
    theta = (precision @ torch.tensor([0.4, 0.5], dtype=D)[:dim]).requires_grad_()
    quadratic = (-0.5 * precision).requires_grad_()

    def rho(theta: Tensor, quadratic: Tensor) -> Tensor:
        sigma = torch.linalg.inv(-2 * symmetric(quadratic))
        return expectation(sigma @ theta, symmetric(sigma), basis, alpha)

    linear, square = torch.autograd.functional.jacobian(rho, (theta, quadratic))
    p = BetaGaussian(torch.tensor([0.4, 0.5], dtype=D)[:dim], sigma=torch.linalg.inv(precision), alpha=alpha)
    phi = lambda t: torch.cat([t, (t.unsqueeze(-1) * t.unsqueeze(-2)).flatten(-2)], -1)  # noqa: E731
    wanted = generalized_covariance(p, phi, basis, nodes=100, angles=200)
    assert torch.allclose(linear.mT, wanted[:dim], atol=1e-9)
    assert torch.allclose(square.flatten(-2).mT, wanted[dim:], atol=1e-9)


def test_several_forwards_before_a_backward() -> None:
    basis = basis_of(2)
    loc, sigma = inputs(2)
    values = [expectation(loc + shift, sigma, basis, 2.0) for shift in (0.0, 0.1, 0.2)]
    together = torch.autograd.grad(sum(v.sum() for v in values), loc, retain_graph=True)[0]
    apart = [torch.autograd.grad(v.sum(), loc)[0] for v in reversed(values)]
    assert torch.allclose(together, sum(apart), rtol=1e-12)


# -- what holds for every map ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "alpha"), [(1, 1.0), (1, 1.5), (1, 2.0), (2, 1.0), (2, 1.5), (2, 2.0)])
def test_kernels_and_torch_operations_agree(dim: int, alpha: float, set_kernels: Callable[[bool], None]) -> None:
    basis = (
        GaussianBasis.line(24, widths=(0.03, 0.2, 2.0)) if dim == 1 else GaussianBasis.grid(3, widths=(0.03, 0.2, 2.0))
    ).double()
    for scale in (1e-4, 0.1, 10.0):
        loc = torch.rand(5, dim, dtype=D, requires_grad=True)
        root = scale * torch.randn(5, dim, dim, dtype=D)
        sigma = root @ root.mT + 0.05 * scale**2 * torch.eye(dim)
        sigma[0] = torch.diag(scale**2 * torch.tensor([1e-5, 1.0], dtype=D)[-dim:])  # a thin one
        sigma.requires_grad_()
        results = []
        for on in (True, False):
            set_kernels(on)
            value = expectation(loc, sigma, basis, alpha)
            cotangent = torch.linspace(-1, 1, value.numel(), dtype=D).reshape(value.shape)
            results.append((value, *torch.autograd.grad(value, (loc, sigma), cotangent)))
        for ours, plain in zip(*results, strict=True):
            assert ((ours - plain).abs().max() / plain.abs().max()) < 2e-9


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_dtypes_shapes_and_broadcasting(dim: int, alpha: float) -> None:
    basis = basis_of(dim)
    loc, sigma = (t.detach() for t in inputs(dim, 3))
    wanted = expectation(loc, sigma, basis, alpha)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
        found = expectation(loc.to(dtype), sigma.to(dtype), basis.to(torch.float32), alpha)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), wanted, atol=error * wanted.max().item())
        basis = basis.double()
    assert expectation(loc[0], sigma[0], basis, alpha).shape == (len(basis),)
    grid = expectation(loc[:, None], sigma[None], basis, alpha)
    assert grid.shape == (3, 3, len(basis))
    assert torch.allclose(grid.diagonal().mT, wanted)
    assert expectation(loc[:0], sigma[:0], basis, alpha).shape == (0, len(basis))
    strided = loc.repeat(1, 2)[:, ::2] if dim == 1 else loc.flip(-1).contiguous().flip(-1)
    assert torch.allclose(expectation(strided, sigma.mT, basis, alpha), wanted)


@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("alpha", [0.6, 1.0, 1.5, 2.0])
def test_nan_spoils_its_own_row_only(dim: int, alpha: float) -> None:
    basis = basis_of(dim)
    loc, sigma = (t.detach().clone() for t in inputs(dim, 3))
    wanted = expectation(loc, sigma, basis, alpha)
    loc[1, 0] = torch.nan
    found = expectation(loc, sigma, basis, alpha)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], wanted[[0, 2]]) or torch.allclose(found[[0, 2]], wanted[[0, 2]], rtol=1e-12)


@pytest.mark.parametrize(("dim", "alpha"), [(1, 1.0), (1, 2.0), (2, 1.0), (2, 2.0)])
def test_forward_mode_and_function_transforms(dim: int, alpha: float) -> None:
    basis = basis_of(dim)
    loc, sigma = (t.detach() for t in inputs(dim, 3))
    f = lambda m, s: expectation(m, s, basis, alpha)  # noqa: E731
    wanted = f(loc, sigma)
    assert torch.allclose(torch.func.vmap(f)(loc, sigma), wanted, rtol=1e-9)
    direction = torch.randn_like(loc)
    _, tangent = torch.func.jvp(lambda m: f(m, sigma), (loc,), (direction,))
    step = 1e-6
    slope = (f(loc + step * direction, sigma) - f(loc - step * direction, sigma)) / (2 * step)
    assert torch.allclose(tangent, slope, atol=1e-7)
    jacobian = torch.func.jacrev(lambda m: f(m, sigma[0]))(loc[0])
    assert torch.allclose(jacobian @ direction[0], tangent[0], atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "backend"), [(1, "aot_eager"), (2, "eager")])
def test_it_can_be_compiled_into_one_graph(dim: int, backend: str) -> None:
    basis = basis_of(dim)
    loc, sigma = inputs(dim)
    f = lambda m, s: expectation(m, s, basis, 2.0)  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    assert torch.allclose(compiled(loc, sigma), f(loc, sigma), rtol=1e-9)
    found, wanted = (torch.autograd.grad(g(loc, sigma).square().sum(), loc)[0] for g in (compiled, f))
    assert torch.allclose(found, wanted, rtol=1e-7)


def test_rows_are_the_same_whatever_the_batch() -> None:
    basis = basis_of(2)
    loc, sigma = (t.detach() for t in inputs(2, 40))
    together = expectation(loc, sigma, basis, 2.0)
    assert torch.equal(together[7], expectation(loc[7], sigma[7], basis, 2.0))


def test_bad_input_is_named() -> None:
    basis = basis_of(2)
    loc, eye = torch.zeros(2, dtype=D), torch.eye(2, dtype=D)
    with pytest.raises(ValueError, match="sigma must be symmetric and positive definite"):
        expectation(loc, torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=D), basis)
    with pytest.raises(ValueError, match="sigma must be symmetric and positive definite"):
        expectation(loc, torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=D), basis)
    with pytest.raises(ValueError, match=r"sigma must be symmetric and positive definite, got \[\[-1"):
        expectation(torch.zeros(1), -torch.ones(1, 1), basis_of(1))
    with pytest.raises(ValueError, match="alpha > 0 in 2 dimensions"):
        expectation(loc, eye, basis, 0.0)
    with pytest.raises(ValueError, match=r"loc must have shape \(…, 2\)"):
        expectation(torch.zeros(3), eye, basis)
    with pytest.raises(ValueError, match=r"sigma must have shape \(…, 2, 2\)"):
        expectation(loc, torch.eye(3), basis)
    with pytest.raises(TypeError, match="basis must be a GaussianBasis"):
        expectation(loc, eye, "basis")
    with pytest.raises(TypeError, match="loc must be a floating-point tensor, got"):
        expectation(torch.zeros(2, dtype=torch.long), eye, basis)
    space = GaussianBasis(torch.zeros(1, 3), torch.eye(3).unsqueeze(0))
    with pytest.raises(ValueError, match="at most 1 in more than two dimensions"):
        expectation(torch.zeros(3), torch.eye(3), space, 2.0)
    with pytest.raises(ValueError, match="sigma must be symmetric"):
        expectation(torch.zeros(3), -torch.eye(3), space, 1.0)
