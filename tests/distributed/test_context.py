"""Attention over sequences that are spread over ranks: gathered and in a ring, causal and not, with gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import fenchel
from fenchel.distributed import attention, context, ring
from ranks import Counted, Ranks, part, split, started

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(__name__) as processes:
        yield processes


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(
    group: Any, rank: int, ranks: int, how: str, omega: Any, causal: bool, in_ring: bool, heads: int, dtype: torch.dtype
) -> tuple[int, list[Any]]:
    context.GATHERED, ring._HELD = (0, 1 << 9) if in_ring else (1 << 30, 1 << 22)
    length = 21
    sizes = split(length, ranks, how)
    query, direction = normal(2, 4, length, 6, seed=0), normal(2, 4, length, 5, seed=1)
    key, value = normal(2, heads, length, 6, seed=2), normal(2, heads, length, 5, seed=3)
    whole = [t.to(dtype).double().clone().requires_grad_() for t in (query, key, value)]
    wide = [whole[0], *(t.repeat_interleave(4 // heads, 1) for t in whole[1:])]
    mask = torch.ones(length, length).tril().bool() if causal else None
    expected, weights = fenchel.attention(*wide, omega, attn_mask=mask, return_weights=True)
    expected.backward(direction)
    mine = [t.to(dtype)[..., part(length, sizes, rank), :].clone().requires_grad_() for t in (query, key, value)]
    with Counted() as forward:
        found = attention(*mine, omega, group=group, is_causal=causal)
    found.backward(direction[..., part(length, sizes, rank), :].to(dtype))
    here = part(length, sizes, rank)
    close = EXACT if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    assert_close(found.double(), expected[..., here, :], **close)
    for own, full in zip(mine, whole, strict=True):
        assert_close(own.grad.double(), full.grad[..., here, :], **close)
    return int((weights > 0).sum(-1).max()), forward.calls


def check_learned(group: Any, rank: int, ranks: int, in_ring: bool) -> None:
    """The gradients of alpha, one per head, sum over the ranks to that of the whole."""
    context.GATHERED = 0 if in_ring else 1 << 30
    tensors = [normal(4, 12, 6, seed=i) for i in range(3)]
    grads = []
    for spread in (True, False):
        omega = fenchel.Tsallis(1.5, learnable=True, shape=(4, 1, 1)).double()
        if spread:
            sizes = split(12, ranks, "uneven")
            found = attention(*(t[:, part(12, sizes, rank)] for t in tensors), omega, group=group, is_causal=True)
        else:
            found = fenchel.attention(*tensors, omega, is_causal=True)
        found.square().sum().backward()
        grads.append(omega.raw_alpha.grad)
    torch.distributed.all_reduce(grads[0], group=group)
    assert grads[1].abs().min() > 0
    assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


def refused(group: Any, rank: int, ranks: int) -> str:
    try:
        attention(torch.zeros(2 + rank, 3), torch.zeros(2, 3), torch.zeros(2, 3), group=group, is_causal=True)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("in_ring", [False, True], ids=["gathered", "ring"])
def test_spread_sequences_give_the_answers_of_whole_ones(ranks: Ranks, count: int, in_ring: bool) -> None:
    omegas = [fenchel.Tsallis(1.5), fenchel.Gini(), fenchel.Norm(2.0), 0.5 * fenchel.Tsallis(1.25)]
    for how, omega in zip(("even", "uneven", "empty", "even"), omegas, strict=True):
        for causal in (False, True):
            for support, calls in ranks.run("check", how, omega, causal, in_ring, 4, torch.float64, ranks=count):
                assert support > 1
                names = [name for name, _ in calls]
                assert names == (["all_reduce"] if in_ring else ["all_reduce", "all_gather"])


def test_softmax_and_grouped_heads(ranks: Ranks) -> None:
    ranks.run("check", "uneven", fenchel.Shannon(), True, True, 4, torch.float64, ranks=3)  # gathered all the same
    ranks.run("check", "uneven", fenchel.Tsallis(1.5), True, False, 2, torch.float64, ranks=3)
    ranks.run("check", "uneven", fenchel.Tsallis(1.5), True, False, 4, torch.float32, ranks=2)
    ranks.run("check", "even", fenchel.Tsallis(1.5), True, True, 4, torch.float32, ranks=2)


@pytest.mark.parametrize("in_ring", [False, True], ids=["gathered", "ring"])
def test_a_learned_alpha_has_its_gradient(ranks: Ranks, in_ring: bool) -> None:
    ranks.run("check_learned", in_ring, ranks=3)


def test_causal_sequences_of_different_lengths_are_refused(ranks: Ranks) -> None:
    assert all("as many queries as keys" in message for message in ranks.run("refused", ranks=2))
