"""Attention: scaled_dot_product_attention for Shannon, a loop over queries for every other regularizer.

One file, because all paths of attention go through the same comparisons.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from torch.nn import functional as F
from torch.testing import assert_close

import oracles
from fenchel import Gini, Hard, KSubsets, Norm, Regularizer, Shannon, SparseMAP, Tsallis, attention
from fenchel.streaming import Plan, using
from fenchel.structures import Matching

sdpa = F.scaled_dot_product_attention
EXACT = {"atol": 1e-12, "rtol": 1e-12}
OMEGAS = [Gini(), Tsallis(1.5), Tsallis(1.2), Tsallis(3), Norm(2), 0.5 * Tsallis(1.5), Hard()]
every_sparse_omega = pytest.mark.parametrize("omega", OMEGAS, ids=lambda o: str(o).replace("\n", ""))


PLANS = {"dense": Plan("dense"), "supports": Plan("supports"), "parts": Plan("parts", rows=8)}


@pytest.fixture(autouse=True, params=PLANS)
def _path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything thrice: with a matrix of weights, with lists of supports where these can be used, by few queries."""
    with using(PLANS[request.param]):
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def gradients(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    direction = torch.arange(1, output.numel() + 1, dtype=output.dtype).reshape(output.shape).cos()
    return torch.autograd.grad(output, inputs, direction, retain_graph=True)


# -- softmax --------------------------------------------------------------------------------------------

SIZES = [
    ((5, 4), (6, 4), (6, 4)),
    ((2, 5, 4), (2, 6, 4), (2, 6, 3)),
    ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7)),
    ((2, 1, 3, 5, 4), (2, 2, 3, 6, 4), (2, 2, 3, 6, 1)),
    ((2, 3, 5, 4), (1, 3, 6, 4), (1, 3, 6, 4)),
    ((2, 3, 5, 4), (2, 1, 6, 4), (2, 1, 6, 4)),
    ((1, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)),
    ((2, 1, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)),
    ((1, 5, 4), (2, 6, 4), (2, 6, 4)),
    ((3, 5, 4), (2, 3, 6, 4), (2, 1, 6, 4)),
    ((2, 3, 1, 4), (2, 3, 1, 4), (2, 3, 1, 4)),
]


@pytest.mark.parametrize(("q", "k", "v"), SIZES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.0, 0.7, -1.0])
def test_shannon_is_scaled_dot_product_attention(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], scale: float | None
) -> None:
    inputs = randn(*q), randn(*k), randn(*v)
    ours, theirs = attention(*inputs, Shannon(), scale=scale), sdpa(*inputs, scale=scale)
    assert_close(ours, theirs, **EXACT)
    assert_close(gradients(ours, *inputs), gradients(theirs, *inputs), **EXACT)


