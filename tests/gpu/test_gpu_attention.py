"""Attention by the kernels for GPUs, against dense products and thresholds by bisection, in double precision."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import fenchel
import oracles
from counting import counted
from fenchel import Gini, Shannon, Tsallis, attention, kernels
from fenchel.kernels.gpu import attention as forward
from fenchel.kernels.gpu import attention_backward as backward
from fenchel.kernels.gpu import launch
from fenchel.kernels.gpu.launch import STARTED

TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 0.1, torch.float16: 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def agree(
    inputs: tuple[Tensor, ...],
    omega: fenchel.Regularizer,
    *more: Tensor,
    call: Callable[..., Tensor] = attention,
    **kwargs: object,
) -> None:
    """Output and gradients of the kernels are those of a formula, of which every step is in double precision."""
    dtype = inputs[0].dtype
    STARTED.clear()
    output = call(*inputs, omega, **kwargs)
    assert STARTED["attend_kernel"] == 1
    direction = torch.randn_like(output)
    wanted = (*inputs, *more)
    found = torch.autograd.grad(output, wanted, direction, retain_graph=True)
    assert STARTED["queries_kernel"] == STARTED["keys_kernel"] == 1
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    base, gamma = omega.canonical()
    rest = {"causal": kwargs.get("is_causal", False), "mask": kwargs.get("attn_mask"), "scale": kwargs.get("scale")}
    expected = oracles.attention(*exact, base.parameter, temperature=gamma, **rest)
    torch.testing.assert_close(output.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    slopes = torch.autograd.grad(expected, (*exact, *more), direction.double())
    for ours, theirs in zip(found, slopes, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), atol=8 * TOLERANCE[dtype], rtol=8 * TOLERANCE[dtype])


@pytest.mark.parametrize("omega", [Tsallis(1.5), Gini(), Tsallis(1.25), 0.5 * Tsallis(1.5)], ids=str)
def test_every_alpha_up_to_2(omega: fenchel.Regularizer) -> None:
    agree((randn(2, 7, 5), randn(2, 21, 5), randn(2, 21, 9)), omega, scale=1.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_precision(dtype: torch.dtype) -> None:
    shapes = (2, 7, 8), (2, 21, 8), (2, 21, 6)
    agree(tuple(randn(*shape, dtype=dtype) for shape in shapes), Tsallis(1.5), scale=0.7)


@pytest.mark.parametrize("given", ["none", "causal", "masked"])
def test_one_learned_alpha_per_head(given: str) -> None:
    omega = Tsallis(1.4, learnable=True, shape=(4, 1, 1)).double()
    with torch.no_grad():
        omega.raw_alpha += torch.randn(4, 1, 1, dtype=torch.float64)
    options = {"none": {}, "causal": {"is_causal": True}, "masked": {"attn_mask": torch.rand(5, 20) < 0.5}}[given]
    agree((randn(2, 4, 5, 4), randn(2, 2, 20, 4), randn(2, 2, 20, 4)), omega, omega.raw_alpha, **options)


@pytest.mark.parametrize("shape", [(6, 19), (1, 19), (4, 6, 1), (2, 1, 6, 19)], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_masks_are_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.6 if kind == "boolean" else torch.randn(shape, dtype=torch.float64)
    inputs = randn(2, 4, 6, 3), randn(2, 2, 19, 3), randn(2, 2, 19, 5)  # two query heads share keys
    agree(inputs, Tsallis(1.5), attn_mask=mask, scale=2.0)


def test_masks_are_read_where_they_are() -> None:
    """Dimensions that a mask shares have a stride of 0; where batch dimensions become one, no others are copied."""
    query, key = torch.randn(2, 3, 4, 6, 8), torch.randn(2, 3, 2, 9, 8)
    strides = {(9,): (0, 0, 0, 0, 1), (6, 1): (0, 0, 0, 1, 0), (4, 6, 9): (0, 108, 54, 9, 1)}
    strides |= {(4, 1, 1): (0, 2, 1, 0, 0), (2, 3, 1, 1, 9): (9, 0, 0, 0, 1), (2, 1, 1, 6, 9): (54, 0, 0, 9, 1)}
    for shape, expected in strides.items():
        for mask in (torch.rand(shape) < 0.5, torch.randn(shape)):
            with launch.recorded() as found:
                attention(query, key, key, attn_mask=mask)
            inputs = found[0][1][0]
            assert inputs.of_mask == expected
            assert inputs.mask.data_ptr() == mask.data_ptr() or shape == (2, 1, 1, 6, 9)
    inputs = randn(2, 2, 2, 3, 4), randn(2, 1, 1, 9, 4), randn(2, 1, 1, 9, 4)
    expanded = tuple(t.expand(2, 2, *t.shape[2:]) for t in inputs[1:])
    agree((inputs[0], *expanded), Tsallis(1.5), attn_mask=torch.rand(2, 1, 2, 1, 9) < 0.6)


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
    agree((randn(1, 3, 130), randn(1, 17, 130), randn(1, 17, 65)), Tsallis(1.5))
    query, key, value = randn(1, 3, 4), randn(1, 17, 4), randn(1, 17, 4)
    output = attention(query, key, value, scale=1.0, sink=torch.tensor(0.3, dtype=torch.float64))
    extended = torch.cat([query, torch.ones(1, 3, 1)], -1), F.pad(key, (0, 1, 1, 0)), F.pad(value, (0, 0, 1, 0))
    extended[1][..., 0, -1] = 0.3  # a key of its own, without a value
    torch.testing.assert_close(output, oracles.attention(*extended, 1.5, scale=1.0), atol=1e-12, rtol=0)


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
    expected = oracles.attention(spoilt, key, value, 1.5)
    torch.testing.assert_close(output[0, :2], expected[0, :2], atol=1e-12, rtol=0)


def test_nan_reaches_the_gradients_of_all_keys_of_its_head() -> None:
    """As by the formula, whose weights are NaN in the whole row: no NaN is hidden by blocks that are not in use."""
    query, key, value = randn(1, 2, 3, 4), randn(1, 2, 40, 4), randn(1, 2, 40, 4)
    spoilt = query.detach().clone()
    spoilt[0, 1, 2, 0] = torch.nan
    spoilt.requires_grad_()
    output = attention(spoilt, key, value)
    assert STARTED["attend_kernel"] == 1
    to_query, *rest = torch.autograd.grad(output.sum(), (spoilt, key, value))
    assert bool(to_query[0, 1, 2].isnan().all() & to_query[0, :, :2].isfinite().all())
    for each in rest:
        assert bool(each[0, 1].isnan().all() & each[0, 0].isfinite().all())


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
    rest = {"mask": None, "keep": False, "causal": False, "scale": 1.0, "dropout": 0.5}
    heads = [t.detach().expand(1, 2, *t.shape[1:]) for t in (query, key, value)]
    (first,), (second,) = ((forward.attend(heads[0].unsqueeze(2), *heads[1:], 1.5, seed=s, **rest)[0]) for s in (7, 8))
    assert not torch.equal(first[0], first[1])  # each head has numbers of its own
    assert not torch.equal(first[1], second[0])

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
        expected = oracles.attention(query, key, value, omega.parameter, mask=given, scale=2.0)
        torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    assert STARTED["decode_scores_kernel"] == STARTED["decode_values_kernel"]
    assert not STARTED["attend_kernel"]


def test_packed_sequences_take_the_same_kernel() -> None:
    parts = [randn(n, 2, 4) for n in (3, 7, 5)]  # (length, heads, width)
    packed = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    found = attention(packed, packed, packed, Gini(), is_causal=True).unbind()
    assert STARTED["attend_kernel"]
    own = [part.transpose(0, 1) for part in parts]
    expected = [oracles.attention(part, part, part, 2.0, causal=True) for part in own]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    slopes = torch.autograd.grad(sum(t.square().sum() for t in found), parts)
    assert STARTED["queries_kernel"]
    for ours, theirs in zip(slopes, torch.autograd.grad(sum(t.square().sum() for t in expected), parts), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def test_alpha_1_is_torchs_own() -> None:
    query, key, value = randn(2, 4, 6, 3), randn(2, 2, 9, 3), randn(2, 2, 9, 5)
    mask = torch.rand(6, 9) < 0.5
    mask[2] = False  # nothing to attend to: zeros, and no gradient
    calls: Counter[str] = Counter()
    own = F.scaled_dot_product_attention

    def counting(*args: object, **kwargs: object) -> Tensor:
        calls["own"] += 1
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", counting)
        outputs = [
            attention(query, key, value, 0.5 * Shannon(), is_causal=True),
            attention(query, key, value, Shannon(), attn_mask=mask, scale=1.3),
            attention(query, key, value, Shannon(), attn_mask=torch.where(mask, 0.2, -torch.inf).double()),
        ]
    assert calls["own"] == 3
    doubled = [t.repeat_interleave(2, 1) for t in (key, value)]
    x = query @ doubled[0].mT
    ahead = torch.ones(6, 9, dtype=torch.bool).triu(1)
    expected = [
        torch.softmax((2 * 3**-0.5 * x).masked_fill(ahead, -torch.inf), -1) @ doubled[1],
        torch.softmax((1.3 * x).masked_fill(~mask, -1e9), -1) @ doubled[1] * mask.any(-1, keepdim=True),
        torch.softmax((3**-0.5 * x).masked_fill(~mask, -1e9), -1) @ doubled[1] * mask.any(-1, keepdim=True),
    ]
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
        direction = torch.randn_like(ours)
        slopes = (torch.autograd.grad(t, (query, key, value), direction, retain_graph=True) for t in (ours, theirs))
        for one, other in zip(*slopes, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
    fenchel.sparsemax(torch.randn(3))  # so that a kernel was reached, as these tests must


def test_one_operator_in_graphs() -> None:
    inputs = randn(2, 3, 4), randn(2, 9, 4), randn(2, 9, 3)
    compiled = torch.compile(lambda *t: attention(*t, is_causal=True, scale=1.5), fullgraph=True, backend="aot_eager")
    agree(inputs, Tsallis(1.5), call=lambda q, k, v, _, **__: compiled(q, k, v), is_causal=True, scale=1.5)
    q, k, v = (t.detach().unsqueeze(0) for t in inputs)
    args = q.unsqueeze(2), k, v, None, None, 1.5, "tsallis", False, 1.0, 0.0, 0
    operators, tests = torch.ops.fenchel, ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operators.fused_attend.default, (*args, False), test_utils=tests)
    output, *state = operators.fused_attend.default(*args, True)
    rest = (output, *state, *args, [False, True, False, False])
    torch.library.opcheck(operators.fused_attend_backward.default, rest, test_utils=tests)
    masked = *args[:3], torch.randn(3, 9).expand(1, 2, 1, 3, 9), torch.full((1, 2, 1), 1.3), 0.0, *args[6:]
    torch.library.opcheck(operators.fused_attend.default, (*masked, True), test_utils=tests)  # smaller blocks


# -- kernels that fail, and devices without any ----------------------------------------------------------------------


@contextmanager
def failing(step: str) -> Iterator[None]:
    """The kernel of a step does not compile."""
    rows = kernels.table._table[step, "tsallis"]
    before = list(rows)

    def fail(*_: object, **__: object) -> None:
        raise kernels.NotCompiledError("made to fail")

    try:
        with pytest.MonkeyPatch.context() as patch:
            for row in rows:
                if isinstance(row.kernel, kernels.table._Guarded):
                    patch.setattr(row.kernel, "kernel", fail)
            yield
    finally:
        rows[:] = before
        kernels.table._found.clear()


@pytest.mark.parametrize("step", ["fused_attend", "fused_attend_backward"])
def test_a_kernel_that_fails_says_so_once_and_torch_takes_its_place(step: str) -> None:
    inputs = randn(1, 3, 4), randn(1, 9, 4), randn(1, 9, 3)
    attention(*inputs).sum().backward()  # both kernels are known from now on
    expected = oracles.attention(*inputs, 1.5)
    slopes = torch.autograd.grad(expected.sum(), inputs)
    with failing(step):
        with pytest.warns(UserWarning, match="made to fail"):
            found = torch.autograd.grad(attention(*inputs).sum(), inputs)
        for ours, theirs in zip(found, slopes, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)
        STARTED.clear()
        torch.testing.assert_close(attention(*inputs), expected, atol=1e-12, rtol=0)  # a warning would be an error
        assert not STARTED["attend_kernel"]
    attention(*inputs)
    assert STARTED["attend_kernel"] == 1


def test_a_device_without_kernels_takes_torch_operations_in_silence() -> None:
    """As on MPS: the table has no row for the device."""
    inputs = randn(1, 3, 4), randn(1, 9, 4), randn(1, 9, 3)
    attention(*inputs)
    rows = {key: list(rows) for key, rows in kernels.table._table.items()}
    STARTED.clear()
    try:
        for key, own in rows.items():
            kernels.table._table[key][:] = [row for row in own if row.device not in ("cpu", "cuda")]
        kernels.table._found.clear()
        output = attention(*inputs)  # a warning would be an error
    finally:
        for key, own in rows.items():
            kernels.table._table[key][:] = own
        kernels.table._found.clear()
    assert not STARTED
    torch.testing.assert_close(output, oracles.attention(*inputs, 1.5), atol=1e-11, rtol=0)
    attention(*inputs)


# -- what is read ----------------------------------------------------------------------------------------------------


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
    _, size = forward.blocks(query, value, 1.5, None, 0.0)
    blocks = {32 * w + i for w, word in enumerate(used.flatten().tolist()) for i in range(32) if word >> i & 1}
    assert blocks <= {k // size for k in (*range(40, 60), 1000)}
    weights = fenchel.entmax((query @ key.transpose(-1, -2).unsqueeze(2)).flatten(0, -2), 1.5)
    assert blocks == {int(k) // size for k in weights.nonzero()[:, 1]}


def test_passes_over_keys_and_values() -> None:
    """Keys: all once for the largest scores; blocks in use once per step of Newton's method, and for the output."""
    keys = 256
    query, key, value = torch.randn(1, 1, 1, 8, 8), torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, 8)
    rows, size = forward.blocks(query, value, 2.0, None, 0.0)
    key[:, :, : keys // 2] *= 0.01
    query[..., 0], key[:, :, keys // 2 :, 0] = 6.0, 3.0  # the second half leads by more than 1/(α − 1)
    rest = {"causal": False, "scale": 1.0, "dropout": 0.0, "seed": 0}
    with counted(key=key, value=value) as found:
        output, state = forward.attend(query, key, value, 2.0, mask=None, keep=True, **rest)
    in_use = sum(word.bit_count() for word in (state[3].flatten() & 0xFFFFFFFF).tolist()) * size / keys
    assert in_use <= 0.5
    assert found["read", "value"] <= 0.5
    steps = (found["read", "key"] - 1.0 - in_use) / 0.5
    assert 1.0 < steps < 8.0
    pairs = 2 * 16 * rows * keys  # blocks are 16 wide, and these queries fill a part of one
    assert found["multiplied", ""] == pairs * (1 + in_use * (steps + 3))
    expected = oracles.attention(query[0, 0].double(), key[0].double(), value[0].double(), 2.0, scale=1.0)
    torch.testing.assert_close(output[0, 0].double(), expected, atol=1e-5, rtol=0)
    with counted(key=key, value=value) as found:
        needed = (True, False, False, False)
        backward.attend_backward(output, state, query, key, value, 2.0, mask=None, needed=needed, **rest)
    assert found["read", "key"] == found["read", "value"] == in_use
    assert found["multiplied", ""] == 3 * pairs * in_use
    with counted(key=key, value=value) as found:
        needed = (False, True, True, False)
        backward.attend_backward(output, state, query, key, value, 2.0, mask=None, needed=needed, **rest)
    assert found["read", "key"] == found["read", "value"] == 1.0  # once per block of keys
    assert found["multiplied", ""] == 4 * pairs * in_use
