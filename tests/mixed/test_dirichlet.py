"""MixedDirichlet: enumeration for few vertices, closed forms for a thousand."""

import itertools
import math

import pytest
import torch
from members import double
from torch import Tensor
from torch.distributions import Dirichlet, kl_divergence

from fenchel.mixed import GaussianSparsemax, Mixed, MixedDirichlet, faces

W = double(0.6, -0.3, 1.2, -1.0, 0.1, 0.4)
ALPHA = double(1.5, 0.8, 2.3, 1.1, 0.5, 3.0)


def enumerated(w: Tensor) -> tuple[Tensor, Tensor]:
    """Every non-empty face of few vertices, and its probability, from the definition."""
    face = torch.tensor([f for f in itertools.product([False, True], repeat=len(w)) if any(f)])
    weight = (face * w).sum(-1).exp()
    return face, weight / weight.sum()


def inside(alpha: Tensor, face: Tensor) -> Dirichlet:
    return Dirichlet(alpha[face])


def test_faces_are_those_of_the_definition() -> None:
    y = MixedDirichlet(W, ALPHA)
    face, prob = enumerated(W)
    torch.testing.assert_close(y.face_log_prob(face).exp(), prob)
    torch.testing.assert_close(y.inclusion, (face * prob.unsqueeze(-1)).sum(0))
    torch.testing.assert_close(y.face_entropy(), -(prob * prob.log()).sum())
    torch.testing.assert_close(y.mean_dimension(), (prob * (face.sum(-1) - 1)).sum())
    sizes = torch.stack([prob[face.sum(-1) == n].sum() for n in range(1, 7)])
    torch.testing.assert_close(y.size_log_prob().exp(), sizes)
    torch.testing.assert_close(y.log_partition, ((1 + W.exp()).prod() - 1).log())


@pytest.mark.parametrize("alpha", [ALPHA, double([0.7])], ids=["own", "shared"])
def test_entropy_and_kl_are_sums_over_faces(alpha: Tensor) -> None:
    p = MixedDirichlet(W, alpha)
    q = MixedDirichlet(W.flip(0), alpha + 0.5)
    face, prob = enumerated(W)
    other = enumerated(W.flip(0))[1]
    own, theirs = alpha.expand(6), (alpha + 0.5).expand(6)
    entropy = sum(p * (inside(own, f).entropy() - p.log()) for f, p in zip(face, prob, strict=True))
    torch.testing.assert_close(p.entropy(), entropy)
    kl = sum(
        p * (kl_divergence(inside(own, f), inside(theirs, f)) + p.log() - o.log())
        for f, p, o in zip(face, prob, other, strict=True)
    )
    torch.testing.assert_close(kl_divergence(p, q), kl)
    assert p.estimate_entropy().error == 0
    assert p.estimate_kl(q).error == 0
    torch.testing.assert_close(kl_divergence(p, p), double(0.0), atol=1e-12, rtol=0)


def test_equal_entries_with_gradients_keep_them_apart() -> None:
    """A shared concentration has one gradient, equal entries have one each."""
    apart = torch.full((4,), 0.7, dtype=torch.float64, requires_grad=True)
    shared = double([0.7]).requires_grad_()
    w = W[:4].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w, a: MixedDirichlet(w, a).entropy(), (w, apart))
    assert torch.autograd.gradcheck(lambda w, a: MixedDirichlet(w, a).entropy(), (w, shared))
    [each] = torch.autograd.grad(MixedDirichlet(w, apart).entropy(), apart)
    [together] = torch.autograd.grad(MixedDirichlet(w, shared).entropy(), shared)
    torch.testing.assert_close(each.sum(), together.squeeze())
    assert each[0] != each[1]