def masks(shape: tuple[int, ...]) -> Tensor:
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize(
    "shape", [(5, 6), (1, 6), (5, 1), (6,), (3, 5, 6), (2, 1, 5, 6), (2, 3, 1, 6), (2, 3, 5, 6)], ids=str
)
@pytest.mark.parametrize("kind", ["boolean", "float", "-inf"])
def test_masks_are_those_of_scaled_dot_product_attention(kind: str, shape: tuple[int, ...]) -> None:
    inputs = randn(2, 3, 5, 4), randn(2, 3, 6, 4), randn(2, 3, 6, 4)
    mask = masks(shape)
    if kind == "float":
        mask = torch.randn(shape, dtype=torch.float64)
    elif kind == "-inf":
        mask = torch.zeros(shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    full = mask.expand(2, 3, 5, 6)
    ours, theirs = attention(*inputs, Shannon(), attn_mask=mask), sdpa(*inputs, attn_mask=full)
    assert_close(ours, theirs, **EXACT)
    assert_close(gradients(ours, *inputs), gradients(theirs, *inputs), **EXACT)


@pytest.mark.parametrize(("targets", "sources"), [(5, 5), (3, 6), (6, 3), (1, 4), (4, 1)])
def test_causal_is_aligned_as_in_scaled_dot_product_attention(targets: int, sources: int) -> None:
    inputs = randn(2, targets, 4), randn(2, sources, 4), randn(2, sources, 3)
    ours, theirs = attention(*inputs, Shannon(), is_causal=True), sdpa(*inputs, is_causal=True)
    assert_close(ours, theirs, **EXACT)
    assert_close(gradients(ours, *inputs), gradients(theirs, *inputs), **EXACT)
    for omega in OMEGAS:
        _, weights = attention(*inputs, omega, is_causal=True, return_weights=True)
        assert (weights.triu(1) == 0).all()
        assert_close(weights.sum(-1), torch.ones(2, targets, dtype=torch.float64))


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 2), (6, 3), (4, 1), (4, 4)])
@pytest.mark.parametrize("batch", [(2,), (), (2, 3)], ids=str)
def test_grouped_queries_are_those_of_scaled_dot_product_attention(
    heads: int, groups: int, batch: tuple[int, ...]
) -> None:
    inputs = randn(*batch, heads, 5, 4), randn(*batch, groups, 6, 4), randn(*batch, groups, 6, 3)
    ours = attention(*inputs, Shannon())
    if len(batch) == 1:
        theirs = sdpa(*inputs, enable_gqa=True)
    else:
        shared = [inputs[0], *(x.repeat_interleave(heads // groups, -3) for x in inputs[1:])]
        theirs = sdpa(*shared)
    assert_close(ours, theirs, **EXACT)
    assert_close(gradients(ours, *inputs), gradients(theirs, *inputs), **EXACT)


def test_a_float_mask_receives_its_gradient() -> None:
    inputs = randn(2, 3, 5, 4), randn(2, 3, 6, 4), randn(2, 3, 6, 4), randn(3, 1, 6)
    ours = attention(*inputs[:3], Shannon(), attn_mask=inputs[3])
    theirs = sdpa(*inputs[:3], attn_mask=inputs[3].expand(2, 3, 5, 6))
    assert_close(gradients(ours, *inputs), gradients(theirs, *inputs), **EXACT)


@given(
    batch=st.lists(st.integers(0, 3), max_size=3),
    targets=st.integers(0, 4),
    sources=st.integers(1, 4),
    width=st.integers(1, 4),
    depth=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_shannon_is_scaled_dot_product_attention_for_every_size(
    batch: list[int], targets: int, sources: int, width: int, depth: int, seed: int
) -> None:
    torch.manual_seed(seed)
    query, key, value = randn(*batch, targets, width), randn(*batch, sources, width), randn(*batch, sources, depth)
    weights = torch.softmax((query @ key.mT).detach() / math.sqrt(width), -1)
    output, ours = attention(query, key, value, Shannon(), return_weights=True)
    assert_close(ours.detach(), weights, **EXACT)
    assert_close(output.detach(), weights @ value.detach(), **EXACT)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 0, 4), (2, 3, 4), (2, 3, 4)),
        ((0, 3, 4), (0, 3, 4), (0, 3, 4)),
        ((2, 0, 3, 4), (2, 0, 3, 4), (2, 0, 3, 4)),
        ((2, 3, 4), (2, 3, 4), (2, 3, 0)),
        ((2, 3, 4), (2, 0, 4), (2, 0, 4)),
        ((2, 3, 0), (2, 3, 0), (2, 3, 4)),
    ],
    ids=["no queries", "no batch", "no heads", "no depth", "no keys", "no width"],
)
def test_empty_sizes_are_as_in_scaled_dot_product_attention(q: tuple, k: tuple, v: tuple) -> None:
    inputs = randn(*q), randn(*k), randn(*v)
    assert_close(attention(*inputs, Shannon()), sdpa(*inputs), **EXACT)
    assert attention(*inputs, Gini()).isfinite().all()


# -- every other regularizer ----------------------------------------------------------------------------


@every_sparse_omega
def test_attention_is_a_loop_over_queries(omega: Regularizer) -> None:
    query, key, value = randn(2, 3, 5, 4), randn(2, 3, 6, 4), randn(2, 3, 6, 3)
    mask = masks((2, 1, 5, 6))
    output, weights = attention(3 * query, key, value, omega, attn_mask=mask, return_weights=True)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (2, 3, 5))).tolist():
        keep = mask[b, 0, i]
        scores = torch.stack([3 * query[b, h, i] @ k / 2 for k in key[b, h][keep]])
        p = omega.argmax(scores)
        assert_close(weights[b, h, i][keep], p, **EXACT)
        assert (weights[b, h, i][~keep] == 0).all()
        expected = sum(w * v for w, v in zip(p, value[b, h][keep], strict=True))
        assert_close(output[b, h, i], expected, **EXACT)


