"""Attention over packed sequences is attention over each."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fenchel import Custom, Gini, Regularizer, Shannon, Tsallis, attention
from fenchel.streaming import Plan, using

QUERIES, KEYS = (3, 1, 20, 2, 0, 4), (5, 2, 30, 0, 3, 4)


def packed(lengths: tuple[int, ...], *rest: int, seed: int = 0) -> Tensor:
    values = torch.randn(sum(lengths), *rest, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nested.nested_tensor_from_jagged(values.requires_grad_(), torch.tensor([0, *lengths]).cumsum(0))


def inputs(keys: tuple[int, ...] = KEYS, heads: int | None = 2) -> list[Tensor]:
    sizes = () if heads is None else (heads,)
    made = [packed(QUERIES, *sizes, 4), packed(keys, *sizes, 4, seed=1), packed(keys, *sizes, 3, seed=2)]
    return made if heads is None else [x.transpose(1, 2) for x in made]


def check(found: Tensor, each: list[Tensor], given: list[Tensor]) -> None:
    assert found.is_nested
    for one, other in zip(found.unbind(), each, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in each]
    ours = sum((one * w).sum() for one, w in zip(found.unbind(), weights, strict=True))
    theirs = sum((one * w).sum() for one, w in zip(each, weights, strict=True))
    slopes = [torch.autograd.grad(total, given, retain_graph=True) for total in (ours, theirs)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one.values(), other.values(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("plan", [None, Plan("dense"), Plan("parts", rows=8), Plan("supports", rows=8)], ids=str)
@pytest.mark.parametrize("omega", [Tsallis(1.5), Gini(), Shannon(), 0.7 * Gini()], ids=str)
def test_packed_sequences_are_attended_to_one_by_one(
    omega: Regularizer, plan: Plan | None, is_causal: bool, heads: int | None
) -> None:
    given = inputs(heads=heads)
    with using(plan):
        found = attention(*given, omega, is_causal=is_causal)
    with using(Plan("dense")):
        each = [attention(*one, omega, is_causal=is_causal) for one in zip(*(x.unbind() for x in given), strict=True)]
    assert found.shape[0] == len(QUERIES)
    check(found, each, given)


@pytest.mark.parametrize("is_causal", [False, True])
def test_shannon_is_torch(is_causal: bool) -> None:
    lengths = tuple(max(n, 1) for n in KEYS)
    given = inputs(lengths)
    found = attention(*given, Shannon(), is_causal=is_causal)
    each = [sdpa(*one, is_causal=is_causal) for one in zip(*(x.unbind() for x in given), strict=True)]
    check(found, each, given)


def test_one_alpha_per_head_and_custom() -> None:
    given = inputs()
    alpha = torch.tensor([1.3, 1.8], dtype=torch.float64).reshape(2, 1, 1)
    for omega in (Tsallis(alpha), Custom(lambda p: 0.5 * p.square().sum(-1))):
        each = [attention(*one, omega) for one in zip(*(x.unbind() for x in given), strict=True)]
        check(attention(*given, omega), each, given)


def test_heads_of_keys_may_be_shared() -> None:
    query = packed(QUERIES, 4, 4).transpose(1, 2)
    key, value = (packed(KEYS, 2, 4, seed=i).transpose(1, 2) for i in (1, 2))
    each = [attention(*one) for one in zip(*(x.unbind() for x in (query, key, value)), strict=True)]
    check(attention(query, key, value), each, [query, key, value])


def test_no_keys_and_no_queries_give_zeros_and_nothing() -> None:
    query, key = packed((2, 1), 4), packed((0, 0), 4, seed=1)
    assert attention(query, key, key).values().count_nonzero() == 0
    empty = packed((0, 0), 4)
    assert attention(empty, query, query).values().shape == (0, 4)


def test_what_cannot_be_is_refused() -> None:
    query, key, value = inputs()
    dense = torch.zeros(6, 2, 3, 4, dtype=torch.float64)
    for arguments, options, match in (
        ((query, dense, value), {}, "all be nested or all dense"),
        ((query, key, value), {"attn_mask": torch.ones(1, dtype=torch.bool)}, "attn_mask must be None"),
        ((query, key, value), {"return_weights": True}, "return_weights must be False"),
        ((query, key, packed(QUERIES, 2, 3).transpose(1, 2)), {}, "value must have sequences of the lengths of key"),
        ((query, packed((1, 2), 2, 4).transpose(1, 2), value), {}, "key must have as many sequences"),
        ((query.transpose(1, 2), key, value), {}, "query must be ragged in the dimension before the last"),
        ((query, key, value, Tsallis(torch.full((6, 1, 1, 1), 1.5))), {}, "omega must have parameters that all"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            attention(*arguments, **options)
