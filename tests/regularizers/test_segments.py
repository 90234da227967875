"""segment_entmax: one choice per group, by the answer of single rows to 30 digits."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import oracles
from fenchel import segment_entmax
from fenchel.regularizers.packed import Segments

INF = math.inf


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def groups(sizes: list[int], seed: int | None = None) -> Tensor:
    """An index with groups of these sizes, in a random order if there is a seed."""
    index = [g for g, size in enumerate(sizes) for _ in range(size)]
    if seed is not None:
        random.Random(seed).shuffle(index)
    return torch.tensor(index, dtype=torch.long)


def expected(scores: Tensor, index: Tensor, alpha: float) -> Tensor:
    """Group after group, by the oracle of single rows."""
    p = torch.zeros_like(scores)
    for g in set(index.tolist()):
        own = [i for i, each in enumerate(index.tolist()) if each == g]
        row = [scores[i].item() for i in own]
        if alpha == INF:
            best = [value == max(row) for value in row]
            found = [each / sum(best) for each in best]
        else:
            found = [float(each) for each in oracles.entmax(row, alpha)]
        p[own] = torch.tensor(found, dtype=scores.dtype)
    return p


SIZES = [
    [3, 3, 3, 3],
    [1, 7, 2, 0, 40, 3, 1],
    [0, 0, 5, 0],
    [1, 0, 1, 1, 0, 0, 0, 1],
    [130, 1, 1, 1, 1, 2, 3],
]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 1.5, 2.0, INF])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_group_is_a_row_of_entmax(sizes: list[int], seed: int | None, alpha: float) -> None:
    index = groups(sizes, seed)
    scores = drawn(len(index), seed=len(index))
    found = segment_entmax(scores, index, alpha, len(sizes))
    torch.testing.assert_close(found, expected(scores, index, alpha), rtol=0, atol=1e-14)


def test_further_dimensions_are_chosen_in_alone() -> None:
    index, scores = groups([4, 1, 9, 2], 0), drawn(16, 3, 2)
    found = segment_entmax(scores, index, 1.5)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(found[:, i, j], expected(scores[:, i, j], index, 1.5), rtol=0, atol=1e-14)


def test_an_alpha_for_each_group() -> None:
    index, scores, alpha = groups([4, 1, 0, 9, 2], 0), drawn(16), torch.tensor([1.0, 1.5, 1.2, 2.0, 1.75]).double()
    found = segment_entmax(scores, index, alpha)
    for g, own in enumerate(alpha.tolist()):
        torch.testing.assert_close(found[index == g], expected(scores, index, own)[index == g], rtol=0, atol=1e-13)
    each = segment_entmax(scores.unsqueeze(-1).expand(-1, 2), index, torch.stack([alpha, alpha + 0.1], -1))
    torch.testing.assert_close(each[:, 0], found, rtol=0, atol=0)
    torch.testing.assert_close(each[:, 1], segment_entmax(scores, index, alpha + 0.1), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [[3, 3, 3], [1, 9, 2, 0, 4]], ids=str)
def test_derivatives_to_second_order(sizes: list[int]) -> None:
    index = groups(sizes, 1)
    scores = drawn(len(index), 2, seed=4).requires_grad_()
    alpha = torch.linspace(1.2, 1.8, len(sizes), dtype=torch.float64, requires_grad=True)
    # Away from the edges of supports, where finite differences mean nothing.
    p = segment_entmax(scores, index, alpha).detach()
    scores = torch.where((p > 0) & (p < 0.05), scores.detach() + 0.3, scores.detach()).requires_grad_()

    def choose(scores: Tensor, alpha: Tensor) -> Tensor:
        return segment_entmax(scores, index, alpha)

    assert gradcheck(choose, (scores, alpha), atol=1e-5)
    assert gradgradcheck(choose, (scores, alpha), atol=1e-4)
    assert gradcheck(lambda s: segment_entmax(s, index, 1.0), (scores,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_kept_and_rounded_once(dtype: torch.dtype) -> None:
    index = groups([5, 2, 11], 2)
    scores = drawn(18).to(dtype)
    found = segment_entmax(scores, index)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected(scores.double(), index, 1.5).to(dtype), atol=1e-6, rtol=1e-2)


def test_masked_and_spoilt_groups_touch_no_other() -> None:
    index = torch.tensor([0, 1, 0, 2, 1, 2, 3])
    scores = torch.tensor([1.0, -INF, -INF, math.nan, -INF, 0.0, INF]).requires_grad_()
    found = segment_entmax(scores, index)
    assert found[[0, 1, 2, 4]].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert found[[3, 5, 6]].isnan().all()
    found[[0, 1, 2, 4]].sum().backward()
    assert scores.grad is not None
    assert scores.grad[[0, 1, 2, 4]].tolist() == [0.0] * 4


def test_no_entries_and_no_groups() -> None:
    none = torch.zeros(0, dtype=torch.long)
    assert segment_entmax(torch.zeros(0), none).shape == (0,)
    assert segment_entmax(torch.zeros(0, 4), none, dim_size=3).shape == (0, 4)
    assert segment_entmax(torch.zeros(3, 0), torch.tensor([0, 1, 1])).shape == (3, 0)


def test_any_integers_name_groups() -> None:
    scores, index = drawn(6), torch.tensor([2, 0, 2, 1, 0, 2])
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(segment_entmax(scores, index.to(dtype)), segment_entmax(scores, index))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((torch.tensor([1, 2]), torch.tensor([0, 0])), TypeError, "scores"),
        ((torch.tensor(1.0), torch.tensor([0])), ValueError, "scores"),
        ((torch.ones(2), torch.tensor([0.0, 1.0])), TypeError, "index"),
        ((torch.ones(2), torch.tensor([0, 1, 1])), ValueError, r"index must have shape \(2,\)"),
        ((torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.long)), ValueError, "index"),
        ((torch.ones(2), torch.tensor([0, -1])), ValueError, "index must be at least 0, got -1"),
        (
            (torch.ones(2), torch.tensor([0, 3]), 1.5, 3),
            ValueError,
            r"index must be at least 0 and less than dim_size, 3, got 3",
        ),
        ((torch.ones(2), torch.tensor([0, 1]), 0.0), ValueError, "alpha"),
        (
            (torch.ones(2), torch.tensor([0, 1]), torch.ones(3), 2),
            ValueError,
            "alpha must be a number or have one value",
        ),
        (
            (torch.ones(2), torch.tensor([0, 1]), torch.ones(2, 2)),
            ValueError,
            "alpha must be a number or have one value",
        ),
        ((torch.ones(2), torch.tensor([0, 1]), 1.5, -1), ValueError, "dim_size"),
        ((torch.ones(2), torch.tensor([0, 1]), 1.5, 2.0), TypeError, "dim_size"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        segment_entmax(*arguments)


def test_vmap_has_one_index_for_all() -> None:
    index, scores = groups([2, 5, 1], 0), drawn(3, 8)
    found = torch.func.vmap(lambda s: segment_entmax(s, index))(scores)
    torch.testing.assert_close(found, torch.stack([expected(s, index, 1.5) for s in scores]), rtol=0, atol=1e-14)
    with pytest.raises(RuntimeError, match="one index for all"):
        torch.func.vmap(segment_entmax)(scores, index.expand(3, -1))


@pytest.mark.parametrize("count", [1, 2, 17, 16384, 16385, 50000])
@pytest.mark.parametrize("longest", [1, 30, 20000])
def test_the_groups_of_long_indices_are_found(count: int, longest: int) -> None:
    """Runs that end anywhere in what is compared together, or with it."""
    sizes = []
    draw = random.Random(count + longest)
    while sum(sizes) < count:
        sizes.append(min(draw.randint(1, longest), count - sum(sizes)))
    values = list(itertools.accumulate(draw.randint(1, 3) for _ in sizes))
    index = torch.tensor([v for v, size in zip(values, sizes, strict=True) for _ in range(size)])
    segments, ends = Segments.of_index(index)
    starts = [sum(sizes[:k]) for k in range(len(sizes))] if len(sizes) < 3000 else None
    assert segments.table[1].tolist() == sizes
    assert segments.table[2].tolist() == values
    assert starts is None or segments.table[0].tolist() == starts
    assert segments.order is None
    assert segments.sizes == (min(sizes), max(sizes))
    assert ends == (values[0], values[-1])


def test_one_step_down_in_a_long_index_is_noticed() -> None:
    index = torch.arange(40000) // 3
    for place in (0, 15, 16383, 16384, 39998):
        changed = index.clone()
        changed[place] = index[place] + 1_000_000
        segments, ends = Segments.of_index(changed)
        assert segments.order is not None
        assert changed[segments.order].tolist() == sorted(changed.tolist())
        assert ends == (min(changed.tolist()), max(changed.tolist()))