def test_sparsemax_attention_by_hand() -> None:
    query, key, value = randn(4, 3), randn(5, 3), randn(5, 2)
    output, weights = attention(query, key, value, Gini(), scale=1.0, return_weights=True)
    for i, q in enumerate(query.tolist()):
        p = oracles.sparsemax([sum(a * b for a, b in zip(q, k, strict=True)) for k in key.tolist()])
        assert_close(weights[i].tolist(), p, **EXACT)
        averaged = [sum(w * v for w, v in zip(p, column, strict=True)) for column in value.T.tolist()]
        assert_close(output[i].tolist(), averaged, **EXACT)


def test_the_default_is_entmax_of_one_and_a_half() -> None:
    inputs = randn(2, 5, 4), randn(2, 6, 4), randn(2, 6, 4)
    assert torch.equal(attention(*inputs), attention(*inputs, Tsallis(1.5)))


@pytest.mark.parametrize("omega", [Gini(), Tsallis(1.5), Norm(2)], ids=str)
def test_gradients_against_finite_differences(omega: Regularizer) -> None:
    inputs = tuple((0.3 * randn(1, n, 2)).detach().requires_grad_() for n in (2, 3, 3))
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert gradcheck(lambda q, k, v: attention(q, k, v, omega, attn_mask=mask), inputs)
    assert gradgradcheck(lambda q, k, v: attention(q, k, v, omega, attn_mask=mask), inputs)


@pytest.mark.parametrize("kind", ["boolean", "float"])
@pytest.mark.parametrize("omega", [Shannon(), *OMEGAS], ids=lambda o: str(o).replace("\n", ""))
def test_a_query_with_no_keys_gets_zeros_and_zero_gradients(omega: Regularizer, kind: str) -> None:
    inputs = randn(2, 4, 3), randn(2, 5, 3), randn(2, 5, 3)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(4, 5, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    output, weights = attention(*inputs, omega, attn_mask=mask, return_weights=True)
    assert (output[:, 2] == 0).all()
    assert (weights[:, 2] == 0).all()
    assert_close(output[:, [0, 1, 3]], attention(inputs[0][:, [0, 1, 3]], *inputs[1:], omega), **EXACT)
    slopes = gradients(output, *inputs)
    assert all(g.isfinite().all() for g in slopes)
    assert (slopes[0][:, 2] == 0).all()


def test_one_alpha_a_head() -> None:
    alpha = torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64).reshape(3, 1, 1).requires_grad_()
    inputs = randn(2, 3, 5, 4), randn(2, 3, 6, 4), randn(2, 3, 6, 4)
    output = attention(*inputs, Tsallis(alpha))
    for h, a in enumerate([1.0, 1.5, 2.0]):
        expected = attention(*(x[:, h] for x in inputs), Tsallis(a))
        assert_close(output[:, h], expected, **EXACT)
    (slope,) = torch.autograd.grad(output.square().sum(), alpha)
    assert slope.shape == (3, 1, 1)
    assert slope.isfinite().all()
    assert (slope != 0).all()
    step = 1e-6
    for h in range(3):
        moved = [alpha.detach() + sign * step * F.one_hot(torch.tensor(h), 3).reshape(3, 1, 1) for sign in (1, -1)]
        up, down = (attention(*inputs, Tsallis(a)).square().sum().item() for a in moved)
        assert math.isclose(slope.flatten()[h].item(), (up - down) / (2 * step), rel_tol=1e-5)


def test_one_learnable_alpha_a_head_with_grouped_queries() -> None:
    omega = Tsallis(1.5, learnable=True, shape=(4, 1, 1))
    inputs = randn(2, 4, 5, 3), randn(2, 2, 6, 3), randn(2, 2, 6, 3)
    attention(*inputs, omega).square().sum().backward()
    assert omega.raw_alpha is not None
    assert omega.raw_alpha.grad is not None
    assert (omega.raw_alpha.grad != 0).all()
    assert omega.raw_alpha.grad.isfinite().all()


