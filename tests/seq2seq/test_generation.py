"""Sampling from sparse distributions, and their metrics, against numpy, scipy, linear programs and 50 digits."""

import math
from itertools import islice

import mpmath
import numpy as np
import pytest
import torch
from scipy import optimize, spatial, special, stats
from torch import Tensor
from torch.testing import assert_close

import oracles
from fenchel import Gini, Hard, KSubsets, Norm, Regularizer, Shannon, Tsallis
from fenchel.seq2seq import (
    best_epsilon,
    distinct,
    epsilon_perplexity,
    jensen_shannon,
    repetition,
    sample,
    sparsemax_score,
)

METRICS = [jensen_shannon, sparsemax_score]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distributions(*shape: int, zeros: float = 0.5, seed: int = 0) -> np.ndarray:
    """Random ones in float64, of which about a share of the entries is zero."""
    random = np.random.default_rng(seed)
    p = random.exponential(size=shape) * (random.random(shape) >= zeros)
    p[..., 0] += 1e-3
    return p / p.sum(-1, keepdims=True)


# -- sampling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("omega", "alpha"), [(None, 1.5), (Shannon(), 1.0), (Gini(), 2.0), (Tsallis(1.2), 1.2)])
def test_words_are_drawn_as_often_as_their_probability_says(omega: Regularizer | None, alpha: float) -> None:
    logits = [1.0, 0.4, -0.3, 0.9, -2.0]
    expected = np.array([float(p) for p in oracles.entmax(logits, alpha)]) * 20_000
    drawn = sample(torch.tensor(logits), omega, num_samples=20_000, generator=seeded())
    counts = np.bincount(drawn, minlength=5)
    inside = expected > 0
    assert counts[~inside].sum() == 0
    assert stats.chisquare(counts[inside], expected[inside]).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("omega", [Gini(), Tsallis(1.5), Norm(3), Hard(), 0.3 * Tsallis(1.5)], ids=str)
def test_what_has_no_probability_is_never_drawn(omega: Regularizer, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(16, 50, generator=seeded())).to(dtype)
    drawn = sample(logits, omega, num_samples=500, generator=seeded(1))
    p = omega.argmax(logits.double() if dtype == torch.float64 else logits.float())
    assert (p == 0).any()
    assert (p.expand(500, 16, 50).gather(-1, drawn.unsqueeze(-1)) > 0).all()


def test_the_least_of_probabilities_does_not_upset_the_draw() -> None:
    logits = torch.tensor([0.0, -100.0, -1e4, -torch.inf])
    assert sample(logits, Shannon(), num_samples=1000, generator=seeded()).max() == 0


def test_temperature_divides_the_logits() -> None:
    logits = torch.randn(7, 9, generator=seeded())
    warm = sample(logits, Gini(), temperature=2.5, num_samples=50, generator=seeded(3))
    assert torch.equal(warm, sample(logits / 2.5, Gini(), num_samples=50, generator=seeded(3)))
    each = torch.linspace(0.5, 3, 7).unsqueeze(-1)
    rows = sample(logits, Gini(), temperature=each, num_samples=50, generator=seeded(3))
    assert torch.equal(rows, sample(logits / each, Gini(), num_samples=50, generator=seeded(3)))
    assert torch.equal(sample(logits, temperature=1e-3), logits.argmax(-1))


def test_masked_words_are_not_drawn_whatever_stands_there() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 0.9], [5.0, 1.0, -torch.inf]])
    mask = torch.tensor([[False, True, True], [False, True, True]])
    drawn = sample(logits, mask=mask, num_samples=200, generator=seeded())
    assert set(drawn[:, 0].tolist()) == {1, 2}
    assert set(drawn[:, 1].tolist()) == {1}


def test_draws_depend_on_the_generator_alone() -> None:
    logits = torch.randn(20, 30, requires_grad=True)
    state = torch.get_rng_state()
    first = sample(logits, Shannon(), generator=seeded(5))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, sample(logits, Shannon(), generator=seeded(5)))
    assert not torch.equal(first, sample(logits, Shannon(), generator=seeded(6)))
    assert first.dtype == torch.int64
    assert not first.requires_grad


