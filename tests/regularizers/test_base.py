"""Regularizer: γΩ, parameters as modules keep them, targets, and what a user may add."""

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import fenchel
from fenchel import Capped, Custom, Fused, Gini, Hard, KSubsets, Norm, Shannon, TotalVariation2d, Tsallis
from fenchel.regularizers import Scaled
from fenchel.structures import DependencyTree

OMEGAS = [Hard(), Shannon(), Gini(), Tsallis(1.5), Tsallis(3.0), Norm(2.0), Norm(math.inf)]


@pytest.mark.parametrize("omega", OMEGAS, ids=repr)
@pytest.mark.parametrize("gamma", [0.1, 1.0, 7.0])
def test_gamma_omega_is_omega_at_another_temperature(omega: fenchel.Regularizer, gamma: float) -> None:
    scores, target = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 5])
    scaled = gamma * omega
    p = scaled.argmax(scores)
    assert torch.allclose(p, omega.argmax(scores / gamma), atol=1e-15)
    assert torch.allclose(scaled(p), gamma * omega(p))
    assert torch.allclose(scaled.max(scores), (p * scores).sum(-1) - gamma * omega(p))
    assert torch.allclose(scaled.loss(scores, target), scaled.max(scores) - scores[torch.arange(4), target])
    assert scaled.margin == gamma * omega.margin


def test_gamma_from_either_side_and_twice() -> None:
    scores = torch.randn(3, 5)
    for omega in (0.5 * Gini(), Gini() * 0.5, 0.25 * (2 * Gini()), torch.tensor(0.5) * Gini()):
        assert torch.equal(omega.argmax(scores), fenchel.sparsemax(scores / 0.5))


def test_gamma_may_be_a_tensor_with_one_value_a_row_and_learned() -> None:
    gamma = torch.nn.Parameter(torch.tensor([[0.5], [2.0]], dtype=torch.float64))
    omega = gamma * Tsallis(1.5)
    assert [name for name, _ in omega.named_parameters()] == ["gamma"]
    scores = torch.tensor([[1.0, 0.7, 0.5], [1.0, 0.4, 0.2]], dtype=torch.float64)
    assert torch.equal(omega.argmax(scores)[1], Tsallis(1.5).argmax(scores[1] / 2))

    def values(g: Tensor, s: Tensor) -> Tensor:
        scaled = g * Tsallis(1.5)
        return torch.cat([scaled.argmax(s).flatten(), scaled.max(s), scaled.loss(s, torch.tensor([0, 1]))])

    inputs = (gamma.detach().clone().requires_grad_(), scores.requires_grad_())
    assert gradcheck(values, inputs, check_forward_ad=True)


def test_a_small_gamma_does_not_overflow_half_precision() -> None:
    scores = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    omega = 0.01 * Shannon()
    assert omega.argmax(scores).tolist() == [1, 0]
    assert omega.max(scores).item() == 60000.0
    assert omega.loss(scores, torch.tensor(0)).item() == 0.0


@pytest.mark.parametrize(
    ("gamma", "error"), [(0.0, ValueError), (-1, ValueError), (math.inf, ValueError), ("2", TypeError)]
)
def test_a_bad_gamma_is_named(gamma: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="gamma"):
        Gini() * gamma  # type: ignore[operator]
    with pytest.raises(ValueError, match="gamma"):
        (torch.tensor([0.5, 1.0]) * Gini()).argmax(torch.ones(3, 2))


@pytest.mark.parametrize(
    "omega",
    [*OMEGAS, 0.5 * Tsallis(1.5), Tsallis(1.5, learnable=True, shape=(2, 1)), Tsallis(torch.tensor([[1.2], [1.8]]))],
    ids=repr,
)
def test_pickle_deepcopy_and_dtype_moves_keep_the_choice(omega: fenchel.Regularizer) -> None:
    scores = torch.randn(2, 6)
    expected = omega.argmax(scores)
    assert torch.equal(pickle.loads(pickle.dumps(omega)).argmax(scores), expected)
    assert torch.equal(copy.deepcopy(omega).argmax(scores), expected)
    assert torch.allclose(copy.deepcopy(omega).double().argmax(scores.double()).float(), expected, atol=1e-6)
    assert torch.allclose(copy.deepcopy(omega).half().argmax(scores), expected, atol=2e-3)
    copied = copy.deepcopy(omega)
    copied.load_state_dict(omega.state_dict())