# -- weights and dropout --------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", [Shannon(), *OMEGAS], ids=lambda o: str(o).replace("\n", ""))
def test_returned_weights_average_the_values(omega: Regularizer) -> None:
    inputs = randn(2, 3, 5, 4), randn(2, 3, 6, 4), randn(2, 3, 6, 2)
    output, weights = attention(*inputs, omega, return_weights=True)
    assert weights.shape == (2, 3, 5, 6)
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
    assert_close(output, weights @ inputs[2], **EXACT)
    assert_close(output, attention(*inputs, omega), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sparse_weights_are_the_dense_ones_with_rows_flattened(dtype: torch.dtype) -> None:
    inputs = randn(2, 3, 5, 4, dtype=dtype), randn(2, 3, 6, 4, dtype=dtype), randn(2, 3, 6, 2, dtype=dtype)
    mask = masks((5, 6))
    mask[1] = False
    output, dense = attention(*inputs, Gini(), attn_mask=mask, return_weights=True)
    again, sparse = attention(*inputs, Gini(), attn_mask=mask, return_weights="sparse")
    assert_close(output, again)
    assert sparse.layout == torch.sparse_csr
    assert sparse.dtype == dtype
    assert sparse.shape == (30, 6)
    assert sparse.values().numel() == (dense != 0).sum()
    assert_close(sparse.detach().to_dense(), dense.detach().reshape(30, 6))


def test_sparse_weights_carry_gradients() -> None:
    inputs = randn(2, 5, 4), randn(2, 6, 4), randn(2, 6, 2)
    _, dense = attention(*inputs, Gini(), return_weights=True)
    _, sparse = attention(*inputs, Gini(), return_weights="sparse")
    slopes = gradients(sparse.to_dense(), *inputs[:2])
    assert_close(slopes, gradients(dense.reshape(10, 6), *inputs[:2]), **EXACT)


def test_sparse_weights_of_an_empty_batch() -> None:
    inputs = randn(0, 5, 4), randn(0, 6, 4), randn(0, 6, 2)
    output, sparse = attention(*inputs, Gini(), return_weights="sparse")
    assert output.shape == (0, 5, 2)
    assert sparse.shape == (0, 6)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(4, 0, dtype=torch.bool)}], ids=str
)
def test_sparse_weights_without_keys_have_rows_and_no_columns(options: dict[str, Any]) -> None:
    output, sparse = attention(randn(2, 4, 3), randn(2, 0, 3), randn(2, 0, 5), return_weights="sparse", **options)
    assert_close(output, torch.zeros(2, 4, 5, dtype=torch.float64))
    assert sparse.layout == torch.sparse_csr
    assert sparse.shape == (8, 0)
    assert sparse.crow_indices().tolist() == [0] * 9


@pytest.mark.parametrize("omega", [Shannon(), Gini(), Tsallis(1.5), Norm(2)], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 6), (3, 1, 6), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_a_mask_may_span_a_batch_of_the_values_alone(omega: Regularizer, shape: tuple[int, ...], kind: str) -> None:
    query, key, value = randn(5, 4), randn(6, 4), randn(3, 6, 2)
    mask = masks(shape)
    mask[0] = True
    mask = mask if kind == "boolean" else torch.zeros(shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    expected = [attention(query, key, v, omega, attn_mask=m) for v, m in zip(value, mask, strict=True)]
    found = attention(query, key, value, omega, attn_mask=mask)
    assert_close(found, torch.stack(expected), **EXACT)
    inputs = query, key, value
    assert_close(gradients(found, *inputs), gradients(torch.stack(expected), *inputs), **EXACT)
    _, sparse = attention(query, key, value, omega, attn_mask=mask, return_weights="sparse")
    assert sparse.shape == (15, 6)
    assert_close((sparse.to_dense().reshape(3, 5, 6) @ value), found, **EXACT)


@pytest.mark.parametrize(
    "omega",
    [
        Tsallis(1.5, learnable=True, shape=(4, 1)),
        Tsallis(torch.full((4, 1), 1.5)),
        Norm(torch.full((4, 1), 2.0)),
        torch.full((4, 1), 2.0) * Gini(),
        2.0 * Tsallis(1.5, learnable=True, shape=(4, 1)),
    ],
    ids=lambda o: str(o).replace("\n", ""),
)
@pytest.mark.parametrize("length", [4, 5])
def test_a_parameter_that_looks_like_one_per_head_and_is_one_per_query_is_refused(
    omega: Regularizer, length: int
) -> None:
    query, key, value = torch.randn(2, 4, length, 3), torch.randn(2, 4, 6, 3), torch.randn(2, 4, 6, 3)
    with pytest.raises(
        ValueError, match=r"one value per head use shape \(4, 1, 1\), for one value per query \(1, 4, 1\)"
    ):
        attention(query, key, value, omega)


def test_one_alpha_per_query_is_taken_where_it_cannot_be_one_per_head() -> None:
    query, key, value = randn(2, 3, 4, 3), randn(2, 3, 6, 3), randn(2, 3, 6, 3)
    alpha = torch.tensor([[1.2], [1.5], [1.8], [2.0]], dtype=torch.float64)
    found = attention(query, key, value, Tsallis(alpha))
    rows = [attention(query[:, :, [i]], key, value, Tsallis(a.item())) for i, a in enumerate(alpha)]
    assert_close(found, torch.cat(rows, -2), **EXACT)
    assert_close(attention(query, key, value, Tsallis(alpha[None])), found, **EXACT)


def test_dropout_drops_its_share_and_scales_up_the_rest() -> None:
    # The identity as value shows the dropped weights themselves.
    query, key, value = randn(400, 8, 4), randn(400, 8, 4), torch.eye(8, dtype=torch.float64).expand(400, 8, 8)
    for p in (0.25, 0.5):
        dropped, weights = attention(query, key, value, Shannon(), dropout_p=p, return_weights=True)
        kept = dropped != 0
        assert_close(dropped[kept], (weights / (1 - p))[kept], **EXACT)
        share = 1 - kept.double().mean()
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / kept.numel())
        assert_close(weights.sum(-1), torch.ones(400, 8, dtype=torch.float64))


