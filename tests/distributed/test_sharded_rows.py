"""Rows whose entries are spread over ranks: values, gradients and collectives of maps and losses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import fenchel
from fenchel import distributed as fd
from ranks import Counted, RankError, Ranks, part, split, started

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(__name__) as processes:
        yield processes


# -- on the ranks ------------------------------------------------------------------------------------------------------


def scores_and_targets(rows: int, classes: int, sigma: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = sigma * torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    return scores, torch.randint(0, classes, (rows,), generator=generator)


def check_map(group: Any, rank: int, ranks: int, sizes: tuple[int, ...], alpha: float, learned: bool, seed: int) -> int:
    """Compare with one process: values, gradients, alpha's gradient; return the largest support."""
    rows = 5
    scores, _ = scores_and_targets(rows, sum(sizes), 1.5, seed)
    scores[1, ::3] = -torch.inf
    scores[2] = -torch.inf
    if sum(sizes) > 3:
        scores[3, -1] = torch.nan
    mask = torch.rand(rows, sum(sizes), generator=torch.Generator().manual_seed(seed)) < 0.8
    mask[3, -1] = True
    direction = torch.randn(rows, sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    own = part(sum(sizes), sizes, rank)
    a = torch.full((rows, 1), alpha, dtype=torch.float64) if learned else alpha
    whole_a = a.clone().requires_grad_() if learned else a
    whole = scores.clone().requires_grad_()
    expected = fenchel.entmax(whole, whole_a, mask=mask)
    expected.backward(direction)
    part_a = a.clone().requires_grad_() if learned else a
    mine = scores[:, own].clone().requires_grad_()
    found = fd.entmax(mine, part_a, mask=mask[:, own], group=group)
    found.backward(direction[:, own])
    assert_close(found, expected[:, own], **EXACT, equal_nan=True)
    assert_close(mine.grad, whole.grad[:, own], **EXACT, equal_nan=True)
    if learned:
        fine = ~whole_a.grad.isnan()
        assert fine.sum() >= rows - 1
        assert_close(part_a.grad[fine], whole_a.grad[fine], rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        assert_close(fd.entmax(mine, part_a, mask=mask[:, own], group=group), found, equal_nan=True, rtol=0, atol=0)
    return int((expected > 0).sum(-1).max())


def check_loss(
    group: Any, rank: int, ranks: int, sizes: tuple[int, ...], alpha: float, learned: bool, reduction: str, seed: int
) -> int:
    """The same for the loss, with ignored rows, a masked target, and a row of NaN that is ignored."""
    rows, classes = 6, sum(sizes)
    scores, target = scores_and_targets(rows, classes, 1.5, seed)
    scores[2] = torch.nan
    target[2] = -100
    scores[4, (target[4] + 1) % classes] = -torch.inf
    mask = torch.ones(rows, classes, dtype=torch.bool)
    if reduction == "none":
        mask[5, target[5]] = False
    own = part(classes, sizes, rank)
    a = torch.tensor(alpha, dtype=torch.float64) if learned else alpha
    whole_a, part_a = (a.clone().requires_grad_() if learned else a for _ in range(2))
    whole, mine = scores.clone().requires_grad_(), scores[:, own].clone().requires_grad_()
    expected = fenchel.entmax_loss(whole, target, whole_a, mask=mask, reduction=reduction)
    found = fd.entmax_loss(mine, target, part_a, mask=mask[:, own], group=group, reduction=reduction)
    assert_close(found, expected, **EXACT)
    weights = torch.linspace(0.5, 1.5, rows, dtype=torch.float64) if reduction == "none" else torch.tensor(2.0).double()
    expected.backward(weights)
    found.backward(weights)
    assert_close(mine.grad, whole.grad[:, own], **EXACT)
    if learned:
        assert_close(part_a.grad, whole_a.grad, rtol=1e-10, atol=1e-12)
    return int((fenchel.entmax(scores[target >= 0], alpha) > 0).sum(-1).max())


def check_precision(group: Any, rank: int, ranks: int, dtype: torch.dtype, alpha: float) -> None:
    """Errors against float64 are no larger than those of one process, up to the last digit."""
    rows, classes = 32, 400
    scores, target = scores_and_targets(rows, classes, 2.0)
    scores = scores.to(dtype)
    own = part(classes, split(classes, ranks, "uneven"), rank)
    exact, plain, mine = scores.double().requires_grad_(), scores.clone().requires_grad_(), scores[:, own].clone()
    mine.requires_grad_()
    losses = [
        fenchel.entmax_loss(exact, target, alpha),
        fenchel.entmax_loss(plain, target, alpha),
        fd.entmax_loss(mine, target, alpha, group=group),
    ]
    assert losses[2].dtype == mine.dtype == dtype
    for loss in losses:
        loss.backward()
    assert mine.grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    error, usual = ((x.detach().double() - losses[0].detach()).abs() for x in (losses[2], losses[1]))
    assert error <= usual + 2 * eps * losses[0].detach()
    error = (mine.grad.double() - exact.grad[:, own]).abs().max()
    usual = (plain.grad.double() - exact.grad).abs().max()
    assert error <= usual + eps * exact.grad.abs().max()
    chosen = [fenchel.entmax(exact, alpha), fenchel.entmax(plain, alpha), fd.entmax(mine, alpha, group=group)]
    assert chosen[2].dtype == dtype
    error = (chosen[2].double() - chosen[0][:, own]).abs().max()
    assert error <= (chosen[1].double() - chosen[0]).abs().max() + eps


def count_collectives(
    group: Any, rank: int, ranks: int, alpha: float, sigma: float, learned: bool
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    rows, classes = 16, 4000
    scores, target = scores_and_targets(rows, classes, sigma)
    mine = scores[:, part(classes, split(classes, ranks, "even"), rank)].float().requires_grad_()
    a = torch.tensor(alpha, requires_grad=True) if learned else alpha
    with Counted() as forward:
        loss = fd.entmax_loss(mine, target, a, group=group)
    with Counted() as backward:
        loss.backward()
    assert mine.grad.abs().sum() > 0
    return forward.calls, backward.calls


def fail(group: Any, rank: int, ranks: int, alpha: float, target: int) -> None:
    fd.entmax_loss(torch.zeros(2, 3), torch.tensor([0, target]), alpha, group=group)


def fail_alone(group: Any, rank: int, ranks: int) -> None:
    if rank == 1:
        raise ArithmeticError("rank 1 gives up")
    fd.entmax(torch.zeros(2, 3), group=group)


def refuse_second_derivatives(group: Any, rank: int, ranks: int) -> bool:
    scores = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        fd.entmax_loss(scores, torch.tensor([0, 1]), group=group), scores, create_graph=True
    )
    try:
        gradient.sum().backward()
    except NotImplementedError as error:
        return "differentiable once" in str(error)
    return False


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("how", ["even", "uneven", "empty"])
def test_maps_and_losses_equal_those_of_one_process(ranks: Ranks, count: int, how: str) -> None:
    sizes = split(29, count, how)
    for alpha in (1.0, 1.3, 1.5, 2.0):
        for learned in (False, True):
            assert min(ranks.run("check_map", sizes, alpha, learned, 0, ranks=count)) > 1
            assert min(ranks.run("check_loss", sizes, alpha, learned, "mean", 1, ranks=count)) > 1
    for reduction in ("none", "sum"):
        ranks.run("check_loss", sizes, 1.5, True, reduction, 2, ranks=count)


@given(
    alpha=st.floats(1.0, 2.0),
    sizes=st.lists(st.integers(0, 40), min_size=2, max_size=4).filter(lambda s: sum(s) >= 2),
    learned=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_alpha_and_any_split(ranks: Ranks, alpha: float, sizes: list[int], learned: bool, seed: int) -> None:
    ranks.run("check_map", tuple(sizes), alpha, learned, seed, ranks=len(sizes))
    ranks.run("check_loss", tuple(sizes), alpha, learned, "mean", seed, ranks=len(sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_narrow_numbers_are_as_exact_as_in_one_process(ranks: Ranks, dtype: torch.dtype, alpha: float) -> None:
    ranks.run("check_precision", dtype, alpha, ranks=3)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_collectives_are_few_and_small(ranks: Ranks, count: int, sigma: float) -> None:
    rows = 16
    for alpha, most in ((1.0, 3), (1.5, 7), (2.0, 7)):
        forward, backward = ranks.run("count_collectives", alpha, sigma, False, ranks=count)[0]
        assert 1 < len(forward) <= most
        assert all(name == "all_reduce" and numbers <= 4 * rows for name, numbers in forward)
        assert backward == []
    forward, backward = ranks.run("count_collectives", 1.4, sigma, True, ranks=count)[0]
    assert len(forward) <= 9
    assert backward == []


def test_second_derivatives_are_refused(ranks: Ranks) -> None:
    assert all(ranks.run("refuse_second_derivatives", ranks=2))


def test_wrong_arguments_are_named_on_all_ranks() -> None:
    with started(__name__) as own, pytest.raises(RankError, match=r"class indices in \[0, 5\], got 6"):
        own.run("fail", 1.5, 6, ranks=2)


def test_an_exception_on_one_rank_ends_all() -> None:
    with started(__name__, timeout=5.0) as own:
        with pytest.raises(RankError, match="rank 1 gives up"):
            own.run("fail_alone", ranks=3)
        assert not any(process.is_alive() for process in own.processes)


def test_without_a_group_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        fd.entmax(torch.zeros(3))