@pytest.mark.parametrize(
    ("omega", "text"),
    [
        (Hard(), "Hard()"),
        (Shannon(), "Shannon()"),
        (Gini(), "Gini()"),
        (Tsallis(1.5), "Tsallis(alpha=1.5)"),
        (Tsallis(math.inf), "Tsallis(alpha=inf)"),
        (Tsallis(torch.ones(4, 1)), "Tsallis(alpha=tensor of shape (4, 1))"),
        (Tsallis(1.25, learnable=True, bounds=(1, 3)), "Tsallis(alpha=1.25, learnable, bounds=(1, 3))"),
        (Norm(5.0), "Norm(alpha=5)"),
    ],
    ids=repr,
)
def test_repr_tells_the_parameters(omega: fenchel.Regularizer, text: str) -> None:
    assert repr(omega) == text
    assert "gamma=0.5" in repr(0.5 * omega)


def test_a_masked_target_costs_infinity_and_leaves_the_rest_its_gradient() -> None:
    scores = torch.randn(3, 4, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True] * 4, [False] * 4])
    for target in (torch.tensor([3, 0, 1]), torch.eye(4, dtype=torch.float64)[[3, 0, 1]]):
        s = scores.clone().requires_grad_()
        loss = Gini().loss(s, target, mask=mask)
        assert loss.isinf().tolist() == [True, False, True]
        loss.sum().backward()
        assert s.grad is not None
        assert torch.allclose(s.grad[0], fenchel.sparsemax(scores, mask=mask)[0])
        assert (s.grad[2] == 0).all()


def test_soft_targets_may_be_zero_where_scores_are_masked() -> None:
    scores = torch.tensor([[1.0, 0.5, -math.inf]], requires_grad=True)
    loss = Tsallis(1.5).loss(scores, torch.tensor([[0.25, 0.75, 0.0]]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (torch.tensor([0, 5]), ValueError),
        (torch.tensor([0, -1]), ValueError),
        (torch.tensor([0, 1, 2]), ValueError),
        (torch.tensor([[0, 1]]), ValueError),
        (torch.tensor([True, False]), TypeError),
        (torch.full((2, 4), 0.25), ValueError),
        (torch.full((2, 5), 0.25), ValueError),
        (torch.tensor([[1.5, -0.5, 0, 0, 0], [1.0, 0, 0, 0, 0]]), ValueError),
    ],
)
def test_a_bad_target_is_named(target: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match="target"):
        Gini().loss(torch.randn(2, 5), target)


def test_max_equals_logsumexp_for_shannon_at_any_scale() -> None:
    for scale in (1e-3, 1.0, 50.0, 1e6):
        scores = scale * torch.randn(10, 7, dtype=torch.float64)
        assert torch.allclose(Shannon().max(scores), scores.logsumexp(-1), rtol=1e-14, atol=1e-14)


def test_support_size_counts_along_a_dimension() -> None:
    p = fenchel.sparsemax(torch.tensor([[1.0, 0.5, -1.0], [2.0, 0.0, 0.0]]))
    assert fenchel.support_size(p).tolist() == [2, 1]
    assert fenchel.support_size(p, dim=0).tolist() == [2, 1, 0]


def test_max_grows_when_the_regularizer_shrinks() -> None:
    """Ω ≤ 0, so max_Ω is at least the maximum, and γΩ* decreases to it with γ."""
    scores = torch.randn(20, 6, dtype=torch.float64)
    values = [(gamma * Tsallis(1.5)).max(scores) for gamma in (1e-6, 0.1, 1.0, 10.0)]
    assert torch.allclose(values[0], scores.amax(-1), atol=1e-5)
    assert all((a <= b + 1e-12).all() for a, b in itertools.pairwise(values))


def test_gamma_omega_sees_small_differences_behind_a_large_offset() -> None:
    scores = torch.tensor([1e6 + 0.0625, 1e6])
    assert (0.1 * Gini()).argmax(scores).tolist() == [0.8125, 0.1875]
    assert (1e-9 * Gini()).argmax(torch.tensor([1e30, 0.0])).tolist() == [1.0, 0.0]


def test_a_learned_gamma_has_finite_gradients_next_to_masked_scores() -> None:
    gamma = torch.tensor(0.5, requires_grad=True)
    scores, mask = torch.tensor([1.0, 0.8, math.nan, -math.inf]), torch.tensor([True, True, False, True])
    omega = gamma * Gini()
    total = omega.argmax(scores, mask=mask)[0] + omega.max(scores, mask=mask)
    total = total + omega.loss(scores, torch.tensor(1), mask=mask)
    (gradient,) = torch.autograd.grad(total, gamma)
    step = 1e-3
    values = []
    for g in (0.5 - step, 0.5 + step):
        fixed = g * Gini()
        value = fixed.argmax(scores, mask=mask)[0] + fixed.max(scores, mask=mask)
        values.append(value + fixed.loss(scores, torch.tensor(1), mask=mask))
    assert gradient.item() == pytest.approx((values[1] - values[0]).item() / (2 * step), rel=1e-2)