@pytest.mark.parametrize("omega", [Shannon(), Gini()], ids=str)
def test_dropping_everything_gives_zeros_and_zero_gradients(omega: Regularizer) -> None:
    inputs = randn(2, 5, 4), randn(2, 6, 4), randn(2, 6, 4)
    output = attention(*inputs, omega, dropout_p=1.0)
    assert (output == 0).all()
    assert all((g == 0).all() for g in gradients(output, *inputs))


# -- dtypes, layouts, graphs ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("omega", [Shannon(), Gini(), Tsallis(1.5), Norm(2)], ids=str)
def test_dtype_is_kept(omega: Regularizer, dtype: torch.dtype) -> None:
    inputs = randn(2, 5, 4, dtype=dtype), randn(2, 6, 4, dtype=dtype), randn(2, 6, 4, dtype=dtype)
    for mask in (None, masks((5, 6)), torch.randn(5, 6), torch.randn(5, 6, dtype=torch.float64)):
        output, weights = attention(*inputs, omega, attn_mask=mask, return_weights=True)
        assert output.dtype == weights.dtype == dtype
        assert all(g.dtype == dtype and g.isfinite().all() for g in gradients(output, *inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 8.0, 100.0])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_errs_no_more_than_scaled_dot_product_attention(
    dtype: torch.dtype, sharpness: float, autocast: bool
) -> None:
    """Both against float64 attention on the rounded inputs, outputs and gradients alike."""
    torch.manual_seed(0)
    given = sharpness * torch.randn(4, 64, 64), *torch.randn(2, 4, 64, 64).unbind()
    rounded = [x.to(dtype).double().requires_grad_() for x in given]
    exact = sdpa(*rounded)
    direction = torch.randn(4, 64, 64, dtype=dtype)
    expected = [exact, *torch.autograd.grad(exact, rounded, direction.double())]

    def errors(attend: Any, *options: Any) -> list[Tensor]:
        inputs = [(x if autocast else x.to(dtype)).clone().requires_grad_() for x in given]
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            output = attend(*inputs, *options)
        assert output.dtype == dtype
        found = [output, *torch.autograd.grad(output, inputs, direction)]
        return [(f.double() - e).square().mean().sqrt() for f, e in zip(found, expected, strict=True)]

    for ours, theirs in zip(errors(attention, Shannon()), errors(sdpa), strict=True):
        assert ours <= 1.01 * theirs  # where both only round the output, some ties fall otherwise


