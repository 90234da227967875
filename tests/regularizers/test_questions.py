"""What engines ask of Ω: every answer against its definition, and one Ω in any spelling gives the same answers."""

import math

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel import (
    Capped,
    Custom,
    Fused,
    Gini,
    Hard,
    KSubsets,
    Norm,
    Oscar,
    Shannon,
    SparseMAP,
    Tsallis,
)
from fenchel.regularizers import Regularizer
from fenchel.structures import AtMost, Chain, Share, Subsets
from spellings import spellings

GINI = {"Gini": Gini(), "Custom": Custom(lambda p: 0.5 * (p.square().sum(-1) - 1)), **spellings(7)}
every_spelling = pytest.mark.parametrize("name", GINI)

SPARSE = [Gini(), Tsallis(1.2), Tsallis(1.5), Tsallis(3.0), Hard(), Norm(1.5), Norm(4.0), Norm(math.inf)]
SPARSE += [KSubsets(2), KSubsets(2.5), Capped(0.4), SparseMAP(Subsets(3))]
LINED = [*SPARSE, *(0.3 * omega for omega in SPARSE), Tsallis(torch.tensor([[1.3], [2.0], [torch.inf], [0.7], [1.0]]))]


@every_spelling
def test_one_omega_in_any_spelling_is_one_map_one_maximum_one_loss(name: str) -> None:
    scores = torch.randn(4, 7, dtype=torch.float64)
    mask = torch.rand(4, 7) < 0.8
    mask[:, 0] = True
    omega, gini = GINI[name], Gini()
    target = gini.argmax(torch.randn(4, 7, dtype=torch.float64), mask=mask)
    for mine, theirs in (
        (omega.argmax(scores, mask=mask), gini.argmax(scores, mask=mask)),
        (omega.max(scores, mask=mask), gini.max(scores, mask=mask)),
        (omega.loss(scores, target, mask=mask), gini.loss(scores, target, mask=mask)),
        (omega(target), gini(target)),
    ):
        assert torch.allclose(mine, theirs, atol=1e-9 if name == "Custom" else 1e-12)


@every_spelling
def test_one_omega_in_any_spelling_has_one_canonical_form(name: str) -> None:
    if name == "Custom":
        assert GINI[name].canonical()[0] is GINI[name]
        return
    omega, gamma = (0.5 * GINI[name]).canonical()
    assert (omega.name, omega.parameter, gamma) == ("tsallis", 2.0, 0.5)


def test_tensors_are_neither_replaced_nor_read_by_the_canonical_form() -> None:
    gamma, alpha = torch.tensor(0.5), torch.tensor(2.0)
    omega, factor = (2.0 * (gamma * Tsallis(alpha))).canonical()
    assert omega.parameter is alpha
    assert float(factor) == 1.0
    assert KSubsets(torch.tensor(1.0)).canonical()[0].name == "k_subsets"
    assert Fused(torch.tensor(0.0)).canonical()[0].name == "fused"
    assert Capped(torch.tensor(1.0)).canonical()[0].name == "bounded_gini"


@pytest.mark.parametrize("omega", LINED, ids=str)
@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
def test_nothing_below_the_line_has_mass_however_much_is_added(omega: Regularizer, spread: float) -> None:
    scores = spread * torch.randn(5, 40, dtype=torch.float64)
    whole = omega.argmax(scores)
    for some in (3, 8, 25, 40):
        line = omega.line(scores[:, :some])
        assert line.shape == (5, 1)
        below = scores < line - 1e-9 * (1 + line.abs())
        assert (whole[below.expand_as(whole)] == 0).all()
    # And the line of all of them is the threshold itself: what has mass is not below it, what is above it has.
    assert (scores[whole > 0] >= line.expand_as(scores)[whole > 0] - 1e-9 * spread).all()
    assert (whole[scores > line + 1e-6 * spread] > 0).all()


def test_a_line_needs_enough_entries_to_hold_the_mass() -> None:
    scores = torch.tensor([3.0, -torch.inf, 1.0])
    assert KSubsets(3).line(scores).item() == -torch.inf
    assert Capped(0.3).line(scores).item() == -torch.inf
    for omega in (Gini(), Norm(2.0), 0.5 * Tsallis(1.5), KSubsets(2)):
        assert omega.line(torch.full((3,), -torch.inf)).item() == -torch.inf


def test_an_omega_without_a_threshold_has_no_line() -> None:
    scores = torch.randn(6)
    chain = SparseMAP(Chain(torch.zeros(2, 2)))
    for omega in (
        Shannon(),
        Tsallis(0.5),
        Fused(0.1),
        Oscar(0.1),
        Capped(0.5, Shannon()),
        Capped(torch.ones(6)),
        chain,
    ):
        assert omega.line(scores) is None
        assert (0.5 * omega).line(scores.reshape(3, 2) if omega is chain else scores) is None


