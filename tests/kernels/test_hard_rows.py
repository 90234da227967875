"""Rows on which kernels once went wrong: wide and flat, wide and steep, bounds that must all be filled, halves."""

import mpmath
import pytest
import torch

import fenchel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [2.5, 17.0, 19.5, 23.0, 33.0, 200.0])
def test_wide_steep_rows_with_ties_share(alpha: float, dtype: torch.dtype) -> None:
    assert torch.allclose(fenchel.entmax(torch.zeros(1, 513, dtype=dtype), alpha), torch.tensor(1 / 513, dtype=dtype))
    tied = torch.cat([torch.randn(1, 700, dtype=dtype), torch.full((1, 2), 9.0, dtype=dtype)], 1)
    assert fenchel.entmax(tied, alpha)[0, -2:].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("width", "alpha"), [(116_000, 1.7), (200_000, 1.9), (300_000, 1.99), (120_000, 1.3)])
def test_flat_rows_of_any_width_are_uniform(width: int, alpha: float) -> None:
    uniform = fenchel.entmax(torch.zeros(1, width), alpha)
    assert torch.allclose(uniform * width, torch.tensor(1.0), atol=1e-5)
    nearly = fenchel.entmax(1e-6 * torch.randn(1, width), alpha).double()
    assert abs(nearly.sum().item() - 1) < 2e-6


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.1])
@pytest.mark.parametrize("alpha", [2.5, 4.0])
def test_steep_rows_that_are_nearly_equal_meet_their_optimality_conditions(alpha: float, spread: float) -> None:
    scores = spread * torch.randn(3, 5000, dtype=torch.float64)
    p, c = fenchel.entmax(scores, alpha), alpha - 1
    level = scores - p**c / c  # one number on the support, at least the score elsewhere
    for row in range(3):
        on = p[row] > 0
        offset = level[row][on].mean()
        assert torch.allclose(level[row][on], offset, atol=1e-12, rtol=0.0)
        assert bool((scores[row][~on] <= offset + 1e-12).all())
    assert torch.allclose(p.sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-12)


def simplex_projection(y: torch.Tensor) -> torch.Tensor:
    """The projection of one row onto the simplex, by sorting."""
    ranked = y.sort(descending=True).values
    levels = (ranked.cumsum(0) - 1) / torch.arange(1, len(y) + 1)
    return (y - levels[int((ranked > levels).sum()) - 1]).clamp_min(0)