@pytest.mark.parametrize(("shape", "n", "expected"), [((4,), None, ()), ((4,), 3, (3,)), ((2, 3, 4), 5, (5, 2, 3))])
def test_shapes_of_draws(shape: tuple[int, ...], n: int | None, expected: tuple[int, ...]) -> None:
    assert sample(torch.zeros(shape), num_samples=n).shape == expected
    assert sample(torch.zeros(0, 4), num_samples=n).shape == ((0,) if n is None else (n, 0))
    assert sample(torch.zeros(shape), num_samples=0).shape == (0, *shape[:-1])


def test_members_of_a_chosen_set_are_drawn_alike() -> None:
    drawn = sample(torch.tensor([9.0, 9.0, 0.0]), KSubsets(2), num_samples=4000, generator=seeded())
    assert stats.binomtest(int((drawn == 0).sum()), 4000).pvalue > 1e-3
    assert drawn.max() == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits": torch.tensor([0.0, torch.nan])}, ValueError, "unmasked, finite entry"),
        ({"logits": torch.tensor([0.0, torch.inf])}, ValueError, "unmasked, finite entry"),
        ({"logits": torch.full((2, 3), -torch.inf)}, ValueError, "unmasked, finite entry"),
        ({"logits": torch.tensor([1, 2])}, TypeError, "floating-point"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "must not be empty"),
        ({"temperature": 0.0}, ValueError, "temperature must satisfy 0 < temperature < inf, got 0"),
        ({"temperature": math.inf}, ValueError, "temperature must satisfy"),
        ({"temperature": torch.tensor([[1.0], [math.inf]])}, ValueError, "temperature must satisfy .* with inf"),
        ({"num_samples": -1}, ValueError, "num_samples must be at least 0, got -1"),
        ({"num_samples": 1.5}, TypeError, "num_samples must be an int"),
        ({"omega": 1.5}, TypeError, "omega must be a Regularizer"),
    ],
)
def test_bad_input_of_sampling_is_named(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sample(**{"logits": torch.zeros(2, 3), **arguments})


# -- metrics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1e-6, 0.02, 3.0])
def test_epsilon_perplexity_is_that_of_the_mixture_with_the_uniform(epsilon: float) -> None:
    p, target = distributions(4, 6, 11), np.random.default_rng(1).integers(11, size=(4, 6))
    share = epsilon * 11 / (1 + epsilon * 11)
    mixture = (1 - share) * p + share / 11
    expected = 2 ** -np.log2(np.take_along_axis(mixture, target[..., None], -1)).mean()
    found = epsilon_perplexity(torch.tensor(p), torch.tensor(target), epsilon)
    assert_close(found.item(), expected, rtol=1e-13, atol=0)


def test_without_epsilon_it_is_perplexity() -> None:
    logits, target = torch.randn(5, 7, dtype=torch.float64), torch.randint(7, (5,))
    found = epsilon_perplexity(logits.softmax(-1), target, 0)
    assert_close(found, torch.nn.functional.cross_entropy(logits, target).exp())
    assert epsilon_perplexity(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), 0) == math.inf


@pytest.mark.parametrize("zeros", [0.2, 0.6])
def test_the_best_epsilon_has_the_smallest_perplexity(zeros: float) -> None:
    p = torch.tensor(distributions(40, 8, zeros=zeros))
    target = torch.where(torch.arange(40) % 4 > 0, p.argmax(-1), torch.arange(40) % 8)
    best = optimize.minimize_scalar(
        lambda log: epsilon_perplexity(p, target, math.exp(log)).item(), bounds=(-20, 5), options={"xatol": 1e-10}
    )
    assert_close(best_epsilon(p, target), math.exp(best.x), rtol=1e-5, atol=0)


def test_the_best_epsilon_may_be_none_or_all() -> None:
    assert best_epsilon(torch.tensor([[0.9, 0.1]]), torch.tensor([0])) == 0
    assert best_epsilon(torch.tensor([[0.9, 0.1], [1.0, 0.0]]), torch.tensor([1, 1])) == math.inf
    # No better than chance on average: the slope is zero where only the uniform distribution is left.
    assert best_epsilon(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])) == math.inf
    assert best_epsilon(torch.tensor([[0.5, 0.5, 0.0], [0.5, 1 / 3, 1 / 6]]), torch.tensor([1, 2])) == math.inf
    with pytest.raises(ValueError, match="a word that is not ignored"):
        best_epsilon(torch.tensor([[0.9, 0.1]]), torch.tensor([-100]))