@pytest.mark.parametrize("omega", [Shannon(), Gini(), Tsallis(1.5)], ids=str)
def test_scores_beyond_half_precision_are_finite_under_autocast(omega: Regularizer) -> None:
    torch.manual_seed(0)
    query, key, value = (randn(2, 70, 16, dtype=torch.float32) for _ in range(3))
    query = (3000 * query).detach().requires_grad_()  # scores of some 1e5; half precision ends at 65504
    exact = attention(*(x.detach().half().double() for x in (query, key, value)), omega)
    with torch.autocast("cpu", dtype=torch.float16):
        output = attention(query, key, value, omega)
        found = gradients(output, query, key, value)  # a backward pass may be inside of autocast, or outside
    assert_close(output.double(), exact, atol=2e-3, rtol=2e-3)
    assert all(g.isfinite().all() for g in (*found, *gradients(output, query, key, value)))


@pytest.mark.parametrize("omega", [Shannon(), Gini()], ids=str)
def test_scores_beyond_the_range_of_half_precision_choose_the_best(omega: Regularizer) -> None:
    query = torch.full((1, 1, 64), 200.0, dtype=torch.float16)
    key = torch.cat([query, query / 2], 1)
    value = torch.tensor([[[1.0], [2.0]]], dtype=torch.float16)
    assert sdpa(query, key, value).item() == 1
    assert attention(query, key, value, omega).item() == 1


def test_autocast_is_as_in_scaled_dot_product_attention() -> None:
    inputs = (
        randn(2, 5, 4, dtype=torch.float32),
        randn(2, 6, 4, dtype=torch.float32),
        randn(2, 6, 4, dtype=torch.float32),
    )
    for mask in (None, masks((5, 6)), torch.randn(5, 6)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, theirs = attention(*inputs, Shannon(), attn_mask=mask), sdpa(*inputs, attn_mask=mask)
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, atol=3e-2, rtol=3e-2)
        assert all(g.dtype == torch.float32 for g in gradients(ours, *inputs))


def test_strided_inputs_are_their_copies() -> None:
    packed = torch.randn(5, 2, 3, 3, 4, dtype=torch.float64)  # length, batch, qkv, heads, width
    query, key, value = packed.permute(2, 1, 3, 0, 4).unbind()
    assert not query.is_contiguous()
    expected = attention(query.contiguous(), key.contiguous(), value.contiguous(), Gini())
    assert_close(attention(query, key, value, Gini()), expected, **EXACT)
    one = query[:1].expand(4, 3, 5, 4)
    assert_close(attention(one, one, one, Gini()), attention(*[one.contiguous()] * 3, Gini()), **EXACT)


def test_inputs_are_left_as_they_were() -> None:
    tensors = [torch.randn(2, 5, 4), torch.randn(2, 6, 4), torch.randn(2, 6, 4), torch.randn(5, 6)]
    kept = [t.clone() for t in tensors]
    for t in tensors:
        t.requires_grad_()
    output, weights = attention(*tensors[:3], Gini(), attn_mask=tensors[3], dropout_p=0.5, return_weights=True)
    (output.sum() + weights.square().sum()).backward()
    assert all(torch.equal(a, b) for a, b in zip(kept, tensors, strict=True))


def test_vmap_is_a_loop() -> None:
    inputs = torch.randn(4, 2, 5, 3), torch.randn(4, 2, 6, 3), torch.randn(4, 2, 6, 3)
    mask = masks((4, 5, 6))
    mapped = vmap(lambda q, k, v, m: attention(q, k, v, Gini(), attn_mask=m))(*inputs, mask)
    assert_close(mapped, attention(*inputs, Gini(), attn_mask=mask[:, None]))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"return_weights": True}], ids=str)
def test_compiles_to_one_graph_with_the_same_results(options: dict) -> None:
    torch._dynamo.reset()
    omega = Tsallis(1.5)
    eager = [torch.randn(2, 4, n, 3, requires_grad=True) for n in (5, 6, 6)]
    graph = [x.detach().clone().requires_grad_() for x in eager]
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, omega, **options), fullgraph=True, backend="aot_eager")
    expected, actual = attention(*eager, omega, **options), compiled(*graph)
    assert_close(actual, expected)
    if options.get("return_weights"):
        expected, actual = expected[0], actual[0]
    assert_close(gradients(actual, *graph), gradients(expected, *eager))


# -- bad input ------------------------------------------------------------------------------------------