@pytest.mark.parametrize("strength", [0.3, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("kind", ["noise", "walk", "steps", "masked"])
def test_fusedmax_with_a_strong_penalty_is_the_projection_of_the_denoised_row(strength: float, kind: str) -> None:
    scores = torch.randn(4, 700, dtype=torch.float64)
    if kind == "walk":
        scores = scores.cumsum(-1)
    if kind == "steps":
        scores = (2 * scores).round()
    if kind == "masked":
        scores[torch.rand(4, 700) < 0.4] = -torch.inf
    found = fenchel.fusedmax(scores, strength)
    for row, p in zip(scores, found, strict=True):
        kept = row > -torch.inf
        z, q = row[kept], p[kept]
        # y − z is the divergence of a flow along the row of at most λ per edge, which is ±λ where y steps.
        y = fenchel.prox_tv1d(z, strength)
        flow = (y - z).cumsum(0)
        steps = y.diff()
        assert bool((flow.abs() <= strength + 1e-9).all())
        assert torch.allclose((flow[:-1] * steps), strength * steps.abs(), atol=1e-8)
        assert torch.allclose(q, simplex_projection(y), atol=1e-9)


@pytest.mark.parametrize("sigma", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_capped_softmax_whose_best_are_at_their_bounds_sums_to_one(sigma: float, dtype: torch.dtype) -> None:
    scores = sigma * torch.randn(5, 1000, dtype=dtype)
    p = fenchel.constrained_softmax(scores, 4 / 1000)
    z = scores.double()
    low, high = z.amin(-1, keepdim=True) - 20, z.amax(-1, keepdim=True) + 20
    for _ in range(200):
        middle = (low + high) / 2
        more = (z - middle).exp().clamp_max(4 / 1000).sum(-1, keepdim=True) > 1
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    expected = (z - low).exp().clamp_max(4 / 1000)
    assert torch.allclose(p.double(), expected, atol=1e-9 if dtype == torch.float32 else 1e-15, rtol=2e-5)


def test_a_flat_normmax_is_uniform() -> None:
    p = fenchel.normmax(torch.zeros(1, 300_000), 10.0)
    assert torch.allclose(p * 300_000, torch.tensor(1.0), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bounds_that_must_all_be_filled_are(dtype: torch.dtype) -> None:
    assert fenchel.k_subsets(torch.tensor([1e6, 0.0], dtype=dtype), 2).tolist() == [1.0, 1.0]
    half = torch.tensor([0.5, 0.5], dtype=dtype)
    assert fenchel.constrained_sparsemax(torch.tensor([1e4, 0.0], dtype=dtype), half).tolist() == [0.5, 0.5]
    scores = 2000 * torch.randn(50, 17, dtype=dtype)
    assert torch.allclose(fenchel.k_subsets(scores, 17), torch.ones(50, 17, dtype=dtype))


def test_a_huge_score_does_not_hide_the_order_of_the_bounds() -> None:
    upper = torch.tensor([0.0012526, 0.0257582, 0.9829892])
    p = fenchel.constrained_softmax(torch.tensor([78305368.0, 0.0, 0.0]), upper)
    rest = 1 - 0.0012526 - 0.0257582
    assert torch.allclose(p, torch.tensor([0.0012526, 0.0257582, rest]), atol=1e-6)


def test_alpha_moves_tied_rows_as_differences_say() -> None:
    scores = torch.tensor([0.0, 0.1, 0.0, -9.0], dtype=torch.float64)
    for value in (2.5, 6.0, 10.0):
        alpha = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        (reverse,) = torch.autograd.grad(fenchel.entmax(scores, alpha)[0], alpha)
        difference = (fenchel.entmax(scores, value + 1e-5)[0] - fenchel.entmax(scores, value - 1e-5)[0]) / 2e-5
        assert reverse.item() == pytest.approx(difference.item(), rel=1e-5)


def test_losses_map_over_weights_alone() -> None:
    scores, target, weights = torch.randn(3, 4), torch.tensor([0, 1, 2]), torch.rand(2, 4)
    mapped = torch.func.vmap(lambda w: fenchel.entmax_loss(scores, target, weight=w))(weights)
    assert torch.allclose(mapped, torch.stack([fenchel.entmax_loss(scores, target, weight=w) for w in weights]))


def test_a_negative_view_is_read_as_what_it_stands_for() -> None:
    scores = torch.randn(2, 5)
    assert torch.allclose(fenchel.entmax(torch._neg_view(scores)), fenchel.entmax(-scores))


@pytest.mark.parametrize("width", [3, 40, 600, 3000])
@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.3])
def test_losses_of_small_alpha_count_probabilities_that_are_tiny(alpha: float, width: int) -> None:
    """One score of 0 and the others at −g: p = (1 + (α − 1)(z − A))^(1/(α − 1)), where Σ p·z is not small."""
    for gap in (1e10, 1e20, 1e30):
        scores = torch.full((1, width), -gap)
        scores[0, 0] = 0
        with mpmath.workdps(60):
            c, others = mpmath.mpf(alpha) - 1, width - 1
            # log of the odds q/p of the two probabilities, by bisection: p(1 + (width − 1)·odds) = 1.
            low, high = mpmath.mpf(-200), mpmath.mpf(0)
            for _ in range(200):
                middle = (low + high) / 2
                top = 1 / (1 + others * mpmath.exp(middle))
                rest = top * mpmath.exp(middle)
                too_near = (top**c - rest**c) / c < -mpmath.mpf(scores[0, 1].item())
                low, high = (low, middle) if too_near else (middle, high)
            omega = (top ** (c + 1) + others * rest ** (c + 1) - 1) / ((c + 1) * c)
            expected = float(others * rest * mpmath.mpf(scores[0, 1].item()) - omega)
        found = fenchel.entmax_loss(scores, torch.tensor([0]), alpha).item()
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