@pytest.mark.parametrize("dims", [(-2, -1), (0, 2), (2, 1)])
def test_a_scaled_regularizer_of_grids_takes_pairs_of_dimensions(dims: tuple[int, int]) -> None:
    """γΩ* (s) = γ Ω*(s/γ): the scores are divided here, and Ω is asked."""
    scores, gamma, omega = torch.randn(3, 4, 5, dtype=torch.float64), 0.4, TotalVariation2d(0.1)
    scaled = gamma * omega
    p = omega.argmax(scores / gamma, dims)
    assert torch.allclose(scaled.argmax(scores, dims), p, atol=1e-12)
    assert torch.allclose(scaled.max(scores, dims), gamma * omega.max(scores / gamma, dims), atol=1e-12)
    assert torch.allclose(scaled(p, dims), gamma * omega(p, dims))
    assert torch.allclose(scaled.loss(scores, p, dims), torch.zeros(1, dtype=torch.float64), atol=1e-12)
    if dims == (-2, -1):
        assert torch.equal(scaled.argmax(scores), scaled.argmax(scores, dims))
        target = torch.tensor([0, 19, -100])
        expected = gamma * omega.loss(scores[:2] / gamma, target[:2])
        for factor in (gamma, torch.full((3, 1, 1), gamma, dtype=torch.float64)):
            found = fenchel.fy_loss(scores, target, factor * omega, reduction="none")
            assert torch.allclose(found[:2], expected, atol=1e-12)
            assert found[2] == 0


def test_every_regularizer_has_a_scaled_maximum() -> None:
    scores = torch.randn(3, 6, dtype=torch.float64)
    square = Custom(lambda p: 0.5 * p.square().sum(-1))
    for omega in (square, Gini(), Fused(0.2), Capped(0.5), KSubsets(2), TotalVariation2d(0.1, shape=(2, 3))):
        assert torch.allclose((2.5 * omega).max(scores + 7), 2.5 * omega.max((scores + 7) / 2.5), atol=1e-12)


def test_factors_of_factors_are_one_factor() -> None:
    omega = 0.5 * (0.5 * Gini())
    assert isinstance(omega, Scaled)
    assert isinstance(omega.omega, Gini)
    assert omega.gamma == 0.25
    learned = torch.nn.Parameter(torch.tensor(0.5))
    assert list((0.5 * (learned * Gini())).parameters()) == [learned]


def test_rows_with_infinite_values_do_not_spoil_the_gradient_of_gamma() -> None:
    scores = torch.randn(3, 4, dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [False] * 4, [True, False, True, True]])
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def total(gamma: Tensor) -> Tensor:
        omega = gamma * Tsallis(1.5)
        maximum, loss = omega.max(scores, mask=mask), omega.loss(scores, torch.tensor([0, 1, 1]), mask=mask)
        return maximum[0] + maximum[2] + loss[0]

    assert torch.autograd.gradcheck(total, gamma)
    assert torch.autograd.gradgradcheck(total, gamma)
    shared = (gamma * Gini()).max(scores, mask=mask)
    (gradient,) = torch.autograd.grad(shared[[0, 2]].sum(), gamma)
    assert gradient.isfinite()


def test_dividing_is_multiplying_by_the_inverse() -> None:
    scores = torch.tensor([0.3, 0.1, -0.2])
    torch.testing.assert_close((Gini() / 4.0).argmax(scores), (0.25 * Gini()).argmax(scores))
    with pytest.raises(ValueError, match="the divisor must satisfy 0 < the divisor < inf, got 0"):
        Gini() / 0


@pytest.mark.parametrize("target", [1, [0, 1], None])
def test_a_target_that_is_no_tensor_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="target must be a Tensor"):
        Gini().loss(torch.zeros(2, 3), target)


def test_options_that_do_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="bounds go with learnable=True"):
        Tsallis(1.5, bounds=(1.0, 3.0))
    with pytest.raises(TypeError, match="single_root must be True or False"):
        DependencyTree(single_root="no")  # type: ignore[arg-type]
