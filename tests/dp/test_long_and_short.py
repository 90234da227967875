"""Chains of one step and of thousands, rows beside others, and programs that are evaluated before they are trained."""

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel.dp import Alignment, DynamicProgram, Lattice, LinearChain, dtw_divergence

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


def long_chain(unary: Tensor, omega: fenchel.Regularizer) -> DynamicProgram:
    transition = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    return LinearChain(unary, transition.to(unary), omega=omega)


def long_lattice(scores: Tensor, omega: fenchel.Regularizer) -> DynamicProgram:
    """Steps of one node and of two."""
    nodes = 1 + scores.shape[1] // 2
    sources = torch.arange(nodes - 1).repeat_interleave(2)
    targets = (sources + 1 + torch.arange(len(sources)) % 2).clamp_max(nodes - 1)
    return Lattice(sources, targets, scores, nodes, omega)


LONG = {
    "chain": (long_chain, (2, 3000, 6)),
    "alignment": (lambda costs, omega: Alignment(costs.square() / 50, omega=omega), (2, 900, 1000)),
    "lattice": (long_lattice, (2, 6000)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("omega", [*SMOOTH[:3], 0.3 * SMOOTH[2]], ids=lambda o: str(o).replace("\n", ""))
def test_single_precision_holds_over_thousands_of_steps(name: str, omega: fenchel.Regularizer) -> None:
    build, shape = LONG[name]
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def marginals_and_product(scores: Tensor) -> tuple[Tensor, Tensor]:
        leaf = scores.clone().requires_grad_()
        marginals = build(leaf, omega).marginals
        direction = torch.arange(leaf.numel()).reshape(leaf.shape).cos().to(leaf)
        (product,) = torch.autograd.grad(marginals, leaf, direction)
        return marginals.detach().double(), product.double()

    single, double = marginals_and_product(scores), marginals_and_product(scores.double())
    assert (single[0] - double[0]).abs().max() < 1e-6
    assert (single[1] - double[1]).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("omega", [*SMOOTH[:3], fenchel.Hard()], ids=str)
@pytest.mark.parametrize("name", LONG)
def test_rows_are_the_same_to_the_bit_in_any_batch(name: str, omega: fenchel.Regularizer, dtype: torch.dtype) -> None:
    build, _ = LONG[name]
    size = {"chain": (40, 6), "alignment": (23, 17), "lattice": (200,)}[name]
    scores = torch.randn(17, *size, generator=torch.Generator().manual_seed(0)).to(dtype)

    def everything(scores: Tensor) -> list[Tensor]:
        leaf = scores.clone().requires_grad_()
        d = build(leaf, omega)
        (first,) = torch.autograd.grad(d.value.sum(), leaf, retain_graph=True)
        (second,) = torch.autograd.grad(d.marginals, leaf, scores.cos())
        return [d.value.detach(), d.marginals.detach(), first, second]

    together = everything(scores)
    for batch in range(1, 17):
        for first in (0, 17 - batch):
            some = slice(first, first + batch)
            for whole, part in zip(together, everything(scores[some]), strict=True):
                assert torch.equal(whole[some], part), batch


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