def test_a_thousand_vertices() -> None:
    torch.manual_seed(2)
    w = torch.randn(1000, dtype=torch.float64) - 4
    y = MixedDirichlet(w, double([0.5]))
    assert y.log_partition.item() == pytest.approx(math.log(math.expm1(torch.log1p(w.exp()).sum().item())), rel=1e-13)
    # Faces are independent entries given that there is one: H = (H(entries) − H(is there one)) / P(there is one)
    p = w.sigmoid()
    each = -(p * p.log() + (1 - p) * torch.log1p(-p)).sum()
    none = (1 - p).log().sum().exp()
    there = -(none * none.log() + (1 - none) * (1 - none).log())
    torch.testing.assert_close(y.face_entropy(), (each - there) / (1 - none), rtol=1e-10, atol=0)
    face = y.sample_face((4000,))
    assert face.any(-1).all()
    error = (y.inclusion * (1 - y.inclusion) / 4000).sqrt()
    assert ((face.double().mean(0) - y.inclusion).abs() < 5.5 * error + 1e-3).all()
    sizes = face.sum(-1).double()
    assert sizes.mean().item() == pytest.approx(y.mean_dimension().item() + 1, abs=5 * sizes.std().item() / 60)
    surprise = -y.log_prob(y.sample((2000,)))
    assert y.entropy().item() == pytest.approx(surprise.mean().item(), abs=5 * surprise.std().item() / 44)


def test_above_twelve_vertices_a_part_is_estimated_and_the_error_reported() -> None:
    torch.manual_seed(4)
    w, alpha = torch.randn(14, dtype=torch.float64), torch.rand(14, dtype=torch.float64) + 0.5
    p, q = MixedDirichlet(w, alpha), MixedDirichlet(w + 0.3, alpha * 1.5)
    face, prob = enumerated(w)
    total, size = (face * alpha).sum(-1), face.sum(-1)
    each = (face * (alpha.lgamma() - (alpha - 1) * alpha.digamma())).sum(-1)
    exact = (prob * (each - total.lgamma() + (total - size) * total.digamma() - prob.log())).sum()
    told = p.estimate_entropy(num_samples=3000)
    assert 0 < told.error < 0.1
    assert (told.value - exact).abs() < 4 * told.error
    value = p.sample((3000,))
    gain = p.log_prob(value) - q.log_prob(value)
    divergence = p.estimate_kl(q, num_samples=3000)
    assert (divergence.value - gain.mean()).abs() < 4 * (divergence.error + gain.std() / math.sqrt(3000))


def test_what_is_estimated_for_others_is_known_here() -> None:
    """Means over drawn faces and values, of eight vertices, beside closed forms; with gradients."""
    w = torch.cat([W, double(-0.5, 0.3)]).requires_grad_()
    y, noise = MixedDirichlet(w, double([0.7])), torch.Generator().manual_seed(6)
    for told, exact, gradient_error in (
        (Mixed.estimate_face_entropy(y, num_samples=40_000, generator=noise), y.face_entropy(), 0.03),
        (Mixed.estimate_mean_dimension(y, num_samples=40_000, generator=noise), y.mean_dimension(), 0.02),
        (Mixed.estimate_entropy(y, num_samples=40_000, generator=noise), y.entropy(), 0.15),
    ):
        assert 0 < told.error < 0.03
        assert (told.value - exact).abs() < 4 * told.error
        estimated, known = (torch.autograd.grad(each, w, retain_graph=True)[0] for each in (told.value, exact))
        torch.testing.assert_close(estimated, known, atol=gradient_error, rtol=0)
    told = Mixed.estimate_mean_dimension(y, num_samples=100_000, generator=noise).value
    second = []
    for each in (told, y.mean_dimension()):
        [gradient] = torch.autograd.grad(each, w, create_graph=True)
        second.append(torch.autograd.grad(gradient[2], w)[0])
    torch.testing.assert_close(*second, atol=0.03, rtol=0)
    assert second[1].abs().max() > 0.05
    still = MixedDirichlet(w.detach(), double([0.7]))
    told = Mixed.estimate_mean_dimension(still, num_samples=40_000, generator=noise)
    assert (told.value - still.mean_dimension()).abs() < 4 * told.error


@pytest.mark.parametrize("offset", [-1000.0, -40.0, 40.0, 1000.0])
def test_extreme_logits(offset: float) -> None:
    """Far below zero one vertex alone is chosen, by softmax; far above, all."""
    y = MixedDirichlet(W + offset, ALPHA)
    if offset < 0:
        expected = torch.cat([W.softmax(0), torch.zeros(57, dtype=torch.float64)])
        torch.testing.assert_close(y.face_log_prob(faces(6)).exp(), expected, atol=1e-15, rtol=1e-12)
        assert y.sample_face((100,)).sum(-1).max() == 1
    else:
        assert y.face_log_prob(faces(6)[-1]).item() == pytest.approx(0, abs=1e-12)
    assert y.entropy().isfinite()
    leaf = (W + offset).requires_grad_()
    [gradient] = torch.autograd.grad(MixedDirichlet(leaf, ALPHA).entropy(), leaf)
    assert gradient.isfinite().all()


