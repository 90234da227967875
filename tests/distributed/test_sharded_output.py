"""Output layers whose classes are spread over ranks: values, gradients, collectives, and what is held."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fenchel
from fenchel import distributed as fd
from ranks import Counted, Ranks, part, split, started

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(__name__) as processes:
        yield processes


def layer(tokens: int, classes: int, width: int, spread: float, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, dtype=torch.float64, generator=generator)
    weight = spread * width**-0.5 * torch.randn(classes, width, dtype=torch.float64, generator=generator)
    bias = 0.1 * torch.randn(classes, dtype=torch.float64, generator=generator)
    target = torch.randint(0, classes, (tokens,), generator=generator)
    return hidden, weight, bias, target


def check_layer(
    group: Any,
    rank: int,
    ranks: int,
    sizes: tuple[int, ...],
    alpha: float,
    learned: bool,
    reduction: str,
    spread: float,
    dtype: torch.dtype,
    with_bias: bool,
) -> int:
    classes = sum(sizes)
    hidden, weight, bias, target = layer(37, classes, 5, spread)
    target[3] = -100
    hidden[3] = torch.nan
    bias[(target[0] + 1) % classes] = -torch.inf
    own = part(classes, sizes, rank)
    a = torch.tensor(alpha, dtype=torch.float64) if learned else alpha
    whole = [t.clone().to(dtype).double().requires_grad_() for t in (hidden, weight, bias)]
    mine = [t.clone().to(dtype).requires_grad_() for t in (hidden, weight[own], bias[own])]
    whole_a, part_a = (a.clone().requires_grad_() if learned else a for _ in range(2))
    logits = torch.where((target >= 0).unsqueeze(-1), whole[0], 0.0) @ whole[1].T + (whole[2] if with_bias else 0.0)
    expected = fenchel.entmax_loss(logits, target, whole_a, reduction=reduction)
    given = mine if with_bias else mine[:2]
    found = fd.linear_entmax_loss(
        given[0], given[1], target, *given[2:], alpha=part_a, group=group, reduction=reduction
    )
    assert found.dtype == dtype
    weights = torch.linspace(0.5, 1.5, 37, dtype=torch.float64) if reduction == "none" else torch.tensor(2.0).double()
    expected.backward(weights)
    found.backward(weights.to(dtype))
    eps = torch.finfo(dtype).eps
    close = EXACT if dtype == torch.float64 else {"rtol": 16 * eps, "atol": 8 * eps}
    assert_close(found.double(), expected, **close)
    kept = target >= 0
    assert_close(mine[0].grad[kept].double(), whole[0].grad[kept], **close)
    assert (mine[0].grad[~kept] == 0).all()
    assert_close(mine[1].grad.double(), whole[1].grad[own], **close)
    if with_bias:
        assert_close(mine[2].grad.double(), whole[2].grad[own], **close)
    if learned:
        assert_close(part_a.grad, whole_a.grad, rtol=1e-10 if dtype == torch.float64 else 1e-4, atol=1e-12)
    return int((fenchel.entmax(logits[kept], alpha) > 0).sum(-1).max())


class Largest(TorchDispatchMode):
    """The largest number of entries of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.entries = max(self.entries, each.numel())
        return result


def measure(group: Any, rank: int, ranks: int, alpha: float, spread: float) -> tuple[int, list[Any], list[Any]]:
    """The largest tensor of a step, and the collectives of its two passes; 400 tokens, 600 classes per rank."""
    hidden, weight, _, target = layer(400, 600 * ranks, 8, spread)
    own = weight[rank * 600 : (rank + 1) * 600].float().requires_grad_()
    hidden = hidden.float().requires_grad_()
    with Largest() as largest:
        with Counted() as forward:
            loss = fd.linear_entmax_loss(hidden, own, target, alpha=alpha, group=group)
        with Counted() as backward:
            loss.backward()
    return largest.entries, forward.calls, backward.calls


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("how", ["even", "uneven", "empty"])
def test_a_spread_layer_equals_the_plain_formula(ranks: Ranks, count: int, how: str) -> None:
    for classes, spread in ((40, 1.0), (300, 4.0)):  # all logits have mass on some tokens, and few do
        sizes = split(classes, count, how)
        for alpha in (1.0, 1.2, 1.5, 2.0):
            run = ("check_layer", sizes, alpha, alpha in (1.2, 1.5))
            assert min(ranks.run(*run, "mean", spread, torch.float64, True, ranks=count)) > 1
    for reduction in ("none", "sum"):
        for alpha in (1.0, 1.5):
            ranks.run("check_layer", sizes, alpha, alpha > 1, reduction, 4.0, torch.float64, False, ranks=count)
            ranks.run("check_layer", sizes, alpha, alpha > 1, reduction, 0.1, torch.float64, True, ranks=count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_numbers(ranks: Ranks, dtype: torch.dtype) -> None:
    for alpha in (1.0, 1.5):
        ranks.run("check_layer", split(300, 3, "uneven"), alpha, False, "mean", 3.0, dtype, True, ranks=3)


@pytest.mark.parametrize(("alpha", "spread"), [(1.5, 4.0), (2.0, 2.0), (1.0, 1.0), (1.1, 0.5)])
def test_no_rank_holds_tokens_times_its_classes(ranks: Ranks, alpha: float, spread: float) -> None:
    for entries, forward, backward in ranks.run("measure", alpha, spread, ranks=2):
        assert entries <= 400 * 600 // 2
        assert backward == [("all_reduce", 400 * 8)]  # the gradient of hidden
        if alpha in (1.5, 2.0):
            assert len(forward) <= 8  # whatever the number of blocks, of which the first is asked alone