def bad(**changes: Any) -> dict[str, Any]:
    arguments = {"query": torch.ones(2, 4, 5, 8), "key": torch.ones(2, 4, 6, 8), "value": torch.ones(2, 4, 6, 3)}
    return {**arguments, **changes}


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        (bad(query=torch.ones(2, 4, 5, 8).long()), TypeError, "query"),
        (bad(key=[1.0]), TypeError, "key"),
        (bad(value=None), TypeError, "value"),
        (bad(value=torch.ones(2, 4, 6, 3, dtype=torch.complex64)), TypeError, "value"),
        (bad(query=torch.ones(8)), ValueError, "query"),
        (bad(value=torch.ones(6)), ValueError, "value"),
        (bad(query=torch.ones(2, 4, 5, 7)), ValueError, "query and key"),
        (bad(value=torch.ones(2, 4, 5, 3)), ValueError, "key and value"),
        (bad(query=torch.ones(2, 3, 5, 8)), ValueError, "query heads"),
        (bad(key=torch.ones(2, 3, 6, 8)), ValueError, r"key heads, got query.*\(.*key of shape \(2, 3, 6, 8\)"),
        (bad(value=torch.ones(2, 3, 6, 8)), ValueError, "value heads"),
        (bad(key=torch.ones(2, 0, 6, 8), value=torch.ones(2, 0, 6, 8)), ValueError, "heads"),
        (bad(key=torch.ones(3, 4, 6, 8)), ValueError, "key"),
        (bad(value=torch.ones(3, 4, 6, 8)), ValueError, "value"),
        (bad(key=torch.ones(2, 4, 6, 8, dtype=torch.float64)), TypeError, "key"),
        (bad(value=torch.ones(2, 4, 6, 8, dtype=torch.float64)), TypeError, "value"),
        (bad(attn_mask=torch.ones(5, 6), is_causal=True), ValueError, "attn_mask"),
        (bad(attn_mask=torch.ones(5, 6).long()), TypeError, "attn_mask"),
        (bad(attn_mask=[True]), TypeError, "attn_mask"),
        (bad(attn_mask=torch.ones(6, 5)), ValueError, "attn_mask"),
        (bad(attn_mask=torch.ones(6, 5, dtype=torch.bool)), ValueError, "attn_mask"),
        (bad(attn_mask=torch.ones(2, 1, 4, 5, 6)), ValueError, "attn_mask"),
        (bad(dropout_p=-0.1), ValueError, "dropout_p"),
        (bad(dropout_p=1.1), ValueError, "dropout_p"),
        (bad(dropout_p=math.nan), ValueError, "dropout_p"),
        (bad(return_weights="dense"), ValueError, "return_weights"),
        (bad(return_weights=None), ValueError, "return_weights"),
        (bad(omega="softmax"), TypeError, "omega"),
        (bad(omega=torch.ones(5, 6, dtype=torch.bool)), TypeError, "omega"),  # sdpa's fourth argument is the mask
        (bad(omega=Tsallis(torch.full((3, 1, 1), 1.5))), ValueError, "alpha"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, Any], error: type, names: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=names):
            attention(**arguments)


def test_a_parted_call_draws_the_same_dropout_again_and_learns_alpha() -> None:
    query, key, value = (randn(2, 6, 4) for _ in range(3))
    omega = Tsallis(1.5, learnable=True)
    inputs = (query, key, value, omega.raw_alpha)
    output = attention(query, key, value, omega, dropout_p=0.5)
    direction = torch.randn_like(output)
    once = torch.autograd.grad(output, inputs, direction, retain_graph=True)
    assert all(map(torch.equal, once, torch.autograd.grad(output, inputs, direction)))


def test_the_name_of_torch_for_grouped_queries_is_taken() -> None:
    query, key, value = randn(4, 3, 2), randn(2, 5, 2), randn(2, 5, 2)
    assert torch.equal(attention(query, key, value, enable_gqa=True), attention(query, key, value))


