"""All ranks in one process: the functions on more ranks than a test machine has, against those of one process."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import fenchel
from fenchel import distributed as fd
from fenchel.distributed import context, rehearse

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(
    alpha=st.one_of(st.floats(1.0, 2.0), st.sampled_from([1 + 1e-12, 1 + 1e-6, 2 - 1e-9])),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=17).filter(lambda s: sum(s) >= 2),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0, 1e30]),
    offset=st.sampled_from([0.0, -1e30, 1e12]),
    learned=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_in_any_number_of_parts(
    alpha: float, sizes: list[int], scale: float, offset: float, learned: bool, seed: int
) -> None:
    scores = scale * normal(4, sum(sizes), seed=seed).round(decimals=1) + offset  # with ties
    scores[2, : sizes[0]] = -torch.inf  # masked on one rank entirely
    direction, target = normal(4, sum(sizes), seed=seed + 1), torch.arange(4) % sum(sizes)
    target[1] = -100
    a = torch.full((4, 1), alpha, dtype=torch.float64) if learned else alpha

    def run(rank: int, group: Any) -> Any:
        mine = scores.split(sizes, -1)[rank].clone().requires_grad_()
        own = a.clone().requires_grad_() if learned else a
        p = fd.entmax(mine, own, group=group)
        (p * direction.split(sizes, -1)[rank]).sum().backward()
        by_map, mine.grad = mine.grad, None
        loss = fd.entmax_loss(mine, target, own, group=group, reduction="none")
        loss[loss.isfinite()].sum().backward()
        return p.detach(), by_map, loss.detach(), mine.grad, own.grad if learned else None

    results = rehearse(run, len(sizes)).results
    plain = scores.clone().requires_grad_()
    own = a.clone().requires_grad_() if learned else a
    p = fenchel.entmax(plain, own)
    (p * direction).sum().backward()
    by_map, plain.grad = plain.grad, None
    loss = fenchel.entmax_loss(plain, target, own, reduction="none")
    loss[loss.isfinite()].sum().backward()
    close = EXACT | {"equal_nan": True}
    assert_close(torch.cat([each[0] for each in results], -1), p.detach(), **close)
    assert_close(torch.cat([each[1] for each in results], -1), by_map, **close)
    assert_close(torch.cat([each[3] for each in results], -1), plain.grad, **close)
    for each in results:
        assert_close(each[2], loss.detach(), **close)
        if learned:
            assert_close(each[4], own.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gathered", [0, 1 << 30], ids=["ring", "gathered"])
@pytest.mark.parametrize("length", [3, 21])
def test_attention_on_seven_ranks(monkeypatch: pytest.MonkeyPatch, causal: bool, gathered: int, length: int) -> None:
    monkeypatch.setattr(context, "GATHERED", gathered)
    tensors = [normal(2, length, 4, seed=i) for i in range(3)]
    whole = [t.clone().requires_grad_() for t in tensors]
    expected = fenchel.attention(*whole, fenchel.Tsallis(1.5), is_causal=causal)
    expected.square().sum().backward()

    def run(rank: int, group: Any) -> Any:
        mine = [t.tensor_split(7, -2)[rank].clone().requires_grad_() for t in tensors]
        found = fd.attention(*mine, fenchel.Tsallis(1.5), group=group, is_causal=causal)
        found.square().sum().backward()
        return found.detach(), *(t.grad for t in mine)

    results = rehearse(run, 7).results
    for i, wanted in enumerate((expected.detach(), *(t.grad for t in whole))):
        assert_close(torch.cat([each[i] for each in results], -2), wanted, **EXACT)


def test_layers_and_memories_on_nine_ranks() -> None:
    hidden, weight, patterns = normal(20, 6), normal(50, 6, seed=1), normal(50, 6, seed=2)
    target = torch.arange(20) * 2
    plain = hidden.clone().requires_grad_()
    fenchel.linear_entmax_loss(plain, weight, target).backward()
    memory = fenchel.hopfield.Memory(patterns, beta=2.0)
    certificate = memory.certify()

    def run(rank: int, group: Any) -> Any:
        own = hidden.clone().requires_grad_()
        fd.linear_entmax_loss(own, weight.tensor_split(9)[rank], target, group=group).backward()
        spread = fd.ShardedMemory(patterns.tensor_split(9)[rank], beta=2.0, group=group)
        return own.grad, spread.step(hidden), spread.energy(hidden), spread.certify().radius

    results = rehearse(run, 9).results
    for grad, step, energy, _ in results:
        assert_close(grad, plain.grad, **EXACT)
        assert_close(step, memory.step(hidden), **EXACT)
        assert_close(energy, memory.energy(hidden), **EXACT)
    assert_close(torch.cat([each[3] for each in results]), certificate.radius, **EXACT)


def test_what_is_exchanged_is_recorded() -> None:
    parts = normal(5, 40).chunk(4, -1)
    run = rehearse(lambda rank, group: fd.entmax(parts[rank], group=group), 4)
    first, *rounds = run.transfers
    assert (first.name, first.numbers, first.bytes) == ("all_reduce", 3 * 5 + 4 + 1, 8 * 20)
    assert all((each.name, each.numbers) in (("all_reduce", 15), ("all_reduce", 20)) for each in rounds)
    assert run.bytes == sum(8 * each.numbers for each in run.transfers)


def test_an_exception_of_one_rank_ends_all() -> None:
    def run(rank: int, group: Any) -> Any:
        if rank == 2:
            raise ArithmeticError("rank 2 gives up")
        return fd.entmax(normal(3), group=group)

    with pytest.raises(ArithmeticError, match="rank 2 gives up"):
        rehearse(run, 5)


def test_a_rank_that_is_done_early_does_not_leave_others_waiting() -> None:
    with pytest.raises(RuntimeError, match="another rank has ended"):
        rehearse(lambda rank, group: fd.entmax(normal(3), group=group) if rank else None, 3)
    with pytest.raises(ValueError, match="ranks must be"):
        rehearse(lambda rank, group: rank, 0)