def test_vertices_at_minus_infinity_are_never_chosen() -> None:
    w = double(0.5, -math.inf, -0.2)
    y, two = MixedDirichlet(w, ALPHA[:3]), MixedDirichlet(w[[0, 2]], ALPHA[[0, 2]])
    assert not y.sample_face((200,))[:, 1].any()
    torch.testing.assert_close(y.entropy(), two.entropy())
    torch.testing.assert_close(kl_divergence(y, y), double(0.0))
    assert y.face_log_prob(torch.tensor([True, True, False])) == -math.inf
    gaussian = GaussianSparsemax(torch.zeros(3, dtype=torch.float64), scale=torch.ones(3, dtype=torch.float64))
    assert gaussian.estimate_kl(y, num_samples=200).value == math.inf


def test_on_the_interior_it_is_torchs_dirichlet() -> None:
    y = MixedDirichlet(W, ALPHA)
    value = Dirichlet(ALPHA).sample((5,))
    expected = y.face_log_prob(torch.ones(6, dtype=torch.bool)) + Dirichlet(ALPHA).log_prob(value)
    torch.testing.assert_close(y.log_prob(value), expected)


def test_gradients_on_a_given_face_are_those_of_expectations() -> None:
    """E[y₀] = α₀ / Σα and E[y₀²] on the face."""
    alpha = double(0.6, 1.0, 2.0).requires_grad_()
    face = torch.tensor([True, False, True]).expand(100_000, 3)
    value = MixedDirichlet(W[:3], alpha).rsample_on(face)
    assert torch.equal(value > 0, face)
    [gradient] = torch.autograd.grad(value[:, 0].mean(), alpha)
    torch.testing.assert_close(gradient, double(2.0, 0.0, -0.6) / 2.6**2, atol=0.004, rtol=0)


def test_tiny_concentrations_stay_on_their_face() -> None:
    y = MixedDirichlet(torch.full((3,), 30.0), torch.full((3,), 1e-3))
    value = y.sample((500,))
    assert (value > 0).all()
    assert y.log_prob(value).isfinite().all()


@pytest.mark.parametrize(
    ("w", "alpha", "message"),
    [
        (torch.zeros(3), torch.zeros(3), "concentration must satisfy 0 < concentration < inf"),
        (torch.full((3,), -math.inf), torch.ones(3), "at least one above −inf"),
        (torch.tensor([math.inf, 0.0]), torch.ones(2), r"below \+inf"),
        (torch.tensor([math.nan, 0.0]), torch.ones(2), "face_logits"),
    ],
)
def test_bad_parameters_are_reported(w: Tensor, alpha: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedDirichlet(w, alpha)


@pytest.mark.parametrize("alpha", [(1.0, 2.0, 3.0), (0.7,)])
def test_a_vertex_that_is_never_in_a_face_leaves_the_gradients_of_the_others(alpha: tuple[float, ...]) -> None:
    w, v, keep = double(0.3, -math.inf, 1.0), double(0.1, -math.inf, 0.2), [0, 2]
    a = double(list(alpha))

    def both(w: Tensor, a: Tensor, v: Tensor) -> Tensor:
        y = MixedDirichlet(w, a)
        return y.entropy() + y.face_entropy() + 2 * kl_divergence(y, MixedDirichlet(v, a.detach() + 1))

    w.requires_grad_()
    few = w.detach()[keep].requires_grad_()
    value, expected = both(w, a, v), both(few, a[keep] if len(a) > 1 else a, v[keep])
    torch.testing.assert_close(value, expected)
    [told], [reference] = torch.autograd.grad(value, w), torch.autograd.grad(expected, few)
    assert told[1] == 0
    torch.testing.assert_close(told[keep], reference)


def test_single_precision_rounds_only_what_comes_out() -> None:
    w = torch.linspace(-1, 1, 300)
    y, exact = (MixedDirichlet(each, torch.full((1,), 0.5, dtype=each.dtype)) for each in (w, w.double()))
    torch.testing.assert_close(y.entropy(), exact.entropy().float(), rtol=1e-7, atol=0)
