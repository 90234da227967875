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
