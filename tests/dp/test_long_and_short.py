"""Chains of one step and of thousands, rows beside others, and programs that are evaluated before they are trained."""

import pytest
import torch

import fenchel
from fenchel.dp import Alignment, Lattice, LinearChain, dtw_divergence

SMOOTH = [fenchel.Shannon(), fenchel.Gini(), fenchel.Tsallis(1.5), fenchel.Tsallis(1.2)]


@pytest.mark.parametrize("omega", SMOOTH, ids=str)
def test_a_chain_of_one_step_is_one_choice(omega: fenchel.Regularizer) -> None:
    unary = torch.randn(3, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chain = LinearChain(unary, torch.zeros(4, 4, dtype=torch.float64), omega=omega)
    torch.testing.assert_close(chain.marginals[:, 0], omega.argmax(unary[:, 0]))
    assert chain.transition_marginals.shape == (3, 0, 4, 4)


def test_paths_are_listed_where_their_probabilities_are_too_small_for_a_number() -> None:
    chain = LinearChain(torch.zeros(1, 1000, 3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64))
    path = chain.top(1).paths[:, 0]
    assert bool((path >= 0).all())
    torch.testing.assert_close(chain.log_prob(path), torch.tensor([3.0], dtype=torch.float64).log() * -1000)


@pytest.mark.parametrize("omega", SMOOTH[:2], ids=str)
def test_single_precision_holds_over_thousands_of_steps(omega: fenchel.Regularizer) -> None:
    generator = torch.Generator().manual_seed(0)
    unary, transition = torch.randn(1, 3000, 6, generator=generator), torch.randn(6, 6, generator=generator)
    single = LinearChain(unary, transition, omega=omega).marginals
    double = LinearChain(unary.double(), transition.double(), omega=omega).marginals
    assert (single.double() - double).abs().max() < 1e-5


def test_a_row_of_a_lattice_does_not_depend_on_the_others() -> None:
    scores = torch.randn(400, 20, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 2, 400)[:, None]
    nodes = torch.zeros(20, dtype=torch.long)
    together = Lattice(nodes, nodes + 1, scores, 2, omega=fenchel.Tsallis(1.5)).marginals
    for row in range(0, 400, 7):
        alone = Lattice(nodes, nodes + 1, scores[row : row + 1], 2, omega=fenchel.Tsallis(1.5)).marginals
        assert torch.equal(alone[0], together[row])


def test_what_was_evaluated_first_can_be_trained_after() -> None:
    with torch.inference_mode():
        LinearChain(torch.randn(2, 9, 3), torch.randn(3, 3), omega=fenchel.Tsallis(1.2)).sample(2)
        Alignment(torch.rand(2, 5, 6)).entropy()
        Lattice(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.randn(2, 2), 3).entropy()
    unary = torch.randn(2, 9, 3, requires_grad=True)
    LinearChain(unary, torch.randn(3, 3), omega=fenchel.Tsallis(1.2)).value.sum().backward()
    costs = torch.rand(2, 5, 6, requires_grad=True)
    Alignment(costs).entropy().sum().backward()
    scores = torch.randn(2, 2, requires_grad=True)
    Lattice(torch.tensor([0, 0]), torch.tensor([1, 2]), scores, 3).entropy().sum().backward()
    assert unary.grad is not None
    assert costs.grad is not None
    assert scores.grad is not None


def test_rounding_does_not_make_a_divergence_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 12, 2, generator=generator)
    y = x + 1e-5 * torch.randn(x.shape, generator=generator)
    assert bool((dtw_divergence(x, y) >= 0).all())
