"""Continuous attention against integrals of the fitted value function, and its masks, heads and mixtures."""

import math

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel.continuous import (
    Attended,
    BetaGaussian,
    ContinuousAttention,
    Encoder,
    Focus,
    GaussianBasis,
    LocationScale,
    MatchedEncoder,
    PooledEncoder,
    ScoreDensity,
    Triangular,
)

D = torch.float64


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("dim", [1, 2])
def test_the_context_is_the_expected_value_function(dim: int, alpha: float) -> None:
    basis = (GaussianBasis.line(8, widths=(0.1, 0.3)) if dim == 1 else GaussianBasis.grid(4, widths=(0.2,))).double()
    shape = (12,) if dim == 1 else (3, 4)
    values = torch.randn(2, 12, 5, dtype=D)
    loc = torch.rand(2, dim, dtype=D)
    sigma = torch.tensor([[0.02, 0.005], [0.005, 0.03]], dtype=D)[:dim, :dim].expand(2, -1, -1)
    attention = ContinuousAttention(basis, alpha, ridge=0.05)
    found = attention(values, loc=loc, sigma=sigma, shape=shape)
    function = basis.fit(values, ridge=0.05, shape=shape)
    for row in range(2):
        p = BetaGaussian(loc[row], sigma=sigma[row], alpha=alpha)
        coefficients = function.coefficients[row]
        wanted = p.integrate(lambda t, b=coefficients: basis(t) @ b, nodes=100, angles=100)
        assert torch.allclose(found[row], wanted, atol=1e-9)


def test_a_narrow_density_over_a_smooth_signal_reads_it() -> None:
    basis = GaussianBasis.line(40, widths=(0.03, 0.1)).double()
    t = ((torch.arange(200) + 0.5) / 200).double()
    values = torch.stack([torch.sin(6 * t), t], -1)
    attention = ContinuousAttention(basis, ridge=1e-6)
    found = attention(values, loc=torch.tensor([0.37], dtype=D), sigma=torch.tensor([[1e-8]], dtype=D))
    assert torch.allclose(found, torch.tensor([math.sin(6 * 0.37), 0.37], dtype=D), atol=1e-3)


def padded() -> tuple[Tensor, Tensor, list[int]]:
    lengths = [9, 4, 6]
    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(-1)
    return torch.randn(3, 9, 6, dtype=D), mask, lengths


def encoders() -> list[tuple[Encoder, int]]:
    """Encoders, and how many dimensions their query has beyond the batch's."""
    torch.manual_seed(5)
    return [
        (PooledEncoder(6).double(), 0),
        (PooledEncoder(6, num_heads=2, components=3).double(), 0),
        (MatchedEncoder(fenchel.Gini()), 1),
        (MatchedEncoder(num_heads=3), 2),
        (MatchedEncoder(exact=True), 1),
    ]


@pytest.mark.parametrize("number", range(5))
def test_padding_and_what_stands_there_do_not_matter(number: int) -> None:
    encoder, kind = encoders()[number]
    values, mask, lengths = padded()
    attention = ContinuousAttention(GaussianBasis.line(8, widths=(0.1,)).double(), encoder=encoder, combined=kind > 0)
    heads = encoder.num_heads
    query = [torch.randn(3, 6), torch.randn(3, 9), torch.randn(3, heads, 9)][kind].double()
    spoilt = values.masked_fill(~mask.unsqueeze(-1), torch.nan)
    found = attention(spoilt, query, mask)
    for row, length in enumerate(lengths):
        part = query[row] if kind == 0 else query[row, ..., :length]
        alone = attention(values[row, :length], part)
        assert torch.allclose(found[row], alone, atol=1e-10)


@pytest.mark.parametrize("number", range(5))
def test_a_row_with_nothing_gives_zeros_and_no_gradient(number: int) -> None:
    encoder, kind = encoders()[number]
    values, mask, _ = padded()
    mask[1] = False
    attention = ContinuousAttention(GaussianBasis.line(8, widths=(0.1,)).double(), encoder=encoder, combined=kind > 0)
    query = [torch.randn(3, 6), torch.randn(3, 9), torch.randn(3, encoder.num_heads, 9)][kind].double().requires_grad_()
    context = attention(values.requires_grad_(), query, mask)
    assert (context[1] == 0).all()
    grads = torch.autograd.grad(context.square().sum(), (values, query))
    assert all((g[1] == 0).all() for g in grads)
    assert all(g.isfinite().all() for g in grads)