@pytest.mark.parametrize("base", [math.e, 2])
def test_jensen_shannon_is_scipys_distance_squared(base: float) -> None:
    p, target = distributions(50, 9), np.arange(50) % 9
    expected = spatial.distance.jensenshannon(p, np.eye(9)[target], base=base, axis=-1) ** 2
    found = jensen_shannon(torch.tensor(p), torch.tensor(target), base=base, reduction="none")
    assert_close(found, torch.tensor(expected), atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("missed", [0.0, 2.0**-50, 1e-9, 1e-3, 0.5, 1 - 1e-9, 1.0])
def test_jensen_shannon_keeps_its_digits_next_to_a_perfect_fit(missed: float) -> None:
    q = mpmath.mpf(1 - missed)

    def kl(a: list, b: list) -> mpmath.mpf:
        return sum((x * mpmath.log(x / y) for x, y in zip(a, b, strict=True) if x), mpmath.mpf(0))

    m = [(q + 1) / 2, (1 - q) / 2]
    expected = (kl([q, 1 - q], m) + kl([mpmath.mpf(1), mpmath.mpf(0)], m)) / 2
    p = torch.tensor([[1 - missed, 1 - (1 - missed)]], dtype=torch.float64)
    assert_close(jensen_shannon(p, torch.tensor([0])).item(), float(expected), rtol=1e-14, atol=0)


def test_the_sparsemax_score_is_one_less_the_smallest_sparsemax_loss() -> None:
    """sparsemax(s) = p for s = p + t − μ with μ ≥ 0 off the support; the loss ⟨p, s⟩ − Ω(p) − s_x is linear in s."""
    p, target = distributions(20, 6), np.arange(20) % 6
    found = sparsemax_score(torch.tensor(p), torch.tensor(target), reduction="none")
    for row, x, score in zip(p, target, found.tolist(), strict=True):
        hit = np.eye(6)[x]
        bounds = [(value, value) if value > 0 else (None, 0) for value in row]
        least = optimize.linprog(row - hit, bounds=bounds)
        assert_close(score, 1 - (least.fun - (row @ row - 1) / 2), rtol=1e-12, atol=1e-12)
        assert_close(score, 1 - ((row - hit) ** 2).sum() / 2, rtol=1e-12, atol=1e-12)


def test_a_one_hot_choice_scores_its_accuracy() -> None:
    p, target = torch.eye(4)[torch.tensor([0, 1, 2, 3, 0])], torch.tensor([0, 1, 3, 3, 1])
    assert sparsemax_score(p, target) == 0.6
    assert_close(jensen_shannon(p, target, base=2).item(), 0.4, rtol=1e-6, atol=0)


@pytest.mark.parametrize("metric", METRICS)
def test_reductions_leave_out_what_is_ignored(metric: callable) -> None:
    p = torch.tensor(distributions(2, 3, 5))
    target = torch.tensor([[1, -100, 2], [4, 0, -100]])
    spoilt = p.clone()
    spoilt[0, 1] = torch.nan
    each = metric(spoilt, target, reduction="none")
    assert each.shape == (2, 3)
    assert each[0, 1] == each[1, 2] == 0
    kept = target != -100
    alone = metric(p[kept], target[kept], reduction="none")
    assert torch.equal(each[kept], alone)
    assert_close(metric(spoilt, target), alone.mean())
    assert_close(metric(spoilt, target, reduction="sum"), alone.sum())
    assert_close(metric(p, target.masked_fill(~kept, 0), ignore_index=0), metric(p[target > 0], target[target > 0]))
    assert metric(p[:0], target[:0]).isnan()


def test_perplexity_leaves_out_what_is_ignored() -> None:
    p, target = torch.tensor(distributions(4, 5)), torch.tensor([1, -100, 2, 0])
    kept = target != -100
    spoilt = torch.where(kept.unsqueeze(-1), p, torch.nan)
    assert_close(epsilon_perplexity(spoilt, target, 0.1), epsilon_perplexity(p[kept], target[kept], 0.1))
    assert best_epsilon(spoilt, target) == best_epsilon(p[kept], target[kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_metrics_of_half_precision_are_made_in_single(dtype: torch.dtype) -> None:
    p = torch.tensor(distributions(30, 6)).to(dtype)
    target = torch.arange(30) % 6
    rows = p.double().numpy()
    q = rows[np.arange(30), target.numpy()]
    by_hand = {
        jensen_shannon(p, target): np.log(2) + (special.xlogy(q, q) - special.xlogy(1 + q, 1 + q)) / 2,
        sparsemax_score(p, target): q + (1 - (rows**2).sum(-1)) / 2,
        epsilon_perplexity(p, target, 0.01).log(): np.log1p(0.06) - np.log(q + 0.01),
    }
    for found, expected in by_hand.items():
        assert found.dtype == torch.float32
        assert_close(found.item(), expected.mean(), rtol=1e-5, atol=1e-6)


def test_metrics_have_gradients() -> None:
    p = torch.tensor(distributions(5, 4, zeros=0.0)).requires_grad_()
    target = torch.tensor([0, 1, 2, 3, -100])
    for metric in (*METRICS, lambda p, y: epsilon_perplexity(p, y, 0.01)):
        (gradient,) = torch.autograd.grad(metric(p, target), p)
        assert gradient[:4].isfinite().all()
        assert (gradient[4] == 0).all()


@pytest.mark.parametrize("metric", [*METRICS, lambda p, y: epsilon_perplexity(p, y, 0.1), best_epsilon])
def test_bad_input_of_metrics_is_named(metric: callable) -> None:
    good, target = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1])
    for wrong in (2 * good, good - 0.5, good * torch.nan):
        with pytest.raises(ValueError, match="probs must hold probabilities"):
            metric(wrong, target)
    with pytest.raises(ValueError, match=r"target must hold class indices in \[0, 1\] or ignore_index, -100, got 2"):
        metric(good, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"target of class indices must have shape \(2,\)"):
        metric(good, torch.tensor([0, 1, 1]))
    with pytest.raises(TypeError, match="target must be a tensor of integer"):
        metric(good, good)
    with pytest.raises(TypeError, match="probs must be a floating-point"):
        metric(target, target)
    with pytest.raises(ValueError, match="probs must have shape"):
        metric(torch.zeros(2, 0), target)


def test_bad_options_of_metrics_are_named() -> None:
    p, target = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    with pytest.raises(ValueError, match=r"epsilon must satisfy 0 <= epsilon < inf, got -0\.1"):
        epsilon_perplexity(p, target, -0.1)
    with pytest.raises(TypeError, match="epsilon must be a number"):
        epsilon_perplexity(p, target, "0.1")
    with pytest.raises(ValueError, match="base must satisfy 1 < base < inf, got 1"):
        jensen_shannon(p, target, base=1)
    with pytest.raises(ValueError, match="reduction must be"):
        sparsemax_score(p, target, reduction="max")


# -- repetitions --------------------------------------------------------------------------------------------------


def texts() -> Tensor:
    tokens = torch.randint(6, (4, 15), generator=seeded(2))
    tokens[1, 9:] = -100
    tokens[3, :2] = -100
    return tokens


@pytest.mark.parametrize("window", [1, 3, 14, 99])
def test_repetition_counts_tokens_that_stood_a_little_before(window: int) -> None:
    seen = [row[t] in row[max(0, t - window) : t] for row in texts().tolist() for t in range(15) if row[t] != -100]
    assert_close(repetition(texts(), window).item(), sum(seen) / len(seen))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_distinct_counts_different_n_grams(n: int) -> None:
    grams = [
        gram
        for row in texts().tolist()
        for gram in zip(*(islice(row, i, None) for i in range(n)), strict=False)
        if -100 not in gram
    ]
    assert_close(distinct(texts(), n).item(), len(set(grams)) / len(grams))


def test_texts_that_are_too_short_have_nothing_to_count() -> None:
    assert distinct(torch.tensor([[1, 2]]), 3).isnan()
    assert distinct(torch.full((2, 4), -100), 2).isnan()
    assert repetition(torch.tensor([[1]]), 3) == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: repetition(torch.zeros(3), 1), TypeError, "tokens must be a tensor of integers"),
        (lambda: repetition(torch.tensor(3), 1), ValueError, "tokens must have shape"),
        (lambda: repetition(torch.tensor([3]), 0), ValueError, "window must be at least 1, got 0"),
        (lambda: repetition(torch.tensor([3]), 1.0), TypeError, "window must be an int"),
        (lambda: distinct(torch.tensor([3]), 0), ValueError, "n must be at least 1, got 0"),
        (lambda: distinct(torch.tensor([3]), True), TypeError, "n must be an int"),
    ],
)
def test_bad_input_of_counts_is_named(call: callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