@pytest.mark.parametrize("omega", [Norm(2.0), KSubsets(3), Shannon()], ids=repr)
@pytest.mark.parametrize("batch", [(), (1,), (2,)])
def test_many_keys_with_few_chosen(omega: Regularizer, batch: tuple[int, ...]) -> None:
    """Supports alone are multiplied by the values where nothing is differentiated: the same numbers."""
    torch.manual_seed(0)
    query, key = 3 * torch.randn(*batch, 64, 8), torch.randn(*batch, 10000, 8)
    value = torch.randn(*batch, 10000, 5)
    expected = omega.argmax(query @ key.mT * 0.7) @ value
    assert_close(attention(query, key, value, omega, scale=0.7), expected, rtol=1e-5, atol=1e-5)
    learned = value.clone().requires_grad_()
    grown = attention(query, key, learned, omega, scale=0.7)
    assert_close(grown, expected, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(grown.sum(), learned)[0]
    theirs = omega.argmax(query @ key.mT * 0.7).sum(-2, keepdim=True).mT.expand_as(value)
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    query[..., 3, 0] = torch.nan
    output = attention(query, key, value, omega, scale=0.7)
    assert bool(output[..., 3, :].isnan().all())
    assert_close(output[..., 4:, :], expected[..., 4:, :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0, torch.inf, torch.tensor([[[3.0]], [[1.5]]])], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_query_that_holds_nan_gets_nan_and_no_other_does(alpha: float | Tensor, bad: float) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 5, 4), torch.rand(2, 300, 4), torch.randn(2, 300, 3)
    expected = attention(query, key, value, Tsallis(alpha))
    query[:, 2, 1] = bad
    output = attention(query, key, value, Tsallis(alpha))
    assert bool(output[:, 2].isnan().all())
    assert_close(output[:, [0, 1, 3, 4]], expected[:, [0, 1, 3, 4]])


def test_shapes_are_told_without_data() -> None:
    inputs = [torch.empty(1, 4, 512, 8, device="meta") for _ in range(3)]
    assert attention(*inputs).shape == (1, 4, 512, 8)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_a_learned_parameter_of_several_steps_counts_once(steps: int) -> None:
    """Each step is computed again to be differentiated, without those before it."""
    torch.manual_seed(0)
    patterns, start = torch.randn(600, 3, dtype=torch.float64), torch.randn(900, 3, dtype=torch.float64)
    alpha = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    along = torch.linspace(-1, 1, 3, dtype=torch.float64)

    def end(step: Any) -> Tensor:
        state = start
        for _ in range(steps):
            state = step(state)
        return (state * along).sum()

    ours = end(lambda q: attention(q, patterns, patterns, Norm(alpha), scale=0.6))
    plain = end(lambda q: Norm(alpha).argmax(0.6 * q @ patterns.T) @ patterns)
    first, expected = (torch.autograd.grad(value, alpha, create_graph=True)[0] for value in (ours, plain))
    assert_close(first, expected, rtol=1e-9, atol=1e-9)
    second, expected = (torch.autograd.grad(value, alpha)[0] for value in (first, expected))
    assert_close(second, expected, rtol=1e-8, atol=1e-8)
    end(lambda q: attention(q, patterns, patterns, Norm(alpha), scale=0.6)).backward()
    assert alpha.grad is not None
    assert_close(alpha.grad, first.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch", [(1,), (3,), (2, 1)])
def test_values_of_a_batch_that_the_weights_lack(batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    query, key, value = 20 * torch.randn(130, 4), torch.randn(4096, 4), torch.randn(*batch, 4096, 3)
    output = attention(query, key, value, Norm(2.0))
    assert_close(output, Norm(2.0).argmax(query @ key.T / 2) @ value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("omega", [Tsallis(1.5), Shannon()], ids=str)
def test_a_mask_that_is_changed_before_the_backward_pass_is_noticed(omega: Regularizer) -> None:
    query, key, value = 0.1 * randn(2, 20, 4), randn(2, 30, 4), randn(2, 30, 3)
    mask = torch.rand(20, 30) > 0.3
    output = attention(query, key, value, omega, attn_mask=mask)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("plan", ["dense", "parts"])
def test_a_structure_over_queries_and_keys_is_chosen_in_the_whole_table(plan: str) -> None:
    """A matching of six queries to six keys gives every key one query, however the queries are parted."""
    query, key, value = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    with using(Plan(plan, rows=2)):
        _, weights = attention(query, key, value, SparseMAP(Matching()), return_weights=True)
        output = attention(query, key, value, SparseMAP(Matching()))
    assert_close(weights.sum(-2), torch.ones(2, 6, dtype=torch.float64))
    assert_close(output, weights @ value)


def test_a_mask_in_the_place_of_omega_is_told_where_it_belongs() -> None:
    query = torch.randn(2, 3, 4)
    with pytest.raises(TypeError, match="pass a mask as attn_mask="):
        attention(query, query, query, torch.ones(3, 3, dtype=torch.bool))