def test_moments_of_discrete_attention_make_the_density() -> None:
    scores = torch.randn(4, 10, dtype=D)
    attention = ContinuousAttention(
        GaussianBasis.line(8, widths=(0.1,)).double(), 2.0, MatchedEncoder(fenchel.Gini(), eps=1e-7)
    )
    found = attention.attend(torch.randn(4, 10, 3, dtype=D), scores)
    p = fenchel.sparsemax(scores)
    t = ((torch.arange(10) + 0.5) / 10).double()
    mean = p @ t
    variance = p @ t.square() - mean.square()
    assert torch.allclose(found.focus.loc.flatten(), mean)
    assert torch.allclose(found.focus.sigma.flatten(), variance + 1e-7)
    assert torch.equal(found.focus.discrete.squeeze(-2), p)
    exact = ContinuousAttention(attention.basis, 2.0, MatchedEncoder(fenchel.Gini(), eps=1e-7, exact=True))
    density = exact.attend(torch.randn(4, 10, 3, dtype=D), scores).density
    assert torch.allclose(density.variance.flatten(), variance + 1e-7)


def test_moments_over_an_image_are_a_covariance() -> None:
    scores = torch.randn(2, 12, dtype=D)
    attention = ContinuousAttention(GaussianBasis.grid(4).double(), 2.0, MatchedEncoder(eps=0.0))
    focus = attention.attend(torch.randn(2, 12, 3, dtype=D), scores, shape=(3, 4)).focus
    p = torch.softmax(scores, -1)
    rows = ((torch.arange(12) // 4 + 0.5) / 3).double()
    columns = ((torch.arange(12) % 4 + 0.5) / 4).double()
    t = torch.stack([rows, columns], -1)
    mean = p @ t
    second = torch.einsum("bl,li,lj->bij", p, t, t) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    assert torch.allclose(focus.loc.reshape(2, 2), mean)
    assert torch.allclose(focus.sigma.reshape(2, 2, 2), second)


def test_combined_attention_is_the_sum_of_both() -> None:
    values, scores = torch.randn(2, 10, 6, dtype=D), torch.randn(2, 10, dtype=D)
    basis = GaussianBasis.line(8, widths=(0.1,)).double()
    both = ContinuousAttention(basis, encoder=MatchedEncoder(), combined=True)(values, scores)
    alone = ContinuousAttention(basis, encoder=MatchedEncoder())(values, scores)
    assert torch.allclose(both - alone, (torch.softmax(scores, -1).unsqueeze(1) @ values).squeeze(1))


def test_heads_read_their_own_part_and_mixtures_average() -> None:
    values, query = torch.randn(2, 10, 6, dtype=D), torch.randn(2, 5, dtype=D)
    basis = GaussianBasis.line(8, widths=(0.1,)).double()
    encoder = PooledEncoder(5, num_heads=2, components=3).double()
    found = ContinuousAttention(basis, 1.5, encoder).attend(values, query)
    single = ContinuousAttention(basis, 1.5)
    focus = found.focus
    for head in range(2):
        part = values[..., 3 * head : 3 * head + 3]
        each = [
            single(part, loc=focus.loc[:, head, k], sigma=focus.sigma[:, head, k]) * focus.shares[:, head, k, None]
            for k in range(3)
        ]
        assert torch.allclose(found.context[:, 3 * head : 3 * head + 3], sum(each), atol=1e-12)
    assert torch.allclose(focus.shares.sum(-1), torch.ones(2, 2, dtype=D))
    assert found.density.batch_shape == (2, 2)
    assert found.density.log_prob(torch.full((1,), 0.5, dtype=D)).shape == (2, 2)
    assert found.weights.shape == (2, 2, 10)


def test_planes_from_pooled_vectors_have_positive_definite_sigma() -> None:
    encoder = PooledEncoder(5, dim=2, num_heads=2).double()
    attention = ContinuousAttention(GaussianBasis.grid(3).double(), 2.0, encoder)
    found = attention.attend(torch.randn(4, 12, 6, dtype=D), 5 * torch.randn(4, 5, dtype=D), shape=(4, 3))
    assert (torch.linalg.eigvalsh(found.focus.sigma) > 0).all()
    assert ((found.focus.loc > 0) & (found.focus.loc < 1)).all()
    assert found.context.shape == (4, 6)
    off = found.focus.sigma[..., 1, 0]
    assert off.abs().max() > 1e-3


@pytest.mark.parametrize("number", range(5))
def test_derivatives_reach_values_query_and_parameters(number: int) -> None:
    encoder, kind = encoders()[number]
    attention = ContinuousAttention(GaussianBasis.line(4, widths=(0.2,)).double(), encoder=encoder, combined=kind > 0)
    values = torch.randn(1, 5, 6, dtype=D, requires_grad=True)
    query = [torch.randn(1, 6), torch.randn(1, 5), torch.randn(1, encoder.num_heads, 5)][kind].double().requires_grad_()
    assert torch.autograd.gradcheck(attention, (values, query))
    attention(values, query).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attention.parameters())


def test_float32_and_autocast() -> None:
    attention = ContinuousAttention(GaussianBasis.line(8), encoder=PooledEncoder(6))
    values, query = torch.randn(2, 10, 6), torch.randn(2, 6)
    wanted = attention(values, query)
    assert wanted.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(attention(values, query).float(), wanted, atol=0.1)
    assert attention.half()(values.half(), query.half()).dtype == torch.float16
    assert set(attention.state_dict()) == {
        "basis.centers",
        "basis.covariances",
        "encoder.loc.weight",
        "encoder.loc.bias",
        "encoder.spread.weight",
        "encoder.spread.bias",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thin_ellipses_survive_every_precision(dtype: torch.dtype) -> None:
    # Two pixels have a singular covariance, and a root with a small corner a product next to one.
    torch.manual_seed(0)
    values = torch.randn(16, 12, 8)
    cases = [(PooledEncoder(6, dim=2), 20 * torch.randn(16, 6)), (MatchedEncoder(fenchel.Gini()), torch.randn(16, 12))]
    for encoder, query in cases:
        attention = ContinuousAttention(GaussianBasis.grid(4), encoder=encoder)
        wanted = attention.double()(values.double(), query.double(), shape=(3, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            assert attention.float()(values, query, shape=(3, 4)).isfinite().all()
        low = attention.to(dtype).attend(values.to(dtype), query.to(dtype), shape=(3, 4))
        assert low.context.dtype == dtype
        assert low.context.isfinite().all()
        assert low.density.rsample().dtype == torch.float32
        if dtype == torch.float32:
            assert torch.allclose(low.context.double(), wanted, atol=1e-3 * wanted.abs().max().item())
    pixels = GaussianBasis.grid(4, widths=(20.0,), interval=(0.0, 100.0)).to(dtype)
    matched = ContinuousAttention(pixels, encoder=MatchedEncoder(fenchel.Gini()))
    places = 100 * torch.rand(12, 2)
    assert matched(values.to(dtype), torch.randn(16, 12).to(dtype), positions=places).isfinite().all()


def test_encoders_of_ones_own() -> None:
    class Middle(Encoder):
        def forward(self, query: Tensor, positions: Tensor, mask: Tensor | None) -> Focus:
            loc = query.new_full((len(query), 1, 1, 1), 0.5)
            return Focus(loc, 0.01 * torch.ones_like(loc).unsqueeze(-1))

    attention = ContinuousAttention(GaussianBasis.line(8), 2.0, Middle())
    found = attention.attend(torch.randn(2, 10, 6), torch.zeros(2, 1))
    assert isinstance(found, Attended)
    assert found.density.mean.flatten().tolist() == [0.5, 0.5]


def test_bad_input_is_named() -> None:
    basis = GaussianBasis.line(8)
    values = torch.randn(2, 10, 6)
    with pytest.raises(TypeError, match="basis must be a GaussianBasis"):
        ContinuousAttention(8)
    with pytest.raises(TypeError, match="encoder must be an Encoder"):
        ContinuousAttention(basis, encoder=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="combined=True"):
        ContinuousAttention(basis, combined=True)
    with pytest.raises(ValueError, match="combined=True needs an encoder"):
        ContinuousAttention(basis, encoder=PooledEncoder(6), combined=True)(values, torch.randn(2, 6))
    with pytest.raises(ValueError, match="alpha"):
        ContinuousAttention(basis, alpha=-2.0)
    with pytest.raises(ValueError, match="ridge"):
        ContinuousAttention(basis, ridge=-1.0)
    with pytest.raises(ValueError, match="pass loc and sigma"):
        ContinuousAttention(basis)(values)
    with pytest.raises(ValueError, match="pass a query"):
        ContinuousAttention(basis, encoder=PooledEncoder(6))(values)
    with pytest.raises(ValueError, match=r"query must have shape \(…, 6\)"):
        ContinuousAttention(basis, encoder=PooledEncoder(6))(values, torch.randn(2, 5))
    with pytest.raises(ValueError, match=r"query .scores of the values. must have shape \(…, 10\)"):
        ContinuousAttention(basis, encoder=MatchedEncoder())(values, torch.randn(2, 5))
    with pytest.raises(ValueError, match="4 heads divide"):
        ContinuousAttention(basis, encoder=PooledEncoder(6, num_heads=4))(values, torch.randn(2, 6))
    with pytest.raises(ValueError, match="not be empty"):
        ContinuousAttention(basis, encoder=PooledEncoder(6))(values[:, :0], torch.randn(2, 6))
    with pytest.raises(ValueError, match="product of shape must be the number of values, 10"):
        ContinuousAttention(GaussianBasis.grid(3), encoder=PooledEncoder(6, dim=2))(
            values, torch.randn(2, 6), shape=(3, 4)
        )
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        PooledEncoder(6, num_heads=0)


def test_a_query_of_another_batch_is_told_by_name() -> None:
    attention = ContinuousAttention(GaussianBasis.line(4), encoder=PooledEncoder(8))
    with pytest.raises(ValueError, match=r"dimensions of query and values must broadcast .* \(3, 10\) and \(3,\)"):
        attention(torch.randn(3, 10, 8), torch.randn(3, 10, 8))
    fixed = ContinuousAttention(GaussianBasis.line(4))
    with pytest.raises(ValueError, match=r"dimensions of loc and values must broadcast .* \(2,\) and \(3,\)"):
        fixed(torch.randn(3, 10, 8), loc=torch.full((2, 1), 0.5), sigma=torch.full((2, 1, 1), 0.1))


# -- densities that are given, and other bases -----------------------------------------------------------------------


DENSITIES = {
    "triangular": lambda: Triangular(torch.tensor([0.4, 0.6]).double(), torch.tensor([0.04, 0.1]).double()),
    "location-scale": lambda: LocationScale(
        torch.tensor([0.4, 0.6]).double(), torch.tensor([0.2, 0.3]).double(), lambda s: s**4
    ),
    "score": lambda: ScoreDensity(lambda t: 5 * torch.sin(torch.tensor([[9.0], [20.0]]) * t)),
    "beta-gaussian": lambda: BetaGaussian(
        torch.tensor([[0.4], [0.6]]).double(), sigma=torch.full((2, 1, 1), 0.02).double(), alpha=1.5
    ),
}


@pytest.mark.parametrize("kind", DENSITIES)
def test_any_density_attends_by_the_expected_value_function(kind: str) -> None:
    basis, density = GaussianBasis.line(8, widths=(0.1,)).double(), DENSITIES[kind]()
    values = torch.randn(2, 20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = ContinuousAttention(basis).attend(values, density=density)
    function = basis.fit(values)
    # The midpoint rule, with cells that end at 0 and 1, where a density may jump.
    places = (torch.arange(21000, dtype=torch.float64) + 0.5) / 21000 * 1.4 - 0.2
    at = places.unsqueeze(-1).expand(-1, 2)
    p = density.log_prob(at.unsqueeze(-1) if kind == "beta-gaussian" else at).exp()  # (places, 2)
    expected = 1.4 * torch.einsum("tb,btd->bd", p, function(places[:, None])) / 21000
    torch.testing.assert_close(found.context, expected, atol=2e-5, rtol=1e-4)
    assert found.density is density
    assert found.focus.loc.shape == (2, 1, 1, 1)
    assert found.focus.sigma.shape == (2, 1, 1, 1, 1)
    mean = 1.4 * (p * at).mean(0)
    torch.testing.assert_close(found.focus.loc.flatten(), mean, atol=1e-4, rtol=1e-4)


def test_an_encoder_may_return_a_density_per_head() -> None:
    class Wells(Encoder):
        num_heads = 2

        def forward(self, query: Tensor, positions: Tensor, mask: Tensor | None) -> ScoreDensity:
            return ScoreDensity(lambda t: -40 * (t - query.unsqueeze(-1)) ** 2)  # (B, heads, n)

    basis = GaussianBasis.line(8, widths=(0.1,)).double()
    attention = ContinuousAttention(basis, encoder=Wells())
    values, query = torch.randn(3, 20, 4, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    query.requires_grad_()
    found = attention.attend(values, query)
    assert found.context.shape == (3, 4)
    plain = ContinuousAttention(basis)
    for head in range(2):
        part, center = slice(2 * head, 2 * head + 2), query[:, head, None]
        alone = plain(values[..., part], density=ScoreDensity(lambda t, center=center: -40 * (t - center) ** 2))
        torch.testing.assert_close(found.context[:, part], alone)
    (grad,) = torch.autograd.grad(found.context.sum(), query)
    assert bool((grad != 0).all())


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_other_bases_than_gaussian_ones(alpha: float) -> None:
    class Copy(torch.nn.Module):
        """The same Gaussian functions, of which the library does not know that they are Gaussian."""

        def forward(self, t: Tensor) -> Tensor:
            centers = torch.linspace(0, 1, 8, dtype=t.dtype)
            return torch.exp(-50 * (t - centers) ** 2) * 10 / (2 * torch.pi) ** 0.5

    values = torch.randn(2, 20, 3, dtype=torch.float64)
    where = {"loc": torch.tensor([[0.3], [0.6]]).double(), "sigma": torch.full((2, 1, 1), 0.01).double()}
    known = ContinuousAttention(GaussianBasis.line(8, widths=(0.1,)).double(), alpha)
    other = ContinuousAttention(Copy(), alpha)
    torch.testing.assert_close(other(values, **where), known(values, **where), atol=1e-5, rtol=1e-5)


def test_densities_that_cannot_be_integrated_are_refused() -> None:
    attention, values = ContinuousAttention(GaussianBasis.line(8)), torch.randn(2, 20, 3)
    with pytest.raises(TypeError, match="density must have expectation"):
        attention(values, density=torch.distributions.Normal(0.0, 1.0))
    with pytest.raises(ValueError, match="pass loc and sigma, or a density"):
        attention(values, density=Triangular(0.5, 0.1), loc=torch.zeros(1), sigma=torch.ones(1, 1))
    with pytest.raises(ValueError, match="neither loc and sigma nor a density"):
        ContinuousAttention(GaussianBasis.line(8), encoder=PooledEncoder(3))(values, density=Triangular(0.5, 0.1))


@pytest.mark.parametrize("dim", [1, 2])
def test_the_first_densities_of_a_pooled_encoder_have_the_initial_width(dim: int) -> None:
    encoder = PooledEncoder(5, dim=dim, num_heads=2, components=2, initial_width=0.3)
    with torch.no_grad():
        focus = encoder(torch.zeros(1, 5), torch.zeros(1, 1, dim), None)
    diagonal = focus.sigma[..., 0, 0]
    if dim == 1:
        p = BetaGaussian(focus.loc, sigma=focus.sigma)
        radius = p.support_radius * p.scale_tril[..., 0, 0]
        torch.testing.assert_close(radius, torch.full_like(radius, 0.3), atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(diagonal, torch.full_like(diagonal, 2 / 3 * 0.027 + 1e-6), atol=1e-5, rtol=1e-4)


def test_parameters_of_an_encoder_without_an_initial_width_load() -> None:
    before, after = PooledEncoder(5, initial_width=None), PooledEncoder(5)
    after.load_state_dict(before.state_dict())
    query, where = torch.randn(4, 5), torch.zeros(4, 1, 1)
    torch.testing.assert_close(after(query, where, None).sigma, before(query, where, None).sigma)
    with pytest.raises(ValueError, match="initial_width must satisfy"):
        PooledEncoder(5, initial_width=0.0)
