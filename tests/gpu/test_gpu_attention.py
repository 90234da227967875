"""Attention by the kernels for GPUs: against the formula in double precision, whose map is the torch path's."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fenchel
from fenchel import Gini, Tsallis, attention, kernels
from fenchel.kernels.gpu import attention as forward
from fenchel.kernels.gpu import launch
from fenchel.kernels.gpu.launch import STARTED
from fenchel.streaming import Plan, using

TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 0.1, torch.float16: 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def formula(*args: object, **kwargs: object) -> Tensor:
    """Attention with a matrix of weights, in torch operations."""
    enabled, kernels.ENABLED = kernels.ENABLED, False
    try:
        with using(Plan("dense")):
            return attention(*args, **kwargs)
    finally:
        kernels.ENABLED = enabled


def agree(inputs: tuple[Tensor, ...], omega: fenchel.Regularizer, *more: Tensor, **kwargs: object) -> None:
    """Output and gradients of the kernels are those of the formula, of which every step is in double precision."""
    dtype = inputs[0].dtype
    output = attention(*inputs, omega, **kwargs)
    assert STARTED["attend_kernel"] or STARTED["decode_scores_kernel"]
    direction = torch.randn_like(output)
    wanted = (*inputs, *more)
    found = torch.autograd.grad(output, wanted, direction)
    assert STARTED["queries_kernel"]
    assert STARTED["keys_kernel"]
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    expected = formula(*exact, omega, **kwargs)
    torch.testing.assert_close(output.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for ours, theirs in zip(found, torch.autograd.grad(expected, (*exact, *more), direction.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), atol=8 * TOLERANCE[dtype], rtol=8 * TOLERANCE[dtype])


@pytest.mark.parametrize("omega", [Tsallis(1.5), Gini(), Tsallis(1.25), 0.5 * Tsallis(1.5)], ids=str)
def test_every_alpha_up_to_2(omega: fenchel.Regularizer) -> None:
    agree((randn(2, 7, 5), randn(2, 21, 5), randn(2, 21, 9)), omega, scale=1.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_precision(dtype: torch.dtype) -> None:
    shapes = (2, 7, 8), (2, 21, 8), (2, 21, 6)
    agree(tuple(randn(*shape, dtype=dtype) for shape in shapes), Tsallis(1.5), scale=0.7)


def test_one_learned_alpha_per_head() -> None:
    omega = Tsallis(1.4, learnable=True, shape=(3, 1, 1)).double()
    with torch.no_grad():
        omega.raw_alpha += torch.randn(3, 1, 1, dtype=torch.float64)
    agree((randn(2, 3, 5, 4), randn(2, 3, 20, 4), randn(2, 3, 20, 4)), omega, omega.raw_alpha)


@pytest.mark.parametrize("shape", [(6, 19), (1, 19), (4, 6, 1), (2, 1, 6, 19)], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_masks_are_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.6 if kind == "boolean" else torch.randn(shape, dtype=torch.float64)
    inputs = randn(2, 4, 6, 3), randn(2, 2, 19, 3), randn(2, 2, 19, 5)  # two query heads share keys
    agree(inputs, Tsallis(1.5), attn_mask=mask, scale=2.0)


@pytest.mark.parametrize(("length", "keys"), [(18, 18), (3, 18), (18, 3)])
def test_causal(length: int, keys: int) -> None:
    agree((randn(2, length, 4), randn(2, keys, 4), randn(2, keys, 4)), Gini(), is_causal=True)
    agree((randn(4, length, 4), randn(2, keys, 4), randn(2, keys, 4)), Tsallis(1.5), is_causal=True)


def test_strided_inputs_are_read_in_place() -> None:
    whole = randn(2, 5, 3, 3, 4)  # (batch, length, of query key and value, heads, width), as of one projection
    query, key, value = (whole[:, :, i].transpose(1, 2) for i in range(3))
    agree((query, key, value), Tsallis(1.5))
    with launch.recorded() as found:
        attention(query.detach(), key.detach(), value.detach())
    assert [t.data_ptr() for t in found[0][1][0][:3]] == [t.data_ptr() for t in (query, key, value)]


def test_wide_heads_and_a_sink() -> None:
    agree((randn(1, 3, 130), randn(1, 17, 130), randn(1, 17, 65)), Tsallis(1.5), sink=torch.tensor(0.3).double())


def test_a_row_without_keys_is_zero_and_one_with_nan_is_nan() -> None:
    query, key, value = randn(1, 3, 4), randn(1, 9, 4), randn(1, 9, 4)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1] = False
    output = attention(query, key, value, attn_mask=mask)
    assert bool((output[0, 1] == 0).all())
    (to_query,) = torch.autograd.grad(output.sum(), query)
    assert bool((to_query[0, 1] == 0).all())
    spoilt = query.detach().clone()
    spoilt[0, 2, 0] = torch.nan
    output = attention(spoilt, key, value)
    assert bool(output[0, 2].isnan().all())
    torch.testing.assert_close(output[0, :2], formula(spoilt, key, value)[0, :2], atol=1e-12, rtol=0)


def test_scores_that_are_huge() -> None:
    agree((1e5 * randn(1, 5, 4).detach().requires_grad_(), randn(1, 20, 4), randn(1, 20, 4)), Tsallis(1.5), scale=1.0)


def test_dropout_repeats_itself_and_keeps_the_mean() -> None:
    query, key, value = randn(1, 4, 3), 0.01 * randn(1, 40, 3).detach(), torch.ones(1, 40, 1, dtype=torch.float64)
    torch.manual_seed(5)
    one = attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(5)
    two = attention(query, key, value, dropout_p=0.5)
    assert torch.equal(one, two)
    torch.manual_seed(6)
    assert not torch.equal(one, attention(query, key, value, dropout_p=0.5))
    outputs = torch.stack([attention(query.detach(), key, value, dropout_p=0.5) for _ in range(6)])
    assert abs(outputs.mean().item() - 1) < 0.2  # the standard deviation of the mean is 0.03

    def same(*inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention(*inputs, dropout_p=0.5)

    inputs = randn(1, 2, 3), randn(1, 9, 3), randn(1, 9, 2)
    directions = [torch.randn_like(t) for t in inputs]
    with torch.no_grad():
        ahead, behind = (same(*(t + e * d for t, d in zip(inputs, directions, strict=True))) for e in (1e-6, -1e-6))
    found = torch.autograd.grad(same(*inputs).sum(), inputs)
    slope = sum((g * d).sum() for g, d in zip(found, directions, strict=True))
    torch.testing.assert_close(slope, (ahead - behind).sum() / 2e-6, atol=1e-6, rtol=1e-6)


def test_second_derivatives() -> None:
    inputs = randn(1, 2, 2), randn(1, 3, 2), randn(1, 3, 2)
    assert gradcheck(attention, inputs, fast_mode=True)
    assert gradgradcheck(attention, inputs, fast_mode=True)


@pytest.mark.parametrize("alpha", [1.5, 2.0, "tensor"])
def test_one_query_splits_keys_over_programs(alpha: float | str) -> None:
    omega = Tsallis(torch.tensor([1.5, 1.8]).double().reshape(2, 1, 1)) if alpha == "tensor" else Tsallis(alpha)
    query, key, value = (t.detach() for t in (randn(2, 1, 4), randn(2, 1100, 4), randn(2, 1100, 4)))
    mask = torch.rand(1100) < 0.9
    for given in (None, mask) if alpha == 1.5 else (mask,):
        output = attention(query, key, value, omega, attn_mask=given, scale=2.0)
        expected = formula(query, key, value, omega, attn_mask=given, scale=2.0)
        torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    assert STARTED["decode_scores_kernel"] == STARTED["decode_values_kernel"]
    assert not STARTED["attend_kernel"]


def test_packed_sequences_take_the_same_kernel() -> None:
    parts = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 7, 5)]
    packed = torch.nested.nested_tensor(parts, layout=torch.jagged)
    found = attention(packed, packed, packed, is_causal=True)
    assert STARTED["attend_kernel"]
    for part, output in zip(parts, found.unbind(), strict=True):
        torch.testing.assert_close(output, formula(part, part, part, is_causal=True), atol=1e-12, rtol=0)


def test_blocks_that_no_query_can_use_are_not_read_again() -> None:
    """Keys far from every query: their bits are not set, and neither they nor their values are read a second time."""
    keys = 64 * 16
    key = torch.zeros(1, 1, keys, 4, dtype=torch.float64)
    key[..., 40:60, 0] = torch.linspace(1, 1.2, 20)
    key[..., 1000, 0] = 1.1
    query = torch.zeros(1, 1, 1, 8, 4, dtype=torch.float64)
    query[..., 0] = 10.0
    value = torch.randn(1, 1, keys, 4, dtype=torch.float64)
    rest = {"causal": False, "scale": 1.0, "dropout": 0.0, "seed": 0}
    _, (_, _, _, used) = forward.attend(query, key, value, 1.5, mask=None, keep=True, **rest)
    size = forward.blocks(4, 4, torch.float64, 2)["BN"]
    blocks = {32 * w + i for w, word in enumerate(used.flatten().tolist()) for i in range(32) if word >> i & 1}
    assert blocks <= {k // size for k in (*range(40, 60), 1000)}
    weights = fenchel.entmax((query @ key.transpose(-1, -2).unsqueeze(2)).flatten(0, -2), 1.5)
    assert blocks == {int(k) // size for k in weights.nonzero()[:, 1]}
