"""Agents: games as they are told, codes of the closed simplex, and pairs that come to understand each other."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from fenchel_lab.models import agents
from fenchel_lab.models.agents import CHANNELS, Agents, Setting

SMALL = Setting(
    symbols=24, candidates=4, width=16, hidden=32, division=1.0, rate=1e-2, cooling=1.5e-3, batch=48, updates=480
)


def test_a_game_has_its_own_image_first_and_no_image_twice() -> None:
    drawn = agents.games(40, 16)
    assert torch.equal(drawn[:, 0], torch.arange(40))
    assert all(len(set(row.tolist())) == 16 for row in drawn)
    again = [agents.games(40, 16, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*again)


def test_other_candidates_are_all_equally_frequent() -> None:
    generator = torch.Generator().manual_seed(0)
    count, candidates, times = 6, 3, 3000
    seen = Counter(int(other) for _ in range(times) for other in agents.games(count, candidates, generator)[0, 1:])
    expected = times * (candidates - 1) / (count - 1)
    assert seen.keys() == {1, 2, 3, 4, 5}
    assert sum((got - expected) ** 2 / expected for got in seen.values()) < 20.5  # χ², 4 degrees of freedom: 0.04 %


def test_more_candidates_than_images_are_refused() -> None:
    with pytest.raises(ValueError, match="candidates must be at most the 10 images"):
        agents.games(10, 16)


@pytest.mark.parametrize("name", CHANNELS)
def test_codes_lie_on_the_simplex_and_on_the_faces_that_their_kind_has(name: str) -> None:
    torch.manual_seed(0)
    pair = Agents(5, SMALL, CHANNELS[name])
    code = pair.code(torch.randn(200, 5))
    assert code.shape == (200, 24)
    assert torch.allclose(code.sum(1), torch.ones(200), atol=1e-5)
    assert (code >= 0).all()
    nonzeros = (code > 0).sum(1)
    if name == "Gumbel-Softmax":
        assert (nonzeros == 24).all()
    elif name == "Gumbel-Softmax ST":
        assert (nonzeros == 1).all()
    else:
        assert 1 <= nonzeros.min() < nonzeros.max() <= 24
    code.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in pair.describe.parameters())


def test_a_candidate_scores_the_product_of_its_embedding_and_the_codes() -> None:
    torch.manual_seed(0)
    pair = Agents(5, SMALL, CHANNELS["Gaussian-Sparsemax"])
    images, code = torch.randn(6, 5), torch.rand(6, 24)
    candidates = agents.games(6, 4)
    scores = pair(code, images, candidates)
    for game in range(6):
        for place in range(4):
            alone = pair.read(code[game]) @ pair.look(images[candidates[game, place]])
            assert scores[game, place].item() == pytest.approx(alone.item(), abs=1e-5)


def test_the_shared_function_and_its_gradients_are_those_of_a_sum_of_sigmoids() -> None:
    torch.manual_seed(0)
    shared = agents.Shared(64).double()
    with torch.no_grad():
        shared.inner.mul_(3)  # as curved as it may become
    x = torch.randn(30, 20, dtype=torch.float64, requires_grad=True)
    exact = (x.unsqueeze(-1) * shared.inner).sigmoid() @ shared.outer
    inputs, weights = (x, shared.inner, shared.outer), torch.randn(30, 20, dtype=torch.float64)
    expected = torch.autograd.grad(exact, inputs, weights)
    assert torch.allclose(shared(x), exact, atol=2e-4)
    for got, want in zip(torch.autograd.grad(shared(x), inputs, weights), expected, strict=True):
        assert (got - want).abs().max() < 0.01 * want.abs().max()
    assert torch.isfinite(shared(torch.full((3,), 2.0))).all()


class Telepaths(Agents):
    """Images carry their number, codes are one-hot, and every tenth code says nothing."""

    def code(self, images: Tensor) -> Tensor:
        number = images[:, 0].long()
        return torch.eye(1001)[torch.where(number % 10 == 0, 1000, number)]

    def forward(self, code: Tensor, images: Tensor, candidates: Tensor) -> Tensor:
        said = code.argmax(1, keepdim=True)
        return (images[candidates, 0] == said).float() + torch.where(said == 1000, -1e-3, 0.0) * (
            torch.arange(candidates.shape[1]) == 0
        )


@pytest.mark.parametrize("count", [130, 500, 990])
def test_success_counts_the_games_that_are_won_and_codes_keep_the_order_of_images(count: int) -> None:
    pair = Telepaths(1, Setting(candidates=16), CHANNELS["Gumbel-Softmax"])
    outcome = agents.played(pair, torch.arange(count).float().unsqueeze(1), seed=1)
    assert outcome.success == pytest.approx(0.9)
    assert outcome.nonzeros == 1
    assert outcome.used == count * 0.9 + 1
    expected = torch.arange(count)
    assert torch.equal(outcome.codes.argmax(1), torch.where(expected % 10 == 0, 1000, expected))


@pytest.mark.parametrize("name", CHANNELS)
def test_agents_come_to_tell_clusters_apart(name: str) -> None:
    torch.manual_seed(0)
    centres = 2 * torch.randn(8, 6)
    images = (centres.repeat(48, 1) + 0.05 * torch.randn(384, 6))[torch.randperm(384)]
    told: list[int] = []
    pair = agents.trained(images, SMALL, CHANNELS[name], lambda updates, _: told.append(updates))
    # Four candidates of eight clusters: who tells clusters apart wins 0.79 of the games, who guesses a quarter.
    assert agents.played(pair, images, seed=0).success > 0.45
    assert pair.temperature == agents.COOLEST
    assert told == list(range(1, 481))
