"""Arguments that differ between ranks: an error on every rank that names the argument and what each rank gave."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fenchel
from fenchel import distributed as fd
from fenchel.distributed import rehearse
from ranks import Counted, Ranks, started


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(__name__) as processes:
        yield processes


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def memory(group: Any) -> fd.ShardedMemory:
    return fd.ShardedMemory(torch.eye(3), group=group)


Case = tuple[Callable[[Any, int], object], str]

# What is checked in every call: it travels with the lengths.
ALWAYS: dict[str, Case] = {
    "attention, batch": (
        lambda g, r: fd.attention(zeros(2 + r, 4, 8), zeros(2 + r, 4, 8), zeros(2 + r, 4, 8), group=g),
        "query must be equal on all ranks, got shape (2, …, 8), torch.float32 on rank 0, shape (3, …, 8)",
    ),
    "attention, width": (
        lambda g, r: fd.attention(zeros(4, 8 + 8 * r), zeros(4, 8 + 8 * r), zeros(4, 8), group=g),
        "query must be equal on all ranks, got shape (…, 8), torch.float32 on rank 0, shape (…, 16)",
    ),
    "attention, values": (
        lambda g, r: fd.attention(zeros(4, 8), zeros(4, 8), zeros(4, 8 + r), group=g),
        "value must be equal on all ranks, got shape (…, 8), torch.float32 on rank 0, shape (…, 9)",
    ),
    "attention, causal": (
        lambda g, r: fd.attention(zeros(4, 8), zeros(4, 8), zeros(4, 8), group=g, is_causal=r == 1),
        "is_causal must be equal on all ranks, got False on rank 0, True on rank 1",
    ),
    "memory, queries": (
        lambda g, r: memory(g).retrieve(zeros(2 + r, 3)),
        "query must be equal on all ranks, got shape (2, 3), torch.float32",
    ),
    "memory, steps": (
        lambda g, r: memory(g).retrieve(zeros(2, 3), max_steps=10 + r),
        "max_steps must be equal on all ranks, got 10 on rank 0, 11 on rank 1",
    ),
    "memory, beta": (
        lambda g, r: fd.ShardedMemory(torch.eye(3), beta=1.0 + r, group=g),
        "beta must be equal on all ranks, got 1 on rank 0, 2 on rank 1",
    ),
    "memory, omega": (
        lambda g, r: fd.ShardedMemory(torch.eye(3), fenchel.Tsallis(1.5 + r / 4), group=g),
        "omega must be equal on all ranks, got Tsallis(alpha=1.5) on rank 0, Tsallis(alpha=1.75) on rank 1",
    ),
    "memory, patterns": (
        lambda g, r: fd.ShardedMemory(torch.full((2, 3), torch.nan) if r else torch.eye(3), group=g),
        "patterns must be finite",
    ),
}

# What takes FENCHEL_CHECK_RANKS=1.
INDEX = torch.tensor([0, 1, 2])
ASKED: dict[str, Case] = {
    "entmax, rows": (
        lambda g, r: fd.entmax(zeros(3 + r, 5), group=g),
        "scores must be equal on all ranks, got shape (3, …), torch.float32 on rank 0, shape (4, …)",
    ),
    "entmax, dtype": (
        lambda g, r: fd.entmax(zeros(3, 5).double() if r else zeros(3, 5), group=g),
        "got shape (3, …), torch.float32 on rank 0, shape (3, …), torch.float64 on rank 1",
    ),
    "entmax, gradients": (
        lambda g, r: fd.entmax(zeros(3, 5).requires_grad_(r == 1), group=g),
        "torch.float32 on rank 0, shape (3, …), torch.float32, requires grad on rank 1",
    ),
    "entmax, alpha": (
        lambda g, r: fd.entmax(zeros(3, 5), 1.5 + r / 4, group=g),
        "alpha must be equal on all ranks, got 1.5 on rank 0, 1.75 on rank 1",
    ),
    "entmax, tensor alpha": (
        lambda g, r: fd.entmax(zeros(3, 5), torch.tensor(1.5 + r / 4), group=g),
        "alpha must be equal on all ranks, got shape (), torch.float32, [1.5] (checksum",
    ),
    "loss, rows": (
        lambda g, r: fd.entmax_loss(zeros(3 + r, 5), torch.arange(3 + r), group=g),
        "scores must be equal on all ranks, got shape (3, …), torch.float32 on rank 0, shape (4, …)",
    ),
    "loss, targets": (
        lambda g, r: fd.entmax_loss(zeros(3, 5), INDEX + r, group=g),
        "target must be equal on all ranks, got shape (3,), torch.int64, [0, 1, 2] (checksum",
    ),
    "loss, reduction": (
        lambda g, r: fd.entmax_loss(zeros(3, 5), INDEX, group=g, reduction="sum" if r else "mean"),
        "reduction must be equal on all ranks, got mean on rank 0, sum on rank 1",
    ),
    "layer, hidden": (
        lambda g, r: fd.linear_entmax_loss(torch.full((3, 2), float(r)), zeros(4, 2), INDEX, group=g),
        "hidden must be equal on all ranks, got shape (3, 2), torch.float32, [0.0, 0.0, 0.0",
    ),
    "layer, bias": (
        lambda g, r: fd.linear_entmax_loss(zeros(3, 2), zeros(4, 2), INDEX, zeros(4) if r else None, group=g),
        "bias must be equal on all ranks, got None on rank 0, shape (…,), torch.float32 on rank 1",
    ),
    "attention, omega": (
        lambda g, r: fd.attention(zeros(4, 8), zeros(4, 8), zeros(4, 8), fenchel.Tsallis(1.5 + r / 4), group=g),
        "omega must be equal on all ranks, got Tsallis(alpha=1.5) on rank 0, Tsallis(alpha=1.75) on rank 1",
    ),
    "memory, values of queries": (
        lambda g, r: memory(g).step(torch.tensor([1.0, float(r), 0.0])),
        "query must be equal on all ranks, got shape (1, 3), torch.float32, [1.0, 0.0, 0.0] (checksum",
    ),
}


def told(group: Any, rank: int, ranks: int, asked: bool) -> dict[str, str]:
    """What this rank is told of every case."""
    found = {}
    os.environ["FENCHEL_CHECK_RANKS"] = "1" if asked else "0"
    try:
        for name, (call, _) in (ALWAYS | ASKED if asked else ALWAYS).items():
            try:
                call(group, rank)
                found[name] = "nothing"
            except ValueError as error:
                found[name] = str(error)
    finally:
        del os.environ["FENCHEL_CHECK_RANKS"]
    return found


def calls_that_agree(group: Any, rank: int, ranks: int) -> list[int]:
    """How many collectives a loss takes, without and with the checks, for parts of different sizes."""
    found = []
    for asked in ("0", "1"):
        os.environ["FENCHEL_CHECK_RANKS"] = asked
        with Counted() as counted:
            learned = torch.tensor(1.5, requires_grad=True)
            fd.entmax_loss(torch.randn(3, 5 + rank), INDEX, learned, group=group)
        found.append(len(counted.calls))
        rows = zeros(4 + rank, 8).requires_grad_()
        fd.attention(rows, rows, rows, fenchel.Tsallis(1.5, learnable=True), group=group, is_causal=True)
        fd.linear_entmax_loss(zeros(3, 2).bfloat16(), zeros(4 + rank, 2).bfloat16(), INDEX, group=group)
        memory(group).retrieve(torch.ones(2, 3))
    del os.environ["FENCHEL_CHECK_RANKS"]
    return found


@pytest.mark.parametrize("asked", [False, True])
def test_arguments_that_differ_are_named_on_all_ranks(ranks: Ranks, asked: bool) -> None:
    answers = ranks.run("told", asked, ranks=2)
    for name, (_, message) in (ALWAYS | ASKED if asked else ALWAYS).items():
        for answer in answers:
            assert message in answer[name], name
    assert answers[0]["memory, patterns"] == "on rank 1: " + answers[1]["memory, patterns"]


def test_arguments_that_agree_pass_and_cost_one_collective_where_asked_for(ranks: Ranks) -> None:
    for usual, asked in ranks.run("calls_that_agree", ranks=3):
        assert asked == usual + 1


def test_many_ranks_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCHEL_CHECK_RANKS", "1")
    with pytest.raises(ValueError, match=r"alpha must be equal on all ranks, got 1\.5 on rank 0, 2\.0 on rank 7"):
        rehearse(lambda rank, group: fd.entmax(zeros(2, 3), 1.5 if rank < 7 else 2.0, group=group), 20)


def test_a_group_that_is_none_is_named() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match=r"group must be a torch\.distributed\.ProcessGroup, .* got 'tp'"):
            fd.entmax(zeros(3), group="tp")
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(TypeError, match="function must be a function of a rank and a group, got int"):
        rehearse(3, 2)


def test_omega_without_a_level_is_refused_when_a_memory_is_made() -> None:
    with pytest.raises(ValueError, match="omega must have a level"):
        rehearse(lambda rank, group: fd.ShardedMemory(torch.eye(3), fenchel.Fused(0.1), group=group), 2)
