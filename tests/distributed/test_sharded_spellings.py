"""One Ω in any spelling gives the same answers where patterns and sequences are spread over ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fenchel import Gini, Regularizer
from fenchel.distributed import ShardedMemory, attention
from ranks import Ranks, part, started
from spellings import spellings

N = 12
SIZES = (5, 4, 3)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(__name__) as processes:
        yield processes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def remembered(omega: Regularizer, group: Any, mine: slice) -> dict[str, Tensor]:
    patterns, queries = normal(N, 4), normal(5, 4, seed=1)
    memory = ShardedMemory(patterns[mine], omega, 0.7, group=group)
    found, certificate = memory.retrieve(queries), memory.certify()
    assert found.weights is not None
    return {
        "step": memory.step(queries),
        "energy": memory.energy(queries),
        "state": found.state,
        "weights": found.weights,
        "radius": certificate.radius,
        "min_beta": certificate.min_beta,
    }


def attended(omega: Regularizer, group: Any, mine: slice) -> dict[str, Tensor]:
    inputs = [normal(2, N, 4, seed=i)[:, mine].requires_grad_() for i in range(3)]
    whole, causal = attention(*inputs, omega, group=group), attention(*inputs, omega, group=group, is_causal=True)
    gradients = torch.autograd.grad((whole * normal(*whole.shape, seed=4)).sum() + causal.square().sum(), inputs)
    return {"whole": whole, "causal": causal, **dict(zip(("query", "key", "value"), gradients, strict=True))}


def check_spellings(group: Any, rank: int, ranks: int) -> None:
    mine = part(N, SIZES, rank)
    for gamma in (1.0, 0.5):
        for engine in (remembered, attended):
            expected = engine(gamma * Gini(), group, mine)
            for name, omega in spellings(N).items():
                found = engine(gamma * omega, group, mine)
                message = f"{engine.__name__} with {gamma} · {name}"
                assert_close(found, expected, rtol=0, atol=1e-12, msg=lambda text, where=message: f"{where}: {text}")


def test_one_omega_in_any_spelling_has_one_answer_on_all_ranks(ranks: Ranks) -> None:
    ranks.run("check_spellings", ranks=len(SIZES), seconds=120.0)