def test_the_logarithm_of_a_softmax_does_not_underflow() -> None:
    scores = torch.tensor([[0.0, -2000.0, 3.0], [-torch.inf, -torch.inf, -torch.inf]])
    mask = torch.tensor([True, True, False])
    logs = Shannon().log_argmax(scores, mask=mask)
    assert logs.tolist() == [[0.0, -2000.0, -torch.inf], [-torch.inf] * 3]
    assert (2.0 * Shannon()).log_argmax(scores, mask=mask)[0].tolist() == [0.0, -1000.0, -torch.inf]
    assert torch.equal(Gini().log_argmax(scores[0]), Gini().argmax(scores[0]).log())


@pytest.mark.parametrize("omega", [Gini(), Tsallis(1.5), Shannon(), 0.5 * Shannon()], ids=str)
def test_the_logarithm_of_a_choice_has_no_derivative_where_it_is_zero(omega: Regularizer) -> None:
    scores = torch.tensor([0.4, 0.1, -9.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    logs = omega.log_argmax(scores)
    p = omega.argmax(scores.detach())
    assert torch.equal(logs == -torch.inf, p == 0)
    (gradient,) = torch.autograd.grad(logs, scores, torch.ones_like(logs))
    small = 1e-6
    for i in range(2):
        shift = torch.zeros(4, dtype=torch.float64)
        shift[i] = small
        up, down = (omega.log_argmax(scores.detach() + sign * shift)[p > 0].sum() for sign in (1, -1))
        assert abs(gradient[i] - (up - down) / (2 * small)) < 1e-7
    assert gradient[3] == 0


def test_a_choice_sums_to_its_mass() -> None:
    for omega, expected in (
        (Gini(), [1.0, 1.0]),
        (KSubsets(2.5), [1.0, 2.5]),
        (0.5 * KSubsets(2.5), [1.0, 2.5]),
        (Capped(1.0), [1.0, 1.0]),
        (SparseMAP(Subsets(2)), [1.0, 2.0]),
        (SparseMAP(AtMost(2)), [None, None]),
        (SparseMAP(Subsets(Share(0.5))), [None, None]),
    ):
        assert [omega.mass(1), omega.mass(4)] == expected


def test_merging_parts_by_an_associative_omega_gives_the_whole() -> None:
    scores = torch.randn(3, 12, dtype=torch.float64)
    parts = scores.split(5, -1)
    for omega in (Shannon(), 0.5 * Shannon()):
        base, _ = omega.canonical()
        assert base.associative
        merged = omega.max(torch.stack([omega.max(part) for part in parts], -1))
        assert torch.allclose(merged, omega.max(scores), atol=1e-14)
    assert not any(omega.associative for omega in (Gini(), Hard(), Tsallis(1.5), Tsallis(torch.tensor(1.0))))


def test_what_varies_from_row_to_row_is_told_by_a_shape() -> None:
    assert Gini().parameter_shape == ()
    assert (torch.ones(4, 1, 1) * Tsallis(torch.full((3, 1), 1.5))).parameter_shape == (4, 3, 1)
    assert Capped(torch.ones(7)).parameter_shape == (7,)
    assert Custom(lambda p: p.square().sum(-1)).parameter_shape is None
    assert (0.5 * Custom(lambda p: p.square().sum(-1))).parameter_shape is None


class Square(Regularizer):
    """A user's own Ω: ½‖p‖² − ½, with nothing but its value and its choice written down."""

    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        return (p.square().sum(dim) - 1) / 2

    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return fenchel.sparsemax(scores, dim, mask)


def test_an_omega_of_a_users_own_needs_no_more_than_its_value_and_its_choice() -> None:
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    omega, gini = Square(), Gini()
    index = torch.tensor([0, 3, 2])
    mask = torch.tensor([True, True, True, True, False])
    for mine, theirs in (
        (omega.max(scores), gini.max(scores)),
        (omega.loss(scores, index, mask=mask), gini.loss(scores, index, mask=mask)),
        ((0.5 * omega).max(scores, 0), (0.5 * gini).max(scores, 0)),
        (fenchel.fy_loss(scores, index, omega), fenchel.fy_loss(scores, index, gini)),
    ):
        assert torch.allclose(mine, theirs, atol=1e-14)
        (gradient,) = torch.autograd.grad(mine.sum(), scores)
        (expected,) = torch.autograd.grad(theirs.sum(), scores)
        assert torch.allclose(gradient, expected, atol=1e-14)
    assert omega.line(scores) is None
    assert omega.config() is None


def test_an_omega_that_writes_neither_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="must set rule, or write forward and argmax"):
        Regularizer().argmax(torch.randn(3))
