"""Memories whose patterns are spread over ranks: the answers of one process, certificates, files, ranks that end."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import fenchel
import fenchel.distributed
from fenchel.distributed import ShardedMemory, context
from fenchel.hopfield import Memory
from ranks import Ranks, part, split, started

EXACT = {"rtol": 1e-12, "atol": 1e-12}
OMEGAS = [
    fenchel.Tsallis(1.5),
    fenchel.Gini(),
    fenchel.Norm(2.0),
    fenchel.KSubsets(3),
    fenchel.Shannon(),
    0.5 * fenchel.Tsallis(1.3),
    fenchel.Hard(),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(__name__) as processes:
        yield processes


def drawn(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(count, width, dtype=torch.float64, generator=generator)
    queries = patterns[::5] + 0.4 * torch.randn(len(patterns[::5]), width, dtype=torch.float64, generator=generator)
    return patterns, queries


def check_memory(group: Any, rank: int, ranks: int, how: str, chunk: int | None) -> None:
    patterns, queries = drawn(40, 6)
    patterns[7] = patterns[39] = patterns[5]  # copies share their weight, on the same rank or not
    sizes = split(40, ranks, how)
    mine = part(40, sizes, rank)
    for omega in OMEGAS:
        plain = Memory(patterns, omega, beta=0.7)
        memory = ShardedMemory(patterns[mine], omega, beta=0.7, group=group, chunk_size=chunk)
        assert_close(memory.step(queries), plain.step(queries), **EXACT)
        assert_close(memory.energy(queries), plain.energy(queries), **EXACT)
        found, expected = memory.retrieve(queries), plain.retrieve(queries)
        assert_close(found.state, expected.state, rtol=1e-10, atol=1e-10)
        assert (found.steps - expected.steps).abs().max() <= 1  # the last step may change the last bit alone
        assert torch.equal(found.converged, expected.converged)
        if found.weights is not None:
            starts = torch.tensor([sum(sizes[:r]) for r in range(ranks)])
            dense = torch.zeros(len(queries), 40, dtype=torch.float64)
            some = found.weights > 0
            assert ((found.ranks >= 0) == some).all()
            places = torch.where(some, starts[found.ranks.clamp_min(0)] + found.places, 0)
            dense.scatter_add_(-1, places, found.weights)
            assert_close(dense, expected.weights, rtol=1e-9, atol=1e-9)
        assert (plain.weights(queries) > 0).sum(-1).max() > 1
        if omega.margin is not None and omega.mass(40) == 1:
            ours, theirs = memory.certify(), plain.certify()
            for name in ("separation", "radius", "min_beta"):
                assert_close(getattr(ours, name), getattr(theirs, name)[mine], **EXACT)
            assert torch.equal(ours.stationary, theirs.stationary[mine])


def check_shapes(group: Any, rank: int, ranks: int) -> None:
    patterns, queries = drawn(40, 6)
    mine = part(40, split(40, ranks, "uneven"), rank)
    memory = ShardedMemory(patterns[mine].float(), group=group)
    plain = Memory(patterns.float())
    assert_close(memory.step(queries[0].float()), plain.step(queries[0].float()))
    batch = queries.float().reshape(2, 4, 6)
    found = memory.retrieve(batch)
    assert found.state.shape == batch.shape
    assert found.weights.shape[:2] == found.ranks.shape[:2] == found.places.shape[:2] == (2, 4)
    broken = queries.clone()
    broken[1] = torch.nan
    answer = ShardedMemory(patterns[mine], group=group).step(broken)
    assert answer[1].isnan().all()
    assert_close(answer[[0, 2]], Memory(patterns).step(broken[[0, 2]]), **EXACT)


def check_changes(group: Any, rank: int, ranks: int) -> None:
    patterns, queries = drawn(40, 6)
    memory = ShardedMemory(patterns[:0] if rank else patterns[:20], group=group)
    if rank == 1:
        memory.add(patterns[20:])
        memory.add(patterns[0])
    assert_close(memory.step(queries), Memory(torch.cat([patterns, patterns[:1]])).step(queries), **EXACT)
    if rank == 0:
        memory.remove([0, 5])
    if rank == 1:
        memory.remove(torch.arange(21) >= 15)
    left = torch.cat([patterns[1:5], patterns[6:20], patterns[20:35]])
    assert_close(memory.step(queries), Memory(left).step(queries), **EXACT)


def check_other_group(group: Any, rank: int, ranks: int) -> None:
    """A group of ranks 1 and 3 alone: numbers of ranks in the group are not those of the world."""
    own = torch.distributed.new_group([1, 3])
    if rank not in (1, 3):
        return
    place, (patterns, queries) = (rank - 1) // 2, drawn(40, 6)
    mine = part(40, (13, 27), place)
    memory, plain = ShardedMemory(patterns[mine], group=own), Memory(patterns)
    assert_close(memory.step(queries), plain.step(queries), **EXACT)
    assert_close(memory.certify().radius, plain.certify().radius[mine], **EXACT)
    rows = queries @ patterns.T
    assert_close(fenchel.distributed.entmax(rows[:, mine], group=own), fenchel.entmax(rows)[:, mine], **EXACT)
    for context.GATHERED in (0, 1 << 30):
        found = fenchel.distributed.attention(patterns[mine], patterns[mine], patterns[mine], group=own, is_causal=True)
        assert_close(found, fenchel.attention(patterns, patterns, patterns, is_causal=True)[mine], **EXACT)


def check_file(group: Any, rank: int, ranks: int, folder: str) -> None:
    patterns, queries = drawn(40, 6)
    path = Path(folder) / f"{rank}.bin"
    patterns[part(40, split(40, ranks, "even"), rank)].numpy().tofile(path)
    before = path.read_bytes(), path.stat().st_mtime_ns
    held = np.memmap(path, dtype=np.float64, mode="r").reshape(-1, 6)
    assert isinstance(held, np.memmap)
    memory = ShardedMemory(held, group=group, chunk_size=5)
    plain = Memory(patterns)
    assert_close(memory.retrieve(queries).state, plain.retrieve(queries).state, **EXACT)
    assert_close(memory.certify().radius, plain.certify().radius[part(40, split(40, ranks, "even"), rank)], **EXACT)
    assert "patterns" not in memory.state_dict()
    with pytest.raises(TypeError, match="in a file are not changed"):
        memory.add(queries)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def refused(group: Any, rank: int, ranks: int) -> list[str]:
    found = []
    for call in (
        lambda: ShardedMemory(torch.zeros(0, 3), group=group).step(torch.zeros(3)),
        lambda: ShardedMemory(torch.ones(2, 3), fenchel.KSubsets(9), group=group).step(torch.zeros(3)),
        lambda: ShardedMemory(torch.ones(2, 3), fenchel.Fused(0.1), group=group).step(torch.zeros(3)),
        lambda: ShardedMemory(torch.ones(2, 3 + rank), group=group),
        lambda: ShardedMemory(torch.ones(2, 3), group=group).step(torch.zeros(3, requires_grad=True)),
    ):
        try:
            call()
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
    return found


def die(group: Any, rank: int, ranks: int, how: str) -> tuple[float, str]:
    """One rank is killed, or stands still; the others report what they were told, and after how many seconds."""
    Memory(torch.eye(3), chunk_size=2).step(torch.ones(3))  # loads what takes longer than the timeout
    memory = ShardedMemory(torch.eye(3), group=group)
    memory.step(torch.ones(3))
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(9)
        return 0.0, ""
    begin = time.monotonic()
    try:
        memory.step(torch.ones(3))
    except RuntimeError as error:
        return time.monotonic() - begin, str(error)
    return 0.0, "nothing"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_spread_memory_equals_one_of_one_process(ranks: Ranks, count: int) -> None:
    for how, chunk in (("even", None), ("uneven", 4), ("empty", None)):
        ranks.run("check_memory", how, chunk, ranks=count)


def test_shapes_and_broken_queries(ranks: Ranks) -> None:
    ranks.run("check_shapes", ranks=3)


def test_patterns_are_added_and_removed_by_single_ranks(ranks: Ranks) -> None:
    ranks.run("check_changes", ranks=3)


def test_a_group_of_other_ranks_than_the_first(ranks: Ranks) -> None:
    ranks.run("check_other_group")


def test_patterns_in_files_are_read_and_never_touched(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run("check_file", str(tmp_path), ranks=3)


def test_what_cannot_be_is_an_error(ranks: Ranks) -> None:
    for empty, k, ordered, width, learns in ranks.run("refused", ranks=2):
        assert "no rank has any" in empty
        assert "k must be at most the number of patterns of all ranks, 4" in k
        assert "omega must have a level" in ordered
        assert "one width on all ranks, got widths from 3 to 4" in width
        assert "not differentiable" in learns


def test_a_rank_that_is_killed_ends_the_others_within_the_timeout() -> None:
    with started(__name__, timeout=20.0) as own:
        answers = own.run("die", "killed", ranks=3, dies=1)
        own.processes[1].join(10)
        assert own.processes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        seconds, message = answers[rank]
        assert f"rank {rank} of 3 cannot go on: another rank has ended" in message
        assert seconds < 20


def test_a_rank_that_stands_still_ends_the_others_within_the_timeout() -> None:
    with started(__name__, timeout=5.0) as own:
        answers = own.run("die", "sleeps", ranks=3)
    for seconds, message in (answers[0], answers[2]):
        assert "another rank has ended, raised an error, or did not take part within the timeout" in message
        assert seconds < 60  # the default timeout is half an hour
